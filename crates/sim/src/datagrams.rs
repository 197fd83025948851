//! Datagrams: threads that send, threads that read, and the CPUs they share.
//!
//! A thread is in one phase at a time. A phase is an amount of CPU time, a wait for a lock, or a sleep. A thread that has
//! or wants a lock keeps its CPU, since spin_lock_bh() forbids preemption. The others that can run share the rest of the
//! CPUs evenly. The costs are those of a machine that was measured.

use std::time::Duration;
use wakeone_bpf::policy_group::Variant;

use crate::error::Error;
use crate::steering::Steering;

/// The CPU time of what happens to a datagram, in s.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Sending one, until it is in a socket's queue.
    pub send_s: f64,
    /// Reading one that is there.
    pub read_s: f64,
    /// The part of each in which the socket's queue is locked: readers have a lock, and senders another
    /// (net/ipv4/udp.c, `reader_queue` and `sk_receive_queue`).
    pub locked_s: f64,
    /// Waking a reader, which its sender does.
    pub wake_s: f64,
    /// Falling asleep and coming back, which a reader does.
    pub sleep_s: f64,
    /// From the wake-up until the reader runs. It takes no CPU time.
    pub rouse_s: f64,
}

/// Where a datagram waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// In the one socket that all threads read.
    OneSocket,
    /// In a socket of each thread, which a policy chooses.
    Steered {
        /// The policy's number in `enum wakeone_policy` (`bpf/policy.h`).
        policy: u32,
    },
}

/// When the threads read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// While datagrams are sent.
    AsSent {
        /// The most that may be unread.
        window: u64,
        /// A sender with too many unread looks again after this time.
        breath: Duration,
    },
    /// All of them wait before the first is read. Nobody sends meanwhile.
    AllWaiting,
}

impl Reading {
    fn has_no_room(self) -> bool {
        matches!(self, Reading::AsSent { window: 0, .. })
    }
}

/// Threads that send and read datagrams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Datagrams {
    /// The CPUs.
    pub cpus: usize,
    /// Threads that send, each one flow.
    pub senders: usize,
    /// Threads that read.
    pub readers: usize,
    /// Where datagrams wait.
    pub placement: Placement,
    /// When they are read.
    pub reading: Reading,
    /// How many there are.
    pub count: u64,
    /// What they cost.
    pub costs: Costs,
    /// The seed of the policy's choices.
    pub seed: u64,
}

/// The result of simulated datagrams.
#[derive(Debug, Clone, PartialEq)]
pub struct DatagramsRead {
    /// From the first one sent until the last one read, in s.
    pub elapsed_s: f64,
    /// Datagrams that each thread read.
    pub read: Vec<u64>,
    /// Readers that were woken.
    pub wakes: u64,
}

impl DatagramsRead {
    /// Datagrams read a second.
    pub fn per_s(&self) -> f64 {
        self.read.iter().sum::<u64>() as f64 / self.elapsed_s
    }
}

/// The phase of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It makes a datagram.
    Sends,
    /// It waits for a socket's lock, as a spin lock has it: on its CPU.
    Spins(Lock),
    /// It has the lock.
    Holds(Lock),
    /// It wakes this reader.
    Wakes(usize),
    /// Too many are unread.
    Breathes,
    /// It copies a datagram to its program.
    Copies,
    /// It found nothing, and waits in its socket's wait queue.
    Asleep,
    /// It was woken and does not run yet.
    Rouses,
    /// It falls asleep or comes back, at its cost.
    Comes,
    /// It has nothing more to do.
    Over,
}

/// A lock of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lock {
    /// That of who puts datagrams into this socket.
    Senders(usize),
    /// That of who takes them.
    Readers(usize),
}

#[derive(Debug, Clone, Copy)]
struct Thread {
    phase: Phase,
    /// CPU time, or time for who sleeps, until the phase ends, in s. Infinite where another thread ends it.
    left: f64,
}

impl Thread {
    const IDLE: Self = Self {
        phase: Phase::Asleep,
        left: f64::INFINITY,
    };

    /// Whether it wants a CPU.
    fn runs(&self) -> bool {
        !matches!(
            self.phase,
            Phase::Breathes | Phase::Asleep | Phase::Rouses | Phase::Over
        )
    }

    /// Whether it keeps its CPU: it has or wants a spin lock.
    fn keeps(&self) -> bool {
        matches!(self.phase, Phase::Spins(_) | Phase::Holds(_))
    }
}

/// How fast threads go on: their part of a CPU.
#[derive(Debug, Clone, Copy)]
struct Speeds {
    /// Of those with a spin lock.
    keeps: f64,
    /// Of the others that can run.
    shares: f64,
}

impl Speeds {
    fn of(threads: &[Thread], cpus: usize) -> Self {
        let keep = threads.iter().filter(|thread| thread.keeps()).count();
        let share = threads.iter().filter(|thread| thread.runs()).count() - keep;
        let part = |cpus: usize, threads: usize| (cpus as f64 / threads.max(1) as f64).min(1.0);
        Self {
            keeps: part(cpus, keep),
            shares: part(cpus.saturating_sub(keep), share),
        }
    }

    fn of_thread(self, thread: &Thread) -> f64 {
        match (thread.keeps(), thread.runs()) {
            (true, _) => self.keeps,
            (false, true) => self.shares,
            (false, false) => 1.0,
        }
    }
}

/// A socket: its queue, its sleeping readers and its locks.
#[derive(Debug, Default)]
struct Socket {
    queued: u64,
    /// The longest asleep first, whom the kernel wakes first (an exclusive wait).
    asleep: Vec<usize>,
    /// Threads that have or want each lock, in the order in which they get it: senders', then readers'.
    locks: [Vec<usize>; 2],
}

struct Machine<'a> {
    of: &'a Datagrams,
    now: f64,
    /// Senders first, then readers.
    threads: Vec<Thread>,
    sockets: Vec<Socket>,
    steering: Option<(Steering, Vec<u32>)>,
    to_send: u64,
    unread: u64,
    found: DatagramsRead,
}

/// Simulates datagrams until the last one is read.
///
/// # Errors
/// When they cannot be simulated.
pub fn read_datagrams(of: &Datagrams) -> Result<DatagramsRead, Error> {
    check(of)?;
    let mut machine = Machine::new(of);
    while machine.to_send + machine.unread > 0 {
        machine.step();
    }
    machine.found.elapsed_s = machine.now;
    Ok(machine.found)
}

fn check(of: &Datagrams) -> Result<(), Error> {
    let counts = [of.cpus, of.senders, of.readers];
    if counts.contains(&0) || of.count == 0 || of.reading.has_no_room() {
        return Err(Error(
            "datagrams need a CPU, a sender, a reader, and room for one".into(),
        ));
    }
    let most = Variant::Kernel.slots();
    if of.readers > most {
        return Err(Error(format!(
            "{} readers cannot be simulated: give 1 to {most}",
            of.readers
        )));
    }
    let costs = of.costs;
    let positive = [costs.send_s, costs.read_s];
    let others = [costs.locked_s, costs.wake_s, costs.sleep_s, costs.rouse_s];
    let sound = positive.iter().all(|cost| cost.is_finite() && *cost > 0.0)
        && others.iter().all(|cost| cost.is_finite() && *cost >= 0.0)
        && positive.iter().all(|cost| costs.locked_s <= *cost);
    if !sound {
        return Err(Error(format!(
            "{costs:?} are no costs: sending and reading take time, and the lock is a part of each"
        )));
    }
    Ok(())
}

impl<'a> Machine<'a> {
    fn new(of: &'a Datagrams) -> Self {
        let (sockets, steering) = match of.placement {
            Placement::OneSocket => (1, None),
            Placement::Steered { policy } => {
                let mut steering = Steering::new(Variant::Kernel, policy, of.readers, &[], of.seed);
                let flows = (0..of.senders).map(|_| steering.hash()).collect();
                (of.readers, Some((steering, flows)))
            }
        };
        let mut machine = Self {
            of,
            now: 0.0,
            threads: vec![Thread::IDLE; of.senders + of.readers],
            sockets: Vec::new(),
            steering,
            to_send: of.count,
            unread: 0,
            found: DatagramsRead {
                elapsed_s: 0.0,
                read: vec![0; of.readers],
                wakes: 0,
            },
        };
        machine.sockets.resize_with(sockets, Socket::default);
        machine.begin();
        machine
    }

    fn begin(&mut self) {
        let senders = self.of.senders;
        if self.of.reading == Reading::AllWaiting {
            for nth in 0..self.to_send {
                let socket = self.place(nth as usize % senders);
                self.sockets[socket].queued += 1;
            }
            self.unread = std::mem::take(&mut self.to_send);
            (0..senders).for_each(|sender| self.rest(sender, Phase::Over));
        } else {
            (0..senders).for_each(|sender| self.send_next(sender));
        }
        (senders..self.threads.len()).for_each(|reader| self.look(reader));
    }

    /// The socket for a datagram of this sender.
    fn place(&mut self, sender: usize) -> usize {
        match &mut self.steering {
            None => 0,
            Some((steering, flows)) => steering.pick(flows[sender]).unwrap_or(0),
        }
    }

    /// The socket that a reader reads.
    fn socket_of(&self, thread: usize) -> usize {
        (thread - self.of.senders) % self.sockets.len()
    }

    /// A phase that takes CPU time.
    fn work(&mut self, thread: usize, phase: Phase, left: f64) {
        self.threads[thread] = Thread { phase, left };
    }

    /// A phase that another thread ends.
    fn rest(&mut self, thread: usize, phase: Phase) {
        self.work(thread, phase, f64::INFINITY);
    }

    /// Goes on to the end of the phase that ends first.
    fn step(&mut self) {
        let speeds = Speeds::of(&self.threads, self.of.cpus);
        let time = |thread: &Thread| match speeds.of_thread(thread) {
            0.0 => f64::INFINITY,
            speed => thread.left / speed,
        };
        let times = self.threads.iter().map(time).enumerate();
        let (first, lasts) = times
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or((0, f64::INFINITY));
        self.now += lasts;
        for thread in &mut self.threads {
            thread.left = (thread.left - lasts * speeds.of_thread(thread)).max(0.0);
        }
        self.end_phase(first);
    }

    fn end_phase(&mut self, thread: usize) {
        let costs = self.of.costs;
        match self.threads[thread].phase {
            Phase::Sends => {
                let socket = self.place(thread);
                self.take(thread, Lock::Senders(socket));
            }
            Phase::Holds(lock) => {
                self.give_back(thread, lock);
                match lock {
                    Lock::Senders(socket) => self.put(thread, socket),
                    Lock::Readers(_) => {
                        self.work(thread, Phase::Copies, costs.read_s - costs.locked_s);
                    }
                }
            }
            Phase::Wakes(reader) => {
                self.work(reader, Phase::Rouses, costs.rouse_s);
                self.send_next(thread);
            }
            Phase::Breathes => self.send_next(thread),
            Phase::Copies => {
                self.found.read[thread - self.of.senders] += 1;
                self.unread -= 1;
                self.look(thread);
            }
            Phase::Rouses => self.work(thread, Phase::Comes, costs.sleep_s),
            Phase::Comes => self.look(thread),
            // They have no end of their own.
            Phase::Spins(_) | Phase::Asleep | Phase::Over => {}
        }
    }

    fn send_next(&mut self, sender: usize) {
        let costs = self.of.costs;
        if self.to_send == 0 {
            return self.rest(sender, Phase::Over);
        }
        if let Reading::AsSent { window, breath } = self.of.reading
            && self.unread >= window
        {
            return self.work(sender, Phase::Breathes, breath.as_secs_f64());
        }
        self.to_send -= 1;
        self.unread += 1;
        self.work(sender, Phase::Sends, costs.send_s - costs.locked_s);
    }

    /// A datagram is in a socket. Its sender wakes the reader that has slept longest there.
    fn put(&mut self, sender: usize, socket: usize) {
        let of = &mut self.sockets[socket];
        of.queued += 1;
        if of.asleep.is_empty() {
            return self.send_next(sender);
        }
        let reader = of.asleep.remove(0);
        self.found.wakes += 1;
        self.work(sender, Phase::Wakes(reader), self.of.costs.wake_s);
    }

    /// A reader looks for a datagram: it takes one, or falls asleep.
    fn look(&mut self, reader: usize) {
        let socket = self.socket_of(reader);
        let of = &mut self.sockets[socket];
        if of.queued == 0 {
            of.asleep.push(reader);
            return self.rest(reader, Phase::Asleep);
        }
        of.queued -= 1;
        self.take(reader, Lock::Readers(socket));
    }

    fn waiting_for(&mut self, lock: Lock) -> &mut Vec<usize> {
        match lock {
            Lock::Senders(socket) => &mut self.sockets[socket].locks[0],
            Lock::Readers(socket) => &mut self.sockets[socket].locks[1],
        }
    }

    /// A thread takes a lock, or spins until it is its turn.
    fn take(&mut self, thread: usize, lock: Lock) {
        let waiting = self.waiting_for(lock);
        waiting.push(thread);
        if waiting.len() == 1 {
            self.work(thread, Phase::Holds(lock), self.of.costs.locked_s);
        } else {
            self.rest(thread, Phase::Spins(lock));
        }
    }

    fn give_back(&mut self, thread: usize, lock: Lock) {
        let waiting = self.waiting_for(lock);
        waiting.retain(|other| *other != thread);
        if let Some(next) = waiting.first().copied() {
            self.work(next, Phase::Holds(lock), self.of.costs.locked_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wakeone_bpf::contract::number::{HASH as BY_HASH, ROUND_ROBIN};

    const COSTS: Costs = Costs {
        send_s: 4e-6,
        read_s: 1e-6,
        locked_s: 0.0,
        wake_s: 0.0,
        sleep_s: 0.0,
        rouse_s: 0.0,
    };
    const HASH: Placement = Placement::Steered { policy: BY_HASH };
    const IN_TURN: Placement = Placement::Steered {
        policy: ROUND_ROBIN,
    };

    fn waiting(cpus: usize, readers: usize, placement: Placement) -> Datagrams {
        Datagrams {
            cpus,
            senders: 1,
            readers,
            placement,
            reading: Reading::AllWaiting,
            count: 10_000,
            costs: COSTS,
            seed: 1,
        }
    }

    fn as_sent(window: u64) -> Reading {
        Reading::AsSent {
            window,
            breath: Duration::from_micros(50),
        }
    }

    fn per_s(of: &Datagrams) -> f64 {
        read_datagrams(of).unwrap().per_s()
    }

    #[track_caller]
    fn near(found: f64, expected: f64) {
        assert!(
            (found / expected - 1.0).abs() < 0.01,
            "{found}, not {expected}"
        );
    }

    #[test]
    fn as_many_read_at_once_as_there_are_cpus_and_sockets_to_read() {
        for placement in [Placement::OneSocket, IN_TURN] {
            for (cpus, readers, at_once) in [(1, 4, 1.0), (4, 1, 1.0), (4, 4, 4.0), (3, 8, 3.0)] {
                near(per_s(&waiting(cpus, readers, placement)), at_once * 1e6);
            }
        }
        // One flow has one hash.
        let hashed = read_datagrams(&waiting(4, 4, HASH)).unwrap();
        near(hashed.per_s(), 1e6);
        assert_eq!(hashed.read.iter().filter(|read| **read > 0).count(), 1);
    }

    #[test]
    fn a_lock_bounds_one_socket_and_not_several() {
        let mut of = waiting(8, 8, Placement::OneSocket);
        of.costs.locked_s = 0.5e-6;
        near(per_s(&of), 2e6);
        of.placement = IN_TURN;
        near(per_s(&of), 8e6);
    }

    #[test]
    fn who_has_a_lock_keeps_its_cpu() {
        // Another reader gets no part of it, however many there are.
        for readers in [3, 8] {
            let mut of = waiting(2, readers, Placement::OneSocket);
            (of.costs.read_s, of.costs.locked_s) = (1e-6, 1e-6);
            near(per_s(&of), 1e6);
        }
    }

    #[test]
    fn who_spins_takes_a_cpu() {
        // Two of three CPUs go to the sender's lock: one has it and one spins. The third CPU is left for all else.
        let mut of = waiting(3, 1, Placement::OneSocket);
        of.reading = as_sent(1_000_000);
        of.senders = 2;
        (of.costs.send_s, of.costs.locked_s) = (1e-6, 1e-6);
        (of.costs.read_s, of.count) = (1e-6, 1_000);
        near(per_s(&of), 1e6);
        // With two, the reader gets one only after all are sent.
        of.cpus = 2;
        near(per_s(&of), 0.5e6);
    }

    #[test]
    fn a_sender_bounds_what_is_read_and_several_less() {
        let mut of = waiting(8, 4, IN_TURN);
        of.reading = as_sent(150);
        near(per_s(&of), 250_000.0);
        of.senders = 4;
        near(per_s(&of), 1e6);
        // With one CPU all share it.
        of.cpus = 1;
        near(per_s(&of), 200_000.0);
    }

    #[test]
    fn each_datagram_for_a_sleeper_costs_a_wake_up() {
        let mut of = waiting(8, 4, Placement::OneSocket);
        of.reading = as_sent(150);
        (of.costs.wake_s, of.costs.sleep_s) = (2e-6, 2e-6);
        let found = read_datagrams(&of).unwrap();
        // The next is sent after 6 µs, and a reader sleeps again after 5.
        near(found.per_s(), 1e6 / 6.0);
        assert_eq!(found.wakes, of.count);
        let shares: Vec<f64> = found.read.iter().map(|read| *read as f64).collect();
        shares.iter().for_each(|read| near(*read, 2_500.0));
    }

    #[test]
    fn no_more_are_unread_than_may_be() {
        let mut of = waiting(2, 1, Placement::OneSocket);
        of.reading = as_sent(10);
        (of.costs.send_s, of.costs.read_s) = (1e-9, 10e-6);
        // Ten are read in 100 µs, and the sender has looked at least every 50.
        near(per_s(&of), 1e5);
    }

    #[test]
    fn one_seed_gives_one_result_and_all_are_read() {
        let mut of = waiting(3, 5, HASH);
        (of.senders, of.reading) = (7, as_sent(20));
        (of.costs.locked_s, of.costs.rouse_s) = (0.2e-6, 5e-6);
        let found = read_datagrams(&of).unwrap();
        assert_eq!(found.read.iter().sum::<u64>(), of.count);
        assert_eq!(found, read_datagrams(&of).unwrap());
    }

    #[test]
    fn what_cannot_be_simulated_says_why() {
        let good = waiting(1, 1, Placement::OneSocket);
        let lock = Costs {
            locked_s: 2e-6,
            ..COSTS
        };
        for bad in [
            Datagrams { cpus: 0, ..good },
            Datagrams { readers: 0, ..good },
            Datagrams {
                readers: 257,
                ..good
            },
            Datagrams { count: 0, ..good },
            Datagrams {
                reading: as_sent(0),
                ..good
            },
            Datagrams {
                costs: lock,
                ..good
            },
        ] {
            assert!(read_datagrams(&bad).is_err(), "{bad:?}");
        }
    }
}
