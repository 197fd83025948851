//! Servers on UNIX sockets: `attach`, `run`, `doctor`, `agent` and `load` take `unix:/PATH` and `unix:@NAME` as they take
//! an address and port.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use support::kept::{ASK, Kept, assert_even, entries_of, keep_by, keep_enough};
use support::real::{Started, installed, program};
use support::steered::{assert_nothing_left, isolated, said, sum, wakeone, worker};
use support::{Ground, Run, WAKEONE, eventually, patience, server, slowly, slowness};
use wakeone_control::control::change_drain;
use wakeone_control::paths::Paths;
use wakeone_kernel::proc::process::children;
use wakeone_kernel::socket::unix_diag::{accepted_at, listening};

const WORKERS: usize = 4;

/// A server on a UNIX socket.
struct Serving {
    server: Started,
    ground: Ground,
    target: String,
}

/// Both kinds of names: in the ground's folder, and abstract.
fn targets(ground: &Ground) -> [String; 2] {
    let path = ground.path().join("app.sock");
    [format!("unix:{}", path.display()), "unix:@app".to_owned()]
}

fn name_of(target: &str) -> &str {
    target.trim_start_matches("unix:")
}

fn connect(target: &str) -> std::io::Result<UnixStream> {
    let stream = match name_of(target).strip_prefix('@') {
        Some(name) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => UnixStream::connect(name_of(target))?,
    };
    stream.set_read_timeout(Some(patience()))?;
    Ok(stream)
}

/// Our event loops, as so many processes.
fn event_loops(target: &str, how: &str) -> Command {
    let script = server("unix_loops.py");
    program(&["python3", &script, name_of(target), how, "4"])
}

impl Serving {
    /// Starts a server, and waits until each worker waits for a connection.
    fn start(ground: Ground, target: &str, command: Command) -> Self {
        let server = Started::spawn(command);
        let serving = Self {
            server,
            ground,
            target: target.to_owned(),
        };
        slowly("it listens", || connect(target).is_ok());
        serving
    }

    fn with_workers(self) -> Self {
        slowly("all workers wait", || self.workers().len() == WORKERS);
        self
    }

    fn event_loops(ground: Ground, target: &str, how: &str) -> Self {
        let serving = Self::start(ground, target, event_loops(target, how)).with_workers();
        slowly("our look whether it listens is over", || {
            let entries = serving.entries();
            entries.values().all(|one| one.len() == 1)
        });
        serving
    }

    /// The processes that wait for the listener, as the kernel shows them.
    fn workers(&self) -> Vec<u32> {
        let all = listening().expect("the listeners").into_iter();
        let mut here = all.filter(|one| one.name.to_string() == name_of(&self.target));
        let Some(listener) = here.next() else {
            return Vec::new();
        };
        let entry = format!("ino:{:x} ", listener.socket.inode);
        let waits = |pid: &u32| entries_of(*pid).iter().any(|line| line.contains(&entry));
        let all = [vec![self.server.pid()], children(self.server.pid())].concat();
        all.into_iter().filter(waits).collect()
    }

    fn entries(&self) -> BTreeMap<u32, Vec<String>> {
        self.workers()
            .into_iter()
            .map(|pid| (pid, entries_of(pid)))
            .collect()
    }

    fn wakeone(&self, arguments: &[&str]) -> (bool, String) {
        run_wakeone(&self.ground, arguments)
    }

    fn attach(&self) {
        let (done, text) = self.wakeone(&["attach", &self.target]);
        assert!(done && text.contains("one queue"), "{text}");
    }

    fn detach(&self) {
        let (done, text) = self.wakeone(&["detach", &self.target]);
        assert!(done && text.contains("woken as before"), "{text}");
    }

    fn status(&self) -> Value {
        let (done, text) = self.wakeone(&["status", &self.target, "--json"]);
        assert!(done, "{text}");
        let whole: Value = serde_json::from_str(&text).expect("JSON");
        whole["groups"][0].clone()
    }

    fn end(self) {
        drop(self.server);
        assert_nothing_left(&self.ground);
    }
}

/// Whether it ended well, and all that it said.
fn run_wakeone(ground: &Ground, arguments: &[&str]) -> (bool, String) {
    let output = wakeone(ground, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), text + &said(&output).join("\n"))
}

fn open(target: &str) -> Kept {
    Kept::on(connect(target).expect("connects"))
}

fn keep(target: &str, count: usize) -> (Vec<Kept>, Vec<usize>) {
    keep_by(count, Duration::from_millis(8), || open(target))
}

#[test]
fn kept_connections_are_spread_evenly_by_path_and_by_name() {
    for how in ["wake-all", "exclusive"] {
        for kind in 0..2 {
            let Some(ground) = isolated() else { return };
            let target = targets(&ground)[kind].clone();
            let serving = Serving::event_loops(ground, &target, how);
            let before = serving.entries();
            let (done, plan) = serving.wakeone(&["attach", &target, "--dry-run"]);
            assert!(done && plan.contains("4 workers share one queue"), "{plan}");
            assert!(plan.contains(&target), "{plan}");
            serving.attach();
            let (kept, counts) = keep_enough(|| open(&target));
            assert_even(&counts, WORKERS);
            let active = || sum(&serving.status(), "active");
            eventually("all are counted", || active() == kept.len() as i64);
            let group = serving.status();
            assert_eq!(group["protocol"], "unix", "{group}");
            assert_eq!(group["listen"][0], target.as_str(), "{group}");
            drop(kept);
            eventually("they are counted out", || active() == 0);
            serving.detach();
            assert_eq!(serving.entries(), before, "{target} {how}");
            serving.end();
        }
    }
}

#[test]
fn a_worker_may_drain_and_metrics_name_the_socket() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[0].clone();
    let serving = Serving::event_loops(ground, &target, "wake-all");
    serving.attach();
    let drained = worker(&serving.status(), 0).expect("a worker").to_string();
    let paths = Paths::of(&serving.ground.runtime());
    let group = serving.status()["name"]
        .as_str()
        .expect("a name")
        .to_owned();
    change_drain(&paths, &group, 0, true).expect("it drains");
    let (kept, counts) = keep(&target, 24);
    let of_it = kept.iter().filter(|one| one.worker == drained).count();
    assert!(
        // While connections wait, all are armed.
        of_it <= 3 && counts.len() >= WORKERS - 1,
        "{of_it} of {counts:?}"
    );
    let (done, text) = serving.wakeone(&["metrics", &target]);
    assert!(
        done && text.contains(&format!("address=\"{target}\"")),
        "{text}"
    );
    serving.detach();
    serving.end();
}

#[test]
fn whoever_is_killed_every_entry_is_as_the_server_made_it() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[1].clone();
    let serving = Serving::event_loops(ground, &target, "exclusive");
    let before = serving.entries();
    serving.attach();
    let (kept, _) = keep(&target, 16);
    let agent = serving.status()["supervisor_pid"]
        .as_u64()
        .expect("an agent") as u32;
    support::signal(agent, Signal::KILL);
    eventually("the agent is gone", || !support::runs(agent));
    drop(kept);
    eventually("all is as it was", || serving.entries() == before);
    let (done, text) = serving.wakeone(&["detach", &target]);
    assert!(done, "{text}");
    assert_eq!(serving.entries(), before);
    serving.end();
}

#[test]
fn what_a_server_opens_is_steered_of_both_kinds() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[0].clone();
    let script = server("unix_loops.py");
    let command = [
        "python3",
        &script,
        name_of(&target),
        "wake-all",
        "4",
        "7410",
    ];
    let mut run: Run = ground.run(&[], &command);
    let steered = [run.line("is steered"), run.line("is steered")].concat();
    assert!(
        steered.contains("at-unix-") && steered.contains("7410"),
        "{steered}"
    );
    let (kept, counts) = keep_enough(|| open(&target));
    assert_even(&counts, WORKERS);
    drop(kept);
    run.signal(Signal::TERM);
    let (_, lines) = run.wait();
    assert!(
        !lines.iter().any(|line| line.contains("panic")),
        "{lines:#?}"
    );
    assert_nothing_left(&ground);
}

#[test]
fn an_agent_keeps_a_unix_socket_steered_across_a_restart() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[0].clone();
    let config = ground.path().join("agent.toml");
    let text = format!("[[target]]\nlisten = {target:?}\nweights = {{ 0 = 3 }}\n");
    std::fs::write(&config, text).expect("written");
    let mut agent = Command::new(WAKEONE);
    agent.args(["agent", "--config"]).arg(&config);
    agent.arg("--runtime-dir").arg(ground.runtime());
    let agent = Started::spawn(agent);
    let mut serving = Serving::event_loops(ground, &target, "wake-all");
    let has_workers = |serving: &Serving| {
        let (done, text) = serving.wakeone(&["status", &serving.target, "--json"]);
        let whole: Value = serde_json::from_str(&text).unwrap_or_default();
        let group = whole["groups"][0].clone();
        done && (0..WORKERS).all(|slot| worker(&group, slot).is_some())
    };
    slowly("it is steered", || has_workers(&serving));
    assert_eq!(serving.status()["slots"][0]["weight"], 3);
    // Another socket, by another file of the same name.
    let nobody = Started::spawn(program(&["true"]));
    drop(std::mem::replace(&mut serving.server, nobody));
    std::fs::remove_file(name_of(&target)).expect("the socket");
    slowly("it is waited for", || !has_workers(&serving));
    serving.server = Started::spawn(event_loops(&target, "wake-all"));
    slowly("it is steered again", || has_workers(&serving));
    support::signal(agent.pid(), Signal::TERM);
    eventually("nothing is steered", || !serving.ground.runtime().exists());
    drop(agent);
    serving.end();
}

fn doctor(target: &str) -> (Option<i32>, Value) {
    let seconds = format!("{}s", 2 * slowness());
    let (code, whole) = report(&["doctor", target, "--for", &seconds, "--json"]);
    (code, whole["listeners"][0].clone())
}

/// The exit code and the JSON of a command.
fn report(arguments: &[&str]) -> (Option<i32>, Value) {
    let output = Command::new(WAKEONE).args(arguments).output();
    let output = output.expect("wakeone starts");
    let whole = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), whole)
}

/// A load whose connections one worker has. Returns how many those are.
fn by_one_worker(serving: &Serving) -> (Started, u64) {
    let workers = serving.workers();
    let others = &workers[1..];
    others.iter().for_each(|pid| support::halt(*pid));
    let work = format!("{}:/?work=5", serving.target);
    let load = [
        WAKEONE,
        "load",
        "--rate",
        "60",
        "-d",
        "60s",
        "-c",
        "20",
        "--keep-alive",
        "--apart",
        "1ms",
    ];
    let load = Started::spawn(program(&[&load[..], &[&work]].concat()));
    let name = name_of(&serving.target).parse().expect("a name");
    let open = || accepted_at(name).expect("the connections").len();
    eventually("the load has its connections", || open() >= 20);
    for pid in others {
        support::signal(*pid, Signal::CONT);
    }
    (load, 20)
}

#[test]
fn doctor_and_top_know_the_workers_and_name_attach() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[0].clone();
    let serving = Serving::event_loops(ground, &target, "exclusive");
    let (load, kept) = by_one_worker(&serving);
    let (code, report) = doctor(&target);
    assert_eq!(report["protocol"], "unix", "{report:#}");
    assert_eq!(
        report["accept_model"], "shared-epoll-exclusive",
        "{report:#}"
    );
    let workers = report["workers"].as_array().expect("workers");
    assert_eq!(workers.len(), WORKERS);
    let open: u64 = workers
        .iter()
        .filter_map(|one| one["active"].as_u64())
        .sum();
    assert!(open >= kept, "{report:#}");
    assert_eq!(report["queues"][0]["limit"], 512, "{report:#}");
    assert_eq!(code, Some(3), "{report:#}");
    let advice = report["findings"].to_string();
    assert!(
        advice.contains(&format!("wakeone attach {target}")),
        "{advice}"
    );
    serving.attach();
    let (_, report) = doctor(&target);
    assert!(
        !report["findings"].to_string().contains("wakeone attach"),
        "{report:#}"
    );
    let top = Command::new(WAKEONE)
        .args(["top", &target, "--once"])
        .output()
        .expect("top");
    let text = String::from_utf8_lossy(&top.stdout);
    assert!(text.contains(&target) && text.contains("open"), "{text}");
    assert!(!text.contains("connections/s"), "{text}");
    drop(load);
    serving.detach();
    serving.end();
}

/// A UNIX listener of this process at an abstract name.
fn listener_at(name: &str) -> UnixListener {
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    UnixListener::bind_addr(&address).expect("listens")
}

#[test]
fn without_a_target_doctor_and_top_show_the_unix_sockets_that_workers_share() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[1].clone();
    let serving = Serving::start(ground, &target, event_loops(&target, "poll"));
    let _idle = listener_at("idle");
    let _stuck = listener_at("stuck");
    let _waits = connect("unix:@stuck").expect("connects");
    let threads = listener_at("threads");
    for _ in 0..2 {
        let copy = threads.try_clone().expect("a copy");
        // They end with the test's process.
        std::thread::spawn(move || copy.accept());
    }
    for arguments in [
        &["doctor", "--for", "300ms", "--json"][..],
        &["top", "--once", "--interval", "300ms", "--json"],
    ] {
        slowly("those that are of use are shown, and no others", || {
            let (_, whole) = report(arguments);
            let all = whole["listeners"].as_array().expect("listeners").iter();
            let mut shown: Vec<&str> = all.filter_map(|one| one["address"].as_str()).collect();
            shown.sort_unstable();
            shown == ["unix:@app", "unix:@stuck", "unix:@threads"]
        });
    }
    // Workers that are busy share it still, though none waits for it.
    let master = serving.server.pid();
    let workers = [vec![master], children(master)].concat();
    workers.iter().for_each(|pid| support::halt(*pid));
    let (_, whole) = report(&["doctor", "--for", "300ms", "--json"]);
    assert!(whole.to_string().contains("@app"), "{whole:#}");
    for pid in workers {
        support::signal(pid, Signal::CONT);
    }
    serving.end();
}

/// Workers like gunicorn's sync ones take the next connection at once, and are never seen to wait.
#[test]
fn doctor_tells_that_a_queue_is_full_and_how_long_its_connections_wait() {
    let Some(_ground) = isolated() else { return };
    let listener = listener_at("full");
    rustix::net::listen(&listener, 8).expect("a short queue");
    for _ in 0..2 {
        let copy = listener.try_clone().expect("a copy");
        // They end with the test's process.
        std::thread::spawn(move || {
            for stream in copy.incoming() {
                std::thread::sleep(Duration::from_millis(40) * slowness());
                let _ = stream.and_then(|mut one| one.write_all(b"HTTP/1.1 200 OK\r\n\r\n"));
            }
        });
    }
    let load = ["load", "-c", "20", "-d", "60s", "unix:@full"];
    let load = Started::spawn(program(&[&[WAKEONE], &load[..]].concat()));
    let full = || doctor("unix:@full").1["queues"][0]["highest"] == 9;
    slowly("the queue is full", full);
    let (code, report) = doctor("unix:@full");
    assert_eq!(code, Some(3), "{report:#}");
    let findings = report["findings"].as_array().expect("findings");
    let codes: Vec<_> = findings.iter().map(|one| &one["code"]).collect();
    assert_eq!(codes, ["backlog-too-small", "workers-busy"], "{report:#}");
    let told = findings[1]["evidence"].to_string();
    assert!(
        told.contains("connections waited 100.0 ms or longer"),
        "{told}"
    );
    drop(load);
}

/// Returns the JSON of a load.
fn load(arguments: &[&str]) -> Value {
    let output = Command::new(WAKEONE)
        .arg("load")
        .args(arguments)
        .arg("--json")
        .output()
        .expect("load");
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_load_reaches_a_unix_socket_with_the_same_report() {
    let Some(ground) = isolated() else { return };
    for target in targets(&ground) {
        let server = Started::spawn(event_loops(&target, "wake-all"));
        slowly("it listens", || connect(&target).is_ok());
        let report = load(&["-c", "8", "-n", "400", &format!("{target}:/whoami")]);
        assert_eq!(report["completed"], 400, "{report}");
        assert_eq!(report["parameters"]["target"], target.as_str(), "{report}");
        assert_eq!(report["latency_ms"]["count"], 400, "{report}");
        let kept = [
            "--rate",
            "200",
            "-n",
            "100",
            "-c",
            "16",
            "--keep-alive",
            "--apart",
            "1ms",
        ];
        let report = load(&[&kept[..], &[&target]].concat());
        assert_eq!(
            (&report["completed"], &report["connections"]),
            (&100.into(), &16.into())
        );
        drop(server);
    }
}

#[test]
fn a_full_queue_is_told_by_the_load() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("full.sock");
    let listener = UnixListener::bind(&path).expect("listens");
    rustix::net::listen(&listener, 0).expect("a short queue");
    let _waiting = UnixStream::connect(&path).expect("connects");
    let url = format!("unix:{}", path.display());
    let output = Command::new(WAKEONE)
        .args([
            "load",
            "--rate",
            "50",
            "-n",
            "5",
            "--timeout",
            "200ms",
            "--json",
            &url,
        ])
        .output()
        .expect("load");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(
        report["errors"]["queue_full"].as_u64() > Some(0),
        "{report}"
    );
}

/// Everything says in one sentence what is wrong, and leaves nothing.
#[test]
fn bad_input_is_told_in_a_sentence() {
    let Some(ground) = isolated() else { return };
    let at = |name: &str| format!("unix:{}", ground.path().join(name).display());
    let path = |name: &str| ground.path().join(name);
    std::fs::write(path("text"), "").expect("a file");
    drop(UnixListener::bind(path("left")).expect("a listener"));
    let _datagrams = UnixDatagram::bind(path("datagrams")).expect("datagrams");
    let alone = UnixListener::bind(path("alone")).expect("a listener");
    for (target, why) in [
        (at("none"), "nothing listens on"),
        ("unix:@none".to_owned(), "nothing listens on"),
        (at("text"), "is no socket"),
        (at("left"), "nobody listens on"),
        (at("datagrams"), "datagrams"),
    ] {
        for command in ["attach", "doctor", "top"] {
            let output = Command::new(WAKEONE)
                .args([command, &target])
                .output()
                .expect(command);
            let told = String::from_utf8_lossy(&output.stderr).replace(['\n', ' '], "");
            assert_eq!(
                output.status.code(),
                Some(1),
                "{command} {target}: {output:?}"
            );
            assert!(
                told.contains(&why.replace(' ', "")),
                "{command} {target}: {told}"
            );
        }
    }
    let (done, text) = run_wakeone(&ground, &["attach", &at("alone")]);
    assert!(
        !done && text.contains("only epoll lets another process choose"),
        "{text}"
    );
    assert!(
        text.contains("no SO_REUSEPORT") && !text.contains("--split"),
        "{text}"
    );
    let (done, text) = run_wakeone(&ground, &["detach", "unix:@none"]);
    assert!(!done && text.contains("there is no group"), "{text}");
    for (bad, why) in [
        ("unix:", "no name of a UNIX socket"),
        ("/run/app.sock", "unix:/PATH"),
    ] {
        let (done, text) = run_wakeone(&ground, &["attach", bad]);
        assert!(!done && text.contains(why), "{text}");
    }
    for (url, why) in [
        (at("none"), "cannot find the socket"),
        (at("text"), "is no socket"),
    ] {
        let output = Command::new(WAKEONE)
            .args(["load", "-n", "1", &url])
            .output()
            .expect("load");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && told.contains(why), "{told}");
    }
    drop(alone);
    assert!(!ground.runtime().exists());
}

/// Starts a real server with four workers on a UNIX socket, steers it, and leaves it as it was.
fn steers(words: &[&str], ground: Ground, target: &str) {
    if !installed(words[0]) {
        eprintln!("skipped: {} is not installed", words[0]);
        assert!(
            std::env::var_os("WAKEONE_NO_SKIPS").is_none(),
            "{} is missing",
            words[0]
        );
        return;
    }
    let serving = Serving::start(ground, target, program(words)).with_workers();
    let before = serving.entries();
    serving.attach();
    let active = || sum(&serving.status(), "active");
    let kept: Vec<UnixStream> = (0..48)
        .map(|_| {
            let mut stream = connect(target).expect("connects");
            let asked = format!("GET {ASK} HTTP/1.1\r\nHost: a\r\n\r\n");
            stream.write_all(asked.as_bytes()).expect("asks");
            let mut some = [0; 1];
            stream.read_exact(&mut some).expect("answers");
            std::thread::sleep(Duration::from_millis(8) * slowness());
            stream
        })
        .collect();
    eventually("all are counted", || active() == 48);
    let group = serving.status();
    let slots = group["slots"].as_array().expect("slots");
    let counts: Vec<u64> = slots
        .iter()
        .filter_map(|slot| slot["active"].as_u64())
        .collect();
    let most = counts.iter().max().copied().unwrap_or(0);
    assert!(
        counts.len() == WORKERS && most <= 18,
        "{words:?}: {counts:?}"
    );
    drop(kept);
    eventually("they are counted out", || active() == 0);
    serving.detach();
    assert_eq!(serving.entries(), before, "{words:?}");
    serving.end();
}

fn apps() -> String {
    server("app.py").trim_end_matches("app.py").to_owned()
}

#[test]
fn gunicorn_with_threads_is_steered() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[0].clone();
    let folder = apps();
    let words = [
        "gunicorn",
        "-w",
        "4",
        "-k",
        "gthread",
        "--threads",
        "32",
        "--keep-alive",
        "60",
        "--log-level",
        "error",
        "--bind",
        &target,
        "--chdir",
        &folder,
        "app:wsgi",
    ];
    steers(&words, ground, &target);
}

#[test]
fn uvicorn_is_steered() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[0].clone();
    let folder = apps();
    let words = [
        "uvicorn",
        "--workers",
        "4",
        "--uds",
        name_of(&target),
        "--log-level",
        "error",
        "--timeout-keep-alive",
        "60",
        "--app-dir",
        &folder,
        "app:asgi",
    ];
    steers(&words, ground, &target);
}

#[test]
fn nginx_is_steered() {
    let Some(ground) = isolated() else { return };
    let target = targets(&ground)[0].clone();
    let folder = ground.path().to_owned();
    let config = nginx(&folder, &target);
    let prefix = folder.display().to_string();
    let config = config.display().to_string();
    let words = ["nginx", "-p", &prefix, "-c", &config, "-e", "stderr"];
    steers(&words, ground, &target);
}

/// nginx as packaged, but for four workers and the socket.
fn nginx(folder: &Path, target: &str) -> std::path::PathBuf {
    let text = format!(
        "daemon off; master_process on; worker_processes 4; pid {0}/nginx.pid; error_log stderr crit;
events {{ worker_connections 768; }}
http {{
    access_log off; keepalive_timeout 60; keepalive_requests 100000;
    client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/fastcgi;
    uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;
    server {{ listen {target}; location / {{ return 200 \"hi\"; }} }}
}}
",
        folder.display()
    );
    let path = folder.join("nginx.conf");
    std::fs::write(&path, text).expect("written");
    path
}
