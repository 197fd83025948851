//! The store as an event loop uses it: calls go in, replies come out later.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::system::stop;
use rustix::event::{EventfdFlags, eventfd};

use super::embedded::Embedded;
use super::{Call, Entry, Failed, Reply};

/// A store that never makes its caller wait. Its descriptor ([`AsFd`]) becomes readable when
/// replies are there, and stays the same.
pub trait Driver: AsFd {
    /// Takes a call. Returns the reply if it is known at once; else it comes out of [`Self::ready`]
    /// under the same token.
    fn submit(&mut self, token: u64, call: Call) -> Option<Result<Reply, Failed>>;

    /// Returns the replies that have come. Call it when the descriptor is readable, and once a
    /// second to give up calls that take too long.
    fn ready(&mut self) -> Vec<(u64, Result<Reply, Failed>)>;
}

/// The embedded store: pages are read in the loop (they are in memory), and a thread waits for
/// the disk. Entries that come while it waits are written together, and one wait confirms all.
pub struct Committing {
    store: Embedded,
    orders: Option<Sender<Order>>,
    done: Receiver<(u64, Result<Reply, Failed>)>,
    confirm: Sender<(u64, Result<Reply, Failed>)>,
    bell: OwnedFd,
    directory: std::path::PathBuf,
}

type Order = (u64, Entry);

impl Committing {
    /// Opens the store in `directory`.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn new(directory: &Path) -> Result<Self, Failed> {
        let (confirm, done) = channel();
        Ok(Self {
            store: Embedded::open(directory)?,
            orders: None,
            done,
            confirm,
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| Failed(format!("cannot make an eventfd: {error}")))?,
            directory: directory.to_owned(),
        })
    }

    /// Starts the thread, at the first entry: most servers never need it.
    fn start(&self) -> Result<Sender<Order>, Failed> {
        let failed = |error| Failed(format!("cannot start the thread that writes: {error}"));
        let mut store = Embedded::open(&self.directory)?;
        let (orders, inbox) = channel();
        let confirm = self.confirm.clone();
        let bell = self.bell.try_clone().map_err(failed)?;
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || {
                // A stop has to interrupt the loop, not this.
                let _ = stop::block_in_this_thread();
                commit(&mut store, &inbox, &confirm, &bell);
            })
            .map_err(failed)?;
        Ok(orders)
    }
}

fn commit(
    store: &mut Embedded,
    inbox: &Receiver<Order>,
    confirm: &Sender<(u64, Result<Reply, Failed>)>,
    bell: &OwnedFd,
) {
    while let Ok(first) = inbox.recv() {
        let batch: Vec<Order> = std::iter::once(first).chain(inbox.try_iter()).collect();
        let entries: Vec<&Entry> = batch.iter().map(|(_, entry)| entry).collect();
        let result = store.add(&entries).map(|()| Reply::Added);
        for (token, _) in &batch {
            let _ = confirm.send((*token, result.clone()));
        }
        let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
    }
}

impl AsFd for Committing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Driver for Committing {
    fn submit(&mut self, token: u64, call: Call) -> Option<Result<Reply, Failed>> {
        let entry = match call {
            Call::Page { visit } => return Some(self.store.page(visit)),
            Call::Add(entry) => entry,
        };
        if self.orders.is_none() {
            match self.start() {
                Ok(orders) => self.orders = Some(orders),
                Err(failed) => return Some(Err(failed)),
            }
        }
        let sent = self
            .orders
            .as_ref()
            .map(|orders| orders.send((token, entry)));
        match sent {
            Some(Ok(())) => None,
            _ => Some(Err(Failed("the thread that writes is gone".to_owned()))),
        }
    }

    fn ready(&mut self) -> Vec<(u64, Result<Reply, Failed>)> {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        self.done.try_iter().collect()
    }
}
