//! Rescues of event loops: no worker learns that its listener was closed, and all get their listeners back, whoever is
//! killed meanwhile.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::real::{Started, installed, program};
use support::steered::{assert_nothing_left, isolated, said, soak, status, sum, wakeone};
use support::{Ground, WAKEONE, eventually, get, patience, runs, server, signal, slowness};
use wakeone_kernel::proc::process::children;

const AT: &str = "127.0.0.1:7300";
const GROUP: &str = "at-127-0-0-1-7300";
const WORKERS: usize = 3;

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

/// Workers in event loops, and what they saw.
struct Watchers {
    server: Started,
    log: PathBuf,
    processes: usize,
}

impl Watchers {
    fn start(ground: &Ground, kind: &str) -> Self {
        let log = ground.path().join("seen");
        let script = server("epoll_watch.py");
        let count = WORKERS.to_string();
        let log_name = log.to_str().expect("a path").to_owned();
        let server = program(&["python3", &script, "7300", &count, &log_name, kind]);
        let watchers = Self {
            server: Started::spawn(server),
            log,
            processes: WORKERS * if kind.contains("forked") { 2 } else { 1 },
        };
        eventually("all workers wait", || {
            let all = watchers.entries();
            all.len() == watchers.processes && all.values().all(|one| !one.is_empty())
        });
        watchers
    }

    fn workers(&self) -> Vec<u32> {
        let of = |pid: &u32| [vec![*pid], children(*pid)].concat();
        let workers = children(self.server.pid());
        workers.iter().flat_map(of).collect()
    }

    /// The entries of each worker's epoll sets, as the kernel shows them.
    fn entries(&self) -> BTreeMap<u32, Vec<String>> {
        let of = |pid: u32| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter();
            let texts = files
                .flatten()
                .flatten()
                .filter_map(|file| std::fs::read_to_string(file.path()).ok());
            let lines = texts.flat_map(|text| {
                let lines = text.lines().filter(|line| line.starts_with("tfd:"));
                lines.map(str::to_owned).collect::<Vec<_>>()
            });
            let mut lines: Vec<String> = lines.collect();
            lines.sort();
            (pid, lines)
        };
        self.workers().into_iter().map(of).collect()
    }

    /// Checks that no event told a worker of a rescue. A worker that accepts without having been told to may fail to, as
    /// these rescues take much longer than others.
    fn assert_saw_no_event(&self) {
        let seen = std::fs::read_to_string(&self.log).unwrap_or_default();
        assert!(!seen.contains("events"), "{seen}");
    }
}

fn attach(ground: &Ground, fate: Option<&str>) -> u32 {
    let mut command = Command::new(WAKEONE);
    command
        .args(["attach", AT, "--rescue", "--stuck-after", "1ms"])
        .args(["--policy", "random", "--runtime-dir"])
        .arg(ground.runtime());
    if let Some(fate) = fate {
        command.env("WAKEONE_TEST_DIE", fate);
    }
    let output = command.output().expect("attach");
    assert!(output.status.success(), "{:?}", said(&output));
    let group = status(ground, GROUP);
    group["supervisor_pid"].as_u64().expect("an agent") as u32
}

fn detach(ground: &Ground) {
    let output = wakeone(ground, &["detach", AT]);
    assert!(output.status.success(), "{:?}", said(&output));
}

/// Clients whose requests keep a worker for some ms, now and then for long, until something is so.
fn load_until(what: &str, ms: u32, over: impl FnMut() -> bool) {
    load_paths_until(what, &format!("/b{ms}"), over);
}

fn load_paths_until(what: &str, slow: &str, over: impl FnMut() -> bool) {
    let stop = Arc::new(AtomicBool::new(false));
    let client = |seed: u32| {
        let (stop, slow) = (Arc::clone(&stop), slow.to_owned());
        std::thread::spawn(move || {
            let mut lost = Vec::new();
            for turn in seed.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let path = if turn % 4 == 0 { &slow } else { "/" };
                lost.extend(get(address(), path).err().map(|error| error.to_string()));
                std::thread::sleep(Duration::from_millis(1));
            }
            lost
        })
    };
    let clients: Vec<_> = (0..6).map(client).collect();
    support::slowly(what, over);
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        assert_eq!(client.join().expect("client"), Vec::<String>::new());
    }
}

/// Checks that each worker accepts, and returns how long that took.
fn all_accept(watchers: &Watchers) -> Duration {
    let begun = Instant::now();
    let mut silent: Vec<u32> = children(watchers.server.pid());
    while !silent.is_empty() {
        assert!(begun.elapsed() < patience(), "{silent:?} do not accept");
        let answer = get(address(), "/").expect("an answer");
        let pid: u32 = answer
            .trim()
            .rsplit('\n')
            .next()
            .expect("a pid")
            .parse()
            .expect("a pid");
        let of = |one: &u32| *one == pid || children(*one).contains(&pid);
        silent.retain(|one| !of(one));
    }
    begun.elapsed()
}

/// So many rescues: many in the soak.
fn rescues(few: i64, many: i64) -> i64 {
    if soak() { many } else { few }
}

/// The listener stays closed for longer than a request lasts: a worker that could see it would.
fn is_unseen(kind: &str) {
    let Some(ground) = isolated() else { return };
    let watchers = Watchers::start(&ground, kind);
    let before = watchers.entries();
    attach(&ground, Some("slow"));
    // Each takes 10 ms, and moves have a share of the time: there is about one a second.
    let wanted = rescues(12, 100) / i64::from(slowness());
    load_until("there are rescues", 8, || {
        sum(&status(&ground, GROUP), "rescues") >= wanted.max(2)
    });
    detach(&ground);
    assert_eq!(watchers.entries(), before, "bit by bit");
    watchers.assert_saw_no_event();
    all_accept(&watchers);
    drop(watchers);
    assert_nothing_left(&ground);
}

#[test]
fn no_level_triggered_loop_learns_of_a_rescue() {
    is_unseen("level");
}

#[test]
fn no_edge_triggered_loop_learns_of_a_rescue() {
    is_unseen("edge");
}

#[test]
fn no_loop_with_exclusive_entries_learns_of_a_rescue() {
    is_unseen("exclusive");
    is_unseen("edge,exclusive");
}

#[test]
fn no_loop_with_two_descriptors_of_its_set_learns_of_a_rescue() {
    is_unseen("edge,copied");
}

#[test]
fn no_loop_with_its_listener_under_two_numbers_learns_of_a_rescue() {
    is_unseen("twice");
}

#[test]
fn no_loop_whose_listener_is_descriptor_0_learns_of_a_rescue() {
    is_unseen("edge,at0");
}

#[test]
fn no_two_processes_with_one_set_learn_of_a_rescue() {
    is_unseen("edge,forked");
}

/// Kills the agent while a listener is closed. Its mover goes on.
#[test]
fn a_worker_accepts_on_after_its_agent_was_killed_in_a_rescue() {
    let Some(ground) = isolated() else { return };
    let watchers = Watchers::start(&ground, "edge");
    let before = watchers.entries();
    let mut took = Vec::new();
    for _ in 0..rescues(3, 200) {
        let agent = attach(&ground, Some("agent"));
        load_until("the agent is killed", 20, || !runs(agent));
        took.push(all_accept(&watchers));
        assert_eq!(watchers.entries(), before);
        watchers.assert_saw_no_event();
        detach(&ground);
    }
    took.sort();
    let (half, longest) = (took[took.len() / 2], took[took.len() - 1]);
    eprintln!(
        "each worker had accepted after {half:?} in half of the cases, {longest:?} at the latest"
    );
    drop(watchers);
    assert_nothing_left(&ground);
}

/// Kills the mover while a listener is closed. Its agent puts the entries back, and goes on.
#[test]
fn a_worker_accepts_on_after_the_mover_was_killed() {
    let Some(ground) = isolated() else { return };
    let watchers = Watchers::start(&ground, "edge,copied");
    let before = watchers.entries();
    let agent = attach(&ground, Some("mover"));
    load_until("there are more rescues", 20, || {
        sum(&status(&ground, GROUP), "rescues") >= 3
    });
    assert!(runs(agent));
    assert_eq!(watchers.entries(), before);
    watchers.assert_saw_no_event();
    all_accept(&watchers);
    detach(&ground);
    drop(watchers);
    assert_nothing_left(&ground);
}

/// Kills both. The next command puts the entries back.
#[test]
fn detach_puts_entries_back_that_nobody_was_left_to_put_back() {
    let Some(ground) = isolated() else { return };
    let watchers = Watchers::start(&ground, "edge,exclusive");
    let before = watchers.entries();
    let agent = attach(&ground, Some("moving"));
    let since = Instant::now();
    while runs(agent) {
        assert!(since.elapsed() < patience(), "no rescue");
        std::thread::spawn(|| get(address(), "/b50"));
        for _ in 0..8 {
            std::thread::spawn(|| get(address(), "/"));
        }
        std::thread::sleep(Duration::from_millis(60));
    }
    let now = watchers.entries();
    let empty = now.values().filter(|entries| entries.is_empty());
    assert_eq!(empty.count(), 1, "{now:?}");
    detach(&ground);
    assert_eq!(watchers.entries(), before);
    watchers.assert_saw_no_event();
    all_accept(&watchers);
    drop(watchers);
    assert_nothing_left(&ground);
}

/// The agent that is left behind has nobody to tell.
#[test]
fn attach_says_that_it_lacks_the_priority_for_short_rescues() {
    let Some(ground) = isolated() else { return };
    let watchers = Watchers::start(&ground, "level");
    let output = Command::new("setpriv")
        .args(["--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice"])
        .args([WAKEONE, "attach", AT, "--rescue", "--runtime-dir"])
        .arg(ground.runtime())
        .output()
        .expect("setpriv");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("CAP_SYS_NICE"),
        "{text}"
    );
    detach(&ground);
    drop(watchers);
    assert_nothing_left(&ground);
}

/// Real servers, each worker with a socket of its own: none is lost, no worker ends, and none complains.
fn harms_nothing(words: &str, slow: &str) {
    let Some(ground) = isolated() else { return };
    let errors = ground.path().join("errors");
    let folder = PathBuf::from(server("app.py"));
    let folder = folder.parent().expect("a folder");
    let program_name = words.split(' ').next().expect("a program");
    if !installed(program_name) {
        return eprintln!("skipped: {program_name} is not installed");
    }
    let line = format!("exec {words} >{} 2>&1", errors.display());
    let mut command = program(&["sh", "-c", &line]);
    command.current_dir(folder).env("WAKEONE_SLOT", "0");
    let started = Started::spawn(command);
    let workers = || children(started.pid());
    support::slowly("its workers serve", || {
        workers().len() >= WORKERS && get(address(), "/").is_ok()
    });
    let before = workers();
    attach(&ground, None);
    let wanted = rescues(20, 2000) / i64::from(slowness());
    let made = || sum(&status(&ground, GROUP), "rescues");
    let log = || std::fs::read_to_string(&errors).expect("its output");
    let mut turns = before.iter().cycle();
    for step in 1..=20 {
        let until = wanted * step / 20;
        load_paths_until("there are rescues", slow, || {
            // A server that accepts beside its requests has no queue unless all of it stands still.
            let worker = *turns.next().expect("a worker");
            let rescues = made();
            assert!(
                runs(worker),
                "{worker} ended after {rescues} rescues: {}",
                log()
            );
            signal(worker, Signal::STOP);
            std::thread::sleep(Duration::from_millis(12) * slowness());
            signal(worker, Signal::CONT);
            made() >= until.max(1)
        });
    }
    eprintln!("{} rescues of {words}", made());
    detach(&ground);
    assert_eq!(workers(), before, "no worker ended");
    let said = log();
    assert!(
        !said.contains("Traceback") && !said.contains("Error"),
        "{said}"
    );
    drop(started);
    assert_nothing_left(&ground);
}

const GUNICORN: &str =
    "gunicorn -w 3 --reuse-port --log-level warning --bind 127.0.0.1:7300 app:wsgi";

#[test]
fn gunicorn_is_not_harmed_by_rescues() {
    harms_nothing(&format!("{GUNICORN} -k sync"), "/?ms=8");
}

#[test]
fn gunicorn_with_threads_is_not_harmed_by_rescues() {
    harms_nothing(&format!("{GUNICORN} -k gthread --threads 1"), "/?ms=8");
}

#[test]
fn asyncio_is_not_harmed_by_rescues() {
    harms_nothing("python3 asyncio_own.py 7300 3", "/b8");
}
