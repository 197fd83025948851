//! A worker is stopped (SIGSTOP) with connections in its queue. Others answer them all, and it serves again afterwards.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use support::steered::{
    PREFORKED, assert_counts_are_exact, assert_nothing_left, isolated, number, signal_all, soak,
    status, worker,
};
use support::{Ground, eventually, patience};
use wakeone_kernel::proc::process::state;

const CLIENTS: usize = 50;

/// Connects and asks, without waiting for the answer.
fn knock(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect_timeout(&address, patience()).expect("connects");
    stream.set_read_timeout(Some(patience())).expect("timeout");
    stream
        .write_all(
            b"GET /work?us=100&kind=sleep HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n",
        )
        .expect("asks");
    stream
}

/// Returns the slot of the worker that answered.
fn answer(mut stream: TcpStream) -> std::io::Result<String> {
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let head = answer
        .split_once("\r\n\r\n")
        .map(|(head, _)| head)
        .filter(|head| head.starts_with("HTTP/1.1 200"));
    let worker = head.and_then(|head| {
        head.lines()
            .find_map(|line| line.strip_prefix("X-Worker: "))
    });
    worker
        .map(str::to_owned)
        .ok_or_else(|| std::io::Error::other(format!("no whole answer: {answer:?}")))
}

/// Stops worker 0, lets 50 clients queue at it, waits for their answers, and continues it. Returns how many of them
/// were put into its queue, and how long it took until the last was answered.
///
/// Its weight is so large that it is chosen for all of them, as long as it does not count as stuck.
fn stop_with_a_queue(ground: &Ground, stuck_after: &str, quiet: Duration) -> (i64, Duration) {
    let options = [
        "-w",
        "4",
        "-l",
        "127.0.0.1:8080",
        "--name",
        "web",
        "--weight",
        "0=60000",
        "--stuck-after",
        stuck_after,
    ];
    let mut run = ground.run(&options, &PREFORKED);
    let address = run.ready();
    let stopped = worker(&status(ground, "web"), 0).expect("worker 0");
    std::thread::sleep(quiet);
    signal_all(stopped, Signal::STOP);
    // Until it has stopped it may still accept a connection, which no other worker could answer.
    eventually("it has stopped", || state(stopped) == Some('T'));
    let begun = Instant::now();
    let clients: Vec<TcpStream> = (0..CLIENTS).map(|_| knock(address)).collect();
    for client in clients {
        let by = answer(client).expect("answered, not reset");
        assert_ne!(by, "0", "it is stopped");
    }
    let took = begun.elapsed();
    let group = status(ground, "web");
    let queued = number(&group, 0, "selected");
    // All of them left its queue again, and also those moved there from a busy worker's queue: it answered none.
    let came = queued + number(&group, 0, "migrated_in");
    assert_eq!(number(&group, 0, "migrated_out"), came, "{group}");
    assert!(number(&group, 0, "rescues") > 0, "{group}");
    assert_eq!(group["slots"][0]["state"], "stuck", "{group}");

    signal_all(stopped, Signal::CONT);
    let mut more = 0;
    eventually("it serves again", || {
        more += 1;
        answer(knock(address)).expect("answered") == "0"
    });
    assert_counts_are_exact(ground, "web", CLIENTS as u64 + more);
    run.stop();
    (queued, took)
}

#[test]
fn all_that_wait_for_a_stopped_worker_are_answered_by_others() {
    let Some(ground) = isolated() else { return };
    // Even on a busy machine all 50 are in its queue when it is judged.
    let (queued, took) = stop_with_a_queue(&ground, "2s", Duration::ZERO);
    eprintln!(
        "stuck after 2 s: {queued} queued at the stopped worker, all answered after {took:?}"
    );
    assert_eq!(queued, CLIENTS as i64);
    assert_nothing_left(&ground);
}

#[test]
fn with_the_default_patience_they_hardly_wait() {
    let Some(ground) = isolated() else { return };
    let (queued, took) = stop_with_a_queue(&ground, "5ms", Duration::ZERO);
    eprintln!(
        "stuck after 5 ms: {queued} queued at the stopped worker, all answered after {took:?}"
    );
    assert!(queued > 0);
    if soak() {
        assert!(took <= Duration::from_millis(100), "{took:?}");
    }
    assert_nothing_left(&ground);
}

/// The agent's thread of a process.
fn agent_of(pid: u32) -> std::path::PathBuf {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let is_agent = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "agent")
    };
    let mut paths = threads.flatten().map(|thread| thread.path());
    paths.find(is_agent).expect("an agent")
}

/// How often a thread went to sleep so far.
fn sleeps(thread: &std::path::Path) -> u64 {
    let status = std::fs::read_to_string(thread.join("status")).expect("status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.expect("switches").trim().parse().expect("a number")
}

/// The agent sleeps until a connection comes, and wakes up at once.
#[test]
fn an_agent_of_a_quiet_group_sleeps_and_is_there_at_once() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(
        &["-w", "2", "-l", "127.0.0.1:8080", "--name", "web"],
        &PREFORKED,
    );
    let address = run.ready();
    let supervisor = status(&ground, "web")["supervisor_pid"]
        .as_u64()
        .expect("it");
    let agent = agent_of(supervisor as u32);
    // A hundred looks a second would be three hundred sleeps.
    eventually("it sleeps", || {
        let before = sleeps(&agent);
        std::thread::sleep(Duration::from_secs(3));
        sleeps(&agent) - before < 60
    });
    // It is woken by the connection, and looks many times a second while that is open.
    let before = sleeps(&agent);
    let held = TcpStream::connect(address).expect("connects");
    std::thread::sleep(Duration::from_millis(500));
    assert!(sleeps(&agent) - before > 20);
    drop(held);
    run.stop();
    // It rescues as it does in a group that is never quiet.
    let (queued, took) = stop_with_a_queue(&ground, "5ms", Duration::from_secs(3));
    eprintln!("after 3 s of nothing: {queued} queued, all answered after {took:?}");
    assert!(queued > 0);
    if soak() {
        assert!(took <= Duration::from_millis(100), "{took:?}");
    }
    assert_nothing_left(&ground);
}
