//! `wakeone top`: shows a running server live, with a row for each worker.

mod fleet;
mod live;
mod replay;
mod screen;
pub mod steering;

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use wakeone_control::paths::Paths;
use wakeone_control::reserved::set_apart;
use wakeone_observe::Target;
use wakeone_top::{Frame, Recorder, plain};

use crate::runtime_dir::RuntimeDir;
use crate::{doctor, target};
use live::Live;
use wakeone_terminal::{style, to_json};

/// Show a running server live: a row a worker
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Keys: ? explains them. To a pipe it writes plain text.\nExamples:\n  wakeone top :8080 --record slow.jsonl\n  wakeone top --replay slow.jsonl\n  wakeone top --from node1:9464 --from node2:9464"
)]
pub struct Args {
    #[arg(value_name = "TARGET", help = target::or_all())]
    target: Option<Target>,

    /// How often to show anew, from 100ms to 1h
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,

    /// Look for one interval, print it, end; of a recording its last refresh
    #[arg(long)]
    once: bool,

    /// As JSON
    #[arg(long, requires = "once")]
    json: bool,

    /// Write every refresh to a new file, a line of JSON for each listener
    #[arg(long, value_name = "FILE", conflicts_with = "replay")]
    record: Option<PathBuf>,

    /// Show a recording at its own pace; it takes no privilege and no server
    #[arg(long, value_name = "FILE", conflicts_with_all = ["target", "netns", "pid", "no_tracing", "interval"])]
    replay: Option<PathBuf>,

    /// Show the groups of other machines, the worst first: an address where an agent serves metrics, or prometheus:URL (repeat for
    /// more)
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["target", "record", "replay", "netns", "pid", "no_tracing"])]
    from: Vec<fleet::From>,

    /// Look into another network namespace: a name in /run/netns, or a path
    #[arg(long, value_name = "NAME")]
    netns: Option<String>,

    /// Look into the network namespace of this process, a container's say
    #[arg(long, value_name = "PID", conflicts_with = "netns")]
    pid: Option<u32>,

    /// Use /proc and sock_diag only, no tracepoints
    #[arg(long)]
    no_tracing: bool,

    #[command(flatten)]
    runtime: RuntimeDir,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = crate::duration::parse(text)?;
    let allowed = Duration::from_millis(100)..=Duration::from_secs(3600);
    if allowed.contains(&interval) {
        Ok(interval)
    } else {
        Err("it must be from 100ms to 1h".into())
    }
}

/// Shows the server or the recording.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let stop = doctor::stop_on_signals()?;
    // Closing the terminal ends us too.
    signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(&stop))
        .context("top: cannot catch signals")?;
    let interactive = !args.once && io::stdout().is_terminal() && io::stdin().is_terminal();
    if !args.from.is_empty() {
        let shown = match interactive {
            true => fleet::on_screen(&args.from, args.interval, &stop),
            false => fleet::as_text(&args, &stop),
        };
        return shown.context("top").map(|()| ExitCode::SUCCESS);
    }
    if let Some(path) = &args.replay {
        let shown = if interactive {
            replay::on_screen(path, &stop)
        } else {
            replay::as_text(path, args.once, args.json, &stop)
        };
        return shown
            .with_context(|| format!("top: cannot replay {}", path.display()))
            .map(|()| ExitCode::SUCCESS);
    }
    let mut live = watched(&args).context("top")?;
    if interactive {
        screen::live(&mut live, args.interval, &stop)
    } else {
        as_text(&mut live, &args, &stop)
    }
    .context("top")?;
    Ok(ExitCode::SUCCESS)
}

/// Begins to watch the listeners of the arguments.
fn watched(args: &Args) -> anyhow::Result<Live> {
    let target = args.target.clone().unwrap_or(Target::All);
    let runtime = args.runtime.dir();
    doctor::enter(args.netns.as_deref(), args.pid, &target)?;
    let paths = Paths::of(&runtime);
    let (mut found, apart) = set_apart(&paths, target::listeners(&target, &paths)?);
    anyhow::ensure!(
        !found.is_empty() || apart.is_empty(),
        "{}",
        apart.join("; ")
    );
    if target == Target::All {
        found.retain(|f| !f.pids.is_empty() || f.hidden > 0);
        anyhow::ensure!(
            !found.is_empty(),
            "nothing listens in this network namespace; --netns looks into another one"
        );
    }
    let tracing = !args.no_tracing && target::may_trace(&found);
    let recorder = args.record.as_deref().map(record_to).transpose()?;
    Live::start(&found, tracing, paths, recorder)
}

/// Creates a recording that only its owner may read: it shows the work of a server.
fn record_to(path: &Path) -> anyhow::Result<Recorder<File>> {
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map(Recorder::new)
        .map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => anyhow::anyhow!(
                "cannot record to {}: it is there already; name a new file",
                path.display()
            ),
            _ => anyhow::anyhow!("cannot record to {}: {error}", path.display()),
        })
}

/// Prints each refresh as text, until told to stop or the reader has ended.
fn as_text(live: &mut Live, args: &Args, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut noted = false;
    loop {
        live.look_for(args.interval, None, &mut |wait| {
            std::thread::sleep(wait);
            Ok(!stop.load(Ordering::Relaxed))
        })?;
        let frames = live.lap()?;
        let mut text = texts(&frames, live.before(), args.json)?;
        if !noted && !args.json {
            // Anything that cannot be observed is noted once.
            text.push_str(&notes(&frames));
            noted = true;
        }
        let last = args.once || stop.load(Ordering::Relaxed);
        if !wrote(&text)? || last {
            return Ok(());
        }
        wrote("\n")?;
    }
}

/// Formats frames as text or as JSON; `before`: those of the refresh before.
fn texts(frames: &[Frame], before: &[Frame], json: bool) -> anyhow::Result<String> {
    if json {
        let whole =
            serde_json::json!({ "listeners": frames.iter().map(report).collect::<Vec<_>>() });
        return Ok(to_json(&whole)?);
    }
    let earlier = |frame: &Frame| {
        let same = before.iter().find(|b| b.place() == frame.place());
        same.and_then(|b| b.steering.as_ref())
    };
    let texts: Vec<String> = frames
        .iter()
        .map(|frame| plain::text(frame, earlier(frame), style()))
        .collect();
    Ok(texts.join("\n"))
}

fn notes(frames: &[Frame]) -> String {
    let mut notes: Vec<String> = frames.iter().flat_map(|f| plain::notes(&f.watch)).collect();
    notes.sort();
    notes.dedup();
    notes.iter().map(|note| format!("note: {note}\n")).collect()
}

/// One listener's part of the JSON: doctor's report, and how the listener is steered.
fn report(frame: &Frame) -> serde_json::Value {
    let watch = &frame.watch;
    serde_json::json!({
        "address": watch.last.listener.address.to_string(),
        "protocol": watch.last.listener.protocol.to_string(),
        "accept_model": watch.model.name(),
        "totals": watch.totals(),
        "workers": watch.rows(),
        "queues": watch.queues(),
        "steering": frame.steering,
        "view": watch.view,
    })
}

/// Writes a text; false if its reader has ended, which is no failure.
fn wrote(text: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}
