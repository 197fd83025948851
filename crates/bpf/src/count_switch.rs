//! Switches the counting of a pinned group off and on again, to measure its cost. A group in use is never switched:
//! its counts would miss the connections that open or close meanwhile.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libbpf_rs::{Program, libbpf_sys};

use crate::error::failed;

/// Switches the counting program of one group. Dropping it leaves counting on.
#[derive(Debug)]
pub struct CountSwitch {
    program: OwnedFd,
    cgroup: File,
    pin: PathBuf,
    on: bool,
}

impl CountSwitch {
    /// For the group whose pins are in `pins` and whose listeners were created in `cgroup`; it counts now.
    ///
    /// # Errors
    /// The error of opening the program or the cgroup.
    pub fn of(pins: &Path, cgroup: &Path) -> io::Result<Self> {
        let program = Program::fd_from_pinned_path(pins.join("count"))
            .map_err(|e| failed("opening the counting program", &e))?;
        Ok(Self {
            program,
            cgroup: File::open(cgroup)?,
            pin: pins.join("count_link"),
            on: true,
        })
    }

    /// Counts connections from now on, or no more.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set(&mut self, on: bool) -> io::Result<()> {
        if on == self.on {
            return Ok(());
        }
        if on { self.attach() } else { self.detach() }?;
        self.on = on;
        Ok(())
    }

    fn attach(&self) -> io::Result<()> {
        // SAFETY: both descriptors are open for as long as the call lasts, and no options are passed.
        let link = owned(unsafe {
            libbpf_sys::bpf_link_create(
                self.program.as_raw_fd(),
                self.cgroup.as_raw_fd(),
                libbpf_sys::BPF_CGROUP_SOCK_OPS,
                std::ptr::null(),
            )
        })?;
        let path = c_path(&self.pin)?;
        // SAFETY: the path ends with 0 and lives until the call returns.
        done(unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), path.as_ptr()) })
    }

    /// Detaches the link itself: after the removal of its pin alone, the kernel frees it only a moment later.
    fn detach(&self) -> io::Result<()> {
        let path = c_path(&self.pin)?;
        // SAFETY: the path ends with 0 and lives until the call returns.
        let link = owned(unsafe { libbpf_sys::bpf_obj_get(path.as_ptr()) })?;
        // SAFETY: the descriptor is open; no memory is passed.
        done(unsafe { libbpf_sys::bpf_link_detach(link.as_raw_fd()) })?;
        fs::remove_file(&self.pin)
    }
}

impl Drop for CountSwitch {
    fn drop(&mut self) {
        if let Err(error) = self.set(true) {
            tracing::warn!("cannot count connections again: {error}");
        }
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

fn done(answer: i32) -> io::Result<()> {
    if answer < 0 {
        return Err(io::Error::from_raw_os_error(-answer));
    }
    Ok(())
}

fn owned(answer: i32) -> io::Result<OwnedFd> {
    done(answer)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(answer) })
}
