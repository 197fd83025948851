//! A small part of `wakeone-lab run harm`: real servers that are attached to answer as they do without.

use assert_cmd::Command;
use serde_json::Value;
use wakeone_lab::process::program;

/// A server, the program that it needs, and the situations and ways in which it is measured.
struct Part {
    server: &'static str,
    needs: &'static str,
    situations: &'static [&'static str],
    ways: &'static [&'static str],
}

const PARTS: [Part; 3] = [
    Part {
        server: "gunicorn-gthread",
        needs: "gunicorn",
        situations: &["kept", "stuck"],
        ways: &["attach"],
    },
    Part {
        server: "tokio-current",
        needs: "tokio_server",
        situations: &["kept", "stuck"],
        ways: &["attach"],
    },
    // Its workers share a queue.
    Part {
        server: "gunicorn-gthread-shared",
        needs: "gunicorn",
        situations: &["burst"],
        ways: &["run-command", "plain-attach"],
    },
];

/// The names of the cells that can be measured here, by server and situation, with their ways; prints a line for each
/// server that cannot.
fn cells() -> Vec<(String, &'static [&'static str])> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: not root");
        return Vec::new();
    }
    let here = |part: &&Part| {
        let found = program(part.needs).is_some();
        if !found {
            eprintln!("skipped: {} is not installed", part.needs);
        }
        found
    };
    let parts = PARTS.iter().filter(here);
    let of = |part: &'static Part| {
        let all = part.situations.iter();
        all.map(|situation| (format!("{}/{situation}", part.server), part.ways))
    };
    parts.flat_map(of).collect()
}

fn sum(variant: &Value, metric: &str) -> Option<f64> {
    let values = variant["metrics"][metric]["values"].as_array()?;
    Some(values.iter().filter_map(Value::as_f64).sum())
}

/// Whether the user of the plain ways may run this build.
fn others_may_run(program: &str) -> bool {
    let mut command = std::process::Command::new("test");
    std::os::unix::process::CommandExt::uid(&mut command, 65534);
    let status = command.args(["-x", program]).status();
    status.is_ok_and(|status| status.success())
}

#[test]
fn steered_servers_lose_nothing_and_no_count_is_left() {
    let cells = cells();
    if cells.is_empty() {
        return;
    }
    let plain = others_may_run(env!("CARGO_BIN_EXE_wakeone-lab"));
    let mut names = Vec::new();
    for (cell, ways) in &cells {
        names.push(format!("{cell}/as-it-is"));
        let ways = ways.iter().filter(|way| plain || !way.starts_with("plain"));
        names.extend(ways.map(|way| format!("{cell}/{way}")));
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::cargo_bin("wakeone-lab").expect("the binary is built");
    command
        .args(["run", "harm", "--quick", "--rounds", "1", "--json", "-"])
        .env("XDG_STATE_HOME", directory.path())
        .env("WAKEONE_RUNTIME_DIR", directory.path().join("run"));
    // A part of a name is enough, and `attach` is also one of `attach+rescue`; those are measured too.
    command.args(names.iter().flat_map(|name| ["--only", name]));
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let variants = result["variants"].as_array().unwrap();
    for name in &names {
        // Another user may not be able to run what the server is written in.
        if name.contains("/plain") && result["parameters"]["left_out"][name].is_string() {
            continue;
        }
        let found = variants.iter().find(|v| v["name"] == **name);
        let found = found.unwrap_or_else(|| panic!("{name}: {}", result["parameters"]));
        assert_eq!(sum(found, "lost"), Some(0.0), "{name}: {found}");
        assert!(sum(found, "planned") > Some(300.0), "{name}: {found}");
        assert!(sum(found, "latency_ms_p99").is_some(), "{name}");
        let is_steered = !name.ends_with("/as-it-is");
        let left = sum(found, "active_at_end");
        assert_eq!(left, is_steered.then_some(0.0), "{name}");
        let judged = result["expectations"].as_array().unwrap().iter();
        let judged = judged.filter(|e| e["name"] == **name).count();
        assert_eq!(judged, usize::from(is_steered), "{name}");
    }
}
