//! QUIC: connections of real clients to workers by quinn (tests/servers/quinn), under `wakeone run` and `wakeone attach`.
//!
//! These tests need root and `quinn_server`, which `make test-deps` builds. Otherwise they are skipped, with a message.

#[path = "support/quic.rs"]
mod clients;
#[path = "support/mod.rs"]
mod support;

use clients::{ADDRESS, Clients, clients, servers};

use rustix::process::Signal;
use std::net::UdpSocket;
use std::time::Duration;
use support::real::installed;
use support::steered::{assert_nothing_left, isolated, status, stop_all, sum, wakeone, worker};
use support::{Ground, Run, app, eventually, signal, slowly, slowness};

const UDP: &str = "udp://127.0.0.1:4433";
const NAME: &str = "quic";
const WORKERS: usize = 4;
/// A worker that waits for a CPU on a busy machine must not count as stuck: it would get no new connections.
const PATIENT: &str = "60s";

fn ground() -> Option<Ground> {
    if !installed("quinn_server") {
        eprintln!("skipped: quinn_server is not installed");
        return None;
    }
    isolated()
}

fn run(ground: &Ground, options: &[&str], server: &[&str]) -> Run {
    let workers = WORKERS.to_string();
    let own = [
        "-w",
        &workers,
        "-l",
        UDP,
        "--affinity",
        "quic",
        "--name",
        NAME,
    ];
    let mut run = ground.run(&[&own[..], options].concat(), server);
    run.line("ready");
    run
}

/// Has so many clients ask for little.
fn ask(count: usize) -> Clients {
    clients(count, (100, 0), &[])
}

#[test]
fn each_connection_goes_to_the_worker_with_the_fewest() {
    let Some(ground) = ground() else { return };
    let run = run(&ground, &["--stuck-after", PATIENT], &["quinn_server"]);
    let counts = ask(400).all_answered();
    let most = counts.iter().max().copied().unwrap_or(0);
    assert!(counts.len() == WORKERS && most <= 110, "{counts:?}");
    eventually("open connections are shown", || {
        sum(&status(&ground, NAME), "active") == 400
    });
    let group = status(&ground, NAME);
    assert_eq!(group["affinity"], "quic");
    assert_eq!(group["exits"]["stray"], 0, "{group}");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_stopped_worker_keeps_its_connections_and_gets_no_new_ones() {
    let Some(ground) = ground() else { return };
    let run = run(&ground, &[], &["quinn_server"]);
    let downloads = clients(20, (100_000, 3_000), &[]);
    eventually("all are under way", || {
        sum(&status(&ground, NAME), "active") >= 20
    });
    let stopped = worker(&status(&ground, NAME), 0).expect("a worker");
    stop_all(stopped);
    eventually("it is seen", || {
        // Packets of nobody reach each worker by chance, and wait at this one.
        let stray = UdpSocket::bind("127.0.0.1:0").expect("bind");
        stray.send_to(&[0x40; 40], ADDRESS).expect("send");
        status(&ground, NAME)["slots"][0]["state"] == "stuck"
    });
    let outcome = ask(40).done();
    assert!(
        !outcome.answered.contains_key(&stopped.to_string()),
        "{outcome:?}"
    );
    assert!(outcome.failures.is_empty(), "{outcome:?}");
    support::steered::signal_all(stopped, Signal::CONT);
    let counts = downloads.all_answered();
    assert_eq!(counts.len(), WORKERS, "{counts:?}");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_rolling_restart_loses_no_download() {
    let Some(ground) = ground() else { return };
    let run = run(
        &ground,
        &["--stuck-after", PATIENT, "--grace", "60s"],
        &["quinn_server"],
    );
    let before: Vec<_> = (0..WORKERS)
        .map(|slot| worker(&status(&ground, NAME), slot))
        .collect();
    let downloads = clients(60, (500_000, 8_000), &[]);
    slowly("all are under way", || {
        sum(&status(&ground, NAME), "active") >= 60
    });
    run.signal(Signal::HUP);
    slowly("the first is replaced", || {
        worker(&status(&ground, NAME), 0) != before[0]
    });
    // The new worker gets what is new, and the old one goes on.
    let counts = ask(40).all_answered();
    assert_eq!(counts.iter().sum::<usize>(), 40);
    downloads.all_answered();
    // An old one is asked to end when no client was heard of for 30 s.
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn clients_that_change_their_address_themselves_go_on_where_ids_tell_the_worker() {
    let Some(ground) = ground() else { return };
    let options = ["--stuck-after", PATIENT];
    let first = run(&ground, &options, &["quinn_server"]);
    clients(50, (100, 0), &["moves=4"]).all_answered();
    first.stop();
    // As it is without: the server's own generator.
    let without = ["env", "-u", "WAKEONE_QUIC_ID", "quinn_server"];
    let second = run(&ground, &options, &without);
    let outcome = clients(20, (100, 0), &["moves=1"]).done();
    assert!(!outcome.failures.is_empty(), "{outcome:?}");
    second.stop();
    assert_nothing_left(&ground);
}

#[test]
fn clients_whose_port_a_nat_changes_go_on() {
    let Some(ground) = ground() else { return };
    // Its IDs are random.
    let words = ["python3", &app("quic.py"), "serve", "{fd}"];
    let run = run(&ground, &["--stuck-after", PATIENT], &words);
    slowly("it serves", || ask(1).done().failures.is_empty());
    // Each port changes once. (After a second change aioquic's server gives some up, also with one worker.)
    let counts = clients(40, (200_000, 4_000), &["rebind"]).all_answered();
    assert_eq!(counts.len(), WORKERS, "{counts:?}");
    run.stop();
    assert_nothing_left(&ground);
}

/// As quinn's: their IDs carry the worker's number, so that clients that change their address by themselves go on.
#[test]
fn other_servers_tell_their_worker_too() {
    let Some(ground) = ground() else { return };
    for server in ["s2n_server", "go_quic"] {
        if !installed(server) {
            eprintln!("skipped: {server} is not installed");
            continue;
        }
        let run = run(&ground, &["--stuck-after", PATIENT], &[server]);
        slowly("it serves", || ask(1).done().failures.is_empty());
        clients(40, (200_000, 3_000), &["rebind"]).all_answered();
        let counts = clients(40, (100, 0), &["moves=4"]).all_answered();
        assert_eq!(counts.len(), WORKERS, "{server}: {counts:?}");
        run.stop();
        assert_nothing_left(&ground);
    }
}

/// As they are, any of the workers gets any packet.
#[test]
fn programs_that_were_started_with_one_socket_get_one_each() {
    let Some(ground) = ground() else { return };
    let (each, own, workers) = (app("each.py"), app("quic.py"), WORKERS.to_string());
    let (host, port) = ADDRESS.split_once(':').expect("an address");
    let share = ["python3", &each, host, port, &workers, "udp-shared"];
    let words = [&share[..], &["python3", &own, "serve", "{fd}"]].concat();
    let options = ["--split", "--affinity", "quic", "--stuck-after", PATIENT];
    let mut run = ground.run(&options, &words);
    run.line("is split");
    slowly("each has its own", || {
        let group = status(&ground, "at-udp-127-0-0-1-4433");
        let slots = group["slots"].as_array();
        slots
            .is_some_and(|slots| slots.iter().filter(|one| one["state"] == "up").count() == WORKERS)
    });
    let counts = ask(40).all_answered();
    assert!(
        counts.len() == WORKERS && counts.iter().max() <= Some(&12),
        "{counts:?}"
    );
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_server_that_runs_is_attached_to() {
    let Some(ground) = ground() else { return };
    let server = servers("udp");
    slowly("it serves", || ask(1).done().failures.is_empty());
    let before = clients(8, (100_000, 4_000), &[]);
    std::thread::sleep(Duration::from_millis(500) * slowness());
    let options = ["--affinity", "quic", "--stuck-after", PATIENT];
    let attached = wakeone(&ground, &[&["attach", UDP][..], &options].concat());
    assert!(attached.status.success(), "{attached:?}");
    let counts = ask(200).all_answered();
    let most = counts.iter().max().copied().unwrap_or(0);
    assert!(counts.len() == WORKERS && most <= 60, "{counts:?}");
    // Those of before stay where they are.
    before.all_answered();
    let detached = wakeone(&ground, &["detach", UDP]);
    assert!(detached.status.success(), "{detached:?}");
    drop(server);
    assert_nothing_left(&ground);
}

/// A worker that dies takes its connections with it, and nobody else's.
#[test]
fn a_worker_that_dies_takes_no_other_connections_with_it() {
    let Some(ground) = ground() else { return };
    let run = run(&ground, &["--stuck-after", PATIENT], &["quinn_server"]);
    let downloads = clients(40, (100_000, 3_000), &[]);
    eventually("all are under way", || {
        sum(&status(&ground, NAME), "active") >= 40
    });
    let dead = worker(&status(&ground, NAME), 1).expect("a worker");
    signal(dead, Signal::KILL);
    slowly("it is started again", || {
        worker(&status(&ground, NAME), 1).is_some_and(|pid| pid != dead)
    });
    let outcome = downloads.done();
    let lost = outcome.failures.len();
    assert_eq!(lost, 10, "{outcome:?}");
    let counts = ask(40).all_answered();
    assert_eq!(counts.len(), WORKERS, "{counts:?}");
    run.stop();
    assert_nothing_left(&ground);
}
