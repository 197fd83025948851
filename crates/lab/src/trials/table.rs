//! An experiment as data: the table `trials` of its card, with the servers looked up.

use serde::Deserialize;
use std::collections::BTreeMap;

use super::load::Load;
use super::server::{self, Server, Who};
use super::sizes::Sizes;
use crate::card::Card;
use crate::experiment::{Design, parameters};
use crate::template;
use crate::ways::Way;

/// The loads, the servers, the judgements and the presentation of an experiment.
#[derive(Debug)]
pub struct Trials {
    /// Its card.
    pub card: &'static Card,
    /// The rest of the table.
    pub table: Table,
    servers: BTreeMap<String, Server>,
}

/// The table `trials` of a card.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Table {
    /// Rounds.
    pub rounds: Sizes<usize>,
    /// Workers of each server.
    pub workers: usize,
    /// The metric that should be the same in each round of a variant.
    #[serde(default)]
    pub steady: String,
    /// The loads.
    pub load: Vec<Load>,
    /// Rows of servers of its own, and rows that differ from those of `servers.toml`.
    #[serde(default)]
    servers: toml::Table,
    /// The numbers of its expectations.
    #[serde(default)]
    pub judge: Vec<Judge>,
    /// The expectations of every variant.
    #[serde(default)]
    pub sound: Vec<Sound>,
    /// The presentation.
    #[serde(default)]
    pub show: Show,
}

/// How the number of an expectation is made. Where there are several, the one that is worst by its bound counts.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Judge {
    /// The expectation of the card.
    pub expect: String,
    /// The metric.
    pub metric: String,
    /// Variants above and below a line: the median of the ratios of their rounds.
    #[serde(default)]
    pub ratio: Vec<(String, String)>,
    /// Variants, and those that are taken from them: all rounds together.
    #[serde(default)]
    pub minus: Vec<(String, String)>,
    /// Variants: each round for itself.
    #[serde(default)]
    pub worst: Vec<String>,
    /// Variants: the sum of all rounds.
    #[serde(default)]
    pub sum: Vec<String>,
    /// The divisor of the number.
    #[serde(default = "one")]
    pub per: f64,
    /// It is made for each of these variants. `{each}` stands for its name, `{of}` for that of its load, `{who}` for that of its
    /// server. `{load}` stands for each load.
    #[serde(default)]
    pub each: Vec<String>,
    /// Whether it is left out where nothing of it was measured.
    #[serde(default)]
    pub optional: bool,
}

fn one() -> f64 {
    1.0
}

/// An expectation of every variant of an experiment.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sound {
    /// No request fails.
    NoErrors,
    /// The server's count agrees with the client's.
    CountsAgree,
    /// No connection is still counted as open.
    #[serde(rename = "active-returns-to-0")]
    NoneActive,
}

/// What is shown.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Show {
    /// The sentences of the card, in order.
    pub say: Vec<String>,
    /// The columns of a load's table: a head, and a metric behind what is shown of it, as `sum lost`. Without that it is the
    /// median.
    pub columns: Vec<(String, String)>,
    /// The charts of a load: `percentiles`, `shares`, or a metric, which is drawn as bars.
    pub charts: Vec<String>,
    /// Metrics that are shown over the loads, whose names are numbers.
    pub over: Vec<String>,
    /// The name of those numbers.
    pub x: String,
}

impl Judge {
    /// It, for each of those that it is made for, with what stands for their names.
    pub fn all(&self, loads: &[&str]) -> Vec<(Vec<(&'static str, String)>, Self)> {
        let one = |each: &str| {
            let names = names(each);
            (names.clone(), self.filled(&names, loads))
        };
        match self.each.is_empty() {
            true => vec![one("")],
            false => self.each.iter().map(|each| one(each)).collect(),
        }
    }

    fn filled(&self, names: &[(&'static str, String)], loads: &[&str]) -> Self {
        let fill = |text: &str| template::fill(text, names.iter().map(|(n, v)| (*n, v)));
        let over = |text: &str| {
            if text.contains("{load}") {
                loads
            } else {
                &[""]
            }
        };
        let at = |text: &str, load: &str| fill(text).replace("{load}", load);
        let one = |all: &[String]| -> Vec<String> {
            let all = all.iter();
            all.flat_map(|text| over(text).iter().map(|load| at(text, load)))
                .collect()
        };
        let pairs = |all: &[(String, String)]| -> Vec<(String, String)> {
            let all = all.iter();
            all.flat_map(|(a, b)| over(a).iter().map(|load| (at(a, load), at(b, load))))
                .collect()
        };
        Self {
            ratio: pairs(&self.ratio),
            minus: pairs(&self.minus),
            worst: one(&self.worst),
            sum: one(&self.sum),
            ..self.clone()
        }
    }
}

/// The names that stand for a variant and its parts.
fn names(each: &str) -> Vec<(&'static str, String)> {
    let (of, who) = each.rsplit_once('/').unwrap_or(("", each));
    vec![
        ("each", each.to_owned()),
        ("arm", each.replace('/', "-")),
        ("of", of.to_owned()),
        ("who", who.to_owned()),
    ]
}

/// A server under a load.
#[derive(Debug, Clone, Copy)]
pub struct Variant {
    /// The load.
    pub load: &'static Load,
    /// The server.
    pub who: Who,
    /// Whether the load is the only one, and not named.
    pub alone: bool,
}

impl Variant {
    /// Its name.
    pub fn name(&self) -> String {
        match self.alone {
            true => self.who.name().to_owned(),
            false => format!("{}/{}", self.load.name, self.who.name()),
        }
    }
}

impl Trials {
    /// Reads the table of a card.
    ///
    /// # Panics
    /// When it is none, or names a server that there is not. A test reads each.
    pub fn read(card: &'static Card) -> Self {
        let table = toml::Value::Table(card.trials.clone()).try_into::<Table>();
        let table = table.unwrap_or_else(|e| panic!("{}: [trials]: {e}", card.name));
        let named = table.load.iter().flat_map(|load| &load.servers);
        let others = named.filter(|name| Way::named(name).is_none());
        let server = |name: &String| {
            let found = server::named(name, &table.servers);
            let found = found.unwrap_or_else(|| panic!("{}: no server {name}", card.name));
            (name.clone(), found)
        };
        Self {
            card,
            servers: others.map(server).collect(),
            table,
        }
    }

    /// The beginning of a plan: rounds, and the numbers that a reader needs to do it again.
    pub fn plan(&self, quick: bool) -> Design {
        let mut design = Design {
            rounds: self.table.rounds.of(quick),
            parameters: parameters([("workers", self.table.workers.into())]),
            ..Design::default()
        };
        let loads = self.table.load.iter();
        let loads = loads.flat_map(|load| load.parameters(quick));
        design.parameters.extend(loads);
        design
    }

    /// The load of this name.
    ///
    /// # Panics
    /// When there is none.
    pub fn load(&self, name: &str) -> &Load {
        let found = self.table.load.iter().find(|load| load.name == name);
        found.unwrap_or_else(|| panic!("{}: no load {name}", self.card.name))
    }

    /// The server of this name.
    ///
    /// # Panics
    /// When no load has it.
    pub fn who(&'static self, name: &str) -> Who {
        match Way::named(name) {
            Some(way) => Who::Ours(way),
            None => Who::Other(&self.servers[name]),
        }
    }

    /// The variants, in order.
    pub fn variants(&'static self) -> impl Iterator<Item = Variant> {
        let alone = self.table.load.len() == 1;
        self.table.load.iter().flat_map(move |load| {
            let servers = load.servers.iter();
            servers.map(move |name| Variant {
                load,
                who: self.who(name),
                alone,
            })
        })
    }

    /// The names of the loads, those that are left out with `--quick` only without it.
    pub fn loads(&self, quick: bool) -> Vec<&str> {
        let all = self.table.load.iter().filter(|load| !(quick && load.whole));
        all.map(|load| load.name.as_str()).collect()
    }

    /// Workers of a server under this load.
    pub fn workers_of(&self, load: &Load) -> usize {
        load.workers.unwrap_or(self.table.workers)
    }
}
