//! Intervals add up to the whole, profiles run their stages, and the log is one that HdrHistogram reads.

mod common;

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use common::{Server, answer, check, plan, run};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
use wakeone_load::{
    Arrivals, ErrorKind, Event, Interval, Outcome, Plan, Spacing, Stage, Stop, Summary,
};

const EVERY: Duration = Duration::from_millis(100);

fn observed(plan: &Plan) -> (Outcome, Vec<Interval>) {
    let mut intervals = Vec::new();
    let outcome = wakeone_load::observe(plan, &AtomicBool::new(false), Some(EVERY), &mut |event| {
        if let Event::Interval(interval) = event {
            intervals.push(interval.clone());
        }
    });
    (outcome.unwrap(), intervals)
}

fn staged(stages: Vec<Stage>, at_most: Option<usize>) -> Arrivals {
    Arrivals::Profile {
        stages,
        spacing: Spacing::Constant,
        at_most,
    }
}

const ENDLESS: Stop = Stop {
    requests: None,
    duration: None,
};

#[test]
fn intervals_add_up_to_the_outcome() {
    let server = Server::start(|request| match request.number % 10 {
        0 => false, // closes without an answer
        n => answer(request, &(n % 2).to_string()),
    });
    for threads in [1, 2] {
        let arrivals = staged(vec![Stage::step(1000.0, Duration::from_millis(550))], None);
        let (outcome, intervals) = observed(&Plan {
            arrivals,
            threads,
            stop: ENDLESS,
            ..plan(server.address)
        });
        check(&outcome);
        assert_eq!(outcome.planned, 550);
        assert_eq!(outcome.errors[&ErrorKind::EofEarly], 55);
        let sum = |of: fn(&Interval) -> u64| intervals.iter().map(of).sum::<u64>();
        assert_eq!(sum(|i| i.planned), outcome.planned);
        assert_eq!(sum(|i| i.completed), outcome.completed);
        assert_eq!(sum(|i| i.errors.values().sum()), 55);
        assert_eq!(sum(|i| i.failed.len()), 55);
        let by_stage = &outcome.by_stage[0];
        assert_eq!((by_stage.errors, by_stage.failed.len()), (55, 55));
        assert_eq!(sum(|i| i.by_worker.values().sum()), outcome.completed);
        let mut all = outcome.latency.clone();
        all.reset();
        intervals.iter().for_each(|i| all.add(&i.latency).unwrap());
        assert_eq!(
            all, outcome.latency,
            "nothing is lost or moved between histograms"
        );
        assert!(intervals.len() >= 6);
        let starts: Vec<_> = intervals.iter().map(|i| i.start).collect();
        assert!(
            starts.windows(2).all(|w| w[1] >= w[0] + EVERY),
            "in order and apart: {starts:?}"
        );
    }
}

#[test]
fn each_stage_is_sent_and_kept_apart() {
    let server = Server::start(|request| answer(request, "0"));
    let fifth = Duration::from_millis(200);
    let ramp = Stage {
        from_per_s: 500.0,
        to_per_s: 1500.0,
        length: fifth,
    };
    let arrivals = staged(
        vec![Stage::step(500.0, fifth), ramp, Stage::step(1500.0, fifth)],
        None,
    );
    let outcome = run(&Plan {
        arrivals,
        stop: ENDLESS,
        ..plan(server.address)
    });
    let planned: Vec<_> = outcome.by_stage.iter().map(|s| s.planned).collect();
    assert_eq!(planned, [100, 200, 300]);
    let ended = outcome
        .by_stage
        .iter()
        .map(|s| s.completed + s.errors)
        .sum::<u64>();
    assert_eq!(ended, outcome.planned);
    assert_eq!(outcome.completed, 600, "{:?}", outcome.errors);
}

/// One client, a rate of 1,000/s and a server that stalls once for 400 ms: the client sends its next requests late.
/// Their own latency (service) is short; the latency from their planned time shows the stall.
#[test]
fn a_limited_open_loop_shows_both_truths() {
    let stall = Duration::from_millis(400);
    let server = Server::start(move |request| {
        if request.number == 100 {
            std::thread::sleep(stall);
        }
        request
            .stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            .is_ok()
    });
    let arrivals = staged(vec![Stage::step(1000.0, Duration::MAX)], Some(1));
    let outcome = run(&Plan {
        arrivals,
        keep_alive: true,
        ..plan(server.address)
    });
    assert_eq!(
        (outcome.completed, outcome.connections),
        (1000, 1),
        "{:?}",
        outcome.errors
    );
    let half = stall.as_nanos() as u64 / 2;
    assert!(
        outcome.latency.value_at_quantile(0.99) > half,
        "corrected: the 99th percentile sees the stall"
    );
    assert!(
        outcome.service.value_at_quantile(0.99) < half,
        "uncorrected: it does not"
    );
    assert!(outcome.service.max() > half, "one request waited for it");
}

#[test]
fn who_gets_no_client_in_time_is_counted() {
    let server = Server::start(|request| {
        std::thread::sleep(Duration::from_millis(100));
        answer(request, "0")
    });
    let arrivals = staged(
        vec![Stage::step(200.0, Duration::from_millis(500))],
        Some(2),
    );
    let timeout = Duration::from_millis(300);
    let outcome = run(&Plan {
        arrivals,
        stop: ENDLESS,
        timeout,
        ..plan(server.address)
    });
    assert_eq!(outcome.planned, 100);
    // Two clients, 100 ms each: 20 a second of the 200 asked for.
    assert!(
        outcome.errors[&ErrorKind::NotSent] > 60,
        "{:?}",
        outcome.errors
    );
    assert!(outcome.completed >= 4, "{:?}", outcome.errors);
}

#[test]
fn the_log_is_read_back_whole() {
    let server = Server::start(|request| answer(request, "0"));
    let (outcome, intervals) = observed(&Plan {
        arrivals: Arrivals::Open {
            rate_per_s: 2000.0,
            spacing: Spacing::Poisson,
        },
        ..plan(server.address)
    });
    let mut log = Vec::new();
    wakeone_load::write_hdr_log(&mut log, SystemTime::now(), &intervals).unwrap();
    let mut latency = outcome.latency.clone();
    let mut service = outcome.service.clone();
    latency.reset();
    service.reset();
    let mut lines = 0;
    for entry in IntervalLogIterator::new(&log).map(Result::unwrap) {
        let LogEntry::Interval(line) = entry else {
            continue;
        };
        let bytes = BASE64_STANDARD.decode(line.encoded_histogram()).unwrap();
        let histogram: Histogram<u64> = Deserializer::new()
            .deserialize(&mut bytes.as_slice())
            .unwrap();
        match line.tag() {
            None => latency.add(&histogram).unwrap(),
            Some(tag) => {
                assert_eq!(tag.as_str(), "service");
                service.add(&histogram).unwrap();
            }
        }
        lines += 1;
    }
    assert_eq!(lines, 2 * intervals.len());
    assert_eq!((latency, service), (outcome.latency, outcome.service));
}

#[test]
fn json_is_read_back_whole() {
    let server = Server::start(|request| answer(request, "0"));
    let plan = plan(server.address);
    let (outcome, intervals) = observed(&plan);
    let summary = Summary::new(&plan, &outcome, &intervals);
    let text = serde_json::to_string(&summary).unwrap();
    assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), summary);
    let bytes = BASE64_STANDARD.decode(&summary.latency_ns_hdr).unwrap();
    let latency: Histogram<u64> = Deserializer::new()
        .deserialize(&mut bytes.as_slice())
        .unwrap();
    assert_eq!(latency, outcome.latency);
    assert!(summary.to_string().contains("1000 of 1000 requests"));
}
