//! /proc/PID/stat, and other files of /proc as text.

use std::io;
use std::path::Path;

pub use crate::proc::line::Stat;
use crate::proc::line::as_text;
use crate::proc::reader;

/// A tick of /proc (`USER_HZ`, 100 on all architectures that we run on), ns.
pub const TICK_NS: u64 = 10_000_000;

impl Stat {
    /// That of a process.
    ///
    /// # Errors
    /// There is no such process, or /proc cannot be read.
    pub fn of(pid: u32) -> io::Result<Self> {
        let line = reader::file(pid, "stat")?;
        Self::parse(&line).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// A file of this process's, or of the system's, in /proc as text; bytes that are none become U+FFFD. For those of other
/// processes: [`text_of`].
///
/// # Errors
/// The error of reading it.
pub fn text(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(as_text(std::fs::read(path)?))
}

/// A file `below` /proc/PID as text; bytes that are none become U+FFFD.
///
/// # Errors
/// The error of reading it; `TimedOut` if the process lets its readers hang.
pub fn text_of(pid: u32, below: &str) -> io::Result<String> {
    Ok(as_text(reader::file(pid, below)?))
}
