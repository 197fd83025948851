//! The folder of a group, with its lock and its state file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use wakeone_kernel::folder;
use wakeone_kernel::proc::process;

use super::format::{State, is_name};
use crate::group_table;
use crate::taken_out::{self, TakenOut};

/// The name of the UNIX socket by which a group's process is asked.
pub const SOCKET: &str = "agent.sock";
/// No file that we wrote is larger.
const MOST_BYTES: u64 = 4 << 20;

/// Why there is no state, or no folder for it.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another supervisor lives.
    #[error(
        "group `{name}` already has a supervisor (pid {pid}); stop it with `kill {pid}`, or give this one another --name"
    )]
    Taken {
        /// The group.
        name: String,
        /// Its supervisor, `?` if unknown.
        pid: String,
    },
    /// Another supervisor lives, and is stopped.
    #[error(
        "group `{name}` already has a supervisor (pid {pid}), which is stopped: continue it with `kill -CONT {pid}`, or end it with `kill -9 {pid}` and try again"
    )]
    Stopped {
        /// The group.
        name: String,
        /// Its supervisor.
        pid: String,
    },
    /// A file or folder cannot be used.
    #[error("cannot {what} {path}: {source}; another folder can be given with --runtime-dir")]
    File {
        /// What was tried.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Other users can change the folder.
    #[error(
        "{0}; groups need a folder that nobody else can replace: give another with --runtime-dir"
    )]
    Unsafe(folder::Error),
    /// The content is not what our supervisor would write.
    #[error("{path} is not a state file of ours: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// The default folder for groups: `$WAKEONE_RUNTIME_DIR`, else `/run/wakeone` for root, else `$XDG_RUNTIME_DIR/wakeone`,
/// else a folder of this user's own in the temporary one. User 0 of a user namespace is not root in /run.
pub fn default_runtime_dir() -> PathBuf {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let user = rustix::process::geteuid();
    variable("WAKEONE_RUNTIME_DIR").unwrap_or_else(|| {
        let system = user.is_root().then(|| PathBuf::from("/run"));
        let own = variable("XDG_RUNTIME_DIR");
        let mut places = system
            .into_iter()
            .chain(own)
            .map(|place| place.join("wakeone"));
        places
            .find(|place| folder::is_possible(place))
            .unwrap_or_else(|| std::env::temp_dir().join(format!("wakeone-{}", user.as_raw())))
    })
}

/// The kernel's id of this boot.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// The folder of one group, locked: while this lives, no other supervisor can take it.
#[derive(Debug)]
pub struct GroupDir {
    path: PathBuf,
    name: String,
    /// The newest state, if the file is older.
    unwritten: Mutex<Option<Unwritten>>,
    _lock: File,
}

/// A state that could not be written.
#[derive(Debug)]
struct Unwritten {
    bytes: Vec<u8>,
    /// When to try again.
    again: Instant,
}

/// How long to wait before writing again: a full disk may have room by then.
const WRITE_AGAIN: Duration = Duration::from_secs(1);

/// A process that was killed releases its lock when the kernel has taken down its programs, which takes a while.
const RELEASED_WITHIN: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The process that holds a lock, as it has written.
fn holder(lock: File) -> Option<u32> {
    let mut pid = String::new();
    let _ = lock.take(20).read_to_string(&mut pid);
    pid.trim().parse().ok()
}

/// Why a group that somebody holds cannot be taken.
fn taken(name: &str, holder: Option<u32>) -> StateError {
    let name = name.to_owned();
    let pid = holder.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
    match holder.is_some_and(process::is_stopped) {
        true => StateError::Stopped { name, pid },
        false => StateError::Taken { name, pid },
    }
}

impl GroupDir {
    /// Makes and locks the folder.
    ///
    /// # Errors
    /// A supervisor has it, it cannot be made, or others can write to it.
    pub fn take(runtime_dir: &Path, name: &str) -> Result<Self, StateError> {
        let path = runtime_dir.join(name);
        let begun = Instant::now();
        loop {
            folder::make_private(&path)?;
            let lock_path = path.join("lock");
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let lock = match rustix::fs::open(&lock_path, flags, Mode::RUSR | Mode::WUSR) {
                Ok(fd) => File::from(fd),
                Err(rustix::io::Errno::NOENT) => continue, // its last owner just removed the folder
                Err(errno) => return Err(file_error("open", &lock_path)(errno.into())),
            };
            if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                let pid = holder(lock);
                if begun.elapsed() < RELEASED_WITHIN && pid.is_some_and(process::is_ending) {
                    std::thread::sleep(LOOK_AGAIN);
                    continue;
                }
                return Err(taken(name, pid));
            }
            // A lock on a file that was removed meanwhile excludes nobody.
            if same_file(&lock, &lock_path) {
                let write = |mut file: &File| {
                    file.set_len(0)
                        .and_then(|()| writeln!(file, "{}", std::process::id()))
                };
                write(&lock).map_err(file_error("write", &lock_path))?;
                return Ok(Self {
                    path,
                    name: name.to_owned(),
                    unwritten: Mutex::new(None),
                    _lock: lock,
                });
            }
        }
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes a file in the folder, only for us, and does something with it.
    ///
    /// # Errors
    /// It cannot be made, or `act` fails.
    pub fn create<T>(
        &self,
        name: &str,
        act: impl FnOnce(&File) -> io::Result<T>,
    ) -> Result<T, StateError> {
        let path = self.path.join(name);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
        opened
            .map_err(io::Error::from)
            .and_then(|file| act(&File::from(file)))
            .map_err(file_error("make", &path))
    }

    /// Removes a file of the folder, if it is there.
    pub fn remove(&self, name: &str) {
        let _ = std::fs::remove_file(self.path.join(name));
    }

    /// Something that cannot be done in the folder.
    pub fn failed(&self, what: &'static str, source: io::Error) -> StateError {
        file_error(what, &self.path)(source)
    }

    /// The note about the epoll entries that a move has taken out.
    pub fn taken_out(&self) -> TakenOut {
        TakenOut::in_folder(&self.path)
    }

    /// The state that the last supervisor left behind.
    ///
    /// # Errors
    /// The state exists, but is invalid or cannot be read.
    pub fn load(&self) -> Result<Option<State>, StateError> {
        read(&self.file(), &self.name)
    }

    /// Replaces the state atomically: whenever we are killed, the file is the old one or the new one.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn store(&self, state: &State) -> Result<(), StateError> {
        self.write(&state.encode())
    }

    /// Like [`GroupDir::store`], but a state that cannot be written now is written by a later [`GroupDir::catch_up`].
    /// The failure is logged once.
    pub fn keep(&self, state: &State) {
        self.try_write(state.encode(), &mut self.unwritten());
    }

    /// Writes the newest state if that failed before. Call it about every second.
    pub fn catch_up(&self) {
        let mut unwritten = self.unwritten();
        if let Some(due) = unwritten.take_if(|one| one.again <= Instant::now()) {
            let bytes = due.bytes.clone();
            *unwritten = Some(due); // the failure was logged then
            self.try_write(bytes, &mut unwritten);
        }
    }

    fn unwritten(&self) -> MutexGuard<'_, Option<Unwritten>> {
        self.unwritten
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn try_write(&self, bytes: Vec<u8>, unwritten: &mut Option<Unwritten>) {
        match self.write(&bytes) {
            Ok(()) => {
                if unwritten.take().is_some() {
                    tracing::info!(
                        event = "note",
                        "{} is up to date again",
                        self.file().display()
                    );
                }
            }
            Err(error) => {
                if unwritten.is_none() {
                    tracing::warn!(
                        event = "degraded",
                        "{error}; until then a takeover would miss the newest workers (next try each second)"
                    );
                }
                let again = Instant::now() + WRITE_AGAIN;
                *unwritten = Some(Unwritten { bytes, again });
            }
        }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), StateError> {
        let draft = self.path.join("state.json.new");
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let write = || {
            let mut file = File::from(rustix::fs::open(&draft, flags, Mode::RUSR | Mode::WUSR)?);
            file.write_all(bytes)?;
            // Not synced: after a crash of the machine the file would describe processes of an earlier boot.
            std::fs::rename(&draft, self.file())
        };
        write().map_err(file_error("write", &self.file()))
    }

    /// Removes the state: the group has ended.
    pub fn forget(&self) {
        self.unwritten().take();
        let _ = std::fs::remove_file(self.file());
    }

    fn file(&self) -> PathBuf {
        self.path.join("state.json")
    }
}

impl Drop for GroupDir {
    /// Removes a folder without a state, which is of no use.
    fn drop(&mut self) {
        if !self.file().exists() {
            let _ = std::fs::remove_file(self.path.join("state.json.new"));
            for file in [taken_out::FILE, group_table::FILE, group_table::ENTRIES] {
                let _ = std::fs::remove_file(self.path.join(file));
            }
            // An agent that was killed leaves its socket.
            let _ = std::fs::remove_file(self.path.join(SOCKET));
            let _ = std::fs::remove_file(self.path.join("lock"));
            let _ = std::fs::remove_dir(&self.path);
            // The runtime folder too, if this was the last of its groups.
            let _ = self.path.parent().map(std::fs::remove_dir);
        }
    }
}

/// The names of the groups that have a folder.
///
/// # Errors
/// The runtime folder cannot be read. If it does not exist, there are no groups.
pub fn names(runtime_dir: &Path) -> Result<Vec<String>, StateError> {
    let entries = match std::fs::read_dir(runtime_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(file_error("read", runtime_dir))?,
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| is_name(name)).collect();
    names.sort();
    Ok(names)
}

/// Reads the state of a group, without its lock. Its supervisor may have died: see [`Identity::lives`].
///
/// # Errors
/// As [`GroupDir::load`].
pub fn load(runtime_dir: &Path, name: &str) -> Result<Option<State>, StateError> {
    read(&runtime_dir.join(name).join("state.json"), name)
}

fn read(path: &Path, name: &str) -> Result<Option<State>, StateError> {
    let invalid = |reason: String| StateError::Invalid {
        path: path.to_owned(),
        reason,
    };
    let file = match rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(file_error("read", path)(errno.into())),
    };
    let about = file.metadata().map_err(file_error("read", path))?;
    if !about.is_file()
        || about.uid() != rustix::process::geteuid().as_raw()
        || about.mode() & 0o022 != 0
    {
        return Err(invalid("others could have written it".to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(file_error("read", path))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(invalid("it is too large".to_owned()));
    }
    State::decode(&bytes, name).map(Some).map_err(invalid)
}

impl From<folder::Error> for StateError {
    fn from(error: folder::Error) -> Self {
        match error {
            folder::Error::File { what, path, source } => Self::File { what, path, source },
            other => Self::Unsafe(other),
        }
    }
}

fn same_file(file: &File, path: &Path) -> bool {
    let id = |about: std::fs::Metadata| (about.dev(), about.ino());
    matches!((file.metadata().map(id), std::fs::metadata(path).map(id)), (Ok(open), Ok(named)) if open == named)
}

fn file_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::File { what, path, source }
}
