//! How often, and how long, are the locks of a UDP socket waited for?

mod present;

use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;
use wakeone_bpf::locks::{Counts, Locks};
use wakeone_kernel::capability::{self, Capability};

use super::udp_readers::reader::BYTES;
use super::udp_readers::readers::{self, Readers, Setup};
use super::udp_readers::sender::{self, Sent};
use super::udp_readers::{self, Mode};
use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::papers;
use crate::present::Block;
use crate::process::Usage;
use crate::result::{Expectation, Outcome};
use crate::stats;
use crate::steered::Attached;

card!(published);

/// The experiment.
pub struct UdpLocks;

/// How many threads read: the source's numbers.
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// The number of reading threads at which ways are compared.
const COMPARED: usize = 4;
/// The locks that belong to a socket, and all other locks of the readers, as metrics name them.
const LOCKS: [&str; 5] = [
    "receive_queue",
    "reader_queue",
    "socket",
    "wait_queue",
    "other",
];
/// The locks of the queue of datagrams.
const QUEUE_LOCKS: [&str; 2] = [LOCKS[0], LOCKS[1]];
/// The locks of the socket.
const SOCKET_LOCKS: [&str; 4] = [LOCKS[0], LOCKS[1], LOCKS[2], LOCKS[3]];

/// The sockets that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// One socket for all threads.
    Socket,
    /// A socket each; Wakeone chooses in turn.
    Each,
    /// One socket with a queue for each thread, in turn, on the kernel of the papers.
    Queues,
}

const WAYS: [Way; 3] = [Way::Socket, Way::Each, Way::Queues];
const MODES: [Mode; 2] = [Mode::Constant, Mode::Flood];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Socket => "socket",
            Way::Each => "round-robin",
            Way::Queues => "patched-queues",
        }
    }

    /// Its place in the palette, as in `udp-readers`.
    fn colour(self) -> usize {
        match self {
            Way::Socket => 1,
            Way::Each => 4,
            Way::Queues => 7,
        }
    }

    fn sockets(self, threads: usize) -> usize {
        match self {
            Way::Socket | Way::Queues => 1,
            Way::Each => threads,
        }
    }
}

/// A variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Variant {
    mode: Mode,
    way: Way,
    threads: usize,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mode, way) = (self.mode.name(), self.way.name());
        write!(f, "{mode}/{way}/{}", self.threads)
    }
}

fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for mode in MODES {
        for way in WAYS {
            // One thread with a socket of its own is one thread with the only socket.
            let threads = THREADS.into_iter().filter(|n| way == Way::Socket || *n > 1);
            all.extend(threads.map(|threads| Variant { mode, way, threads }));
        }
    }
    all
}

fn parse(name: &str) -> Result<Variant, Error> {
    variants()
        .into_iter()
        .find(|variant| variant.to_string() == name)
        .ok_or_else(|| Error::Unknown(name.into()))
}

/// Datagrams for each thread, not for all together, as the source's counts of acquisitions show.
fn datagrams_each(quick: bool) -> u64 {
    if quick { 100_000 } else { 500_000 }
}

/// The reason why waits for a lock cannot be seen; None where they can.
fn why_not() -> Option<&'static str> {
    static WHY: OnceLock<Option<String>> = OnceLock::new();
    let why = WHY.get_or_init(|| {
        let error = Locks::watch(0, 0).err()?;
        let missing = capability::missing_of([Capability::CAP_BPF, Capability::CAP_PERFMON]);
        Some(match &missing[..] {
            [] => error.to_string(),
            missing => format!("tracing needs {}", missing.join(" and ")),
        })
    });
    why.as_deref()
}

impl Experiment for UdpLocks {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let missing = capability::missing();
        let mut all = variants();
        all.retain(|v| missing.is_empty() || v.way == Way::Socket);
        all.retain(|v| papers::is_here() || v.way != Way::Queues);
        let each = datagrams_each(settings.quick);
        let arm = |v: &Variant| Arm {
            name: v.to_string(),
            group: THREADS.len() * (v.mode as usize)
                + THREADS.iter().position(|n| *n == v.threads).unwrap_or(0),
            seconds: (each * v.threads as u64) as f64 * 4e-6 + 1.0,
        };
        let why = why_not().map(|why| ("contentions", why));
        Design {
            rounds: if settings.quick { 3 } else { 5 },
            arms: all.iter().map(arm).collect(),
            pairings: Vec::new(),
            steady: "rate_per_s",
            parameters: parameters([
                ("datagrams_each", json!(each)),
                ("datagram_bytes", json!(BYTES)),
                ("cpus", json!(crate::cpus::count())),
                ("left_out", json!(BTreeMap::from_iter(why))),
                ("build", json!(crate::environment::build())),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        measure(parse(&arm.name)?, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let of = |mode, way, threads| Variant { mode, way, threads };
        let contended =
            |variant, locks: &[&str]| together(outcome, variant, locks, "contentions_per_million");
        let shared = || variants().into_iter().filter(|v| v.way == Way::Socket);
        let highest = |values: Vec<Option<f64>>| {
            let known: Option<Vec<f64>> = values.into_iter().collect();
            known.map(|all| all.into_iter().fold(0.0, f64::max))
        };
        let share = |v| together(outcome, v, &QUEUE_LOCKS, "wait_share");
        let socket = |v| together(outcome, v, &["socket"], "contentions");
        let less = |mode, locks| {
            let one = contended(of(mode, Way::Socket, COMPARED), locks)?;
            let each = contended(of(mode, Way::Each, COMPARED), locks)?;
            Some(each - one)
        };
        let more = |mode| {
            let with = |threads| contended(of(mode, Way::Socket, threads), &QUEUE_LOCKS);
            Some(with(COMPARED)? - with(1)?)
        };
        let lost: Vec<f64> = variants()
            .into_iter()
            .filter(|v| v.mode == Mode::Constant)
            .flat_map(|v| outcome.values(&v.to_string(), "lost").to_vec())
            .collect();
        let longest = highest(shared().map(share).collect());
        let of_socket = highest(shared().map(socket).collect());
        let mut all = vec![
            CARD.expect("waits-are-short", longest),
            CARD.expect("socket-lock-is-free", of_socket),
        ];
        for mode in MODES {
            let name = [("mode", mode.name())];
            let expect = |key: &str, measured| CARD.expect_of(key, &name, measured);
            let (sockets, everywhere) = (less(mode, &SOCKET_LOCKS[..]), less(mode, &LOCKS[..]));
            all.extend([
                expect("{mode}-more-readers-more-contentions", more(mode)),
                expect("{mode}-socket-each-contends-no-more", sockets),
                expect("{mode}-socket-each-waits-nowhere-else", everywhere),
            ]);
        }
        let queues = contended(of(Mode::Constant, Way::Queues, COMPARED), &SOCKET_LOCKS[..]);
        if let Some(queues) = queues {
            let one = contended(of(Mode::Constant, Way::Socket, COMPARED), &SOCKET_LOCKS[..]);
            let less = one.map(|one| queues / one.max(1e-9));
            all.push(CARD.expect("patched-queues-contend-less", less));
        }
        all.push(CARD.expect("nothing-lost", stats::sum(&lost)));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

/// The result of one measurement.
struct Found {
    sent: Sent,
    used: Usage,
    /// The waits, where they can be seen, and how many sockets have those locks.
    waited: Option<(Counts, u32)>,
}

fn measure(variant: Variant, context: &mut Context<'_>) -> Result<Sample, Error> {
    let readers = Readers::start(&Setup {
        sockets: variant.way.sockets(variant.threads),
        threads: variant.threads,
        queues: match variant.way {
            Way::Queues => udp_readers::Way::QueuesInTurn.queues(variant.threads),
            _ => None,
        },
        ..Setup::default()
    })?;
    let found = send(variant, &readers, context)?;
    let read = readers.end();
    let mut sample = readers::sample(&read, &found.sent, &found.used);
    if let Some((counts, sockets)) = &found.waited {
        waited(&mut sample, counts, *sockets);
    }
    Ok(sample)
}

fn send(variant: Variant, readers: &Readers, context: &mut Context<'_>) -> Result<Found, Error> {
    readers.until_ready()?;
    let address = readers.address();
    let _attached = match variant.way {
        Way::Each => Some(Attached::to_datagrams(address, "round-robin")?),
        Way::Socket | Way::Queues => None,
    };
    let failed = |e: std::io::Error| Error::Server(format!("watching the readers' locks: {e}"));
    let watched = match why_not() {
        None => Some(Locks::watch(address.port(), readers.pid()).map_err(failed)?),
        Some(_) => None,
    };
    let counts = || watched.as_ref().map(Locks::counts).transpose();
    let (before, early) = (readers.usage(), counts().map_err(failed)?);
    let each = datagrams_each(context.settings.quick);
    let count = each * variant.threads as u64;
    let board = readers.board();
    let sent = sender::datagrams(address, 1, count, variant.mode, board, context)?;
    let (used, late) = (readers.usage().since(&before), counts().map_err(failed)?);
    let sockets = watched.as_ref().map_or(0, Locks::sockets);
    Ok(Found {
        sent,
        used,
        waited: late
            .zip(early)
            .map(|(late, early)| (late.since(&early), sockets)),
    })
}

fn waited(sample: &mut Sample, counts: &Counts, sockets: u32) {
    let get = |metric: &str| sample.metrics.get(metric).map_or(0.0, |(_, value)| *value);
    let (read, seconds) = (get("read").max(1.0), get("time_s").max(1e-9));
    sample.put("sockets", "count", f64::from(sockets));
    for (name, kind) in counts.kinds() {
        let (contentions, waits) = (kind.contentions as f64, kind.waits as f64);
        let wait_us = kind.wait_ns as f64 / 1000.0;
        sample.put(format!("{name}_contentions"), "count", contentions);
        sample.put(
            format!("{name}_contentions_per_million"),
            "1/million",
            contentions / read * 1e6,
        );
        sample.put(format!("{name}_wait_us_total"), "us", wait_us);
        // Nobody waited: there is no average.
        if waits > 0.0 {
            sample.put(format!("{name}_wait_us_avg"), "us", wait_us / waits);
        }
        sample.put(
            format!("{name}_wait_share"),
            "share",
            wait_us / 1e6 / seconds,
        );
    }
}

/// A metric of several locks together: the median over the rounds of their sum.
fn together(outcome: &Outcome, variant: Variant, locks: &[&str], metric: &str) -> Option<f64> {
    let name = variant.to_string();
    let of = |lock: &&str| outcome.values(&name, &format!("{lock}_{metric}"));
    let rounds = locks.iter().map(|lock| of(lock).len()).min()?;
    let sum = |round| locks.iter().map(|lock| of(lock)[round]).sum();
    let sums: Vec<f64> = (0..rounds).map(sum).collect();
    (rounds > 0).then(|| stats::median(&sums))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wakeone_bpf::locks::Contended;

    #[test]
    fn names_of_variants_go_both_ways() {
        for variant in variants() {
            assert_eq!(parse(&variant.to_string()).unwrap(), variant);
        }
        for none in [
            "",
            "constant/socket",
            "constant/round-robin/1",
            "x/socket/1",
        ] {
            assert!(parse(none).is_err(), "{none}");
        }
    }

    #[test]
    fn metrics_name_the_locks_that_are_counted() {
        let names = Counts::default().kinds().map(|(name, _)| name);
        assert_eq!(names, LOCKS);
    }

    #[test]
    fn waits_are_told_a_datagram_and_a_wait() {
        let mut sample = Sample::default();
        sample.put("read", "count", 500_000.0);
        sample.put("time_s", "s", 2.0);
        let counts = Counts {
            receive_queue: Contended {
                contentions: 50,
                waits: 40,
                wait_ns: 20_000_000,
            },
            ..Counts::default()
        };
        waited(&mut sample, &counts, 1);
        let value = |metric: &str| sample.metrics.get(metric).map(|(_, value)| *value);
        assert_eq!(value("receive_queue_contentions_per_million"), Some(100.0));
        assert_eq!(value("receive_queue_wait_us_avg"), Some(500.0));
        assert_eq!(value("receive_queue_wait_share"), Some(0.01));
        assert_eq!(value("reader_queue_contentions"), Some(0.0));
        assert_eq!(value("reader_queue_wait_us_avg"), None);
    }

    /// All variants with the same numbers, but those of four readers: `one` a million and share with one socket, `each`
    /// with a socket each.
    fn held(one: f64, each: f64, socket: f64, lost: f64) -> Vec<String> {
        let names: Vec<(Variant, String)> =
            variants().into_iter().map(|v| (v, v.to_string())).collect();
        let metric = |v: &Variant, metric: &str| match (metric, v.way, v.threads) {
            ("lost", ..) => lost,
            ("socket_contentions", ..) => socket,
            ("receive_queue_contentions_per_million", Way::Socket, COMPARED) => one,
            ("receive_queue_contentions_per_million", Way::Each, COMPARED) => each,
            ("receive_queue_contentions_per_million", ..) => 10.0,
            ("receive_queue_wait_share", ..) => one / 1e4,
            _ => 0.0,
        };
        let mut metrics = vec!["lost".to_owned()];
        for lock in LOCKS {
            for what in ["contentions", "contentions_per_million", "wait_share"] {
                metrics.push(format!("{lock}_{what}"));
            }
        }
        let values: Vec<Vec<[f64; 1]>> = names
            .iter()
            .map(|(v, _)| metrics.iter().map(|m| [metric(v, m)]).collect())
            .collect();
        let rows: Vec<Vec<(&str, &[f64])>> = values
            .iter()
            .map(|row| {
                let pairs = metrics.iter().zip(row);
                pairs.map(|(m, v)| (m.as_str(), &v[..])).collect()
            })
            .collect();
        let all: Vec<_> = names
            .iter()
            .zip(&rows)
            .map(|((_, name), row)| (name.as_str(), &row[..]))
            .collect();
        let outcome = crate::result::tests::outcome(&all);
        let found = UdpLocks.judge(&outcome).into_iter().filter(|e| e.holds);
        found.map(|e| e.name).collect()
    }

    #[test]
    fn limits_bite() {
        assert_eq!(held(99.0, 99.0, 0.0, 0.0).len(), 10);
        assert_eq!(
            held(100.0, 101.0, 1.0, 1.0),
            [
                "constant-more-readers-more-contentions",
                "flood-more-readers-more-contentions",
                "patched-queues-contend-less"
            ]
        );
        assert_eq!(
            held(10.0, 0.0, 0.0, 0.0),
            [
                "waits-are-short",
                "socket-lock-is-free",
                "constant-socket-each-contends-no-more",
                "constant-socket-each-waits-nowhere-else",
                "flood-socket-each-contends-no-more",
                "flood-socket-each-waits-nowhere-else",
                "nothing-lost"
            ]
        );
    }

    #[test]
    fn what_was_not_seen_does_not_hold() {
        let outcome = crate::result::tests::outcome(&[("constant/socket/1", &[("lost", &[0.0])])]);
        let held: Vec<String> = UdpLocks
            .judge(&outcome)
            .into_iter()
            .filter(|e| e.holds)
            .map(|e| e.name)
            .collect();
        assert_eq!(held, ["nothing-lost"]);
    }

    #[test]
    fn published_averages_are_totals_through_counts() {
        let published = crate::published::Published::parse(CARD.published);
        for series in present::PUBLISHED.map(|(series, ..)| series) {
            for (total, count, average) in [
                ("hold_us_total", "acquisitions", "hold_us_avg"),
                ("wait_us_total", "contentions", "wait_us_avg"),
            ] {
                let of = |metric| published.curve(series, metric);
                assert_eq!(of(total).len(), THREADS.len(), "{series} {total}");
                for ((total, count), average) in of(total).iter().zip(of(count)).zip(of(average)) {
                    let (x, printed) = average;
                    assert_eq!((total.0, count.0), (x, x), "{series}");
                    let error = (total.1 / count.1 / printed - 1.0).abs();
                    assert!(error < 1e-3, "{series} {x} {printed}: {error}");
                }
            }
        }
    }
}
