//! Every architecture of `wakeone serve`, started as a user starts it and driven over loopback.

mod support;

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use support::{Client, Response, Server, wait_for};

/// Every way of serving that the command line offers.
const WAYS: &[&[&str]] = &[
    &["--model", "preforked"],
    &["--model", "preforked", "--reuseport"],
    &["--model", "epoll-prefork", "--epoll", "wake-all"],
    &["--model", "epoll-prefork", "--epoll", "exclusive"],
    &["--model", "epoll-prefork", "--epoll", "rotate"],
    &["--model", "epoll-prefork", "--reuseport"],
];

/// Runs `check` against each way with this many workers, all ways at once.
fn with_each(workers: &str, more: &[&str], check: impl Fn(&Server, &str) + Sync) {
    std::thread::scope(|scope| {
        for way in WAYS {
            let check = &check;
            scope.spawn(move || {
                let arguments = [way, &["-w", workers][..], more].concat();
                let server = Server::start(&arguments);
                check(&server, &arguments.join(" "));
                server.stop();
            });
        }
    });
}

fn request(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").into_bytes()
}

#[test]
fn answers_and_says_who_did() {
    with_each("2", &[], |server, way| {
        let answer = server.get("/whoami");
        assert_eq!(answer.status, 200, "{way}");
        assert!(["0", "1"].contains(&answer.worker()), "{way}: {answer:?}");
        let who = answer.text();
        assert!(
            who.contains(&format!("\"worker\":\"{}\"", answer.worker())),
            "{way}: {who}"
        );
        assert!(
            who.contains(&format!("\"pid\":{}", answer.pid())),
            "{way}: {who}"
        );
        assert_ne!(
            answer.pid(),
            server.child.id().to_string(),
            "{way}: workers are forked"
        );
        assert_eq!(server.get("/").status, 200, "{way}");
        assert_eq!(server.get("/nothing").status, 404, "{way}");
        assert_eq!(server.get("/work?us=100&kind=sleep").status, 200, "{way}");
        assert_eq!(server.get("/work?us=100&kind=cpu").status, 200, "{way}");
        assert_eq!(server.get("/work?us=x").status, 400, "{way}");
        assert!(
            server.ready_line.ends_with("2 workers)"),
            "{}",
            server.ready_line
        );
    });
}

#[test]
fn one_worker_is_the_process_itself() {
    with_each("1", &[], |server, way| {
        let answer = server.get("/whoami");
        assert_eq!(answer.pid(), server.child.id().to_string(), "{way}");
        assert_eq!(answer.worker(), "0", "{way}");
    });
}

#[test]
fn work_takes_its_time() {
    with_each("1", &[], |server, way| {
        for kind in ["sleep", "cpu"] {
            let started = Instant::now();
            server.get(&format!("/work?us=20000&kind={kind}"));
            assert!(
                started.elapsed() >= Duration::from_millis(20),
                "{way} {kind}"
            );
        }
    });
}

#[test]
fn a_connection_is_kept_and_pipelined() {
    with_each("2", &[], |server, way| {
        let mut client = server.connect();
        client.send(&request("/whoami"));
        let first = client.response();
        assert_eq!(first.header("connection"), "keep-alive", "{way}");
        let many = [request("/whoami"), request("/no"), request("/whoami")].concat();
        client.send(&many);
        let statuses: Vec<u16> = (0..3)
            .map(|_| {
                let answer = client.response();
                assert_eq!(answer.pid(), first.pid(), "{way}: the same worker");
                answer.status
            })
            .collect();
        assert_eq!(statuses, [200, 404, 200], "{way}");
        client.send(b"HEAD /whoami HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        let head = client.response_to("HEAD");
        assert!(head.header("content-length").len() > 1, "{way}: {head:?}");
        client.expect_end();
    });
}

#[test]
fn without_keep_alive_each_answer_closes() {
    with_each("1", &["--no-keep-alive"], |server, way| {
        let mut client = server.connect();
        client.send(&request("/"));
        let answer = client.response();
        assert_eq!(answer.header("connection"), "close", "{way}");
        client.expect_end();
    });
}

#[test]
fn http_1_0_closes_unless_asked_not_to() {
    with_each("1", &[], |server, way| {
        assert_eq!(server.get("/").header("connection"), "close", "{way}");
        let mut client = server.connect();
        for _ in 0..2 {
            client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
            assert_eq!(
                client.response().header("connection"),
                "keep-alive",
                "{way}"
            );
        }
    });
}

#[test]
fn a_byte_at_a_time() {
    with_each("1", &[], |server, way| {
        let mut client = server.connect();
        for _ in 0..2 {
            for byte in request("/whoami") {
                client.send(&[byte]);
            }
            assert_eq!(client.response().status, 200, "{way}");
        }
    });
}

#[test]
fn the_client_may_end_its_side_first() {
    with_each("1", &[], |server, way| {
        let mut client = server.connect();
        client.send(&request("/whoami"));
        client
            .stream
            .shutdown(std::net::Shutdown::Write)
            .expect("a half close");
        assert_eq!(client.response().status, 200, "{way}");
        client.expect_end();
    });
}

#[test]
fn bad_requests_are_refused_and_the_refusal_arrives() {
    let long = "x".repeat(100_000);
    with_each("1", &[], |server, way| {
        let refused = |bytes: &[u8]| {
            let mut client = server.connect();
            client.send(bytes);
            let answer = client.response();
            client.expect_end();
            answer.status
        };
        assert_eq!(refused(b"nonsense\r\n\r\n"), 400, "{way}");
        assert_eq!(refused(b"GET / HTTP/1.1\r\n\r\n"), 400, "{way}");
        assert_eq!(
            refused(format!("GET /{long} HTTP/1.0\r\n\r\n").as_bytes()),
            414,
            "{way}"
        );
        let header = format!("GET / HTTP/1.0\r\nA: {long}\r\n\r\n");
        assert_eq!(refused(header.as_bytes()), 431, "{way}");
        let body = format!("POST / HTTP/1.0\r\nContent-Length: 100000\r\n\r\n{long}");
        assert_eq!(refused(body.as_bytes()), 413, "{way}");
        assert_eq!(refused(b"DELETE / HTTP/1.0\r\n\r\n"), 405, "{way}");
    });
}

#[test]
fn a_slow_request_is_told_and_a_silent_client_is_not() {
    with_each("1", &["--header-timeout", "1"], |server, way| {
        let mut client = server.connect();
        client.send(b"GET / HTTP/1.1\r\nHo");
        assert_eq!(client.response().status, 408, "{way}");
        client.expect_end();
        server.connect().expect_end();
    });
}

/// Connections open at the same time reach all the workers of a blocking model, which serve one
/// each.
#[test]
fn all_preforked_workers_accept() {
    let server = Server::start(&["--model", "preforked", "-w", "4"]);
    let mut open: Vec<Client> = Vec::new();
    let (mut workers, mut pids) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..4 {
        let mut client = server.connect();
        client.send(&request("/whoami"));
        let answer = client.response();
        workers.insert(answer.worker().to_owned());
        pids.insert(answer.pid().to_owned());
        open.push(client);
    }
    assert_eq!(workers, ["0", "1", "2", "3"].map(str::to_owned).into());
    assert_eq!(pids.len(), 4);
    // A fifth waits until one of them is free.
    let mut fifth = server.connect();
    fifth.send(&request("/whoami"));
    let mut first = open.remove(0);
    first.send(b"GET /whoami HTTP/1.0\r\n\r\n");
    let freed = first.response();
    assert_eq!(fifth.response().worker(), freed.worker());
    drop((open, fifth));
    server.stop();
}

/// With `rotate`, connections one after another go round among idle workers.
#[test]
fn rotate_goes_round() {
    let server = Server::start(&["--model", "epoll-prefork", "--epoll", "rotate", "-w", "3"]);
    let answers: Vec<Response> = (0..12)
        .map(|_| {
            // Time for the one before to wait again.
            std::thread::sleep(Duration::from_millis(20));
            server.get("/whoami")
        })
        .collect();
    for worker in ["0", "1", "2"] {
        let count = answers
            .iter()
            .filter(|answer| answer.worker() == worker)
            .count();
        assert!(
            (3..=5).contains(&count),
            "worker {worker} got {count} of 12"
        );
    }
    server.stop();
}

#[test]
fn each_worker_has_a_queue_with_reuseport() {
    for model in ["preforked", "epoll-prefork"] {
        let server = Server::start(&["--model", model, "-w", "2", "--reuseport"]);
        let workers: BTreeSet<String> = (0..40)
            .map(|_| server.get("/whoami").worker().to_owned())
            .collect();
        assert_eq!(workers.len(), 2, "{model}: the hash reaches both");
        server.stop();
    }
}

#[test]
fn a_stop_finishes_the_request_in_hand() {
    for way in WAYS {
        let arguments = [way, &["-w", "2"][..]].concat();
        let mut server = Server::start(&arguments);
        let mut idle = server.connect();
        idle.send(&request("/whoami"));
        let idle_worker = idle.response();
        let mut busy = loop {
            // In the blocking models only another worker than the one that keeps `idle` answers;
            // a queue of that worker is no place to be in when it stops.
            let mut client = server.connect();
            client.send(&request("/whoami"));
            client
                .stream
                .set_read_timeout(Some(Duration::from_millis(300)))
                .expect("a timeout");
            let mut byte = [0];
            if client.stream.peek(&mut byte).is_ok() {
                client
                    .stream
                    .set_read_timeout(Some(support::PATIENCE))
                    .expect("a timeout");
                client.response();
                break client;
            }
        };
        busy.send(&request("/work?us=300000&kind=sleep"));
        std::thread::sleep(Duration::from_millis(100));
        server.signal(Signal::SIGTERM);
        let answer = busy.response();
        assert_eq!(answer.status, 200, "{way:?}");
        assert_eq!(answer.header("connection"), "close", "{way:?}");
        busy.expect_end();
        idle.expect_end();
        let (status, said) = server.wait();
        assert!(
            status.success(),
            "{way:?}: {status}: {said} ({idle_worker:?})"
        );
    }
}

#[test]
fn a_stop_ends_idle_workers_at_once() {
    with_each("3", &[], |_, _| {}); // `stop` checks that it ends well
}

#[test]
fn the_workers_go_with_their_master() {
    let mut server = Server::start(&["--model", "preforked", "-w", "3"]);
    let pid = server.get("/whoami").pid().to_owned();
    server.signal(Signal::SIGKILL);
    assert!(!server.wait().0.success());
    let end = Instant::now() + support::PATIENCE;
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        assert!(Instant::now() < end, "worker {pid} is still there");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_worker_that_dies_is_reported_and_the_others_go_on() {
    let mut server = Server::start(&["--model", "preforked", "-w", "2"]);
    let pid = server.get("/whoami").pid().to_owned();
    let victim = nix::unistd::Pid::from_raw(pid.parse().expect("a pid"));
    nix::sys::signal::kill(victim, Signal::SIGKILL).expect("a worker can be killed");
    let other = server.get("/whoami").pid().to_owned();
    assert_ne!(other, pid);
    server.signal(Signal::SIGTERM);
    let (status, said) = server.wait();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("(pid {pid}) ended by SIGKILL; 1 left")),
        "{said}"
    );
}

/// Listeners handed over as sd_listen_fds(3) says: both are served, by every model, blocking or
/// not.
#[test]
fn inherited_listeners_are_all_served() {
    for (model, count) in [
        ("preforked", 1),
        ("preforked", 2),
        ("epoll-prefork", 1),
        ("epoll-prefork", 2),
    ] {
        let listeners: Vec<_> = (0..count)
            .map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a port"))
            .collect();
        // The shell puts its own pid where the protocol wants the server's, then becomes it.
        let mut command = Command::new("sh");
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$0\" serve --model \"$1\""])
            .args([env!("CARGO_BIN_EXE_wakeone"), model])
            .env("LISTEN_FDS", count.to_string())
            .env("WAKEONE_SLOT", "7");
        let mappings = listeners
            .iter()
            .enumerate()
            .map(|(index, listener)| command_fds::FdMapping {
                parent_fd: listener.as_fd().try_clone_to_owned().expect("a copy"),
                child_fd: 3 + index as i32,
            })
            .collect();
        command_fds::CommandFdExt::fd_mappings(&mut command, mappings).expect("distinct numbers");
        let server = Server::spawn(&mut command);
        for _ in 0..3 {
            for listener in &listeners {
                let mut client = Client::connect(listener.local_addr().expect("an address"));
                client.send(b"GET /whoami HTTP/1.0\r\n\r\n");
                let answer = client.response();
                assert_eq!(answer.worker(), "7", "{model}: the slot is the name");
                assert_eq!(answer.pid(), server.child.id().to_string());
            }
        }
        server.stop();
        // What is not accepted stays in the queue, which others hold.
        let _waits = Client::connect(listeners[0].local_addr().expect("an address"));
        assert!(listeners[0].accept().is_ok());
    }
}

/// The queue of a worker is taken away (shutdown) and it listens again, as a rescue does: the
/// server neither ends nor spins, and serves again.
#[test]
fn a_moved_queue_is_survived() {
    for model in ["preforked", "epoll-prefork"] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut command = Command::new("sh");
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$0\" serve --model \"$1\""])
            .args([env!("CARGO_BIN_EXE_wakeone"), model])
            .env("LISTEN_FDS", "1");
        let mapping = command_fds::FdMapping {
            parent_fd: listener.as_fd().try_clone_to_owned().expect("a copy"),
            child_fd: 3,
        };
        command_fds::CommandFdExt::fd_mappings(&mut command, vec![mapping]).expect("one number");
        let server = Server::spawn(&mut command);
        for _ in 0..3 {
            server.get("/whoami");
            rustix::net::shutdown(&listener, rustix::net::Shutdown::Read).expect("a shutdown");
            std::thread::sleep(Duration::from_millis(200));
            let _ = rustix::net::bind(&listener, &address);
            rustix::net::listen(&listener, 16).expect("it listens again");
        }
        assert_eq!(server.get("/whoami").status, 200, "{model}");
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.child.id()))
            .expect("it is there");
        let fields: Vec<&str> = stat
            .rsplit(") ")
            .next()
            .expect("fields")
            .split(' ')
            .collect();
        let ticks: u64 = fields[11..13]
            .iter()
            .map(|field| field.parse::<u64>().expect("ticks"))
            .sum();
        // 600 ms without a queue: a hot loop would have used about 60 ticks of 10 ms.
        assert!(ticks <= 20, "{model} used {ticks} ticks of CPU time");
        server.stop();
    }
}

fn refused(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_wakeone"))
        .arg("serve")
        .args(arguments)
        .env_remove("LISTEN_FDS")
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let status = wait_for(&mut child);
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("stderr is piped");
    std::io::Read::read_to_string(&mut stderr, &mut said).expect("stderr can be read");
    (status.code(), said)
}

#[test]
fn what_cannot_be_served_is_said() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let (code, said) = refused(&["-l", &address]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains(&format!("cannot listen on {address}")),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");

    let (code, said) = refused(&["-l", "192.0.2.1:0"]);
    assert_eq!(
        (code, said.contains("no interface")),
        (Some(1), true),
        "{said}"
    );
    for wrong in [
        &["-l", "here"][..],
        &["--model", "nosuch"],
        &["-w", "0"],
        &["-w", "x"],
        &["--epoll", "some"],
        &["--backlog", "-1"],
        &["--header-timeout", "0"],
    ] {
        let (code, said) = refused(wrong);
        assert_eq!(code, Some(2), "{wrong:?}: {said}");
    }
}
