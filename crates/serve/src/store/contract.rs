//! The guarantees of every store, whatever it is made of: one suite, run against each, and through
//! each of its two faces.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::*;

/// One way to use a store.
type Open<'a> = &'a dyn Fn() -> Box<dyn Store>;

fn entry(text: &str) -> Entry {
    Entry {
        at_unix_s: 1_700_000_000,
        name: "Ada".to_owned(),
        text: text.to_owned(),
    }
}

fn page(store: &mut dyn Store, visit: bool) -> (u64, u64, Vec<String>) {
    match store.call(&Call::Page { visit }) {
        Ok(Reply::Page {
            visits,
            total,
            entries,
        }) => {
            let texts = entries.iter().map(|entry| entry.text.clone()).collect();
            (visits, total, texts)
        }
        other => panic!("{other:?}"),
    }
}

fn add(store: &mut dyn Store, entry: Entry) {
    assert_eq!(store.call(&Call::Add(entry)), Ok(Reply::Added));
}

/// The contract. `open` opens the same, initially empty store again.
fn holds(open: Open<'_>) {
    let mut one = open();
    assert_eq!(page(&mut *one, false), (0, 0, vec![]), "empty at first");
    assert_eq!(page(&mut *one, true).0, 1, "a visit is counted");
    assert_eq!(page(&mut *one, false).0, 1, "a look is not");

    // Both clients see the entries of both, in the same order.
    let mut two = open();
    add(&mut *one, entry("first"));
    add(&mut *two, entry("second"));
    for store in [&mut one, &mut two] {
        let (_, total, texts) = page(&mut **store, false);
        assert_eq!((total, texts), (2, vec!["second".into(), "first".into()]));
    }

    // Every text comes back as it was.
    let strange = Entry {
        at_unix_s: u64::MAX,
        name: "Zoë\0<b>".to_owned(),
        text: "\r\n$5\r\n\u{1F600}\\\"'& \u{FFFF}".to_owned(),
    };
    add(&mut *one, strange.clone());
    match two.call(&Call::Page { visit: false }) {
        Ok(Reply::Page { entries, .. }) => assert_eq!(entries[0], strange),
        other => panic!("{other:?}"),
    }

    // Many at once from several: none lost, none twice.
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let mut store = SendStore(open());
            scope.spawn(move || {
                for number in 0..10 {
                    add(store.get(), entry(&format!("{writer}-{number}")));
                    page(store.get(), true);
                }
            });
        }
    });
    let (visits, total, texts) = page(&mut *open(), false);
    assert_eq!(
        (visits, total),
        (41, 43),
        "every visit and entry counts once"
    );
    for writer in 0..4 {
        let of_writer: Vec<_> = texts
            .iter()
            .filter(|text| text.starts_with(&format!("{writer}-")))
            .collect();
        let expected: Vec<_> = (0..10).rev().map(|n| format!("{writer}-{n}")).collect();
        assert_eq!(of_writer, expected.iter().collect::<Vec<_>>());
    }

    // The page shows the latest ones only.
    for number in 0..SHOWN {
        add(&mut *one, entry(&format!("late {number}")));
    }
    let (_, total, texts) = page(&mut *two, false);
    assert_eq!((total, texts.len()), (43 + SHOWN as u64, SHOWN));
    assert_eq!(texts[0], format!("late {}", SHOWN - 1));
    assert_eq!(texts[SHOWN - 1], "late 0");
}

/// Lets a thread have a store that was opened outside of it.
struct SendStore(Box<dyn Store>);

impl SendStore {
    fn get(&mut self) -> &mut dyn Store {
        &mut *self.0
    }
}

/// A driver used as a store: submits, waits for the descriptor as a loop does, takes the reply.
struct Waited(Box<dyn Driver + Send>);

impl Store for Waited {
    fn call(&mut self, call: &Call) -> Result<Reply, Failed> {
        if let Some(reply) = self.0.submit(7, call.clone()) {
            return reply;
        }
        loop {
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            poll(&mut fds, None).expect("poll");
            if let Some((token, reply)) = self.0.ready().pop() {
                assert_eq!(token, 7);
                return reply;
            }
        }
    }
}

fn both_faces(place: impl Fn() -> Place) {
    let blocking = place();
    holds(&|| blocking.open().expect("it opens"));
    let driven = place();
    holds(&|| match &driven {
        Place::Directory(path) => Box::new(Waited(Box::new(
            driver::Committing::new(path).expect("it opens"),
        ))),
        Place::Redis(address) => Box::new(Waited(Box::new(
            redis::Pipelined::new(address).expect("it opens"),
        ))),
    });
}

#[test]
fn on_disk() {
    let directory = tempfile::tempdir().expect("a directory");
    let count = std::cell::Cell::new(0);
    both_faces(|| {
        count.set(count.get() + 1);
        Place::Directory(directory.path().join(count.get().to_string()))
    });
}

/// A Redis server of the test's own, on a port that was free; ended when dropped.
struct Redis {
    child: Child,
    port: u16,
    _directory: tempfile::TempDir,
}

impl Redis {
    /// `None` where no redis-server is installed.
    fn start(more: &[&str]) -> Option<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|socket| socket.local_addr())
            .expect("a port")
            .port();
        let directory = tempfile::tempdir().expect("a directory");
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(directory.path())
            .args(more)
            .stdout(Stdio::null())
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) => {
                eprintln!(
                    "not run: redis-server does not start ({error}); apt-get install redis-server"
                );
                return None;
            }
        };
        let new = Self {
            child,
            port,
            _directory: directory,
        };
        let end = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(new)
    }

    fn place(&self, rest: &str) -> Place {
        let url = match rest.split_once('@') {
            Some((user, path)) => format!("redis://{user}@127.0.0.1:{}{path}", self.port),
            None => format!("redis://127.0.0.1:{}{rest}", self.port),
        };
        Place::parse(&url).expect("an address")
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn in_redis() {
    let Some(server) = Redis::start(&[]) else {
        return;
    };
    let database = std::cell::Cell::new(0);
    both_faces(|| {
        database.set(database.get() + 1);
        server.place(&format!("/{}", database.get()))
    });
}

#[test]
fn in_redis_with_a_password() {
    let Some(server) = Redis::start(&["--requirepass", "sesame"]) else {
        return;
    };
    let database = std::cell::Cell::new(0);
    both_faces(|| {
        database.set(database.get() + 1);
        server.place(&format!(":sesame@/{}", database.get()))
    });
    let refused = server.place("").drive().expect("set up");
    let Place::Redis(address) = server.place("") else {
        panic!()
    };
    drop(refused);
    let mut waited = Waited(Box::new(redis::Pipelined::new(&address).expect("set up")));
    let said = waited
        .call(&Call::Page { visit: false })
        .expect_err("no password");
    assert!(said.to_string().contains("NOAUTH"), "{said}");
}

/// A server that goes away fails the calls, and one that comes back serves them.
#[test]
fn redis_goes_and_comes_back() {
    let Some(mut server) = Redis::start(&[]) else {
        return;
    };
    let place = server.place("");
    let Place::Redis(address) = &place else {
        panic!()
    };
    let mut stores: [Box<dyn Store>; 2] = [
        place.open().expect("it opens"),
        Box::new(Waited(Box::new(
            redis::Pipelined::new(address).expect("set up"),
        ))),
    ];
    for store in &mut stores {
        page(&mut **store, true);
    }
    server.child.kill().expect("it can be killed");
    server.child.wait().expect("it ends");
    for store in &mut stores {
        for _ in 0..2 {
            let said = store
                .call(&Call::Page { visit: true })
                .expect_err("it is gone");
            assert!(said.to_string().contains("redis-cli ping"), "{said}");
        }
    }
    server.child = Command::new("redis-server")
        .args(["--port", &server.port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no"])
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts again");
    let end = Instant::now() + Duration::from_secs(10);
    for store in &mut stores {
        while store.call(&Call::Page { visit: false }).is_err() {
            assert!(Instant::now() < end, "the store does not come back");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
