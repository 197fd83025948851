//! Another process, seen from outside: what it waits in, and descriptors it holds.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// What a worker is doing, as far as /proc tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Some thread waits for connections: accept, epoll, poll or select.
    Waiting,
    /// No thread does: it computes, or sleeps in something else.
    Busy,
    /// It is stopped (SIGSTOP, a debugger, a frozen cgroup).
    Stopped,
    /// It is gone, or a zombie.
    Gone,
    /// We may not look (another user's process, without CAP_SYS_PTRACE).
    Unknown,
}

/// System calls that a server waits for connections in. io_uring_enter is one: a ring may hold an accept.
#[cfg(target_arch = "x86_64")]
const WAITS: [u64; 9] = [
    43,  // accept
    288, // accept4
    232, // epoll_wait
    281, // epoll_pwait
    441, // epoll_pwait2
    7,   // poll
    271, // ppoll
    23,  // select
    270, // pselect6
];
#[cfg(target_arch = "x86_64")]
const IO_URING_ENTER: u64 = 426;
#[cfg(target_arch = "aarch64")]
const WAITS: [u64; 6] = [202, 242, 22, 441, 73, 72];
#[cfg(target_arch = "aarch64")]
const IO_URING_ENTER: u64 = 426;

/// Looks at every thread of a process; the first one that waits for connections settles it.
///
/// A thread in the middle of its computation shows as `running`, and so does one that is about to return from
/// accept: a sample, not a proof.
pub fn doing(pid: u32) -> Doing {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Doing::Gone;
    };
    let mut verdict = Doing::Gone;
    for task in tasks.flatten() {
        match thread_doing(&task.path()) {
            Doing::Gone => {}
            Doing::Waiting => return if_running(pid, Doing::Waiting),
            other => verdict = other,
        }
    }
    match verdict {
        Doing::Busy => if_running(pid, Doing::Busy),
        other => other,
    }
}

/// A stopped process keeps the system call it was in.
fn if_running(pid: u32, doing: Doing) -> Doing {
    if matches!(state(pid), Some('T' | 't')) {
        Doing::Stopped
    } else {
        doing
    }
}

/// The same for a worker that may be a tree of processes: a server's own master, say, with the process that accepts
/// below it. Those accept that hold one of the listeners (by their `inodes`) and have nobody below them that does.
pub fn doing_below(pid: u32, inodes: &[u64]) -> Doing {
    holders_doing(pid, inodes).unwrap_or_else(|| doing(pid))
}

fn holders_doing(pid: u32, inodes: &[u64]) -> Option<Doing> {
    let children = children(pid);
    let below = children
        .iter()
        .filter_map(|child| holders_doing(*child, inodes))
        .reduce(|one, other| if one == Doing::Waiting { one } else { other });
    below.or_else(|| {
        let held = sockets_of(pid).unwrap_or_default();
        held.iter()
            .any(|(_, inode)| inodes.contains(inode))
            .then(|| doing(pid))
    })
}

/// The processes that a process started and that are still there.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let lists = tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

fn thread_doing(task: &std::path::Path) -> Doing {
    match std::fs::read_to_string(task.join("syscall")) {
        Ok(line) => parse_syscall(&line),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Doing::Unknown,
        Err(_) => Doing::Gone,
    }
}

/// A line of /proc/PID/syscall: the number and its arguments, `running`, or -1 outside a system call.
fn parse_syscall(line: &str) -> Doing {
    let mut words = line.split_whitespace();
    let Some(number) = words.next().and_then(|word| word.parse::<u64>().ok()) else {
        return Doing::Busy;
    };
    if number == IO_URING_ENTER || WAITS.contains(&number) {
        Doing::Waiting
    } else {
        Doing::Busy
    }
}

/// The state letter of /proc/PID/stat (`R`, `S`, `D`, `T`, `Z` …).
pub fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, a closing parenthesis too: the last one ends it.
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// A descriptor of another process, shared with it. The caller must not change its file status flags: they are the
/// other's too; and must close it, or a listener outlives its server.
///
/// # Errors
/// `ESRCH`, `EBADF`, or `EPERM` without CAP_SYS_PTRACE over another user's process.
pub fn descriptor_of(pid: u32, fd: i32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(pidfd_getfd(process.as_fd(), fd, PidfdGetfdFlags::empty())?)
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
    fn lines_of_proc_syscall() {
        for (line, doing) in [
            ("running\n", Doing::Busy),
            ("-1 0x7ffc 0x7f\n", Doing::Busy),
            ("35 0x7ffc 0x0 0x0\n", Doing::Busy),
            ("", Doing::Busy),
            ("99999999999999999999999 0x1\n", Doing::Busy),
            ("426 0x4 0x1\n", Doing::Waiting),
        ] {
            assert_eq!(parse_syscall(line), doing, "{line:?}");
        }
        for number in WAITS {
            assert_eq!(
                parse_syscall(&format!("{number} 0x3 0x0\n")),
                Doing::Waiting
            );
        }
    }

    #[test]
    fn a_thread_in_accept_makes_its_process_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let thread = std::thread::spawn(move || listener.accept().map(drop));
        let since = Instant::now();
        while doing(std::process::id()) != Doing::Waiting {
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
    fn nobody_does_nothing() {
        assert_eq!(doing(u32::MAX), Doing::Gone);
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
