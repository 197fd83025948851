//! Whether what Wakeone tells the operators of other projects' servers helps.

mod client;

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Value, json};
use toml::Table as Toml;
use wakeone_model::advice;

use crate::card::{Card, card};
use crate::error::{Error, joined};
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Row, Table};
use crate::result::{Expectation, Outcome};
use crate::trials::server::{self, How, Server};
use crate::under_test::ServerUnderTest;
use crate::{measure, stats, verdict, views};

card!();

/// The experiment.
pub struct Advice;

/// Workers of each server.
const WORKERS: usize = 4;
const BUSIEST: &str = "busiest_over_even";
const WOKEN: &str = "wakeups_per_connection";
const UNTOLD: &str = "untold";
const UNANSWERED: &str = "unanswered";

/// A server whose advice is tried.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tried {
    name: String,
    /// A part of its advice.
    says: String,
    /// The first bytes that a client sends.
    #[serde(default = "http")]
    hello: String,
    /// Whether it keeps connections.
    #[serde(default = "yes")]
    kept: bool,
    /// Whether it is attached to as it is.
    #[serde(default)]
    shared: bool,
    /// The user of its sockets, where that is not the one who attaches.
    #[serde(default)]
    owner: String,
}

fn http() -> String {
    "GET / HTTP/1.1\r\nHost: a\r\n\r\n".into()
}

fn yes() -> bool {
    true
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    tried: Vec<Tried>,
    servers: Toml,
}

static FILE: LazyLock<File> = LazyLock::new(|| {
    toml::from_str(include_str!("servers.toml")).unwrap_or_else(|e| panic!("servers.toml: {e}"))
});

/// A server in one of the ways that are measured.
struct Variant {
    tried: &'static Tried,
    way: &'static str,
    server: &'static Server,
}

const AS_IT_IS: &str = "as-it-is";
const ATTACHED: &str = "attached";
const ADVISED: &str = "advised";

impl Variant {
    fn name(&self) -> String {
        format!("{}/{}", self.tried.name, self.way)
    }
}

static VARIANTS: LazyLock<Vec<Variant>> = LazyLock::new(|| {
    let row = |name: &str| {
        let server = server::named(name, &FILE.servers);
        server.unwrap_or_else(|| panic!("there is no server {name}"))
    };
    let of = |tried: &'static Tried| {
        let as_it_is = row(&tried.name);
        let attached = tried.shared.then(|| as_it_is.with(How::Attach));
        let advised = row(&format!("{}-advised", tried.name));
        let all = [
            (AS_IT_IS, Some(as_it_is)),
            (ATTACHED, attached),
            (ADVISED, Some(advised)),
        ];
        let variant = move |(way, server): (&'static str, Option<Server>)| {
            let server: &'static Server = Box::leak(Box::new(server?));
            Some(Variant { tried, way, server })
        };
        all.into_iter().filter_map(variant)
    };
    FILE.tried.iter().flat_map(of).collect()
});

impl Experiment for Advice {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut design = Design {
            rounds: if settings.quick { 1 } else { 3 },
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("connections", json!(client::CONNECTIONS)),
            ]),
            ..Design::default()
        };
        for (group, variant) in VARIANTS.iter().enumerate() {
            let arm = Arm {
                name: variant.name(),
                group,
                seconds: 12.0,
            };
            design.offer(arm, &variant.name(), variant.server.lacks());
        }
        design
    }

    fn measure(&self, arm: &Arm, _context: &mut Context<'_>) -> Result<Sample, Error> {
        let variant = VARIANTS.iter().find(|one| one.name() == arm.name);
        let variant = variant.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        measured(variant)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = Vec::new();
        for tried in &FILE.tried {
            let of = |way: &str, metric| outcome.values(&format!("{}/{way}", tried.name), metric);
            let names = [("server", &*tried.name)];
            let mut expect = |name, value| all.push(CARD.expect_of(name, &names, value));
            expect("{server}-told", stats::sum(of(AS_IT_IS, UNTOLD)));
            match tried.kept {
                true => expect("{server}-even", worst(of(ADVISED, BUSIEST))),
                false => expect("{server}-wakes", worst(of(ADVISED, WOKEN))),
            }
            if tried.shared && tried.kept {
                expect("{server}-attached-even", worst(of(ATTACHED, BUSIEST)));
            }
            expect("{server}-answers", stats::sum(of(ADVISED, UNANSWERED)));
        }
        all.push(measure::complete(&CARD, outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let sentence = "The busiest worker, in even shares of four, and in brackets how many workers a connection wakes; the worst round.";
        let mut blocks = views::meaning([sentence.to_owned()]);
        let heads = ["as it is", "attached", "as advised", "the advice"];
        let rows = FILE.tried.iter().filter_map(|tried| row(outcome, tried));
        blocks.push(Block::Table(Table::new("64 kept connections", heads, rows)));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

fn worst(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| stats::max(values))
}

fn row(outcome: &Outcome, tried: &Tried) -> Option<Row> {
    let cell = |way: &str| {
        let of = |metric| worst(outcome.values(&format!("{}/{way}", tried.name), metric));
        let busiest = of(BUSIEST)?;
        let woken = of(WOKEN).map_or_else(String::new, |woken| format!(" ({woken:.1})"));
        Some(format!("{busiest:.2}{woken}"))
    };
    let cells = [AS_IT_IS, ATTACHED, ADVISED].map(cell);
    let is_measured = cells.iter().any(Option::is_some);
    let as_it_is = outcome.variant(&format!("{}/{AS_IT_IS}", tried.name));
    let told = as_it_is.and_then(|one| one.notes.get("advice").cloned());
    let cells = cells
        .into_iter()
        .chain([told])
        .map(Option::unwrap_or_default);
    is_measured.then(|| Row::named(&tried.name, cells))
}

fn measured(variant: &Variant) -> Result<Sample, Error> {
    let owner = match variant.tried.owner.as_str() {
        "" => Vec::new(),
        owner => vec!["--owner", owner],
    };
    let launch = variant.server.launch(WORKERS, &owner)?;
    let mut server = ServerUnderTest::start(launch)?;
    let address = server.address;
    let (clients, said) = std::thread::scope(|scope| {
        let clients = scope.spawn(move || client::keep(address, variant.tried.hello_bytes()));
        let said = verdict::doctor(address, client::WATCHED);
        (clients.join(), said)
    });
    let (answered, said) = (joined(clients)?, said?);
    let unanswered = client::CONNECTIONS - answered;
    let answers = &mut server.answers;
    answers.client_counted(answered as u64, unanswered as u64);
    let mut sample = Sample::default();
    let taken = taken(&said);
    let most = taken.iter().max().copied().unwrap_or(0);
    let all: u64 = taken.iter().sum();
    sample.put("taken", "count", all as f64);
    let even = (all as f64 / WORKERS as f64).max(1.0);
    sample.put(BUSIEST, "ratio", most as f64 / even);
    if let Some(woken) = said["totals"]["wakeups_per_connection"].as_f64() {
        sample.put(WOKEN, "ratio", woken);
    }
    sample.put(UNANSWERED, "count", unanswered as f64);
    if variant.way == AS_IT_IS {
        let name = said["workers"][0]["name"].as_str().unwrap_or_default();
        let told = advice::own_sockets(name, &address.to_string());
        let is_told = told.contains(&variant.tried.says);
        sample.put(UNTOLD, "count", f64::from(u8::from(!is_told)));
        sample.notes.insert("advice".into(), told);
    }
    server.stop(&mut sample)?;
    Ok(sample)
}

/// How many connections each worker took, as doctor counts.
fn taken(said: &Value) -> Vec<u64> {
    let workers = said["workers"].as_array().into_iter().flatten();
    workers.filter_map(|one| one["taken"].as_u64()).collect()
}

impl Tried {
    /// Each character is a byte.
    fn hello_bytes(&self) -> Vec<u8> {
        self.hello.chars().map(|one| one as u8).collect()
    }
}
