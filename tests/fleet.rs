//! The programs of contrib/ that send a load from several machines.

#[path = "support/mod.rs"]
mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use support::kept::event_loops;
use support::real::{Started, installed, program};
use support::steered::isolated;
use support::{LAB, WAKEONE, eventually, get, slowly};

const AT: &str = "127.0.0.1:8080";

fn contrib(name: &str) -> String {
    format!("{}/../../contrib/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Makes an executable in a folder.
fn executable(folder: &Path, name: &str, text: &str) {
    let file = folder.join(name);
    std::fs::write(&file, text).expect("write");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("mode");
}

#[test]
fn a_load_is_sent_from_several_machines_by_ssh() {
    let Some(ground) = isolated() else { return };
    let server = [&[LAB], &event_loops(AT, "2")[..]].concat();
    let server = Started::spawn(program(&server));
    eventually("it answers", || {
        get(AT.parse().expect("address"), "/").is_ok()
    });
    // Another machine: its shell runs what ssh is given.
    executable(
        ground.path(),
        "ssh",
        "#!/bin/sh\n[ \"$3\" != gone ] || exit 255\nexec sh -c \"$4\"\n",
    );
    std::os::unix::fs::symlink(WAKEONE, ground.path().join("wakeone")).expect("link");
    let path = format!(
        "{}:{}",
        ground.path().display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let send = |hosts: &str| {
        let mut load = Command::new(contrib("ssh/load"));
        load.args([
            hosts,
            "--rate",
            "300",
            "-d",
            "1s",
            "-H",
            "X-A: it's \"so\" & $so",
        ]);
        load.arg(format!("http://{AT}/"));
        load.env("PATH", &path).env("WAKEONE_START_IN", "2");
        load.env("TMPDIR", ground.path());
        load.output().expect("the script runs")
    };
    let output = send(":,one,two");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told} {output:?}");
    assert!(told.contains("300 of 300 requests"), "{told}");
    assert!(told.contains("3 shards began within"), "{told}");
    let output = send("one,gone");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("shard 1 of 2 is missing"), "{told}");
    drop(server);
}

#[test]
fn the_groups_of_many_machines_are_in_one_table() {
    let Some(ground) = isolated() else { return };
    let metrics = "127.0.0.1:9464";
    let options = ["-w", "3", "-l", AT, "--name", "web", "--metrics", metrics];
    let mut run = ground.whoami(&options);
    run.ready();
    let mut top = Command::new(WAKEONE);
    top.args(["top", "--once", "--interval", "300ms", "--from", metrics]);
    // Nobody serves there.
    top.args(["--from", "127.0.0.1:9465"]);
    let output = top.output().expect("top");
    assert!(output.status.success(), "{output:?}");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = told.lines().collect();
    assert!(lines[1].starts_with("127.0.0.1:9465  no answer"), "{told}");
    assert!(lines[2].starts_with("127.0.0.1:9464  web"), "{told}");
    assert!(told.contains("Connection refused"), "{told}");
    let output = top.arg("--json").output().expect("top");
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let web = &all["groups"][1];
    assert_eq!((&web["group"], &web["workers"]), (&"web".into(), &3.into()));
    assert!(web["arrivals_per_s"].is_number(), "{all:#}");
    run.stop();
}

#[test]
fn the_job_of_kubernetes_sends_a_shard_from_each_pod() {
    let output = Command::new(contrib("kubernetes/load"))
        .args([
            "7",
            "--rate",
            "2000",
            "-H",
            "X-A: b\"c&d|e\\f",
            "http://server:8080/",
        ])
        .env("WAKEONE_DRY_RUN", "1")
        .output()
        .expect("the script runs");
    assert!(output.status.success(), "{output:?}");
    let job = String::from_utf8(output.stdout).expect("text");
    for line in [
        "  completions: 7",
        "  parallelism: 7",
        "  maxFailedIndexes: 7",
        "  completionMode: Indexed",
        "  backoffLimitPerIndex: 0",
    ] {
        assert!(
            job.lines().any(|one| one == line),
            "{line} is not in\n{job}"
        );
    }
    let arguments = job
        .lines()
        .find_map(|line| line.trim().strip_prefix("args: ["));
    let arguments = arguments.expect("arguments").trim_end_matches(']');
    assert!(
        arguments.starts_with("load, --shard, /7, --start-at, \"@"),
        "{arguments}"
    );
    let rest = r#", --part=-, "--rate", "2000", "-H", "X-A: b\"c&d|e\\f", "http://server:8080/""#;
    assert!(arguments.ends_with(rest), "{arguments}");
}

/// Four nodes of Slurm in this network namespace.
struct Slurm {
    folder: std::path::PathBuf,
    _daemons: Started,
}

impl Slurm {
    fn start(folder: &Path) -> Self {
        let script = format!("{}/../../tests/support/slurm", env!("CARGO_MANIFEST_DIR"));
        let daemons = Started::spawn(program(&[&script, folder.to_str().expect("text")]));
        let slurm = Self {
            folder: folder.to_owned(),
            _daemons: daemons,
        };
        slowly("four nodes are idle", || {
            let mut info = slurm.command("sinfo");
            let output = info.args(["-h", "-t", "idle", "-o", "%D"]).output();
            output.is_ok_and(|output| output.stdout.trim_ascii() == b"4")
        });
        slurm
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command.env("SLURM_CONF", self.folder.join("slurm.conf"));
        command.env("WAKEONE", WAKEONE).env("WAKEONE_START_IN", "4");
        command.current_dir(&self.folder);
        command
    }

    /// Sends a load from all nodes.
    fn load(&self, rate: &str, time: &str) -> Command {
        let mut batch = self.command("sbatch");
        batch.args(["--wait", "--ntasks=4", "--ntasks-per-node=1"]);
        batch.arg(contrib("slurm/load.sbatch"));
        batch.args(["--rate", rate, "-d", time, &format!("http://{AT}/")]);
        batch
    }

    fn said(&self, job: u32) -> String {
        std::fs::read_to_string(self.folder.join(format!("{job}.out"))).unwrap_or_default()
    }
}

/// The process of a task of a job.
fn task(number: &str) -> Option<u32> {
    let is_it = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let is_task = environment
            .split(|byte| *byte == 0)
            .any(|one| one == format!("SLURM_PROCID={number}").as_bytes());
        let program = std::fs::read_link(format!("/proc/{pid}/exe"));
        is_task && program.is_ok_and(|program| program == Path::new(WAKEONE))
    };
    wakeone_kernel::proc::process::pids()
        .into_iter()
        .find(is_it)
}

fn median_ms(json: &[u8]) -> f64 {
    let all: serde_json::Value = serde_json::from_slice(json).expect("JSON");
    let median = all["latency_ms"]["p50"].as_f64();
    median.unwrap_or_else(|| panic!("no median in {all:#}"))
}

#[test]
#[ignore = "half a minute of loads, and Slurm"]
fn four_nodes_of_slurm_send_what_one_machine_would() {
    let Some(ground) = isolated() else { return };
    if !installed("slurmctld") {
        return eprintln!("skipped: Slurm is not installed");
    }
    let slurm = Slurm::start(ground.path());
    let server = [&[LAB], &event_loops(AT, "2")[..]].concat();
    let server = Started::spawn(program(&server));
    eventually("it answers", || {
        get(AT.parse().expect("address"), "/").is_ok()
    });
    let alone = [(); 3].map(|()| {
        let mut load = program(&[WAKEONE, "load", "--rate", "2000", "-d", "4s", "--json"]);
        let output = load.arg(format!("http://{AT}/")).output().expect("load");
        median_ms(&output.stdout)
    });
    let output = slurm.load("2000", "4s").output().expect("sbatch");
    assert!(output.status.success(), "{output:?} {}", slurm.said(1));
    let told = slurm.said(1);
    assert!(told.contains("8000 of 8000 requests"), "{told}");
    assert!(told.contains("4 shards began within"), "{told}");
    let mut merge = program(&[WAKEONE, "load", "merge", "--json"]);
    let parts = (0..4).map(|number| slurm.folder.join(format!("1.{number}.part")));
    let output = merge.args(parts).output().expect("merge");
    let merged = median_ms(&output.stdout);
    let [least, most] = [f64::min, f64::max].map(|of| alone.into_iter().reduce(of).expect("three"));
    println!("median of four shards {merged} ms, of one process {least} to {most} ms");
    assert!((least / 2.0..=2.0 * most).contains(&merged));
    // A shard that dies is named.
    let mut job = slurm.load("2000", "4s").spawn().expect("sbatch");
    let mut killed = None;
    slowly("the task runs", || {
        killed = task("2");
        killed.is_some()
    });
    support::signal(killed.expect("a task"), rustix::process::Signal::KILL);
    assert!(!job.wait().expect("sbatch").success());
    let told = slurm.said(2);
    assert!(told.contains("shard 2 of 4 is missing"), "{told}");
    drop(server);
}
