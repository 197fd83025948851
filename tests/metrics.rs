//! `run`, `attach` and `agent` serve the same figures as `status`, over HTTP and by the socket beside the state, even
//! to slow and hostile clients. A real Prometheus answers each query of the dashboard.
//!
//! These tests need root, and some need nginx or Prometheus. Otherwise they are skipped, with a message.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::nginx::{Nginx, PORT, address};
use support::real::{Started, installed, program};
use support::steered::{PREFORKED, assert_nothing_left, isolated, status, wakeone};
use support::{Clients, Ground, Run, WAKEONE, eventually, patience, signal, whoami};

const METRICS: &str = "127.0.0.1:9464";

/// Sends these bytes to a server. Returns the head and the body of its answer.
fn asked(to: &str, request: &[u8]) -> std::io::Result<(String, String)> {
    let address: SocketAddr = to.parse().expect("address");
    let mut stream = TcpStream::connect_timeout(&address, patience())?;
    stream.set_read_timeout(Some(patience()))?;
    stream.write_all(request)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .ok_or_else(|| std::io::Error::other(format!("no answer: {answer:?}")))?;
    Ok((head.to_owned(), body.to_owned()))
}

fn scraped() -> String {
    let (head, body) =
        asked(METRICS, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").expect("a scrape");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(
        head.contains("Content-Type: application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    assert!(
        head.contains(&format!("Content-Length: {}", body.len())),
        "{head}"
    );
    assert!(body.ends_with("# EOF\n"));
    body
}

/// The value of a sample.
fn value(text: &str, sample: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(sample));
    let value = line.and_then(|line| line.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {sample} in {text}"))
}

/// Returns the answer of a group's socket. With `None` as `request` it sends nothing and waits.
fn told(ground: &Ground, group: &str, request: Option<&str>) -> Value {
    let path = ground.runtime().join(group).join("agent.sock");
    let mut stream = UnixStream::connect(path).expect("connect");
    stream.set_read_timeout(Some(patience())).expect("timeout");
    if let Some(request) = request {
        stream.write_all(request.as_bytes()).expect("ask");
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    serde_json::from_str(&answer).unwrap_or_else(|_| panic!("one document: {answer}"))
}

const WEB: [&str; 8] = [
    "-w",
    "3",
    "-l",
    "127.0.0.1:8080",
    "--name",
    "web",
    "--metrics",
    METRICS,
];

fn web(ground: &Ground) -> Run {
    let mut run = ground.run(&WEB, &PREFORKED);
    run.ready();
    run
}

#[test]
fn what_is_served_is_what_status_says() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.whoami(&WEB);
    let at = run.ready();
    for _ in 0..30 {
        whoami(at);
    }
    eventually("every connection is counted out", || {
        let group = status(&ground, "web");
        let slots = group["slots"].as_array().expect("slots").iter();
        slots
            .map(|slot| slot["active"].as_i64().expect("active"))
            .sum::<i64>()
            == 0
    });
    // No connection is open, so these figures do not change meanwhile.
    let (served, group) = (scraped(), status(&ground, "web"));
    let printed = wakeone(&ground, &["metrics"]);
    let printed = String::from_utf8(printed.stdout).expect("text");
    let snapshot = told(&ground, "web", None);
    assert_eq!(
        snapshot,
        told(&ground, "web", Some("{\"ask\":\"snapshot\"}\n"))
    );
    let (mut chosen, mut moved) = (0.0, 0.0);
    for slot in 0..3 {
        let labels = format!("{{group=\"web\",slot=\"{slot}\"}}");
        for (metric, field) in [
            ("wakeone_slot_selected_connections_total", "selected"),
            ("wakeone_slot_established_connections_total", "established"),
            ("wakeone_slot_closed_connections_total", "closed"),
            ("wakeone_slot_queue_limit_connections", "queue_limit"),
            ("wakeone_slot_worker_pid", "pid"),
            ("wakeone_slot_selected_share_ratio", "selected_share"),
        ] {
            let sample = format!("{metric}{labels}");
            let is = group["slots"][slot][field].as_f64().expect(field);
            assert_eq!(value(&served, &sample), is, "{sample}");
            assert_eq!(value(&printed, &sample), is, "{sample}");
        }
        chosen += value(
            &served,
            &format!("wakeone_slot_selected_connections_total{labels}"),
        );
        moved += group["slots"][slot]["rescued"].as_f64().expect("rescued");
        assert!(
            value(
                &served,
                &format!("wakeone_worker_cpu_seconds_total{labels}")
            ) > 0.0
        );
        assert_eq!(snapshot["groups"][0]["slots"][slot], group["slots"][slot]);
    }
    // A worker that waits for a CPU may be taken for stuck. A moved connection is chosen for again.
    assert_eq!(chosen, 30.0 + moved);
    // Without --metrics-tracing the figures that only tracepoints know are absent.
    assert!(!served.contains("wakeone_worker_accepted_connections_total{"));
    run.stop();
    assert_nothing_left(&ground);
    assert!(
        asked(METRICS, b"GET /metrics HTTP/1.1\r\n\r\n").is_err(),
        "it ends with the group"
    );
}

#[test]
fn whoever_asks_holds_up_nobody_else() {
    let Some(ground) = isolated() else { return };
    let run = web(&ground);
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        (
            "POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
            "405",
        ),
        ("\x16\x03\x01\x02 hello\r\n\r\n", "400"),
        (
            &format!("GET /metrics HTTP/1.1\r\nA: {}\r\n\r\n", "a".repeat(9000)),
            "431",
        ),
        ("HEAD /metrics HTTP/1.1\r\n\r\n", "200"),
    ] {
        let (head, body) = asked(METRICS, request.as_bytes()).expect("an answer");
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
        assert!(body.is_empty(), "{body}");
    }
    // The request arrives in single bytes, with pauses.
    let mut slow = TcpStream::connect(METRICS).expect("connect");
    for byte in b"GET /metrics HTTP/1.1\r\n\r\n" {
        slow.write_all(&[*byte]).expect("a byte");
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut answer = String::new();
    slow.read_to_string(&mut answer).expect("answer");
    assert!(answer.ends_with("# EOF\n"), "{answer}");

    // More clients than are served at a time send nothing. They are disconnected, and the agent continues its rounds.
    let silent: Vec<TcpStream> = (0..40)
        .map(|_| TcpStream::connect(METRICS).expect("connect"))
        .collect();
    assert_eq!(status(&ground, "web")["agent"], true);
    scraped();
    for mut one in silent {
        one.set_read_timeout(Some(patience())).expect("timeout");
        assert_eq!(one.read(&mut [0; 1]).unwrap_or(0), 0, "it gets nothing");
    }
    assert_eq!(status(&ground, "web")["agent"], true);
    run.stop();
    assert_nothing_left(&ground);
}

/// The medians of several times: of `act` alone, and right after 80 clients connected that send nothing.
fn alone_and_beside_idle_clients(act: impl Fn()) -> (Duration, Duration) {
    let timed = || {
        let begun = Instant::now();
        act();
        begun.elapsed()
    };
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        alone.push(timed());
        // Anew each time, as they are disconnected when others need the room.
        let idle: Vec<TcpStream> = (0..80)
            .map(|_| TcpStream::connect(METRICS).expect("connect"))
            .collect();
        beside.push(timed());
        drop(idle);
    }
    alone.sort();
    beside.sort();
    (alone[2], beside[2])
}

#[test]
fn idle_clients_keep_neither_a_scrape_nor_the_socket_waiting() {
    let Some(ground) = isolated() else { return };
    let run = web(&ground);
    let snapshot = || {
        told(&ground, "web", Some("{\"ask\":\"snapshot\"}\n"));
    };
    let times = [
        alone_and_beside_idle_clients(|| drop(scraped())),
        alone_and_beside_idle_clients(snapshot),
    ];
    for (alone, beside) in times {
        // The bar is 100 ms. A busy machine takes longer, as it does for a scrape alone. Each
        // idle client may stay for 5 s, 32 at a time: if none made room, this would take seconds.
        let most = Duration::from_millis(100) * support::slowness() + 10 * alone;
        assert!(beside < most, "{beside:?}, and {alone:?} alone");
    }
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn the_socket_is_ours_alone_and_outlives_nobody() {
    let Some(ground) = isolated() else { return };
    let run = web(&ground);
    let path = ground.runtime().join("web/agent.sock");
    let mode = std::fs::metadata(&path)
        .expect("socket")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    for (request, says) in [
        ("rubbish\n", "this is no request"),
        (
            "{\"ask\":\"rescue\",\"group\":\"web\",\"slot\":3}\n",
            "there is no such slot",
        ),
        (
            "{\"ask\":\"rescue\",\"group\":\"other\",\"slot\":0}\n",
            "this is the socket of `web`",
        ),
    ] {
        let refused = told(&ground, "web", Some(request))["refused"].clone();
        assert!(
            refused.as_str().is_some_and(|why| why.contains(says)),
            "{refused}"
        );
    }
    // Another user gets no answer, even if the file's mode lets that user connect.
    let open = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("mode");
    };
    open(&path, 0o666);
    for folder in [
        ground.runtime().join("web"),
        ground.runtime(),
        ground.path().to_owned(),
    ] {
        open(&folder, 0o755);
    }
    let script = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\ntry:\n d=s.recv(9)\nexcept ConnectionError:\n d=b''\nprint(len(d))";
    let answered = |user: u32| {
        use std::os::unix::process::CommandExt;
        let mut asker = Command::new("python3");
        asker.args(["-c", script]).arg(&path).uid(user).gid(user);
        let output = asker.output().expect("python3");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    assert_eq!(answered(65534), "0");
    assert_eq!(answered(0), "9");

    // kill -9 leaves the socket's file, and the successor replaces it.
    run.murder();
    assert!(path.exists());
    let run = web(&ground);
    assert_eq!(told(&ground, "web", None)["groups"][0]["name"], "web");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn an_address_that_is_taken_is_told() {
    let Some(ground) = isolated() else { return };
    let _taken = std::net::TcpListener::bind(METRICS).expect("bound");
    let (code, line) = ground.refused(&WEB, &PREFORKED);
    assert_eq!(code, 1, "{line}");
    assert!(
        line.contains(&format!("cannot serve metrics on {METRICS}: "))
            && line.contains("--metrics"),
        "{line}"
    );
    assert_nothing_left(&ground);
}

#[test]
fn every_metric_is_explained() {
    let output = Command::new(WAKEONE)
        .args(["metrics", "--help-all"])
        .output()
        .expect("wakeone");
    let text = String::from_utf8(output.stdout).expect("text");
    let names = text
        .lines()
        .filter(|line| line.starts_with("wakeone_"))
        .count();
    assert!(
        names > 40
            && text.contains("wakeone_slot_active_connections{group, slot}  gauge, connections"),
        "{text}"
    );
}

#[test]
fn the_alerts_fire_when_they_should_and_ask_for_metrics_that_there_are() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !installed("promtool") {
        return eprintln!("skipped: promtool is not installed");
    }
    let output = Command::new("promtool")
        .args(["test", "rules", "tests/alerts.yaml"])
        .current_dir(&folder)
        .output()
        .expect("promtool");
    assert!(output.status.success(), "{output:?}");
    let output = Command::new(WAKEONE)
        .args(["metrics", "--help-all"])
        .output()
        .expect("wakeone");
    let known = String::from_utf8(output.stdout).expect("text");
    let alerts = include_str!("../contrib/prometheus-alerts.yaml");
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = alerts.split(|c| !is_part(c));
    for name in words.filter(|word| word.starts_with("wakeone_")) {
        assert!(known.contains(&format!("{name}{{")), "{name}");
    }
}

fn dashboard() -> Value {
    let text = include_str!("../contrib/grafana-dashboard.json");
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn the_dashboard_is_one() {
    let dashboard = dashboard();
    assert_eq!(dashboard["title"], "Wakeone");
    assert!(dashboard["schemaVersion"].as_u64() >= Some(36));
    let variables = dashboard["templating"]["list"]
        .as_array()
        .expect("variables");
    assert_eq!(variables[0]["type"], "datasource");
    assert_eq!(variables[0]["name"], "datasource");
    let mut ids = BTreeSet::new();
    let mut taken = BTreeMap::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        let title = panel["title"].as_str().expect("title");
        assert!(
            ids.insert(panel["id"].as_u64().expect("id")),
            "the id of {title} is not its own"
        );
        assert!(
            matches!(panel["type"].as_str(), Some("timeseries" | "stat")),
            "{title}"
        );
        assert!(
            panel["description"]
                .as_str()
                .is_some_and(|text| !text.is_empty()),
            "{title}"
        );
        let grid = |name: &str| panel["gridPos"][name].as_u64().expect("a place");
        assert!(
            grid("w") > 0 && grid("h") > 0 && grid("x") + grid("w") <= 24,
            "{title}"
        );
        for x in grid("x")..grid("x") + grid("w") {
            for y in grid("y")..grid("y") + grid("h") {
                assert_eq!(taken.insert((x, y), title), None, "{title} lies on another");
            }
        }
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{title}");
        let mut refs = BTreeSet::new();
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            assert!(
                target["expr"].as_str().is_some_and(|expr| !expr.is_empty()),
                "{title}"
            );
            assert!(
                refs.insert(target["refId"].as_str().expect("refId")),
                "{title}"
            );
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
    }
}

/// A Prometheus that scrapes the metrics.
fn prometheus(folder: &Path) -> Started {
    let config = folder.join("prometheus.yml");
    let text = format!(
        "global: {{ scrape_interval: 500ms }}\nscrape_configs: [ {{ job_name: wakeone, static_configs: [ {{ targets: ['{METRICS}'] }} ] }} ]\n"
    );
    std::fs::write(&config, text).expect("configuration");
    Started::spawn(program(&[
        "prometheus",
        &format!("--config.file={}", config.display()),
        &format!("--storage.tsdb.path={}", folder.join("data").display()),
        "--web.listen-address=127.0.0.1:9090",
    ]))
}

/// Returns the answer of Prometheus to a query; None while it does not answer.
fn queried(expr: &str) -> Option<Value> {
    let query: String = form_urlencoded::Serializer::new(String::new())
        .append_pair("query", expr)
        .finish();
    let request = format!("GET /api/v1/query?{query} HTTP/1.0\r\nHost: a\r\n\r\n");
    let (_, body) = asked("127.0.0.1:9090", request.as_bytes()).ok()?;
    serde_json::from_str(&body).ok()
}

/// A query as Grafana would send it.
fn filled_in(expr: &str) -> String {
    expr.replace("$group", ".*")
        .replace("$__rate_interval", "5s")
}

/// A child that does not outlive the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The exposition as the text format that `promtool check metrics` reads, in which a family has the name of its
/// samples.
fn classic(text: &str) -> String {
    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        {
            kinds.insert(name, kind);
        }
    }
    let line = |line: &str| -> Option<String> {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "UNIT", ..] | ["#", "EOF"] => None,
            ["#", what, name, rest] => {
                let (end, kind) = match kinds[name] {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    other => ("", other),
                };
                let rest = if what == "TYPE" { kind } else { rest };
                Some(format!("# {what} {name}{end} {rest}\n"))
            }
            _ => Some(format!("{line}\n")),
        }
    };
    text.lines().filter_map(line).collect()
}

#[test]
fn a_prometheus_answers_every_query_of_the_dashboard() {
    if !installed("prometheus") || !installed("promtool") {
        eprintln!("skipped: prometheus is not installed");
        return;
    }
    let Some(nginx) = Nginx::start(4) else { return };
    let folder = nginx.folder.path();
    let config = folder.join("agent.toml");
    let text = format!(
        "metrics = '{METRICS}'\nmetrics_tracing = true\n[[target]]\nlisten = ':{PORT}'\nrescue = true\n"
    );
    std::fs::write(&config, text).expect("configuration");
    let mut agent = Ended(nginx.start_agent(&config));
    support::slowly("it is steered", || !nginx.group().is_null());
    let _prometheus = prometheus(folder);
    let clients = Clients::start(address(), "/", 4);

    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool");
    let scrape = scraped();
    promtool
        .stdin
        .take()
        .expect("stdin")
        .write_all(classic(&scrape).as_bytes())
        .expect("written");
    let output = promtool.wait_with_output().expect("promtool");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.is_empty(),
        "{said}\n{scrape}"
    );

    support::slowly("it is scraped", || {
        queried("up{job=\"wakeone\"}")
            .is_some_and(|answer| answer["data"]["result"][0]["value"][1] == "1")
    });
    let dashboard = dashboard();
    let mut empty = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let expr = filled_in(target["expr"].as_str().expect("expr"));
            let start = Instant::now();
            loop {
                let answer = queried(&expr).expect("an answer");
                assert_eq!(
                    answer["status"], "success",
                    "{}: {expr}: {answer}",
                    panel["title"]
                );
                let results = answer["data"]["result"]
                    .as_array()
                    .expect("results")
                    .clone();
                let numbers = results.iter().filter_map(|one| one["value"][1].as_str());
                if numbers.clone().any(|number| number != "NaN") {
                    break;
                }
                // Rates take a few scrapes.
                if start.elapsed() > Duration::from_secs(20) {
                    empty.push(expr);
                    break;
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
    // No answer may be empty: counters of events that did not happen are 0, and tracing is on.
    assert!(empty.is_empty(), "no data: {empty:#?}");
    let variable = filled_in("count by (group) (wakeone_group_steered)");
    let answer = queried(&variable).expect("an answer");
    assert_eq!(
        answer["data"]["result"][0]["metric"]["group"],
        format!("at-127-0-0-1-{PORT}")
    );
    // The table of all machines, by what this server knows.
    let mut top = Command::new(WAKEONE);
    top.args(["top", "--once", "--interval", "1s"]);
    let output = top
        .args(["--from", "prometheus:http://127.0.0.1:9090"])
        .output()
        .expect("top");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let row = told.lines().nth(1).unwrap_or_default();
    let begins = format!("{METRICS}  at-127-0-0-1-{PORT}");
    assert!(
        row.starts_with(&begins) && row.contains("least-connections"),
        "{told}"
    );
    let rate =
        queried("sum(rate(wakeone_slot_selected_connections_total[5s]))").expect("an answer");
    let rate: f64 = rate["data"]["result"][0]["value"][1]
        .as_str()
        .and_then(|n| n.parse().ok())
        .expect("a rate");
    assert!(rate > 1.0, "{rate} connections a second");
    let (answers, failures) = clients.stop();
    assert!(failures.is_empty(), "{answers}: {failures:?}");
    signal(agent.0.id(), Signal::TERM);
    assert_eq!(agent.0.wait().expect("wait").code(), Some(0));
    assert!(!nginx.runtime().exists(), "something is left of the group");
}
