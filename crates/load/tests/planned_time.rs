//! Latency counts from the planned time. The requests planned during a stall of the server show it; a client that
//! politely waits for its end does not hide it ("coordinated omission").

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use common::{open, plan, run};
use wakeone_load::{Arrivals, Plan, Sources, Spacing, Stop};

const STALL: Duration = Duration::from_millis(400);

/// Serves 1,000 connections one after the other and stalls once, at the 300th.
fn stalling_server() -> (SocketAddr, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Deeper than the stall is long: no connection is to be dropped.
    rustix::net::listen(&listener, 1024).unwrap();
    let address = listener.local_addr().unwrap();
    let serve = move || {
        for (number, stream) in listener.incoming().take(1000).enumerate() {
            let mut stream = stream.unwrap();
            if number == 300 {
                std::thread::sleep(STALL);
            }
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).unwrap();
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                .unwrap();
        }
    };
    (address, std::thread::spawn(serve))
}

#[test]
fn the_open_loop_sees_the_stall_that_the_closed_loop_hides() {
    let half = STALL.as_nanos() as u64 / 2;
    let seen = |arrivals| {
        let (address, server) = stalling_server();
        let outcome = run(&Plan {
            arrivals,
            ..plan(address)
        });
        server.join().unwrap();
        assert_eq!(outcome.completed, 1000, "{:?}", outcome.errors);
        outcome
    };
    // 1,000 requests/s: 400 requests are planned during the stall, half of them wait for more than half of it.
    let open = seen(open(1000.0, Spacing::Constant));
    let waited = open.latency.count_between(half, u64::MAX);
    assert!(
        (150..).contains(&waited),
        "{waited} of 1000 requests saw the stall"
    );
    assert!(open.latency.value_at_quantile(0.99) > half);
    // One client: one request waits, and the 400 that should have been sent meanwhile are not.
    let closed = seen(Arrivals::Closed { concurrency: 1 });
    assert!(closed.latency.max() > half);
    assert!(
        closed.latency.value_at_quantile(0.99) < half,
        "one client cannot see it in its 99th percentile"
    );
}

/// A plan that no generator can keep. A request sent late is late by the planned time and not by the time from the
/// send; `lateness` reports the difference.
#[test]
fn a_late_generator_says_so() {
    let server = common::Server::start(|request| {
        let _ = request
            .stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        true
    });
    let stop = Stop {
        // Far fewer than the server's accept queue, its threads and our descriptors allow: their limits are not under
        // test.
        requests: Some(400),
        duration: None,
    };
    // 400 requests within 0.4 µs.
    let arrivals = open(1e9, Spacing::Constant);
    let plan = Plan {
        arrivals,
        stop,
        keep_alive: true,
        sources: Sources::System,
        ..plan(server.address)
    };
    let outcome = run(&plan);
    assert_eq!(outcome.completed, 400, "{:?}", outcome.errors);
    let (latency, service, lateness) = (
        outcome.latency.mean(),
        outcome.service.mean(),
        outcome.lateness.mean(),
    );
    assert!(lateness > 0.0);
    let difference = latency - service;
    // Histograms keep three digits of each.
    assert!(
        (difference - lateness).abs() < 0.003 * latency,
        "{latency} - {service} is not {lateness}"
    );
}
