//! How long tests wait for what must happen.

use std::time::Duration;

/// How many times slower than a machine of today this one is: an emulated one says so in `WAKEONE_TIME_SCALE`.
pub fn slowness() -> u32 {
    let scale = std::env::var("WAKEONE_TIME_SCALE").ok();
    scale.map_or(1, |scale| scale.parse().expect("WAKEONE_TIME_SCALE"))
}

/// Everything that a test waits for happens long before this, on the slowest machine.
pub fn patience() -> Duration {
    Duration::from_secs(60) * slowness()
}
