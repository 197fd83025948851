//! Whether steering makes any server worse than it is.

mod cell;
mod clients;
mod judge;
mod moves;
mod present;
mod subjects;

use serde_json::json;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::{answers, views};
use subjects::{ALL, Subject};

card!();

/// The experiment.
pub struct Harm;

/// The ways to hand out a server's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The server, without us.
    AsItIs,
    /// `wakeone attach`.
    Attach,
    /// `wakeone attach --rescue`.
    AttachRescue,
    /// `wakeone run`, a process for each worker.
    Run,
    /// `wakeone run --split`.
    Split,
}

impl Way {
    /// Last part of the variants' names.
    fn name(self) -> &'static str {
        match self {
            Way::AsItIs => "as-it-is",
            Way::Attach => "attach",
            Way::AttachRescue => "attach+rescue",
            Way::Run => "run",
            Way::Split => "split",
        }
    }
}

/// The situations that a server is measured in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Situation {
    /// Short requests in an open loop, a connection each.
    Steady,
    /// Short requests over connections that were opened slowly before.
    Kept,
    /// One request in a hundred is long.
    Stuck,
    /// Most requests block their worker for some milliseconds.
    Busy,
    /// It is restarted, or reloaded, twice.
    Restart,
    /// It is restarted while clients keep connections. A client that loses its connection opens it again.
    Roll,
    /// Requests come before the first worker accepts.
    Boot,
    /// Workers are stopped for some milliseconds, one after the other, until queues have been moved many times.
    Moves,
}

impl Situation {
    /// Middle part of the variants' names.
    fn name(self) -> &'static str {
        match self {
            Situation::Steady => "steady",
            Situation::Kept => "kept",
            Situation::Stuck => "stuck",
            Situation::Busy => "busy",
            Situation::Restart => "restart",
            Situation::Roll => "roll",
            Situation::Boot => "boot",
            Situation::Moves => "moves",
        }
    }
}

/// How long the load of a situation lasts. Two restarts delay one request in a hundred of a shorter one, so that its 99th
/// percentile would be chance.
fn load_seconds(situation: Situation, quick: bool) -> f64 {
    match situation {
        Situation::Restart => 5.0,
        _ if quick => 2.0,
        _ => 5.0,
    }
}

/// One server in one situation.
fn of(subject: &Subject, situation: Situation) -> String {
    format!("{}/{}", subject.name, situation.name())
}

fn arm_name(subject: &Subject, situation: Situation, way: Way) -> String {
    format!("{}/{}", of(subject, situation), way.name())
}

fn cells() -> impl Iterator<Item = (&'static Subject, Situation)> {
    ALL.iter()
        .flat_map(|subject| subject.situations.iter().map(move |s| (subject, *s)))
}

fn parse(name: &str) -> Result<(&'static Subject, Situation, Way), Error> {
    let all = cells().flat_map(|(subject, situation)| {
        let ways = subject.ways(situation).into_iter();
        ways.map(move |way| (subject, situation, way))
    });
    all.into_iter()
        .find(|(subject, situation, way)| arm_name(subject, *situation, *way) == name)
        .ok_or_else(|| Error::Unknown(name.into()))
}

/// The comparison of a way with the server as it is.
fn pairing(subject: &Subject, situation: Situation, way: Way, metric: &str) -> Pairing {
    let a = arm_name(subject, situation, way);
    Pairing {
        name: format!("{a}: {metric} / as it is"),
        a,
        b: arm_name(subject, situation, Way::AsItIs),
        metric: metric.into(),
    }
}

impl Experiment for Harm {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = |situation| load_seconds(situation, settings.quick);
        let mut design = Design {
            rounds: if settings.quick { 2 } else { 5 },
            parameters: parameters([
                ("workers", json!(subjects::WORKERS)),
                ("load_s", json!(seconds(Situation::Steady))),
                ("restart_s", json!(seconds(Situation::Restart))),
                ("rate_per_s", json!(cell::RATE_PER_S)),
                ("usual_us", json!(cell::USUAL_US)),
                ("long_us", json!(cell::LONG_US)),
                ("moves", json!(moves::wanted(settings.quick))),
            ]),
            ..Design::default()
        };
        for (group, (subject, situation)) in cells().enumerate() {
            for way in subject.ways(situation) {
                let name = arm_name(subject, situation, way);
                let arm = Arm {
                    name: name.clone(),
                    group,
                    seconds: seconds(situation) + 4.0,
                };
                design.offer(arm, &name, subject.lacks(way));
            }
        }
        let pairs = cells().flat_map(|(subject, situation)| {
            let ours = subject.ways(situation).into_iter().skip(1);
            ours.flat_map(move |way| {
                judge::RATIOS.map(|metric| pairing(subject, situation, way, metric))
            })
        });
        design.compare(pairs);
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (subject, situation, way) = parse(&arm.name)?;
        cell::measure(subject, situation, way, context)
    }

    /// Of 150 cells, some are beyond the spread of five rounds by chance.
    fn doubtful(&self, outcome: &Outcome) -> Vec<String> {
        judge::all_worse(outcome)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = judge::all(outcome);
        all.push(answers::agree(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning([present::meaning(outcome)]);
        blocks.push(Block::Table(present::summary(outcome)));
        blocks.extend(present::servers(outcome));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variants_go_both_ways() {
        for (subject, situation) in cells() {
            for way in subject.ways(situation) {
                let name = arm_name(subject, situation, way);
                let found = parse(&name).unwrap();
                assert_eq!(
                    (found.0.name, found.1, found.2),
                    (subject.name, situation, way)
                );
            }
        }
        assert!(parse("nginx/steady/split").is_err());
    }
}
