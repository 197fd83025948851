//! Wake-ups and sleeps of chosen threads, as the scheduler itself reports them through tracefs.
//!
//! The source of `herd` had printk() at the wait queue; these tracepoints stand in for it. All tracing happens in an
//! instance of our own, which other tracers on the machine do not notice. It is undone when the guard is dropped.

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// The place of tracefs on most machines.
const USUAL: &str = "/sys/kernel/tracing";

/// The change of a thread's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It was woken.
    Waking,
    /// It went to sleep.
    Asleep,
}

/// One event.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Event {
    /// Time in µs of the monotonic clock.
    pub at_us: f64,
    /// What happened.
    pub kind: Kind,
    /// The thread that it happened to.
    pub thread: u32,
    /// The thread that ran then: of a wake-up, the waker, or the one that an interrupt's work interrupted.
    pub by: u32,
}

/// The threads that were woken by others than themselves. Threads that a connection woke wake each other as well: in
/// accept() of the kernel all of them want the socket's lock.
pub fn woken_by_others(events: &[Event]) -> BTreeSet<u32> {
    let own: BTreeSet<u32> = events.iter().map(|e| e.thread).collect();
    let wakings = events.iter().filter(|e| e.kind == Kind::Waking);
    let by_others = wakings.filter(|e| !own.contains(&e.by));
    by_others.map(|e| e.thread).collect()
}

/// A tracing instance that records the wake-ups and sleeps of all threads of one name.
#[derive(Debug)]
pub struct Trace {
    instance: PathBuf,
    mounted: Option<PathBuf>,
}

impl Trace {
    /// Starts to record the threads whose name is `comm` (at most 15 characters).
    ///
    /// # Errors
    /// When recording cannot start. The message says that it needs root and CONFIG_FTRACE.
    pub fn start(comm: &str) -> Result<Self, Error> {
        let mut trace = Self {
            instance: PathBuf::new(),
            mounted: None,
        };
        trace.begin(comm).map_err(|e| {
            Error::Missing(format!("recording wake-ups through tracefs failed: {e}; it needs root and a kernel with CONFIG_FTRACE"))
        })?;
        Ok(trace)
    }

    fn begin(&mut self, comm: &str) -> std::io::Result<()> {
        let root = self.root()?;
        let instance = root
            .join("instances")
            .join(format!("wakeone-lab-{}", std::process::id()));
        fs::create_dir(&instance)?;
        self.instance = instance;
        self.set("trace_clock", "mono")?;
        self.set("buffer_size_kb", "2048")?;
        for (event, field) in [("sched_waking", "comm"), ("sched_switch", "prev_comm")] {
            self.set(
                &format!("events/sched/{event}/filter"),
                &format!("{field} == \"{comm}\""),
            )?;
            self.set(&format!("events/sched/{event}/enable"), "1")?;
        }
        Ok(())
    }

    /// tracefs where it usually is, else mounted for ourselves.
    fn root(&mut self) -> std::io::Result<PathBuf> {
        if Path::new(USUAL).join("instances").is_dir() {
            return Ok(USUAL.into());
        }
        let place = std::env::temp_dir().join(format!("wakeone-tracefs-{}", std::process::id()));
        fs::create_dir_all(&place)?;
        let mounted = mount(
            Some("none"),
            &place,
            Some("tracefs"),
            MsFlags::empty(),
            None::<&str>,
        );
        if let Err(error) = mounted {
            let _ = fs::remove_dir(&place);
            return Err(error.into());
        }
        self.mounted = Some(place.clone());
        Ok(place)
    }

    fn set(&self, file: &str, value: &str) -> std::io::Result<()> {
        fs::write(self.instance.join(file), value)
    }

    /// Forgets what was recorded so far.
    ///
    /// # Errors
    /// When the kernel does not let us.
    pub fn clear(&self) -> Result<(), Error> {
        let path = self.instance.join("trace");
        fs::File::create(&path)
            .map(drop)
            .map_err(|source| Error::File {
                action: "writing",
                path,
                source,
            })
    }

    /// The events recorded since the last [`Trace::clear`], in order of time.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn events(&self) -> Result<Vec<Event>, Error> {
        let path = self.instance.join("trace");
        let text = fs::read_to_string(&path).map_err(|source| Error::File {
            action: "reading",
            path,
            source,
        })?;
        let mut events: Vec<Event> = text.lines().filter_map(parse).collect();
        events.sort_by(|a, b| a.at_us.total_cmp(&b.at_us));
        Ok(events)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if !self.instance.as_os_str().is_empty() {
            let _ = self.set("events/enable", "0");
            let _ = fs::remove_dir(&self.instance);
        }
        if let Some(place) = &self.mounted {
            let _ = umount2(place, MntFlags::MNT_DETACH);
            let _ = fs::remove_dir(place);
        }
    }
}

/// A line of the trace: `herd-123 [001] d..2. 12.345678: sched_switch: prev_comm=herd prev_pid=123 … prev_state=S ==> …`.
fn parse(line: &str) -> Option<Event> {
    let (head, rest) = line.split_once(": sched_")?;
    let (task, _) = head.split_once(" [")?;
    let by = task.trim_end().rsplit('-').next()?.parse().ok()?;
    let seconds: f64 = head.rsplit(' ').next()?.parse().ok()?;
    let field = |name: &str| rest.split_whitespace().find_map(|w| w.strip_prefix(name));
    let (kind, thread) = if rest.starts_with("waking:") {
        (Kind::Waking, field("pid=")?)
    } else if rest.starts_with("switch:") {
        // R is a thread that was only interrupted; every other state is a sleep.
        if field("prev_state=")?.starts_with('R') {
            return None;
        }
        (Kind::Asleep, field("prev_pid=")?)
    } else {
        return None;
    };
    Some(Event {
        at_us: seconds * 1e6,
        kind,
        thread: thread.parse().ok()?,
        by,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_trace() {
        let waking = "    wakeone-77      [001] d.h3.   812.000123: sched_waking: comm=herd pid=42 prio=120 target_cpu=000";
        assert_eq!(
            parse(waking),
            Some(Event {
                at_us: 812_000_123.0,
                kind: Kind::Waking,
                thread: 42,
                by: 77
            })
        );
        let asleep = " herd-42 [000] d..2. 812.5: sched_switch: prev_comm=herd prev_pid=42 prev_prio=120 prev_state=S ==> next_comm=a next_pid=1 next_prio=120";
        assert_eq!(
            parse(asleep).map(|e| (e.kind, e.thread)),
            Some((Kind::Asleep, 42))
        );
        assert_eq!(
            parse(&asleep.replace("prev_state=S", "prev_state=R+")),
            None
        );
        assert_eq!(parse("# tracer: nop"), None);
    }
}
