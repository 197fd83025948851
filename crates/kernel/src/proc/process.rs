//! Another process, seen from outside: its state, its children, and the descriptors it holds.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::capability::Capability;
use crate::proc::line;
use crate::proc::reader;
use crate::proc::stat::{self, Stat};

/// A process that maps something more often does so to fill our memory.
const MOST_FOUND: usize = 1024;
/// No chain of processes is longer, unless somebody makes it so.
const MOST_ANCESTORS: usize = 128;

/// A worker is a tree of at most this many processes; of a larger one, only a part is looked at.
const MOST_IN_TREE: usize = 256;

/// Whether a process is below another one, at whatever distance.
pub fn descends(pid: u32, from: u32) -> bool {
    let above = |pid: &u32| Stat::of(*pid).ok().map(|stat| stat.parent);
    std::iter::successors(above(&pid), above)
        .take(MOST_ANCESTORS)
        .take_while(|parent| *parent != 0)
        .any(|parent| parent == from)
}

/// The processes that a process started and that are still there.
pub fn children(pid: u32) -> Vec<u32> {
    let lists = reader::file_of_each(pid, "task", "children").unwrap_or_default();
    let mut all = Vec::new();
    for (tid, list) in lists {
        // A thread may have more children than are read of each.
        let whole = || stat::text_of(pid, &format!("task/{tid}/children")).unwrap_or_default();
        let list = list.map_or_else(|_| whole(), crate::proc::line::as_text);
        all.extend(
            list.split_whitespace()
                .filter_map(|pid| pid.parse::<u32>().ok()),
        );
    }
    all
}

/// A process and those below it, level by level. Of a large tree only a part is returned.
pub fn tree(pid: u32) -> impl Iterator<Item = u32> {
    let mut level = VecDeque::from([pid]);
    let next = move || {
        let one = level.pop_front()?;
        level.extend(children(one));
        Some(one)
    };
    std::iter::from_fn(next).take(MOST_IN_TREE)
}

/// The state letter of /proc/PID/stat (`R`, `S`, `D`, `T`, `Z` …).
pub fn state(pid: u32) -> Option<char> {
    Stat::of(pid).ok().map(|stat| stat.state)
}

/// Whether a process is stopped: by SIGSTOP, or by a debugger.
pub fn is_stopped(pid: u32) -> bool {
    matches!(state(pid), Some('T' | 't'))
}

/// Whether a process is gone or on its way: it does nothing more, but may still hold files and locks. To end takes the
/// kernel a while where it takes down programs of BPF.
pub fn is_ending(pid: u32) -> bool {
    Stat::of(pid).map_or(true, |stat| stat.ending || matches!(stat.state, 'Z' | 'X'))
}

/// The path of a process's executable, as the process sees it. It may have been replaced or removed since.
pub fn executable(pid: u32) -> Option<String> {
    let path = String::from_utf8(reader::link(pid, "exe").ok()?).ok()?;
    let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
    Some(path.to_owned())
}

/// The user by whom a process makes files, which is that of the connections that it accepts.
pub fn file_user(pid: u32) -> Option<u32> {
    let [.., file_system] = line::users(&reader::file(pid, "status").ok()?)?;
    Some(file_system)
}

/// A descriptor of another process, shared with it. The caller must not change its file status flags: they are the
/// other's too; and must close it, or a listener outlives its server.
///
/// # Errors
/// `ESRCH`, `EBADF`, `EPERM` without CAP_SYS_PTRACE over another user's process, or `TimedOut` if it lets those hang who
/// ask.
pub fn descriptor_of(pid: u32, fd: i32) -> io::Result<OwnedFd> {
    if reader::reads_itself() || pid == std::process::id() {
        return Ok(pidfd_getfd(handle_of(pid)?, fd, PidfdGetfdFlags::empty())?);
    }
    reader::descriptor(pid, fd)
}

/// Opens a pidfd, which stays with its process even after the number is reused.
///
/// # Errors
/// `ESRCH` where there is none, or out of descriptors.
pub fn handle_of(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// As [`descriptor_of`], of the process of a pidfd.
///
/// # Errors
/// As there; `ESRCH` if that process has ended.
pub fn descriptor_by(handle: impl AsFd, pid: u32, fd: i32) -> io::Result<OwnedFd> {
    let descriptor = descriptor_of(pid, fd)?;
    // While its process is there, nobody else has the number.
    if has_ended(handle)? {
        return Err(rustix::io::Errno::SRCH.into());
    }
    Ok(descriptor)
}

/// Whether the process of a pidfd has ended. It may still have to be waited for.
///
/// # Errors
/// poll(2) fails.
pub fn has_ended(handle: impl AsFd) -> io::Result<bool> {
    let mut ended = [PollFd::new(&handle, PollFlags::IN)];
    Ok(poll(&mut ended, Some(&Timespec::default()))? > 0)
}

/// Whether /proc is that of this process's own PID namespace: `nsenter --pid` alone leaves another one mounted, whose numbers mean
/// other processes.
pub fn has_own_proc() -> bool {
    let own = std::fs::read_link("/proc/self");
    own.is_ok_and(|own| own.to_str() == Some(&std::process::id().to_string()))
}

/// Every process id of this pid namespace.
pub fn pids() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let numbers = entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok());
    numbers.collect()
}

/// Returns those of these capabilities that a process lacks. A process in another user namespace lacks all of them,
/// because its capabilities mean nothing here (`ns_capable`). So does a process that cannot be seen.
pub fn lacking_of(pid: u32, wanted: &[Capability]) -> Vec<Capability> {
    let own = std::fs::read_link("/proc/self/ns/user").ok();
    let theirs = reader::link(pid, "ns/user").ok();
    let here = own.is_some_and(|own| Some(own.as_os_str().as_encoded_bytes()) == theirs.as_deref());
    let held = i32::try_from(pid)
        .ok()
        .filter(|_| here)
        .and_then(|pid| caps::read(Some(pid), caps::CapSet::Effective).ok())
        .unwrap_or_default();
    let lacks = |cap: &&Capability| !held.contains(cap);
    wanted.iter().filter(lacks).copied().collect()
}

/// A socket of any process that may be seen, shared with it, by its inode.
pub fn socket_of_any(inode: u64) -> Option<OwnedFd> {
    let mut pids = pids().into_iter();
    pids.find_map(|pid| socket_of(pid, inode))
}

/// A socket of a process, shared with it, by its inode.
pub fn socket_of(pid: u32, inode: u64) -> Option<OwnedFd> {
    let held = sockets_of(pid).ok()?;
    let mut held = held.iter().filter(|(_, held)| *held == inode);
    held.find_map(|(fd, _)| {
        let socket = descriptor_of(pid, *fd).ok()?;
        // The number may be another's since we looked.
        let is_it = rustix::fs::fstat(&socket).is_ok_and(|stat| stat.st_ino == inode);
        is_it.then_some(socket)
    })
}

/// The lines of a process's memory map that contain this text.
///
/// # Errors
/// `PermissionDenied` for another user's process, `NotFound` where it is gone, `TimedOut` if it lets its readers hang.
pub fn maps_with(pid: u32, text: &str) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    reader::lines(pid, "maps", |line| {
        let line = String::from_utf8_lossy(line);
        if line.contains(text) && found.len() < MOST_FOUND {
            found.push(line.into_owned());
        }
    })?;
    Ok(found)
}

/// Counts the open descriptors of a process, again and again.
#[derive(Debug)]
pub struct DescriptorCount {
    pid: u32,
    folder: OwnedFd,
}

impl DescriptorCount {
    /// That of a process.
    ///
    /// # Errors
    /// It is gone, or is another user's.
    pub fn of(pid: u32) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = format!("/proc/{pid}/fd");
        let folder = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { pid, folder })
    }

    /// The number now. Since Linux 6.2 the size of the folder tells (`proc_fd_getattr` in fs/proc/fd.c), in less than a
    /// microsecond, and no lock of the process is taken. Before, the descriptors are counted.
    ///
    /// # Errors
    /// `PermissionDenied` for another user's process, `NotFound` where it is gone, `TimedOut` if it lets its readers hang.
    pub fn look(&self) -> io::Result<u64> {
        match u64::try_from(rustix::fs::fstat(&self.folder)?.st_size) {
            Ok(size @ 1..) => Ok(size),
            _ => Ok(reader::numbers(self.pid, "fd")?.len() as u64),
        }
    }

    /// The number, and the inodes of those that are sockets.
    ///
    /// # Errors
    /// As [`Self::look`].
    pub fn list(&self) -> io::Result<(u64, Vec<u64>)> {
        let all = Descriptors::of(self.pid)?;
        let inodes = all.sockets.into_iter().map(|(_, inode)| inode);
        Ok((all.number, inodes.collect()))
    }
}

/// Descriptors of a process that are sockets: number and inode.
///
/// # Errors
/// `PermissionDenied` for another user's process, `NotFound` where it is gone, `TimedOut` if it lets its readers hang.
pub fn sockets_of(pid: u32) -> io::Result<Vec<(i32, u64)>> {
    Ok(Descriptors::of(pid)?.sockets)
}

/// The descriptors with which a process may wait for connections.
#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    /// How many there are of any kind.
    pub number: u64,
    /// Sockets: number and inode.
    pub sockets: Vec<(i32, u64)>,
    /// The numbers of epoll instances.
    pub epolls: Vec<i32>,
    /// Whether it has an io_uring.
    pub has_ring: bool,
}

impl Descriptors {
    /// Those of a process.
    ///
    /// # Errors
    /// As [`sockets_of`].
    pub fn of(pid: u32) -> io::Result<Self> {
        let mut all = Self::default();
        for (number, target) in reader::links(pid, "fd")? {
            all.number += 1;
            let Ok(number) = i32::try_from(number) else {
                continue;
            };
            match &target[..] {
                b"anon_inode:[eventpoll]" => all.epolls.push(number),
                b"anon_inode:[io_uring]" => all.has_ring = true,
                other => all
                    .sockets
                    .extend(inode_in(other).map(|inode| (number, inode))),
            }
        }
        Ok(all)
    }
}

/// The inode in `socket:[INODE]`.
fn inode_in(target: &[u8]) -> Option<u64> {
    let digits = target.strip_prefix(b"socket:[")?.strip_suffix(b"]")?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn descendants_are_told_from_others() {
        let own = std::process::id();
        let script = "sleep 60 & echo $!; wait";
        let mut shell = std::process::Command::new("sh")
            .args(["-c", script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("sh");
        let mut line = String::new();
        let out = shell.stdout.take().expect("output");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a line");
        let below: u32 = line.trim().parse().expect("pid");
        assert!(descends(below, own) && descends(below, shell.id()));
        assert!(!descends(own, below) && !descends(own, own) && !descends(u32::MAX, own));
        let below = nix::unistd::Pid::from_raw(below as i32);
        nix::sys::signal::kill(below, nix::sys::signal::Signal::SIGKILL).expect("kill");
        shell.wait().expect("wait");
    }

    #[test]
    fn nobody_holds_anything() {
        assert!(descriptor_of(u32::MAX, 0).is_err());
        assert!(sockets_of(u32::MAX).is_err());
    }

    #[test]
    fn finds_its_own_sockets() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let number = std::os::fd::AsRawFd::as_raw_fd(&listener);
        let own = sockets_of(std::process::id()).expect("own descriptors");
        assert!(own.iter().any(|(fd, inode)| *fd == number && *inode > 0));
        let copy = descriptor_of(std::process::id(), number).expect("own descriptor");
        assert_eq!(
            crate::socket::cookie(&copy).expect("cookie"),
            crate::socket::cookie(&listener).expect("cookie")
        );
    }
}
