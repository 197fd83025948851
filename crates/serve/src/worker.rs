//! One worker: what it listens on, the application with its name, and the errors it counted.

use crate::Options;
use crate::app::App;
use crate::listener::{Faults, Listener};

/// One worker of the server, in whatever form the architecture gives it.
#[derive(Debug)]
pub struct Worker {
    /// What it accepts from.
    pub listeners: Vec<Listener>,
    /// What it answers.
    pub app: App,
    /// What went wrong in accept.
    pub faults: Faults,
}

impl Worker {
    /// The worker number `index` in this process, which is the last one of the fork. Under a
    /// supervisor that gives slots (`WAKEONE_SLOT`) the slot is its name, else the number.
    pub fn new(options: &Options, listeners: Vec<Listener>, index: usize) -> Self {
        let slot = std::env::var("WAKEONE_SLOT").ok();
        // It goes into a header as it is.
        let slot =
            slot.filter(|slot| !slot.is_empty() && slot.bytes().all(|b| b.is_ascii_alphanumeric()));
        Self {
            listeners,
            app: App {
                worker: slot.unwrap_or_else(|| index.to_string()),
                pid: std::process::id(),
                model: options.model.name(),
                keep_alive: options.keep_alive,
                header_timeout: options.header_timeout,
            },
            faults: Faults::default(),
        }
    }
}
