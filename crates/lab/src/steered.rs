//! Servers that are steered from outside, as a user would do it: by `wakeone attach` and `wakeone detach`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::process;
use crate::user::User;

/// A server that was attached to. Dropping it is `wakeone detach`.
#[derive(Debug)]
pub struct Attached {
    target: String,
    user: User,
    /// Where the state is, where it is not in the usual place.
    runtime: Option<PathBuf>,
}

impl Attached {
    /// Attaches to UDP sockets: every datagram is placed anew by this policy.
    ///
    /// # Errors
    /// What `wakeone attach` says.
    pub fn to_datagrams(address: SocketAddr, policy: &str) -> Result<Self, Error> {
        let how = ["--policy", policy, "--affinity", "none"];
        Self::by(User::Own, None, format!("udp://{address}"), &how)
    }

    /// Attaches with these options, by this user and with the state in this directory.
    ///
    /// # Errors
    /// What `wakeone attach` says, as [`Error::Refused`].
    pub fn by(
        user: User,
        runtime: Option<PathBuf>,
        target: String,
        how: &[&str],
    ) -> Result<Self, Error> {
        let this = std::mem::ManuallyDrop::new(Self {
            target,
            user,
            runtime,
        });
        let done = this.wakeone("attach", how);
        done.map_err(|error| Error::Refused(error.to_string()))?;
        Ok(std::mem::ManuallyDrop::into_inner(this))
    }

    /// Detaches.
    ///
    /// # Errors
    /// What `wakeone detach` says.
    pub fn end(self) -> Result<(), Error> {
        std::mem::ManuallyDrop::new(self).wakeone("detach", &[])
    }

    fn wakeone(&self, verb: &str, how: &[&str]) -> Result<(), Error> {
        let target = &self.target;
        let failed = |why: String| Error::Server(format!("wakeone {verb} {target}: {why}"));
        let mut command = Command::new(process::wakeone()?);
        command.arg(verb).args(how).arg(target).stdin(Stdio::null());
        self.user.runs(&mut command);
        if let Some(runtime) = &self.runtime {
            command.env("WAKEONE_RUNTIME_DIR", runtime);
        }
        let output = command.output().map_err(|e| failed(e.to_string()))?;
        if output.status.success() {
            Ok(())
        } else {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(failed(said.trim().to_owned()))
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.wakeone("detach", &[]);
    }
}

/// The reason why Wakeone cannot attach to a server here.
pub fn lacks() -> Option<String> {
    let missing = wakeone_kernel::capability::missing();
    (!missing.is_empty()).then(|| format!("it needs {}", missing.join(", ")))
}
