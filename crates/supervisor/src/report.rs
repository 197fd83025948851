//! The supervisor's log: a sentence for people, with fields for programs, one line for each event.

use super::listen::Endpoint;
use super::process::Ending;
use super::roll::Roll;
use super::slot::Worker;
use super::spawn::SpawnError;
use super::wear::Wear;
use super::wrapper;
use nix::sys::signal::Signal;
use std::time::Duration;
use wakeone_control::steer::SteerEvent;
use wakeone_model::layout::counted;

pub fn adopted(slot: usize, pid: u32) {
    tracing::info!(
        event = "adopted",
        slot,
        pid,
        "worker {slot} (pid {pid}) was found running and is taken over"
    );
}

/// Logs that all workers are ready. Returns the sentence, which is also sent elsewhere.
pub fn ready<'a>(workers: impl Iterator<Item = &'a Worker>, places: &str) -> String {
    let pids: Vec<String> = workers
        .map(|worker| worker.process.pid().to_string())
        .collect();
    let count = pids.len();
    let sentence = format!("{} on {places}", counted(count as u64, "workers"));
    let pids = pids.join(" ");
    tracing::info!(
        event = "ready",
        workers = count,
        listen = places,
        pids,
        "ready: {sentence}, pids {pids}"
    );
    sentence
}

pub fn never_seen(slot: usize, pid: u32) {
    tracing::warn!(
        event = "unseen",
        slot,
        pid,
        "worker {slot} (pid {pid}) was never seen to accept; it is given connections now"
    );
}

pub fn on_its_way(slot: usize, pid: u32, command: &[String]) {
    let program = command.first().map_or("", String::as_str);
    tracing::warn!(
        event = "note",
        slot,
        pid,
        "worker {slot} (pid {pid}) has not begun `{program}` yet: the kernel still opens it; look whether its file system answers with `ls -l`"
    );
}

/// Whether a command contains the number of a listener.
pub fn names_listener(command: &[String]) -> bool {
    command.iter().any(|word| word.contains("{fd"))
}

/// Logs that a worker had shut down a listener that all share.
pub fn listens_again(endpoint: &Endpoint) {
    tracing::warn!(
        event = "shut",
        address = %endpoint,
        "a worker shut down {endpoint}, which all workers share; it listens again"
    );
}

/// The hint where a command names no listener.
const NAMES_NONE: &str = "give it the listener by {fd} in its command, or, as root, the port by {port} if it takes no listener; or start it as it is by `wakeone run -- CMD`";

/// Logs that a worker has closed its listeners.
pub fn nowhere(slot: usize, pid: u32, command: &[String]) {
    let hint = match wrapper::advice(command) {
        Some(advice) => advice,
        None if names_listener(command) => "its command names {fd}, but it has closed that descriptor: give it the option by which this server takes one".to_owned(),
        None => NAMES_NONE.to_owned(),
    };
    tracing::warn!(
        event = "nowhere",
        slot,
        pid,
        "worker {slot} (pid {pid}) is not ready: it has closed the listener that it was given, and listens nowhere; {hint}"
    );
}

/// Logs that a worker does not accept, and may not know of its listeners.
pub fn silent(slot: usize, pid: u32) {
    tracing::warn!(
        event = "silent",
        slot,
        pid,
        "worker {slot} (pid {pid}) does not accept yet: without {{fd}} in its command it must take its listener by LISTEN_FDS, as from systemd; if this server does not, write {{fd}} where it takes a descriptor, or, as root, {{port}} where it takes a port; or start it as it is by `wakeone run -- CMD`"
    );
}

/// Logs that a worker may hang in accept.
pub fn blocking(slot: usize, pid: u32) {
    tracing::warn!(
        event = "blocking",
        slot,
        pid,
        "worker {slot} (pid {pid}) waits for its listener by epoll, and the listener is blocking: an event loop that accepts until no connection is left hangs in accept4, and answers nobody; start it with --nonblocking, or have the server set O_NONBLOCK (tokio: `set_nonblocking(true)`)"
    );
}

/// Logs that a worker listens, but not where connections arrive.
pub fn elsewhere(slot: usize, pid: u32, at: &str, command: &[String]) {
    let hint = if names_listener(command) {
        "its command names {fd}, but it does not accept from that descriptor: give it the option by which this server takes one"
    } else {
        NAMES_NONE
    };
    tracing::warn!(
        event = "elsewhere",
        slot,
        pid,
        listen = at,
        "worker {slot} (pid {pid}) is not ready: it listens on {at}, not on the listener that it was given; {hint}"
    );
}

/// Logs that a worker that opens its own listener does so elsewhere.
pub fn own_elsewhere(slot: usize, pid: u32, at: &str, wanted: &str) {
    tracing::warn!(
        event = "elsewhere",
        slot,
        pid,
        listen = at,
        "worker {slot} (pid {pid}) is not ready: it listens on {at}, not on {wanted}; have it listen there, or write its address after -l"
    );
}

/// Logs why a worker's own listener cannot be had.
pub fn own_refused(slot: usize, pid: u32, why: &str) {
    tracing::error!(
        event = "own",
        slot,
        pid,
        "worker {slot} (pid {pid}) is not ready: {why}"
    );
}

/// Logs that a worker's first process has ended and others of its group have not.
pub fn left(slot: usize, pid: u32) {
    tracing::info!(
        event = "left",
        slot,
        pid,
        "worker {slot} (pid {pid}) has ended and left processes in its group {pid}: they were asked to end"
    );
}

/// Logs that they did not end.
pub fn kill_left(slot: usize, pid: u32) {
    tracing::warn!(
        event = "left",
        slot,
        pid,
        "processes that worker {slot} left in its group {pid} did not end within the grace, and are killed"
    );
}

pub fn beside(slot: usize, pid: u32) {
    tracing::debug!(
        event = "note",
        slot,
        pid,
        "a new worker {slot} starts as pid {pid}, beside the one that it replaces"
    );
}

/// Why a rolling restart stops, for [`roll_failed`].
pub fn not_switched(slot: usize, why: &str) -> String {
    format!("connections cannot be given to the new worker {slot}: {why}")
}

/// The reason if the new worker ended too soon, for [`roll_failed`].
pub fn ended_soon(slot: usize) -> String {
    format!("the new worker {slot} ended before the old one did")
}

/// The reason if no new worker could be started, for [`roll_failed`].
pub fn no_room(slot: usize, error: &SpawnError) -> String {
    format!("no new worker {slot} could be started if the old one ended: {error}")
}

pub fn stop_first(why: &SpawnError) {
    let remedy = if why.lacks_descriptors() {
        "raise the limit with `ulimit -Hn` (LimitNOFILE= of a unit) before the next start"
    } else {
        "see the limits of processes and memory, `ulimit -u` and those of its cgroup"
    };
    tracing::warn!(
        event = "degraded",
        "there is no room for a new worker beside the old one ({why}): each old worker ends first; {remedy}"
    );
}

pub fn few_descriptors(needed: u64, limit: u64) {
    tracing::warn!(
        event = "degraded",
        needed,
        limit,
        "rolling restarts end each old worker first: to start new ones beside them takes {needed} descriptors, and the limit is {limit}; raise it with `ulimit -Hn {needed}`"
    );
}

/// Logs that a worker ended soon after it had taken over.
pub fn switched_back(slot: usize, story: &str) {
    tracing::warn!(
        event = "death",
        slot,
        "{story}; the old worker {slot} serves on"
    );
}

pub fn restart(slot: usize, pid: u32) {
    tracing::info!(
        event = "restart",
        slot,
        pid,
        "worker {slot} restarted as pid {pid}"
    );
}

/// Logs that the number of workers changes.
pub fn scales(now: usize, wanted: usize) {
    let wanted_ones = counted(wanted as u64, "workers");
    tracing::info!(
        event = "scale",
        before = now,
        workers = wanted,
        "{wanted_ones} from now on, instead of {now}"
    );
}

/// Logs that a worker is one too many.
pub fn leaves(slot: usize, pid: u32) {
    tracing::info!(
        event = "scale",
        slot,
        pid,
        "worker {slot} (pid {pid}) gets no new connections, and ends"
    );
}

/// Logs that it does not.
pub fn not_scaled(signal: Signal, wanted: usize, why: &str) {
    let wanted_ones = counted(wanted as u64, "workers");
    tracing::warn!(event = "scale", "{signal}: {wanted_ones} cannot be: {why}");
}

/// Logs that it stays as it is, though others were asked for at the start.
pub fn stays(workers: usize, wanted: usize, why: &str) {
    let ones = counted(workers as u64, "workers");
    tracing::warn!(
        event = "scale",
        workers,
        "there are {ones}, and {wanted} cannot be: {why}"
    );
}

/// Describes how a worker ended, for [`end`] or [`retry`].
pub fn story(slot: usize, worker: &Worker, ending: Ending, queued: u32) -> String {
    if worker.ended_well(ending) {
        return format!("worker {slot} (pid {}) ended", worker.process.pid());
    }
    let moved = if queued > 0 {
        format!("; its queue of {queued} was moved")
    } else {
        String::new()
    };
    format!(
        "worker {slot} (pid {}) {ending}{moved}",
        worker.process.pid()
    )
}

pub fn no_start(slot: usize, error: &SpawnError) -> String {
    format!("worker {slot} cannot be started: {error}")
}

/// Logs the end of a worker that was asked to end.
pub fn end(slot: usize, story: &str) {
    tracing::info!(event = "end", slot, "{story}");
}

/// Logs that a slot has no worker, and when the next one is tried.
pub fn retry(slot: usize, story: &str, delay: Duration, failures: u32) {
    let restart_ms = delay.as_millis() as u64;
    let often = if failures > 2 {
        format!(" (failed {failures} times)")
    } else {
        String::new()
    };
    tracing::warn!(
        event = "death",
        slot,
        restart_ms,
        failures,
        "{story}; restart in {restart_ms} ms{often}"
    );
}

pub fn kill_one(slot: usize) {
    tracing::warn!(
        event = "kill",
        slot,
        "worker {slot} did not end within the grace and is killed"
    );
}

pub fn kill_all(workers: usize) {
    let (count, are) = (
        counted(workers as u64, "workers"),
        if workers == 1 { "is" } else { "are" },
    );
    tracing::warn!(
        event = "kill",
        workers,
        "{count} did not end in time and {are} killed"
    );
}

/// Tells why a worker is replaced.
pub fn worn(slot: usize, pid: u32, wear: &Wear) -> String {
    format!("worker {slot} (pid {pid}): {wear}")
}

/// Logs what the threads of a worker that hangs do.
pub fn threads(slot: usize, pid: u32, lines: &[String]) {
    for line in lines {
        tracing::warn!(
            event = "hang",
            slot,
            pid,
            "worker {slot} hangs: process {pid}, {line}"
        );
    }
}

pub fn no_hook(error: &SpawnError) {
    tracing::warn!(
        event = "note",
        "the command of --on-hang cannot be run: {error}"
    );
}

pub fn roll_begins(why: &str) {
    tracing::info!(event = "roll", "{why}: rolling restart, a worker at a time");
}

pub fn roll_follows() {
    tracing::info!(
        event = "roll",
        "SIGHUP: a rolling restart is under way; another follows it"
    );
}

/// `kept`: the slot's old worker still serves.
pub fn roll_failed(slot: usize, roll: &Roll, kept: bool) {
    let (replaced, untouched) = roll.progress();
    let left = untouched + usize::from(kept);
    let hint = if kept && roll.reason().is_none() {
        "; if two of them cannot run side by side, use --restart stop-first"
    } else {
        ""
    };
    let unready = format!("the new worker {slot} did not get ready");
    let why = roll.reason().unwrap_or(&unready);
    let count = counted(left as u64, "workers");
    let run = if left == 1 {
        "runs on as it was"
    } else {
        "run on as they were"
    };
    tracing::error!(
        event = "roll",
        slot,
        replaced,
        left,
        "the rolling restart stops: {why}; {count} {run}{hint}"
    );
}

pub fn roll_done(roll: &Roll) {
    let (replaced, _) = roll.progress();
    tracing::info!(
        event = "roll",
        replaced,
        "rolling restart done: {} replaced",
        counted(replaced as u64, "workers")
    );
}

pub fn stopping(signal: Signal, grace: Duration, refuse: bool) {
    let new = if refuse {
        "new connections are refused"
    } else {
        "no new connections"
    };
    tracing::info!(
        event = "stopping",
        "{signal}: {new}; workers have {grace:?} to end"
    );
}

pub fn stopped() {
    tracing::info!(event = "stopped", "stopped");
}

/// Logs an event of the steering.
pub fn steering(event: SteerEvent) {
    match event {
        // `MoveLog` sums these up.
        SteerEvent::Stuck { .. } => {}
        SteerEvent::Rescued(one) => one.log(format_args!("worker {}", one.slot)),
        SteerEvent::Resumed { slot, after_ms } => {
            tracing::info!(
                event = "resumed",
                slot,
                after_ms,
                "worker {slot} accepts again after {after_ms} ms"
            );
        }
        SteerEvent::Summary { slot, moved, text } => {
            tracing::info!(event = "moved", slot, moved, "{text}");
        }
        SteerEvent::Note(note) => tracing::info!(event = "note", "{note}"),
    }
}

/// Formats a command line as a person would type it, cut if it is long.
pub fn shown(command: &[String]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,@%+{}".contains(&byte);
    let quote = |word: &String| {
        let quoted = || format!("'{}'", word.replace('\'', "'\\''"));
        if !word.is_empty() && word.bytes().all(plain) {
            word.clone()
        } else {
            quoted()
        }
    };
    let line = command.iter().map(quote).collect::<Vec<_>>().join(" ");
    let cut: String = line.chars().take(100).take_while(|c| *c != '\n').collect();
    if cut == line { line } else { cut + "…" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_typed_and_not_too_long() {
        let shown =
            |words: &[&str]| shown(&words.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(
            shown(&["python3", "-m", "app", "--fd={fd}"]),
            "python3 -m app --fd={fd}"
        );
        assert_eq!(
            shown(&["sh", "-c", "echo it's", ""]),
            r"sh -c 'echo it'\''s' ''"
        );
        assert_eq!(shown(&["sh", "-c", "a\nb"]), "sh -c 'a…");
        assert_eq!(shown(&[&"ü".repeat(300)]).chars().count(), 101);
    }
}
