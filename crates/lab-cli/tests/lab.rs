//! `wakeone-lab` as a user types it, with real servers and real connections on 127.0.0.0/8.

use assert_cmd::Command;
use std::path::Path;

fn lab(arguments: &[&str], results: &Path) -> Command {
    let mut command = Command::cargo_bin("wakeone-lab").expect("the binary is built");
    command.args(arguments).env("XDG_STATE_HOME", results);
    command
}

fn output(command: &mut Command) -> (i32, String, String) {
    let output = command.output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code().unwrap_or(-1),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// One small round of the shared queue and the hash, which need no privilege.
const SMALL: [&str; 8] = [
    "run",
    "tills",
    "--quick",
    "--rounds",
    "1",
    "--only",
    "stuck/shared-accept",
    "--only=stuck/reuseport-hash",
];

#[test]
fn a_real_result_follows_the_schema_and_makes_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let (json, html) = (
        directory.path().join("r.json"),
        directory.path().join("r.html"),
    );
    let mut command = lab(&SMALL, directory.path());
    command.arg("--json").arg(&json).arg("--html").arg(&html);
    let (code, text, errors) = output(command.arg("--full"));
    assert_eq!(code, 0, "{errors}");
    assert!(
        text.contains("min:") && text.contains("shared-accept"),
        "{text}"
    );

    let schema = include_str!("../../../docs/schema/lab-result.schema.json");
    let validator = jsonschema::draft202012::new(&serde_json::from_str(schema).unwrap()).unwrap();
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let wrong: Vec<String> = validator
        .iter_errors(&result)
        .map(|e| e.to_string())
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    for variant in result["variants"].as_array().unwrap() {
        let metrics = &variant["metrics"];
        assert_eq!(metrics["requests"]["values"][0], 1500.0, "{variant}");
        assert_eq!(metrics["errors"]["values"][0], 0.0);
        let shares: f64 = (0..4)
            .map(|w| {
                metrics[format!("share_worker_{w}")]["values"][0]
                    .as_f64()
                    .unwrap()
            })
            .sum();
        assert!((shares - 1.0).abs() < 1e-9);
        let counts = variant["distributions"]["latency_ms"]["count"]
            .as_array()
            .unwrap();
        assert_eq!(
            counts.iter().map(|c| c.as_u64().unwrap()).sum::<u64>(),
            1500
        );
        for name in ["mean", "stddev", "min", "p50", "p90", "p99", "p999", "max"] {
            assert_eq!(
                metrics[format!("latency_ms_{name}")]["unit"],
                "ms",
                "{name}"
            );
        }
    }

    let page = std::fs::read_to_string(&html).unwrap();
    assert!(
        page.contains("<svg") && !page.contains("<script") && !page.contains("src="),
        "self-contained"
    );
    let (code, _, errors) =
        output(lab(&["report", "-o"], directory.path()).arg(directory.path().join("all.html")));
    assert_eq!(code, 0, "the kept result makes a report: {errors}");
    let svg = directory.path().join("first.svg");
    let (code, _, errors) = output(
        lab(&["report"], directory.path())
            .arg(&json)
            .arg("--svg")
            .arg(&svg),
    );
    assert_eq!(code, 0, "{errors}");
    let drawn = std::fs::read_to_string(&svg).unwrap();
    assert!(
        drawn.starts_with("<svg ") && drawn.contains("xmlns=") && drawn.contains("stuck, ms"),
        "a file that stands alone: {drawn}"
    );
    let (code, _, errors) = output(
        lab(&["report"], directory.path())
            .args([&json, &json])
            .arg("--svg")
            .arg(&svg),
    );
    assert!(
        code == 1 && errors.contains("draws one result, and there are 2"),
        "{errors}"
    );
}

#[track_caller]
fn fits_the_screen(text: &str) {
    let wide: Vec<&str> = text.lines().filter(|l| l.chars().count() > 80).collect();
    assert!(wide.is_empty(), "wider than 80 columns: {wide:#?}");
    assert!(text.lines().count() <= 24, "higher than 24 lines:\n{text}");
}

#[test]
fn who_reads_only_the_first_lines_has_read_enough() {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_wakeone-lab"))
        .args(["list", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The reader ends before the first line comes.
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
}

#[test]
fn the_list_and_the_end_of_a_run_fit_the_screen() {
    let directory = tempfile::tempdir().unwrap();
    let (code, list, errors) = output(&mut lab(&["list"], directory.path()));
    assert_eq!(code, 0, "{errors}");
    fits_the_screen(&list);
    let one = list
        .lines()
        .find(|line| line.starts_with("tills "))
        .unwrap();
    let times = one
        .split_whitespace()
        .filter(|word| ["s", "min"].contains(word));
    assert_eq!(times.count(), 2, "both sizes: {one}");

    let (code, text, errors) = output(&mut lab(&SMALL, directory.path()));
    assert_eq!(code, 0, "{errors}");
    fits_the_screen(&text);
    assert!(!text.contains("min:"), "histograms are for --full:\n{text}");
    assert!(text.contains("expectations hold"), "{text}");
    let page = errors
        .lines()
        .last()
        .unwrap()
        .strip_prefix("Charts: file://");
    let page = std::fs::read_to_string(page.expect("the last line is the link")).unwrap();
    assert!(page.contains("Histograms") && page.contains("<svg"));
}

/// Returns the values of a variant's metric, from the JSON of a run.
fn values(result: &serde_json::Value, variant: &str, metric: &str) -> Vec<f64> {
    let variants = result["variants"].as_array().unwrap();
    let of = variants.iter().find(|v| v["name"] == variant).unwrap();
    let values = of["metrics"][metric]["values"].as_array();
    let values = values.unwrap_or_else(|| panic!("{variant} has no {metric}"));
    values.iter().map(|v| v.as_f64().unwrap()).collect()
}

/// One round of these variants of an experiment, as JSON.
fn measured(experiment: &str, variants: &[&str]) -> serde_json::Value {
    let directory = tempfile::tempdir().unwrap();
    let mut command = lab(
        &["run", experiment, "--quick", "--rounds", "1", "--json", "-"],
        directory.path(),
    );
    command.env("WAKEONE_RUNTIME_DIR", directory.path().join("run"));
    for variant in variants {
        command.args(["--only", variant]);
    }
    let (code, json, errors) = output(&mut command);
    assert_eq!(code, 0, "{errors}");
    assert_no_server_is_left(directory.path());
    serde_json::from_str(&json).unwrap()
}

#[test]
fn kept_connections_crowd_one_worker_of_an_exclusive_epoll() {
    let (crowd, turns) = ("kept/shared-epoll-exclusive", "kept/shared-epoll-rotate");
    // A busy machine delays workers by more than the gap between connections, which spreads these. One quiet moment
    // is enough.
    let mut seen = Vec::new();
    let shown = (0..4).any(|_| {
        let found = measured("tills", &[crowd, turns]);
        assert_eq!(values(&found, crowd, "requests"), [1800.0]);
        let of = |metric| [crowd, turns].map(|variant| values(&found, variant, metric)[0]);
        let ([busiest, even], means) = (of("share_max_over_mean"), of("latency_ms_mean"));
        seen.push((busiest, even, means));
        busiest > 2.0 && even < 1.2 && means[0] > 2.0 * means[1]
    });
    assert!(shown, "(busiest, the same in turn, means): {seen:?}");
}

#[test]
fn a_restart_loses_connections_of_a_shared_socket_and_none_of_ours() {
    let (theirs, ours) = ("restart/shared-accept", "restart/least-connections+rescue");
    let found = measured("tills", &[theirs]);
    assert!(values(&found, theirs, "lost")[0] > 0.0);
    if steers() {
        let found = measured("tills", &[ours]);
        assert_eq!(values(&found, ours, "lost"), [0.0]);
        assert!(values(&found, ours, "planned")[0] > 1000.0);
    }
}

#[test]
fn haproxy_is_restarted_while_it_is_attached_to() {
    if !steers() || !is_installed("haproxy") {
        return;
    }
    // A handshake that ends on another CPU in the moment of the old process's close is reset by the kernel
    // (`inet_csk_reqsk_queue_add`): on a busy machine one or two of 16,000 connections. Without Wakeone 4 to 16 of them
    // are lost. One round without a loss is enough; where there is none, both are compared.
    let (theirs, attached) = ("many/haproxy", "many/haproxy+attach");
    let alone = measured("restart", &[attached]);
    assert!(values(&alone, attached, "planned")[0] > 1000.0);
    if values(&alone, attached, "lost") == [0.0] {
        return;
    }
    let mut seen = Vec::new();
    let none_lost = (0..3).any(|_| {
        let both = measured("restart", &[theirs, attached]);
        let lost = [theirs, attached].map(|variant| values(&both, variant, "lost")[0]);
        seen.push(lost);
        lost[1] == 0.0
    });
    let [as_it_is, ours] = [0, 1].map(|nth| seen.iter().map(|lost| lost[nth]).sum::<f64>());
    assert!(none_lost || 3.0 * ours <= as_it_is, "{seen:?}");
}

#[test]
fn nginx_is_resized_while_it_is_attached_to() {
    if !steers() || !is_installed("nginx") {
        return;
    }
    let found = measured("nginx", &["resized/reuseport+attach"]);
    // The kernel resets a handshake that ends on another CPU while nginx closes its listener (docs/attach.md). Without
    // Wakeone it resets dozens.
    let lost = values(&found, "resized/reuseport+attach", "lost")[0];
    assert!(lost <= 2.0, "{lost}");
    assert!(values(&found, "resized/reuseport+attach", "planned")[0] > 1000.0);
}

#[test]
fn one_queue_that_is_attached_to_has_its_kept_connections_even() {
    if !steers() {
        return;
    }
    let mut all = vec![("tills", "kept/one-queue")];
    if is_installed("node") {
        all.push(("kept", "node-cluster/attached"));
    }
    for (experiment, variant) in all {
        // A busy machine delays looks by more than the gap between connections. One quiet moment is enough.
        let mut seen = Vec::new();
        let even = (0..4).any(|_| {
            let found = measured(experiment, &[variant]);
            assert_eq!(values(&found, variant, "errors"), [0.0]);
            let busiest = values(&found, variant, "share_max_over_mean")[0];
            seen.push(busiest);
            busiest < 1.2
        });
        assert!(even, "{variant}: {seen:?}");
    }
}

#[test]
fn what_is_not_installed_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = lab(&["run", "kept", "--quick"], directory.path());
    let (code, text, errors) = output(command.env("PATH", "/nowhere"));
    assert_eq!(code, 0, "{errors}");
    let text = text.replace('\n', " ");
    assert!(
        text.contains("Not measured:") && text.contains("hypercorn is not installed"),
        "{text}"
    );
}

/// Whether a server is installed; prints a line if not.
fn is_installed(name: &str) -> bool {
    let here = wakeone_lab::process::program(name).is_some();
    if !here {
        eprintln!("skipped: {name} is not installed");
    }
    here
}

#[test]
fn check_fails_when_an_expectation_does() {
    let directory = tempfile::tempdir().unwrap();
    // The steered variants are left out, so that the expectations about them cannot hold.
    let arguments = [
        "run",
        "tills",
        "--quick",
        "--rounds",
        "1",
        "--only",
        "cpu/shared-accept",
        "--check",
    ];
    let (code, _, errors) = output(&mut lab(&arguments, directory.path()));
    assert_eq!(code, 1);
    assert!(
        errors.contains("expectations do not hold") && errors.contains("stuck-hash-is-worse"),
        "{errors}"
    );
}

#[test]
fn bad_input_is_a_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let cases: [(&[&str], i32, &str); 5] = [
        (&["run", "nothing"], 2, "there is no experiment \"nothing\""),
        (
            &["run", "all", "--json", "x.json"],
            2,
            "--json takes one experiment",
        ),
        (
            &["run", "tills", "--rounds", "0"],
            2,
            "0 is not in 1..=1000",
        ),
        (
            &["run", "tills", "--only", "nowhere"],
            1,
            "no variant has nowhere in its name",
        ),
        (&["report"], 1, "there is no result in"),
    ];
    for (arguments, expected, sentence) in cases {
        let (code, _, errors) = output(&mut lab(arguments, directory.path()));
        assert_eq!(code, expected, "{arguments:?}: {errors}");
        assert!(errors.contains(sentence), "{arguments:?}: {errors}");
    }
}

#[test]
fn an_interrupted_run_leaves_no_server_and_keeps_its_points() {
    use std::process::{Command, Stdio};
    let directory = tempfile::tempdir().unwrap();
    let start = || {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("wakeone-lab"));
        command.args([
            "run",
            "tills",
            "--quick",
            "--rounds",
            "2",
            "--only",
            "stuck/shared",
        ]);
        command
            .env("XDG_STATE_HOME", directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut child = start();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    lines.next().unwrap().unwrap();
    // The first point is done, the second one is being measured: its server is one of our grandchildren.
    std::thread::sleep(std::time::Duration::from_millis(400));
    let group = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(group, nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert!(
        rest.iter()
            .any(|l| l.contains("interrupted; finished points are kept")),
        "{rest:?}"
    );
    assert_no_server_is_left(directory.path());
    let again = start().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(
        said.contains("points were measured before and are kept"),
        "{said}"
    );
    assert!(again.status.success());
}

/// Whether this machine lets us steer; prints a line if not.
fn steers() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: not root");
    }
    root
}

/// The parts of a live group are switched while it serves, and no connection is lost.
#[test]
fn arms_take_turns_within_one_load() {
    if !steers() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("r.json");
    let arguments = [
        "run",
        "cost",
        "--quick",
        "--only",
        "slices/parts",
        "--only=programs/4-slots",
    ];
    let mut command = lab(&arguments, directory.path());
    command.env("WAKEONE_RUNTIME_DIR", directory.path().join("run"));
    let (code, text, errors) = output(command.arg("--full").arg("--json").arg(&json));
    assert_eq!(code, 0, "{errors}");
    assert!(text.contains("Ratios of neighbouring slices"), "{text}");
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let schema = include_str!("../../../docs/schema/lab-result.schema.json");
    let validator = jsonschema::draft202012::new(&serde_json::from_str(schema).unwrap()).unwrap();
    let wrong: Vec<String> = validator
        .iter_errors(&result)
        .map(|e| e.to_string())
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    let parts = &result["variants"][0];
    assert_eq!(parts["metrics"]["errors"]["values"][0], 0.0);
    let blocks = parts["slices"]["rounds"][0].as_array().unwrap();
    assert!(blocks.len() >= 5, "{blocks:?}");
    let contrast = &result["contrasts"][0];
    assert_eq!(
        (&contrast["a"], &contrast["b"]),
        (&"choosing".into(), &"hash".into())
    );
    let [low, ratio, high] = ["low", "ratio", "high"].map(|n| contrast[n].as_f64().unwrap());
    assert!(0.0 < low && low <= ratio && ratio <= high, "{contrast}");
    let programs = &result["variants"][1]["metrics"];
    let ns = |name: &str| programs[name]["median"].as_f64().unwrap();
    assert!(ns("empty_ns") > 0.0 && ns("least_connections_ns") > ns("empty_ns"));
    // Nine callbacks a connection at most, on any machine: only the server's end of it is counted.
    assert!(
        (1.0..=9.0).contains(&ns("sock_ops_runs_per_connection")),
        "{programs}"
    );
    assert_no_server_is_left(directory.path());
}

/// No server is left, even if the run is interrupted while the supervisor is stopped.
#[test]
fn slices_that_are_interrupted_leave_no_server() {
    use std::process::{Command, Stdio};
    if !steers() {
        return;
    }
    for wait_ms in [2500, 2900] {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("wakeone-lab"));
        command.args(["run", "cost", "--quick", "--only", "slices/steering"]);
        let mut child = command
            .env("XDG_STATE_HOME", directory.path())
            .env("WAKEONE_RUNTIME_DIR", directory.path().join("run"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(wait_ms));
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1));
        assert_no_server_is_left(directory.path());
        assert!(!directory.path().join("run").exists(), "no group is left");
    }
}

/// Nothing that the run started is left. The processes that read for one that was killed end a moment later.
fn assert_no_server_is_left(directory: &Path) {
    use std::time::{Duration, Instant};
    let since = Instant::now();
    loop {
        let left = servers_of(directory);
        if left.is_empty() {
            return;
        }
        assert!(since.elapsed() < Duration::from_secs(1), "{left:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Processes that have this test's environment, and their names: everything that the run started.
fn servers_of(directory: &Path) -> Vec<(String, String)> {
    let mark = format!("XDG_STATE_HOME={}", directory.display());
    let carries = |entry: &std::fs::DirEntry| {
        std::fs::read(entry.path().join("environ"))
            .is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == mark.as_bytes()))
    };
    let named = |entry: std::fs::DirEntry| {
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let pid = entry.file_name().to_string_lossy().into_owned();
        (pid, name.trim_end().to_owned())
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter(carries).map(named).collect()
}

/// The pictures of a page need eyes. This checks in a real browser the part that a machine can check.
#[test]
fn a_browser_shows_the_page_without_a_request_an_error_or_an_overflow() {
    let Some(browser) = chromium() else {
        eprintln!("skipped: no chromium on this machine");
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let html = directory.path().join("page.html");
    let mut command = lab(&SMALL, directory.path());
    command.arg("--html").arg(&html);
    let (code, _, errors) = output(&mut command);
    assert_eq!(code, 0, "{errors}");
    // The page itself has no script. This one, added to a copy, reports the browser's result.
    let spy = "<script>addEventListener('load',()=>{document.title=JSON.stringify({\
        fetched:performance.getEntriesByType('resource').map(r=>r.name),\
        wider:document.documentElement.scrollWidth-document.documentElement.clientWidth,\
        charts:[...document.querySelectorAll('svg')].filter(s=>s.getBoundingClientRect().width>100).length,\
        spilled:[...document.querySelectorAll('svg text')].filter(t=>{const a=t.getBoundingClientRect(),\
          b=t.ownerSVGElement.getBoundingClientRect();return a.width>0&&(a.right>b.right+2||a.left<b.left-2)}).map(t=>t.textContent),\
        mute:[...document.querySelectorAll('.scroll')].filter(s=>s.querySelector('table')&&s.scrollWidth>s.clientWidth&&s.getClientRects().length&&\
          getComputedStyle(s,'::before').content=='none').map(s=>s.textContent),\
        lost:[...document.querySelectorAll('.scroll')].filter(s=>{s.scrollLeft=999;const n=s.querySelector('tbody th');\
          return n&&s.getClientRects().length&&n.getBoundingClientRect().left<s.getBoundingClientRect().left-1}).map(s=>s.textContent)})})</script>";
    let page = std::fs::read_to_string(&html)
        .unwrap()
        .replace("</head>", &format!("{spy}</head>"));
    std::fs::write(&html, page).unwrap();
    for width in [1280, 390] {
        let profile = tempfile::tempdir().unwrap();
        let mut chromium = Command::new(&browser);
        chromium.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            "--dump-dom",
        ]);
        chromium.arg(format!("--user-data-dir={}", profile.path().display()));
        chromium.arg(format!("--window-size={width},900"));
        chromium
            .arg(format!("file://{}", html.display()))
            .timeout(std::time::Duration::from_secs(60));
        let (code, dom, log) = output(&mut chromium);
        assert_eq!(code, 0, "{log}");
        assert!(
            !log.contains("CONSOLE"),
            "console messages at {width}: {log}"
        );
        let title = dom
            .split("<title>")
            .nth(1)
            .and_then(|t| t.split("</title>").next())
            .unwrap_or_default();
        let found: serde_json::Value =
            serde_json::from_str(title).unwrap_or_else(|e| panic!("{e}: {title}"));
        assert_eq!(found["fetched"], serde_json::json!([]), "at {width}");
        assert_eq!(found["wider"], 0, "the page scrolls sideways at {width}");
        assert_eq!(
            found["spilled"],
            serde_json::json!([]),
            "text outside a chart at {width}"
        );
        assert!(found["charts"].as_u64().unwrap() >= 3, "{found}");
        let no = serde_json::json!([]);
        // The hint is for narrow screens; on wide ones, a shadow at the edge has the same meaning.
        if width == 390 {
            assert_eq!(found["mute"], no, "tables that scroll without a hint");
        }
        assert_eq!(found["lost"], no, "names that scroll away at {width}");
    }
}

fn chromium() -> Option<std::path::PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let places: Vec<_> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    names
        .iter()
        .flat_map(|n| places.iter().map(move |p| p.join(n)))
        .find(|p| p.is_file())
}
