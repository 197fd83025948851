//! The supervisor's calls to its steering, and their order. Real workers (`sleep`), and a steering that only takes
//! notes.
//!
//! Workers are started through an exec of this very program, so it has a main of its own instead of the test harness's.

use rustix::process::{Pid, Signal, getpid, kill_process, test_kill_process};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use wakeone_control::steer::{Steer, SteerEvent};
use wakeone_supervisor::wear::Limits;
use wakeone_supervisor::{Options, Supervisor, spawn, trampoline};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Up(usize, u32),
    Down(usize),
    Drain(usize, bool),
    Close,
}
use Call::{Close, Down, Drain, Up};

/// The calls so far, and the values to return.
#[derive(Debug, Default)]
struct Notes {
    calls: Vec<Call>,
    queued: [u32; 2],
    accepting: [Option<bool>; 2],
}

#[derive(Debug, Default, Clone)]
struct Notebook(Arc<Mutex<Notes>>);

impl Notebook {
    fn open(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().expect("notes")
    }

    fn calls(&self) -> Vec<Call> {
        self.open().calls.clone()
    }

    fn clear(&self) {
        self.open().calls.clear();
    }

    /// Returns the pid that last came up in a slot.
    fn pid(&self, slot: usize) -> u32 {
        let calls = self.calls();
        let pids = calls.iter().rev().filter_map(|call| match call {
            Up(of, pid) if *of == slot => Some(*pid),
            _ => None,
        });
        pids.into_iter().next().expect("a worker came up")
    }

    /// Waits until all of these calls were made; others may come between.
    fn wait_for(&self, wanted: &[Call]) {
        let start = Instant::now();
        while !wanted.iter().all(|call| self.calls().contains(call)) {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{wanted:?} not in {:?}",
                self.calls()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Steer for Notebook {
    fn worker_up(&mut self, slot: usize, pid: u32) {
        self.open().calls.push(Up(slot, pid));
    }
    fn worker_down(&mut self, slot: usize) {
        self.open().calls.push(Down(slot));
    }
    fn drain(&mut self, slot: usize, on: bool) {
        self.open().calls.push(Drain(slot, on));
    }
    fn close(&mut self) {
        self.open().calls.push(Close);
    }
    fn queued(&self, slot: usize) -> u32 {
        self.open().queued[slot]
    }
    fn accepting(&self, slot: usize) -> Option<bool> {
        self.open().accepting[slot]
    }
    fn events(&mut self) -> Vec<SteerEvent> {
        Vec::new()
    }
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(number as i32).expect("pid")
}

fn signal_ourselves(signal: Signal) {
    kill_process(getpid(), signal).expect("signal");
}

/// Waits long enough for any wrong act of the supervisor.
fn a_while() {
    std::thread::sleep(Duration::from_millis(300));
}

/// Runs two workers under a notebook with the script beside them, then stops.
fn supervise(notes: Notebook, script: impl FnOnce(&Notebook) + Send + 'static) {
    let folder = tempfile::tempdir().expect("folder");
    let options = Options {
        name: Some("steering".to_owned()),
        workers: 2,
        most_workers: None,
        queue: None,
        listen: vec!["127.0.0.1:0".parse().expect("address")],
        backlog: None,
        command: vec!["sleep".to_owned(), "1000".to_owned()],
        user: None,
        group: None,
        keep_caps: Vec::new(),
        restart: None,
        refuse: false,
        stop_signal: nix::sys::signal::Signal::SIGTERM,
        grace: Duration::from_secs(60),
        limits: Limits::default(),
        on_hang: None,
        quic: false,
        lookup: false,
        nonblocking: false,
        stdin: false,
        runtime_dir: folder.path().to_owned(),
    };
    let supervisor = Supervisor::new(&options).expect("supervisor");
    let mut steer = notes.clone();
    let script = std::thread::spawn(move || {
        // A script that fails must not leave the supervisor waiting.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| script(&notes)));
        notes.open().queued = [0, 0];
        signal_ourselves(Signal::TERM);
        result
    });
    supervisor.run(&mut steer).expect("run");
    if let Err(panic) = script.join().expect("script") {
        std::panic::resume_unwind(panic);
    }
}

fn a_worker_drains_until_it_is_seen_to_accept() {
    let notes = Notebook::default();
    notes.open().accepting = [Some(true), Some(false)];
    supervise(notes, |notes| {
        notes.wait_for(&[Drain(0, false)]);
        a_while();
        let (first, second) = (notes.pid(0), notes.pid(1));
        // The workers start side by side.
        let start = [
            Drain(0, true),
            Drain(1, true),
            Up(0, first),
            Up(1, second),
            Drain(0, false),
        ];
        assert_eq!(notes.calls(), start);
        notes.open().accepting[1] = Some(true);
        notes.wait_for(&[Drain(1, false)]);
    });
}

fn one_that_cannot_be_seen_is_taken_to_accept_after_a_while() {
    supervise(Notebook::default(), |notes| {
        notes.wait_for(&[Up(1, notes.pid_once_up(1))]);
        assert!(!notes.calls().contains(&Drain(0, false)));
        notes.wait_for(&[Drain(0, false), Drain(1, false)]);
    });
}

fn a_dead_workers_queue_is_moved_first() {
    supervise(Notebook::default(), |notes| {
        notes.wait_for(&[Drain(0, false), Drain(1, false)]);
        let old = notes.pid(1);
        notes.clear();
        notes.open().accepting[1] = Some(true);
        kill_process(pid(old), Signal::KILL).expect("kill");
        notes.wait_for(&[Drain(1, false)]);
        let new = notes.pid(1);
        assert_ne!(old, new);
        assert_eq!(
            notes.calls(),
            [Down(1), Drain(1, true), Up(1, new), Drain(1, false)]
        );
    });
}

fn a_roll_waits_for_the_queue_of_each_slot() {
    supervise(Notebook::default(), |notes| {
        notes.wait_for(&[Drain(0, false), Drain(1, false)]);
        let old = [notes.pid(0), notes.pid(1)];
        notes.clear();
        notes.open().accepting = [Some(true), Some(true)];
        notes.open().queued = [3, 0];
        signal_ourselves(Signal::HUP);
        notes.wait_for(&[Drain(0, true)]);
        a_while();
        assert_eq!(
            notes.calls(),
            [Drain(0, true)],
            "connections wait for this worker"
        );
        assert!(old.iter().all(|old| test_kill_process(pid(*old)).is_ok()));
        notes.open().queued = [0, 0];
        notes.wait_for(&[Drain(1, false)]);
        let roll = |slot| {
            [
                Drain(slot, true),
                Down(slot),
                Drain(slot, true),
                Up(slot, notes.pid(slot)),
                Drain(slot, false),
            ]
        };
        assert_eq!(notes.calls(), [roll(0), roll(1)].concat());
    });
}

fn a_stop_closes_and_waits_for_the_queues() {
    supervise(Notebook::default(), |notes| {
        notes.wait_for(&[Drain(0, false), Drain(1, false)]);
        notes.clear();
        notes.open().queued = [0, 5];
        signal_ourselves(Signal::TERM);
        notes.wait_for(&[Close]);
        a_while();
        assert_eq!(notes.calls(), [Close]);
        notes.open().queued = [0, 0];
        notes.wait_for(&[Down(0), Down(1)]);
        assert_eq!(
            notes.calls().len(),
            3,
            "nobody is started again: {:?}",
            notes.calls()
        );
    });
}

impl Notebook {
    /// Returns the pid of a slot, as soon as there is one.
    fn pid_once_up(&self, slot: usize) -> u32 {
        let start = Instant::now();
        while !self
            .calls()
            .iter()
            .any(|call| matches!(call, Up(of, _) if *of == slot))
        {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "no worker came up"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        self.pid(slot)
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(spawn::TRAMPOLINE) {
        let order = arguments.next().expect("an order");
        trampoline::exec(&order.parse().expect("an order"));
        std::process::exit(127);
    }
    let tests: [(&str, fn()); 5] = [
        (
            "a_worker_drains_until_it_is_seen_to_accept",
            a_worker_drains_until_it_is_seen_to_accept,
        ),
        (
            "one_that_cannot_be_seen_is_taken_to_accept_after_a_while",
            one_that_cannot_be_seen_is_taken_to_accept_after_a_while,
        ),
        (
            "a_dead_workers_queue_is_moved_first",
            a_dead_workers_queue_is_moved_first,
        ),
        (
            "a_roll_waits_for_the_queue_of_each_slot",
            a_roll_waits_for_the_queue_of_each_slot,
        ),
        (
            "a_stop_closes_and_waits_for_the_queues",
            a_stop_closes_and_waits_for_the_queues,
        ),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
}
