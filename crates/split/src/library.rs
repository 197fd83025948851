//! The library's file. Every process of the server can read it, whatever user it runs as. Nobody can write to it, nor
//! to any folder above it. In /tmp another user could make the folder anew once it was cleaned away. Every program
//! that the server starts later would then load that user's file.
//!
//! Where the user has no such folder, the library is in memory. Only processes of that user can open it there.
//!
//! The file is locked as long as its `wakeone run` lives. If that was killed, the next one, or `wakeone detach`,
//! removes its file once no process of the server has it loaded: such processes start others, which load it too.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, MemfdFlags, StatVfsMountFlags, flock, memfd_create, statvfs};
use rustix::process::{DumpableBehavior, dumpable_behavior};
use wakeone_kernel::capability::{self, Capability};
use wakeone_kernel::folder;
use wakeone_kernel::proc::process;
use wakeone_shim::LIBRARY;

/// The library. Dropping this removes it.
#[derive(Debug)]
pub struct Library {
    /// A folder of its own, with the library in it; `None`: it is in memory.
    folder: Option<PathBuf>,
    /// Locked.
    file: File,
}

impl Library {
    /// Writes the library below the first folder that may hold programs. The runtime folder itself is not suitable:
    /// workers that became another user start programs too, and may not enter it.
    ///
    /// # Errors
    /// No folder is suitable.
    pub fn write() -> io::Result<Self> {
        sweep();
        let mut last = None;
        for place in places() {
            match write_below(&place) {
                Ok(library) => return Ok(library),
                Err(error) => last = Some(error),
            }
        }
        in_memory().map_err(|error| last.unwrap_or(error))
    }

    /// The path for `LD_PRELOAD`.
    pub fn path(&self) -> PathBuf {
        match &self.folder {
            Some(folder) => folder.join(NAME),
            None => {
                let (own, fd) = (std::process::id(), self.file.as_raw_fd());
                PathBuf::from(format!("/proc/{own}/fd/{fd}"))
            }
        }
    }
}

/// Holds the library in memory. The server's processes open it through our descriptor, which only processes of our user
/// may do (proc_pid_get_link, fs/proc/base.c).
fn in_memory() -> io::Result<Library> {
    if may_become_others() {
        return Err(io::Error::other("its processes may become other users"));
    }
    if dumpable_behavior()? != DumpableBehavior::Dumpable {
        return Err(io::Error::other(
            "our descriptors cannot be opened by our user",
        ));
    }
    let mut file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC)?);
    file.write_all(LIBRARY)?;
    Ok(Library { folder: None, file })
}

const NAME: &str = "libwakeone-split.so";
const FOLDER: &str = "wakeone-split-";
/// A younger folder may be about to be locked.
const YOUNG: Duration = Duration::from_secs(10);

/// Removes the folders of killed processes that no process has loaded. Those that cannot be read or removed stay.
pub fn sweep() {
    let own = rustix::process::geteuid().as_raw();
    let left: Vec<PathBuf> = places()
        .iter()
        .filter_map(|place| fs::read_dir(trusted(place).ok()?).ok())
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(FOLDER))
        .map(|entry| entry.path())
        .filter(|folder| is_left(folder, own))
        .collect();
    if left.is_empty() {
        return;
    }
    let Some(loaded) = loaded() else { return };
    for folder in left {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        if !loaded.contains(name.as_ref()) {
            let _ = fs::remove_file(folder.join(NAME));
            let _ = fs::remove_dir(&folder);
        }
    }
}

/// Whether a folder is one of ours, and nobody uses it. Links are not followed: others may write in some of the
/// places.
fn is_left(folder: &Path, own: u32) -> bool {
    let Ok(is) = fs::symlink_metadata(folder) else {
        return false;
    };
    let young = is
        .modified()
        .ok()
        .and_then(|at| SystemTime::now().duration_since(at).ok())
        .is_none_or(|age| age < YOUNG);
    if !is.is_dir() || is.uid() != own || young {
        return false;
    }
    match File::open(folder.join(NAME)) {
        Ok(file) => flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// The lines of all processes' maps that name such a library; `None` if one may be missing.
fn loaded() -> Option<String> {
    let mut all = String::new();
    let pids = process::pids();
    if pids.is_empty() {
        return None;
    }
    for pid in pids {
        match process::maps_with(pid, FOLDER) {
            Ok(lines) => lines.iter().for_each(|line| all += line),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return None,
            // The process has just ended, or we may not read it.
            Err(_) => {}
        }
    }
    Some(all)
}

impl Drop for Library {
    fn drop(&mut self) {
        let Some(folder) = &self.folder else { return };
        let _ = fs::remove_dir_all(folder);
        // We may have made it; it stays if another library is in it.
        let _ = fs::remove_dir(SYSTEM_PLACE);
    }
}

/// A folder for root's library if /run is not suitable. It is made when it is needed.
const SYSTEM_PLACE: &str = "/var/lib/wakeone";

/// Whether the server's processes may become other users, as root's may. In a user namespace of one user nobody may.
fn may_become_others() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_alone = map.split_whitespace().nth(2) == Some("1") && map.lines().count() == 1;
    capability::has(Capability::CAP_SETUID) && !is_alone
}

/// Candidates for the library's place, the best one first. [`trusted`] refuses those that others can change.
fn places() -> Vec<PathBuf> {
    let variable = |name| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    let own = rustix::process::geteuid();
    let mut places = Vec::new();
    if own.is_root() {
        places.extend(["/run", SYSTEM_PLACE].map(PathBuf::from));
    }
    places.extend(variable("XDG_RUNTIME_DIR"));
    places.push(format!("/run/user/{}", own.as_raw()).into());
    let home = || variable("HOME").map(|home| home.join(".cache"));
    places.extend(variable("XDG_CACHE_HOME").or_else(home));
    places.extend(variable("TMPDIR"));
    places
}

/// A place with all links resolved, if only root and we can change what is at its path. Then it is the same whenever
/// a process of the server opens it.
fn trusted(place: &Path) -> io::Result<PathBuf> {
    let own = rustix::process::geteuid();
    let root = folder::root().map_err(io::Error::other)?;
    let place = fs::canonicalize(place)?;
    for step in place.ancestors() {
        let is = fs::symlink_metadata(step)?;
        let refused = |why: &str| {
            let step = step.display();
            Err(io::Error::other(format!("{step} {why}")))
        };
        if ![root, own.as_raw()].contains(&is.uid()) {
            return refused("belongs to another user");
        }
        if is.mode() & 0o022 != 0 {
            return refused("can be written by other users");
        }
        if may_become_others() && is.mode() & 0o001 == 0 {
            return refused("cannot be entered by other users");
        }
    }
    Ok(place)
}

fn write_below(place: &Path) -> io::Result<Library> {
    if place == Path::new(SYSTEM_PLACE) {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(place)?;
    }
    let place = &trusted(place)?;
    if statvfs(place)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::other(format!(
            "nothing can be run from {}",
            place.display()
        )));
    }
    let folder = place.join(format!("{FOLDER}{:016x}", rand::random::<u64>()));
    // Others may enter it, but neither list nor write. This fails if somebody made one of that name before us.
    DirBuilder::new().mode(0o711).create(&folder)?;
    let written = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o755)
            .open(folder.join(NAME))?;
        flock(&file, FlockOperation::LockExclusive)?;
        file.write_all(LIBRARY)?;
        Ok(file)
    };
    match written() {
        Ok(file) => Ok(Library {
            folder: Some(folder),
            file,
        }),
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
        let folder = library.folder.as_ref().expect("a folder");
        assert_eq!(fs::metadata(folder).expect("mode").mode() & 0o777, 0o711);
        drop(library);
        assert!(!path.exists());
    }

    #[test]
    fn programs_of_the_same_user_load_it_from_memory() {
        let file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC).expect("memory"));
        (&file).write_all(LIBRARY).expect("written");
        let library = Library { folder: None, file };
        let mut maps = std::process::Command::new("cat");
        maps.arg("/proc/self/maps")
            .env("LD_PRELOAD", library.path());
        let output = maps.output().expect("cat");
        assert!(String::from_utf8_lossy(&output.stdout).contains(NAME));
        assert!(output.stderr.is_empty(), "{output:?}");
    }

    #[test]
    fn a_place_that_another_user_can_change_is_refused() {
        let refused = |place: &str| trusted(Path::new(place)).expect_err(place).to_string();
        assert!(refused("/tmp").contains("written by other users"));
        assert!(refused("/var/tmp").contains("/var/tmp can be written"));
        let folder = tempfile::tempdir().expect("folder");
        let below = folder.path().join("below");
        fs::create_dir(&below).expect("folder");
        let told = trusted(&below).expect_err("a folder above").to_string();
        assert!(told.contains("written by other users"), "{told}");
        if rustix::process::geteuid().is_root() {
            let own = tempfile::tempdir_in("/run").expect("folder");
            let mode = |mode| {
                let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
                fs::set_permissions(own.path(), mode).expect("mode");
            };
            mode(0o755);
            assert_eq!(trusted(own.path()).expect("a place"), own.path());
            let link = folder.path().join("link");
            std::os::unix::fs::symlink(own.path(), &link).expect("link");
            assert_eq!(trusted(&link).expect("a place"), own.path());
            mode(0o775);
            assert!(trusted(own.path()).is_err(), "its group can write it");
            mode(0o700);
            assert!(trusted(own.path()).is_err(), "its workers may be others");
            mode(0o755);
            std::os::unix::fs::chown(own.path(), Some(65534), None).expect("chown");
            let told = trusted(own.path()).expect_err("another user's");
            assert!(told.to_string().contains("another user"), "{told}");
        }
    }

    #[test]
    fn what_a_killed_one_left_goes_once_nobody_has_it() {
        let own = rustix::process::geteuid().as_raw();
        let library = Library::write().expect("a place");
        let folder = library.folder.as_ref().expect("a folder");
        let age = |folder: &Path| {
            let old = SystemTime::now() - 2 * YOUNG;
            File::open(folder)
                .and_then(|file| file.set_modified(old))
                .expect("times");
        };
        age(folder);
        assert!(!is_left(folder, own), "locked");
        // As after kill -9: the lock is released with its holder, and the folder stays.
        let copy = folder.with_extension("left");
        fs::create_dir(&copy).expect("folder");
        fs::copy(library.path(), copy.join(NAME)).expect("copy");
        assert!(!is_left(&copy, own), "young");
        age(&copy);
        assert!(is_left(&copy, own));
        assert!(!is_left(&copy, own + 1), "another user's");
        let link = folder.with_extension("link");
        std::os::unix::fs::symlink(&copy, &link).expect("link");
        assert!(!is_left(&link, own), "a link");
        fs::remove_file(link).expect("link");
        if own == 0 {
            sweep();
            assert!(!copy.exists() && library.path().exists());
        }
        let _ = fs::remove_dir_all(copy);
    }
}
