//! Tells whether one of several processes has ended, in one system call and without reading /proc.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::proc::process;

/// The processes watched, each by a pidfd.
#[derive(Debug, Default)]
pub struct Exits {
    handles: BTreeMap<u32, OwnedFd>,
    /// Processes whose end was reported: a zombie keeps its number until its parent reaps it.
    told: BTreeSet<u32>,
}

impl Exits {
    /// Watches these processes from now on, and no others.
    pub fn watch(&mut self, pids: &[u32]) {
        self.handles.retain(|pid, _| pids.contains(pid));
        self.told.retain(|pid| pids.contains(pid));
        for pid in pids {
            if !self.handles.contains_key(pid)
                && !self.told.contains(pid)
                && let Ok(handle) = process::handle_of(*pid)
            {
                self.handles.insert(*pid, handle);
            }
        }
    }

    /// Whether one of them ended since the last call. It does not wait.
    pub fn take(&mut self) -> bool {
        let pids: Vec<u32> = self.handles.keys().copied().collect();
        let mut polled: Vec<PollFd<'_>> = self
            .handles
            .values()
            .map(|handle| PollFd::new(handle, PollFlags::IN))
            .collect();
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // A signal may come first: the next call tells.
        if !poll(&mut polled, Some(&now)).is_ok_and(|ended| ended > 0) {
            return false;
        }
        let ended: Vec<u32> = pids
            .into_iter()
            .zip(&polled)
            .filter(|(_, one)| !one.revents().is_empty())
            .map(|(pid, _)| pid)
            .collect();
        for pid in ended {
            self.handles.remove(&pid);
            self.told.insert(pid);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn start() -> Child {
        let mut cat = Command::new("cat");
        cat.stdin(Stdio::piped()).stdout(Stdio::null());
        cat.spawn().expect("cat")
    }

    /// Ends when its input does; waits until it is a zombie, which is not reaped yet.
    fn end(child: &mut Child) {
        drop(child.stdin.take());
        while process::state(child.id()) != Some('Z') {
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_end_of_one_of_several_is_told_once() {
        let (mut one, mut other) = (start(), start());
        let pids = [one.id(), other.id(), std::process::id(), u32::MAX];
        let mut exits = Exits::default();
        exits.watch(&pids);
        assert!(!exits.take());
        end(&mut one);
        assert!(exits.take());
        // A zombie is no news.
        exits.watch(&pids);
        assert!(!exits.take());
        end(&mut other);
        assert!(exits.take());
        assert!(!exits.take());
        one.wait().expect("reaped");
        other.wait().expect("reaped");
    }
}
