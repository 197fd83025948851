//! Simulated means beside those of queueing theory: each within one percent, or within its own interval.

use wakeone_bpf::contract::number::{HASH, LEAST_CONNECTIONS, TWO_CHOICES};
use wakeone_sim::{
    Arrivals, Dispatch, Kept, Kind, Load, Next, Outcome, Service, Setup, Variant, Wake, run, theory,
};

fn simulate(workers: usize, way: Dispatch, load: f64, service: &str, requests: u64) -> Outcome {
    let service: Service = service.parse().expect("service");
    let per_s = load * workers as f64 / service.mean_s();
    let setup = Setup::new(workers, way);
    run(&setup, &poisson(per_s, service, requests)).expect("it can be simulated")
}

fn poisson(per_s: f64, service: Service, requests: u64) -> Load {
    Load {
        arrivals: Arrivals::Poisson { per_s },
        service,
        requests,
        kept: None,
        seed: 1,
    }
}

fn policy(policy: u32) -> Dispatch {
    steered(policy, None)
}

fn steered(policy: u32, stuck_after_s: Option<f64>) -> Dispatch {
    Dispatch::Steered {
        policy,
        variant: Variant::Kernel,
        stuck_after_s,
    }
}

/// Within one percent, or within the interval of the result.
#[track_caller]
fn agrees(what: &str, found: &Outcome, expected_s: f64) {
    let off = (found.mean_s - expected_s).abs();
    assert!(
        off <= (expected_s * 0.01).max(found.mean_error_s),
        "{what}: {:.4} ± {:.4} ms simulated, {:.4} ms expected",
        found.mean_s * 1e3,
        found.mean_error_s * 1e3,
        expected_s * 1e3
    );
    // An interval as wide as the value would agree with anything.
    assert!(
        found.mean_error_s < expected_s * 0.05,
        "{what}: ± {}",
        found.mean_error_s
    );
}

#[test]
fn one_queue_is_as_erlang_has_it() {
    for (workers, load) in [(1, 0.5), (4, 0.8), (16, 0.9), (64, 0.9)] {
        let expected = theory::mmc_mean_s(workers, load * workers as f64 * 1e3, 1e-3);
        for wake in [Wake::LongestAsleep, Wake::LastAsleep, Wake::FirstRegistered] {
            let found = simulate(workers, Dispatch::Shared(wake), load, "exp:1ms", 1_000_000);
            agrees(&format!("M/M/{workers} at {load}"), &found, expected);
        }
    }
}

#[test]
fn a_queue_each_chosen_by_a_hash_is_as_pollaczek_and_khinchine_have_it() {
    for service in ["1ms", "exp:1ms", "lognormal:1ms:1", "9:1ms,1:5ms"] {
        let of: Service = service.parse().unwrap();
        let per_worker = 0.6 / of.mean_s();
        let expected = theory::mg1_mean_s(per_worker, of.mean_s(), of.mean_square_s2());
        let found = simulate(8, policy(HASH), 0.6, service, 2_000_000);
        agrees(service, &found, expected);
    }
}

#[test]
fn one_queue_of_other_services_is_near_lee_and_longton() {
    // An approximation: within five percent where service varies little more than exponentially.
    for service in ["1ms", "lognormal:1ms:0.8", "9:1ms,1:5ms"] {
        let of: Service = service.parse().unwrap();
        let per_s = 0.8 * 4.0 / of.mean_s();
        let expected = theory::mgc_mean_s(4, per_s, of.mean_s(), of.mean_square_s2());
        let found = simulate(
            4,
            Dispatch::Shared(Wake::LongestAsleep),
            0.8,
            service,
            1_000_000,
        );
        assert!((found.mean_s / expected - 1.0).abs() < 0.05, "{service}");
    }
}

#[test]
fn two_choices_come_near_their_limit_with_1024_workers() {
    for load in [0.7, 0.9] {
        let expected = theory::two_choices_mean_s(load, 1e-3);
        let found = simulate(1024, policy(TWO_CHOICES), load, "exp:1ms", 2_000_000);
        agrees(&format!("two choices at {load}"), &found, expected);
    }
}

#[test]
fn an_event_loop_is_a_server_that_its_requests_share() {
    // Processor sharing: the mean is that of an M/M/1, whatever the service times (Kleinrock, 1976).
    for service in ["1ms", "exp:1ms", "9:1ms,1:5ms"] {
        let service: Service = service.parse().unwrap();
        let (mean, load) = (service.mean_s(), 0.7);
        let setup = Setup {
            kind: Kind::EventLoop,
            ..Setup::new(8, policy(HASH))
        };
        let load = poisson(8.0 * load / mean, service, 2_000_000);
        let found = run(&setup, &load).expect("it can be simulated");
        agrees("M/G/1 by processor sharing", &found, mean / 0.3);
    }
}

#[test]
fn threads_of_one_worker_are_servers_of_one_queue() {
    let setup = Setup {
        kind: Kind::Threads(4),
        ..Setup::new(1, policy(LEAST_CONNECTIONS))
    };
    let load = poisson(3_200.0, Service::Exponential(1e-3), 1_000_000);
    let found = run(&setup, &load).expect("it can be simulated");
    agrees("M/M/4", &found, theory::mmc_mean_s(4, 3_200.0, 1e-3));
}

#[test]
fn the_least_loaded_lies_between_one_queue_and_two_choices() {
    let way = |way| simulate(16, way, 0.9, "exp:1ms", 1_000_000).mean_s;
    let shared = way(Dispatch::Shared(Wake::LongestAsleep));
    let least = way(policy(LEAST_CONNECTIONS));
    let two = way(policy(TWO_CHOICES));
    assert!(shared < least && least < two, "{shared} {least} {two}");
}

#[test]
fn who_is_always_first_has_most_of_the_work_and_the_longest_asleep_no_more_than_the_others() {
    let share = |wake| simulate(4, Dispatch::Shared(wake), 0.3, "exp:1ms", 200_000).served;
    let even = share(Wake::LongestAsleep);
    assert!(
        even.iter().all(|n| (49_000..51_000).contains(n)),
        "{even:?}"
    );
    // Ordered entry: the first server of any number loses what finds it busy, and serves a / (1 + a) erlangs of a.
    let first = share(Wake::FirstRegistered)[0] as f64 / 200_000.0;
    assert!((first * 2.2 - 1.0).abs() < 0.05, "{first}");
}

#[test]
fn one_seed_gives_one_result() {
    let way = steered(LEAST_CONNECTIONS, Some(0.005));
    let once = || {
        let found = simulate(4, way, 0.7, "99:1ms,1:100ms", 50_000);
        (found.mean_s.to_bits(), found.served, found.counts)
    };
    assert_eq!(once(), once());
}

#[test]
fn nothing_is_lost_by_moving_and_those_behind_a_stuck_worker_wait_less() {
    let with = |stuck_after_s| {
        let way = steered(LEAST_CONNECTIONS, stuck_after_s);
        simulate(4, way, 0.5375, "99:1.15ms,1:100ms", 60_000)
    };
    let (without, with) = (with(None), with(Some(0.005)));
    assert_eq!(with.served.iter().sum::<u64>(), 60_000);
    assert!(with.counts.rescues > 100 && with.counts.moved >= with.counts.rescues);
    assert!(
        with.mean_s < without.mean_s * 0.95,
        "{} {}",
        with.mean_s,
        without.mean_s
    );
}

#[test]
fn who_shares_cpus_is_as_slow_as_they_are_few() {
    // Four workers that compute on one CPU are one processor-sharing server: an M/M/1 in the mean, whatever is served
    // first. With few workers some wait in line instead: the mean of exponential work is the same.
    let setup = Setup {
        cpus: Some(1),
        ..Setup::new(4, Dispatch::Shared(Wake::LongestAsleep))
    };
    let load = poisson(700.0, Service::Exponential(1e-3), 2_000_000);
    let found = run(&setup, &load).expect("it can be simulated");
    agrees(
        "M/M/1 by processor sharing",
        &found,
        theory::mmc_mean_s(1, 700.0, 1e-3),
    );
}

#[test]
fn clients_of_a_closed_loop_wait_for_their_answers() {
    // Little's law: four busy workers end 4,000 requests a second, so each of twenty clients waits for 5 ms.
    let load = Load {
        arrivals: Arrivals::Closed(20),
        ..poisson(1.0, Service::Exponential(1e-3), 400_000)
    };
    let way = Dispatch::Shared(Wake::LongestAsleep);
    let found = run(&Setup::new(4, way), &load).expect("it can be simulated");
    agrees("closed loop", &found, 5e-3);
    // With two clients nobody waits, and there is work for half of the workers.
    let load = Load {
        arrivals: Arrivals::Closed(2),
        ..load
    };
    let found = run(&Setup::new(4, way), &load).expect("it can be simulated");
    agrees("two clients", &found, 1e-3);
}

/// 64 connections kept open, opened one after another to four workers; 2,400 requests/s of 1 ms over them.
fn kept(way: Dispatch) -> Outcome {
    let load = Load {
        kept: Some(Kept {
            connections: 64,
            next: Next::Any,
            apart_s: 0.004,
        }),
        ..poisson(2_400.0, Service::Constant(1e-3), 100_000)
    };
    run(&Setup::new(4, way), &load).expect("it can be simulated")
}

#[test]
fn connections_that_are_kept_stay_with_the_worker_that_accepted_them() {
    let shared = kept(Dispatch::Shared(Wake::FirstRegistered));
    assert_eq!(shared.served, [100_000, 0, 0, 0]);
    // One worker serves 1,000 a second of 2,400: it gets later and later.
    assert!(shared.mean_s > 10.0);
    let least = kept(policy(LEAST_CONNECTIONS));
    // Sixteen connections each: four queues with a quarter of the requests, M/D/1 at 0.6.
    assert!(least.max_over_mean() < 1.03, "{:?}", least.served);
    agrees("16 each", &least, theory::mg1_mean_s(600.0, 1e-3, 1e-6));
    assert!(kept(policy(HASH)).mean_s > least.mean_s);
}

#[test]
fn connections_that_take_turns_give_each_worker_its_turn() {
    let in_turn = |connections, arrivals| {
        let load = Load {
            arrivals,
            kept: Some(Kept {
                connections,
                next: Next::LongestIdle,
                apart_s: 0.004,
            }),
            ..poisson(1.0, Service::Constant(1e-3), 200_000)
        };
        run(&Setup::new(connections, policy(LEAST_CONNECTIONS)), &load)
            .expect("it can be simulated")
    };
    // Each of four workers gets every fourth request, 1.25 ms after the one before: none waits.
    let even = in_turn(4, Arrivals::Constant { per_s: 3_200.0 });
    assert_eq!(even.served, [50_000; 4]);
    assert!((even.mean_s / 1e-3 - 1.0).abs() < 1e-6, "{}", even.mean_s);
    // One connection: the requests wait for it, as in an M/D/1.
    let one = in_turn(1, Arrivals::Poisson { per_s: 500.0 });
    agrees("one", &one, theory::mg1_mean_s(500.0, 1e-3, 1e-6));
}

#[test]
fn who_waits_for_a_connection_is_served_after_those_that_have_one() {
    let load = Load {
        kept: Some(Kept {
            connections: 2,
            next: Next::LongestIdle,
            apart_s: 0.004,
        }),
        ..poisson(1.0, Service::Recorded(vec![3.0, 2.0, 1.0].into()), 3)
    };
    let load = Load {
        arrivals: Arrivals::Constant { per_s: 1e9 },
        ..load
    };
    let found = run(&Setup::new(1, policy(LEAST_CONNECTIONS)), &load).expect("it can be simulated");
    // They end after 3, 5 and 6 s.
    assert!((found.mean_s - 14.0 / 3.0).abs() < 1e-6, "{}", found.mean_s);
}

/// Workers that are a round trip away.
fn far(workers: usize, way: Dispatch, rtt_s: f64) -> Setup {
    Setup {
        rtt_s,
        ..Setup::new(workers, way)
    }
}

#[test]
fn a_request_takes_two_round_trips_and_one_over_a_kept_connection() {
    let load = poisson(2_400.0, Service::Exponential(1e-3), 1_000_000);
    let mean = |way| run(&far(4, way, 20e-3), &load).expect("it can be simulated");
    let one_queue = theory::mmc_mean_s(4, 2_400.0, 1e-3);
    agrees(
        "one queue",
        &mean(Dispatch::Shared(Wake::LongestAsleep)),
        one_queue + 40e-3,
    );
    let hashed = theory::mg1_mean_s(600.0, 1e-3, 2e-6);
    agrees("hash", &mean(policy(HASH)), hashed + 40e-3);

    let over_kept = Load {
        kept: Some(Kept {
            connections: 64,
            next: Next::Any,
            apart_s: 0.004,
        }),
        ..load
    };
    let kept = |rtt_s| {
        run(&far(4, policy(HASH), rtt_s), &over_kept)
            .expect("it can be simulated")
            .mean_s
    };
    assert!((kept(20e-3) - kept(0.0) - 20e-3).abs() < 1e-9);
}

#[test]
fn a_client_far_away_asks_again_a_round_trip_later() {
    let load = Load {
        arrivals: Arrivals::Closed(3),
        ..poisson(1.0, Service::Constant(1e-3), 9_000)
    };
    let found = run(&far(3, policy(LEAST_CONNECTIONS), 4e-3), &load).expect("it can be simulated");
    assert!((found.mean_s - 9e-3).abs() < 1e-6, "{}", found.mean_s);
    let per_s = found.answers_per_s();
    assert!((per_s / (3.0 / 9e-3) - 1.0).abs() < 1e-3, "{per_s}");
}

#[test]
fn connections_far_away_count_late() {
    let load = poisson(3_000.0, Service::Constant(1e-3), 300_000);
    let waits = |rtt_s: f64| {
        let setup = far(4, policy(LEAST_CONNECTIONS), rtt_s);
        run(&setup, &load).expect("it can be simulated").mean_s - 2.0 * rtt_s
    };
    // A choice counts after twenty services.
    let (near, far_away) = (waits(0.0), waits(20e-3));
    assert!(far_away > 1.5 * near, "{near} {far_away}");
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    let (good, load) = (
        Setup::new(1, policy(HASH)),
        poisson(1.0, Service::Constant(1.0), 1),
    );
    assert!(run(&good, &load).is_ok());
    let changed = |change: fn(&mut Setup)| {
        let mut setup = good.clone();
        change(&mut setup);
        setup
    };
    for setup in [
        changed(|setup| setup.workers = 0),
        changed(|setup| setup.workers = 1025),
        changed(|setup| setup.kind = Kind::Threads(0)),
        changed(|setup| setup.cpus = Some(0)),
        changed(|setup| setup.weights = vec![1, 1]),
        changed(|setup| setup.weights = vec![0]),
        changed(|setup| setup.speeds = vec![f64::NAN]),
        changed(|setup| setup.rtt_s = -1e-3),
        changed(|setup| setup.rtt_s = f64::NAN),
    ] {
        assert!(run(&setup, &load).is_err(), "{setup:?}");
    }
    let none = Load {
        requests: 0,
        ..load.clone()
    };
    assert!(run(&good, &none).is_err());
    let arrivals = Arrivals::Poisson { per_s: f64::NAN };
    assert!(run(&good, &Load { arrivals, ..load }).is_err());
}
