//! Requests that a worker has accepted and not read.

use std::collections::HashMap;

/// Follows the unread data of connections, by their inodes.
#[derive(Debug, Default)]
pub(crate) struct Unread {
    /// How long it has been there, µs.
    ages: HashMap<u64, u64>,
}

impl Unread {
    /// Notes the connections with unread data, and how long it has been there. Returns for how long that was there which
    /// has been read since the last call. That is too short by the time between two calls at most.
    pub fn note(&mut self, seen: impl IntoIterator<Item = (u64, u64)>) -> Vec<u64> {
        let before = std::mem::replace(&mut self.ages, seen.into_iter().collect());
        // More data may have come to what is there, so that its age begins anew.
        let was_read = |inode: &u64, age: &u64| self.ages.get(inode).is_none_or(|now| now < age);
        let read = before.into_iter();
        read.filter(|(inode, age)| was_read(inode, age))
            .map(|(_, age)| age)
            .collect()
    }

    /// How long that has been there which nobody has read by now, µs.
    pub fn ages(&self) -> impl Iterator<Item = u64> + '_ {
        self.ages.values().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wait_is_told_once_when_it_is_over() {
        let mut unread = Unread::default();
        assert!(unread.note([(1, 10), (2, 300)]).is_empty());
        assert!(unread.note([(1, 60), (2, 350)]).is_empty());
        // The first was read, and the second has a new request.
        let mut read = unread.note([(2, 20)]);
        read.sort_unstable();
        assert_eq!(read, [60, 350]);
        assert_eq!(unread.ages().collect::<Vec<_>>(), [20]);
        assert_eq!(unread.note([]), [20]);
    }
}
