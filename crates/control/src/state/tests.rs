use std::os::unix::fs::MetadataExt;

use super::*;
use crate::state::{Identity, ListenAt};
use wakeone_model::listener::Protocol;
use wakeone_model::network::Network;

fn at(port: u16) -> ListenAt {
    let address: std::net::SocketAddr = ([127, 0, 0, 1], port).into();
    ListenAt::of(Protocol::Tcp, address.into())
}

fn sample() -> State {
    let slot = |pid: u32, inode| SlotRecord {
        worker: Some(Identity { pid, started: 9 }),
        current: true,
        inodes: vec![inode],
        beside: None,
        orphaned: false,
    };
    State {
        attached: false,
        one_queue: false,
        reserved: Vec::new(),
        workers: 2,
        serving: 1,
        fixed: Some("it is so".to_owned()),
        network: Some(Network::new(7)),
        schema: SCHEMA,
        name: "web".to_owned(),
        boot: "b".to_owned(),
        supervisor: Identity { pid: 5, started: 8 },
        listen: vec![at(80)],
        backlog: 128,
        task: Task {
            command: vec!["server".to_owned(), "{fd}".to_owned()],
            account: None,
            keep_caps: Vec::new(),
            nonblocking: true,
            stdin: false,
        },
        slots: vec![
            slot(6, 100),
            slot(7, 101),
            SlotRecord {
                worker: None,
                current: false,
                inodes: vec![102],
                beside: None,
                orphaned: false,
            },
        ],
    }
}

#[test]
fn what_is_written_is_read() {
    let state = sample();
    assert_eq!(State::decode(&state.encode(), "web"), Ok(state));
    let unix = State {
        attached: true,
        listen: vec![ListenAt::of(
            Protocol::Unix,
            "unix:/run/app.sock".parse().expect("address"),
        )],
        ..sample()
    };
    assert_eq!(State::decode(&unix.encode(), "web"), Ok(unix));
}

#[test]
fn states_survive_foreign_bytes() {
    crate::foreign::survives("state", &[sample().encode()], |bytes| {
        if let Ok(state) = State::decode(bytes, "web") {
            assert!(state.slots.len() <= MOST_SLOTS && state.name == "web");
            assert_eq!(State::decode(&state.encode(), "web"), Ok(state));
        }
    });
}

#[test]
fn each_flaw_is_seen() {
    type Spoil = fn(&mut State);
    let spoil: &[(&str, Spoil)] = &[
        ("version", |state| state.schema = 2),
        ("another group", |state| state.name = "other".to_owned()),
        ("addresses", |state| state.listen.clear()),
        ("no port", |state| state.listen[0] = at(0)),
        ("UNIX", |state| {
            state.listen[0] = ListenAt::of(Protocol::Unix, "unix:@app".parse().expect("address"));
        }),
        ("slots is impossible", |state| state.slots.clear()),
        ("slots is impossible", |state| {
            state.slots = (0..257)
                .map(|n| SlotRecord {
                    worker: None,
                    current: false,
                    inodes: vec![n],
                    beside: None,
                    orphaned: false,
                })
                .collect()
        }),
        ("negative", |state| state.backlog = -1),
        ("number of reserved", |state| state.reserved = vec![None; 9]),
        ("no private port", |state| {
            let none = Reserved {
                private_port: 0,
                inode: 9,
            };
            state.reserved = vec![Some(none); state.listen.len()];
        }),
        ("no command", |state| state.task.command.clear()),
        ("network", |state| {
            let mut network = Network::new(7);
            network.container = Some("..".to_owned());
            state.network = Some(network);
        }),
        ("lacks a listener", |state| state.slots[1].inodes.clear()),
        ("same listener", |state| state.slots[1].inodes[0] = 100),
        ("same worker", |state| {
            state.slots[1].worker = state.slots[0].worker
        }),
        ("pid is impossible", |state| {
            state.slots[0].worker = Some(Identity { pid: 1, started: 1 })
        }),
        ("pid is impossible", |state| {
            state.slots[0].worker = Some(Identity {
                pid: u32::MAX,
                started: 1,
            })
        }),
    ];
    for (flaw, change) in spoil {
        let mut state = sample();
        change(&mut state);
        let found = State::decode(&state.encode(), "web").expect_err(flaw);
        assert!(found.contains(flaw), "{found} is not {flaw}");
    }
}

#[test]
fn other_bytes_are_refused() {
    let text = String::from_utf8(sample().encode()).expect("JSON");
    let more = text.replacen("\"schema\"", "\"surprise\": 1, \"schema\"", 1);
    for bytes in [
        &b""[..],
        b"{}",
        b"null",
        b"[[[[",
        b"\xff\xfe",
        &text.as_bytes()[..text.len() - 2],
        more.as_bytes(),
    ] {
        State::decode(bytes, "web").expect_err("refused");
    }
}

#[test]
fn one_supervisor_at_a_time() {
    let root = tempfile::tempdir().expect("folder");
    let first = GroupDir::take(root.path(), "web").expect("first");
    let error = GroupDir::take(root.path(), "web")
        .expect_err("second")
        .to_string();
    assert!(
        error.contains(&format!("(pid {})", std::process::id())),
        "{error}"
    );
    GroupDir::take(root.path(), "other").expect("another group");
    drop(first);
    assert!(!root.path().join("web").exists(), "nothing is left");
    GroupDir::take(root.path(), "web").expect("free again");
}

#[test]
fn a_state_outlives_its_writer() {
    let root = tempfile::tempdir().expect("folder");
    let dir = GroupDir::take(root.path(), "web").expect("take");
    assert_eq!(dir.load().expect("none yet"), None);
    dir.store(&sample()).expect("store");
    drop(dir);
    let mode = |path: &str| {
        std::fs::metadata(root.path().join(path))
            .expect(path)
            .mode()
            & 0o777
    };
    assert_eq!((mode("web"), mode("web/state.json")), (0o700, 0o600));
    let dir = GroupDir::take(root.path(), "web").expect("take");
    assert_eq!(dir.load().expect("load"), Some(sample()));
    assert_eq!(names(root.path()).expect("names"), ["web"]);
    assert_eq!(load(root.path(), "web").expect("look"), Some(sample()));
    assert_eq!(load(root.path(), "other").expect("look"), None);
    dir.forget();
    drop(dir);
    assert!(!root.path().join("web").exists());
}

#[test]
fn planted_files_are_not_believed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let root = tempfile::tempdir().expect("folder");
    let dir = GroupDir::take(root.path(), "web").expect("take");
    let file = root.path().join("web/state.json");
    std::fs::write(&file, sample().encode()).expect("write");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).expect("mode");
    assert!(matches!(dir.load(), Err(StateError::Invalid { .. })));
    std::fs::rename(&file, root.path().join("elsewhere")).expect("move");
    symlink(root.path().join("elsewhere"), &file).expect("link");
    assert!(matches!(dir.load(), Err(StateError::File { .. })));
    std::fs::create_dir(root.path().join("open")).expect("folder");
    std::fs::set_permissions(
        root.path().join("open"),
        std::fs::Permissions::from_mode(0o777),
    )
    .expect("mode");
    assert!(matches!(
        GroupDir::take(root.path(), "open"),
        Err(StateError::Unsafe(_))
    ));
}

#[test]
fn names_are_plain() {
    for name in ["8080", "127_0_0_1-80", "__1-80", "a", &"x".repeat(64)] {
        assert!(is_name(name), "{name}");
    }
    for name in ["", "-x", "a.b", "a/b", "..", "ä", "a b", &"x".repeat(65)] {
        assert!(!is_name(name), "{name}");
    }
}
