//! The note of a group about the epoll entries that a move has taken out: see [`wakeone_kernel::socket::moving`].
//!
//! It is there only during a move. If the agent and its mover are both killed then, whoever comes next reads it, and puts
//! the entries back.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wakeone_kernel::socket;
use wakeone_kernel::socket::moving::{self, Entry, Look, Place};

/// The name of the note in the group's folder.
pub const FILE: &str = "taken-out.json";
/// No note of ours is larger.
const MOST_BYTES: u64 = 1 << 20;

/// The note of one group.
#[derive(Debug, Clone)]
pub struct TakenOut {
    path: PathBuf,
}

impl TakenOut {
    /// That of a group.
    pub fn of(runtime_dir: &Path, name: &str) -> Self {
        Self::in_folder(&runtime_dir.join(name))
    }

    /// That of the group with this folder.
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            path: folder.join(FILE),
        }
    }

    /// Whether a move has not ended well.
    pub fn is_there(&self) -> bool {
        self.path.exists()
    }

    /// Moves a listener's queue: see [`moving::move_queue`]. The note is there meanwhile. It stays if an entry could not be
    /// put back, or the listener does not listen again.
    ///
    /// # Errors
    /// As there, or an earlier move has not ended yet, or no note can be written, and nothing was done.
    pub fn move_queue(
        &self,
        listener: impl AsFd,
        backlog: i32,
        look: &Look,
        place: Option<Place<'_>>,
    ) -> io::Result<Duration> {
        self.put_back()?;
        if !look.entries.is_empty() {
            let note = serde_json::to_vec(&look.entries)?;
            std::fs::write(&self.path, note).inspect_err(|_| self.remove())?;
        }
        let moved = moving::move_queue(&listener, backlog, look, place);
        if moved.is_ok() {
            self.remove();
        } else if socket::listens(&listener) {
            self.put_back()?;
        }
        moved
    }

    /// Puts back what a move left out.
    ///
    /// # Errors
    /// An entry cannot be put back: its worker gets no connections.
    pub fn put_back(&self) -> io::Result<()> {
        let Some(entries) = self.read()? else {
            return Ok(());
        };
        moving::put_back(&entries)?;
        self.remove();
        Ok(())
    }

    /// Returns the entries. Half a note was written before anything was taken out.
    fn read(&self) -> io::Result<Option<Vec<Entry>>> {
        let length = match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?.len(),
        };
        if length > MOST_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let bytes = std::fs::read(&self.path)?;
        Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default()))
    }

    fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
