//! Records the commit that is built: WAKEONE_COMMIT if it is set, else the answer of git, else nothing (a tarball).

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=WAKEONE_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let commit = std::env::var("WAKEONE_COMMIT")
        .ok()
        .or_else(|| git(&["rev-parse", "--short=12", "HEAD"]));
    // The commit changes when HEAD moves, or the branch that it names. git records both moves in this log.
    if let Some(log) =
        git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists())
    {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = commit.filter(|commit| commit.bytes().all(|b| b.is_ascii_alphanumeric()));
    println!(
        "cargo::rustc-env=WAKEONE_COMMIT={}",
        commit.as_deref().unwrap_or("unknown")
    );
}

/// Returns the first line of a git command's output, if these sources are a checkout of their own.
fn git(arguments: &[&str]) -> Option<String> {
    // A tarball that was unpacked inside another checkout does not have that checkout's commit.
    if !Path::new("../../.git").exists() {
        return None;
    }
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.lines().next()?.to_owned();
    output.status.success().then_some(line)
}
