//! The planned requests are the ones sent, and the ones counted.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Server, answer, check, open, plan, run};
use wakeone_load::{Arrivals, ErrorKind, Mix, Plan, Sources, Spacing, Stop};

#[test]
fn every_request_is_answered_counted_and_attributed() {
    let server = Server::start(|request| {
        let worker = (request.number % 4).to_string();
        answer(request, &worker)
    });
    for arrivals in [
        Arrivals::Closed { concurrency: 16 },
        open(5000.0, Spacing::Poisson),
    ] {
        for threads in [1, 3] {
            let before = server.requests();
            let outcome = run(&Plan {
                arrivals: arrivals.clone(),
                threads,
                ..plan(server.address)
            });
            assert_eq!(
                (outcome.planned, outcome.completed),
                (1000, 1000),
                "{:?}",
                outcome.errors
            );
            assert_eq!(
                server.requests() - before,
                1000,
                "the server's count and the client's agree"
            );
            assert_eq!(outcome.connections, 1000, "a connection a request");
            let even: BTreeMap<_, _> = (0..4).map(|w: u64| (w.to_string(), 250)).collect();
            assert_eq!(outcome.by_worker, even);
            assert_eq!(outcome.share_max_over_mean(), Some(1.0));
            assert_eq!(outcome.by_status, BTreeMap::from([(200, 1000)]));
            assert_eq!(outcome.phases.connect.len(), 1000);
        }
    }
}

#[test]
fn sources_are_spread_and_a_closed_loop_keeps_its_concurrency() {
    let server = Server::start(|request| answer(request, "0"));
    run(&plan(server.address));
    let peers = server.seen.peers.lock().unwrap();
    let addresses: HashSet<_> = peers.iter().map(|p| p.ip()).collect();
    assert_eq!(addresses.len(), 100);
    assert!(addresses.contains(&"127.1.0.1".parse().unwrap()));
}

#[test]
fn the_paths_asked_for_are_those_planned() {
    let server = Server::start(|request| answer(request, "0"));
    let plan = Plan {
        mix: Mix::weighted([(9, "/common"), (1, "/rare?x=1")]),
        ..plan(server.address)
    };
    let outcome = run(&plan);
    let planned = wakeone_load::Schedule::new(&plan, 0)
        .filter(|due| due.entry == 1)
        .count();
    let asked = server
        .seen
        .paths
        .lock()
        .unwrap()
        .iter()
        .filter(|p| *p == "/rare?x=1")
        .count();
    assert_eq!(asked, planned);
    assert_eq!(outcome.by_path[1].completed, planned as u64);
    assert!((50..150).contains(&planned));
}

#[test]
fn ipv6_and_system_sources() {
    let server = Server::start_on("[::1]:0", |request| answer(request, "6"));
    let outcome = run(&Plan {
        sources: Sources::System,
        ..plan(server.address)
    });
    assert_eq!(outcome.completed, 1000, "{:?}", outcome.errors);
}

#[test]
fn kept_connections_are_used_again() {
    let server = Server::start(|request| {
        let last = request.number % 50 == 49;
        let close = if last { "Connection: close\r\n" } else { "" };
        let _ = request
            .stream
            .write_all(format!("HTTP/1.1 200 OK\r\n{close}Content-Length: 1\r\n\r\nx").as_bytes());
        !last
    });
    let closed = run(&Plan {
        keep_alive: true,
        ..plan(server.address)
    });
    assert_eq!(closed.completed, 1000, "{:?}", closed.errors);
    // 10 clients, and a new connection after each of the 20 closes but those that end the load.
    assert!(
        (10..=30).contains(&closed.connections),
        "{} connections",
        closed.connections
    );
    assert_eq!(closed.phases.connect.len(), closed.connections);
    let arrivals = open(2000.0, Spacing::Constant);
    let outcome = run(&Plan {
        keep_alive: true,
        arrivals,
        ..plan(server.address)
    });
    assert_eq!(outcome.completed, 1000, "{:?}", outcome.errors);
    assert!(
        outcome.connections < 1000,
        "{} connections for 1000 requests",
        outcome.connections
    );
}

#[test]
fn bodies_of_every_framing_arrive() {
    let server = Server::start(|request| {
        let big = "x".repeat(300_000);
        let text = match request.number % 3 {
            0 => format!("HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n{big}"),
            1 => format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n493e0\r\n{big}\r\n0\r\n\r\n"
            ),
            _ => format!("HTTP/1.0 200 OK\r\n\r\n{big}"),
        };
        let _ = request.stream.write_all(text.as_bytes());
        false
    });
    let stop = Stop {
        requests: Some(60),
        duration: None,
    };
    let outcome = run(&Plan {
        stop,
        ..plan(server.address)
    });
    assert_eq!(outcome.completed, 60, "{:?}", outcome.errors);
    assert!(outcome.bytes_received > 60 * 300_000);
}

#[test]
fn the_duration_ends_the_load() {
    let server = Server::start(|request| answer(request, "0"));
    let stop = Stop {
        requests: None,
        duration: Some(Duration::from_millis(200)),
    };
    let outcome = run(&Plan {
        stop,
        arrivals: open(1000.0, Spacing::Constant),
        ..plan(server.address)
    });
    assert_eq!(outcome.planned, 200);
    assert!(outcome.elapsed >= Duration::from_millis(200));
    let closed = run(&Plan {
        stop,
        ..plan(server.address)
    });
    assert!(
        closed.completed > 0 && closed.completed == closed.planned,
        "{:?}",
        closed.errors
    );
}

#[test]
fn a_cancelled_load_accounts_for_every_request() {
    let cancel = Arc::new(AtomicBool::new(false));
    let by_server = Arc::clone(&cancel);
    let server = Server::start(move |request| {
        if request.number == 100 {
            by_server.store(true, SeqCst);
        }
        if request.number >= 100 {
            std::thread::sleep(Duration::from_secs(2));
        }
        answer(request, "0")
    });
    let plan = plan(server.address);
    let outcome = wakeone_load::run(&plan, &cancel, &mut |_| {}).unwrap();
    check(&outcome);
    assert!(
        outcome.cancelled > 0 && outcome.planned < 1000,
        "{outcome:?}"
    );
}

#[test]
fn what_a_server_calls_itself_is_harmless_to_a_terminal() {
    // U+009B begins a command to a terminal as ESC [ does; the other one is no text at all.
    let server = Server::start(|request| {
        let name: &[u8] = [&b"a\xc2\x9b2Jb"[..], b"\xff\xc2\x85c"][request.number as usize % 2];
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\nX-Worker: ";
        let _ = request
            .stream
            .write_all(&[head, name, b"\r\n\r\n"].concat());
        false
    });
    let outcome = run(&plan(server.address));
    let names = [("a?2Jb".to_owned(), 500), ("\u{fffd}?c".to_owned(), 500)];
    assert_eq!(outcome.by_worker, BTreeMap::from(names));
}

#[test]
fn connections_opened_beforehand_are_opened_apart_and_used_in_turn() {
    const CONNECTIONS: usize = 10;
    let apart = Duration::from_millis(10);
    let first = Arc::new(Mutex::new(None::<Instant>));
    let per_peer = Arc::new(Mutex::new(BTreeMap::<_, u32>::new()));
    let (asked, peers) = (Arc::clone(&first), Arc::clone(&per_peer));
    let server = Server::start(move |request| {
        asked.lock().unwrap().get_or_insert_with(Instant::now);
        let peer = request.stream.peer_addr().unwrap();
        *peers.lock().unwrap().entry(peer).or_default() += 1;
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        request.stream.write_all(text.as_bytes()).is_ok()
    });
    for threads in [1, 2] {
        (*first.lock().unwrap(), *per_peer.lock().unwrap()) = (None, BTreeMap::new());
        let start = Instant::now();
        let outcome = run(&Plan {
            arrivals: Arrivals::Kept {
                rate_per_s: 2000.0,
                spacing: Spacing::Constant,
                connections: CONNECTIONS,
                apart,
            },
            keep_alive: true,
            threads,
            ..plan(server.address)
        });
        assert_eq!((outcome.completed, outcome.connections), (1000, 10));
        let first = first.lock().unwrap().expect("a request came");
        assert!(
            first - start >= apart * CONNECTIONS as u32,
            "all are open before the first request"
        );
        let per_peer = per_peer.lock().unwrap();
        // The latest first would leave most of them unused at this rate.
        assert!(
            per_peer.len() == CONNECTIONS && per_peer.values().all(|&n| n >= 50),
            "{per_peer:?}"
        );
    }
}

/// A server that closes kept connections after a time, without a word, and those that were lost are opened again.
#[test]
fn lost_connections_of_a_fixed_number_are_opened_again() {
    const CONNECTIONS: usize = 10;
    let patience = Duration::from_millis(150);
    let server = Server::start(move |request| {
        // Each sixth connection is closed while it is idle, all others are kept.
        if request.number % 6 == 5 {
            request.stream.set_read_timeout(Some(patience)).unwrap();
        }
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        request.stream.write_all(text.as_bytes()).is_ok()
    });
    for threads in [1, 2] {
        // Each connection is idle for 200 ms between two requests.
        let outcome = run(&Plan {
            arrivals: Arrivals::Kept {
                rate_per_s: 50.0,
                spacing: Spacing::Constant,
                connections: CONNECTIONS,
                apart: Duration::from_millis(1),
            },
            stop: Stop {
                requests: Some(100),
                duration: None,
            },
            keep_alive: true,
            threads,
            ..plan(server.address)
        });
        assert!(outcome.completed >= 95, "{:?}", outcome.errors);
        assert!(outcome.connections >= 15, "{}", outcome.connections);
        assert_eq!(outcome.connections_open_max, 10);
        // One may have been lost just now.
        assert!(outcome.connections_open_end >= 8, "{outcome:?}");
    }
}

/// A kept connection whose end meets a request is told from one that is reset while the server has the request.
#[test]
fn requests_that_meet_the_end_of_an_idle_connection_are_told_apart() {
    // Closes after the third answer, with a request unread by then: so the kernel resets the connection.
    let closing = |wait: Duration| {
        move |request: common::Request<'_>| {
            let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            let _ = request.stream.write_all(text.as_bytes());
            std::thread::sleep(wait);
            request.number % 3 != 2
        }
    };
    let one = |address| Plan {
        arrivals: Arrivals::Closed { concurrency: 1 },
        stop: Stop {
            requests: Some(60),
            duration: None,
        },
        keep_alive: true,
        ..plan(address)
    };
    let server = Server::start(closing(Duration::from_millis(2)));
    let outcome = run(&one(server.address));
    let met = outcome.errors[&ErrorKind::ClosedIdle];
    assert!(met >= 10, "{:?}", outcome.errors);
    assert_eq!(outcome.error_count(), met, "{:?}", outcome.errors);
    // It resets after a part of the answer, or long after it was asked.
    for (begun, wait) in [("HTTP/1.1 200 OK\r\nConte", 0), ("", 200)] {
        let server = Server::start(move |request| {
            if request.number % 3 != 2 {
                let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
                return request.stream.write_all(text.as_bytes()).is_ok();
            }
            std::thread::sleep(Duration::from_millis(wait));
            let _ = request.stream.write_all(begun.as_bytes());
            let linger = Some(Duration::ZERO);
            rustix::net::sockopt::set_socket_linger(&*request.stream, linger).unwrap();
            false
        });
        let outcome = run(&Plan {
            stop: Stop {
                requests: Some(15),
                duration: None,
            },
            ..one(server.address)
        });
        assert_eq!(outcome.errors, BTreeMap::from([(ErrorKind::Reset, 5)]));
    }
    // It ends the connection when it has read the request: that is no idle one.
    let server = Server::start(|request| {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        request.number % 3 != 2 && request.stream.write_all(text.as_bytes()).is_ok()
    });
    let outcome = run(&one(server.address));
    assert_eq!(outcome.errors, BTreeMap::from([(ErrorKind::EofEarly, 20)]));
}

/// A server need not read a body before it answers. It may close then, and the kernel resets what still comes.
#[test]
fn an_answer_may_come_before_the_body_is_sent() {
    for keep_alive in [false, true] {
        let server = Server::start(|request| {
            let text = "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno";
            let _ = request.stream.write_all(text.as_bytes());
            std::thread::sleep(Duration::from_millis(20));
            false
        });
        let mut plan = Plan {
            stop: Stop {
                requests: Some(8),
                duration: None,
            },
            arrivals: Arrivals::Closed { concurrency: 2 },
            keep_alive,
            ..plan(server.address)
        };
        plan.mix.form.body = Some(vec![b'x'; 20_000_000]);
        let outcome = run(&plan);
        assert_eq!(outcome.by_status, BTreeMap::from([(413, 8)]));
        assert_eq!(outcome.errors, BTreeMap::from([(ErrorKind::Status, 8)]));
    }
}

/// Answers of every framing, one after the other over kept connections where the framing allows it.
#[test]
fn kept_connections_take_answers_of_every_framing() {
    let server = Server::start(|request| {
        let (text, kept) = match request.number % 6 {
            0 => ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", true),
            1 => (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nok\r\n0\r\nX: y\r\n\r\n",
                true,
            ),
            2 => (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
                true,
            ),
            3 => (
                "HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n\r\nok",
                true,
            ),
            4 => ("HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", false),
            _ => ("HTTP/1.0 200 OK\r\n\r\nuntil the end", false),
        };
        request.stream.write_all(text.as_bytes()).is_ok() && kept
    });
    let outcome = run(&Plan {
        stop: Stop {
            requests: Some(120),
            duration: None,
        },
        arrivals: Arrivals::Closed { concurrency: 1 },
        keep_alive: true,
        ..plan(server.address)
    });
    assert_eq!(outcome.completed, 120, "{:?}", outcome.errors);
    assert_eq!(outcome.connections, 40);
}

#[test]
fn method_headers_and_body_are_sent() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n[1, 2]") {
            let mut piece = [0; 1024];
            let n = std::io::Read::read(&mut stream, &mut piece).unwrap();
            assert!(n > 0, "{}", String::from_utf8_lossy(&request));
            request.extend_from_slice(&piece[..n]);
        }
        let text = "HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        std::io::Write::write_all(&mut stream, text.as_bytes()).unwrap();
        String::from_utf8(request).unwrap()
    });
    let mut plan = Plan {
        stop: Stop {
            requests: Some(1),
            duration: None,
        },
        ..plan(address)
    };
    plan.mix.form.method = Some("PUT".to_owned());
    plan.mix.form.headers = vec!["Content-Type: application/json".parse().unwrap()];
    plan.mix.form.body = Some(b"[1, 2]".to_vec());
    assert_eq!(run(&plan).completed, 1);
    let request = server.join().unwrap();
    assert!(request.starts_with("PUT / HTTP/1.1\r\n"), "{request}");
    assert!(
        request.contains("\r\nContent-Type: application/json\r\n"),
        "{request}"
    );
    assert!(request.contains("\r\nContent-Length: 6\r\n"), "{request}");
}

#[test]
fn an_answer_to_head_has_no_body_whatever_its_length_says() {
    let server = Server::start(|request| {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: keep-alive\r\n\r\n";
        std::io::Write::write_all(request.stream, text.as_bytes()).is_ok()
    });
    let mut plan = Plan {
        keep_alive: true,
        ..plan(server.address)
    };
    plan.mix.form.method = Some("HEAD".to_owned());
    let outcome = run(&plan);
    assert_eq!((outcome.completed, outcome.connections), (1000, 10));
}
