//! The experiments, a folder each: the published numbers, the measurement and the judgement.

mod accept_lock;
mod architectures;
mod cost;
mod cycle;
mod harm;
mod herd;
mod kept;
mod nginx;
mod overload;
mod pinned;
mod reference;
mod reopen;
mod restart;
pub mod simulated;
pub mod simulator;
mod split;
mod spread;
mod stuck;
mod theory;
mod throughput;
mod tills;
mod udp_locks;
pub mod udp_readers;

use crate::error::Error;
use crate::experiment::Experiment;

/// All experiments, in the best order to read them.
pub fn all() -> &'static [&'static dyn Experiment] {
    &[
        &herd::Herd,
        &throughput::Throughput,
        &accept_lock::AcceptLock,
        &spread::Spread,
        &tills::Tills,
        &kept::Kept,
        &cycle::Cycle,
        &architectures::Architectures,
        &stuck::Stuck,
        &overload::Overload,
        &restart::Restart,
        &nginx::Nginx,
        &pinned::Pinned,
        &split::Split,
        &harm::Harm,
        &reference::Reference,
        &udp_readers::UdpReaders,
        &udp_locks::UdpLocks,
        &reopen::Reopen,
        &cost::Cost,
        &theory::Theory,
        &simulator::Simulator,
        &simulated::Simulated,
    ]
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
    use crate::result::Outcome;
    use crate::store::Store;
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
            for before in &outcome.expectations {
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
}
