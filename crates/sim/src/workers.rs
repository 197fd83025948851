//! Workers, and the accept queues before them.

use std::collections::VecDeque;

/// A connection that waits, with the request it will bring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Waiting {
    /// When it came, in s.
    pub arrived: f64,
    /// How much work it is, in s.
    pub work: f64,
}

/// A worker, with the queue that is its own.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    /// Requests it is busy with.
    pub busy: usize,
    /// Connections it has accepted so far.
    pub accepted: u64,
    /// Connections that wait for it alone.
    pub queue: VecDeque<Waiting>,
}

/// In which order the workers that wait for one shared queue are woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The one that has waited longest: blocking accept() (net/ipv4/inet_connection_sock.c, an exclusive wait).
    LongestAsleep,
    /// The one that went to sleep last: several threads in epoll_wait() on one epoll (fs/eventpoll.c, `ep_poll`).
    LastAsleep,
    /// Always the same first one, if it sleeps: an epoll a worker with EPOLLEXCLUSIVE. The list of who waits for the socket
    /// keeps the order of registration (fs/eventpoll.c, `ep_ptable_queue_proc`).
    FirstRegistered,
}

/// The workers that wait for the shared queue.
#[derive(Debug)]
pub(crate) struct Asleep {
    wake: Wake,
    /// In the order in which they went to sleep; of `FirstRegistered` with the first one at the end.
    order: VecDeque<usize>,
}

impl Asleep {
    pub(crate) fn new(wake: Wake, workers: usize) -> Self {
        let mut asleep = Self {
            wake,
            order: VecDeque::with_capacity(workers),
        };
        (0..workers).for_each(|worker| asleep.sleep(worker));
        asleep
    }

    pub(crate) fn sleep(&mut self, worker: usize) {
        if self.wake == Wake::FirstRegistered {
            let at = self.order.partition_point(|other| *other > worker);
            self.order.insert(at, worker);
        } else {
            self.order.push_back(worker);
        }
    }

    pub(crate) fn wake(&mut self) -> Option<usize> {
        match self.wake {
            Wake::LongestAsleep => self.order.pop_front(),
            Wake::LastAsleep | Wake::FirstRegistered => self.order.pop_back(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_wakes_another_one() {
        for (wake, expected) in [
            (Wake::LongestAsleep, [0, 1, 2, 0]),
            (Wake::LastAsleep, [2, 2, 2, 2]),
            (Wake::FirstRegistered, [0, 0, 0, 0]),
        ] {
            let mut asleep = Asleep::new(wake, 3);
            let woken = [(); 4].map(|()| {
                let worker = asleep.wake().expect("all sleep");
                asleep.sleep(worker);
                worker
            });
            assert_eq!(woken, expected, "{wake:?}");
        }
    }
}
