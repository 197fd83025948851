//! `wakeone run --split` on unchanged real servers whose workers share one listening socket. Each worker gets a queue
//! of its own, shares are even, and a worker that dies loses only the connections that it had accepted.
//!
//! These tests need root, and skip servers that are not installed. A message tells of both.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};
use support::mixed::{Mixed, Speech};
use support::real::installed;
use support::steered::{assert_nothing_left, isolated, number, soak, status, sum, wakeone};
use support::{Clients, Ground, Run, eventually, get, halt, server, signal};
use wakeone_kernel::proc::waits::Processes;
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

const PORT: u16 = 7400;
const GROUP: &str = "at-127-0-0-1-7400";

fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// A server under `--split`, in a network of its own.
struct Split {
    ground: Ground,
    run: Run,
}

impl Split {
    fn start(options: &[&str], command: &[&str]) -> Option<Self> {
        let ground = isolated()?;
        let mut run = ground.command(&[&["--split"], options].concat(), command);
        // The applications of this folder expect this variable.
        run.env("WAKEONE_SLOT", "0");
        let run = Run::start(run);
        Some(Self { ground, run })
    }

    /// Waits until that many workers have a queue of their own, and returns their pids.
    fn settled(&self, workers: usize) -> BTreeSet<u32> {
        let mut pids = BTreeSet::new();
        eventually("every worker has a queue", || {
            pids = self.up();
            pids.len() == workers && pids.iter().all(|pid| support::runs(*pid))
        });
        // A process that was just started may still hold descriptors of its parent.
        eventually("each queue is held by one", || self.own_queues(&pids));
        pids
    }

    /// The workers of the slots that are up.
    fn up(&self) -> BTreeSet<u32> {
        let group = self.status();
        let slots = group["slots"].as_array().cloned().unwrap_or_default();
        let up = slots.iter().filter(|slot| slot["state"] != "down");
        up.filter_map(|slot| slot["pid"].as_u64())
            .map(|pid| pid as u32)
            .collect()
    }

    fn status(&self) -> Value {
        let output = wakeone(&self.ground, &["status", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["groups"][0].clone()
    }

    /// Checks that each of these processes holds a listening socket that no other process holds.
    fn own_queues(&self, pids: &BTreeSet<u32>) -> bool {
        let listening = sockets(Protocol::Tcp, Which::Listening, PORT).expect("sock_diag");
        let all = Processes::read();
        let mut alone = BTreeSet::new();
        for entry in &listening {
            let inode = entry.socket.inode;
            let holders: BTreeSet<u32> = all
                .held
                .iter()
                // The agent borrows listeners for a moment.
                .filter(|held| held.inode == inode && held.pid != self.run.pid())
                .map(|held| held.pid)
                .collect();
            if holders.len() == 1 {
                alone.extend(holders);
            }
        }
        alone.is_superset(pids)
    }

    /// How often each slot was chosen.
    fn chosen(&self) -> Vec<i64> {
        let group = status(&self.ground, GROUP);
        let slots = group["slots"].as_array().expect("slots").len();
        (0..slots)
            .filter(|slot| group["slots"][*slot]["state"] == "up")
            .map(|slot| number(&group, slot, "selected"))
            .collect()
    }

    /// Asks for a while from several clients, and expects even shares.
    fn serves_evenly(&self) {
        let before = self.chosen();
        let since = || -> Vec<i64> {
            let now = self.chosen();
            now.iter()
                .zip(&before)
                .map(|(now, then)| now - then)
                .collect()
        };
        let clients = Clients::start(address(), "/", 4);
        support::slowly("300 connections", || since().iter().sum::<i64>() >= 300);
        let (answers, failures) = clients.stop();
        assert_eq!(failures, Vec::<String>::new(), "of {answers}");
        let chosen = since();
        let mean = chosen.iter().sum::<i64>() as f64 / chosen.len() as f64;
        let highest = *chosen.iter().max().expect("slots") as f64;
        assert!(highest <= 1.1 * mean + 2.0, "{chosen:?}");
        assert_eq!(self.status()["fallbacks"], 0);
    }

    /// Kills workers under a mixed load, in a soak for as long as `soak_for`. A killed worker loses the connections
    /// that it had accepted, with any server; nothing else may fail.
    fn survives_kills(&self, workers: usize, speech: &Speech, soak_for: Duration) {
        self.settled(workers);
        let mut load = Mixed::start(address(), speech);
        let until = Instant::now() + if soak() { soak_for } else { Duration::ZERO };
        let mut kills = 0;
        while kills < 2 || Instant::now() < until {
            let pids = self.settled(workers);
            let asked = load.answers();
            support::slowly("there are answers", || load.answers() > asked + 50);
            let victim = *pids.iter().nth(kills % workers).expect("a worker");
            load.kill(victim);
            eventually("it is gone", || !self.up().contains(&victim));
            kills += 1;
        }
        self.settled(workers);
        let listening = || sockets(Protocol::Tcp, Which::Listening, PORT).expect("sock_diag");
        support::slowly("no queue of a dead worker is left", || {
            listening().len() == workers + 1
        });
        let outcome = load.stop();
        eprintln!(
            "{} answers, {} kills, {} lost with a worker, {} cut, {} wrong",
            outcome.answers,
            outcome.kills,
            outcome.lost,
            outcome.cut,
            outcome.wrong.len()
        );
        assert_eq!(
            outcome.wrong,
            Vec::<String>::new(),
            "{:#?}",
            self.run.lines()
        );
        // A connection can be cut in one microsecond of each kill and each rescue.
        assert!(outcome.cut <= 1 + outcome.kills / 20, "{outcome:?}");
    }

    /// Checks that the server answers as without Wakeone, and that there is no group.
    fn serves_unsplit(&self, requests: usize) {
        let up = || std::net::TcpStream::connect(address()).is_ok();
        support::slowly("it listens", up);
        for _ in 0..requests {
            get(address(), "/").expect("an answer");
        }
        assert_eq!(self.status(), Value::Null);
    }

    /// Ends it by SIGTERM, and checks that nothing is left.
    fn ends(self) -> Vec<String> {
        let Self { ground, run } = self;
        let lines = run.stop();
        assert_nothing_left(&ground);
        lines
    }

    /// Does the same with another signal, by which a server may die.
    fn ends_by(self, which: Signal) -> Vec<String> {
        let Self { ground, run } = self;
        run.signal(which);
        let (_, lines) = run.wait();
        assert_nothing_left(&ground);
        lines
    }
}

/// Runs `--split=check`. Returns its exit code and its output.
fn check(command: &[&str]) -> Option<(Option<i32>, String)> {
    let ground = isolated()?;
    let mut command = ground.command(&["--split=check"], command);
    let output = command.env("WAKEONE_SLOT", "0").output().expect("wakeone");
    assert_nothing_left(&ground);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some((output.status.code(), text))
}

/// Shares are even with these options on a busy machine too: no worker counts as stuck.
const EVEN: [&str; 5] = [
    "--policy",
    "round-robin",
    "--no-rescue",
    "--stuck-after",
    "60s",
];

fn python(options: &[&str], mode: &str, workers: &str) -> Option<Split> {
    let port = PORT.to_string();
    let script = server("shared.py");
    Split::start(options, &["python3", &script, mode, &port, workers])
}

/// How long a soak kills workers of one kind of server.
const MINUTE: Duration = Duration::from_secs(60);

/// Checks shares, and then kills workers of a server that runs with the default options.
fn whole(start: impl Fn(&[&str]) -> Option<Split>, workers: usize, soak_for: Duration) {
    let Some(split) = start(&EVEN) else {
        return;
    };
    split.settled(workers);
    split.serves_evenly();
    split.ends();
    let split = start(&[]).expect("root");
    split.survives_kills(workers, &Speech::Http, soak_for);
    split.ends();
}

#[test]
fn python_prefork_in_every_way_of_waiting() {
    for mode in ["accept", "epoll", "exclusive", "poll", "select"] {
        eprintln!("{mode}");
        whole(|options| python(options, mode, "3"), 3, MINUTE / 5);
    }
}

#[test]
fn ways_that_are_easily_broken() {
    for mode in ["dup", "passed", "clone", "relisten"] {
        eprintln!("{mode}");
        whole(|options| python(options, mode, "3"), 3, MINUTE / 4);
    }
}

#[test]
fn gunicorn() {
    if !installed("gunicorn") {
        return eprintln!("skipped: gunicorn is not installed");
    }
    let app = server("app.py");
    let folder = app.trim_end_matches("app.py");
    let bind = address().to_string();
    for class in ["sync", "gthread"] {
        let command = [
            "gunicorn",
            "-k",
            class,
            "-w",
            "3",
            "--bind",
            &bind,
            "--chdir",
            folder,
            "--log-level",
            "warning",
            "app:wsgi",
        ];
        eprintln!("{class}");
        whole(|options| Split::start(options, &command), 3, MINUTE);
    }
}

#[test]
fn hypercorn_shares_a_socket_that_has_reuseport() {
    if !installed("hypercorn") {
        return eprintln!("skipped: hypercorn is not installed");
    }
    let app = format!("{}:asgi", server("app.py"));
    let bind = address().to_string();
    let command = ["hypercorn", "-w", "3", "--bind", &bind, &app];
    let Some(split) = Split::start(&EVEN, &command) else {
        return;
    };
    split.settled(3);
    split.serves_evenly();
    let lines = split.ends();
    let told = |text: &str| lines.iter().any(|line| line.contains(text));
    assert!(told("ready: 127.0.0.1:7400 is split"), "{lines:?}");
    assert!(told("queues of their own"), "{lines:?}");
    let (code, told) = check(&command).expect("root");
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("would get a queue of its own"), "{told}");
}

#[test]
fn granian_has_a_socket_for_each_worker_and_is_left_to_attach() {
    if !installed("granian") {
        return eprintln!("skipped: granian is not installed");
    }
    let app = server("app.py");
    let folder = app.trim_end_matches("/app.py");
    let mut granian = vec![
        "granian",
        "--interface",
        "asgi",
        "--workers",
        "3",
        "--no-ws",
    ];
    granian.extend([
        "--host",
        "127.0.0.1",
        "--port",
        "7400",
        "--working-dir",
        folder,
    ]);
    granian.push("app:asgi");
    let Some(mut split) = Split::start(&EVEN, &granian) else {
        return;
    };
    let line = split
        .run
        .line("is left alone: the server opens a socket for each worker");
    assert!(line.contains("wakeone attach 127.0.0.1:7400"), "{line}");
    split.serves_unsplit(20);
    split.ends();
    let (code, told) = check(&granian).expect("root");
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("wakeone attach 127.0.0.1:7400"), "{told}");
}

fn configure(folder: &std::path::Path, workers: usize) -> String {
    let at = folder.display();
    let conf = format!(
        "daemon off; user root; worker_processes {workers}; pid {at}/nginx.pid; error_log {at}/error.log;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3;\n\
         uwsgi_temp_path {at}/4; scgi_temp_path {at}/5;\n\
         server {{ listen 127.0.0.1:{PORT}; location / {{ return 200 \"ok\"; }}\n\
         location = /echo {{ return 200 $arg_word; }}\n\
         location = /slow {{ limit_rate 3000; return 200 ${{arg_word}}{filler}; }} }} }}\n",
        filler = "x".repeat(3500)
    );
    let path = folder.join("nginx.conf");
    std::fs::write(&path, conf).expect("write");
    path.display().to_string()
}

#[test]
fn nginx_without_reuseport() {
    if !installed("nginx") {
        return eprintln!("skipped: nginx is not installed");
    }
    let folder = tempfile::tempdir().expect("folder");
    let conf = configure(folder.path(), 3);
    let Some(split) = Split::start(&EVEN, &["nginx", "-c", &conf]) else {
        return;
    };
    let first = split.settled(3);
    split.serves_evenly();
    // A reload replaces the workers; connections that wait in the old workers' queues go to the new ones.
    let clients = Clients::start(address(), "/", 4);
    configure(folder.path(), 4);
    split.run.signal(Signal::HUP);
    let second = eventually_other(&split, &first, 4);
    let (answers, failures) = clients.stop();
    assert_eq!(failures, Vec::<String>::new(), "of {answers}");
    assert!(first.is_disjoint(&second));
    split.ends();
    let split = Split::start(&[], &["nginx", "-c", &conf]).expect("root");
    split.survives_kills(4, &Speech::Http, MINUTE);
    split.ends();
}

/// Waits until that many workers, none of them in `former`, have queues.
fn eventually_other(split: &Split, former: &BTreeSet<u32>, workers: usize) -> BTreeSet<u32> {
    let mut now = BTreeSet::new();
    support::slowly("new workers have queues", || {
        now = split.up();
        now.len() == workers && now.is_disjoint(former)
    });
    now
}

#[test]
fn a_low_port_and_workers_of_another_user() {
    if !installed("nginx") {
        return eprintln!("skipped: nginx is not installed");
    }
    let folder = tempfile::tempdir().expect("folder");
    let conf = configure(folder.path(), 2);
    let text = std::fs::read_to_string(&conf).expect("read");
    let text = text
        .replace("user root", "user nobody nogroup")
        .replace(&format!("127.0.0.1:{PORT}"), "[::]:80 ipv6only=off");
    std::fs::write(&conf, text).expect("write");
    let Some(split) = Split::start(&EVEN, &["nginx", "-c", &conf]) else {
        return;
    };
    support::slowly("both workers have queues", || split.up().len() == 2);
    let address = SocketAddr::from(([127, 0, 0, 1], 80));
    for _ in 0..40 {
        assert_eq!(get(address, "/").expect("an answer"), "ok");
    }
    let group = split.status();
    let chosen: Vec<i64> = (0..2)
        .map(|slot| number(&group, slot, "selected"))
        .collect();
    assert_eq!(chosen.iter().sum::<i64>(), 40, "{group}");
    assert!(
        chosen.iter().all(|chosen| (18..=22).contains(chosen)),
        "{chosen:?}"
    );
    split.ends();
}

#[test]
fn uvicorn_whose_workers_are_new_programs() {
    if !installed("uvicorn") {
        return eprintln!("skipped: uvicorn is not installed");
    }
    let app = server("app.py");
    let folder = app.trim_end_matches("app.py");
    let port = PORT.to_string();
    let command = [
        "uvicorn",
        "--workers",
        "3",
        "--port",
        &port,
        "--app-dir",
        folder,
        "--log-level",
        "warning",
        "app:asgi",
    ];
    whole(|options| Split::start(options, &command), 3, MINUTE);
}

#[test]
fn node_cluster() {
    if !installed("node") {
        return eprintln!("skipped: node is not installed");
    }
    let script = server("cluster.js");
    let port = PORT.to_string();
    let Some(split) = Split::start(&EVEN, &["node", &script, &port, "none", "3"]) else {
        return;
    };
    split.settled(3);
    split.serves_evenly();
    let lines = split.ends_by(Signal::INT);
    assert!(
        lines.iter().any(|line| line.contains("is split")),
        "{lines:?}"
    );
    let command = ["node", &script, &port, "none", "3"];
    let split = Split::start(&[], &command).expect("root");
    split.survives_kills(3, &Speech::Http, MINUTE);
    split.ends_by(Signal::INT);
    // The primary accepts itself, so there is nothing to split, and the server works as before.
    let Some(mut split) = Split::start(&EVEN, &["node", &script, &port, "rr", "3"]) else {
        return;
    };
    split
        .run
        .line("is not split yet: only the process that opened it listens");
    split.serves_unsplit(100);
    split.ends_by(Signal::INT);
}

#[test]
fn php_fpm() {
    if !installed("php-fpm8.2") {
        return eprintln!("skipped: php-fpm is not installed");
    }
    let folder = tempfile::tempdir().expect("folder");
    let here = folder.path().display();
    let conf = folder.path().join("fpm.conf");
    let text = format!(
        "[global]\npid = {here}/fpm.pid\nerror_log = {here}/fpm.log\ndaemonize = no\n\
         [www]\nuser = root\ngroup = root\nlisten = 127.0.0.1:{PORT}\npm = static\npm.max_children = 3\nping.path = /ping\n"
    );
    std::fs::write(&conf, text).expect("write");
    let conf = conf.display().to_string();
    let command = ["php-fpm8.2", "-R", "-F", "-y", &conf];
    let Some(split) = Split::start(&EVEN, &command) else {
        return;
    };
    let first = split.settled(3);
    let before = split.chosen();
    for round in 0..120 {
        assert!(pong().expect("an answer").contains("pong"), "{round}");
    }
    let chosen = split.chosen();
    let mut since = chosen.iter().zip(&before).map(|(now, then)| now - then);
    assert!(
        since.all(|chosen| (38..=42).contains(&chosen)),
        "{before:?} {chosen:?}"
    );
    for victim in first {
        signal(victim, Signal::KILL);
        // Until it has died it may still accept.
        eventually("it is dead", || !support::runs(victim));
        for _ in 0..20 {
            assert!(pong().expect("an answer").contains("pong"));
        }
    }
    split.settled(3);
    split.ends();
    let script = folder.path().join("echo.php").display().to_string();
    let text = "<?php usleep(1000 * $_GET['ms']); echo $_GET['word'];";
    std::fs::write(&script, text).expect("write");
    let split = Split::start(&[], &command).expect("root");
    split.survives_kills(3, &Speech::FastCgi(script), MINUTE);
    split.ends();
}

/// Returns the answer of php-fpm to its ping, by FastCGI.
fn pong() -> std::io::Result<String> {
    let mut stream = std::net::TcpStream::connect(address())?;
    stream.set_read_timeout(Some(support::patience()))?;
    support::mixed::fastcgi(&mut stream, "/ping", "", false)
}

#[test]
fn go_is_left_as_it_is() {
    if !installed("go") {
        return eprintln!("skipped: go is not installed");
    }
    let folder = tempfile::tempdir().expect("folder");
    let binary = folder.path().join("server").display().to_string();
    let built = std::process::Command::new("go")
        .args(["build", "-o", &binary, &server("go/main.go")])
        .env("GO111MODULE", "off")
        .status();
    assert!(built.expect("go").success());
    let at = address().to_string();
    let Some((code, told)) = check(&[&binary, &at]) else {
        return;
    };
    assert_eq!(code, Some(1));
    assert!(told.contains("is a Go program"), "{told}");
    let Some(split) = Split::start(&EVEN, &[&binary, &at]) else {
        return;
    };
    split.serves_unsplit(100);
    let lines = split.ends_by(Signal::TERM);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("nothing is split: "), "{lines:?}");
}

#[test]
fn an_epoll_set_from_before_the_fork_is_left_alone_and_that_is_said() {
    let Some(split) = python(&EVEN, "early", "3") else {
        return;
    };
    split.serves_unsplit(200);
    let lines = split.ends();
    let told: Vec<&String> = lines
        .iter()
        .filter(|line| line.contains("stays with"))
        .collect();
    assert_eq!(told.len(), 1, "{lines:?}");
    assert!(told[0].contains("registered before the fork"), "{lines:?}");
}

#[test]
fn a_first_process_that_accepts_too_gets_its_part() {
    let Some(split) = python(&EVEN, "owner", "2") else {
        return;
    };
    eventually("three slots are up", || split.up().len() == 3);
    split.serves_evenly();
    split.ends();
}

#[test]
fn a_check_changes_nothing_and_tells() {
    let script = server("shared.py");
    let port = PORT.to_string();
    let Some((code, told)) = check(&["python3", &script, "poll", &port, "2"]) else {
        return;
    };
    assert_eq!(code, Some(0), "{told}");
    let own = told
        .lines()
        .filter(|line| line.contains("would get a queue of its own"));
    assert_eq!(own.count(), 2, "{told}");
    let (_, told) = check(&["python3", &script, "early", &port, "2"]).expect("root");
    assert!(told.contains("it opened the listener"), "{told}");
    let (_, told) = check(&["sleep", "3"]).expect("root");
    assert!(told.starts_with("nothing to split"), "{told}");
}

/// The folder of the library that a process was started with; it stays when `wakeone run` is killed.
fn library_of(pid: u32) -> std::path::PathBuf {
    let variables = std::fs::read_to_string(format!("/proc/{pid}/environ")).expect("variables");
    let library = variables
        .split('\0')
        .find_map(|variable| variable.strip_prefix("LD_PRELOAD="))
        .expect("the library");
    let folder = std::path::Path::new(library).parent().expect("folder");
    folder.to_owned()
}

#[test]
fn after_kill_9_the_server_goes_on_and_detach_takes_the_pins() {
    let Some(split) = python(&EVEN, "accept", "3") else {
        return;
    };
    let workers = split.settled(3);
    let Split { ground, run } = split;
    let library = library_of(*workers.first().expect("a worker"));
    run.murder();
    let clients = Clients::start(address(), "/", 2);
    let victim = *workers.iter().next().expect("a worker");
    std::thread::sleep(Duration::from_millis(300));
    signal(victim, Signal::KILL);
    std::thread::sleep(Duration::from_millis(700));
    let output = wakeone(&ground, &["detach", "--all"]);
    assert!(output.status.success(), "{output:?}");
    std::thread::sleep(Duration::from_millis(500));
    let (answers, failures) = clients.stop();
    assert!(answers > 100, "{answers}");
    assert!(failures.len() <= 2, "{failures:?}");
    let survivors: Vec<u32> = workers.into_iter().filter(|pid| *pid != victim).collect();
    let parent = wakeone_kernel::proc::waits::identity(survivors[0])
        .expect("a worker")
        .parent;
    signal(parent, Signal::TERM);
    std::fs::remove_dir_all(library).expect("the library's folder");
    assert_nothing_left(&ground);
}

/// `wakeone run` is killed while workers ask it. Each worker then has a queue that is chosen, or the shared socket.
#[test]
fn killed_while_workers_ask_it_leaves_a_server_that_answers() {
    for wait_ms in [0, 3, 10, 20, 40, 80] {
        let Some(Split { ground, run }) = python(&EVEN, "accept", "8") else {
            return;
        };
        let up = || std::net::TcpStream::connect(address()).is_ok();
        support::slowly("it listens", up);
        std::thread::sleep(Duration::from_millis(wait_ms));
        let server = wakeone_kernel::proc::process::children(run.pid())[0];
        let library = library_of(server);
        run.murder();
        let clients = Clients::start(address(), "/", 4);
        std::thread::sleep(Duration::from_millis(700));
        let (answers, failures) = clients.stop();
        assert!(answers > 100, "{answers} after {wait_ms} ms");
        assert_eq!(failures, Vec::<String>::new(), "after {wait_ms} ms");
        signal(server, Signal::TERM);
        support::slowly("it ends", || !support::runs(server));
        std::fs::remove_dir_all(library).expect("the library's folder");
        let output = wakeone(&ground, &["detach", "--all"]);
        assert!(output.status.success(), "{output:?}");
        assert_nothing_left(&ground);
    }
}

/// The first process holds the shared socket, and does not count as a worker.
#[test]
fn the_first_process_is_told_apart_from_the_workers() {
    let Some(split) = python(&EVEN, "accept", "3") else {
        return;
    };
    let workers = split.settled(3);
    let first = wakeone_kernel::proc::process::children(split.run.pid())[0];
    let clients = Clients::start(address(), "/", 2);
    let doctor = ["doctor", ":7400", "--for", "1s", "--json", "--no-tracing"];
    let output = std::process::Command::new(support::WAKEONE)
        .args(doctor)
        .output();
    let told: Value = serde_json::from_slice(&output.expect("wakeone").stdout).expect("JSON");
    let told = &told["listeners"][0];
    let pids = |rows: &Value| -> BTreeSet<u32> {
        let rows = rows.as_array().cloned().unwrap_or_default();
        rows.iter()
            .filter_map(|row| Some(row["pid"].as_u64()? as u32))
            .collect()
    };
    assert_eq!(pids(&told["workers"]), workers, "{told}");
    let kept: Vec<&Value> = told["queues"]
        .as_array()
        .expect("queues")
        .iter()
        .filter(|queue| queue["kept_by"] == first)
        .collect();
    assert_eq!(kept.len(), 1, "{told}");
    let output = wakeone(&split.ground, &["top", ":7400", "--once", "--no-tracing"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains(&format!("{first} keeps a socket as a last resort")),
        "{text}"
    );
    clients.stop();
    split.ends();
}

/// The broker gets foreign bytes, wrong tokens and silent connections, and still serves the others.
#[test]
fn hostile_clients_of_the_broker_are_survived() {
    let Some(split) = python(&EVEN, "accept", "2") else {
        return;
    };
    split.settled(2);
    let names = std::fs::read_to_string("/proc/thread-self/net/unix").expect("sockets");
    let name = names
        .lines()
        .find_map(|line| Some(line.split_once("@wakeone-split-")?.1.trim().to_owned()))
        .expect("the broker's name");
    let name = format!("wakeone-split-{name}");
    let mut open = Vec::new();
    for round in 0_u32..300 {
        use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
        let client = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        )
        .expect("socket");
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("name");
        let _ = rustix::net::connect(&client, &address);
        let noise: Vec<u8> = (0..round % 80).map(|at| (at * 7 + round) as u8).collect();
        if round % 3 > 0 {
            let _ = rustix::net::send(&client, &noise, SendFlags::NOSIGNAL);
        }
        open.push(client);
    }
    // Silent connections delay others for as long as a conversation may take at most; their number is bounded.
    drop(open.split_off(200));
    split.survives_kills(2, &Speech::Http, Duration::ZERO);
    drop(open);
    split.ends();
}

/// Makes a folder with `wakeone` and a script that another user may run. It has that user's folder for state and for
/// the library, which nobody else can write to. Enters a new network namespace; returns `None` where that takes root.
fn for_another_user(
    name: &str,
) -> Option<(tempfile::TempDir, std::path::PathBuf, std::path::PathBuf)> {
    isolated()?;
    let folder = tempfile::tempdir_in("/var/lib").expect("folder");
    // Other users may have no access to the folder of the sources.
    let binary = folder.path().join("wakeone");
    std::fs::copy(support::WAKEONE, &binary).expect("copy");
    std::fs::copy(server(name), folder.path().join(name)).expect("copy");
    let runtime = folder.path().join("run");
    std::fs::create_dir(&runtime).expect("folder");
    std::os::unix::fs::chown(&runtime, Some(65534), Some(65534)).expect("chown");
    use std::os::unix::fs::PermissionsExt;
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).expect("mode");
    Some((folder, binary, runtime))
}

/// For another user, without any privilege, each worker has a socket of its own, and the kernel's hash chooses.
#[test]
fn without_privileges_workers_get_queues_all_the_same() {
    let Some((folder, binary, runtime)) = for_another_user("shared.py") else {
        return;
    };
    let script = folder.path().join("shared.py");
    let mut command = std::process::Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&binary)
        .args(["run", "--split", "--runtime-dir"])
        .arg(&runtime)
        .env("XDG_RUNTIME_DIR", &runtime)
        .args(["--", "/usr/bin/env", "python3"])
        .arg(&script)
        .args(["poll", &PORT.to_string(), "3"]);
    let run = Run::start(command);
    let mut seen = BTreeSet::new();
    eventually("all three workers answer", || {
        seen.extend(get(address(), "/"));
        seen.len() == 3
    });
    let listening = sockets(Protocol::Tcp, Which::Listening, PORT).expect("sock_diag");
    assert_eq!(listening.len(), 3, "the first worker has the shared socket");
    let clients = Clients::start(address(), "/", 4);
    std::thread::sleep(Duration::from_millis(500));
    let (answers, failures) = clients.stop();
    assert!(
        answers > 100 && failures.is_empty(),
        "{answers} {failures:?}"
    );
    let lines = run.stop();
    assert!(lines[0].contains("nothing steers"), "{lines:?}");
}

/// Threads that receive from one UDP socket get a queue each. If a thread ends, others answer the datagrams in its
/// queue.
#[test]
fn python_threads_of_one_udp_socket() {
    let port = PORT.to_string();
    let script = server("datagrams.py");
    let Some(split) = Split::start(&[], &["python3", &script, &port, "4"]) else {
        return;
    };
    let client = || {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
        socket.connect(address()).expect("connect");
        socket
            .set_read_timeout(Some(Duration::from_millis(200)))
            .expect("timeout");
        socket
    };
    let ask = |socket: &std::net::UdpSocket, what: &str| {
        let mut answer = [0_u8; 100];
        socket.send(what.as_bytes())?;
        let length = socket.recv(&mut answer)?;
        let text = String::from_utf8_lossy(&answer[..length]).into_owned();
        Ok::<_, std::io::Error>(text)
    };
    eventually("it answers", || ask(&client(), "x").is_ok());
    let clients: Vec<_> = (0..32).map(|_| client()).collect();
    let mut threads = BTreeSet::new();
    eventually("all four threads answer", || {
        for client in &clients {
            if let Ok(answer) = ask(client, "x") {
                threads.extend(answer.split(' ').next().map(str::to_owned));
            }
        }
        threads.len() >= 4
    });
    let queues = || {
        let sockets = sockets(Protocol::Udp, Which::Listening, PORT).expect("sock_diag");
        sockets.iter().filter(|e| e.peer.port() == 0).count()
    };
    assert_eq!(queues(), 4);
    for round in 0..40 {
        clients[round % 32].send(b"end").expect("send");
        for (number, client) in clients.iter().enumerate() {
            let wish = format!("{round}-{number}");
            // A client asks again if it gets no answer. The answer to an earlier question may come late.
            let answered = (0..50).any(|_| {
                ask(client, &wish).is_ok_and(|answer| answer.ends_with(&format!(" {wish}")))
            });
            assert!(answered, "no answer to {wish}");
        }
    }
    let lines = split.ends_by(Signal::TERM);
    assert!(
        lines.iter().any(|line| line.contains("/udp is split")),
        "{lines:?}"
    );
}

const DATAGRAMS: &str = "at-udp-127-0-0-1-7400";
/// Each datagram is placed anew.
const EACH: [&str; 7] = [
    "--policy",
    "round-robin",
    "--no-rescue",
    "--stuck-after",
    "60s",
    "--affinity",
    "none",
];

/// How many answers came from each reader.
type Shares = BTreeMap<String, u32>;

/// One flow of numbers, from a client that has a few under way. Each must be answered exactly once.
struct Flow {
    socket: UdpSocket,
    next: u32,
    sent: u32,
}

impl Flow {
    fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        socket.connect(address()).expect("connect");
        let patience = Duration::from_secs(5);
        socket.set_read_timeout(Some(patience)).expect("timeout");
        Self {
            socket,
            next: 0,
            sent: 0,
        }
    }

    /// Returns a flow that has had its first answer.
    fn served() -> Self {
        let mut flow = Self::start();
        eventually("it answers", || {
            flow.sent += 1;
            let _ = flow.socket.send(b"x");
            flow.socket.recv(&mut [0; 100]).is_ok()
        });
        flow
    }

    fn say(&mut self, what: &str) {
        self.socket.send(what.as_bytes()).expect("send");
        self.sent += 1;
    }

    /// Asks `count` times, ten at a time.
    fn ask(&mut self, count: u32) -> Shares {
        let mut shares = Shares::new();
        for _ in 0..count / 10 {
            self.ask_at_once(10, &mut shares);
        }
        shares
    }

    fn ask_at_once(&mut self, count: u32, shares: &mut Shares) {
        let mut wanted: BTreeSet<String> = (self.next..self.next + count)
            .map(|number| number.to_string())
            .collect();
        self.next += count;
        for number in &wanted {
            self.say(number);
        }
        self.answers(&mut wanted, shares);
    }

    fn answers(&self, wanted: &mut BTreeSet<String>, shares: &mut Shares) {
        while !wanted.is_empty() {
            let mut answer = [0_u8; 100];
            let length = match self.socket.recv(&mut answer) {
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => panic!("{wanted:?} of {} lost: {error}", self.next),
            };
            let text = String::from_utf8_lossy(&answer[..length]);
            let (who, number) = text.split_once(' ').expect("an answer");
            if number == "x" {
                continue; // of when it was looked whether anybody is there
            }
            assert!(wanted.remove(number), "{number} twice");
            *shares.entry(who.to_owned()).or_default() += 1;
        }
    }
}

fn assert_even(shares: &Shares, readers: usize) {
    let most = shares.values().max().copied().unwrap_or(0);
    let mean = f64::from(shares.values().sum::<u32>()) / readers as f64;
    assert!(
        shares.len() == readers && f64::from(most) <= 1.1 * mean,
        "{shares:?}"
    );
}

/// The readers that `status` shows.
fn readers_up(split: &Split) -> Vec<u32> {
    let group = split.status();
    let slots = group["slots"].as_array().cloned().unwrap_or_default();
    let up = slots.iter().filter(|slot| slot["state"] == "up");
    up.filter_map(|slot| slot["pid"].as_u64())
        .map(|pid| pid as u32)
        .collect()
}

/// One client sends, and each datagram is placed anew, so every thread reads its part. Threads come and go, and no
/// datagram bypasses the program: it placed as many as were sent, and one more for each thread that ended. (That empty
/// one only wakes another thread.)
#[test]
fn threads_of_one_udp_socket_are_steered() {
    let port = PORT.to_string();
    let script = server("datagrams.py");
    let Some(split) = Split::start(&EACH, &["python3", &script, &port, "4"]) else {
        return;
    };
    let mut flow = Flow::served();
    eventually("four threads have a slot each", || {
        flow.ask(10);
        readers_up(&split).len() == 4
    });
    let group = status(&split.ground, DATAGRAMS);
    assert_eq!(group["protocol"], "udp", "{group}");
    assert_eq!(group["policy"], "round-robin", "{group}");
    assert_even(&flow.ask(400), 4);
    let placed = || sum(&status(&split.ground, DATAGRAMS), "selected");
    let (before, sent) = (placed(), flow.sent);
    let ends = if soak() { 500 } else { 40 };
    for _ in 0..ends {
        flow.say("end");
        flow.ask(40);
    }
    eventually("four threads have a slot each again", || {
        flow.ask(10);
        readers_up(&split).len() == 4
    });
    assert_even(&flow.ask(400), 4);
    let (placed, sent) = (placed() - before, i64::from(flow.sent - sent));
    assert!(
        (sent..=sent + ends).contains(&placed),
        "{placed} placed, {sent} sent, {ends} woken"
    );
    assert_eq!(status(&split.ground, DATAGRAMS)["fallbacks"], 0);
    let lines = split.ends_by(Signal::TERM);
    let split = |line: &String| line.contains("/udp is split") && line.contains("round-robin");
    assert!(lines.iter().any(split), "{lines:?}");
}

/// The kernel's hash knows one flow, and gives all of it to one reader, as it does without us.
#[test]
fn by_hash_one_flow_has_one_reader() {
    let port = PORT.to_string();
    let script = server("datagrams.py");
    let options = ["--policy", "hash"];
    let Some(split) = Split::start(&options, &["python3", &script, &port, "4"]) else {
        return;
    };
    let mut flow = Flow::served();
    // Threads get their queues when they first receive. The others follow soon.
    eventually("four threads have a slot each", || {
        readers_up(&split).len() == 4
    });
    let shares = flow.ask(200);
    assert_eq!(shares.len(), 1, "{shares:?}");
    split.ends_by(Signal::TERM);
}

/// The same server in C, with every way to receive. Threads come and go, and leave no descriptor.
#[test]
fn threads_in_c_receive_every_datagram_once_by_whatever_call() {
    let folder = tempfile::tempdir().expect("folder");
    let program = folder.path().join("datagrams");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../shim/tests/datagrams.c");
    let program = program.display().to_string();
    let compiled = std::process::Command::new("cc")
        .args(["-O1", "-pthread", "-o", &program, source])
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        panic!("{source} is not compiled");
    }
    for call in ["recv", "recvfrom", "recvmsg", "recvmmsg", "read"] {
        let Some(split) = Split::start(&EACH, &[&program, call, "5000"]) else {
            return;
        };
        let Split { ground, run } = split;
        let (code, lines) = run.wait();
        assert!(code.success(), "{call}: {lines:?}");
        assert_nothing_left(&ground);
    }
}

/// Processes that share one UDP socket have a queue each, however they wait for it. If one is killed, the others answer
/// the datagrams in its queue.
#[test]
fn processes_of_one_udp_socket_are_steered_and_killed() {
    for (wait, each) in [
        ("recv", 1),
        ("poll", 1),
        ("epoll", 1),
        ("asyncio", 1),
        ("threads", 2),
    ] {
        let port = PORT.to_string();
        let script = server("datagrams_prefork.py");
        let Some(split) = Split::start(&EACH, &["python3", &script, &port, "4", wait]) else {
            return;
        };
        let mut flow = Flow::served();
        eventually("four processes have their slots", || {
            flow.ask(10);
            readers_up(&split).len() == 4 * each
        });
        assert_even(&flow.ask(400), 4);
        for _ in 0..5 {
            if each > 1 {
                // The broker lets some process read the queue that the thread leaves.
                flow.say("end thread");
                flow.ask(100);
            }
            let victim = readers_up(&split)[0];
            // Datagrams wait unread in its queue when it dies: no more than our own buffer has room for answers.
            halt(victim);
            let mut wanted: BTreeSet<String> = (flow.next..flow.next + 200)
                .map(|number| number.to_string())
                .collect();
            flow.next += 200;
            for number in &wanted {
                flow.say(number);
            }
            signal(victim, Signal::KILL);
            flow.answers(&mut wanted, &mut Shares::new());
            eventually("it has a successor", || {
                let up = readers_up(&split);
                up.len() == 4 * each && !up.contains(&victim)
            });
        }
        assert_even(&flow.ask(400), 4);
        assert_eq!(status(&split.ground, DATAGRAMS)["fallbacks"], 0, "{wait}");
        split.ends();
    }
}

/// An epoll set from before the fork has the shared socket. Nothing is split, and the log says so once.
#[test]
fn a_udp_socket_that_was_polled_before_the_fork_is_left_alone() {
    let port = PORT.to_string();
    let script = server("datagrams_prefork.py");
    let Some(split) = Split::start(&EACH, &["python3", &script, &port, "3", "before"]) else {
        return;
    };
    Flow::served().ask(200);
    assert_eq!(split.status(), Value::Null);
    let lines = split.ends();
    let said = |line: &&String| line.contains("registered before the fork");
    assert_eq!(lines.iter().filter(said).count(), 1, "{lines:?}");
}

/// Without privileges the kernel's hash chooses, and the log says so. No datagram is lost then either.
#[test]
fn without_privileges_udp_readers_get_queues_all_the_same() {
    let Some((folder, binary, runtime)) = for_another_user("datagrams_prefork.py") else {
        return;
    };
    let mut command = std::process::Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&binary)
        .args(["run", "--split", "--affinity", "none", "--runtime-dir"])
        .arg(&runtime)
        .env("XDG_RUNTIME_DIR", &runtime)
        .args(["--", "/usr/bin/env", "python3"])
        .arg(folder.path().join("datagrams_prefork.py"))
        .args([&PORT.to_string(), "3", "recv"]);
    let run = Run::start(command);
    let mut flow = Flow::served();
    let queues = || {
        let sockets = sockets(Protocol::Udp, Which::Listening, PORT).expect("sock_diag");
        sockets.iter().filter(|e| e.peer.port() == 0).count()
    };
    eventually("two have queues, and one the shared socket", || {
        queues() == 3
    });
    let mut seen = BTreeSet::new();
    eventually("all three processes answer", || {
        let mut other = Flow::start();
        seen.extend(other.ask(10).into_keys());
        seen.len() == 3
    });
    for _ in 0..10 {
        flow.say("end");
        let mut other = Flow::start();
        other.ask(40);
    }
    let lines = run.stop();
    assert!(lines[0].contains("nothing steers"), "{lines:?}");
}

/// Threads wait on one epoll set. Any of them may be woken, and must find the datagram, so all share the socket.
#[test]
fn threads_that_poll_one_udp_socket_share_it() {
    for wait in ["epoll", "unbound"] {
        let port = PORT.to_string();
        let script = server("datagrams.py");
        let Some(split) = Split::start(&EACH, &["python3", &script, &port, "4", wait]) else {
            return;
        };
        let mut flow = Flow::served();
        for _ in 0..20 {
            flow.say("end");
            flow.ask(40);
        }
        assert_eq!(split.status(), Value::Null, "{wait}");
        split.ends_by(Signal::TERM);
    }
}
