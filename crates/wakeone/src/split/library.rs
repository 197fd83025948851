//! The library's file: where every process of the server can read it, whoever it runs as, and nobody can write it.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, statvfs};
use wakeone_shim::LIBRARY;

/// A folder of its own with the library in it; it goes with this.
#[derive(Debug)]
pub struct Library {
    folder: PathBuf,
}

impl Library {
    /// Writes it below the first folder that may hold programs. The runtime folder itself will not do: workers that
    /// became another user start programs too, and may not enter it.
    ///
    /// # Errors
    /// No folder will do.
    pub fn write() -> io::Result<Self> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for place in places() {
            match write_below(&place) {
                Ok(folder) => return Ok(Self { folder }),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// What `LD_PRELOAD` is to name.
    pub fn path(&self) -> PathBuf {
        self.folder.join(NAME)
    }
}

const NAME: &str = "libwakeone-split.so";

impl Drop for Library {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn places() -> Vec<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let root = rustix::process::geteuid().is_root();
    let system = root.then(|| PathBuf::from("/run"));
    let places = system.into_iter().chain(own.filter(|_| !root));
    places
        .chain([std::env::temp_dir(), "/var/tmp".into()])
        .collect()
}

fn write_below(place: &Path) -> io::Result<PathBuf> {
    if statvfs(place)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::other(format!(
            "nothing can be run from {}",
            place.display()
        )));
    }
    let folder = place.join(format!("wakeone-split-{:016x}", rand::random::<u64>()));
    // Enter, but neither list nor write. It fails where somebody made one of that name before us.
    DirBuilder::new().mode(0o711).create(&folder)?;
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(folder.join(NAME))
        .and_then(|mut file| file.write_all(LIBRARY));
    match written {
        Ok(()) => Ok(folder),
        Err(error) => {
            let _ = fs::remove_dir_all(&folder);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn it_is_there_for_all_to_read_and_goes_away() {
        let library = Library::write().expect("a place");
        let path = library.path();
        assert_eq!(fs::read(&path).expect("library"), LIBRARY);
        assert_eq!(fs::metadata(&path).expect("mode").mode() & 0o022, 0);
        assert_eq!(
            fs::metadata(&library.folder).expect("mode").mode() & 0o777,
            0o711
        );
        drop(library);
        assert!(!path.exists());
    }
}
