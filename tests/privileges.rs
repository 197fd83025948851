//! Privileges: workers inherit nothing from Wakeone, and the supervisor keeps only the capabilities that it needs.

#[path = "support/mod.rs"]
mod support;

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::split::for_another_user;
use support::steered::{PREFORKED, assert_nothing_left, isolated, status, worker};
use support::{LAB, server};

/// A set of capabilities of a process, from its status.
fn capabilities(pid: u32, set: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = text.lines().find_map(|line| line.strip_prefix(set));
    let bits = line
        .and_then(|line| line.strip_prefix(':'))
        .expect("the set");
    u64::from_str_radix(bits.trim(), 16).expect("bits")
}

/// Each open descriptor, and the file that it refers to.
fn descriptors(pid: u32) -> Vec<(u32, PathBuf)> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("fd")
        .flatten();
    let mut open: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            Some((number, std::fs::read_link(entry.path()).ok()?))
        })
        .collect();
    open.sort();
    open
}

const BPF: u64 = 1 << 39;
const NET_ADMIN: u64 = 1 << 12;
const SYS_ADMIN: u64 = 1 << 21;
const PERFMON: u64 = 1 << 38;
const DAC_OVERRIDE: u64 = 1 << 1;

#[test]
fn workers_have_no_capability_and_no_descriptor_but_their_own() {
    let Some(ground) = isolated() else { return };
    let as_users: [&[&str]; 2] = [&[], &["--user", "nobody"]];
    // `nobody` may have no access to the folder of the sources, so the script is passed as text.
    let script = std::fs::read_to_string(server("whoami.py")).expect("server");
    for as_user in as_users {
        let options = [
            "-w",
            "3",
            "-l",
            "127.0.0.1:8080",
            "-l",
            "[::1]:8080",
            "--name",
            "web",
        ];
        let options = [&options[..], as_user].concat();
        let sleepy = ["python3", "-c", &script, "{fd}", "{fd2}"];
        let mut run = ground.run(&options, &sleepy);
        run.ready();
        let group = status(&ground, "web");
        assert_eq!(group["steered"], true);
        let mut listeners = std::collections::HashSet::new();
        for slot in 0..3 {
            let pid = worker(&group, slot).expect("a worker");
            for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                assert_eq!(
                    capabilities(pid, set),
                    0,
                    "{set} of worker {slot} {as_user:?}"
                );
            }
            // 5 and 6 are the socket pair by which the server wakes itself up. Wakeone holds neither end.
            let open = descriptors(pid);
            let numbers: Vec<u32> = open.iter().map(|(number, _)| *number).collect();
            assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6], "{open:?}");
            for (_, listener) in &open[3..5] {
                assert!(
                    listener.to_string_lossy().starts_with("socket:"),
                    "{open:?}"
                );
                assert!(listeners.insert(listener.clone()), "of its own: {open:?}");
            }
            let ours = descriptors(run.pid());
            for (_, own) in &open[5..7] {
                assert!(!ours.iter().any(|(_, theirs)| theirs == own), "{own:?}");
            }
        }
        run.stop();
        assert_nothing_left(&ground);
    }
}

/// A file of the sources.
fn source(name: &str) -> String {
    let path = format!("{}/../../{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The value of a setting, by the first line that begins with it.
fn setting<'a>(unit: &'a str, name: &str) -> &'a str {
    let mut lines = unit.lines();
    lines
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
        .unwrap_or_else(|| panic!("no {name}="))
}

const AS_IT_IS: &str = "wakeone-server@.service";

/// The user and group of www-data on every Debian, and one that never has a capability.
const WWW_DATA: &str = "33";

/// Returns the words of a unit's `ExecStart`, filled by its example of an environment file. Another program and another server
/// replace those of the example.
fn starts(unit: &str, program: &Path, server: &[&str]) -> Vec<String> {
    let example = |name: &str| {
        let mut lines = unit.lines().map(|line| line.trim_start_matches(['#', ' ']));
        lines
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
            .unwrap_or_default()
    };
    assert!(example("WAKEONE_COMMAND").contains("/srv/shop/bin/"));
    let mut words = Vec::new();
    for word in setting(unit, "ExecStart").split(' ') {
        match word {
            "/usr/local/bin/wakeone" => words.push(program.display().to_string()),
            "%i" => words.push("shop".to_owned()),
            "$WAKEONE_OPTIONS" => {
                let options = example("WAKEONE_OPTIONS").replace("www-data", WWW_DATA);
                words.extend(options.split_whitespace().map(str::to_owned));
            }
            "$WAKEONE_COMMAND" => words.extend(server.iter().map(|word| (*word).to_owned())),
            word => words.push(word.to_owned()),
        }
    }
    words
}

/// The units start what README shows: they tell systemd that they are ready, and no server runs as root.
#[test]
fn each_unit_starts_a_server_that_is_not_root_and_reports_it_ready() {
    for (name, server) in [
        (
            AS_IT_IS,
            &[
                "serve",
                "--model",
                "epoll-prefork",
                "-w",
                "2",
                "-l",
                "127.0.0.1:8000",
            ][..],
        ),
        ("wakeone-one@.service", &["serve", "--model", "preforked"]),
        ("wakeone-run@.service", &["serve", "--model", "preforked"]),
    ] {
        let Some((folder, binary, runtime)) = for_another_user("app.py") else {
            return;
        };
        std::os::unix::fs::chown(&runtime, Some(0), Some(0)).expect("chown");
        let lab = folder.path().join("lab");
        support::copy_program(LAB, &lab);
        let server = [&[lab.to_str().expect("path")], server].concat();
        let unit = source(&format!("contrib/{name}"));
        let manager = folder.path().join("notify");
        let told = UnixDatagram::bind(&manager).expect("socket");
        open_to_all(&manager);
        let mut command = Command::new("setpriv");
        // systemd keeps what is in the bounding set, and takes all from another user than root.
        let keep = setting(&unit, "CapabilityBoundingSet").to_lowercase();
        let keep = keep.split_whitespace().map(|cap| cap.replace("cap_", ",+"));
        let keep: String = keep.collect();
        command.args([
            format!("--bounding-set=-all{keep}"),
            "--no-new-privs".into(),
        ]);
        if unit.contains("\nUser=www-data\n") {
            std::os::unix::fs::chown(&runtime, Some(33), Some(33)).expect("chown");
            command.args(["--reuid", WWW_DATA, "--regid", WWW_DATA, "--clear-groups"]);
        }
        command.arg("--").args(starts(&unit, &binary, &server));
        command.env("NOTIFY_SOCKET", &manager);
        command.env("WAKEONE_RUNTIME_DIR", &runtime);
        let run = support::Run::start(command);
        told.set_read_timeout(Some(support::long_patience()))
            .expect("timeout");
        let mut message = [0; 256];
        let ready =
            std::iter::from_fn(|| told.recv(&mut message).ok().map(|n| message[..n].to_vec()))
                .any(|message| String::from_utf8_lossy(&message).contains("READY=1"));
        assert!(ready, "{name}: {:?}", run.lines());
        // The guardian of one queue is the supervisor's child too, and as root as that is.
        let is_server = |pid: &u32| {
            std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| program == lab)
        };
        let children = wakeone_kernel::proc::process::children(run.pid()).into_iter();
        let workers: Vec<u32> = children.filter(is_server).collect();
        assert!(!workers.is_empty(), "{name}");
        for pid in workers {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
            assert!(
                status.contains("\nUid:\t33\t33\t33\t33\n"),
                "{name}: {status}"
            );
            assert_eq!(capabilities(pid, "CapEff"), 0, "{name}");
        }
        run.stop();
    }
}

fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(path, mode).expect("mode");
}

/// A user without any privilege types what README and each `--help` show, and makes a newcomer's mistakes.
#[test]
fn a_newcomers_first_hour_takes_no_privilege() {
    let Some((folder, _binary, _runtime)) = for_another_user("app.py") else {
        return;
    };
    support::copy_program(LAB, folder.path().join("wakeone-lab"));
    let script = folder.path().join("newcomer.sh");
    std::fs::write(&script, source("tests/newcomer.sh")).expect("script");
    open_to_all(&script);
    let mut hour = Command::new("setpriv");
    hour.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=-all",
    ]);
    hour.args(["--bounding-set=-all", "--no-new-privs", "--"]);
    hour.arg(&script)
        .args(["wakeone-lab", "serve", "--model", "epoll-prefork"]);
    hour.args(["-w", "4", "-l", "127.0.0.1:8000"]);
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let output = hour
        .env_clear()
        .env("PATH", path)
        .output()
        .expect("setpriv");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.ends_with(" steps\n"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_docs_and_the_units_agree_and_systemd_accepts_them() {
    let units = ["wakeone-run@.service", "wakeone-agent.service", AS_IT_IS];
    let [run, agent, as_it_is] = units.map(|name| source(&format!("contrib/{name}")));
    let docs = source("docs/run.md");
    for name in ["KillMode", "TimeoutStopSec", "WatchdogSec", "Delegate"] {
        assert_eq!(setting(&docs, name), setting(&run, name), "{name}");
    }
    // Workers serve on when their supervisor dies: systemd must not end them for it.
    assert_eq!(setting(&run, "KillMode"), "process");
    assert_eq!(setting(&as_it_is, "CapabilityBoundingSet"), "");
    let bounding = setting(&agent, "CapabilityBoundingSet");
    assert!(
        bounding.contains("CAP_SETPCAP"),
        "it takes that to give up root"
    );
    let verify = |path: &Path| {
        let mut analyze = Command::new("systemd-analyze");
        analyze.arg("verify").arg("--man=no").arg(path).output()
    };
    let folder = tempfile::tempdir().expect("folder");
    for (name, unit) in units.into_iter().zip([run, agent, as_it_is]) {
        let path = folder.path().join(name);
        let unit = unit.replace("/usr/local/bin/wakeone", support::WAKEONE);
        std::fs::write(&path, unit).expect("unit");
        let Ok(output) = verify(&path) else {
            return eprintln!("skipped: systemd-analyze is not installed");
        };
        let said = String::from_utf8_lossy(&output.stderr);
        let ours: Vec<&str> = said
            .lines()
            .filter(|line| line.contains("wakeone"))
            .collect();
        assert!(ours.is_empty(), "{said}");
    }
}

#[test]
fn the_supervisor_gives_up_what_only_its_start_needed() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(
        &["-w", "2", "-l", "127.0.0.1:8080", "--name", "web"],
        &PREFORKED,
    );
    run.ready();
    let tasks = std::fs::read_dir(format!("/proc/{}/task", run.pid())).expect("threads");
    let threads: Vec<u32> = tasks
        .flatten()
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .collect();
    assert!(threads.len() >= 2, "the agent is a thread of its own");
    for thread in threads {
        let effective = capabilities(thread, "CapEff");
        let gone = BPF | NET_ADMIN | SYS_ADMIN | PERFMON | DAC_OVERRIDE;
        assert_eq!(effective & gone, 0, "{effective:x}");
        // Three are kept out of effect for the end: filters that keep new connections away while the group closes,
        // then removing the cgroup and a mount.
        let permitted = capabilities(thread, "CapPrm");
        assert_eq!(permitted & (BPF | PERFMON), 0, "{permitted:x}");
    }
    run.stop();
    assert_nothing_left(&ground);
}
