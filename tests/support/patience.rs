//! How long tests wait for what must happen.

#![allow(dead_code)] // not every test program waits for all of it

use std::time::Duration;

/// How many times slower than a machine of today this one is: an emulated one says so in `WAKEONE_TIME_SCALE`.
pub fn slowness() -> u32 {
    let scale = std::env::var("WAKEONE_TIME_SCALE").ok();
    scale.map_or(1, |scale| scale.parse().expect("WAKEONE_TIME_SCALE"))
}

/// How long to wait for what takes milliseconds: a hundred times as long, so that a test that waits in vain fails soon.
pub fn patience() -> Duration {
    Duration::from_secs(20) * slowness()
}

/// How long to wait for what takes seconds on a busy machine: servers that start or drain, long loads.
pub fn long_patience() -> Duration {
    Duration::from_secs(60) * slowness()
}
