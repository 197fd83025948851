//! The expectations.

use wakeone_control::policy::Policy;

use super::loads::{Load, Shared};
use super::{CARD, UNDER_LOAD, agents, cell_name, many, programs};
use crate::card::OWN_GOAL;
use crate::measure;
use crate::result::{Expectation, Outcome};
use crate::slices::{Contrast, Per};

/// The most that half of an interval's width may be, so that differences of 2 % can be told apart.
const HALF_WIDTH: f64 = 0.01;
/// The same for the thinned size, which only shows that the method works.
const HALF_WIDTH_QUICK: f64 = 0.05;
/// How far from 1 the same arm twice may be. A 95 % interval misses the truth once in twenty. A miss by less than this
/// is small beside the limits of the others.
const SAME: f64 = 0.005;

/// Compares the result with the expectations.
pub fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut expected = slices(outcome);
    expected.extend(by_slots(outcome));
    expected.extend(under_load(outcome));
    expected.extend(agents(outcome));
    expected.extend(measure::sound(outcome));
    expected
}

/// An expectation of a contrast: its name, the load, and the arms above and below the line.
type Bar = (&'static str, Load, (&'static str, &'static str));

const BARS: [Bar; 7] = [
    ("steering", Load::Steering, ("steered", "hash")),
    ("watched", Load::Watching, ("watched", "unwatched")),
    (
        "watched-without-tracing",
        Load::Watching,
        ("watched-without-tracing", "unwatched"),
    ),
    ("one-queue", one_queue(Shared::Ours(4)), ATTACHED),
    ("one-queue-64", one_queue(Shared::Ours(64)), ATTACHED),
    (
        "one-queue-uvicorn",
        one_queue(Shared::Other("uvicorn-workers")),
        ATTACHED,
    ),
    (
        "one-queue-nginx",
        one_queue(Shared::Other("nginx-shared-fixed")),
        ATTACHED,
    ),
];

const fn one_queue(shared: Shared) -> Load {
    Load::OneQueue(shared)
}

const ATTACHED: (&str, &str) = ("attached", "as-it-is");

/// Returns connections a second where the machine was quiet enough for them. Otherwise it returns those for a second
/// of CPU time, which other work on the machine changes less. The interval's width decides, never the ratio.
pub fn surest<'a>(outcome: &'a Outcome, load: Load, arms: (&str, &str)) -> Option<&'a Contrast> {
    let of = |per| outcome.contrast(&load.variant(), arms, per);
    let (plain, cpu) = (of(Per::Second)?, of(Per::CpuSecond));
    let quiet = plain.half_width() <= HALF_WIDTH;
    Some(cpu.filter(|_| !quiet).unwrap_or(plain))
}

fn slices(outcome: &Outcome) -> Vec<Expectation> {
    // Other projects' servers are not everywhere.
    let here = |bar: &&Bar| {
        let is_other = matches!(bar.1, Load::OneQueue(Shared::Other(_)));
        !is_other || outcome.variant(&bar.1.variant()).is_some()
    };
    let bars = BARS.iter().filter(here);
    let mut expected: Vec<Expectation> = bars.map(|bar| reaches(outcome, bar)).collect();
    let steered = surest(outcome, Load::Steering, ("steered", "hash"));
    expected.push(narrow(outcome, steered));
    let again = surest(outcome, Load::Steering, ("hash-again", "hash"));
    expected.push(Expectation::new(
        "same-arm-twice",
        "The kernel's hash against itself: the interval covers 1, or misses it by less than 0.005",
        OWN_GOAL,
        again.map(|c| c.ratio),
        |_| {
            let covers = |c: &Contrast| c.low - SAME < 1.0 && 1.0 < c.high + SAME;
            again.is_some_and(covers)
        },
    ));
    expected
}

fn reaches(outcome: &Outcome, (name, load, arms): &Bar) -> Expectation {
    let found = surest(outcome, *load, *arms);
    let per = found.map_or(Per::Second, |c| c.per).name();
    CARD.expect_of(name, &[("per", per)], found.map(|c| c.ratio))
}

fn narrow(outcome: &Outcome, contrast: Option<&Contrast>) -> Expectation {
    let quick = outcome.parameters.get("quick").and_then(|q| q.as_bool());
    let most = if quick == Some(true) {
        HALF_WIDTH_QUICK
    } else {
        HALF_WIDTH
    };
    let most = most.to_string();
    let half = contrast.map(Contrast::half_width);
    CARD.expect_of("steering-interval", &[("most", &*most)], half)
}

/// Policies that need not look at the slots.
const FLAT: [Policy; 5] = [
    Policy::Hash,
    Policy::RoundRobin,
    Policy::Random,
    Policy::Cpu,
    Policy::TwoChoices,
];

fn by_slots(outcome: &Outcome) -> Vec<Expectation> {
    let ns = |policy, slots| outcome.median(&cell_name(slots), &programs::metric(policy));
    let growth = |policy| Some(ns(policy, 256)? / ns(policy, 4)?);
    let grows = |policy: Policy, most: &str| {
        let names = [("policy", policy.name()), ("most", most)];
        CARD.expect_of("{policy}-growth", &names, growth(policy))
    };
    let mut expected: Vec<Expectation> = FLAT.map(|policy| grows(policy, "1.3")).into();
    expected.push(grows(Policy::LeastConnections, "3"));
    let among_four = ns(Policy::LeastConnections, 4);
    expected.push(CARD.expect("least-connections-ns", among_four));
    expected
}

fn under_load(outcome: &Outcome) -> [Expectation; 2] {
    let of = |name: &str, metric: &str| CARD.expect(name, outcome.median(UNDER_LOAD, metric));
    [
        of("dispatch-ns", "dispatch_ns"),
        of("sock-ops-ns", "sock_ops_ns"),
    ]
}

fn agents(outcome: &Outcome) -> Vec<Expectation> {
    let each = |agent: &agents::Agent| {
        let (variant, most) = (agent.variant, agent.most_percent);
        let rate = agent.rate_per_s.unwrap_or_default().to_string();
        let names = [
            ("name", &*variant.replace('/', "-")),
            ("variant", variant),
            ("most", most),
            ("rate", &rate),
        ];
        let which = match agent.rate_per_s {
            None => "{name}",
            Some(_) => "{name}-under-load",
        };
        CARD.expect_of(which, &names, outcome.median(variant, agents::METRIC))
    };
    let memory =
        |(which, variant): (&str, &str)| CARD.expect(which, outcome.median(variant, many::MEMORY));
    let memory = [
        ("memory-of-50", "idle/agent-of-50"),
        ("memory-of-50-queues", "idle/agent-of-50-queues"),
    ]
    .map(memory);
    agents::ALL.iter().map(each).chain(memory).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{SOUND, Values, failing, outcome};

    fn contrast(bar: &Bar, per: Per, ratio: f64, half: f64) -> Contrast {
        Contrast {
            variant: bar.1.variant(),
            a: bar.2.0.into(),
            b: bar.2.1.into(),
            per,
            ratio,
            low: ratio - half,
            high: ratio + half,
            confidence: 0.95,
            mean: ratio,
            blocks: 100,
            slices: 400,
            rounds: vec![ratio],
        }
    }

    const AGAIN: Bar = ("", Load::Steering, ("hash-again", "hash"));

    /// Ratios of the bars without nginx, and of the same arm twice.
    fn with(ratios: [f64; 6], half: f64, ns: [f64; 2]) -> Outcome {
        let names: Vec<String> = Policy::ALL.map(programs::metric).into();
        let [four, many] = ns.map(|ns| [ns]);
        let cell = |ns| -> Vec<Values<'_>> { names.iter().map(|n| (n.as_str(), ns)).collect() };
        let (four, many) = (cell(&four[..]), cell(&many[..]));
        let runs: [Values<'_>; 2] = [("dispatch_ns", &[200.0]), ("sock_ops_ns", &[100.0])];
        let (small, large) = (cell_name(4), cell_name(256));
        let quiet: [Values<'_>; 2] = [(agents::METRIC, &[0.1]), (many::MEMORY, &[19.0])];
        let agents = agents::ALL.iter().map(|agent| (agent.variant, &quiet[..]));
        let others: [(&str, &[Values<'_>]); 4] = [
            (small.as_str(), &four[..]),
            (large.as_str(), &many[..]),
            (UNDER_LOAD, &runs),
            ("slices/steering", &SOUND),
        ];
        let mut found = outcome(&agents.chain(others).collect::<Vec<_>>());
        let bars = BARS[..5].iter().chain([&AGAIN]);
        found.contrasts = bars
            .zip(ratios)
            .flat_map(|(bar, ratio)| {
                // By connections a second, the machine was too noisy.
                [
                    contrast(bar, Per::Second, ratio - 0.02, 0.1),
                    contrast(bar, Per::CpuSecond, ratio, half),
                ]
            })
            .collect();
        found
    }

    const GOOD: [f64; 6] = [0.985, 0.985, 0.985, 0.99, 0.99, 1.001];

    #[test]
    fn each_limit_bites() {
        let failed = |ratios, half, ns| failing(judge(&with(ratios, half, ns)));
        assert!(failed(GOOD, 0.009, [140.0, 180.0]).is_empty());
        assert_eq!(failed(GOOD, 0.011, [140.0, 180.0]), ["steering-interval"]);
        assert_eq!(
            failed(
                [0.979, 0.979, 0.979, 0.989, 0.989, 1.02],
                0.009,
                [140.0, 180.0]
            ),
            [
                "steering",
                "watched",
                "watched-without-tracing",
                "one-queue",
                "one-queue-64",
                "same-arm-twice"
            ]
        );
        assert_eq!(
            failed(GOOD, 0.009, [150.0, 200.0]),
            [
                "hash-growth",
                "round-robin-growth",
                "random-growth",
                "cpu-growth",
                "two-choices-growth",
                "least-connections-ns"
            ]
        );
        let nothing = failing(judge(&outcome(&[("slices/steering", &SOUND)])));
        assert_eq!(nothing.len(), 5 + 2 + 7 + 11 + 2 + 2, "{nothing:?}");
        for (variant, most) in [("idle/attach", 0.3), ("busy/one-queue-64", 0.5)] {
            let mut busy = with(GOOD, 0.009, [140.0, 180.0]);
            let is_it = |v: &&mut crate::result::Variant| v.name == variant;
            let found = busy.variants.iter_mut().find(is_it).expect("variant");
            let metric = found.metrics.get_mut(agents::METRIC).expect("metric");
            metric.median = most + 0.01;
            assert_eq!(failing(judge(&busy)).len(), 1, "{variant}");
        }
    }

    #[test]
    fn connections_a_second_count_where_the_machine_was_quiet() {
        let mut found = with(GOOD, 0.009, [100.0, 100.0]);
        let arms = BARS[0].2;
        let per = |found: &Outcome| surest(found, Load::Steering, arms).map(|c| c.per);
        assert_eq!(per(&found), Some(Per::CpuSecond));
        found.contrasts[0] = contrast(&BARS[0], Per::Second, 0.97, 0.009);
        assert_eq!(per(&found), Some(Per::Second));
        assert_eq!(failing(judge(&found)), ["steering"]);
        // And alone where the kernel's accounting does not have the CPU time.
        found.contrasts[0] = contrast(&BARS[0], Per::Second, 0.99, 0.1);
        found.contrasts.retain(|c| c.per == Per::Second);
        assert_eq!(per(&found), Some(Per::Second));
        assert!(failing(judge(&found)).contains(&"steering-interval".to_owned()));
    }

    #[test]
    fn the_thinned_size_may_be_less_sure() {
        let mut found = with(GOOD, 0.04, [100.0, 100.0]);
        assert_eq!(failing(judge(&found)), ["steering-interval"]);
        found.parameters.insert("quick".into(), true.into());
        assert!(failing(judge(&found)).is_empty());
    }
}
