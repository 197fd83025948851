//! The state file of a supervisor, so that the next one can take over workers that outlived it.
//!
//! A group has a folder `RUNTIME_DIR/NAME` (mode 0700) with `state.json` and `lock`. A supervisor holds the lock as
//! long as it lives, which tells a living one from a dead one's files. The file is read as if an attacker had written
//! it.

use super::account::Account;
use super::listen::Endpoint;
use super::process::Identity;
use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use wakeone_kernel::{folder, process};

/// The version of the file's format.
pub const SCHEMA: u32 = 1;
/// No file that we wrote is larger.
const MOST_BYTES: u64 = 4 << 20;
/// Stands for the command of an attached server whose queues were made by `wakeone run --split`.
pub const SPLIT: &str = "--split";
/// Most slots of a group.
pub const MOST_SLOTS: usize = 256;
/// Most addresses of a group.
pub const MOST_ADDRESSES: usize = 16;

/// A group as its supervisor last wrote it down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The group's name.
    pub name: String,
    /// The kernel's boot id: pids of another boot mean nothing.
    pub boot: String,
    /// The process that wrote it.
    pub supervisor: Identity,
    /// The addresses where it listens, in the order of the workers' descriptors.
    pub listen: Vec<Endpoint>,
    /// The listeners' backlog.
    pub backlog: i32,
    /// The command of its workers, and its account.
    pub task: Task,
    /// Its slots.
    pub slots: Vec<Slot>,
    /// The server is not ours and is steered from outside: `supervisor` is the agent, and starts and ends no worker.
    #[serde(default)]
    pub attached: bool,
    /// The private ports of the listeners, if they are on such: one entry for each of `listen`, or none at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<Option<Reserved>>,
}

/// An address whose listeners are on a private port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserved {
    /// The listeners' port.
    pub private_port: u16,
    /// The inode of the socket that reserves the public address.
    pub inode: u64,
}

/// The command of workers and its account: two tasks that differ are different servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// The command, placeholders not yet filled in.
    pub command: Vec<String>,
    /// The account that runs it.
    pub account: Option<Account>,
    /// Capabilities that it keeps.
    pub keep_caps: Vec<String>,
}

/// A slot as written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slot {
    /// Its worker, if one ran.
    pub worker: Option<Identity>,
    /// Whether that worker runs the task above, not an earlier one.
    pub current: bool,
    /// The inode of its listener at each address, by which it is found among the worker's descriptors.
    pub inodes: Vec<u64>,
    /// In a rolling restart: the second worker of the slot, which starts or ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
}

/// A second worker of a slot, with listeners of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beside {
    /// The worker.
    pub worker: Identity,
    /// The inode of its listener at each address.
    pub inodes: Vec<u64>,
}

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

impl State {
    /// Whether its queues were made beside a shared socket that nobody serves. Then the kernel's hash must not
    /// choose.
    pub fn is_split(&self) -> bool {
        self.attached
            && self
                .task
                .command
                .first()
                .is_some_and(|first| first == SPLIT)
    }

    /// Encodes the state as JSON.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Decodes the state, and checks all that can be checked without looking at processes.
    ///
    /// # Errors
    /// The flaw, as part of a sentence.
    pub fn decode(bytes: &[u8], name: &str) -> Result<Self, String> {
        let state: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let wrong = state.flaw(name);
        wrong.map_or(Ok(state), |flaw| Err(flaw.to_owned()))
    }

    fn flaw(&self, name: &str) -> Option<&'static str> {
        let mut seen = HashSet::new();
        let beside = || self.slots.iter().filter_map(|slot| slot.beside.as_ref());
        let inodes = self.slots.iter().flat_map(|slot| &slot.inodes);
        let inodes = inodes.chain(beside().flat_map(|beside| &beside.inodes));
        let workers = || {
            let first = self.slots.iter().filter_map(|slot| slot.worker);
            first.chain(beside().map(|beside| beside.worker))
        };
        let pids: HashSet<u32> = workers().map(|worker| worker.pid).collect();
        let checks = [
            (self.schema == SCHEMA, "its schema is of another version"),
            (self.name == name, "it names another group"),
            (
                (1..=MOST_ADDRESSES).contains(&self.listen.len()),
                "its number of addresses is impossible",
            ),
            (
                self.listen
                    .iter()
                    .all(|endpoint| endpoint.address.port() != 0),
                "an address has no port",
            ),
            (
                (1..=MOST_SLOTS).contains(&self.slots.len()),
                "its number of slots is impossible",
            ),
            (self.backlog >= 0, "its backlog is negative"),
            (
                self.reserved.is_empty() || self.reserved.len() == self.listen.len(),
                "its number of reserved addresses is impossible",
            ),
            (
                self.reserved
                    .iter()
                    .flatten()
                    .all(|one| one.private_port != 0),
                "a reserved address has no private port",
            ),
            (
                self.attached || !self.task.command.is_empty(),
                "it has no command",
            ),
            (
                self.slots.iter().all(|slot| {
                    slot.inodes.len() == self.listen.len()
                        || self.attached && slot.inodes.is_empty()
                }),
                "a slot lacks a listener",
            ),
            (
                beside().all(|beside| beside.inodes.len() == self.listen.len()),
                "a second worker lacks a listener",
            ),
            (
                inodes.into_iter().all(|inode| seen.insert(*inode)),
                "two slots have the same listener",
            ),
            (
                workers().all(|worker| worker.pid > 1 && i32::try_from(worker.pid).is_ok()),
                "a pid is impossible",
            ),
            (
                self.attached || pids.len() == workers().count(),
                "two slots have the same worker",
            ),
        ];
        checks
            .iter()
            .find(|(holds, _)| !holds)
            .map(|(_, flaw)| *flaw)
    }
}

/// Whether a text can name a group: it becomes a folder here and under bpffs, which forbids dots.
pub fn is_name(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=64).contains(&text.len()) && !text.starts_with('-') && text.bytes().all(fits)
}

/// The default folder for groups: `$WAKEONE_RUNTIME_DIR`, else `/run/wakeone` for root. For others it is
/// `$XDG_RUNTIME_DIR/wakeone`, or a folder of their own in the temporary one.
pub fn default_runtime_dir() -> PathBuf {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let user = rustix::process::geteuid();
    variable("WAKEONE_RUNTIME_DIR").unwrap_or_else(|| {
        if user.is_root() {
            PathBuf::from("/run/wakeone")
        } else if let Some(own) = variable("XDG_RUNTIME_DIR") {
            own.join("wakeone")
        } else {
            std::env::temp_dir().join(format!("wakeone-{}", user.as_raw()))
        }
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

impl GroupDir {
    /// Makes and locks the folder.
    ///
    /// # Errors
    /// A supervisor has it, it cannot be made, or others can write to it.
    pub fn take(runtime_dir: &Path, name: &str) -> Result<Self, StateError> {
        let path = runtime_dir.join(name);
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
                let mut pid = String::new();
                let _ = lock.take(20).read_to_string(&mut pid);
                let pid = if pid.trim().is_empty() {
                    "?".to_owned()
                } else {
                    pid.trim().to_owned()
                };
                let name = name.to_owned();
                let stopped = pid.parse().is_ok_and(process::is_stopped);
                return Err(if stopped {
                    StateError::Stopped { name, pid }
                } else {
                    StateError::Taken { name, pid }
                });
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
            // An agent that was killed leaves its socket.
            let _ = std::fs::remove_file(self.path.join(crate::metrics::socket::NAME));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> State {
        let slot = |pid: u32, inode| Slot {
            worker: Some(Identity { pid, started: 9 }),
            current: true,
            inodes: vec![inode],
            beside: None,
        };
        State {
            attached: false,
            reserved: Vec::new(),
            schema: SCHEMA,
            name: "web".to_owned(),
            boot: "b".to_owned(),
            supervisor: Identity { pid: 5, started: 8 },
            listen: vec![Endpoint {
                address: ([127, 0, 0, 1], 80).into(),
                dual_stack: false,
                udp: false,
            }],
            backlog: 128,
            task: Task {
                command: vec!["server".to_owned(), "{fd}".to_owned()],
                account: None,
                keep_caps: Vec::new(),
            },
            slots: vec![
                slot(6, 100),
                slot(7, 101),
                Slot {
                    worker: None,
                    current: false,
                    inodes: vec![102],
                    beside: None,
                },
            ],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let state = sample();
        assert_eq!(State::decode(&state.encode(), "web"), Ok(state));
    }

    #[test]
    fn states_survive_foreign_bytes() {
        crate::foreign::survives("state", &[sample().encode()], |bytes| {
            if let Ok(state) = State::decode(bytes, "web") {
                assert!(state.slots.len() <= MOST_SLOTS && state.name == "web");
                assert_eq!(State::decode(&state.encode(), "web"), Ok(state));
            }
        });
    }

    #[test]
    fn each_flaw_is_seen() {
        type Spoil = fn(&mut State);
        let spoil: &[(&str, Spoil)] = &[
            ("version", |state| state.schema = 2),
            ("another group", |state| state.name = "other".to_owned()),
            ("addresses", |state| state.listen.clear()),
            ("no port", |state| state.listen[0].address.set_port(0)),
            ("slots is impossible", |state| state.slots.clear()),
            ("slots is impossible", |state| {
                state.slots = (0..257)
                    .map(|n| Slot {
                        worker: None,
                        current: false,
                        inodes: vec![n],
                        beside: None,
                    })
                    .collect()
            }),
            ("negative", |state| state.backlog = -1),
            ("number of reserved", |state| state.reserved = vec![None; 9]),
            ("no private port", |state| {
                let none = Reserved {
                    private_port: 0,
                    inode: 9,
                };
                state.reserved = vec![Some(none); state.listen.len()];
            }),
            ("no command", |state| state.task.command.clear()),
            ("lacks a listener", |state| state.slots[1].inodes.clear()),
            ("same listener", |state| state.slots[1].inodes[0] = 100),
            ("same worker", |state| {
                state.slots[1].worker = state.slots[0].worker
            }),
            ("pid is impossible", |state| {
                state.slots[0].worker = Some(Identity { pid: 1, started: 1 })
            }),
            ("pid is impossible", |state| {
                state.slots[0].worker = Some(Identity {
                    pid: u32::MAX,
                    started: 1,
                })
            }),
        ];
        for (flaw, change) in spoil {
            let mut state = sample();
            change(&mut state);
            let found = State::decode(&state.encode(), "web").expect_err(flaw);
            assert!(found.contains(flaw), "{found} is not {flaw}");
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let text = String::from_utf8(sample().encode()).expect("JSON");
        let more = text.replacen("\"schema\"", "\"surprise\": 1, \"schema\"", 1);
        for bytes in [
            &b""[..],
            b"{}",
            b"null",
            b"[[[[",
            b"\xff\xfe",
            &text.as_bytes()[..text.len() - 2],
            more.as_bytes(),
        ] {
            State::decode(bytes, "web").expect_err("refused");
        }
    }

    #[test]
    fn one_supervisor_at_a_time() {
        let root = tempfile::tempdir().expect("folder");
        let first = GroupDir::take(root.path(), "web").expect("first");
        let error = GroupDir::take(root.path(), "web")
            .expect_err("second")
            .to_string();
        assert!(
            error.contains(&format!("(pid {})", std::process::id())),
            "{error}"
        );
        GroupDir::take(root.path(), "other").expect("another group");
        drop(first);
        assert!(!root.path().join("web").exists(), "nothing is left");
        GroupDir::take(root.path(), "web").expect("free again");
    }

    #[test]
    fn a_state_outlives_its_writer() {
        let root = tempfile::tempdir().expect("folder");
        let dir = GroupDir::take(root.path(), "web").expect("take");
        assert_eq!(dir.load().expect("none yet"), None);
        dir.store(&sample()).expect("store");
        drop(dir);
        let mode = |path: &str| {
            std::fs::metadata(root.path().join(path))
                .expect(path)
                .mode()
                & 0o777
        };
        assert_eq!((mode("web"), mode("web/state.json")), (0o700, 0o600));
        let dir = GroupDir::take(root.path(), "web").expect("take");
        assert_eq!(dir.load().expect("load"), Some(sample()));
        assert_eq!(names(root.path()).expect("names"), ["web"]);
        assert_eq!(load(root.path(), "web").expect("look"), Some(sample()));
        assert_eq!(load(root.path(), "other").expect("look"), None);
        dir.forget();
        drop(dir);
        assert!(!root.path().join("web").exists());
    }

    #[test]
    fn planted_files_are_not_believed() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let root = tempfile::tempdir().expect("folder");
        let dir = GroupDir::take(root.path(), "web").expect("take");
        let file = root.path().join("web/state.json");
        std::fs::write(&file, sample().encode()).expect("write");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).expect("mode");
        assert!(matches!(dir.load(), Err(StateError::Invalid { .. })));
        std::fs::rename(&file, root.path().join("elsewhere")).expect("move");
        symlink(root.path().join("elsewhere"), &file).expect("link");
        assert!(matches!(dir.load(), Err(StateError::File { .. })));
        std::fs::create_dir(root.path().join("open")).expect("folder");
        std::fs::set_permissions(
            root.path().join("open"),
            std::fs::Permissions::from_mode(0o777),
        )
        .expect("mode");
        assert!(matches!(
            GroupDir::take(root.path(), "open"),
            Err(StateError::Unsafe(_))
        ));
    }

    #[test]
    fn names_are_plain() {
        for name in ["8080", "127_0_0_1-80", "__1-80", "a", &"x".repeat(64)] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "-x", "a.b", "a/b", "..", "ä", "a b", &"x".repeat(65)] {
            assert!(!is_name(name), "{name}");
        }
    }
}
