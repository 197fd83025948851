//! One thread of the load: an epoll loop that begins requests when they are due and records how they end.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::deadlines::Deadlines;
use crate::recorder::{Moments, Recorder};
use crate::response::{ResponseReader, Step};
use crate::socket::{connect, error_kind, source_address};
use crate::{Arrivals, Due, Error, ErrorKind, Plan, Schedule, Sources};

/// So many requests are begun before answers are looked at again: a burst must not make answers look late.
const BEGIN_AT_ONCE: usize = 64;
/// Longest sleep: how soon a cancel is seen.
const TICK_NS: u64 = 50_000_000;
/// How long the server may take to close after its last answer before we do.
const LINGER_NS: u64 = 1_000_000_000;
/// The same once nothing else is left to do.
const LAST_LINGER_NS: u64 = 100_000_000;
const RECEIVE_BYTES: usize = 64 * 1024;

/// Counters a thread shows to the one that reports progress.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub planned: AtomicU64,
    pub started: AtomicU64,
    pub completed: AtomicU64,
    pub errors: AtomicU64,
    pub in_flight: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No connection: the entry can be used.
    Free,
    /// The handshake is under way, or the request is not all sent.
    Sending,
    /// The request is sent.
    Receiving,
    /// The answer is whole; the server is about to close. It should: who closes first keeps the TIME_WAIT.
    Lingering,
    /// Kept for the next request.
    Idle,
}

struct Connection {
    socket: Option<OwnedFd>,
    /// Tells events of this connection from those of the one that had the entry before.
    generation: u32,
    state: State,
    entry: usize,
    written: usize,
    at: Moments,
    reader: ResponseReader,
}

/// One thread's half of a plan, being sent.
pub(crate) struct Engine<'a> {
    start: Instant,
    cancel: &'a AtomicBool,
    shown: &'a Shown,
    target: SocketAddr,
    sources: Sources,
    keep_alive: bool,
    timeout_ns: u64,
    duration_ns: u64,
    /// The bytes of each request of the mix.
    requests: Vec<Vec<u8>>,
    schedule: Schedule,
    next: Option<Due>,
    /// Closed loop: since when each client without a request has been free. None in an open loop.
    free_clients: Option<VecDeque<u64>>,
    epoll: OwnedFd,
    connections: Vec<Connection>,
    free: Vec<u32>,
    /// Kept connections with their generation; one that has been closed meanwhile is passed over.
    idle: Vec<(u32, u32)>,
    in_time: Deadlines,
    lingering: Deadlines,
    in_flight: u64,
    lingerers: u64,
    buffer: Vec<u8>,
    record: Recorder,
}

impl<'a> Engine<'a> {
    /// Everything that thread number `thread` needs; `start` is time 0 of the plan.
    pub(crate) fn new(
        plan: &Plan,
        thread: usize,
        start: Instant,
        cancel: &'a AtomicBool,
        shown: &'a Shown,
    ) -> Result<Self, Error> {
        let mut schedule = Schedule::new(plan, thread);
        let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        let free_clients = match plan.arrivals {
            Arrivals::Open { .. } => None,
            Arrivals::Closed { concurrency } => {
                let own =
                    concurrency / plan.threads + usize::from(thread < concurrency % plan.threads);
                Some(VecDeque::from(vec![nanos(start.elapsed()); own]))
            }
        };
        Ok(Self {
            start,
            cancel,
            shown,
            target: plan.target,
            sources: plan.sources,
            keep_alive: plan.keep_alive,
            timeout_ns: nanos(plan.timeout),
            duration_ns: plan.stop.duration.map_or(u64::MAX, nanos),
            requests: plan
                .mix
                .entries
                .iter()
                .map(|e| request_bytes(plan, &e.path))
                .collect(),
            next: schedule.next(),
            schedule,
            free_clients,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)
                .map_err(Error::system("create an epoll instance"))?,
            connections: Vec::new(),
            free: Vec::new(),
            idle: Vec::new(),
            in_time: Deadlines::default(),
            lingering: Deadlines::default(),
            in_flight: 0,
            lingerers: 0,
            buffer: vec![0; RECEIVE_BYTES],
            record: Recorder::new(plan.mix.entries.len()),
        })
    }

    /// Sends this thread's half of the plan and gives its notes.
    pub(crate) fn run(mut self) -> Result<Recorder, Error> {
        let mut events = Vec::with_capacity(256);
        let mut linger_until = u64::MAX;
        while !self.cancel.load(Relaxed) {
            self.begin_due();
            self.expire();
            self.show();
            if self.in_flight == 0 && self.exhausted() {
                linger_until = linger_until.min(self.now() + LAST_LINGER_NS);
                if self.lingerers == 0 || self.now() >= linger_until {
                    break;
                }
            }
            let wait = self.sleep_ns().min(linger_until.saturating_sub(self.now()));
            events.clear();
            let wait = Timespec {
                tv_sec: (wait / 1_000_000_000) as _,
                tv_nsec: (wait % 1_000_000_000) as _,
            };
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::system("wait for answers")(errno)),
            }
            for event in &events {
                self.ready(event.data.u64(), event.flags);
            }
        }
        self.record.cancelled = self.in_flight;
        self.show();
        Ok(self.record)
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// No request is left to begin.
    fn exhausted(&self) -> bool {
        self.next.is_none()
    }

    /// How long nothing is planned.
    fn sleep_ns(&self) -> u64 {
        let now = self.now();
        let begin = match (&self.next, &self.free_clients) {
            (Some(due), None) => due.at_ns,
            (Some(_), Some(free)) if !free.is_empty() => now,
            _ => u64::MAX,
        };
        let first = |deadlines: &Deadlines| deadlines.first().map_or(u64::MAX, |(_, at)| at);
        let next = begin.min(first(&self.in_time)).min(first(&self.lingering));
        next.saturating_sub(now).min(TICK_NS)
    }

    fn show(&self) {
        self.shown.planned.store(self.record.planned, Relaxed);
        self.shown.started.store(self.record.started, Relaxed);
        self.shown.completed.store(self.record.completed, Relaxed);
        self.shown.errors.store(self.record.error_count(), Relaxed);
        self.shown.in_flight.store(self.in_flight, Relaxed);
    }

    /// Begins what is due by now.
    fn begin_due(&mut self) {
        for _ in 0..BEGIN_AT_ONCE {
            let Some(due) = self.next else { return };
            let now = self.now();
            let planned = match &mut self.free_clients {
                None if due.at_ns > now => return,
                None => due.at_ns,
                Some(_) if now >= self.duration_ns => {
                    self.next = None;
                    return;
                }
                Some(free) => match free.pop_front() {
                    Some(since) => since,
                    None => return,
                },
            };
            self.next = self.schedule.next();
            self.record.planned += 1;
            self.begin(due, planned, now);
        }
    }

    fn begin(&mut self, due: Due, planned: u64, now: u64) {
        let (key, fresh) = match self.kept() {
            Some(key) => (key, false),
            None => match self.open(due.source) {
                Ok(key) => (key, true),
                Err(errno) => {
                    self.record.failed(error_kind(errno, true), now);
                    return self.client_free(now);
                }
            },
        };
        self.record.begun(planned, now);
        self.in_flight += 1;
        self.in_time.push(key, now.saturating_add(self.timeout_ns));
        let connection = &mut self.connections[key as usize];
        connection.state = State::Sending;
        connection.entry = due.entry;
        connection.written = 0;
        connection.at = Moments {
            planned,
            started: now,
            fresh,
            ..Moments::default()
        };
        connection.reader.reset();
        self.send(key);
        if fresh {
            self.register(key);
        }
    }

    /// A kept connection that the server has not closed.
    fn kept(&mut self) -> Option<u32> {
        while let Some((key, generation)) = self.idle.pop() {
            let connection = &self.connections[key as usize];
            if connection.generation == generation && connection.state == State::Idle {
                return Some(key);
            }
        }
        None
    }

    /// Connects and gives the connection an entry in the table.
    fn open(&mut self, source: u32) -> Result<u32, Errno> {
        let socket = connect(&self.target, source_address(self.sources, source))?;
        self.record.connections += 1;
        let key = self.free.pop().unwrap_or_else(|| {
            self.connections.push(Connection {
                socket: None,
                generation: 0,
                state: State::Free,
                entry: 0,
                written: 0,
                at: Moments::default(),
                reader: ResponseReader::default(),
            });
            (self.connections.len() - 1) as u32
        });
        self.connections[key as usize].socket = Some(socket);
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
        if connection.state == State::Sending || self.keep_alive {
            flags |= epoll::EventFlags::OUT;
        }
        let data = u64::from(connection.generation) << 32 | u64::from(key);
        if let Err(errno) = epoll::add(&self.epoll, socket, epoll::EventData::new_u64(data), flags)
        {
            self.fail(key, error_kind(errno, false));
        }
    }

    /// Sends what the connection takes of its request. During the handshake that is nothing; on loopback the handshake is
    /// over when connect() returns, so that the first try succeeds.
    fn send(&mut self, key: u32) {
        let connection = &mut self.connections[key as usize];
        let Some(socket) = &connection.socket else {
            return;
        };
        let request = &self.requests[connection.entry];
        while connection.written < request.len() {
            match rustix::net::send(socket, &request[connection.written..], SendFlags::NOSIGNAL) {
                Ok(n) => connection.written += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    let connecting = connection.written == 0 && connection.at.fresh;
                    return self.fail(key, error_kind(errno, connecting));
                }
            }
        }
        connection.state = State::Receiving;
        connection.at.sent = self.start.elapsed().as_nanos() as u64;
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
            // Bytes nobody asked for make a kept connection as useless as its end does.
            State::Idle if flags.intersects(hangup | epoll::EventFlags::IN) => self.close(key),
            State::Lingering if flags.intersects(hangup) => {
                self.lingering.remove(key);
                self.lingerers -= 1;
                self.close(key);
            }
            State::Idle | State::Lingering => {}
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

    /// Reads all there is. A read that does not fill the buffer has emptied the socket; if the event said that the server
    /// has closed in good order, nothing more will come, and the read that would only return 0 is spared. After a reset the
    /// next read says so, and no other event will.
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
            let now = self.start.elapsed().as_nanos() as u64;
            self.record.bytes_received += n as u64;
            if connection.at.first_byte == 0 {
                connection.at.first_byte = now;
            }
            match connection.reader.feed(&self.buffer[..n]) {
                // An answer before the request is all sent is an answer to something else.
                _ if connection.state == State::Sending => {
                    return self.fail(key, ErrorKind::BadResponse);
                }
                Err(_) => return self.fail(key, ErrorKind::BadResponse),
                Ok(Step::Done { used }) if used < n => {
                    return self.fail(key, ErrorKind::BadResponse);
                }
                Ok(Step::Done { .. }) => return self.answered(key, now, closed || reset),
                Ok(Step::More) if n == RECEIVE_BYTES || reset => {}
                Ok(Step::More) if closed => return self.ended(key),
                Ok(Step::More) => return,
            }
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
        let reader = &connection.reader;
        self.record.answered(
            connection.entry,
            reader.status(),
            reader.worker(),
            connection.at,
        );
        let keep = self.keep_alive && reader.keep_alive() && !closed;
        self.in_time.remove(key);
        self.in_flight -= 1;
        if keep {
            connection.state = State::Idle;
            self.idle.push((key, connection.generation));
        } else if closed {
            self.close(key);
        } else {
            connection.state = State::Lingering;
            self.lingering.push(key, now + LINGER_NS);
            self.lingerers += 1;
        }
        self.client_free(now);
    }

    /// The request under way on `key` has failed.
    fn fail(&mut self, key: u32, kind: ErrorKind) {
        let now = self.now();
        self.record.failed(kind, now);
        self.in_time.remove(key);
        self.in_flight -= 1;
        self.close(key);
        self.client_free(now);
    }

    fn close(&mut self, key: u32) {
        let connection = &mut self.connections[key as usize];
        connection.socket = None;
        connection.state = State::Free;
        connection.generation = connection.generation.wrapping_add(1);
        self.free.push(key);
    }

    fn client_free(&mut self, now: u64) {
        if let Some(free) = &mut self.free_clients {
            free.push_back(now);
        }
    }

    /// Ends what has taken too long.
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

fn request_bytes(plan: &Plan, path: &str) -> Vec<u8> {
    let connection = if plan.keep_alive {
        "keep-alive"
    } else {
        "close"
    };
    let host = &plan.host;
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: wakeone-load\r\nConnection: {connection}\r\n\r\n").into()
}
