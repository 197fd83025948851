//! `wakeone run --split` on unchanged real servers whose workers share one listening socket. Each worker gets a queue
//! of its own, shares are even, and a worker that dies loses only the connections that it had accepted.
//!
//! These tests need root, and skip servers that are not installed. A message tells of both.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use support::mixed::Speech;
use support::real::installed;
use support::split::{GROUP, PORT, Split, address, as_nobody, check, for_another_user};
use support::steered::{assert_nothing_left, isolated, number, wakeone};
use support::{Clients, Ground, Run, eventually, get, server, signal};
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

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
    // The kernel resets a handshake that ends on another CPU while a listener closes (docs/attach.md): on a busy machine
    // one connection in a hundred reloads.
    assert!(failures.len() <= 1, "of {answers}: {failures:?}");
    assert!(first.is_disjoint(&second));
    split.ends();
    let split = Split::start(&[], &["nginx", "-c", &conf]).expect("root");
    split.survives_kills(4, &Speech::Http, MINUTE);
    split.ends();
}

/// Waits until that many workers, none of them in `former`, have queues.
fn eventually_other(split: &Split, former: &BTreeSet<u32>, workers: usize) -> BTreeSet<u32> {
    let start = Instant::now();
    loop {
        let now = split.up();
        if now.len() == workers && now.is_disjoint(former) {
            return now;
        }
        assert!(
            start.elapsed() < support::long_patience(),
            "{now:?} have queues, {former:?} had them: {}\n{}",
            split.status(),
            split.run.lines().join("\n")
        );
        std::thread::sleep(Duration::from_millis(10));
    }
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
    // uvloop adds its listener to its set through a ring, which the library does not see.
    let command = [
        "uvicorn",
        "--loop",
        "asyncio",
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

/// A server whose first connection waited on the shared socket before any worker had a queue.
struct Late {
    split: Split,
    /// The process that opened the shared socket.
    first: u32,
    /// The first connection.
    client: std::thread::JoinHandle<()>,
}

/// Starts one. `wakeone run` moves the shared socket's queue, and meets `fate` while that socket is closed.
fn late(fate: &str) -> Option<Late> {
    let ground = isolated()?;
    let (script, port) = (server("shared.py"), PORT.to_string());
    let options = [&["--split"], &EVEN[..]].concat();
    let mut run = ground.command(&options, &["python3", &script, "late", &port, "2"]);
    run.env("WAKEONE_SLOT", "0").env("WAKEONE_TEST_DIE", fate);
    let run = Run::start(run);
    let mut children = Vec::new();
    eventually("the server starts", || {
        children = wakeone_kernel::proc::process::children(run.pid());
        !children.is_empty()
    });
    let client = std::thread::spawn(|| support::slowly("an answer", answers));
    Some(Late {
        split: Split { ground, run },
        first: children[0],
        client,
    })
}

fn answers() -> bool {
    get(address(), "/").is_ok()
}

/// How many sockets listen at the server's address.
fn listening() -> usize {
    let found = sockets(Protocol::Tcp, Which::Listening, PORT);
    found.expect("sock_diag").len()
}

/// `wakeone run` is killed while it moves the shared socket's queue. `repair` has to open that socket.
fn shared_socket_is_opened_by(repair: impl Fn(&Ground)) {
    let Some(Late {
        split: Split { ground, run },
        first,
        client,
    }) = late("moving")
    else {
        return;
    };
    support::slowly("it is killed", || !support::runs(run.pid()));
    run.murder();
    let library = library_of(first);
    let workers = wakeone_kernel::proc::process::children(first);
    let before = listening();
    assert!(before <= 2, "{before} listen, and not the shared one");
    repair(&ground);
    assert_eq!(listening(), before + 1, "the shared one too");
    client.join().expect("an answer");
    for worker in workers {
        signal(worker, Signal::KILL);
    }
    // Their successors have the shared socket alone.
    for _ in 0..20 {
        support::slowly("an answer", answers);
    }
    signal(first, Signal::TERM);
    support::slowly("it ends", || !support::runs(first));
    std::fs::remove_dir_all(library).expect("the library's folder");
    let output = wakeone(&ground, &["detach", "--all"]);
    assert!(output.status.success(), "{output:?}");
    assert_nothing_left(&ground);
}

#[test]
fn what_waits_before_the_workers_come_is_counted_out_as_often_as_in() {
    // A worker that is busy for a moment is stuck soon, so connections are moved again and again.
    let options = ["--stuck-after", "1ms"];
    let Some(split) = python(&options, "late", "2") else {
        return;
    };
    support::slowly("it listens", || listening() > 0);
    for _ in 0..3 {
        let ask = |_| std::thread::spawn(|| get(address(), "/?ms=50"));
        let clients: Vec<_> = (0..12).map(ask).collect();
        for client in clients {
            client.join().expect("client").expect("an answer");
        }
    }
    split.counts_are_exact();
    split.ends();
}

#[test]
fn detach_opens_the_shared_socket_that_was_left_closed() {
    shared_socket_is_opened_by(|ground| {
        let output = wakeone(ground, &["detach", "--all"]);
        assert!(output.status.success(), "{output:?}");
    });
}

#[test]
fn the_next_run_opens_the_shared_socket_that_was_left_closed() {
    shared_socket_is_opened_by(|ground| {
        let mut next = ground.whoami(&["-w", "1", "-l", "127.0.0.1:8080"]);
        next.ready();
        next.stop();
    });
}

#[test]
fn a_shared_socket_that_does_not_listen_again_is_tried_again() {
    let Some(late) = late("refused") else { return };
    let mut split = late.split;
    split.run.line("the shared socket's queue stays: ");
    support::slowly("it listens again", || listening() == 3);
    late.client.join().expect("an answer");
    split.settled(2);
    let state = split.ground.runtime().join(GROUP).join("state.json");
    eventually("the move is over", || {
        let text = std::fs::read_to_string(&state).expect("state");
        !text.contains("moving_shared")
    });
    split.serves_evenly();
    split.ends();
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

/// For another user, without any privilege, each worker has a socket of its own, and the kernel's hash chooses. The account
/// of a service has neither a home nor a folder at run time, and may be root of a user namespace.
#[test]
fn without_privileges_workers_get_queues_all_the_same() {
    for (root_of_a_namespace, has_a_folder) in [(false, true), (false, false), (true, false)] {
        let Some((folder, binary, runtime)) = for_another_user("shared.py") else {
            return;
        };
        let Some(mut command) = as_nobody(root_of_a_namespace) else {
            return;
        };
        command
            .arg(&binary)
            .args(["run", "--split", "--runtime-dir"])
            .arg(&runtime)
            .args(["--", "/usr/bin/env", "python3"])
            .arg(folder.path().join("shared.py"))
            .args(["poll", &PORT.to_string(), "3"]);
        if has_a_folder {
            command.env("XDG_RUNTIME_DIR", &runtime);
        }
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
        assert!(
            !lines.iter().any(|line| line.contains("ld.so")),
            "{lines:?}"
        );
    }
}

#[test]
fn a_queue_that_could_not_listen_again_is_not_closed() {
    let command = ["python3", &server("dropped.py"), "shared", "7400", "3"];
    let Some(mut split) = Split::start(&["--policy", "random"], &command) else {
        return;
    };
    split.settled(3);
    let listening = || {
        sockets(Protocol::Tcp, Which::Listening, PORT)
            .expect("sock_diag")
            .len()
    };
    let before = listening();
    let ask = |path: &str| {
        let mut stream = std::net::TcpStream::connect(address()).expect("connects");
        let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
        std::io::Write::write_all(&mut stream, request.as_bytes()).expect("sends");
        stream
    };
    let _slow = ask("/slow");
    std::thread::sleep(Duration::from_millis(100));
    let rest: Vec<_> = (0..30).map(|_| ask("/")).collect();
    split.run.line("has no SO_REUSEADDR");
    for mut stream in rest {
        stream
            .set_read_timeout(Some(support::patience()))
            .expect("a timeout");
        std::io::Read::read_exact(&mut stream, &mut [0]).expect("an answer");
    }
    assert_eq!(listening(), before);
    split.ends();
}
