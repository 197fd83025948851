//! The part of the broker that decides: which socket is split, and who gets a queue.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use wakeone_kernel::socket;
use wakeone_model::layout::counted;
use wakeone_shim::protocol::Reply;

use super::broker::{Answer, QueueRequest};
use super::config::{Options, SplitConfig, Steering};
use super::queue_group::SharedSocket;
use super::tcp::shared::{self, Shared};
use super::udp::left::WakeReply;
use super::udp::readers::{self, Readers};
use super::unsplit::{self, Unsplit};
use wakeone::metrics::Monitor;
use wakeone_kernel::socket::inode_of;

/// A server that listens at more addresses than this has a fault.
pub(super) const MOST_LISTENERS: usize = 64;
/// How many sockets about to listen are remembered. The library reports each of them again in a moment.
pub(super) const MOST_OPENED: usize = 1024;
/// How many sentences are remembered.
pub(super) const MOST_SAID: usize = 1024;

/// A queue that was made for a process or a thread, and is not yet in its place.
pub(super) enum Granted {
    Listener(shared::QueueGrant),
    Reader(readers::QueueGrant),
}

/// Decides about the server's listeners.
pub(super) struct Splitter {
    pub config: SplitConfig,
    pub steering: Steering,
    pub shared: Vec<Shared>,
    pub check: bool,
    /// Sentences that were logged, to log each only once; at most [`MOST_SAID`].
    pub said: HashSet<String>,
    /// The results of `--split=check`.
    pub findings: Vec<String>,
    pub news: Instant,
    pub started: Instant,
    pub ending: bool,
    pub server: u32,
    pub monitor: Option<Monitor>,
    pub traced: bool,
    /// Sockets that the library puts into a reuseport group, the last ones: their cookies, which are never used
    /// again.
    pub opened: VecDeque<u64>,
    /// UDP sockets beside which there are queues.
    pub readers: Vec<Readers>,
    /// Why those are not steered by the policy that was asked for.
    pub unfit: Option<String>,
    /// Reports the addresses that are left alone.
    pub unsplit: Unsplit,
    /// The server's own groups of sockets, by cookie: they had SO_REUSEPORT set when they were reported.
    pub foreign: VecDeque<u64>,
    /// How many queues were granted.
    pub given: u64,
}

impl Splitter {
    pub fn new(options: &Options, steering: Steering, server: u32) -> Self {
        Self {
            config: SplitConfig::of(options),
            steering,
            shared: Vec::new(),
            check: options.check,
            said: HashSet::new(),
            findings: Vec::new(),
            news: Instant::now(),
            started: Instant::now(),
            ending: false,
            server,
            monitor: None,
            traced: options.metrics_tracing,
            opened: VecDeque::new(),
            readers: Vec::new(),
            unfit: options
                .policy
                .and_then(|policy| policy.fits_datagrams().err()),
            unsplit: Unsplit::new(),
            foreign: VecDeque::new(),
            given: 0,
        }
    }

    pub fn once(&mut self, sentence: String) {
        // A worker can give itself any name, so there may be any number. Some are logged again then.
        if self.said.len() >= MOST_SAID {
            self.said.clear();
        }
        if self.said.insert(sentence.clone()) {
            tracing::warn!(event = "shared", "{sentence}");
        }
    }

    /// Checks what became of all sockets and processes. Call it some twenty times a second.
    pub fn follow(&mut self) {
        follow_all(&mut self.shared, self.monitor.as_ref());
        follow_all(&mut self.readers, self.monitor.as_ref());
        self.look_unsplit();
    }

    /// Reports listeners that stay as they are.
    fn look_unsplit(&mut self) {
        let shared = &self.shared;
        let known = |inode| shared.iter().any(|one| one.group().knows(inode));
        let split = |address| {
            let mut at = shared.iter().filter(|one| one.group().address == address);
            at.any(|one| one.queues() > 0)
        };
        for (address, why) in self.unsplit.look(self.server, known, split) {
            let sentence = why.told(address);
            match (self.check, why) {
                // Its processes are judged one by one.
                (true, unsplit::Why::Waits) => {
                    tracing::info!(
                        event = "check",
                        "{address} listens; waiting for its workers"
                    );
                }
                (true, _) => self.note(sentence),
                (false, unsplit::Why::Waits) => tracing::info!(event = "unsplit", "{sentence}"),
                (false, _) => tracing::warn!(event = "unsplit", "{sentence}"),
            }
        }
    }

    /// Logs how the server ended, and how many queues it was given.
    pub fn tell_end(&self, code: Option<&u8>) {
        let how = code.map_or(String::new(), |code| format!(" with status {code}"));
        let queues = match self.given {
            0 => "no queue".to_owned(),
            given => counted(given, "queues"),
        };
        tracing::info!(
            event = "end",
            queues = self.given,
            "the server ended{how}; its workers had been given {queues} of their own",
        );
    }

    /// Removes all groups.
    pub fn end(self) {
        let monitor = self.monitor.as_ref();
        self.shared.into_iter().for_each(|one| end(one, monitor));
        self.readers.into_iter().for_each(|one| end(one, monitor));
    }
}

/// Follows shared sockets, logs what their agents saw, and ends the groups of those that are gone.
fn follow_all<S: SharedSocket>(all: &mut Vec<S>, monitor: Option<&Monitor>) {
    for one in all.iter_mut() {
        one.follow();
        let group = one.group_mut();
        for event in group.events() {
            event.log(group);
        }
    }
    for over in all.extract_if(.., |one| one.is_over()) {
        end(over, monitor);
    }
}

fn end(socket: impl SharedSocket, monitor: Option<&Monitor>) {
    if let Some(monitor) = monitor {
        monitor.remove(&socket.group().name());
    }
    socket.end();
}

impl Answer<Granted> for Splitter {
    fn opens(&mut self, socket: &OwnedFd) -> Reply {
        let Ok(cookie) = socket::cookie(socket) else {
            return Reply::Leave;
        };
        if !self.opened.contains(&cookie) {
            if self.opened.len() >= MOST_OPENED {
                self.opened.pop_front();
            }
            self.opened.push_back(cookie);
        }
        Reply::Done
    }

    fn listens(&mut self, pid: u32, fd: i32, own: bool, socket: OwnedFd) -> Reply {
        let Ok(inode) = inode_of(&socket) else {
            return Reply::Leave;
        };
        if let Some(at) = self.of_inode(inode) {
            self.shared[at].listens_again(&socket);
            return Reply::Done;
        }
        // A socket that had SO_REUSEPORT before belongs to a group of the server's own making. The exception: another
        // process has just begun to listen on it too, and its message is still to come.
        let shared = own || self.has_opened(&socket) || self.is_shared(pid, &socket);
        if shared && self.admit(pid, fd, &socket).is_some() {
            Reply::Done
        } else {
            self.is_foreign(&socket);
            Reply::Leave
        }
    }

    fn reader(&mut self, pid: u32, fd: i32, socket: &OwnedFd) -> Option<Granted> {
        self.queue_for_thread(pid, fd, socket).map(Granted::Reader)
    }

    fn given_back(&mut self, pid: u32, queue: OwnedFd) -> Reply {
        let at = self.readers_of(&queue);
        if at.is_some_and(|at| self.readers[at].given_back(pid, queue)) {
            Reply::Done
        } else {
            Reply::Leave
        }
    }

    fn left(&mut self, pid: u32, socket: &OwnedFd) -> WakeReply {
        match self.readers_of(socket) {
            Some(at) => self.readers[at].ask_left(pid),
            None => WakeReply::Foreign,
        }
    }

    fn request(&mut self, claim: &QueueRequest<'_>) -> Option<Granted> {
        if socket::is_udp(claim.socket) {
            return self.queue_for_process(claim).map(Granted::Reader);
        }
        self.queue_for_worker(claim).map(Granted::Listener)
    }

    fn socket<'a>(&self, grant: &'a Granted) -> BorrowedFd<'a> {
        match grant {
            Granted::Listener(grant) => grant.new.socket(),
            Granted::Reader(grant) => grant.new.socket(),
        }
    }

    fn accepted(&mut self, pid: u32, fd: i32, grant: Granted) {
        match grant {
            Granted::Listener(grant) => self.listens_on_its_own(pid, fd, grant),
            Granted::Reader(grant) => self.reads_its_own(pid, fd, grant),
        }
    }

    fn rejected(&mut self, pid: u32, grant: Granted) {
        match grant {
            Granted::Listener(grant) => {
                if let Some(at) = self.of_inode(grant.new.original) {
                    self.shared[at].rejected(pid, grant);
                }
            }
            Granted::Reader(grant) => {
                let inode = grant.new.original;
                if let Some(at) = self.readers.iter().position(|one| one.inode() == inode) {
                    self.readers[at].rejected(grant);
                }
            }
        }
    }
}
