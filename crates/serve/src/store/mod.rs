//! Where the guest book is kept: on disk by default, or in a Redis server.
//!
//! A blocking model calls a [`Store`] and waits. An event loop must not wait, and hands its calls
//! to a [`Driver`], which has a descriptor to wait for and returns the replies later.

mod driver;
mod embedded;
mod redis;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

pub use self::driver::Driver;

/// The most characters that a name may have.
pub const NAME_CHARS_MAX: usize = 64;
/// The most characters that a text may have.
pub const TEXT_CHARS_MAX: usize = 1000;
/// How many entries a page shows, the latest first.
pub const SHOWN: usize = 50;

/// An entry of the guest book.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// When it was made, in seconds since 1970.
    pub at_unix_s: u64,
    /// The name of its author.
    pub name: String,
    /// The text.
    pub text: String,
}

impl Entry {
    /// The entry as bytes: time and length of the name in little endian, name, text.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(10 + self.name.len() + self.text.len());
        bytes.extend_from_slice(&self.at_unix_s.to_le_bytes());
        bytes.extend_from_slice(&(self.name.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.name.as_bytes());
        bytes.extend_from_slice(self.text.as_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (at, rest) = bytes.split_first_chunk::<8>()?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let (name, text) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        Some(Self {
            at_unix_s: u64::from_le_bytes(*at),
            name: std::str::from_utf8(name).ok()?.to_owned(),
            text: std::str::from_utf8(text).ok()?.to_owned(),
        })
    }
}

/// A call to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Reads the content of the page.
    Page {
        /// Whether this is a visit, to be counted.
        visit: bool,
    },
    /// Keeps an entry. Once it is acknowledged it is not lost, however the server ends.
    Add(Entry),
}

/// The store's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`Call::Page`].
    Page {
        /// Visits so far, this one included.
        visits: u64,
        /// Entries so far.
        total: u64,
        /// The latest entries, the newest first, at most [`SHOWN`].
        entries: Arc<[Entry]>,
    },
    /// To [`Call::Add`]: it is kept.
    Added,
}

/// The store could not do the call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failed(pub String);

/// A store whose caller waits.
pub trait Store: Send {
    /// Does a call.
    ///
    /// # Errors
    /// When it could not be done. An entry to be added may have been added or not.
    fn call(&mut self, call: &Call) -> Result<Reply, Failed>;
}

/// The place of the guest book.
#[derive(Clone, Debug)]
pub enum Place {
    /// In files in this directory, which is made when it is needed.
    Directory(PathBuf),
    /// In a Redis server.
    Redis(redis::Address),
}

impl Place {
    /// Parses the user's text: a `redis://` URL, else a directory.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.contains("://") {
            redis::Address::parse(text).map(Self::Redis)
        } else if text.is_empty() {
            Err(
                "an empty path is no place for a store; give a directory or redis://HOST:PORT"
                    .to_owned(),
            )
        } else {
            Ok(Self::Directory(text.into()))
        }
    }

    /// Returns the default place of the guest book, in the user's state directory.
    pub fn default_directory() -> Self {
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        let state = variable("XDG_STATE_HOME")
            .or_else(|| variable("HOME").map(|home| home.join(".local/state")))
            .unwrap_or_else(|| PathBuf::from("/var/tmp"));
        Self::Directory(state.join("wakeone/guestbook"))
    }

    /// Opens the store for a caller that waits.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub fn open(&self) -> Result<Box<dyn Store>, Failed> {
        Ok(match self {
            Self::Directory(path) => Box::new(embedded::Embedded::open(path)?),
            Self::Redis(address) => Box::new(redis::Blocking::open(address)?),
        })
    }

    /// Opens the store for an event loop.
    ///
    /// # Errors
    /// When it cannot be set up. An unreachable Redis server is no error here: each call fails
    /// until it is reached.
    pub fn drive(&self) -> Result<Box<dyn Driver>, Failed> {
        Ok(match self {
            Self::Directory(path) => Box::new(driver::Committing::new(path)?),
            Self::Redis(address) => Box::new(redis::Pipelined::new(address)?),
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Redis(address) => address.fmt(f),
        }
    }
}

/// A store that is opened at the first call, and again after a failure to open.
#[derive(Default)]
pub struct Lazy(Option<Box<dyn Store>>);

impl Lazy {
    /// Does a call to the store in `place`.
    ///
    /// # Errors
    /// As [`Store::call`], and when the store cannot be opened.
    pub fn call(&mut self, place: &Place, call: &Call) -> Result<Reply, Failed> {
        if self.0.is_none() {
            self.0 = Some(place.open()?);
        }
        match &mut self.0 {
            Some(store) => store.call(call),
            None => Err(Failed("the store is not open".to_owned())),
        }
    }
}

impl Lazy {
    /// Opens a store on disk, or reads its new records, so that a process forked from this one
    /// finds it open. The files may be shared so, because nothing depends on their position. A
    /// connection to a server must not be.
    pub fn warm(&mut self, place: &Place) {
        if matches!(place, Place::Directory(_)) {
            // A failure here is reported to the client that needs the store.
            let _ = self.call(place, &Call::Page { visit: false });
        }
    }
}

/// Open stores that are unused now, for models whose threads come and go.
#[derive(Debug, Default)]
pub struct Pool(Mutex<Vec<Lazy>>);

impl Pool {
    /// Lends a store to `use_it`.
    pub fn lend<R>(&self, use_it: impl FnOnce(&mut Lazy) -> R) -> R {
        let idle = self.lock().pop();
        let mut store = idle.unwrap_or_default();
        let result = use_it(&mut store);
        if store.0.is_some() {
            self.lock().push(store);
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Lazy>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Lazy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.0.is_some() { "open" } else { "closed" };
        f.debug_tuple("Lazy").field(&state).finish()
    }
}

/// A driver that is opened at the first call, and again after a failure to open. Its descriptor
/// is there from the start, so that a loop can wait for it always.
pub struct Deferred {
    epoll: OwnedFd,
    driver: Option<Box<dyn Driver>>,
    place: Place,
}

impl Deferred {
    /// Makes one for the store in `place`.
    ///
    /// # Errors
    /// When no epoll instance can be made.
    pub fn new(place: &Place) -> Result<Self, Errno> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            driver: None,
            place: place.clone(),
        })
    }

    fn open(&mut self) -> Result<&mut Box<dyn Driver>, Failed> {
        let driver = match self.driver.take() {
            Some(driver) => driver,
            None => {
                let driver = self.place.drive()?;
                epoll::add(&self.epoll, &driver, EventData::new_u64(0), EventFlags::IN)
                    .map_err(|error| Failed(format!("cannot wait for the store: {error}")))?;
                driver
            }
        };
        Ok(self.driver.insert(driver))
    }
}

impl AsFd for Deferred {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Driver for Deferred {
    fn submit(&mut self, token: u64, call: Call) -> Option<Result<Reply, Failed>> {
        match self.open() {
            Ok(driver) => driver.submit(token, call),
            Err(failed) => Some(Err(failed)),
        }
    }

    fn ready(&mut self) -> Vec<(u64, Result<Reply, Failed>)> {
        self.driver
            .as_mut()
            .map_or_else(Vec::new, |driver| driver.ready())
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod contract;
