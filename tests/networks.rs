//! Servers in network namespaces of their own, as in containers: an agent steers all of them, and each is a group.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use support::steered::{assert_nothing_left, isolated, said, wakeone};
use support::{Ground, Run, WAKEONE, eventually, server, slowly};

/// Workers of each server.
const WORKERS: usize = 2;

/// An agent that serves all network namespaces would steer the servers of another test.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Processes in a network namespace of their own, which ends with them.
struct Inhabitant(Child);

impl Inhabitant {
    fn start(command: &str) -> Self {
        Self::start_with(command, &[])
    }

    fn start_with(command: &str, variables: &[(&str, &str)]) -> Self {
        use std::os::unix::process::CommandExt;
        let script = format!("ip link set lo up && exec {command}");
        let mut unshare = Command::new("unshare");
        unshare.args(["--net", "sh", "-c", &script]);
        unshare.envs(variables.iter().copied());
        unshare.process_group(0);
        unshare.stdout(Stdio::null()).stderr(Stdio::null());
        Self(unshare.spawn().expect("unshare"))
    }

    /// A server of two workers with a queue each.
    fn server() -> Self {
        Self::start(&own_sockets())
    }

    /// The inode of its network namespace.
    fn network(&self) -> u64 {
        let link =
            std::fs::read_link(format!("/proc/{}/ns/net", self.0.id())).expect("its network");
        let text = link.to_str().expect("text");
        let inode = text.trim_start_matches("net:[").trim_end_matches(']');
        inode.parse().expect("an inode")
    }

    /// Opens connections from within, and leaves them open.
    fn connections(&self, count: usize) -> Child {
        let script = format!(
            "import socket,sys,time\na=[socket.create_connection(('127.0.0.1',8080)) for _ in range({count})]\nprint('open',flush=True)\nsys.stdin.read()"
        );
        let pid = self.0.id().to_string();
        let mut client = Command::new("nsenter");
        client.args(["--target", &pid, "--net", "python3", "-c", &script]);
        let mut client = client
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("nsenter");
        let mut line = String::new();
        let told = client.stdout.take().expect("stdout");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(told), &mut line).expect("a line");
        assert_eq!(line, "open\n");
        client
    }
}

impl Drop for Inhabitant {
    fn drop(&mut self) {
        let _ = Command::new("kill")
            .args(["-KILL", "--", &format!("-{}", self.0.id())])
            .status();
        let _ = self.0.wait();
    }
}

fn own_sockets() -> String {
    format!("python3 {} 8080 {WORKERS}", server("asyncio_own.py"))
}

/// Starts an agent with this configuration.
fn agent(ground: &Ground, config: &str) -> Run {
    let file = ground.path().join("agent.toml");
    std::fs::write(&file, config).expect("write");
    let mut run = Run::start(command(ground, &file));
    run.line("to be kept steered");
    run
}

fn command(ground: &Ground, file: &Path) -> Command {
    let mut agent = Command::new(WAKEONE);
    agent.arg("agent").arg("--config").arg(file);
    agent.arg("--runtime-dir").arg(ground.runtime());
    agent
}

/// The groups that are steered now.
fn groups(ground: &Ground) -> Vec<Value> {
    let output = wakeone(ground, &["status", "--json"]);
    let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let all = all["groups"].as_array().cloned().unwrap_or_default();
    all.into_iter()
        .filter(|group| group["steered"] == true)
        .collect()
}

fn namespace(group: &Value) -> Option<u64> {
    group["network"]["namespace"].as_u64()
}

/// The group of a network namespace.
fn group_in(ground: &Ground, network: u64) -> Option<Value> {
    let all = groups(ground);
    all.into_iter()
        .find(|group| namespace(group) == Some(network))
}

fn open(group: &Value) -> Vec<i64> {
    let slots = group["slots"].as_array().expect("slots").iter();
    let served = slots.filter(|slot| slot["pid"].is_number());
    served
        .map(|slot| slot["active"].as_i64().expect("active"))
        .collect()
}

#[test]
fn the_same_port_in_several_networks_is_several_groups() {
    let _alone = alone();
    let Some(ground) = isolated() else { return };
    let first = Inhabitant::server();
    let mut agent = agent(&ground, "networks = 'all'\n[[target]]\nlisten = ':8080'\n");
    slowly("the first is steered", || {
        group_in(&ground, first.network()).is_some()
    });
    let second = Inhabitant::server();
    let third = Inhabitant::server();
    let begun = Instant::now();
    for one in [&second, &third] {
        slowly("the others are steered", || {
            group_in(&ground, one.network()).is_some()
        });
    }
    println!("steered {:?} after their start", begun.elapsed());
    // Its connections are counted, and divided.
    let mut client = second.connections(20);
    eventually("all are counted", || {
        let group = group_in(&ground, second.network()).expect("group");
        open(&group) == [10, 10]
    });
    let of_third = group_in(&ground, third.network()).expect("group");
    assert_eq!(open(&of_third).iter().sum::<i64>(), 0);
    drop(client.stdin.take());
    client.wait().expect("wait");
    // An address alone does not tell which is meant.
    let refused = wakeone(&ground, &["detach", ":8080"]);
    assert_eq!(refused.status.code(), Some(1));
    let told = said(&refused).join(" ");
    assert!(
        told.contains("each in a network namespace of its own"),
        "{told}"
    );
    // With its processes a namespace is gone, and nothing of ours keeps it.
    let network = second.network();
    drop(second);
    slowly("its group is gone", || groups(&ground).len() == 2);
    eventually("it has ended", || !exists(network));
    assert!(group_in(&ground, first.network()).is_some());
    agent.signal(Signal::TERM);
    agent.line("stopped");
    assert_nothing_left(&ground);
}

/// Whether any process is in a network namespace.
fn exists(network: u64) -> bool {
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    let mut threads = processes.flat_map(|one| {
        let threads = std::fs::read_dir(one.path().join("task"));
        threads.into_iter().flatten().flatten()
    });
    threads.any(|thread| {
        let link = std::fs::read_link(thread.path().join("ns/net"));
        link.is_ok_and(|link| link.to_str() == Some(&format!("net:[{network}]")))
    })
}

#[test]
fn a_server_is_meant_by_its_marks_or_by_its_own_wish() {
    let _alone = alone();
    let Some(ground) = isolated() else { return };
    let wishing = Inhabitant::start_with(&own_sockets(), &[("WAKEONE", "round-robin")]);
    let wrong = Inhabitant::start_with(&own_sockets(), &[("WAKEONE", "fastest\u{1b}[1m")]);
    let silent = Inhabitant::server();
    let mut config = String::from("networks = 'all'\n[[target]]\nopt_in = true\n");
    let mut agent = agent(&ground, &config);
    let told = agent.line("WAKEONE in its environment");
    assert!(
        told.contains("is no policy") && !told.contains('\u{1b}'),
        "{told}"
    );
    slowly("it is steered", || {
        group_in(&ground, wishing.network()).is_some()
    });
    let group = group_in(&ground, wishing.network()).expect("group");
    assert_eq!(group["policy"], "round-robin");
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(groups(&ground).len(), 1);
    // By the executable, whatever it wishes.
    write!(config, "[[target]]\nexe = '*/python3*'\nlisten = ':8080'\n").expect("text");
    std::fs::write(ground.path().join("agent.toml"), config).expect("write");
    agent.signal(Signal::HUP);
    for one in [&wrong, &silent] {
        slowly("it is steered too", || {
            group_in(&ground, one.network()).is_some()
        });
    }
    let group = group_in(&ground, wishing.network()).expect("group");
    assert_eq!(group["policy"], "round-robin");
    agent.signal(Signal::TERM);
    agent.line("stopped");
    assert_nothing_left(&ground);
}

#[test]
fn one_queue_and_a_new_server_in_the_same_network_are_steered() {
    let _alone = alone();
    let Some(ground) = isolated() else { return };
    let shared = format!("python3 {} 8080 3", server("loops.py"));
    let pod = Inhabitant::start(&format!("sh -c '{shared} & wait $!; exec {shared}'"));
    let mut agent = agent(&ground, "networks = 'all'\n[[target]]\nlisten = ':8080'\n");
    let steered = |agents: &mut Run| {
        slowly("it is steered", || {
            group_in(&ground, pod.network()).is_some()
        });
        agents.line("is steered;");
        group_in(&ground, pod.network()).expect("group")
    };
    let group = steered(&mut agent);
    assert_eq!(group["queued"], 0);
    // Its server ends, and another comes in the same namespace.
    let first = group["slots"][0]["pid"].as_u64().expect("pid");
    support::signal(first as u32, Signal::KILL);
    let group = steered(&mut agent);
    assert_ne!(group["slots"][0]["pid"], first);
    agent.signal(Signal::TERM);
    agent.line("stopped");
    assert_nothing_left(&ground);
}

#[test]
fn attach_by_a_process_in_another_network_ends_with_that_network() {
    let _alone = alone();
    let Some(ground) = isolated() else { return };
    let [first, second] = [Inhabitant::server(), Inhabitant::server()];
    let pid = |one: &Inhabitant| format!("pid:{}", one.0.id());
    // A user who does not know where it is gets told.
    slowly("it is told where something listens", || {
        let output = wakeone(&ground, &["attach", ":8080"]);
        said(&output).join(" ").contains("in its own: give pid:")
    });
    for one in [&first, &second] {
        eventually("it listens", || {
            wakeone(&ground, &["attach", "--dry-run", &pid(one)])
                .status
                .success()
        });
        let output = wakeone(&ground, &["attach", &pid(one)]);
        assert!(output.status.success(), "{:?}", said(&output));
    }
    assert_eq!(groups(&ground).len(), 2);
    // As `attach` said.
    let output = wakeone(&ground, &["detach", &pid(&first)]);
    assert!(output.status.success(), "{:?}", said(&output));
    let left = groups(&ground);
    assert_eq!(
        left.iter().filter_map(namespace).collect::<Vec<_>>(),
        [second.network()]
    );
    let agent = left[0]["supervisor_pid"].as_u64().expect("pid") as u32;
    drop(second);
    slowly("its agent has ended", || !support::runs(agent));
    assert_nothing_left(&ground);
}

#[test]
fn another_proc_than_its_own_is_refused() {
    let _alone = alone();
    let Some(ground) = isolated() else { return };
    for command in [
        &["doctor", ":8080"][..],
        &["attach", ":8080"],
        &["top", ":8080", "--once"],
    ] {
        let output = Command::new("unshare")
            .args(["--pid", "--fork", WAKEONE])
            .args(command)
            .output()
            .expect("unshare");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let told = said(&output).join(" ");
        assert!(told.contains("another PID namespace"), "{told}");
    }
    drop(ground);
}
