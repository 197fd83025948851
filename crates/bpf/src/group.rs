//! Whether a socket is in a reuseport group: no option of the socket tells that.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType};

use crate::error::from_bpf;

/// Whether a bound socket of UDP, or a listener, is in a reuseport group. Into a map of such sockets the kernel takes no other
/// (kernel/bpf/reuseport_array.c, `reuseport_array_update_check`); the map goes away with the question.
///
/// # Errors
/// `EPERM` without CAP_BPF.
pub fn is_in_group(socket: impl AsFd) -> io::Result<bool> {
    let options = libbpf_rs::libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let kind = MapType::ReuseportSockarray;
    let map = MapHandle::create(kind, Some("wakeone_ask"), 4, 8, 1, &options)
        .map_err(|error| from_bpf(&error))?;
    let fd = u64::try_from(socket.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
    match map.update(&0_u32.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(false),
        // It is in the map of a program that steers its group.
        Err(error) if error.kind() != ErrorKind::PermissionDenied => Ok(true),
        Err(error) => Err(from_bpf(&error)),
    }
}
