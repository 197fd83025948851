//! Connections that are kept: the worker of each, and the one that a request comes over.

use std::collections::VecDeque;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::front::Front;
use crate::load::{self, Next};
use crate::random::stream;
use crate::workers::Waiting;

/// The worker whose connection a request takes.
pub(crate) enum Taken {
    /// This one.
    By(usize),
    /// The request waits for a connection.
    Later,
    /// There is no connection.
    Nobody,
}

/// Connections that are kept.
pub(crate) struct Kept {
    next: Next,
    /// The worker of each connection, or of each idle one, the longest idle first. Those of one worker are alike.
    workers: VecDeque<usize>,
    random: Xoshiro256PlusPlus,
    /// Requests that wait for a connection.
    waiting: VecDeque<Waiting>,
}

impl Kept {
    /// Opens them, one after another, while all workers wait.
    pub(crate) fn open(of: load::Kept, front: &mut Front, seed: u64) -> Self {
        let (mut now, mut next_look) = (0.0, 0.0);
        let mut open = |_| {
            while next_look <= now
                && let Some((_, next)) = front.steer(next_look, |_| true)
            {
                next_look = next;
            }
            let opened = front.open();
            next_look = front.ring(now).unwrap_or(next_look);
            now += of.apart_s;
            opened
        };
        Self {
            next: of.next,
            workers: (0..of.connections).filter_map(&mut open).collect(),
            random: stream(seed, 4),
            waiting: VecDeque::new(),
        }
    }

    /// The connection for a request.
    pub(crate) fn take(&mut self, one: Waiting) -> Taken {
        let taken = match self.next {
            Next::LongestIdle => self.workers.pop_front(),
            Next::Any if self.workers.is_empty() => return Taken::Nobody,
            Next::Any => {
                let which = self.random.random_range(0..self.workers.len());
                Some(self.workers[which])
            }
        };
        match taken {
            Some(worker) => Taken::By(worker),
            None => {
                self.waiting.push_back(one);
                Taken::Later
            }
        }
    }

    /// A request of this worker has ended. Returns the request that waited for the connection, if one did.
    pub(crate) fn give_back(&mut self, worker: usize) -> Option<Waiting> {
        if self.next == Next::Any {
            return None;
        }
        let one = self.waiting.pop_front();
        if one.is_none() {
            self.workers.push_back(worker);
        }
        one
    }

    /// The connections of a worker, to be opened anew.
    pub(crate) fn of(&mut self, worker: usize) -> impl Iterator<Item = &mut usize> {
        self.workers.iter_mut().filter(move |of| **of == worker)
    }
}
