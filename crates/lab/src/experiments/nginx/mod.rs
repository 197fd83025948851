//! nginx in each of the ways that its operator can choose, and steered from outside.

mod present;
mod servers;
mod workload;

use serde_json::json;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::experiments::tills::workload::WORKERS;
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::under_test::ServerUnderTest;
use crate::{apps, measure, stats, status};
use servers::Kind;
use workload::{GONE, HEALTHY, LOAD_S, RATE_PER_S, Variant, WORKLOADS, Workload};

card!();

/// The experiment.
pub struct Nginx;

/// The comparisons: the expectation, the workload, the metric, and the variants above and below the line.
const COMPARISONS: [(&str, Workload, &str, &str, &str); 5] = [
    (
        "stuck-attach-helps",
        Workload::Stuck,
        "latency_ms_mean",
        Kind::Reuseport.name(),
        Kind::AttachRescue.name(),
    ),
    (
        "stopped-as-if-healthy",
        Workload::Stopped,
        "latency_ms_p99",
        Kind::AttachRescue.name(),
        HEALTHY,
    ),
    (
        "busy-as-if-healthy",
        Workload::Busy,
        "latency_ms_p99",
        Kind::AttachRescue.name(),
        HEALTHY,
    ),
    (
        "cpu-attach-costs-nothing",
        Workload::Cpu,
        "throughput_per_s",
        Kind::Attach.name(),
        Kind::Reuseport.name(),
    ),
    (
        "cpu-hash-scatters",
        Workload::Cpu,
        "latency_ms_stddev",
        Kind::Reuseport.name(),
        Kind::Default.name(),
    ),
];

/// The comparisons, each behind its expectation.
fn comparisons() -> [(&'static str, Pairing); 5] {
    COMPARISONS.map(|(expectation, workload, metric, a, b)| {
        let what = metric.trim_start_matches("latency_ms_");
        let workload = workload.name();
        let pairing = Pairing {
            name: format!("{workload}: {what} of {a} / {b}"),
            a: format!("{workload}/{a}"),
            b: format!("{workload}/{b}"),
            metric: metric.into(),
        };
        (expectation, pairing)
    })
}

impl Experiment for Nginx {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut design = Design {
            rounds: if settings.quick { 3 } else { 5 },
            steady: "throughput_per_s",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("lost_worker_rate_per_s", json!(RATE_PER_S)),
                ("lost_worker_load_s", json!(LOAD_S)),
                ("lost_worker_gone_s", json!(GONE.as_secs_f64())),
                ("resized_rate_per_s", json!(workload::RESIZED_RATE_PER_S)),
                ("resized_workers", json!(workload::RESIZED_WORKERS)),
                ("resized_reloads", json!(workload::RESIZED_RELOADS)),
            ]),
            ..Design::default()
        };
        for (group, of) in WORKLOADS.into_iter().enumerate() {
            for variant in of.variants() {
                let (name, seconds) = (variant.name(), of.seconds(settings.quick) + 0.5);
                let arm = Arm {
                    name,
                    group,
                    seconds,
                };
                design.offer(arm, &variant.name(), variant.lacks());
            }
        }
        design.compare(comparisons().map(|(_, pairing)| pairing));
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let variant = Variant::parse(&arm.name)?;
        if variant.workload == Workload::Resized {
            return workload::resize(variant.kind, context);
        }
        let mut running = ServerUnderTest::start(variant.kind.launch(WORKERS)?)?;
        let mut found = variant.load(&mut running, context)?;
        found.by_worker = apps::by_place(&found.by_worker, &running.workers);
        let mut sample = measure::sample(&found, WORKERS);
        if variant.kind.steered() {
            let left = status::active_at_rest(running.address)?;
            sample.put("active_at_end", "count", left as f64);
        }
        running.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let judged = comparisons();
        let judged = judged.map(|(name, of)| CARD.expect(name, outcome.ratio(&of.name)));
        let mut all: Vec<Expectation> = judged.into();
        let resized = format!("{}/{}", Workload::Resized.name(), Kind::Attach.name());
        let lost = stats::sum(outcome.values(&resized, "lost"));
        all.push(CARD.expect("resized-loses-none", lost));
        all.push(measure::counted_out(outcome));
        all.extend(measure::sound(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{self, SOUND, failing, ratio};

    fn outcome(ratios: [f64; 5], active: f64) -> Outcome {
        let active = [active];
        let mut found = SOUND.to_vec();
        found.push(("active_at_end", &active));
        let mut outcome = tests::outcome(&[
            ("stuck/reuseport+attach", &found),
            ("resized/reuseport+attach", &[("lost", &[0.0])]),
        ]);
        let named = comparisons().map(|(_, pairing)| pairing.name);
        outcome.comparisons = std::iter::zip(named, ratios)
            .map(|(n, r)| ratio(n, r))
            .collect();
        outcome
    }

    #[test]
    fn each_limit_bites() {
        let failed =
            |ratios, active| -> Vec<String> { failing(Nginx.judge(&outcome(ratios, active))) };
        let good = [3.0, 1.3, 1.3, 0.95, 2.0];
        assert_eq!(failed(good, 0.0), Vec::<String>::new());
        let bad = [2.9, 1.31, 1.31, 0.94, 1.9];
        for (at, value) in bad.into_iter().enumerate() {
            let mut ratios = good;
            ratios[at] = value;
            assert_eq!(failed(ratios, 0.0), [COMPARISONS[at].0]);
        }
        assert_eq!(failed(good, 1.0), ["active-returns-to-0"]);
        let mut lossy = outcome(good, 0.0);
        let lost = tests::outcome(&[("resized/reuseport+attach", &[("lost", &[0.0, 1.0])])]);
        lossy.variants[1] = lost.variants[0].clone();
        assert_eq!(failing(Nginx.judge(&lossy)), ["resized-loses-none"]);
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        let judged = Nginx.judge(&tests::outcome(&[]));
        assert!(judged.iter().all(|e| !e.holds && e.measured.is_none()));
    }
}
