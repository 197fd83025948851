//! Real-time scheduling, where it is allowed.

use std::io;
use std::time::Duration;

use nix::libc;

/// Makes this thread a real-time one (SCHED_FIFO, lowest priority), children excepted.
///
/// # Errors
/// `EPERM` without CAP_SYS_NICE or RLIMIT_RTPRIO.
pub fn real_time() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameters are a valid struct; 0 is the calling thread.
    let done = unsafe {
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &parameters)
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether a thread of this process could be made a real-time one.
///
/// # Errors
/// As [`real_time`].
pub fn may_be_real_time() -> io::Result<()> {
    // The caller stays as it is.
    let tried = std::thread::spawn(real_time).join();
    tried.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// Returns `CLOCK_MONOTONIC` in ns.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns `CLOCK_MONOTONIC_COARSE` in ns, the clock of `bpf_ktime_get_coarse_ns` in the kernel.
pub fn coarse_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the time that this thread has run on a CPU.
pub fn thread_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
