//! `wakeone run` end to end: the built binary, real processes, loopback only.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use support::{
    Clients, Ground, Run, ask, eventually, everyone, is_root, pid_of, runs, server, signal, whoami,
    whoami_from,
};

const ANY: &str = "127.0.0.1:0";

#[test]
fn workers_get_their_own_listener_by_systemds_protocol_and_nothing_else_of_ours() {
    let ground = Ground::new();
    let mut command = ground.command(&["-w", "3", "-l", ANY], &["python3", &server("whoami.py")]);
    command
        .env("LISTEN_FDS", "9")
        .env("LISTEN_PID", "1")
        .env("LISTEN_FDNAMES", "x");
    let mut run = Run::start(command);
    let address = run.ready();
    let port = format!("port-{}", address.port());
    let workers = everyone(address, 3);
    let mut inodes = HashSet::new();
    for (slot, worker) in workers.iter().enumerate() {
        let pid = pid_of(worker);
        let environment = serde_json::json!({"LISTEN_PID": pid.to_string(), "LISTEN_FDS": "1", "LISTEN_FDNAMES": port});
        for (key, value) in environment.as_object().expect("object") {
            assert_eq!(&worker["environment"][key], value, "{key}");
        }
        assert_eq!(worker["slot"], slot);
        assert_eq!(worker["fds"], serde_json::json!([0, 1, 2, 3]));
        assert_eq!(worker["blocked"], "0000000000000000");
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(worker["capabilities"][set], "0000000000000000", "{set}");
        }
        if is_root() {
            assert_eq!(worker["capabilities"]["CapBnd"], "0000000000000000");
        }
        assert!(
            inodes.insert(std::fs::read_link(format!("/proc/{pid}/fd/3")).expect("listener")),
            "a listener of its own"
        );
    }
    let pids: Vec<u32> = workers.iter().map(pid_of).collect();
    let lines = run.stop();
    assert!(lines.iter().any(|line| line.starts_with("ready: ")
        && pids.iter().all(|pid| line.contains(&pid.to_string()))));
    assert!(ground.groups().is_empty(), "nothing is left");
    assert!(pids.iter().all(|pid| !runs(*pid)));
}

#[test]
fn placeholders_name_the_listeners_of_several_addresses() {
    let ground = Ground::new();
    let command = [
        "python3",
        &server("whoami.py"),
        "{fd2}",
        "{fd}",
        "slot={slot}",
    ];
    let mut run = ground.run(
        &["-w", "2", "-l", ANY, "-l", "127.0.0.2:0", "--name", "two"],
        &command,
    );
    let first = run.ready();
    let workers = everyone(first, 2);
    for (slot, worker) in workers.iter().enumerate() {
        assert_eq!(
            worker["arguments"],
            serde_json::json!(["4", "3", format!("slot={slot}")])
        );
        let told = worker["environment"].as_object().expect("environment");
        assert!(
            !told.contains_key("LISTEN_FDS"),
            "who is told numbers is not told twice: {told:?}"
        );
        assert_eq!(worker["address"][0], "127.0.0.1");
    }
    let ready = run
        .lines()
        .into_iter()
        .find(|line| line.starts_with("ready:"))
        .expect("ready");
    let second = ready
        .split([' ', ','])
        .find(|word| word.starts_with("127.0.0.2:"))
        .expect("the second address");
    assert_eq!(
        whoami(second.parse().expect("address"))["address"][0],
        "127.0.0.2"
    );
    run.stop();
}

#[test]
fn signals_that_we_were_told_to_ignore_reach_workers_again() {
    let ground = Ground::new();
    let line = format!(
        "trap '' TERM HUP INT USR1; exec {} run -w 1 -l {ANY} --runtime-dir \"$0\" -- python3 {}",
        support::WAKEONE,
        server("whoami.py")
    );
    let mut command = Command::new("sh");
    command.args(["-c", &line]).arg(ground.runtime());
    let mut run = Run::start(command);
    let worker = whoami(run.ready());
    // Python itself ignores SIGPIPE (13) and SIGXFSZ (25); 32 and 33 belong to libc and are as they were.
    let ignored = u64::from_str_radix(worker["ignored"].as_str().expect("mask"), 16).expect("mask");
    assert_eq!(ignored & !(0b11 << 31), (1 << 12) | (1 << 24));
    run.stop();
}

/// Under nohup. nginx handles SIGHUP there as well.
#[test]
fn a_server_that_handles_a_signal_gets_it_though_we_were_told_to_ignore_it() {
    let ground = Ground::new();
    let script = "\
import signal, sys
tell = lambda text: print(text, file=sys.stderr, flush=True)
tell(f'ignored: {[n for n in (1, 10) if signal.getsignal(n) == signal.SIG_IGN]}')
signal.signal(signal.SIGHUP, lambda *_: tell('reloaded'))
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
tell('handles')
while True: signal.pause()";
    let line = format!(
        "trap '' HUP USR1; exec {} run --grace 100ms --runtime-dir \"$0\" -- python3 -c \"$1\"",
        support::WAKEONE,
    );
    let mut command = Command::new("sh");
    command
        .args(["-c", &line])
        .arg(ground.runtime())
        .arg(script);
    let mut run = Run::start(command);
    run.line("ignored: [1, 10]");
    run.line("handles");
    // The other stays ignored, or it would end the server.
    run.signal(Signal::USR1);
    run.signal(Signal::HUP);
    run.line("reloaded");
    run.stop();
}

#[test]
fn a_rolling_restart_under_load_replaces_everyone_and_loses_nothing() {
    let ground = Ground::new();
    let mut run = ground.whoami(&["-w", "3", "-l", ANY]);
    let address = run.ready();
    let before: HashSet<u32> = everyone(address, 3).iter().map(pid_of).collect();
    let clients = Clients::start(address, "/slow?ms=1", 4);
    run.signal(Signal::HUP);
    run.line("rolling restart done: 3 workers replaced");
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );
    assert!(answers > 0);
    let after: HashSet<u32> = everyone(address, 3).iter().map(pid_of).collect();
    assert!(before.is_disjoint(&after));
    assert!(before.iter().all(|pid| !runs(*pid)));
    run.stop();
}

/// Sessions of MCP servers and of socket.io are in one worker's memory.
#[test]
fn a_client_keeps_its_worker_over_a_restart_of_another() {
    if !is_root() {
        return eprintln!("skipped: not root");
    }
    let ground = Ground::new();
    let mut run = ground.whoami(&["-w", "4", "-l", ANY, "--policy", "source"]);
    let address = run.ready();
    let workers = || -> Vec<(u64, u32)> {
        let hosts = (1..=40).map(|host| Ipv4Addr::new(127, 9, 8, host));
        let ask = |host| whoami_from(host, address);
        let who = |one: Value| (one["slot"].as_u64().expect("slot"), pid_of(&one));
        hosts.map(ask).map(who).collect()
    };
    let before = workers();
    assert_eq!(workers(), before);
    let (slot, pid) = before[0];
    signal(pid, Signal::KILL);
    // Those of the others stay while it is away, and all are where they were when it is back.
    let of_others = |all: Vec<(u64, u32)>| -> Vec<(usize, (u64, u32))> {
        let kept = before.iter().zip(all).enumerate();
        let kept = kept.filter(|(_, (was, _))| was.0 != slot);
        kept.map(|(client, (_, now))| (client, now)).collect()
    };
    let others = of_others(before.clone());
    assert!(others.len() >= 20, "{before:?}");
    assert_eq!(of_others(workers()), others);
    run.line(&format!("worker {slot} restarted"));
    eventually("its clients come back", || {
        let slots = |all: &[(u64, u32)]| all.iter().map(|one| one.0).collect::<Vec<_>>();
        slots(&workers()) == slots(&before)
    });
    assert_eq!(of_others(workers()), others);
    run.stop();
}

#[test]
fn a_roll_whose_new_worker_fails_stops_and_the_others_serve_on() {
    let ground = Ground::new();
    let flag = ground.path().join("broken");
    let script = format!(
        "test -e {} && exit 4; exec python3 {}",
        flag.display(),
        server("whoami.py")
    );
    let options = ["-w", "3", "-l", ANY, "--restart", "stop-first"];
    let mut run = ground.run(&options, &["sh", "-c", &script]);
    let address = run.ready();
    let before: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    std::fs::write(&flag, "").expect("flag");
    run.signal(Signal::HUP);
    let line = run.line("the rolling restart stops");
    assert!(
        line.contains("new worker 0") && line.contains("2 workers run on"),
        "{line}"
    );
    assert!(runs(before[1]) && runs(before[2]) && !runs(before[0]));
    std::fs::remove_file(&flag).expect("flag");
    run.line("worker 0 restarted");
    let after: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    assert_eq!(before[1..], after[1..]);
    run.stop();
}

/// A server that ignores the listener that it was given.
const ITS_OWN: &str = "import http.server as h; h.ThreadingHTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler).serve_forever()";

#[test]
fn a_server_that_listens_elsewhere_is_not_ready_and_told_where() {
    let ground = Ground::new();
    let server = ["python3", "-c", ITS_OWN];
    let mut run = ground.run(&["-w", "1", "-l", ANY], &server);
    let line = run.line("is not ready: it listens on 127.0.0.1:");
    assert!(
        ["{fd}", "{port}", "wakeone run -- "]
            .iter()
            .all(|word| line.contains(word)),
        "{line}"
    );
    let lines = run.stop();
    assert!(
        !lines.iter().any(|line| line.starts_with("ready")),
        "{lines:?}"
    );
    assert!(ground.groups().is_empty());
}

#[test]
fn a_server_that_listens_nowhere_is_told_what_it_may_lack_before_it_gets_connections() {
    let ground = Ground::new();
    let mut run = ground.run(&["-w", "1", "-l", ANY], &["sleep", "600"]);
    let line = run.line("does not accept yet");
    assert!(
        ["{fd}", "LISTEN_FDS", "{port}", "wakeone run -- "]
            .iter()
            .all(|word| line.contains(word)),
        "{line}"
    );
    assert!(
        !run.lines().iter().any(|line| line.starts_with("ready")),
        "{:?}",
        run.lines()
    );
    run.line("was never seen to accept");
    run.ready();
    run.stop();
    assert!(ground.groups().is_empty());
}

#[test]
fn a_server_that_has_closed_its_listener_and_listens_nowhere_is_never_ready() {
    const WAITS: &str = "import os, select; os.close(3); select.select([os.pipe()[0]], [], [])";
    const WAITS_LATER: &str = "import os, select, time; time.sleep(3); os.close(3); \
                               select.select([os.pipe()[0]], [], [])";
    const SLEEPS: &str = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(600)";
    let servers: [(&[&str], &str); 3] = [
        (&["python3", "-ISc", WAITS], "give it the listener by {fd}"),
        (
            &["python3", "-ISc", WAITS_LATER],
            "give it the listener by {fd}",
        ),
        (
            &["python3", "-ISc", SLEEPS, "{fd}"],
            "its command names {fd}",
        ),
    ];
    for (server, hint) in servers {
        let ground = Ground::new();
        let mut run = ground.run(&["-w", "1", "-l", ANY], server);
        let line = run.line("it has closed the listener that it was given, and listens nowhere");
        assert!(line.contains(hint), "{line}");
        let lines = run.stop();
        assert!(
            !lines.iter().any(|line| line.starts_with("ready")),
            "{lines:?}"
        );
        assert!(ground.groups().is_empty());
    }
}

#[test]
fn a_killed_worker_is_replaced_in_its_slot() {
    let ground = Ground::new();
    let mut run = ground.whoami(&["-w", "2", "-l", ANY]);
    let address = run.ready();
    let before = everyone(address, 2);
    let inode = |worker: &Value| {
        std::fs::read_link(format!("/proc/{}/fd/3", pid_of(worker))).expect("listener")
    };
    let listener = inode(&before[1]);
    signal(pid_of(&before[1]), Signal::KILL);
    let line = run.line("killed by signal 9");
    assert!(
        line.starts_with(&format!("worker 1 (pid {})", pid_of(&before[1]))),
        "{line}"
    );
    run.line("worker 1 restarted");
    // Until the new worker runs, connections wait in its queue. All are answered, none is refused.
    let after = everyone(address, 2);
    assert_eq!(pid_of(&after[0]), pid_of(&before[0]));
    assert_ne!(pid_of(&after[1]), pid_of(&before[1]));
    assert_eq!(inode(&after[1]), listener, "the same queue");
    run.stop();
}

#[test]
fn a_crash_loop_backs_off_and_is_told() {
    let ground = Ground::new();
    let script = format!(
        "test $WAKEONE_SLOT = 1 && exit 3; exec python3 {}",
        server("whoami.py")
    );
    let mut run = ground.run(
        &["-w", "2", "-l", ANY, "--log", "json"],
        &["sh", "-c", &script],
    );
    let delays: Vec<u64> = (1..=4)
        .map(|nth| {
            let line: Value = serde_json::from_str(&run.line("\"event\":\"death\"")).expect("JSON");
            assert_eq!(
                (&line["slot"], &line["failures"]),
                (&1.into(), &nth.into()),
                "{line}"
            );
            assert!(
                line["message"]
                    .as_str()
                    .expect("message")
                    .contains("exited with status 3"),
                "{line}"
            );
            line["restart_ms"].as_u64().expect("delay")
        })
        .collect();
    // The delay doubles each time. With 20 % of jitter on both, it grows by a third at least.
    assert!(
        delays.windows(2).all(|pair| pair[1] * 3 >= pair[0] * 4),
        "{delays:?}"
    );
    assert!(
        !run.lines()
            .iter()
            .any(|line| line.contains("\"event\":\"ready\"")),
        "one worker never was"
    );
    run.signal(Signal::TERM);
    let (status, _) = run.wait();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn what_cannot_be_run_is_one_sentence_and_leaves_nothing() {
    let ground = Ground::new();
    let file = ground.path().join("data");
    std::fs::write(&file, "x").expect("file");
    let file = file.to_str().expect("path").to_owned();
    let table: [(&[&str], &str); 5] = [
        (
            &["no-such-command"],
            "there is no command `no-such-command` in PATH",
        ),
        (&["/no/such/file"], "there is no file `/no/such/file`"),
        (&[&file], "may not be executed"),
        (
            &["sh", "-c", "exit 3"],
            "the command exited with status 3 in every slot before it was ready",
        ),
        (
            &["sh", "-c", "kill -9 $$"],
            "the command was killed by signal 9 (SIGKILL) in every slot",
        ),
    ];
    for (command, sentence) in table {
        let (code, line) = ground.refused(&["-w", "2", "-l", ANY, "--name", "bad"], command);
        assert_eq!(code, 1, "{line}");
        assert!(
            line.contains(sentence) && line.matches(sentence).count() == 1,
            "{line}"
        );
        assert!(ground.groups().is_empty(), "nothing is left of {command:?}");
    }
}

#[test]
fn an_address_in_use_is_said_whoever_uses_it() {
    let ground = Ground::new();
    let other = TcpListener::bind(ANY).expect("bind");
    let address = other.local_addr().expect("address");
    let (code, line) = ground.refused(&["-l", &address.to_string()], &["sleep", "60"]);
    assert_eq!(code, 1);
    assert!(
        line.contains(&format!(
            "cannot listen on {address}: the address is in use"
        )),
        "{line}"
    );

    let mut run = ground.whoami(&["-w", "2", "-l", ANY, "--name", "one"]);
    let address = run.ready().to_string();
    let (code, line) = ground.refused(&["-l", &address, "--name", "two"], &["sleep", "60"]);
    assert!(
        code == 1 && line.contains("the address is in use"),
        "a group is not joined by another: {line}"
    );
    run.stop();
}

#[test]
fn bad_arguments_are_named_and_end_with_2() {
    let ground = Ground::new();
    let table: [(&[&str], &str); 9] = [
        (&["-w", "257", "-l", ANY], "257 is not in 1..=256"),
        (&["-w", "0", "-l", ANY], "0 is not in 1..=256"),
        (&["-l", "here"], "`here` is no address to listen on"),
        (&["-l", "127.0.0.1:99999"], "the port is above 65535"),
        (
            &["-l", "127.0.0.1:8080", "-l", "127.0.0.1:8080"],
            "-l 127.0.0.1:8080 is given twice",
        ),
        (&["-l", ANY, "--grace", "5d"], "`5d` is no time"),
        (&["-l", ANY, "--name", "a/b"], "`a/b` cannot name a group"),
        (
            &["-l", ANY, "--keep-cap", "fly"],
            "there is no capability `fly`",
        ),
        (&["-l", ANY, "--weight", "1"], "`1` is no weight"),
    ];
    for (options, sentence) in table {
        let run = ground.run(options, &["sleep", "60"]);
        let (status, lines) = run.wait();
        assert_eq!(status.code(), Some(2), "{lines:?}");
        assert!(
            lines.iter().any(|line| line.contains(sentence)),
            "{sentence}: {lines:?}"
        );
    }
    let (code, line) = ground.refused(&["-l", ANY, "-l", "127.0.0.2:0"], &["sleep", "{fd}"]);
    assert!(
        code == 2 && line.contains("nobody would serve 127.0.0.2:0"),
        "{line}"
    );
    let (code, line) = ground.refused(&["-l", ANY], &["sleep", "{fd2}"]);
    assert!(
        code == 2 && line.contains("`{fd2}` names a listener that there is not"),
        "{line}"
    );
    let (code, line) = ground.refused(&["-l", ANY, "--user", "no-such-user"], &["sleep", "60"]);
    let (expected, sentence) = if is_root() {
        (2, "there is no user `no-such-user`")
    } else {
        (1, "only root can")
    };
    assert!(code == expected && line.contains(sentence), "{line}");
    assert!(ground.groups().is_empty());
}

#[test]
fn an_address_that_is_not_ours_is_said() {
    let ground = Ground::new();
    // TEST-NET-1 (RFC 5737): no machine has it. Nothing is sent.
    let (code, line) = ground.refused(&["-l", "192.0.2.1:0"], &["sleep", "60"]);
    assert!(
        code == 1 && line.contains("this machine has no such address"),
        "{line}"
    );
    let (code, line) = ground.refused(&["-l", "no-such-host.invalid:80"], &["sleep", "60"]);
    assert!(
        code == 1 && line.contains("cannot find the address of `no-such-host.invalid`"),
        "{line}"
    );
}

#[test]
fn a_backlog_above_the_kernels_is_cut_and_said() {
    let ground = Ground::new();
    let mut run = ground.whoami(&["-w", "1", "-l", ANY, "--backlog", "2000000000"]);
    run.line("a backlog of 2000000000 is cut to");
    run.ready();
    run.stop();
}

#[test]
fn a_stop_lets_requests_in_hand_finish() {
    let ground = Ground::new();
    let mut run = ground.whoami(&["-w", "2", "-l", ANY]);
    let address = run.ready();
    let slow = ask(address, "/slow?ms=1000").expect("accepted");
    let lines = run.stop();
    slow.answer().expect("the whole answer");
    assert!(
        !lines.iter().any(|line| line.contains("killed")),
        "{lines:?}"
    );
}

const DEAF: &str = "--deaf";

#[test]
fn a_worker_deaf_to_sigterm_is_killed_after_the_grace() {
    let ground = Ground::new();
    let mut run = ground.run(
        &["-w", "2", "-l", ANY, "--grace", "1s"],
        &["python3", &server("whoami.py"), DEAF],
    );
    run.ready();
    let lines = run.stop();
    assert!(
        lines
            .iter()
            .any(|line| line.contains("2 workers did not end in time and are killed")),
        "{lines:?}"
    );
}

#[test]
fn a_second_sigint_does_not_wait() {
    let ground = Ground::new();
    let mut run = ground.run(
        &["-w", "2", "-l", ANY, "--grace", "1000m"],
        &["python3", &server("whoami.py"), DEAF],
    );
    run.ready();
    run.signal(Signal::INT);
    run.line("SIGINT: no new connections");
    run.signal(Signal::INT);
    let (status, lines) = run.wait();
    assert_eq!(status.code(), Some(0));
    assert!(
        lines.iter().any(|line| line.contains("are killed")),
        "{lines:?}"
    );
}

#[test]
fn what_a_dead_worker_leaves_behind_ends_too() {
    let ground = Ground::new();
    let note = ground.path().join("grandchild");
    let script = format!(
        "sleep 1000 & echo $! > {}; exec python3 {}",
        note.display(),
        server("whoami.py")
    );
    let mut run = ground.run(&["-w", "1", "-l", ANY], &["sh", "-c", &script]);
    let worker = whoami(run.ready());
    let grandchild: u32 = std::fs::read_to_string(&note)
        .expect("pid")
        .trim()
        .parse()
        .expect("pid");
    assert!(runs(grandchild));
    signal(pid_of(&worker), Signal::KILL);
    run.line("restarted");
    eventually("the grandchild is gone", || !runs(grandchild));
    run.stop();
}

#[test]
fn a_second_supervisor_of_a_name_is_refused_and_told_who_has_it() {
    let ground = Ground::new();
    let mut run = ground.whoami(&["-w", "1", "-l", ANY, "--name", "web"]);
    run.ready();
    let (code, line) = ground.refused(&["-w", "1", "-l", ANY, "--name", "web"], &["sleep", "60"]);
    assert!(
        code == 1
            && line.contains(&format!(
                "group `web` already has a supervisor (pid {})",
                run.pid()
            )),
        "{line}"
    );
    run.stop();
}

#[test]
fn workers_outlive_a_killed_supervisor_and_the_next_one_takes_them_over() {
    let ground = Ground::new();
    let options = ["-w", "3", "-l", ANY, "--name", "web", "--grace", "10s"];
    let mut first = ground.whoami(&options);
    let address = first.ready();
    let before: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    let clients = Clients::start(address, "/slow?ms=1", 2);
    first.murder();
    everyone(address, 3);

    let mut second = ground.whoami(&options);
    assert_eq!(
        second.ready(),
        address,
        "port 0 is content with the port that was"
    );
    let after: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    assert_eq!(before, after, "nobody was restarted");
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty() && answers > 0, "{failures:?}");

    // Workers that were taken over are supervised: they are seen to die, replaced in their slots, rolled, and ended.
    signal(before[2], Signal::KILL);
    second.line(&format!("worker 2 (pid {}) is gone", before[2]));
    second.line("worker 2 restarted");
    let clients = Clients::start(address, "/slow?ms=1", 2);
    second.signal(Signal::HUP);
    second.line("rolling restart done: 3 workers replaced");
    let (_, failures) = clients.stop();
    assert!(failures.is_empty(), "{failures:?}");
    everyone(address, 3);
    second.stop();
    assert!(before.iter().all(|pid| !runs(*pid)));
    assert!(ground.groups().is_empty());
}

#[test]
fn a_takeover_fills_slots_whose_worker_died_meanwhile() {
    let ground = Ground::new();
    let options = ["-w", "3", "-l", ANY, "--name", "web"];
    let mut first = ground.whoami(&options);
    let address = first.ready();
    let before: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    first.murder();
    signal(before[1], Signal::KILL);
    eventually("the worker is gone", || !runs(before[1]));
    let mut options = options;
    options[1] = "4";
    let mut second = ground.whoami(&options);
    second.ready();
    let after: Vec<u32> = everyone(address, 4).iter().map(pid_of).collect();
    assert_eq!((before[0], before[2]), (after[0], after[2]));
    assert!(!before.contains(&after[1]) && !before.contains(&after[3]));
    second.stop();
}

#[test]
fn a_takeover_with_a_new_command_replaces_the_workers_one_at_a_time() {
    let ground = Ground::new();
    let options = ["-w", "2", "-l", ANY, "--name", "web"];
    let mut first = ground.whoami(&options);
    let address = first.ready();
    let before: HashSet<u32> = everyone(address, 2).iter().map(pid_of).collect();
    let clients = Clients::start(address, "/slow?ms=1", 2);
    first.murder();
    let mut second = ground.run(&options, &["python3", &server("whoami.py"), "new"]);
    second.line("the command changed");
    second.line("rolling restart done: 2 workers replaced");
    let (_, failures) = clients.stop();
    assert!(failures.is_empty(), "{failures:?}");
    for worker in everyone(address, 2) {
        assert_eq!(worker["arguments"], serde_json::json!(["new"]));
        assert!(!before.contains(&pid_of(&worker)));
    }
    second.stop();
}

#[test]
fn a_takeover_that_asks_for_something_else_is_refused_and_touches_nobody() {
    let ground = Ground::new();
    let mut first = ground.whoami(&["-w", "2", "-l", ANY, "--name", "web"]);
    let address = first.ready();
    let before: Vec<u32> = everyone(address, 2).iter().map(pid_of).collect();
    first.murder();
    let pids = format!("{} {}", before[0], before[1]);
    // The workers hold the killed supervisor's standard error, not that of these supervisors.
    let (code, line) = ground.refused(
        &["-w", "2", "-l", "127.0.0.2:0", "--name", "web"],
        &["sleep", "60"],
    );
    assert!(
        code == 1 && line.contains(&format!("still serve {address} (pids {pids})")),
        "{line}"
    );
    let fewer = ["-w", "1", "--max-workers", "1", "-l", ANY, "--name", "web"];
    let (code, line) = ground.refused(&fewer, &["sleep", "60"]);
    assert!(
        code == 1 && line.contains("start with -w 2 or more"),
        "{line}"
    );
    assert_eq!(
        everyone(address, 2).iter().map(pid_of).collect::<Vec<_>>(),
        before
    );
    let mut last = ground.whoami(&["-w", "2", "-l", ANY, "--name", "web"]);
    assert_eq!(last.ready(), address);
    last.stop();
}

#[test]
fn a_state_that_is_not_ours_is_set_aside() {
    let ground = Ground::new();
    let folder = ground.runtime().join("web");
    std::fs::create_dir_all(&folder).expect("folder");
    std::fs::write(folder.join("state.json"), "{\"schema\": 1}").expect("state");
    let mut run = ground.whoami(&["-w", "1", "-l", ANY, "--name", "web"]);
    run.line("is not a state file of ours");
    run.ready();
    run.stop();
    assert!(ground.groups().is_empty());
}

/// Returns the messages to a service manager, up to and including one that contains `last`.
fn told(socket: &UnixDatagram, last: &str) -> Vec<String> {
    let mut messages = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let length = socket.recv(&mut buffer).expect("a message");
        messages.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        if messages
            .last()
            .is_some_and(|message| message.contains(last))
        {
            return messages;
        }
    }
}

/// So many workers under a service manager, which is told what they do by this socket.
fn with_a_service_manager(ground: &Ground, workers: &str) -> (UnixDatagram, Command) {
    let path = ground.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("socket");
    let limit = Some(support::patience());
    socket.set_read_timeout(limit).expect("timeout");
    let mut command = ground.command(
        &["-w", workers, "-l", ANY, "--name", "web"],
        &["python3", &server("whoami.py")],
    );
    command.env("NOTIFY_SOCKET", path);
    (socket, command)
}

#[test]
fn a_service_manager_is_told_and_the_workers_cannot_tell_it() {
    let ground = Ground::new();
    let (socket, command) = with_a_service_manager(&ground, "2");
    let mut run = Run::start(command);
    let address = run.ready();
    let ready = told(&socket, "READY=1").concat();
    assert!(
        ready.contains(&format!("MAINPID={}", run.pid())) && ready.contains("STATUS=2 workers on"),
        "{ready}"
    );
    assert!(
        whoami(address)["environment"]
            .get("NOTIFY_SOCKET")
            .is_none()
    );
    run.signal(Signal::HUP);
    let reloading = told(&socket, "RELOADING=1").concat();
    assert!(reloading.contains("MONOTONIC_USEC="), "{reloading}");
    told(&socket, "READY=1");
    run.line("rolling restart done");
    run.signal(Signal::TERM);
    told(&socket, "STOPPING=1");
    run.wait();
}

#[test]
fn a_service_manager_that_does_not_read_holds_nothing_up() {
    let ground = Ground::new();
    let (_deaf, mut command) = with_a_service_manager(&ground, "1");
    // A sign of life each millisecond: the socket is full before the worker is ready.
    command.env("WATCHDOG_USEC", "2000");
    let mut run = Run::start(command);
    whoami(run.ready());
    run.stop();
}

#[test]
fn a_watchdog_is_fed_as_long_as_the_loop_goes_round() {
    let ground = Ground::new();
    let (socket, mut command) = with_a_service_manager(&ground, "1");
    command.env("WATCHDOG_USEC", "300000");
    let mut run = Run::start(command);
    run.ready();
    told(&socket, "READY=1");
    for _ in 0..3 {
        told(&socket, "WATCHDOG=1");
    }
    run.signal(Signal::STOP);
    eventually("all of it stands", || support::has_stopped(run.pid()));
    socket.set_nonblocking(true).expect("nonblocking");
    while socket.recv(&mut [0; 4096]).is_ok() {}
    std::thread::sleep(Duration::from_millis(400));
    assert!(
        socket.recv(&mut [0; 4096]).is_err(),
        "who hangs says nothing"
    );
    run.signal(Signal::CONT);
    run.stop();
}

#[test]
fn workers_become_another_user_and_keep_only_what_they_are_left() {
    if !is_root() {
        return eprintln!("skipped: only root can start workers as another user");
    }
    let ground = Ground::new();
    // `nobody` may have no access to the folder of the sources, so the script is passed as text.
    let script = std::fs::read_to_string(server("whoami.py")).expect("server");
    let mut run = ground.run(
        &["-w", "1", "-l", ANY, "--user", "nobody"],
        &["python3", "-c", &script],
    );
    let worker = whoami(run.ready());
    let nobody = nix::unistd::User::from_name("nobody")
        .expect("users")
        .expect("nobody");
    assert_eq!(
        (&worker["uid"], &worker["gid"]),
        (&nobody.uid.as_raw().into(), &nobody.gid.as_raw().into())
    );
    assert_eq!(worker["groups"], serde_json::json!([nobody.gid.as_raw()]));
    assert_eq!(worker["environment"]["USER"], "nobody");
    assert_eq!(worker["capabilities"]["CapEff"], "0000000000000000");
    run.stop();

    let net_bind_service = format!("{:016x}", 1 << 10);
    for user in ["nobody", "root"] {
        let options = [
            "-w",
            "1",
            "-l",
            ANY,
            "--user",
            user,
            "--group",
            "daemon",
            "--keep-cap",
            "net_bind_service",
        ];
        let mut run = ground.run(&options, &["python3", "-c", &script]);
        let worker = whoami(run.ready());
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(
                worker["capabilities"][set], net_bind_service,
                "{set} of {user}"
            );
        }
        run.stop();
    }
}

#[test]
fn nobody_need_read_what_we_say() {
    let ground = Ground::new();
    let command = ground.command(&["-w", "2", "-l", ANY], &["python3", &server("whoami.py")]);
    let mut run = Run::start_heard_until(command, Some("ready: "));
    let address = run.ready();
    let before = everyone(address, 2);
    signal(pid_of(&before[1]), Signal::KILL);
    eventually("the dead worker is replaced", || {
        pid_of(&everyone(address, 2)[1]) != pid_of(&before[1])
    });
    run.stop();
    assert!(ground.groups().is_empty());
}

#[test]
fn a_terminals_interrupt_reaches_only_the_supervisor() {
    let ground = Ground::new();
    let mut command = ground.command(&["-w", "1", "-l", ANY], &["python3", &server("whoami.py")]);
    command.process_group(0);
    let mut run = Run::start(command);
    let worker = pid_of(&whoami(run.ready()));
    let group =
        |pid| rustix::process::getpgid(rustix::process::Pid::from_raw(pid as i32)).expect("group");
    assert_ne!(group(worker), group(run.pid()));
    run.stop();
}
