//! N event loops around io_uring, where the program submits operations instead of waiting for
//! readiness. One multishot accept returns connection after connection, and all receives and sends
//! are submitted in one system call a turn.
//!
//! Connections are accepted as they come, whether the worker has time for them or not. With a
//! shared listener, the worker that is in the kernel at that moment gets them all.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::system::ring::{Event, Ring};
use crate::system::stop;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::blocking::LINGER;
use crate::session::{Next, Session};
use crate::store::{Deferred, Driver};
use crate::worker::Worker;

const ENTRIES: u32 = 1024;
const BUFFER_BYTES: usize = 16 * 1024;
const SWEEP: Duration = Duration::from_secs(1);
/// For how long a listener is left alone while its queue is being moved, and when descriptors
/// have run out.
const MOVING_PAUSE: Duration = Duration::from_millis(1);
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(10);

const STORE: u64 = u64::MAX;
const TICK: u64 = u64::MAX - 1;
/// Tokens of listeners are counted from here, those of their pauses likewise.
const LISTENERS: u64 = 1 << 63;
const PAUSES: u64 = LISTENERS + (1 << 32);

/// One connection, with at most one operation in the kernel.
struct Connection {
    socket: OwnedFd,
    session: Session,
    deadline: Instant,
    doing: Doing,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    Receiving,
    Sending,
    Asking,
    Lingering,
}

struct Loop<'a> {
    worker: &'a Worker,
    ring: Ring,
    connections: HashMap<u64, Connection>,
    store: Deferred,
    next: u64,
    ticking: bool,
    accepting: bool,
}

/// Whether the kernel allows io_uring.
///
/// # Errors
/// As [`Ring::new`].
pub fn probe() -> io::Result<()> {
    Ring::new(4).map(drop)
}

/// Serves until a stop is requested; all connections accepted are finished.
///
/// # Errors
/// When the ring fails.
pub fn serve(worker: &Worker) -> io::Result<()> {
    let mut this = Loop {
        worker,
        ring: Ring::new(ENTRIES)?,
        connections: HashMap::new(),
        store: Deferred::new(&worker.app.place)?,
        next: 0,
        ticking: false,
        accepting: true,
    };
    for index in 0..worker.listeners.len() {
        this.accept(index);
    }
    this.ring.poll_readable(this.store.as_fd(), STORE);
    this.run()
}

impl Loop<'_> {
    fn run(&mut self) -> io::Result<()> {
        while self.accepting || self.ring.is_accepting() || !self.connections.is_empty() {
            if !self.ticking && !self.connections.is_empty() {
                self.ticking = true;
                self.ring.sleep(SWEEP, TICK);
            }
            for event in self.ring.wait()? {
                self.handle(event);
            }
            if stop::requested() {
                if self.accepting {
                    self.accepting = false;
                    self.ring.cancel_accepts();
                }
                // The stop signal comes again and again: often enough to look.
                self.sweep();
            }
        }
        Ok(())
    }

    fn accept(&mut self, index: usize) {
        let listener = &self.worker.listeners[index];
        self.ring.accept(listener.as_fd(), LISTENERS + index as u64);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Accepted {
                token,
                result,
                more,
            } => self.accepted((token - LISTENERS) as usize, result, more),
            Event::Received { token, result } => self.received(token, result),
            Event::Sent { token, result } => self.sent(token, result),
            Event::Readable { token: STORE } => {
                self.store_ready();
                self.ring.poll_readable(self.store.as_fd(), STORE);
            }
            Event::Elapsed { token: TICK } => {
                self.ticking = false;
                self.store_ready();
                self.sweep();
            }
            // A pause is over, or a non-blocking listener has a connection.
            Event::Elapsed { token } | Event::Readable { token } => {
                if self.accepting {
                    self.accept((token - PAUSES) as usize);
                }
            }
        }
    }

    fn accepted(&mut self, index: usize, result: io::Result<OwnedFd>, more: bool) {
        let pause = PAUSES + index as u64;
        match result {
            Ok(socket) => {
                self.next += 1;
                let connection = Connection {
                    socket,
                    session: Session::new(),
                    deadline: Instant::now() + self.worker.app.header_timeout,
                    doing: Doing::Receiving,
                };
                self.connections.insert(self.next, connection);
                self.go_on(self.next);
                if !more && self.accepting {
                    self.accept(index);
                }
            }
            Err(_) if !self.accepting => {}
            // The listener was handed over as non-blocking, and the ring does not wait for it
            // either.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let listener = &self.worker.listeners[index];
                self.ring.poll_readable(listener.as_fd(), pause);
            }
            Err(error) => {
                let error = Errno::from_raw_os_error(error.raw_os_error().unwrap_or_default());
                if error == Errno::INVAL {
                    self.ring.sleep(MOVING_PAUSE, pause);
                } else {
                    self.worker.faults.count(error);
                    self.ring.sleep(EXHAUSTED_PAUSE, pause);
                }
            }
        }
    }

    fn received(&mut self, token: u64, result: io::Result<Vec<u8>>) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        match result {
            Ok(bytes) if connection.doing == Doing::Lingering => {
                if bytes.is_empty() || connection.deadline <= Instant::now() {
                    self.connections.remove(&token);
                } else {
                    let socket = connection.socket.as_fd();
                    self.ring.receive(socket, token, bytes);
                }
                return;
            }
            Ok(bytes) if bytes.is_empty() => connection.session.end_of_input(),
            Ok(bytes) => connection.session.receive(&bytes),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => {
                self.connections.remove(&token);
                return;
            }
        }
        self.go_on(token);
    }

    fn sent(&mut self, token: u64, result: io::Result<usize>) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        match result {
            Ok(count) => {
                connection.session.sent(count);
                connection.deadline = Instant::now() + self.worker.app.header_timeout;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => {
                self.connections.remove(&token);
                return;
            }
        }
        self.go_on(token);
    }

    fn store_ready(&mut self) {
        for (token, reply) in self.store.ready() {
            if let Some(connection) = self.connections.get_mut(&token) {
                connection.session.reply(&self.worker.app, reply);
                self.go_on(token);
            }
        }
    }

    /// Goes on with a connection until there is something for the kernel to do.
    fn go_on(&mut self, token: u64) {
        let app = &self.worker.app;
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        loop {
            let socket = connection.socket.as_fd();
            connection.doing = match connection.session.step(app) {
                Next::Ask => {
                    let call = connection.session.question();
                    if let Some(reply) = call.and_then(|call| self.store.submit(token, call)) {
                        connection.session.reply(app, reply);
                    }
                    continue;
                }
                Next::Reply => Doing::Asking,
                Next::Write => {
                    let bytes = connection.session.unsent().to_vec();
                    let more = connection.session.is_last();
                    self.ring.send(socket, token, bytes, more);
                    Doing::Sending
                }
                Next::Read => {
                    let buffer = Vec::with_capacity(BUFFER_BYTES);
                    self.ring.receive(socket, token, buffer);
                    Doing::Receiving
                }
                Next::Close { linger } => {
                    if !linger || shutdown(socket, Shutdown::Write).is_err() {
                        self.connections.remove(&token);
                        return;
                    }
                    connection.deadline = Instant::now() + LINGER;
                    let buffer = Vec::with_capacity(BUFFER_BYTES);
                    self.ring.receive(socket, token, buffer);
                    Doing::Lingering
                }
            };
            return;
        }
    }

    /// Ends connections that took too long, and idle ones if the server stops. An operation in the
    /// kernel keeps its socket. So the socket is shut down, which ends the operation, and the
    /// connection goes on from there.
    fn sweep(&mut self) {
        let now = Instant::now();
        for connection in self.connections.values_mut() {
            let overdue = connection.deadline <= now;
            if connection.doing == Doing::Receiving && overdue && !connection.session.is_silent() {
                // The receive ends as if the client had ended; the answer is sent then.
                connection.session.time_out(&self.worker.app);
                connection.deadline = now + LINGER;
                let _ = shutdown(&connection.socket, Shutdown::Read);
            } else if overdue || (stop::requested() && connection.session.is_idle()) {
                let _ = shutdown(&connection.socket, Shutdown::Both);
            }
        }
    }
}
