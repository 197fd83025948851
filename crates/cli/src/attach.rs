//! `wakeone attach`: steer a server that runs already.

use std::io::Read;
use std::net::SocketAddr;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use wakeone::attach::{
    self, AttachCandidate, AttachConfig, AttachManager, Everywhere, Owners, Server, admitted, meant,
};
use wakeone::metrics::{self, Monitor};
use wakeone_control::policy::{Affinity, Policy};
use wakeone_control::repair::repair_all;
use wakeone_control::reserved::set_apart;
use wakeone_kernel::capability::{self, Capability};
use wakeone_kernel::schedule;
use wakeone_kernel::socket::arming::Waiter;
use wakeone_model::layout;
use wakeone_model::listener::Protocol;
use wakeone_observe::{Found, Target};
use wakeone_steering::agent::without_priority;

use crate::doctor::{enter, stop_on_signals};
use crate::runtime_dir::RuntimeDir;
use crate::target;
use wakeone_terminal::{print, print_wrapped};

/// Steer a server that runs already: its workers share a listening socket, or each has its own (SO_REUSEPORT)
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "It returns when the server is steered; an agent stays behind, follows its workers, and attaches again when it comes back.\nExamples: wakeone attach :8080 --rescue\n          wakeone attach unix:/run/app.sock\n          wakeone attach udp://:53 --affinity none"
)]
pub struct Args {
    #[arg(value_name = "TARGET", help = target::FORMS)]
    target: Target,

    /// How a worker is chosen [default: least-connections, for UDP other than QUIC shortest-queue]
    #[arg(long, value_name = "POLICY")]
    policy: Option<Policy>,

    /// Of UDP: datagrams of one flow go to one worker (flow), those of one connection of QUIC (quic), or each is placed by the
    /// policy (none)
    #[arg(long, default_value_t, value_name = "KIND")]
    affinity: Affinity,

    /// Move the queue of a worker that is stuck to the others
    #[arg(long)]
    rescue: bool,

    /// How long connections may wait without one being accepted, while another worker is idle
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = crate::duration::parse)]
    stuck_after: Duration,

    /// Weight of a slot, 1 for the others; repeatable
    #[arg(long, value_name = "SLOT=N", value_parser = crate::run::weight)]
    weight: Vec<(usize, u32)>,

    /// Steer a server of this user too (name or number), beside root's and your own; repeatable
    #[arg(long, value_name = "USER", value_parser = attach::user)]
    owner: Vec<u32>,

    /// Serve OpenMetrics on this address, at /metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = crate::target::to_serve)]
    metrics: Option<SocketAddr>,

    /// Waits and wake-ups are among the metrics: of the kernel's tracepoints, which cost the server some CPU time (`wakeone-lab run cost` measures it)
    #[arg(long, requires = "metrics")]
    metrics_tracing: bool,

    #[command(flatten)]
    log: crate::log::LogArgs,

    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,

    /// Stay in the foreground, under a service manager say; SIGTERM detaches
    #[arg(long)]
    foreground: bool,

    #[command(flatten)]
    runtime: RuntimeDir,

    /// The agent that `attach` leaves behind: says on standard output what it did, then nothing any more.
    #[arg(long, hide = true)]
    agent: bool,
}

/// How often to check the state of the server; a quarter as often while no connection comes.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// With many servers that may take one part in so many of a CPU, unless the pause were longer than this then. Changes of sockets and
/// processes are noticed at once.
const FOLLOW_SHARE: u32 = 100;
const LONGEST_LEISURE: Duration = Duration::from_secs(3);
/// How often to look whether a server that ended is back.
const RETURN_EVERY: Duration = Duration::from_millis(250);

/// Attaches.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(args.target != Target::All, "attach needs a target");
    if args.agent {
        let _ = rustix::process::setsid();
    } else if !args.dry_run && !args.foreground {
        return leave_agent(&args);
    }
    args.log.start();
    wakeone::group::check_weights(&args.weight)
        .map_err(|why| anyhow::anyhow!("attach: --weight {why}"))?;
    // Bound in our network namespace, not in a container's.
    let http = match args.metrics.filter(|_| !args.dry_run) {
        Some(address) => Some(metrics::bind(address).map_err(anyhow::Error::msg)?),
        None => None,
    };
    let network = enter(None, None, &args.target).context("attach")?;
    let paths = args.runtime.paths();
    if !args.dry_run {
        // A listener that an earlier agent left closed is not found.
        repair_all(&paths);
    }
    let found = target::listeners(&args.target, &paths).context("attach")?;
    let (mut found, apart) = set_apart(&paths, found);
    if let Some(namespace) = network {
        let there = |one: Found| one.in_network(namespace);
        found = found.into_iter().map(there).collect();
    }
    anyhow::ensure!(
        !found.is_empty() || apart.is_empty(),
        "cannot attach to {}: {}",
        args.target,
        apart.join("; ")
    );
    let found = meant(found, &args.target);
    if !args.dry_run {
        // This comes first and is complete, so that no later error hides it.
        let missing = lacking(&found);
        anyhow::ensure!(
            missing.is_empty(),
            "cannot attach to {}: it needs {}: start as root or with these capabilities",
            args.target,
            missing.join(" and ")
        );
    }
    let owners = Owners::These(args.owner.clone());
    let candidates = candidates(&found, &owners)?;
    if args.dry_run {
        print(
            &candidates
                .iter()
                .map(|p| plan(p, &args))
                .collect::<String>(),
        )?;
        let missing = lacking(&found);
        anyhow::ensure!(
            missing.is_empty(),
            "attach would fail now: it needs {}: start as root or with these capabilities",
            missing.join(" and ")
        );
        return Ok(ExitCode::SUCCESS);
    }
    let stop = stop_on_signals()?;
    let config = config(&args);
    let mut manager = AttachManager::new(paths);
    if let Some(namespace) = network {
        manager = manager.in_network(namespace);
    }
    for candidate in candidates {
        let attached = manager.keep(candidate, config.clone(), owners.clone())?;
        print_wrapped(&said(attached, &args))?;
    }
    let monitor = Monitor::start(http).context("attach: cannot serve figures")?;
    manager.serve(monitor, args.metrics_tracing);
    if args.agent {
        // Nobody sees what the agent says later.
        if let (true, Err(error)) = (args.rescue, schedule::may_be_real_time()) {
            print_wrapped(&format!("{}\n", without_priority(&error)))?;
        }
        fall_silent().context("attach: cannot let go of standard output")?;
    } else {
        tracing::info!(
            event = "ready",
            "ready: {} is steered until SIGTERM or `wakeone detach {}`",
            args.target,
            args.target.to_argument()
        );
        wakeone_supervisor::notify::ready();
    }
    let mut groups = Everywhere::new(manager);
    follow(&mut groups, &stop, &mut |_| Ok(()))?;
    groups.end();
    tracing::info!(event = "stopped", "stopped");
    Ok(ExitCode::SUCCESS)
}

/// The capabilities that attaching needs and we lack, including those for other users' processes if the server is
/// another user's.
fn lacking(found: &[Found]) -> Vec<String> {
    let others = [Capability::CAP_SYS_PTRACE, Capability::CAP_DAC_READ_SEARCH];
    let hidden = found
        .iter()
        .any(|one| one.hidden > 0 && one.pids.is_empty());
    // One socket that workers share needs no program.
    let shared = |one: &Found| {
        let listener = &one.listener;
        listener.sockets.len() == 1 && [Protocol::Tcp, Protocol::Unix].contains(&listener.protocol)
    };
    let programs = !found.iter().all(shared);
    let needed = capability::NEEDED.into_iter().map(|(needed, _)| needed);
    let needed = needed.filter(|_| programs);
    capability::missing_of(needed.chain(others.into_iter().filter(|_| hidden)))
}

fn config(args: &Args) -> AttachConfig {
    AttachConfig {
        policy: args.policy,
        affinity: args.affinity,
        rescue: args.rescue,
        stuck_after: args.stuck_after,
        weights: args.weight.clone(),
    }
}

/// The target's listeners that can be steered. If there is only one listener and it cannot be, that is an error.
fn candidates(found: &[Found], owners: &Owners) -> anyhow::Result<Vec<AttachCandidate>> {
    let (found, mut refused) = admitted(found.to_vec(), owners);
    let mut candidates = Vec::new();
    let mut unfit = None;
    for found in &found {
        match attach::examine(found) {
            Ok(candidate) => candidates.push(candidate),
            Err(error) => unfit = Some(error),
        }
    }
    refused.extend(unfit);
    if candidates.is_empty()
        && let Some(last) = refused.pop()
    {
        return Err(last.into());
    }
    // A server's socket for its own control is none that the user meant.
    refused.retain(|error| !matches!(error, attach::Error::OneWorker { .. }));
    for error in refused {
        crate::complain(&error.to_string());
    }
    Ok(candidates)
}

fn plan(candidate: &AttachCandidate, args: &Args) -> String {
    if let Some(sharing) = &candidate.sharing {
        let policy = config(args).policy_of(candidate.protocol());
        return plan_of_one_queue(candidate, &sharing.workers, policy);
    }
    let udp = candidate.protocol() == Protocol::Udp;
    let mut text = format!(
        "{} would be steered by {}, as `{}`: {} sockets{}\n",
        candidate.address(),
        how(
            candidate.protocol(),
            config(args).policy_of(candidate.protocol()),
            args
        ),
        candidate.name,
        candidate.members.len(),
        if udp {
            String::new()
        } else {
            format!(
                ", {} counted in",
                layout::counted(candidate.open as u64, "open connections")
            )
        }
    );
    for member in &candidate.members {
        text += &format!(
            "  socket {:<12} {}\n",
            member.remote.inode,
            match member.worker() {
                Some(worker) => format!("process {worker}"),
                None => format!(
                    "nobody was seen waiting; borrowed from process {}",
                    member.remote.pid
                ),
            }
        );
    }
    text
}

fn plan_of_one_queue(candidate: &AttachCandidate, workers: &[Waiter], policy: Policy) -> String {
    if let Err(why) = policy.fits_one_queue() {
        return format!("{} would not be steered: {why}\n", candidate.address());
    }
    let whose = match policy {
        Policy::RoundRobin => "got the fewest",
        _ => "have least to do",
    };
    let mut text = format!(
        "{} would be steered by {policy}, as `{}`: {} workers share one queue, and those are woken that {whose}; {}\n",
        candidate.address(),
        candidate.name,
        workers.len(),
        layout::counted(candidate.open as u64, "open connections")
    );
    for worker in workers {
        let exclusive = match worker.is_exclusive() {
            true => ", with EPOLLEXCLUSIVE",
            false => "",
        };
        let set = worker.entry.epoll;
        text += &format!(
            "  process {:<12} epoll set {set}{exclusive}\n",
            worker.entry.pid
        );
    }
    text
}

/// Describes the policy, and the other options.
fn how(protocol: Protocol, policy: Policy, args: &Args) -> String {
    if protocol == Protocol::Udp {
        return format!("{policy}, affinity {}", args.affinity);
    }
    format!("{policy}{}", if args.rescue { " with rescue" } else { "" })
}

fn said(server: &Server, args: &Args) -> String {
    let attached = match server {
        Server::QueueEach(attached) => attached,
        Server::OneQueue(one) => {
            return format!(
                "attached: {}, one queue by {}; {}\n",
                one.name(),
                server.policy(),
                layout::counted(one.open, "open connections")
            );
        }
    };
    let how = how(attached.protocol(), attached.policy, args);
    if attached.protocol() == Protocol::Udp {
        let earlier = match args.affinity {
            Affinity::Flow => {
                "; for five minutes new flows go by the kernel's hash, as those of before did"
            }
            Affinity::Quic => {
                "; connections of before stay where they are, but follow no client to another address"
            }
            Affinity::None => "",
        };
        return format!("attached: {} by {how}{earlier}\n", attached.name());
    }
    let unattributed = match attached.recounted.unattributed {
        0 => String::new(),
        n => format!(" ({n} belong to no worker of now and stay uncounted)"),
    };
    format!(
        "attached: {} by {how}; {} counted in{unattributed}\n",
        attached.name(),
        layout::counted(attached.recounted.counted, "open connections")
    )
}

/// Starts this program again as an agent, prints its output until it is ready, and leaves it behind.
fn leave_agent(args: &Args) -> anyhow::Result<ExitCode> {
    let own = std::env::current_exe().context("attach: cannot find the program itself")?;
    let mut agent = Command::new(own)
        .args(std::env::args_os().skip(1))
        .arg("--agent")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("attach: cannot start the agent")?;
    let mut text = String::new();
    if let Some(mut out) = agent.stdout.take() {
        out.read_to_string(&mut text)
            .context("attach: cannot hear the agent")?;
    }
    print_wrapped(&text)?;
    if text.is_empty() {
        let status = agent.wait().context("attach: cannot wait for the agent")?;
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        return Ok(ExitCode::from(code.unwrap_or(1)));
    }
    print_wrapped(&format!(
        "an agent follows it (pid {}); `wakeone detach {}` ends it\n",
        agent.id(),
        args.target.to_argument()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Redirects our output to nowhere: a reader that waits for its end has all of it then. A write to a descriptor that only
/// names a folder fails with EBADF, which Rust's output ignores; some containers have no /dev/null that a user may write to.
fn fall_silent() -> std::io::Result<()> {
    let null = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(rustix::stdio::dup2_stderr(&null)?)
}

/// Follows the groups until told to stop. A group whose server ended is attached again when the server is back.
/// `between` is called between two rounds.
pub fn follow(
    groups: &mut Everywhere,
    stop: &AtomicBool,
    between: &mut dyn FnMut(&mut Everywhere) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut looked = Instant::now();
    let mut due = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let rest = due.saturating_duration_since(Instant::now());
        let noticed = groups.wait(rest.min(RETURN_EVERY.saturating_sub(looked.elapsed())));
        between(groups)?;
        let begun = Instant::now();
        if noticed || begun >= due {
            groups.follow().iter().for_each(crate::log::event);
            let leisure = (begun.elapsed() * FOLLOW_SHARE).min(LONGEST_LEISURE);
            let time = match groups.is_quiet() {
                true => 4 * FOLLOW_EVERY,
                false => FOLLOW_EVERY,
            };
            due = Instant::now() + groups.pause(time.max(leisure));
        }
        if looked.elapsed() >= RETURN_EVERY {
            groups.attach().iter().for_each(crate::log::event);
            looked = Instant::now();
            if groups.is_abandoned() {
                tracing::info!(event = "gone", "its network namespace has ended");
                return Ok(());
            }
        }
    }
    Ok(())
}
