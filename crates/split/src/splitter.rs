//! The part of the broker that decides which socket is split, and who gets a queue.

use std::collections::HashSet;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use wakeone_kernel::socket;
use wakeone_model::layout::counted;
use wakeone_shim::protocol::Reply;

use super::broker::{Answer, QueueRequest};
use super::config::{Options, SplitConfig};
use super::left::WakeReply;
use super::readers::{QueueGrant, Readers};
use wakeone::metrics::Monitor;

/// A server that receives at more addresses than this has a fault.
pub(super) const MOST_SOCKETS: usize = 64;
/// How many sentences are remembered.
pub(super) const MOST_SAID: usize = 1024;

/// Decides about the server's UDP sockets.
pub(super) struct Splitter {
    pub config: SplitConfig,
    /// The privileges that steering needs and that we do not have.
    pub missing: Option<String>,
    pub check: bool,
    /// Sentences that were logged, to log each only once; at most [`MOST_SAID`].
    pub said: HashSet<String>,
    /// The results of `--split=check`.
    pub findings: Vec<String>,
    pub news: Instant,
    pub started: Instant,
    pub ending: bool,
    pub monitor: Option<Arc<Monitor>>,
    /// UDP sockets beside which there are queues.
    pub readers: Vec<Readers>,
    /// Why those are not steered by the policy that was asked for.
    pub unfit: Option<String>,
    /// How many queues were granted.
    pub given: u64,
}

impl Splitter {
    pub fn new(options: &Options, missing: Option<String>) -> Self {
        Self {
            config: SplitConfig::of(options),
            missing,
            check: options.check,
            said: HashSet::new(),
            findings: Vec::new(),
            news: Instant::now(),
            started: Instant::now(),
            ending: false,
            monitor: None,
            readers: Vec::new(),
            unfit: options.policy.and_then(|policy| {
                let affinity = options.affinity.unwrap_or_default();
                policy.fits_datagrams(affinity).err()
            }),
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
        for one in &mut self.readers {
            one.follow();
            let group = one.group_mut();
            for event in group.events() {
                event.log(group);
            }
        }
        for over in self.readers.extract_if(.., |one| one.is_over()) {
            end(over, self.monitor.as_deref());
        }
    }

    /// Whether there is nothing to do until somebody asks.
    pub fn is_idle(&self) -> bool {
        self.readers.is_empty() && !self.check
    }

    /// Logs how the server ended, and how many queues it was given.
    pub fn tell_end(&self, code: u8) {
        let queues = match self.given {
            0 => "no queue".to_owned(),
            given => counted(given, "queues"),
        };
        tracing::info!(
            event = "end",
            queues = self.given,
            "the server ended with status {code}; its UDP readers had been given {queues} of their own",
        );
    }

    /// Removes all groups.
    pub fn end(self) {
        let monitor = self.monitor.as_deref();
        self.readers.into_iter().for_each(|one| end(one, monitor));
    }
}

fn end(readers: Readers, monitor: Option<&Monitor>) {
    if let Some(monitor) = monitor {
        monitor.remove(&readers.group().name());
    }
    readers.end();
}

impl Answer<QueueGrant> for Splitter {
    fn reader(&mut self, pid: u32, fd: i32, socket: &OwnedFd) -> Option<QueueGrant> {
        self.queue_for_thread(pid, fd, socket)
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

    fn request(&mut self, claim: &QueueRequest<'_>) -> Option<QueueGrant> {
        let is_udp = socket::is_udp(claim.socket);
        is_udp.then(|| self.queue_for_process(claim))?
    }

    fn socket<'a>(&self, grant: &'a QueueGrant) -> BorrowedFd<'a> {
        grant.new.socket()
    }

    fn accepted(&mut self, pid: u32, fd: i32, grant: QueueGrant) {
        self.reads_its_own(pid, fd, grant);
    }

    fn rejected(&mut self, _: u32, grant: QueueGrant) {
        let inode = grant.new.original;
        if let Some(at) = self.readers.iter().position(|one| one.inode() == inode) {
            self.readers[at].rejected(grant);
        }
    }
}
