//! A thread beside the agent's own, for what takes longer than a look.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Does something again and again. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Background {
    stop: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

impl Background {
    /// Has a thread of this name prepare its work, and do it after each pause. It ends if there is none.
    ///
    /// # Errors
    /// Out of threads.
    pub fn start<Work: FnMut()>(
        name: &str,
        pause: Duration,
        prepare: impl FnOnce() -> Option<Work> + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let its_stop = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name(name.into());
        let handle = thread.spawn(move || {
            let Some(mut work) = prepare() else { return };
            while !its_stop.load(Ordering::Acquire) {
                work();
                std::thread::park_timeout(pause);
            }
        })?;
        Ok(Self {
            stop,
            handle: Some(handle),
        })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(handle) = self.handle.take() {
            handle.thread().unpark();
            let _ = handle.join();
        }
    }
}
