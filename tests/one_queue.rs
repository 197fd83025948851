//! `wakeone attach` to workers that share one listener: their kept connections are spread evenly, nobody waits for a
//! worker that is busy, and every epoll entry is as the server made it, whoever is killed.

#[path = "support/mod.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use support::kept::{
    ASK, Kept, assert_even, entries_of, event_loops, is_disarmed, keep, keep_enough, until_disarmed,
};
use support::real::{Started, program};
use support::split::for_another_user;
use support::steered::{assert_nothing_left, isolated, said, soak, status, sum, wakeone, worker};
use support::{Ground, LAB, eventually, get, runs, server, signal, slowly, slowness};
use wakeone_kernel::proc::process::children;

const AT: &str = "127.0.0.1:7400";
const GROUP: &str = "at-127-0-0-1-7400";
const WORKERS: usize = 4;
const EVENT_LOOPS: [&str; 9] = event_loops(AT, "4");

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

/// A server whose workers wait for one listener.
struct Sharing {
    server: Started,
    ground: Ground,
}

impl Sharing {
    /// Starts a server that answers at once. `None`: the test does not run as root.
    fn start(command: &[&str]) -> Option<Self> {
        Self::spawn(program(command))
    }

    fn spawn(command: Command) -> Option<Self> {
        let ground = isolated()?;
        let server = Started::spawn(command);
        slowly("it answers", || get(address(), ASK).is_ok());
        Some(Self { server, ground })
    }

    /// Waits until so many workers wait for the listener.
    fn with_workers(self, count: usize) -> Self {
        // One that still has the connection of him who asked has one more.
        slowly("all workers wait for connections alone", || {
            let all = self.entries();
            let lengths: BTreeSet<usize> = all.values().map(Vec::len).collect();
            all.len() == count && lengths.len() == 1
        });
        self
    }

    /// Starts the reference server, as event loops that wake each other in this way.
    fn event_loops(wakes: &str) -> Option<Self> {
        let command = [&[LAB], &EVENT_LOOPS[..], &["--epoll", wakes]].concat();
        Self::start(&command).map(|sharing| sharing.with_workers(WORKERS))
    }

    fn wakeone(&self, arguments: &[&str]) -> (bool, String) {
        let output = wakeone(&self.ground, arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text + &said(&output).join("\n"))
    }

    fn attach(&self) {
        self.attach_by("least-connections");
    }

    fn attach_by(&self, policy: &str) {
        let (done, text) = self.wakeone(&["attach", AT, "--policy", policy]);
        let by = format!("one queue by {policy}");
        assert!(done && text.contains(&by), "{text}");
    }

    fn detach(&self) {
        let (done, text) = self.wakeone(&["detach", AT]);
        assert!(done && text.contains("woken as before"), "{text}");
    }

    /// Ends the server. Nothing of ours is left.
    fn end(self) {
        drop(self.server);
        assert_nothing_left(&self.ground);
    }

    fn status(&self) -> Value {
        status(&self.ground, GROUP)
    }

    fn agent(&self) -> u32 {
        let agent = self.status()["supervisor_pid"].as_u64();
        agent.expect("an agent") as u32
    }

    fn guardian(&self) -> u32 {
        let name = |pid: &u32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name.trim() == "wakeone-guard")
        };
        let found = children(self.agent()).into_iter().find(name);
        found.expect("a guardian")
    }

    fn workers(&self) -> Vec<u32> {
        let all = [vec![self.server.pid()], children(self.server.pid())].concat();
        let waits = |pid: &u32| !entries_of(*pid).is_empty();
        all.into_iter().filter(waits).collect()
    }

    /// The entries of each worker's epoll sets, as the kernel shows them.
    fn entries(&self) -> BTreeMap<u32, Vec<String>> {
        let workers = self.workers().into_iter();
        workers.map(|pid| (pid, entries_of(pid))).collect()
    }

    /// How many workers are not woken now, as the kernel shows it: their entry of the listener has no EPOLLIN.
    fn disarmed(&self) -> usize {
        let all = self.entries();
        all.values().filter(|lines| is_disarmed(lines)).count()
    }

    /// Opens connections until a worker is disarmed, and keeps them.
    fn until_one_is_disarmed(&self) -> Vec<Kept> {
        until_disarmed(address(), || self.disarmed())
    }
}

#[test]
fn kept_connections_are_spread_evenly_whoever_is_woken() {
    for wakes in ["wake-all", "exclusive"] {
        let Some(sharing) = Sharing::event_loops(wakes) else {
            return;
        };
        let before = sharing.entries();
        assert_eq!(before.len(), WORKERS);
        let (code, plan) = sharing.wakeone(&["attach", AT, "--dry-run"]);
        assert!(code && plan.contains("4 workers share one queue"), "{plan}");
        assert_eq!(
            plan.contains("EPOLLEXCLUSIVE"),
            wakes == "exclusive",
            "{plan}"
        );
        sharing.attach();
        let (kept, counts) = keep(address(), 64, Duration::from_millis(8));
        // As it is, exclusive workers end up with 64, 0, 0 and 0.
        assert!(
            counts.len() == WORKERS && counts[0] <= 24,
            "{wakes}: {counts:?}"
        );
        let active = || sum(&sharing.status(), "active");
        eventually("all are counted", || active() == 64);
        drop(kept);
        eventually("they are counted out", || active() == 0);
        sharing.detach();
        assert_eq!(sharing.entries(), before, "{wakes}");
        sharing.end();
    }
}

/// Opens connections, closes those of two workers, and opens half as many more. Returns how many of all the other two got.
fn got_by_those_that_keep(sharing: &Sharing) -> usize {
    let active = || sum(&sharing.status(), "active");
    let some = |count| keep(address(), count, Duration::from_millis(16)).0;
    let first = some(64);
    let names: BTreeSet<String> = first.iter().map(|one| one.worker.clone()).collect();
    assert_eq!(names.len(), WORKERS);
    let keeping: Vec<String> = names.into_iter().take(WORKERS / 2).collect();
    let keeps = |one: &Kept| keeping.contains(&one.worker);
    let (stay, go): (Vec<Kept>, Vec<Kept>) = first.into_iter().partition(keeps);
    drop(go);
    eventually("they are counted out", || active() == stay.len() as i64);
    stay.len() + some(32).into_iter().filter(keeps).count()
}

#[test]
fn in_turn_workers_get_as_many_whoever_has_closed_some() {
    for wakes in ["wake-all", "exclusive"] {
        let Some(sharing) = Sharing::event_loops(wakes) else {
            return;
        };
        sharing.attach_by("round-robin");
        assert_eq!(sharing.status()["policy"], "round-robin");
        // Half of all, however uneven the first ones were.
        let got = got_by_those_that_keep(&sharing);
        assert!((41..=55).contains(&got), "{wakes}: {got} of 96 in turn");
        sharing.detach();
        // They keep 32. With the 32 others that is 16 open for each worker: 32.
        sharing.attach();
        let got = got_by_those_that_keep(&sharing);
        assert!(got < 41, "{wakes}: {got} of 96 by least-connections");
        sharing.detach();
        let (done, text) = sharing.wakeone(&["attach", AT, "--policy", "hash"]);
        assert!(!done && text.contains("round-robin fit"), "{text}");
        let (_, text) = sharing.wakeone(&["attach", AT, "--policy", "hash", "--dry-run"]);
        assert!(text.contains("would not be steered"), "{text}");
        sharing.end();
    }
}

#[test]
fn threads_with_an_epoll_set_each_are_workers() {
    let script = server("loops.py");
    let Some(sharing) = Sharing::start(&["python3", &script, "7400", "4"]) else {
        return;
    };
    sharing.attach();
    eventually("all threads are found", || {
        sharing.status()["slots"].as_array().map(Vec::len) == Some(4)
    });
    let (_kept, counts) = keep(address(), 40, Duration::from_millis(10));
    assert!(counts.len() == 4 && counts[0] <= 16, "{counts:?}");
    sharing.detach();
    sharing.end();
}

/// Hypercorn closes a connection only when its time for another request is over.
#[test]
fn connections_that_their_clients_have_closed_are_no_load() {
    let script = server("lingering.py");
    let Some(sharing) = Sharing::start(&["python3", &script, "7400", "4"]) else {
        return;
    };
    let sharing = sharing.with_workers(WORKERS);
    sharing.attach();
    let (mut kept, _) = keep(address(), 48, Duration::from_millis(8));
    let left: Vec<u32> = sharing.workers()[..2].to_vec();
    kept.retain(|one| !left.iter().any(|pid| one.worker == pid.to_string()));
    // The last correction comes when nothing has changed for a second.
    std::thread::sleep(Duration::from_secs(2));
    // More than two a worker while the steerer stands still would be a burst, for which all are armed.
    let (more, _) = keep(address(), 24, Duration::from_millis(25));
    let of_left = |one: &&Kept| left.iter().any(|pid| one.worker == pid.to_string());
    let theirs = more.iter().filter(of_left).count();
    assert!(theirs >= 18, "{theirs} of 24");
    sharing.detach();
    sharing.end();
}

/// The steerer may end, stop and hang at any moment.
#[test]
fn every_entry_is_as_the_server_made_it_soon_after_the_agents_end() {
    for wakes in ["wake-all", "exclusive"] {
        for how in [Signal::KILL, Signal::STOP] {
            let Some(sharing) = Sharing::event_loops(wakes) else {
                return;
            };
            let before = sharing.entries();
            sharing.attach();
            let agent = sharing.agent();
            let kept = sharing.until_one_is_disarmed();
            signal(agent, how);
            let begun = Instant::now();
            eventually("all are armed", || sharing.disarmed() == 0);
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(2) * slowness(), "{took:?}");
            drop(kept);
            eventually("the connections are closed", || sharing.entries() == before);
            if how == Signal::STOP {
                signal(agent, Signal::CONT);
            }
            let (done, text) = sharing.wakeone(&["detach", AT]);
            assert!(done, "{wakes}, {how:?}: {text}");
            assert_eq!(sharing.entries(), before, "{wakes}, {how:?}");
            sharing.end();
        }
    }
}

#[test]
fn whoever_comes_next_repairs_after_agent_and_guardian_were_killed() {
    for next in ["attach", "detach"] {
        let Some(sharing) = Sharing::event_loops("exclusive") else {
            return;
        };
        let before = sharing.entries();
        sharing.attach();
        let (agent, guardian) = (sharing.agent(), sharing.guardian());
        let mut kept = Vec::new();
        eventually("both stand still while one is disarmed", || {
            kept.extend(sharing.until_one_is_disarmed());
            // The guardian would act at once.
            support::halt(guardian);
            support::halt(agent);
            let still = sharing.disarmed() > 0;
            if !still {
                for one in [agent, guardian] {
                    signal(one, Signal::CONT);
                }
            }
            still
        });
        signal(agent, Signal::KILL);
        eventually("the agent is gone", || !runs(agent));
        signal(guardian, Signal::KILL);
        eventually("the guardian is gone", || !runs(guardian));
        assert!(sharing.disarmed() > 0, "nobody armed it");
        drop(kept);
        let (done, text) = sharing.wakeone(&[next, AT]);
        assert!(done, "{text}");
        if next == "attach" {
            sharing.detach();
        }
        eventually("all is as it was", || sharing.entries() == before);
        sharing.end();
    }
}

/// Asks for one connection after the other from several threads. Returns how many were answered, and the longest time.
fn ask_all_the_time(over: &AtomicBool) -> (u64, Duration) {
    let ask = || {
        let (mut answered, mut longest) = (0, Duration::ZERO);
        while !over.load(Relaxed) {
            let begun = Instant::now();
            get(address(), ASK).expect("an answer");
            longest = longest.max(begun.elapsed());
            answered += 1;
            std::thread::sleep(Duration::from_millis(3));
        }
        (answered, longest)
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        let each = all.into_iter().map(|one| one.join().expect("asks"));
        each.fold((0, Duration::ZERO), |sum, one| {
            (sum.0 + one.0, sum.1.max(one.1))
        })
    })
}

/// `WAKEONE_SOAK=1`: a thousand times.
#[test]
fn under_load_nobody_is_lost_or_waits_whatever_becomes_of_agent_and_guardian() {
    let Some(sharing) = Sharing::event_loops("exclusive") else {
        return;
    };
    let before = sharing.entries();
    // Opened without us they are uneven, so that workers are disarmed all the time.
    let kept: Vec<Kept> = (0..16).map(|_| Kept::open(address())).collect();
    let over = AtomicBool::new(false);
    let rounds = if soak() { 1000 } else { 12 };
    let (answered, longest) = std::thread::scope(|scope| {
        let load = scope.spawn(|| ask_all_the_time(&over));
        for round in 0..rounds {
            sharing.attach();
            let (agent, guardian) = (sharing.agent(), sharing.guardian());
            std::thread::sleep(Duration::from_millis(20 + round % 7));
            let killed: &[u32] = match round % 4 {
                0 => &[agent],
                1 => &[guardian, agent],
                2 => {
                    signal(agent, Signal::STOP);
                    std::thread::sleep(Duration::from_millis(60));
                    signal(agent, Signal::CONT);
                    &[]
                }
                _ => &[guardian],
            };
            for pid in killed {
                signal(*pid, Signal::KILL);
            }
            if killed.contains(&agent) {
                eventually("the agent is gone", || !runs(agent));
            } else {
                sharing.detach();
            }
        }
        sharing.attach();
        sharing.detach();
        over.store(true, Relaxed);
        load.join().expect("load")
    });
    println!("{answered} answered, one of them after {longest:?}");
    assert!(
        answered > 100 && longest < Duration::from_secs(1) * slowness(),
        "{longest:?}"
    );
    drop(kept);
    eventually("all is as it was", || sharing.entries() == before);
    sharing.end();
}

#[test]
fn nobody_waits_for_a_worker_that_is_armed_and_busy() {
    let Some(sharing) = Sharing::event_loops("wake-all") else {
        return;
    };
    sharing.attach();
    let _kept = sharing.until_one_is_disarmed();
    // The least loaded workers do nothing any more; at last all but one.
    let workers = sharing.workers();
    for (stopped, pid) in workers.iter().take(WORKERS - 1).enumerate() {
        support::halt(*pid);
        for _ in 0..20 {
            let begun = Instant::now();
            get(address(), ASK).unwrap_or_else(|error| panic!("{stopped} stopped: {error}"));
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(1) * slowness(), "{took:?}");
        }
    }
    for pid in workers {
        signal(pid, Signal::CONT);
    }
    sharing.detach();
    sharing.end();
}

#[test]
fn workers_that_end_and_come_are_followed() {
    let app = server("app.py");
    let mut command = program(&["gunicorn", "-w", "4", "-k", "gthread", "--threads", "16"]);
    command
        .args(["--keep-alive", "60", "--log-level", "error", "--bind", AT])
        .args(["--chdir", app.trim_end_matches("app.py"), "app:wsgi"]);
    let Some(sharing) = Sharing::spawn(command) else {
        return;
    };
    let sharing = sharing.with_workers(WORKERS);
    sharing.attach();
    let up = || {
        let group = sharing.status();
        let slots = 0..group["slots"].as_array().map_or(0, Vec::len);
        let mut pids: Vec<u32> = slots.filter_map(|slot| worker(&group, slot)).collect();
        pids.sort_unstable();
        pids
    };
    let first = up();
    assert_eq!(first.len(), WORKERS);
    signal(first[0], Signal::KILL);
    slowly("its successor is followed", || {
        let now = up();
        now.len() == WORKERS && !now.contains(&first[0])
    });
    let (_kept, counts) = keep(address(), 32, Duration::from_millis(8));
    assert!(counts.len() == WORKERS && counts[0] <= 16, "{counts:?}");
    sharing.detach();
    sharing.end();
}

#[test]
fn a_server_that_ends_is_waited_for_and_steered_again() {
    let Some(mut sharing) = Sharing::event_loops("wake-all") else {
        return;
    };
    sharing.attach();
    let agent = sharing.agent();
    drop(std::mem::replace(
        &mut sharing.server,
        Started::spawn(program(&["true"])),
    ));
    slowly("it is waited for", || {
        sharing.status()["slots"][0]["pid"].is_null()
    });
    sharing.server = Started::spawn(program(&[&[LAB], &EVENT_LOOPS[..]].concat()));
    slowly("it is steered again", || {
        let group = sharing.status();
        (0..WORKERS).all(|slot| worker(&group, slot).is_some())
    });
    assert_eq!(sharing.agent(), agent);
    sharing.detach();
    sharing.end();
}

#[test]
fn what_cannot_be_steered_is_refused_with_the_reason() {
    for (kind, why) in [
        ("one-set", "made before they were forked"),
        ("one-shot", "EPOLLONESHOT"),
        ("poll", "only epoll lets another process choose"),
        ("alone", "nothing to choose between"),
    ] {
        let script = server("waits.py");
        let Some(sharing) = Sharing::start(&["python3", &script, "7400", kind]) else {
            return;
        };
        let (done, text) = sharing.wakeone(&["attach", AT]);
        assert!(!done && text.contains(why), "{kind}: {text}");
        sharing.end();
    }
}

#[test]
fn a_server_that_is_started_as_it_is_is_steered_and_ends_with_its_own_code() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&[], &[&[LAB], &EVENT_LOOPS[..]].concat());
    run.line("is steered");
    let (kept, counts) = keep(address(), 64, Duration::from_millis(8));
    assert!(counts.len() == WORKERS && counts[0] <= 24, "{counts:?}");
    drop(kept);
    // It is ours: without us it would end.
    let output = wakeone(&ground, &["detach", AT]);
    assert!(!output.status.success(), "{output:?}");
    assert!(get(address(), ASK).is_ok());
    run.signal(Signal::TERM);
    let (status, lines) = run.wait();
    assert!(status.success(), "{lines:#?}");
    assert_nothing_left(&ground);
    let failing = ["sh", "-c", "exit 7"];
    let (status, lines) = ground.run(&[], &failing).wait();
    assert_eq!(status.code(), Some(7), "{lines:#?}");
}

/// As a user without any capability, who may have no more than before (`no_new_privs`).
#[test]
fn no_privilege_is_needed_for_a_server_of_the_same_user() {
    let Some((folder, binary, runtime)) = for_another_user("loops.py") else {
        return;
    };
    let ground = Ground::new();
    let lab = folder.path().join("lab");
    support::copy_program(LAB, &lab);
    let nobody = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.args([
            "--inh-caps=-all",
            "--bounding-set=-all",
            "--no-new-privs",
            "--",
        ]);
        command
    };
    let mut server = nobody();
    server.arg(&lab).args(EVENT_LOOPS);
    let sharing = Sharing {
        server: Started::spawn(server),
        ground,
    };
    slowly("it answers", || get(address(), ASK).is_ok());
    let sharing = sharing.with_workers(WORKERS);
    let before = sharing.entries();
    let wakeone = |arguments: &[&str]| {
        let mut command = nobody();
        command
            .arg(&binary)
            .args(arguments)
            .arg("--runtime-dir")
            .arg(&runtime);
        let output = command.output().expect("setpriv");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(wakeone(&["attach", AT]).contains("one queue"));
    let (kept, counts) = keep_enough(|| Kept::open(address()));
    assert_even(&counts, WORKERS);
    assert!(wakeone(&["status", AT]).contains("least-connections"));
    drop(kept);
    assert!(wakeone(&["detach", AT]).contains("woken as before"));
    eventually("all is as it was", || sharing.entries() == before);
    sharing.end();
}
