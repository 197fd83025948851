//! nginx in each of the ways that its operator can choose, and steered from outside.

mod present;
mod servers;
mod workload;

use serde_json::json;

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source, parameters,
};
use crate::experiments::tills::workload::WORKERS;
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::{Error, apps, measure, status};
use servers::{Kind, Running};
use workload::{GONE, HEALTHY, LOAD_S, RATE_PER_S, Variant, WORKLOADS, Workload};

/// The experiment.
pub struct Nginx;

const OURS: &str = "Wakeone's own goal";

const CARD: Card = Card {
    name: "nginx",
    title: "nginx, and nginx steered",
    question: "Which of nginx's ways of handing out connections should its operator choose, and what does attaching to it change?",
    source: Source {
        short: "Majkowski, 2017",
        long: "Marek Majkowski, Why does one NGINX worker take all the load?, Cloudflare blog, 2017.",
        url: "https://blog.cloudflare.com/the-sad-state-of-linux-socket-balancing/",
    },
    readme: include_str!("README.md"),
    published: "series,x,metric,unit,value,note\n",
};

/// What is compared, by workload and metric: `a / b`, and what ought to be seen of it.
struct Comparison {
    workload: Workload,
    metric: &'static str,
    a: &'static str,
    b: &'static str,
    name: &'static str,
    claim: &'static str,
    source: &'static str,
    holds: fn(f64) -> bool,
}

const COMPARISONS: [Comparison; 5] = [
    Comparison {
        workload: Workload::Stuck,
        metric: "latency_ms_mean",
        a: Kind::Reuseport.name(),
        b: Kind::AttachRescue.name(),
        name: "stuck-attach-helps",
        claim: "With stuck workers, reuseport has at least 3 times the mean latency that it has attached to, with rescue",
        source: OURS,
        holds: |m| m >= 3.0,
    },
    Comparison {
        workload: Workload::Stopped,
        metric: "latency_ms_p99",
        a: Kind::AttachRescue.name(),
        b: HEALTHY,
        name: "stopped-as-if-healthy",
        claim: "While one of four workers is stopped, the p99 is at most 1.3 times that of a healthy group",
        source: OURS,
        holds: |m| m <= 1.3,
    },
    Comparison {
        workload: Workload::Busy,
        metric: "latency_ms_p99",
        a: Kind::AttachRescue.name(),
        b: HEALTHY,
        name: "busy-as-if-healthy",
        claim: "While one of four workers computes, the p99 of the others' requests is at most 1.3 times that of a healthy group",
        source: OURS,
        holds: |m| m <= 1.3,
    },
    Comparison {
        workload: Workload::Cpu,
        metric: "throughput_per_s",
        a: Kind::Attach.name(),
        b: Kind::Reuseport.name(),
        name: "cpu-attach-costs-nothing",
        claim: "Under CPU load, attaching leaves at least 0.95 times the requests/s",
        source: OURS,
        holds: |m| m >= 0.95,
    },
    Comparison {
        workload: Workload::Cpu,
        metric: "latency_ms_stddev",
        a: Kind::Reuseport.name(),
        b: Kind::Default.name(),
        name: "cpu-hash-scatters",
        claim: "Under CPU load, latencies with reuseport deviate at least twice as much as with one shared listener",
        source: "Majkowski, 2017: 16 times",
        holds: |m| m >= 2.0,
    },
];

impl Comparison {
    fn pairing(&self) -> Pairing {
        let of = |way: &str| format!("{}/{way}", self.workload.name());
        Pairing {
            name: self.pair(),
            a: of(self.a),
            b: of(self.b),
            metric: self.metric.into(),
        }
    }

    fn pair(&self) -> String {
        let what = self.metric.trim_start_matches("latency_ms_");
        format!(
            "{}: {what} of {} / {}",
            self.workload.name(),
            self.a,
            self.b
        )
    }
}

impl Experiment for Nginx {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let arms = WORKLOADS.into_iter().enumerate().flat_map(|(group, of)| {
            let variants = of.variants().into_iter();
            let here = variants.filter(|v| v.lacks().is_none());
            here.map(move |variant| Arm {
                name: variant.name(),
                group,
                seconds: of.seconds(settings.quick) + 0.5,
            })
        });
        let arms: Vec<Arm> = arms.collect();
        let is_here = |name: &str| arms.iter().any(|arm| arm.name == name);
        let pairings = COMPARISONS.iter().map(Comparison::pairing);
        Design {
            rounds: if settings.quick { 3 } else { 5 },
            pairings: pairings
                .filter(|p| is_here(&p.a) && is_here(&p.b))
                .collect(),
            arms,
            steady: "throughput_per_s",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("lost_worker_rate_per_s", json!(RATE_PER_S)),
                ("lost_worker_load_s", json!(LOAD_S)),
                ("lost_worker_gone_s", json!(GONE.as_secs_f64())),
                ("resized_rate_per_s", json!(workload::RESIZED_RATE_PER_S)),
                ("resized_workers", json!(workload::RESIZED_WORKERS)),
                ("resized_reloads", json!(workload::RESIZED_RELOADS)),
                ("left_out", json!(left_out())),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let variant = Variant::parse(&arm.name)?;
        if variant.workload == Workload::Resized {
            return workload::resize(variant.kind, context);
        }
        let mut running = Running::start(variant.kind, WORKERS)?;
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
        let judged = COMPARISONS.iter().map(|of| {
            let ratio = outcome.ratio(&of.pair());
            Expectation::new(of.name, of.claim, of.source, ratio, of.holds)
        });
        let mut all: Vec<Expectation> = judged.collect();
        let lost = outcome.values(
            &format!("{}/{}", Workload::Resized.name(), Kind::Attach.name()),
            "lost",
        );
        all.push(Expectation::new(
            "resized-loses-none",
            "nginx with reuseport loses no connection while it is attached to and reloaded with 8, 1, 8 … workers (all rounds)",
            OURS,
            (!lost.is_empty()).then(|| lost.iter().sum()),
            |m| m == 0.0,
        ));
        all.push(measure::counted_out(outcome));
        all.extend(measure::sound(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

/// The variants that cannot be measured here, and why.
fn left_out() -> std::collections::BTreeMap<String, String> {
    let all = WORKLOADS.into_iter().flat_map(Workload::variants);
    all.filter_map(|v| Some((v.name(), v.lacks()?))).collect()
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
        let named = COMPARISONS.iter().map(Comparison::pair);
        outcome.comparisons = named.zip(ratios).map(|(n, r)| ratio(n, r)).collect();
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
            assert_eq!(failed(ratios, 0.0), [COMPARISONS[at].name]);
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
