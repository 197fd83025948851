//! What the supervisor says: a sentence for people, with fields for programs, one line an event.

use super::process::Ending;
use super::roll::Roll;
use super::slot::Worker;
use super::spawn::SpawnError;
use crate::steer::SteerEvent;
use nix::sys::signal::Signal;
use std::time::Duration;
use wakeone_model::layout::counted;

pub fn adopted(slot: usize, pid: u32) {
    tracing::info!(
        event = "adopted",
        slot,
        pid,
        "worker {slot} (pid {pid}) was found running and is taken over"
    );
}

/// Says that all are ready; the sentence, for others to be told too.
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

/// A worker listens, but not where connections come.
pub fn elsewhere(slot: usize, pid: u32, at: &str, command: &[String]) {
    let hint = if command.iter().any(|word| word.contains("{fd")) {
        "its command names {fd}, but it does not accept from that descriptor: give it the option by which this server takes one"
    } else {
        "give it that listener by {fd} in its command, or let it open its own by `wakeone run --split`"
    };
    tracing::warn!(
        event = "elsewhere",
        slot,
        pid,
        listen = at,
        "worker {slot} (pid {pid}) is not ready: it listens on {at}, not on the listener that it was given; {hint}"
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

pub fn not_switched(slot: usize, why: &str) {
    tracing::warn!(
        event = "roll",
        slot,
        "the new worker {slot} gets no connections and is ended: {why}"
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

/// How a worker ended, for [`end`] or [`retry`].
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

/// The end of a worker that was asked to.
pub fn end(slot: usize, story: &str) {
    tracing::info!(event = "end", slot, "{story}");
}

/// A worker that is not there, and when it will be tried again.
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

pub fn roll_begins(why: &str) {
    tracing::info!(event = "roll", "{why}: rolling restart, a worker at a time");
}

pub fn roll_follows() {
    tracing::info!(
        event = "roll",
        "SIGHUP: a rolling restart is under way; another follows it"
    );
}

/// `kept`: the slot's old worker serves on.
pub fn roll_failed(slot: usize, roll: &Roll, kept: bool) {
    let (replaced, untouched) = roll.progress();
    let left = untouched + usize::from(kept);
    let hint = if kept {
        "; if two of them cannot run side by side, use --restart stop-first"
    } else {
        ""
    };
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
        "the rolling restart stops: the new worker {slot} did not get ready; {count} {run}{hint}"
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

/// What happened beside us.
pub fn steering(event: SteerEvent) {
    match event {
        SteerEvent::Stuck { slot, queued, unit } => {
            tracing::info!(
                event = "stuck",
                slot,
                queued,
                "worker {slot} is stuck with {} waiting",
                counted(queued.into(), unit)
            );
        }
        SteerEvent::Rescued {
            slot,
            moved,
            took_us,
        } => tracing::info!(
            event = "rescue",
            slot,
            moved,
            took_us,
            "{} of worker {slot} moved to others in {took_us} µs",
            counted(moved.into(), "connections")
        ),
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

/// A command line as a person would type it, cut where it gets long.
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
