//! Commands that keep running log their start, their actions on servers, mistakes, and their end.

#[path = "support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use support::real::{Started, program};
use support::steered::{assert_nothing_left, isolated, wakeone};
use support::{Ground, LAB, Run, WAKEONE, slowly};

const AT: &str = "127.0.0.1:7500";

/// A server with a socket for each of its workers.
fn start_server() -> Started {
    let serve = [LAB, "serve", "--model", "reuseport", "--workers", "2"];
    let started = Started::spawn(program(&[&serve[..], &["--listen", AT]].concat()));
    slowly("the server listens", || {
        std::net::TcpStream::connect(AT).is_ok()
    });
    started
}

fn agent(ground: &Ground, config: &Path, options: &[&str]) -> Run {
    let mut agent = Command::new(WAKEONE);
    agent.args(["agent", "--config"]).arg(config).args(options);
    agent.arg("--runtime-dir").arg(ground.runtime());
    Run::start(agent)
}

#[test]
fn an_agent_tells_of_its_start_each_server_a_broken_file_and_its_end() {
    let Some(ground) = isolated() else { return };
    let config = ground.path().join("agent.toml");
    let good = format!("[[target]]\nlisten = '{AT}'\n");
    std::fs::write(&config, &good).expect("configuration");
    let mut agent = agent(&ground, &config, &[]);
    agent.line("1 target to be kept steered");
    let server = start_server();
    agent.line("is steered; ");
    std::fs::write(&config, "[[target]]\nlisten = ':0'\n").expect("configuration");
    agent.signal(Signal::HUP);
    let line = agent.line("is not taken over, and all goes on as before");
    assert!(
        line.contains("agent.toml") && line.contains("no port"),
        "{line}"
    );
    std::fs::write(&config, "").expect("configuration");
    agent.signal(Signal::HUP);
    agent.line("is not steered any more; its server runs on as it was");
    std::fs::write(&config, &good).expect("configuration");
    agent.signal(Signal::HUP);
    agent.line("is steered; ");
    agent.signal(Signal::TERM);
    agent.line("is not steered any more");
    agent.line("stopped");
    let (status, lines) = agent.wait();
    assert_eq!(status.code(), Some(0), "{lines:?}");
    assert!(
        !lines.iter().any(|line| line.contains('\u{1b}')),
        "{lines:?}"
    );
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn a_log_can_be_json() {
    let Some(ground) = isolated() else { return };
    let config = ground.path().join("agent.toml");
    std::fs::write(&config, "").expect("configuration");
    let mut agent = agent(&ground, &config, &["--log", "json"]);
    agent.line("\"event\":\"started\"");
    agent.signal(Signal::TERM);
    let (_, lines) = agent.wait();
    for line in &lines {
        let object: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert!(object["timestamp"].is_string() && object["message"].is_string());
    }
    assert_nothing_left(&ground);
}

#[test]
fn the_journal_gets_priorities() {
    let Some(ground) = isolated() else { return };
    let config = ground.path().join("agent.toml");
    std::fs::write(&config, format!("[[target]]\nlisten = '{AT}'\n")).expect("configuration");
    // A shell knows the file that its standard error is, as systemd knows the journal's stream.
    let log = ground.path().join("log");
    let line = format!(
        "JOURNAL_STREAM=$(stat -Lc %d:%i /proc/self/fd/2) exec {WAKEONE} agent --config {} --runtime-dir {}",
        config.display(),
        ground.runtime().display()
    );
    let mut agent = Command::new("sh");
    agent.args(["-c", &line]);
    agent.stderr(std::fs::File::create(&log).expect("log"));
    let mut agent = agent.spawn().expect("agent");
    let text = || std::fs::read_to_string(&log).unwrap_or_default();
    slowly("it tells what it misses", || text().contains("\n<4>"));
    support::signal(agent.id(), Signal::TERM);
    agent.wait().expect("wait");
    let text = text();
    assert!(text.starts_with("<6>"), "{text}");
    assert!(text.lines().all(|line| line.starts_with('<')), "{text}");
    assert_nothing_left(&ground);
}

#[test]
fn attach_in_the_foreground_tells_when_it_is_ready_and_when_it_ends() {
    let Some(ground) = isolated() else { return };
    let server = start_server();
    let mut attach = Command::new(WAKEONE);
    attach.args(["attach", AT, "--foreground", "--runtime-dir"]);
    attach.arg(ground.runtime());
    let mut attach = Run::start(attach);
    attach.line("ready: 127.0.0.1:7500 is steered");
    attach.signal(Signal::TERM);
    attach.line("is not steered any more");
    attach.line("stopped");
    let (status, lines) = attach.wait();
    assert_eq!(status.code(), Some(0), "{lines:?}");
    drop(server);
    assert_nothing_left(&ground);
}

#[test]
fn attach_that_cannot_choose_names_the_way_out() {
    let Some(ground) = isolated() else { return };
    let serve = [LAB, "serve", "--model", "preforked", "--listen", AT];
    let server = Started::spawn(program(&serve));
    slowly("the server listens", || {
        std::net::TcpStream::connect(AT).is_ok()
    });
    let output = wakeone(&ground, &["attach", AT]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && told.contains("give each worker its own"),
        "{told}"
    );
    drop(server);
    assert_nothing_left(&ground);
}
