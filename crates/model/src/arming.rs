//! One queue, the right worker: which of the workers that wait for a shared listener are woken, and in which order.
//!
//! A worker whose entry has EPOLLIN is *armed*. Those that have more connections than the least loaded one are disarmed,
//! so that a new connection wakes one that has few. It stays in the one queue until somebody takes it: nothing is
//! committed to a worker that is busy.
//!
//! Two rules keep that from doing harm. A worker's load is the least count of its last looks, so that a few connections
//! which come and go disarm nobody. And all are armed as long as the queue is seen not to be empty: a worker that was armed
//! alone may just have got a long request.
//!
//! As long as connections only come, they are taken for such that last. If a look can follow each of them, the counts are
//! taken as they are: the next connection goes to a worker with the fewest.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::looks::{Pace, Wanted};

/// A change of a worker's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// The worker is woken for connections, as the server made it.
    Arm,
    /// The worker is not woken for connections any more.
    Disarm,
    /// The entry goes to the end of the listener's wait list. Workers that wait exclusively are woken in the order of that
    /// list.
    ToEnd,
}

/// How workers take turns at connections that last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Turn {
    /// The next is the worker with the fewest open connections for its weight.
    #[default]
    LeastConnections,
    /// The next is the worker that got the fewest for its weight, though others may have closed theirs since.
    RoundRobin,
}

/// How a group is to be steered. The default is what the product does; the search of docs/policies.md tries others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArmingConfig {
    /// By so many connections a worker may be above the least loaded one and stay armed.
    pub slack: u64,
    /// So many stay armed at least: while the least loaded one serves a request, another takes the next connection.
    pub least_armed: usize,
    /// But of workers that are all woken the kernel wakes the last ones to come first, and the others hardly get any. So one
    /// with so many connections less than the next is armed alone, as long as it waits and connections only come. Where a look
    /// follows each connection, one less is enough.
    pub alone_below: u64,
    /// Connections do not only come if more than so many came since the last look,
    pub come_until: u64,
    /// or one ended in so many looks: those that come may be short.
    pub come_after: u32,
    /// And one of so many workers, rounded up: those that are armed have to take a burst alone.
    pub armed_of: usize,
    /// If more connections a worker came since the last look, all are armed. The counts are too old then to go by, and two
    /// workers would take what four can.
    pub burst: u64,
    /// A worker's load is its least count of so many looks, 1 or more.
    pub looks: usize,
    /// So many connections may come and go. Those beyond them count at once.
    pub passing: u64,
    /// After so many looks in a row at which something waited all are armed.
    pub waiting_looks: u32,
    /// So many looks with an empty queue, and without a burst, end the time in which all are armed.
    pub calm_looks: u32,
    /// How often to look while connections come and go.
    pub look_every: Duration,
    /// How soon to look again while connections wait and a worker is disarmed.
    pub hurried: Duration,
}

impl Default for ArmingConfig {
    fn default() -> Self {
        Self {
            slack: 2,
            least_armed: 2,
            alone_below: 3,
            come_until: 8,
            come_after: 6,
            armed_of: 4,
            burst: 2,
            looks: 4,
            passing: 2,
            waiting_looks: 2,
            calm_looks: 4,
            look_every: Duration::from_millis(5),
            hurried: Duration::from_millis(1),
        }
    }
}

/// A worker's load, and its share relative to the others'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    load: u64,
    weight: u64,
}

impl Share {
    /// Compares by load for its weight.
    fn is_above(&self, least: &Self, slack: u64) -> bool {
        let (load, least_load) = (u128::from(self.load), u128::from(least.load));
        let (weight, least_weight) = (u128::from(self.weight), u128::from(least.weight));
        load * least_weight > least_load * weight + u128::from(slack) * least_weight
    }

    /// Orders by load for its weight.
    fn compare(&self, other: &Self) -> Ordering {
        self.is_above(other, 0).cmp(&other.is_above(self, 0))
    }

    /// Is at least at a load for its weight.
    fn raise(&mut self, least: Self) {
        let load = u128::from(least.load) * u128::from(self.weight) / u128::from(least.weight);
        self.load = self.load.max(u64::try_from(load).unwrap_or(u64::MAX));
    }
}

/// A worker that waits for the listener.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Worker {
    /// Its last counts of connections, the newest first.
    counts: VecDeque<u64>,
    /// Those of its connections that have lasted.
    lasting: u64,
    share: Share,
    /// It waits with EPOLLEXCLUSIVE.
    exclusive: bool,
    draining: bool,
    armed: bool,
    /// It did not take what waited, though it was armed, and has not been seen waiting since.
    busy: bool,
    /// It has its share of what waits, and was refused more. The next look disarms it, if others can take that.
    refused: bool,
}

impl Worker {
    /// Takes the count of a look. Returns the last one.
    fn count(&mut self, count: u64, config: &ArmingConfig) -> u64 {
        let before = self.counts.front().copied();
        self.counts.truncate(config.looks.max(1) - 1);
        self.counts.push_front(count);
        before.unwrap_or(count)
    }

    /// Finds its load by the counts. `at_once`: the last one is taken as it is.
    fn weigh(&mut self, config: &ArmingConfig, turn: Turn, at_once: bool) {
        let count = self.counts.front().copied().unwrap_or_default();
        let least = self.counts.iter().copied().min().unwrap_or_default();
        let lasting = least.max(count.saturating_sub(config.passing));
        let more = lasting.saturating_sub(std::mem::replace(&mut self.lasting, lasting));
        self.share.load = match turn {
            Turn::LeastConnections if at_once => count,
            Turn::LeastConnections => lasting,
            Turn::RoundRobin => self.share.load.saturating_add(more),
        };
    }

    /// Whether its turn comes.
    fn takes(&self) -> bool {
        !self.draining && !self.busy
    }
}

/// The workers of one listener.
#[derive(Debug, Clone, Default)]
pub struct Arming {
    config: ArmingConfig,
    turn: Turn,
    workers: BTreeMap<usize, Worker>,
    /// Those that wait exclusively, in the order in which the kernel wakes them, as far as it is known.
    order: Vec<usize>,
    /// Looks in a row at which something waited while a worker was disarmed.
    waited: u32,
    /// Looks until not all are armed any more.
    open: u32,
    /// Looks until connections only come.
    falls: u32,
    /// Connections that came since the last look.
    came: u64,
    /// A worker was armed and did not take what waited: perhaps the server has changed its entry.
    doubts: bool,
    /// A worker was refused before the last look.
    refused: bool,
    pace: Pace,
}

impl Arming {
    /// Returns a group without workers.
    pub fn new(config: ArmingConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// Sets how workers take turns from now on.
    pub fn set_turn(&mut self, turn: Turn) {
        if std::mem::replace(&mut self.turn, turn) == turn {
            return;
        }
        for worker in self.workers.values_mut() {
            worker.share.load = match turn {
                Turn::LeastConnections => worker.lasting,
                Turn::RoundRobin => 0,
            };
        }
    }

    /// A worker waits for the listener, and is armed. It has so many connections.
    pub fn join(&mut self, worker: usize, exclusive: bool, connections: u64) {
        self.leave(worker);
        let load = match self.turn {
            Turn::LeastConnections => connections,
            Turn::RoundRobin => 0,
        };
        let joined = Worker {
            counts: VecDeque::from(vec![connections; self.config.looks.max(1)]),
            lasting: connections,
            share: Share { load, weight: 1 },
            exclusive,
            draining: false,
            armed: true,
            busy: false,
            refused: false,
        };
        self.workers.insert(worker, joined);
        self.begin_turns(worker);
        if exclusive {
            self.order.push(worker);
        }
    }

    /// A worker's turn comes again. It is not given at once what it could not get meanwhile.
    fn begin_turns(&mut self, worker: usize) {
        let others = self.workers.iter().filter(|(one, _)| **one != worker);
        let least = least(others.map(|(_, one)| one));
        if let (Turn::RoundRobin, Some(least)) = (self.turn, least)
            && let Some(worker) = self.workers.get_mut(&worker)
        {
            worker.share.raise(least);
        }
    }

    /// A worker is gone, or waits no longer.
    pub fn leave(&mut self, worker: usize) {
        self.workers.remove(&worker);
        self.order.retain(|one| *one != worker);
    }

    /// Sets a worker's share relative to the others', and whether it is to get no more connections.
    pub fn set(&mut self, worker: usize, weight: u32, draining: bool) {
        let Some(one) = self.workers.get_mut(&worker) else {
            return;
        };
        one.share.weight = u64::from(weight.max(1));
        let drained = std::mem::replace(&mut one.draining, draining);
        if drained && !draining {
            self.begin_turns(worker);
        }
    }

    /// Sets how soon looks can come from now on.
    pub fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
    }

    /// Somebody has armed all.
    pub fn released(&mut self) {
        for worker in self.workers.values_mut() {
            worker.armed = true;
        }
    }

    /// Whether a worker is armed.
    pub fn is_armed(&self, worker: usize) -> bool {
        self.workers.get(&worker).is_some_and(|one| one.armed)
    }

    /// Whether any worker is disarmed.
    pub fn any_disarmed(&self) -> bool {
        self.workers.values().any(|one| !one.armed)
    }

    /// Whether the next look should come soon: a connection waits, and perhaps no armed worker is free.
    pub fn is_hurried(&self) -> bool {
        self.waited > 0
    }

    /// Whether a connection should cause a look: the next one is to go to another worker, or a worker is armed alone, and may
    /// be busy with the one before.
    pub fn wants_bell(&self) -> bool {
        let is_one_alone = || self.workers.values().filter(|one| one.armed).count() == 1;
        !self.is_hurried() && (self.counts_at_once() || self.any_disarmed() && is_one_alone())
    }

    /// Whether no connections end, and few come at a time.
    fn only_come(&self) -> bool {
        self.falls == 0 && self.came <= self.config.come_until
    }

    /// Whether the counts are taken as they are.
    fn counts_at_once(&self) -> bool {
        self.pace.prompt && self.turn == Turn::LeastConnections && self.only_come()
    }

    /// Returns what it wants until the next look.
    pub fn wants(&self) -> Wanted {
        Wanted {
            pause: match self.is_hurried() {
                true => self.config.hurried.min(self.config.look_every),
                false => self.config.look_every,
            },
            hurried: self.is_hurried(),
            disarmed: self.any_disarmed(),
            only_come: self.falls == 0,
            refused: self.refused,
        }
    }

    /// Returns a worker's load: the connections that have lasted, or those of them that it got.
    pub fn load(&self, worker: usize) -> u64 {
        self.workers.get(&worker).map_or(0, |one| one.share.load)
    }

    /// Whether a worker did not take what waited, and has not been seen waiting since.
    pub fn is_busy(&self, worker: usize) -> bool {
        self.workers.get(&worker).is_some_and(|one| one.busy)
    }

    /// Whether an armed worker did not take what waited since this was asked last. Its entry should be read again.
    pub fn take_doubts(&mut self) -> bool {
        std::mem::take(&mut self.doubts)
    }

    /// These workers were refused a connection, as they have their share of what waits.
    pub fn refused(&mut self, workers: impl IntoIterator<Item = usize>) {
        for worker in workers {
            if let Some(worker) = self.workers.get_mut(&worker) {
                worker.refused = true;
            }
        }
    }

    /// Takes the counts of a look, and whether anything waits in the queue. `waits` tells whether a worker waits in epoll
    /// now; it is asked of few. Returns the changes to make, in this order; they count as made.
    pub fn look(
        &mut self,
        counts: impl IntoIterator<Item = (usize, u64)>,
        queued: bool,
        mut waits: impl FnMut(usize) -> bool,
    ) -> Vec<(usize, Change)> {
        self.falls = self.falls.saturating_sub(1);
        self.came = 0;
        for (worker, count) in counts {
            let Some(worker) = self.workers.get_mut(&worker) else {
                continue;
            };
            let before = worker.count(count, &self.config);
            self.came += count.saturating_sub(before);
            if count < before {
                self.falls = self.config.come_after;
            }
        }
        let at_once = self.counts_at_once();
        for worker in self.workers.values_mut() {
            worker.weigh(&self.config, self.turn, at_once);
        }
        let was_busy = |(number, one): (&usize, &Worker)| one.busy.then_some(*number);
        let busy: Vec<usize> = self.workers.iter().filter_map(was_busy).collect();
        for number in busy.into_iter().filter(|number| waits(*number)) {
            if let Some(worker) = self.workers.get_mut(&number) {
                worker.busy = false;
            }
            self.begin_turns(number);
        }
        self.open = self.open.saturating_sub(u32::from(!queued));
        self.heed_queue(queued, &mut waits);
        if self.came > self.config.burst.saturating_mul(self.workers.len() as u64) {
            self.open = self.config.calm_looks;
        }
        let mut changes = self.arm(&mut waits);
        let refused = |one: &mut Worker| std::mem::take(&mut one.refused);
        let refused = self
            .workers
            .values_mut()
            .filter_map(|one| refused(one).then_some(()));
        // Of exclusive workers only the refused one may be awake. Each that is put in its place is woken if something waits.
        let anew = refused.count() > 0;
        self.refused = anew;
        changes.extend(self.put_in_order(anew));
        changes
    }

    /// Takes whether anything waits in the queue, and no counts. That costs next to nothing. Returns the changes as
    /// [`Self::look`] does.
    pub fn glance(
        &mut self,
        queued: bool,
        mut waits: impl FnMut(usize) -> bool,
    ) -> Vec<(usize, Change)> {
        self.heed_queue(queued, &mut waits);
        match self.open {
            0 => Vec::new(),
            _ => self.arm(&mut waits),
        }
    }

    /// Opens the group while connections wait, and notes who did not take them.
    fn heed_queue(&mut self, queued: bool, waits: &mut impl FnMut(usize) -> bool) {
        if !queued || !self.any_disarmed() {
            self.waited = 0;
            return;
        }
        self.waited += 1;
        if self.waited < self.config.waiting_looks {
            return;
        }
        self.waited = 0;
        // Those that wait now are not left alone, however soon it is calm.
        self.open = self.config.calm_looks.max(1);
        self.doubts = true;
        for (number, worker) in &mut self.workers {
            worker.busy |= worker.armed && !worker.draining && !waits(*number);
        }
    }

    /// The least loaded workers that take connections, so many of them.
    fn least_loaded(&self, count: usize) -> Vec<usize> {
        let takes = |(_, one): &(&usize, &Worker)| one.takes();
        let mut all: Vec<_> = self.workers.iter().filter(takes).collect();
        all.sort_by(|(_, one), (_, other)| one.share.compare(&other.share));
        all.into_iter().take(count).map(|(one, _)| *one).collect()
    }

    /// The least loaded workers, which are armed in any case.
    fn few(&self, waits: &mut impl FnMut(usize) -> bool) -> Vec<usize> {
        let part = self.workers.len().div_ceil(self.config.armed_of.max(1));
        let mut few = self.least_loaded(self.config.least_armed.max(part));
        let below = match self.counts_at_once() {
            true => 0,
            false => self.config.alone_below,
        };
        if let [first, second, ..] = few[..] {
            let (one, next) = (&self.workers[&first], &self.workers[&second]);
            // Of many, enough are armed. The order of exclusive ones is enough, too.
            let may = few.len() == self.config.least_armed && !one.exclusive;
            let is_far = next.share.is_above(&one.share, below);
            if may && self.only_come() && is_far && waits(first) {
                few.truncate(1);
            }
        }
        few
    }

    fn arm(&mut self, waits: &mut impl FnMut(usize) -> bool) -> Vec<(usize, Change)> {
        let least = least(self.workers.values());
        // Counts of connections that come and go are too old soon, and two loops would take what four can.
        let stale = self.pace.rare && self.falls > 0;
        let open = self.open > 0 || stale;
        let slack = match self.counts_at_once() {
            true => 0,
            false => self.config.slack,
        };
        let others = self.workers.values().any(|one| !one.draining);
        let few = self.few(waits);
        let wanted = |number: &usize, worker: &Worker| match least {
            _ if worker.draining => !others,
            _ if worker.refused => false,
            _ if open || worker.busy || few.contains(number) => true,
            Some(least) => !worker.share.is_above(&least, slack),
            None => true,
        };
        let mut changes: Vec<(usize, Change)> = Vec::new();
        let mut disarmed = Vec::new();
        for (number, worker) in &self.workers {
            match (worker.armed, wanted(number, worker)) {
                (false, true) => changes.push((*number, Change::Arm)),
                (true, false) => disarmed.push(*number),
                _ => {}
            }
        }
        for (number, _) in &changes {
            self.armed(*number, true);
        }
        if disarmed.is_empty() {
            return changes;
        }
        // Nobody is disarmed for others that cannot take a connection now.
        let stays = |(number, one): &(&usize, &Worker)| {
            one.armed && !one.draining && !disarmed.contains(number)
        };
        let stay: Vec<usize> = self
            .workers
            .iter()
            .filter(stays)
            .map(|(number, _)| *number)
            .collect();
        // One that is refused would only ask again and again.
        let refused = |number: &usize| self.workers[number].refused;
        let is_free = stay.iter().copied().any(waits);
        let some_take = stay.iter().any(|number| self.workers[number].takes());
        disarmed.retain(|number| is_free || some_take && refused(number));
        for number in disarmed {
            self.armed(number, false);
            changes.push((number, Change::Disarm));
        }
        changes
    }

    fn armed(&mut self, number: usize, armed: bool) {
        let Some(worker) = self.workers.get_mut(&number) else {
            return;
        };
        worker.armed = armed;
        // An entry that cannot be modified is added anew, at the end.
        if worker.exclusive {
            self.order.retain(|one| *one != number);
            self.order.push(number);
        }
    }

    /// Puts those that wait exclusively in the order of their loads. Those that stand right already stay, unless all are put
    /// there `anew`; the others go to the end, in this order.
    fn put_in_order(&mut self, anew: bool) -> Vec<(usize, Change)> {
        let armed = |number: &usize| self.is_armed(*number);
        let now: Vec<usize> = self.order.iter().copied().filter(armed).collect();
        let mut wanted = now.clone();
        // Stable: of equal ones, who came to the end first stays first.
        let share = |number: &usize| self.workers[number].share;
        wanted.sort_by(|one, other| share(one).compare(&share(other)));
        let mut from = 0;
        let stands = |number: &&usize| {
            let found = now[from..].iter().position(|one| one == *number);
            from += found.map_or(0, |at| at + 1);
            found.is_some()
        };
        let first = match anew {
            true => 0,
            false => wanted.iter().take_while(stands).count(),
        };
        let moved = wanted.split_off(first);
        self.order.retain(|one| !moved.contains(one));
        self.order.extend(&moved);
        moved.into_iter().map(|one| (one, Change::ToEnd)).collect()
    }
}

/// The least loaded worker of those whose turn comes.
fn least<'a>(workers: impl Iterator<Item = &'a Worker>) -> Option<Share> {
    let all = workers.filter(|one| one.takes()).map(|one| one.share);
    all.reduce(|least, one| match least.is_above(&one, 0) {
        true => one,
        false => least,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WORKERS: usize = 4;

    fn group(exclusive: bool) -> Arming {
        let mut arming = Arming::new(ArmingConfig::default());
        for worker in 0..WORKERS {
            arming.join(worker, exclusive, 0);
        }
        arming
    }

    /// Looks at these counts as often as it takes for them to have lasted.
    fn settle(arming: &mut Arming, counts: &[u64]) {
        for _ in 0..=ArmingConfig::default().looks {
            arming.look(counts.iter().copied().enumerate(), false, |_| true);
        }
    }

    fn armed(arming: &Arming) -> Vec<usize> {
        let all = arming.workers.keys().copied();
        all.filter(|worker| arming.is_armed(*worker)).collect()
    }

    /// The kernel's wait list, as the changes make it.
    #[derive(Default)]
    struct Kernel {
        list: Vec<usize>,
        disarmed: Vec<usize>,
    }

    impl Kernel {
        fn of(arming: &Arming) -> Self {
            Self {
                list: arming.workers.keys().copied().collect(),
                disarmed: Vec::new(),
            }
        }

        fn change(&mut self, changes: &[(usize, Change)]) {
            for (worker, change) in changes {
                self.list.retain(|one| one != worker);
                self.list.push(*worker);
                self.disarmed.retain(|one| one != worker);
                if *change == Change::Disarm {
                    self.disarmed.push(*worker);
                }
            }
        }

        /// The workers that are woken, in order.
        fn woken(&self) -> Vec<usize> {
            let all = self.list.iter().copied();
            all.filter(|one| !self.disarmed.contains(one)).collect()
        }
    }

    #[test]
    fn connections_that_last_go_to_who_has_few_and_the_spread_stays_small() {
        for exclusive in [false, true] {
            let mut arming = group(exclusive);
            let mut kernel = Kernel::of(&arming);
            let mut counts = [0_u64; WORKERS];
            // A look every 5 ms, a connection every 4 ms.
            let (mut looked, mut random) = (0, 1_usize);
            for ms in (0..2_000).step_by(4) {
                while looked <= ms {
                    kernel.change(&arming.look(counts.into_iter().enumerate(), false, |_| true));
                    looked += 5;
                }
                let woken = kernel.woken();
                random = random.wrapping_mul(48_271) % 0x7fff_ffff;
                // Of all that are woken, any may be first; of exclusive ones the first is.
                let first = if exclusive { 0 } else { random % woken.len() };
                counts[woken[first]] += 1;
            }
            let (most, least) = (counts.iter().max(), counts.iter().min());
            assert!(most <= least.map(|least| least + 6).as_ref(), "{counts:?}");
        }
    }

    #[test]
    fn a_few_connections_that_come_and_go_disarm_nobody() {
        let mut arming = group(false);
        for look in 0..1_000_u64 {
            let count = |worker: u64| (look * 7 + worker * 3) % 3;
            let counts = (0..WORKERS).map(|worker| (worker, count(worker as u64)));
            assert_eq!(arming.look(counts, false, |_| true), []);
        }
    }

    #[test]
    fn who_is_refused_is_disarmed_until_the_next_look_and_all_others_are_woken() {
        for exclusive in [false, true] {
            let mut arming = group(exclusive);
            let even = (0..WORKERS).map(|worker| (worker, 4));
            // Those that were woken do not wait any more.
            arming.refused([1]);
            let changes = arming.look(even.clone(), false, |_| false);
            assert_eq!(armed(&arming), [0, 2, 3]);
            let woken = [0, 2, 3].map(|worker| (worker, Change::ToEnd));
            assert_eq!(changes[0], (1, Change::Disarm));
            assert_eq!(changes[1..], woken[..if exclusive { 3 } else { 0 }]);
            arming.look(even.clone(), false, |_| false);
            assert_eq!(armed(&arming), [0, 1, 2, 3]);
            arming.refused(0..WORKERS);
            arming.look(even, false, |_| false);
            assert_eq!(armed(&arming), [0, 1, 2, 3], "somebody takes what waits");
        }
    }

    #[test]
    fn nobody_is_disarmed_for_others_that_are_all_busy() {
        let mut arming = group(false);
        for _ in 0..10 {
            let counts = [(0, 9), (1, 0), (2, 0), (3, 0)];
            assert_eq!(arming.look(counts, false, |_| false), []);
        }
        settle(&mut arming, &[9, 0, 0, 0]);
        assert_eq!(armed(&arming), [1, 2, 3]);
    }

    #[test]
    fn all_are_armed_while_connections_wait_and_who_did_not_take_them_is_passed_over() {
        let mut arming = group(false);
        settle(&mut arming, &[9, 9, 9, 0]);
        assert_eq!(armed(&arming), [3], "it hardly gets any beside another");
        let counts = [(0, 9), (1, 9), (2, 9), (3, 0)];
        // The fourth does something else.
        let waits = |worker| worker != 3;
        arming.look(counts, true, waits);
        assert!(arming.is_hurried());
        arming.look(counts, true, waits);
        assert_eq!(armed(&arming), [0, 1, 2, 3]);
        for _ in 0..100 {
            assert_eq!(arming.look(counts, false, waits), []);
        }
        assert!(arming.is_busy(3) && arming.take_doubts());
        settle(&mut arming, &[9, 9, 9, 0]);
        assert_eq!(armed(&arming), [3], "it waits again");
    }

    #[test]
    fn one_is_armed_alone_only_where_it_waits_and_connections_only_come() {
        let settled = |exclusive| {
            let mut arming = group(exclusive);
            settle(&mut arming, &[9, 9, 9, 0]);
            arming
        };
        assert_eq!(armed(&settled(true)), [0, 3], "their order is enough");
        let mut arming = settled(false);
        assert!(arming.wants_bell());
        let counts = |one, other| [(0, 9), (1, 9), (2, one), (3, other)];
        // It is busy.
        arming.look(counts(9, 0), false, |worker| worker != 3);
        assert_eq!(armed(&arming), [0, 3]);
        // One has ended, or so many have come.
        for look in [counts(8, 1), counts(9, 9)] {
            let mut arming = settled(false);
            arming.look(look, false, |_| true);
            assert_ne!(armed(&arming), [3]);
        }
    }

    #[test]
    fn in_a_burst_all_are_armed() {
        let mut arming = group(false);
        settle(&mut arming, &[9, 9, 9, 0]);
        let counts = |last| [(0, 9), (1, 9), (2, 9), (3, last)];
        arming.look(counts(8), false, |_| true);
        assert_eq!(armed(&arming).len(), 2, "two a worker are none");
        arming.look(counts(0), false, |_| true);
        arming.look(counts(9), false, |_| true);
        assert_eq!(armed(&arming), [0, 1, 2, 3]);
        settle(&mut arming, &[9, 9, 9, 5]);
        assert_eq!(armed(&arming).len(), 2);
    }

    #[test]
    fn a_worker_that_drains_gets_none_unless_all_do() {
        let mut arming = group(false);
        arming.set(2, 1, true);
        settle(&mut arming, &[0, 0, 0, 0]);
        assert_eq!(armed(&arming), [0, 1, 3]);
        for worker in 0..WORKERS {
            arming.set(worker, 1, true);
        }
        settle(&mut arming, &[0, 0, 0, 0]);
        assert_eq!(armed(&arming), [0, 1, 2, 3]);
    }

    #[test]
    fn of_many_workers_a_quarter_stays_armed() {
        let mut arming = Arming::new(ArmingConfig::default());
        (0..64).for_each(|worker| arming.join(worker, false, 0));
        let counts: Vec<u64> = (0..64).map(|worker| 10 * worker).collect();
        settle(&mut arming, &counts);
        assert_eq!(armed(&arming), (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn in_turn_those_that_got_few_come_first_though_they_have_many() {
        for exclusive in [false, true] {
            let mut arming = group(exclusive);
            let mut kernel = Kernel::of(&arming);
            settle(&mut arming, &[9, 9, 0, 0]);
            // Connections that were open before count for nobody.
            arming.set_turn(Turn::RoundRobin);
            kernel.change(&arming.look([], false, |_| true));
            assert_eq!(armed(&arming), [0, 1, 2, 3]);
            let mut look = |counts: [u64; WORKERS]| {
                for _ in 0..ArmingConfig::default().looks {
                    let counts = counts.into_iter().enumerate();
                    kernel.change(&arming.look(counts, false, |_| true));
                }
                kernel.woken()
            };
            let mut first = look([9, 9, 3, 3]);
            first.sort_unstable();
            assert_eq!(first, [0, 1]);
            // They get as many. Then others close theirs, which changes nothing.
            assert_eq!(look([12, 12, 3, 3]).len(), WORKERS);
            assert_eq!(look([12, 12, 0, 0]).len(), WORKERS);
        }
    }

    #[test]
    fn who_comes_again_is_not_given_all_that_it_could_not_get() {
        let mut arming = group(true);
        arming.set_turn(Turn::RoundRobin);
        arming.set(3, 1, true);
        settle(&mut arming, &[0, 0, 0, 0]);
        settle(&mut arming, &[50, 51, 52, 0]);
        arming.set(3, 1, false);
        arming.join(4, true, 0);
        assert_eq!([0, 3, 4].map(|worker| arming.load(worker)), [50; 3]);
    }

    #[test]
    fn a_worker_of_twice_the_weight_has_twice_the_connections() {
        let mut arming = group(false);
        arming.set(0, 2, false);
        settle(&mut arming, &[20, 10, 10, 10]);
        assert_eq!(armed(&arming), [0, 1, 2, 3]);
        settle(&mut arming, &[20, 13, 13, 13]);
        assert_eq!(armed(&arming), [0, 1]);
    }

    proptest! {
        #[test]
        fn somebody_is_always_woken_and_the_order_is_that_of_loads(
            exclusive: bool,
            in_turn: bool,
            looks in proptest::collection::vec(
                (proptest::collection::vec(0..9_u64, WORKERS), any::<bool>(), any::<u8>(), any::<u8>()),
                1..60,
            ),
        ) {
            let mut arming = group(exclusive);
            arming.set_turn(if in_turn { Turn::RoundRobin } else { Turn::LeastConnections });
            let mut kernel = Kernel::of(&arming);
            for (counts, queued, waiting, draining) in looks {
                for worker in 0..WORKERS {
                    arming.set(worker, 1, draining & (16 << worker) != 0 && draining & 1 != 0);
                }
                let waits = |worker: usize| waiting & (1 << worker) != 0;
                kernel.change(&arming.look(counts.into_iter().enumerate(), queued, waits));
                let woken = kernel.woken();
                prop_assert!(!woken.is_empty());
                let serves = |worker: &usize| !arming.workers[worker].draining;
                prop_assert!(woken.iter().any(serves) || !(0..WORKERS).any(|worker| serves(&worker)));
                let mut believed = armed(&arming);
                let mut sorted = woken.clone();
                believed.sort_unstable();
                sorted.sort_unstable();
                prop_assert_eq!(believed, sorted);
                if exclusive {
                    prop_assert_eq!(&arming.order.iter().copied().filter(|one| arming.is_armed(*one)).collect::<Vec<_>>(), &woken);
                    prop_assert!(woken.is_sorted_by_key(|worker| arming.load(*worker)));
                }
            }
        }

        /// Connections that last, opened a look apart, go round, whatever is closed meanwhile.
        #[test]
        fn in_turn_all_get_as_many(
            exclusive: bool,
            steps in proptest::collection::vec((any::<u8>(), any::<u8>(), 0..4_u8), 40..120),
        ) {
            let config = ArmingConfig { looks: 1, passing: 0, least_armed: 1, ..ArmingConfig::default() };
            let mut arming = Arming::new(config);
            arming.set_turn(Turn::RoundRobin);
            (0..WORKERS).for_each(|worker| arming.join(worker, exclusive, 0));
            let mut kernel = Kernel::of(&arming);
            let (mut open, mut got) = ([0_u64; WORKERS], [0_u64; WORKERS]);
            for (chance, closes, how_many) in steps {
                let woken = kernel.woken();
                let first = if exclusive { 0 } else { usize::from(chance) % woken.len() };
                open[woken[first]] += 1;
                got[woken[first]] += 1;
                // A connection that is closed within a look is never seen.
                kernel.change(&arming.look(open.into_iter().enumerate(), false, |_| true));
                let closes = usize::from(closes) % WORKERS;
                open[closes] = open[closes].saturating_sub(u64::from(how_many));
                kernel.change(&arming.look(open.into_iter().enumerate(), false, |_| true));
                let spread = got.iter().max().zip(got.iter().min()).map(|(most, least)| most - least);
                prop_assert!(spread <= Some(if exclusive { 1 } else { 2 + config.slack }), "{got:?}");
            }
        }
    }
}
