//! Whether steering makes any server worse than it is.

mod cell;
mod clients;
mod judge;
mod moves;
mod present;
mod sample;

use serde_json::json;
use std::sync::LazyLock;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::present::Block;
use crate::result::{Expectation, Outcome, Variant};
use crate::trials::Trials;
use crate::trials::load::Load;
use crate::trials::server::{How, Server, Who};
use crate::{answers, views};

card!();

/// The servers and the situations, which are its loads.
pub static TRIALS: LazyLock<Trials> = LazyLock::new(|| Trials::read(&CARD));

/// The experiment.
pub struct Harm;

/// The ways to hand out connections, that without us first.
const WAYS: [How; 8] = [
    How::AsItIs,
    How::Attach,
    How::AttachRescue,
    How::Run,
    How::Split,
    How::RunCommand,
    How::PlainAttach,
    How::PlainRunCommand,
];
/// The situations in which the workers of one queue are steered in every way and by every user: they depend on which worker
/// is woken.
const WHO_IS_WOKEN: [&str; 4] = ["kept", "stuck", "burst", "storm"];
/// Workers are stopped for some milliseconds, one after the other, until queues have been moved many times.
const MOVES: &str = "moves";
/// It is restarted, or reloaded.
const RESTART: &str = "restart";
/// It is restarted while clients keep connections. A client that loses its connection opens it again.
const ROLL: &str = "roll";

/// One server in one situation, in one way.
#[derive(Debug, Clone, Copy)]
struct Cell {
    server: &'static Server,
    load: &'static Load,
}

/// Each server in each way.
static SERVERS: LazyLock<Vec<Server>> = LazyLock::new(|| {
    let mut all: Vec<Server> = Vec::new();
    for variant in TRIALS.variants() {
        let Who::Other(server) = variant.who else {
            continue;
        };
        if all.iter().all(|one| one.name != server.name) {
            all.extend(WAYS.map(|how| server.with(how)));
        }
    }
    all
});

impl Cell {
    /// First and middle part of the variants' names.
    fn of(&self) -> String {
        format!("{}/{}", self.server.name, self.load.name)
    }

    fn name(&self) -> String {
        format!("{}/{}", self.of(), self.server.how.name())
    }

    fn is(&self, situation: &str) -> bool {
        self.load.name == situation
    }

    /// The same server in the same situation, in another way.
    fn with(&self, how: How) -> Self {
        let mut all = SERVERS.iter();
        let same = all.find(|one| one.name == self.server.name && one.how == how);
        Self {
            server: same.unwrap_or(self.server),
            ..*self
        }
    }

    /// Whether its server can be served in its way.
    fn fits(&self) -> bool {
        let server = self.server;
        match server.how {
            How::AsItIs => true,
            How::Split => server.shared && !server.is_one_queue(),
            _ if server.shared && !server.is_one_queue() => false,
            // It moves nothing.
            How::Attach => !self.is(MOVES),
            // One queue need not be moved, and that of a datagram socket cannot.
            How::AttachRescue => server.scheme.is_empty() && !server.is_one_queue(),
            How::Run => !server.run.is_empty(),
            How::RunCommand | How::PlainAttach | How::PlainRunCommand => {
                server.is_one_queue() && WHO_IS_WOKEN.iter().any(|name| self.is(name))
            }
        }
    }

    /// The options of steering in its situation.
    fn options(&self) -> &'static [&'static str] {
        match self.is(MOVES) {
            true => moves::OPTIONS,
            false => &[],
        }
    }
}

/// All of them, those of a server together, those of one situation in the order of the ways.
fn cells() -> impl Iterator<Item = Cell> {
    SERVERS.iter().step_by(WAYS.len()).flat_map(|server| {
        let loads = TRIALS.table.load.iter();
        let here = loads.filter(|load| load.servers.contains(&server.name));
        here.flat_map(|load| ways(Cell { server, load }))
    })
}

/// A server in a situation, in each way that fits.
fn ways(cell: Cell) -> impl Iterator<Item = Cell> {
    let all = WAYS.into_iter().map(move |how| cell.with(how));
    all.filter(Cell::fits)
}

/// Those of [`cells`] that are ours.
fn ours() -> impl Iterator<Item = Cell> {
    cells().filter(|cell| cell.server.how != How::AsItIs)
}

/// The comparison of a way with the server as it is.
fn pairing(cell: &Cell, metric: &str) -> Pairing {
    let a = cell.name();
    Pairing {
        name: format!("{a}: {metric} / as it is"),
        a,
        b: cell.with(How::AsItIs).name(),
        metric: metric.into(),
    }
}

impl Experiment for Harm {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let quick = settings.quick;
        let mut design = TRIALS.plan(quick);
        let moves = parameters([("moves", json!(moves::wanted(quick)))]);
        design.parameters.extend(moves);
        let mut groups: Vec<String> = Vec::new();
        for cell in cells() {
            if groups.last() != Some(&cell.of()) {
                groups.push(cell.of());
            }
            let arm = Arm {
                name: cell.name(),
                group: groups.len(),
                seconds: cell.load.typical_s(quick) + 4.0,
            };
            design.offer(arm, &cell.name(), cell.server.lacks());
        }
        design.compare(ours().flat_map(|cell| judge::RATIOS.map(|metric| pairing(&cell, metric))));
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let cell = cells().find(|cell| cell.name() == arm.name);
        let cell = cell.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        cell::measure(&cell, context)
    }

    /// Of 150 cells, some are beyond the spread of five rounds by chance.
    fn doubtful(&self, outcome: &Outcome) -> Vec<String> {
        judge::all_worse(outcome)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = judge::all(outcome);
        // Parts of it have only servers that count nowhere.
        let counts =
            |variant: &Variant| !outcome.values(&variant.name, answers::BY_SERVER).is_empty();
        if outcome.variants.iter().any(counts) {
            all.push(answers::agree(outcome));
        }
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning([present::meaning(outcome)]);
        blocks.extend(present::summaries(outcome).map(Block::Table));
        blocks.extend(present::servers(outcome));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}
