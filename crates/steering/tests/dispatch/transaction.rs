//! Loading is a transaction, steering outlives its loader, and the next loader takes over what it finds.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use wakeone_bpf::table;
use wakeone_bpf::{self as bpf, Feature, LoadPlan, Pinned};
use wakeone_control::policy::Policy;
use wakeone_steering::agent::{Agent, AgentConfig, Rounds};
use wakeone_steering::dispatcher::{Plan, sweep_halves};

use crate::ground::*;

#[test]
fn a_start_that_fails_leaves_nothing() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let nowhere = ground.cgroup.join("nowhere");
    let plan = Plan {
        cgroup: Some(&nowhere),
        by_name: true,
        ..ground.plan(Policy::LeastConnections)
    };
    let said = ground
        .try_start(&plan)
        .expect_err("no such cgroup")
        .to_string();
    assert!(said.contains("cannot steer `tested`"), "{said}");
    assert!(said.contains("nowhere"), "{said}");
    assert!(!said.contains('\n'), "{said}");
    assert!(!ground.paths.pins.exists());
    // A folder that is no cgroup is refused in the last step, when almost everything is pinned.
    let plan = Plan {
        cgroup: Some(Path::new("/proc")),
        ..plan
    };
    let said = ground.try_start(&plan).expect_err("no cgroup").to_string();
    assert!(said.contains("attaching the counting program"), "{said}");
    assert!(!ground.paths.pins.exists());
    wakeone_kernel::cgroup::remove(&ground.cgroup).expect("remove");
    ground.nothing_left();
    // Nothing stays attached either.
    let clients = connect_many(V4, 10);
    wait("all wait", || ground.queues().iter().sum::<u32>() == 10);
    drop(clients);
}

#[test]
fn without_counts_the_rest_is_there() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let plan = Plan {
        cgroup: Some(Path::new("/proc")),
        ..ground.plan(Policy::LeastConnections)
    };
    let dispatcher = ground.try_start(&plan).expect("dispatcher");
    assert!(!dispatcher.counting());
    assert_eq!(dispatcher.policy(), Policy::ShortestQueue);
    let missing: Vec<Feature> = dispatcher.missing().iter().map(|one| one.feature).collect();
    assert_eq!(
        missing
            .iter()
            .filter(|one| **one == Feature::Counting)
            .count(),
        1,
        "{missing:?}"
    );
    assert_eq!(
        dispatcher.pinned().walks(),
        !missing.contains(&Feature::ReadQueues)
    );
    assert!(!ground.pins().join("count").exists());
    let clients = connect_many(V4, 10);
    wait("all wait", || ground.queues().iter().sum::<u32>() == 10);
    assert_eq!(exits(dispatcher.table()), [("selected", 10)]);
    drop(clients);
    ground.end(dispatcher);
}

/// Makes sockets that are bound and do not listen.
fn bound(slots: usize) -> Option<Ground> {
    Ground::new(|| (0..slots).map(|_| bind(V4)).collect())
}

#[test]
fn what_listens_later_is_steered_and_counted_from_the_first_connection_on() {
    let Some(ground) = bound(4) else {
        return;
    };
    let dispatcher = ground.start(Policy::RoundRobin);
    let table = dispatcher.table();
    let flags = |slot| table.slot(slot).flags().load(Relaxed);
    assert_eq!([0, 1, 2, 3].map(flags), [0; 4]);
    TcpStream::connect(V4).expect_err("nobody listens");
    let mut clients = Vec::new();
    for (slot, listener) in ground.listeners.iter().enumerate() {
        rustix::net::listen(listener, BACKLOG).expect("listen");
        dispatcher.raise(slot).expect("raise");
        // Each listener joins the first one's group, and its program.
        clients.extend(connect_many(V4, 2 * (slot + 1)));
    }
    wait_for_established(table, 20);
    assert_eq!(exits(table), [("selected", 20)]);
    assert!(actives(table).iter().all(|active| *active > 0));
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn a_connection_before_its_slot_is_raised_is_counted() {
    let Some(ground) = bound(2) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    for listener in &ground.listeners {
        rustix::net::listen(listener, BACKLOG).expect("listen");
    }
    let clients = connect_many(V4, 10);
    wait_for_established(table, 10);
    assert_eq!(exits(table), [("no_slot", 10)], "the kernel's hash chose");
    (0..2).for_each(|slot| dispatcher.raise(slot).expect("raise"));
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn mptcp_listeners_are_refused_by_name() {
    let mptcp = Some(rustix::net::ipproto::MPTCP);
    let Some(mut ground) = Ground::new(Vec::new) else {
        return;
    };
    match listen_by(V4, BACKLOG, mptcp) {
        Ok(listener) => ground.listeners.push(listener),
        Err(error) => {
            println!("skipped: no MPTCP here: {error}");
            return;
        }
    }
    let plan = ground.plan(Policy::LeastConnections);
    let said = ground.try_start(&plan).expect_err("MPTCP").to_string();
    assert!(said.contains("MPTCP"), "{said}");
    wakeone_kernel::cgroup::remove(&ground.cgroup).expect("remove");
    ground.nothing_left();
}

/// Tells the test below, run once more as a process of its own, where to load.
const LOAD_INTO: &str = "WAKEONE_TEST_LOAD_INTO";

#[test]
fn killed_while_loading_leaves_halves_that_are_swept() {
    if let Some(pins) = std::env::var_os(LOAD_INTO) {
        return load_for_ever(Path::new(&pins));
    }
    let Some(ground) = ground(2, V4) else {
        return;
    };
    ground.paths.prepare().expect("bpffs");
    let pins = &ground.paths.pins;
    let mut halves = 0;
    for round in 0..12_u32 {
        let pid = load_and_kill(pins, Duration::from_millis(u64::from(round) * 7));
        for name in names(pins) {
            if name.starts_with(bpf::TEMPORARY) {
                assert!(
                    name.starts_with(&format!("{}{pid}-", bpf::TEMPORARY)),
                    "{name}"
                );
                halves += 1;
            } else {
                let whole = Pinned::open(&pins.join(&name)).expect("whole");
                assert_eq!(whole.addresses(), 2, "{name}");
            }
        }
        sweep_halves(pins);
        assert!(
            names(pins)
                .iter()
                .all(|name| !name.starts_with(bpf::TEMPORARY))
        );
    }
    assert!(halves > 0, "no load was ever met in its middle");
    for name in names(pins) {
        bpf::remove_pins(&pins.join(name)).expect("remove");
    }
    let dispatcher = ground.start(Policy::LeastConnections);
    ground.end(dispatcher);
}

fn load_for_ever(pins: &Path) {
    for number in 0.. {
        let dir = pins.join(format!("{}-{number}", std::process::id()));
        let plan = LoadPlan {
            dir: &dir,
            addresses: 2,
            cgroup: None,
            read_queues: true,
            datagrams: false,
            quic: false,
            lookup: &[],
            joins: &[],
        };
        drop(bpf::load(&plan).expect("load"));
    }
}

/// Starts a process that loads, and kills it after that time of loading. Returns its pid.
fn load_and_kill(pins: &Path, after: Duration) -> u32 {
    let test = "transaction::killed_while_loading_leaves_halves_that_are_swept";
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", test])
        .env(LOAD_INTO, pins)
        .stdout(Stdio::null())
        .spawn()
        .expect("loader");
    wait("the load begins", || {
        names(pins)
            .iter()
            .any(|name| name.starts_with(bpf::TEMPORARY))
    });
    std::thread::sleep(after);
    child.kill().expect("kill");
    child.wait().expect("wait");
    child.id()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("pins").flatten();
    let names = entries.map(|entry| entry.file_name().into_string().expect("UTF-8"));
    names.collect()
}

#[test]
fn halves_of_a_living_loader_are_left_alone() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    ground.paths.prepare().expect("bpffs");
    let alive = ground
        .paths
        .pins
        .join(format!("tmp-{}-other", std::process::id()));
    // The number is larger than any pid (PID_MAX_LIMIT is 2^22).
    let dead = ground.paths.pins.join("tmp-99999999-other");
    for dir in [&alive, &dead] {
        let plan = LoadPlan {
            dir,
            addresses: 1,
            cgroup: None,
            read_queues: true,
            datagrams: false,
            quic: false,
            lookup: &[],
            joins: &[],
        };
        bpf::load(&plan).expect("load");
    }
    // Every start sweeps half-made groups.
    let dispatcher = ground.start(Policy::LeastConnections);
    assert!(alive.exists());
    assert!(!dead.exists());
    bpf::remove_pins(&alive).expect("remove");
    ground.end(dispatcher);
}

#[test]
fn steering_and_counts_outlive_dispatcher_and_agent() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let duties = AgentConfig {
        rescue: true,
        stuck_after: Duration::from_millis(5),
    };
    let agent = Agent::start(
        dispatcher,
        duties,
        ground.paths.clone(),
        None,
        &Rounds::new(),
    );
    let mut clients = connect_many(V4, 20);
    let pinned = ground.pinned();
    wait_for_actives(pinned.table(), &[5; 4]);
    // As after kill -9: no group is ended.
    drop(agent);
    clients.extend(connect_many(V4, 20));
    wait_for_actives(pinned.table(), &[10; 4]);
    assert_eq!(exits(pinned.table()), [("selected", 40)]);
    drop(ground.accept(1));
    wait_for_actives(pinned.table(), &[10, 0, 10, 10]);
    let plan = Plan {
        adopt: true,
        ..ground.plan(Policy::LeastConnections)
    };
    let successor = ground.try_start(&plan).expect("dispatcher");
    assert!(successor.kept());
    assert_eq!(actives(successor.table()), [10, 0, 10, 10]);
    clients.extend(connect_many(V4, 10));
    wait_for_actives(successor.table(), &[10; 4]);
    assert_eq!(exits(successor.table()), [("selected", 50)]);
    drop((clients, pinned));
    ground.settle();
    ground.end(successor);
}

/// Starts a live group again although its pins do not fit: nothing of the old one is left, and no connection is lost.
fn replaced(spoil: impl FnOnce(&Ground), adopt: bool) {
    let Some(ground) = ground(3, V4) else {
        return;
    };
    drop(ground.start(Policy::LeastConnections));
    let old = connect_many(V4, 6);
    wait_for_actives(ground.pinned().table(), &[2; 3]);
    drop(ground.accept_all());
    spoil(&ground);
    let plan = Plan {
        adopt,
        ..ground.plan(Policy::LeastConnections)
    };
    let successor = ground.try_start(&plan).expect("dispatcher");
    assert!(!successor.kept());
    assert_eq!(successor.table().contract().load(Relaxed), table::CONTRACT);
    assert_eq!(exits(successor.table()), []);
    let clients = connect_many(V4, 30);
    wait_for_actives(successor.table(), &[10; 3]);
    assert_eq!(exits(successor.table()), [("selected", 30)]);
    drop((old, clients));
    ground.settle();
    ground.end(successor);
}

#[test]
fn a_table_of_another_contract_is_replaced() {
    let other = |ground: &Ground| {
        let pinned = ground.pinned();
        pinned
            .table()
            .contract()
            .store(table::CONTRACT + 1, Relaxed);
    };
    replaced(other, true);
}

#[test]
fn a_group_of_another_size_is_replaced() {
    replaced(
        |ground| ground.pinned().table().slots().store(2, Relaxed),
        true,
    );
}

#[test]
fn a_group_with_a_pin_missing_is_replaced() {
    let spoil = |ground: &Ground| {
        std::fs::remove_file(ground.pins().join("moved")).expect("remove");
    };
    replaced(spoil, true);
}

#[test]
fn a_group_that_nobody_wants_to_adopt_is_replaced() {
    replaced(|_| {}, false);
}

#[test]
fn after_the_end_the_kernel_chooses() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    dispatcher
        .table()
        .slot(0)
        .mark(wakeone_bpf::table::flag::DRAINING, true);
    let clients = connect_many(V4, 10);
    wait_for_actives(dispatcher.table(), &[0, 10]);
    dispatcher.end(&ground.paths, Some(&ground.cgroup));
    ground.nothing_left();
    let more = connect_many(V4, 64);
    wait("all wait", || ground.queues().iter().sum::<u32>() == 74);
    // By hash: 64 connections all miss slot 0 once in 2^64 times.
    assert!(ground.queues()[0] > 0);
    drop((clients, more));
}
