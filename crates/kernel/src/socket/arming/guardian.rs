//! The guardian's own side. It makes only system calls: another thread of the process that it was forked from may have
//! held any lock, the allocator's among them.
//!
//! An entry of an epoll set is known by an open file and the number that it had (`struct epoll_filefd` in
//! fs/eventpoll.c). So whoever changes it must have the listener at that number, which a process with threads cannot
//! arrange. The guardian borrows set and listener for one change, and keeps neither: a listener that is kept would hold
//! its port after the server's end.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use nix::libc;
use wakeone_model::arming::Change;

use super::request::{
    CHANGES, Condition, DISMISS, ENLIST, LEND, MOST, MOST_BYTES, Records, WORD, change_of,
};
use crate::proc::reader::child::{allow_any_number, become_helper};
use crate::proc::reader::request::{END, FAILED};
use crate::schedule::monotonic_ns;
use crate::socket::entries::{EXCLUSIVE, Entry, WAKES};

/// An errno.
type Failed = i32;

/// How long after a release that failed it is tried again.
const AGAIN_NS: u64 = 100_000_000;

/// Answers until its other end is closed, and makes every entry as it was when the steerer is late, or gone.
pub(super) fn serve(records: &Records, socket: RawFd, real_time: bool) -> ! {
    become_helper(socket, c"wakeone-guard", real_time);
    allow_any_number();
    // The signals of a terminal are for the steerer, which ends this process.
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: nothing is run for an ignored signal.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let mut guardian = Guardian {
        records,
        socket: 0,
        processes: [-1; MOST],
        lent: [[-1; 2]; MOST],
    };
    while guardian.wait() {}
    guardian.release();
    // SAFETY: ends the process, without anything that exit() would run.
    unsafe { libc::_exit(0) }
}

struct Guardian<'a> {
    records: &'a Records,
    socket: RawFd,
    /// A pidfd for each place that is in use.
    processes: [RawFd; MOST],
    /// Set and listener of a place, where the steerer may borrow them and this process may not. They are kept while the
    /// entry is changed, and no longer.
    lent: [[RawFd; 2]; MOST],
}

#[repr(align(8))]
struct Control([u8; 64]);

impl Guardian<'_> {
    /// Waits for a request and answers it, or for the end of the steerer's time. Returns whether the steerer lives.
    fn wait(&mut self) -> bool {
        let left_ms = if self.records.is_changed() {
            let due = self.records.due_ns().load(Ordering::SeqCst);
            due.saturating_sub(monotonic_ns()).div_ceil(1_000_000)
        } else {
            u64::MAX
        };
        if left_ms == 0 {
            self.release();
            self.records.releases().fetch_add(1, Ordering::SeqCst);
            // Until then the entries of a worker that refuses stay as they are.
            let again = monotonic_ns() + AGAIN_NS;
            self.records.due_ns().store(again, Ordering::SeqCst);
            return true;
        }
        let mut polled = libc::pollfd {
            fd: self.socket,
            events: libc::POLLIN,
            revents: 0,
        };
        let timeout = i32::try_from(left_ms).unwrap_or(-1);
        // SAFETY: one valid record.
        let ready = unsafe { libc::poll(&raw mut polled, 1, timeout) };
        ready <= 0 || self.hear()
    }

    fn hear(&mut self) -> bool {
        let mut bytes = [0_u8; MOST_BYTES];
        let mut control = Control([0; _]);
        let mut data = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        // SAFETY: all zeros are a valid header; its parts point to memory that outlives the call.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut data;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len() as _;
        // SAFETY: as above.
        let got = unsafe { libc::recvmsg(self.socket, &raw mut message, 0) };
        if got < 0 && errno() == libc::EINTR {
            return true;
        }
        let Some(bytes) = usize::try_from(got).ok().filter(|got| *got > 0) else {
            return false;
        };
        let mut came = [-1; 2];
        // SAFETY: the kernel filled the control message.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            if !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS {
                let descriptors = libc::CMSG_DATA(header).cast::<RawFd>();
                for (at, fd) in came.iter_mut().enumerate() {
                    if (*header).cmsg_len as usize >= libc::CMSG_LEN(4 * (at as u32 + 1)) as usize {
                        *fd = descriptors.add(at).read_unaligned();
                    }
                }
            }
        }
        let words = Words(&data, bytes);
        match (words.at(0), words.at(1)) {
            (Some(ENLIST), Some(place)) => self.enlist(place as usize, came[0]),
            (Some(LEND), Some(place)) => self.lend(place as usize, came),
            (Some(DISMISS), Some(place)) => self.dismiss(place as usize),
            (Some(CHANGES), _) => self.change_all(&words),
            _ => self.answer(FAILED, &libc::EINVAL.to_ne_bytes()),
        }
        true
    }

    fn enlist(&mut self, place: usize, process: RawFd) {
        let Some(known) = self.processes.get_mut(place) else {
            return self.answer(FAILED, &libc::EINVAL.to_ne_bytes());
        };
        // SAFETY: a pidfd of ours, or -1.
        unsafe { libc::close(std::mem::replace(known, process)) };
        self.answer(END, &[]);
    }

    fn lend(&mut self, place: usize, came: [RawFd; 2]) {
        let Some(lent) = self.lent.get_mut(place) else {
            return self.answer(FAILED, &libc::EINVAL.to_ne_bytes());
        };
        close_both(std::mem::replace(lent, came));
        self.answer(END, &[]);
    }

    fn dismiss(&mut self, place: usize) {
        if let Some(known) = self.processes.get_mut(place) {
            // SAFETY: as above.
            unsafe { libc::close(std::mem::replace(known, -1)) };
        }
        self.records.set(place, Condition::Free);
        self.give_back(place);
        self.answer(END, &[]);
    }

    fn change_all(&mut self, words: &Words<'_>) {
        let mut answer = [0_u8; WORD * MOST];
        let mut used = 0;
        while let (Some(place), Some(change)) = (words.at(1 + used * 2), words.at(2 + used * 2)) {
            let done = match change_of(change) {
                Some(change) => self.change(place as usize, change),
                None => Err(libc::EINVAL),
            };
            let errno = done.err().unwrap_or(0);
            answer[WORD * used..][..WORD].copy_from_slice(&errno.to_ne_bytes());
            used += 1;
            if used == MOST {
                break;
            }
        }
        self.answer(END, &answer[..WORD * used]);
    }

    /// Makes every entry as its server made it.
    fn release(&mut self) {
        for place in 0..MOST {
            if self.records.condition(place).is_changed() {
                let done = self.change(place, Change::Arm);
                // Its process has ended, or has closed set or listener.
                if matches!(done, Err(libc::ESRCH | libc::EBADF | libc::ESTALE)) {
                    self.records.set(place, Condition::Gone);
                }
            }
        }
    }

    /// Changes the entry of a place.
    fn change(&mut self, place: usize, change: Change) -> Result<(), Failed> {
        let done = self.change_in_set(place, change);
        self.give_back(place);
        done
    }

    /// Closes what was lent for a place, unless its entry is to be made as it was.
    fn give_back(&mut self, place: usize) {
        if !self.records.condition(place).is_changed()
            && let Some(lent) = self.lent.get_mut(place)
        {
            close_both(std::mem::replace(lent, [-1; 2]));
        }
    }

    fn change_in_set(&mut self, place: usize, change: Change) -> Result<(), Failed> {
        let (entry, held) = self.records.entry(place).ok_or(libc::EINVAL)?;
        self.leave(entry.number);
        let process = self.processes.get(place).copied().unwrap_or(-1);
        let lent = self.lent.get(place).copied().unwrap_or([-1; 2]);
        let mut set = borrow(process, entry.epoll, lent[0])?;
        if set == entry.number {
            set = elsewhere(set, set)?;
        }
        let listener = borrow(process, held, lent[1]);
        let listener = listener.and_then(|listener| bring(listener, entry.number));
        let done = listener.and_then(|listener| {
            if inode_of(listener)? != entry.inode {
                return Err(libc::ESTALE);
            }
            self.control(place, set, &entry, change)
        });
        // SAFETY: numbers of ours; nothing else has that of the entry.
        unsafe {
            libc::close(set);
            if listener.is_ok() {
                libc::close(entry.number);
            }
        }
        done
    }

    fn control(
        &self,
        place: usize,
        set: RawFd,
        entry: &Entry,
        change: Change,
    ) -> Result<(), Failed> {
        let (number, data) = (entry.number, entry.data);
        let (events, after) = match change {
            Change::Disarm => (entry.events & !WAKES, Condition::Disarmed),
            Change::Arm | Change::ToEnd => (entry.events, Condition::AsMade),
        };
        let ours = self.records.condition(place) == Condition::Out;
        let exclusive = entry.events & EXCLUSIVE != 0;
        // All that wait at once are woken at once. Taken out for a moment, it would be missed by a server that changes it.
        if change == Change::ToEnd && !exclusive {
            return Err(libc::EINVAL);
        }
        // An exclusive entry cannot be modified (do_epoll_ctl in fs/eventpoll.c).
        if !exclusive && !ours {
            if after == Condition::Disarmed {
                self.records.set(place, after);
            }
            let done = control(set, libc::EPOLL_CTL_MOD, number, events, data);
            self.note(place, done, after);
            return done;
        }
        if !ours {
            self.records.set(place, Condition::Out);
            let taken = control(set, libc::EPOLL_CTL_DEL, number, 0, 0);
            if taken.is_err() {
                self.note(place, taken, Condition::AsMade);
                return taken;
            }
        }
        match control(set, libc::EPOLL_CTL_ADD, number, events, data) {
            // The server has made it anew.
            Ok(()) | Err(libc::EEXIST) => {
                self.records.set(place, after);
                Ok(())
            }
            failed => failed,
        }
    }

    /// Notes how an entry is after a change that took nothing out.
    fn note(&self, place: usize, done: Result<(), Failed>, after: Condition) {
        match done {
            Ok(()) => self.records.set(place, after),
            // The server has taken it out, and it stays out.
            Err(libc::ENOENT | libc::EBADF) => self.records.set(place, Condition::Gone),
            Err(_) => {}
        }
    }

    /// Leaves a number to a listener.
    fn leave(&mut self, number: RawFd) {
        let lent = self.lent.as_flattened_mut().iter_mut();
        let kept = self.processes.iter_mut().chain(lent);
        for kept in kept.chain([&mut self.socket]) {
            if *kept == number
                && let Ok(other) = elsewhere(number, *kept)
            {
                *kept = other;
            }
        }
    }

    fn answer(&self, kind: u8, rest: &[u8]) {
        let mut packet = [0_u8; 1 + WORD * MOST];
        packet[0] = kind;
        packet[1..=rest.len()].copy_from_slice(rest);
        // SAFETY: `packet` is as long.
        unsafe {
            libc::send(
                self.socket,
                packet.as_ptr().cast(),
                1 + rest.len(),
                libc::MSG_NOSIGNAL,
            )
        };
    }
}

/// The words of a request.
struct Words<'a>(&'a libc::iovec, usize);

impl Words<'_> {
    fn at(&self, word: usize) -> Option<u32> {
        let end = (word + 1) * WORD;
        // SAFETY: within what was received.
        (end <= self.1).then(|| unsafe {
            self.0
                .iov_base
                .cast::<u8>()
                .add(word * WORD)
                .cast::<u32>()
                .read_unaligned()
        })
    }
}

fn close_both(both: [RawFd; 2]) {
    for fd in both.into_iter().filter(|fd| *fd >= 0) {
        // SAFETY: a number of ours.
        unsafe { libc::close(fd) };
    }
}

/// Borrows a descriptor of a process, or copies the one that was lent.
fn borrow(process: RawFd, fd: RawFd, lent: RawFd) -> Result<RawFd, Failed> {
    // SAFETY: system calls on numbers.
    let got = unsafe {
        match lent {
            ..0 => libc::syscall(libc::SYS_pidfd_getfd, process, fd, 0),
            lent => libc::c_long::from(libc::fcntl(lent, libc::F_DUPFD, 0)),
        }
    };
    i32::try_from(got)
        .ok()
        .filter(|got| *got >= 0)
        .ok_or_else(errno)
}

/// Moves a descriptor of ours to a number.
fn bring(fd: RawFd, number: RawFd) -> Result<RawFd, Failed> {
    if fd == number {
        return Ok(fd);
    }
    // SAFETY: numbers of ours.
    unsafe {
        let done = libc::dup2(fd, number);
        let failed = errno();
        libc::close(fd);
        if done < 0 { Err(failed) } else { Ok(done) }
    }
}

/// Moves a descriptor of ours to any number above another.
fn elsewhere(above: RawFd, fd: RawFd) -> Result<RawFd, Failed> {
    // SAFETY: numbers of ours.
    unsafe {
        let other = libc::fcntl(fd, libc::F_DUPFD, above + 1);
        if other < 0 {
            return Err(errno());
        }
        libc::close(fd);
        Ok(other)
    }
}

fn inode_of(fd: RawFd) -> Result<u64, Failed> {
    // SAFETY: all zeros are a valid record, which the kernel fills.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        if libc::fstat(fd, &raw mut about) < 0 {
            return Err(errno());
        }
        Ok(about.st_ino)
    }
}

fn control(set: RawFd, what: i32, fd: RawFd, events: u32, data: u64) -> Result<(), Failed> {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: a system call on numbers and a valid event.
    match unsafe { libc::epoll_ctl(set, what, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

fn errno() -> i32 {
    nix::errno::Errno::last_raw()
}
