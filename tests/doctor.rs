//! `wakeone doctor` reports each of its findings for a server that has the fault, and none for a healthy one. Every
//! server is real, small, and in a network namespace of its own.
//!
//! With `WAKEONE_SOAK=1` each fault is staged 20 times, and must be found 20 times.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;
use support::real::{Started, program};
use support::steered::{isolated, soak};
use support::{Ground, LAB, WAKEONE, server, signal, slowness};

const PORT: u16 = 8080;
const AT: &str = "127.0.0.1:8080";

/// A server and the load on it. Both end when this is dropped.
struct Stage {
    server: Started,
    _load: Option<Started>,
    kept: Vec<TcpStream>,
}

/// The reference server with these options.
fn serve(options: &[&str]) -> Command {
    let mut command = program(&[LAB, "serve", "-l", AT]);
    command.args(options);
    command
}

/// The server in Python.
fn prefork(mode: &str, workers: &str, ms: &str) -> Command {
    program(&["python3", &server("prefork.py"), mode, "8080", workers, ms])
}

impl Stage {
    /// Starts a server and waits until it listens and has its workers.
    fn of(command: Command) -> Self {
        let server = Started::spawn(command);
        support::slowly("the server listens", || {
            TcpStream::connect(("127.0.0.1", PORT)).is_ok()
        });
        // Workers start after the socket listens.
        std::thread::sleep(Duration::from_millis(300));
        Self {
            server,
            _load: None,
            kept: Vec::new(),
        }
    }

    /// With connections that ask for nothing, opened one after the other until a worker that has one waits in accept.
    fn hanging(mut self) -> Self {
        let accepts = |pid: &u32| {
            let place = std::fs::read_to_string(format!("/proc/{pid}/wchan"));
            place.is_ok_and(|place| place == "inet_csk_accept")
        };
        let sockets = |pid: &u32| wakeone_kernel::proc::process::sockets_of(*pid);
        let hangs = |pid: &u32| accepts(pid) && sockets(pid).is_ok_and(|all| all.len() > 1);
        support::slowly("one hangs", || {
            let one = TcpStream::connect(("127.0.0.1", PORT)).expect("connects");
            self.kept.push(one);
            std::thread::sleep(Duration::from_millis(200) * slowness());
            self.workers().iter().any(hangs)
        });
        self
    }

    /// Under the load of `wakeone load` with these options. A slow machine gets the rate that it keeps up with: a busy
    /// worker does not sleep, and is not woken.
    fn under(mut self, options: &[&str]) -> Self {
        let mut load = program(&[WAKEONE, "load", "-d", &seconds(30)]);
        let mut is_rate = false;
        for option in options {
            let rate = option.parse().ok().filter(|_: &u32| is_rate);
            match rate {
                Some(rate) => load.arg((rate / slowness()).to_string()),
                None => load.arg(option),
            };
            is_rate = *option == "--rate";
        }
        load.arg(AT);
        self._load = Some(Started::spawn(load));
        self
    }

    /// The workers of the server.
    fn workers(&self) -> Vec<u32> {
        wakeone_kernel::proc::process::children(self.server.pid())
    }
}

/// The result of doctor: its exit code, and its JSON for the port.
struct Told {
    code: Option<i32>,
    report: Value,
}

/// A time for the command line, longer where less happens in a second.
fn seconds(count: u32) -> String {
    format!("{}s", count * slowness())
}

fn doctor(options: &[&str]) -> Told {
    let output = Command::new(WAKEONE)
        .args(["doctor", ":8080", "--for", &seconds(2), "--json"])
        .args(options)
        .output()
        .expect("doctor");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.is_empty(), "{told}");
    let whole: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let listeners = whole["listeners"].as_array().expect("listeners");
    assert_eq!(listeners.len(), 1, "{whole}");
    Told {
        code: output.status.code(),
        report: listeners[0].clone(),
    }
}

impl Told {
    fn codes(&self) -> Vec<&str> {
        let findings = self.report["findings"].as_array().expect("findings");
        findings
            .iter()
            .map(|f| f["code"].as_str().expect("code"))
            .collect()
    }

    /// Checks that this was found, with numbers and a next step.
    fn has(&self, code: &str) {
        let findings = self.report["findings"].as_array().expect("findings");
        let found = findings.iter().find(|f| f["code"] == code);
        let found = found.unwrap_or_else(|| panic!("no {code} in {:#}", self.report));
        let evidence = found["evidence"].as_array().expect("evidence");
        let numbers = |e: &Value| {
            let text = e.as_str().expect("text");
            text.contains(|c: char| c.is_ascii_digit())
        };
        assert!(evidence.iter().any(numbers), "no number: {found:#}");
        let next = found["next"].as_array().expect("next");
        assert!(!next.is_empty(), "no way out: {found:#}");
        assert_eq!(self.code, Some(3), "{:#}", self.report);
        assert_eq!(self.report["healthy"], false);
    }

    fn is_healthy(&self) {
        assert!(self.codes().is_empty(), "{:#}", self.report);
        assert_eq!(self.code, Some(0));
        assert_eq!(self.report["healthy"], true);
    }
}

/// Stages a server once, or as often as was asked for, each time in a network namespace of its own.
fn staged(mut act: impl FnMut(&Ground)) {
    let times = if soak() { 5 } else { 1 };
    for _ in 0..times {
        let Some(ground) = isolated() else { return };
        act(&ground);
    }
}

/// Checks that doctor reports `code` for a stage under load, and besides it only findings in `beside`.
fn finds(code: &str, beside: &[&str], stage: impl Fn() -> Stage) {
    staged(|_| {
        let stage = stage();
        let told = doctor(&[]);
        told.has(code);
        let others = |found: &&str| *found != code && !beside.contains(found);
        let more: Vec<&str> = told.codes().into_iter().filter(others).collect();
        assert!(more.is_empty(), "{more:?} as well: {:#}", told.report);
        drop(stage);
    });
}

#[test]
fn a_stopped_worker() {
    finds("stopped-worker", &[], || {
        let stage = Stage::of(serve(&["--model", "preforked", "--reuseport", "-w", "3"]));
        support::halt(stage.workers()[0]);
        stage.under(&["--rate", "100", "--timeout", "1s"])
    });
}

#[test]
fn a_stuck_worker() {
    finds("stuck-worker", &[], || {
        let stage = Stage::of(serve(&["--model", "preforked", "--reuseport", "-w", "3"]));
        let long = [
            "-n",
            "1",
            "-c",
            "1",
            "--mix",
            "1:/work?us=10000000&kind=sleep",
        ];
        let mut load = program(&[WAKEONE, "load", "--timeout", "20s"]);
        load.args(long).arg(AT);
        // Its client may leave: the worker sleeps on.
        let client = Started::spawn(load);
        std::thread::sleep(Duration::from_millis(300));
        drop(client);
        stage.under(&["--rate", "100", "--timeout", "1s"])
    });
}

/// The longest waits are those of connections that no worker has accepted yet.
#[test]
fn those_that_wait_still_are_in_the_figures() {
    staged(|_| {
        let stage = Stage::of(serve(&["--model", "preforked", "--reuseport", "-w", "3"]));
        support::halt(stage.workers()[0]);
        let stage = stage.under(&["--rate", "100", "--timeout", "60s"]);
        std::thread::sleep(Duration::from_secs(1));
        // They have waited for at least the two seconds of the doctor by its end.
        let told = doctor(&[]);
        let totals = &told.report["totals"];
        let oldest = totals["oldest_wait_us"].as_f64().expect("some wait");
        assert!(oldest >= 2e6, "{totals}");
        if let Some(longest) = totals["wait_us_max"].as_f64() {
            assert!(longest >= oldest, "{totals}");
            assert!(totals["wait_us_p99"].as_f64() > Some(2e5), "{totals}");
        }
        let findings = told.report["findings"].to_string();
        assert!(findings.contains("; the oldest waits "), "{findings}");
        fits_the_screen();
        drop(stage);
    });
}

/// No line of doctor's text is wider than the terminal.
fn fits_the_screen() {
    for width in [80, 100, 160] {
        let output = Command::new(WAKEONE)
            .args(["doctor", ":8080", "--for", "200ms"])
            .env("COLUMNS", width.to_string())
            .output()
            .expect("doctor");
        let text = String::from_utf8(output.stdout).expect("text");
        assert!(text.contains("oldest waits "), "{text}");
        assert!(!text.contains('\x1b'), "a pipe has no colours: {text}");
        for line in text.lines() {
            assert!(line.chars().count() <= width, "{width}: {line:?}");
        }
    }
}

/// An event loop in C, tokio or Python that was given a blocking listener.
#[test]
fn an_event_loop_that_hangs_in_accept() {
    for events in ["level", "edge"] {
        finds("blocking-listener", &[], || {
            // `Stage::of` connects once, which is what it hangs after.
            Stage::of(event_loop("blocking", events)).under(&["--rate", "5", "--timeout", "1s"])
        });
    }
}

/// Loops around poll, of which one gets a connection that both were woken for.
#[test]
fn a_loop_around_poll_that_hangs_in_accept() {
    finds("blocking-listener", &[], || {
        let loops = program(&["python3", &server("poll_loop.py"), "8080"]);
        Stage::of(loops).hanging()
    });
}

/// Its own listener, whatever the event loop does with it.
fn event_loop(listener: &str, events: &str) -> Command {
    let mut command = program(&["python3", &server("event_loop.py"), events, AT]);
    command.arg(listener);
    command
}

/// As tokio's after EPOLLHUP: it takes the listener for ready for ever. Nothing comes meanwhile.
#[test]
fn a_worker_that_spins_in_accept_or_in_epoll() {
    for how in ["spins", "polls"] {
        finds("accept-spin", &[], || Stage::of(event_loop(how, "level")));
    }
}

/// Two workers that serve one request at a time, and a thread of each waits in poll for something else.
#[test]
fn a_helper_thread_in_poll_hides_nothing() {
    let own = || Stage::of(program(&["python3", &server("helper_thread.py"), "8080"]));
    finds("blind-hash", &[], || own().under(&MIXED));
    finds("stuck-worker", &[], || {
        let stage = own();
        let mut long = program(&[WAKEONE, "load", "--timeout", "20s", "-n", "1", "-c", "1"]);
        long.args(["--mix", "1:/work?us=10000000&kind=sleep", AT]);
        let client = Started::spawn(long);
        std::thread::sleep(Duration::from_millis(300));
        drop(client);
        stage.under(&["--rate", "100", "--timeout", "1s"])
    });
}

/// A thread in poll for something else does not make its worker one that waits for connections, also while none waits.
#[test]
fn a_helper_thread_in_poll_makes_nobody_idle() {
    staged(|_| {
        let busy = ["--rate", "12", "--mix", "1:/work?us=80000&kind=sleep"];
        let server = program(&["python3", &server("helper_thread.py"), "8080"]);
        let stage = Stage::of(server).under(&busy);
        let told = doctor(&["--no-tracing"]);
        let workers = told.report["workers"].as_array().expect("workers");
        let idle: f64 = workers.iter().filter_map(|w| w["waiting"].as_f64()).sum();
        // Of two, together they are busy for nearly one.
        assert!(idle < 1.3, "{idle} of {}: {:#}", workers.len(), told.report);
        drop(stage);
    });
}

/// Four threads of one process, or of each of two, with a socket each.
fn thread_sockets(means: &str, processes: &str) -> Stage {
    let server = server("thread_sockets.py");
    Stage::of(program(&["python3", &server, "8080", means, processes]))
}

/// A loop that is blocked keeps its own queue waiting, however free the process's other loops are.
#[test]
fn threads_with_sockets_of_their_own_are_the_workers() {
    for (means, processes) in [("accept", "1"), ("epoll", "1"), ("epoll", "2")] {
        finds("blind-hash", &[], || {
            thread_sockets(means, processes).under(&MIXED)
        });
    }
    finds("stuck-worker", &[], || {
        let stage = thread_sockets("accept", "1");
        let mut long = program(&[WAKEONE, "load", "--timeout", "20s", "-n", "1", "-c", "1"]);
        long.args(["--mix", "1:/work?us=20000000&kind=sleep", AT]);
        let client = Started::spawn(long);
        std::thread::sleep(Duration::from_millis(300));
        drop(client);
        stage.under(&["--rate", "100", "--timeout", "1s"])
    });
    healthy(|| thread_sockets("accept", "1").under(&["--rate", "100"]));
}

/// The master opened the sockets, so that all hold all. One worker hangs since before, and is never seen to wait.
#[test]
fn a_worker_that_hangs_since_before_beside_one_other() {
    finds("stuck-worker", &[], || {
        let stage = Stage::of(prefork("hangs", "2", "0"));
        stage.under(&["--rate", "100", "--timeout", "1s"])
    });
}

/// A server has ended, and its helpers keep the port: the kernel goes on taking connections for nobody.
#[test]
fn a_port_that_is_kept_by_processes_that_do_not_accept() {
    for (keepers, code) in [("1", "stuck-worker"), ("3", "nobody-accepts")] {
        finds(code, &[], || {
            let server = server("kept_listener.py");
            let stage = Stage::of(program(&["python3", &server, "8080", keepers]));
            stage.under(&["--rate", "20", "--timeout", "500ms"])
        });
    }
}

/// Starts two processes with a socket of UDP each.
fn udp_sockets(kind: &str) -> Started {
    let server = Started::spawn(program(&[
        "python3",
        &server("udp_sockets.py"),
        "8080",
        kind,
    ]));
    let sockets = || {
        let table = wakeone_kernel::proc::stat::text("/proc/thread-self/net/udp");
        table.map_or(0, |table| table.matches(":1F90 ").count())
    };
    support::slowly("both sockets are bound", || sockets() == 2);
    std::thread::sleep(Duration::from_millis(300));
    server
}

/// A group is what the kernel takes for one, and not what has an address in common.
#[test]
fn sockets_of_udp_that_are_no_group() {
    let why = [
        ("address", "without SO_REUSEPORT they are no group"),
        ("mixed", "only some of its sockets have SO_REUSEPORT"),
        ("after", "SO_REUSEPORT after bind()"),
        ("users", "of different users"),
        ("multicast", "each socket gets each datagram"),
    ];
    for (kind, why) in why {
        staged(|ground| {
            let _server = udp_sockets(kind);
            let told = doctor(&[]);
            assert_eq!(told.report["accept_model"], "no-group", "{:#}", told.report);
            assert!(told.report["model"]["evidence"].to_string().contains(why));
            match kind {
                // That is what it is for.
                "multicast" => told.is_healthy(),
                _ => told.has("no-group"),
            }
            let attach = Command::new(WAKEONE)
                .args([
                    "attach",
                    "udp://:8080",
                    "--owner",
                    "nobody",
                    "--runtime-dir",
                ])
                .arg(ground.runtime())
                .output()
                .expect("attach");
            let said = String::from_utf8_lossy(&attach.stderr);
            assert!(said.contains(why), "{kind}: {said}");
            assert_eq!(attach.status.code(), Some(1), "{kind}: {said}");
        });
    }
    staged(|_| {
        let _server = udp_sockets("group");
        let told = doctor(&[]);
        assert_eq!(told.report["accept_model"], "socket-per-worker");
        told.is_healthy();
    });
}

/// Most requests take 1 ms, some 300 ms.
const MIXED: [&str; 6] = [
    "--rate",
    "120",
    "--mix",
    "97:/work?us=1000&kind=sleep",
    "--mix",
    "3:/work?us=300000&kind=sleep",
];

#[test]
fn a_blind_hash() {
    finds("blind-hash", &[], || {
        Stage::of(serve(&["--model", "preforked", "--reuseport", "-w", "4"])).under(&MIXED)
    });
}

/// Clients in a closed loop, with requests that sleep for 10 ms each in one worker.
fn queue_behind_one(backlog: &str, clients: &str) -> Stage {
    Stage::of(serve(&["--model", "preforked", "--backlog", backlog])).under(&[
        "-c",
        clients,
        "--mix",
        "1:/work?us=10000&kind=sleep",
    ])
}

#[test]
fn an_accept_queue_that_overflows() {
    finds("accept-queue-overflow", &[], || queue_behind_one("8", "50"));
}

#[test]
fn a_backlog_that_is_too_small() {
    finds("backlog-too-small", &["workers-busy"], || {
        queue_behind_one("32", "31")
    });
}

#[test]
fn a_worker_that_ends_with_connections_in_its_queue() {
    staged(|_| {
        let stage = Stage::of(prefork("own", "3", "1")).under(&["--rate", "100"]);
        let worker = stage.workers()[0];
        let told = std::thread::scope(|scope| {
            let doctor = scope.spawn(|| doctor(&[]));
            std::thread::sleep(Duration::from_millis(700));
            support::halt(worker);
            std::thread::sleep(Duration::from_millis(600));
            signal(worker, Signal::KILL);
            doctor.join().expect("doctor")
        });
        told.has("reload-resets-queue");
    });
}

/// From the times that connections took, doctor simulates what other policies would bring, and says why where it cannot.
#[test]
fn what_a_policy_would_bring_is_simulated() {
    staged(|_| {
        let stage = Stage::of(serve(&["--model", "preforked", "--reuseport", "-w", "4"]));
        let slow = ["--mix", "1:/work?us=60000&kind=sleep"];
        let quick = ["--mix", "9:/work?us=5000&kind=sleep"];
        let _stage = stage.under(&[&["--rate", "200"][..], &quick, &slow].concat());
        let told = doctor(&[]);
        let prediction = &told.report["prediction"];
        let of = |field: &str| prediction[field].as_f64().unwrap_or(f64::NAN);
        assert_eq!(prediction["simulated"], true, "{:#}", told.report);
        assert_eq!(prediction["workers"], 4, "{prediction:#}");
        // 10.5 ms, and what the server needs beside the sleep.
        let most = 16.0 * f64::from(slowness());
        assert!(
            (8.0..most).contains(&of("service_ms_mean")),
            "{prediction:#}"
        );
        let mean = |name: &str| {
            let ways = prediction["ways"].as_array().expect("ways");
            let way = ways.iter().find(|way| way["name"] == name);
            way.and_then(|way| way["latency_ms_mean"].as_f64())
        };
        let (now, then) = (mean("now"), mean("least-connections+rescue"));
        assert!(now > then && then > Some(8.0), "{prediction:#}");

        let untraced = doctor(&["--no-tracing"]).report;
        assert_eq!(untraced["prediction"], Value::Null);
        let reason = untraced["not_predicted"].as_str().expect("a reason");
        assert!(reason.contains("tracing"), "{reason}");
    });
}

#[test]
fn a_herd_around_poll() {
    finds("thundering-herd", &[], || {
        Stage::of(prefork("poll", "4", "0")).under(&["--rate", "150"])
    });
}

#[test]
fn a_herd_around_epoll() {
    finds("epoll-exclusive-missing", &[], || {
        let options = ["--model", "epoll-prefork", "--epoll", "wake-all", "-w", "4"];
        Stage::of(serve(&options)).under(&["--rate", "150"])
    });
}

const SLEEPY: [&str; 4] = ["--rate", "150", "--mix", "1:/work?us=3000&kind=sleep"];

#[test]
fn the_last_to_sleep_gets_most() {
    finds("lifo-imbalance", &[], || {
        let options = [
            "--model",
            "epoll-prefork",
            "--epoll",
            "exclusive",
            "-w",
            "4",
        ];
        Stage::of(serve(&options)).under(&SLEEPY)
    });
}

#[test]
fn a_reuseport_group_of_one() {
    finds("group-of-one", &["lifo-imbalance"], || {
        Stage::of(prefork("group-of-one", "4", "3")).under(&["--rate", "150"])
    });
}

#[test]
fn multipath_tcp() {
    finds("mptcp-listener", &[], || {
        Stage::of(prefork("mptcp", "2", "0")).under(&["--rate", "50"])
    });
}

#[test]
fn workers_pinned_to_one_cpu() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return eprintln!("skipped: it takes two CPUs to use only one of them");
    }
    finds("pinned-to-one-cpu", &[], || {
        let mut pinned = program(&["taskset", "-c", "0", LAB, "serve", "-l", AT]);
        pinned.args(["--model", "preforked", "-w", "3"]);
        Stage::of(pinned).under(&["--rate", "50"])
    });
}

#[test]
fn a_worker_near_its_limit_of_descriptors() {
    staged(|_| {
        let mut limited = program(&["prlimit", "--nofile=40", LAB, "serve", "-l", AT]);
        limited.args(["--model", "epoll", "--header-timeout", "60"]);
        let stage = Stage::of(limited);
        let idle: Vec<TcpStream> = (0..28)
            .map(|_| TcpStream::connect(("127.0.0.1", PORT)).expect("connect"))
            .collect();
        doctor(&[]).has("descriptor-limit-near");
        drop((idle, stage));
    });
}

#[test]
fn workers_that_are_all_busy() {
    // Four workers serve forty clients that send the next request at once.
    finds("workers-busy", &[], || {
        Stage::of(prefork("accept", "4", "100")).under(&["-c", "40", "--timeout", "60s"])
    });
}

#[test]
fn requests_that_wait_in_workers_that_have_accepted_them() {
    // Sixty connections are kept, and each request holds one of four event loops.
    finds("waits-inside", &["lifo-imbalance"], || {
        let options = ["--model", "epoll-prefork", "--epoll", "rotate", "-w", "4"];
        let mix = "1:/work?us=20000&kind=sleep";
        Stage::of(serve(&options)).under(&["-c", "60", "--keep-alive", "--mix", mix])
    });
}

/// Checks that doctor finds nothing in a server, with or without load, with tracing and without.
fn healthy(stage: impl Fn() -> Stage) {
    staged(|_| {
        let stage = stage();
        doctor(&[]).is_healthy();
        doctor(&["--no-tracing"]).is_healthy();
        drop(stage);
    });
}

#[test]
fn nothing_is_found_where_workers_block_in_accept() {
    healthy(|| Stage::of(prefork("accept", "3", "1")).under(&["--rate", "200"]));
    healthy(|| Stage::of(serve(&["--model", "preforked", "-w", "4"])).under(&SLEEPY));
}

#[test]
fn nothing_is_found_where_each_worker_has_a_socket_and_a_moderate_load() {
    healthy(|| {
        let options = ["--model", "preforked", "--reuseport", "-w", "4"];
        Stage::of(serve(&options)).under(&["--rate", "200", "--mix", "1:/work?us=1000&kind=sleep"])
    });
    healthy(|| Stage::of(serve(&["--model", "reuseport", "-w", "4"])).under(&["--rate", "200"]));
}

#[test]
fn nothing_is_found_in_a_single_event_loop() {
    healthy(|| Stage::of(serve(&["--model", "epoll"])).under(&["--rate", "200", "--keep-alive"]));
}

#[test]
fn nothing_is_found_where_one_is_woken_in_turn() {
    healthy(|| {
        let options = ["--model", "epoll-prefork", "--epoll", "rotate", "-w", "4"];
        Stage::of(serve(&options)).under(&SLEEPY)
    });
}

#[test]
fn nothing_is_found_in_a_server_without_load() {
    healthy(|| Stage::of(prefork("epoll", "3", "0")));
    healthy(|| {
        let options = [
            "--model",
            "epoll-prefork",
            "--epoll",
            "exclusive",
            "-w",
            "4",
        ];
        Stage::of(serve(&options))
    });
    healthy(|| Stage::of(prefork("own", "3", "0")));
}

/// A user without any privilege, and a copy of the program that it may read.
struct Nobody(std::path::PathBuf);

impl Nobody {
    fn of(ground: &Ground) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(ground.path(), open.clone()).expect("chmod");
        let program = ground.path().join("wakeone");
        for (from, name) in [(WAKEONE, "wakeone"), (LAB, "wakeone-lab")] {
            let to = ground.path().join(name);
            support::copy_program(from, &to);
            std::fs::set_permissions(&to, open.clone()).expect("chmod");
        }
        let guests = ground.path().join("guests");
        std::fs::create_dir(&guests).expect("folder");
        std::os::unix::fs::chown(&guests, Some(65534), Some(65534)).expect("chown");
        Self(program)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        self.of_program(&self.0, arguments)
    }

    fn of_program(&self, path: &std::path::Path, arguments: &[&str]) -> Command {
        let user = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
        let mut command = program(&["setpriv"]);
        command
            .args(user)
            .args(["--inh-caps", "-all", "--bounding-set", "-all"])
            .arg(path)
            .args(arguments);
        command
    }

    /// Two workers with a socket each.
    fn serve(&self) -> Command {
        let options = ["--model", "preforked", "--reuseport", "-w", "2"];
        let lab = self.0.with_file_name("wakeone-lab");
        let mut serve = self.of_program(&lab, &["serve", "-l", AT]);
        // A guest book in a folder that this user may write to.
        let store = self.0.with_file_name("guests");
        serve.args(options).arg("--store").arg(store);
        serve
    }

    /// Exit code, standard output, lines of standard error.
    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, Vec<String>) {
        let output = self.command(arguments).output().expect("setpriv");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let told = text(&output.stderr).lines().map(str::to_owned).collect();
        (output.status.code(), text(&output.stdout), told)
    }
}

#[test]
fn without_privileges_ones_own_server_is_told_by_what_may_be_seen() {
    staged(|ground| {
        let nobody = Nobody::of(ground);
        let serve = nobody.serve();
        let stage = Stage::of(serve).under(&["--rate", "50", "--timeout", "1s"]);
        let (code, text, told) = nobody.run(&["doctor", ":8080", "--for", "1s"]);
        assert_eq!((code, told.len()), (Some(0), 0), "{text} {told:?}");
        assert!(
            text.contains("socket-per-worker") && text.contains("healthy"),
            "{text}"
        );
        // Each missing privilege, and its effect, is named once.
        let notes: Vec<&str> = text.lines().filter(|l| l.starts_with("note: ")).collect();
        let of = |word: &str| notes.iter().filter(|note| note.contains(word)).count();
        let tracing = "it needs CAP_BPF, CAP_PERFMON, CAP_SYS_ADMIN): connections taken";
        assert_eq!((of(tracing), of("of other users")), (1, 1), "{notes:#?}");
        assert_eq!(of(" 1 processes"), 0, "{notes:#?}");
        assert_eq!(notes.len(), 2, "{notes:#?}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");

        support::halt(stage.workers()[0]);
        let (code, text, _) = nobody.run(&["doctor", ":8080", "--for", "2s", "--json"]);
        let report: Value = serde_json::from_str(&text).expect("JSON");
        let report = report["listeners"][0].clone();
        Told { code, report }.has("stopped-worker");
    });
}

#[test]
fn without_privileges_anothers_server_is_not_called_healthy() {
    staged(|ground| {
        let nobody = Nobody::of(ground);
        let _stage = Stage::of(serve(&["--model", "preforked", "-w", "2"]));
        let (code, text, told) = nobody.run(&["doctor", ":8080", "--for", "500ms"]);
        assert_eq!((code, told.len()), (Some(1), 0), "{text} {told:?}");
        assert!(
            text.contains("not told") && !text.contains("healthy"),
            "{text}"
        );
        assert!(
            text.contains("CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"),
            "{text}"
        );
    });
}

#[test]
fn without_privileges_attach_names_those_it_needs() {
    staged(|ground| {
        let nobody = Nobody::of(ground);
        let serve = nobody.serve();
        let _stage = Stage::of(serve);
        // The user may write there, so only capabilities are missing.
        let runtime = ground.path().join("guests/run");
        let runtime = runtime.to_str().expect("path");
        let (code, text, told) = nobody.run(&["attach", ":8080", "--runtime-dir", runtime]);
        assert_eq!((code, told.len(), &*text), (Some(1), 1, ""), "{told:#?}");
        for word in [":8080", "CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"] {
            assert!(told[0].contains(word), "no {word} in {told:?}");
        }
        assert!(!std::path::Path::new(runtime).exists(), "nothing is left");
    });
}

#[test]
fn the_same_port_in_another_network_namespace_is_another_server() {
    staged(|_| {
        let options = ["--model", "preforked", "-w", "2"];
        let _busy = Stage::of(serve(&options)).under(&["--rate", "300"]);
        let told = std::thread::scope(|scope| {
            let beside = scope.spawn(|| {
                wakeone_kernel::netns::isolate().expect("network namespace");
                let _stage = Stage::of(serve(&options));
                doctor(&[])
            });
            beside.join().expect("doctor")
        });
        told.is_healthy();
        assert_eq!(told.report["totals"]["connections"], 0, "{:#}", told.report);
    });
}
