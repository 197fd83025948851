//! A listening socket in small: a queue of connections, and threads that wait for them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::queue::{Kind, Policy, Slept, WaitQueue, Waiter};
use crate::spin::Spin;

/// Why a connection was not queued; it is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused<T> {
    /// The queue holds as many as its backlog.
    #[error("the queue of connections is full")]
    Full(T),
    /// The acceptor is closed.
    #[error("the acceptor is closed")]
    Closed(T),
}

/// No connection came in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no connection came in time")]
pub struct TimedOut;

/// The news for a select()-like waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Arrivals {
    /// Connections that have ever been queued.
    pub total: u64,
    /// Connections that wait to be accepted.
    pub queued: usize,
    /// Whether the acceptor is closed.
    pub closed: bool,
}

/// A queue of connections `T` in front of threads in [`Acceptor::accept`] and [`Acceptor::select`].
#[derive(Debug)]
pub struct Acceptor<T> {
    queue: WaitQueue,
    backlog: usize,
    state: Spin<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    connections: VecDeque<T>,
    total: u64,
    closed: bool,
}

impl<T> Acceptor<T> {
    /// An acceptor that queues at most `backlog` connections and wakes by `policy`.
    #[must_use]
    pub fn new(policy: Policy, backlog: usize) -> Self {
        Self {
            queue: WaitQueue::new(policy),
            backlog,
            state: Spin::new(State {
                connections: VecDeque::with_capacity(backlog.min(1024)),
                total: 0,
                closed: false,
            }),
        }
    }

    /// Queues a connection and wakes for it; returns how many threads were woken.
    ///
    /// # Errors
    /// When the queue is full or the acceptor closed.
    pub fn connect(&self, connection: T) -> Result<usize, Refused<T>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Refused::Closed(connection));
        }
        if state.connections.len() >= self.backlog {
            return Err(Refused::Full(connection));
        }
        state.connections.push_back(connection);
        state.total += 1;
        drop(state);
        Ok(self.queue.wake_one())
    }

    /// Waits for the oldest connection; returns `None` once the acceptor is closed.
    pub fn accept(&self, waiter: &mut Waiter) -> Option<T> {
        self.queue
            .wait_until(waiter, Kind::Exclusive, || self.try_accept())
    }

    /// Waits as [`Acceptor::accept`] does, but no longer than `timeout`.
    ///
    /// # Errors
    /// [`TimedOut`] when none came in time.
    pub fn accept_within(
        &self,
        waiter: &mut Waiter,
        timeout: Duration,
    ) -> Result<Option<T>, TimedOut> {
        let deadline = Instant::now() + timeout;
        let mut waiting = self.queue.prepare(waiter, Kind::Exclusive);
        loop {
            if let Some(ended) = self.try_accept() {
                return Ok(ended);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if waiting.sleep_for(left) == Slept::TimedOut {
                return Err(TimedOut);
            }
            if let Some(ended) = self.try_accept() {
                return Ok(ended);
            }
            waiting.again();
        }
    }

    /// Returns the result of accept() now; `None` while there is reason to wait.
    fn try_accept(&self) -> Option<Option<T>> {
        let mut state = self.state.lock();
        let connection = state.connections.pop_front();
        (connection.is_some() || state.closed).then_some(connection)
    }

    /// Waits, as select() does, until more connections have come than the `seen` that the caller knows of, or the acceptor
    /// is closed. Takes none.
    pub fn select(&self, waiter: &mut Waiter, seen: u64) -> Arrivals {
        self.queue.wait_until(waiter, Kind::Select, || {
            let now = self.arrivals();
            (now.closed || now.total > seen).then_some(now)
        })
    }

    /// Returns the news for a select()-like waiter without waiting.
    #[must_use]
    pub fn arrivals(&self) -> Arrivals {
        let state = self.state.lock();
        Arrivals {
            total: state.total,
            queued: state.connections.len(),
            closed: state.closed,
        }
    }

    /// The wait queue, for threads that wait in a way of their own.
    #[must_use]
    pub fn queue(&self) -> &WaitQueue {
        &self.queue
    }

    /// How many threads wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Closes the acceptor: drops the connections that were not accepted, and wakes all waiters, exclusive ones
    /// included. Returns how many were woken.
    pub fn close(&self) -> usize {
        let mut state = self.state.lock();
        state.closed = true;
        let dropped = std::mem::take(&mut state.connections);
        drop(state);
        drop(dropped);
        self.queue.wake_abnormal()
    }
}
