//! Another process, seen from outside: its state, and the descriptors it holds.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
pub use wakeone_model::judge::WorkerState;
use wakeone_model::listener::Wait;

use crate::proc::stat::{self, Stat};
use crate::proc::waits;

/// Returns the state of a process from all of its threads; the first one that waits for connections settles it. A
/// thread in epoll or poll may wait for anything: it is not checked for which connections.
///
/// A thread in the middle of its computation shows as `running`, and so does one that is about to return from accept.
/// The state is a sample, not a proof.
pub fn doing(pid: u32) -> WorkerState {
    threads_doing(pid, thread_doing)
}

/// Returns the same of a process that has these `sockets`, for some listeners. A thread in accept, epoll, poll or
/// select counts as waiting only if it waits for one of the `listeners` (by inode). A server's threads may wait in
/// epoll for their open connections while nobody accepts new ones.
fn doing_at(pid: u32, sockets: &[(i32, u64)], listeners: &HashSet<u64>) -> WorkerState {
    threads_doing(pid, |task| {
        let tid = task
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        match tid.map(|tid| waits::wait_of(pid, tid, sockets, listeners)) {
            None => WorkerState::Gone,
            Some(Wait::Unseen) => WorkerState::Unknown,
            Some(Wait::Accept(inode) | Wait::Receive(inode)) if listeners.contains(&inode) => {
                WorkerState::Waiting
            }
            Some(Wait::Epoll(epoll)) if waits::is_in(pid, epoll, listeners) => WorkerState::Waiting,
            Some(Wait::Poll(set)) if !set.is_empty() => WorkerState::Waiting,
            // The polled descriptors cannot be read here, and a ring may hold an accept.
            Some(Wait::PollUnseen | Wait::IoUring) => WorkerState::Waiting,
            Some(_) => WorkerState::Busy,
        }
    })
}

fn threads_doing(pid: u32, of: impl Fn(&std::path::Path) -> WorkerState) -> WorkerState {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return WorkerState::Gone;
    };
    let mut verdict = WorkerState::Gone;
    for task in tasks.flatten() {
        match of(&task.path()) {
            WorkerState::Gone => {}
            WorkerState::Waiting => return if_running(pid, WorkerState::Waiting),
            other => verdict = other,
        }
    }
    match verdict {
        WorkerState::Busy => if_running(pid, WorkerState::Busy),
        other => other,
    }
}

/// A stopped process keeps the system call it was in.
fn if_running(pid: u32, doing: WorkerState) -> WorkerState {
    if is_stopped(pid) {
        WorkerState::Stopped
    } else {
        doing
    }
}

/// Returns the same for a worker that may be a tree of processes: a server's own master, say, with the process that
/// accepts below it. The accepting processes hold one of the listeners (by their `inodes`) and have none below them
/// that does.
pub fn doing_below(pid: u32, inodes: &[u64]) -> WorkerState {
    holders_doing(pid, inodes).unwrap_or_else(|| doing(pid))
}

fn holders_doing(pid: u32, inodes: &[u64]) -> Option<WorkerState> {
    let children = children(pid);
    let below = children
        .iter()
        .filter_map(|child| holders_doing(*child, inodes))
        .reduce(|one, other| {
            if one == WorkerState::Waiting {
                one
            } else {
                other
            }
        });
    below.or_else(|| {
        let held = sockets_of(pid).unwrap_or_default();
        held.iter()
            .any(|(_, inode)| inodes.contains(inode))
            .then(|| doing_at(pid, &held, &inodes.iter().copied().collect()))
    })
}

/// No chain of processes is longer, unless somebody makes it so.
const MOST_ANCESTORS: usize = 128;

/// Whether a process is below another one, at whatever distance.
pub fn descends(pid: u32, from: u32) -> bool {
    let above = |pid: &u32| waits::identity(*pid).map(|identity| identity.parent);
    std::iter::successors(above(&pid), above)
        .take(MOST_ANCESTORS)
        .take_while(|parent| *parent != 0)
        .any(|parent| parent == from)
}

/// The processes that a process started and that are still there.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let lists = tasks
        .flatten()
        .filter_map(|task| stat::text(task.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

fn thread_doing(task: &std::path::Path) -> WorkerState {
    match stat::text(task.join("syscall")) {
        Ok(line) if waits::is_wait(&line) => WorkerState::Waiting,
        Ok(_) => WorkerState::Busy,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => WorkerState::Unknown,
        Err(_) => WorkerState::Gone,
    }
}

/// The state letter of /proc/PID/stat (`R`, `S`, `D`, `T`, `Z` …).
pub fn state(pid: u32) -> Option<char> {
    Stat::of(pid).ok().map(|stat| stat.state)
}

/// Whether a process is stopped: by SIGSTOP, or by a debugger.
pub fn is_stopped(pid: u32) -> bool {
    matches!(state(pid), Some('T' | 't'))
}

/// A descriptor of another process, shared with it. The caller must not change its file status flags: they are the
/// other's too; and must close it, or a listener outlives its server.
///
/// # Errors
/// `ESRCH`, `EBADF`, or `EPERM` without CAP_SYS_PTRACE over another user's process.
pub fn descriptor_of(pid: u32, fd: i32) -> io::Result<OwnedFd> {
    descriptor_by(handle_of(pid)?, fd)
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

/// As [`descriptor_of`], by a pidfd.
///
/// # Errors
/// As there.
pub fn descriptor_by(handle: impl AsFd, fd: i32) -> io::Result<OwnedFd> {
    Ok(pidfd_getfd(handle, fd, PidfdGetfdFlags::empty())?)
}

/// A socket of any process that may be seen, shared with it, by its inode.
pub fn socket_of_any(inode: u64) -> Option<OwnedFd> {
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
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

/// Descriptors of a process that are sockets: number and inode.
///
/// # Errors
/// `PermissionDenied` for another user's process, `NotFound` where it is gone.
pub fn sockets_of(pid: u32) -> io::Result<Vec<(i32, u64)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else {
            continue;
        };
        let inode = target
            .to_str()
            .and_then(|name| name.strip_prefix("socket:["))
            .and_then(|rest| rest.strip_suffix(']'))
            .and_then(|digits| digits.parse().ok());
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let (Some(number), Some(inode)) = (number, inode) {
            found.push((number, inode));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    #[test]
    fn a_thread_in_accept_makes_its_process_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let thread = std::thread::spawn(move || listener.accept().map(drop));
        let since = Instant::now();
        while doing(std::process::id()) != WorkerState::Waiting {
            assert!(
                since.elapsed() < Duration::from_secs(10),
                "accept was never seen"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(std::net::TcpStream::connect(address).expect("connect"));
        thread.join().expect("thread").expect("accept");
    }

    #[test]
    fn who_waits_for_something_else_does_not_wait_for_connections() {
        use rustix::event::epoll;
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let inode = rustix::fs::fstat(&listener).expect("stat").st_ino;
        let (own, listeners) = (std::process::id(), HashSet::from([inode]));
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
        let (other, wake) = std::io::pipe().expect("pipe");
        epoll::add(
            &set,
            &other,
            epoll::EventData::new_u64(1),
            epoll::EventFlags::IN,
        )
        .expect("add");
        let doing = || doing_at(own, &sockets_of(own).expect("own sockets"), &listeners);
        let until = |wanted: WorkerState| {
            let since = Instant::now();
            while doing() != wanted {
                assert!(
                    since.elapsed() < Duration::from_secs(10),
                    "{wanted:?} never seen"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut events = Vec::with_capacity(4);
                epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), None)
            });
            // Other tests' threads come and go, and none of them waits for this listener.
            for _ in 0..20 {
                assert_eq!(doing(), WorkerState::Busy);
                std::thread::sleep(Duration::from_millis(1));
            }
            let data = epoll::EventData::new_u64(2);
            epoll::add(&set, &listener, data, epoll::EventFlags::IN).expect("add");
            until(WorkerState::Waiting);
            drop(wake);
        });
        until(WorkerState::Busy);
    }

    #[test]
    fn a_helper_that_holds_no_listener_does_not_speak_for_its_worker() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let inode = rustix::fs::fstat(&listener).expect("stat").st_ino;
        let mut helper = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let own = std::process::id();
        assert_eq!(holders_doing(helper.id(), &[inode]), None);
        assert!(
            holders_doing(own, &[inode]).is_some(),
            "this process holds the listener, whoever is below it"
        );
        assert_eq!(holders_doing(own, &[u64::MAX]), None);
        helper.kill().expect("kill");
        helper.wait().expect("wait");
    }

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
    fn nobody_does_nothing() {
        assert_eq!(doing(u32::MAX), WorkerState::Gone);
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
