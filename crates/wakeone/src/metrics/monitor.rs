//! The thread that serves metrics. It reads the shared tables as anybody may, waits for nobody, and shares no lock with
//! an agent's rounds. A client that is slow or wrong holds up nothing but itself.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;
use wakeone_control::group_table::GroupTable;
use wakeone_kernel::capability::{self, Capability};
use wakeone_model::address::Address;
use wakeone_model::snapshot::Snapshot;
use wakeone_observe::{Target, Watcher, find};

use super::socket::Socket;
use super::values::{GroupMetrics, Metrics};
use super::{http, socket, table};
use wakeone_control::paths::Paths;
use wakeone_control::state;
use wakeone_control::status;
use wakeone_steering::agent::{Rescued, Rescuer};

/// Connections of each kind served at a time; more wait in the kernel's queue. Anybody may connect by HTTP, so HTTP has
/// a budget of its own: it cannot keep us from our socket.
const MOST_CONNECTIONS: usize = 32;
/// Once the budget of HTTP is spent, a client without a whole request after this time makes room for others.
const HASTE: Duration = Duration::from_millis(20);
/// The longest life of a connection, whichever side is slow.
const LIFE: Duration = Duration::from_secs(5);
/// A client that sends nothing on the UNIX socket for this long gets the snapshot.
const SILENCE: Duration = Duration::from_millis(100);
/// How often to check whether a rescue is done.
const RESCUE_BEAT: Duration = Duration::from_millis(2);
/// How often to look at watched listeners, to follow workers that come and go.
const WATCH_EVERY: Duration = Duration::from_millis(250);
/// The buffer size of a read.
const CHUNK: usize = 4 << 10;

/// Binds the address that metrics are served on. Call it before dropping capabilities.
///
/// # Errors
/// One sentence.
pub fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    let listener = TcpListener::bind(address);
    let ready = listener.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    ready.map_err(|error| {
        format!("cannot serve metrics on {address}: {error}; give another address with --metrics")
    })
}

/// A group whose metrics are served.
pub struct Source {
    /// Its name.
    name: String,
    paths: Paths,
    table: Option<GroupTable>,
    rescuer: Option<Rescuer>,
    watchers: Vec<Watcher>,
    seen: Vec<Snapshot>,
    socket: Option<Arc<Socket>>,
}

impl Source {
    /// Opens the sources of a group's metrics: its pins, if it has any. Call it before dropping capabilities. Its
    /// folder must be ours.
    pub fn open(paths: &Paths, name: &str) -> Self {
        let socket = socket::bind(paths, name).map_err(|error| {
            tracing::warn!("{name}: no figures and no rescue by its socket: {error}");
        });
        Self {
            name: name.to_owned(),
            table: GroupTable::open(paths, name).ok(),
            paths: paths.clone(),
            rescuer: None,
            watchers: Vec::new(),
            seen: Vec::new(),
            socket: socket.ok().map(Arc::new),
        }
    }

    /// Opens the group's table again, which was made since.
    #[must_use]
    pub fn with_new_table(mut self) -> Self {
        self.table = GroupTable::open(&self.paths, &self.name).ok();
        self
    }

    /// Adds the agent, which moves a slot's queue on request.
    #[must_use]
    pub fn with_rescuer(mut self, rescuer: Rescuer) -> Self {
        self.rescuer = Some(rescuer);
        self
    }

    /// Adds metrics from the kernel's tracepoints, if they may be used.
    #[must_use]
    pub fn traced(mut self, addresses: impl Iterator<Item = Address>) -> Self {
        for address in addresses {
            let found = find(&Target::Address(address)).unwrap_or_default();
            match found
                .iter()
                .map(|one| Watcher::start(one, true))
                .collect::<Result<Vec<_>, _>>()
            {
                Ok(watchers) => {
                    for missing in watchers.iter().flat_map(Watcher::missing) {
                        tracing::warn!("{}: {missing}", self.name);
                    }
                    self.watchers.extend(watchers);
                }
                Err(error) => tracing::warn!("{}: no figures from tracing: {error}", self.name),
            }
        }
        self
    }

    fn watch(&mut self) {
        let look = |watcher: &mut Watcher| watcher.look().and_then(|()| watcher.snapshot()).ok();
        // If a look fails, the next one makes up for it.
        self.seen = self.watchers.iter_mut().filter_map(look).collect();
    }

    fn metrics(&self) -> GroupMetrics {
        let state = state::load(&self.paths.runtime, &self.name).ok().flatten();
        let status = status::group(self.name.clone(), state.as_ref(), self.table.as_ref());
        GroupMetrics::of(status, &self.seen)
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

type Sources = BTreeMap<String, Source>;

/// Serves metrics until dropped.
#[derive(Debug)]
pub struct Monitor {
    sources: Arc<Mutex<Sources>>,
    stop: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

fn lock(sources: &Mutex<Sources>) -> MutexGuard<'_, Sources> {
    sources.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Monitor {
    /// Starts the thread. `http` is the socket to serve metrics on, see [`bind`].
    ///
    /// # Errors
    /// Out of descriptors or threads.
    pub fn start(http: Option<TcpListener>) -> io::Result<Self> {
        let sources = Arc::new(Mutex::new(Sources::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut server = Server {
            http,
            sources: Arc::clone(&sources),
            wake: Arc::clone(&wake),
            connections: Vec::new(),
            watched: Instant::now(),
        };
        let ended = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || {
                // Clients reach a thread that may look at workers, and nothing else.
                let keep = [Capability::CAP_SYS_PTRACE, Capability::CAP_DAC_READ_SEARCH];
                // Possible here because this thread executes nothing.
                if let Err(error) = capability::forbid_root() {
                    tracing::debug!(
                        "what root executes cannot be kept from getting capabilities: {error}"
                    );
                }
                if let Err(error) = capability::keep_only(&keep, &[]) {
                    tracing::debug!("keeping all capabilities: {error}");
                }
                while !ended.load(Relaxed) {
                    server.round();
                }
            })?;
        Ok(Self {
            sources,
            stop,
            wake,
            thread: Some(thread),
        })
    }

    /// Serves a group's metrics from now on.
    pub fn add(&self, source: Source) {
        lock(&self.sources).insert(source.name.clone(), source);
        self.wake();
    }

    /// Stops serving a group and lets go of all that belongs to it. Call it before the group's agent ends.
    pub fn remove(&self, name: &str) {
        let gone = lock(&self.sources).remove(name);
        drop(gone);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        lock(&self.sources).clear();
    }
}

/// A client.
enum Peer {
    Http(TcpStream),
    Unix(UnixStream),
}

impl Peer {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Http(stream) => stream.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Http(stream) => stream.write(from),
            Self::Unix(stream) => stream.write(from),
        }
    }

    fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    fn finish(&self) {
        let _ = match self {
            Self::Http(stream) => stream.shutdown(Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Http(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// The progress of a connection.
enum Stage {
    /// The client sends its request: the bytes so far.
    Asking(Vec<u8>),
    /// The client waits for an agent.
    Rescuing(Receiver<Rescued>),
    /// The client gets its answer: the bytes, and how many of them are sent.
    Answered(Vec<u8>, usize),
    /// The client has the whole answer. Further bytes are thrown away until it closes. To close first would reset the
    /// connection, and lose the answer.
    Leaving,
    Over,
}

struct Connection {
    peer: Peer,
    /// The group by whose socket it came.
    group: Option<String>,
    since: Instant,
    stage: Stage,
}

impl Connection {
    fn waits_for(&self) -> PollFlags {
        match self.stage {
            Stage::Asking(_) | Stage::Leaving => PollFlags::IN,
            Stage::Answered(..) => PollFlags::OUT,
            Stage::Rescuing(_) | Stage::Over => PollFlags::empty(),
        }
    }

    /// Returns when to look at it even if nothing happens.
    fn due(&self) -> Instant {
        match (&self.stage, &self.group) {
            (Stage::Asking(bytes), Some(_)) if bytes.is_empty() => self.since + SILENCE,
            (Stage::Rescuing(_), _) => Instant::now() + RESCUE_BEAT,
            _ => self.since + LIFE,
        }
    }

    /// Goes on as far as possible without waiting.
    fn go_on(&mut self, sources: &Mutex<Sources>) {
        if self.since.elapsed() >= LIFE {
            self.stage = Stage::Over;
        }
        loop {
            let stage = std::mem::replace(&mut self.stage, Stage::Over);
            let (next, waits) = match stage {
                Stage::Asking(bytes) => self.asking(bytes, sources),
                Stage::Rescuing(answered) => rescuing(answered),
                Stage::Answered(bytes, sent) => self.answering(bytes, sent),
                Stage::Leaving => self.leaving(),
                Stage::Over => (Stage::Over, true),
            };
            self.stage = next;
            if waits {
                return;
            }
        }
    }

    fn asking(&mut self, mut bytes: Vec<u8>, sources: &Mutex<Sources>) -> (Stage, bool) {
        let mut chunk = [0; CHUNK];
        let mut over = self.group.is_some() && bytes.is_empty() && self.since.elapsed() >= SILENCE;
        match self.peer.read(&mut chunk) {
            Ok(0) => over = true,
            Ok(count) => bytes.extend_from_slice(&chunk[..count]),
            Err(error) if is_later(&error) => {}
            Err(_) => return (Stage::Over, true),
        }
        let answer = match self.group.clone() {
            None => http_answer(&bytes, over, sources),
            Some(group) => unix_answer(&group, &bytes, over, sources),
        };
        match answer {
            Some(stage) => (stage, false),
            // The client sends no more and its request is incomplete, so do not wait for it.
            None if over => (Stage::Over, true),
            None => (Stage::Asking(bytes), true),
        }
    }

    fn answering(&mut self, bytes: Vec<u8>, mut sent: usize) -> (Stage, bool) {
        while sent < bytes.len() {
            match self.peer.write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) if is_later(&error) => return (Stage::Answered(bytes, sent), true),
                Err(_) => return (Stage::Over, true),
            }
        }
        self.peer.finish();
        (Stage::Leaving, false)
    }

    fn leaving(&mut self) -> (Stage, bool) {
        let mut chunk = [0; CHUNK];
        match self.peer.read(&mut chunk) {
            Ok(1..) => (Stage::Leaving, true),
            Err(error) if is_later(&error) => (Stage::Leaving, true),
            Ok(0) | Err(_) => (Stage::Over, true),
        }
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn http_answer(bytes: &[u8], over: bool, sources: &Mutex<Sources>) -> Option<Stage> {
    let answer = match http::parse(bytes) {
        http::Request::Partial if over && !bytes.is_empty() => {
            http::refusal(http::Refusal::Malformed)
        }
        http::Request::Partial => return None,
        http::Request::Metrics { head } => http::answer(&table::exposition(all(sources)), head),
        http::Request::Refused(why) => http::refusal(why),
    };
    Some(Stage::Answered(answer, 0))
}

fn all(sources: &Mutex<Sources>) -> Metrics {
    Metrics {
        groups: lock(sources).values().map(Source::metrics).collect(),
    }
}

fn unix_answer(group: &str, bytes: &[u8], over: bool, sources: &Mutex<Sources>) -> Option<Stage> {
    let refused = |why: String| json(&socket::Answer::Refused(why));
    let answer = match socket::parse(bytes, over)? {
        Err(why) => refused(why),
        Ok(socket::Request::Snapshot) => json(&Metrics {
            groups: lock(sources)
                .get(group)
                .map(Source::metrics)
                .into_iter()
                .collect(),
        }),
        Ok(socket::Request::Rescue { group: named, .. }) if named != group => {
            refused(format!("this is the socket of `{group}`, not of `{named}`"))
        }
        Ok(socket::Request::Rescue { slot, .. }) => {
            // Asked under the lock, so that the agent cannot end meanwhile.
            let sources = lock(sources);
            match sources
                .get(group)
                .and_then(|source| source.rescuer.as_ref())
            {
                Some(rescuer) => return Some(Stage::Rescuing(rescuer.ask(slot))),
                None => refused(format!(
                    "cannot move the queue of slot {slot}: `{group}` is not steered by our program"
                )),
            }
        }
    };
    Some(Stage::Answered(answer, 0))
}

fn rescuing(answered: Receiver<Rescued>) -> (Stage, bool) {
    let answer = match answered.try_recv() {
        Ok(Ok(moved)) => socket::Answer::Moved(moved),
        Ok(Err(why)) => socket::Answer::Refused(why),
        Err(TryRecvError::Empty) => return (Stage::Rescuing(answered), true),
        Err(TryRecvError::Disconnected) => {
            socket::Answer::Refused("its agent has ended".to_owned())
        }
    };
    (Stage::Answered(json(&answer), 0), false)
}

fn json(value: &impl serde::Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec(value).unwrap_or_default();
    text.push(b'\n');
    text
}

/// The state of the monitor's thread.
struct Server {
    http: Option<TcpListener>,
    sources: Arc<Mutex<Sources>>,
    wake: Arc<OwnedFd>,
    connections: Vec<Connection>,
    watched: Instant,
}

impl Server {
    /// Waits for something to do, and does it.
    fn round(&mut self) {
        let (sockets, watching) = {
            let sources = lock(&self.sources);
            let socket = |source: &Source| Some((source.name.clone(), source.socket.clone()?));
            let sockets: Vec<_> = sources.values().filter_map(socket).collect();
            (sockets, sources.values().any(|s| !s.watchers.is_empty()))
        };
        self.wait(&sockets, watching);
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        if watching && self.watched.elapsed() >= WATCH_EVERY {
            lock(&self.sources).values_mut().for_each(Source::watch);
            self.watched = Instant::now();
        }
        self.admit(&sockets);
        for connection in &mut self.connections {
            connection.go_on(&self.sources);
        }
        self.connections
            .retain(|one| !matches!(one.stage, Stage::Over));
    }

    fn wait(&self, sockets: &[(String, Arc<Socket>)], watching: bool) {
        let mut wanted = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        let mut due = watching.then(|| self.watched + WATCH_EVERY);
        match self.room_for_http() {
            Ok(()) => wanted.extend(self.http.iter().map(|one| PollFd::new(one, PollFlags::IN))),
            Err(then) => due = due.into_iter().chain(then).min(),
        }
        if self.count(Peer::is_unix) < MOST_CONNECTIONS {
            let listeners = sockets.iter().map(|(_, one)| &one.listener);
            wanted.extend(listeners.map(|one| PollFd::new(one, PollFlags::IN)));
        }
        for connection in &self.connections {
            let fd = PollFd::from_borrowed_fd(connection.peer.fd(), connection.waits_for());
            wanted.push(fd);
            due = due.into_iter().chain([connection.due()]).min();
        }
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        // Better a little late once than a little early again and again.
        let left = left.map(|left| left + Duration::from_millis(1));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let _ = poll(&mut wanted, left.as_ref());
    }

    fn admit(&mut self, sockets: &[(String, Arc<Socket>)]) {
        // Takes at most a full budget, so that others get their turn however many clients come.
        for _ in 0..MOST_CONNECTIONS {
            if self.room_for_http().is_err() {
                break;
            }
            let Some(stream) = self.http.as_ref().and_then(|one| admitted(one.accept())) else {
                break;
            };
            self.make_room();
            if stream.set_nonblocking(true).is_ok() {
                self.begin(Peer::Http(stream), None);
            }
        }
        for (group, socket) in sockets {
            while self.count(Peer::is_unix) < MOST_CONNECTIONS
                && let Some(stream) = admitted(socket.listener.accept())
            {
                if is_ours(&stream) && stream.set_nonblocking(true).is_ok() {
                    self.begin(Peer::Unix(stream), Some(group.clone()));
                }
            }
        }
    }

    fn count(&self, of: impl Fn(&Peer) -> bool) -> usize {
        let peers = self.connections.iter().map(|one| &one.peer);
        peers.filter(|peer| of(peer)).count()
    }

    /// Whether another HTTP client may come; else when a client will have used up its time, if one will.
    fn room_for_http(&self) -> Result<(), Option<Instant>> {
        if self.count(|peer| !peer.is_unix()) < MOST_CONNECTIONS {
            return Ok(());
        }
        match self.slowest().map(|at| self.connections[at].since + HASTE) {
            Some(then) if then <= Instant::now() => Ok(()),
            then => Err(then),
        }
    }

    /// Returns the HTTP client that has kept us waiting longest, for its request or for its end.
    fn slowest(&self) -> Option<usize> {
        let waits = |one: &Connection| matches!(one.stage, Stage::Asking(_) | Stage::Leaving);
        let connections = self.connections.iter().enumerate();
        connections
            .filter(|(_, one)| !one.peer.is_unix() && waits(one))
            .min_by_key(|(_, one)| one.since)
            .map(|(at, _)| at)
    }

    fn make_room(&mut self) {
        if self.count(|peer| !peer.is_unix()) >= MOST_CONNECTIONS
            && let Some(at) = self.slowest()
        {
            self.connections.remove(at);
        }
    }

    fn begin(&mut self, peer: Peer, group: Option<String>) {
        self.connections.push(Connection {
            peer,
            group,
            since: Instant::now(),
            stage: Stage::Asking(Vec::new()),
        });
    }
}

/// Returns an accepted connection. When out of descriptors, waits a moment for connections to end.
fn admitted<S, A>(accepted: io::Result<(S, A)>) -> Option<S> {
    match accepted {
        Ok((stream, _)) => Some(stream),
        Err(error) => {
            if !is_later(&error) {
                std::thread::sleep(Duration::from_millis(20));
            }
            None
        }
    }
}

/// Whether the client is root or our own user.
fn is_ours(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid();
    rustix::net::sockopt::socket_peercred(stream)
        .is_ok_and(|peer| peer.uid.is_root() || peer.uid == own)
}
