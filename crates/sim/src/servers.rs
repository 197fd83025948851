//! Requests in hand: virtual time, and the CPUs that workers share in it.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::calendar::Calendar;

/// How a worker works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request a thread; a worker without a free thread accepts no more.
    Threads(usize),
    /// It accepts at once, and its requests share its CPU, or whatever single resource it has.
    EventLoop,
}

/// A request that is finished.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Finished {
    pub worker: usize,
    /// When it came.
    pub arrived: f64,
    /// When its worker began with it.
    pub began: f64,
}

/// A thread.
#[derive(Debug, Clone, Copy, Default)]
struct Thread {
    arrived: f64,
    began: f64,
    busy: bool,
    /// The work that is left, while its worker is halted.
    left: f64,
    /// The next free thread of its worker.
    next_free: u32,
}

/// A request of an event loop.
#[derive(Debug, Clone, Copy, PartialEq)]
struct InHand {
    /// The work, in s, that each request of the loop will have got when this one is finished.
    finish: f64,
    arrived: f64,
    began: f64,
}

impl Eq for InHand {}

impl Ord for InHand {
    /// The first to finish is the greatest: `BinaryHeap` gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.finish.total_cmp(&self.finish)
    }
}

impl PartialOrd for InHand {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// An event loop.
#[derive(Debug, Default)]
struct Loop {
    requests: BinaryHeap<InHand>,
    /// The work, in s, that each request in hand has got since the beginning.
    given: f64,
    /// The time of that value, as [`Servers::done`].
    at: f64,
}

const NONE: u32 = u32::MAX;

/// All workers' requests in hand.
///
/// Busy servers share the CPUs evenly: each gets as much work done as the others, at most a second of work in a
/// second. So one number, the work of each since the beginning, tells when all of them finish. A thread is a server
/// here. So is an event loop, which shares its part among its requests in turn.
#[derive(Debug)]
pub(crate) struct Servers {
    kind: Kind,
    now: f64,
    /// The work of a server that was always busy, in s.
    done: f64,
    cpus: f64,
    /// Threads, or loops, that are busy now.
    busy: usize,
    /// When each is finished with its next request, as `done`.
    calendar: Calendar,
    threads: Vec<Thread>,
    /// The first free thread of each worker.
    free: Vec<u32>,
    loops: Vec<Loop>,
    halted: Vec<bool>,
}

impl Servers {
    /// `cpus`: infinite where requests wait for something else than a CPU.
    pub(crate) fn new(kind: Kind, workers: usize, cpus: f64) -> Self {
        let (each, loops) = match kind {
            Kind::Threads(threads) => (threads, 0),
            Kind::EventLoop => (1, workers),
        };
        let mut servers = Self {
            kind,
            now: 0.0,
            done: 0.0,
            cpus,
            busy: 0,
            calendar: Calendar::new(workers * each),
            threads: Vec::new(),
            free: vec![NONE; workers],
            loops: Vec::new(),
            halted: vec![false; workers],
        };
        servers.loops.resize_with(loops, Loop::default);
        if let Kind::Threads(_) = kind {
            servers.threads = vec![Thread::default(); workers * each];
            (0..workers).for_each(|worker| servers.free_all(worker));
        }
        servers
    }

    #[inline]
    pub(crate) fn now(&self) -> f64 {
        self.now
    }

    /// The CPU time of a server that was always busy, in s; `None` where requests wait for something else.
    #[inline]
    pub(crate) fn cpu_s(&self) -> Option<f64> {
        self.cpus.is_finite().then_some(self.done)
    }

    /// Work that gets done for each in a second.
    #[inline]
    fn speed(&self) -> f64 {
        if self.cpus >= self.busy as f64 {
            1.0
        } else {
            self.cpus / self.busy as f64
        }
    }

    /// When the next request is finished; infinite where there is none.
    #[inline]
    pub(crate) fn next(&self) -> f64 {
        let left = (self.calendar.next() - self.done).max(0.0);
        // A division takes longer than all the rest.
        if self.cpus >= self.busy as f64 {
            self.now + left
        } else {
            self.now + left / self.speed()
        }
    }

    /// Goes on to a moment before which nothing finishes.
    #[inline]
    pub(crate) fn advance(&mut self, to: f64) {
        if self.busy > 0 {
            self.done += (to - self.now) * self.speed();
        }
        self.now = to;
    }

    /// The threads of a worker.
    fn threads_of(&self, worker: usize) -> std::ops::Range<usize> {
        match self.kind {
            Kind::Threads(each) => worker * each..(worker + 1) * each,
            Kind::EventLoop => 0..0,
        }
    }

    fn free_all(&mut self, worker: usize) {
        let all = self.threads_of(worker);
        let mut first = NONE;
        for thread in all.rev() {
            self.threads[thread] = Thread {
                next_free: first,
                ..Thread::default()
            };
            first = thread as u32;
        }
        self.free[worker] = first;
    }

    /// A worker that may begin does so.
    #[inline]
    pub(crate) fn begin(&mut self, worker: usize, arrived: f64, work: f64) {
        let began = self.now;
        if let Kind::EventLoop = self.kind {
            self.settle(worker);
            let finish = self.loops[worker].given + work;
            self.loops[worker].requests.push(InHand {
                finish,
                arrived,
                began,
            });
            return self.due(worker);
        }
        let thread = self.free[worker] as usize;
        self.free[worker] = self.threads[thread].next_free;
        self.threads[thread] = Thread {
            arrived,
            began,
            busy: true,
            left: 0.0,
            next_free: NONE,
        };
        self.busy += 1;
        self.calendar.set(thread, self.done + work);
    }

    /// Goes on to the moment `at`, when the next request is finished, and ends it.
    #[inline]
    pub(crate) fn finish(&mut self, at: f64) -> Finished {
        self.now = at;
        self.done = self.done.max(self.calendar.next());
        let place = self.calendar.place();
        let Kind::Threads(each) = self.kind else {
            return self.finish_in_loop(place);
        };
        let worker = if each == 1 { place } else { place / each };
        let thread = &mut self.threads[place];
        let finished = Finished {
            worker,
            arrived: thread.arrived,
            began: thread.began,
        };
        thread.busy = false;
        thread.next_free = self.free[worker];
        self.free[worker] = place as u32;
        self.busy -= 1;
        self.calendar.set(place, f64::INFINITY);
        finished
    }

    fn finish_in_loop(&mut self, worker: usize) -> Finished {
        self.settle(worker);
        let of = &mut self.loops[worker];
        let Some(first) = of.requests.pop() else {
            unreachable!("a loop that is due has a request")
        };
        // Removes the rounding error.
        of.given = first.finish;
        self.due(worker);
        Finished {
            worker,
            arrived: first.arrived,
            began: first.began,
        }
    }

    /// Notes the work that a loop's requests have got until now. Call it before their number changes.
    fn settle(&mut self, worker: usize) {
        let of = &mut self.loops[worker];
        let sharing = of.requests.len();
        if sharing > 0 && !self.halted[worker] {
            of.given += (self.done - of.at) / sharing as f64;
        }
        of.at = self.done;
    }

    /// Notes when a loop is finished with its next request. Call it after a change.
    fn due(&mut self, worker: usize) {
        let of = &self.loops[worker];
        let next = match of.requests.peek() {
            Some(first) if !self.halted[worker] => {
                self.done + (first.finish - of.given).max(0.0) * of.requests.len() as f64
            }
            _ => f64::INFINITY,
        };
        let was_busy = self.calendar.get(worker).is_finite();
        self.calendar.set(worker, next);
        self.busy = self.busy + usize::from(next.is_finite()) - usize::from(was_busy);
    }

    /// Nothing gets done in a worker, until [`Servers::go_on`].
    pub(crate) fn halt(&mut self, worker: usize) {
        if let Kind::EventLoop = self.kind {
            self.settle(worker);
            self.halted[worker] = true;
            return self.due(worker);
        }
        self.halted[worker] = true;
        for thread in self.threads_of(worker) {
            if self.threads[thread].busy {
                self.threads[thread].left = self.calendar.get(thread) - self.done;
                self.calendar.set(thread, f64::INFINITY);
                self.busy -= 1;
            }
        }
    }

    /// A halted worker works again.
    pub(crate) fn go_on(&mut self, worker: usize) {
        if let Kind::EventLoop = self.kind {
            self.settle(worker);
            self.halted[worker] = false;
            return self.due(worker);
        }
        self.halted[worker] = false;
        for thread in self.threads_of(worker) {
            if self.threads[thread].busy {
                let finish = self.done + self.threads[thread].left;
                self.calendar.set(thread, finish);
                self.busy += 1;
            }
        }
    }

    /// A worker loses its requests in hand.
    pub(crate) fn lose(&mut self, worker: usize) {
        // A halted worker is none of the busy ones.
        if !self.halted[worker] {
            self.halt(worker);
        }
        self.halted[worker] = false;
        match self.kind {
            Kind::EventLoop => {
                self.loops[worker].requests.clear();
                self.due(worker);
            }
            Kind::Threads(_) => self.free_all(worker),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times and workers of all that finishes.
    fn finished(servers: &mut Servers) -> Vec<(f64, usize)> {
        std::iter::from_fn(|| {
            let at = servers.next();
            at.is_finite().then(|| (at, servers.finish(at).worker))
        })
        .collect()
    }

    fn servers(kind: Kind, workers: usize, cpus: f64, works: &[(usize, f64)]) -> Servers {
        let mut servers = Servers::new(kind, workers, cpus);
        for (worker, work) in works {
            servers.begin(*worker, 0.0, *work);
        }
        servers
    }

    const ONE: Kind = Kind::Threads(1);

    #[test]
    fn each_worker_with_a_cpu_works_for_itself() {
        let mut two = servers(ONE, 2, 2.0, &[(0, 3.0), (1, 1.0)]);
        assert_eq!(finished(&mut two), [(1.0, 1), (3.0, 0)]);
    }

    #[test]
    fn three_on_two_cpus_have_two_thirds_each() {
        for kind in [ONE, Kind::EventLoop] {
            let mut three = servers(kind, 3, 2.0, &[(0, 2.0), (1, 2.0), (2, 2.0)]);
            let times: Vec<f64> = finished(&mut three).iter().map(|(at, _)| *at).collect();
            assert_eq!(times, [3.0, 3.0, 3.0]);
        }
    }

    #[test]
    fn who_comes_later_slows_the_others_from_then_on() {
        let mut one = servers(ONE, 2, 1.0, &[(0, 2.0)]);
        one.advance(1.0);
        one.begin(1, 1.0, 0.5);
        // Half each: the later one needs a second, the first has a half left then.
        assert_eq!(finished(&mut one), [(2.0, 1), (2.5, 0)]);
    }

    #[test]
    fn threads_of_a_worker_work_side_by_side_and_requests_of_a_loop_share() {
        let works = [(0, 1.0), (0, 2.0), (1, 2.0)];
        let mut threads = servers(Kind::Threads(2), 2, f64::INFINITY, &works);
        assert_eq!(finished(&mut threads), [(1.0, 0), (2.0, 0), (2.0, 1)]);
        // Two share until 2; of the longer one half is left then.
        let mut loops = servers(Kind::EventLoop, 2, f64::INFINITY, &works);
        let mut found = finished(&mut loops);
        found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        assert_eq!(found, [(2.0, 0), (2.0, 1), (3.0, 0)]);
    }

    #[test]
    fn who_is_halted_goes_on_where_it_was() {
        for kind in [ONE, Kind::EventLoop] {
            let mut two = servers(kind, 2, f64::INFINITY, &[(0, 2.0), (1, 5.0)]);
            two.advance(1.0);
            two.halt(0);
            two.advance(4.0);
            two.go_on(0);
            assert_eq!(finished(&mut two), [(5.0, 0), (5.0, 1)], "{kind:?}");
        }
    }

    #[test]
    fn what_is_lost_never_finishes_and_leaves_room() {
        for kind in [ONE, Kind::EventLoop] {
            for halted in [false, true] {
                let mut two = servers(kind, 2, 1.0, &[(0, 2.0), (1, 2.0)]);
                if halted {
                    two.halt(0);
                }
                two.lose(0);
                two.begin(0, 0.0, 1.0);
                assert_eq!(finished(&mut two), [(2.0, 0), (3.0, 1)], "{kind:?}");
            }
        }
    }
}
