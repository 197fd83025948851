//! How long tests wait for what must happen.

use std::time::Duration;

/// Everything that a test waits for happens long before this, on the slowest machine. An emulated machine is slower
/// still: `WAKEONE_TIME_SCALE` multiplies the limit.
pub fn patience() -> Duration {
    let scale = std::env::var("WAKEONE_TIME_SCALE").ok();
    Duration::from_secs(60) * scale.map_or(1, |scale| scale.parse().expect("WAKEONE_TIME_SCALE"))
}
