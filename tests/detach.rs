//! `wakeone detach` removes the remains of a killed supervisor, complete or half made. Its workers go on serving.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use support::steered::{assert_nothing_left, cgroups, isolated, said, signal_all, status, wakeone};
use support::{eventually, everyone, pid_of, runs};
use wakeone_control::paths::Paths;

const OPTIONS: [&str; 6] = ["-w", "3", "-l", "127.0.0.1:8080", "--name", "web"];

#[test]
fn a_group_without_a_supervisor_is_taken_away_and_its_workers_serve_on() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    let address = run.ready();
    let before: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    run.murder();
    let paths = Paths::of(&ground.runtime());
    let group = status(&ground, "web");
    assert!(group["steered"] == true && group["supervisor_pid"].is_null());
    assert_eq!(cgroups(&paths).len(), 1);
    // A half-made folder of a process that is gone: its number is above the kernel's highest.
    let half = paths.pins.join("tmp-4194305-0");
    std::fs::create_dir(&half).expect("folder on bpffs");

    let output = wakeone(&ground, &["detach", "web", "--json"]);
    assert!(output.status.success(), "{:?}", said(&output));
    let reports: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let report = &reports[0];
    assert_eq!(report["detached"], 1, "from one address: {report}");
    assert_eq!(report["pins"], true, "{report}");
    assert_eq!(report["cgroups"].as_array().map(Vec::len), Some(1));
    assert_eq!(report["serving_pids"], serde_json::json!(before));

    assert!(!paths.group_pins("web").exists() && cgroups(&paths).is_empty());
    assert!(ground.groups().iter().all(|path| !path.ends_with("web")));
    // All workers answer, by the kernel's own choice.
    let after: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    assert_eq!(before, after);

    let output = wakeone(&ground, &["detach", "--all"]);
    assert!(output.status.success(), "{:?}", said(&output));
    assert!(!half.exists(), "what was half-made is gone too");
    end(&before);
    assert_nothing_left(&ground);
}

#[test]
fn who_reads_only_the_first_lines_of_a_status_gets_them() {
    let Some(ground) = isolated() else { return };
    let (reader, writer) = std::io::pipe().expect("pipe");
    drop(reader);
    let mut status = std::process::Command::new(support::WAKEONE);
    status
        .arg("status")
        .arg("--runtime-dir")
        .arg(ground.runtime());
    let output = status.stdout(writer).output().expect("runs");
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{:?}",
        said(&output)
    );
}

/// Ends workers that have no supervisor.
fn end(workers: &[u32]) {
    for pid in workers {
        signal_all(*pid, Signal::KILL);
    }
    eventually("the workers are gone", || {
        !workers.iter().any(|pid| runs(*pid))
    });
}

#[test]
fn what_is_left_when_all_died_is_taken_away() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    let workers: Vec<u32> = everyone(run.ready(), 3).iter().map(pid_of).collect();
    run.murder();
    end(&workers);
    let output = wakeone(&ground, &["detach", "--all"]);
    assert!(output.status.success(), "{:?}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("web: detached; no worker is left"), "{text}");
    assert_nothing_left(&ground);
    let output = wakeone(&ground, &["detach", "--all"]);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "nothing was left behind\n"
    );
    assert_nothing_left(&ground);
}

#[test]
fn a_detached_group_can_be_started_again() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    let address = run.ready();
    let workers: Vec<u32> = everyone(address, 3).iter().map(pid_of).collect();
    run.murder();
    let output = wakeone(&ground, &["detach", "web"]);
    assert!(output.status.success(), "{:?}", said(&output));
    end(&workers);
    let mut run = ground.whoami(&OPTIONS);
    everyone(run.ready(), 3);
    assert_eq!(status(&ground, "web")["steered"], true);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_group_with_a_living_supervisor_is_refused() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&OPTIONS);
    let address = run.ready();
    let output = wakeone(&ground, &["detach", "web"]);
    let lines = said(&output);
    assert_eq!(output.status.code(), Some(1), "{lines:?}");
    assert!(
        lines.len() == 1 && lines[0].contains(&format!("(pid {})", run.pid())),
        "{lines:?}"
    );
    // `detach` takes all groups without a supervisor: not this one.
    let output = wakeone(&ground, &["detach", "--all"]);
    assert!(output.status.success(), "{:?}", said(&output));
    let group = status(&ground, "web");
    assert!(
        group["steered"] == true && group["agent"] == true,
        "{group}"
    );
    everyone(address, 3);
    run.stop();
    assert_nothing_left(&ground);
}
