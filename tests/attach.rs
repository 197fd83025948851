//! `wakeone attach` and `detach` on a real nginx with a socket for each worker.
//! Under load, reloads and kills no request fails that would not have failed without Wakeone. The counts are exact, and
//! `detach` restores the state from before.
//!
//! These tests need root and nginx. Otherwise they are skipped, with a message.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};
use support::nginx::{Nginx, PORT, address, held, pid_in};
use support::{Clients, WAKEONE, eventually, signal};
use wakeone_control::paths::Paths;

#[test]
fn open_connections_are_counted_in_and_out_exactly() {
    let Some(nginx) = Nginx::start(4) else { return };
    let mut before: Vec<TcpStream> = (0..30).map(|_| held()).collect();
    // Some connections are not accepted yet: one worker is stopped, and its queue fills.
    let stopped = nginx.workers()[0];
    support::halt(stopped);
    let waiting: Vec<TcpStream> = (0..20)
        .map(|_| TcpStream::connect(address()).expect("connect"))
        .collect();
    let (code, text) = nginx.wakeone(&["attach", &format!(":{PORT}"), "--dry-run"]);
    assert!(
        code == 0 && text.contains("4 sockets, 50 open connections"),
        "{text}"
    );
    assert!(!nginx.runtime().exists(), "--dry-run leaves nothing");
    let (code, text) = nginx.wakeone(&["attach", &format!(":{PORT}")]);
    assert!(
        code == 0 && text.contains("50 open connections counted in\n"),
        "{text}"
    );
    assert_eq!(nginx.active().iter().sum::<i64>(), 50);
    // A connection for a stopped worker would wait for that worker: without --rescue nobody moves it.
    signal(stopped, Signal::CONT);
    let after: Vec<TcpStream> = (0..10).map(|_| held()).collect();
    assert_eq!(nginx.active().iter().sum::<i64>(), 60);
    before.truncate(7);
    eventually("closed ones are counted out", || {
        nginx.active().iter().sum::<i64>() == 7 + 20 + 10
    });
    drop((before, after, waiting));
    eventually("all are counted out", || nginx.active() == [0, 0, 0, 0]);
    nginx.detach();
}

/// A process with a socket of its own at a port that others share. It accepts connections, says a word to each, and
/// keeps it until the client closes.
const OWN_SOCKET: &str = "
import socket, sys, threading
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(('127.0.0.1', int(sys.argv[1])))
s.listen(64)
def keep(c):
    c.sendall(b'x')
    c.recv(1)
    c.close()
while True:
    threading.Thread(target=keep, args=(s.accept()[0],), daemon=True).start()
";

/// Starts one, and waits until it listens beside so many others.
fn own_socket(others: usize) -> std::process::Child {
    use wakeone_kernel::socket::diag::{Which, sockets};
    let port = PORT.to_string();
    let mut command = Command::new("python3");
    let child = command.args(["-c", OWN_SOCKET, &port]).spawn();
    support::slowly("it listens", || {
        let found = sockets(
            wakeone_model::listener::Protocol::Tcp,
            Which::Listening,
            PORT,
        );
        found.expect("sock_diag").len() == others + 1
    });
    child.expect("python3")
}

/// Opens a connection, and waits until it was accepted.
fn accepted() -> TcpStream {
    let mut stream = TcpStream::connect(address()).expect("connect");
    std::io::Read::read_exact(&mut stream, &mut [0]).expect("a word");
    stream
}

#[test]
fn what_a_new_socket_had_before_it_was_noticed_is_counted_in() {
    let Some(ground) = support::steered::isolated() else {
        return;
    };
    use support::steered::{status, wakeone};
    let mut first = [own_socket(0), own_socket(1)];
    let output = wakeone(&ground, &["attach", &format!(":{PORT}")]);
    assert!(output.status.success(), "{output:?}");
    let name = format!("at-127-0-0-1-{PORT}");
    let old: Vec<TcpStream> = (0..3).map(|_| accepted()).collect();
    let agent = status(&ground, &name)["supervisor_pid"]
        .as_u64()
        .expect("agent") as u32;
    // The agent sees nothing of this: another process takes over, and only the kernel can choose its socket.
    support::halt(agent);
    let mut second = own_socket(2);
    for one in &mut first {
        one.kill().expect("kill");
        one.wait().expect("wait");
    }
    let new: Vec<TcpStream> = (0..10).map(|_| accepted()).collect();
    signal(agent, Signal::CONT);
    let active = || support::steered::sum(&status(&ground, &name), "active");
    support::slowly("they are counted in", || active() == 10);
    drop((old, new));
    support::slowly("they are counted out", || active() == 0);
    assert_eq!(status(&ground, &name)["drift_mended"], 0);
    let output = wakeone(&ground, &["detach", &format!(":{PORT}")]);
    assert!(output.status.success(), "{output:?}");
    second.kill().expect("kill");
    second.wait().expect("wait");
}

#[test]
fn cycles_of_attach_and_detach_lose_nothing_and_leave_nothing() {
    let Some(nginx) = Nginx::start(4) else { return };
    let before = nginx.listeners();
    assert!(before.iter().all(|(_, held)| held.len() == 4), "{before:?}");
    let clients = Clients::start(address(), "/", 4);
    for _ in 0..if std::env::var_os("WAKEONE_SOAK").is_some() {
        20
    } else {
        5
    } {
        nginx.attach();
        std::thread::sleep(Duration::from_millis(50));
        nginx.detach();
    }
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );
    assert!(answers > 100);
    eventually("nginx has what it had", || nginx.listeners() == before);
}

#[test]
fn a_group_is_followed_through_reloads_and_kills() {
    let Some(nginx) = Nginx::start(4) else { return };
    nginx.attach();
    let clients = Clients::start(address(), "/", 4);
    for workers in [6, 3, 4] {
        nginx.reload(workers);
        eventually("the group has as many slots as workers", || {
            nginx.active().len() == workers
        });
    }
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );

    // A killed worker loses the connections that it had accepted, and no others. Its successor has the same socket.
    let killed = nginx.workers()[0];
    signal(killed, Signal::KILL);
    eventually("another worker serves its slot", || {
        let slots = nginx.group()["slots"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        nginx.workers().len() == 4 && slots.iter().all(|slot| slot["pid"] != killed)
    });

    // After the agent is killed steering goes on, and the next agent takes over with the counts.
    let clients = Clients::start(address(), "/", 4);
    let open = held();
    signal(nginx.agent(), Signal::KILL);
    std::thread::sleep(Duration::from_millis(300));
    let selected = |group: &Value| -> u64 {
        let slots = group["slots"].as_array().expect("slots");
        slots
            .iter()
            .filter_map(|slot| slot["selected"].as_u64())
            .sum()
    };
    let before = selected(&nginx.group());
    eventually("connections are steered without an agent", || {
        selected(&nginx.group()) > before
    });
    nginx.attach();
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );
    eventually("the counts are exact", || {
        nginx.active().iter().sum::<i64>() == 1
    });
    drop(open);
    eventually("and to the last", || nginx.active() == [0, 0, 0, 0]);
    nginx.detach();
}

#[test]
fn a_stopped_workers_queue_is_answered_by_others() {
    let Some(nginx) = Nginx::start(4) else { return };
    nginx.attach();
    let stopped = nginx.workers()[1];
    support::halt(stopped);
    let clients = Clients::start(address(), "/", 8);
    std::thread::sleep(Duration::from_secs(1) * support::slowness());
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty() && answers > 50,
        "{answers}: {failures:?}"
    );
    let rescued: u64 = nginx.group()["slots"]
        .as_array()
        .expect("slots")
        .iter()
        .filter_map(|slot| slot["rescued"].as_u64())
        .sum();
    assert!(rescued > 0, "its queue was moved");
    signal(stopped, Signal::CONT);
    eventually("it gets connections again", || {
        drop(support::get(address(), "/"));
        let group = nginx.group();
        let slots = group["slots"].as_array().expect("slots").clone();
        slots
            .iter()
            .any(|slot| slot["pid"] == stopped && slot["state"] == "up")
    });
    nginx.detach();
}

#[test]
fn what_cannot_be_steered_is_told_with_the_way_out() {
    let Some(nginx) = Nginx::start(2) else { return };
    let mut shared = Command::new("python3")
        .args([&support::server("prefork.py"), "accept", "7301", "2"])
        .process_group(0)
        .spawn()
        .expect("python3");
    eventually("it listens", || {
        TcpStream::connect(("127.0.0.1", 7301)).is_ok()
    });
    let (code, text) = nginx.wakeone(&["attach", ":7301"]);
    let group = rustix::process::Pid::from_child(&shared);
    rustix::process::kill_process_group(group, Signal::KILL).expect("kill");
    shared.wait().expect("wait");
    assert!(
        code == 1
            && text.contains("one socket (shared-accept")
            && text.contains("wakeone run -w N"),
        "{text}"
    );
    assert_eq!(text.trim().lines().count(), 1, "{text}");

    // The group is steered already, by a Wakeone with another runtime folder.
    nginx.attach();
    let other = tempfile::tempdir().expect("folder");
    let output = Command::new(WAKEONE)
        .args(["attach", &format!(":{PORT}"), "--runtime-dir"])
        .arg(other.path().join("run"))
        .output()
        .expect("wakeone");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("another program chooses"), "{text}");
    nginx.detach();
    let (code, text) = nginx.wakeone(&["attach", ":7999"]);
    assert!(
        code == 1 && text.contains("nothing listens on :7999"),
        "{text}"
    );
}

#[test]
fn a_service_keeps_a_server_steered_across_its_restart() {
    let Some(mut nginx) = Nginx::start(3) else {
        return;
    };
    let config = nginx.folder.path().join("agent.toml");
    let write = |policy: &str| {
        let text = format!("[[target]]\nlisten = ':{PORT}'\npolicy = '{policy}'\n");
        std::fs::write(&config, text).expect("configuration");
    };
    write("round-robin");
    let mut agent = nginx.start_agent(&config);
    let steered = |nginx: &Nginx, policy: &str| {
        let group = nginx.group();
        group["policy"] == policy
            && group["agent"] == true
            && nginx.active().len() == 3
            && !group["supervisor_pid"].is_null()
    };
    eventually("it is steered", || steered(&nginx, "round-robin"));
    write("least-connections");
    signal(agent.id(), Signal::HUP);
    eventually("the new policy is in force", || {
        steered(&nginx, "least-connections")
    });

    // An invalid configuration file changes nothing.
    std::fs::write(&config, "rubbish").expect("configuration");
    signal(agent.id(), Signal::HUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(steered(&nginx, "least-connections"));
    write("least-connections");

    let before: Vec<u32> = nginx.workers();
    nginx.end();
    eventually("nothing is steered", || nginx.group()["steered"] == false);
    nginx.begin();
    eventually("it is steered again", || {
        !nginx.group().is_null() && steered(&nginx, "least-connections")
    });
    assert!(nginx.workers().iter().all(|pid| !before.contains(pid)));
    signal(agent.id(), Signal::TERM);
    assert_eq!(agent.wait().expect("wait").code(), Some(0));
    assert!(!nginx.runtime().exists(), "something is left of the group");
}

#[test]
fn a_binary_upgrade_loses_nothing_and_stays_steered() {
    let Some(mut nginx) = Nginx::start_daemon(4) else {
        return;
    };
    nginx.attach();
    let old = nginx.workers();
    let clients = Clients::start(address(), "/", 4);
    // A second master starts workers beside the first's, as nginx's manual describes.
    signal(nginx.master, Signal::USR2);
    let folder = nginx.folder.path().to_owned();
    eventually("the old master gives its pid file away", || {
        folder.join("pid.oldbin").exists()
    });
    let new = pid_in(&folder.join("pid"));
    assert_ne!(new, nginx.master);
    let served = |nginx: &Nginx| -> Vec<u64> {
        let slots = nginx.group()["slots"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let up = slots.iter().filter(|slot| slot["state"] != "down");
        up.filter_map(|slot| slot["pid"].as_u64()).collect()
    };
    // The old workers leave, then their master.
    signal(nginx.master, Signal::WINCH);
    eventually("the old workers leave", || {
        old.iter().all(|pid| !support::runs(*pid))
    });
    signal(nginx.master, Signal::QUIT);
    let gone = nginx.master;
    eventually("the old master leaves", || !support::runs(gone));
    nginx.master = new;
    nginx.settled(4);
    let mut workers: Vec<u64> = nginx.workers().into_iter().map(u64::from).collect();
    workers.sort_unstable();
    eventually("each new worker has its slot", || {
        let mut served = served(&nginx);
        served.sort_unstable();
        served == workers
    });
    let selected = |group: &Value| -> u64 {
        let slots = group["slots"].as_array().expect("slots").iter();
        slots.filter_map(|slot| slot["selected"].as_u64()).sum()
    };
    let before = selected(&nginx.group());
    eventually("connections are steered to them", || {
        selected(&nginx.group()) > before + 50
    });
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );
    eventually("the counts are exact", || {
        nginx.active().iter().all(|open| *open == 0)
    });
    assert_eq!(nginx.group()["fallbacks"], 0, "{}", nginx.group());
    nginx.detach();
}

#[test]
fn weights_of_a_file_are_in_force_and_change() {
    let Some(nginx) = Nginx::start(3) else { return };
    let config = nginx.folder.path().join("agent.toml");
    let write = |weights: &str| {
        let text = format!("[[target]]\nlisten = ':{PORT}'\nweights = {weights}\n");
        std::fs::write(&config, text).expect("configuration");
    };
    write("{ 1 = 3 }");
    let mut agent = nginx.start_agent(&config);
    let weigh = |expected: [u64; 3]| {
        let slots = nginx.group()["slots"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let weights = slots.iter().filter_map(|slot| slot["weight"].as_u64());
        weights.eq(expected)
    };
    eventually("the slots weigh as the file says", || weigh([1, 3, 1]));
    write("{ 0 = 2 }");
    signal(agent.id(), Signal::HUP);
    eventually("they weigh as it says now", || weigh([2, 1, 1]));
    signal(agent.id(), Signal::TERM);
    assert_eq!(agent.wait().expect("wait").code(), Some(0));
}

#[test]
fn who_may_not_attach_is_told_all_that_is_missing_first() {
    let Some(nginx) = Nginx::start(2) else { return };
    // `nobody` may have no access to the program's folder. This folder it can read, but not write to.
    let folder = tempfile::tempdir().expect("folder");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).expect("mode");
    let own = folder.path().join("wakeone");
    support::copy_program(WAKEONE, &own);
    let output = Command::new(own)
        .args(["attach", &format!(":{PORT}"), "--runtime-dir"])
        .arg(folder.path().join("run"))
        .uid(65534)
        .gid(65534)
        .output()
        .expect("wakeone");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.trim().lines().count(), 1, "{text}");
    for name in [
        "BPF",
        "PERFMON",
        "NET_ADMIN",
        "SYS_PTRACE",
        "DAC_READ_SEARCH",
    ] {
        assert!(text.contains(&format!("CAP_{name}")), "{name}: {text}");
    }
    assert!(!text.contains("folder"), "{text}");
    nginx.attach();
    nginx.detach();
}

/// Kills the agent of an attached group, which leaves program, pins and state.
fn murder_agent(nginx: &Nginx) {
    let agent = nginx.agent();
    signal(agent, Signal::KILL);
    // Its last thread releases the lock of the group.
    let threads = || std::fs::read_dir(format!("/proc/{agent}/task")).map_or(0, Iterator::count);
    eventually("the agent is gone", || {
        !support::runs(agent) && threads() <= 1
    });
}

/// Detaches, and checks that the program is gone: `attach` refuses a group that has one which it does not know.
fn assert_detaches(nginx: &Nginx, arguments: &[&str]) {
    let (code, text) = nginx.wakeone(arguments);
    assert!(code == 0 && text.contains("detached"), "{text}");
    assert!(!nginx.runtime().exists(), "something is left of the group");
    nginx.attach();
    nginx.detach();
}

#[test]
fn detach_reaches_sockets_whose_recorded_workers_are_gone() {
    let Some(nginx) = Nginx::start(3) else { return };
    nginx.attach();
    murder_agent(&nginx);
    let before = nginx.workers();
    for pid in &before {
        signal(*pid, Signal::KILL);
    }
    eventually("the master has started others", || {
        let now = nginx.workers();
        now.len() == 3 && now.iter().all(|pid| !before.contains(pid))
    });
    assert_detaches(&nginx, &["detach", &format!(":{PORT}")]);
}

#[test]
fn detach_reaches_the_sockets_of_a_group_without_state() {
    let Some(nginx) = Nginx::start(2) else { return };
    nginx.attach();
    murder_agent(&nginx);
    let folder = nginx.runtime().join(format!("at-127-0-0-1-{PORT}"));
    std::fs::remove_file(folder.join("state.json")).expect("the state");
    let (code, text) = nginx.wakeone(&["attach", &format!(":{PORT}")]);
    assert!(
        code == 1 && text.contains("another program chooses"),
        "{text}"
    );
    assert_detaches(&nginx, &["detach", "--all"]);
}

#[test]
fn an_attach_that_is_killed_in_the_middle_can_be_repeated_and_undone() {
    let Some(nginx) = Nginx::start(2) else { return };
    let target = format!(":{PORT}");
    let pins = Paths::of(&nginx.runtime()).group_pins(&format!("at-127-0-0-1-{PORT}"));
    for again in [&["attach", &target][..], &["detach", "--all"]] {
        let mut attach = Command::new(WAKEONE)
            .args(["attach", &target, "--foreground", "--runtime-dir"])
            .arg(nginx.runtime())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("wakeone");
        let begun = Instant::now();
        while !pins.exists() && begun.elapsed() < support::long_patience() {
            std::hint::spin_loop();
        }
        // The program is attached a moment later.
        std::thread::sleep(Duration::from_millis(2));
        attach.kill().expect("kill");
        attach.wait().expect("wait");
        assert!(pins.exists());
        let (code, text) = nginx.wakeone(again);
        assert_eq!(code, 0, "{text}");
        if again[0] == "attach" {
            nginx.detach();
        }
    }
    nginx.attach();
    nginx.detach();
}

#[test]
fn an_attach_whose_state_has_no_room_leaves_nothing() {
    let Some(nginx) = Nginx::start(2) else { return };
    let runtime = nginx.runtime();
    std::fs::create_dir(&runtime).expect("folder");
    let run = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        let status = command.args(arguments).arg(&runtime).status();
        assert!(status.expect("runs").success(), "{program}");
    };
    run(
        "mount",
        &["-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs"],
    );
    let pins = Paths::of(&runtime).pins;
    // Room for the lock, and for a first state but not for a second one beside it.
    let failures = [1, 2].map(|left| {
        let filler = runtime.join("filler");
        std::fs::write(&filler, vec![0; (16 - left) * 4096]).expect("filler");
        let (code, text) = nginx.wakeone(&["attach", &format!(":{PORT}")]);
        std::fs::remove_file(&filler).expect("filler");
        let left = std::fs::read_dir(&runtime).expect("folder").count();
        (code, text, left, pins.exists())
    });
    let (code, text) = nginx.wakeone(&["attach", &format!(":{PORT}")]);
    let (detached, _) = nginx.wakeone(&["detach", &format!(":{PORT}")]);
    run("umount", &[]);
    for (code, text, left, pins) in failures {
        assert!(code == 1 && text.contains("No space left"), "{text}");
        assert!(!pins && left == 0, "{left} files");
    }
    assert!(code == 0 && detached == 0, "{text}");
}
