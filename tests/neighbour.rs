//! Attacks of other users of the machine, and of a server's own code: none of them gains anything, or stops Wakeone.
//!
//! These tests need root. Otherwise they are skipped, with a message.

#[path = "support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::steered::{assert_nothing_left, isolated, said, wakeone};
use support::{Ground, Run, WAKEONE, eventually, server};
use wakeone_control::paths::Paths;
use wakeone_kernel::cgroup;
use wakeone_kernel::proc::process::children;
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

const PORT: u16 = 8085;
const NOBODY: u32 = 65534;

/// A process of `hostile.py`, which ends with the test.
struct Hostile(Child);

impl Hostile {
    /// Starts it as this user, and waits for the line that tells that it is ready.
    fn start(user: u32, arguments: &[&str]) -> Self {
        // `nobody` may have no access to the folder of the sources, so the script is passed as text.
        let text = std::fs::read_to_string(server("hostile.py")).expect("script");
        let mut child = Command::new("python3")
            .args(["-c", &text])
            .args(arguments)
            .uid(user)
            .gid(user)
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let out = child.stdout.take().expect("its output");
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).expect("a line");
        assert!(!line.is_empty(), "{arguments:?} ended");
        Self(child)
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command that must end by itself. After a long time it is killed, and the exit code is 124.
fn bounded(arguments: &[&str]) -> Output {
    let seconds = (20 * support::patience::slowness()).to_string();
    let mut command = Command::new("timeout");
    command.args(["-k", "1", &seconds, WAKEONE]).args(arguments);
    command.output().expect("timeout")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether another user may make namespaces here.
fn may_unshare() -> bool {
    let status = Command::new("unshare")
        .args(["-Urn", "true"])
        .uid(NOBODY)
        .gid(NOBODY)
        .status();
    status.is_ok_and(|status| status.success())
}

#[test]
fn a_socket_of_another_network_gets_no_queue_in_ours() {
    let Some(ground) = isolated() else { return };
    if !may_unshare() {
        return eprintln!("skipped: this kernel lets no user make namespaces");
    }
    let command = ["python3", &server("hostile.py"), "network"];
    let mut run = Run::start(ground.command(&["--split"], &command));
    let line = run.line("asked: ");
    let here = sockets(Protocol::Udp, Which::Listening, 443).expect("sock_diag");
    assert!(here.is_empty(), "{line}: {here:?}");
    assert!(line.ends_with("asked: 0"), "told to leave: {line}");
    run.signal(rustix::process::Signal::TERM);
    drop(run);
    assert_nothing_left(&ground);
}

/// A worker may hold many queues that it never takes. The broker still has descriptors for others.
#[test]
fn a_worker_that_hoards_queues_keeps_none_from_others() {
    let Some(ground) = isolated() else { return };
    let script = server("hostile.py");
    let wakeone = ground.command(&["--split"], &["python3", &script, "hoard"]);
    let mut command = Command::new("sh");
    // A common limit, whatever ours is. The server's is not changed.
    command.args(["-c", "ulimit -Sn 1024; exec \"$@\"", "sh"]);
    command.arg(wakeone.get_program()).args(wakeone.get_args());
    let mut run = Run::start(command);
    let line = run.line("honest: ");
    assert!(line.ends_with("a queue of its own"), "{line}");
    let first = children(run.pid())[0];
    for pid in children(first).into_iter().chain([first]) {
        support::signal(pid, rustix::process::Signal::TERM);
    }
    // It takes a while to remove so many groups.
    run.wait();
    assert_nothing_left(&ground);
}

/// Starts `run --split` in a mount namespace where /run is mounted with the options `run_is`. Its server prints the
/// library that it was told to load.
fn library_where(ground: &Ground, run_is: &str, user: u32, environment: &[(&str, &str)]) -> Run {
    let script = format!(
        "mount -t tmpfs -o {run_is} none /run && exec setpriv --reuid {user} --regid {user} --clear-groups \"$0\" \"$@\""
    );
    let program = ground.path().join("wakeone");
    support::copy_program(WAKEONE, &program);
    let open = || std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(ground.path(), open()).expect("mode");
    std::fs::set_permissions(&program, open()).expect("mode");
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", &script])
        .arg(&program)
        .args(["run", "--split", "--runtime-dir"])
        .arg(ground.path().join("run"))
        .args([
            "--",
            "sh",
            "-c",
            "echo library: $LD_PRELOAD: >&2; exec sleep 60",
        ])
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("XDG_CACHE_HOME")
        .env_remove("TMPDIR")
        .env_remove("HOME")
        .envs(environment.iter().copied());
    Run::start(command)
}

fn library_in(line: &str) -> PathBuf {
    let after = line.split_once("library: ").expect("a path").1;
    PathBuf::from(after.trim_end_matches(':'))
}

/// Checks the library and every folder above it: another user must not be able to replace the library.
fn assert_only_theirs(library: &Path, user: u32) {
    for step in library.ancestors() {
        let Ok(is) = std::fs::symlink_metadata(step) else {
            continue; // in the mount namespace only
        };
        let theirs = is.uid() == 0 || is.uid() == user;
        assert!(theirs, "{} belongs to user {}", step.display(), is.uid());
        let open = is.mode() & 0o022 != 0;
        assert!(!open, "{} can be written by others", step.display());
    }
}

#[test]
fn the_library_lies_where_nobody_else_can_put_another() {
    let Some(ground) = isolated() else { return };
    let mut run = library_where(&ground, "noexec", 0, &[("TMPDIR", "/tmp")]);
    let library = library_in(&run.line("library: "));
    assert!(library.exists(), "{}", library.display());
    assert_only_theirs(&library, 0);
    drop(run);
    assert!(!library.exists(), "{} is left", library.display());
    // A user without a folder of its own gets it in memory, where only processes of that user can open it.
    let mut run = library_where(&ground, "exec", NOBODY, &[("TMPDIR", "/tmp")]);
    let line = run.line("library: ");
    let library = library_in(&line);
    assert!(
        library.starts_with(format!("/proc/{}/fd", run.pid())),
        "{line}"
    );
}

/// How many workers got no answer of the broker in time, and share the socket.
fn unanswered(run: &Run) -> usize {
    let lines = run.lines();
    let told = lines.iter().filter(|line| line.contains("does not answer"));
    told.count()
}

#[test]
fn who_fills_the_brokers_socket_holds_up_no_worker() {
    let Some(ground) = isolated() else { return };
    let script = server("datagrams_prefork.py");
    let port = PORT.to_string();
    let command = ["python3", script.as_str(), &port, "2", "recv"];
    let run = Run::start(ground.command(&["--split"], &command));
    let mut workers = Vec::new();
    let up = |workers: &mut Vec<u64>| {
        let output = wakeone(&ground, &["status", "--json"]);
        let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let slots = all["groups"][0]["slots"].as_array().cloned();
        let slots = slots.unwrap_or_default();
        let up = slots.iter().filter(|slot| slot["state"] == "up");
        *workers = up.filter_map(|slot| slot["pid"].as_u64()).collect();
        workers.len() == 2 && workers.iter().all(|pid| support::runs(*pid as u32))
    };
    // On a slow machine the first workers may ask in vain while the programs are loaded. The server starts others.
    let mut early = 0;
    eventually("two workers have queues", || {
        let before = std::mem::replace(&mut early, unanswered(&run));
        if early > before {
            let server = children(run.pid());
            let workers = server.iter().flat_map(|server| children(*server));
            workers.for_each(|pid| support::signal(pid, rustix::process::Signal::KILL));
            return false;
        }
        up(&mut workers)
    });
    let names = std::fs::read_to_string("/proc/thread-self/net/unix").expect("names");
    let name = names
        .split_whitespace()
        .find_map(|word| {
            word.strip_prefix('@')
                .filter(|n| n.starts_with("wakeone-split-"))
        })
        .expect("the broker's name is there for all to read")
        .to_owned();
    let _flood = Hostile::start(NOBODY, &["flood", &name, "600"]);
    let gone = workers[0];
    support::signal(gone as u32, rustix::process::Signal::KILL);
    eventually("the next one has a queue, or goes without", || {
        unanswered(&run) > early || (up(&mut workers) && !workers.contains(&gone))
    });
    assert_eq!(unanswered(&run), early, "{:#?}", run.lines());
    run.stop();
}

/// A server whose poll set cannot be read, and one whose epoll instance stays locked.
#[test]
fn who_lets_readers_hang_stops_neither_doctor_nor_agent() {
    for how in ["frozen", "epoll"] {
        let Some(ground) = isolated() else { return };
        let hostile = Hostile::start(0, &[how, &PORT.to_string()]);
        let doctor = bounded(&["doctor", &format!(":{PORT}"), "--for", "1s"]);
        assert_ne!(doctor.status.code(), Some(124), "{how}: doctor hangs");
        assert!(text(&doctor).contains(&PORT.to_string()), "{doctor:?}");
        let other = PORT + 1;
        let other_server = Hostile::start(0, &["listen", &other.to_string()]);
        let file = ground.path().join("agent.toml");
        let targets = [PORT, other].map(|port| format!("[[target]]\nlisten = ':{port}'\n"));
        std::fs::write(&file, targets.concat()).expect("file");
        let mut agent = Command::new(WAKEONE);
        agent.args(["agent", "--config"]).arg(&file);
        agent.arg("--runtime-dir").arg(ground.runtime());
        let mut agent = Run::start(agent);
        agent.line(&format!("at-127-0-0-1-{other} is steered"));
        agent.stop();
        drop((hostile, other_server));
        assert_nothing_left(&ground);
    }
}

/// A supervisor that looked at such a worker itself hung for as long as the worker lived, and no signal ended it.
#[test]
fn a_worker_that_lets_readers_hang_stops_neither_agent_nor_supervisor() {
    let Some(ground) = isolated() else { return };
    let script = server("hostile.py");
    let place = format!("127.0.0.1:{PORT}");
    // Without the privilege the kernel itself does not wait for a page of userfaultfd. (For one of FUSE it does.)
    let options = ["-w", "2", "-l", &place, "--keep-cap", "sys_ptrace"];
    let command = ["python3", script.as_str(), "worker"];
    let mut run = Run::start(ground.command(&options, &command));
    run.line("locked: ");
    // A connection that waits for that worker stays with it: nobody knows what it does. The next ones go to the other.
    let limit = support::patience::slowness() * Duration::from_millis(500);
    let kept: Vec<_> = (0..20)
        .map(|_| {
            let mut connection = TcpStream::connect(&place).expect("connect");
            connection.set_read_timeout(Some(limit)).expect("a limit");
            let mut answer = String::new();
            let served = connection.read_to_string(&mut answer).is_ok() && answer == "served";
            (connection, served)
        })
        .collect();
    let served = kept.iter().filter(|(_, served)| *served).count();
    assert!(served >= 15, "{served} of 20");
    let status = wakeone(&ground, &["status"]);
    let status = text(&status);
    assert!(
        status.contains("supervisor") && !status.contains("no agent"),
        "{status}"
    );
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn listeners_of_other_users_are_steered_only_where_they_are_named() {
    let Some(ground) = isolated() else { return };
    let theirs = Hostile::start(NOBODY, &["listen", &PORT.to_string()]);
    let target = format!(":{PORT}");
    let refused = wakeone(&ground, &["attach", &target, "--dry-run"]);
    let told = said(&refused);
    assert_eq!(
        refused.status.code(),
        Some(1),
        "{told:?} {}",
        text(&refused)
    );
    assert!(told.len() == 1 && told[0].contains("nobody"), "{told:?}");
    assert!(told[0].contains("--owner nobody"), "the way out: {told:?}");
    for owner in ["nobody", "65534"] {
        let named = wakeone(&ground, &["attach", &target, "--dry-run", "--owner", owner]);
        assert!(named.status.success(), "{:?}", said(&named));
    }
    let file = ground.path().join("agent.toml");
    let config = |owners: &str| {
        let text = format!("[[target]]\nlisten = '{target}'\n{owners}");
        std::fs::write(&file, text).expect("file");
    };
    config("");
    let mut agent = Command::new(WAKEONE);
    agent.args(["agent", "--config"]).arg(&file);
    agent.arg("--runtime-dir").arg(ground.runtime());
    let mut agent = Run::start(agent);
    let line = agent.line("nobody");
    assert!(line.contains("owners"), "the way out: {line}");
    config("owners = ['nobody']\n");
    agent.signal(rustix::process::Signal::HUP);
    agent.line("is steered");
    config("");
    agent.signal(rustix::process::Signal::HUP);
    agent.line("read again");
    eventually("it is let go", || ground.groups().is_empty());
    agent.stop();
    drop(theirs);
    assert_nothing_left(&ground);
}

/// The next server at the address of one that has ended may be another user's, and is not steered then.
#[test]
fn sockets_of_another_user_are_not_taken_for_those_of_a_server_that_ended() {
    let Some(ground) = isolated() else { return };
    let (port, target) = (PORT.to_string(), format!(":{PORT}"));
    let ours = Hostile::start(0, &["listen", &port]);
    let attached = wakeone(&ground, &["attach", &target]);
    assert!(attached.status.success(), "{:?}", said(&attached));
    let group = || {
        let output = wakeone(&ground, &["status", &target, "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["groups"][0].clone()
    };
    assert_eq!(group()["steered"], true);
    drop(ours);
    let theirs = Hostile::start(NOBODY, &["listen", &port]);
    eventually("the agent waits for another server", || {
        group()["steered"] == false
    });
    let slots = group()["slots"].as_array().cloned().unwrap_or_default();
    assert!(slots.iter().all(|slot| slot["pid"].is_null()), "{slots:?}");
    let detached = wakeone(&ground, &["detach", &target]);
    assert!(detached.status.success(), "{:?}", said(&detached));
    drop(theirs);
    assert_nothing_left(&ground);
}

/// A frozen cgroup of another user, with one of our name in it. It is thawed and removed at the end.
struct Trap(PathBuf, PathBuf);

impl Trap {
    fn set(name: &str) -> Self {
        let place = cgroup::own().expect("cgroup2");
        let theirs = place.join(format!("stranger-{}", std::process::id()));
        let trap = theirs.join(name);
        std::fs::create_dir(&theirs).expect("cgroup");
        std::os::unix::fs::chown(&theirs, Some(NOBODY), Some(NOBODY)).expect("chown");
        std::fs::create_dir(&trap).expect("cgroup");
        let trap = Self(theirs, trap);
        std::os::unix::fs::chown(&trap.1, Some(NOBODY), Some(NOBODY)).expect("chown");
        std::fs::write(trap.1.join("cgroup.freeze"), "1").expect("freeze");
        trap
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        let _ = std::fs::write(self.1.join("cgroup.freeze"), "0");
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let empty = || std::fs::remove_dir(&self.1).is_ok();
        while !empty() && std::time::Instant::now() < until {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_strangers_cgroup_of_our_name_is_not_entered() {
    let Some(ground) = isolated() else { return };
    let paths = Paths::of(&ground.runtime());
    let name = paths.cgroup_name("web");
    let trap = Trap::set(&name);
    let script = server("whoami.py");
    let mut command = Command::new("timeout");
    command
        .args([
            "-s",
            "KILL",
            "10",
            WAKEONE,
            "run",
            "-w",
            "1",
            "-l",
            "127.0.0.1:8080",
        ])
        .args(["--name", "web", "--runtime-dir"])
        .arg(ground.runtime())
        .args(["--", "python3", &script])
        .stderr(Stdio::piped());
    let mut run = command.spawn().expect("timeout");
    let lines = BufReader::new(run.stderr.take().expect("stderr")).lines();
    let ready = lines
        .map_while(Result::ok)
        .any(|line| line.contains("ready: "));
    let inside = std::fs::read_to_string(trap.1.join("cgroup.procs")).unwrap_or_default();
    drop(trap);
    support::signal(run.id(), rustix::process::Signal::TERM);
    let _ = run.wait();
    assert!(ready, "it was stopped; in the cgroup: {inside}");
    assert_eq!(inside, "");
    assert_nothing_left(&ground);
}

#[test]
fn a_target_has_a_bounded_number_of_groups() {
    let Some(ground) = isolated() else { return };
    let open = |at: u8| {
        (0..2).map(move |_| {
            use rustix::net::{AddressFamily, Ipv4Addr, SocketAddrV4, SocketType, sockopt};
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None);
            let socket = socket.expect("socket");
            sockopt::set_socket_reuseport(&socket, true).expect("SO_REUSEPORT");
            let address = SocketAddrV4::new(Ipv4Addr::new(127, 0, 1, at), PORT);
            rustix::net::bind(&socket, &address).expect("bind");
            rustix::net::listen(&socket, 1).expect("listen");
            socket
        })
    };
    let _held: Vec<_> = (1..=40).flat_map(open).collect();
    let target = format!(":{PORT}");
    let plan = wakeone(&ground, &["attach", &target, "--dry-run"]);
    let told = said(&plan);
    let steered = text(&plan).matches("would be steered").count();
    assert_eq!(steered, 32, "{told:?}");
    assert!(told.iter().any(|line| line.contains("32")), "{told:?}");
}
