//! Each call that the library sees, with and without it: the same results, the same errors, the same descriptors.

mod support;

use support::{Bench, Broker, soak};

#[test]
fn every_result_is_what_it_is_without() {
    let bench = Bench::new("script");
    let broker = Broker::open(true);
    let lines = |broker| {
        let output = bench.run(&[], broker);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
        text
    };
    let (without, with) = (lines(None), lines(Some(&broker)));
    assert!(without.lines().count() > 150, "{without}");
    for (number, (one, other)) in without.lines().zip(with.lines()).enumerate() {
        assert_eq!(one, other, "call {number}");
    }
    assert_eq!(without.lines().count(), with.lines().count());
    assert!(
        broker.given() >= 2,
        "the library did nothing: {}",
        broker.given()
    );
}

/// `WAKEONE_SOAK=1`: a million calls; otherwise a hundred thousand.
#[test]
fn random_calls_never_meet_a_wrong_socket_and_leak_none() {
    let calls = if soak() { "1000000" } else { "100000" };
    let bench = Bench::new("fuzz");
    let broker = Broker::open(false);
    for seed in ["1", "20111124"] {
        let output = bench.run(&[seed, calls], Some(&broker));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "seed {seed}: {text}{output:?}");
        eprintln!("seed {seed}: {text}");
    }
    assert!(
        broker.given() > 1000,
        "the library did little: {}",
        broker.given()
    );
}

#[test]
fn without_a_broker_nothing_changes_and_that_is_said_once() {
    let bench = Bench::new("script");
    let nobody = Broker::nobody();
    let plain = bench.run(&[], None);
    let output = bench.run(&[], Some(&nobody));
    assert_eq!(output.stdout, plain.stdout);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // The first process of the script, and the two that it forks.
    assert!((1..=3).contains(&said.lines().count()), "{said}");
    assert!(
        said.lines().all(|line| line.starts_with("wakeone: ")),
        "{said}"
    );
}

/// Threads that receive from one UDP socket start and end; every datagram is received once, by whatever call.
#[test]
fn threads_of_one_socket_receive_every_datagram_once() {
    let bench = Bench::new("datagrams");
    let broker = Broker::open(false);
    for call in ["recv", "recvfrom", "recvmsg", "recvmmsg", "read"] {
        let output = bench.run(&[call, "20000"], Some(&broker));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{call}: {text}{output:?}");
    }
    assert!(broker.given() >= 5 * 3, "{}", broker.given());
}
