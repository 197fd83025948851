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
    let mut command = Command::cargo_bin("wakeone").expect("built");
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
    found.expect(name)[field].as_f64().expect(field)
}

#[test]
fn rescue_brings_a_stuck_workers_queue_near_one_queue() {
    let (ok, out, err) = wakeone(&STUCK);
    assert!(ok, "{err}");
    let mean = |name| variant(&out, name, "latency_ms_mean");
    let shared = mean("shared-accept");
    // Measured: 3.71 ms of one queue, 29.3 of the hash.
    assert!((3.4..4.2).contains(&shared), "{shared}");
    assert!((25.0..35.0).contains(&mean("hash")), "{out}");
    assert!(mean("least-connections+rescue") < 1.15 * shared);
    assert!(variant(&out, "least-connections+rescue", "moved") > 0.0);
    assert_eq!(variant(&out, "least-connections", "moved"), 0.0);
    assert_eq!(wakeone(&STUCK).1, out, "the same seed, the same result");
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
    // Three are busy all the time; one queue needs the fewest, a blind hash the most.
    assert!(workers("shared-accept") > 3.0);
    assert!(workers("least-connections") >= workers("shared-accept"));
    assert!(workers("hash") > workers("least-connections"));
}

#[test]
fn what_cannot_be_simulated_is_said_in_a_sentence() {
    for (arguments, said) in [
        (
            &["sim", "--rate", "9000", "--service", "1ms"][..],
            "queues would grow without end",
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
            &["sim", "--rate", "1", "--service", "1ms", "-w", "300"],
            "1 to 256",
        ),
    ] {
        let (ok, _, err) = wakeone(arguments);
        assert!(!ok && err.contains(said), "{arguments:?}: {err}");
        assert!(err.lines().count() <= 3, "{err}");
    }
}
