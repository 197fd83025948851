//! `wakeone run -w N --queue one`: workers of ours that share one queue. Nobody needs a privilege for it, and no connection
//! is lost when a worker dies, is replaced, or the supervisor is killed.

#[path = "support/mod.rs"]
mod support;

use std::cell::Cell;
use std::collections::{BTreeSet, HashSet};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use support::kept::{Kept, entries_of, keep, keep_by};
use support::split::{as_nobody, for_another_user};
use support::steered::{assert_nothing_left, isolated, status, worker};
use support::{
    Clients, Ground, LAB, Run, eventually, get, pid_of, runs, server, signal, slowly, whoami,
};
use wakeone_kernel::proc::process::descriptor_of;
use wakeone_kernel::socket::inode_of;

const AT: &str = "127.0.0.1:7480";
const GROUP: &str = "127_0_0_1-7480";
const ONE: [&str; 6] = ["-w", "4", "-l", AT, "--queue", "one"];
const SIX: &str = "[::1]:7481";
const BOTH: [&str; 8] = ["-w", "4", "-l", AT, "-l", SIX, "--queue", "one"];

fn event_loops() -> [String; 2] {
    ["python3".to_owned(), server("asyncio_server.py")]
}

fn start(ground: &Ground, options: &[&str]) -> Run {
    let command = event_loops();
    ground.run(options, &[&command[0], &command[1]])
}

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

fn both() -> [SocketAddr; 2] {
    [AT, SIX].map(|at| at.parse().expect("address"))
}

fn slots(group: &Value) -> Vec<u32> {
    (0..4).filter_map(|slot| worker(group, slot)).collect()
}

#[test]
fn all_workers_have_the_same_listener_and_kept_connections_are_spread_evenly() {
    let script = server("asyncio_server.py");
    let loops = ["python3", &script];
    let reference = [LAB, "serve", "--model", "epoll", "-w", "1"];
    for command in [&loops[..], &reference] {
        let Some(ground) = isolated() else { return };
        let mut run = ground.run(&ONE, command);
        run.line("one queue, policy least-connections");
        run.ready();
        let group = status(&ground, GROUP);
        let listener = |pid: &u32| descriptor_of(*pid, 3).expect("a listener");
        let inode = |pid: &u32| inode_of(listener(pid)).expect("inode");
        let inodes: HashSet<u64> = slots(&group).iter().map(inode).collect();
        assert_eq!(inodes.len(), 1, "{group}");
        let (kept, counts) = keep(address(), 64, Duration::from_millis(8));
        assert!(counts.len() == 4 && counts[0] <= 24, "{counts:?}");
        let active = |group: Value| support::steered::sum(&group, "active");
        eventually("all are counted", || active(status(&ground, GROUP)) == 64);
        drop(kept);
        let lines = run.stop();
        // One that is disarmed before it was seen to wait would not be ready for long.
        assert!(
            !lines.iter().any(|line| line.contains("never seen")),
            "{lines:#?}"
        );
        assert_nothing_left(&ground);
    }
}

#[test]
fn a_rolling_restart_and_dead_workers_lose_nothing() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &ONE);
    run.ready();
    let before = slots(&status(&ground, GROUP));
    let clients = Clients::start(address(), "/", 4);
    run.signal(Signal::HUP);
    run.line("rolling restart done");
    let after = slots(&status(&ground, GROUP));
    assert!(before.iter().all(|pid| !runs(*pid) && !after.contains(pid)));
    // A worker that has accepted nothing loses nothing.
    let (kept, _) = keep(address(), 8, Duration::ZERO);
    drop(kept);
    clients.lost_nothing();
    let victim = after[1];
    signal(victim, Signal::KILL);
    slowly("another one serves", || {
        let group = status(&ground, GROUP);
        // The listener, and what wakes asyncio itself.
        worker(&group, 1).is_some_and(|pid| pid != victim && entries_of(pid).len() >= 2)
    });
    let (_kept, counts) = keep(address(), 40, Duration::from_millis(20));
    assert!(counts.len() == 4 && counts[0] <= 18, "{counts:?}");
    run.stop();
    assert_nothing_left(&ground);
}

/// What contrib/wakeone-one@.service does.
#[test]
fn the_only_worker_is_replaced_and_nothing_is_lost() {
    let Some(ground) = isolated() else { return };
    let script = server("whoami.py");
    let one = ["-w", "1", "-l", AT, "--queue", "one"];
    let mut run = ground.run(&one, &["python3", &script]);
    run.ready();
    let clients = Clients::start(address(), "/", 2);
    let mut seen = HashSet::from([pid_of(&whoami(address()))]);
    for round in 0..3 {
        run.signal(Signal::HUP);
        run.line("rolling restart done: 1 worker replaced");
        seen.insert(pid_of(&whoami(address())));
        assert_eq!(seen.len(), round + 2);
    }
    let (answers, failures) = clients.stop();
    assert_eq!(failures, Vec::<String>::new(), "of {answers}");
    run.stop();
    assert_nothing_left(&ground);
}

/// Opens connections by both addresses in turn, and checks that no worker has many more than its share.
fn assert_even_by_both() {
    let turn = Cell::new(0);
    let (_kept, counts) = keep_by(64, Duration::from_millis(8), || {
        Kept::open(both()[turn.replace(1 - turn.get())])
    });
    assert!(counts.len() == 4 && counts[0] <= 24, "{counts:?}");
}

#[test]
fn a_worker_with_many_connections_by_one_address_gets_few_by_another() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &BOTH);
    run.line("[::1]:7481: one queue, policy least-connections");
    run.ready();
    assert_even_by_both();
    let active = || support::steered::sum(&status(&ground, GROUP), "active");
    eventually("all are closed", || active() == 0);
    let (mut kept, counts) = keep(address(), 32, Duration::from_millis(8));
    assert!(counts.len() == 4 && counts[0] <= 12, "{counts:?}");
    let has = |worker: &String| kept.iter().filter(|one| one.worker == *worker).count();
    let all: BTreeSet<String> = kept.iter().map(|one| one.worker.clone()).collect();
    let mut all: Vec<String> = all.into_iter().collect();
    all.sort_by_key(has);
    let free: Vec<String> = all.into_iter().take(2).collect();
    kept.retain(|one| !free.contains(&one.worker));
    let left = kept.len() as i64;
    assert!(free.len() == 2 && left >= 12, "{counts:?}");
    eventually("the others are closed", || active() == left);
    let other = both()[1];
    let (others, _) = keep_by(16, Duration::from_millis(8), || Kept::open(other));
    let to_free = |one: &&Kept| free.contains(&one.worker);
    // Without the sum it would be 8.
    let got = others.iter().filter(to_free).count();
    assert!(got >= 11, "{got} of 16");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn with_several_addresses_a_rolling_restart_and_whoever_takes_over_lose_nothing() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &BOTH);
    run.ready();
    let clients = both().map(|at| Clients::start(at, "/", 2));
    run.signal(Signal::HUP);
    run.line("rolling restart done");
    let before = slots(&status(&ground, GROUP));
    run.murder();
    let mut run = start(&ground, &["-w", "4", "-l", AT, "-l", SIX]);
    run.ready();
    for clients in clients {
        clients.lost_nothing();
    }
    assert_eq!(slots(&status(&ground, GROUP)), before);
    assert_even_by_both();
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn the_queues_of_several_addresses_are_shown_as_one() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &BOTH);
    run.ready();
    let group = status(&ground, GROUP);
    assert_eq!(group["listen"], serde_json::json!([AT, SIX]), "{group}");
    slots(&group).iter().for_each(|pid| support::halt(*pid));
    let [four, six] = both();
    let waiting = [four, six, six].map(|at| TcpStream::connect(at).expect("waits"));
    slowly("all are counted", || status(&ground, GROUP)["queued"] == 3);
    // asyncio listens with a backlog of 100.
    assert_eq!(status(&ground, GROUP)["queue_limit"], 200);
    drop(waiting);
    slots(&group)
        .iter()
        .for_each(|pid| signal(*pid, Signal::CONT));
    run.stop();
}

#[test]
fn what_waits_while_every_worker_is_dead_is_served_by_the_next_ones() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &ONE);
    run.ready();
    let workers = slots(&status(&ground, GROUP));
    workers.iter().for_each(|pid| support::halt(*pid));
    let waits = std::thread::spawn(|| get(address(), "/"));
    let queued = || status(&ground, GROUP)["queued"].as_u64();
    slowly("it waits", || queued() == Some(1));
    workers.iter().for_each(|pid| signal(*pid, Signal::KILL));
    let answer = waits.join().expect("thread").expect("an answer");
    let by = serde_json::from_str::<Value>(&answer).expect("JSON");
    assert!(!workers.contains(&pid_of(&by)));
    run.stop();
}

#[test]
fn whoever_takes_over_has_the_same_queue() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &ONE);
    run.ready();
    let before = slots(&status(&ground, GROUP));
    run.murder();
    let command = event_loops();
    let command = [command[0].as_str(), &command[1]];
    let (code, line) = ground.refused(&["-w", "4", "-l", AT, "--queue", "each"], &command);
    assert!(
        code == 1 && line.contains("start with --queue one"),
        "{line}"
    );
    // Without --queue it is theirs.
    let mut run = start(&ground, &["-w", "4", "-l", AT]);
    run.ready();
    assert_eq!(slots(&status(&ground, GROUP)), before);
    let (_kept, counts) = keep(address(), 64, Duration::from_millis(8));
    assert!(counts.len() == 4 && counts[0] <= 24, "{counts:?}");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_listener_that_one_worker_shuts_down_listens_again() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &BOTH);
    run.ready();
    for worker in slots(&status(&ground, GROUP)) {
        signal(worker, Signal::USR1);
        slowly("both listen again", || {
            both().iter().all(|at| get(*at, "/").is_ok())
        });
    }
    run.line("it listens again");
    run.stop();
}

/// select(2) does not wait in epoll, and nothing can be chosen. It is served all the same, and restarted without a loss.
#[test]
fn workers_that_cannot_be_steered_are_served_as_the_kernel_does_it() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&ONE);
    run.ready();
    whoami(address());
    let clients = Clients::start(address(), "/", 2);
    run.signal(Signal::HUP);
    run.line("rolling restart done");
    clients.lost_nothing();
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_user_without_any_capability_gets_one_queue_that_is_steered_and_restarted() {
    let Some((folder, binary, runtime)) = for_another_user("asyncio_server.py") else {
        return;
    };
    let Some(mut command) = as_nobody(false) else {
        return;
    };
    let script = folder.path().join("asyncio_server.py");
    command
        .arg(binary)
        .args(["run", "-w", "4", "-l", AT, "--runtime-dir"])
        .arg(runtime)
        .args(["--", "python3"])
        .arg(script);
    let mut run = Run::start(command);
    run.line("one queue");
    run.ready();
    let (kept, counts) = keep(address(), 64, Duration::from_millis(8));
    assert!(counts.len() == 4 && counts[0] <= 24, "{counts:?}");
    drop(kept);
    let clients = Clients::start(address(), "/", 2);
    run.signal(Signal::HUP);
    run.line("rolling restart done");
    let (_, failures) = clients.stop();
    assert_eq!(failures, Vec::<String>::new());
    run.stop();
}

#[test]
fn what_does_not_go_with_one_queue_is_refused() {
    let ground = Ground::new();
    for (options, why) in [
        (
            &["-l", "udp://127.0.0.1:0"][..],
            "every -l is a udp:// address",
        ),
        (
            &["-l", AT, "-l", SIX, "-w", "129"],
            "129 workers that wait for 2 listeners each are more than",
        ),
        (
            &["-l", AT, "--policy", "hash"],
            "hash is not for workers that share one queue",
        ),
        (&["-l", AT, "--rescue"], "--rescue needs"),
        (&["-l", AT, "--refuse"], "--refuse needs"),
    ] {
        let options = [&["--queue", "one"][..], options].concat();
        let (code, line) = ground.refused(&options, &["true"]);
        assert!(code == 2 && line.contains(why), "{code}: {line}");
    }
    assert!(ground.groups().is_empty());
}
