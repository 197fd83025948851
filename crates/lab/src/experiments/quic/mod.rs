//! How many connections of QUIC fail where a server has several workers, by the way their packets are handed out.

mod cell;
mod clients;
mod flood;

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::json;
use toml::Table as Toml;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::present::{Block, Row, Table, number};
use crate::result::{Expectation, Outcome};
use crate::trials::server::{self, Server};
use crate::{measure, stats, views};

card!();

/// The experiment.
pub struct Quic;

/// Workers of each server, but for the ways that have one.
const WORKERS: usize = 4;
const LOST: &str = "lost";
const BUSIEST: &str = "busiest";
const TO_STOPPED: &str = "to_stopped";
const RATE: &str = "mb_per_s";

/// It says what happens beside the clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Situation {
    /// Nothing. It is asked how they are spread.
    New,
    /// A NAT gives them other ports.
    Rebind,
    /// They change to other addresses.
    Moved,
    /// The workers are replaced.
    Restart,
    /// A worker is stopped for a while.
    Stopped,
    /// First packets come that nobody goes on with.
    Flood,
    /// Nothing. It is asked how fast the downloads are.
    Throughput,
    /// Nothing. It is asked how long the programs take.
    Packets,
}

/// A situation and a server, with the ways that are measured.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    situation: Situation,
    server: String,
    ways: Vec<String>,
    connections: usize,
    /// Each connection gets so many bytes.
    #[serde(default)]
    bytes: u64,
    /// It gets them over so many milliseconds.
    #[serde(default)]
    ms: u64,
    /// Changes of its address.
    #[serde(default)]
    moves: usize,
    /// The path, where the server speaks HTTP/3.
    #[serde(default)]
    path: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    asked: Vec<Asked>,
    servers: Toml,
}

static FILE: LazyLock<File> = LazyLock::new(|| {
    toml::from_str(include_str!("asked.toml")).unwrap_or_else(|e| panic!("asked.toml: {e}"))
});

/// One of the ways of a row.
struct Variant {
    asked: &'static Asked,
    way: &'static str,
    server: &'static Server,
}

static VARIANTS: LazyLock<Vec<Variant>> = LazyLock::new(|| {
    let of = |asked: &'static Asked| {
        asked.ways.iter().map(move |way| {
            let name = format!("{}-{way}", asked.server);
            let server = server::named(&name, &FILE.servers);
            let server = server.unwrap_or_else(|| panic!("there is no server {name}"));
            Variant {
                asked,
                way,
                server: Box::leak(Box::new(server)),
            }
        })
    };
    FILE.asked.iter().flat_map(of).collect()
});

impl Situation {
    fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Rebind => "rebind",
            Self::Moved => "moved",
            Self::Restart => "restart",
            Self::Stopped => "stopped",
            Self::Flood => "flood",
            Self::Throughput => "throughput",
            Self::Packets => "packets",
        }
    }

    /// About how long it takes beside the downloads, in seconds.
    fn seconds(self) -> f64 {
        match self {
            Self::Restart => 45.0,
            Self::Moved => 15.0,
            _ => 6.0,
        }
    }
}

impl Variant {
    fn name(&self) -> String {
        let Asked {
            situation, server, ..
        } = self.asked;
        format!("{}/{server}/{}", situation.name(), self.way)
    }

    /// Whether nothing may be lost here. Where nginx is attached to, both generations read the same sockets during a reload:
    /// nobody outside can tell them apart.
    fn is_ours(&self) -> bool {
        match self.way {
            "attached" => self.asked.situation != Situation::Restart,
            way => ["steered", "one"].contains(&way),
        }
    }
}

const THROUGHPUT: &str = "throughput with --affinity quic / as it is";

impl Experiment for Quic {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut design = Design {
            rounds: if settings.quick { 1 } else { 3 },
            steady: RATE,
            parameters: parameters([("workers", json!(WORKERS))]),
            ..Design::default()
        };
        for variant in VARIANTS.iter() {
            let asked = variant.asked;
            let group = FILE.asked.iter().position(|one| std::ptr::eq(one, asked));
            let arm = Arm {
                name: variant.name(),
                group: group.unwrap_or(0),
                seconds: asked.situation.seconds() + asked.ms as f64 / 1e3,
            };
            design.offer(arm, &variant.name(), variant.server.lacks());
        }
        let [a, b] = ["one", "alone"].map(|way| format!("throughput/quinn/{way}"));
        design.compare([Pairing {
            name: THROUGHPUT.into(),
            a,
            b,
            metric: RATE.into(),
        }]);
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let variant = VARIANTS.iter().find(|one| one.name() == arm.name);
        let variant = variant.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        context.check()?;
        cell::measure(variant)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = Vec::new();
        for variant in VARIANTS.iter().filter(|one| one.is_ours()) {
            let asked = variant.asked;
            let names = [
                ("situation", asked.situation.name()),
                ("server", &*asked.server),
                ("way", variant.way),
            ];
            let of = |metric| outcome.values(&variant.name(), metric);
            let mut expect = |name, value| all.push(CARD.expect_of(name, &names, value));
            expect("{situation}-{server}-{way}-lost", stats::sum(of(LOST)));
            match asked.situation {
                Situation::New => expect("{server}-{way}-even", stats::most(of(BUSIEST))),
                Situation::Stopped => expect("{server}-stopped", stats::sum(of(TO_STOPPED))),
                _ => {}
            }
        }
        all.push(CARD.expect("throughput", outcome.ratio(THROUGHPUT)));
        all.push(measure::complete(&CARD, outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let told = ["throughput", "packets"].map(|key| CARD.say(key, outcome, &[]));
        let mut blocks = views::meaning(told.into_iter().flatten());
        let ways = [
            "shared",
            "reuseport",
            "alone",
            "no-number",
            "steered",
            "attached",
        ];
        let rows = FILE
            .asked
            .iter()
            .filter_map(|asked| row(outcome, asked, &ways));
        let caption = "Connections that failed, of those that were tried, in all rounds; in brackets the most of one worker over its even share, in the worst round.";
        blocks.push(Block::Table(Table::new(caption, ways, rows)));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

fn row(outcome: &Outcome, asked: &Asked, ways: &[&str]) -> Option<Row> {
    let cell = |way: &&str| {
        let name = format!("{}/{}/{way}", asked.situation.name(), asked.server);
        let of = |metric| outcome.values(&name, metric);
        let (lost, tried) = (stats::sum(of(LOST))?, stats::sum(of("tried"))?);
        let busiest = stats::most(of(BUSIEST)).filter(|_| asked.situation == Situation::New);
        let spread = busiest.map_or_else(String::new, |most| format!(" ({})", number(most)));
        Some(format!("{lost} of {tried}{spread}"))
    };
    let cells: Vec<Option<String>> = ways.iter().map(cell).collect();
    let is_measured = cells.iter().any(Option::is_some);
    let name = format!("{}, {}", asked.situation.name(), asked.server);
    is_measured.then(|| Row::named(name, cells.into_iter().map(Option::unwrap_or_default)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{failing, outcome, ratio};

    #[test]
    fn each_way_has_a_server() {
        for variant in VARIANTS.iter() {
            let launch = variant.server.launch(WORKERS, &[]);
            assert!(launch.is_ok(), "{}", variant.name());
        }
    }

    #[test]
    fn each_limit_bites() {
        let of = |lost: f64, busiest: f64, stopped: f64, rate: f64| {
            let metrics = [
                (LOST, vec![lost]),
                (BUSIEST, vec![busiest]),
                (TO_STOPPED, vec![stopped]),
            ];
            let metrics: Vec<_> = metrics
                .iter()
                .map(|(name, all)| (*name, &all[..]))
                .collect();
            let names: Vec<String> = VARIANTS.iter().map(Variant::name).collect();
            let all: Vec<_> = names.iter().map(|name| (&**name, &metrics[..])).collect();
            let mut outcome = outcome(&all);
            outcome.comparisons = vec![ratio(THROUGHPUT, rate)];
            failing(Quic.judge(&outcome))
        };
        assert_eq!(of(0.0, 1.0, 0.0, 0.99), Vec::<String>::new());
        assert!(of(1.0, 1.0, 0.0, 0.99).contains(&"new-quinn-steered-lost".to_owned()));
        assert!(of(0.0, 1.2, 0.0, 0.99).contains(&"quinn-steered-even".to_owned()));
        assert_eq!(of(0.0, 1.0, 1.0, 0.99), ["quinn-stopped"]);
        assert_eq!(of(0.0, 1.0, 0.0, 0.9), ["throughput"]);
    }
}
