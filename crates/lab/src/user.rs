//! The user who starts a server and steers it.

use std::io::Read;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::process;
use crate::scratch::Scratch;

/// The user of a server and of what steers it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum User {
    /// The one who runs the experiment.
    #[default]
    Own,
    /// Another user, without any capability.
    Plain,
}

/// `nobody`, as most distributions have it.
const PLAIN: u32 = 65534;

impl User {
    /// Makes a command run as this user. A change from root to another user ends every capability.
    pub fn runs(self, command: &mut Command) {
        if self == Self::Plain {
            command.uid(PLAIN).gid(PLAIN);
        }
    }

    /// Gives a directory to this user, with all that is in it, and a directory in it for the state of Wakeone.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn take(self, scratch: &Scratch) -> Result<(), Error> {
        let Some(runtime) = self.runtime(scratch.path()) else {
            return Ok(());
        };
        let take = || {
            std::fs::create_dir(&runtime)?;
            for entry in std::fs::read_dir(scratch.path())? {
                chown(entry?.path(), Some(PLAIN), Some(PLAIN))?;
            }
            chown(scratch.path(), Some(PLAIN), Some(PLAIN))
        };
        take().map_err(|source| Error::File {
            action: "giving away",
            path: scratch.path().to_owned(),
            source,
        })
    }

    /// The directory for the state of Wakeone, where it is not that of the one who runs the experiment.
    pub fn runtime(self, scratch: &Path) -> Option<PathBuf> {
        (self == Self::Plain).then(|| scratch.join("run"))
    }

    /// The reason why Wakeone, or one of these programs, cannot be run as this user here.
    pub fn lacks(self, programs: &[&str]) -> Option<String> {
        if self == Self::Own {
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            return Some("only root may run a command as another user".into());
        }
        let named = programs.iter().filter_map(|name| process::program(name));
        let all = process::wakeone().into_iter().chain(named);
        let mut all = all.flat_map(|program| {
            let interpreter = interpreter(&program);
            std::iter::once(program).chain(interpreter)
        });
        let refused = all.find(|program| {
            let mut command = Command::new("test");
            self.runs(command.arg("-x").arg(program));
            !command.status().is_ok_and(|status| status.success())
        });
        refused.map(|program| format!("the user {PLAIN} may not run {}", program.display()))
    }
}

/// The program that runs a script.
fn interpreter(script: &Path) -> Option<PathBuf> {
    let mut start = [0; 256];
    let read = std::fs::File::open(script).ok()?.read(&mut start).ok()?;
    let line = String::from_utf8_lossy(&start[..read]);
    let words = line.lines().next()?.strip_prefix("#!")?;
    words.split_whitespace().next().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_needs_its_interpreter() {
        let scratch = Scratch::new("test").unwrap();
        let script = scratch.write("script", "#!/bin/sh -e\nexit 0\n").unwrap();
        assert_eq!(interpreter(&script), Some("/bin/sh".into()));
        let other = scratch.write("other", b"\x7fELF").unwrap();
        assert_eq!(interpreter(&other), None);
    }

    #[test]
    fn a_plain_user_has_its_directory_and_no_capability() {
        if User::Plain.lacks(&["sh"]).is_some() {
            return eprintln!("skipped: not root, or others may not run this build");
        }
        let scratch = Scratch::new("test").unwrap();
        scratch.write("file", "").unwrap();
        User::Plain.take(&scratch).unwrap();
        let script = "echo >> file && echo > run/state && grep CapEff /proc/self/status";
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(scratch.path());
        User::Plain.runs(&mut command);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("CapEff:\t0000000000000000"), "{output:?}");
        assert_eq!(User::Own.runtime(scratch.path()), None);
    }
}
