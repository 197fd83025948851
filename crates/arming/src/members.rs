//! The workers that wait for one listener, each with an epoll set of its own.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use wakeone_kernel::proc::process;
use wakeone_kernel::proc::refusal::Refusal;
use wakeone_kernel::socket::arming::{MOST, Waiter, is_same_set, waiters_of};
use wakeone_kernel::socket::entries::{ONE_SHOT, READABLE};
use wakeone_model::address::Address;

/// A listener that workers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shared {
    /// Where it listens.
    pub address: Address,
    /// The interface that it is bound to; 0: none.
    pub interface: u32,
    /// Its inode.
    pub inode: u64,
    /// Its cookie.
    pub cookie: u64,
}

/// Why workers that share a listener cannot be steered.
#[derive(Debug)]
pub enum Unsteerable {
    /// Fewer than two wait for it in epoll.
    Alone(usize),
    /// It is for datagrams.
    Datagrams,
    /// They have one epoll set, which was made before they were forked.
    OneSet,
    /// The kernel disables the entry with each event (EPOLLONESHOT), and the server enables it again.
    OneShot(u32),
    /// This process may not be looked into.
    Hidden(u32, io::Error),
    /// There are more than have room.
    Many(usize),
}

impl fmt::Display for Unsteerable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone(0) => f.write_str(
                "none of its workers waits for it in epoll, and only epoll lets another process choose who is woken",
            ),
            Self::Alone(_) => f.write_str("one worker waits for it, and there is nothing to choose between"),
            Self::Datagrams => f.write_str("there is nothing to choose between"),
            Self::OneSet => f.write_str(
                "its workers wait in one epoll set, which was made before they were forked: have each worker make its own",
            ),
            Self::OneShot(pid) => write!(
                f,
                "process {pid} waits for it with EPOLLONESHOT, and enables the entry itself after each connection"
            ),
            Self::Hidden(pid, error) if is_refusal(error) => {
                write!(f, "process {pid} may not be looked into: {}", Refusal::of(*pid))
            }
            Self::Hidden(pid, error) => write!(f, "process {pid} may not be looked into: {error}"),
            Self::Many(count) => write!(f, "{count} epoll sets have it, and {MOST} are the most"),
        }
    }
}

impl Unsteerable {
    /// Whether the rules of the machine or the container forbid it. The reason has the way out then.
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Hidden(_, error) if is_refusal(error))
    }
}

fn is_refusal(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, Unsupported};
    matches!(error.kind(), PermissionDenied | Unsupported)
}

/// Finds the workers among some processes.
///
/// # Errors
/// See [`Unsteerable`].
pub fn examine(shared: &Shared, pids: &[u32]) -> Result<Vec<Waiter>, Unsteerable> {
    let members = members(shared, pids)?;
    let mut borrowed: Vec<(u32, OwnedFd)> = Vec::new();
    let mut distinct: Vec<Waiter> = Vec::new();
    for member in members {
        let (pid, epoll) = (member.entry.pid, member.entry.epoll);
        let set =
            process::descriptor_of(pid, epoll).map_err(|error| Unsteerable::Hidden(pid, error))?;
        let same = borrowed
            .iter()
            .find(|(_, one)| is_same_set(one.as_fd(), set.as_fd()).unwrap_or(false));
        match same {
            // Some event loops have two numbers for one set.
            Some((other, _)) if *other == pid => {}
            Some(_) => return Err(Unsteerable::OneSet),
            None => {
                borrowed.push((pid, set));
                distinct.push(member);
            }
        }
    }
    match distinct.len() {
        few @ (0 | 1) => Err(Unsteerable::Alone(few)),
        many if many > MOST => Err(Unsteerable::Many(many)),
        _ => Ok(distinct),
    }
}

/// Returns the entries by which these processes wait for the listener now.
pub(crate) fn members(shared: &Shared, pids: &[u32]) -> Result<Vec<Waiter>, Unsteerable> {
    let mut found = entries(shared, pids)?;
    if let Some(one) = found.iter().find(|one| one.entry.events & ONE_SHOT != 0) {
        return Err(Unsteerable::OneShot(one.entry.pid));
    }
    found.retain(|one| one.entry.events & READABLE != 0);
    Ok(found)
}

/// The same with those that are disarmed, by us or by the server.
pub(crate) fn entries(shared: &Shared, pids: &[u32]) -> Result<Vec<Waiter>, Unsteerable> {
    let mut found = Vec::new();
    let pids: BTreeSet<u32> = pids.iter().copied().collect();
    for pid in pids {
        match waiters_of(pid, shared.inode) {
            Ok(waiters) => found.extend(waiters),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Unsteerable::Hidden(pid, error)),
        }
    }
    Ok(found)
}
