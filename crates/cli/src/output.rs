//! Standard output that nobody may be reading any more.

use std::io::{self, Write};

/// Prints a text as it is. A reader that has gone, such as `head`, has read enough: that is no failure.
///
/// # Errors
/// Any other that writing has.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}
