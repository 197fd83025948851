//! The kernel's own statistics of BPF programs: how often each has run and how long that took.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;

/// Has the kernel count runs and run time of every BPF program, for as long as it lives. Costs each run two readings of the
/// clock, so no throughput is to be measured meanwhile. Others may ask for the same at the same time; the kernel counts the
/// askers.
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

/// A program for a reuseport group that does nothing: the kernel's hash chooses. Its run time is the cost of the statistics
/// themselves.
#[derive(Debug)]
pub struct EmptyProgram(OwnedFd);

impl EmptyProgram {
    /// Loads one.
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN.
    pub fn load() -> io::Result<Self> {
        let instruction = |code, imm| libbpf_sys::bpf_insn {
            code,
            imm,
            ..Default::default()
        };
        // r0 = SK_PASS; exit
        let code = [instruction(0xb7, 1), instruction(0x95, 0)];
        // SAFETY: the strings end with 0, `code` has the length that is given, and no options are passed.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_SK_REUSEPORT,
                c"wakeone_empty".as_ptr(),
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

impl AsFd for EmptyProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
