//! Rolling restarts that start each new worker before they end the old one. No request waits for a worker that starts
//! slowly, and held connections are even afterwards. If anything fails on the way, the old worker keeps its place.

#[path = "support/mod.rs"]
mod support;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use support::steered::{assert_counts_are_exact, assert_nothing_left, isolated, status, worker};
use support::{
    Clients, Ground, Run, ask, eventually, everyone, get, long_patience, patience, pid_of, runs,
    server, signal, slowly, slowness, whoami,
};

const ONE: [&str; 6] = ["-w", "1", "-l", "127.0.0.1:8080", "--name", "web"];
const FOUR: [&str; 6] = ["-w", "4", "-l", "127.0.0.1:8080", "--name", "web"];

/// A command that becomes `whoami.py` after some seconds, as a server with long imports does.
fn slow_to_start(seconds: f64) -> Vec<String> {
    let line = format!("sleep {seconds}; exec python3 {}", server("whoami.py"));
    ["sh", "-c", &line].map(str::to_owned).to_vec()
}

fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

/// The longest request of a client that sends one after the other until told to stop.
fn longest_wait(address: SocketAddr, over: impl FnOnce()) -> Duration {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let begun = Instant::now();
                get(address, "/").expect("an answer");
                longest = longest.max(begun.elapsed());
            }
            longest
        });
        over();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        client.join().expect("client")
    })
}

/// The second worker of a slot that the state names.
fn beside(ground: &Ground) -> Option<u32> {
    let text = std::fs::read(ground.runtime().join("web/state.json")).ok()?;
    let state: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let slots = state["slots"].as_array()?;
    let pid = slots
        .iter()
        .find_map(|slot| slot["beside"]["worker"]["pid"].as_u64())?;
    u32::try_from(pid).ok()
}

#[test]
fn a_worker_that_starts_slowly_delays_nobody() {
    let Some(ground) = isolated() else { return };
    let start_takes = Duration::from_millis(1500) * slowness();
    let command = slow_to_start(start_takes.as_secs_f64());
    let mut run = ground.run(&ONE, &words(&command));
    let address = run.ready();
    let before = pid_of(&whoami(address));
    let longest = longest_wait(address, || {
        run.signal(Signal::HUP);
        run.line("rolling restart done: 1 worker replaced");
    });
    eprintln!("the longest request took {longest:?}");
    assert!(longest < start_takes / 3, "{longest:?}");
    assert_ne!(pid_of(&whoami(address)), before);
    eventually("the old worker is gone", || !runs(before));
    let lines = run.stop();
    assert!(
        !lines.iter().any(|line| line.contains("signal 15")),
        "a good end is no death: {lines:?}"
    );
    assert_nothing_left(&ground);
}

#[test]
fn a_new_worker_that_fails_leaves_the_old_one_in_its_place() {
    let Some(ground) = isolated() else { return };
    let flag = ground.path().join("broken");
    let script = format!(
        "test -e {} && exit 4; exec python3 {}",
        flag.display(),
        server("whoami.py")
    );
    let mut run = ground.run(&FOUR, &["sh", "-c", &script]);
    let address = run.ready();
    let before: Vec<u32> = everyone(address, 4).iter().map(pid_of).collect();
    std::fs::write(&flag, "").expect("flag");
    let clients = Clients::start(address, "/", 2);
    run.signal(Signal::HUP);
    run.line("exited with status 4");
    let line = run.line("the rolling restart stops");
    assert!(
        line.contains("new worker 0") && line.contains("4 workers run on as they were"),
        "{line}"
    );
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty() && answers > 0, "{failures:?}");
    let after: Vec<u32> = everyone(address, 4).iter().map(pid_of).collect();
    assert_eq!(before, after);
    // The next rolling restart finds the spare listener in its first state.
    std::fs::remove_file(&flag).expect("flag");
    run.signal(Signal::HUP);
    run.line("rolling restart done: 4 workers replaced");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn an_old_worker_that_dies_meanwhile_is_replaced_by_the_one_that_starts() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&ONE, &words(&slow_to_start(1.0)));
    let address = run.ready();
    let before = pid_of(&whoami(address));
    run.signal(Signal::HUP);
    eventually("a second worker starts", || beside(&ground).is_some());
    let next = beside(&ground).expect("a second worker");
    signal(before, Signal::KILL);
    // A connection that comes now waits for the new worker.
    assert_eq!(pid_of(&whoami(address)), next);
    run.line("rolling restart done: 1 worker replaced");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_supervisor_killed_on_the_way_loses_nothing_and_the_next_one_ends_the_second_worker() {
    let Some(ground) = isolated() else { return };
    let command = slow_to_start(2.0);
    let mut first = ground.run(&ONE, &words(&command));
    let address = first.ready();
    let before = pid_of(&whoami(address));
    let clients = Clients::start(address, "/", 2);
    first.signal(Signal::HUP);
    eventually("a second worker starts", || beside(&ground).is_some());
    let next = beside(&ground).expect("a second worker");
    first.murder();
    let mut second = ground.run(&ONE, &words(&command));
    second.ready();
    slowly("the second worker is gone", || !runs(next));
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty() && answers > 0, "{failures:?}");
    assert_eq!(pid_of(&whoami(address)), before);
    // The next rolling restart works as usual.
    second.signal(Signal::HUP);
    second.line("rolling restart done: 1 worker replaced");
    assert_ne!(pid_of(&whoami(address)), before);
    second.stop();
    assert_nothing_left(&ground);
}

/// The worker of slot 0.
fn first_worker(ground: &Ground) -> u32 {
    worker(&status(ground, "web"), 0).expect("a worker")
}

#[test]
fn a_new_worker_that_dies_while_the_old_one_drains_gives_its_place_back() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&ONE);
    let address = run.ready();
    let old = first_worker(&ground);
    // A connection waits for it, so it drains for long.
    signal(old, Signal::STOP);
    let mut waiting = TcpStream::connect(address).expect("queued");
    waiting
        .set_read_timeout(Some(long_patience()))
        .expect("timeout");
    waiting.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("asks");
    run.signal(Signal::HUP);
    run.line("worker 0 restarted as pid");
    let new = first_worker(&ground);
    assert_ne!(new, old);
    signal(new, Signal::KILL);
    run.line("was killed by signal 9 (SIGKILL); the old worker 0 serves on");
    let line = run.line("the rolling restart stops");
    assert!(
        line.contains("the new worker 0 ended before the old one did")
            && line.ends_with("1 worker runs on as it was"),
        "{line}"
    );
    signal(old, Signal::CONT);
    let mut answer = String::new();
    waiting.read_to_string(&mut answer).expect("an answer");
    assert!(answer.contains(&format!("\"pid\": {old},")), "{answer}");
    assert_eq!(pid_of(&whoami(address)), old);
    run.signal(Signal::HUP);
    run.line("rolling restart done: 1 worker replaced");
    assert_ne!(pid_of(&whoami(address)), old);
    assert_counts_are_exact(&ground, "web", 3);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn one_that_dies_when_the_old_one_is_asked_to_end_is_started_again() {
    let Some(ground) = isolated() else { return };
    let asked = ground.path().join("asked");
    // The old worker gets SIGTERM, and does not end until it is killed.
    let script = format!(
        "trap 'touch {}' TERM; python3 {} --deaf & wait; wait",
        asked.display(),
        server("whoami.py")
    );
    let options = [&ONE[..], &["--grace", "10s"]].concat();
    let mut run = ground.run(&options, &["sh", "-c", &script]);
    let address = run.ready();
    let old = first_worker(&ground);
    run.signal(Signal::HUP);
    run.line("worker 0 restarted as pid");
    slowly("the old one is asked to end", || asked.exists());
    signal(first_worker(&ground), Signal::KILL);
    let line = run.line("was killed by signal 9");
    assert!(line.contains("restart in"), "{line}");
    let line = run.line("the rolling restart stops");
    assert!(line.contains("ended before the old one did"), "{line}");
    run.line("worker 0 restarted as pid");
    // The request waits for the worker that starts.
    whoami(address);
    slowly("the old one is killed", || !runs(old));
    assert_counts_are_exact(&ground, "web", 1);
    run.signal(Signal::INT);
    run.line("no new connections");
    run.signal(Signal::INT);
    run.wait();
    assert_nothing_left(&ground);
}

#[test]
fn a_supervisor_killed_while_an_old_worker_retires_leaves_that_to_the_next() {
    let Some(ground) = isolated() else { return };
    let deaf = ["python3", &server("whoami.py"), "--deaf"];
    let grace = |time| [&ONE[..], &["--grace", time]].concat();
    let mut first = ground.run(&grace("10m"), &deaf);
    let address = first.ready();
    let old = pid_of(&whoami(address));
    first.signal(Signal::HUP);
    first.line("worker 0 restarted as pid");
    let new = pid_of(&whoami(address));
    eventually("the state names the old one too", || {
        beside(&ground) == Some(old)
    });
    first.murder();
    assert!(runs(old) && new != old);
    let mut second = ground.run(&grace("1s"), &deaf);
    second.ready();
    second.line("worker 0 did not end within the grace and is killed");
    slowly("the old one is gone", || !runs(old));
    assert_eq!(pid_of(&whoami(address)), new);
    eventually("it is forgotten", || beside(&ground).is_none());
    assert_counts_are_exact(&ground, "web", 3);
    let (_, lines) = {
        second.signal(Signal::TERM);
        second.wait()
    };
    assert!(
        lines.iter().any(|line| line.contains("stopped")),
        "{lines:?}"
    );
    assert_nothing_left(&ground);
}

/// A supervisor with this many descriptors at most.
fn run_with_descriptors(ground: &Ground, limit: u32, options: &[&str]) -> Run {
    let plain = ground.command(options, &["python3", &server("whoami.py")]);
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\"")])
        .arg(plain.get_program())
        .args(plain.get_args());
    Run::start(command)
}

#[test]
fn where_descriptors_do_not_suffice_old_workers_end_first_and_it_is_said_once() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "2", "-l", "127.0.0.1:8080", "--name", "web"];
    let mut run = run_with_descriptors(&ground, 100, &options);
    run.line("rolling restarts end each old worker first: to start new ones beside them takes 106");
    let address = run.ready();
    let clients = Clients::start(address, "/", 2);
    for _ in 0..2 {
        run.signal(Signal::HUP);
        for slot in 0..2 {
            run.line(&format!("worker {slot} (pid"));
            run.line(&format!("worker {slot} restarted"));
        }
        run.line("rolling restart done: 2 workers replaced");
    }
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty() && answers > 0, "{failures:?}");
    assert_eq!(said_of_room(&run), 1);
    run.stop();
    assert_nothing_left(&ground);
    // An order that was asked for explicitly is not replaced by the other one.
    let asked = [&options[..], &["--restart", "start-first"]].concat();
    let (code, lines) = run_with_descriptors(&ground, 100, &asked).wait();
    let line = lines.last().expect("a line");
    assert!(
        code.code() == Some(1) && line.contains("--restart start-first takes 106 descriptors here"),
        "{line}"
    );
    assert_nothing_left(&ground);
}

/// How often the log says that old workers end first.
fn said_of_room(run: &Run) -> usize {
    let about = |line: &&String| {
        line.contains("old worker ends first") || line.contains("end each old worker first")
    };
    run.lines().iter().filter(about).count()
}

/// Limits a process to `room` more descriptors than it has.
fn leave_descriptors(pid: u32, room: usize) {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
    let numbers = entries.flatten().map(|entry| entry.file_name());
    let open: HashSet<u64> = numbers
        .filter_map(|number| number.to_str()?.parse().ok())
        .collect();
    let mut free = (0..).filter(|number| !open.contains(number));
    limit_descriptors(pid, free.nth(room).expect("a number"));
}

fn limit_descriptors(pid: u32, limit: u64) {
    let pid = Pid::from_raw(pid as i32);
    let new = Rlimit {
        current: Some(limit),
        ..getrlimit(Resource::Nofile)
    };
    prlimit(pid, Resource::Nofile, new).expect("prlimit");
}

#[test]
fn one_that_runs_out_of_descriptors_replaces_its_workers_all_the_same() {
    let Some(ground) = isolated() else { return };
    let mut options = FOUR.to_vec();
    // Each address is one more listener for a slot's second worker.
    for more in ["127.0.0.1:8081", "127.0.0.1:8082", "127.0.0.1:8083"] {
        options.extend(["-l", more]);
    }
    let mut run = ground.whoami(&options);
    let address = run.ready();
    let clients = Clients::start(address, "/", 2);
    leave_descriptors(run.pid(), 5);
    for _ in 0..2 {
        run.signal(Signal::HUP);
        run.line("rolling restart done: 4 workers replaced");
    }
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty() && answers > 0, "{failures:?}");
    assert_eq!(said_of_room(&run), 1);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn no_worker_is_ended_where_no_other_could_be_started() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&ONE);
    let address = run.ready();
    let before = pid_of(&whoami(address));
    leave_descriptors(run.pid(), 1);
    run.signal(Signal::HUP);
    let line = run.line("the rolling restart stops: no new worker 0 could be started");
    assert!(
        line.contains("Too many open files") && line.ends_with("1 worker runs on as it was"),
        "{line}"
    );
    assert_eq!(pid_of(&whoami(address)), before);
    limit_descriptors(run.pid(), 1000);
    run.signal(Signal::HUP);
    run.line("rolling restart done: 1 worker replaced");
    assert_ne!(pid_of(&whoami(address)), before);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn sigterm_ends_the_worker_that_starts_too() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&ONE, &words(&slow_to_start(2.0)));
    let address = run.ready();
    run.signal(Signal::HUP);
    eventually("a second worker starts", || beside(&ground).is_some());
    let slow = ask(address, "/slow?ms=300").expect("accepted");
    run.stop();
    slow.answer().expect("the whole answer");
    assert_nothing_left(&ground);
}

#[test]
fn a_second_sighup_on_the_way_is_another_roll_after_it() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&FOUR);
    let address = run.ready();
    let clients = Clients::start(address, "/", 2);
    run.signal(Signal::HUP);
    run.line("worker 0 restarted");
    run.signal(Signal::HUP);
    run.line("another follows it");
    run.line("rolling restart done: 4 workers replaced");
    run.line("rolling restart done: 4 workers replaced");
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty() && answers > 0, "{failures:?}");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn many_rolls_use_no_more_sockets_than_one() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&ONE);
    let address = run.ready();
    // A file of /proc is open now and then, so the smallest of several counts is right.
    let descriptors = |pid: u32| {
        let look = |_| {
            std::thread::sleep(Duration::from_millis(10));
            let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
            entries.count()
        };
        (0..30).map(look).min()
    };
    let supervisor = run.pid();
    let mut roll = || {
        run.signal(Signal::HUP);
        run.line("rolling restart done");
        get(address, "/").expect("an answer");
    };
    roll();
    let after_one = descriptors(supervisor);
    for _ in 0..3 {
        roll();
        // What belongs to the old worker is closed when it has ended.
        eventually("no more descriptors than after one roll", || {
            descriptors(supervisor) <= after_one
        });
    }
    run.stop();
    assert_nothing_left(&ground);
}

/// Clients that hold a connection each, and reconnect at once when it ends.
struct Held {
    address: SocketAddr,
    connections: Vec<(TcpStream, u8)>,
    returned: usize,
}

impl Held {
    fn open(address: SocketAddr, count: usize) -> Self {
        Self {
            address,
            connections: (0..count).map(|_| connect(address)).collect(),
            returned: 0,
        }
    }

    /// Reconnects closed ones, until `over` is true and no connection is closed.
    fn come_back_until(&mut self, mut over: impl FnMut() -> bool) {
        let start = Instant::now();
        loop {
            let is_over = over();
            assert!(start.elapsed() < long_patience(), "the roll takes for ever");
            let mut fds: Vec<PollFd<'_>> = self
                .connections
                .iter()
                .map(|(stream, _)| PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN))
                .collect();
            let wait = Timespec::try_from(Duration::from_millis(20)).expect("time");
            poll(&mut fds, Some(&wait)).expect("poll");
            let ended: Vec<usize> = (0..fds.len())
                .filter(|at| !fds[*at].revents().is_empty())
                .collect();
            if is_over && ended.is_empty() {
                return;
            }
            for at in ended {
                self.connections[at] = connect(self.address);
                self.returned += 1;
            }
        }
    }

    fn by_slot(&self, slots: usize) -> Vec<usize> {
        let of = |slot: usize| {
            let held = self.connections.iter();
            held.filter(|(_, at)| usize::from(*at) == slot).count()
        };
        (0..slots).map(of).collect()
    }
}

fn connect(address: SocketAddr) -> (TcpStream, u8) {
    let mut stream = TcpStream::connect_timeout(&address, patience()).expect("connect");
    stream.set_read_timeout(Some(patience())).expect("timeout");
    let mut slot = [0];
    stream.read_exact(&mut slot).expect("a slot");
    (stream, slot[0])
}

#[test]
fn held_connections_are_even_after_a_roll() {
    let Some(ground) = isolated() else { return };
    let held_py = server("held.py");
    let mut run = ground.run(&FOUR, &["python3", &held_py, "{fd}"]);
    let address = run.ready();
    let mut held = Held::open(address, 500);
    let pids: Vec<_> = (0..4)
        .map(|slot| worker(&status(&ground, "web"), slot).expect("a worker"))
        .collect();
    run.signal(Signal::HUP);
    held.come_back_until(|| {
        run.lines()
            .iter()
            .any(|line| line.contains("rolling restart done: 4 workers replaced"))
    });
    let shares = held.by_slot(4);
    eprintln!("held by slot: {shares:?}; {} came back", held.returned);
    let most = *shares.iter().max().expect("slots");
    assert!(most * 4 * 10 <= 500 * 11, "max/mean above 1.1: {shares:?}");
    assert!(held.returned >= 500, "every worker was replaced");
    // If old workers ended first, the first worker's connections would go to the others, and return a second time.
    assert!(held.returned < 625, "a quarter came back twice");
    for pid in pids {
        assert!(!runs(pid));
    }
    drop(held);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn refuse_turns_new_connections_away_and_finishes_what_is_there() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&[&ONE[..], &["--refuse"]].concat());
    let address = run.ready();
    let slow = ask(address, "/slow?ms=500").expect("accepted");
    let waiting = TcpStream::connect(address).expect("queued behind it");
    run.signal(Signal::TERM);
    run.line("new connections are refused");
    let refused = || {
        let error = TcpStream::connect_timeout(&address, patience()).err();
        error.is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    };
    assert!(refused(), "at once, while a worker still serves");
    drop(waiting);
    slow.answer().expect("the whole answer");
    let (code, lines) = run.wait();
    assert_eq!(code.code(), Some(0), "{lines:?}");
    assert_nothing_left(&ground);
}

#[test]
fn an_order_that_cannot_be_is_refused() {
    let ground = Ground::new();
    let udp = ["-l", "udp://127.0.0.1:0", "--restart", "start-first"];
    let (code, line) = ground.refused(&udp, &["sleep", "60"]);
    assert!(
        code == 2 && line.contains("--restart start-first cannot be for udp://"),
        "{line}"
    );
    assert!(ground.groups().is_empty());
}
