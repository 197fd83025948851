//! A cgroup of its own for a group's listeners, so that counting concerns them alone.
//!
//! sock_ops programs run for the sockets of the cgroup that a socket was *created* in, and an accepted connection
//! belongs to its listener's. Attached at the root, the program would run a dozen times for every connection of the
//! machine. Attached to a cgroup in which only the listeners were created, it runs for their connections alone.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::proc::reader;

/// Where cgroup2 is mounted in this mount namespace.
///
/// # Errors
/// `NotFound` where it is not.
pub fn mount_point() -> io::Result<PathBuf> {
    let mountinfo = fs::read("/proc/self/mountinfo")?;
    find_mount(&mountinfo)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no cgroup2 file system is mounted"))
}

fn find_mount(mountinfo: &[u8]) -> Option<PathBuf> {
    let (_, at) = mounts(mountinfo).find(|(root, _)| *root == b"/")?;
    Some(at)
}

/// The mounts of cgroup2: the part that is mounted, and where. The part is told as seen from this process's cgroup
/// namespace: `/` is that namespace's root, and `/..` the cgroup above.
///
/// Fields of mountinfo: … root mount-point options … `-` type source … Mount points are any bytes.
fn mounts(mountinfo: &[u8]) -> impl Iterator<Item = (&[u8], PathBuf)> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ').skip(3);
        let (root, at) = (fields.next()?, fields.next()?);
        let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
        let at = || PathBuf::from(OsString::from_vec(unescaped(at)));
        (kind == b"cgroup2").then(|| (root, at()))
    })
}

/// Returns a folder of cgroup2 below which all of these cgroups are, each given by its inode: a program attached there
/// runs for all sockets that were made in them. `None` among them is a cgroup that is not known.
///
/// In a cgroup namespace, or where only a part of the hierarchy is mounted, there may be none.
///
/// # Errors
/// The reason, if there is none.
pub fn covering(cgroups: &HashSet<Option<u64>>) -> io::Result<PathBuf> {
    let mountinfo = fs::read("/proc/self/mountinfo")?;
    let places: Vec<PathBuf> = mounts(&mountinfo).map(|(_, at)| at).collect();
    if places.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "no cgroup2 file system is mounted",
        ));
    }
    let whole = places.iter().find(|place| is_whole(place));
    let part = || {
        let known: Option<HashSet<u64>> = cgroups.iter().copied().collect();
        let known = known?;
        places.iter().find(|place| contains(place, known.clone()))
    };
    whole.or_else(part).cloned().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            "they were made in a cgroup that is not mounted here (a cgroup namespace shows only its own part)",
        )
    })
}

/// Whether this is the root of the whole hierarchy: it alone has no such file (kernel/cgroup/cgroup.c,
/// `CFTYPE_NOT_ON_ROOT`).
fn is_whole(place: &Path) -> bool {
    place.join("cgroup.procs").exists() && !place.join("cgroup.events").exists()
}

/// Whether all cgroups of these inodes are in a folder.
fn contains(place: &Path, mut wanted: HashSet<u64>) -> bool {
    let mut folders = vec![place.to_owned()];
    while let Some(folder) = folders.pop() {
        if let Ok(is) = fs::symlink_metadata(&folder) {
            wanted.remove(&is.ino());
        }
        if wanted.is_empty() {
            return true;
        }
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        folders.extend(below.map(|entry| entry.path()));
    }
    false
}

/// A path as mountinfo has it: a blank, a tab, a newline, a backslash and `#` are written as three octal digits
/// (fs/proc_namespace.c, `seq_path_root` with `" \t\n\\#"`).
fn unescaped(field: &[u8]) -> Vec<u8> {
    let (mut path, mut rest) = (Vec::with_capacity(field.len()), field);
    while let [first, after @ ..] = rest {
        let octal = match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if *first == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        path.push(octal.unwrap_or(*first));
        rest = &after[if octal.is_some() { 3 } else { 0 }..];
    }
    path
}

/// The path below cgroup2's mount in a text like /proc/PID/cgroup's: any bytes as well.
fn find_own(cgroups: &[u8]) -> Option<PathBuf> {
    let lines = cgroups.split(|byte| *byte == b'\n');
    let path = lines.filter_map(|line| line.strip_prefix(b"0::/")).next()?;
    Some(PathBuf::from(OsString::from_vec(path.to_vec())))
}

/// The cgroup2 of this process.
///
/// # Errors
/// The error of reading /proc, or no cgroup2.
pub fn own() -> io::Result<PathBuf> {
    let path = find_own(&fs::read("/proc/self/cgroup")?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "this process is in no cgroup2"))?;
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "this process is in a cgroup above its cgroup namespace",
        ));
    }
    Ok(mount_point()?.join(path))
}

/// Runs `create` with this process in another cgroup, which is made where it does not exist; then moves it back.
/// Sockets that `create` makes stay in that cgroup. Returns whether it was made, beside what `create` gave.
///
/// # Errors
/// The cgroup cannot be made or entered, or it is another user's, or frozen: `create` has not run then.
pub fn create_sockets_in<T>(nursery: &Path, create: impl FnOnce() -> T) -> io::Result<(bool, T)> {
    let home = own()?;
    let made = match fs::create_dir(nursery) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            refuse_trap(nursery)?;
            false
        }
        Err(error) => return Err(error),
    };
    let back = Back(&home);
    if let Err(error) = enter(nursery) {
        std::mem::forget(back);
        if made {
            let _ = remove(nursery);
        }
        return Err(error);
    }
    let created = create();
    // It may have been started in there, and would keep the cgroup from being removed.
    reader::retire();
    drop(back);
    Ok((made, created))
}

/// Whether an existing cgroup may be one of ours: root's, or our own user's. Its owner can freeze a process that
/// enters it.
pub fn is_trusted(cgroup: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(cgroup).is_ok_and(|is| is.is_dir() && [0, own].contains(&is.uid()))
}

fn refuse_trap(cgroup: &Path) -> io::Result<()> {
    let refused = |why: &str| {
        let at = cgroup.display();
        Err(io::Error::other(format!("{at} is not entered: {why}")))
    };
    if !is_trusted(cgroup) {
        return refused("it belongs to another user");
    }
    let events = fs::read_to_string(cgroup.join("cgroup.events")).unwrap_or_default();
    if events.lines().any(|line| line == "frozen 1") {
        return refused("it is frozen");
    }
    Ok(())
}

fn enter(cgroup: &Path) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0")
}

/// Returns to a cgroup on every way out.
struct Back<'a>(&'a Path);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        if let Err(error) = enter(self.0) {
            tracing::warn!("cannot return to cgroup {}: {error}", self.0.display());
        }
    }
}

/// Removes a cgroup that has no process in it. Programs attached to it are detached by that.
///
/// # Errors
/// `EBUSY` while a process is in it; nothing where it does not exist.
pub fn remove(cgroup: &Path) -> io::Result<()> {
    match fs::remove_dir(cgroup) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_point_is_the_whole_hierarchy() {
        let lines = b"\
                     34 25 0:31 / /mnt/\xd1\x81\xd0 rw - tmpfs tmpfs rw\n\
                     35 25 0:33 / /mnt/- rw - tmpfs cgroup2 rw\n\
                     36 25 0:32 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                     37 36 0:33 /part /mnt/part rw - cgroup2 cgroup2 rw\n\
                     38 36 0:33 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(
            find_mount(lines),
            Some(PathBuf::from("/sys/fs/cgroup/unified"))
        );
        assert_eq!(find_mount(b"garbage\n - cgroup2 \n"), None);
    }

    #[test]
    fn a_part_covers_what_was_made_in_it() {
        let folder = tempfile::tempdir().expect("folder");
        let inner = folder.path().join("a/b");
        fs::create_dir_all(&inner).expect("folders");
        let inode = |path: &Path| fs::metadata(path).expect("folder").ino();
        let inside = HashSet::from([inode(folder.path()), inode(&inner)]);
        assert!(contains(folder.path(), inside.clone()));
        assert!(!contains(&inner, inside));
        assert!(!is_whole(folder.path()), "no cgroup at all");
    }

    #[test]
    fn mounts_and_cgroups_survive_foreign_bytes() {
        crate::foreign::survives("proc", &[], |bytes| {
            let _ = (find_mount(bytes), find_own(bytes));
        });
    }

    #[test]
    fn paths_are_bytes() {
        let line = b"1 1 0:1 / /a\\040b\xff\\134\\9\\04 rw shared:9 - cgroup2 none rw";
        let path = PathBuf::from(OsString::from_vec(b"/a b\xff\\\\9\\04".to_vec()));
        assert_eq!(find_mount(line), Some(path));
        let own = find_own(b"1:name=systemd:/\xd1\n0::/a/\xd0b\n");
        let path = OsString::from_vec(b"a/\xd0b".to_vec());
        assert_eq!(own, Some(PathBuf::from(path)));
        assert_eq!(find_own(b"0:/\n"), None);
    }
}
