//! Servers that are steered from outside, as a user would do it: by `wakeone attach` and `wakeone detach`.

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use crate::Error;

/// A server that was attached to. Dropping it is `wakeone detach`.
#[derive(Debug)]
pub struct Attached(SocketAddr);

impl Attached {
    /// Attaches, and returns when it is steered.
    ///
    /// # Errors
    /// What `wakeone attach` says.
    pub fn to(address: SocketAddr, rescue: bool) -> Result<Self, Error> {
        let mut arguments = vec!["attach"];
        arguments.extend(rescue.then_some("--rescue"));
        wakeone(&arguments, address)?;
        Ok(Self(address))
    }

    /// Detaches.
    ///
    /// # Errors
    /// What `wakeone detach` says.
    pub fn end(self) -> Result<(), Error> {
        let address = self.0;
        std::mem::forget(self);
        wakeone(&["detach"], address)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = wakeone(&["detach"], self.0);
    }
}

fn wakeone(arguments: &[&str], address: SocketAddr) -> Result<(), Error> {
    let failed = |why: String| Error::Server(format!("wakeone {}: {why}", arguments.join(" ")));
    let executable = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
    let output = Command::new(executable)
        .args(arguments)
        .arg(address.to_string())
        .stdin(Stdio::null())
        .output()
        .map_err(|e| failed(e.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(failed(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ))
    }
}
