//! The ground of `attach` changes: a worker dies and its manager keeps the socket, two workers serve one socket,
//! the server sets a program of its own, or ends.
//!
//! These tests need root. Otherwise they are skipped, with a message.

#[path = "support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::steered::{isolated, number, said, sum, wakeone};
use support::{Ground, eventually, get, server, slowly};

const PORT: u16 = 7390;

fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// A `manager.py`, and the groups of its ground.
struct Manager {
    ground: Ground,
    child: Child,
    answers: Answers,
    /// The process in whose mount namespace commands run, if it is another one.
    inside: Option<String>,
}

impl Manager {
    /// Starts one with these options, in a network namespace of this thread. Returns None if the test cannot run here.
    fn start(options: &[&str]) -> Option<Self> {
        Self::start_in(options, None)
    }

    /// The same in a cgroup.
    fn start_in(options: &[&str], part: Option<&Part>) -> Option<Self> {
        let ground = isolated()?;
        let (child, answers) = launch(options, part);
        Some(Self {
            ground,
            child,
            answers,
            inside: None,
        })
    }

    /// Ends the server.
    fn end(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().expect("its end");
    }

    /// Starts it again.
    fn begin(&mut self, options: &[&str]) {
        (self.child, self.answers) = launch(options, None);
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("an answer");
        line.trim().to_owned()
    }

    fn tell(&mut self, command: &str) -> String {
        let to = self.child.stdin.as_mut().expect("its input");
        writeln!(to, "{command}").expect("a command");
        self.answer()
    }

    fn wakeone(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = match &self.inside {
            None => Command::new(support::WAKEONE),
            Some(agent) => {
                let mut enter = Command::new("nsenter");
                enter.args(["--mount", "--target", agent, support::WAKEONE]);
                enter
            }
        };
        command.args(arguments).arg("--runtime-dir");
        let output = command.arg(self.ground.runtime()).output().expect("runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text + &said(&output).join("\n"))
    }

    fn attach(&self, options: &[&str]) {
        let (done, text) = self.wakeone(&[&["attach", &target()], options].concat());
        assert!(done, "{text}");
    }

    fn detach(&mut self) {
        let (done, text) = self.wakeone(&["detach", &target()]);
        assert!(done, "{text}");
        self.inside = None;
    }

    fn group(&self) -> Value {
        let (done, text) = self.wakeone(&["status", &target(), "--json"]);
        assert!(done, "{text}");
        let status: Value = serde_json::from_str(&text).expect("JSON");
        status["groups"][0].clone()
    }

    /// Whether the agent waits for a server. For a moment between the two there is neither a group nor a note of that.
    fn waits(&self) -> bool {
        let (done, text) = self.wakeone(&["status", &target(), "--json"]);
        let status = serde_json::from_str::<Value>(&text).ok().filter(|_| done);
        status.is_some_and(|status| status["groups"][0]["steered"] == false)
    }

    fn slot_of(&self, pid: u32) -> Option<usize> {
        let group = self.group();
        let slots = group["slots"].as_array().expect("slots");
        slots.iter().position(|slot| slot["pid"] == pid)
    }

    /// The worker that answers the next request.
    fn worker(answer: &str) -> u32 {
        let pid = answer.split(' ').nth(1).expect("a pid");
        pid.parse().expect("a number")
    }
}

type Answers = BufReader<std::process::ChildStdout>;

/// Starts a `manager.py`, and waits until it listens.
fn launch(options: &[&str], part: Option<&Part>) -> (Child, Answers) {
    let enter = part.map(|part| format!("echo $$ > {}/cgroup.procs;", part.0.display()));
    let mut child = Command::new("sh")
        .args([
            "-c",
            &(enter.unwrap_or_default() + "exec \"$@\""),
            "sh",
            "python3",
        ])
        .arg(server("manager.py"))
        .arg(PORT.to_string())
        .args(options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3");
    let mut answers = BufReader::new(child.stdout.take().expect("its answers"));
    let mut line = String::new();
    answers.read_line(&mut line).expect("an answer");
    assert_eq!(line, "ready\n");
    (child, answers)
}

fn target() -> String {
    format!(":{PORT}")
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.wakeone(&["detach", "--all"]);
        self.end();
    }
}

/// Sends that many requests at once.
fn ask(count: usize, path: &'static str) -> Vec<JoinHandle<std::io::Result<String>>> {
    let ask = |_| std::thread::spawn(move || get(address(), path));
    (0..count).map(ask).collect()
}

fn answers(asked: Vec<JoinHandle<std::io::Result<String>>>) -> Vec<String> {
    let join = |one: JoinHandle<std::io::Result<String>>| one.join().expect("client");
    let answered: std::io::Result<Vec<String>> = asked.into_iter().map(join).collect();
    answered.expect("every request is answered")
}

fn states(group: &Value) -> Vec<&str> {
    let slots = group["slots"].as_array().expect("slots").iter();
    slots
        .map(|slot| slot["state"].as_str().expect("a state"))
        .collect()
}

/// The number of slots in a state.
fn count(group: &Value, state: &str) -> usize {
    states(group).iter().filter(|one| **one == state).count()
}

fn a_dead_workers_socket_is_left_alone(options: &[&str]) {
    let Some(mut manager) = Manager::start(&[&["4"], options].concat()) else {
        return;
    };
    manager.attach(&["--policy", "round-robin"]);
    assert_eq!(count(&manager.group(), "up"), 4);
    // Half of the requests come before anybody can know that the worker is gone.
    manager.tell("kill 2");
    let at_once = ask(40, "/");
    slowly("its slot is down", || count(&manager.group(), "down") == 1);
    let later = ask(40, "/");
    let served: Vec<String> = answers(at_once).into_iter().chain(answers(later)).collect();
    assert!(served.iter().all(|answer| !answer.starts_with("2 ")));
    let down = manager.group();
    let slots = down["slots"].as_array().expect("slots");
    let dead = slots.iter().position(|slot| slot["state"] == "down");
    let dead = dead.expect("a slot that is down");
    assert!(
        slots[dead]["pid"].is_null() && number(&down, dead, "queued") == 0,
        "{down}"
    );

    // A successor on the same socket is given connections again, in the same slot.
    let successor: u32 = manager.tell("start 2").parse().expect("a pid");
    slowly("the successor has the slot", || {
        manager.slot_of(successor) == Some(dead)
    });
    assert_eq!(count(&manager.group(), "up"), 4);
    let mine = answers(ask(40, "/"));
    let mine = mine
        .iter()
        .filter(|answer| Manager::worker(answer) == successor);
    assert_eq!(mine.count(), 10, "round-robin");
}

#[test]
fn a_dead_workers_socket_that_its_manager_keeps_gets_nothing() {
    a_dead_workers_socket_is_left_alone(&[]);
}

#[test]
fn nor_does_one_that_the_other_workers_hold_too() {
    a_dead_workers_socket_is_left_alone(&["--all"]);
}

#[test]
fn what_waits_when_all_workers_died_goes_to_the_first_that_comes() {
    let Some(mut manager) = Manager::start(&["3"]) else {
        return;
    };
    manager.attach(&["--policy", "round-robin", "--rescue"]);
    for socket in ["kill 0", "kill 1", "kill 2"] {
        manager.tell(socket);
    }
    let asked = ask(30, "/");
    std::thread::sleep(Duration::from_millis(300));
    let successor: u32 = manager.tell("start 1").parse().expect("a pid");
    let served = answers(asked);
    assert!(
        served
            .iter()
            .all(|answer| Manager::worker(answer) == successor)
    );
    assert_eq!(count(&manager.group(), "up"), 1);
}

/// A connection that keeps its worker, and that worker.
fn hold() -> (TcpStream, u32) {
    let mut stream = TcpStream::connect(address()).expect("connects");
    stream
        .set_read_timeout(Some(support::patience()))
        .expect("timeout");
    stream
        .write_all(b"GET /hold HTTP/1.1\r\n\r\n")
        .expect("asks");
    let mut answer = Vec::new();
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") || answer.ends_with(b"\n") {
        let mut more = [0; 512];
        let count = stream.read(&mut more).expect("an answer");
        assert!(count > 0, "it ends");
        answer.extend_from_slice(&more[..count]);
    }
    let answer = String::from_utf8(answer).expect("text");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    (stream, Manager::worker(body))
}

#[test]
fn of_two_workers_on_a_socket_the_one_that_is_free_counts() {
    let Some(mut manager) = Manager::start(&["2"]) else {
        return;
    };
    let second: u32 = manager.tell("start 1").parse().expect("a pid");
    manager.attach(&["--policy", "round-robin", "--rescue"]);
    let of_first: u32 = Manager::worker(
        &answers(ask(20, "/"))
            .into_iter()
            .find(|one| one.starts_with("0 "))
            .expect("the first socket's"),
    );
    let slot = 1 - manager.slot_of(of_first).expect("its slot");
    let shown = manager.group()["slots"][slot]["pid"]
        .as_u64()
        .expect("a worker") as u32;
    // Both workers of a socket are held.
    let mut held = std::collections::BTreeMap::new();
    slowly("both are held", || {
        let (stream, worker) = hold();
        if worker != of_first {
            held.insert(worker, stream);
        }
        held.len() == 2
    });
    assert!(held.contains_key(&second) && held.contains_key(&shown));
    // So their queue is moved to the idle one.
    let served = answers(ask(8, "/"));
    assert!(
        served
            .iter()
            .all(|answer| Manager::worker(answer) == of_first)
    );
    assert_eq!(count(&manager.group(), "stuck"), 1);
    // One of them is free: not the one that status shows.
    held.retain(|worker, _| *worker == shown);
    eventually("the mark goes with the first that is free", || {
        count(&manager.group(), "stuck") == 0
    });
    let served = answers(ask(8, "/"));
    assert!(
        served.iter().any(|answer| answer.starts_with("1 ")),
        "{served:?}"
    );
    assert_eq!(held.len(), 1, "the other one is still held");
}

/// Waits until status tells that our program does not choose any more.
fn is_replaced(manager: &Manager) -> bool {
    let group = manager.group();
    assert_eq!(group["attached"], true, "{group}");
    group["replaced"] == true && group["steered"] == false && group["policy"].is_null()
}

#[test]
fn a_server_that_sets_its_own_program_keeps_it() {
    let Some(mut manager) = Manager::start(&["3"]) else {
        return;
    };
    manager.attach(&["--rescue", "--stuck-after", "1ms"]);
    assert_eq!(manager.group()["policy"], "least-connections");
    manager.tell("program");
    slowly("it is noticed", || is_replaced(&manager));
    let (_, text) = manager.wakeone(&["status"]);
    assert!(text.contains("set a program of its own"), "{text}");
    // Its program chooses the first socket for everything. One worker is busy with that, others are idle: it is neither
    // marked nor moved.
    let served = answers(ask(12, "/work?ms=30"));
    assert!(
        served.iter().all(|answer| answer.starts_with("0 ")),
        "{served:?}"
    );
    let group = manager.group();
    assert_eq!(
        (sum(&group, "rescues"), count(&group, "stuck")),
        (0, 0),
        "{group}"
    );
    let (done, text) = manager.wakeone(&["attach", &target()]);
    assert!(!done, "it has an agent: {text}");
    let (done, text) = manager.wakeone(&["detach", &target()]);
    assert!(done, "{text}");
    let served = answers(ask(20, "/"));
    assert!(
        served.iter().all(|answer| answer.starts_with("0 ")),
        "its program is still there: {served:?}"
    );
    let (done, text) = manager.wakeone(&["attach", &target()]);
    assert!(!done && text.contains("another program chooses"), "{text}");
    // Without one it can be attached again.
    manager.tell("detach");
    manager.attach(&[]);
    assert_eq!(manager.group()["replaced"], false);
}

#[test]
fn a_program_that_the_server_set_after_the_agent_died_stays_too() {
    let Some(mut manager) = Manager::start(&["3"]) else {
        return;
    };
    manager.attach(&[]);
    let agent = manager.group()["supervisor_pid"]
        .as_u64()
        .expect("an agent") as u32;
    support::signal(agent, rustix::process::Signal::KILL);
    eventually("the agent is gone", || !support::runs(agent));
    manager.tell("program");
    // The next agent does not take the group away from it.
    let (done, text) = manager.wakeone(&["attach", &target()]);
    assert!(!done && text.contains("another program chooses"), "{text}");
    let (done, text) = manager.wakeone(&["detach", &target()]);
    assert!(done, "{text}");
    let served = answers(ask(20, "/"));
    assert!(
        served.iter().all(|answer| answer.starts_with("0 ")),
        "{served:?}"
    );
}

#[test]
fn a_server_that_takes_our_program_away_is_left_to_the_kernel() {
    let Some(mut manager) = Manager::start(&["3"]) else {
        return;
    };
    manager.attach(&[]);
    manager.tell("detach");
    slowly("it is noticed", || is_replaced(&manager));
    let report = doctor(&manager);
    assert!(report.contains("not steered, though attached"), "{report}");
    let (done, text) = manager.wakeone(&["detach", &target()]);
    assert!(done, "{text}");
}

/// Two sockets that are open together are of one group, and have its program. A server that closes all first has another.
#[test]
fn a_server_that_closes_all_its_sockets_and_opens_others_stays_steered() {
    let Some(mut manager) = Manager::start(&["3"]) else {
        return;
    };
    manager.attach(&["--policy", "round-robin"]);
    for gap in [0, 10, 200, 600] {
        manager.tell(&format!("reopen {gap}"));
        // Until the agent has seen them, those of before are still shown as up, and the hash chooses.
        let before = sum(&manager.group(), "selected");
        slowly("the new sockets are chosen", || {
            for asked in ask(1, "/") {
                let _ = asked.join();
            }
            let group = manager.group();
            count(&group, "up") == 3 && sum(&group, "selected") > before
        });
        let before = sum(&manager.group(), "selected");
        let served = answers(ask(30, "/"));
        let group = manager.group();
        let (steered, replaced) = (&group["steered"], &group["replaced"]);
        assert!(*steered == true && *replaced == false, "{gap} ms: {group}");
        assert_eq!(sum(&group, "selected") - before, 30, "{gap} ms: {group}");
        let of_first = served.iter().filter(|answer| answer.starts_with("0 "));
        assert_eq!(of_first.count(), 10, "{gap} ms: {served:?}");
    }
    manager.tell("reopen 0 program");
    slowly("its program is noticed", || is_replaced(&manager));
    let served = answers(ask(12, "/"));
    let by_its_own = served.iter().all(|answer| answer.starts_with("0 "));
    assert!(by_its_own, "{served:?}");
    manager.detach();
}

fn doctor(manager: &Manager) -> String {
    let mut doctor = Command::new(support::WAKEONE);
    doctor.args(["doctor", &target(), "--for", "500ms", "--no-tracing"]);
    doctor.env("WAKEONE_RUNTIME_DIR", manager.ground.runtime());
    let output = doctor.output().expect("doctor");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Attaches, and ends the server. Returns the agent, which waits for another one.
fn waiting_agent(manager: &mut Manager) -> u32 {
    manager.attach(&[]);
    let agent = manager.group()["supervisor_pid"].as_u64();
    manager.end();
    slowly("it waits", || manager.waits());
    agent.expect("an agent") as u32
}

#[test]
fn an_agent_whose_server_ended_is_listed_and_can_be_ended() {
    let Some(mut manager) = Manager::start(&["2"]) else {
        return;
    };
    let agent = waiting_agent(&mut manager);
    let (done, text) = manager.wakeone(&["status"]);
    assert!(done && text.contains("waits for a server there"), "{text}");
    assert!(!text.contains("closed"), "{text}");
    // The server comes back, and ends again.
    manager.begin(&["2"]);
    slowly("it is steered again", || {
        manager.group()["policy"] == "least-connections"
    });
    answers(ask(8, "/"));
    manager.end();
    slowly("it waits again", || manager.waits());
    assert_eq!(manager.group()["supervisor_pid"], agent);
    let (done, text) = manager.wakeone(&["detach", &target()]);
    assert!(done && text.contains("no server was there"), "{text}");
    eventually("the agent is gone", || !support::runs(agent));
    support::steered::assert_nothing_left(&manager.ground);
    // The next server that listens there is not steered.
    manager.begin(&["2"]);
    answers(ask(8, "/"));
    let (done, _) = manager.wakeone(&["status", &target()]);
    assert!(!done, "no group");
}

#[test]
fn an_agent_that_was_killed_while_it_waited_leaves_what_can_be_taken_away() {
    let Some(mut manager) = Manager::start(&["2"]) else {
        return;
    };
    let agent = waiting_agent(&mut manager);
    support::signal(agent, rustix::process::Signal::KILL);
    eventually("the agent is gone", || !support::runs(agent));
    // The server is attached anew, as if nothing had been.
    manager.begin(&["2"]);
    manager.attach(&[]);
    assert_eq!(count(&manager.group(), "up"), 2);
    let (done, text) = manager.wakeone(&["detach", &target()]);
    assert!(done, "{text}");
}

#[test]
fn the_dead_workers_of_a_killed_run_are_down() {
    let Some(ground) = isolated() else { return };
    for (policy, name) in [("hash", "web"), ("random", "classic")] {
        let listen = format!("127.0.0.1:{PORT}");
        let options = ["-w", "2", "-l", &listen, "--name", name, "--policy", policy];
        let mut run = ground.whoami(&options);
        let address = run.ready();
        let workers: Vec<u32> = support::everyone(address, 2)
            .iter()
            .map(support::pid_of)
            .collect();
        run.murder();
        for pid in &workers {
            support::steered::signal_all(*pid, rustix::process::Signal::KILL);
        }
        eventually("they are gone", || {
            !workers.iter().any(|pid| support::runs(*pid))
        });
        let group = support::steered::status(&ground, name);
        assert_eq!(states(&group), ["down", "down"], "{group}");
        assert!(group["slots"][0]["pid"].is_null(), "{group}");
        let output = wakeone(&ground, &["detach", name]);
        assert!(output.status.success(), "{:?}", said(&output));
    }
}

/// A cgroup2 of this test.
struct Part(std::path::PathBuf);

impl Part {
    fn new() -> Self {
        let root = wakeone_kernel::cgroup::mount_point().expect("cgroup2");
        let path = root.join(format!(
            "wakeone-changed-{}",
            rustix::thread::gettid().as_raw_nonzero()
        ));
        std::fs::create_dir(&path).expect("a cgroup");
        Self(path)
    }

    /// A command that starts there, and before that runs `prepare` in a cgroup namespace and a mount namespace of its own.
    fn run(&self, prepare: &str, arguments: &[&str]) -> (bool, String) {
        let inner = format!("{prepare} exec \"$@\"");
        let outer = format!(
            "echo $$ > {}/cgroup.procs && exec unshare --cgroup --mount sh -c '{inner}' sh \"$@\"",
            self.0.display()
        );
        let output = Command::new("sh")
            .args(["-c", &outer, "sh", support::WAKEONE])
            .args(arguments)
            .output()
            .expect("sh");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text + &said(&output).join("\n"))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        slowly("its cgroup is empty", || {
            std::fs::remove_dir(&self.0).is_ok()
        });
    }
}

/// Only the namespace's own part of cgroup2 is mounted, as in a container.
const FRESH: &str = "umount -R -l /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup &&";

/// Attaches there. The pins are in the mount namespace of the agent, so later commands run there too.
fn attach_in(
    part: &Part,
    manager: &mut Manager,
    prepare: &str,
    options: &[&str],
) -> (bool, String) {
    let runtime = manager.ground.runtime().display().to_string();
    let attach = ["attach", &target(), "--runtime-dir", &runtime];
    let (done, text) = part.run(prepare, &[&attach, options].concat());
    let agent = text
        .split_once("(pid ")
        .and_then(|(_, rest)| rest.split_once(')'));
    manager.inside = agent.map(|(agent, _)| agent.to_owned());
    (done, text)
}

/// The policy of the group, whether its connections are counted, and how many are counted of three.
fn counted(manager: &Manager) -> (String, bool, i64) {
    let kept = ask(3, "/work?ms=1000");
    let mut open = 0;
    let begun = Instant::now();
    while open < 3 && begun.elapsed() < Duration::from_millis(800) {
        open = open.max(sum(&manager.group(), "active"));
    }
    answers(kept);
    let group = manager.group();
    let policy = group["policy"].as_str().expect("a policy").to_owned();
    (policy, group["counting"] == true, open)
}

#[test]
fn connections_that_cannot_be_counted_in_a_cgroup_namespace_are_not_said_to_be() {
    let Some(mut manager) = Manager::start(&["3"]) else {
        return;
    };
    let part = Part::new();
    let (done, text) = attach_in(
        &part,
        &mut manager,
        FRESH,
        &["--policy", "least-connections"],
    );
    assert!(!done && text.contains("not mounted here"), "{text}");
    let (done, text) = attach_in(&part, &mut manager, FRESH, &[]);
    assert!(done && text.contains("shortest-queue"), "{text}");
    assert_eq!(counted(&manager), ("shortest-queue".into(), false, 0));
    manager.detach();
    // The namespace changes nothing where the whole is mounted.
    let (done, text) = attach_in(&part, &mut manager, "", &[]);
    assert!(done, "{text}");
    assert_eq!(counted(&manager), ("least-connections".into(), true, 3));
    manager.detach();
    drop(manager);
}

#[test]
fn a_server_in_the_same_cgroup_namespace_is_counted() {
    let part = match support::is_root() {
        true => Part::new(),
        false => return,
    };
    let Some(mut manager) = Manager::start_in(&["3"], Some(&part)) else {
        return;
    };
    let (done, text) = attach_in(&part, &mut manager, FRESH, &[]);
    assert!(done, "{text}");
    assert_eq!(counted(&manager), ("least-connections".into(), true, 3));
    manager.detach();
    drop(manager);
}
