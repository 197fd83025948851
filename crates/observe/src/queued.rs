//! Connections that wait at UNIX sockets: the kernel does not tell since when.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

/// Follows them by the inodes of the clients.
#[derive(Debug, Default)]
pub(crate) struct Queued {
    /// When each was first seen.
    since: HashMap<u64, Instant>,
    last: Option<Instant>,
    /// A queue was too long to be told.
    is_hidden: bool,
}

impl Queued {
    /// Notes those that wait now; `None`: that is not known. Returns how long those waited that do not any more, µs. That is
    /// too short by the time between two calls at either end, at most.
    pub fn note(&mut self, waiting: Option<HashSet<u64>>, now: Instant) -> Vec<u64> {
        self.is_hidden = waiting.is_none();
        let Some(waiting) = waiting else {
            self.since.clear();
            return Vec::new();
        };
        let last = self.last.replace(now).unwrap_or(now);
        for client in &waiting {
            self.since.entry(*client).or_insert(now);
        }
        let over = self.since.extract_if(|client, _| !waiting.contains(client));
        over.map(|(_, since)| us_between(since, last)).collect()
    }

    /// Whether none waited when it was last noted.
    pub fn is_empty(&self) -> bool {
        self.since.is_empty()
    }

    /// Whether it is known how long they wait.
    pub fn are_known(&self) -> bool {
        !self.is_hidden
    }

    /// How long those have waited that wait still, µs.
    pub fn ages(&self) -> impl Iterator<Item = u64> + '_ {
        let last = self.last;
        let since = self.since.values();
        since.filter_map(move |since| Some(us_between(*since, last?)))
    }
}

fn us_between(since: Instant, until: Instant) -> u64 {
    let us = until.saturating_duration_since(since).as_micros();
    u64::try_from(us).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_wait_is_told_when_it_is_over() {
        let mut queued = Queued::default();
        let begun = Instant::now();
        let after = |ms| begun + Duration::from_millis(ms);
        assert!(queued.note(Some([1, 2].into()), after(0)).is_empty());
        assert!(queued.note(Some([1, 2, 3].into()), after(10)).is_empty());
        assert_eq!(queued.note(Some([2, 3].into()), after(30)), [10_000]);
        let mut ages: Vec<u64> = queued.ages().collect();
        ages.sort_unstable();
        assert_eq!(ages, [20_000, 30_000]);
        let mut over = queued.note(Some([].into()), after(40));
        over.sort_unstable();
        assert_eq!(over, [20_000, 30_000]);
        assert!(queued.is_empty() && queued.are_known());
        assert!(queued.note(None, after(50)).is_empty());
        assert!(!queued.are_known());
    }
}
