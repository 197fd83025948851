//! The thundering herd: how long a wait queue needs to settle after one connection, and which threads it wakes.

mod present;
mod waiters;

use serde_json::json;
use std::time::Duration;
use wakeone_waitqueue::Policy;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::present::Block;
use crate::published::Published;
use crate::result::{Derived, Expectation, Outcome};
use crate::stats;
use crate::trace::{self, Event, Kind, Trace};
use waiters::{Herd as Waiters, Waiting};

card!(published);

/// The experiment.
pub struct Herd;

const TAPS: usize = 10;
const ROUNDS: usize = 3;

/// The published series, the way of waiting that stands for it, and its place in the palette.
const PUBLISHED: [(&str, Waiting); 3] = [
    ("Kernel", Waiting::WakeAll),
    ("Taskex", Waiting::Accept),
    ("Wake1", Waiting::Exclusive),
];

fn sizes(quick: bool) -> Vec<usize> {
    if quick {
        vec![100, 400, 1000]
    } else {
        (1..=10).map(|n| n * 100).collect()
    }
}

fn arm_name(waiting: Waiting, threads: usize) -> String {
    format!("{}/{threads}", waiting.name())
}

fn parse_arm(name: &str) -> Option<(Waiting, usize)> {
    let (way, threads) = name.split_once('/')?;
    Some((
        waiters::ALL.into_iter().find(|w| w.name() == way)?,
        threads.parse().ok()?,
    ))
}

/// Between the moment when all wait again and the next tap: the same for all sizes, for what rests longer wakes slower.
const REST: Duration = Duration::from_millis(20);

impl Experiment for Herd {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut arms = Vec::new();
        for (group, threads) in sizes(settings.quick).into_iter().enumerate() {
            arms.extend(waiters::here().map(|waiting| Arm {
                name: arm_name(waiting, threads),
                group,
                seconds: 0.1
                    + TAPS as f64 * (REST.as_secs_f64() + 0.005 + threads as f64 * 20e-6)
                    + threads as f64 * 0.0004,
            }));
        }
        Design {
            rounds: ROUNDS,
            arms,
            pairings: waiters::here().map(growth).collect(),
            steady: "settle_us",
            parameters: parameters([
                ("threads", json!(sizes(settings.quick))),
                ("taps_per_round", json!(TAPS)),
                ("selecting_in_queue_always_wake", json!(waiters::SELECTING)),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (waiting, threads) =
            parse_arm(&arm.name).ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let herd = Waiters::gather(waiting, threads)?;
        let trace = Trace::start(waiters::NAME)?;
        let before = herd.voluntary_switches();
        let mut taps = Vec::new();
        for tap in 0..TAPS {
            context.check()?;
            trace.clear()?;
            herd.tap(REST)?;
            taps.push(Tap::of(&trace.events()?).ok_or_else(|| {
                Error::Missing(format!(
                    "the trace of a tap on {threads} threads shows no wake-up"
                ))
            })?);
            (context.progress)((tap + 1) as f64 / TAPS as f64);
        }
        let switches = herd.voluntary_switches() - before;
        let of = |value: fn(&Tap) -> f64| taps.iter().map(value).collect::<Vec<f64>>();
        let mut sample = Sample::default();
        sample.put("settle_us", "us", stats::median(&of(|tap| tap.settle_us)));
        sample.put(
            "wakeups_per_tap",
            "count",
            stats::mean(&of(|tap| tap.wakeups)),
        );
        let by_the_connection = stats::median(&of(|tap| tap.by_the_connection));
        sample.put("woken_by_connection", "count", by_the_connection);
        sample.put(
            "voluntary_switches_per_tap",
            "count",
            switches as f64 / TAPS as f64,
        );
        Ok(sample)
    }

    fn derive(&self, outcome: &Outcome) -> Vec<Derived> {
        derive(outcome)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut expectations = Vec::new();
        for waiting in measured(outcome) {
            expectations.push(settles(outcome, waiting));
            expectations.push(wakes(outcome, waiting));
        }
        expectations
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

fn growth(waiting: Waiting) -> Pairing {
    Pairing {
        name: growth_name(waiting),
        a: arm_name(waiting, 1000),
        b: arm_name(waiting, 100),
        metric: "settle_us".into(),
    }
}

fn growth_name(waiting: Waiting) -> String {
    format!(
        "settle(1,000 threads) / settle(100 threads), {}",
        waiting.name()
    )
}

/// The figures of one tap.
#[derive(Debug, PartialEq)]
struct Tap {
    /// From the first wake-up to the last sleep.
    settle_us: f64,
    /// All wake-ups.
    wakeups: f64,
    /// The threads that no other woken thread woke.
    by_the_connection: f64,
}

impl Tap {
    /// None for a trace without wake-ups.
    fn of(events: &[Event]) -> Option<Self> {
        let wakeups = || events.iter().filter(|e| e.kind == Kind::Waking);
        let first = wakeups().next()?;
        let last = events.iter().rev().find(|e| e.kind == Kind::Asleep)?;
        Some(Self {
            settle_us: last.at_us - first.at_us,
            wakeups: wakeups().count() as f64,
            by_the_connection: trace::woken_by_others(events).len() as f64,
        })
    }
}

/// Whether the settle time grows, or does not, as the paper says.
fn settles(outcome: &Outcome, waiting: Waiting) -> Expectation {
    let published = match waiting {
        Waiting::Accept
        | Waiting::Queue(Policy::TaskExclusive)
        | Waiting::Patched(Policy::TaskExclusive) => "2.73 times (Taskex)",
        Waiting::Queue(Policy::AlwaysWake) | Waiting::Patched(Policy::AlwaysWake) => {
            "not implemented then"
        }
        _ => "0.89 times (Wake1)",
    };
    let name = if waiting.wakes_all() {
        "{way}-grows"
    } else {
        "{way}-constant"
    };
    let names = [("way", waiting.name()), ("published", published)];
    CARD.expect_of(name, &names, outcome.ratio(&growth_name(waiting)))
}

/// Whether one connection wakes as many as the paper says.
fn wakes(outcome: &Outcome, waiting: Waiting) -> Expectation {
    let selecting = waiting.selecting();
    let name = match selecting {
        _ if waiting.wakes_all() => "{way}-wakes-all",
        0 => "{way}-wakes-one",
        _ => "{way}-wakes-one-and-selecting",
    };
    let names = [
        ("way", waiting.name()),
        ("selecting", &*selecting.to_string()),
        ("all", &*(1 + selecting).to_string()),
    ];
    // In a result of before it was measured, all of them.
    let woken = |metric| outcome.median(&arm_name(waiting, 1000), metric);
    let woken = match waiting {
        Waiting::Patched(_) => woken("woken_by_connection"),
        _ => woken("wakeups_per_tap"),
    };
    CARD.expect_of(name, &names, woken)
}

/// The ways of waiting that a result has; those of the kernel of the papers only if it was measured there.
fn measured(outcome: &Outcome) -> impl Iterator<Item = Waiting> {
    let patched = outcome
        .variants
        .iter()
        .any(|v| v.name.starts_with("patched-"));
    let all = waiters::ALL.into_iter();
    all.filter(move |waiting| patched || !matches!(waiting, Waiting::Patched(_)))
}

/// The measured `(threads, value)` of a way of waiting, rising.
fn curve(outcome: &Outcome, waiting: Waiting, metric: &str) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = outcome
        .variants
        .iter()
        .filter_map(|v| {
            let (way, threads) = parse_arm(&v.name)?;
            (way == waiting).then_some((threads as f64, v.median(metric)?))
        })
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// The growth exponent of the settle time of a way of waiting.
fn growth_of(outcome: &Outcome, waiting: Waiting) -> Option<f64> {
    stats::growth_exponent(&curve(outcome, waiting, "settle_us"))
}

/// The growth exponents of the published series and of ours.
fn derive(outcome: &Outcome) -> Vec<Derived> {
    let published = Published::parse(CARD.published);
    let theirs = PUBLISHED.iter().map(|(series, _)| {
        let curve = published.curve(series, "settle_us");
        let name = format!("growth/published-{}", series.to_lowercase());
        (name, true, stats::growth_exponent(&curve))
    });
    let ours = measured(outcome).map(|w| {
        let name = format!("growth/{}", w.name());
        (name, false, growth_of(outcome, w))
    });
    theirs
        .chain(ours)
        .filter_map(|(name, published, value)| {
            Some(Derived {
                name,
                meaning: "e of settle_us ~ threads^e, fitted over all sizes".into(),
                published,
                unit: "exponent".into(),
                value: value?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settling_is_from_the_first_wake_up_to_the_last_sleep() {
        let event = |at_us, kind, thread, by| Event {
            at_us,
            kind,
            thread,
            by,
        };
        let events = [
            event(5.0, Kind::Asleep, 1, 1),
            event(10.0, Kind::Waking, 1, 9),
            event(11.0, Kind::Waking, 2, 9),
            event(12.0, Kind::Waking, 2, 1),
            event(50.0, Kind::Asleep, 2, 2),
        ];
        let tap = Tap {
            settle_us: 40.0,
            wakeups: 3.0,
            by_the_connection: 2.0,
        };
        assert_eq!(Tap::of(&events), Some(tap));
        assert_eq!(Tap::of(&events[..1]), None);
    }

    #[test]
    fn the_published_ratios_are_those_of_the_csv() {
        let published = Published::parse(CARD.published);
        let ratio = |name: &str| {
            let curve = published.curve(name, "settle_us");
            assert_eq!(curve.len(), 10);
            curve[9].1 / curve[0].1
        };
        let rounded = |r: f64| (r * 100.0).round() / 100.0;
        assert_eq!(
            (
                rounded(ratio("Kernel")),
                rounded(ratio("Taskex")),
                rounded(ratio("Wake1"))
            ),
            (37.65, 2.73, 0.89)
        );
    }

    #[test]
    fn names_of_variants_go_both_ways() {
        for waiting in waiters::ALL {
            assert_eq!(parse_arm(&arm_name(waiting, 700)), Some((waiting, 700)));
        }
        assert_eq!(parse_arm("nobody/100"), None);
    }
}
