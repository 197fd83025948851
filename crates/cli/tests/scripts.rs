//! `scripts/test`: its last line is the sum of what cargo says, and a skipped test is not one that passed.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// What cargo prints of a test program with these tests: name, whether it passed, and what it said.
fn printed(tests: &[(&str, bool, &str)]) -> String {
    let section = |passed: bool| -> String {
        let of = tests.iter().filter(|(_, ok, _)| *ok == passed);
        of.map(|(name, _, said)| format!("---- {name} stdout ----\n{said}\n\n"))
            .collect()
    };
    let passed = tests.iter().filter(|(_, ok, _)| *ok).count();
    format!(
        "\nrunning {} tests\n\nsuccesses:\n\n{}\nsuccesses:\n    a name\n\nfailures:\n\n{}\nfailures:\n    a name\n\n\
         test result: x. {passed} passed; {} failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s\n",
        tests.len(),
        section(true),
        section(false),
        tests.len() - passed
    )
}

/// Runs the script with a cargo that prints this and ends so: whether it is content, and its lines.
fn summed(output: &str, code: u8, no_skips: bool) -> (bool, Vec<String>) {
    let folder = tempfile::tempdir().expect("folder");
    let (cargo, text) = (folder.path().join("cargo"), folder.path().join("text"));
    std::fs::write(&text, output).expect("text");
    let script = format!("#!/bin/sh\ncat {}\nexit {code}\n", text.display());
    std::fs::write(&cargo, script).expect("script");
    std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).expect("mode");
    let mut test = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/test"));
    test.env("WAKEONE_CARGO", cargo);
    test.env("WAKEONE_NO_SKIPS", if no_skips { "1" } else { "" });
    let output = test.output().expect("bash");
    let text = String::from_utf8(output.stdout).expect("text");
    (
        output.status.success(),
        text.lines().map(str::to_owned).collect(),
    )
}

fn last(lines: &[String]) -> &str {
    lines.last().map_or("", String::as_str)
}

#[test]
fn skipped_tests_are_counted_apart_and_fail_where_none_may_be() {
    let programs = [
        printed(&[
            ("a", true, "fine"),
            ("b", true, "skipped: no nginx\nskipped: no nginx"),
        ]),
        printed(&[("a", true, "skipped: no root"), ("c", true, "")]),
    ]
    .concat();
    let (content, lines) = summed(&programs, 0, false);
    assert!(content, "{lines:?}");
    assert_eq!(last(&lines), "2 passed, 0 failed");
    assert!(lines.contains(&"2 skipped".to_owned()), "{lines:?}");
    assert!(!lines.contains(&"fine".to_owned()), "{lines:?}");
    let (content, lines) = summed(&programs, 0, true);
    assert!(!content);
    assert_eq!(last(&lines), "2 passed, 2 failed");
}

#[test]
fn a_reason_that_is_named_may_skip_anywhere() {
    let said = "skipped: it takes two CPUs to use only one of them";
    let programs = printed(&[("a", true, said), ("b", true, "")]);
    let (content, lines) = summed(&programs, 0, true);
    assert!(content, "{lines:?}");
    assert_eq!(last(&lines), "1 passed, 0 failed");
    let partly = printed(&[("a", true, "not run: redis-server does not start")]);
    assert_eq!(last(&summed(&partly, 0, false).1), "1 passed, 0 failed");
    assert!(!summed(&partly, 0, true).0);
}

#[test]
fn failures_are_failures_and_so_is_a_program_that_dies() {
    let failed = printed(&[
        ("a", false, "skipped: it says so, and fails"),
        ("b", true, ""),
    ]);
    let (content, lines) = summed(&failed, 101, true);
    assert!(!content);
    assert_eq!(last(&lines), "1 passed, 1 failed");
    let (content, lines) = summed("error: could not compile\n", 101, false);
    assert!(
        !content && last(&lines) == "0 passed, 1 failed",
        "{lines:?}"
    );
}
