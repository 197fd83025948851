//! Reads another process's memory. That process may have arranged its memory so that a reader waits for ever: in a
//! page of a FUSE file that is never answered, or of userfaultfd. No signal ends that wait in all cases.
//!
//! So a helper process reads it. A helper that does not answer in time is killed and left behind, and the caller goes
//! on without an answer. The process that it read from is then not read for a while; nor are the others of its user,
//! after a few.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::capability::{self, Capability};

/// The most that can be read at a time.
pub(crate) const MOST_BYTES: usize = 32 * 1024;
/// A read takes some microseconds; a helper that takes longer than this hangs, or has no CPU.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a process is not read after its first timeout; doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A user with this many hanging processes is not read from at all.
const MOST_OF_USER: usize = 4;
/// With this many helpers given up and not ended, nothing is read.
const MOST_LEFT_BEHIND: usize = 64;

const REQUEST_BYTES: usize = 16;

/// All of `length` bytes of another process's memory, or nothing.
pub(crate) fn read(pid: u32, address: u64, length: usize) -> Option<Vec<u8>> {
    if length > MOST_BYTES {
        return None;
    }
    // Without the privilege only processes of one's own user can be read, and those of others have no way to it. (Yama lets
    // a helper, which is no ancestor of theirs, read less than this process.)
    if !capability::has(Capability::CAP_SYS_PTRACE) {
        let mut bytes = vec![0; length];
        return read_here(pid, address, &mut bytes).then_some(bytes);
    }
    READERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_with(Readers::default)
        .read(pid, address, length)
}

static READERS: Mutex<Option<Readers>> = Mutex::new(None);

/// The helper, and a record of the processes that made one hang.
#[derive(Debug, Default)]
struct Readers {
    helper: Option<Helper>,
    left_behind: Vec<Pid>,
    suspects: HashMap<u32, Suspect>,
}

/// A process whose memory was not read in time.
#[derive(Debug, Clone, Copy)]
struct Suspect {
    user: u32,
    until: Instant,
    pause: Duration,
}

impl Readers {
    fn read(&mut self, pid: u32, address: u64, length: usize) -> Option<Vec<u8>> {
        self.forget();
        let user = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
        if self.is_paused(pid, user) || self.left_behind.len() >= MOST_LEFT_BEHIND {
            return None;
        }
        let own = std::process::id();
        // A fork of this process has its own: the socket would be shared.
        self.helper = self.helper.take().filter(|helper| helper.of == own);
        let helper = match self.helper.take() {
            Some(helper) => helper,
            None => Helper::start().ok()?,
        };
        match helper.read(pid, address, length) {
            Answer::Told(bytes) => {
                self.helper = Some(helper);
                bytes
            }
            Answer::Dead => {
                self.left_behind.push(helper.pid);
                None
            }
            Answer::Late => {
                tracing::debug!("the memory of process {pid} cannot be read in time");
                let _ = nix::sys::signal::kill(helper.pid, nix::sys::signal::Signal::SIGKILL);
                self.left_behind.push(helper.pid);
                self.suspect(pid, user);
                None
            }
        }
    }

    fn is_paused(&self, pid: u32, user: u32) -> bool {
        let now = Instant::now();
        let paused = |suspect: &&Suspect| suspect.until > now;
        let of_user = |suspect: &&Suspect| suspect.user == user;
        let all = self.suspects.values().filter(paused).filter(of_user);
        self.suspects.get(&pid).filter(paused).is_some() || all.count() >= MOST_OF_USER
    }

    fn suspect(&mut self, pid: u32, user: u32) {
        let before = self.suspects.get(&pid);
        let pause = before.map_or(FIRST_PAUSE, |one| (one.pause * 2).min(LONGEST_PAUSE));
        let until = Instant::now() + pause;
        self.suspects.insert(pid, Suspect { user, until, pause });
    }

    /// Forgets helpers that have ended, and processes that have not timed out for long.
    fn forget(&mut self) {
        self.left_behind.retain(|pid| !has_ended(*pid));
        let now = Instant::now();
        self.suspects
            .retain(|_, suspect| suspect.until + LONGEST_PAUSE > now);
    }
}

fn has_ended(helper: Pid) -> bool {
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    let flags = WaitPidFlag::WNOHANG | WaitPidFlag::__WALL;
    !matches!(waitpid(helper, Some(flags)), Ok(WaitStatus::StillAlive))
}

enum Answer {
    Told(Option<Vec<u8>>),
    Late,
    Dead,
}

/// A process that reads for us.
#[derive(Debug)]
struct Helper {
    pid: Pid,
    socket: OwnedFd,
    /// The process that it was started by.
    of: u32,
}

impl Helper {
    fn start() -> io::Result<Self> {
        let (socket, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // Without a signal at its end: a plain wait() for any child, as for a server's last process, does not see it
        // (`eligible_child` in kernel/exit.c).
        // SAFETY: a fork in all but the signal. The child calls nothing but system calls, and never returns.
        let pid = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
        match i32::try_from(pid) {
            Ok(0) => serve(theirs.as_raw_fd()),
            Ok(pid) if pid > 0 => Ok(Self {
                pid: Pid::from_raw(pid),
                socket,
                of: std::process::id(),
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn read(&self, pid: u32, address: u64, length: usize) -> Answer {
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&pid.to_ne_bytes());
        request[4..8].copy_from_slice(&(length as u32).to_ne_bytes());
        request[8..].copy_from_slice(&address.to_ne_bytes());
        if rustix::net::send(&self.socket, &request, SendFlags::NOSIGNAL).is_err() {
            return Answer::Dead;
        }
        if !self.answers() {
            return Answer::Late;
        }
        let mut answer = vec![0; 1 + length];
        match rustix::net::recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT) {
            Ok((read, _)) if read == 1 + length && answer[0] == 1 => {
                answer.remove(0);
                Answer::Told(Some(answer))
            }
            Ok((1.., _)) => Answer::Told(None),
            _ => Answer::Dead,
        }
    }

    fn answers(&self) -> bool {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let limit = Timespec {
                tv_sec: 0,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut wanted = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
            match poll(&mut wanted, Some(&limit)) {
                Err(rustix::io::Errno::INTR) => {}
                ready => return ready.is_ok_and(|ready| ready > 0),
            }
        }
    }
}

/// Runs the helper until its other end is closed. It makes only system calls: another thread of the process that it
/// was forked from may have held any lock.
fn serve(socket: RawFd) -> ! {
    // It holds nothing of this process: no lock of a group's folder, no socket.
    // SAFETY: system calls on numbers; everything but the socket is closed, and nothing here uses the rest.
    unsafe {
        libc::dup2(socket, 0);
        libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0);
        libc::prctl(libc::PR_SET_NAME, c"wakeone-reader".as_ptr());
        keep_ptrace_only();
    }
    let mut answer = [0_u8; 1 + MOST_BYTES];
    loop {
        let mut request = [0_u8; REQUEST_BYTES];
        // SAFETY: `request` has as many bytes.
        let got = unsafe { libc::recv(0, request.as_mut_ptr().cast(), REQUEST_BYTES, 0) };
        if got < 0 && nix::errno::Errno::last() == nix::errno::Errno::EINTR {
            continue;
        }
        if got != REQUEST_BYTES as isize {
            // SAFETY: ends the process, without anything that exit() would run.
            unsafe { libc::_exit(0) }
        }
        let word = |at: usize| [0, 1, 2, 3].map(|byte| request[at + byte]);
        let pid = u32::from_ne_bytes(word(0));
        let length = (u32::from_ne_bytes(word(4)) as usize).min(MOST_BYTES);
        let address = u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|byte| request[8 + byte]));
        let told = read_here(pid, address, &mut answer[1..=length]);
        answer[0] = u8::from(told);
        let bytes = if told { 1 + length } else { 1 };
        // SAFETY: `answer` has that many bytes and more.
        unsafe { libc::send(0, answer.as_ptr().cast(), bytes, libc::MSG_NOSIGNAL) };
    }
}

/// Gives up every capability but CAP_SYS_PTRACE. Without the library for it, which allocates.
///
/// # Safety
/// System calls only; may be called after a fork.
unsafe fn keep_ptrace_only() {
    const VERSION_3: u32 = 0x2008_0522; // include/uapi/linux/capability.h
    const SYS_PTRACE: u32 = 1 << 19;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, of the lower 32 and of the upper.
    let sets = [SYS_PTRACE, SYS_PTRACE, 0, 0, 0, 0];
    // SAFETY: both have the layout that the version says, and are read only.
    unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
}

/// The read itself; whether all of it was read. Allocates nothing.
fn read_here(pid: u32, address: u64, bytes: &mut [u8]) -> bool {
    let (Ok(pid), Ok(base)) = (i32::try_from(pid), usize::try_from(address)) else {
        return false;
    };
    let len = bytes.len();
    let remote = [RemoteIoVec { base, len }];
    let read = process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(bytes)], &remote);
    read == Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn memory_is_read_whole_or_not_at_all() {
        let own = std::process::id();
        let text = b"what is here".to_vec();
        let at = text.as_ptr() as u64;
        for _ in 0..3 {
            assert_eq!(read(own, at, text.len()).as_deref(), Some(&text[..]));
            assert_eq!(read(own, 8, 16), None, "nothing is mapped there");
        }
        assert_eq!(read(u32::MAX, at, 1), None);
        assert_eq!(read(own, at, MOST_BYTES + 1), None);
    }

    #[test]
    fn no_plain_wait_sees_the_helper() {
        let helper = Helper::start().expect("helper");
        let waited =
            nix::sys::wait::waitpid(helper.pid, Some(nix::sys::wait::WaitPidFlag::WNOHANG));
        assert_eq!(waited, Err(nix::errno::Errno::ECHILD));
        assert!(!has_ended(helper.pid));
        let Helper { pid, socket, .. } = helper;
        drop(socket);
        let since = Instant::now();
        while !has_ended(pid) {
            assert!(since.elapsed() < Duration::from_secs(10), "it stays");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A page that nobody fills: the first read is given up, and the next ones do not wait.
    #[test]
    fn a_read_that_hangs_is_left_behind() {
        if !capability::has(Capability::CAP_SYS_PTRACE) {
            return eprintln!("skipped: without CAP_SYS_PTRACE nobody else's memory is read");
        }
        let script = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/servers/hostile.py"
        );
        let mut hostile = Command::new("python3")
            .args([script, "page"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut line = String::new();
        let out = hostile.stdout.take().expect("output");
        BufReader::new(out).read_line(&mut line).expect("a line");
        let at = line.trim().parse().expect("its address");
        let mut readers = Readers::default();
        assert_eq!(readers.read(hostile.id(), at, 8), None);
        assert!(readers.suspects.contains_key(&hostile.id()));
        let helpers = readers.left_behind.len();
        assert_eq!(readers.read(hostile.id(), at, 8), None);
        assert!(readers.helper.is_none(), "it was not asked again");
        assert!(readers.left_behind.len() <= helpers);
        let text = [7_u8; 8];
        let own = readers.read(std::process::id(), text.as_ptr() as u64, 8);
        assert_eq!(own.as_deref(), Some(&text[..]), "others are read");
        for pid in 0..MOST_OF_USER as u32 {
            readers.suspect(u32::MAX - pid, 12345);
        }
        assert!(readers.is_paused(1, 12345) && !readers.is_paused(1, 12346));
        hostile.kill().expect("kill");
        hostile.wait().expect("wait");
    }
}
