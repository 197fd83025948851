//! One queue where rights are few: in containers of podman, by the seccomp lists of podman and of Docker, and beside Yama.
//! Where the workers cannot be steered, one sentence names the cause and each way out, and the server serves on.

#[path = "support/mod.rs"]
mod support;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use support::kept::{
    ASK, Kept, assert_even, entries_of, event_loops, is_disarmed, keep_enough, until_disarmed,
};
use support::real::{Started, installed, program};
use support::split::for_another_user;
use support::steered::{isolated, said, wakeone};
use support::{Ground, LAB, Run, WAKEONE, eventually, get, server, signal, slowly, slowness};

const AT: &str = "127.0.0.1:7500";
const EVENT_LOOPS: [&str; 9] = event_loops(AT, "4");
/// A user without any capability, in a container or by setpriv(1).
const NOBODY: [&str; 4] = ["--user", "65534:65534", "--cap-drop", "ALL"];
/// Root of a container with the one capability that lets it look into other processes.
const TRACER: [&str; 4] = ["--cap-drop", "ALL", "--cap-add", "SYS_PTRACE"];

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

/// The ground of containers: an empty root with the machine's programs, and podman's own folders.
struct Containers {
    ground: Ground,
}

impl Containers {
    /// `None`: they cannot be made here.
    fn new() -> Option<Self> {
        let ground = isolated()?;
        if !installed("podman") {
            eprintln!("skipped: podman is not installed");
            return None;
        }
        let root = ground.path().join("root");
        std::fs::create_dir(&root).expect("folder");
        for name in ["bin", "lib", "lib64"] {
            std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name)).expect("link");
        }
        let containers = Self { ground };
        // All of the machine share one list of locks. Of two that make it at once one fails.
        static LOCKS: Once = Once::new();
        LOCKS.call_once(|| {
            let _ = containers.podman(&["ps"]).output();
        });
        Some(containers)
    }

    fn podman(&self, words: &[&str]) -> Command {
        let at = |name: &str| self.ground.path().join(name);
        // crun takes no mixture of the two versions of cgroups. Where there is none, this fails.
        let begin = "mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null; exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            begin,
            "sh",
        ]);
        command.args([
            "podman",
            "--cgroup-manager",
            "cgroupfs",
            "--storage-driver",
            "vfs",
        ]);
        command.args(["--events-backend", "none"]);
        for (option, folder) in [
            ("--root", "store"),
            ("--runroot", "state"),
            ("--tmpdir", "tmp"),
        ] {
            command.arg(option).arg(at(folder));
        }
        command.args(words);
        command
    }

    /// `podman run` with these options. The container is in the test's network, and sees itself only.
    fn command(&self, options: &[&str], program: &[&str]) -> Command {
        let mut command = self.podman(&["run"]);
        command.args([
            "--rm",
            "--cgroups",
            "disabled",
            "--network",
            "host",
            "--no-hosts",
        ]);
        command.args([
            "--ulimit",
            "nofile=4096:4096",
            "--ulimit",
            "nproc=4096:4096",
        ]);
        command.args([
            "--security-opt",
            "no-new-privileges",
            "--tmpfs",
            "/tmp:mode=1777",
        ]);
        command.args(["--volume", "/usr:/usr:ro"]);
        for (from, to) in [(WAKEONE, "/opt/wakeone"), (LAB, "/opt/lab")] {
            command.args(["--volume", &format!("{from}:{to}:ro")]);
        }
        let root = self.ground.path().join("root");
        command.args(options).arg("--rootfs").arg(root);
        command.args(program);
        command
    }

    /// A server under `wakeone run`.
    fn run(&self, options: &[&str], server: &[&str]) -> Run {
        let wakeone = ["/opt/wakeone", "run", "--runtime-dir", "/tmp/run", "--"];
        Run::start(self.command(options, &[&wakeone[..], server].concat()))
    }

    /// Docker's list. It allows what podman's does, but pidfd_getfd only with CAP_SYS_PTRACE, and refuses the rest with
    /// EPERM.
    fn list_of_docker(&self) -> String {
        let text = std::fs::read_to_string("/usr/share/containers/seccomp.json");
        let mut list: Value = serde_json::from_str(&text.expect("podman's list")).expect("JSON");
        list["defaultErrnoRet"] = json!(1);
        list["defaultErrno"] = json!("EPERM");
        let calls = list["syscalls"].as_array_mut().expect("calls");
        for call in calls.iter_mut() {
            let names = call["names"].as_array_mut().expect("names");
            names.retain(|name| name != "pidfd_getfd");
        }
        calls.push(json!({
            "names": ["pidfd_getfd"],
            "action": "SCMP_ACT_ALLOW",
            "includes": {"caps": ["CAP_SYS_PTRACE"]},
        }));
        let file = self.ground.path().join("docker.json");
        std::fs::write(&file, list.to_string()).expect("written");
        format!("seccomp={}", file.display())
    }
}

/// Python with the packages of the uvicorn in PATH, as options for podman, and the interpreter there.
fn uvicorn() -> Option<(Vec<String>, String)> {
    if !installed("uvicorn") {
        eprintln!("skipped: uvicorn is not installed");
        return None;
    }
    let find = "head -n 1 \"$(command -v uvicorn)\" | sed 's/^#!//'";
    let found = Command::new("sh").args(["-c", find]).output().expect("sh");
    let interpreter = String::from_utf8_lossy(&found.stdout).trim().to_owned();
    let ask = "import site, sys; print(sys.base_prefix, site.getsitepackages()[0], '%d.%d' % sys.version_info[:2])";
    let told = Command::new(interpreter).args(["-c", ask]).output();
    let told = String::from_utf8_lossy(&told.expect("python").stdout).into_owned();
    let [prefix, packages, version] = told.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{told}");
    };
    let app = PathBuf::from(server("app.py"));
    let app = app.parent().and_then(Path::to_str).expect("folder");
    let mut options = vec![
        "--env=PYTHONPATH=/opt/packages:/opt/app".to_owned(),
        "--env=PYTHONDONTWRITEBYTECODE=1".to_owned(),
        format!("--volume={packages}:/opt/packages:ro"),
        format!("--volume={app}:/opt/app:ro"),
    ];
    if prefix == "/usr" {
        return Some((options, format!("/usr/bin/python{version}")));
    }
    // It finds its library by this path.
    options.push(format!("--volume={prefix}:{prefix}:ro"));
    Some((options, format!("{prefix}/bin/python{version}")))
}

/// How many processes of this network wait for connections and are not woken.
fn disarmed() -> usize {
    let network = std::fs::read_link("/proc/thread-self/ns/net").expect("a network");
    let here = |pid: &u32| {
        std::fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|other| other == network)
    };
    let all = wakeone_kernel::proc::process::pids().into_iter();
    all.filter(here)
        .filter(|pid| is_disarmed(&entries_of(*pid)))
        .count()
}

/// Kept connections are even among four workers, and some of them are disarmed meanwhile.
fn assert_steered() {
    drop(until_disarmed(address(), disarmed));
    eventually("all are armed again", || disarmed() == 0);
    let (_kept, counts) = keep_enough(|| Kept::open(address()));
    assert_even(&counts, 4);
}

/// The server answers, and exactly one line tells why it is not steered: with all these words.
fn assert_refused(run: &mut Run, words: &[&str]) {
    run.line("cannot steer");
    let one = Kept::open(address());
    std::thread::sleep(Duration::from_secs(1));
    assert!(get(address(), ASK).is_ok());
    let lines = run.lines();
    let told: Vec<_> = lines
        .iter()
        .filter(|line| line.contains("cannot steer"))
        .collect();
    assert_eq!(told.len(), 1, "{lines:#?}");
    for word in words {
        assert!(told[0].contains(word), "{told:?}");
    }
    drop(one);
}

#[test]
fn uvicorn_is_steered_in_a_container_by_a_user_without_any_capability() {
    let (Some(containers), Some((options, python))) = (Containers::new(), uvicorn()) else {
        return;
    };
    let options: Vec<&str> = options.iter().map(String::as_str).chain(NOBODY).collect();
    let (_, port) = AT.rsplit_once(':').expect("a port");
    let server = [
        &python,
        "-m",
        "uvicorn",
        "--workers",
        "4",
        // In an emulated machine a worker takes longer to start than the 5 s after which it is killed.
        "--timeout-worker-healthcheck",
        "100",
        "--port",
        port,
        "--log-level",
        "error",
        "app:asgi",
    ];
    let mut run = containers.run(&options, &server);
    run.line("is steered");
    assert_steered();
    run.stop();
}

#[test]
fn root_of_a_container_steers_with_the_capabilities_that_it_has() {
    let Some(containers) = Containers::new() else {
        return;
    };
    let mut run = containers.run(&[], &[&["/opt/lab"], &EVENT_LOOPS[..]].concat());
    run.line("is steered");
    assert_steered();
    run.stop();
}

#[test]
fn where_a_list_forbids_it_the_cause_is_named_and_each_way_out_works() {
    let Some(containers) = Containers::new() else {
        return;
    };
    let list = containers.list_of_docker();
    let server = [&["/opt/lab"], &EVENT_LOOPS[..]].concat();
    let by_list = |user: [&'static str; 4]| [&["--security-opt", &list][..], &user].concat();
    let mut run = containers.run(&by_list(NOBODY), &server);
    assert_refused(
        &mut run,
        &[
            "seccomp list forbids pidfd_getfd",
            "--cap-add SYS_PTRACE",
            "from the host",
        ],
    );
    // From the host, the server that runs there already.
    let output = wakeone(&containers.ground, &["attach", AT, "--owner", "65534"]);
    assert!(output.status.success(), "{:?}", said(&output));
    assert_steered();
    let output = wakeone(&containers.ground, &["detach", AT]);
    assert!(output.status.success(), "{:?}", said(&output));
    run.stop();
    let mut run = containers.run(&by_list(TRACER), &server);
    run.line("is steered");
    assert_steered();
    run.stop();
}

/// `command` as a user without any capability, who may get none.
fn as_nobody(command: &[&str]) -> Command {
    let mut setpriv = program(&[
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ]);
    setpriv.args([
        "--inh-caps=-all",
        "--bounding-set=-all",
        "--no-new-privs",
        "--",
    ]);
    setpriv.args(command);
    setpriv
}

/// Yama's setting, which is that of the whole machine, until this is dropped.
struct Scope(String);

const SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

impl Scope {
    fn set(value: &str) -> Option<Self> {
        let Ok(before) = std::fs::read_to_string(SCOPE) else {
            eprintln!("skipped: this kernel has no Yama");
            return None;
        };
        std::fs::write(SCOPE, value).expect("written");
        Some(Self(before))
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        std::fs::write(SCOPE, &self.0).expect("written");
    }
}

#[test]
fn where_only_an_ancestor_may_look_a_server_that_it_starts_is_steered() {
    let Some((folder, binary, runtime)) = for_another_user("loops.py") else {
        return;
    };
    let Some(_scope) = Scope::set("1") else {
        return;
    };
    let lab = folder.path().join("lab");
    support::copy_program(LAB, &lab);
    let path = |path: &Path| path.to_str().expect("text").to_owned();
    let (lab, binary, runtime) = (path(&lab), path(&binary), path(&runtime));
    let server = [&[&lab[..]], &EVENT_LOOPS[..]].concat();
    let own = [&binary, "run", "--runtime-dir", &runtime, "--"];
    let mut run = Run::start(as_nobody(&[&own[..], &server].concat()));
    run.line("is steered");
    assert_steered();
    // Its guardian has no right of its own.
    let kept = until_disarmed(address(), disarmed);
    run.signal(Signal::STOP);
    eventually("all are armed", || disarmed() == 0);
    run.signal(Signal::CONT);
    drop(kept);
    assert_steered();
    let kept = until_disarmed(address(), disarmed);
    let workers: Vec<u32> = wakeone_kernel::proc::process::tree(run.pid()).collect();
    run.murder();
    eventually("all are armed", || disarmed() == 0);
    drop(kept);
    for pid in workers
        .into_iter()
        .skip(1)
        .filter(|pid| support::runs(*pid))
    {
        signal(pid, Signal::KILL);
    }
    slowly("nobody listens", || get(address(), ASK).is_err());

    let server = Started::spawn(as_nobody(&server));
    slowly("it answers", || get(address(), ASK).is_ok());
    let attach = [&binary, "attach", AT, "--runtime-dir", &runtime];
    let output = as_nobody(&attach).output().expect("setpriv");
    let told = said(&output);
    assert!(!output.status.success() && told.len() == 1, "{told:?}");
    for word in [
        "ptrace_scope is 1",
        "`wakeone run -- CMD`",
        "CAP_SYS_PTRACE",
    ] {
        assert!(told[0].contains(word), "{told:?}");
    }
    drop(server);
}

/// nginx as packaged: its master is root, its workers are not.
#[test]
fn workers_that_changed_their_user_take_a_capability() {
    let Some(ground) = isolated() else { return };
    if !installed("nginx") {
        eprintln!("skipped: nginx is not installed");
        return;
    }
    let folder = ground.path().display();
    let settings = format!(
        "daemon off; user nobody nogroup; worker_processes 4; pid {folder}/pid; error_log {folder}/log; \
         events {{}} http {{ access_log off; server {{ listen {AT}; return 200 \"hi\"; }} }}"
    );
    let file = ground.path().join("nginx.conf");
    std::fs::write(&file, settings).expect("written");
    let nginx = ["nginx", "-c", file.to_str().expect("text")];
    let mut run = program(&[
        "setpriv",
        "--bounding-set=-sys_ptrace",
        "--inh-caps=-sys_ptrace",
        "--",
    ]);
    let plain = ground.command(&[], &nginx);
    run.arg(plain.get_program()).args(plain.get_args());
    let mut run = Run::start(run);
    run.line("another user's");
    assert!(get(address(), "/").is_ok());
    let lines = run.lines();
    let is_told = |line: &&String| line.contains("cannot steer");
    let told: Vec<_> = lines.iter().filter(is_told).collect();
    // In an emulated machine its workers may start later than they are looked for.
    assert!(told.len() == 1 || slowness() > 1, "{lines:#?}");
    for word in ["CAP_SYS_PTRACE", "from the host"] {
        assert!(told[told.len() - 1].contains(word), "{told:?}");
    }
    run.stop();
}
