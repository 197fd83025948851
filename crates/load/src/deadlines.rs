//! Timeouts in O(1). Every request may take equally long, so requests expire in the order in which they start, and a
//! linked list does what a timer wheel would.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    at_ns: u64,
    previous: u32,
    next: u32,
}

/// Deadlines of table entries (by key), the earliest first. An entry is in the list at most once.
#[derive(Default)]
pub(crate) struct Deadlines {
    links: Vec<Link>,
    ends: Option<(u32, u32)>,
}

impl Deadlines {
    /// Adds `key`, which must not be in the list, with a deadline no earlier than any in it.
    pub(crate) fn push(&mut self, key: u32, at_ns: u64) {
        if self.links.len() <= key as usize {
            self.links.resize(
                key as usize + 1,
                Link {
                    at_ns: 0,
                    previous: NONE,
                    next: NONE,
                },
            );
        }
        let previous = self.ends.map_or(NONE, |(_, last)| last);
        debug_assert!(
            previous == NONE || self.links[previous as usize].at_ns <= at_ns,
            "deadlines out of order"
        );
        self.links[key as usize] = Link {
            at_ns,
            previous,
            next: NONE,
        };
        if let Some(before) = self.links.get_mut(previous as usize) {
            before.next = key;
        }
        self.ends = Some((self.ends.map_or(key, |(first, _)| first), key));
    }

    /// Takes `key`, which must be in the list, out of it.
    pub(crate) fn remove(&mut self, key: u32) {
        let Link { previous, next, .. } = self.links[key as usize];
        let (mut first, mut last) = self.ends.expect("a key to remove is in the list");
        match self.links.get_mut(previous as usize) {
            Some(before) => before.next = next,
            None => first = next,
        }
        match self.links.get_mut(next as usize) {
            Some(after) => after.previous = previous,
            None => last = previous,
        }
        self.ends = (first != NONE).then_some((first, last));
    }

    /// The earliest: its key and its deadline.
    pub(crate) fn first(&self) -> Option<(u32, u64)> {
        self.ends
            .map(|(first, _)| (first, self.links[first as usize].at_ns))
    }

    /// The earliest if it has passed.
    pub(crate) fn expired(&self, now_ns: u64) -> Option<u32> {
        self.first()
            .and_then(|(key, at)| (at <= now_ns).then_some(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// Against a plain queue with linear removal.
        #[test]
        fn behaves_like_a_queue(actions in prop::collection::vec((any::<bool>(), 0u32..20), 0..200)) {
            let mut list = Deadlines::default();
            let mut model: VecDeque<(u32, u64)> = VecDeque::new();
            for (time, (add, key)) in actions.into_iter().enumerate() {
                match (add, model.iter().position(|&(k, _)| k == key)) {
                    (true, None) => { list.push(key, time as u64); model.push_back((key, time as u64)); }
                    (_, Some(at)) => { list.remove(key); model.remove(at); }
                    (false, None) => {}
                }
                prop_assert_eq!(list.first(), model.front().copied());
            }
            while let Some((key, _)) = model.pop_front() {
                prop_assert_eq!(list.expired(u64::MAX), Some(key));
                list.remove(key);
            }
            prop_assert_eq!(list.first(), None);
        }
    }
}
