//! `wakeone run --split`: a queue of its own for each worker of a server that shares one listening socket among them,
//! and knows nothing of Wakeone.
//!
//! The server is started as it is, with a preloaded library (`crates/shim`). When one of its processes first waits
//! for connections on a listener, the library asks the broker here, over a UNIX socket. The broker makes a second
//! socket beside the shared one, in the same reuseport group. The library puts it in the listener's place: under the
//! same number, in that process only. So each queue is held by its worker alone, and closes with it; the kernel then
//! moves its connections. The shared socket stays with the server's first process. Nobody accepts from it, and the
//! program does not choose it while another socket is available.

mod broker;
mod datagrams;
mod left;
mod library;
mod program;
mod readers;
mod server;
mod shared;
#[cfg(test)]
mod tests;
mod unsplit;

use std::collections::{HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wakeone_kernel::capability;
use wakeone_kernel::{clone_listener, procfs, socket};
use wakeone_shim::protocol::Reply;

use crate::metrics::{self, Monitor};
use crate::paths::Paths;
use crate::policy::{Affinity, Policy};
use crate::privileges;
use crate::slot_sockets::inode_of;
use broker::{Answer, Broker, QueueRequest};
use left::WakeReply;
use library::Library;
pub use library::sweep;
use readers::Readers;
use server::{Server, Signals};
use shared::{QueueGrant, Shared, in_words};
use unsplit::Unsplit;
use wakeone_model::layout::counted;

/// How often to check the state of sockets and processes.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// The same while datagrams wait in an orphaned queue.
const DRAIN_EVERY: Duration = Duration::from_millis(2);
/// A server that listens at more addresses than this has a fault.
const MOST_LISTENERS: usize = 64;
/// How many sockets about to listen are remembered. The library reports each of them again in a moment.
const MOST_OPENED: usize = 1024;
/// `--split=check`: it ends when nothing new has happened for this long, and after this long at the latest.
const QUIET: Duration = Duration::from_secs(1);
const LONGEST_CHECK: Duration = Duration::from_secs(15);

/// Why a server is not started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command cannot be started.
    #[error("cannot start `{command}`: {source}")]
    Start {
        /// The program.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// There is no place for the library.
    #[error(
        "cannot write the library for the server's processes: {0}; it takes a folder that only root and you can write, as all above it, and that is not mounted noexec: of root /run or /var/lib/wakeone, else $XDG_RUNTIME_DIR, $XDG_CACHE_HOME or ~/.cache, or $TMPDIR"
    )]
    Library(io::Error),
    /// Something of our own failed.
    #[error("cannot split: {what}: {source}")]
    Own {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Metrics cannot be served there.
    #[error("{0}")]
    Metrics(String),
    /// The chosen policy takes privileges that we do not have.
    #[error(
        "cannot steer by {policy}: it needs {missing}: start as root or with these capabilities, or leave --policy away"
    )]
    NotAllowed {
        /// The chosen policy.
        policy: Policy,
        /// The missing privileges.
        missing: String,
    },
}

/// The options of `run --split`.
#[derive(Debug, Clone)]
pub struct Options {
    /// The server.
    pub command: Vec<String>,
    /// How a worker is chosen; `None`: the best policy that our privileges allow.
    pub policy: Option<Policy>,
    /// For UDP: keeps datagrams of one flow together, or not.
    pub affinity: Affinity,
    /// Move the queues of stuck workers.
    pub rescue: bool,
    /// How long connections may wait without one being accepted.
    pub stuck_after: Duration,
    /// Where groups keep their state.
    pub runtime_dir: PathBuf,
    /// Change nothing, print what would be done, and end the server.
    pub check: bool,
    /// Where to serve metrics.
    pub metrics: Option<SocketAddr>,
    /// Include waits and wake-ups in the metrics.
    pub metrics_tracing: bool,
}

/// The options with which groups are made.
#[derive(Debug, Clone)]
struct SteeringConfig {
    paths: Paths,
    rescue: bool,
    stuck_after: Duration,
    /// The policy that chooses among UDP queues.
    datagrams: Policy,
    affinity: Affinity,
}

/// A queue that was made for a process or a thread, and is not yet in its place.
enum Granted {
    Listener(QueueGrant),
    Reader(readers::QueueGrant),
}

/// The chooser among the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Steering {
    /// Our program.
    Full(Policy),
    /// The kernel's hash.
    None,
}

/// Starts a server with its listeners split, and returns its exit code when it is over.
///
/// # Errors
/// See [`Error`]. A later failure leaves the server's processes with the listener that they share.
pub fn run(options: &Options) -> Result<u8, Error> {
    let own = |what| move |source| Error::Own { what, source };
    let steering = steering(options)?;
    let command = options.command.first().cloned().unwrap_or_default();
    if let Some(obstacle) = program::obstacle(&command) {
        if options.check {
            tell(&format!("cannot split: {obstacle}"));
            return Ok(1);
        }
        tracing::warn!(event = "unsplit", "nothing is split: {obstacle}");
    }
    let http = options.metrics.map(metrics::bind).transpose();
    let http = http.map_err(Error::Metrics)?;
    let signals = Signals::take().map_err(own("taking signals"))?;
    let library = Library::write().map_err(Error::Library)?;
    let mut broker = Broker::open().map_err(own("opening the broker's socket"))?;
    let mut server = Server::start(&options.command, &library.path(), &broker.variable())
        .map_err(|source| Error::Start { command, source })?;
    privileges::keep_for_splitting();
    let mut splitter = Splitter::new(options, steering, server.pid());
    // The server runs already: it works as well without metrics.
    match Monitor::start(http) {
        Ok(monitor) => splitter.monitor = Some(monitor),
        Err(error) => tracing::warn!("no figures are served: {error}"),
    }
    if options.check {
        tracing::info!(
            event = "check",
            "the server was started; waiting at most {} s for it to listen, and for its workers to wait for connections",
            LONGEST_CHECK.as_secs()
        );
    }
    let code = serve(&mut broker, &mut splitter, &mut server, &signals);
    if splitter.check {
        splitter.report();
    } else {
        splitter.tell_end(code.as_ref().ok());
    }
    splitter.end();
    drop(library);
    code.map_err(own("waiting for the server"))
}

/// The steering that our privileges allow.
fn steering(options: &Options) -> Result<Steering, Error> {
    let missing = capability::missing();
    match (options.policy, missing.is_empty()) {
        (policy, true) => Ok(Steering::Full(policy.unwrap_or_default())),
        (None | Some(Policy::Hash), false) => {
            tracing::warn!(
                event = "degraded",
                "each worker gets a queue of its own, but nothing steers: that needs {}; the kernel's hash chooses, and the queue of a stuck worker waits for it",
                missing.join(" and ")
            );
            Ok(Steering::None)
        }
        (Some(policy), false) => Err(Error::NotAllowed {
            policy,
            missing: missing.join(" and "),
        }),
    }
}

/// Runs until the last of the server's processes has ended.
fn serve(
    broker: &mut Broker<Granted>,
    splitter: &mut Splitter,
    server: &mut Server,
    signals: &Signals,
) -> io::Result<u8> {
    let mut followed = Instant::now();
    loop {
        let mut left = FOLLOW_EVERY.saturating_sub(followed.elapsed());
        if splitter.drain_step() {
            left = left.min(DRAIN_EVERY);
        }
        wait(broker, signals, left);
        for signal in signals.pending() {
            server.signal(signal);
        }
        broker.attend(splitter);
        if followed.elapsed() >= FOLLOW_EVERY {
            splitter.follow();
            followed = Instant::now();
        }
        if let Some(code) = server.reap()? {
            return Ok(code);
        }
        if splitter.check_is_over() {
            server.signal(rustix::process::Signal::TERM);
        }
    }
}

fn wait(broker: &Broker<Granted>, signals: &Signals, at_most: Duration) {
    let mut wanted: Vec<PollFd<'_>> = broker
        .descriptors()
        .chain([signals.as_fd()])
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: at_most.subsec_nanos().into(),
    };
    let _ = poll(&mut wanted, Some(&limit));
}

fn tell(line: &str) {
    use io::Write;
    // The reader may be gone; we wait for the server's end all the same.
    let _ = writeln!(io::stdout(), "{line}");
}

/// Decides about the server's listeners.
struct Splitter {
    wish: SteeringConfig,
    steering: Steering,
    shared: Vec<Shared>,
    check: bool,
    /// Sentences that were logged, to log each only once.
    said: HashSet<String>,
    /// The results of `--split=check`.
    findings: Vec<String>,
    news: Instant,
    started: Instant,
    ending: bool,
    server: u32,
    monitor: Option<Monitor>,
    traced: bool,
    /// Sockets that the library puts into a reuseport group, the last ones: their cookies, which are never used
    /// again.
    opened: VecDeque<u64>,
    /// UDP sockets beside which there are queues.
    readers: Vec<Readers>,
    /// Why those are not steered by the policy that was asked for.
    unfit: Option<String>,
    /// Reports the addresses that are left alone.
    unsplit: Unsplit,
    /// The server's own groups of sockets, by cookie: they had SO_REUSEPORT set when they were reported.
    foreign: VecDeque<u64>,
    /// How many queues were granted.
    given: u64,
}

impl Splitter {
    fn new(options: &Options, steering: Steering, server: u32) -> Self {
        Self {
            wish: SteeringConfig {
                paths: Paths::of(&options.runtime_dir),
                rescue: options.rescue,
                stuck_after: options.stuck_after,
                datagrams: options
                    .policy
                    .filter(|policy| policy.fits_datagrams().is_ok())
                    .unwrap_or(Policy::FOR_DATAGRAMS),
                affinity: options.affinity,
            },
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

    fn of_inode(&mut self, inode: u64) -> Option<usize> {
        self.shared.iter().position(|shared| shared.knows(inode))
    }

    /// Whether the library put a socket into a reuseport group.
    fn has_opened(&self, socket: &OwnedFd) -> bool {
        socket::cookie(socket).is_ok_and(|cookie| self.opened.contains(&cookie))
    }

    /// Admits a listener that may be split. Returns its index in `shared`.
    fn admit(&mut self, pid: u32, fd: i32, socket: &OwnedFd) -> Option<usize> {
        if !clone_listener::is_tcp_listener(socket) || self.shared.len() >= MOST_LISTENERS {
            return None;
        }
        match Shared::new(pid, fd, socket) {
            Ok(shared) => {
                self.news = Instant::now();
                tracing::debug!("{} is listened on by process {pid}", shared.address());
                self.shared.push(shared);
                Some(self.shared.len() - 1)
            }
            Err(error) => {
                tracing::debug!("a listener of process {pid} is left alone: {error}");
                None
            }
        }
    }

    fn once(&mut self, sentence: String) {
        if self.said.insert(sentence.clone()) {
            tracing::warn!(event = "shared", "{sentence}");
        }
    }

    fn note(&mut self, finding: String) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
            self.news = Instant::now();
        }
    }

    fn follow(&mut self) {
        for shared in &mut self.shared {
            shared.follow();
            let address = shared.address();
            for event in shared.events() {
                event.log(&address);
            }
        }
        let (over, there): (Vec<_>, Vec<_>) = std::mem::take(&mut self.shared)
            .into_iter()
            .partition(Shared::is_over);
        self.shared = there;
        for shared in over {
            self.end_of(shared);
        }
        self.follow_readers();
        self.look_unsplit();
    }

    /// Reports listeners that stay as they are.
    fn look_unsplit(&mut self) {
        let shared = &self.shared;
        let known = |inode| shared.iter().any(|one| one.knows(inode));
        let split = |address| {
            let mut at = shared.iter().filter(|one| one.address() == address);
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

    /// Whether a socket with SO_REUSEPORT is shared by the server's processes all the same, as with hypercorn. Then
    /// the process that listens got it from its parent, and the address has no other socket.
    fn is_shared(&self, pid: u32, socket: &OwnedFd) -> bool {
        let cookie = socket::cookie(socket).unwrap_or_default();
        let inherited = inode_of(socket).is_ok_and(|inode| shared::first_holder(pid, inode) != pid);
        !self.foreign.contains(&cookie)
            && inherited
            && clone_listener::address(socket).is_some_and(|at| unsplit::sockets_at(at) == 1)
    }

    /// Notes a socket that belongs to a group of the server's own making.
    fn is_foreign(&mut self, socket: &OwnedFd) {
        if let Ok(cookie) = socket::cookie(socket) {
            if self.foreign.len() >= MOST_OPENED {
                self.foreign.pop_front();
            }
            self.foreign.push_back(cookie);
        }
    }

    /// Logs how the server ended, and how many queues it was given.
    fn tell_end(&self, code: Option<&u8>) {
        let how = code.map_or(String::new(), |code| format!(" with status {code}"));
        tracing::info!(
            event = "end",
            queues = self.given,
            "the server ended{how}; {} of its own were given out",
            counted(self.given, "queues")
        );
    }

    fn end_of(&self, shared: Shared) {
        if let Some(monitor) = &self.monitor {
            monitor.remove(&shared.name());
        }
        shared.end();
    }

    /// Whether a check has seen all that it waits for. Returns true only once.
    fn check_is_over(&mut self) -> bool {
        let quiet = !self.findings.is_empty() && self.news.elapsed() >= QUIET;
        let over = self.check && !self.ending && (quiet || self.started.elapsed() >= LONGEST_CHECK);
        self.ending |= over;
        over
    }

    fn report(&self) {
        if self.findings.is_empty() {
            let seen = if self.unsplit.has_seen_any() {
                "it listens, but no process was seen to begin to wait for connections"
            } else {
                "no process of the server was seen to listen by TCP"
            };
            tell(&format!(
                "nothing to split: {seen} in {} s; if it starts more slowly, look at the log of `wakeone run --split`",
                LONGEST_CHECK.as_secs()
            ));
        }
        for finding in &self.findings {
            tell(finding);
        }
    }

    fn end(mut self) {
        for shared in std::mem::take(&mut self.shared) {
            self.end_of(shared);
        }
        for readers in std::mem::take(&mut self.readers) {
            self.end_of_readers(readers);
        }
    }

    /// Reports a decision about a process for `--split=check`, and logs why a process stays as it is.
    fn judged(
        &mut self,
        address: &dyn std::fmt::Display,
        claim: &QueueRequest<'_>,
        decision: &Result<(), shared::Reason>,
    ) {
        let who = format!("process {}{}", claim.pid, peek_name(claim.pid));
        match decision {
            Ok(()) if self.check => self.note(format!(
                "{address}: {who} would get a queue of its own (it waits in {})",
                in_words(claim.how)
            )),
            Err(reason) if self.check => {
                self.note(format!(
                    "{address}: {who} stays with the shared socket: {reason}"
                ));
            }
            Err(
                shared::Reason::Owner
                | shared::Reason::Alone
                | shared::Reason::Has
                | shared::Reason::First,
            )
            | Ok(()) => {}
            // A worker's successor has the same reason, which is logged once.
            Err(reason) => self.once(format!(
                "{address}: {} stays with the shared socket: {reason}",
                peek_name(claim.pid).trim_matches([' ', '(', ')'])
            )),
        }
    }
}

/// Formats ` (name)` of a process; nothing if it has ended.
fn peek_name(pid: u32) -> String {
    procfs::identity(pid).map_or_else(String::new, |identity| format!(" ({})", identity.name))
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
        if clone_listener::is_udp(claim.socket) {
            return self.queue_for_process(claim).map(Granted::Reader);
        }
        self.queue_for_worker(claim).map(Granted::Listener)
    }

    fn socket<'a>(&self, grant: &'a Granted) -> BorrowedFd<'a> {
        match grant {
            Granted::Listener(grant) => grant.socket(),
            Granted::Reader(grant) => grant.socket(),
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
                if let Some(at) = self.of_inode(grant.original) {
                    self.shared[at].rejected(pid, grant);
                }
            }
            Granted::Reader(grant) => {
                let inode = grant.original;
                if let Some(at) = self.readers.iter().position(|one| one.inode() == inode) {
                    self.readers[at].rejected(grant);
                }
            }
        }
    }
}

impl Splitter {
    /// A queue for a process that is about to wait for connections.
    fn queue_for_worker(&mut self, claim: &QueueRequest<'_>) -> Option<QueueGrant> {
        let inode = rustix::fs::fstat(claim.socket).ok()?.st_ino;
        let at = match self.of_inode(inode) {
            Some(at) => at,
            // It listens already: by another process, whose message is still to come.
            None => {
                let socket = claim.socket.try_clone_to_owned().ok()?;
                let opened = self.has_opened(&socket) || self.is_shared(claim.pid, &socket);
                opened.then(|| self.admit(claim.pid, claim.fd, &socket))??
            }
        };
        let decision = self.shared[at].decide(claim.pid, inode, &self.steering);
        let address = self.shared[at].address();
        self.judged(&address, claim, &decision);
        let grant = match decision {
            Ok(()) if self.check => return None,
            Ok(()) => {
                let wish = self.wish.clone();
                self.shared[at].grant(claim.pid, claim.socket, &wish, &mut self.steering)
            }
            Err(reason) => Err(reason),
        };
        match grant {
            Ok(grant) => Some(grant),
            Err(reason) => {
                if !self.check {
                    self.shared[at].stays(claim.pid, inode);
                }
                if fails_late(&reason) {
                    let address = self.shared[at].address();
                    self.once(format!(
                        "{address}: a worker stays with the shared socket: {reason}"
                    ));
                }
                None
            }
        }
    }

    fn listens_on_its_own(&mut self, pid: u32, fd: i32, grant: QueueGrant) {
        let Some(at) = self.of_inode(grant.original) else {
            return;
        };
        self.shared[at].accepted(pid, fd, grant);
        self.given += 1;
        let shared = &self.shared[at];
        let address = shared.address();
        let first = format!("{address} is split");
        if shared.queues() > 0 && self.said.insert(first) {
            let source = shared.source(&self.wish.paths, self.traced);
            if let (Some(monitor), Some(source)) = (&self.monitor, source) {
                monitor.add(source);
            }
            match self.steering {
                Steering::Full(policy) => {
                    tracing::info!(event = "split", %address, %policy, "ready: {address} is split: each worker gets a queue of its own, policy {policy}, group `{}`", shared.name())
                }
                Steering::None => {
                    tracing::info!(event = "split", %address, "ready: {address} is split: each worker gets a queue of its own, the kernel's hash chooses")
                }
            }
        }
        tracing::debug!("{address}: process {pid} has a queue of its own");
    }
}

/// Reasons that come up only when a queue is made.
fn fails_late(reason: &shared::Reason) -> bool {
    use shared::Reason::{Sibling, Steering};
    matches!(reason, Sibling(_) | Steering(_))
}
