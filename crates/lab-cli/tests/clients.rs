//! The clients with which people measure servers, against every architecture. wrk, ab, httperf and curl must find
//! nothing to complain about, and must count the same as the server. The tests leave out clients that are not
//! installed, and print that.
//!
//! `cargo test -p wakeone-lab-cli --test clients -- --ignored`

mod support;

use std::process::Command;

use support::Server;
use support::ways::ways;

/// The output of a client, or `None` if it is not installed.
fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("left out: {program} is not installed");
            return None;
        }
        Err(error) => panic!("{program}: {error}"),
    };
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    Some(text)
}

/// The number behind `label` in a client's report.
fn number(report: &str, label: &str) -> u64 {
    report
        .split_once(label)
        .and_then(|(_, rest)| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no {label} in {report}"))
}

/// The visits that the guest book has counted, this one included.
fn visits(server: &Server) -> u64 {
    number(&server.get("/").text(), "<div>")
}

fn ab(server: &Server, name: &str) {
    let url = format!("http://{}/", server.address);
    for keep_alive in [&[][..], &["-k"]] {
        let before = visits(server);
        let arguments = [&["-q", "-l", "-n", "300", "-c", "10"], keep_alive, &[&*url]].concat();
        let Some(report) = run("ab", &arguments) else {
            return;
        };
        assert_eq!(
            number(&report, "Complete requests:"),
            300,
            "{name}: {report}"
        );
        assert_eq!(number(&report, "Failed requests:"), 0, "{name}: {report}");
        assert!(!report.contains("Non-2xx"), "{name}: {report}");
        let kept = report.contains("Keep-Alive requests:");
        assert_eq!(kept, !keep_alive.is_empty(), "{name}: {report}");
        // ab opens connections that it does not need in the end, and sends requests on them.
        let counted = visits(server) - before - 1;
        assert!(
            (300..=310).contains(&counted),
            "{name}: {counted} were counted of 300: {report}"
        );
    }
}

fn httperf(server: &Server, name: &str) {
    let port = server.address.port().to_string();
    let before = visits(server);
    let load = [
        "--num-conns",
        "200",
        "--rate",
        "400",
        "--timeout",
        "5",
        "--uri",
        "/",
    ];
    let arguments = [
        &["--hog", "--server", "127.0.0.1", "--port", &port],
        &load[..],
    ]
    .concat();
    let Some(report) = run("httperf", &arguments) else {
        return;
    };
    assert_eq!(number(&report, "replies "), 200, "{name}: {report}");
    assert_eq!(number(&report, "Errors: total "), 0, "{name}: {report}");
    assert!(report.contains("2xx=200 "), "{name}: {report}");
    assert_eq!(visits(server) - before - 1, 200, "{name}");
}

fn wrk(server: &Server, name: &str) {
    let url = format!("http://{}/", server.address);
    for close in [&[][..], &["-H", "Connection: close"]] {
        let arguments = [&["-t", "1", "-c", "10", "-d", "1"], close, &[&*url]].concat();
        let Some(report) = run("wrk", &arguments) else {
            return;
        };
        assert!(!report.contains("Socket errors"), "{name}: {report}");
        assert!(!report.contains("Non-2xx"), "{name}: {report}");
        assert!(report.contains(" requests in "), "{name}: {report}");
    }
}

fn curl(server: &Server, name: &str) {
    let url = |path: &str| format!("http://{}{path}", server.address);
    let status = |arguments: &[&str]| {
        let more = ["-sS", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}\n"];
        run("curl", &[&more, arguments].concat())
    };
    let Some(page) = status(&[&url("/")]) else {
        return;
    };
    assert_eq!(page, "200\n", "{name}");
    let expect = |arguments: &[&str], expected: &str| {
        assert_eq!(
            status(arguments).as_deref(),
            Some(expected),
            "{name}: {arguments:?}"
        );
    };
    expect(&["--http1.0", &url("/")], "200\n");
    expect(&["-I", &url("/")], "200\n");
    expect(
        &[&url("/whoami"), "-o", "/dev/null", &url("/nothing")],
        "200\n404\n",
    );
    expect(&["-d", "text=curl", &url("/")], "303\n");
    expect(&["-L", "-d", "text=follows", &url("/")], "200\n");
    expect(
        &[
            "-H",
            "Transfer-Encoding: chunked",
            "-d",
            "text=chunks",
            &url("/"),
        ],
        "303\n",
    );
    expect(
        &["-H", "Expect: 100-continue", "-d", "text=waits", &url("/")],
        "303\n",
    );
    expect(&["-X", "DELETE", &url("/")], "405\n");
    expect(&["-d", &"x".repeat(50_000), &url("/")], "413\n");
    expect(&["-r", "0-3", &url("/small.txt")], "206\n");
    expect(&["--path-as-is", &url("/../etc/passwd")], "404\n");
    let entries = number(&server.get("/").text(), "visits, ");
    assert_eq!(
        entries, 4,
        "{name}: as many entries as curl was thanked for"
    );
}

#[test]
#[ignore = "runs wrk, ab, httperf and curl against all models, a minute or so"]
fn are_happy_with_all_models() {
    let directory = tempfile::tempdir().expect("a directory");
    let files = directory.path().join("files");
    std::fs::create_dir(&files).expect("a directory");
    std::fs::write(files.join("small.txt"), "some text").expect("a file");
    for (number, way) in ways().iter().enumerate() {
        let arguments = way.arguments;
        let name = arguments.join(" ");
        let store = directory.path().join(number.to_string());
        let count = if way.workers { "3" } else { "1" };
        // ab keeps idle connections open. A worker that serves one connection to its end waits for each of them until
        // its client has been idle too long.
        let idle = ["--header-timeout", "1"];
        let places = [
            ["--store", store.to_str().expect("UTF-8")],
            ["--files", files.to_str().expect("UTF-8")],
            idle,
        ];
        let server = Server::start(&[arguments, &["-w", count], &places.concat()[..]].concat());
        curl(&server, &name);
        ab(&server, &name);
        httperf(&server, &name);
        wrk(&server, &name);
        server.stop();
    }
}
