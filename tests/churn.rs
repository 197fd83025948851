//! Servers whose workers share one queue reload under load; workers end, are killed, become more and fewer. Steered, no
//! more requests are lost than without us. Each test has a network namespace of its own, and needs root.

#[path = "support/mod.rs"]
mod support;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::real::{Started, installed, program};
use support::steered::{assert_nothing_left, isolated, said, soak, wakeone};
use support::{Clients, Ground, get, runs, server, signal, slowly};
use wakeone_kernel::proc::process::children;

const AT: &str = "127.0.0.1:7500";
const ASK: &str = "/?word=ok";
const CLIENTS: usize = 4;
const SOON: Duration = Duration::from_millis(900);

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

/// What becomes of a server.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// This signal to its master.
    Master(Signal),
    /// This signal to one of its workers.
    Worker(Signal),
    /// Another number of workers, and a reload.
    Nginx(usize),
}

/// Steps, and how long after one another.
type Steps<'a> = (&'a [Step], Duration);

struct Server {
    started: Started,
    folder: PathBuf,
}

impl Server {
    fn start(ground: &Ground, command: impl Fn(&Path) -> Command) -> Self {
        let folder = ground.path().to_owned();
        let started = Started::spawn(command(&folder));
        slowly("it answers", || get(address(), ASK).is_ok());
        Self { started, folder }
    }

    fn take(&self, step: Step) {
        let master = self.started.pid();
        match step {
            Step::Master(which) => signal(master, which),
            Step::Worker(which) => {
                // Some have a process for resources beside their workers, which has no socket.
                let workers = children(master).into_iter();
                let one = workers.filter(|pid| holds_listener(*pid)).max();
                one.into_iter().for_each(|pid| signal(pid, which));
            }
            Step::Nginx(workers) => {
                configure_nginx(&self.folder, workers);
                signal(master, Signal::HUP);
            }
        }
    }

    /// Goes through these steps again and again. Returns how many requests were answered, and why others were not.
    fn churn(&self, (steps, pause): Steps<'_>, time: Duration) -> (u64, Vec<String>) {
        let clients = Clients::start(address(), ASK, CLIENTS);
        let begun = Instant::now();
        for step in steps.iter().cycle() {
            self.take(*step);
            std::thread::sleep(pause);
            if begun.elapsed() >= time {
                break;
            }
        }
        clients.stop()
    }
}

/// Whether a process holds a socket that listens at the server's address.
fn holds_listener(pid: u32) -> bool {
    use wakeone_kernel::proc::process::sockets_of;
    use wakeone_kernel::socket::diag::{Which, sockets};
    use wakeone_model::listener::Protocol;
    let there = sockets(Protocol::Tcp, Which::Listening, address().port()).expect("sock_diag");
    let held = sockets_of(pid).unwrap_or_default();
    held.iter()
        .any(|(_, inode)| there.iter().any(|one| one.socket.inode == *inode))
}

/// Requests that a killed worker had in hand are lost with it, steered or not: at most one for each client and kill.
fn lost_by_kills((steps, pause): Steps<'_>, time: Duration) -> usize {
    let kill = |step: &&Step| matches!(step, Step::Worker(Signal::KILL));
    let rounds = time.div_duration_f32(pause * steps.len() as u32).ceil() as usize;
    steps.iter().filter(kill).count() * rounds * CLIENTS
}

/// By how much two counts of rare events may differ by chance: three times the standard deviation of their difference, which
/// is the root of their sum.
fn by_chance(one: usize, other: usize) -> usize {
    (3.0 * ((one + other) as f64).sqrt()) as usize
}

/// Runs the steps without us and with us. Of a server that loses some whenever it reloads, `allowed` tells how many more.
fn no_more_is_lost(
    name: &str,
    command: impl Fn(&Path) -> Command,
    steps: Steps<'_>,
    allowed: fn(usize, usize) -> usize,
) {
    let Some(ground) = isolated() else { return };
    if !installed(name) {
        return eprintln!("skipped: {name} is not installed");
    }
    let server = Server::start(&ground, command);
    let time = Duration::from_secs(if soak() { 60 } else { 6 });
    let (before, lost_before) = server.churn(steps, time);
    let output = wakeone(&ground, &["attach", AT]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("one queue by"), "{text}{:?}", said(&output));
    let (after, lost_after) = server.churn(steps, time);
    println!(
        "{name}: {before} answered and {} lost as it is, {after} and {} steered",
        lost_before.len(),
        lost_after.len()
    );
    assert!(runs(server.started.pid()), "the server lives");
    assert!(after > before / 2, "{after} answered, {before} before");
    let (before, after) = (lost_before.len(), lost_after.len());
    let allowed = before + lost_by_kills(steps, time) + allowed(before, after);
    assert!(after <= allowed, "{allowed}: {lost_after:?}");
    let output = wakeone(&ground, &["detach", AT]);
    assert!(output.status.success(), "{:?}", said(&output));
    drop(server);
    assert_nothing_left(&ground);
}

fn configure_nginx(folder: &Path, workers: usize) {
    let here = folder.display();
    let text = format!(
        "daemon off; user root; worker_processes {workers}; pid {here}/pid; error_log {here}/log;
         events {{ worker_connections 512; }}
         http {{ access_log off; client_body_temp_path {here}/b; proxy_temp_path {here}/p; fastcgi_temp_path {here}/f;
                uwsgi_temp_path {here}/u; scgi_temp_path {here}/s;
                server {{ listen {AT}; location / {{ return 200 ok; }} }} }}"
    );
    std::fs::write(folder.join("nginx.conf"), text).expect("configuration");
}

/// A server in Python, with the application of the tests.
fn python(words: &[&str]) -> Command {
    let app = server("app.py");
    let mut command = program(words);
    command.current_dir(app.trim_end_matches("app.py"));
    command
}

#[test]
fn nginx_reloads_with_more_and_fewer_workers() {
    let command = |folder: &Path| {
        configure_nginx(folder, 4);
        let mut command = program(&["nginx", "-c"]);
        command.arg(folder.join("nginx.conf"));
        command
    };
    let steps = [
        Step::Master(Signal::HUP),
        Step::Nginx(6),
        Step::Worker(Signal::TERM),
        Step::Nginx(2),
        Step::Worker(Signal::KILL),
        Step::Nginx(4),
    ];
    no_more_is_lost("nginx", command, (&steps, SOON), |_, _| 0);
}

/// What servers in Python understand.
const PYTHON: [Step; 6] = [
    Step::Master(Signal::HUP),
    Step::Master(Signal::TTIN),
    Step::Worker(Signal::TERM),
    Step::Master(Signal::TTOU),
    Step::Worker(Signal::KILL),
    Step::Master(Signal::HUP),
];

#[test]
fn gunicorn_reloads_with_more_and_fewer_workers() {
    let words = ["gunicorn", "-w", "4", "-k", "gthread", "--bind", AT];
    let command = |_: &Path| {
        let mut command = python(&words);
        command.args(["--threads", "8", "--log-level", "error", "app:wsgi"]);
        command
    };
    no_more_is_lost("gunicorn", command, (&PYTHON, SOON), |_, _| 0);
}

#[test]
fn uvicorn_reloads_with_more_and_fewer_workers() {
    let words = ["uvicorn", "--workers", "4", "--host", "127.0.0.1"];
    let command = |_: &Path| {
        let mut command = python(&words);
        command.args(["--port", "7500", "--log-level", "error", "app:asgi"]);
        command
    };
    no_more_is_lost("uvicorn", command, (&PYTHON, SOON), |_, _| 0);
}

/// It ends with the first worker that fails, and starts all workers at once: for a second it serves nobody. Of four clients a
/// reload costs one to two a request, steered or not.
#[test]
fn hypercorn_reloads() {
    let command = |_: &Path| python(&["hypercorn", "-w", "4", "--bind", AT, "app:asgi"]);
    let steps = [Step::Master(Signal::HUP)];
    no_more_is_lost("hypercorn", command, (&steps, 4 * SOON), by_chance);
}
