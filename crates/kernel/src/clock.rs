//! How far the machine's clock can be trusted.

#![allow(unsafe_code)]

use nix::libc;
use std::io;

/// The state of the clock, by adjtimex(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockState {
    /// Whether something, as NTP, keeps it right.
    pub synchronized: bool,
    /// The kernel's bound of its error, µs.
    pub error_us_max: u64,
}

/// Asks for it.
///
/// # Errors
/// That of adjtimex(2); there is none in practice.
pub fn state() -> io::Result<ClockState> {
    // SAFETY: an all-zero `timex` is valid: it is made of integers, and no mode is set, so that nothing changes.
    let mut state: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `state` is one `timex`, which outlives the call.
    let status = unsafe { libc::adjtimex(&raw mut state) };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(ClockState {
        synchronized: status != libc::TIME_ERROR && state.status & libc::STA_UNSYNC == 0,
        error_us_max: u64::try_from(state.maxerror).unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_tells_how_far_its_clock_can_be_trusted() {
        let state = super::state().expect("adjtimex");
        // 16 s is the kernel's own limit (`NTP_PHASE_LIMIT`, include/linux/timex.h).
        assert!(state.error_us_max <= 16_000_000, "{state:?}");
    }
}
