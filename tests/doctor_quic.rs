//! `wakeone doctor` knows QUIC by its packets, and says where they reach the wrong workers. `top` and `metrics` show the connections
//! of a group that is steered by their IDs.
//!
//! These tests need root, and most `quinn_server`, which `make test-deps` builds. Otherwise they are skipped, with a message.

#[path = "support/quic.rs"]
mod clients;
#[path = "support/mod.rs"]
mod support;

use clients::{ADDRESS, clients, servers};

use serde_json::Value;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use support::real::{Started, installed, program};
use support::steered::{isolated, said, status, sum, wakeone};
use support::{Ground, WAKEONE, eventually, server, slowly, slowness};
use wakeone_kernel::socket::{self, ClassicChoice};

const UDP: &str = "udp://127.0.0.1:4433";
const WORKERS: usize = 4;

fn ground() -> Option<Ground> {
    if !installed("quinn_server") {
        eprintln!("skipped: quinn_server is not installed");
        return None;
    }
    isolated()
}

/// Clients that connect again and again, whether or not they get an answer, until this is dropped.
fn clients_without_end() -> Started {
    let again = format!("while :; do timeout 1 quinn_client {ADDRESS} 5; done");
    Started::spawn(program(&["sh", "-c", &again]))
}

/// The report on the address, with the exit code.
fn doctor(ground: &Ground, before: &[&str]) -> (Option<i32>, Value) {
    let time = format!("{}s", 3 * slowness());
    let words = [
        before,
        &[
            WAKEONE,
            "doctor",
            UDP,
            "--json",
            "--for",
            &time,
            "--runtime-dir",
        ],
    ]
    .concat();
    let mut command: Command = program(&words);
    let output = command.arg(ground.runtime()).output().expect("doctor");
    assert!(output.stderr.is_empty(), "{:?}", said(&output));
    let whole: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    (output.status.code(), whole["listeners"][0].clone())
}

/// Doctor's notes that speak of QUIC.
fn notes(report: &Value) -> Vec<&str> {
    let missing = report["view"]["missing"].as_array().expect("notes");
    let notes = missing.iter().filter_map(Value::as_str);
    notes.filter(|note| note.contains("QUIC")).collect()
}

fn is_healthy((code, report): (Option<i32>, Value)) -> Value {
    assert_eq!(
        (code, &report["healthy"]),
        (Some(0), &true.into()),
        "{report:#}"
    );
    report
}

#[test]
fn workers_that_share_a_socket_are_found() {
    let Some(ground) = ground() else { return };
    let _workers = servers("udp-shared");
    let _clients = clients_without_end();
    let (code, report) = doctor(&ground, &[]);
    let found = &report["findings"][0];
    assert_eq!(
        (code, &report["is_quic"]),
        (Some(3), &true.into()),
        "{report:#}"
    );
    assert_eq!(found["code"], "quic-scattered", "{report:#}");
    let command = "`wakeone run --split --affinity quic -- COMMAND`";
    assert!(found["next"].to_string().contains(command), "{found:#}");
    let seen = found["evidence"].to_string();
    assert!(seen.contains("4 processes read one socket"), "{seen}");
    // Without the privilege nothing is found, and that is named.
    let setpriv = [
        "setpriv",
        "--inh-caps",
        "-net_raw",
        "--bounding-set",
        "-net_raw",
    ];
    let report = is_healthy(doctor(&ground, &setpriv));
    assert!(report["is_quic"].is_null(), "{report:#}");
    assert!(
        notes(&report)[0].contains("it needs CAP_NET_RAW"),
        "{report:#}"
    );
}

#[test]
fn workers_that_get_packets_by_hash_are_told_of_until_a_program_chooses() {
    let Some(ground) = ground() else { return };
    let _workers = servers("udp");
    let _clients = clients_without_end();
    let report = is_healthy(doctor(&ground, &[]));
    let hint = "`wakeone attach udp://:4433 --affinity quic`";
    assert!(notes(&report)[0].contains(hint), "{report:#}");
    // By us, and by the server.
    let options = ["attach", UDP, "--affinity", "quic", "--stuck-after", "60s"];
    let attached = wakeone(&ground, &options);
    assert!(attached.status.success(), "{:?}", said(&attached));
    let report = is_healthy(doctor(&ground, &[]));
    assert_eq!(
        (&report["is_quic"], notes(&report).len()),
        (&true.into(), 0),
        "{report:#}"
    );
    let detached = wakeone(&ground, &["detach", UDP]);
    assert!(detached.status.success(), "{:?}", said(&detached));
    // The program stays with the group when this socket is gone.
    let one = bound();
    socket::attach_classic(&one, ClassicChoice::Cpu, WORKERS as u32).expect("a program");
    drop(one);
    let report = is_healthy(doctor(&ground, &[]));
    assert_eq!(notes(&report).len(), 0, "{report:#}");
}

/// A socket of the group.
fn bound() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
    let at: SocketAddr = ADDRESS.parse().expect("address");
    let (inet, datagrams) = (AddressFamily::INET, SocketType::DGRAM);
    let own = rustix::net::socket_with(inet, datagrams, SocketFlags::CLOEXEC, None);
    let own = own.expect("socket");
    sockopt::set_socket_reuseport(&own, true).expect("SO_REUSEPORT");
    rustix::net::bind(&own, &at).expect("bind");
    own
}

/// A query of DNS for `example.org`, with each ID in turn.
fn query(id: u16) -> Vec<u8> {
    let name = b"\x07example\x03org\0\0\x01\0\x01";
    [&id.to_be_bytes()[..], b"\x01\0\0\x01\0\0\0\0\0\0", name].concat()
}

#[test]
fn datagrams_of_others_are_no_quic() {
    let Some(ground) = isolated() else { return };
    let port = ADDRESS.rsplit(':').next().expect("a port");
    let script = server("datagrams_prefork.py");
    let _readers = Started::spawn(program(&["python3", &script, port, "4", "recv"]));
    let own = UdpSocket::bind("127.0.0.1:0").expect("bind");
    own.connect(ADDRESS).expect("connect");
    own.set_read_timeout(Some(Duration::from_millis(100)))
        .expect("timeout");
    slowly("it answers", || {
        own.send(&query(0)).is_ok() && own.recv(&mut [0; 64]).is_ok()
    });
    let asking = Arc::new(AtomicBool::new(true));
    let asker = std::thread::spawn({
        let asking = Arc::clone(&asking);
        move || {
            let mut ids = (0..u16::MAX).step_by(97).cycle();
            while asking.load(Relaxed) {
                let _ = own.send(&query(ids.next().unwrap_or(0)));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let told = doctor(&ground, &[]);
    asking.store(false, Relaxed);
    asker.join().expect("queries");
    let report = is_healthy(told);
    assert_eq!(report["is_quic"], false, "{report:#}");
    assert_eq!(report["accept_model"], "shared-receive", "{report:#}");
}

/// The value of a metric with all these labels, summed.
fn metric(text: &str, name: &str, label: &str) -> f64 {
    let lines = text
        .lines()
        .filter(|line| line.starts_with(name) && line.contains(label));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[test]
fn top_and_metrics_show_the_connections_of_quic() {
    let Some(ground) = ground() else { return };
    let options = [
        "-w",
        "4",
        "-l",
        UDP,
        "--affinity",
        "quic",
        "--name",
        "quic",
        "--stuck-after",
        "60s",
    ];
    let mut run = ground.run(&options, &["quinn_server"]);
    run.line("ready");
    clients(40, (10, 0), &[]).all_answered();
    eventually("open connections are shown", || {
        sum(&status(&ground, "quic"), "active") == 40
    });

    let top = wakeone(&ground, &["top", UDP, "--once", "--interval", "300ms"]);
    let text = String::from_utf8_lossy(&top.stdout).into_owned();
    assert!(
        text.contains("40 open, ") && !text.contains("connections/s"),
        "{text}"
    );
    let rows = text
        .lines()
        .filter(|line| line.contains("quinn_server") && line.contains("  10  "));
    assert_eq!(rows.count(), WORKERS, "{text}");

    let metrics = wakeone(&ground, &["metrics", "quic"]);
    let text = String::from_utf8_lossy(&metrics.stdout).into_owned();
    assert_eq!(
        metric(&text, "wakeone_slot_active_connections{", "slot="),
        40.0,
        "{text}"
    );
    assert_eq!(
        metric(&text, "wakeone_group_affinity_info{", "\"quic\""),
        1.0,
        "{text}"
    );
    let exits = |exit: &str| {
        metric(
            &text,
            "wakeone_group_exits_total{",
            &format!("exit=\"{exit}\""),
        )
    };
    assert_eq!((exits("selected"), exits("stray")), (40.0, 0.0), "{text}");
    assert!(exits("by_id") >= 40.0, "{text}");
    let all: f64 = ["selected", "by_id", "by_token", "by_flow"]
        .map(exits)
        .iter()
        .sum();
    let chosen = metric(&text, "wakeone_slot_selected_connections_total{", "slot=");
    assert_eq!(all, chosen, "{text}");
    run.stop();
}
