//! Invalid input: each case ends with one clear sentence and exit code 1 or 2, and leaves nothing behind.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use std::net::TcpListener;
use std::process::Command;
use support::steered::{assert_nothing_left, isolated, said, status, wakeone};
use support::{Ground, Run, WAKEONE, everyone, server, whoami};

const AT: &str = "127.0.0.1:8080";

/// Returns the exit code of `wakeone run` and its error message, without the lines about its progress.
fn refused(run: Run) -> (i32, String) {
    let (status, lines) = run.wait();
    let news = ["listening on ", "worker "];
    let sentences: Vec<&String> = lines
        .iter()
        .filter(|line| !news.iter().any(|news| line.starts_with(news)))
        .collect();
    assert_eq!(sentences.len(), 1, "one sentence: {lines:#?}");
    assert_eq!(lines.last(), Some(sentences[0]), "it comes last");
    (status.code().expect("exit code"), sentences[0].clone())
}

fn assert_refused(ground: &Ground, run: Run, code: i32, words: &[&str]) {
    let (exit, sentence) = refused(run);
    assert_eq!(exit, code, "{sentence}");
    for word in words {
        assert!(sentence.contains(word), "no `{word}` in: {sentence}");
    }
    assert_nothing_left(ground);
}

/// As `Ground::run`, in an environment and under a command that takes privileges away.
fn run_under(ground: &Ground, under: &[&str], options: &[&str], command: &[&str]) -> Run {
    let plain = ground.command(options, command);
    let mut run = Command::new(under[0]);
    run.args(&under[1..])
        .arg(plain.get_program())
        .args(plain.get_args());
    Run::start(run)
}

#[test]
fn arguments_that_cannot_be_end_with_2() {
    let Some(ground) = isolated() else { return };
    let table: [(&[&str], &[&str]); 10] = [
        (
            &["-l", AT, "--user", "4000000001"],
            &["user 4000000001", "no entry", "--group"],
        ),
        (
            &["-l", AT, "--policy", "fastest"],
            &["`fastest` is no policy", "least-connections"],
        ),
        (&["-l", AT, "-w", "257"], &["257 is not in 1..=256"]),
        (&["-l", AT, "-w", "0"], &["0 is not in 1..=256"]),
        (
            &["-l", "unix:/run/app.sock"],
            &[
                "`unix:/run/app.sock` is no address to listen on",
                "without -l",
            ],
        ),
        (&["-l", "127.0.0.1:port"], &["`127.0.0.1:port`"]),
        (
            &["-l", AT, "-w", "2", "--weight", "2=5"],
            &["--weight 2=", "slots 0 to 1"],
        ),
        (&["-l", AT, "--weight", "0=0"], &["`0=0` is no weight"]),
        (
            &["-l", AT, "--stuck-after", "0s"],
            &["--stuck-after takes 1ms or more"],
        ),
        (&["-w", "2"], &["required", "--listen <ADDR>"]),
    ];
    for (options, words) in table {
        assert_refused(&ground, ground.run(options, &["sleep", "60"]), 2, words);
    }
}

#[test]
fn a_port_in_use_ends_with_1() {
    let Some(ground) = isolated() else { return };
    let other = TcpListener::bind(AT).expect("bind");
    let run = ground.run(&["-w", "2", "-l", AT], &["sleep", "60"]);
    assert_refused(
        &ground,
        run,
        1,
        &["cannot listen on 127.0.0.1:8080", "in use"],
    );
    drop(other);
    let run = ground.run(&["-w", "2", "-l", "192.0.2.1:80"], &["sleep", "60"]);
    assert_refused(&ground, run, 1, &["192.0.2.1:80", "no such address"]);
}

#[test]
fn commands_that_cannot_run_end_with_1() {
    let Some(ground) = isolated() else { return };
    let table: [(&[&str], &[&str]); 4] = [
        (
            &["no-such-command"],
            &["there is no command `no-such-command`"],
        ),
        (&["/no/such/file"], &["there is no file `/no/such/file`"]),
        (
            &["sh", "-c", "exit 3"],
            &["exited with status 3", "sh -c 'exit 3'"],
        ),
        (&["sh", "-c", "kill -9 $$"], &["killed by signal 9"]),
    ];
    for (command, words) in table {
        let run = ground.run(&["-w", "2", "-l", AT], command);
        assert_refused(&ground, run, 1, words);
    }
    // A server that is started as it is, by the same words.
    for (command, words) in &table[..2] {
        for options in [&[][..], &["--split"]] {
            assert_refused(&ground, ground.run(options, command), 1, words);
        }
    }
}

#[test]
fn under_sudo_a_command_that_is_not_in_path_is_said_to_be_in_another_one() {
    let Some(ground) = isolated() else { return };
    let by_sudo = ["env", "SUDO_UID=1000"];
    for options in [&[][..], &["--split"], &["-w", "2", "-l", AT]] {
        let run = run_under(&ground, &by_sudo, options, &["no-such-command"]);
        let words = [
            "sudo has a PATH of its own",
            "$(command -v no-such-command)",
        ];
        assert_refused(&ground, run, 1, &words);
    }
}

#[test]
fn who_would_change_the_user_in_front_of_the_server_is_named() {
    let Some(ground) = isolated() else { return };
    for command in [
        &["setpriv", "--reuid=65534", "--clear-groups", "sleep", "60"][..],
        &["runuser", "-u", "nobody", "--", "sleep", "60"],
        &["su", "nobody", "-s", "/bin/sh", "-c", "sleep 60"],
    ] {
        let mut run = ground.run(&["-w", "2", "-l", AT], command);
        let told = run.line("wakeone run: the command exited");
        let words = format!(
            "by `{}`: leave that out, and give the user by --user",
            command[0]
        );
        assert!(told.contains(&words), "{told}");
        assert_eq!(run.wait().0.code(), Some(1));
        assert_nothing_left(&ground);
    }
}

#[test]
fn without_a_bpffs_only_what_needs_none_is_had() {
    let Some(ground) = isolated() else { return };
    let nowhere = ground.path().join("no-bpffs");
    std::fs::create_dir(&nowhere).expect("folder");
    let nowhere = nowhere.to_str().expect("path");
    let bpffs = format!("WAKEONE_BPFFS={nowhere}");
    let under = ["env", &bpffs];
    let asked: [&[&str]; 4] = [
        &["--queue", "each", "--policy", "least-connections"],
        &["--policy", "shortest-queue"],
        &["--rescue"],
        &["--queue", "each", "--weight", "0=2"],
    ];
    for wish in asked {
        let options = [&["-w", "2", "-l", AT], wish].concat();
        let run = run_under(&ground, &under, &options, &["sleep", "60"]);
        let mount = format!("mount -t bpf bpf {nowhere}");
        assert_refused(&ground, run, 1, &["cannot steer", "is no bpffs", &mount]);
    }
    let told = format!("{nowhere} is no bpffs");
    degraded(
        &ground,
        &under,
        &["--queue", "each"],
        &[&told, "Going on with random", "without rescue"],
    );
    shared(&ground, &under, &[], &[&told, "share one queue instead"]);
    assert!(std::fs::read_dir(nowhere).expect("folder").next().is_none());
}

/// The workers share one queue, and the log says so.
fn shared(ground: &Ground, under: &[&str], wish: &[&str], words: &[&str]) {
    let options = [&["-w", "2", "-l", AT, "--name", "web"], wish].concat();
    let mut run = run_under(ground, under, &options, &["python3", &server("whoami.py")]);
    whoami(run.ready());
    let lines = run.lines();
    for words in [words, &["one queue, policy "]] {
        let told = |line: &String| words.iter().all(|word| line.contains(word));
        assert!(lines.iter().any(told), "{words:?} not in {lines:#?}");
    }
    let group = status(ground, "web");
    assert!(
        group["steered"] == true && group["queued"].is_u64(),
        "{group}"
    );
    run.stop();
    assert_nothing_left(ground);
}

/// The server runs with a simpler policy, and the log says so.
fn degraded(ground: &Ground, under: &[&str], wish: &[&str], words: &[&str]) {
    let options = [&["-w", "2", "-l", AT, "--name", "web"], wish].concat();
    let mut run = run_under(ground, under, &options, &["python3", &server("whoami.py")]);
    let address = run.ready();
    let lines = run.lines();
    let told = lines
        .iter()
        .any(|line| words.iter().all(|word| line.contains(word)));
    assert!(told, "{words:?} not in one line of {lines:#?}");
    everyone(address, 2);
    assert_eq!(status(ground, "web")["steered"], false);
    run.stop();
    assert_nothing_left(ground);
}

#[test]
fn a_capability_that_cannot_be_kept_is_named_alone() {
    let Some(ground) = isolated() else { return };
    let under = ["setpriv", "--bounding-set", "-sys_time"];
    let options = [
        "-w",
        "1",
        "-l",
        AT,
        "--keep-cap",
        "net_raw",
        "--keep-cap",
        "sys_time",
    ];
    let run = run_under(&ground, &under, &options, &["sleep", "60"]);
    let (code, sentence) = refused(run);
    assert_eq!(code, 1, "{sentence}");
    assert!(sentence.contains("cannot keep CAP_SYS_TIME:"), "{sentence}");
    assert!(!sentence.contains("CAP_NET_RAW"), "{sentence}");
}

/// root without the capabilities that steering takes, as in many containers.
const UNPRIVILEGED: [&str; 3] = [
    "setpriv",
    "--bounding-set",
    "-bpf,-net_admin,-sys_admin,-perfmon",
];

#[test]
fn without_the_capabilities_what_was_asked_for_is_refused_and_they_are_named() {
    let Some(ground) = isolated() else { return };
    let asked: [&[&str]; 4] = [
        &["--queue", "each", "--policy", "least-connections"],
        &["--policy", "shortest-queue"],
        &["--rescue"],
        &["--queue", "each", "--weight", "0=2"],
    ];
    for wish in asked {
        let options = [&["-w", "2", "-l", AT], wish].concat();
        let run = run_under(&ground, &UNPRIVILEGED, &options, &["sleep", "60"]);
        assert_refused(
            &ground,
            run,
            1,
            &["cannot steer", "CAP_BPF", "--policy random"],
        );
    }
}

#[test]
fn without_the_capabilities_listeners_on_a_private_port_are_refused_and_they_are_named() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "2", "-l", AT, "--lookup"];
    let unattached = ["setpriv", "--bounding-set", "-net_admin,-sys_admin"];
    let cases: [(&[&str], &str); 2] = [
        (&unattached, "--lookup needs CAP_NET_ADMIN: "),
        (&UNPRIVILEGED, "--lookup needs CAP_BPF and "),
    ];
    for (under, needs) in cases {
        let run = run_under(&ground, under, &options, &["sleep", "60"]);
        assert_refused(&ground, run, 1, &[needs, "or leave --lookup away"]);
    }
}

#[test]
fn without_the_capabilities_the_best_that_can_be_had_is_and_they_are_named() {
    let Some(ground) = isolated() else { return };
    let words = ["CAP_BPF", "CAP_NET_ADMIN", "Going on with random"];
    degraded(&ground, &UNPRIVILEGED, &["--queue", "each"], &words);
    for policy in ["random", "cpu", "hash"] {
        let words = [&format!("Going on with {policy}")[..]];
        degraded(&ground, &UNPRIVILEGED, &["--policy", policy], &words);
    }
    // The same holds for a root without any capability.
    let nobody = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"];
    degraded(&ground, &nobody, &["--queue", "each"], &words);
    // Where nothing was asked for, it needs none.
    for under in [&UNPRIVILEGED[..], &nobody] {
        shared(
            &ground,
            under,
            &["--weight", "0=2", "--policy", "round-robin"],
            &[],
        );
    }
}

#[test]
fn a_failed_start_does_not_touch_a_group_that_runs() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "2", "-l", AT, "--name", "web"];
    let mut run = ground.whoami(&options);
    let address = run.ready();
    let other = ["-w", "2", "-l", "127.0.0.1:8081", "--name"];
    let starts: [(&[&str], &[&str]); 3] = [
        (&["-w", "2", "-l", AT, "--name", "other"], &["sleep", "60"]),
        (&[&other[..], &["web"]].concat(), &["sleep", "60"]),
        (&[&other[..], &["other"]].concat(), &["no-such-command"]),
    ];
    for (options, command) in starts {
        let (code, sentence) = refused(ground.run(options, command));
        assert_eq!(code, 1, "{sentence}");
        everyone(address, 2);
        let group = status(&ground, "web");
        assert!(
            group["steered"] == true && group["agent"] == true,
            "{group}"
        );
        assert_eq!(group["slots"][0]["state"], "up", "{group}");
    }
    run.signal(Signal::TERM);
    run.wait();
    assert_nothing_left(&ground);
}

#[test]
fn what_is_not_there_is_named() {
    let Some(ground) = isolated() else { return };
    for command in [
        &["status", "nobody"][..],
        &["detach", "nobody"],
        &["policy", "nobody", "hash"],
    ] {
        let output = wakeone(&ground, command);
        let lines = said(&output);
        assert_eq!(output.status.code(), Some(1), "{lines:?}");
        assert!(
            lines.len() == 1 && lines[0].contains("there is no group `nobody`"),
            "{lines:?}"
        );
        assert_nothing_left(&ground);
    }
    let output = Command::new(WAKEONE).arg("atach").output().expect("runs");
    let lines = said(&output);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        lines.len() == 1 && lines[0].contains("unrecognized subcommand 'atach'"),
        "{lines:?}"
    );
}

#[test]
fn targets_that_cannot_be_are_named_in_one_sentence() {
    let Some(ground) = isolated() else { return };
    let table: [(&str, i32, &str); 14] = [
        ("", 2, "\"\" is no target"),
        (":", 2, "\":\" is no port"),
        (":0", 2, "a number from 1 to 65535"),
        (":99999", 2, "a number from 1 to 65535"),
        ("1.2.3.4", 2, "\"1.2.3.4\" is no target"),
        ("host:80", 2, "\"host:80\" is no target"),
        (
            "no-such-name",
            1,
            "no process or unit is named no-such-name",
        ),
        ("4194304", 1, "there is no process 4194304"),
        ("pid:4194304", 1, "there is no process 4194304"),
        ("localhost:0", 2, "a number from 1 to 65535"),
        ("localhost:9", 1, "nothing listens on localhost:9"),
        ("9", 1, "nothing listens on port 9, and "),
        (":9", 1, "nothing listens on :9"),
        ("127.0.0.1:9", 1, "nothing listens on 127.0.0.1:9"),
    ];
    for command in ["doctor", "attach"] {
        for (target, code, words) in table {
            let mut refused = Command::new(WAKEONE);
            refused.args([command, target]);
            if command == "attach" {
                refused.arg("--runtime-dir").arg(ground.runtime());
            }
            let output = refused.output().expect("runs");
            let lines = said(&output);
            assert_eq!(output.status.code(), Some(code), "{target}: {lines:?}");
            assert!(output.stdout.is_empty(), "{target}");
            assert!(
                lines.len() == 1 && lines[0].contains(words),
                "{command} {target}: {lines:?}"
            );
            assert_nothing_left(&ground);
        }
    }
}

#[test]
fn doctor_refuses_times_and_places_that_cannot_be() {
    let Some(_ground) = isolated() else { return };
    let table: [(&[&str], i32, &str); 6] = [
        (&["--for", "soon"], 2, "`soon` is no time"),
        (&["--for=-1s"], 2, "`-1s` is no time"),
        (&["--for", "0s"], 2, "100ms or more"),
        (&["--netns", "no-such-place"], 1, "/run/netns/no-such-place"),
        (&["--pid", "4194304"], 1, "/proc/4194304/ns/net"),
        (&["--pid", "1", "--netns", "x"], 2, "cannot be used with"),
    ];
    for (options, code, words) in table {
        let output = Command::new(WAKEONE)
            .arg("doctor")
            .args(options)
            .output()
            .expect("runs");
        let lines = said(&output);
        assert_eq!(output.status.code(), Some(code), "{options:?}: {lines:?}");
        assert!(
            lines.len() == 1 && lines[0].contains(words),
            "{options:?}: {lines:?}"
        );
    }
}

/// A server listens on the port whose number is another server's process id.
#[test]
fn a_number_that_means_two_servers_is_refused() {
    let Some(_ground) = isolated() else { return };
    let script = r#"
        listen='import socket, sys, time; s = socket.create_server(("127.0.0.1", int(sys.argv[1]))); time.sleep(99)'
        python3 -c "$listen" 7400 & first=$!
        python3 -c "$listen" $first &
        for place in pid:$first :$first; do
            for _ in $(seq 100); do
                "$0" doctor $place --for 100ms 2>/dev/null | grep "^tcp 127.0.0.1:" && break
                sleep 0.1
            done
        done
        "$0" attach $first
        echo "code $? of $first"
        kill $(jobs -p)
    "#;
    // Process ids begin with 1 there, so that they are ports.
    let mut apart = Command::new("unshare");
    apart.args([
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "bash",
        "-c",
        script,
        WAKEONE,
    ]);
    let output = apart.output().expect("unshare");
    let (lines, text) = (said(&output), String::from_utf8_lossy(&output.stdout));
    assert!(text.starts_with("tcp 127.0.0.1:7400"), "{text} {lines:?}");
    assert!(text.contains("code 1 of "), "{text} {lines:?}");
    let refusal = "is a port, and the id of a process that listens elsewhere; write :";
    assert!(lines.iter().any(|line| line.contains(refusal)), "{lines:?}");
}
