//! Measures whether many threads read UDP faster than one, from one socket or from a socket each.

mod costs;
mod more_cpus;
mod present;
pub mod reader;
pub mod readers;
pub mod sender;

use serde_json::json;
use std::fmt;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::papers;
use crate::present::Block;
use crate::process::Usage;
use crate::result::{Expectation, Outcome};
use crate::stats;
use crate::steered::Attached;
use readers::{Readers, Setup};
use sender::Sent;

card!(published);

/// The experiment.
pub struct UdpReaders;

/// How many threads read: the source's numbers.
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// The number of reading threads at which ways are compared.
const COMPARED: usize = 4;
/// Flows of the variant with many.
const MANY_FLOWS: usize = 64;
/// Holds a portion of what waits before it is read, at 768 bytes of kernel memory a datagram, and twice that.
const WAITING_BYTES: usize = 1 << 25;
/// Holds several batches for each reader.
const BATCHES_BYTES: usize = 1 << 22;

/// The kind of socket that is read, and who chooses among several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// A named pipe.
    Fifo,
    /// One socket for all threads.
    Socket,
    /// A socket each, the kernel's hash, all datagrams of one flow.
    HashOne,
    /// The same with many flows.
    HashMany,
    /// A socket each, one flow; Wakeone chooses in turn.
    RoundRobin,
    /// The same; Wakeone chooses by the CPU that got the datagram.
    Cpu,
    /// The program that reads one socket, split by `wakeone run --split`: a socket each, one flow; Wakeone chooses in
    /// turn.
    Split,
    /// One socket with a queue for each thread, one flow, on the kernel of the papers. Datagrams go to the queues in turn.
    QueuesInTurn,
    /// The same with many flows. Datagrams go to the queue of their flow.
    QueuesByFlow,
}

/// All of them.
pub const WAYS: [Way; 9] = [
    Way::Fifo,
    Way::Socket,
    Way::HashOne,
    Way::HashMany,
    Way::RoundRobin,
    Way::Cpu,
    Way::Split,
    Way::QueuesInTurn,
    Way::QueuesByFlow,
];

impl Way {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Way::Fifo => "fifo",
            Way::Socket => "socket",
            Way::HashOne => "hash-one-flow",
            Way::HashMany => "hash-many-flows",
            Way::RoundRobin => "round-robin",
            Way::Cpu => "cpu",
            Way::Split => "split",
            Way::QueuesInTurn => "patched-queues",
            Way::QueuesByFlow => "patched-queues-many-flows",
        }
    }

    /// Its place in the palette.
    pub fn colour(self) -> usize {
        match self {
            Way::Fifo => 0,
            Way::Socket => 1,
            Way::HashOne => 2,
            Way::HashMany => 5,
            Way::RoundRobin => 4,
            Way::Cpu => 3,
            Way::Split => 6,
            Way::QueuesInTurn => 7,
            Way::QueuesByFlow => 8,
        }
    }

    fn flows(self) -> usize {
        match self {
            Way::HashMany | Way::QueuesByFlow => MANY_FLOWS,
            _ => 1,
        }
    }

    /// How many sockets the program opens for `threads` threads.
    fn sockets(self, threads: usize) -> usize {
        match self {
            Way::Fifo => 0,
            Way::Socket | Way::Split | Way::QueuesInTurn | Way::QueuesByFlow => 1,
            _ => threads,
        }
    }

    /// The value of the socket option UDP_QUEUES, if it is set.
    pub fn queues(self, threads: usize) -> Option<i32> {
        let each = i32::try_from(threads).unwrap_or(i32::MAX);
        match self {
            Way::QueuesInTurn => Some(each | papers::UDP_QUEUES_IN_TURN),
            Way::QueuesByFlow => Some(each),
            _ => None,
        }
    }

    fn policy(self) -> Option<&'static str> {
        match self {
            Way::RoundRobin => Some("round-robin"),
            Way::Cpu => Some("cpu"),
            _ => None,
        }
    }

    fn steered(self) -> bool {
        self.policy().is_some() || self == Way::Split
    }
}

/// How fast the sender sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// As fast as the readers read: nothing is lost.
    Constant,
    /// The same, with many datagrams by a system call. The sender shares the CPUs with the readers, so it is made to
    /// cost as little as possible.
    Batches,
    /// As fast as possible.
    Flood,
    /// A whole portion before its first datagram is read: only the reading takes time.
    Waiting,
}

/// All of them.
pub const MODES: [Mode; 4] = [Mode::Constant, Mode::Batches, Mode::Flood, Mode::Waiting];

impl Mode {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Constant => "constant",
            Mode::Batches => "batches",
            Mode::Flood => "flood",
            Mode::Waiting => "waiting",
        }
    }

    /// Its name and what it means.
    pub fn title(self) -> &'static str {
        match self {
            Mode::Constant => "constant: sent as fast as it is read",
            Mode::Batches => "batches: sent as fast as it is read, 64 by a system call",
            Mode::Flood => "flood: sent as fast as possible",
            Mode::Waiting => "waiting: read when it is there already",
        }
    }

    /// The bytes that each socket must be able to hold, where that is more than usual.
    fn buffer_bytes(self) -> Option<usize> {
        match self {
            Mode::Constant | Mode::Flood => None,
            Mode::Batches => Some(BATCHES_BYTES),
            Mode::Waiting => Some(WAITING_BYTES),
        }
    }
}

/// A variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// How fast the sender sends.
    pub mode: Mode,
    /// Whether the threads stay on their CPUs.
    pub pinned: bool,
    /// The kind of socket that is read.
    pub way: Way,
    /// How many threads read.
    pub threads: usize,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pinned = if self.pinned { "-pinned" } else { "" };
        let (mode, way) = (self.mode.name(), self.way.name());
        write!(f, "{mode}{pinned}/{way}/{}", self.threads)
    }
}

/// All possible variants. A pipe loses nothing, so it is neither flooded nor filled beforehand.
fn variants(quick: bool) -> Vec<Variant> {
    let threads: &[usize] = if quick { &[1, COMPARED] } else { &THREADS };
    let mut all = Vec::new();
    for mode in MODES {
        for pinned in [false, true] {
            for way in WAYS {
                for threads in threads {
                    all.push(Variant {
                        mode,
                        pinned,
                        way,
                        threads: *threads,
                    });
                }
            }
        }
    }
    all.retain(|v| v.mode == Mode::Constant || v.way != Way::Fifo);
    all.retain(|v| !quick || (!v.pinned && (v.mode != Mode::Flood || v.threads == COMPARED)));
    // The program under the shim has one thread's calls changed for each further one: with one there is nothing to split.
    all.retain(|v| v.way != Way::Split || v.threads > 1);
    // Its threads get their sockets when they begin to read: until then all would wait in one.
    all.retain(|v| v.way != Way::Split || v.mode != Mode::Waiting);
    all
}

fn parse(name: &str) -> Result<Variant, Error> {
    variants(false)
        .into_iter()
        .find(|variant| variant.to_string() == name)
        .ok_or_else(|| Error::Unknown(name.into()))
}

fn datagrams(quick: bool) -> u64 {
    if quick { 100_000 } else { 500_000 }
}

/// Ratios of the rates of two ways, with as many readers as are compared.
const PAIRS: [(Way, Way); 9] = [
    (Way::RoundRobin, Way::HashOne),
    (Way::RoundRobin, Way::Socket),
    (Way::Cpu, Way::HashOne),
    (Way::Cpu, Way::Socket),
    (Way::Split, Way::HashOne),
    (Way::Split, Way::Socket),
    (Way::QueuesInTurn, Way::Socket),
    (Way::QueuesInTurn, Way::RoundRobin),
    (Way::QueuesByFlow, Way::HashMany),
];

fn pair_name(mode: Mode, pinned: bool, a: Way, b: Way) -> String {
    let pinned = if pinned { ", pinned" } else { "" };
    format!(
        "{}{pinned}, {COMPARED} readers: rate of {} / {}",
        mode.name(),
        a.name(),
        b.name()
    )
}

impl Experiment for UdpReaders {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let missing = wakeone_kernel::capability::missing();
        let mut all = variants(settings.quick);
        all.retain(|v| missing.is_empty() || !v.way.steered());
        let patched = papers::is_here();
        all.retain(|v| patched || v.way.queues(v.threads).is_none());
        let arm = |v: &Variant| Arm {
            name: v.to_string(),
            group: THREADS.len() * 2 * (v.mode as usize)
                + THREADS.len() * usize::from(v.pinned)
                + THREADS.iter().position(|n| *n == v.threads).unwrap_or(0),
            seconds: datagrams(settings.quick) as f64 * 4e-6 + 1.0,
        };
        let costs = Arm {
            name: more_cpus::COSTS.into(),
            group: 2 * THREADS.len() * MODES.len(),
            seconds: 8.0,
        };
        // The patched kernel runs on an emulated machine, whose costs are those of no other.
        let costs = (!patched).then_some(costs);
        let arms: Vec<Arm> = all.iter().map(arm).chain(costs).collect();
        let is_here = |name: &str| arms.iter().any(|arm| arm.name == name);
        let mut pairings = Vec::new();
        for (mode, pinned) in MODES.into_iter().flat_map(|m| [(m, false), (m, true)]) {
            let of = |way: Way| Variant {
                mode,
                pinned,
                way,
                threads: COMPARED,
            };
            pairings.extend(PAIRS.map(|(a, b)| Pairing {
                name: pair_name(mode, pinned, a, b),
                a: of(a).to_string(),
                b: of(b).to_string(),
                metric: "rate_per_s".into(),
            }));
        }
        pairings.retain(|p| is_here(&p.a) && is_here(&p.b));
        Design {
            rounds: if settings.quick { 5 } else { 7 },
            arms,
            pairings,
            steady: "rate_per_s",
            parameters: parameters([
                ("datagrams", json!(datagrams(settings.quick))),
                ("datagram_bytes", json!(reader::BYTES)),
                ("many_flows", json!(MANY_FLOWS)),
                ("cpus", json!(crate::cpus::count())),
                ("build", json!(crate::environment::build())),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        if arm.name == more_cpus::COSTS {
            return more_cpus::measure(context);
        }
        measure(parse(&arm.name)?, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let ratio = |mode, a, b| outcome.ratio(&pair_name(mode, false, a, b));
        let lost = |mode: Mode, metric: &str| {
            let of_mode = outcome
                .variants
                .iter()
                .filter(|v| v.name.starts_with(&format!("{}/", mode.name())));
            let values: Vec<f64> = of_mode
                .flat_map(|v| outcome.values(&v.name, metric).to_vec())
                .collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>())
        };
        let growth = |way: Way| {
            let of = |threads| Variant {
                mode: Mode::Constant,
                pinned: false,
                way,
                threads,
            };
            let time = |threads| outcome.median(&of(threads).to_string(), "time_s");
            Some(time(COMPARED)? / time(1)?)
        };
        let (hash, shared) = (
            |mode| ratio(mode, Way::RoundRobin, Way::HashOne),
            |mode| ratio(mode, Way::RoundRobin, Way::Socket),
        );
        let whole = [Mode::Constant, Mode::Batches, Mode::Waiting];
        let of_flood = lost(Mode::Flood, "lost").zip(lost(Mode::Flood, "dropped"));
        let mut all = vec![
            CARD.expect("round-robin-over-hash", hash(Mode::Constant)),
            CARD.expect("round-robin-as-shared", shared(Mode::Constant)),
            CARD.expect("batches-round-robin-as-shared", shared(Mode::Batches)),
            CARD.expect("waiting-round-robin-over-hash", hash(Mode::Waiting)),
            CARD.expect("waiting-round-robin-as-shared", shared(Mode::Waiting)),
            CARD.expect("fifo-gains-nothing", growth(Way::Fifo)),
            CARD.expect("socket-gains-nothing", growth(Way::Socket)),
            CARD.expect(
                "nothing-lost",
                whole.map(|mode| lost(mode, "lost")).into_iter().sum(),
            ),
            CARD.expect("losses-are-counted", of_flood.map(|(a, b)| (a - b).abs())),
        ];
        all.extend(more_cpus::judge(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

fn measure(variant: Variant, context: &mut Context<'_>) -> Result<Sample, Error> {
    let split = [
        "run",
        "--split",
        "--policy",
        "round-robin",
        "--affinity",
        "none",
        "--",
    ];
    let readers = Readers::start(&Setup {
        sockets: variant.way.sockets(variant.threads),
        threads: variant.threads,
        pinned: variant.pinned,
        buffer_bytes: variant.mode.buffer_bytes(),
        portions: variant.mode == Mode::Waiting,
        queues: variant.way.queues(variant.threads),
        wrapped: if variant.way == Way::Split {
            &split
        } else {
            &[]
        },
    })?;
    let count = datagrams(context.settings.quick);
    let (sent, used) = send(variant, count, &readers, context)?;
    let read = readers.end();
    let mut sample = readers::sample(&read, &sent, &used);
    sample.put("share_max_over_mean", "ratio", stats::max_over_mean(&read));
    Ok(sample)
}

fn send(
    variant: Variant,
    count: u64,
    readers: &Readers,
    context: &mut Context<'_>,
) -> Result<(Sent, Usage), Error> {
    let board = readers.board();
    if variant.way == Way::Fifo {
        // The reader's open() waits for the writer's.
        let before = readers.usage();
        let (sent, _open) = sender::fifo(readers.pipe(), count, board, context)?;
        return Ok((sent, readers.usage().since(&before)));
    }
    readers.until_ready()?;
    let address = readers.address();
    let _attached = match variant.way.policy() {
        Some(policy) if variant.threads > 1 => Some(Attached::to_datagrams(address, policy)?),
        _ => None,
    };
    if variant.way == Way::Split {
        readers.until_split(variant.threads)?;
    }
    let before = readers.usage();
    let flows = variant.way.flows();
    let sent = sender::datagrams(address, flows, count, variant.mode, board, context)?;
    Ok((sent, readers.usage().since(&before)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{outcome, ratio};

    #[test]
    fn names_of_variants_go_both_ways() {
        for variant in variants(false) {
            assert_eq!(parse(&variant.to_string()).unwrap(), variant);
        }
        for none in [
            "",
            "constant/fifo",
            "flood/fifo/1",
            "constant/split/1",
            "x/y/1",
        ] {
            assert!(parse(none).is_err(), "{none}");
        }
    }

    #[test]
    fn limits_bite() {
        let of = |constant: &'static [f64], lost: &'static [f64]| {
            let with = |lost| {
                vec![
                    ("lost", lost),
                    ("dropped", &[3.0][..]),
                    ("time_s", constant),
                ]
            };
            let (a, b, c) = (with(lost), with(&[0.0]), with(&[3.0]));
            let mut outcome = outcome(&[
                ("constant/socket/4", &a[..]),
                ("batches/socket/4", &b[..]),
                ("waiting/socket/4", &b[..]),
                ("flood/socket/4", &c[..]),
            ]);
            let name = pair_name(Mode::Constant, false, Way::RoundRobin, Way::HashOne);
            outcome.comparisons = vec![ratio(name, constant[0])];
            UdpReaders
                .judge(&outcome)
                .into_iter()
                .filter(|e| e.holds)
                .map(|e| e.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            of(&[1.3], &[0.0]),
            [
                "round-robin-over-hash",
                "nothing-lost",
                "losses-are-counted"
            ]
        );
        assert_eq!(of(&[1.2], &[1.0]), ["losses-are-counted"]);
    }
}
