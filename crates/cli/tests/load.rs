//! `wakeone load` as a user types it, against `wakeone-lab serve`.

#[path = "../../lab-cli/tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::process::{Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::Server;

fn load(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wakeone"));
    command
        .arg("load")
        .args(arguments)
        .output()
        .expect("wakeone load runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("the output is text")
}

/// Checks that the command failed with this code, and gave the reason in one sentence with these parts.
fn refused(output: &Output, code: i32, parts: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in {said:?}");
    }
}

#[test]
fn every_request_is_in_the_json() {
    let server = Server::start(&["--model", "preforked", "-w", "3"]);
    let url = format!("http://{}", server.address);
    let mix = [
        "--mix",
        "3:/work?us=100&kind=sleep",
        "--mix",
        "1:/work?us=2000&kind=sleep",
    ];
    let closed = ["-n", "400", "-c", "8", "--json", &url];
    let open = ["-n", "400", "--rate", "2000", "--json", &url];
    for arguments in [closed.as_slice(), open.as_slice()] {
        let output = load(&[mix.as_slice(), arguments].concat());
        assert!(output.status.success(), "{output:?}");
        let result: Value =
            serde_json::from_slice(&output.stdout).expect("JSON alone is on stdout");
        assert_eq!(result["schema"], "wakeone-load/1");
        assert_eq!(result["planned"], 400);
        assert_eq!(result["completed"], 400, "{}", result["errors"]);
        let workers = result["by_worker"].as_object().unwrap();
        assert_eq!(
            workers.values().map(|n| n.as_u64().unwrap()).sum::<u64>(),
            400
        );
        let (quick, slow) = (&result["paths"][0], &result["paths"][1]);
        assert_eq!(quick["path"], "/work?us=100&kind=sleep");
        assert!(slow["latency_ms"]["min"].as_f64() >= Some(2.0), "{slow}");
        let both = [quick, slow].map(|path| path["completed"].as_u64().unwrap());
        assert_eq!(both.iter().sum::<u64>(), 400);
    }
}

#[test]
fn text_fits_eighty_columns_and_files_are_written() {
    let server = Server::start(&["--model", "epoll-prefork", "-w", "2"]);
    let url = format!("http://{}/work?us=100&kind=sleep", server.address);
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (a, b, log) = (file("a.json"), file("b.json"), file("a.hlog"));
    let stages = [
        "--step",
        "100:200ms",
        "--ramp",
        "100:1000:300ms",
        "-c",
        "50",
        "--hdr-log",
        &log,
    ];
    let output = load(&[stages.as_slice(), &[&format!("--json={a}"), &url]].concat());
    assert!(output.status.success(), "{output:?}");
    let text = stdout(&output);
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    for part in ["latency", "service", "100 to 1000", "worker 0", "no errors"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let log = std::fs::read_to_string(log).unwrap();
    assert!(
        log.lines()
            .any(|line| line.starts_with("0.000,") && line.contains("HISTFAAA")),
        "{log}"
    );

    let output = load(&["-n", "100", "--seed", "2", &format!("--json={b}"), &url]);
    assert!(output.status.success(), "{output:?}");
    let comparison = load(&["--compare", &a, &b]);
    let text = stdout(&comparison);
    assert!(
        text.contains("asked differently: loop_kind \"open\" against \"closed\""),
        "{text}"
    );
    assert!(text.contains("throughput_per_s"), "{text}");
    let comparison = load(&["--compare", &a, &a, "--json"]);
    let result: Value = serde_json::from_slice(&comparison.stdout).unwrap();
    assert_eq!(result["differences"].as_array().map(Vec::len), Some(0));
    assert!(
        result["metrics"]
            .as_array()
            .unwrap()
            .iter()
            .all(|m| m["ratio"].is_null() || m["ratio"] == 1.0)
    );
}

/// Sends each of three shards from a process of its own, and returns the folder with their parts. `one`: the arguments of one
/// of them, by its number.
fn send_shards(url: &str, one: &dyn Fn(usize) -> Vec<String>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let at = format!("@{}", now.as_secs_f64() + 1.0);
    let send = |number: usize| {
        let part = folder.path().join(format!("{number}.part"));
        let mut shard = Command::new(env!("CARGO_BIN_EXE_wakeone"));
        shard.args(["load", "--rate", "300", "-d", "2s", "--threads", "2"]);
        shard.args(["--start-at", &at, "--shard", &format!("{number}/3")]);
        shard.arg("--part").arg(part).args(one(number)).arg(url);
        shard.stdout(std::process::Stdio::null());
        shard.spawn().expect("wakeone load runs")
    };
    for mut shard in (0..3).map(send).collect::<Vec<_>>() {
        assert!(shard.wait().expect("wait").success());
    }
    folder
}

#[test]
fn shards_are_merged_to_the_load_of_one_machine() {
    let server = Server::start(&["--model", "preforked", "-w", "3"]);
    let url = format!("http://{}/", server.address);
    let folder = send_shards(&url, &|_| Vec::new());
    let files: Vec<String> = (0..3)
        .map(|number| folder.path().join(format!("{number}.part")))
        .map(|path| path.to_str().unwrap().to_owned())
        .collect();
    let merge = |files: &[&String]| {
        let files: Vec<&str> = files.iter().map(|file| file.as_str()).collect();
        load(&[&["merge"], files.as_slice()].concat())
    };
    let all: Vec<&String> = files.iter().collect();
    let output = merge(&all);
    assert!(output.status.success(), "{output:?}");
    let text = stdout(&output);
    assert!(text.contains("3 shards began within"), "{text}");
    let json = load(&["merge", "--json", &files[0], &files[1], &files[2]]);
    let merged: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    // As many as one machine would have sent, each once.
    assert_eq!(merged["planned"], 600);
    assert_eq!(merged["completed"], 600, "{}", merged["errors"]);
    assert_eq!(merged["latency_ms"]["count"], 600);
    let seconds = merged["intervals"].as_array().expect("intervals").iter();
    let planned = seconds.map(|one| one["planned"].as_u64().unwrap());
    assert_eq!(planned.sum::<u64>(), 600);

    refused(&merge(&all[..2]), 2, &["shard 2 of 3 is missing"]);
    refused(
        &merge(&[all[0], all[1], all[1], all[2]]),
        2,
        &["both shard 1"],
    );
    let other = load(&["-n", "1", &format!("--json={}", files[2]), &url]);
    assert!(other.status.success(), "{other:?}");
    refused(&merge(&all), 1, &["2.part", "is not the result of a shard"]);
}

#[test]
fn shards_that_do_not_fit_are_refused() {
    let closed = ["--shard", "0/2", "--part", "/dev/null", ":1"];
    refused(&load(&closed), 2, &["closed loop"]);
    let server = Server::start(&["--model", "preforked", "-w", "1"]);
    let url = format!("http://{}/", server.address);
    let folder = send_shards(&url, &|number| {
        let seed = if number == 1 { "7" } else { "1" };
        vec!["--seed".to_owned(), seed.to_owned()]
    });
    let part = |number: usize| folder.path().join(format!("{number}.part"));
    let merged = [0, 1, 2].map(|number| part(number).to_str().unwrap().to_owned());
    refused(
        &load(&["merge", &merged[0], &merged[1], &merged[2]]),
        2,
        &["seed", "1.part 7"],
    );
}

#[test]
fn an_interrupt_shows_what_there_is() {
    let server = Server::start(&["--model", "preforked", "-w", "2"]);
    let child = Command::new(env!("CARGO_BIN_EXE_wakeone"))
        .args([
            "load",
            "-d",
            "20s",
            "-c",
            "2",
            "--json",
            &format!("http://{}/work?us=1000&kind=sleep", server.address),
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    refused(&output, 1, &["interrupted"]);
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let count = |name: &str| result[name].as_u64().unwrap();
    assert!(count("completed") > 0);
    assert_eq!(
        count("completed") + count("cancelled"),
        count("planned"),
        "{}",
        result["errors"]
    );
}

/// Few descriptors, a slow server: connections that cannot be opened are an error of their own kind, and no request
/// is missing.
#[test]
fn running_out_of_descriptors_is_counted() {
    let server = Server::start(&["--model", "preforked", "-w", "1"]);
    let url = format!("http://{}/work?us=20000&kind=sleep", server.address);
    let output = Command::new("sh")
        .args([
            "-c",
            "ulimit -n 30; exec \"$0\" load --rate 2000 -n 100 --max-errors 100 --json \"$1\"",
        ])
        .args([env!("CARGO_BIN_EXE_wakeone"), &url])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let refused = result["errors"]["too_many_files"].as_u64().unwrap_or(0);
    assert!(refused > 0, "{}", result["errors"]);
    assert_eq!(
        result["completed"].as_u64().unwrap() + refused,
        100,
        "{}",
        result["errors"]
    );
}

/// A server that answers every n-th request with 503, and closes each connection after its answer.
fn busy(every: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.expect("a connection");
            let _ = stream.read(&mut [0; 1024]);
            let status = ["200 OK", "503 Busy"][usize::from((number + 1) % every == 0)];
            let head = "Content-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = write!(stream, "HTTP/1.1 {status}\r\n{head}");
        }
    });
    address
}

#[test]
fn more_failures_than_may_be_end_with_exit_code_1() {
    let (third, fiftieth) = (busy(3).to_string(), busy(50).to_string());
    let failed = load(&["-n", "300", "-c", "4", "--json", &third]);
    refused(
        &failed,
        1,
        &["100 of 300", "33.33 %", "1 %", "--max-errors"],
    );
    let result: Value = serde_json::from_slice(&failed.stdout).expect("the result all the same");
    assert_eq!(result["errors"]["status"], 100);
    let timeout_ms = 5000.0;
    assert!(result["latency_all_ms"]["p99"].as_f64() >= Some(timeout_ms));
    assert!(result["latency_ms"]["p99"].as_f64() < Some(timeout_ms));
    for (target, most, code) in [
        (&third, "34%", 0),
        (&third, "33", 1),
        (&fiftieth, "2%", 0),
        (&fiftieth, "1.9", 1),
        (&fiftieth, "0", 1),
    ] {
        let output = load(&["-n", "300", "-c", "4", "--max-errors", most, target]);
        assert_eq!(output.status.code(), Some(code), "{most}: {output:?}");
    }
}

#[test]
fn errors_of_unequal_shares_show_in_a_comparison() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (a, b) = (file("a.json"), file("b.json"));
    for (to, every) in [(&a, usize::MAX), (&b, 20)] {
        let target = busy(every).to_string();
        load(&["-n", "400", "-c", "4", &format!("--json={to}"), &target]);
    }
    let text = stdout(&load(&["--compare", &a, &b]));
    for part in ["errors differ: ", "5.00 % of B's", "latency_all_ms_p99"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let result = load(&["--compare", &a, &b, "--json"]);
    let result: Value = serde_json::from_slice(&result.stdout).unwrap();
    assert_eq!(result["error_shares"]["differ"], true);
}

#[test]
fn a_unix_socket_is_named_by_its_option_or_by_the_url() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.sock");
    let listener = UnixListener::bind(&path).expect("listens");
    let server = std::thread::spawn(move || {
        let heads = listener.incoming().take(2).map(|stream| {
            let mut stream = stream.expect("a connection");
            let mut head = [0; 1024];
            let n = stream.read(&mut head).expect("a request");
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            stream.write_all(answer.as_bytes()).expect("an answer");
            String::from_utf8_lossy(&head[..n]).into_owned()
        });
        heads.collect::<Vec<_>>()
    });
    let path = path.to_str().unwrap();
    let by_option = ["-n", "1", "--unix-socket", path, "http://app.example/a?b"];
    assert!(load(&by_option).status.success());
    assert!(
        load(&["-n", "1", &format!("unix:{path}:/a?b")])
            .status
            .success()
    );
    for (head, host) in server
        .join()
        .unwrap()
        .iter()
        .zip(["app.example", "localhost"])
    {
        assert!(head.starts_with("GET /a?b HTTP/1.1\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nHost: {host}\r\n")), "{head}");
    }
    let twice = ["--unix-socket", path, "unix:/run/other.sock"];
    refused(&load(&twice), 2, &["--unix-socket"]);
    let none = ["--unix-socket", "/nowhere/app.sock", ":80"];
    refused(&load(&none), 2, &["/nowhere/app.sock"]);
}

#[test]
fn what_cannot_be_done_is_said_in_one_sentence() {
    let unused = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    refused(
        &load(&["-n", "5", &unused]),
        1,
        &["not one of 5 requests", &unused],
    );
    // A documentation address (RFC 5737) belongs to nobody, and nothing is sent there.
    refused(
        &load(&["-n", "5", "192.0.2.1"]),
        2,
        &["192.0.2.1:80", "--allow-remote"],
    );
    refused(&load(&["-n", "5", "--rate", "0", &unused]), 2, &["rate"]);
    for wrong in ["22570", "127.1:80"] {
        assert_eq!(load(&["-n", "5", wrong]).status.code(), Some(2), "{wrong}");
    }
    refused(
        &load(&["-n", "5", "--sources", "10", "[::1]:80"]),
        2,
        &["127.0.0.0/8"],
    );
    refused(
        &load(&["--mix", "1:/a", &format!("{unused}/b")]),
        2,
        &["/b", "--mix"],
    );
    refused(
        &load(&["-n", "5", "--hdr-log", "/nowhere/x", &unused]),
        1,
        &["/nowhere/x"],
    );
    refused(
        &load(&["--compare", "/nowhere/a", "/nowhere/b"]),
        1,
        &["/nowhere/a"],
    );
    for wrong in [
        &["-n", "5"][..],
        &["ftp://localhost/"],
        &["-d", "5x", &unused],
        &["--mix", "x:/", &unused],
    ] {
        assert_eq!(load(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
