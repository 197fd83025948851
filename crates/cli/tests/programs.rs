//! The laboratory is a program of its own, and the command links nothing of it.

use std::process::Command;

fn told(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wakeone"));
    let output = command.args(arguments).output().expect("wakeone");
    let said = String::from_utf8(output.stderr).expect("text");
    (output.status.code(), said)
}

#[test]
fn the_other_program_is_named() {
    for (arguments, instead) in [
        (&["lab", "run", "tills", "--quick"][..], "`wakeone-lab`"),
        (&["lab"], "`wakeone-lab`"),
        (
            &["serve", "--model", "epoll", "-l", ":80"],
            "`wakeone-lab serve`",
        ),
        (&["serve", "--help"], "`wakeone-lab serve`"),
    ] {
        let (code, said) = told(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        assert!(said.contains(instead), "{arguments:?}: {said}");
    }
}

#[test]
fn nothing_of_the_laboratory_is_linked() {
    let mut tree = Command::new(env!("CARGO"));
    tree.current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--locked", "--offline", "--package", "wakeone-cli"])
        .args(["--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let output = tree.output().expect("cargo");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let names: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    for name in [
        "plotters",
        "maud",
        "csv",
        "redis",
        "io-uring",
        "wakeone-lab",
        "wakeone-lab-cli",
        "wakeone-serve",
        "wakeone-waitqueue",
    ] {
        assert!(!names.contains(&name), "{name} is linked");
    }
    // doctor predicts by it.
    assert!(names.contains(&"wakeone-sim"), "{names:?}");
}
