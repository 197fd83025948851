//! The kernel's own statistics of BPF programs: how often each has run and how long that took.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Has the kernel count runs and run time of every BPF program, for as long as it lives. Costs each run two readings of the
/// clock, so no throughput is to be measured meanwhile. Others may ask for the same at the same time; the kernel counts the
/// askers.
#[derive(Debug)]
pub struct RunStats {
    _fd: OwnedFd,
}

impl RunStats {
    /// Starts counting.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN, EINVAL on kernels before 5.8.
    pub fn enable() -> io::Result<Self> {
        // SAFETY: the call takes a plain number and gives a new descriptor or a negative errno; no memory is passed.
        let fd = unsafe {
            libbpf_rs::libbpf_sys::bpf_enable_stats(libbpf_rs::libbpf_sys::BPF_STATS_RUN_TIME)
        };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { _fd: fd })
    }
}
