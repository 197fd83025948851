//! The reference server beside nginx: a small file, the same number of workers.

mod servers;

use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan, Sources, Stop};

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source,
};
use crate::present::{Bar, Block, Chart, Kind as ChartKind, Row, Style, Table, number};
use crate::result::{Expectation, Outcome};
use crate::{Error, environment, measure};
use servers::{ALL, Kind, OURS, Running, THEIRS};

/// The experiment.
pub struct Reference;

/// Clients of the closed loop: enough that no worker is ever without work.
const CLIENTS: usize = 64;
const WARM_UP_S: f64 = 0.3;
const RATE: &str = "throughput_per_s";
const CPU: &str = "server_cpu_us";
/// What ours must reach of nginx's rate.
const SHARE: f64 = 0.9;
const GOAL: &str = "Wakeone's own goal";

const CARD: Card = Card {
    name: "reference",
    title: "The reference server beside nginx",
    question: "How near to nginx is the reference server, on which the other experiments rest, with a small file?",
    source: Source {
        short: "Wakeone",
        long: "Beyond the papers: a reference that is slow by itself would hide what the architectures cost.",
        url: "",
    },
    readme: include_str!("README.md"),
    published: "series,x,metric,unit,value,note\n",
};

/// Connections and workers: what is the same for all servers that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Setting {
    keep_alive: bool,
    workers: usize,
}

impl Setting {
    fn name(self) -> String {
        let connections = if self.keep_alive {
            "keep-alive"
        } else {
            "close"
        };
        format!("{connections}/{}", self.workers)
    }

    fn words(self) -> String {
        let connections = if self.keep_alive {
            "connections kept"
        } else {
            "a connection a request"
        };
        format!("{connections}, {} workers", self.workers)
    }

    fn arm(self, kind: Kind) -> String {
        format!("{}/{}", self.name(), kind.name())
    }
}

fn settings_of(quick: bool) -> Vec<Setting> {
    let workers: &[usize] = if quick { &[2] } else { &[2, 4] };
    let both = |workers: &usize| {
        [false, true].map(|keep_alive| Setting {
            keep_alive,
            workers: *workers,
        })
    };
    workers.iter().flat_map(both).collect()
}

fn parse_arm(name: &str) -> Option<(Setting, Kind)> {
    settings_of(false)
        .into_iter()
        .flat_map(|setting| ALL.map(|kind| (setting, kind)))
        .find(|(setting, kind)| setting.arm(*kind) == name)
}

fn load_seconds(quick: bool) -> f64 {
    if quick { 1.0 } else { 3.0 }
}

fn comparison(setting: Setting, ours: Kind, theirs: Kind, metric: &str) -> String {
    let what = if metric == RATE {
        "requests/s"
    } else {
        "CPU time a request"
    };
    format!(
        "{}: {what} of {} / {}",
        setting.words(),
        ours.name(),
        theirs.name()
    )
}

impl Experiment for Reference {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings.quick);
        let left_out: BTreeMap<&str, String> = ALL
            .into_iter()
            .filter_map(|kind| Some((kind.name(), kind.lacks()?)))
            .collect();
        let here: Vec<Kind> = ALL
            .into_iter()
            .filter(|kind| !left_out.contains_key(kind.name()))
            .collect();
        let mut design = Design {
            rounds: if settings.quick { 7 } else { 9 },
            steady: RATE,
            ..Design::default()
        };
        for (group, setting) in settings_of(settings.quick).into_iter().enumerate() {
            design.arms.extend(here.iter().map(|kind| Arm {
                name: setting.arm(*kind),
                group,
                seconds: WARM_UP_S + seconds + 0.5,
            }));
            for (ours, theirs) in OURS.into_iter().flat_map(|a| THEIRS.map(|b| (a, b))) {
                if here.contains(&ours) && here.contains(&theirs) {
                    design.pairings.extend([RATE, CPU].map(|metric| Pairing {
                        name: comparison(setting, ours, theirs, metric),
                        a: setting.arm(ours),
                        b: setting.arm(theirs),
                        metric: metric.into(),
                    }));
                }
            }
        }
        for (name, value) in [
            ("clients", json!(CLIENTS)),
            ("warm_up_s", json!(WARM_UP_S)),
            ("load_s", json!(seconds)),
            ("file_bytes", json!(servers::FILE_BYTES)),
            ("build", json!(environment::build())),
            ("left_out", json!(left_out)),
        ] {
            design.parameters.insert(name.into(), value);
        }
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (setting, kind) =
            parse_arm(&arm.name).ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let mut running = Running::start(kind, setting.workers)?;
        let warm_up = measure::load(&plan(&running, setting, WARM_UP_S, context), context)?;
        running.answers.client_saw(&warm_up);
        let seconds = load_seconds(context.settings.quick);
        let (server, client) = (running.cpu_ns(), own_cpu());
        let found = measure::load(&plan(&running, setting, seconds, context), context)?;
        let (server, client) = (running.cpu_ns() - server, own_cpu() - client);
        running.answers.client_saw(&found);
        let mut sample = measure::sample(&found, 0);
        running.stop(&mut sample)?;
        // nginx does not say which worker answers.
        sample.metrics.retain(|name, _| !name.starts_with("share_"));
        let answers = found.completed.max(1) as f64;
        sample.put(CPU, "us", server as f64 / 1000.0 / answers);
        sample.put("client_cpu_us", "us", client.as_secs_f64() * 1e6 / answers);
        sample.put(
            "client_busy",
            "ratio",
            client.as_secs_f64() / found.elapsed.as_secs_f64(),
        );
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = vec![Block::Heading("What it means".into())];
        blocks.extend(meaning(outcome).into_iter().map(Block::Paragraph));
        blocks.push(Block::Table(table(outcome)));
        for setting in measured(outcome) {
            blocks.push(Block::Chart(chart(outcome, setting, RATE, "/s")));
            blocks.push(Block::Chart(chart(outcome, setting, CPU, "µs")));
        }
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

/// CPU time that this process, the client, has used.
fn own_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn plan(running: &Running, setting: Setting, seconds: f64, context: &Context<'_>) -> Plan {
    Plan {
        target: running.address,
        host: "localhost".into(),
        arrivals: Arrivals::Closed {
            concurrency: CLIENTS,
        },
        stop: Stop {
            requests: None,
            duration: Some(Duration::from_secs_f64(seconds)),
        },
        mix: Mix::one(format!("/{}", servers::FILE)),
        sources: Sources::Loopback { count: 1000 },
        timeout: Duration::from_secs(10),
        seed: context.seed,
        threads: 1,
        keep_alive: setting.keep_alive,
    }
}

/// The settings that were measured, in order.
fn measured(outcome: &Outcome) -> Vec<Setting> {
    let has = |setting: &Setting| {
        ALL.iter()
            .any(|kind| outcome.variant(&setting.arm(*kind)).is_some())
    };
    settings_of(false).into_iter().filter(has).collect()
}

fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut all = Vec::new();
    for setting in measured(outcome) {
        for ours in OURS {
            let theirs = Kind::Nginx;
            // Left out where either is not there; the result says so.
            let there = |kind: Kind| outcome.variant(&setting.arm(kind)).is_some();
            if !there(ours) || !there(theirs) {
                continue;
            }
            let ratio = |metric: &str| outcome.ratio(&comparison(setting, ours, theirs, metric));
            let name = format!("{}-{}", setting.name().replace('/', "-"), ours.name());
            all.push(Expectation::new(
                format!("{name}-rate"),
                format!(
                    "{}: {} answers at least {SHARE} times as many requests as nginx (ratio)",
                    setting.words(),
                    ours.name()
                ),
                GOAL,
                ratio(RATE),
                |m| m >= SHARE,
            ));
            all.push(Expectation::new(
                format!("{name}-cpu"),
                format!(
                    "{}: a request costs {} at most 1/{SHARE} times the CPU time that it costs nginx (ratio)",
                    setting.words(),
                    ours.name()
                ),
                GOAL,
                ratio(CPU),
                |m| m <= 1.0 / SHARE,
            ));
        }
    }
    all.extend(measure::sound(outcome));
    all
}

fn meaning(outcome: &Outcome) -> Vec<String> {
    let mut said = Vec::new();
    for setting in measured(outcome) {
        let of = |ours: Kind| {
            let ratio =
                |metric: &str| outcome.ratio(&comparison(setting, ours, Kind::Nginx, metric));
            Some(format!(
                "{} answers {} times as many requests as nginx and uses {} times its CPU time for each",
                ours.name(),
                number(ratio(RATE)?),
                number(ratio(CPU)?)
            ))
        };
        let both: Vec<String> = OURS.into_iter().filter_map(of).collect();
        if !both.is_empty() {
            said.push(format!("With {}, {}.", setting.words(), both.join("; ")));
        }
    }
    let busy = outcome
        .variants
        .iter()
        .filter_map(|v| v.median("client_busy"));
    if let Some(most) = busy.max_by(f64::total_cmp) {
        said.push(format!(
            "The client is one thread, busy for up to {:.0} % of the time, on the same {} CPUs as the server. Where it is busy all the time, the rates say what client and server can do together, and a faster server looks less so than it is; the CPU time of the server a request does not depend on that, and is the steadier figure.",
            most * 100.0,
            outcome.environment.cpus
        ));
    }
    said
}

fn table(outcome: &Outcome) -> Table {
    let columns = [
        ("requests/s", RATE),
        ("server CPU µs", CPU),
        ("client CPU µs", "client_cpu_us"),
        ("p50 ms", "latency_ms_p50"),
        ("p99 ms", "latency_ms_p99"),
        ("errors", "errors"),
    ];
    let row = |v: &crate::result::Variant| {
        let mut cells = vec![v.name.clone()];
        cells
            .extend(columns.map(|(_, metric)| v.median(metric).map_or_else(|| "–".into(), number)));
        Row::ours(cells)
    };
    Table {
        caption: "Median of the rounds; CPU time is for each request.".into(),
        head: std::iter::once("")
            .chain(columns.map(|c| c.0))
            .map(str::to_owned)
            .collect(),
        rows: outcome.variants.iter().map(row).collect(),
    }
}

fn chart(outcome: &Outcome, setting: Setting, metric: &str, unit: &str) -> Chart {
    let bars = ALL
        .into_iter()
        .zip([0, 1, 2, 4])
        .filter_map(|(kind, colour)| {
            let found = outcome.variant(&setting.arm(kind))?.metrics.get(metric)?;
            Some(Bar {
                style: Style::ours(kind.name(), colour),
                value: found.median,
                range: Some((found.min, found.max)),
            })
        });
    let (what, note) = if metric == RATE {
        (
            "requests/s",
            "Higher is better. Median and range of the rounds.",
        )
    } else {
        (
            "CPU time of the server a request",
            "Lower is better. Median and range of the rounds.",
        )
    };
    Chart {
        title: format!("{}: {what}.", setting.words()),
        note: note.into(),
        kind: ChartKind::Bars {
            unit: unit.into(),
            bars: bars.collect(),
            log: false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{self, SOUND, failing, ratio};

    #[test]
    fn names_of_variants_go_both_ways() {
        for setting in settings_of(false) {
            for kind in ALL {
                assert_eq!(parse_arm(&setting.arm(kind)), Some((setting, kind)));
            }
        }
        assert_eq!(parse_arm("close/2/apache"), None);
    }

    /// An outcome with these ratios to nginx of epoll-prefork, with a connection a request and 2 workers.
    fn outcome(rate: f64, cpu: f64) -> Outcome {
        let setting = settings_of(true)[0];
        let ours = setting.arm(Kind::EpollPrefork);
        let theirs = setting.arm(Kind::Nginx);
        let mut outcome = tests::outcome(&[(&ours, &SOUND[..]), (&theirs, &SOUND[..])]);
        outcome.comparisons = [(RATE, rate), (CPU, cpu)]
            .map(|(metric, value)| {
                ratio(
                    comparison(setting, Kind::EpollPrefork, Kind::Nginx, metric),
                    value,
                )
            })
            .into();
        outcome
    }

    fn failed(outcome: &Outcome) -> Vec<String> {
        failing(judge(outcome))
    }

    #[test]
    fn slower_or_dearer_than_nginx_is_found() {
        assert_eq!(failed(&outcome(0.9, 1.1)), Vec::<String>::new());
        assert_eq!(failed(&outcome(0.89, 1.0)), ["close-2-epoll-prefork-rate"]);
        assert_eq!(failed(&outcome(1.0, 1.12)), ["close-2-epoll-prefork-cpu"]);
        let mut lost = outcome(1.0, 1.0);
        lost.comparisons.clear();
        assert_eq!(failed(&lost).len(), 2);
        assert_eq!(failed(&tests::outcome(&[])), ["no-errors", "counts-agree"]);
        let mut miscounted = outcome(1.0, 1.0);
        let counts = miscounted.variants[1].metrics.get_mut("server_requests");
        counts.unwrap().values = vec![10.0];
        assert_eq!(failed(&miscounted), ["counts-agree"]);
    }
}
