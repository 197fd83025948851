//! Where `scripts/deps` gets Rust from on a machine without it: the packages it requests, and when it runs the
//! official installer. Every program that would change the machine is replaced by one of the test's own.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The script uses these programs of the machine itself.
const TOOLS: [&str; 15] = [
    "bash", "cat", "cut", "dirname", "env", "gcc", "head", "mktemp", "rm", "sed", "sh", "sort",
    "true", "uname", "grep",
];

/// A machine: a PATH with nothing else in it.
struct Machine(tempfile::TempDir);

impl Machine {
    /// `packages`: a line `PACKAGE VERSION` for each that apt knows.
    fn new(packages: &str) -> Self {
        let machine = Self(tempfile::tempdir().expect("a folder"));
        for tool in TOOLS {
            let real = ["/usr/bin", "/bin"].map(|dir| Path::new(dir).join(tool));
            let real = real.into_iter().find(|path| path.exists());
            symlink(real.expect(tool), machine.path(tool)).expect("a link");
        }
        let log = machine.path("log").display().to_string();
        let folder = machine.0.path().display().to_string();
        fs::write(machine.path("packages"), format!("{packages}\n")).expect("packages");
        machine.program("id", "echo 0");
        machine.program("tee", "cat >/dev/null");
        machine.program("chmod", "true");
        machine.program(
            "apt-cache",
            &format!(
                "while read -r name version; do [ \"$name\" != \"$2\" ] || \
                 printf '%s:\\n  Installed: (none)\\n  Candidate: %s\\n' \"$name\" \"$version\"; done <{folder}/packages"
            ),
        );
        // An installed rustup is a program from then on.
        let rustup = format!("#!/bin/sh\\necho rustup \"$@\" >>{log}\\n");
        machine.program(
            "apt-get",
            &format!(
                "echo apt-get \"$@\" >>{log}; case \" $* \" in *' rustup '*) printf '{rustup}' >{folder}/rustup; \
                 /bin/chmod +x {folder}/rustup;; esac"
            ),
        );
        machine.program(
            "curl",
            &format!("while [ \"$1\" != -o ]; do shift; done; echo \"echo installer \\\"\\$@\\\" >>{log}\" >\"$2\""),
        );
        machine
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn program(&self, name: &str, text: &str) {
        fs::write(self.path(name), format!("#!/bin/bash\n{text}\n")).expect("a program");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(self.path(name), mode).expect("a mode");
    }

    /// Runs the script. Returns its output and the log of the programs it ran.
    fn deps(&self, yes: bool) -> (Output, String) {
        let mut command = Command::new("/bin/bash");
        command
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/deps"))
            .env_clear()
            .env("PATH", self.0.path())
            .env("HOME", self.0.path())
            .stdin(Stdio::null());
        if yes {
            command.env("YES", "1");
        }
        let output = command.output().expect("bash");
        let done = fs::read_to_string(self.path("log")).unwrap_or_default();
        (output, done)
    }
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .map(String::from_utf8_lossy)
        .concat()
}

#[test]
fn the_distributions_own_cargo_comes_first_if_it_is_new_enough() {
    for (packages, wanted) in [
        (
            "cargo 1.91.0+dfsg1-1\ncargo-web 1.96.0+dfsg1-1",
            " cargo rustfmt rust-clippy",
        ),
        (
            "cargo 1.85.1+dfsg1-1+deb13u1\nrustup 1.27.1-3+b1\ncargo-web 1.96.0+dfsg1-1~deb13u1+b1",
            " cargo-web rustfmt-web rust-web-clippy",
        ),
        (
            "cargo 0.66.0+ds1-1\ncargo-web 1.96.0+dfsg1-1~deb12u2",
            " cargo-web ",
        ),
    ] {
        let (output, done) = Machine::new(packages).deps(false);
        assert!(output.status.success(), "{}", said(&output));
        assert!(
            format!("{done} ").replace('\n', " ").contains(wanted),
            "{done}"
        );
        assert!(
            !done.contains("rustup") && !done.contains("installer"),
            "{done}"
        );
    }
}

#[test]
fn rustup_comes_next() {
    let machine = Machine::new("cargo 1.75.0+dfsg0ubuntu1\nrustup 1.26.0-3");
    let (output, done) = machine.deps(false);
    assert!(output.status.success(), "{}", said(&output));
    assert!(done.contains("rustup toolchain install stable"), "{done}");
    assert!(!done.contains("installer"), "{done}");
}

#[test]
fn the_official_installer_runs_after_a_yes_alone() {
    let machine = Machine::new("cargo 1.63.0+dfsg1-2");
    let (output, done) = machine.deps(false);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(
        said(&output).contains("https://rustup.rs"),
        "{}",
        said(&output)
    );
    assert!(said(&output).contains("YES=1"), "{}", said(&output));
    assert!(!done.contains("installer"), "{done}");
    let (output, done) = machine.deps(true);
    assert!(output.status.success(), "{}", said(&output));
    assert!(done.contains("installer -y"), "{done}");
}

#[test]
fn an_old_cargo_is_not_taken() {
    let machine = Machine::new("");
    machine.program("cargo", "echo cargo 1.63.0");
    let (output, _) = machine.deps(false);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("cargo 1.63.0 is too old"),
        "{}",
        said(&output)
    );
    machine.program("cargo", "echo cargo 1.99.0");
    let (output, done) = machine.deps(false);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!((said(&output), done), (String::new(), String::new()));
}
