//! A directory for the time of a measurement.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;

/// A new directory under the system's own for such things. Dropping it removes it with all that is in it.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes one; `what` is part of its name.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(what: &str) -> Result<Self, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("wakeone-{what}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self(path)),
            Err(source) => Err(writing(&path, source)),
        }
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<PathBuf, Error> {
        let path = self.0.join(name);
        fs::write(&path, content).map_err(|source| writing(&path, source))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn writing(path: &Path, source: std::io::Error) -> Error {
    Error::File {
        action: "writing",
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gone_with_all_that_is_in_it() {
        let one = Scratch::new("test").unwrap();
        let other = Scratch::new("test").unwrap();
        assert_ne!(one.path(), other.path());
        let file = one.write("a", "b").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "b");
        let path = one.path().to_owned();
        drop(one);
        assert!(!path.exists());
    }
}
