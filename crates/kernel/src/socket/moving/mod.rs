//! Moving a listener's queue so that no worker learns of it.
//!
//! The kernel moves a queue when its listener is shut down, which then listens again. In between, epoll reports EPOLLHUP
//! for the listener, which some event loops never forget, and accept fails with EINVAL, of which some workers die. So
//! before the shutdown the listener is taken out of every epoll set that has it, and put back afterwards as it was.
//! Nothing is moved while a worker waits for the listener in any other way.
//!
//! A process of its own does that, the mover: see [`mover`]. It goes on if its agent is killed, and has the program ignore
//! the marks that this agent left. If the mover is killed,
//! its agent puts back by another one. The caller of [`move_queue`] writes the entries down before, in case both are
//! killed.

mod holders;
mod mover;
mod request;

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{Signal, kill};

pub use self::holders::{Holders, Look, Unsafe};
use self::request::{ENTRY, Head, MOST_DESCRIPTORS, MOST_ENTRIES, THREAD, hash};
pub use super::entries::Entry;
use crate::proc::process;
use crate::proc::reader::helper::Outcome;
use crate::proc::reader::{self, Kept};
use crate::proc::stat::Stat;

thread_local! {
    static MOVER: RefCell<Kept> = const { RefCell::new(Kept::none()) };
}

/// Where the program finds the listener.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The array of sockets.
    pub sockets: BorrowedFd<'a>,
    /// The listener's index there.
    pub slot: u32,
    /// The table, whose marks count as long as its agent lives.
    pub table: BorrowedFd<'a>,
    /// The byte of the table at which it has its agent's heartbeat, 8 bytes.
    pub heartbeat_at: u32,
}

/// Moves the queue of a listener, which then listens again where it was. `look` is from [`Holders::look`] just before.
/// Returns how long the mover took: the walks of the kernel over all connections of the port, which hold up new ones.
///
/// # Errors
/// `WouldBlock`: a worker does something else than at that look, and nothing was done. Else the error of shutdown or
/// listen: the listener may not listen now. Or an entry could not be put back: see [`put_back`].
pub fn move_queue(
    listener: impl AsFd,
    backlog: i32,
    look: &Look,
    place: Option<Place<'_>>,
) -> io::Result<Duration> {
    let mut sets = Sets::default();
    let mut words = Vec::new();
    let fits = look.entries.len() <= MOST_ENTRIES;
    for entry in look.entries.iter().filter(|_| fits) {
        words.extend(sets.words_of(entry)?);
    }
    let first = 1 + 2 * usize::from(place.is_some());
    if !fits || first + sets.borrowed.len() > MOST_DESCRIPTORS {
        return Err(io::Error::other("too many epoll sets have the listener"));
    }
    for entry in words.chunks_mut(ENTRY) {
        entry[0] += first as u64;
    }
    for (pid, tid, line) in &look.threads {
        let thread: [u64; THREAD] = [(*pid).into(), (*tid).into(), hash(line)];
        words.extend(thread);
    }
    let head = Head {
        only_back: false,
        backlog,
        key: place.map_or(0, |place| place.slot),
        fate: fate(),
        threads: look.threads.len(),
        entries: look.entries.len(),
        heartbeat_at: place.map(|place| place.heartbeat_at),
    };
    let mut descriptors = vec![listener.as_fd()];
    descriptors.extend(place.iter().flat_map(|place| [place.sockets, place.table]));
    descriptors.extend(sets.borrowed.iter().map(AsFd::as_fd));
    let begun = Instant::now();
    let answer = ask(head, &words, &descriptors)?;
    let took = begun.elapsed();
    let done = match answer {
        Some((moved, back)) => moved.and(back),
        None => {
            // The mover is gone, or hangs in the set of a process that keeps it locked.
            tracing::debug!("the mover did not answer");
            finish(listener, backlog).and(put_back(&look.entries))
        }
    };
    done.map(|()| took)
}

/// Puts entries back that a mover took out and perhaps did not put back.
///
/// # Errors
/// That of the first entry that could not be put back. One whose process has gone, or has closed the listener, counts as
/// put back.
pub fn put_back(entries: &[Entry]) -> io::Result<()> {
    let mut done = Ok(());
    for entry in entries {
        let one = put_one_back(entry);
        done = done.and(one);
    }
    done
}

fn put_one_back(entry: &Entry) -> io::Result<()> {
    if !Stat::of(entry.pid).is_ok_and(|now| now.started == entry.started) {
        return Ok(());
    }
    let Some(listener) = entry.listener()? else {
        return Ok(());
    };
    let mut sets = Sets::default();
    let mut words = match sets.words_of(entry) {
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => return Ok(()),
        other => other?,
    };
    words[0] += 1;
    let head = Head {
        only_back: true,
        backlog: 0,
        key: 0,
        fate: 0,
        threads: 0,
        entries: 1,
        heartbeat_at: None,
    };
    let descriptors = [listener.as_fd(), sets.borrowed[0].as_fd()];
    match ask(head, &words, &descriptors)? {
        Some((_, back)) => back,
        None => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Has a listener listen again that a mover may have left closed.
fn finish(listener: impl AsFd, backlog: i32) -> io::Result<()> {
    if super::listens(&listener) {
        return Ok(());
    }
    let address = super::address_of(&listener)?;
    super::listen_again(listener, address, backlog)
}

/// The epoll sets of a request, borrowed.
#[derive(Default)]
struct Sets {
    known: Vec<(u32, i32)>,
    borrowed: Vec<OwnedFd>,
}

impl Sets {
    fn words_of(&mut self, entry: &Entry) -> io::Result<[u64; ENTRY]> {
        let key = (entry.pid, entry.epoll);
        let known = self.known.iter().position(|one| *one == key);
        let at = match known {
            Some(at) => at,
            None => {
                let set = process::descriptor_of(entry.pid, entry.epoll)?;
                self.borrowed.push(set);
                self.known.push(key);
                self.known.len() - 1
            }
        };
        let number = u64::from(entry.number.cast_unsigned());
        Ok([at as u64, number, entry.events.into(), entry.data])
    }
}

type Answer = (io::Result<()>, io::Result<()>);

/// Asks this thread's mover. Returns how the move and the putting back ended; `None` if it did not answer.
fn ask(head: Head, words: &[u64], descriptors: &[BorrowedFd<'_>]) -> io::Result<Option<Answer>> {
    let all = head.words().into_iter().chain(words.iter().copied());
    let bytes: Vec<u8> = all.flat_map(u64::to_ne_bytes).collect();
    let mut mover = MOVER.with_borrow_mut(|kept| kept.take(mover::serve))?;
    let mut answer = Vec::new();
    let outcome = mover.ask_with(&bytes, descriptors, |some| answer.extend_from_slice(some));
    match outcome {
        Outcome::Answered(answered) => {
            MOVER.with_borrow_mut(|kept| kept.keep(mover));
            answered.map_err(io::Error::from_raw_os_error)?;
            let errno = |at: usize| {
                let bytes = answer.get(at..at + 4)?.first_chunk().copied()?;
                Some(match i32::from_ne_bytes(bytes) {
                    0 => Ok(()),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                })
            };
            Ok(errno(0).zip(errno(4)))
        }
        Outcome::Hangs(pid) | Outcome::Lost(pid) => {
            let _ = kill(pid, Signal::SIGKILL);
            reader::wait_for_end(pid);
            Ok(None)
        }
    }
}

/// A test has us meet a fate while the listener is closed, by `WAKEONE_TEST_DIE`. Release builds do not have this.
#[cfg(debug_assertions)]
fn fate() -> u64 {
    use self::request::fate;
    static ONCE: std::sync::Once = std::sync::Once::new();
    let mut once = 0;
    match std::env::var("WAKEONE_TEST_DIE").as_deref() {
        Ok("moving") => fate::BOTH_DIE,
        Ok("agent") => fate::AGENT_DIES,
        Ok("slow") => fate::IS_SLOW,
        Ok("stopped") => {
            ONCE.call_once(|| once = fate::STOPS);
            once
        }
        Ok("refused") => {
            ONCE.call_once(|| once = fate::REFUSED);
            once
        }
        Ok("mover") => {
            ONCE.call_once(|| once = fate::MOVER_DIES);
            once
        }
        _ => 0,
    }
}

#[cfg(not(debug_assertions))]
fn fate() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    /// The entries of a listener in a set of this process.
    fn look(set: &OwnedFd, listener: &TcpListener) -> Look {
        let inode = rustix::fs::fstat(listener).expect("stat").st_ino;
        let (pid, epoll) = (std::process::id(), set.as_raw_fd());
        let started = Stat::of(pid).expect("own").started;
        let mut look = Look::default();
        let take = |entry| look.entries.push(entry);
        super::super::entries::of_set((pid, started), epoll, inode, take).expect("own set");
        look
    }

    /// Returns the data of what is ready.
    fn ready(set: &OwnedFd) -> Vec<u64> {
        let mut events = Vec::with_capacity(4);
        let wait = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 20_000_000,
        };
        epoll::wait(
            set,
            rustix::buffer::spare_capacity(&mut events),
            Some(&wait),
        )
        .expect("wait");
        events.iter().map(|event| event.data.u64()).collect()
    }

    fn watched(flags: epoll::EventFlags) -> (OwnedFd, TcpListener) {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let data = epoll::EventData::new_u64(0x1234_5678_9abc_def0);
        epoll::add(&set, &listener, data, flags).expect("add");
        (set, listener)
    }

    #[test]
    fn a_set_sees_nothing_of_a_move_and_every_connection_after_it() {
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        for flags in [
            epoll::EventFlags::IN,
            edge,
            edge | epoll::EventFlags::EXCLUSIVE,
        ] {
            let (set, listener) = watched(flags);
            // The kernel chose its port, and would choose another one.
            let address = listener.local_addr().expect("address");
            let before = look(&set, &listener);
            assert_eq!(before.entries.len(), 1);
            for _ in 0..20 {
                move_queue(&listener, 7, &before, None).expect("moved");
                assert_eq!(look(&set, &listener).entries, before.entries);
            }
            assert_eq!(listener.local_addr().expect("address"), address);
            assert_eq!(ready(&set), []);
            assert_eq!(
                super::super::accept_queue(&listener).expect("queue").limit,
                7
            );
            let _client = TcpStream::connect(address).expect("connects");
            assert_eq!(ready(&set), [0x1234_5678_9abc_def0]);
        }
    }

    #[test]
    fn what_its_owner_has_taken_out_is_not_put_back() {
        let (set, listener) = watched(epoll::EventFlags::IN);
        let before = look(&set, &listener);
        epoll::delete(&set, &listener).expect("delete");
        move_queue(&listener, 7, &before, None).expect("moved");
        assert_eq!(look(&set, &listener).entries, []);
        // A note says that it had been there, and its process still holds the listener.
        put_back(&before.entries).expect("put back");
        assert_eq!(look(&set, &listener).entries, before.entries);
        put_back(&before.entries).expect("it is there already");
        drop(listener);
        put_back(&before.entries).expect("nobody holds it");
        assert_eq!(ready(&set), []);
    }

    #[test]
    fn a_worker_that_does_something_else_by_now_is_left_alone() {
        let (set, listener) = watched(epoll::EventFlags::IN);
        let mut before = look(&set, &listener);
        let address = listener.local_addr().expect("address");
        let _client = TcpStream::connect(address).expect("connects");
        let own = std::process::id();
        before.threads.push((own, own, b"61 0x0 0x0\n".to_vec()));
        let error = move_queue(&listener, 7, &before, None).expect_err("it has changed");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(look(&set, &listener).entries, before.entries);
        assert_eq!(ready(&set).len(), 1, "and the connection still waits");
        before.threads.push((own, u32::MAX, b"running\n".to_vec()));
        move_queue(&listener, 7, &before, None).expect_err("no such thread");
        assert_eq!(look(&set, &listener).entries, before.entries);
    }
}
