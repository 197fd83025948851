//! One thread of the load: an epoll loop that begins requests when they are due and records how they end.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{set_tcp_nodelay, socket_error};
use rustix::net::{RecvFlags, SendFlags};

use crate::deadlines::Deadlines;
use crate::live::Live;
use crate::progress::{Message, Progress};
use crate::recorder::{Moments, Recorder, Subject};
use crate::response::{ResponseReader, Step};
use crate::socket::{connect, error_kind, source_address};
use crate::tls::{Client, Received, Session};
use crate::{Arrivals, Due, Error, ErrorKind, Plan, Schedule, Sources};

/// At most this many requests are begun before answers are looked at again: a burst must not make answers look late.
const BEGIN_AT_ONCE: usize = 64;
/// In a closed loop, clients that have become free send again after this many answers. Not after each: connections
/// begun one after the other find the server awake, and waking it costs this CPU a tenth of a connection.
const ANSWERS_AT_ONCE: usize = 16;
/// Longest sleep: how soon a cancel is seen.
const TICK_NS: u64 = 50_000_000;
/// How long the server may take to close after its last answer before we do.
const LINGER_NS: u64 = 1_000_000_000;
/// The same once nothing else is left to do.
const LAST_LINGER_NS: u64 = 100_000_000;
/// A reset this soon after a request was sent met it on its way: the server was closing the connection.
const AS_SENT_NS: u64 = 100_000_000;
/// Lost connections are opened again no faster than this one after another: a server may close each at once.
const REOPEN_NS: u64 = 1_000_000;
const RECEIVE_BYTES: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No connection: the entry can be used.
    Free,
    /// The handshake is under way, or the request is not all sent.
    Sending,
    /// The request is sent.
    Receiving,
    /// The answer is whole; the server is about to close. It should close first, because that side keeps the
    /// TIME_WAIT.
    Lingering,
    /// Kept for the next request.
    Idle,
}

struct Connection {
    socket: Option<OwnedFd>,
    /// Encrypts, where the plan says so.
    session: Option<Box<Session>>,
    /// Distinguishes events of this connection from those of the entry's previous connection.
    generation: u32,
    state: State,
    of: Subject,
    written: usize,
    at: Moments,
    reader: ResponseReader,
}

/// A fixed number of connections, opened before the load begins.
struct Pool {
    connections: usize,
    /// At least so much later than one is the next one opened.
    apart_ns: u64,
    /// When a lost one may be opened again.
    next_ns: u64,
    /// The next one's source.
    source: u32,
}

impl Pool {
    /// This thread's share of a plan's connections.
    fn new(plan: &Plan, thread: usize) -> Option<Self> {
        let Arrivals::Kept {
            connections, apart, ..
        } = plan.arrivals
        else {
            return None;
        };
        let apart_ns = nanos(apart).saturating_mul(plan.lanes() as u64);
        Some(Self {
            connections: share(connections, plan.lane(thread), plan.lanes()),
            apart_ns: apart_ns.max(REOPEN_NS),
            next_ns: 0,
            source: 0,
        })
    }
}

/// The share of `all` that one of so many threads has.
fn share(all: usize, lane: usize, lanes: usize) -> usize {
    all / lanes + usize::from(lane < all % lanes)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The clients that may send.
enum Clients {
    /// Each request when it is due.
    Any,
    /// Each request when it is due, if one of this many clients is free.
    Limited(usize),
    /// Each free client sends the next request, due or not; since when they have been free.
    Closed(VecDeque<u64>),
}

impl Clients {
    /// This thread's share of them.
    fn new(arrivals: &Arrivals, lane: usize, lanes: usize, now: u64) -> Self {
        let own = |all| share(all, lane, lanes);
        match *arrivals {
            Arrivals::Open { .. } | Arrivals::Profile { at_most: None, .. } => Self::Any,
            Arrivals::Profile {
                at_most: Some(all), ..
            } => Self::Limited(own(all)),
            Arrivals::Kept { connections, .. } => Self::Limited(own(connections)),
            Arrivals::Closed { concurrency } => {
                Self::Closed(VecDeque::from(vec![now; own(concurrency)]))
            }
        }
    }
}

/// The task of one thread.
pub(crate) struct Task<'a> {
    pub plan: &'a Plan,
    /// Its number, from 0.
    pub thread: usize,
    /// Time 0 of the plan.
    pub start: Instant,
    /// How often notes are handed over; `None`: only at the end.
    pub interval: Option<Duration>,
    pub cancel: &'a AtomicBool,
    pub live: &'a Live,
    pub messages: Sender<Message>,
    /// Connections that were opened beforehand, for this thread.
    pub opened: Vec<OwnedFd>,
}

/// The part of a plan that one thread sends, under way.
pub(crate) struct Engine<'a> {
    task: Task<'a>,
    timeout_ns: u64,
    duration_ns: u64,
    /// The length of an interval, and the number of the current one.
    interval_ns: u64,
    interval: u64,
    /// The bytes of each request of the mix.
    requests: Vec<Vec<u8>>,
    /// `None`: plain HTTP.
    tls: Option<Client>,
    schedule: Schedule,
    next: Option<Due>,
    clients: Clients,
    epoll: OwnedFd,
    connections: Vec<Connection>,
    free: Vec<u32>,
    /// Kept connections with their generation, the longest idle first. Connections closed meanwhile are skipped.
    idle: VecDeque<(u32, u32)>,
    /// With a fixed number of connections, requests take the one that has been idle longest, so that all are used alike; else
    /// the latest one, so that few are.
    pool: Option<Pool>,
    in_time: Deadlines,
    lingering: Deadlines,
    in_flight: u64,
    lingerers: u64,
    /// The most connections that were open at a time.
    open_max: u64,
    buffer: Vec<u8>,
    record: Recorder,
    /// The sums of the notes that were handed over.
    before: Progress,
}

impl<'a> Engine<'a> {
    /// Everything that a thread needs.
    pub(crate) fn new(mut task: Task<'a>) -> Result<Self, Error> {
        let plan = task.plan;
        let opened = std::mem::take(&mut task.opened);
        let mut schedule = Schedule::new(plan, task.thread);
        let now = nanos(task.start.elapsed());
        let mut engine = Self {
            timeout_ns: nanos(plan.timeout),
            duration_ns: plan.stop.duration.map_or(u64::MAX, nanos),
            interval_ns: task.interval.map_or(u64::MAX, nanos),
            interval: 0,
            requests: plan
                .mix
                .entries
                .iter()
                .map(|e| plan.mix.form.request(&plan.host, &e.path, plan.keep_alive))
                .collect(),
            tls: plan.mix.form.tls.as_ref().map(Client::new).transpose()?,
            next: schedule.next(),
            schedule,
            clients: Clients::new(&plan.arrivals, plan.lane(task.thread), plan.lanes(), now),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)
                .map_err(Error::system("create an epoll instance"))?,
            connections: Vec::new(),
            free: Vec::new(),
            idle: VecDeque::new(),
            pool: Pool::new(plan, task.thread),
            in_time: Deadlines::default(),
            lingering: Deadlines::default(),
            in_flight: 0,
            lingerers: 0,
            open_max: 0,
            buffer: vec![0; RECEIVE_BYTES],
            record: Recorder::new(plan),
            before: Progress::default(),
            task,
        };
        for socket in opened {
            engine.adopt(socket);
        }
        Ok(engine)
    }

    /// Adopts a connection that is open already, as a kept one.
    fn adopt(&mut self, socket: OwnedFd) {
        // A connection without a session is opened again for its first request, and fails there.
        let Ok(key) = self.enter(socket) else {
            return;
        };
        let connection = &mut self.connections[key as usize];
        connection.state = State::Idle;
        self.idle.push_back((key, connection.generation));
        self.register(key);
    }

    /// Sends this thread's part of the plan and returns its notes.
    pub(crate) fn run(mut self) -> Result<Recorder, Error> {
        let mut events = Vec::with_capacity(256);
        let mut linger_until = u64::MAX;
        while !self.task.cancel.load(Relaxed) {
            self.reopen();
            self.begin_due(BEGIN_AT_ONCE);
            self.expire();
            self.show();
            self.hand_over();
            if self.in_flight == 0 && self.exhausted() {
                linger_until = linger_until.min(self.now() + LAST_LINGER_NS);
                if self.lingerers == 0 || self.now() >= linger_until {
                    break;
                }
            }
            let wait = self.sleep_ns().min(linger_until.saturating_sub(self.now()));
            events.clear();
            match self.wait(wait, &mut events) {
                Ok(()) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::system("wait for answers")(errno)),
            }
            for answers in events.chunks(ANSWERS_AT_ONCE) {
                for event in answers {
                    self.ready(event.data.u64(), event.flags);
                    if !matches!(self.clients, Clients::Closed(_)) {
                        self.begin_due(1); // what is due does not wait for the other answers' turn
                    }
                }
                self.begin_due(BEGIN_AT_ONCE);
                // An answer belongs to the interval in which it came, not to the one in which a long list of answers
                // ends.
                self.hand_over();
            }
        }
        self.record.cancelled = self.in_flight;
        self.note_open();
        self.show();
        Ok(self.record)
    }

    /// Waits for events, for so many ns at most. epoll_wait(2) waits for whole milliseconds, and epoll_pwait2(2) came with
    /// Linux 5.11.
    fn wait(&self, longest_ns: u64, events: &mut Vec<epoll::Event>) -> Result<(), Errno> {
        let now = Timespec::default();
        if epoll::wait(&self.epoll, spare_capacity(events), Some(&now))? > 0 || longest_ns == 0 {
            return Ok(());
        }
        let longest = Timespec {
            tv_sec: (longest_ns / 1_000_000_000) as _,
            tv_nsec: (longest_ns % 1_000_000_000) as _,
        };
        let mut set = [PollFd::new(&self.epoll, PollFlags::IN)];
        if poll(&mut set, Some(&longest))? > 0 {
            epoll::wait(&self.epoll, spare_capacity(events), Some(&now))?;
        }
        Ok(())
    }

    fn now(&self) -> u64 {
        self.task.start.elapsed().as_nanos() as u64
    }

    /// No request is left to begin.
    fn exhausted(&self) -> bool {
        self.next.is_none()
    }

    /// Connections that are open, those that are about to be closed left out.
    fn open_now(&self) -> u64 {
        (self.connections.len() - self.free.len()) as u64 - self.lingerers
    }

    fn note_open(&mut self) {
        (self.record.open, self.record.open_max) = (self.open_now(), self.open_max);
    }

    /// When a lost connection of a fixed number is to be opened again; never where none is lost.
    fn reopen_at(&self) -> u64 {
        match &self.pool {
            Some(pool) if self.open_now() < pool.connections as u64 && !self.exhausted() => {
                pool.next_ns
            }
            _ => u64::MAX,
        }
    }

    /// Opens a lost connection again, if it is time. Where that fails, a request that needs it counts the failure.
    fn reopen(&mut self) {
        let now = self.now();
        if self.reopen_at() > now {
            return;
        }
        let Some(pool) = &mut self.pool else { return };
        let source = pool.source;
        pool.source = match self.task.plan.sources {
            Sources::System => 0,
            Sources::Loopback { count } => (source + 1) % count,
        };
        let (soon, later) = (now + pool.apart_ns, now + TICK_NS.max(pool.apart_ns));
        let opened = self.connect(source);
        if let Some(pool) = &mut self.pool {
            pool.next_ns = if opened.is_ok() { soon } else { later };
        }
        if let Ok(socket) = opened {
            self.adopt(socket);
        }
    }

    /// How long nothing is planned.
    fn sleep_ns(&self) -> u64 {
        let now = self.now();
        let begin = match (&self.next, &self.clients) {
            (Some(due), Clients::Any) => due.at_ns,
            (Some(due), Clients::Limited(free)) if *free > 0 => due.at_ns,
            (Some(due), Clients::Limited(_)) => due.at_ns.saturating_add(self.timeout_ns),
            (Some(_), Clients::Closed(free)) if !free.is_empty() => now,
            _ => u64::MAX,
        };
        let first = |deadlines: &Deadlines| deadlines.first().map_or(u64::MAX, |(_, at)| at);
        let next = begin.min(first(&self.in_time)).min(first(&self.lingering));
        let next = next.min(self.reopen_at());
        next.saturating_sub(now).min(TICK_NS)
    }

    /// So far, all intervals.
    fn progress(&self) -> Progress {
        Progress {
            elapsed: Duration::ZERO,
            planned: self.before.planned + self.record.planned,
            started: self.before.started + self.record.started,
            completed: self.before.completed + self.record.completed,
            errors: self.before.errors + self.record.error_count(),
            in_flight: self.in_flight,
        }
    }

    fn show(&self) {
        self.task.live.show(self.task.thread, &self.progress());
    }

    /// Sends the notes of an interval that is over to the thread that merges them.
    fn hand_over(&mut self) {
        if self.interval_ns == u64::MAX || self.now() / self.interval_ns == self.interval {
            return;
        }
        self.before = self.progress();
        self.note_open();
        let notes = Box::new(std::mem::replace(
            &mut self.record,
            Recorder::new(self.task.plan),
        ));
        let message = Message::Notes {
            thread: self.task.thread,
            interval: self.interval,
            notes,
        };
        // The receiver is gone once the load is being given up; the notes are not needed then.
        let _ = self.task.messages.send(message);
        self.interval = self.now() / self.interval_ns;
    }

    /// Begins the requests that are due by now, but no more than `most`.
    fn begin_due(&mut self, most: usize) {
        for _ in 0..most {
            let Some(due) = self.next else { return };
            let now = self.now();
            let planned = match &mut self.clients {
                Clients::Any | Clients::Limited(_) if due.at_ns > now => return,
                Clients::Any => due.at_ns,
                Clients::Limited(0) if now - due.at_ns < self.timeout_ns => return,
                Clients::Limited(0) => {
                    self.next_due(due);
                    self.record
                        .failed(ErrorKind::NotSent, due.subject(), due.at_ns, now);
                    continue;
                }
                Clients::Limited(free) => {
                    *free -= 1;
                    due.at_ns
                }
                Clients::Closed(_) if now >= self.duration_ns => {
                    self.next = None;
                    return;
                }
                Clients::Closed(free) => match free.pop_front() {
                    Some(since) => since,
                    None => return,
                },
            };
            self.next_due(due);
            self.begin(due, planned, now);
        }
    }

    /// Counts `due` as planned and goes on to the one after it.
    fn next_due(&mut self, due: Due) {
        self.next = self.schedule.next();
        self.record.due(due.stage);
    }

    fn begin(&mut self, due: Due, planned: u64, now: u64) {
        let (key, fresh) = match self.kept() {
            Some(key) => (key, false),
            None => match self.open(due.source) {
                Ok(key) => (key, true),
                Err(kind) => {
                    self.record.failed(kind, due.subject(), planned, now);
                    return self.client_free(now);
                }
            },
        };
        self.record.begun(planned, now);
        self.in_flight += 1;
        self.in_time.push(key, now.saturating_add(self.timeout_ns));
        let connection = &mut self.connections[key as usize];
        connection.state = State::Sending;
        connection.of = due.subject();
        connection.written = 0;
        connection.at = Moments {
            planned,
            started: now,
            fresh,
            ..Moments::default()
        };
        connection.reader.reset();
        if let Some(session) = &mut connection.session
            && let Err(kind) = session.put(&self.requests[due.entry])
        {
            return self.fail(key, kind);
        }
        self.send(key);
        if fresh {
            self.register(key);
        }
    }

    /// Returns a kept connection that the server has not closed.
    fn kept(&mut self) -> Option<u32> {
        loop {
            let next = if self.pool.is_some() {
                self.idle.pop_front()
            } else {
                self.idle.pop_back()
            };
            let (key, generation) = next?;
            let connection = &self.connections[key as usize];
            if connection.generation == generation && connection.state == State::Idle {
                return Some(key);
            }
        }
    }

    /// Connects, and enters the connection in the table.
    fn open(&mut self, source: u32) -> Result<u32, ErrorKind> {
        let socket = self.connect(source);
        self.enter(socket.map_err(|errno| error_kind(errno, true))?)
    }

    fn connect(&self, source: u32) -> Result<OwnedFd, Errno> {
        let from = source_address(self.task.plan.sources, source);
        connect(self.task.live.target(), from)
    }

    /// Gives a connection an entry in the table.
    fn enter(&mut self, socket: OwnedFd) -> Result<u32, ErrorKind> {
        let session = self.tls.as_ref().map(Client::session).transpose()?;
        if session.is_some() {
            // The end of the handshake and the request are two writes. The second must not wait for the first one's ACK,
            // which the server may delay by 40 ms.
            set_tcp_nodelay(&socket, true).map_err(|errno| error_kind(errno, true))?;
        }
        self.record.connections += 1;
        let key = self.free.pop().unwrap_or_else(|| {
            self.connections.push(Connection {
                socket: None,
                session: None,
                generation: 0,
                state: State::Free,
                of: Subject::default(),
                written: 0,
                at: Moments::default(),
                reader: ResponseReader::of(self.task.plan.mix.form.method()),
            });
            (self.connections.len() - 1) as u32
        });
        let connection = &mut self.connections[key as usize];
        (connection.socket, connection.session) = (Some(socket), session);
        self.open_max = self.open_max.max(self.open_now());
        Ok(key)
    }

    /// Asks for the events of a new connection. Only now, after the first send: by then the request is usually sent, and
    /// the event "writable", one wake-up a connection, is not needed.
    fn register(&mut self, key: u32) {
        let connection = &self.connections[key as usize];
        let Some(socket) = &connection.socket else {
            return;
        };
        let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if connection.state == State::Sending || self.task.plan.keep_alive {
            flags |= epoll::EventFlags::OUT;
        }
        let data = u64::from(connection.generation) << 32 | u64::from(key);
        if let Err(errno) = epoll::add(&self.epoll, socket, epoll::EventData::new_u64(data), flags)
        {
            self.fail(key, error_kind(errno, false));
        }
    }

    /// Sends as much of the request as the connection takes. During the handshake that is nothing. On loopback the
    /// handshake is over when connect() returns, so that the first try succeeds.
    fn send(&mut self, key: u32) {
        let connection = &mut self.connections[key as usize];
        let Some(socket) = &connection.socket else {
            return;
        };
        if let Some(session) = &mut connection.session {
            match session.flush(socket) {
                Ok(true) => {}
                Ok(false) => return,
                Err(kind) => return self.not_sent(key, kind),
            }
        }
        let request = &self.requests[connection.of.entry];
        // An encrypted request is sent by now.
        if connection.session.is_some() {
            return self.sent(key);
        }
        while connection.written < request.len() {
            match rustix::net::send(socket, &request[connection.written..], SendFlags::NOSIGNAL) {
                Ok(n) => connection.written += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    let connecting = connection.written == 0 && connection.at.fresh;
                    return self.not_sent(key, error_kind(errno, connecting));
                }
            }
        }
        self.sent(key);
    }

    /// The whole request is sent.
    fn sent(&mut self, key: u32) {
        let now = self.now();
        let connection = &mut self.connections[key as usize];
        connection.written = self.requests[connection.of.entry].len();
        connection.state = State::Receiving;
        connection.at.sent = now;
    }

    /// The server takes no more of the request. It may have answered already, as by 413 to a body that it does not want.
    fn not_sent(&mut self, key: u32, kind: ErrorKind) {
        let connection = &self.connections[key as usize];
        let Some(socket) = &connection.socket else {
            return;
        };
        let generation = connection.generation;
        match (&connection.session, connection.written) {
            (Some(_), _) => self.take_encrypted(key),
            (None, 0) => {}
            (None, 1..) => {
                let some = rustix::net::recv(socket, &mut self.buffer[..], RecvFlags::PEEK);
                if matches!(some, Ok((1.., _))) {
                    self.receive(key, epoll::EventFlags::ERR);
                }
            }
        }
        if self.is_sending(key, generation) {
            self.fail(key, kind);
        }
    }

    /// Whether a connection is still the one of this generation, and sends its request.
    fn is_sending(&self, key: u32, generation: u32) -> bool {
        let connection = &self.connections[key as usize];
        connection.generation == generation && connection.state == State::Sending
    }

    fn ready(&mut self, data: u64, flags: epoll::EventFlags) {
        let (key, generation) = (data as u32, (data >> 32) as u32);
        let hangup = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let connection = &self.connections[key as usize];
        if connection.generation != generation {
            return;
        }
        match connection.state {
            State::Free => {}
            // Unrequested bytes make a kept connection as useless as its end does.
            State::Idle if flags.intersects(hangup | epoll::EventFlags::IN) => self.close(key),
            State::Lingering if flags.intersects(hangup) => {
                self.drain(key);
                self.lingering.remove(key);
                self.lingerers -= 1;
                self.close(key);
            }
            State::Idle | State::Lingering => {}
            // The handshake of an encrypted one is as much receiving as sending.
            State::Sending | State::Receiving if connection.session.is_some() => {
                self.receive_encrypted(key);
            }
            State::Sending => {
                self.send(key);
                let connection = &self.connections[key as usize];
                if connection.generation == generation
                    && flags.intersects(hangup | epoll::EventFlags::IN)
                {
                    self.receive(key, flags);
                }
            }
            State::Receiving => self.receive(key, flags),
        }
    }

    /// Reads all there is. A read that does not fill the buffer has emptied the socket. If the event reported an
    /// orderly close by the server, nothing more will come, and the read that would only return 0 is saved. After a
    /// reset the next read reports it, and no other event will.
    fn receive(&mut self, key: u32, flags: epoll::EventFlags) {
        let reset = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
        let closed = flags.contains(epoll::EventFlags::RDHUP) && !reset;
        loop {
            let connection = &mut self.connections[key as usize];
            let Some(socket) = &connection.socket else {
                return;
            };
            let n = match rustix::net::recv(socket, &mut self.buffer[..], RecvFlags::empty()) {
                Ok((0, _)) => return self.ended(key),
                Ok((n, _)) => n,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return,
                Err(errno) => return self.fail(key, error_kind(errno, false)),
            };
            if !self.take(key, n, closed || reset) {
                return;
            }
            if n < RECEIVE_BYTES && !reset {
                if closed {
                    self.ended(key);
                }
                return;
            }
        }
    }

    /// Takes the part of an answer that is in the buffer. Returns false once the request has ended, well or not.
    /// `closed`: the server has closed.
    fn take(&mut self, key: u32, n: usize, closed: bool) -> bool {
        let now = self.task.start.elapsed().as_nanos() as u64;
        let connection = &mut self.connections[key as usize];
        self.record.bytes_received += n as u64;
        if connection.at.first_byte == 0 {
            connection.at.first_byte = now;
        }
        match connection.reader.feed(&self.buffer[..n]) {
            // An answer before any of the request is sent is one to something else.
            _ if connection.written == 0 => self.fail(key, ErrorKind::BadResponse),
            Err(_) => self.fail(key, ErrorKind::BadResponse),
            Ok(Step::Done { used }) if used < n => self.fail(key, ErrorKind::BadResponse),
            Ok(Step::Done { .. }) => self.answered(key, now, closed),
            Ok(Step::More) => return true,
        }
        false
    }

    /// Reads all there is of an encrypted connection, and takes its handshake on.
    fn receive_encrypted(&mut self, key: u32) {
        let generation = self.connections[key as usize].generation;
        self.take_encrypted(key);
        if self.is_sending(key, generation) {
            self.send(key);
        }
    }

    /// Reads all there is of an encrypted connection. Of its bytes, those before the handshake's end are no answer.
    fn take_encrypted(&mut self, key: u32) {
        loop {
            let connection = &mut self.connections[key as usize];
            let (Some(socket), Some(session)) = (&connection.socket, &mut connection.session)
            else {
                return;
            };
            let received = session.receive(socket, &mut self.buffer);
            if connection.state == State::Sending && session.is_sent() {
                self.sent(key);
            }
            match received {
                Err(kind) => return self.fail(key, kind),
                Ok(Received::Nothing) => return,
                Ok(Received::End) => return self.ended(key),
                Ok(Received::Bytes(n)) => {
                    // The request follows the handshake at once.
                    let connection = &mut self.connections[key as usize];
                    connection.written = connection.written.max(1);
                    if !self.take(key, n, false) {
                        return;
                    }
                }
            }
        }
    }

    /// Reads the rest of an encrypted connection: if it were closed with the server's farewell unread, the kernel
    /// would reset it.
    fn drain(&mut self, key: u32) {
        let connection = &self.connections[key as usize];
        if let (Some(socket), Some(_)) = (&connection.socket, &connection.session) {
            while matches!(
                rustix::net::recv(socket, &mut self.buffer[..], RecvFlags::empty()),
                Ok((1.., _))
            ) {}
        }
    }

    /// The server closed.
    fn ended(&mut self, key: u32) {
        if self.connections[key as usize].reader.finish() {
            self.answered(key, self.now(), true);
        } else {
            self.fail(key, ErrorKind::EofEarly);
        }
    }

    /// The answer is whole.
    fn answered(&mut self, key: u32, now: u64, closed: bool) {
        let connection = &mut self.connections[key as usize];
        connection.at.done = now;
        // The server may answer before it has the whole request. The rest of the request is not sent then.
        let early = connection.state == State::Sending;
        if early {
            connection.at.sent = connection.at.first_byte;
        }
        let reader = &connection.reader;
        self.record.answered(
            connection.of,
            reader.status(),
            reader.worker(),
            connection.at,
        );
        // A reader counts the answers between two moments, so each must show at once and not at the next pause.
        let completed = self.before.completed + self.record.completed;
        self.task.live.answered(self.task.thread, completed);
        let reader = &self.connections[key as usize].reader;
        let keep = self.task.plan.keep_alive && reader.keep_alive() && !closed && !early;
        self.in_time.remove(key);
        self.in_flight -= 1;
        if keep {
            let connection = &mut self.connections[key as usize];
            connection.state = State::Idle;
            self.idle.push_back((key, connection.generation));
        } else if closed {
            self.close(key);
        } else {
            let connection = &mut self.connections[key as usize];
            connection.state = State::Lingering;
            self.lingering.push(key, now + LINGER_NS);
            self.lingerers += 1;
        }
        self.client_free(now);
    }

    /// Whether the end of this connection met a request on its way: the server closed it as an idle one.
    ///
    /// A kernel resets a connection on which a request arrives after its close, and one that is closed with an unread request
    /// in it. After the server's FIN such a reset leaves EPIPE, and reads as an end. An end alone acknowledges the request:
    /// the server had read it.
    fn closed_idle(&self, key: u32, kind: ErrorKind, now: u64) -> bool {
        let connection = &self.connections[key as usize];
        if connection.at.fresh || connection.at.first_byte != 0 {
            return false;
        }
        match (kind, &connection.socket) {
            (ErrorKind::Reset, _) => now - connection.at.started < AS_SENT_NS,
            (ErrorKind::EofEarly, Some(socket)) => {
                matches!(socket_error(socket), Ok(Err(Errno::PIPE)))
            }
            _ => false,
        }
    }

    /// The request under way on `key` has failed.
    fn fail(&mut self, key: u32, kind: ErrorKind) {
        let now = self.now();
        let kind = match self.closed_idle(key, kind, now) {
            true => ErrorKind::ClosedIdle,
            false => kind,
        };
        let connection = &self.connections[key as usize];
        let planned = connection.at.planned;
        self.record.failed(kind, connection.of, planned, now);
        self.in_time.remove(key);
        self.in_flight -= 1;
        self.close(key);
        self.client_free(now);
    }

    fn close(&mut self, key: u32) {
        let connection = &mut self.connections[key as usize];
        (connection.socket, connection.session) = (None, None);
        connection.state = State::Free;
        connection.generation = connection.generation.wrapping_add(1);
        self.free.push(key);
    }

    fn client_free(&mut self, now: u64) {
        match &mut self.clients {
            Clients::Any => {}
            Clients::Limited(free) => *free += 1,
            Clients::Closed(free) => free.push_back(now),
        }
    }

    /// Ends requests that have taken too long.
    fn expire(&mut self) {
        let now = self.now();
        while let Some(key) = self.in_time.expired(now) {
            let connection = &self.connections[key as usize];
            let connecting = connection.at.fresh && connection.written == 0;
            self.fail(
                key,
                if connecting {
                    ErrorKind::ConnectTimeout
                } else {
                    ErrorKind::Timeout
                },
            );
        }
        while let Some(key) = self.lingering.expired(now) {
            self.lingering.remove(key);
            self.lingerers -= 1;
            self.close(key);
        }
    }
}
