//! Many threads that read datagrams, on more CPUs than there are: measured costs, simulated threads.

use std::fmt;
use wakeone_control::policy::Policy;
use wakeone_sim::{Costs, Datagrams, DatagramsRead, Placement, Reading, read_datagrams};

use super::sender::{BREATH, WINDOW};
use super::{CARD, COMPARED, Mode, Variant, Way, costs};
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::experiments::simulated::simulates;
use crate::present::{Block, Chart, Row, Style, Table, cell};
use crate::result::{Expectation, Outcome};

/// The arm that measures the costs and simulates.
pub(super) const COSTS: &str = "costs";
/// CPUs that are simulated, beside as many as there are here.
const CPUS: [usize; 6] = [2, 4, 8, 16, 32, 64];
const READERS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const WAYS: [Way; 3] = [Way::Socket, Way::HashOne, Way::RoundRobin];
/// Datagrams of a simulation: enough that its beginning does not count.
const SIMULATED: u64 = 20_000;
/// The machine that the words and charts are about.
const SHOWN_CPUS: usize = 16;
const SHOWN_READERS: usize = 8;

/// The loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// One thread sends as fast as is read.
    OneSender,
    /// As many send as read.
    SenderEach,
    /// Everything waits before it is read.
    Waiting,
}

const LOADS: [Load; 3] = [Load::OneSender, Load::SenderEach, Load::Waiting];

impl Load {
    fn name(self) -> &'static str {
        match self {
            Load::OneSender => "constant",
            Load::SenderEach => "senders",
            Load::Waiting => "waiting",
        }
    }

    /// The ways that are simulated. Each sender is a flow.
    fn ways(self) -> [Way; 3] {
        match self {
            Load::OneSender | Load::Waiting => WAYS,
            Load::SenderEach => [Way::Socket, Way::HashMany, Way::RoundRobin],
        }
    }

    fn title(self) -> &'static str {
        match self {
            Load::OneSender => "one sender, sent as fast as it is read",
            Load::SenderEach => "as many senders as readers",
            Load::Waiting => "read when it is there already",
        }
    }
}

/// A simulation. Its name is that of its metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Point {
    load: Load,
    way: Way,
    readers: usize,
    cpus: usize,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (load, way) = (self.load.name(), self.way.name());
        write!(f, "{load}/{way}/{}/cpus-{}", self.readers, self.cpus)
    }
}

impl Point {
    fn all(here: usize) -> Vec<Self> {
        let mut machines = CPUS.to_vec();
        machines.extend((!CPUS.contains(&here)).then_some(here));
        let mut all = Vec::new();
        for (load, way) in LOADS.into_iter().flat_map(|l| l.ways().map(|way| (l, way))) {
            for readers in READERS {
                let of = |&cpus: &usize| Self {
                    load,
                    way,
                    readers,
                    cpus,
                };
                all.extend(machines.iter().map(of));
            }
        }
        all
    }

    fn simulate(self, costs: Costs, seed: u64) -> Result<DatagramsRead, Error> {
        let policy = match self.way {
            Way::RoundRobin => Some(Policy::RoundRobin),
            Way::HashOne | Way::HashMany => Some(Policy::Hash),
            _ => None,
        };
        let senders = match self.load {
            Load::SenderEach => self.readers,
            Load::OneSender | Load::Waiting => 1,
        };
        simulates(read_datagrams(&Datagrams {
            cpus: self.cpus,
            senders,
            readers: self.readers,
            placement: policy.map_or(Placement::OneSocket, |policy| Placement::Steered {
                policy: policy.number(),
            }),
            reading: match self.load {
                Load::Waiting => Reading::AllWaiting,
                _ => Reading::AsSent {
                    window: WINDOW * senders as u64,
                    breath: BREATH,
                },
            },
            count: SIMULATED,
            costs,
            seed,
        }))
    }

    fn rate(self, outcome: &Outcome) -> Option<f64> {
        outcome.median(COSTS, &self.to_string())
    }
}

/// The variants whose measured rate is held against the simulated one.
fn compared() -> impl Iterator<Item = Variant> {
    let modes = [Mode::Constant, Mode::Waiting].into_iter();
    modes.flat_map(|mode| {
        WAYS.map(|way| Variant {
            mode,
            pinned: false,
            way,
            threads: COMPARED,
        })
    })
}

/// The same variant as it is simulated.
fn point_of(variant: Variant, cpus: usize) -> Point {
    Point {
        load: match variant.mode {
            Mode::Waiting => Load::Waiting,
            _ => Load::OneSender,
        },
        way: variant.way,
        readers: variant.threads,
        cpus,
    }
}

/// Measures the costs here and simulates all points.
///
/// # Errors
/// When a cost cannot be measured, or on Ctrl-C.
pub(super) fn measure(context: &mut Context<'_>) -> Result<Sample, Error> {
    let here = crate::cpus::count();
    let costs = costs::measure(here, context)?;
    let mut sample = costs::sample(costs);
    for point in Point::all(here) {
        context.check()?;
        let found = point.simulate(costs, context.seed)?;
        sample.put(point.to_string(), "1/s", found.per_s());
    }
    Ok(sample)
}

/// The simulated rate of a variant on as many CPUs as there were, and the measured one over it.
fn beside(outcome: &Outcome, variant: Variant) -> Option<(f64, f64)> {
    let here = outcome.parameter_u64("cpus")? as usize;
    let simulated = point_of(variant, here).rate(outcome)?;
    let measured = outcome.median(&variant.to_string(), "rate_per_s")?;
    Some((simulated, measured / simulated))
}

/// Nothing where it was not simulated.
pub(super) fn judge(outcome: &Outcome) -> Vec<Expectation> {
    if outcome.variant(COSTS).is_none() {
        return Vec::new();
    }
    let judged = |variant: Variant| {
        let name = variant.to_string();
        let names = [("arm", &*name.replace('/', "-"))];
        let ratio = beside(outcome, variant).map(|(_, ratio)| ratio);
        CARD.expect_of("simulated-{arm}", &names, ratio)
    };
    compared().map(judged).collect()
}

/// The part about more CPUs; nothing where they were not simulated.
pub(super) fn present(outcome: &Outcome) -> Vec<Block> {
    if outcome.variant(COSTS).is_none() {
        return Vec::new();
    }
    let mut blocks = vec![
        Block::Heading("More CPUs, simulated".into()),
        Block::Paragraph(words(outcome)),
        Block::Table(comparison(outcome)),
    ];
    for load in LOADS {
        blocks.push(Block::Table(rates(outcome, load)));
        blocks.push(Block::Chart(chart(outcome, load)));
    }
    blocks
}

fn words(outcome: &Outcome) -> String {
    let gain = |load| {
        let of = |way| {
            Point {
                load,
                way,
                readers: SHOWN_READERS,
                cpus: SHOWN_CPUS,
            }
            .rate(outcome)
        };
        let ratio = of(Way::RoundRobin).zip(of(Way::Socket));
        cell(ratio.map(|(turn, one)| turn / one))
    };
    let mut names = vec![
        ("cpus", SHOWN_CPUS.to_string()),
        ("readers", SHOWN_READERS.to_string()),
        ("one_sender", gain(Load::OneSender)),
        ("sender_each", gain(Load::SenderEach)),
        ("waiting", gain(Load::Waiting)),
    ];
    let cost = |name: &&'static str| (*name, cell(outcome.median(COSTS, name)));
    names.extend(costs::NAMES.iter().map(cost));
    let names: Vec<(&str, &str)> = names.iter().map(|(n, v)| (*n, &**v)).collect();
    CARD.say("more-cpus", outcome, &names).unwrap_or_default()
}

fn comparison(outcome: &Outcome) -> Table {
    let row = |variant: Variant| {
        let name = variant.to_string();
        let (simulated, ratio) = beside(outcome, variant).unzip();
        let measured = outcome.median(&name, "rate_per_s");
        Row::named(name, [measured, simulated, ratio].map(cell))
    };
    Table::new(
        "Datagrams a second on this machine; medians of the rounds.",
        ["measured", "simulated", "ratio"],
        compared().map(row),
    )
}

/// The simulated rate of a load in a way, by the threads that read, in million a second.
fn millions(outcome: &Outcome, load: Load, way: Way, cpus: usize) -> [Option<f64>; READERS.len()] {
    READERS.map(|readers| {
        let point = Point {
            load,
            way,
            readers,
            cpus,
        };
        point.rate(outcome).map(|rate| rate / 1e6)
    })
}

fn rates(outcome: &Outcome, load: Load) -> Table {
    let rows = load.ways().into_iter().flat_map(|way| {
        CPUS.into_iter().map(move |cpus| {
            let cells = millions(outcome, load, way, cpus).map(cell);
            Row::named(format!("{}, {cpus} CPUs", way.name()), cells)
        })
    });
    Table::new(
        format!("Simulated, {}: million datagrams a second.", load.title()),
        READERS.map(|readers| format!("{readers} reading")),
        rows,
    )
}

fn chart(outcome: &Outcome, load: Load) -> Chart {
    let series = |way: Way| {
        let rates = millions(outcome, load, way, SHOWN_CPUS);
        let points = READERS.iter().zip(rates);
        let points = points.filter_map(|(readers, rate)| Some((*readers as f64, rate?)));
        (Style::ours(way.name(), way.colour()), points.collect())
    };
    Chart::lines(
        format!("Simulated on {SHOWN_CPUS} CPUs, {}.", load.title()),
        "Higher is better.",
        ("threads that read", "million/s", false),
        load.ways().map(series),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::udp_readers::{parse, variants};
    use crate::result::tests::{failing, outcome};
    use serde_json::json;

    #[test]
    fn what_is_compared_is_measured_and_simulated() {
        for variant in compared() {
            assert_eq!(parse(&variant.to_string()).unwrap(), variant);
            assert!(variants(true).contains(&variant), "{variant}");
            for here in [2, 3, 4] {
                let point = point_of(variant, here);
                assert!(Point::all(here).contains(&point), "{variant}");
            }
        }
    }

    #[test]
    fn a_rate_further_off_than_a_fifth_does_not_hold() {
        let judged = |rate: f64| {
            let names: Vec<String> = compared().map(|variant| variant.to_string()).collect();
            let points = compared().map(|variant| point_of(variant, 4).to_string());
            let points: Vec<String> = points.collect();
            let simulated: Vec<(&str, &[f64])> =
                points.iter().map(|p| (&**p, &[1000.0][..])).collect();
            let rates = [rate];
            let measured = [("rate_per_s", &rates[..])];
            let mut all: Vec<_> = names.iter().map(|n| (&**n, &measured[..])).collect();
            all.push((COSTS, &simulated[..]));
            let mut found = outcome(&all);
            found.parameters.insert("cpus".into(), json!(4));
            failing(judge(&found)).len()
        };
        assert_eq!(judged(1000.0), 0);
        assert_eq!(judged(1250.0), 0);
        assert_eq!(judged(1260.0), compared().count());
        assert_eq!(judged(790.0), compared().count());
    }
}
