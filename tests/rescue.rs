//! Rescues under load: no connection is reset, near or far. If an agent is killed in the middle of a rescue, the next
//! command repairs the group.
//!
//! There are some hundred rescues; with `WAKEONE_SOAK=1`, on an idle machine, 20,000 near and 5,000 far.

#[path = "support/distance.rs"]
mod distance;
#[path = "support/mod.rs"]
mod support;

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use distance::{Distance, FAR, NEAR};
use rustix::process::Signal;
use support::steered::{
    PREFORKED, assert_counts_are_exact, assert_nothing_left, die_while_moving, isolated, said,
    soak, status, stop_while_moving, sum, wakeone, worker,
};
use support::{
    Ground, LAB, Run, WAKEONE, eventually, get, halt, patience, runs, server, signal, slowness,
};
use wakeone_kernel::proc::process::socket_of_any;
use wakeone_kernel::socket::diag;
use wakeone_load::{Arrivals, Mix, Outcome, Plan, Shard, Sources, Spacing, Stop};
use wakeone_model::listener::Protocol;

/// A move walks over connections in TIME_WAIT, and moves have a bounded share of the time. With few such connections
/// there are many moves.
fn few_in_time_wait() {
    std::fs::write("/proc/sys/net/ipv4/tcp_max_tw_buckets", "1000").expect("sysctl");
}

/// A load in which some requests keep a blocking worker for long. Where there are fewer of them, they last longer: as
/// many workers are kept at a time, and a connection as often finds all of them kept.
fn plan(target: SocketAddr, rate_per_s: f64, long_percent: u64, sources: Sources) -> Plan {
    Plan {
        target: target.into(),
        host: "test".into(),
        arrivals: Arrivals::Open {
            rate_per_s,
            spacing: Spacing::Poisson,
        },
        stop: Stop {
            requests: None,
            duration: Some(Duration::from_secs(3600)),
        },
        mix: Mix::weighted([
            (100 - long_percent, "/work?us=100&kind=sleep"),
            (
                long_percent,
                &format!("/work?us={}&kind=sleep", 40_000 * rarity()),
            ),
        ]),
        sources,
        timeout: patience(),
        seed: 1,
        threads: 1,
        keep_alive: false,
        shard: Shard::default(),
    }
}

/// So many rescues, and so many times fewer on a slow machine.
fn fewer(rescues: i64) -> i64 {
    rescues / i64::from(slowness())
}

/// So many times fewer connections a second on a slow machine. An emulated one also has a single CPU for two tests.
fn rarity() -> u32 {
    match slowness() {
        1 => 1,
        times => 2 * times,
    }
}

/// So many connections a second, and fewer on a slow machine.
fn slower(rate: f64) -> f64 {
    rate / f64::from(rarity())
}

/// Loads a group until it has made that many rescues, or until the limit. Returns the outcome, and how many it made.
fn load_until(ground: &Ground, plan: Plan, rescues: i64, limit: Duration) -> (Outcome, i64) {
    let cancel = Arc::new(AtomicBool::new(false));
    let thread = {
        let cancel = cancel.clone();
        std::thread::spawn(move || {
            wakeone_load::run(&plan, &cancel, &mut |_| {}).expect("the load runs")
        })
    };
    let begun = Instant::now();
    let made = || sum(&status(ground, "web"), "rescues");
    while made() < rescues && begun.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(100));
    }
    cancel.store(true, Ordering::Relaxed);
    let outcome = thread.join().expect("load");
    let made = made();
    eprintln!(
        "{made} rescues in {:?}: {} connections, {} answers, mean {:.2} ms, p99 {:.1} ms, errors {:?}",
        begun.elapsed(),
        outcome.connections,
        outcome.completed,
        outcome.latency.mean() / 1e6,
        outcome.latency.value_at_quantile(0.99) as f64 / 1e6,
        outcome.errors
    );
    (outcome, made)
}

const SIX: [&str; 6] = ["-w", "6", "--name", "web", "--stuck-after", "1ms"];

fn six(listen: &str) -> Vec<&str> {
    let mut options = SIX.to_vec();
    options.extend(["-l", listen]);
    options
}

#[test]
fn no_connection_is_reset_by_a_rescue() {
    let Some(ground) = isolated() else { return };
    few_in_time_wait();
    none_is_reset_near(&ground, &six("127.0.0.1:8080"));
}

#[test]
fn no_connection_is_reset_by_a_rescue_of_listeners_on_a_private_port() {
    let Some(ground) = isolated() else { return };
    // The number of moves does not depend on the number of connections in TIME_WAIT.
    let options = [&six("127.0.0.1:8080")[..], &["--lookup"]].concat();
    none_is_reset_near(&ground, &options);
}

/// Runs a server that waits for a request as long as [`plan`] waits for the answer.
///
/// Where the accept queue is full, the kernel drops a request, too. TCP sends it again after an ever longer pause, and
/// meanwhile a worker may accept the connection.
fn run_patient(ground: &Ground, options: &[&str]) -> Run {
    let seconds = patience().as_secs().to_string();
    let server = [&PREFORKED[..], &["--header-timeout", &seconds]].concat();
    ground.run(options, &server)
}

fn none_is_reset_near(ground: &Ground, options: &[&str]) {
    let mut run = run_patient(ground, options);
    let target = run.ready();
    let (rescues, limit) = if soak() {
        (20_000, Duration::from_secs(3_600))
    } else {
        (fewer(200), Duration::from_secs(100) * slowness())
    };
    let rate = slower(1_500.0);
    let plan = plan(target, rate, 3, Sources::Loopback { count: 200 });
    let (outcome, made) = load_until(ground, plan, rescues, limit);
    assert!(made >= rescues, "only {made} rescues");
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
    assert_counts_are_exact(ground, "web", outcome.connections);
    run.stop();
    assert_nothing_left(ground);
}

#[test]
fn no_connection_from_far_away_is_reset_by_a_rescue() {
    let Some(ground) = isolated() else { return };
    few_in_time_wait();
    let distance = Distance::of(Duration::from_millis(5));
    let mut run = run_patient(&ground, &six(&format!("{NEAR}:8080")));
    run.ready();
    let target = format!("{FAR}:8080").parse().expect("address");
    let (rescues, limit) = if soak() {
        (5_000, Duration::from_secs(3_600))
    } else {
        (fewer(100), Duration::from_secs(100) * slowness())
    };
    // A relay in user space carries each packet, so there are fewer rescues than near. Each request keeps a worker for a
    // round trip. That is not longer on a slow machine, so more of the fewer requests are long there.
    let long_percent = if slowness() == 1 { 3 } else { 10 };
    let plan = plan(target, slower(500.0), long_percent, Sources::System);
    let (outcome, made) = load_until(&ground, plan, rescues, limit);
    assert!(made >= rescues, "only {made} rescues");
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
    run.stop();
    drop(distance);
    assert_nothing_left(&ground);
}

/// A server with a socket for each of its three workers; it ends with the test.
struct Server(Child);

const SERVER: &str = "127.0.0.1:7300";

impl Server {
    fn start() -> Self {
        let mut command = Command::new(LAB);
        command
            .args(["serve", "--model", "preforked", "--reuseport", "-w", "3"])
            .args(["-l", SERVER])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Self::of(command)
    }

    /// Starts another server of this kind, at the same address.
    fn of(mut command: Command) -> Self {
        let server = Self(command.spawn().expect("serve"));
        eventually("it listens", || listening(SERVER) == 3);
        // The first process opens all sockets, and only then starts the workers that `attach` looks for.
        eventually("its workers run", || server.workers().len() == 3);
        server
    }

    fn workers(&self) -> Vec<u32> {
        wakeone_kernel::proc::process::children(self.0.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for worker in self.workers() {
            signal(worker, Signal::CONT);
        }
        signal(self.0.id(), Signal::TERM);
        let _ = self.0.wait();
    }
}

/// How many sockets listen at an address.
fn listening(address: &str) -> usize {
    let address = address.parse().expect("address");
    let found = diag::sockets_at(Protocol::Tcp, diag::Which::Listening, address);
    found.expect("sock_diag").len()
}

/// An agent's fate in the middle of a move: its name in the environment, and the function that brings it about.
type Fate = (&'static str, fn(u32, SocketAddr));
const DIES: Fate = ("moving", die_while_moving);
const STOPS: Fate = ("stopped", stop_while_moving);

/// Stops a worker and makes connections until its agent moves a queue and meets this fate. A listener is then closed.
fn stop_and_wait(agent: u32, victim: &[u32], at: &str, fate: Fate) {
    for pid in victim {
        halt(*pid);
    }
    fate.1(agent, at.parse().expect("address"));
    assert_eq!(listening(at), 2, "one of three is closed");
}

/// Checks that every request is answered, and that the stopped worker serves again.
fn all_is_well(victim: &[u32], at: &str, listeners: usize) {
    eventually("all of them listen", || listening(at) == listeners);
    for pid in victim {
        signal(*pid, Signal::CONT);
    }
    let address: SocketAddr = at.parse().expect("address");
    for _ in 0..30 {
        get(address, "/work?us=100&kind=sleep").expect("an answer");
    }
    let live = victim.iter().all(|pid| runs(*pid));
    assert!(live, "nor did its worker end");
    assert_eq!(listening(at), listeners);
}

/// Attaches with an agent that dies in its first rescue, and causes that rescue. Returns the stopped worker.
fn attach_and_die(ground: &Ground, server: &Server) -> [u32; 1] {
    attach_and(ground, server, DIES).1
}

/// Does the same for any fate. Returns the agent and the stopped worker.
fn attach_and(ground: &Ground, server: &Server, fate: Fate) -> (u32, [u32; 1]) {
    let output = Command::new(WAKEONE)
        .args(["attach", SERVER, "--rescue", "--runtime-dir"])
        .arg(ground.runtime())
        .env("WAKEONE_TEST_DIE", fate.0)
        .output()
        .expect("attach");
    assert!(output.status.success(), "{:?}", said(&output));
    let group = status(ground, "at-127-0-0-1-7300");
    let agent = group["supervisor_pid"].as_u64().expect("an agent") as u32;
    let victim = [server.workers()[1]];
    stop_and_wait(agent, &victim, SERVER, fate);
    (agent, victim)
}

#[test]
fn detach_repairs_what_an_agent_left_that_died_while_it_moved_a_queue() {
    let Some(ground) = isolated() else { return };
    let server = Server::start();
    let victim = attach_and_die(&ground, &server);
    let output = wakeone(&ground, &["detach", SERVER]);
    assert!(output.status.success(), "{:?}", said(&output));
    all_is_well(&victim, SERVER, 3);
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn attach_repairs_what_an_agent_left_that_died_while_it_moved_a_queue() {
    let Some(ground) = isolated() else { return };
    let server = Server::start();
    let victim = attach_and_die(&ground, &server);
    let output = wakeone(&ground, &["attach", SERVER, "--rescue"]);
    assert!(output.status.success(), "{:?}", said(&output));
    all_is_well(&victim, SERVER, 3);
    let group = status(&ground, "at-127-0-0-1-7300");
    assert_eq!(group["slots"].as_array().map(Vec::len), Some(3), "{group}");
    let output = wakeone(&ground, &["detach", SERVER]);
    assert!(output.status.success(), "{:?}", said(&output));
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn the_agent_of_a_file_repairs_what_one_before_it_left() {
    let Some(ground) = isolated() else { return };
    let server = Server::start();
    let victim = attach_and_die(&ground, &server);
    let config = ground.path().join("agent.toml");
    let text = format!("[[target]]\nlisten = '{SERVER}'\nrescue = true\n");
    std::fs::write(&config, text).expect("configuration");
    let mut agent = Command::new(WAKEONE)
        .args(["agent", "--config"])
        .arg(&config)
        .arg("--runtime-dir")
        .arg(ground.runtime())
        .stderr(Stdio::null())
        .spawn()
        .expect("agent");
    all_is_well(&victim, SERVER, 3);
    signal(agent.id(), Signal::TERM);
    agent.wait().expect("wait");
    drop(server);
    assert_nothing_left(&ground);
}

const WEB: &str = "127.0.0.1:8080";
/// The policy gives connections to busy workers too, while others are idle.
const RUN: [&str; 8] = ["-w", "3", "--name", "web", "-l", WEB, "--policy", "random"];

/// Starts a supervisor that is to meet its fate in its first move.
fn start_web(ground: &Ground, fate: Fate) -> Run {
    let mut command = ground.command(&RUN, &PREFORKED);
    command.env("WAKEONE_TEST_DIE", fate.0);
    let mut run = Run::start(command);
    run.ready();
    run
}

#[test]
fn what_a_stopped_agent_left_closed_is_opened_by_who_comes_and_the_agent_goes_on() {
    let Some(ground) = isolated() else { return };
    let server = Server::start();
    let (agent, victim) = attach_and(&ground, &server, STOPS);
    let output = wakeone(&ground, &["attach", SERVER, "--rescue"]);
    let lines = said(&output).concat();
    let told = format!("continue it with `kill -CONT {agent}`");
    assert!(!output.status.success() && lines.contains(&told), "{lines}");
    assert!(
        lines.contains("in the middle of moving the queue of slot"),
        "{lines}"
    );
    assert_eq!(listening(SERVER), 3);
    signal(agent, Signal::CONT);
    all_is_well(&victim, SERVER, 3);
    let output = wakeone(&ground, &["detach", SERVER]);
    assert!(output.status.success(), "{:?}", said(&output));
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn detach_has_a_stopped_agent_go_on_and_end() {
    let Some(ground) = isolated() else { return };
    let server = Server::start();
    let (agent, victim) = attach_and(&ground, &server, STOPS);
    let output = wakeone(&ground, &["detach", SERVER]);
    assert!(output.status.success(), "{:?}", said(&output));
    eventually("it ended", || !runs(agent));
    all_is_well(&victim, SERVER, 3);
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn run_opens_what_a_stopped_supervisor_left_closed() {
    let Some(ground) = isolated() else { return };
    let first = start_web(&ground, STOPS);
    stop_and_wait(first.pid(), &[], WEB, STOPS);
    let told = format!("continue it with `kill -CONT {}`", first.pid());
    let (code, line) = ground.refused(&RUN, &PREFORKED);
    assert!(code == 1 && line.contains(&told), "{line}");
    assert_eq!(listening(WEB), 3, "opened all the same");
    let output = wakeone(&ground, &["detach", "web"]);
    let line = said(&output).concat();
    assert!(!output.status.success() && line.contains(&told), "{line}");
    first.signal(Signal::CONT);
    all_is_well(&[], WEB, 3);
    first.stop();
    assert_nothing_left(&ground);
}

#[test]
fn run_repairs_what_its_predecessor_left_and_what_agents_left() {
    let Some(ground) = isolated() else { return };
    let server = Server::start();
    let attached = attach_and_die(&ground, &server);
    let first = start_web(&ground, DIES);
    // It repaired the other group when it began.
    all_is_well(&attached, SERVER, 3);
    // No worker is stopped here: one that is stopped when its supervisor ends gets SIGHUP from the kernel.
    stop_and_wait(first.pid(), &[], WEB, DIES);
    let mut second = ground.run(&RUN, &PREFORKED);
    second.ready();
    all_is_well(&[], WEB, 3);
    second.stop();
    let output = wakeone(&ground, &["detach", SERVER]);
    assert!(output.status.success(), "{:?}", said(&output));
    drop(server);
    drop(first);
    assert_nothing_left(&ground);
}

/// Attaches in the foreground, with every line of the log.
fn attach_watched(ground: &Ground, fate: Option<&str>) -> Run {
    let mut command = Command::new(WAKEONE);
    command
        .args(["attach", SERVER, "--rescue", "--policy", "random"])
        .args(["--foreground", "--runtime-dir"])
        .arg(ground.runtime());
    if let Some(fate) = fate {
        command.env("WAKEONE_TEST_DIE", fate);
    }
    let mut agent = Run::start(command);
    agent.line("ready: ");
    agent
}

/// A connection on which a request was sent.
fn asked(path: &str) -> std::net::TcpStream {
    let mut stream = std::net::TcpStream::connect(SERVER).expect("connects");
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    std::io::Write::write_all(&mut stream, request.as_bytes()).expect("sends");
    stream
}

fn is_answered(stream: &mut std::net::TcpStream) -> bool {
    stream
        .set_read_timeout(Some(patience()))
        .expect("a timeout");
    let mut begun = [0];
    std::io::Read::read_exact(stream, &mut begun).is_ok()
}

#[test]
fn a_listener_that_could_not_listen_again_is_not_closed() {
    let Some(ground) = isolated() else { return };
    let mut command = Command::new("python3");
    command.args([&server("dropped.py"), "7300", "3"]);
    let server = Server::of(command);
    let mut agent = attach_watched(&ground, None);
    let mut kept: Vec<_> = (0..6).map(|_| asked("/keep")).collect();
    assert!(kept.iter_mut().all(is_answered));
    let mut rest = vec![asked("/slow")];
    std::thread::sleep(Duration::from_millis(100));
    // Some of these wait for the busy worker.
    rest.extend((0..30).map(|_| asked("/")));
    let line = agent.line("has no SO_REUSEADDR");
    assert!(line.contains("connections of user 65534"), "{line}");
    assert!(rest.iter_mut().all(is_answered));
    assert_eq!(listening(SERVER), 3);
    // The connections of the workers are gone: still a worker of another user may accept at any moment.
    drop((kept, rest));
    let mut rest = vec![asked("/slow")];
    rest.extend((0..30).map(|_| asked("/")));
    assert!(rest.iter_mut().all(is_answered));
    assert_eq!(listening(SERVER), 3);
    let lines = agent.stop();
    let told = lines.iter().filter(|line| line.contains("SO_REUSEADDR"));
    assert_eq!(told.count(), 1, "{lines:?}");
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn a_listener_that_a_move_left_closed_is_opened_later() {
    let Some(ground) = isolated() else { return };
    let server = Server::start();
    let mut agent = attach_watched(&ground, Some("refused"));
    let victim = server.workers()[1];
    halt(victim);
    let at: SocketAddr = SERVER.parse().expect("address");
    eventually("a listener does not listen again", || {
        for _ in 0..8 {
            std::thread::spawn(move || get(at, "/work?us=1000&kind=sleep"));
        }
        std::thread::sleep(Duration::from_millis(50));
        listening(SERVER) == 2
    });
    all_is_well(&[victim], SERVER, 3);
    let group = status(&ground, "at-127-0-0-1-7300");
    let slots = group["slots"].as_array().expect("slots");
    assert!(slots.iter().all(|slot| slot["state"] != "down"), "{group}");
    agent.line("is not rescued");
    agent.stop();
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn detach_repairs_a_group_of_tcp_and_udp_or_says_that_it_cannot() {
    let Some(ground) = isolated() else { return };
    let options = [&["-l", "udp://127.0.0.1:8080"], &RUN[..]].concat();
    let mut command = ground.command(&options, &["python3", &server("whoami.py")]);
    command.env("WAKEONE_TEST_DIE", DIES.0);
    let mut run = Run::start(command);
    run.line("ready: ");
    let workers: Vec<u32> = (0..3)
        .map(|slot| worker(&status(&ground, "web"), slot).expect("a worker"))
        .collect();
    let at: SocketAddr = WEB.parse().expect("address");
    eventually("the supervisor dies of moving a queue", || {
        std::thread::spawn(move || get(at, "/slow?ms=200"));
        for _ in 0..8 {
            std::thread::spawn(move || get(at, "/"));
        }
        std::thread::sleep(Duration::from_millis(90));
        !runs(run.pid())
    });
    assert_eq!(listening(WEB), 2, "one of three is closed");
    // A listener of another user is in the way of the closed one.
    let open = diag::sockets_at(Protocol::Tcp, diag::Which::Listening, at).expect("sock_diag");
    let open = socket_of_any(open[0].socket.inode).expect("a listener");
    let give = |user| rustix::fs::fchown(&open, Some(rustix::fs::Uid::from_raw(user)), None);
    give(65534).expect("fchown");
    let output = wakeone(&ground, &["detach", "web"]);
    let lines = said(&output).concat();
    assert_eq!(output.status.code(), Some(1), "{lines}");
    assert!(lines.contains("gets no connections"), "{lines}");
    assert_eq!(status(&ground, "web")["steered"], true, "the pins stay");
    give(0).expect("fchown");
    drop(open);
    let output = wakeone(&ground, &["detach", "web"]);
    assert!(output.status.success(), "{:?}", said(&output));
    assert_eq!(listening(WEB), 3);
    for pid in workers {
        signal(pid, Signal::KILL);
    }
    drop(run);
    assert_nothing_left(&ground);
}
