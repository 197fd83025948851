//! One of the listeners that workers share: its queue, and who of those that wait for it is woken.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::epoll;
use wakeone_kernel::proc::process;
use wakeone_kernel::socket::arming::QueueWatch;
use wakeone_kernel::socket::queue_look::QueueLook;
use wakeone_model::arming::{Arming, ArmingConfig};

use crate::members::Shared;

/// A steered listener.
pub(crate) struct Listener {
    pub shared: Shared,
    /// Decides who is woken for it. A worker's number there is the place of its entry.
    pub arming: Arming,
    /// Something waited at the last look.
    pub queued: bool,
    length: QueueLook,
    /// Tells whether anything waits; `None`: nobody was found to borrow the listener from.
    watch: Option<QueueWatch>,
    /// A connection ends the sleep: the group is quiet.
    rings: bool,
}

impl Listener {
    pub fn of(shared: &Shared) -> io::Result<Self> {
        Ok(Self {
            shared: *shared,
            arming: Arming::new(ArmingConfig::default()),
            queued: false,
            length: QueueLook::at(
                shared.address,
                shared.interface,
                shared.inode,
                shared.cookie,
            )?,
            watch: None,
            rings: false,
        })
    }

    /// Returns how many connections wait, and how many may; `None`: it is gone.
    pub fn length(&self) -> io::Result<Option<(u32, u32)>> {
        self.length.look()
    }

    /// Looks whether anything waits. `holders`: the processes that may have the listener.
    pub fn look<'a>(&mut self, holders: impl IntoIterator<Item = &'a u32>) {
        if self.watch.is_none() {
            let mut pids = holders.into_iter();
            let listener = pids.find_map(|pid| process::socket_of(*pid, self.shared.inode));
            self.watch = listener.and_then(|listener| QueueWatch::of(listener).ok());
            self.rings = false;
        }
        self.queued = self.watch.as_ref().is_some_and(QueueWatch::is_filled);
    }

    /// Has a connection end a wait in this epoll set, or not.
    pub fn ring(&mut self, wakes: &OwnedFd, bell: epoll::EventData, on: bool) {
        let Some(watch) = self.watch.as_ref().filter(|_| self.rings != on) else {
            return;
        };
        let done = match on {
            true => epoll::add(wakes, watch, bell, epoll::EventFlags::IN),
            false => epoll::delete(wakes, watch),
        };
        self.rings = on && done.is_ok();
    }
}
