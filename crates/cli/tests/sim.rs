//! `wakeone sim` as a user types it.

use assert_cmd::Command;

const STUCK: [&str; 6] = [
    "sim",
    "--rate",
    "1000",
    "--service",
    "99:1.15ms,1:100ms",
    "--json",
];

fn wakeone(arguments: &[&str]) -> (bool, String, String) {
    ran("wakeone", arguments)
}

fn ran(program: &str, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::cargo_bin(program).expect("built");
    let output = command.args(arguments).output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

fn variant(json: &str, name: &str, field: &str) -> f64 {
    let all: serde_json::Value = serde_json::from_str(json).expect("JSON");
    let variants = all["variants"].as_array().expect("variants");
    let found = variants.iter().find(|one| one["name"] == name);
    let metric = &found.expect(name)["metrics"][field];
    metric["median"].as_f64().expect(field)
}

#[test]
fn rescue_brings_a_stuck_workers_queue_near_one_queue() {
    let (ok, out, err) = wakeone(&STUCK);
    assert!(ok, "{err}");
    let mean = |name| variant(&out, name, "latency_ms_mean");
    let shared = mean("shared-accept");
    // Measured: 3.71 ms with one queue, 29.3 ms with the hash.
    assert!((3.4..4.2).contains(&shared), "{shared}");
    assert!((25.0..35.0).contains(&mean("hash")), "{out}");
    assert!(mean("least-connections+rescue") < 1.15 * shared);
    assert!(variant(&out, "least-connections+rescue", "moved") > 0.0);
    assert_eq!(variant(&out, "least-connections", "moved"), 0.0);
    let variants = |out: &str| {
        serde_json::from_str::<serde_json::Value>(out).expect("JSON")["variants"].clone()
    };
    assert_eq!(
        variants(&wakeone(&STUCK).1),
        variants(&out),
        "the same seed, the same result"
    );
}

#[test]
fn the_table_has_a_row_a_way_and_fits_80_columns() {
    let (ok, out, err) = wakeone(&STUCK[..5]);
    assert!(ok, "{err}");
    for row in ["shared-accept", "hash+rescue", "least-connections "] {
        assert!(
            out.lines().any(|line| line.starts_with(row)),
            "{row}: {out}"
        );
    }
    assert!(out.lines().all(|line| line.len() <= 100), "{out}");
    let table = out.lines().filter(|line| line.contains("0.0%"));
    assert!(table.clone().count() >= 4);
    assert!(table.into_iter().all(|line| line.len() <= 80), "{out}");
}

#[test]
fn clients_of_a_closed_loop_get_what_the_workers_can_do() {
    let closed = ["sim", "--clients", "20", "--service", "exp:1ms"];
    let (ok, out, err) = wakeone(&closed);
    assert!(ok, "{err}");
    assert!(
        out.starts_with("Simulated: 4 workers, 20 clients."),
        "{out}"
    );
    assert!(out.contains("answers/s"), "{out}");
    let (ok, out, err) = wakeone(&[&closed[..], &["--json"]].concat());
    assert!(ok, "{err}");
    // Little's law: four workers end 4,000 requests a second, and twenty clients wait 5 ms each.
    let of = |field| variant(&out, "shared-accept", field);
    assert!(
        (3_900.0..4_100.0).contains(&of("throughput_per_s")),
        "{out}"
    );
    assert!((4.9..5.1).contains(&of("latency_ms_mean")), "{out}");
    let (ok, _, err) = wakeone(&[&closed[..], &["--rate", "1000"]].concat());
    assert!(!ok && err.contains("--clients"), "{err}");
}

#[test]
fn one_queue_spreads_kept_connections_if_it_is_steered() {
    let kept = [
        "sim",
        "--rate",
        "2400",
        "--service",
        "1ms",
        "--keep-alive",
        "64",
        "--policy",
        "hash",
        "--json",
        "--shared",
    ];
    let ways = "exclusive,steered-exclusive,wake-all,steered-wake-all";
    let (ok, out, err) = wakeone(&[&kept[..], &[ways]].concat());
    assert!(ok, "{err}");
    let most = |name| variant(&out, name, "share_max_over_mean");
    assert_eq!(most("shared-epoll-exclusive"), 4.0);
    for name in ["steered-exclusive", "steered-wake-all"] {
        assert!(most(name) < 1.2, "{name}: {}", most(name));
    }
    // Of connections that are opened before the first look the first worker gets all.
    let (_, out, _) = wakeone(&[&kept[..], &[ways, "--apart", "0ms"]].concat());
    assert_eq!(
        variant(&out, "steered-exclusive", "share_max_over_mean"),
        4.0
    );
}

#[test]
fn how_many_workers_a_wish_takes_is_found() {
    let wish = [
        "sim",
        "--rate",
        "3000",
        "--service",
        "exp:1ms",
        "--find",
        "workers",
        "--p99",
        "5ms",
        "-n",
        "50000",
        "--json",
    ];
    let (ok, out, err) = wakeone(&wish);
    assert!(ok, "{err}");
    let found: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let workers = |name: &str| found["found"][name]["workers"].as_f64().expect(name);
    // Three workers are busy all the time; one queue needs the fewest, a blind hash the most.
    assert!(workers("shared-accept") > 3.0);
    assert!(workers("least-connections") >= workers("shared-accept"));
    assert!(workers("hash") > workers("least-connections"));
}

#[test]
fn where_nothing_fits_the_reason_is_said() {
    let wish = |more: &[&str]| {
        let few = [
            "sim", "-n", "5000", "--shared", "accept", "--policy", "hash",
        ];
        let (ok, out, err) = wakeone(&[&few[..], more].concat());
        assert!(ok, "{err}");
        out
    };
    // No request is faster than the time that it takes by itself.
    for what in ["workers", "rate"] {
        let impossible = [
            "--rate",
            "1000",
            "--service",
            "2ms",
            "--p99",
            "1ms",
            "--find",
            what,
        ];
        let told = wish(&impossible);
        assert!(
            told.contains("None fits: the slowest one percent take 2.00 ms"),
            "{told}"
        );
        let json: serde_json::Value =
            serde_json::from_str(&wish(&[&impossible[..], &["--json"]].concat())).expect("JSON");
        let why = json["found"]["hash"]["why"].as_str().expect("a reason");
        assert!(why.contains("2.00 ms where nothing waits"), "{why}");
    }
    // A blind choice keeps some waiting however many workers there are, and one queue does not.
    let told = wish(&[
        "--rate",
        "300000",
        "--service",
        "2ms",
        "--p99",
        "2.1ms",
        "--find",
        "workers",
    ]);
    let row = |name: &str| {
        told.lines()
            .find(|line| line.starts_with(name))
            .expect("a row")
    };
    assert!(!row("shared-accept").contains("none"), "{told}");
    assert!(row("hash ").contains("none  1024 workers at "), "{told}");
}

#[test]
fn what_cannot_be_simulated_is_said_in_a_sentence() {
    for (arguments, said) in [
        (
            &["sim", "--rate", "9000", "--service", "1ms"][..],
            "queues would grow without end",
        ),
        (
            &[
                "sim",
                "--rate",
                "900",
                "--service",
                "1ms",
                "--look-every",
                "0ms",
            ],
            "until the next look",
        ),
        (
            &[
                "sim",
                "--rate",
                "900",
                "--service",
                "1ms",
                "--shared",
                "epoll",
            ],
            "steered-wake-all",
        ),
        (
            &["sim", "--rate", "1", "--service", "1"],
            "is no service time",
        ),
        (
            &["sim", "--rate", "0", "--service", "1ms"],
            "give a rate above 0",
        ),
        (
            &["sim", "--rate", "1", "--service", "1ms", "--policy", "cpu"],
            "cannot be simulated",
        ),
        (
            &["sim", "--rate", "1", "--service", "1ms", "-w", "3000"],
            "1 to 1024",
        ),
        (&["sim", "--service", "1ms"], "a rate is missing"),
        (
            &["sim", "--rate", "1", "--service", "file:/nonexistent"],
            "reading /nonexistent failed",
        ),
        (
            &["sim", "--rate", "1", "--service", "1ms", "--window", "5"],
            "give 4, 8, 16 or 32",
        ),
        (
            &["sim", "--rate", "1", "--service", "1ms", "--pause", "1s"],
            "how often and for how long",
        ),
        (
            &[
                "sim",
                "--rate",
                "1",
                "--service",
                "1ms",
                "--stop",
                "9@1s:1s",
            ],
            "worker 9 cannot be stopped",
        ),
        (
            &["sim", "--rate", "1", "--service", "1ms", "--weights", "1,2"],
            "2 weights for 4 workers",
        ),
        (
            &[
                "sim",
                "--rate",
                "9",
                "--service",
                "1s",
                "--sweep",
                "workers=1..2",
            ],
            "none of these can serve",
        ),
    ] {
        let (ok, _, err) = wakeone(arguments);
        assert!(!ok && err.contains(said), "{arguments:?}: {err}");
        assert!(err.lines().count() <= 3, "{err}");
    }
}

#[test]
fn what_goes_wrong_shows_in_the_table_and_in_the_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let file = path.to_str().expect("text");
    let (ok, out, err) = wakeone(&[
        "sim",
        "--rate",
        "1000",
        "--service",
        "exp:1ms",
        "-n",
        "20000",
        "--policy",
        "hash",
        "--backlog",
        "16",
        "--stop",
        "0@2s:3s",
        "--crash",
        "4s:100ms",
        "--pause",
        "1s:20ms",
        "--trace",
        file,
    ]);
    assert!(ok, "{err}");
    assert!(out.contains("SYNs dropped"), "{out}");
    let row = |name: &str| {
        let all = out.lines().rev().find(|line| line.starts_with(name));
        let fields = all.expect(name).split_whitespace().skip(1);
        fields
            .map(|n| n.parse::<u64>().expect("a count"))
            .collect::<Vec<_>>()
    };
    // Dropped, given up, lost: for three seconds, a fourth of the requests finds a full queue.
    let (hash, rescued) = (row("hash "), row("hash+rescue "));
    assert!(hash[0] > 500 && hash[2] > 0, "{out}");
    assert!(rescued[0] < hash[0] / 2, "{out}");
    let text = std::fs::read_to_string(&path).expect("written");
    let trace: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    // Five ways, with some thousand requests a second each.
    assert!(
        events
            .iter()
            .filter(|event| event["name"] == "request")
            .count()
            > 2_000
    );
    assert_eq!(
        events
            .iter()
            .filter(|event| event["name"] == "process_name")
            .count(),
        5
    );
}

#[test]
fn a_sweep_is_a_result_that_the_report_draws() {
    let folder = tempfile::tempdir().expect("a folder");
    let (result, page) = (
        folder.path().join("sweep.json"),
        folder.path().join("page.html"),
    );
    let sweep = [
        "sim",
        "--rate",
        "3000",
        "--service",
        "exp:1ms",
        "-n",
        "20000",
        "--policy",
        "least-connections",
        "--sweep",
        "workers=2..6",
    ];
    let (ok, out, err) = wakeone(&sweep);
    assert!(ok, "{err}");
    // Two and three workers cannot serve this rate.
    let of = |point: &str| {
        out.lines()
            .find(|line| line.starts_with(point))
            .expect("a row")
            .to_owned()
    };
    assert!(
        of("workers-3").contains(" -") && !of("workers-4").contains(" -"),
        "{out}"
    );
    let json: Vec<&str> = sweep.iter().copied().chain(["--json"]).collect();
    let (ok, out, err) = wakeone(&json);
    assert!(ok, "{err}");
    let p99 = |workers| {
        variant(
            &out,
            &format!("workers-{workers}/shared-accept"),
            "latency_ms_p99",
        )
    };
    assert!(p99(4) > p99(5) && p99(5) > p99(6), "{out}");
    let schema = include_str!("../../../docs/schema/lab-result.schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).expect("a schema");
    let value: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    jsonschema::validate(&schema, &value).expect("a result of the lab");
    std::fs::write(&result, out).expect("written");
    let text = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let (ok, _, err) = ran(
        "wakeone-lab",
        &["report", &text(&result), "-o", &text(&page)],
    );
    assert!(ok, "{err}");
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(
        page.contains("<svg") && page.contains("The slowest one percent"),
        "no chart"
    );
}

#[test]
fn what_was_measured_is_simulated() {
    let folder = tempfile::tempdir().expect("a folder");
    let (service, arrivals) = (
        folder.path().join("service"),
        folder.path().join("arrivals"),
    );
    std::fs::write(&service, "1ms\n1ms\n4ms\n").expect("written");
    std::fs::write(&arrivals, "0\n0.001\n0.002\n0.010\n").expect("written");
    let file = |path: &std::path::Path| format!("file:{}", path.display());
    let (ok, out, err) = wakeone(&[
        "sim",
        "--json",
        "-n",
        "20000",
        "--policy",
        "hash",
        "--service",
        &file(&service),
        "--arrivals",
        &file(&arrivals),
    ]);
    assert!(ok, "{err}");
    let value: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let parameter = |name: &str| value["parameters"][name].as_f64().expect(name);
    assert!((parameter("service_mean_ms") - 2.0).abs() < 1e-9);
    // Four gaps in 10 ms, and the mean gap of 3.3 ms after the last.
    assert!((parameter("rate_per_s") - 300.0).abs() < 1e-6, "{out}");
    assert!(variant(&out, "shared-accept", "latency_ms_mean") >= 2.0 - 0.1);
}
