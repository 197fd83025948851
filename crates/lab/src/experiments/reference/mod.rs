//! The reference server beside nginx: a small file, the same number of workers.

mod servers;

use serde_json::json;
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::present::{Block, Chart, Style, Table, number};
use crate::result::{Expectation, Outcome};
use crate::under_test::ServerUnderTest;
use crate::views::{self, Of};
use crate::{environment, measure, process};
use servers::{ALL, Kind, OURS, THEIRS};

card!();

/// The experiment.
pub struct Reference;

/// Clients of the closed loop: enough that no worker is ever without work.
const CLIENTS: usize = 64;
const WARM_UP_S: f64 = 0.3;
const RATE: &str = "throughput_per_s";
const CPU: &str = "server_cpu_us";
/// The share of nginx's rate that our server must reach.
const SHARE: f64 = 0.9;

/// Connections and workers. All compared servers share one setting.
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
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings.quick);
        let mut design = Design {
            rounds: if settings.quick { 7 } else { 9 },
            steady: RATE,
            parameters: parameters([
                ("clients", json!(CLIENTS)),
                ("warm_up_s", json!(WARM_UP_S)),
                ("load_s", json!(seconds)),
                ("file_bytes", json!(servers::FILE_BYTES)),
                ("build", json!(environment::build())),
            ]),
            ..Design::default()
        };
        for (group, setting) in settings_of(settings.quick).into_iter().enumerate() {
            for kind in ALL {
                let (name, seconds) = (setting.arm(kind), WARM_UP_S + seconds + 0.5);
                let arm = Arm {
                    name,
                    group,
                    seconds,
                };
                design.offer(arm, kind.name(), kind.lacks());
            }
            for (ours, theirs) in OURS.into_iter().flat_map(|a| THEIRS.map(|b| (a, b))) {
                design.compare([RATE, CPU].map(|metric| Pairing {
                    name: comparison(setting, ours, theirs, metric),
                    a: setting.arm(ours),
                    b: setting.arm(theirs),
                    metric: metric.into(),
                }));
            }
        }
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (setting, kind) =
            parse_arm(&arm.name).ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let mut running = kind.start(setting.workers)?;
        let warm_up = measure::load(&plan(&running, setting, WARM_UP_S, context), context)?;
        running.answers.client_saw(&warm_up);
        let seconds = load_seconds(context.settings.quick);
        let (server, client) = (cpu_ns(&running), own_cpu());
        let found = measure::load(&plan(&running, setting, seconds, context), context)?;
        let (server, client) = (cpu_ns(&running) - server, own_cpu() - client);
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
        let mut all = Vec::new();
        for setting in measured(outcome) {
            for ours in OURS {
                let theirs = Kind::Nginx;
                // The comparison is left out where either server is missing; the result says so.
                let there = |kind: Kind| outcome.variant(&setting.arm(kind)).is_some();
                if !there(ours) || !there(theirs) {
                    continue;
                }
                let ratio =
                    |metric: &str| outcome.ratio(&comparison(setting, ours, theirs, metric));
                let name = format!("{}-{}", setting.name().replace('/', "-"), ours.name());
                let (setting, dearest) = (setting.words(), (1.0 / SHARE).to_string());
                let names = [
                    ("arm", &*name),
                    ("setting", &*setting),
                    ("ours", ours.name()),
                    ("dearest", &*dearest),
                ];
                all.push(CARD.expect_of("{arm}-rate", &names, ratio(RATE)));
                all.push(CARD.expect_of("{arm}-cpu", &names, ratio(CPU)));
            }
        }
        all.extend(measure::sound(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning(meaning(outcome));
        blocks.push(Block::Table(table(outcome)));
        for setting in measured(outcome) {
            blocks.push(Block::Chart(chart(outcome, setting, RATE, "/s")));
            blocks.push(Block::Chart(chart(outcome, setting, CPU, "µs")));
        }
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

/// CPU time of all processes of the server so far, in ns.
fn cpu_ns(server: &ServerUnderTest) -> u64 {
    let all = process::tree(server.pid());
    all.into_iter().map(process::cpu_ns).sum()
}

/// CPU time that this process, the client, has used.
fn own_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn plan(running: &ServerUnderTest, setting: Setting, seconds: f64, context: &Context<'_>) -> Plan {
    let clients = Arrivals::Closed {
        concurrency: CLIENTS,
    };
    let end = measure::for_seconds(seconds);
    let mix = Mix::one(format!("/{}", servers::FILE));
    Plan {
        timeout: Duration::from_secs(10),
        keep_alive: setting.keep_alive,
        ..measure::plan(running.address, clients, end, mix, context.seed)
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
        ("requests/s", Of::Median(RATE)),
        ("server CPU µs", Of::Median(CPU)),
        ("client CPU µs", Of::Median("client_cpu_us")),
        ("p50 ms", Of::Median("latency_ms_p50")),
        ("p99 ms", Of::Median("latency_ms_p99")),
        ("errors", Of::Median("errors")),
    ];
    let rows = outcome.variants.iter().map(|v| (v.name.clone(), v));
    let caption = "Median of the rounds; CPU time is for each request.";
    views::table(caption, &columns, rows)
}

fn chart(outcome: &Outcome, setting: Setting, metric: &str, unit: &str) -> Chart {
    let all = ALL.into_iter().zip([0, 1, 2, 4]);
    let drawn = all.filter_map(|(kind, colour)| {
        let found = outcome.variant(&setting.arm(kind))?;
        Some((Style::ours(kind.name(), colour), found))
    });
    let (what, better) = if metric == RATE {
        ("requests/s", "Higher")
    } else {
        ("CPU time of the server a request", "Lower")
    };
    Chart::bars(
        format!("{}: {what}.", setting.words()),
        &format!("{better} is better. Median and range of the rounds."),
        (unit, false),
        views::bars(drawn, metric),
    )
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
        failing(Reference.judge(outcome))
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
