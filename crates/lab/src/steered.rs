//! Servers that are steered from outside, as a user would do it: by `wakeone attach` and `wakeone detach`.

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::process;

/// A server that was attached to. Dropping it is `wakeone detach`.
#[derive(Debug)]
pub struct Attached(String);

impl Attached {
    /// Attaches to UDP sockets: every datagram is placed anew by this policy.
    ///
    /// # Errors
    /// What `wakeone attach` says.
    pub fn to_datagrams(address: SocketAddr, policy: &str) -> Result<Self, Error> {
        let how = ["--policy", policy, "--affinity", "none"];
        Self::to_target(format!("udp://{address}"), &how)
    }

    /// Attaches with these options.
    ///
    /// # Errors
    /// What `wakeone attach` says, as [`Error::Refused`].
    pub fn to_target(target: String, how: &[&str]) -> Result<Self, Error> {
        wakeone("attach", how, &target).map_err(|error| Error::Refused(error.to_string()))?;
        Ok(Self(target))
    }

    /// Detaches.
    ///
    /// # Errors
    /// What `wakeone detach` says.
    pub fn end(self) -> Result<(), Error> {
        let mut this = std::mem::ManuallyDrop::new(self);
        wakeone("detach", &[], &std::mem::take(&mut this.0))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = wakeone("detach", &[], &self.0);
    }
}

/// The reason why Wakeone cannot attach to a server here.
pub fn lacks() -> Option<String> {
    let missing = wakeone_kernel::capability::missing();
    (!missing.is_empty()).then(|| format!("it needs {}", missing.join(", ")))
}

fn wakeone(verb: &str, how: &[&str], target: &str) -> Result<(), Error> {
    let failed = |why: String| Error::Server(format!("wakeone {verb} {target}: {why}"));
    let output = Command::new(process::wakeone()?)
        .arg(verb)
        .args(how)
        .arg(target)
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
