//! Workers, and the accept queues before them.

use std::collections::VecDeque;

/// A connection that waits, with the request it will bring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Waiting {
    /// When its first SYN came, in s.
    pub arrived: f64,
    /// How much work it is, in s.
    pub work: f64,
    /// The hash of its addresses and ports.
    pub hash: u32,
    /// SYNs that were dropped.
    pub dropped: u32,
}

/// A worker, with the queue that is its own.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    /// Requests it is busy with.
    pub busy: usize,
    /// Connections it has accepted so far.
    pub accepted: u64,
    /// Connections that wait for this worker alone.
    pub queue: VecDeque<Waiting>,
    /// The number of pauses and stops that overlap now; it works where there are none.
    pub halts: u32,
    /// It crashed, and is not started again yet.
    pub down: bool,
    /// How often it has been started anew.
    pub lives: u32,
}

impl Worker {
    /// Whether it does nothing now.
    #[inline]
    pub(crate) fn is_halted(&self) -> bool {
        self.halts > 0 || self.down
    }
}

/// In which order the workers that wait for one shared queue are woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The one that has waited longest: blocking accept() (net/ipv4/inet_connection_sock.c, an exclusive wait).
    LongestAsleep,
    /// The one that went to sleep last: several threads in epoll_wait() on one epoll (fs/eventpoll.c, `ep_poll`).
    LastAsleep,
    /// Always the same first one, if it sleeps: an epoll a worker with EPOLLEXCLUSIVE. The socket's wait queue keeps
    /// the order of registration (fs/eventpoll.c, `ep_ptable_queue_proc`).
    FirstRegistered,
}

/// The workers that wait for the shared queue.
#[derive(Debug)]
pub(crate) struct Asleep {
    wake: Wake,
    /// The workers in the order in which they went to sleep; unused for `FirstRegistered`.
    order: VecDeque<u32>,
    /// A bit for each worker that sleeps.
    bits: Vec<u64>,
}

impl Asleep {
    pub(crate) fn new(wake: Wake, workers: usize) -> Self {
        let mut asleep = Self {
            wake,
            order: VecDeque::with_capacity(workers),
            bits: vec![0; workers.div_ceil(64)],
        };
        (0..workers).for_each(|worker| asleep.sleep(worker));
        asleep
    }

    fn has(&self, worker: usize) -> bool {
        self.bits[worker / 64] >> (worker % 64) & 1 == 1
    }

    /// A worker waits from now on, if it does not already.
    #[inline]
    pub(crate) fn sleep(&mut self, worker: usize) {
        if self.has(worker) {
            return;
        }
        self.bits[worker / 64] |= 1 << (worker % 64);
        if self.wake != Wake::FirstRegistered {
            self.order.push_back(worker as u32);
        }
    }

    #[inline]
    pub(crate) fn wake(&mut self) -> Option<usize> {
        let worker = match self.wake {
            Wake::LongestAsleep => self.order.pop_front()? as usize,
            Wake::LastAsleep => self.order.pop_back()? as usize,
            Wake::FirstRegistered => {
                let word = self.bits.iter().position(|bits| *bits != 0)?;
                word * 64 + self.bits[word].trailing_zeros() as usize
            }
        };
        self.bits[worker / 64] &= !(1 << (worker % 64));
        Some(worker)
    }

    /// A worker waits no more.
    pub(crate) fn remove(&mut self, worker: usize) {
        self.bits[worker / 64] &= !(1 << (worker % 64));
        self.order.retain(|other| *other as usize != worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_removed_is_not_woken() {
        for wake in [Wake::LongestAsleep, Wake::LastAsleep, Wake::FirstRegistered] {
            let mut asleep = Asleep::new(wake, 70);
            (0..69).for_each(|worker| asleep.remove(worker));
            asleep.sleep(69);
            assert_eq!((asleep.wake(), asleep.wake()), (Some(69), None));
        }
    }

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
