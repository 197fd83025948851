//! The workers that wait for one shared queue, and which of them a connection wakes.

use std::collections::VecDeque;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use wakeone_model::arming::Change;

use crate::random::stream;

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
    /// All of them, and any may be the first to accept: an epoll a worker without EPOLLEXCLUSIVE.
    All,
}

/// A bit for each of a number of places.
#[derive(Debug, Clone)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(places: usize) -> Self {
        Self(vec![0; places.div_ceil(64)])
    }

    #[inline]
    fn get(&self, place: usize) -> bool {
        self.0[place / 64] >> (place % 64) & 1 == 1
    }

    #[inline]
    fn set(&mut self, place: usize, on: bool) {
        let bit = 1 << (place % 64);
        match on {
            true => self.0[place / 64] |= bit,
            false => self.0[place / 64] &= !bit,
        }
    }

    /// The places of `self` without those of others, as words.
    #[inline]
    fn without<'a>(&'a self, others: &'a Self) -> impl Iterator<Item = u64> + 'a {
        self.0
            .iter()
            .zip(&others.0)
            .map(|(one, other)| one & !other)
    }
}

/// The place of the n-th bit of these words; `None`: there are fewer.
#[inline]
fn nth_place(words: impl Iterator<Item = u64>, mut n: usize) -> Option<usize> {
    for (at, mut word) in words.enumerate() {
        let ones = word.count_ones() as usize;
        if n >= ones {
            n -= ones;
            continue;
        }
        (0..n).for_each(|_| word &= word - 1);
        return Some(at * 64 + word.trailing_zeros() as usize);
    }
    None
}

/// The workers that wait for the shared queue.
#[derive(Debug)]
pub(crate) struct Asleep {
    wake: Wake,
    /// The workers in the order in which they went to sleep, where that decides.
    order: VecDeque<u32>,
    /// The listener's wait list: the workers in the order in which their entries were added.
    list: Vec<u32>,
    /// The place of each worker in it.
    places: Vec<u32>,
    /// The places of those that sleep, and of those that are not woken though they do.
    asleep: Bits,
    disarmed: Bits,
    /// Draws the first of all that are woken.
    chance: Xoshiro256PlusPlus,
}

impl Asleep {
    pub(crate) fn new(wake: Wake, workers: usize, seed: u64) -> Self {
        let in_order: Vec<u32> = (0..workers as u32).collect();
        let mut asleep = Self {
            wake,
            order: VecDeque::with_capacity(workers),
            list: in_order.clone(),
            places: in_order,
            asleep: Bits::new(workers),
            disarmed: Bits::new(workers),
            chance: stream(seed, 7),
        };
        (0..workers).for_each(|worker| asleep.sleep(worker));
        asleep
    }

    #[inline]
    fn place(&self, worker: usize) -> usize {
        self.places[worker] as usize
    }

    /// Whether a worker waits, armed or not.
    #[inline]
    pub(crate) fn has(&self, worker: usize) -> bool {
        self.asleep.get(self.place(worker))
    }

    /// Whether a worker's entry wakes it.
    #[inline]
    pub(crate) fn is_armed(&self, worker: usize) -> bool {
        !self.disarmed.get(self.place(worker))
    }

    /// Whether a connection wakes all that wait.
    pub(crate) fn wakes_all(&self) -> bool {
        self.wake == Wake::All
    }

    /// A worker waits from now on, if it does not already.
    #[inline]
    pub(crate) fn sleep(&mut self, worker: usize) {
        if self.has(worker) {
            return;
        }
        self.asleep.set(self.place(worker), true);
        if matches!(self.wake, Wake::LongestAsleep | Wake::LastAsleep) {
            self.order.push_back(worker as u32);
        }
    }

    /// A connection comes. Returns the worker that is woken, or is the first of those.
    #[inline]
    pub(crate) fn wake(&mut self) -> Option<usize> {
        let worker = match self.wake {
            Wake::LongestAsleep => self.order.pop_front()? as usize,
            Wake::LastAsleep => self.order.pop_back()? as usize,
            Wake::FirstRegistered => self.nth(0)?,
            Wake::All => {
                let count: u32 = self.woken().map(u64::count_ones).sum();
                let which = (count > 0).then(|| self.chance.random_range(0..count))?;
                self.nth(which as usize)?
            }
        };
        self.asleep.set(self.place(worker), false);
        Some(worker)
    }

    #[inline]
    fn woken(&self) -> impl Iterator<Item = u64> + '_ {
        self.asleep.without(&self.disarmed)
    }

    #[inline]
    fn nth(&self, n: usize) -> Option<usize> {
        Some(self.list[nth_place(self.woken(), n)?] as usize)
    }

    /// A worker waits no more.
    pub(crate) fn remove(&mut self, worker: usize) {
        self.asleep.set(self.place(worker), false);
        self.order.retain(|other| *other as usize != worker);
    }

    /// A worker's entry changes. One that waits exclusively cannot be modified: it is taken out, and added at the end.
    pub(crate) fn change(&mut self, worker: usize, change: Change) {
        if self.wake == Wake::FirstRegistered {
            self.move_to_end(worker);
        }
        let place = self.place(worker);
        match change {
            Change::Arm => self.disarmed.set(place, false),
            Change::Disarm => self.disarmed.set(place, true),
            Change::ToEnd => {}
        }
    }

    fn move_to_end(&mut self, worker: usize) {
        let from = self.place(worker);
        let bits = (self.asleep.get(from), self.disarmed.get(from));
        let last = self.list.len() - 1;
        for place in from..last {
            let (asleep, disarmed) = (self.asleep.get(place + 1), self.disarmed.get(place + 1));
            self.put(place, self.list[place + 1], (asleep, disarmed));
        }
        self.put(last, worker as u32, bits);
    }

    fn put(&mut self, place: usize, worker: u32, (asleep, disarmed): (bool, bool)) {
        self.list[place] = worker;
        self.places[worker as usize] = place as u32;
        self.asleep.set(place, asleep);
        self.disarmed.set(place, disarmed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn who_is_removed_is_not_woken() {
        for wake in [
            Wake::LongestAsleep,
            Wake::LastAsleep,
            Wake::FirstRegistered,
            Wake::All,
        ] {
            let mut asleep = Asleep::new(wake, 70, 1);
            (0..69).for_each(|worker| asleep.remove(worker));
            asleep.sleep(69);
            assert_eq!((asleep.wake(), asleep.wake()), (Some(69), None));
        }
    }

    fn woken<const N: usize>(wake: Wake, workers: usize) -> [usize; N] {
        let mut asleep = Asleep::new(wake, workers, 1);
        [(); N].map(|()| {
            let worker = asleep.wake().expect("all sleep");
            asleep.sleep(worker);
            worker
        })
    }

    #[test]
    fn each_order_wakes_another_one() {
        for (wake, expected) in [
            (Wake::LongestAsleep, [0, 1, 2, 0]),
            (Wake::LastAsleep, [2, 2, 2, 2]),
            (Wake::FirstRegistered, [0, 0, 0, 0]),
        ] {
            assert_eq!(woken(wake, 3), expected, "{wake:?}");
        }
        let any: [usize; 70_000] = woken(Wake::All, 70);
        for worker in 0..70 {
            let times = any.iter().filter(|one| **one == worker).count();
            assert!((800..1_200).contains(&times), "{worker}: {times}");
        }
    }

    proptest! {
        /// The kernel's wait list, kept as a list.
        #[test]
        fn the_first_of_the_wait_list_that_sleeps_and_is_armed_is_woken(
            workers in 1_usize..140,
            steps in prop::collection::vec((0_u8..6, any::<u16>()), 0..200),
        ) {
            let mut asleep = Asleep::new(Wake::FirstRegistered, workers, 1);
            let mut list: Vec<(usize, bool, bool)> = (0..workers).map(|worker| (worker, true, true)).collect();
            for (what, worker) in steps {
                let worker = usize::from(worker) % workers;
                let at = list.iter().position(|(one, ..)| *one == worker).expect("a worker");
                let changed = |change| match change {
                    Change::Arm => (worker, list[at].1, true),
                    Change::Disarm => (worker, list[at].1, false),
                    Change::ToEnd => list[at],
                };
                match what {
                    0..3 => {
                        let change = [Change::Arm, Change::Disarm, Change::ToEnd][usize::from(what)];
                        asleep.change(worker, change);
                        let entry = changed(change);
                        list.remove(at);
                        list.push(entry);
                    }
                    3 => {
                        asleep.sleep(worker);
                        list[at].1 = true;
                    }
                    _ => {
                        let first = list.iter_mut().find(|(_, asleep, armed)| *asleep && *armed);
                        let expected = first.map(|one| {
                            one.1 = false;
                            one.0
                        });
                        prop_assert_eq!(asleep.wake(), expected);
                    }
                }
                for (worker, sleeps, armed) in &list {
                    prop_assert_eq!((asleep.has(*worker), asleep.is_armed(*worker)), (*sleeps, *armed));
                }
            }
        }
    }
}
