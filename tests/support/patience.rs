//! How long tests wait for an event that must happen.

#![allow(dead_code)] // not every test program waits for all of it

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// How many times slower than a current machine this one is. On an emulated one `WAKEONE_TIME_SCALE` says so.
pub fn slowness() -> u32 {
    let scale = std::env::var("WAKEONE_TIME_SCALE").ok();
    scale.map_or(1, |scale| scale.parse().expect("WAKEONE_TIME_SCALE"))
}

/// How long to wait for something that takes milliseconds: a hundred times as long, so a test that waits in vain fails
/// soon.
pub fn patience() -> Duration {
    // After one wait in vain the test program has failed, and the others need not take minutes to fail too.
    let seconds = if IN_VAIN.load(Relaxed) { 1 } else { 20 };
    Duration::from_secs(seconds) * slowness()
}

static IN_VAIN: AtomicBool = AtomicBool::new(false);

/// Fails the test: it waited for [`patience`], and the event did not happen.
#[track_caller]
pub fn in_vain(what: &str) -> ! {
    IN_VAIN.store(true, Relaxed);
    panic!("never happened: {what}");
}

/// How long to wait for something that takes seconds on a busy machine: servers that start or drain, long loads. A soak
/// (`WAKEONE_SOAK=1`) does more of it.
pub fn long_patience() -> Duration {
    let soak = std::env::var_os("WAKEONE_SOAK").is_some_and(|value| value == "1");
    Duration::from_secs(if soak { 600 } else { 60 }) * slowness()
}
