//! `wakeone run --lookup`: the listeners are on a private port, which clients and servers do not notice.

#![allow(unsafe_code)] // programs of others are loaded by hand

#[path = "support/mod.rs"]
mod support;

use serde_json::Value;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Output};
use support::steered::{
    PREFORKED, assert_nothing_left, die_while_moving, isolated, number, said, status, wakeone,
    worker,
};
use support::{Clients, Ground, WAKEONE, eventually, everyone, get, patience, pid_of, server};
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

const AT: &str = "127.0.0.1:8080";
const OPTIONS: [&str; 7] = ["-w", "3", "-l", AT, "--name", "web", "--lookup"];

fn address(text: &str) -> SocketAddr {
    text.parse().expect("address")
}

/// The private port of each address of the group, as written down.
fn private_ports(ground: &Ground) -> Vec<u16> {
    let bytes = std::fs::read(ground.runtime().join("web/state.json")).expect("state");
    let state: Value = serde_json::from_slice(&bytes).expect("JSON");
    let reserved = state["reserved"].as_array().expect("reserved addresses");
    let port = |one: &Value| one["private_port"].as_u64().expect("port") as u16;
    reserved.iter().map(port).collect()
}

fn refused(at: SocketAddr) {
    let error = TcpStream::connect_timeout(&at, patience()).expect_err("nobody is there");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{at}");
}

/// Binds as a server does that knows nothing of Wakeone.
fn a_second_server_finds_it_in_use(at: SocketAddr) {
    let error = std::net::TcpListener::bind(at).expect_err("it is in use");
    assert_eq!(error.kind(), ErrorKind::AddrInUse, "{at}");
}

/// Nothing listens in this namespace, so nothing of a group is left there.
fn nothing_listens() {
    let left = diag::sockets(Protocol::Tcp, Which::Listening, 0).expect("sock_diag");
    assert!(left.is_empty(), "{left:?}");
}

/// A group at an address: where it answers, and where it must not.
fn is_there_and_nowhere_else(listen: &str, there: &[&str], elsewhere: &[&str]) {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "3", "-l", listen, "--name", "web", "--lookup"];
    let mut run = ground.whoami(&options);
    run.line("ready: ");
    for at in there {
        for worker in everyone(address(at), 3) {
            let port = worker["address"][1].as_u64();
            assert_eq!(
                port,
                Some(8080),
                "getsockname tells the public port: {worker}"
            );
            let ip = worker["address"][0].as_str().expect("address");
            assert!(
                listen.contains(ip) || ip == "::" && listen == ":8080",
                "{worker}"
            );
        }
        a_second_server_finds_it_in_use(address(at));
    }
    elsewhere.iter().for_each(|at| refused(address(at)));
    for port in private_ports(&ground) {
        refused((Ipv4Addr::LOCALHOST, port).into());
        refused((Ipv6Addr::LOCALHOST, port).into());
    }
    run.stop();
    there.iter().for_each(|at| refused(address(at)));
    assert_nothing_left(&ground);
    nothing_listens();
}

#[test]
fn an_ipv4_address() {
    is_there_and_nowhere_else(
        AT,
        &[AT],
        &["127.0.0.2:8080", "[::1]:8080", "127.0.0.1:8081"],
    );
}

#[test]
fn every_ipv4_address() {
    is_there_and_nowhere_else("0.0.0.0:8080", &[AT, "127.9.9.9:8080"], &["[::1]:8080"]);
}

#[test]
fn an_ipv6_address() {
    is_there_and_nowhere_else("[::1]:8080", &["[::1]:8080"], &[AT]);
}

#[test]
fn every_ipv6_address_and_no_other() {
    is_there_and_nowhere_else("[::]:8080", &["[::1]:8080"], &[AT]);
}

#[test]
fn every_address() {
    is_there_and_nowhere_else(":8080", &[AT, "127.9.9.9:8080", "[::1]:8080"], &[]);
}

#[test]
fn several_addresses_lead_to_a_queue_each() {
    let Some(ground) = isolated() else { return };
    let mut options = OPTIONS.to_vec();
    options.extend(["-l", "[::1]:9090"]);
    let mut run = ground.whoami(&options);
    run.ready();
    for at in [AT, "[::1]:9090"] {
        let at = address(at);
        for worker in everyone(at, 3) {
            assert_eq!(worker["address"][0], at.ip().to_string());
            assert_eq!(worker["address"][1], at.port());
            assert_eq!(
                worker["environment"]["LISTEN_FDS"], "2",
                "nobody is told of more"
            );
        }
    }
    run.stop();
    assert_nothing_left(&ground);
    nothing_listens();
}

#[test]
fn groups_stand_beside_each_other_each_with_its_own_program() {
    let Some(ground) = isolated() else { return };
    let mut first = ground.whoami(&OPTIONS);
    first.ready();
    let other = [
        "-w",
        "2",
        "-l",
        "127.0.0.1:9090",
        "--name",
        "other",
        "--lookup",
    ];
    let mut second = ground.whoami(&other);
    second.ready();
    everyone(address(AT), 3);
    everyone(address("127.0.0.1:9090"), 2);
    first.stop();
    refused(address(AT));
    everyone(address("127.0.0.1:9090"), 2);
    second.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_second_group_is_refused_and_changes_nothing() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    run.ready();
    for lookup in [true, false] {
        let mut options = vec!["-w", "2", "-l", AT, "--name", "second"];
        options.extend(lookup.then_some("--lookup"));
        let (code, line) = ground.refused(&options, &PREFORKED);
        assert_eq!(code, 1, "{line}");
        assert!(line.contains("the address is in use"), "{line}");
    }
    everyone(address(AT), 3);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn an_address_that_others_have_is_refused_and_they_keep_it() {
    let Some(ground) = isolated() else { return };
    let _theirs = std::net::TcpListener::bind(AT).expect("listen");
    let (code, line) = ground.refused(&OPTIONS, &PREFORKED);
    assert_eq!(code, 1, "{line}");
    assert!(line.contains("the address is in use"), "{line}");
    TcpStream::connect(AT).expect("theirs");
    assert_nothing_left(&ground);
}

#[test]
fn workers_of_a_killed_supervisor_serve_on_and_are_taken_over() {
    let Some(ground) = isolated() else { return };
    let mut first = ground.whoami(&OPTIONS);
    let at = first.ready();
    let before: Vec<u32> = everyone(at, 3).iter().map(pid_of).collect();
    let clients = Clients::start(at, "/", 4);
    first.murder();
    everyone(at, 3);
    a_second_server_finds_it_in_use(at);

    let pids = before
        .iter()
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(" ");
    let output = wakeone(&ground, &["detach", "web"]);
    let line = said(&output).concat();
    assert!(
        !output.status.success() && line.contains(&format!("`kill {pids}`")),
        "{line}"
    );
    let (code, line) = ground.refused(&OPTIONS[..6], &PREFORKED);
    assert_eq!(code, 1, "{line}");
    assert!(
        line.contains("start with --lookup to take them over"),
        "{line}"
    );

    let mut second = ground.whoami(&OPTIONS);
    second.ready();
    let after: Vec<u32> = everyone(at, 3).iter().map(pid_of).collect();
    assert_eq!(before, after, "nobody was restarted");
    let (answers, failures) = clients.stop();
    assert!(
        answers > 0 && failures.is_empty(),
        "{answers}, {failures:?}"
    );
    second.stop();
    refused(at);
    assert_nothing_left(&ground);
    nothing_listens();
}

#[test]
fn a_queue_that_was_being_moved_when_its_supervisor_died_is_opened_by_the_next() {
    let Some(ground) = isolated() else { return };
    // The policy also chooses busy workers.
    let options = [&OPTIONS[..], &["--policy", "round-robin"]].concat();
    let mut command = ground.command(&options, &PREFORKED);
    command.env("WAKEONE_TEST_DIE", "moving");
    let mut first = support::Run::start(command);
    let at = first.ready();
    die_while_moving(first.pid(), at);
    let mut second = ground.run(&options, &PREFORKED);
    second.ready();
    let established = || {
        let group = status(&ground, "web");
        [0, 1, 2].map(|slot| number(&group, slot, "established"))
    };
    let before = established();
    // Requests from before may keep a worker for a moment: then it is stuck, and passed over.
    eventually("each worker gets connections", || {
        for _ in 0..30 {
            get(at, "/").expect("an answer");
        }
        let after = established();
        (0..3).all(|slot| after[slot] >= before[slot] + 5)
    });
    second.stop();
    drop(first);
    assert_nothing_left(&ground);
}

#[test]
fn what_a_dead_group_left_is_taken_away() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    let at = run.ready();
    let workers: Vec<u32> = everyone(at, 3).iter().map(pid_of).collect();
    run.murder();
    for pid in workers {
        support::signal(pid, rustix::process::Signal::KILL);
        eventually("it ends", || !support::runs(pid));
    }
    // Any server can bind its address: the remaining program finds no listener.
    drop(std::net::TcpListener::bind(at).expect("free"));
    let output = wakeone(&ground, &["detach", "web"]);
    assert!(output.status.success(), "{:?}", said(&output));
    assert_nothing_left(&ground);
}

#[test]
fn a_rolling_restart_loses_nothing() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    let at = run.ready();
    let clients = Clients::start(at, "/", 4);
    run.signal(rustix::process::Signal::HUP);
    run.line("rolling restart done");
    let (answers, failures) = clients.stop();
    assert!(
        answers > 0 && failures.is_empty(),
        "{answers}, {failures:?}"
    );
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn workers_of_a_rolling_restart_keep_the_address_as_those_before_them_did() {
    let Some(ground) = isolated() else { return };
    let mut first = ground.whoami(&OPTIONS);
    let at = first.ready();
    let old: Vec<u32> = everyone(at, 3).iter().map(pid_of).collect();
    first.signal(rustix::process::Signal::HUP);
    first.line("rolling restart done");
    eventually("the old workers are gone", || {
        !old.iter().any(|pid| support::runs(*pid))
    });
    let before: Vec<u32> = everyone(at, 3).iter().map(pid_of).collect();
    first.murder();
    a_second_server_finds_it_in_use(at);
    let mut second = ground.whoami(&OPTIONS);
    second.ready();
    let after: Vec<u32> = everyone(at, 3).iter().map(pid_of).collect();
    assert_eq!(before, after, "nobody was restarted");
    second.stop();
    assert_nothing_left(&ground);
    nothing_listens();
}

#[test]
fn the_socket_that_reserves_the_address_is_not_taken_for_a_listener_of_the_server() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "1", "-l", AT, "--name", "web", "--lookup"];
    let mut run = ground.run(&options, &["sleep", "600"]);
    run.line("does not accept yet");
    run.line("was never seen to accept");
    run.ready();
    let lines = run.stop();
    assert!(
        !lines.iter().any(|line| line.contains("is not ready")),
        "{lines:?}"
    );
    assert_nothing_left(&ground);
}

#[test]
fn who_looks_at_the_address_is_told_where_the_queues_are() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&OPTIONS, &PREFORKED);
    run.ready();
    let looks = |arguments: &[&str]| -> Output {
        let mut command = Command::new(WAKEONE);
        command
            .args(arguments)
            .env("WAKEONE_RUNTIME_DIR", ground.runtime());
        command.output().expect("wakeone starts")
    };
    let port = private_ports(&ground)[0];
    let expected = format!(
        "127.0.0.1:8080 (queues on port {port}) belongs to group `web` of `wakeone run --lookup`"
    );
    let all: [&[&str]; 4] = [
        &["doctor", ":8080", "--for", "200ms"],
        &["doctor", "--for", "200ms"],
        &["attach", ":8080"],
        &["top", ":8080", "--once"],
    ];
    for arguments in all {
        let output = looks(arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &said(&output).concat();
        assert!(text.contains(&expected), "{arguments:?}: {text}");
    }
    let group = status(&ground, "web");
    assert_eq!(group["listen"][0], AT);
    assert!(worker(&group, 2).is_some());
    get(address(AT), "/").expect("an answer");
    run.stop();
    assert_nothing_left(&ground);
}

/// Programs of others that look at each connection of this network namespace and let it pass; they last as long as
/// these.
fn programs_of_others(count: usize) -> Vec<OwnedFd> {
    use libbpf_rs::libbpf_sys::{self, bpf_insn, bpf_prog_load_opts};
    const MOVE_NUMBER: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    const PASS: i32 = 1;
    let mut pass = [bpf_insn::default(), bpf_insn::default()];
    (pass[0].code, pass[0].imm, pass[1].code) = (MOVE_NUMBER, PASS, EXIT);
    let mut options = bpf_prog_load_opts {
        sz: size_of::<bpf_prog_load_opts>() as _,
        expected_attach_type: libbpf_sys::BPF_SK_LOOKUP,
        ..Default::default()
    };
    // SAFETY: names end with NUL, `pass` holds two instructions, and `options` tells its size.
    let program = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SK_LOOKUP,
            c"of_others".as_ptr(),
            c"GPL".as_ptr(),
            pass.as_ptr(),
            pass.len() as _,
            &mut options,
        )
    };
    assert!(program >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel gave us this descriptor.
    let program = unsafe { OwnedFd::from_raw_fd(program) };
    let netns = std::fs::File::open("/proc/thread-self/ns/net").expect("namespace");
    let attach = |_| {
        let kind = libbpf_sys::BPF_SK_LOOKUP;
        let (program, netns) = (program.as_raw_fd(), netns.as_raw_fd());
        // SAFETY: no options.
        let link = unsafe { libbpf_sys::bpf_link_create(program, netns, kind, std::ptr::null()) };
        assert!(link >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the kernel gave us this descriptor.
        unsafe { OwnedFd::from_raw_fd(link) }
    };
    (0..count).map(attach).collect()
}

#[test]
fn programs_of_others_that_were_there_first_are_named_and_what_they_let_pass_comes_to_us() {
    let Some(ground) = isolated() else { return };
    let _others = programs_of_others(1);
    let mut run = ground.whoami(&OPTIONS);
    run.line("sk_lookup programs of others (of_others) were in this network namespace first");
    run.line("ready: ");
    everyone(address(AT), 3);
    // Programs of other groups are not logged.
    let options = [
        "-w",
        "1",
        "-l",
        "127.0.0.1:9090",
        "--name",
        "other",
        "--lookup",
    ];
    let mut second = ground.whoami(&options);
    let line = second.line("sk_lookup programs of others");
    assert!(line.contains("(of_others)"), "{line}");
    second.line("ready: ");
    second.stop();
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_namespace_without_room_for_another_program_is_told_of_in_a_sentence() {
    let Some(ground) = isolated() else { return };
    let mut others = programs_of_others(64);
    let (code, line) = ground.refused(&OPTIONS, &PREFORKED);
    assert_eq!(code, 1, "{line}");
    assert!(
        line.contains("this network namespace has 64 such programs, and can have no more"),
        "{line}"
    );
    refused(address(AT));
    assert_nothing_left(&ground);
    // The last place will do.
    others.pop();
    let mut run = ground.whoami(&OPTIONS);
    run.line("ready: ");
    everyone(address(AT), 3);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn where_it_cannot_be_had_nothing_is_started_and_the_reason_is_said() {
    let Some(ground) = isolated() else { return };
    if !cfg!(debug_assertions) {
        return eprintln!("skipped: a release build has no bad programs");
    }
    let whoami = server("whoami.py");
    let mut command = ground.command(&OPTIONS, &["python3", &whoami]);
    command.env("WAKEONE_TEST_BROKEN", "wakeone_lookup");
    let (status, lines) = support::Run::start(command).wait();
    let last = lines.last().expect("a line");
    assert_eq!(status.code(), Some(1), "{lines:?}");
    assert!(
        last.contains("loading the program wakeone_lookup failed"),
        "{last}"
    );
    refused(address(AT));
    assert_nothing_left(&ground);
    let (code, line) = ground.refused(&["-l", "udp://127.0.0.1:5353", "--lookup"], &PREFORKED);
    assert_eq!(code, 2, "{line}");
}

#[test]
fn a_rolling_restart_changes_listeners_on_the_private_port_too() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    run.line("ready: ");
    let before: Vec<u32> = everyone(address(AT), 3).iter().map(pid_of).collect();
    let clients = Clients::start(address(AT), "/", 2);
    for _ in 0..2 {
        run.signal(rustix::process::Signal::HUP);
        run.line("rolling restart done: 3 workers replaced");
    }
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty() && answers > 0, "{failures:?}");
    let after: Vec<u32> = everyone(address(AT), 3).iter().map(pid_of).collect();
    assert!(after.iter().all(|pid| !before.contains(pid)), "{after:?}");
    run.stop();
    assert_nothing_left(&ground);
    nothing_listens();
}
