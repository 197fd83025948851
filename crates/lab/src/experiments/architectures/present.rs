//! The source's table and ours, one above the other, and which of its findings still hold.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use wakeone_serve::Model;

use super::setup::{KINDS, Kind, LATER, PUBLISHED};
use super::{CARD, curve};
use crate::card::Bound;
use crate::present::{Block, Chart, Line, Row, Style, Table, cell, number};
use crate::published::Published;
use crate::result::Outcome;
use crate::views;

/// A rate varies widely when its deviation within the measured time is more than this share of it.
const WIDE: f64 = 0.5;
const METRIC: &str = "throughput_per_s";

/// A claim of the source's table: the ratio of two of its cells, each an architecture and its clients.
#[derive(Debug, Deserialize)]
pub struct Claim {
    /// How code refers to it.
    pub name: String,
    /// The claim as a sentence.
    says: String,
    above: (String, usize),
    below: (String, usize),
    /// The limit up to which a ratio still says so.
    limit: String,
}

/// The source's findings, in its own order.
pub static CLAIMS: LazyLock<Vec<Claim>> = LazyLock::new(|| {
    let all: BTreeMap<String, Vec<Claim>> =
        toml::from_str(include_str!("claims.toml")).unwrap_or_else(|e| panic!("claims.toml: {e}"));
    all.into_values().flatten().collect()
});

impl Claim {
    fn ratio(&self, value: impl Fn(Model, usize) -> Option<f64>) -> Option<f64> {
        let at = |(name, clients): &(String, usize)| {
            let mut models = Model::ALL.into_iter();
            value(models.find(|model| model.name() == name)?, *clients)
        };
        Some(at(&self.above)? / at(&self.below)?)
    }

    fn holds(&self, ratio: f64) -> bool {
        Bound::parse(&self.limit).is_some_and(|limit| limit.holds(ratio))
    }

    /// The source's ratio.
    pub fn published(&self) -> Option<f64> {
        let published = Published::parse(CARD.published);
        self.ratio(|model, clients| at(&published.curve(model.name(), METRIC), clients))
    }

    /// The same ratio in our measurement.
    pub fn measured(&self, outcome: &Outcome, kind: Kind) -> Option<f64> {
        self.ratio(|model, clients| at(&curve(outcome, kind, model), clients))
    }
}

fn at(curve: &[(f64, f64)], clients: usize) -> Option<f64> {
    curve.iter().find(|p| p.0 == clients as f64).map(|p| p.1)
}

/// Everything, in reading order.
pub fn present(outcome: &Outcome) -> Vec<Block> {
    let kinds: Vec<Kind> = KINDS
        .into_iter()
        .filter(|kind| !clients(outcome, *kind).is_empty())
        .collect();
    let told = meaning(outcome, &kinds).into_iter();
    let mut blocks = views::meaning(told.chain([conditions(outcome)]));
    blocks.push(Block::Table(claims(outcome, &kinds)));
    blocks.push(Block::Chart(published_chart()));
    for kind in kinds {
        blocks.push(Block::Heading(match kind {
            Kind::Embedded => "The guest book in files of the server".into(),
            Kind::Redis => "The guest book in Redis, as the source had it".into(),
        }));
        blocks.push(Block::Chart(chart(
            outcome,
            kind,
            &PUBLISHED,
            "The source's architectures, here",
        )));
        blocks.push(Block::Table(table(outcome, kind, &PUBLISHED)));
        let measured = |model: &Model| !curve(outcome, kind, *model).is_empty();
        if !LATER.iter().any(measured) {
            continue;
        }
        let mut later = vec![Model::Prethreaded, Model::Epoll];
        later.extend(LATER);
        blocks.push(Block::Chart(chart(
            outcome,
            kind,
            &later,
            "What came after, beside the source's best two",
        )));
        blocks.push(Block::Table(table(outcome, kind, &LATER)));
    }
    blocks.extend(outcome.left_out().map(Block::Paragraph));
    blocks
}

/// The numbers of clients at which anything was measured, rising.
fn clients(outcome: &Outcome, kind: Kind) -> Vec<usize> {
    let mut all: Vec<usize> = super::cells(outcome)
        .into_iter()
        .filter(|c| c.kind == kind)
        .map(|c| c.clients)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Tells which of the source's findings still hold, and which architecture is ahead today.
fn meaning(outcome: &Outcome, kinds: &[Kind]) -> Option<String> {
    let kind = *kinds.first()?;
    let checked: Vec<(&Claim, bool)> = CLAIMS
        .iter()
        .filter_map(|claim| Some((claim, claim.holds(claim.measured(outcome, kind)?))))
        .collect();
    let gone = checked.iter().filter(|c| !c.1);
    let gone: Vec<&str> = gone.map(|c| c.0.says.as_str()).collect();
    let most = *clients(outcome, kind).last()?;
    let mut rates: Vec<(Model, f64)> = Model::ALL
        .into_iter()
        .filter_map(|model| Some((model, at(&curve(outcome, kind, model), most)?)))
        .collect();
    rates.sort_by(|a, b| b.1.total_cmp(&a.1));
    let (first, last) = (rates.first()?, rates.last()?);
    let seen = match (checked.len(), gone.len()) {
        (0, _) => String::new(),
        (all, 0) => format!("All {all} findings of the source that were checked are seen here. "),
        (all, n) => format!(
            "Of {all} findings of the source, {} seen here. Not seen here, with the guest book in {}: “{}” ",
            match all - n {
                1 => "1 is".to_owned(),
                still => format!("{still} are"),
            },
            kind.name(),
            gone.join("” “"),
        ),
    };
    Some(format!(
        "{seen}With {} clients, {} is ahead with {} requests/s and {} last with {}.",
        number(most as f64),
        first.0.name(),
        number(first.1),
        last.0.name(),
        number(last.1),
    ))
}

/// The reason why a reader cannot compare the figures one to one.
fn conditions(outcome: &Outcome) -> String {
    let cpus = outcome.environment.cpus;
    format!(
        "The source drove its servers over a real network with ab, and each page waited for Redis: an iterative server, which answers 7 requests/s there, mostly waits, and gains most from company. Here there is no network; client, server and Redis share {cpus} CPUs, so an architecture that needs more CPU time also slows the client that measures it, and one that waits for nothing gains nothing from more workers. Compare shapes, not heights."
    )
}

/// The table of the claims, narrow enough for a telephone: the compared cells share a column with the limit, and our
/// ratio shares one with the verdict.
fn claims(outcome: &Outcome, kinds: &[Kind]) -> Table {
    let row = |claim: &Claim| {
        let of = |(name, clients): &(String, usize)| format!("{name}, {clients}");
        let (above, below, limit) = (of(&claim.above), of(&claim.below), &claim.limit);
        let mut cells = vec![
            format!("{above} / {below}: {limit}"),
            cell(claim.published()),
        ];
        cells.extend(kinds.iter().map(|kind| {
            let ratio = claim.measured(outcome, *kind);
            let seen = match ratio {
                Some(ratio) if claim.holds(ratio) => " yes",
                Some(_) => " no",
                None => "",
            };
            format!("{}{seen}", cell(ratio))
        }));
        Row::ours(cells)
    };
    Table::new(
"What the source's table says, as ratios of its cells, and the same ratios here, with the guest book in either store; “yes” where the finding is still seen.",
        ["source"].into_iter().chain(kinds.iter().map(|kind| kind.name())),
        CLAIMS.iter().map(row),
    )
    .by("ratio, clients: limit")
}

/// Every cell of these architectures: the source's, where it has them, and ours.
fn table(outcome: &Outcome, kind: Kind, models: &[Model]) -> Table {
    let published = Published::parse(CARD.published);
    let mut rows = Vec::new();
    for clients in clients(outcome, kind) {
        let theirs = |model: &Model| {
            let figure = published
                .0
                .iter()
                .find(|f| f.series == model.name() && f.x == Some(clients as f64));
            figure.map_or_else(String::new, |f| {
                f.value.map_or_else(|| "wide".into(), number)
            })
        };
        let mut cells = vec![format!("(published) {}", number(clients as f64))];
        cells.extend(models.iter().map(theirs));
        if cells.iter().skip(1).any(|cell| !cell.is_empty()) {
            rows.push(Row::published(cells));
        }
        let ours = |model: &Model| {
            let cell = super::Cell {
                kind,
                clients,
                model: *model,
            };
            let of = |metric: &str| outcome.median(&cell.name(), metric);
            of(METRIC).map_or_else(String::new, |rate| {
                let wide = of("rate_variation").is_some_and(|v| v > WIDE);
                format!("{}{}", number(rate), if wide { " wide" } else { "" })
            })
        };
        let mut cells = vec![number(clients as f64)];
        cells.extend(models.iter().map(ours));
        rows.push(Row::ours(cells));
    }
    let caption = format!(
        "Requests/s, guest book in {}. “wide”: the source's “wide variations”; ours, where the rate deviates by more than half of itself within the measured time.",
        kind.name()
    );
    Table::new(caption, models.iter().map(|model| model.name()), rows).by("clients")
}

fn colour(model: Model, among: &[Model]) -> usize {
    among.iter().position(|m| *m == model).unwrap_or(0)
}

fn published_chart() -> Chart {
    let published = Published::parse(CARD.published);
    let series = PUBLISHED.map(|model| {
        (
            Style::published(model.name(), colour(model, &PUBLISHED)),
            published.curve(model.name(), METRIC),
        )
    });
    lines(
        "Published: requests/s over the number of clients.",
        series.into(),
    )
}

fn chart(outcome: &Outcome, kind: Kind, models: &[Model], title: &str) -> Chart {
    let line = |model: &Model| {
        let style = Style::ours(model.name(), colour(*model, models));
        (style, curve(outcome, kind, *model))
    };
    lines(
        &format!("{title}: requests/s over the number of clients."),
        models.iter().map(line).collect(),
    )
}

fn lines(title: &str, series: Vec<Line>) -> Chart {
    let axes = ("simultaneous clients", "requests/s", true);
    let note = "Higher is better; both axes are logarithmic.";
    Chart::lines(title, note, axes, series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_says_all_that_it_is_said_to() {
        for claim in CLAIMS.iter() {
            let ratio = claim.published().expect(&claim.name);
            assert!(claim.holds(ratio), "{}: {ratio}", claim.name);
        }
    }
}
