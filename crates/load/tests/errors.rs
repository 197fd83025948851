//! Each way to fail, provoked for real, is counted as its own kind.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use common::{Request, Server, answer, open, plan, run};
use wakeone_load::{Error, ErrorKind, Mix, Outcome, Plan, Sources, Spacing, Stop, Summary};

const TEN: Stop = Stop {
    requests: Some(10),
    duration: None,
};

fn against(handle: impl Fn(Request<'_>) -> bool + Send + Sync + 'static) -> Outcome {
    let server = Server::start(handle);
    run(&Plan {
        stop: TEN,
        ..plan(server.address)
    })
}

fn only(kind: ErrorKind, n: u64) -> BTreeMap<ErrorKind, u64> {
    BTreeMap::from([(kind, n)])
}

#[test]
fn refused() {
    let unused = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    for arrivals in [plan(unused).arrivals, open(1000.0, Spacing::Constant)] {
        let outcome = run(&Plan {
            stop: TEN,
            arrivals,
            ..plan(unused)
        });
        assert_eq!(outcome.errors, only(ErrorKind::ConnectRefused, 10));
    }
}

#[test]
fn reset_before_an_answer_and_within_one() {
    // Closing a socket with unread bytes in it makes the kernel send RST: the second request here is never read.
    for begun in ["", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            for stream in listener.incoming().take(10) {
                let mut stream = stream.unwrap();
                let mut byte = [0];
                std::io::Read::read_exact(&mut stream, &mut byte).unwrap();
                stream.write_all(begun.as_bytes()).unwrap();
            }
        });
        let outcome = run(&Plan {
            stop: TEN,
            ..plan(address)
        });
        assert_eq!(
            outcome.errors,
            only(ErrorKind::Reset, 10),
            "after {begun:?}"
        );
        server.join().unwrap();
    }
}

#[test]
fn closed_early() {
    let cut = |text: &'static str| {
        against(move |request| {
            let _ = request.stream.write_all(text.as_bytes());
            false
        })
    };
    for text in [
        "",
        "HTTP/1.1 200",
        "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
    ] {
        assert_eq!(cut(text).errors, only(ErrorKind::EofEarly, 10), "{text:?}");
    }
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n";
    assert_eq!(cut(chunked).errors, only(ErrorKind::EofEarly, 10));
}

#[test]
fn not_http() {
    for text in [
        "SSH-2.0-x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ntoo long",
    ] {
        let outcome = against(move |request| {
            let _ = request.stream.write_all(text.as_bytes());
            false
        });
        assert_eq!(outcome.errors, only(ErrorKind::BadResponse, 10), "{text:?}");
    }
}

#[test]
fn not_2xx_is_an_error_and_has_its_status() {
    let outcome = against(|request| {
        let _ = request
            .stream
            .write_all(b"HTTP/1.1 503 Busy\r\nX-Worker: 2\r\nContent-Length: 0\r\n\r\n");
        false
    });
    assert_eq!(outcome.errors, only(ErrorKind::Status, 10));
    assert_eq!(outcome.by_status, BTreeMap::from([(503, 10)]));
    assert_eq!(outcome.by_worker, BTreeMap::from([("2".to_owned(), 10)]));
    assert_eq!(outcome.completed, 0);
}

#[test]
fn too_slow_and_only_those() {
    let server = Server::start(|request| {
        if request.path == "/slow" {
            std::thread::sleep(Duration::from_secs(3));
        }
        answer(request, "0")
    });
    let timeout = Duration::from_secs(1);
    let mix = Mix::weighted([(1, "/quick"), (1, "/slow")]);
    let outcome = run(&Plan {
        stop: TEN,
        timeout,
        mix,
        ..plan(server.address)
    });
    let paths = server.seen.paths.lock().unwrap();
    let slow = paths.iter().filter(|p| *p == "/slow").count() as u64;
    assert!(slow > 0 && slow < 10);
    assert_eq!(outcome.errors, only(ErrorKind::Timeout, slow));
    assert_eq!(outcome.completed, 10 - slow);
}

/// A twentieth of the requests gets no answer in time, or a quick 503. The answered ones hide it; all together do not.
#[test]
fn percentiles_of_all_requests_count_a_failed_one_as_a_wait_of_the_timeout() {
    let timeout = Duration::from_millis(500);
    for quick in [false, true] {
        let server = Server::start(move |request| match request.number % 20 {
            7 if quick => request
                .stream
                .write_all(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                .is_err(),
            7 => {
                std::thread::sleep(2 * timeout);
                false
            }
            _ => answer(request, "0"),
        });
        for arrivals in [plan(server.address).arrivals, open(400.0, Spacing::Poisson)] {
            let plan = Plan {
                stop: Stop {
                    requests: Some(200),
                    duration: None,
                },
                mix: Mix::weighted([(1, "/a"), (1, "/b")]),
                timeout,
                arrivals,
                ..plan(server.address)
            };
            let outcome = run(&plan);
            assert_eq!(outcome.error_count(), 10, "{:?}", outcome.errors);
            let summary = Summary::new(&plan, &outcome, &[]);
            let (answered, all) = (summary.latency_ms, summary.latency_all_ms.expect("new"));
            assert!(answered.max < 500.0, "{answered:?}");
            assert!(all.p99 >= 500.0 && all.p90 < 500.0, "{all:?}");
            assert_eq!((answered.count, all.count), (190, 200));
            let paths = summary.paths.iter();
            let of_paths: u64 = paths.map(|p| p.latency_all_ms.expect("new").count).sum();
            assert_eq!(of_paths, 200);
            let text = summary.to_string();
            assert!(text.contains("all, with failures"), "{text}");
            assert!(text.contains("10 errors (5.00 %)"), "{text}");
        }
    }
}

/// A listener whose queue is full drops the handshake's first packet: the client's kernel repeats it, we give up first.
#[test]
fn no_handshake_in_time() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    let timeout = Duration::from_millis(300);
    let outcome = run(&Plan {
        stop: TEN,
        timeout,
        ..plan(address)
    });
    let connects = outcome.errors[&ErrorKind::ConnectTimeout];
    assert!(connects >= 8, "{:?}", outcome.errors);
    assert_eq!(
        outcome
            .errors
            .get(&ErrorKind::Timeout)
            .copied()
            .unwrap_or(0),
        10 - connects,
        "{:?}",
        outcome.errors
    );
}

/// In a network namespace of its own, where there are ten ports: the server holds the connections that got one.
#[test]
fn no_port_left() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root may make a network namespace");
        return;
    }
    own_network();
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40009").unwrap();
    let server = Server::start_on("127.0.0.1:80", |request| {
        std::thread::sleep(Duration::from_secs(1));
        answer(request, "0")
    });
    let stop = Stop {
        requests: Some(15),
        duration: None,
    };
    let arrivals = wakeone_load::Arrivals::Closed { concurrency: 15 };
    let one = Plan {
        stop,
        arrivals,
        sources: Sources::Loopback { count: 1 },
        ..plan(server.address)
    };
    let outcome = run(&one);
    assert_eq!(outcome.errors, only(ErrorKind::AddressUnavailable, 5));
    assert_eq!((outcome.started, outcome.completed), (10, 10));
    let spread = run(&Plan {
        sources: Sources::Loopback { count: 3 },
        ..one
    });
    assert_eq!(
        spread.completed, 15,
        "with three sources there are 30 ports: {:?}",
        spread.errors
    );
}

#[test]
fn no_route() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root may make a network namespace");
        return;
    }
    own_network();
    // Nothing can leave a network that has but its loopback.
    let target = "192.0.2.1:80".parse().unwrap();
    let outcome = run(&Plan {
        stop: TEN,
        sources: Sources::System,
        ..plan(target)
    });
    assert_eq!(outcome.errors, only(ErrorKind::Unreachable, 10));
    assert_eq!(outcome.started, 0);
}

/// A network namespace for this thread and the threads it starts.
fn own_network() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    assert!(
        std::process::Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn impossible_plans_are_refused_before_anything_is_sent() {
    let server = Server::start(|request| answer(request, "0"));
    let mut too_many = plan(server.address);
    too_many.arrivals = wakeone_load::Arrivals::Closed {
        concurrency: usize::MAX / 2,
    };
    let never = std::sync::atomic::AtomicBool::new(false);
    let refused = wakeone_load::run(&too_many, &never, &mut |_| {});
    assert!(matches!(refused, Err(Error::Plan(why)) if why.contains("open files")));
    assert_eq!(server.requests(), 0);
}
