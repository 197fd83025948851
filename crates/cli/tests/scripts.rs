//! `scripts/test`: its last line sums up cargo's output, and a skipped test does not count as passed.
//! `scripts/image-check`: it rejects an image that is not as it should be.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// The output of cargo for a test program with these tests: name, whether it passed, and its output.
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

/// Runs the script with a cargo that prints this and ends with this code. Returns whether the script succeeded, and
/// its lines.
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

/// Makes an OCI archive of one layer with this configuration; `spoil` may change its files before they are packed.
fn image(configuration: &str, spoil: impl Fn(&Path, &str)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("folder");
    let blobs = folder.path().join("blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("blobs");
    std::fs::write(folder.path().join("wakeone"), "a program").expect("program");
    ran(Command::new("tar")
        .current_dir(folder.path())
        .args(["-cf", "layer", "wakeone"]));
    let blob = |bytes: &[u8]| {
        let file = folder.path().join("blob");
        std::fs::write(&file, bytes).expect("blob");
        let sum = ran(Command::new("sha256sum").arg(&file));
        let digest = sum.split(' ').next().expect("digest").to_owned();
        std::fs::rename(&file, blobs.join(&digest)).expect("blob");
        digest
    };
    let layer = blob(&std::fs::read(folder.path().join("layer")).expect("layer"));
    let about = |digest: &str| format!(r#"{{"digest": "sha256:{digest}"}}"#);
    let (config, layer_about) = (about(&blob(configuration.as_bytes())), about(&layer));
    let manifest = blob(format!(r#"{{"config": {config}, "layers": [{layer_about}]}}"#).as_bytes());
    let index = format!(r#"{{"manifests": [{}]}}"#, about(&manifest));
    std::fs::write(folder.path().join("index.json"), index).expect("index");
    spoil(&blobs, &layer);
    let pack = ["-cf", "image.tar", "index.json", "blobs"];
    ran(Command::new("tar").current_dir(folder.path()).args(pack));
    folder
}

/// Runs a command that must succeed, and returns its output.
fn ran(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// The complaint of `scripts/image-check` about an archive; `None` if it has none.
fn complaint(folder: &tempfile::TempDir) -> Option<String> {
    let mut check = Command::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../scripts/image-check"
    ));
    let output = check
        .arg(folder.path().join("image.tar"))
        .output()
        .expect("python3");
    let told = String::from_utf8(output.stderr).expect("text");
    (!output.status.success()).then_some(told)
}

#[test]
fn an_image_that_does_not_start_the_command_is_refused() {
    let labels = [
        "title",
        "description",
        "version",
        "revision",
        "source",
        "licenses",
    ];
    let configuration = |entrypoint: &str, labels: &[&str]| {
        let labels: Vec<String> = labels
            .iter()
            .map(|label| format!(r#""org.opencontainers.image.{label}": "x""#))
            .collect();
        format!(
            r#"{{"os": "linux", "config": {{"Entrypoint": ["{entrypoint}"], "Cmd": ["--help"], "Labels": {{{}}}}}}}"#,
            labels.join(", ")
        )
    };
    let right = configuration("/usr/bin/wakeone", &labels);
    assert_eq!(complaint(&image(&right, |_, _| {})), None);
    let refused = |archive| complaint(&archive).expect("it is refused");
    let told = refused(image(&configuration("/bin/sh", &labels), |_, _| {}));
    assert!(told.contains("entrypoint is ['/bin/sh'] and not"), "{told}");
    let told = refused(image(
        &configuration("/usr/bin/wakeone", &labels[1..]),
        |_, _| {},
    ));
    assert!(
        told.contains("no label org.opencontainers.image.title"),
        "{told}"
    );
    let told = refused(image(&right, |blobs, layer| {
        std::fs::write(blobs.join(layer), "other bytes").expect("blob");
    }));
    assert!(
        told.contains("has other bytes than its name says"),
        "{told}"
    );
    let told = refused(image(&right, |blobs, layer| {
        std::fs::remove_file(blobs.join(layer)).expect("blob");
    }));
    assert!(told.contains("cannot be read as an OCI archive"), "{told}");
}

/// The complaint of `scripts/size-check` about a program, where the docs name this size.
fn size_complaint(program: &str, said: &str) -> Option<String> {
    let folder = tempfile::tempdir().expect("folder");
    let docs = folder.path().join("install.md");
    std::fs::write(
        &docs,
        format!("| `bin/wakeone` | the command, stripped: {said} MB |\n"),
    )
    .expect("docs");
    let mut check = Command::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../scripts/size-check"
    ));
    let output = check.arg(program).env("DOCS", docs).output().expect("bash");
    let told = String::from_utf8(output.stderr).expect("text");
    (!output.status.success()).then_some(told)
}

#[test]
fn docs_that_name_another_size_are_refused() {
    let program = env!("CARGO_BIN_EXE_wakeone");
    let told = size_complaint(program, "0.1").expect("it is refused");
    let right = told
        .split(' ')
        .find(|word| word.contains('.'))
        .expect("a size");
    assert!(told.contains("the docs say 0.1 MB"), "{told}");
    assert_eq!(size_complaint(program, right), None);
    let larger = format!("{:.1}", right.parse::<f64>().expect("a size") * 1.08);
    assert!(size_complaint(program, &larger).is_some());
    assert!(size_complaint("/no/such/program", right).is_some());
}

/// The size of a release build, where there is one; `scripts/chroots` checks it always.
#[test]
fn the_docs_name_the_true_size_of_the_command() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let program = format!("{root}/target/release/wakeone");
    if !Path::new(&program).exists() {
        println!("skipped: there is no release build");
        return;
    }
    ran(Command::new(format!("{root}/scripts/size-check")).arg(program));
}

/// Another user than root skips most of what there is to test, which must not pass.
#[test]
fn no_test_may_skip_in_ci_whoever_runs_it() {
    for user in ["0", "1000"] {
        let folder = tempfile::tempdir().expect("folder");
        let program = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("script");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
        };
        program("id", &format!("echo {user}"));
        program(
            "make",
            "[ \"$WAKEONE_NO_SKIPS\" = 1 ] && echo '1 passed, 0 failed'",
        );
        let path = std::env::var("PATH").expect("PATH");
        let output = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.ci/run"))
            .env("PATH", format!("{}:{path}", folder.path().display()))
            .env_remove("WAKEONE_NO_SKIPS")
            .output()
            .expect("bash");
        assert!(output.status.success(), "as user {user}: {output:?}");
    }
}
