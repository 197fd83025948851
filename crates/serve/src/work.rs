//! The work that `/work` does: time of this thread's CPU, or time that passes.

use std::time::Duration;

use rustix::thread::{ClockId, NanosleepRelativeResult, clock_nanosleep_relative};
use rustix::time::{Timespec, clock_gettime};

/// The longest work that a request may ask for.
pub const WORK_US_MAX: u64 = 10_000_000;

/// The kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Burns CPU time of this thread; takes longer when the CPU is shared.
    Cpu,
    /// Blocks this thread without using the CPU, as a handler does that waits for something. In the
    /// event loops it blocks the loop as well, on purpose: it models the stuck handler, and the
    /// loop does nothing else meanwhile.
    Sleep,
}

/// Does `duration` of work in the calling thread.
pub fn work(kind: Kind, duration: Duration) {
    match kind {
        Kind::Cpu => burn(duration),
        Kind::Sleep => sleep(duration),
    }
}

/// Uses up `duration` of this thread's CPU time.
fn burn(duration: Duration) {
    let end = thread_time() + duration;
    while thread_time() < end {
        // Some microseconds of computing between two looks at the clock: reading the time of a
        // thread is a system call, and the work should be done in user space.
        let mut value = 1_u64;
        for step in 0..1_000_u64 {
            value = std::hint::black_box(value.wrapping_mul(6_364_136_223_846_793_005) ^ step);
        }
    }
}

/// The CPU time that this thread has used so far.
pub fn thread_time() -> Duration {
    let now = clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Sleeps for all of `duration`, whatever signals come.
pub fn sleep(duration: Duration) {
    let mut left = Timespec {
        tv_sec: duration.as_secs() as i64,
        tv_nsec: duration.subsec_nanos().into(),
    };
    while let NanosleepRelativeResult::Interrupted(rest) =
        clock_nanosleep_relative(ClockId::Monotonic, &left)
    {
        left = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn cpu_work_uses_the_cpu_and_sleep_does_not() {
        let asked = Duration::from_millis(5);
        let before = thread_time();
        work(Kind::Cpu, asked);
        assert!(thread_time() - before >= asked);

        let (before, started) = (thread_time(), Instant::now());
        work(Kind::Sleep, asked);
        assert!(started.elapsed() >= asked);
        assert!(thread_time() - before < asked);
    }
}
