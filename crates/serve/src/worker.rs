//! One worker: its listeners, the application with its name, and the errors it counted.

use std::os::fd::OwnedFd;

use crate::app::App;
use crate::listener::{Accepted, Faults, Listener};
use crate::options::Options;

/// One worker of the server, in whatever form the architecture gives it.
#[derive(Debug)]
pub struct Worker {
    /// The listeners it accepts from.
    pub listeners: Vec<Listener>,
    /// The application that it answers with.
    pub app: App,
    /// The errors of accept.
    pub faults: Faults,
    /// Whether a listener is non-blocking; it matters where there is only one.
    nonblocking: bool,
    slot: Option<String>,
}

impl Worker {
    /// The worker number `index` in this process, which is the last one of the fork. Under a
    /// supervisor that gives slots (`WAKEONE_SLOT`) the slot is its name, else the number.
    pub fn new(options: &Options, listeners: Vec<Listener>, index: usize) -> Self {
        // The slot goes into a header unchanged.
        let plain = |slot: &String| {
            !slot.is_empty() && slot.bytes().all(|byte| byte.is_ascii_alphanumeric())
        };
        let slot = std::env::var("WAKEONE_SLOT").ok().filter(plain);
        Self {
            nonblocking: listeners.iter().any(Listener::is_nonblocking),
            app: App {
                worker: slot.clone().unwrap_or_else(|| index.to_string()),
                pid: std::process::id(),
                model: options.model.name(),
                keep_alive: options.keep_alive,
                header_timeout: options.header_timeout,
                place: options.place.clone(),
                files: options.files.clone(),
                counter: options.counter.clone(),
            },
            listeners,
            faults: Faults::default(),
            slot,
        }
    }

    /// The application under the name of worker number `index` of this process.
    pub fn app_for(&self, index: usize) -> App {
        App {
            worker: self.slot.clone().unwrap_or_else(|| index.to_string()),
            pid: std::process::id(),
            ..self.app.clone()
        }
    }

    /// Worker number `index` in this process, which gets its connections from elsewhere.
    pub fn without_listeners(&self, index: usize) -> Self {
        Self {
            listeners: Vec::new(),
            app: self.app_for(index),
            faults: Faults::default(),
            nonblocking: false,
            slot: self.slot.clone(),
        }
    }

    /// Waits for a connection and accepts it, for the blocking models. Returns none when a signal
    /// came, when another worker got the connection, or after waiting out an error. Try again then,
    /// unless a stop has been requested.
    pub fn accept(&self) -> Option<OwnedFd> {
        match self.listeners.as_slice() {
            // One listener: simply wait in accept. Ours blocks; one that was handed over may not.
            [listener] => self.accept_from(listener).or_else(|| {
                if self.nonblocking {
                    Listener::wait_any(&self.listeners, None);
                }
                None
            }),
            // Several, which do not block: wait for all, and take from the first that has a
            // connection. Others serve the next one, or this worker does in the next round.
            several => Listener::wait_any(several, None)
                .into_iter()
                .find_map(|listener| self.accept_from(listener)),
        }
    }

    fn accept_from(&self, listener: &Listener) -> Option<OwnedFd> {
        match listener.accept(false, &self.faults) {
            Accepted::Connection(connection) => Some(connection),
            Accepted::Nothing => None,
            Accepted::Later(wait) => {
                std::thread::sleep(wait);
                None
            }
        }
    }
}
