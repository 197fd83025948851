//! `wakeone scale`, SIGTTIN and SIGTTOU: more and fewer workers while a group runs, and no connection lost.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use rustix::process::Signal;
use support::steered::{assert_nothing_left, isolated, said, status, wakeone};
use support::{Clients, Ground, Run, everyone, pid_of, runs, slowly};

const AT: &str = "127.0.0.1:7490";

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

fn start(ground: &Ground, options: &[&str]) -> Run {
    let options = [&["-l", AT, "--name", "web"], options].concat();
    let mut run = ground.whoami(&options);
    run.ready();
    run
}

/// Changes the number of workers, and returns what was said.
fn scale(ground: &Ground, workers: usize) -> String {
    let output = wakeone(ground, &["scale", AT, &workers.to_string()]);
    assert!(output.status.success(), "{:?}", said(&output));
    String::from_utf8(output.stdout).expect("text")
}

/// The workers in the slots; there must be so many, and all answer.
fn workers(ground: &Ground, count: usize) -> BTreeSet<u32> {
    let group = status(ground, "web");
    let slots = group["slots"].as_array().expect("slots");
    assert_eq!(slots.len(), count, "{group}");
    let pids = slots.iter().filter_map(|slot| slot["pid"].as_u64());
    let pids: BTreeSet<u32> = pids.map(|pid| pid as u32).collect();
    // One that leaves accepts from the queue of all until it ends.
    ground.nobody_retires("web");
    let answer: BTreeSet<u32> = everyone(address(), count).iter().map(pid_of).collect();
    assert_eq!(answer, pids);
    pids
}

/// Has a group get more and fewer workers under load, in every way.
fn loses_nothing(queue: &str) {
    let Some(ground) = isolated() else { return };
    let run = start(&ground, &["-w", "2", "--queue", queue]);
    let clients = Clients::start(address(), "/slow?ms=1", 4);
    let mut seen = workers(&ground, 2);
    for (before, count) in [(2, 4), (4, 1), (1, 3), (3, 2), (2, 2)] {
        let told = scale(&ground, count);
        assert!(told.starts_with(&format!("web: {count} worker")), "{told}");
        assert!(told.ends_with(&format!(", {before} before\n")), "{told}");
        seen.extend(workers(&ground, count));
    }
    for (signal, count) in [(Signal::TTIN, 3), (Signal::TTOU, 2), (Signal::TTOU, 1)] {
        run.signal(signal);
        slowly("as many serve", || {
            let group = status(&ground, "web");
            let slots = group["slots"].as_array().expect("slots");
            slots.len() == count && slots.iter().all(|slot| slot["state"] == "up")
        });
        seen.extend(workers(&ground, count));
    }
    clients.lost_nothing();
    let last = workers(&ground, 1);
    assert!(last.is_subset(&seen));
    assert_eq!(seen.iter().filter(|pid| runs(**pid)).count(), 1);
    // A rolling restart replaces those that there are.
    scale(&ground, 3);
    let before = workers(&ground, 3);
    let mut run = run;
    run.signal(Signal::HUP);
    run.line("rolling restart done: 3 workers replaced");
    assert!(workers(&ground, 3).is_disjoint(&before));
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn more_and_fewer_workers_with_a_queue_each_lose_nothing() {
    loses_nothing("each");
}

#[test]
fn more_and_fewer_workers_with_one_queue_lose_nothing() {
    loses_nothing("one");
}

#[test]
fn a_worker_that_leaves_answers_what_it_has() {
    use std::io::{Read, Write};
    for queue in ["each", "one"] {
        let Some(ground) = isolated() else { return };
        let run = start(&ground, &["-w", "4", "--queue", queue]);
        let mut open = Vec::new();
        for _ in 0..16 {
            let mut stream = std::net::TcpStream::connect(address()).expect("connects");
            let request = "GET /slow?ms=1500 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
            stream.write_all(request.as_bytes()).expect("sent");
            open.push(stream);
        }
        scale(&ground, 1);
        for mut stream in open {
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("answered");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        run.stop();
        assert_nothing_left(&ground);
    }
}

#[test]
fn the_next_supervisor_has_as_many_as_it_is_told() {
    for queue in ["each", "one"] {
        let Some(ground) = isolated() else { return };
        let run = start(&ground, &["-w", "2", "--queue", queue]);
        scale(&ground, 4);
        let four = workers(&ground, 4);
        let clients = Clients::start(address(), "/", 2);
        run.murder();
        let run = start(&ground, &["-w", "4", "--queue", queue]);
        assert_eq!(workers(&ground, 4), four, "all were taken over");
        run.murder();
        let mut run = start(&ground, &["-w", "2", "--queue", queue]);
        run.line("worker 3 (pid ");
        slowly("two serve on", || {
            let group = status(&ground, "web");
            group["slots"].as_array().expect("slots").len() == 2
        });
        assert!(workers(&ground, 2).is_subset(&four));
        clients.lost_nothing();
        run.stop();
        assert_nothing_left(&ground);
    }
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let Some(ground) = isolated() else { return };
    let refused = |workers: &str| {
        let output = wakeone(&ground, &["scale", "web", workers]);
        assert_eq!(output.status.code(), Some(1));
        said(&output).last().cloned().expect("a sentence")
    };
    assert!(refused("2").contains("there is no group `web`"));
    for (options, count, why) in [
        (&["-w", "2"][..], "5", "there is room for 1 to 4"),
        (&["-w", "2", "--max-workers", "3"], "4", "1 to 3"),
        (&["-w", "2", "--restart", "stop-first"], "3", "stop-first"),
    ] {
        let mut run = start(&ground, options);
        let before = workers(&ground, 2);
        let told = refused(count);
        assert!(told.contains(why), "{told}");
        assert_eq!(workers(&ground, 2), before);
        if options.contains(&"stop-first") {
            run.signal(Signal::TTIN);
        } else {
            scale(&ground, 1);
            run.signal(Signal::TTOU);
        }
        run.line(" cannot be: ");
        run.stop();
    }
    let run = start(&ground, &["-w", "2"]);
    run.murder();
    assert!(refused("3").contains("no supervisor"));
    start(&ground, &["-w", "2"]).stop();
    let datagrams = ["-w", "2", "-l", "udp://127.0.0.1:7491", "--name", "web"];
    let run = ground.run(&datagrams, &["sleep", "600"]);
    slowly("its supervisor is there", || refused("3").contains("UDP"));
    run.stop();
    let bad = ["-w", "4", "-l", AT, "--max-workers", "3"];
    let (code, line) = ground.refused(&bad, &["sleep", "1"]);
    assert!(
        code == 2 && line.contains("--max-workers 3 cannot be"),
        "{line}"
    );
    assert_nothing_left(&ground);
}
