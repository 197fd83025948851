//! Paths of a group: pins on bpffs, a cgroup, state in the runtime folder.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::FlockOperation;
use wakeone_bpf::bpffs;
use wakeone_kernel::cgroup;
use wakeone_kernel::folder;
use wakeone_model::address::Address;

/// Where bpffs is mounted on every systemd machine.
const SYSTEM_BPFFS: &str = "/sys/fs/bpf";

/// Our own mount, below the runtime folder. The dot keeps it apart, as no group's name can have one.
const OWN_BPFFS: &str = ".bpf";

/// The runtime folder of root.
const SYSTEM_RUNTIME: &str = "/run/wakeone";

/// The end of the name of a group's UDP part, if the group has another part.
pub const DATAGRAM_SUFFIX: &str = "-udp";

/// Returns an address as a part of a group's name: letters, digits and dashes only. That of a UNIX socket ends with a
/// hash, as names that differ would look alike.
pub fn plain_name(address: Address) -> String {
    if let Some(mapped) = address.inet().and_then(of_ipv4) {
        return format!("mapped-{}", plain_name(mapped.into()));
    }
    let text = address.to_string();
    if let Address::Unix(_) = address {
        let words = text.split(|char: char| !char.is_ascii_alphanumeric());
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let mut plain = words.join("-");
        plain.truncate(MOST_OF_A_NAME);
        return format!("{plain}-{:08x}", fnv1a(text.as_bytes()));
    }
    let plain = text.trim_start_matches('[').replace("]:", "-");
    plain.replace(['.', ':', '%'], "-")
}

/// Returns a group's name of two parts. Where that is too long, the first is cut and ends with a hash of itself.
pub fn joined_name(first: &str, second: &str) -> String {
    let room = MOST_OF_ANY_NAME.saturating_sub(second.len());
    if first.len() <= room {
        return format!("{first}{second}");
    }
    let hash = format!("-{:08x}", fnv1a(first.as_bytes()));
    let cut: String = first.chars().take(room - hash.len()).collect();
    format!("{cut}{hash}{second}")
}

/// The IPv4 address that an IPv6 socket has, as Java's do.
fn of_ipv4(address: SocketAddr) -> Option<SocketAddr> {
    let SocketAddr::V6(six) = address else {
        return None;
    };
    let four = six.ip().to_ipv4_mapped()?;
    Some((four, six.port()).into())
}

/// Of the name of a group at a UNIX socket: the part that is cut.
const MOST_OF_A_NAME: usize = 48;
/// A group's name has so many bytes at most.
const MOST_OF_ANY_NAME: usize = 64;

/// The paths of all groups of one runtime folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// The runtime folder.
    pub runtime: PathBuf,
    /// The folder on bpffs that holds a folder for each group.
    pub pins: PathBuf,
    /// The name of that folder, which the groups' cgroups begin with.
    prefix: String,
    /// A bpffs of our own, if the machine has none.
    own_mount: Option<PathBuf>,
}

impl Paths {
    /// Returns the paths for a runtime folder; touches nothing. `WAKEONE_BPFFS` names another bpffs.
    pub fn of(runtime: &Path) -> Self {
        let given = std::env::var_os("WAKEONE_BPFFS").map(PathBuf::from);
        let system = PathBuf::from(SYSTEM_BPFFS);
        let (root, own_mount) = match given {
            Some(given) => (given, None),
            None if bpffs::is_bpffs(&system).unwrap_or(false) => (system, None),
            None => (runtime.join(OWN_BPFFS), Some(runtime.join(OWN_BPFFS))),
        };
        let prefix = pins_name(runtime);
        Self {
            runtime: runtime.to_owned(),
            pins: root.join(&prefix),
            prefix,
            own_mount,
        }
    }

    /// Returns the folder of a group's pins.
    pub fn group_pins(&self, name: &str) -> PathBuf {
        self.pins.join(name)
    }

    /// Returns the name of a group's cgroup, below the one that its supervisor runs in.
    pub fn cgroup_name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    /// Returns every cgroup with this group's name, wherever its supervisor ran. It skips those of other users and all
    /// below them: their owners could freeze a process that enters.
    pub fn cgroups_of(&self, name: &str) -> Vec<PathBuf> {
        let wanted = self.cgroup_name(name);
        let mut found = Vec::new();
        if let Ok(root) = cgroup::mount_point() {
            find_named(&root, &wanted, &mut found);
        }
        found
    }

    /// Makes sure that there is a bpffs to pin on. Mounts one of our own if the machine has none.
    ///
    /// # Errors
    /// One sentence with the missing part and the remedy.
    pub fn prepare(&self) -> Result<(), String> {
        let root = self.pins.parent().unwrap_or(Path::new("/"));
        // Held until the pins have their folder, and the mount is in use.
        let _alone;
        if let Some(own) = &self.own_mount {
            folder::make_private(own).map_err(|error| error.to_string())?;
            _alone = self.alone();
            // The end of another group may have removed it meanwhile.
            folder::make_private(own).map_err(|error| error.to_string())?;
            if !bpffs::is_bpffs(own).unwrap_or(false) {
                // Mounted over a folder that only root may enter, so that nobody else gets near the pins.
                bpffs::mount_at(own).map_err(|error| {
                    // It is empty, and would look like a remnant of a group.
                    let _ = fs::remove_dir(own);
                    format!(
                        "{SYSTEM_BPFFS} is no bpffs and one cannot be mounted at {}: {error}; as root: mount -t bpf bpf {SYSTEM_BPFFS}",
                        own.display()
                    )
                })?;
            }
        } else if !bpffs::is_bpffs(root).unwrap_or(false) {
            return Err(format!(
                "{} is no bpffs, so the program cannot outlive this process; mount one with: mount -t bpf bpf {}",
                root.display(),
                root.display()
            ));
        }
        folder::make_private(&self.pins)
            .map_err(|error| format!("the pins need a folder of ours alone: {error}"))
    }

    /// Keeps others from mounting and unmounting while the lock lives. Two at once would mount twice, one over the
    /// other's pins. Returns `None` if the folder cannot be locked.
    fn alone(&self) -> Option<fs::File> {
        let folder = fs::File::open(&self.runtime).ok()?;
        rustix::fs::flock(&folder, FlockOperation::LockExclusive).ok()?;
        Some(folder)
    }

    /// Checks that nobody else can exchange the folders, so that whatever we remove there is ours. They need not exist.
    ///
    /// # Errors
    /// The folder and its problem.
    pub fn check(&self) -> Result<(), folder::Error> {
        for place in [&self.runtime, &self.pins] {
            match folder::check(place) {
                Err(error) if !error.is_missing() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes what no group uses any more: the folder of the pins, and our own mount. Removes nothing if somebody else
    /// could have put something else in their place.
    pub fn tidy(&self) {
        if self.check().is_err() {
            return;
        }
        let _ = fs::remove_dir(&self.pins);
        if let Some(own) = &self.own_mount
            && let _alone = self.alone()
            && is_unused(own)
            // A supervisor that was killed early has made the folder, and mounted nothing yet.
            && (!bpffs::is_bpffs(own).unwrap_or(true) || bpffs::unmount(own).is_ok())
        {
            let _ = fs::remove_dir(own);
        }
        let _ = fs::remove_dir(&self.runtime);
    }
}

/// Returns `wakeone` for the default runtime folder. Groups of another folder must not meet those, so its name differs.
/// It does not depend on how the folder is spelled, nor on the build: the next supervisor must find the pins.
fn pins_name(runtime: &Path) -> String {
    let runtime = resolved(runtime);
    if runtime == resolved(Path::new(SYSTEM_RUNTIME)) {
        return "wakeone".into();
    }
    format!("wakeone-{:08x}", fnv1a(runtime.as_os_str().as_bytes()))
}

/// Returns an absolute path without symbolic links and `..`. It need not exist: missing parts are
/// taken as they are spelled.
fn resolved(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut resolved = PathBuf::new();
    for component in absolute.components() {
        match component {
            Component::ParentDir => drop(resolved.pop()),
            other => resolved.push(other),
        }
        if let Ok(real) = fs::canonicalize(&resolved) {
            resolved = real;
        }
    }
    resolved
}

/// The 32-bit FNV-1a hash: <http://www.isthe.com/chongo/tech/comp/fnv/>.
fn fnv1a(bytes: &[u8]) -> u32 {
    let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    bytes.iter().fold(0x811c_9dc5, step)
}

/// Whether a bpffs holds only the kernel's own entries (maps.debug, progs.debug).
fn is_unused(mount: &Path) -> bool {
    let kernels = |name: &std::ffi::OsStr| name.as_encoded_bytes().ends_with(b".debug");
    fs::read_dir(mount)
        .is_ok_and(|entries| entries.flatten().all(|entry| kernels(&entry.file_name())))
}

fn find_named(dir: &Path, wanted: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = entry.path();
        if !cgroup::is_trusted(&path) {
            continue;
        }
        if entry.file_name().to_str() == Some(wanted) {
            found.push(path);
        } else {
            find_named(&path, wanted, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_each_unix_socket_is_one_for_a_group() {
        let long = format!("unix:/run/{}", "very/".repeat(19));
        let names = [
            "unix:/run/app.sock",
            "unix:/run/app/sock",
            "unix:@run-app.sock",
            "unix:@\u{1f980}",
            &long,
        ];
        let names = names.map(|text| {
            let name = format!("at-{}", plain_name(text.parse().expect("address")));
            assert!(crate::state::is_name(&name), "{name}");
            name
        });
        assert!(names[0].starts_with("at-unix-run-app-sock-"));
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        let inet = plain_name("[::1]:80".parse().expect("address"));
        assert_eq!(inet, "--1-80");
    }

    #[test]
    fn a_folder_that_was_made_and_not_mounted_on_is_removed() {
        let scratch = tempfile::tempdir().expect("folder");
        let runtime = scratch.path().join("run");
        let own = runtime.join(OWN_BPFFS);
        for made in [&runtime, &own] {
            folder::make_private(made).expect("private");
        }
        let paths = Paths {
            pins: own.join("wakeone"),
            prefix: "wakeone".into(),
            own_mount: Some(own),
            runtime,
        };
        paths.tidy();
        assert!(!paths.runtime.exists());
    }

    /// The values for `a` and `foobar` are those that the authors of FNV publish.
    #[test]
    fn names_of_folders_are_the_same_in_every_build() {
        assert_eq!(fnv1a(b""), 0x811c_9dc5);
        assert_eq!(fnv1a(b"a"), 0xe40c_292c);
        assert_eq!(fnv1a(b"foobar"), 0xbf9c_f968);
        assert_eq!(pins_name(Path::new("/run/wakeone")), "wakeone");
        let known = "wakeone-40693cac";
        assert_eq!(pins_name(Path::new("/nonexistent/of/wakeone")), known);
    }

    #[test]
    fn all_spellings_of_a_folder_lead_to_the_same_pins() {
        let scratch = tempfile::tempdir().expect("folder");
        let runtime = scratch.path().join("real/run");
        fs::create_dir(scratch.path().join("real")).expect("folder");
        std::os::unix::fs::symlink("real", scratch.path().join("link")).expect("link");
        let here = std::env::current_dir().expect("folder");
        let up = "../".repeat(here.components().count());
        let relative = Path::new(&up).join(runtime.strip_prefix("/").expect("absolute"));
        let spelled = |text: &str| scratch.path().join(text);
        let spellings = [
            runtime.clone(),
            relative,
            spelled("real/run/"),
            spelled("real/./run/."),
            spelled("real/../real/run"),
            spelled("link/run"),
            spelled("link/run/../../real//run"),
        ];
        let name = pins_name(&runtime);
        let all_lead_there = || {
            for path in &spellings {
                assert_eq!(pins_name(path), name, "{}", path.display());
            }
        };
        all_lead_there();
        fs::create_dir(&runtime).expect("folder");
        all_lead_there();
        assert_ne!(pins_name(&spelled("real/other")), name);
    }
}
