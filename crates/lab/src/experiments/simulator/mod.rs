//! The simulator beside this machine.

mod case;
mod replay;

use serde_json::json;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Row, Table, cell};
use crate::result::{Expectation, Outcome};
use crate::trials::beside::load_while_pinned;
use crate::under_test::ServerUnderTest;
use crate::ways::{self, Way};
use crate::{measure, views};
use case::{Case, cases};
use replay::Alone;

card!();

/// The experiment.
pub struct Simulator;

/// Requests that measure how long one takes alone.
const ALONE: u64 = 200;

fn named(name: &str, quick: bool) -> Result<(Case, Way), Error> {
    for case in cases(quick) {
        if let Ok((of, way)) = ways::parse_arm(name, case.ways)
            && of == case.name
        {
            return Ok((case, way));
        }
    }
    Err(Error::Unknown(name.into()))
}

impl Experiment for Simulator {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let all = cases(settings.quick);
        let arms = all
            .iter()
            .enumerate()
            .flat_map(|(group, case)| ways::arms(case.name, case.ways, group, case.seconds + 1.0));
        Design {
            rounds: if settings.quick { 3 } else { 5 },
            arms: arms.collect(),
            pairings: Vec::new(),
            steady: "",
            parameters: parameters([("alone_requests", json!(ALONE))]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let quick = context.settings.quick;
        let (case, way) = named(&arm.name, quick)?;
        let mut server = ServerUnderTest::start(way.launch(case.serving, case.workers))?;
        let plan = case.plan(server.address, context.seed);
        let alone = server.load(&case::alone(&plan, ALONE), context)?;
        let alone = Alone::of(&alone, plan.keep_alive);
        let (found, pinned_s) = match case.pinned {
            Some(length) => {
                let path = format!("/work?us={}&kind=sleep", length.as_micros());
                load_while_pinned(&mut server, &plan, (&path, length), context)?
            }
            None => (server.load(&plan, context)?, 0.0),
        };
        let mut sample = measure::sample(&found, case.workers);
        server.stop(&mut sample)?;
        sample.put("alone_ms", "ms", alone.median_s() * 1e3);
        sample.put("alone_connect_ms", "ms", alone.connect_s * 1e3);
        let setup = case.setup(way, pinned_s);
        replay::beside(&mut sample, &setup, &plan, &alone)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = Vec::new();
        for (arm, what, beyond) in compared() {
            let names = [("arm", &*arm.replace('/', "-"))];
            let off = outcome.median(&arm, &beyond);
            all.push(CARD.expect_of(&format!("{{arm}}-{what}"), &names, off));
        }
        all.extend(measure::sound(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning(meaning(outcome));
        for ((measured, simulated), title) in replay::COMPARED.into_iter().zip([
            "Mean latency, in ms.",
            "The latency that one request in ten exceeds, in ms.",
            "The busiest worker's share, over the mean.",
        ]) {
            blocks.push(Block::Table(table(outcome, title, measured, simulated)));
        }
        blocks
    }
}

/// The numbers that are compared: the variant, the expectation, and the metric that says how far off it is.
fn compared() -> Vec<(String, &'static str, String)> {
    let mut all = Vec::new();
    for case in cases(true) {
        for way in case.ways {
            let of = |what, simulated: &str| {
                let arm = ways::arm_name(case.name, *way);
                (arm, what, format!("{simulated}_beyond"))
            };
            // Its requests are so short that they mostly are the machine's waking of an idle CPU.
            if case.name != "spread" {
                all.push(of("mean", "simulated_ms_mean"));
                all.push(of("p90", "simulated_ms_p90"));
            }
            // Elsewhere all workers get the same number of requests, or those that chance gives them.
            if matches!(case.name, "spread" | "kept") {
                all.push(of("share", "simulated_share"));
            }
        }
    }
    all
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let compared = compared();
    let worst = |what: &str| {
        let of_it = compared.iter().filter(|one| one.1 == what);
        let found = of_it.filter_map(|(arm, _, beyond)| {
            let off = outcome.median(arm, beyond)?;
            Some((off.abs(), arm.as_str()))
        });
        found.max_by(|a, b| a.0.total_cmp(&b.0))
    };
    let percent = |off: f64| format!("{:.0} %", off * 100.0);
    let [(mean, mean_of), (p90, p90_of), (share, share_of)] =
        [worst("mean")?, worst("p90")?, worst("share")?];
    let names = [
        ("mean", &*percent(mean)),
        ("mean_of", mean_of),
        ("p90", &*percent(p90)),
        ("p90_of", p90_of),
        ("share", &*percent(share)),
        ("share_of", share_of),
    ];
    CARD.say("off", outcome, &names)
}

fn signed_percent(ratio: f64) -> String {
    match (ratio * 100.0).round() {
        0.0 => "0 %".into(),
        percent => format!("{percent:+} %"),
    }
}

fn table(outcome: &Outcome, title: &str, measured: &str, simulated: &str) -> Table {
    let row = |variant: &crate::result::Variant| {
        let of = |metric: &str| variant.median(metric);
        let end = |which: &str| of(&format!("{simulated}_{which}"));
        let off = end("beyond").map_or_else(|| "–".into(), signed_percent);
        let cells = [
            cell(of(measured)),
            cell(of(simulated)),
            cell(end("low")),
            cell(end("high")),
            off,
        ];
        Row::named(variant.name.clone(), cells)
    };
    Table::new(
        format!(
            "{title} Medians of the rounds. Nine simulations of ten lie between low and high; off is how far beyond that the measured number lies."
        ),
        ["measured", "simulated", "low", "high", "off"],
        outcome.variants.iter().map(row),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{SOUND, failing, outcome};

    #[test]
    fn every_arm_is_found_again() {
        for quick in [true, false] {
            for arm in Simulator
                .design(&Settings {
                    quick,
                    ..Settings::default()
                })
                .arms
            {
                let (case, way) = named(&arm.name, quick).unwrap();
                assert_eq!(ways::arm_name(case.name, way), arm.name);
            }
        }
        assert!(named("stuck/reuseport", true).is_err());
    }

    #[test]
    fn what_is_further_off_than_a_tenth_does_not_hold() {
        let judged = |off: f64| {
            let mut values = SOUND.to_vec();
            let offs = [off];
            for (_, simulated) in replay::COMPARED {
                let name: &'static str = Box::leak(format!("{simulated}_beyond").into());
                values.push((name, Box::leak(Box::new(offs))));
            }
            let arms: Vec<String> = Simulator
                .design(&Settings::default())
                .arms
                .into_iter()
                .map(|a| a.name)
                .collect();
            let all: Vec<_> = arms.iter().map(|arm| (arm.as_str(), &values[..])).collect();
            let failed = failing(Simulator.judge(&outcome(&all)));
            failed
                .into_iter()
                .filter(|name| name != "counts-agree")
                .count()
        };
        assert_eq!(judged(0.1), 0);
        assert_eq!(judged(-0.1), 0);
        assert_eq!(judged(0.11), compared().len());
        assert_eq!(judged(-0.11), compared().len());
    }
}
