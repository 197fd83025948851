//! Preforked event loops: N processes, each with an epoll instance of its own in which the same
//! listener is registered. Who is woken for a connection depends on how it is registered:
//!
//! * `wake-all`: `EPOLLIN` alone. Everyone who waits is woken, one gets the connection: the
//!   thundering herd.
//! * `exclusive`: `EPOLLEXCLUSIVE`. One of those that wait is woken, always the first in the
//!   listener's list that waits: the load sticks to a few.
//! * `rotate`: `EPOLLEXCLUSIVE`, and who has accepted registers the listener anew and so goes to
//!   the end of that list: the connections go round, without a patch to the kernel.
//!
//! One connection is accepted for each time the listener is ready, so that the others of a burst
//! are left to workers that are idle. With a listener for each process (`--reuseport`) the
//! kernel's hash chooses and the mode makes no difference.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;
use wakeone_kernel::stop;

use crate::connections::{Connections, Interest, Token};
use crate::listener::{Accepted, Listener};
use crate::worker::Worker;
use crate::{EpollMode, Error};

/// Tokens of listeners are counted down from here; those of connections never get so far.
const LISTENERS: u64 = u64::MAX - 0xffff;
/// How often overdue connections are looked for; while stopping more often.
const SWEEP: Duration = Duration::from_secs(1);
const SWEEP_STOPPING: Duration = Duration::from_millis(10);

/// Serves until a stop is requested; all connections accepted are finished.
///
/// # Errors
/// When epoll cannot be set up.
pub fn serve(worker: &Worker, mode: EpollMode) -> Result<(), Error> {
    let mut event_loop = EventLoop::new(worker, mode).map_err(Error::EventLoop)?;
    event_loop.run().map_err(Error::EventLoop)
}

struct EventLoop<'a> {
    worker: &'a Worker,
    mode: EpollMode,
    epoll: OwnedFd,
    connections: Connections,
    /// Listeners that are not registered now, and until when.
    paused: Vec<(usize, Instant)>,
}

impl<'a> EventLoop<'a> {
    fn new(worker: &'a Worker, mode: EpollMode) -> Result<Self, Errno> {
        let new = Self {
            worker,
            mode,
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            connections: Connections::default(),
            paused: Vec::new(),
        };
        for index in 0..worker.listeners.len() {
            new.register(index)?;
        }
        Ok(new)
    }

    fn listener(&self, index: usize) -> &'a Listener {
        &self.worker.listeners[index]
    }

    fn register(&self, index: usize) -> Result<(), Errno> {
        let flags = match self.mode {
            EpollMode::WakeAll => EventFlags::IN,
            EpollMode::Exclusive | EpollMode::Rotate => EventFlags::IN | EventFlags::EXCLUSIVE,
        };
        let data = EventData::new_u64(LISTENERS + index as u64);
        epoll::add(&self.epoll, self.listener(index), data, flags)
    }

    fn run(&mut self) -> Result<(), Errno> {
        let mut events = Vec::with_capacity(256);
        let mut swept = Instant::now();
        let mut accepting = true;
        while accepting || !self.connections.is_empty() {
            events.clear();
            let wait = self.wait(swept);
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
            if accepting && stop::requested() {
                accepting = false;
                self.stop_accepting();
            }
            for event in &events {
                match event.data.u64() {
                    token if token >= LISTENERS => {
                        if accepting {
                            self.accept((token - LISTENERS) as usize)?;
                        }
                    }
                    token => self.drive(token),
                }
            }
            self.resume_paused()?;
            let period = if accepting { SWEEP } else { SWEEP_STOPPING };
            if swept.elapsed() >= period {
                swept = Instant::now();
                for (token, before, after) in self.connections.sweep(&self.worker.app) {
                    self.follow(token, before, after);
                }
            }
        }
        Ok(())
    }

    /// How long to wait for events: until something else is due.
    fn wait(&self, swept: Instant) -> Timespec {
        let now = Instant::now();
        let mut wait = match (self.connections.is_empty(), stop::requested()) {
            (_, true) => SWEEP_STOPPING,
            (true, false) => Duration::from_secs(3600),
            (false, false) => (swept + SWEEP).saturating_duration_since(now),
        };
        for (_, until) in &self.paused {
            wait = wait.min(until.saturating_duration_since(now));
        }
        Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: wait.subsec_nanos().into(),
        }
    }

    fn accept(&mut self, index: usize) -> Result<(), Errno> {
        match self.listener(index).accept(true, &self.worker.faults) {
            Accepted::Connection(connection) => {
                let token = self.connections.insert(connection, &self.worker.app);
                self.watch(token, Interest::Read, |epoll, socket, data, flags| {
                    epoll::add(epoll, socket, data, flags)
                });
                if self.mode == EpollMode::Rotate {
                    epoll::delete(&self.epoll, self.listener(index))?;
                    self.register(index)?;
                }
            }
            Accepted::Nothing => {}
            // Short: its queue is being moved, and the loop would come round at once because the
            // listener shows EPOLLHUP meanwhile.
            Accepted::Later(wait) if wait < Duration::from_millis(1) => std::thread::sleep(wait),
            Accepted::Later(wait) => {
                epoll::delete(&self.epoll, self.listener(index))?;
                self.paused.push((index, Instant::now() + wait));
            }
        }
        Ok(())
    }

    fn resume_paused(&mut self) -> Result<(), Errno> {
        let now = Instant::now();
        while let Some(position) = self.paused.iter().position(|(_, until)| *until <= now) {
            let (index, _) = self.paused.swap_remove(position);
            if !stop::requested() {
                self.register(index)?;
            }
        }
        Ok(())
    }

    fn stop_accepting(&mut self) {
        for listener in &self.worker.listeners {
            // Not there if it is paused.
            let _ = epoll::delete(&self.epoll, listener);
        }
    }

    fn drive(&mut self, token: Token) {
        if let Some((_, before)) = self.connections.get(token) {
            let after = self.connections.drive(token, &self.worker.app);
            self.follow(token, before, after);
        }
    }

    /// Tells epoll when a connection waits for something else. A closed one is gone from it.
    fn follow(&mut self, token: Token, before: Interest, after: Interest) {
        if before != after {
            self.watch(token, after, |epoll, socket, data, flags| {
                epoll::modify(epoll, socket, data, flags)
            });
        }
    }

    /// Registers what a connection waits for. One that epoll does not take is closed: nobody
    /// would ever hear of it again.
    fn watch(
        &mut self,
        token: Token,
        interest: Interest,
        control: impl FnOnce(&OwnedFd, BorrowedFd<'_>, EventData, EventFlags) -> Result<(), Errno>,
    ) {
        let flags = match interest {
            Interest::Read => EventFlags::IN,
            Interest::Write => EventFlags::OUT,
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
