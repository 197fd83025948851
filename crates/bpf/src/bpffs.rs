//! The file system in which programs and maps outlive their loader.

use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, mount};

const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Whether a path lies on a bpffs.
///
/// # Errors
/// The path does not exist, or cannot be examined.
pub fn is_bpffs(path: &Path) -> io::Result<bool> {
    Ok(rustix::fs::statfs(path)?.f_type as i64 == BPF_FS_MAGIC)
}

/// Mounts a bpffs that only root may look into.
///
/// # Errors
/// `EPERM` without CAP_SYS_ADMIN.
pub fn mount_at(path: &Path) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("bpf", path, "bpf", flags, Some(c"mode=0700"))?)
}

/// Takes a mount away again; fails while anything in it is in use.
///
/// # Errors
/// The error of umount.
pub fn unmount(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(
        path,
        rustix::mount::UnmountFlags::empty(),
    )?)
}
