//! Whether a worker waits for connections: the state of a process, or of a tree of them.

use std::collections::HashSet;
use std::io;
use std::time::Duration;

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
pub use wakeone_model::judge::WorkerState;
use wakeone_model::listener::Wait;

use crate::proc::process::{children, is_stopped, sockets_of};
use crate::proc::{reader, stat, waits};

/// Returns the state of a process from all of its threads; the first one that waits for connections settles it. A
/// thread in epoll or poll may wait for anything: it is not checked for which connections.
///
/// A thread in the middle of its computation shows as `running`, and so does one that is about to return from accept.
/// The state is a sample, not a proof.
pub fn doing(pid: u32) -> WorkerState {
    threads_doing(pid, |line| thread_doing(pid, line))
}

/// Returns the same of a process that has these `sockets`, for some listeners. A thread in accept, epoll, poll or
/// select counts as waiting only if it waits for one of the `listeners` (by inode). A server's threads may wait in
/// epoll for their open connections while nobody accepts new ones.
fn doing_at(pid: u32, sockets: &[(i32, u64)], listeners: &HashSet<u64>) -> WorkerState {
    threads_doing(pid, |line| {
        let line = match line {
            Ok(line) if !waits::is_running(&line) => line,
            other => return thread_doing(pid, other),
        };
        match waits::wait_of(pid, &line, sockets, listeners) {
            Wait::Accept(inode) | Wait::Receive(inode) if listeners.contains(&inode) => {
                WorkerState::Waiting
            }
            Wait::Epoll(epoll) => match waits::is_in(pid, epoll, listeners) {
                Some(true) => WorkerState::Waiting,
                Some(false) => WorkerState::Busy,
                None => WorkerState::Unknown,
            },
            Wait::Poll(set) if !set.is_empty() => WorkerState::Waiting,
            // The polled descriptors cannot be read here, and a ring may hold an accept.
            Wait::PollUnseen | Wait::IoUring => WorkerState::Waiting,
            _ => WorkerState::Busy,
        }
    })
}

/// Returns the state of a process by each thread's line of /proc/PID/task/TID/syscall.
fn threads_doing(pid: u32, of: impl Fn(io::Result<String>) -> WorkerState) -> WorkerState {
    let calls = match reader::file_of_each(pid, "task", "syscall") {
        Ok(calls) => calls,
        Err(error) if waits::is_hidden(&error) => return WorkerState::Unknown,
        Err(_) => return WorkerState::Gone,
    };
    let mut verdict = WorkerState::Gone;
    for (_, line) in calls {
        match of(line.map(stat::as_text)) {
            WorkerState::Gone => {}
            WorkerState::Waiting => return if_running(pid, WorkerState::Waiting),
            other => verdict = busier(verdict, other),
        }
    }
    match verdict {
        WorkerState::Busy | WorkerState::Running { .. } => if_running(pid, verdict),
        other => other,
    }
}

/// Returns the state of two that do not wait together: one that runs settles it.
fn busier(one: WorkerState, other: WorkerState) -> WorkerState {
    match one {
        WorkerState::Running { .. } => one,
        _ => other,
    }
}

/// Returns the state of two processes of a worker.
fn together(one: WorkerState, other: WorkerState) -> WorkerState {
    match (one, other) {
        (WorkerState::Waiting, _) => one,
        (_, WorkerState::Waiting) => other,
        (WorkerState::Running { cpu_ns: one }, WorkerState::Running { cpu_ns: other }) => {
            WorkerState::Running {
                cpu_ns: one.saturating_add(other),
            }
        }
        _ => busier(one, other),
    }
}

/// Returns the state of a process that runs.
fn running(pid: u32) -> WorkerState {
    WorkerState::Running {
        cpu_ns: cpu_ns(pid).unwrap_or(0),
    }
}

/// Returns the CPU time of a process. One call gives that of all its threads (kernel/time/posix-cpu-timers.c), and lags
/// by a tick for those that run now.
fn cpu_ns(pid: u32) -> Option<u64> {
    let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    let time = Duration::from(clock_gettime(clock).ok()?);
    u64::try_from(time.as_nanos()).ok()
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
        .reduce(together);
    below.or_else(|| {
        let held = match sockets_of(pid) {
            Ok(held) => held,
            // It lets its readers hang. Nobody knows what it holds, and does.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return Some(WorkerState::Unknown);
            }
            Err(_) => Vec::new(),
        };
        held.iter()
            .any(|(_, inode)| inodes.contains(inode))
            .then(|| doing_at(pid, &held, &inodes.iter().copied().collect()))
    })
}

fn thread_doing(pid: u32, line: io::Result<String>) -> WorkerState {
    match line {
        Ok(line) if waits::is_wait(&line) => WorkerState::Waiting,
        Ok(line) if waits::is_running(&line) => running(pid),
        Ok(_) => WorkerState::Busy,
        Err(error) if waits::is_hidden(&error) => WorkerState::Unknown,
        Err(_) => WorkerState::Gone,
    }
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
    fn who_computes_runs_and_its_cpu_time_grows() {
        let mut computes = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .expect("sh");
        let since = Instant::now();
        let mut first = None;
        loop {
            assert!(since.elapsed() < Duration::from_secs(10), "{first:?}");
            if let WorkerState::Running { cpu_ns } = doing(computes.id())
                && *first.get_or_insert(cpu_ns) + 5_000_000 < cpu_ns
            {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        computes.kill().expect("kill");
        computes.wait().expect("wait");
    }

    #[test]
    fn processes_of_one_worker_are_told_together() {
        use WorkerState::{Busy, Running, Stopped, Waiting};
        let (one, other) = (Running { cpu_ns: 5 }, Running { cpu_ns: 7 });
        assert_eq!(together(one, other), Running { cpu_ns: 12 });
        assert_eq!(together(Busy, one), one);
        assert_eq!(together(one, Stopped), one);
        assert_eq!(together(Waiting, one), Waiting);
        assert_eq!(together(one, Waiting), Waiting);
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
        let until = |waiting: bool| {
            let since = Instant::now();
            while (doing() == WorkerState::Waiting) != waiting {
                assert!(since.elapsed() < Duration::from_secs(10), "{waiting}");
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
                assert!(doing().is_elsewhere(), "{:?}", doing());
                std::thread::sleep(Duration::from_millis(1));
            }
            let data = epoll::EventData::new_u64(2);
            epoll::add(&set, &listener, data, epoll::EventFlags::IN).expect("add");
            until(true);
            drop(wake);
        });
        until(false);
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
        assert_eq!(doing(u32::MAX), WorkerState::Gone);
    }
}
