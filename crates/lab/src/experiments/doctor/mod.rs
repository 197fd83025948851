//! Whether doctor says of a server what is so.

mod cell;
mod truth;

use std::sync::LazyLock;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings};
use crate::present::{Block, Row, Table};
use crate::result::{Expectation, Outcome};
use crate::trials::Trials;
use crate::trials::load::Load;
use crate::trials::server::{Server, Who};
use crate::{measure, stats, views};

card!();

/// The servers and the situations, which are its loads. The first one has the servers of all.
static TRIALS: LazyLock<Trials> = LazyLock::new(|| Trials::read(&CARD));

/// The experiment.
pub struct Doctor;

/// One server in one situation.
#[derive(Debug, Clone, Copy)]
struct Cell {
    server: &'static Server,
    load: &'static Load,
}

impl Cell {
    fn name(&self) -> String {
        format!("{}/{}", self.server.name, self.load.name)
    }
}

fn servers() -> impl Iterator<Item = &'static Server> {
    TRIALS.variants().filter_map(|variant| match variant.who {
        Who::Other(server) => Some(server),
        Who::Ours(_) => None,
    })
}

/// All of them, those of a server together.
fn cells() -> impl Iterator<Item = Cell> {
    let of = |server| {
        let loads = TRIALS.table.load.iter();
        loads.map(move |load| Cell { server, load })
    };
    servers().flat_map(of)
}

/// The metric that is 1 in the rounds in which doctor found this.
fn metric_of(code: &str) -> String {
    format!("found_{code}")
}

/// Returns what doctor found in a cell, and in how many rounds.
fn found(outcome: &Outcome, cell: &Cell) -> Vec<(String, usize)> {
    let variant = outcome.variant(&cell.name());
    let metrics = variant.into_iter().flat_map(|one| &one.metrics);
    let codes = metrics.filter_map(|(name, metric)| {
        let code = name.strip_prefix("found_")?;
        Some((code.to_owned(), metric.values.len()))
    });
    codes.collect()
}

fn told(outcome: &Outcome, cell: &Cell) -> Option<String> {
    let rounds = outcome.values(&cell.name(), "wrong").len();
    let all = found(outcome, cell);
    let all = all.iter().map(|(code, times)| match *times == rounds {
        true => code.clone(),
        false => format!("{code} ({times} of {rounds})"),
    });
    let all: Vec<String> = all.collect();
    (rounds > 0).then(|| match all.is_empty() {
        true => "nothing".into(),
        false => all.join(", "),
    })
}

fn wrong(outcome: &Outcome, cell: &Cell) -> Option<f64> {
    stats::sum(outcome.values(&cell.name(), "wrong"))
}

impl Experiment for Doctor {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let quick = settings.quick;
        let mut design = TRIALS.plan(quick);
        for (group, cell) in cells().enumerate() {
            let arm = Arm {
                name: cell.name(),
                group,
                seconds: cell.load.typical_s(quick) + 3.0,
            };
            design.offer(arm, &cell.name(), cell.server.lacks());
        }
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let cell = cells().find(|cell| cell.name() == arm.name);
        let cell = cell.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        cell::measure(&cell, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = Vec::new();
        for cell in cells() {
            let name = cell.name();
            let Some(variant) = outcome.variant(&name) else {
                continue;
            };
            let found = told(outcome, &cell).unwrap_or_default();
            let why = variant.notes.get("wrong");
            let why = why.map_or_else(String::new, |why| format!("; {why}"));
            let names = [("cell", &*name), ("found", &*found), ("why", &*why)];
            all.push(CARD.expect_of("{cell}", &names, wrong(outcome, &cell)));
        }
        all.push(measure::complete(&CARD, outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let measured = || cells().filter_map(|cell| wrong(outcome, &cell));
        let right = measured().filter(|wrong| *wrong == 0.0).count();
        let sentence = format!(
            "Of {} servers in a situation doctor says of {right} what is so, in every round.",
            measured().count()
        );
        let mut blocks = views::meaning([sentence]);
        let heads = TRIALS.table.load.iter().map(|load| load.name.clone());
        let rows = servers().filter_map(|server| row(outcome, server));
        blocks.push(Block::Table(Table::new(
            "What doctor finds, by situation. ✗: it is not so, or not all.",
            heads,
            rows,
        )));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

fn row(outcome: &Outcome, server: &'static Server) -> Option<Row> {
    let loads = TRIALS.table.load.iter();
    let of_it: Vec<Cell> = loads.map(|load| Cell { server, load }).collect();
    let texts: Vec<_> = of_it.iter().map(|cell| told(outcome, cell)).collect();
    let bad = of_it.iter().enumerate().filter_map(|(nth, cell)| {
        let wrong = wrong(outcome, cell)?;
        (wrong > 0.0).then_some(nth + 1)
    });
    let bad = bad.collect();
    let is_measured = texts.iter().any(Option::is_some);
    let texts = texts.into_iter().map(Option::unwrap_or_default);
    is_measured.then(|| Row::named(&server.name, texts).marking(bad))
}
