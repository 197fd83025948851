//! Servers whose listeners have TCP_DEFER_ACCEPT, as Apache's, bun's, pgbouncer's and nginx's `deferred`: the kernel holds
//! connections back until their first data comes, and they are in no count.

#[path = "support/mod.rs"]
mod support;

use serde_json::Value;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;
use support::real::{Started, program};
use support::steered::{isolated, number, status, wakeone};
use support::{WAKEONE, eventually, get, server};
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

const AT: &str = "127.0.0.1:8080";

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

fn four_workers() -> Started {
    let server = Started::spawn(program(&["python3", &server("deferred.py"), "8080", "4"]));
    support::slowly("four listen", || {
        sockets(Protocol::Tcp, Which::Listening, 8080).is_ok_and(|all| all.len() == 4)
    });
    // The option is set after the socket listens.
    std::thread::sleep(Duration::from_millis(300));
    server
}

fn silent() -> Vec<TcpStream> {
    let connect = |_| TcpStream::connect(address()).expect("connect");
    (0..64).map(connect).collect()
}

fn chosen(group: &Value) -> Vec<i64> {
    let slots = group["slots"].as_array().expect("slots").len();
    let of = |slot| number(group, slot, "selected");
    (0..slots).map(of).collect()
}

/// Each worker has as many of those that are kept silent, whatever was before.
#[test]
fn silent_connections_are_spread_evenly() {
    let Some(ground) = isolated() else { return };
    let server = four_workers();
    let attached = wakeone(&ground, &["attach", AT]);
    assert!(attached.status.success(), "{attached:?}");
    let group = || status(&ground, "at-127-0-0-1-8080");
    for answered in [0, 7] {
        for _ in 0..answered {
            get(address(), "/").expect("an answer");
        }
        eventually("nothing is open", || {
            (0..4).all(|slot| number(&group(), slot, "active") == 0)
        });
        let before = chosen(&group());
        let kept = silent();
        let after = chosen(&group());
        let each: Vec<i64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
        assert!(each.iter().all(|n| (15..=17).contains(n)), "{each:?}");
        assert_eq!(each.iter().sum::<i64>(), 64);
        drop(kept);
    }
    drop(server);
}

/// Workers that are given a listener set the option themselves.
#[test]
fn so_they_are_where_a_worker_sets_the_option() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "4", "-l", AT, "--name", "web"];
    let mut run = ground.run(&options, &["python3", &server("deferred.py"), "{fd}"]);
    run.ready();
    let _kept = silent();
    let each = chosen(&status(&ground, "web"));
    assert!(each.iter().all(|n| (15..=17).contains(n)), "{each:?}");
    run.stop();
}

/// The kernel counts the ACKs that it holds back as drops of the socket. No connection is dropped.
#[test]
fn what_is_held_back_is_not_called_dropped() {
    let Some(_ground) = isolated() else { return };
    let _server = four_workers();
    let doctor = std::thread::scope(|scope| {
        let doctor = scope.spawn(|| {
            let mut doctor = Command::new(WAKEONE);
            doctor.args(["doctor", ":8080", "--for", "2s", "--json"]);
            doctor.output().expect("doctor")
        });
        std::thread::sleep(Duration::from_secs(1));
        let _kept = silent();
        doctor.join().expect("doctor")
    });
    let listening = sockets(Protocol::Tcp, Which::Listening, 8080).expect("sock_diag");
    let drops: u32 = listening.iter().map(|entry| entry.socket.drops).sum();
    assert!(drops >= 64, "the kernel counts {drops}");
    let report: Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    let report = &report["listeners"][0];
    assert_eq!(report["totals"]["dropped"], 0, "{report:#}");
    assert_eq!(report["healthy"], true, "{report:#}");
}
