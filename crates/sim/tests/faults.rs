//! Full queues, pauses, stops and crashes, with the results that are known without a machine.

use wakeone_bpf::contract::number::{HASH, LEAST_CONNECTIONS};
use wakeone_sim::{
    Arrivals, Dispatch, Faults, Kept, Kind, Load, Next, Outcome, Repeated, Service, Setup, Stop,
    Variant, Wake, run, run_traced,
};

fn steered(policy: u32, stuck_after_s: Option<f64>) -> Dispatch {
    Dispatch::Steered {
        policy,
        variant: Variant::Kernel,
        stuck_after_s,
    }
}

const WAYS: [Dispatch; 4] = [
    Dispatch::Shared(Wake::LongestAsleep),
    Dispatch::Shared(Wake::FirstRegistered),
    Dispatch::Steered {
        policy: HASH,
        variant: Variant::Kernel,
        stuck_after_s: None,
    },
    Dispatch::Steered {
        policy: LEAST_CONNECTIONS,
        variant: Variant::Kernel,
        stuck_after_s: Some(0.005),
    },
];

fn load(arrivals: Arrivals, service: Service, requests: u64) -> Load {
    Load {
        arrivals,
        service,
        requests,
        kept: None,
        seed: 3,
    }
}

fn poisson(per_s: f64, requests: u64) -> Load {
    load(
        Arrivals::Poisson { per_s },
        Service::Exponential(1e-3),
        requests,
    )
}

fn simulate(setup: &Setup, load: &Load) -> Outcome {
    run(setup, load).expect("it can be simulated")
}

/// Every request is served, lost or given up: none is counted twice, none is forgotten.
#[track_caller]
fn adds_up(found: &Outcome, requests: u64) {
    let counts = found.counts;
    let served: u64 = found.served.iter().sum();
    // A request that a crash took from a worker had been accepted by it.
    assert!(served + counts.given_up <= requests, "{counts:?}");
    assert!(
        served + counts.given_up + counts.lost >= requests,
        "{counts:?}"
    );
}

#[test]
fn a_full_queue_makes_clients_wait_for_their_next_syn() {
    // Two at once, one is begun, a queue of a backlog of 0 holds one: a third at the same time is dropped.
    let arrivals = Arrivals::recorded(vec![0.0, 0.001, 0.002, 0.003, 10.0]).expect("recorded");
    let setup = Setup {
        backlog: Some(0),
        ..Setup::new(1, steered(LEAST_CONNECTIONS, None))
    };
    let load = load(arrivals, Service::Constant(0.5), 3);
    let found = simulate(&setup, &load);
    assert_eq!(found.counts.dropped_syns, 1);
    // The third is served when its second SYN comes, a second later: the other two are done by then.
    assert!((found.quantile_s(1.0) - 1.5).abs() < 0.01, "{found:?}");
    adds_up(&found, 3);
}

#[test]
fn who_is_stopped_for_long_has_clients_give_up() {
    let faults = Faults {
        stops: vec![Stop {
            worker: 0,
            at_s: 0.0,
            lasts_s: 500.0,
            busy: false,
        }],
        ..Faults::default()
    };
    for way in WAYS {
        let setup = Setup {
            backlog: Some(9),
            faults: faults.clone(),
            ..Setup::new(1, way)
        };
        let found = simulate(&setup, &poisson(1.0, 300));
        assert!(found.counts.given_up > 100, "{:?}", found.counts);
        adds_up(&found, 300);
    }
}

#[test]
fn who_is_busy_with_something_else_counts_as_busy() {
    let faults = Faults {
        stops: vec![Stop {
            worker: 0,
            at_s: 0.0,
            lasts_s: 500.0,
            busy: true,
        }],
        ..Faults::default()
    };
    let setup = Setup {
        faults,
        ..Setup::new(2, steered(LEAST_CONNECTIONS, None))
    };
    let load = load(Arrivals::Closed(1), Service::Constant(0.001), 100);
    assert_eq!(simulate(&setup, &load).served, [0, 100]);
}

#[test]
fn who_is_stopped_does_not_keep_what_waits_where_queues_are_moved() {
    let faults = Faults {
        stops: vec![Stop {
            worker: 1,
            at_s: 2.0,
            lasts_s: 3.0,
            busy: false,
        }],
        ..Faults::default()
    };
    let slowest = |way| {
        let setup = Setup {
            faults: faults.clone(),
            ..Setup::new(4, way)
        };
        let found = simulate(&setup, &poisson(1_000.0, 10_000));
        adds_up(&found, 10_000);
        found.quantile_s(0.99)
    };
    let (hash, rescued) = (
        slowest(steered(HASH, None)),
        slowest(steered(HASH, Some(0.005))),
    );
    // In three of ten seconds, a quarter of the requests waits for up to three seconds.
    assert!(hash > 1.0 && rescued < 0.1, "{hash} {rescued}");
}

#[test]
fn workers_that_crash_lose_what_they_had_in_hand_and_no_more() {
    for (way, kind, rtt_s) in WAYS
        .into_iter()
        .flat_map(|way| [Kind::Threads(2), Kind::EventLoop].map(|kind| (way, kind)))
        .flat_map(|(way, kind)| [0.0, 0.03].map(|rtt_s| (way, kind, rtt_s)))
    {
        let setup = Setup {
            kind,
            rtt_s,
            faults: Faults {
                crashes: Some(Repeated {
                    every_s: 0.2,
                    lasts_s: 0.05,
                }),
                pauses: Some(Repeated {
                    every_s: 0.1,
                    lasts_s: 0.02,
                }),
                ..Faults::default()
            },
            ..Setup::new(8, way)
        };
        let found = simulate(&setup, &poisson(2_000.0, 40_000));
        // 20 s, 8 workers, some 32 lives each that end with a request or none in hand.
        assert!(found.counts.lost > 0, "{way:?} {kind:?}");
        assert!(found.counts.lost < 8 * 100 * 8, "{:?}", found.counts);
        adds_up(&found, 40_000);
    }
}

#[test]
fn connections_of_a_worker_that_crashed_are_opened_anew() {
    for way in [WAYS[0], steered(LEAST_CONNECTIONS, None)] {
        let setup = Setup {
            faults: Faults {
                crashes: Some(Repeated {
                    every_s: 1.0,
                    lasts_s: 0.1,
                }),
                ..Faults::default()
            },
            ..Setup::new(4, way)
        };
        let kept = Load {
            kept: Some(Kept {
                connections: 64,
                next: Next::Any,
                apart_s: 0.004,
            }),
            ..poisson(400.0, 8_000)
        };
        let found = simulate(&setup, &kept);
        assert!(
            found.served.iter().all(|n| *n > 0),
            "{way:?} {:?}",
            found.served
        );
        adds_up(&found, 8_000);
    }
}

#[test]
fn bursts_are_worse_than_their_mean() {
    let mean = |text: &str| {
        let arrivals: Arrivals = text.parse().expect("arrivals");
        let load = load(arrivals.at(3_000.0), Service::Exponential(1e-3), 300_000);
        simulate(&Setup::new(4, WAYS[0]), &load).mean_s
    };
    let (constant, poisson, bursts) = (
        mean("constant"),
        mean("poisson"),
        mean("bursts:2:100ms:0.2"),
    );
    assert!(
        constant < poisson && 3.0 * poisson < bursts,
        "{constant} {poisson} {bursts}"
    );
}

#[test]
fn the_faster_worker_is_worth_its_weight() {
    let mean = |weights: &[u32]| {
        let setup = Setup {
            speeds: vec![3.0, 1.0, 1.0],
            weights: weights.to_vec(),
            ..Setup::new(3, steered(HASH, None))
        };
        let found = simulate(&setup, &poisson(2_500.0, 200_000));
        (found.mean_s, found.served)
    };
    let ((alike, _), (weighed, served)) = (mean(&[1, 1, 1]), mean(&[3, 1, 1]));
    assert!(weighed < alike / 2.0, "{weighed} {alike}");
    let share = served[0] as f64 / served.iter().sum::<u64>() as f64;
    assert!((share - 0.6).abs() < 0.01, "{share}");
}

#[test]
fn a_trace_has_one_part_of_the_run() {
    let setup = Setup {
        faults: Faults {
            pauses: Some(Repeated {
                every_s: 0.5,
                lasts_s: 0.05,
            }),
            ..Faults::default()
        },
        ..Setup::new(4, WAYS[3])
    };
    let (found, trace) = run_traced(&setup, &poisson(1_000.0, 20_000), 1.0).expect("simulated");
    assert!((trace.until_s - trace.from_s - 1.0).abs() < 1e-9);
    assert!(
        (800..1_200).contains(&trace.spans.len()),
        "{}",
        trace.spans.len()
    );
    assert!(!trace.marks.is_empty() && found.counts.rescues > 0);
    for span in &trace.spans {
        assert!(span.arrived_s <= span.began_s && span.began_s <= span.ended_s);
        assert!(span.worker < 4 && (trace.from_s..trace.until_s).contains(&span.ended_s));
    }
    // Nobody serves two at a time.
    let mut of_one: Vec<_> = trace.spans.iter().filter(|span| span.worker == 0).collect();
    of_one.sort_by(|a, b| a.began_s.total_cmp(&b.began_s));
    assert!(
        of_one
            .windows(2)
            .all(|pair| pair[1].began_s >= pair[0].ended_s - 1e-9)
    );
}

#[test]
fn the_freshest_of_tied_slots_is_better_than_any() {
    let with = |variant| {
        let way = Dispatch::Steered {
            policy: LEAST_CONNECTIONS,
            variant,
            stuck_after_s: None,
        };
        let service: Service = "99:1.15ms,1:100ms".parse().expect("service");
        let arrivals = Arrivals::Poisson { per_s: 1_000.0 };
        simulate(&Setup::new(4, way), &load(arrivals, service, 200_000))
    };
    let (chance, freshest) = (with(Variant::Chance), with(Variant::Kernel));
    assert!(
        freshest.mean_s < 0.97 * chance.mean_s,
        "{} {}",
        freshest.mean_s,
        chance.mean_s
    );
    assert!(freshest.max_over_mean() < 1.05, "{:?}", freshest.served);
}
