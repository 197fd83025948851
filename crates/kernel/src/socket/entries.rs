//! The entries of a listener in epoll sets.

use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::proc::process;
use crate::proc::reader;

/// EPOLLWAKEUP, EPOLLONESHOT, EPOLLET and EPOLLEXCLUSIVE (`EP_PRIVATE_BITS` in fs/eventpoll.c). An entry with these alone
/// reports nothing: its one event has been reported.
const PRIVATE: u32 = 0xf000_0000;

/// EPOLLIN. A process without it does not accept.
pub const READABLE: u32 = 1;
/// EPOLLIN and EPOLLRDNORM, by either of which a connection wakes a waiter of the set.
pub const WAKES: u32 = 0x41;
/// EPOLLEXCLUSIVE: of those that wait so, one is woken.
pub const EXCLUSIVE: u32 = 1 << 28;
/// EPOLLET: a process hears once of each connection.
pub const EDGE: u32 = 1 << 31;
/// EPOLLONESHOT: the kernel disables the entry with each event.
pub const ONE_SHOT: u32 = 1 << 30;

/// An entry of an epoll set, as /proc/PID/fdinfo shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// A process that has the set.
    pub pid: u32,
    /// When it started: clock ticks since boot.
    pub started: u64,
    /// The set's number there.
    pub epoll: i32,
    /// The number that the listener had when it was added.
    pub number: i32,
    /// The listener.
    pub inode: u64,
    /// The events that are waited for, and how.
    pub events: u32,
    /// A word of the process that comes with the events.
    pub data: u64,
}

impl Entry {
    /// Returns the listener; `None` where its process has closed it.
    pub(crate) fn listener(&self) -> io::Result<Option<OwnedFd>> {
        let held = match process::sockets_of(self.pid) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        if !held.iter().any(|(_, inode)| *inode == self.inode) {
            return Ok(None);
        }
        match process::socket_of(self.pid, self.inode) {
            Some(listener) => Ok(Some(listener)),
            None => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
}

/// Hands on the entries of a socket in an epoll set of a process, which started then.
pub(crate) fn of_set(
    (pid, started): (u32, u64),
    epoll: i32,
    inode: u64,
    mut take: impl FnMut(Entry),
) -> io::Result<()> {
    each_member(pid, epoll, |at, number, events, data| {
        if at == inode && events & !PRIVATE != 0 {
            take(Entry {
                pid,
                started,
                epoll,
                number,
                inode,
                events,
                data,
            });
        }
    })
}

/// Hands on inode, number, events and data of each entry of an epoll set.
pub(super) fn each_member(
    pid: u32,
    epoll: i32,
    mut take: impl FnMut(u64, i32, u32, u64),
) -> io::Result<()> {
    reader::lines(pid, &format!("fdinfo/{epoll}"), |line| {
        if let Some((inode, number, events, data)) = std::str::from_utf8(line).ok().and_then(parse)
        {
            take(inode, number, events, data);
        }
    })
}

/// `tfd: N events: HEX data: HEX pos:N ino:HEX sdev:HEX` (fs/eventpoll.c, `ep_show_fdinfo`): inode, number, events, data.
fn parse(line: &str) -> Option<(u64, i32, u32, u64)> {
    let after = |name: &str| line.split_once(name)?.1.split_whitespace().next();
    line.trim_start().strip_prefix("tfd:")?;
    Some((
        u64::from_str_radix(after("ino:")?, 16).ok()?,
        after("tfd:")?.parse().ok().filter(|number| *number >= 0)?,
        u32::from_str_radix(after("events:")?, 16).ok()?,
        u64::from_str_radix(after("data:")?, 16).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entries_are_read_back(inode in any::<u64>(), number in 0..i32::MAX, events in any::<u32>(), data in any::<u64>()) {
            let line = format!("tfd: {number:8} events: {events:8x} data: {data:16x}  pos:0 ino:{inode:x} sdev:8");
            prop_assert_eq!(parse(&line), Some((inode, number, events, data)));
        }

        #[test]
        fn no_line_breaks_the_parser(line in "\\PC{0,200}") {
            let _ = parse(&line);
            let _ = parse(&format!("tfd: {line} events: {line} data: {line} ino:{line}"));
        }
    }
}
