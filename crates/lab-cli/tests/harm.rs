//! A small part of `wakeone-lab run harm`: real servers that are attached to answer as they do without.

use assert_cmd::Command;
use serde_json::Value;
use wakeone_lab::process::program;

/// Each server with the program that it needs.
const SERVERS: [(&str, &str); 2] = [
    ("gunicorn-gthread", "gunicorn"),
    ("tokio-current", "tokio_server"),
];

/// The servers that can be measured here; prints a line for each that cannot.
fn servers() -> Vec<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: not root");
        return Vec::new();
    }
    let here = |(name, needs): (&'static str, &str)| {
        let found = program(needs).is_some();
        if !found {
            eprintln!("skipped: {needs} is not installed");
        }
        found.then_some(name)
    };
    SERVERS.into_iter().filter_map(here).collect()
}

fn sum(variant: &Value, metric: &str) -> Option<f64> {
    let values = variant["metrics"][metric]["values"].as_array()?;
    Some(values.iter().filter_map(Value::as_f64).sum())
}

#[test]
fn attached_servers_lose_nothing_and_no_count_is_left() {
    let cells: Vec<String> = servers()
        .iter()
        .flat_map(|server| ["kept", "stuck"].map(|situation| format!("{server}/{situation}")))
        .collect();
    if cells.is_empty() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::cargo_bin("wakeone-lab").expect("the binary is built");
    command
        .args(["run", "harm", "--quick", "--rounds", "1", "--json", "-"])
        .env("XDG_STATE_HOME", directory.path())
        .env("WAKEONE_RUNTIME_DIR", directory.path().join("run"));
    for way in ["as-it-is", "attach"] {
        // A part of a name is enough, and `attach` is also one of `attach+rescue`; those are measured too.
        command.args(
            cells
                .iter()
                .flat_map(|cell| ["--only".into(), format!("{cell}/{way}")]),
        );
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    for cell in &cells {
        for way in ["as-it-is", "attach"] {
            let name = format!("{cell}/{way}");
            let variants = result["variants"].as_array().unwrap();
            let found = variants.iter().find(|v| v["name"] == name).unwrap();
            assert_eq!(sum(found, "lost"), Some(0.0), "{name}: {found}");
            assert!(sum(found, "planned") > Some(300.0), "{name}: {found}");
            assert!(sum(found, "latency_ms_p99").is_some(), "{name}");
            let left = sum(found, "active_at_end");
            assert_eq!(left, (way == "attach").then_some(0.0), "{name}");
        }
    }
    let names = result["expectations"].as_array().unwrap().iter();
    let judged = names.filter(|e| e["name"].as_str().unwrap().ends_with("/attach"));
    assert_eq!(judged.count(), cells.len());
}
