//! The common part of the library's tests: compiled programs of this folder, and a broker that gives a queue to every
//! process and thread that asks.

// Each test program uses its own part of this.
#![allow(dead_code)]

use std::collections::{HashMap, HashSet};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use wakeone_kernel::socket::clone_socket::{leave_reuseport_group, reader};
use wakeone_shim::protocol::{REQUEST_BYTES, Reply, Request, Token};

/// A folder with the library and a program of `tests/` in it.
pub struct Bench {
    folder: tempfile::TempDir,
    program: PathBuf,
}

impl Bench {
    /// Compiles `tests/NAME.c`.
    pub fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("split.so"), wakeone_shim::LIBRARY).expect("library");
        let program = folder.path().join(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c"));
        let compiled = Command::new("cc")
            .args([
                "-O1",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wno-nonnull",
                "-pthread",
                "-o",
            ])
            .arg(&program)
            .arg(&source)
            .status()
            .expect("a C compiler");
        assert!(compiled.success(), "{}", source.display());
        Self { folder, program }
    }

    /// Runs the program. With a broker, it preloads the library.
    pub fn run(&self, arguments: &[&str], broker: Option<&Broker>) -> Output {
        let mut command = Command::new("timeout");
        // Ten times as many calls may take ten times as long.
        let limit_s = if soak() { "1000" } else { "100" };
        command.arg(limit_s).arg(&self.program).args(arguments);
        if let Some(broker) = broker {
            command
                .env("LD_PRELOAD", self.folder.path().join("split.so"))
                .env(wakeone_shim::VARIABLE, &broker.variable);
        }
        command.output().expect("runs")
    }
}

/// Whether the long tests are run.
pub fn soak() -> bool {
    std::env::var_os("WAKEONE_SOAK").is_some_and(|value| value == "1")
}

/// A broker in a thread, for the life of the test.
pub struct Broker {
    variable: String,
    given: Arc<AtomicU64>,
}

impl Broker {
    /// Opens it. `alone`: a socket takes no datagram any more once a process has a queue beside it, as nothing here
    /// steers.
    pub fn open(alone: bool) -> Self {
        Self::serve(alone, None)
    }

    /// One that does its work badly.
    pub fn with(fault: Fault) -> Self {
        Self::serve(false, Some(fault))
    }

    fn serve(alone: bool, fault: Option<Fault>) -> Self {
        let name = format!("wakeone-test-{:032x}", rand::random::<u128>());
        let token = Token::new(rand::random());
        let variable = token.variable(&name);
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("socket");
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("name");
        rustix::net::bind(&socket, &address).expect("bind");
        rustix::net::listen(&socket, 100).expect("listen");
        let given = Arc::new(AtomicU64::new(0));
        let table = Arc::new(Table {
            alone,
            fault,
            token,
            owners: Mutex::default(),
            known: Mutex::default(),
            given: given.clone(),
        });
        std::thread::spawn(move || {
            loop {
                let connection = rustix::net::accept_with(&socket, SocketFlags::CLOEXEC);
                let (connection, table) = (connection.expect("accept"), table.clone());
                // A slow process holds up no other.
                std::thread::spawn(move || table.converse(&connection));
            }
        });
        Self { variable, given }
    }

    /// The number of queues that processes and threads have.
    pub fn given(&self) -> u64 {
        self.given.load(Ordering::SeqCst)
    }
}

/// The place of a fault in a conversation: before the answer to the claim, after the queue was sent, and before the
/// answer to Taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    Claim,
    Queue,
    Taken,
}

/// A fault of a broker.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// It takes its time.
    Slow(Point, Duration),
    /// It dies.
    HangsUp(Point),
}

struct Table {
    alone: bool,
    fault: Option<Fault>,
    token: Token,
    /// The process that was given a queue, by inode.
    owners: Mutex<HashMap<u64, i32>>,
    /// Sockets that are in a group of ours.
    known: Mutex<HashSet<u64>>,
    given: Arc<AtomicU64>,
}

impl Table {
    /// Whether the conversation continues at this point.
    fn passes(&self, here: Point) -> bool {
        match self.fault {
            Some(Fault::HangsUp(point)) => point != here,
            Some(Fault::Slow(point, time)) if point == here => {
                std::thread::sleep(time);
                true
            }
            _ => true,
        }
    }

    fn converse(&self, connection: &OwnedFd) {
        let peer = rustix::net::sockopt::socket_peercred(connection).expect("peer");
        let pid = peer.pid.as_raw_nonzero().get();
        let Some((request, Some(socket))) = hear(connection, &self.token) else {
            return;
        };
        if !self.passes(Point::Claim) {
            return;
        }
        match request {
            // It keeps no queues, and sends no empty datagrams.
            Request::GivenBack { .. } | Request::Left { .. } => say(connection, Reply::Leave, None),
            Request::Claim { .. } => {
                let owner = self.owners.lock().expect("owners").get(&inode(&socket)) == Some(&pid);
                match owner {
                    true => say(connection, Reply::Leave, None),
                    false => self.give(connection, &socket, Some(pid)),
                }
            }
            Request::Reader { .. } => self.give(connection, &socket, None),
            Request::Taken { .. } => {}
        }
    }

    /// Gives a queue beside a socket to a process in whose place it is then, or to a thread.
    fn give(&self, connection: &OwnedFd, socket: &OwnedFd, owner: Option<i32>) {
        let queue = {
            // Two that ask at once must not both think that it is in no group yet.
            let mut known = self.known.lock().expect("known");
            let is_known = known.contains(&inode(socket));
            let queue = reader(socket, is_known, std::process::id());
            if let Ok(queue) = &queue {
                known.extend([inode(socket), inode(queue)]);
            }
            queue
        };
        let Ok(queue) = queue else {
            return say(connection, Reply::Leave, None);
        };
        say(connection, Reply::Queue, Some(&queue));
        if !self.passes(Point::Queue) {
            return;
        }
        let Some((Request::Taken { .. }, None)) = hear(connection, &self.token) else {
            return;
        };
        if !self.passes(Point::Taken) {
            return;
        }
        self.given.fetch_add(1, Ordering::SeqCst);
        if let Some(pid) = owner {
            let mut owners = self.owners.lock().expect("owners");
            owners.insert(inode(&queue), pid);
            if self.alone {
                leave_reuseport_group(socket).expect("left");
            }
        }
        drop(queue);
        say(connection, Reply::Done, None);
    }
}

fn inode(socket: &OwnedFd) -> u64 {
    rustix::fs::fstat(socket).expect("stat").st_ino
}

fn hear(connection: &OwnedFd, token: &Token) -> Option<(Request, Option<OwnedFd>)> {
    let mut bytes = [0_u8; REQUEST_BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let heard = rustix::net::recvmsg(
        connection,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .ok()?;
    let socket = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
        _ => None,
    });
    Some((Request::parse(&bytes[..heard.bytes], token).ok()?, socket))
}

fn say(connection: &OwnedFd, what: Reply, with: Option<&OwnedFd>) {
    let bytes = what.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let sockets: Vec<_> = with.iter().map(|socket| socket.as_fd()).collect();
    if !sockets.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&sockets));
    }
    let _ = rustix::net::sendmsg(
        connection,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
}

impl Broker {
    /// A broker's name that does not exist.
    pub fn nobody() -> Self {
        Self {
            variable: Token::new(rand::random())
                .variable(&format!("wakeone-test-{:032x}", rand::random::<u128>())),
            given: Arc::default(),
        }
    }
}
