//! One queue whose workers wait in epoll, as it is and steered: nothing is lost, and nobody is idle for long while
//! connections wait.

use std::time::Duration;

use proptest::prelude::*;
use wakeone_model::arming::ArmingConfig;
use wakeone_sim::{
    Arrivals, Dispatch, Faults, Kept, Kind, Load, Next, Repeated, Service, Setup, Span, Wake, run,
    run_traced,
};

fn armed(exclusive: bool, config: ArmingConfig) -> Dispatch {
    Dispatch::Armed { exclusive, config }
}

fn load(arrivals: Arrivals, service: &str, requests: u64, seed: u64) -> Load {
    Load {
        arrivals,
        service: service.parse().expect("service"),
        requests,
        kept: None,
        seed,
    }
}

/// The busiest worker's share over the mean, where so many connections are kept that are opened so far apart: the mean of
/// some runs. 600 requests/s of 1 ms for each worker.
fn share(workers: usize, connections: usize, apart_s: f64, way: Dispatch) -> f64 {
    let per_s = 600.0 * workers as f64;
    let of = |seed| {
        let load = Load {
            kept: Some(Kept {
                connections,
                next: Next::Any,
                apart_s,
            }),
            ..load(Arrivals::Poisson { per_s }, "1ms", 50_000, seed)
        };
        run(&Setup::new(workers, way), &load).expect("it can be simulated")
    };
    let all = (1..=8).map(|seed| of(seed).max_over_mean());
    all.sum::<f64>() / 8.0
}

#[test]
fn kept_connections_are_spread_evenly_by_the_steerer() {
    let (first, any) = (Wake::FirstRegistered, Wake::All);
    let as_it_is = |wake| share(4, 64, 0.004, Dispatch::Shared(wake));
    assert_eq!((as_it_is(first), as_it_is(any) > 1.15), (4.0, true));
    for exclusive in [false, true] {
        let way = armed(exclusive, ArmingConfig::default());
        let few = share(4, 64, 0.004, way);
        assert!(few < 1.05, "{few}");
        let many = share(64, 1_024, 0.001, way);
        assert!(many < 1.2, "{many}");
    }
    // All at once, before anybody looks.
    let way = armed(true, ArmingConfig::default());
    assert_eq!(share(4, 64, 0.0, way), 4.0);
}

#[test]
fn a_steerer_that_never_disarms_is_none() {
    let config = ArmingConfig {
        least_armed: usize::MAX,
        ..ArmingConfig::default()
    };
    let load = load(Arrivals::Poisson { per_s: 3e3 }, "exp:1ms", 50_000, 4);
    let found = |way| run(&Setup::new(4, way), &load).expect("it can be simulated");
    let (steered, as_it_is) = (
        found(armed(false, config)),
        found(Dispatch::Shared(Wake::All)),
    );
    assert_eq!(steered.counts.changes, 0);
    assert_eq!(steered.latency, as_it_is.latency);
    assert_eq!(steered.served, as_it_is.served);
}

#[test]
fn a_disarmed_worker_that_has_finished_does_not_look_at_the_queue() {
    // Two requests each. The first worker has two before anybody looks, and the other weighs more.
    let config = ArmingConfig {
        slack: 0,
        least_armed: 1,
        armed_of: usize::MAX,
        looks: 1,
        passing: 0,
        waiting_looks: u32::MAX,
        ..ArmingConfig::default()
    };
    let setup = Setup {
        kind: Kind::Threads(2),
        weights: vec![1, 4],
        ..Setup::new(2, armed(true, config))
    };
    // The first one comes after the first distance.
    let times = vec![0.0, 0.001, 0.002, 0.007, 0.008, 0.013];
    let arrivals = Arrivals::recorded(times).expect("recorded");
    let load = Load {
        service: Service::Recorded(vec![1.0, 0.02, 1.0, 1.0, 0.001].into()),
        ..load(arrivals, "1ms", 5, 1)
    };
    let found = run(&setup, &load).expect("it can be simulated");
    // The second request ends after 22 ms, but the last one waits for a second, as the other three take.
    assert_eq!(found.latency.len(), 5);
    assert!(found.quantile_s(0.3) > 0.9, "{:?}", found.latency);
}

/// When a worker does not work: the times between its spans.
fn idle_times(spans: &[Span], worker: usize, until: f64) -> Vec<(f64, f64)> {
    let mut own: Vec<&Span> = spans.iter().filter(|span| span.worker == worker).collect();
    own.sort_by(|one, other| one.began_s.total_cmp(&other.began_s));
    let mut idle = Vec::new();
    let mut free = 0.0_f64;
    for span in own {
        idle.push((free, span.began_s));
        free = free.max(span.ended_s);
    }
    idle.push((free, until));
    idle
}

/// When something waits in the queue, as times that do not touch.
fn filled_times(spans: &[Span]) -> Vec<(f64, f64)> {
    let mut all: Vec<(f64, f64)> = spans
        .iter()
        .map(|span| (span.arrived_s, span.began_s))
        .filter(|(from, to)| to > from)
        .collect();
    all.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut merged: Vec<(f64, f64)> = Vec::new();
    for (from, to) in all {
        match merged.last_mut() {
            // One leaves the queue at the moment when another comes: it is not seen empty between them.
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => merged.push((from, to)),
        }
    }
    merged
}

/// For how long a worker was idle at a stretch while something waited, at most.
fn longest_idle_s(spans: &[Span], workers: usize) -> f64 {
    let until = spans
        .iter()
        .fold(0.0_f64, |last, span| last.max(span.ended_s));
    let filled = filled_times(spans);
    let overlap =
        |idle: &(f64, f64), filled: &(f64, f64)| idle.1.min(filled.1) - idle.0.max(filled.0);
    (0..workers)
        .flat_map(|worker| idle_times(spans, worker, until))
        .flat_map(|idle| filled.iter().map(move |filled| overlap(&idle, filled)))
        .fold(0.0, f64::max)
}

fn rules() -> impl Strategy<Value = ArmingConfig> {
    (
        0..3_u64,
        1..4_usize,
        1..6_usize,
        0..3_u64,
        1..4_u32,
        0..5_u32,
        1..20_u64,
    )
        .prop_map(
            |(slack, least_armed, looks, passing, waiting_looks, calm_looks, ms)| ArmingConfig {
                slack,
                least_armed,
                looks,
                passing,
                waiting_looks,
                calm_looks,
                look_every: Duration::from_millis(ms),
                ..ArmingConfig::default()
            },
        )
}

const SERVICES: [&str; 3] = ["exp:2ms", "95:1ms,5:60ms", "lognormal:2ms:1.5"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// All requests are given, so that each of them is measured and traced.
    #[test]
    fn each_connection_is_served_once_and_nobody_is_idle_for_long_while_one_waits(
        exclusive: bool,
        workers in 1_usize..12,
        config in rules(),
        busy in 0.3_f64..0.97,
        service in 0..SERVICES.len(),
        seed: u64,
    ) {
        const REQUESTS: u64 = 1_500;
        let setup = Setup::new(workers, armed(exclusive, config));
        let mean_s = SERVICES[service].parse::<Service>().expect("service").mean_s();
        let arrivals = Arrivals::Poisson { per_s: busy * setup.capacity() / mean_s };
        let load = load(arrivals, SERVICES[service], REQUESTS, seed);
        let (found, trace) = run_traced(&setup, &load, 1e6).expect("it can be simulated");
        prop_assert_eq!(found.served.iter().sum::<u64>(), REQUESTS);
        prop_assert_eq!(found.latency.len(), REQUESTS - REQUESTS / 10);
        prop_assert_eq!(trace.spans.len() as u64, found.latency.len());
        prop_assert_eq!(found.counts.lost + found.counts.given_up, 0);
        // The trace does not have what happened before it began.
        let spans: Vec<Span> = trace.spans.into_iter().map(|span| Span {
            arrived_s: span.arrived_s.max(trace.from_s),
            began_s: span.began_s.max(trace.from_s),
            ..span
        }).collect();
        let pause = |look: Duration| look.as_secs_f64();
        let hurried = pause(config.hurried.min(config.look_every));
        // Looks that cost too much are further apart. Then the queue is looked at between them.
        let bound = 2.0 * pause(config.look_every) + f64::from(config.waiting_looks - 1) * hurried;
        let longest = longest_idle_s(&spans, workers);
        prop_assert!(longest <= bound + 1e-9, "idle for {} ms, {} ms allowed", longest * 1e3, bound * 1e3);
    }

    #[test]
    fn whatever_goes_wrong_every_request_ends_and_the_seed_decides_how(
        exclusive: bool,
        config in rules(),
        event_loop: bool,
        threads in 1_usize..4,
        crashes: bool,
        keeps: bool,
        seed: u64,
    ) {
        const REQUESTS: u64 = 3_000;
        let repeated = |every_s, lasts_s| Some(Repeated { every_s, lasts_s });
        let setup = Setup {
            kind: if event_loop { Kind::EventLoop } else { Kind::Threads(threads) },
            backlog: Some(64),
            weights: vec![1, 2, 1, 3],
            faults: Faults {
                pauses: repeated(0.5, 0.05),
                crashes: repeated(1.0, 0.2).filter(|_| crashes),
                stops: Vec::new(),
            },
            ..Setup::new(4, armed(exclusive, config))
        };
        let load = Load {
            kept: keeps.then_some(Kept { connections: 32, next: Next::Any, apart_s: 0.004 }),
            ..load(Arrivals::Poisson { per_s: 2e3 }, "exp:1ms", REQUESTS, seed)
        };
        let found = run(&setup, &load).expect("it can be simulated");
        let served: u64 = found.served.iter().sum();
        let counts = found.counts;
        // A request that a crash took had been accepted.
        prop_assert!(served + counts.given_up <= REQUESTS);
        prop_assert!(served + counts.given_up + counts.lost >= REQUESTS, "{counts:?}");
        if !crashes {
            prop_assert_eq!((served, counts.lost), (REQUESTS - counts.given_up, 0));
        }
        let again = run(&setup, &load).expect("it can be simulated");
        prop_assert_eq!((again.counts, again.served), (counts, found.served));
        prop_assert_eq!(again.latency, found.latency);
    }
}
