//! Stamps results and programs with the commit that they are of: WAKEONE_COMMIT if it is set, else the answer of git, else
//! `unknown` (a tarball). `+changes` behind it says that files differed.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=WAKEONE_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let named = std::env::var("WAKEONE_COMMIT").ok();
    let commit = named.or_else(checked_out).unwrap_or_default();
    let sound = !commit.is_empty()
        && commit
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'+');
    let commit = if sound { &commit } else { "unknown" };
    println!("cargo::rustc-env=WAKEONE_COMMIT={commit}");
    // HEAD moves with a checkout, its log with every commit; both lie in the (possibly shared) git directory.
    if let Some(directory) = git(&["rev-parse", "--absolute-git-dir"]) {
        for file in ["HEAD", "logs/HEAD"] {
            let path = Path::new(&directory).join(file);
            if path.exists() {
                println!("cargo::rerun-if-changed={}", path.display());
            }
        }
    }
}

fn checked_out() -> Option<String> {
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(commit + if changes.is_empty() { "" } else { "+changes" })
}

/// The output of a git command, if these sources are a checkout of their own.
fn git(arguments: &[&str]) -> Option<String> {
    // A tarball that was unpacked inside another checkout does not have that checkout's commit.
    if !Path::new("../../.git").exists() {
        return None;
    }
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
