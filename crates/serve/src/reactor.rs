//! The common part of the epoll architectures: an epoll instance with the connections, the store
//! and the listeners of one worker in it. They differ in how a listener is registered and how much
//! is accepted at a time; this is in their files, each with its own loop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::system::stop;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::connections::{Change, Connections, Interest, Token};
use crate::listener::Accepted;
use crate::worker::Worker;

/// Tokens of listeners are counted from here; those of connections never get so far.
const LISTENERS: u64 = u64::MAX - 0xffff;
/// The token of the store.
const STORE: u64 = LISTENERS - 1;
/// The token of something else that a loop watches.
const OTHER: u64 = LISTENERS - 2;
/// How often overdue connections are looked for; while stopping, more often.
const SWEEP: Duration = Duration::from_secs(1);
const SWEEP_STOPPING: Duration = Duration::from_millis(10);

/// An event that a loop has to handle itself. Connections and the store were handled before it sees
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The listener with this number may have connections.
    Listener(usize),
    /// The descriptor given to [`Reactor::watch_other`].
    Other,
}

/// The epoll instance of a worker, with its connections and listeners.
pub struct Reactor<'a> {
    worker: &'a Worker,
    epoll: OwnedFd,
    connections: Connections,
    /// How listeners are registered.
    flags: EventFlags,
    /// Listeners that are not registered for a while, and until when.
    paused: Vec<(usize, Instant)>,
    swept: Instant,
    events: Vec<Event>,
}

impl<'a> Reactor<'a> {
    /// Makes one with all listeners of the worker registered with `flags`.
    ///
    /// # Errors
    /// When the kernel has no descriptors or memory for it.
    pub fn new(worker: &'a Worker, flags: EventFlags) -> Result<Self, Errno> {
        let new = Self {
            worker,
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            connections: Connections::new(&worker.app)?,
            flags,
            paused: Vec::new(),
            swept: Instant::now(),
            events: Vec::with_capacity(256),
        };
        for index in 0..worker.listeners.len() {
            new.register(index)?;
        }
        let store = EventData::new_u64(STORE);
        epoll::add(
            &new.epoll,
            new.connections.store_fd(),
            store,
            EventFlags::IN,
        )?;
        Ok(new)
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Watches one more descriptor: [`Ready::Other`] when it is readable.
    ///
    /// # Errors
    /// The error of epoll.
    pub fn watch_other(&self, fd: impl AsFd) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(OTHER), EventFlags::IN)
    }

    /// Ends [`Self::watch_other`].
    ///
    /// # Errors
    /// The error of epoll.
    pub fn forget_other(&self, fd: impl AsFd) -> Result<(), Errno> {
        epoll::delete(&self.epoll, fd)
    }

    fn register(&self, index: usize) -> Result<(), Errno> {
        let data = EventData::new_u64(LISTENERS + index as u64);
        epoll::add(&self.epoll, &self.worker.listeners[index], data, self.flags)
    }

    /// Registers a listener anew, which puts this worker at the end of its list.
    ///
    /// # Errors
    /// The error of epoll.
    pub fn register_anew(&self, index: usize) -> Result<(), Errno> {
        epoll::delete(&self.epoll, &self.worker.listeners[index])?;
        self.register(index)
    }

    /// Takes the listeners out of the epoll instance.
    pub fn stop_listening(&mut self) {
        for listener in &self.worker.listeners {
            // A paused listener is not registered.
            let _ = epoll::delete(&self.epoll, listener);
        }
        self.paused.clear();
    }

    /// Waits for events, goes on with the connections they are for, and returns the rest for the
    /// loop to handle.
    ///
    /// # Errors
    /// The error of epoll.
    pub fn turn(&mut self) -> Result<Vec<Ready>, Errno> {
        let wait = self.time_to_wait();
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let mut ready = Vec::new();
        for event in &events {
            match event.data.u64() {
                STORE => {
                    let changes = self.connections.store_ready(&self.worker.app);
                    self.follow_all(changes);
                }
                OTHER => ready.push(Ready::Other),
                token if token >= LISTENERS => {
                    ready.push(Ready::Listener((token - LISTENERS) as usize));
                }
                token => self.drive(token),
            }
        }
        self.events = events;
        self.resume_paused()?;
        let period = if stop::requested() {
            SWEEP_STOPPING
        } else {
            SWEEP
        };
        if self.swept.elapsed() >= period {
            self.swept = Instant::now();
            let changes = self.connections.sweep(&self.worker.app);
            self.follow_all(changes);
        }
        Ok(ready)
    }

    /// How long to wait for events: until something else is due.
    fn time_to_wait(&self) -> Timespec {
        let now = Instant::now();
        let mut wait = match (self.connections.is_empty(), stop::requested()) {
            (_, true) => SWEEP_STOPPING,
            (true, false) => Duration::from_secs(3600),
            (false, false) => (self.swept + SWEEP).saturating_duration_since(now),
        };
        for (_, until) in &self.paused {
            wait = wait.min(until.saturating_duration_since(now));
        }
        Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: wait.subsec_nanos().into(),
        }
    }

    /// Accepts one connection from a listener, if it has one; returns whether it had.
    ///
    /// # Errors
    /// The error of epoll.
    pub fn accept(&mut self, index: usize) -> Result<bool, Errno> {
        let listener = &self.worker.listeners[index];
        match listener.accept(true, &self.worker.faults) {
            Accepted::Connection(connection) => {
                self.adopt(connection);
                return Ok(true);
            }
            Accepted::Nothing => {}
            // Short: its queue is being moved, and the loop would come round at once because the
            // listener shows EPOLLHUP meanwhile.
            Accepted::Later(wait) if wait < Duration::from_millis(1) => std::thread::sleep(wait),
            Accepted::Later(wait) => {
                epoll::delete(&self.epoll, listener)?;
                self.paused.push((index, Instant::now() + wait));
            }
        }
        Ok(false)
    }

    /// Takes over an accepted connection, which does not block.
    pub fn adopt(&mut self, connection: OwnedFd) {
        let token = self.connections.insert(connection, &self.worker.app);
        self.control(token, Interest::Read, |epoll, socket, data, flags| {
            epoll::add(epoll, socket, data, flags)
        });
    }

    fn resume_paused(&mut self) -> Result<(), Errno> {
        let now = Instant::now();
        while let Some(position) = self.paused.iter().position(|(_, until)| *until <= now) {
            let (index, _) = self.paused.swap_remove(position);
            self.register(index)?;
        }
        Ok(())
    }

    fn drive(&mut self, token: Token) {
        if let Some((_, before)) = self.connections.get(token) {
            let after = self.connections.drive(token, &self.worker.app);
            self.follow(token, before, after);
        }
    }

    fn follow_all(&mut self, changes: Vec<Change>) {
        for (token, before, after) in changes {
            self.follow(token, before, after);
        }
    }

    /// Updates epoll when a connection's interest has changed. A closed connection is gone from it.
    fn follow(&mut self, token: Token, before: Interest, after: Interest) {
        if before != after {
            self.control(token, after, |epoll, socket, data, flags| {
                epoll::modify(epoll, socket, data, flags)
            });
        }
    }

    /// Registers a connection's interest. A connection that epoll does not take is closed: it would
    /// never be woken again.
    fn control(
        &mut self,
        token: Token,
        interest: Interest,
        control: impl FnOnce(&OwnedFd, BorrowedFd<'_>, EventData, EventFlags) -> Result<(), Errno>,
    ) {
        let flags = match interest {
            Interest::Read => EventFlags::IN,
            Interest::Write => EventFlags::OUT,
            Interest::Store => EventFlags::empty(),
            Interest::Closed => return,
        };
        let Some((socket, _)) = self.connections.get(token) else {
            return;
        };
        if let Err(error) = control(&self.epoll, socket, EventData::new_u64(token), flags) {
            self.worker.faults.count(error);
            self.connections.remove(token);
        }
    }
}
