//! The application of `wakeone-lab serve` in every architecture: the guest book over both stores, and
//! static files.

mod support;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::redis::Redis;
use support::ways::{Way, ways};
use support::{Client, Response, Server};

fn post(address: SocketAddr, form: &str) -> Response {
    let mut client = Client::connect(address);
    client.send(&sign(form));
    client.response()
}

fn sign(form: &str) -> Vec<u8> {
    format!(
        "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
         Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n\r\n{form}",
        form.len()
    )
    .into_bytes()
}

/// The visits and entries that the page shows.
fn counts(server: &Server) -> (u64, u64, String) {
    let page = server.get("/").text();
    let line = page
        .lines()
        .find(|line| line.contains(" visit"))
        .unwrap_or_else(|| panic!("no counts in {page}"));
    let numbers: Vec<u64> = line
        .trim_start_matches("<div>")
        .split(", ")
        .take(2)
        .filter_map(|part| part.split(' ').next()?.parse().ok())
        .collect();
    (numbers[0], numbers[1], page)
}

/// A page, a signature and many visits at once, in the order in which a user would make them.
fn guest_book_works(way: &Way, store: &str) {
    let name = format!("{} with {store}", way.arguments.join(" "));
    let count = if way.workers { "3" } else { "1" };
    let server = Server::start(&[way.arguments, &["-w", count, "--store", store]].concat());
    assert_eq!(counts(&server).0, 1, "{name}");

    let answer = post(
        server.address,
        "name=%3Cb%3E&text=%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    );
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, "/"),
        "{name}"
    );
    let (visits, entries, page) = counts(&server);
    assert_eq!((visits, entries), (2, 1), "{name}");
    assert!(
        page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"),
        "{name}: {page}"
    );
    assert!(!page.contains("<script"), "{name}");

    let mut client = server.connect();
    client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.response_to("HEAD").status, 200, "{name}");
    drop(client); // a worker that serves one at a time has to be free again
    assert_eq!(post(server.address, "name=x").status, 400, "{name}");
    let long = "x".repeat(1001);
    assert_eq!(
        post(server.address, &format!("text={long}")).status,
        413,
        "{name}"
    );

    // Many at once, half of them by reading and half by writing.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let server = &server;
            scope.spawn(move || {
                for number in 0..5 {
                    assert_eq!(server.get("/").status, 200);
                    let answer = post(server.address, &format!("text={thread}-{number}"));
                    assert_eq!(answer.status, 303);
                }
            });
        }
    });
    let (visits, entries, page) = counts(&server);
    assert_eq!(
        (visits, entries),
        (23, 21),
        "{name}: none lost, none counted twice"
    );
    let written: BTreeSet<String> = (0..4)
        .flat_map(|thread| (0..5).map(move |number| format!("{thread}-{number}")))
        .filter(|text| page.contains(&format!("<p>{text}</p>")))
        .collect();
    assert_eq!(written.len(), 20, "{name}");
    server.stop();
}

#[test]
fn guest_book_on_disk() {
    let directory = tempfile::tempdir().expect("a directory");
    for (number, way) in ways().iter().enumerate() {
        let store = directory.path().join(number.to_string());
        guest_book_works(way, store.to_str().expect("UTF-8"));
    }
}

#[test]
fn guest_book_in_redis() {
    let Some(redis) = Redis::start() else { return };
    // A Redis server has sixteen databases.
    let ways = ways();
    let first_of_each_model: Vec<&Way> = ways
        .iter()
        .enumerate()
        .filter(|(at, way)| {
            ways[..*at]
                .iter()
                .all(|other| other.arguments[1] != way.arguments[1])
        })
        .map(|(_, way)| way)
        .collect();
    for (number, way) in first_of_each_model.into_iter().enumerate() {
        guest_book_works(way, &format!("{}/{number}", redis.url));
    }
}

/// While the store does not answer, an event loop continues with everything else.
#[test]
fn a_store_that_hangs_does_not_hang_the_event_loops() {
    let Some(redis) = Redis::start() else { return };
    for way in ways() {
        let model = way.arguments[1];
        if ![
            "poll",
            "epoll",
            "epoll-prefork",
            "reuseport",
            "fd-passing",
            "io-uring",
        ]
        .contains(&model)
        {
            continue;
        }
        let server = Server::start(&[way.arguments, &["--store", &redis.url]].concat());
        let (before, ..) = counts(&server);
        redis.signal(Signal::SIGSTOP);
        let mut waiting: Vec<Client> = (0..3)
            .map(|_| {
                let mut client = server.connect();
                client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
                client
            })
            .collect();
        for _ in 0..5 {
            assert_eq!(server.get("/whoami").status, 200, "{model}");
        }
        // One of the clients leaves before the answer.
        drop(waiting.pop());
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(server.get("/whoami").status, 200, "{model}");
        redis.signal(Signal::SIGCONT);
        for client in &mut waiting {
            assert_eq!(client.response().status, 200, "{model}");
            client.send(b"GET /whoami HTTP/1.1\r\nHost: a\r\n\r\n");
            assert_eq!(
                client.response().status,
                200,
                "{model}: the connection goes on"
            );
        }
        drop(waiting);
        assert_eq!(counts(&server).0, before + 4, "{model}");
        server.stop();
    }
}

/// All processes of the server are killed while clients sign. Every acknowledged entry is there when the server is
/// started again.
#[test]
fn kill_9_loses_no_acknowledged_entry() {
    for model in ["preforked", "epoll-prefork", "prethreaded", "io-uring"] {
        if ways().iter().all(|way| way.arguments[1] != model) {
            continue;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let store = directory.path().to_str().expect("UTF-8");
        let mut acknowledged = 0;
        for round in 0..3 {
            acknowledged += sign_until_killed(model, store, round);
            let server = Server::start(&["--model", model, "--store", store]);
            let (_, entries, _) = counts(&server);
            assert!(
                entries >= acknowledged,
                "{model}: {entries} of {acknowledged} left"
            );
            server.stop();
        }
        assert!(
            acknowledged > 20,
            "{model}: only {acknowledged} were acknowledged at all"
        );
    }
}

/// Returns how many entries were acknowledged; each of them is in the log afterwards.
fn sign_until_killed(model: &str, store: &str, round: u32) -> u64 {
    let mut server = Server::start(&["--model", model, "-w", "2", "--store", store]);
    let kept = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for writer in 0..3 {
            let (kept, address) = (&kept, server.address);
            scope.spawn(move || {
                for number in 0.. {
                    let text = format!("{model}-{round}-{writer}-{number}.");
                    match try_sign(address, &text) {
                        Some(true) => kept.lock().expect("a lock").push(text),
                        _ => return,
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(150 + 37 * u64::from(round)));
        for pid in children_of(server.child.id()) {
            let _ = kill(pid, Signal::SIGKILL);
        }
        server.signal(Signal::SIGKILL);
    });
    server.wait();
    let log = std::fs::read(Path::new(store).join("entries.log")).expect("a log");
    let log = String::from_utf8_lossy(&log);
    let kept = kept.into_inner().expect("a lock");
    for text in &kept {
        assert!(log.contains(text), "{text} was acknowledged and is lost");
    }
    kept.len() as u64
}

/// Whether the entry was acknowledged; `None` if the server was killed.
fn try_sign(address: SocketAddr, text: &str) -> Option<bool> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(support::PATIENCE)).ok()?;
    stream.write_all(&sign(&format!("text={text}"))).ok()?;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    Some(answer.starts_with(b"HTTP/1.1 303 "))
}

fn children_of(pid: u32) -> Vec<Pid> {
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .map(Pid::from_raw)
        .collect()
}

#[test]
fn files_are_served_whole_and_in_parts() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().join("files");
    std::fs::create_dir(&root).expect("a directory");
    std::fs::write(directory.path().join("secret"), "secret").expect("a file");
    // More than socket buffers hold, so that sending has to wait for the client.
    let large: Vec<u8> = (0..20_000_000_u32)
        .map(|n| (n >> 8) as u8 ^ n as u8)
        .collect();
    std::fs::write(root.join("large.bin"), &large).expect("a file");
    std::fs::write(root.join("small.css"), "a { color: red }").expect("a file");
    let files = root.to_str().expect("UTF-8");
    for way in ways() {
        let name = way.arguments.join(" ");
        let server = Server::start(&[way.arguments, &["--files", files]].concat());
        let small = server.get("/small.css");
        assert_eq!(small.text(), "a { color: red }", "{name}");
        assert_eq!(
            small.header("content-type"),
            "text/css; charset=utf-8",
            "{name}"
        );
        let mut client = server.connect();
        client.send(b"GET /large.bin HTTP/1.1\r\nHost: a\r\n\r\nHEAD /large.bin HTTP/1.1\r\nHost: a\r\n\r\n");
        std::thread::sleep(Duration::from_millis(50));
        assert!(
            client.response().body == large,
            "{name}: all of it and in order"
        );
        let head = client.response_to("HEAD");
        assert_eq!(head.header("content-length"), "20000000", "{name}");
        client.send(b"GET /large.bin HTTP/1.1\r\nHost: a\r\nRange: bytes=1000000-1000099\r\n\r\n");
        let part = client.response();
        assert_eq!(part.status, 206, "{name}");
        assert!(part.body == large[1_000_000..1_000_100], "{name}");
        drop(client);
        for path in ["/../secret", "/%2e%2e/secret", "/", "/nothing"] {
            let text = server.get(path).text();
            assert!(!text.contains("secret"), "{name} {path}");
        }
        // A client that leaves in the middle does no harm.
        let mut leaver = server.connect();
        leaver.send(b"GET /large.bin HTTP/1.0\r\n\r\n");
        drop(leaver);
        assert_eq!(server.get("/small.css").status, 200, "{name}");
        server.stop();
    }
}
