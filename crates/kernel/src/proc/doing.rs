//! Whether a worker waits for connections: the state of a process, or of a tree of them.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
pub use wakeone_model::judge::WorkerState;
use wakeone_model::listener::{Process, Wait};

use crate::proc::process::{is_stopped, sockets_of, tree};
use crate::proc::{reader, waits};

/// Keeps what was read about processes, so that each file is read once. Several sockets may be those of one process.
#[derive(Debug, Default)]
pub struct Looks {
    sockets: OfEach<Vec<(i32, u64)>>,
    calls: OfEach<Vec<Result<String, io::ErrorKind>>>,
}

/// By process id.
type OfEach<T> = RefCell<HashMap<u32, Read<T>>>;
type Read<T> = Result<Arc<T>, io::ErrorKind>;

impl Looks {
    /// The sockets of a process.
    fn sockets_of(&self, pid: u32) -> Read<Vec<(i32, u64)>> {
        once(&self.sockets, pid, || sockets_of(pid))
    }

    /// Each thread's line of /proc/PID/task/TID/syscall.
    fn calls_of(&self, pid: u32) -> Read<Vec<Result<String, io::ErrorKind>>> {
        once(&self.calls, pid, || {
            let calls = reader::file_of_each(pid, "task", "syscall")?;
            let lines = calls.into_iter().map(|(_, line)| line);
            let line = |line: io::Result<_>| {
                line.map(crate::proc::line::as_text)
                    .map_err(|error| error.kind())
            };
            Ok(lines.map(line).collect())
        })
    }
}

/// Returns what was read of a process, or reads it.
fn once<T>(seen: &OfEach<T>, pid: u32, read: impl FnOnce() -> io::Result<T>) -> Read<T> {
    let read = || read().map(Arc::new).map_err(|error| error.kind());
    seen.borrow_mut().entry(pid).or_insert_with(read).clone()
}

/// Returns the state of a process from all of its threads; the first one that waits for connections settles it. A
/// thread in epoll or poll may wait for anything: it is not checked for which connections.
///
/// A thread in the middle of its computation shows as `running`, and so does one that is about to return from accept.
/// The state is a sample, not a proof.
pub fn doing(pid: u32) -> WorkerState {
    threads_doing(&Looks::default(), pid, |line| thread_doing(pid, line))
}

/// The state of a process that holds one of a worker's listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    state: WorkerState,
    /// It was seen to wait for one of the listeners. Polled descriptors that cannot be read, and rings, may be of
    /// anything.
    sure: bool,
}

/// Returns the same of a process that has these `sockets`, for some listeners. A thread in accept, epoll, poll or
/// select counts as waiting only if it waits for one of the `listeners` (by inode). A server's threads may wait in
/// epoll for their open connections while nobody accepts new ones.
fn doing_at(looks: &Looks, pid: u32, sockets: &[(i32, u64)], listeners: &HashSet<u64>) -> Look {
    let sure = Cell::new(false);
    let state = threads_doing(looks, pid, |line| {
        let look = thread_at(pid, line, sockets, listeners, |epoll| {
            waits::is_in(pid, epoll, listeners)
        });
        sure.set(look.sure);
        look.state
    });
    Look {
        state,
        sure: sure.get(),
    }
}

/// Returns the same of one thread, by its line of /proc/PID/task/TID/syscall. `is_in` tells whether an epoll set has one of
/// the listeners; `None` if that cannot be seen.
fn thread_at(
    pid: u32,
    line: Result<&str, io::ErrorKind>,
    sockets: &[(i32, u64)],
    listeners: &HashSet<u64>,
    is_in: impl Fn(i32) -> Option<bool>,
) -> Look {
    let look = |state, sure| Look { state, sure };
    let line = match line {
        Ok(line) if !waits::is_running(line) => line,
        other => return look(thread_doing(pid, other), false),
    };
    match waits::wait_of(pid, line, sockets, listeners) {
        Wait::Accept(inode) | Wait::Receive(inode) if listeners.contains(&inode) => {
            look(WorkerState::Waiting, true)
        }
        Wait::Epoll(epoll) => match is_in(epoll) {
            Some(true) => look(WorkerState::Waiting, true),
            Some(false) => look(WorkerState::Busy, false),
            None => look(WorkerState::Unknown, false),
        },
        Wait::Poll(set) if !set.is_empty() => look(WorkerState::Waiting, true),
        Wait::PollUnseen | Wait::IoUring => look(WorkerState::Waiting, false),
        _ => look(WorkerState::Busy, false),
    }
}

/// Where a process has a listener, as a sample found it: its descriptors of it, and the epoll sets that have it. By this a
/// look tells at no more cost than [`doing`] whether a thread waits for the listener, or for something else.
#[derive(Debug, Clone)]
pub struct Place {
    sockets: Vec<(i32, u64)>,
    listeners: HashSet<u64>,
    epolls: Vec<i32>,
}

impl Place {
    /// That of a process; `None` if it has none of the sockets.
    pub fn of(process: &Process) -> Option<Self> {
        (!process.descriptors.is_empty()).then(|| Self {
            sockets: process.descriptors.clone(),
            listeners: process.holds.iter().copied().collect(),
            epolls: process.polls.iter().map(|polled| polled.epoll).collect(),
        })
    }

    /// Returns the state of the process. A thread counts as waiting only if it waits for the listener.
    pub fn doing(&self, pid: u32) -> WorkerState {
        threads_doing(&Looks::default(), pid, |line| self.at(pid, line))
    }

    /// Returns the state of one of its threads.
    pub fn doing_of_thread(&self, tid: u32) -> WorkerState {
        let line = reader::file(tid, "syscall").map(crate::proc::line::as_text);
        let line = line.as_deref().map_err(io::Error::kind);
        match self.at(tid, line) {
            gone @ (WorkerState::Gone | WorkerState::Unknown) => gone,
            doing => if_running(tid, doing),
        }
    }

    fn at(&self, pid: u32, line: Result<&str, io::ErrorKind>) -> WorkerState {
        let is_in = |epoll| Some(self.epolls.contains(&epoll));
        thread_at(pid, line, &self.sockets, &self.listeners, is_in).state
    }
}

/// Returns the state of a process by each thread's line of /proc/PID/task/TID/syscall.
fn threads_doing(
    looks: &Looks,
    pid: u32,
    of: impl Fn(Result<&str, io::ErrorKind>) -> WorkerState,
) -> WorkerState {
    let calls = match looks.calls_of(pid) {
        Ok(calls) => calls,
        Err(kind) => return unread(kind),
    };
    let mut verdict = WorkerState::Gone;
    for line in calls.iter() {
        match of(line.as_deref().map_err(|kind| *kind)) {
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

/// Returns the state of a process that runs.
fn running(pid: u32) -> WorkerState {
    WorkerState::Running {
        cpu_ns: cpu_ns(pid).unwrap_or(0),
    }
}

/// Returns the CPU time of a process. One call gives that of all its threads (kernel/time/posix-cpu-timers.c), and lags
/// by a tick for those that run now. `None`: it is gone.
pub fn cpu_ns(pid: u32) -> Option<u64> {
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

/// Returns the same for a worker that may be a tree of processes, which hold one of its listeners (by their `inodes`):
/// see [`Acceptors`], here without a memory.
pub fn doing_below(pid: u32, inodes: &[u64]) -> WorkerState {
    Acceptors::default().doing(&Looks::default(), &[pid], inodes)
}

/// The processes of a worker that were seen to wait for its listeners.
///
/// A worker may be a tree of processes: a server's own master with the process that accepts below it, or a process that
/// accepts with its helpers (a process pool, a child command) below it. All of them may hold the listener, as children
/// inherit it. So whoever was seen to wait for it speaks for the worker, and the others only while nobody was.
#[derive(Debug, Default)]
pub struct Acceptors(Vec<u32>);

impl Acceptors {
    /// Returns the state of the worker that has these processes at its top: mostly one. If any
    /// process waits for the listeners, the worker is free.
    pub fn doing(&mut self, looks: &Looks, tops: &[u32], inodes: &[u64]) -> WorkerState {
        let listeners: HashSet<u64> = inodes.iter().copied().collect();
        let mut seen: Vec<(u32, WorkerState)> = Vec::new();
        // Mostly one look at who accepts is enough.
        for one in self
            .0
            .clone()
            .into_iter()
            .chain(tops.iter().copied().flat_map(tree))
        {
            let is_new = seen.iter().all(|(other, _)| *other != one);
            let Some(look) = is_new.then(|| look_at(looks, one, &listeners)).flatten() else {
                continue;
            };
            let known = self.0.contains(&one);
            if look.state == WorkerState::Waiting && (known || look.sure) {
                if !known {
                    self.0.push(one);
                }
                return WorkerState::Waiting;
            }
            seen.push((one, look.state));
        }
        self.0.retain(|one| {
            seen.iter()
                .any(|(other, state)| other == one && *state != WorkerState::Gone)
        });
        let speaks = |one: &u32| self.0.is_empty() || self.0.contains(one);
        seen.iter()
            .filter(|(one, _)| speaks(one))
            .map(|(_, state)| *state)
            .chain(
                tops.iter()
                    .filter(|_| seen.is_empty())
                    .map(|top| doing(*top)),
            )
            .reduce(WorkerState::freest)
            .unwrap_or(WorkerState::Gone)
    }

    /// Returns the CPU time of those who accept, or else of the worker's first process, in ns.
    pub fn cpu_ns(&self, pid: u32) -> u64 {
        let first = self.0.is_empty().then_some(&pid);
        let all = self.0.iter().chain(first);
        all.filter_map(|one| cpu_ns(*one)).sum()
    }
}

/// Looks at a process; `None` if it holds none of these listeners.
fn look_at(looks: &Looks, pid: u32, listeners: &HashSet<u64>) -> Option<Look> {
    match looks.sockets_of(pid) {
        Ok(held) => held
            .iter()
            .any(|(_, inode)| listeners.contains(inode))
            .then(|| doing_at(looks, pid, &held, listeners)),
        // It lets its readers hang. Nobody knows what it holds, and does.
        Err(io::ErrorKind::TimedOut) => Some(Look {
            state: WorkerState::Unknown,
            sure: false,
        }),
        Err(_) => None,
    }
}

fn thread_doing(pid: u32, line: Result<&str, io::ErrorKind>) -> WorkerState {
    match line {
        Ok(line) if waits::is_wait(line) => WorkerState::Waiting,
        Ok(line) if waits::is_running(line) => running(pid),
        Ok(_) => WorkerState::Busy,
        Err(kind) => unread(kind),
    }
}

/// The state of a process, or a thread, of which a file could not be read.
fn unread(kind: io::ErrorKind) -> WorkerState {
    if waits::is_hidden(kind) {
        WorkerState::Unknown
    } else {
        WorkerState::Gone
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
        let doing = || {
            doing_at(
                &Looks::default(),
                own,
                &sockets_of(own).expect("own sockets"),
                &listeners,
            )
            .state
        };
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

    /// A thread in poll for something else does not wait for the listener. A thread that accepts does.
    #[test]
    fn a_sample_tells_whose_wait_is_for_the_listener() {
        let (listener, inode) = listener();
        let number = std::os::fd::AsRawFd::as_raw_fd(&listener).to_string();
        let helper = start(&["python3", "-c", HELPED, &number], &listener);
        let inodes = HashSet::from([inode]);
        let pid = helper.id();
        let sample = || crate::proc::sight::look(pid, &inodes, &HashSet::new()).expect("it lives");
        until("it accepts", || {
            sample()
                .threads
                .iter()
                .any(|t| t.wait == Wait::Accept(inode))
        });
        let process = sample();
        let place = Place::of(&process).expect("it holds the listener");
        let accepts = |t: &&wakeone_model::listener::Thread| t.wait == Wait::Accept(inode);
        let accepting = process.threads.iter().find(accepts).expect("a thread").tid;
        let polling = process
            .threads
            .iter()
            .find(|t| !accepts(t))
            .expect("a thread")
            .tid;
        assert_eq!(place.doing(pid), WorkerState::Waiting);
        assert_eq!(place.doing_of_thread(accepting), WorkerState::Waiting);
        assert_eq!(place.doing_of_thread(polling), WorkerState::Busy);
        // It serves a connection: it reads.
        let client = std::net::TcpStream::connect(listener.local_addr().expect("address"));
        until("it serves", || place.doing(pid) == WorkerState::Busy);
        assert_eq!(doing(pid), WorkerState::Waiting, "of whatever");
        assert_eq!(place.doing_of_thread(accepting), WorkerState::Busy);
        drop(client);
        end(helper);
        assert_eq!(place.doing_of_thread(accepting), WorkerState::Gone);
    }

    /// A thread in poll on a pipe beside one that accepts and reads.
    const HELPED: &str = "
import os, select, socket, sys, threading
def wait():
    poller = select.poll()
    poller.register(os.pipe()[0], select.POLLIN)
    poller.poll()
threading.Thread(target=wait, daemon=True).start()
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    listener.accept()[0].recv(1)
";

    fn listener() -> (TcpListener, u64) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let inode = rustix::fs::fstat(&listener).expect("stat").st_ino;
        (listener, inode)
    }

    /// Starts a process that inherits the listener.
    fn start(command: &[&str], listener: &TcpListener) -> std::process::Child {
        use rustix::io::{FdFlags, fcntl_setfd};
        fcntl_setfd(listener, FdFlags::empty()).expect("keep it over exec");
        let child = std::process::Command::new(command[0])
            .args(&command[1..])
            .spawn()
            .expect(command[0]);
        fcntl_setfd(listener, FdFlags::CLOEXEC).expect("close it on exec");
        child
    }

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let since = Instant::now();
        while !is_so() {
            assert!(since.elapsed() < Duration::from_secs(30), "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(mut child: std::process::Child) {
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_helper_that_holds_no_listener_does_not_speak_for_its_worker() {
        let (_listener, inode) = listener();
        let helper = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let listeners = HashSet::from([inode]);
        assert_eq!(look_at(&Looks::default(), helper.id(), &listeners), None);
        assert!(
            look_at(&Looks::default(), std::process::id(), &listeners).is_some(),
            "this process holds the listener, whoever is below it"
        );
        end(helper);
    }

    #[test]
    fn a_helper_that_inherited_the_listener_does_not_speak_for_its_worker() {
        let (listener, inode) = listener();
        let own = std::process::id();
        let helper = start(&["sleep", "60"], &listener);
        until("it holds the listener", || {
            look_at(&Looks::default(), helper.id(), &HashSet::from([inode])).is_some()
        });
        let address = listener.local_addr().expect("address");
        let accepts = std::thread::spawn(move || listener.accept().map(drop));
        until("its worker accepts", || {
            doing_below(own, &[inode]) == WorkerState::Waiting
        });
        // Other tests' threads do not wait for this listener, whatever they do.
        drop(std::net::TcpStream::connect(address).expect("connect"));
        accepts.join().expect("thread").expect("accept");
        end(helper);
    }

    #[test]
    fn a_process_that_was_seen_to_accept_speaks_for_its_worker() {
        let (listener, inode) = listener();
        let own = std::process::id();
        let number = std::os::fd::AsRawFd::as_raw_fd(&listener).to_string();
        let accept = "import socket, sys
one = socket.socket(fileno=int(sys.argv[1]))
while True: one.accept()";
        let worker = start(&["python3", "-c", accept, &number], &listener);
        let helper = start(&["sh", "-c", "while :; do :; done"], &listener);
        let mut acceptors = Acceptors::default();
        until("a process below accepts", || {
            acceptors.doing(&Looks::default(), &[own], &[inode]) == WorkerState::Waiting
        });
        assert_eq!(acceptors.0, [worker.id()]);
        // The helper computes, and so does this process.
        let pid = nix::unistd::Pid::from_raw(worker.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).expect("stop");
        until("it is stopped", || {
            acceptors.doing(&Looks::default(), &[own], &[inode]) == WorkerState::Stopped
        });
        let stopped_at = acceptors.cpu_ns(own);
        until("the helper has had a CPU", || {
            cpu_ns(helper.id()) > Some(5_000_000)
        });
        assert_eq!(acceptors.cpu_ns(own), stopped_at);
        assert_ne!(doing_below(own, &[inode]), WorkerState::Waiting);
        end(worker);
        until("its end is seen", || {
            acceptors
                .doing(&Looks::default(), &[own], &[inode])
                .is_elsewhere()
                && acceptors.0.is_empty()
        });
        end(helper);
    }

    #[test]
    fn nobody_does_nothing() {
        assert_eq!(doing(u32::MAX), WorkerState::Gone);
    }
}
