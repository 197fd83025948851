//! Which slot a worker has.

use wakeone_kernel::proc::process;

/// The slots of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slots {
    /// Each worker that is found has one of its own.
    Found,
    /// The one who starts the workers says which process has which slot. A worker below that process has its slot, and
    /// all others have none: they were replaced.
    Given(Vec<Option<u32>>),
}

impl Slots {
    /// Returns the slot of a worker: the process, and the number by which it was taken in.
    pub(crate) fn of(&self, place: usize, pid: u32) -> Option<usize> {
        let serves =
            |one: &Option<u32>| one.is_some_and(|one| one == pid || process::descends(pid, one));
        match self {
            Self::Found => Some(place),
            Self::Given(pids) => pids.iter().position(serves),
        }
    }

    /// Returns how many there are, unless workers are found.
    pub(crate) fn count(&self) -> Option<usize> {
        match self {
            Self::Found => None,
            Self::Given(pids) => Some(pids.len()),
        }
    }

    /// Returns the processes that are known to have slots.
    pub(crate) fn given(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        let pids = match self {
            Self::Found => &[],
            Self::Given(pids) => pids.as_slice(),
        };
        let all = pids.iter().enumerate();
        all.filter_map(|(slot, pid)| Some((slot, (*pid)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_has_the_slot_of_the_process_above_it_or_none() {
        let own = std::process::id();
        let above = std::os::unix::process::parent_id();
        assert_eq!(Slots::Found.of(3, own), Some(3));
        for (pids, slot) in [
            (vec![None, Some(own)], Some(1)),
            (vec![Some(above), None], Some(0)),
            (vec![None, None], None),
        ] {
            assert_eq!(Slots::Given(pids).of(3, own), slot);
        }
        let given = Slots::Given(vec![None, Some(own)]);
        assert_eq!(given.given().collect::<Vec<_>>(), [(1, own)]);
    }
}
