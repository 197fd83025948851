//! The experiments, a folder each: the published numbers, the measurement and the judgement.

mod accept_lock;
mod advice;
mod architectures;
mod cost;
mod cycle;
mod doctor;
mod harm;
mod herd;
mod quic;
mod reopen;
pub mod simulated;
pub mod simulator;
mod spread;
mod theory;
mod throughput;
mod tills;
mod udp_locks;
pub mod udp_readers;

use std::sync::LazyLock;

use crate::card::Card;
use crate::error::Error;
use crate::experiment::Experiment;
use crate::trials::{Data, Trials};

/// An experiment that is its card, in this folder.
macro_rules! data {
    ($folder:literal) => {{
        static CARD: LazyLock<Card> = LazyLock::new(|| {
            let card = include_str!(concat!($folder, "/card.toml"));
            Card::read(
                card,
                include_str!(concat!($folder, "/README.md")),
                NONE_PUBLISHED,
            )
        });
        static TRIALS: LazyLock<Trials> = LazyLock::new(|| Trials::read(&CARD));
        Data(&TRIALS)
    }};
}
/// The head of a CSV of published figures.
const NONE_PUBLISHED: &str = "series,x,metric,unit,value,note\n";

static KEPT: Data = data!("kept");
static OVERLOAD: Data = data!("overload");
static RESTART: Data = data!("restart");
static NGINX: Data = data!("nginx");
static REFERENCE: Data = data!("reference");
/// One of two workers is busy with something else, which other experiments use too.
pub static PINNED: Data = data!("pinned");

/// All experiments, in the best order to read them.
pub fn all() -> &'static [&'static dyn Experiment] {
    static ALL: [&dyn Experiment; 24] = [
        &herd::Herd,
        &throughput::Throughput,
        &accept_lock::AcceptLock,
        &spread::Spread,
        &tills::Tills,
        &KEPT,
        &cycle::Cycle,
        &architectures::Architectures,
        &OVERLOAD,
        &RESTART,
        &NGINX,
        &PINNED,
        &harm::Harm,
        &doctor::Doctor,
        &advice::Advice,
        &REFERENCE,
        &udp_readers::UdpReaders,
        &udp_locks::UdpLocks,
        &quic::Quic,
        &reopen::Reopen,
        &cost::Cost,
        &theory::Theory,
        &simulator::Simulator,
        &simulated::Simulated,
    ];
    &ALL
}

/// The experiment of this name.
///
/// # Errors
/// When there is none.
pub fn find(name: &str) -> Result<&'static dyn Experiment, Error> {
    let named = all().iter().copied().find(|e| e.card().name == name);
    named.ok_or_else(|| Error::Unknown(name.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Settings;
    use crate::published::Published;
    use crate::result::{Expectation, Outcome, tests};
    use crate::store::Store;
    use crate::trials::judge::judge;
    use crate::trials::table::Judge;
    use std::collections::BTreeSet;

    #[test]
    fn every_experiment_is_whole() {
        let mut names = BTreeSet::new();
        for experiment in all() {
            let card = experiment.card();
            assert!(names.insert(&card.name), "{} is there twice", card.name);
            assert!(
                card.readme.starts_with(&format!("# {}\n", card.name)),
                "{}",
                card.name
            );
            for part in ["**Asked:**", "**Source:**", "## Method", "## Expectations"] {
                assert!(card.readme.contains(part), "{} has no {part}", card.name);
            }
            // Panics where a row does not parse.
            let _ = Published::parse(card.published);
        }
    }

    #[test]
    fn designs_name_each_variant_once_and_compare_what_they_measure() {
        for experiment in all() {
            for quick in [false, true] {
                let design = experiment.design(&Settings {
                    quick,
                    ..Settings::default()
                });
                let arms: BTreeSet<&str> = design.arms.iter().map(|a| a.name.as_str()).collect();
                let name = &experiment.card().name;
                assert_eq!(arms.len(), design.arms.len(), "{name}");
                assert!(
                    design.rounds > 0 && design.arms.iter().all(|a| a.seconds > 0.0),
                    "{name}"
                );
                for pairing in &design.pairings {
                    assert!(
                        arms.contains(&*pairing.a) && arms.contains(&*pairing.b),
                        "{name}: {}",
                        pairing.name
                    );
                }
            }
        }
    }

    /// Expectations of kept results that experiments no longer have.
    const RETIRED: [(&str, &str); 7] = [
        // The split of TCP listeners.
        ("cost", "split-prefork"),
        ("cost", "split-nginx"),
        ("harm", "prefork/boot/split"),
        // Processes beside threads. `haproxy-processes` is compared with its like.
        ("harm", "haproxy/steady/run"),
        ("harm", "haproxy/kept/run"),
        ("harm", "haproxy/stuck/run"),
        ("harm", "haproxy/restart/run"),
    ];

    /// The results that this repository keeps.
    fn kept_results() -> Vec<Outcome> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results");
        let machines = std::fs::read_dir(folder).expect("docs/results").flatten();
        let folders = machines.map(|m| m.path()).filter(|path| path.is_dir());
        let all: Vec<Outcome> = folders
            .flat_map(|folder| Store::at(folder).all().expect("results"))
            .collect();
        assert!(!all.is_empty());
        all
    }

    #[test]
    fn kept_results_are_judged_and_shown_as_when_they_were_measured() {
        for outcome in kept_results() {
            let name = &outcome.experiment;
            let experiment = find(name).expect("it is still there");
            let judged = experiment.judge(&outcome);
            let names: BTreeSet<&String> = judged.iter().map(|e| &e.name).collect();
            assert_eq!(names.len(), judged.len(), "{name}: two have one name");
            let retired = |e: &&Expectation| RETIRED.contains(&(&**name, &*e.name));
            for before in outcome.expectations.iter().filter(|e| !retired(e)) {
                let now = judged.iter().find(|e| e.name == before.name);
                let now = now.unwrap_or_else(|| panic!("{name}: {} is gone", before.name));
                assert_eq!(now.measured, before.measured, "{name}: {}", now.name);
            }
            assert!(!experiment.present(&outcome).is_empty(), "{name}");
            assert!(!experiment.brief(&outcome).is_empty(), "{name}");
        }
    }

    #[test]
    fn what_was_not_measured_holds_nowhere() {
        for experiment in all() {
            let nothing = crate::result::tests::outcome(&[]);
            let judged = experiment.judge(&nothing);
            let holding: Vec<_> = judged.iter().filter(|e| e.holds).map(|e| &e.name).collect();
            assert!(
                holding.is_empty(),
                "{}: {holding:?}",
                experiment.card().name
            );
            let _ = (experiment.present(&nothing), experiment.brief(&nothing));
        }
    }

    /// An outcome in which the number of a judgement is `value`.
    fn with(judge: &Judge, value: f64) -> Outcome {
        let (above, one, none) = ([value * judge.per], [1.0], [0.0]);
        let shares = [[value.max(0.0)], [1.0 - value.max(0.0)]];
        let metric = judge.metric.as_str();
        let mut all = Vec::new();
        for (a, b) in &judge.ratio {
            all.push((a.as_str(), vec![(metric, &above[..])]));
            all.push((b.as_str(), vec![(metric, &one[..])]));
        }
        for (a, b) in &judge.minus {
            all.push((
                a.as_str(),
                vec![("errors", &shares[0][..]), ("requests", &shares[1])],
            ));
            all.push((
                b.as_str(),
                vec![("errors", &none[..]), ("requests", &one[..])],
            ));
        }
        for name in judge.worst.iter().chain(&judge.sum) {
            all.push((name.as_str(), vec![(metric, &above[..])]));
        }
        let all: Vec<_> = all.iter().map(|(n, m)| (*n, m.as_slice())).collect();
        tests::outcome(&all)
    }

    #[test]
    fn each_limit_bites() {
        let data = [&KEPT, &OVERLOAD, &RESTART, &NGINX, &PINNED, &REFERENCE].map(|data| &**data.0);
        for trials in data
            .into_iter()
            .chain([&*tills::TRIALS, &*throughput::TRIALS])
        {
            let card = trials.card;
            assert!(!trials.table.judge.is_empty(), "{}", card.name);
            let loads = trials.loads(false);
            let judges = trials.table.judge.iter();
            for (names, one) in judges.flat_map(|judge| judge.all(&loads)) {
                let names: Vec<_> = names.iter().map(|(n, v)| (*n, v.as_str())).collect();
                for name in one.variants() {
                    let mut all = trials.variants();
                    assert!(all.any(|of| of.name() == *name), "{}: {name}", card.name);
                }
                let (good, bad) = card.around_bound(&one.expect, &names);
                let name = crate::template::fill(&one.expect, names.iter().copied());
                let holds = |value: f64| {
                    let judged = judge(trials, &with(&one, value));
                    judged.iter().find(|e| e.name == name).map(|e| e.holds)
                };
                assert_eq!(holds(good), Some(true), "{}: {name} at {good}", card.name);
                assert_eq!(holds(bad), Some(false), "{}: {name} at {bad}", card.name);
            }
        }
    }

    #[test]
    fn what_was_left_out_is_not_judged() {
        let experiment = find("kept").expect("kept");
        let mut found = tests::outcome(&[]);
        let all = experiment.judge(&found).len();
        found.parameters.insert(
            "left_out".into(),
            serde_json::json!({"hypercorn/attached": "hypercorn is not installed"}),
        );
        assert_eq!(experiment.judge(&found).len(), all - 2);
    }
}
