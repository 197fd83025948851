//! The kernel's own statistics of BPF programs: how often each has run and how long that took.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;
use libbpf_rs::query::ProgInfoIter;

use crate::skeletons::dispatch::types::sk_reuseport_md;

/// Has the kernel count runs and run time of every BPF program, for as long as it lives. Each run then costs two
/// readings of the clock, so measure no throughput meanwhile. Others may request the same at the same time; the kernel
/// counts the requests.
#[derive(Debug)]
pub struct RunStats {
    _fd: OwnedFd,
}

impl RunStats {
    /// Starts counting.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN, EINVAL on kernels before 5.8.
    pub fn enable() -> io::Result<Self> {
        // SAFETY: the call takes a plain number and gives a new descriptor or a negative errno; no memory is passed.
        let fd = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { _fd: fd })
    }
}

/// The kernel's statistics of one program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Runs {
    /// Times it ran.
    pub count: u64,
    /// Time it took in all, in ns.
    pub ns: u64,
}

impl Runs {
    /// The runs of a loaded program so far.
    ///
    /// # Errors
    /// The descriptor is no program's.
    pub fn of(program: BorrowedFd<'_>) -> io::Result<Self> {
        let mut info = libbpf_sys::bpf_prog_info::default();
        let mut size = size_of_val(&info) as u32;
        // SAFETY: `info` is a zeroed bpf_prog_info of `size` bytes: all its pointers are null and their lengths 0.
        let done = unsafe {
            libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &mut info, &mut size)
        };
        if done != 0 {
            return Err(io::Error::from_raw_os_error(-done));
        }
        Ok(Self {
            count: info.run_cnt,
            ns: info.run_time_ns,
        })
    }
}

/// The programs that are loaded whose names begin like this, by the number that the kernel gives to each.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN.
pub fn named(prefix: &str) -> io::Result<BTreeMap<u32, (String, Runs)>> {
    // It says nothing where it may not look: the first step asks the kernel.
    drop(RunStats::enable()?);
    let all = ProgInfoIter::default().map(|one| {
        let name = one.name.to_string_lossy().into_owned();
        let runs = Runs {
            count: one.run_cnt,
            ns: one.run_time_ns,
        };
        (one.id, (name, runs))
    });
    Ok(all
        .filter(|(_, (name, _))| name.starts_with(prefix))
        .collect())
}

/// A program to compare a group's own one with.
#[derive(Debug)]
pub struct PlainProgram(OwnedFd);

/// `bpf_sk_select_reuseport`, include/uapi/linux/bpf.h
const SELECT: i32 = 82;
/// `SK_PASS`
const PASS: i32 = 1;

impl PlainProgram {
    /// One that does nothing: the kernel's hash chooses. Its run time is the cost of the statistics themselves.
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN.
    pub fn empty() -> io::Result<Self> {
        // r0 = SK_PASS; exit
        Self::load(
            c"wakeone_empty",
            &[
                instruction(0xb7, 0, 0, 0, PASS),
                instruction(0x95, 0, 0, 0, 0),
            ],
        )
    }

    /// One that selects among the first sockets of a group's array by the hash, and does nothing else. Its run time is that
    /// of the kernel's own helper, which reads the selected socket.
    ///
    /// # Errors
    /// As [`PlainProgram::empty`].
    pub fn selecting(sockets: BorrowedFd<'_>, slots: u32) -> io::Result<Self> {
        let hash = std::mem::offset_of!(sk_reuseport_md, hash) as i16;
        let slots = i32::try_from(slots).map_err(io::Error::other)?;
        let map = sockets.as_raw_fd();
        Self::load(
            c"wakeone_select",
            &[
                instruction(0x61, 2, 1, hash, 0),   // r2 = ctx->hash
                instruction(0x27, 2, 0, 0, slots),  // r2 *= slots
                instruction(0x77, 2, 0, 0, 32),     // r2 >>= 32
                instruction(0x63, 10, 2, -4, 0),    // *(u32 *)(fp - 4) = r2
                instruction(0x18, 2, 1, 0, map),    // r2 = the array,
                instruction(0, 0, 0, 0, 0),         // in two instructions
                instruction(0xbf, 3, 10, 0, 0),     // r3 = fp
                instruction(0x07, 3, 0, 0, -4),     // r3 -= 4
                instruction(0xb7, 4, 0, 0, 0),      // r4 = 0
                instruction(0x85, 0, 0, 0, SELECT), // call
                instruction(0xb7, 0, 0, 0, PASS),   // r0 = SK_PASS
                instruction(0x95, 0, 0, 0, 0),      // exit
            ],
        )
    }

    fn load(name: &CStr, code: &[libbpf_sys::bpf_insn]) -> io::Result<Self> {
        // SAFETY: the strings end with 0, `code` has the length that is given, and no options are passed.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_SK_REUSEPORT,
                name.as_ptr(),
                c"Dual BSD/GPL".as_ptr(),
                code.as_ptr(),
                code.len() as u64,
                std::ptr::null_mut(),
            )
        };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

/// One instruction, as the kernel numbers them (Documentation/bpf/standardization/instruction-set.rst).
pub fn instruction(code: u8, to: u8, from: u8, off: i16, imm: i32) -> libbpf_sys::bpf_insn {
    let mut one = libbpf_sys::bpf_insn {
        code,
        off,
        imm,
        ..Default::default()
    };
    one.set_dst_reg(to);
    one.set_src_reg(from);
    one
}

impl AsFd for PlainProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
