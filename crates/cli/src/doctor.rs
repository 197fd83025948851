//! `wakeone doctor`: explains how the kernel treats a running server, and how to improve that.

mod prediction;

use std::cell::LazyCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use wakeone_control::reserved::set_apart;
use wakeone_control::status::Group;
use wakeone_kernel::netns;
use wakeone_kernel::proc::process::has_own_proc;
use wakeone_kernel::proc::waits::Processes;
use wakeone_model::layout::{Style, wrap};
use wakeone_model::snapshot::{Queue, Row, Totals, View, Watch};
use wakeone_model::verdict::{self, Finding};
use wakeone_observe::{Target, find, text, watcher};

use crate::runtime_dir::RuntimeDir;
use crate::target;
use crate::top::steering;
use prediction::Prediction;
use wakeone_terminal::{print, style, to_json};

/// Say how a running server takes connections, what is wrong with it, and what to do
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit code: 0 healthy, 3 something was found, 1 it could not be told, 2 bad arguments.\nExamples:\n  wakeone doctor :8080 --for 30s\n  wakeone doctor unix:/run/app.sock\n  wakeone doctor --self"
)]
pub struct Args {
    #[arg(value_name = "TARGET", help = target::or_all())]
    target: Option<Target>,

    /// Say what this kernel and these privileges allow, feature by feature, and exit; 1 if one is missing or takes root
    #[arg(long = "self", conflicts_with_all = ["target", "duration", "netns", "pid", "no_tracing"])]
    itself: bool,

    /// How long to watch
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = watching_time)]
    duration: Duration,

    /// Look into another network namespace: a name in /run/netns, or a path
    #[arg(long, value_name = "NAME")]
    netns: Option<String>,

    /// Look into the network namespace of this process, a container's say
    #[arg(long, value_name = "PID", conflicts_with = "netns")]
    pid: Option<u32>,

    /// Use /proc and sock_diag only, no tracepoints, and look at no datagrams
    #[arg(long)]
    no_tracing: bool,

    /// As JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    runtime: RuntimeDir,
}

/// One listener's part of the JSON.
#[derive(Serialize)]
struct Report<'a> {
    address: String,
    protocol: String,
    accept_model: String,
    model: &'a wakeone_model::accept::AcceptModel,
    healthy: bool,
    /// Whether the datagrams that came are QUIC's; `None` where none was looked at.
    is_quic: Option<bool>,
    findings: &'a [Finding],
    totals: Totals,
    workers: Vec<Row>,
    queues: Vec<Queue>,
    view: &'a View,
    /// What other policies would bring, simulated; `None` where that cannot be told.
    prediction: Option<&'a Prediction>,
    /// Why it cannot.
    not_predicted: Option<&'a str>,
}

/// A listener as it was watched, and what follows from that.
struct Judged {
    watch: Watch,
    findings: Vec<Finding>,
    prediction: Result<Prediction, String>,
}

/// Exit code for findings.
const FOUND: u8 = 3;
/// Exit code if the server could not be judged.
const NOT_TOLD: u8 = 1;
/// In a shorter time, nothing happens that could be judged.
const SHORTEST: Duration = Duration::from_millis(100);

fn watching_time(text: &str) -> Result<Duration, String> {
    let time = crate::duration::parse(text)?;
    if time < SHORTEST {
        return Err(format!(
            "'{text}' is too short to see anything: 100ms or more"
        ));
    }
    Ok(time)
}

/// Watches and reports.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.itself {
        return crate::self_check::run(args.json);
    }
    let target = args.target.clone().unwrap_or(Target::All);
    enter(args.netns.as_deref(), args.pid, &target).context("doctor")?;
    let paths = args.runtime.paths();
    let found = target::listeners(&target, &paths).context("doctor")?;
    let (mut found, apart) = set_apart(&paths, found);
    if target == Target::All {
        found.retain(|f| !f.pids.is_empty() || f.hidden > 0);
    }
    let stop = stop_on_signals()?;
    let cancelled = || stop.load(Ordering::Relaxed);
    let tracing = !args.no_tracing && target::may_trace(&found);
    let progress = Progress::of(args.duration);
    let watches = watcher::watch_all(&found, tracing, args.duration, &mut || {
        progress.show();
        cancelled()
    });
    progress.end();
    let watches = watches.context("doctor")?;
    // If we may not read the state of root's groups, the report treats the steering as unknown.
    let groups = steering::groups(&paths);
    let processes = LazyCell::new(Processes::read);
    let judged: Vec<Judged> = watches
        .into_iter()
        .map(|mut watch| {
            let group = steering::group_of(&groups, &watch);
            watch.steered = group.map(|_| true);
            watch.affinity = group.and_then(|group| Some(group.affinity?.to_string()));
            watch.heavy_flows = group.and_then(|group| group.heavy_flows).unwrap_or(0);
            let orphans =
                group.map_or_else(Vec::new, |group| group.find_orphans(&paths, &processes));
            watch.orphans = orphans.iter().map(|orphan| orphan.pid).collect();
            watch.view.missing.extend(verdict::notes(&watch));
            Judged {
                findings: verdict::judge(&watch),
                prediction: prediction::predict(&watch),
                watch,
            }
        })
        .collect();
    if args.json {
        print(&json(&judged)?)?;
    } else {
        print(&texts(&judged, &groups, &apart, &target, style()))?;
    }
    let ill = judged.iter().any(|one| !one.findings.is_empty());
    let unseen = target != Target::All && !judged.iter().any(|one| text::told(&one.watch));
    Ok(if ill {
        ExitCode::from(FOUND)
    } else if unseen {
        ExitCode::from(NOT_TOLD)
    } else {
        ExitCode::SUCCESS
    })
}

/// Checks that pids mean the processes that /proc shows.
///
/// # Errors
/// They do not.
pub fn check_proc() -> anyhow::Result<()> {
    anyhow::ensure!(
        has_own_proc(),
        "/proc is not mounted, or shows another PID namespace than the one that this runs in: with nsenter enter both (--pid and --mount), or run it outside and give a process of the container, as pid:PID"
    );
    Ok(())
}

/// Enters the target's network namespace, if it is another one: one by name, that of a process, or the target's own.
/// Returns the inode of a namespace that was entered.
pub fn enter(
    netns: Option<&str>,
    pid: Option<u32>,
    target: &Target,
) -> anyhow::Result<Option<u64>> {
    check_proc()?;
    let place = match (netns, pid, target) {
        (Some(name), _, _) if name.contains('/') => PathBuf::from(name),
        (Some(name), _, _) => Path::new("/run/netns").join(name),
        (None, Some(pid), _) => format!("/proc/{pid}/ns/net").into(),
        // A process in another namespace is observed there.
        (None, None, Target::Pid(pid) | Target::Number(pid))
            if !netns::is_ours(*pid) && find(target).is_err() =>
        {
            format!("/proc/{pid}/ns/net").into()
        }
        _ => return Ok(None),
    };
    netns::enter(&place).with_context(|| {
        format!(
            "cannot enter the network namespace {}; it must exist, and entering it takes CAP_SYS_ADMIN",
            place.display()
        )
    })?;
    Ok(netns::own().ok())
}

/// The progress of the watching, on a terminal's standard error.
struct Progress {
    bar: ProgressBar,
    begun: Instant,
}

impl Progress {
    fn of(duration: Duration) -> Self {
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        // It hides itself if standard error is no terminal.
        let bar = ProgressBar::new(millis);
        let seconds = duration.as_secs_f64();
        bar.set_style(
            ProgressStyle::with_template("{msg} {wide_bar} {percent:>3}%")
                .unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        bar.set_message(format!("watching for {seconds} s"));
        Self {
            bar,
            begun: Instant::now(),
        }
    }

    fn show(&self) {
        let passed = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.bar.set_position(passed);
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// A flag that SIGINT and SIGTERM set.
pub fn stop_on_signals() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot catch signals")?;
    }
    Ok(stop)
}

fn json(judged: &[Judged]) -> anyhow::Result<String> {
    let reports: Vec<Report<'_>> = judged
        .iter()
        .map(
            |Judged {
                 watch,
                 findings,
                 prediction,
             }| Report {
                address: watch.last.listener.address.to_string(),
                protocol: watch.last.listener.protocol.to_string(),
                accept_model: watch.model.name(),
                model: &watch.model,
                healthy: findings.is_empty() && text::told(watch),
                is_quic: watch.is_quic(),
                findings,
                totals: watch.totals(),
                workers: watch.rows(),
                queues: watch.queues(),
                view: &watch.view,
                prediction: prediction.as_ref().ok(),
                not_predicted: prediction.as_ref().err().map(String::as_str),
            },
        )
        .collect();
    let whole = serde_json::json!({ "listeners": reports });
    Ok(to_json(&whole)?)
}

fn texts(
    judged: &[Judged],
    groups: &[Group],
    apart: &[String],
    target: &Target,
    style: Style,
) -> String {
    let mut parts: Vec<String> = judged
        .iter()
        .map(
            |Judged {
                 watch,
                 findings,
                 prediction,
             }| {
                let steered = steering::of(groups, watch).map(|one| steering::line(&one));
                let steered = steered.or_else(|| steering::replaced(groups, watch));
                let steered = steered.map(|line| wrap(&line, "  ", style).join("\n") + "\n");
                let predicted = prediction.as_ref().map(|one| prediction::lines(one, style));
                text::report(watch, findings, style)
                    + &steered.unwrap_or_default()
                    + &predicted.unwrap_or_default()
            },
        )
        .collect();
    if judged.iter().any(|one| text::told(&one.watch)) {
        parts.push(text::legend(&parts.concat(), style));
    }
    parts.extend(
        apart
            .iter()
            .map(|one| wrap(one, "", style).join("\n") + "\n"),
    );
    if parts.is_empty() {
        parts.push(format!("nothing listens on {target}\n"));
    }
    // Anything that cannot be observed is noted once, not for each listener.
    let missing: BTreeSet<&String> = judged
        .iter()
        .flat_map(|one| &one.watch.view.missing)
        .collect();
    let note = |text: &&String| wrap(text, "note: ", style).join("\n") + "\n";
    let notes: String = missing.iter().map(note).collect();
    if !notes.is_empty() {
        parts.push(notes);
    }
    parts.join("\n")
}
