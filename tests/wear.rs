//! Workers that have had what they may have, and workers that hang, are replaced: one at a time, the new one first, and no
//! request is lost.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use support::steered::{assert_nothing_left, isolated, soak};
use support::{Clients, Ground, Run, everyone, get, pid_of, runs, server, slowly};

const THREE: [&str; 6] = ["-w", "3", "-l", "127.0.0.1:8080", "--name", "web"];

fn start(ground: &Ground, options: &[&str]) -> (Run, SocketAddr) {
    let script = server("whoami.py");
    let mut run = ground.run(&[&THREE[..], options].concat(), &["python3", &script]);
    let address = run.ready();
    (run, address)
}

/// The processes of the three workers.
fn pids(address: SocketAddr) -> BTreeSet<u32> {
    everyone(address, 3).iter().map(pid_of).collect()
}

/// How many of these lines have such words.
fn count(lines: &[String], words: &str) -> usize {
    lines.iter().filter(|line| line.contains(words)).count()
}

/// Asks for something of which no answer is awaited.
fn send(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connects");
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("asks");
    stream
}

/// `WAKEONE_SOAK=1`: a thousand times.
#[test]
fn after_so_many_requests_a_worker_is_replaced_and_none_is_lost() {
    let Some(ground) = isolated() else { return };
    let (mut run, address) = start(&ground, &["--max-requests", "50"]);
    let first = pids(address);
    let replacements = if soak() { 1000 } else { 6 };
    let begun = Instant::now();
    let clients = Clients::start(address, "/", 2);
    for _ in 0..replacements {
        run.line("it got");
        run.line("rolling restart done: 1 worker replaced");
    }
    let (answers, failures) = clients.stop();
    println!(
        "{answers} answers, {replacements} replacements in {:?}",
        begun.elapsed()
    );
    assert_eq!(failures, Vec::<String>::new(), "of {answers}");
    assert!(answers >= 50 * replacements, "{answers}");
    assert!(pids(address).is_disjoint(&first));
    let lines = run.stop();
    assert_eq!(count(&lines, "the rolling restart stops"), 0, "{lines:#?}");
    assert_nothing_left(&ground);
}

#[test]
fn after_some_time_all_are_replaced_one_by_one() {
    for queue in ["one", "each"] {
        let Some(ground) = isolated() else { return };
        let (mut run, address) = start(&ground, &["--max-age", "2s", "--queue", queue]);
        let clients = Clients::start(address, "/", 2);
        for _ in 0..3 {
            run.line("it has run for");
            run.line("rolling restart done: 1 worker replaced");
        }
        let (_, failures) = clients.stop();
        assert_eq!(failures, Vec::<String>::new(), "{queue}");
        run.stop();
        assert_nothing_left(&ground);
    }
}

#[test]
fn one_that_has_too_much_memory_is_replaced_and_no_other() {
    let Some(ground) = isolated() else { return };
    let (mut run, address) = start(&ground, &["--max-memory", "100M"]);
    let before = pids(address);
    let answer = get(address, "/keep?mib=120").expect("an answer");
    let fat = pid_of(&serde_json::from_str(&answer).expect("JSON"));
    let line = run.line("MiB of memory");
    assert!(line.contains(&format!("pid {fat}")), "{line}");
    run.line("rolling restart done: 1 worker replaced");
    slowly("it is gone", || !runs(fat));
    let after = pids(address);
    assert_eq!(
        before.intersection(&after).count(),
        2,
        "{before:?} {after:?}"
    );
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn one_that_hangs_is_replaced_after_its_stack_was_logged() {
    for (path, cpu) in [
        ("/slow?ms=600000", "no CPU"),
        ("/spin?ms=600000", "a whole CPU"),
    ] {
        let Some(ground) = isolated() else { return };
        let told = ground.path().join("told");
        let hook = format!("echo {{pid}} $WAKEONE_SLOT $(id -u) > {}", told.display());
        let options = ["--hang-after", "2s", "--on-hang", &hook, "--grace", "2s"];
        let (mut run, address) = start(&ground, &options);
        let before = pids(address);
        let _asked = send(address, path);
        // So many that the others have as many connections, and it gets one now and then.
        let clients = Clients::start(address, "/slow?ms=20", 6);
        let line = run.line("hangs: process");
        assert!(line.contains("system call"), "{line}");
        let line = run.line("has accepted none for");
        assert!(line.contains(cpu), "{path}: {line}");
        run.line("rolling restart done: 1 worker replaced");
        let (answers, failures) = clients.stop();
        assert_eq!(failures, Vec::<String>::new(), "of {answers}");
        let after = pids(address);
        let gone: Vec<u32> = before.difference(&after).copied().collect();
        assert_eq!(gone.len(), 1, "{before:?} {after:?}");
        let told = std::fs::read_to_string(told).expect("the command ran");
        assert!(told.starts_with(&format!("{} ", gone[0])), "{told}");
        run.stop();
        assert_nothing_left(&ground);
    }
}

#[test]
fn where_all_hang_or_nothing_waits_nobody_is_replaced() {
    let Some(ground) = isolated() else { return };
    let (run, address) = start(&ground, &["--hang-after", "1s"]);
    let before = pids(address);
    let one = send(address, "/slow?ms=3000");
    std::thread::sleep(Duration::from_secs(4));
    drop(one);
    let all: Vec<TcpStream> = (0..9).map(|_| send(address, "/slow?ms=1500")).collect();
    std::thread::sleep(Duration::from_secs(5));
    drop(all);
    slowly("it answers", || get(address, "/").is_ok());
    assert_eq!(pids(address), before);
    let lines = run.stop();
    assert_eq!(count(&lines, "hangs"), 0, "{lines:#?}");
    assert_nothing_left(&ground);
}

#[test]
fn what_nobody_counts_is_refused() {
    let Some(ground) = isolated() else { return };
    let options = [&THREE[..], &["--queue", "one", "--max-requests", "9"]].concat();
    let (status, lines) = ground.run(&options, &["sleep", "60"]).wait();
    assert_eq!(status.code(), Some(2), "{lines:?}");
    let why = "--max-requests needs a queue for each worker";
    assert!(lines.len() == 1 && lines[0].contains(why), "{lines:?}");
    let options = [&THREE[..], &["--on-hang", "true"]].concat();
    let (status, lines) = ground.run(&options, &["sleep", "60"]).wait();
    assert_eq!(status.code(), Some(2), "{lines:?}");
    assert_nothing_left(&ground);
}
