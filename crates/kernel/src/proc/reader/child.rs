//! The helper's own side. It makes only system calls: another thread of the process that it was forked from may have held
//! any lock, the allocator's among them.

use std::ffi::CStr;
use std::io::IoSliceMut;
use std::os::fd::RawFd;

use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::request::{
    DESCRIPTOR, END, FAILED, MORE, MOST_BYTES, MOST_OF_EACH, RECORD_HEAD, REQUEST_BYTES, Request,
    Task,
};

/// Makes this forked process a helper with this name, which holds nothing of its parent but the socket, as descriptor 0: no
/// lock of a group's folder, and few capabilities.
pub(crate) fn become_helper(socket: RawFd, name: &CStr, real_time: bool) {
    // SAFETY: system calls on numbers; everything but the socket is closed, and no helper uses the rest.
    unsafe {
        libc::dup2(socket, 0);
        libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0);
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        if real_time {
            let parameters = libc::sched_param { sched_priority: 1 };
            libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters);
        }
        keep_few_capabilities();
    }
}

/// Lets this process have descriptors of any number: a worker may have its listener at any below its limit.
pub(crate) fn allow_any_number() {
    // SAFETY: all zeros are a valid limit, and the kernel fills it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
    }
}

/// Answers until its other end is closed.
pub(crate) fn serve(socket: RawFd, real_time: bool) -> ! {
    become_helper(socket, c"wakeone-reader", real_time);
    // SAFETY: a system call. It ends with the thread that started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let mut answer = Answer::new();
    loop {
        let mut request = [0_u8; REQUEST_BYTES];
        // SAFETY: `request` has as many bytes.
        let got = unsafe { libc::recv(0, request.as_mut_ptr().cast(), REQUEST_BYTES, 0) };
        if got < 0 && errno() == libc::EINTR {
            continue;
        }
        let request = (got == REQUEST_BYTES as isize).then(|| Request::decode(&request));
        let Some(Some(request)) = request else {
            // SAFETY: ends the process, without anything that exit() would run.
            unsafe { libc::_exit(0) }
        };
        answer.give(&request);
    }
}

/// The room in which the packets of an answer are gathered.
struct Answer {
    /// The kind, and room for the rest.
    bytes: [u8; 1 + MOST_BYTES],
    used: usize,
}

/// An errno.
type Failed = i32;

impl Answer {
    fn new() -> Self {
        Self {
            bytes: [0; 1 + MOST_BYTES],
            used: 0,
        }
    }

    fn give(&mut self, request: &Request) {
        self.used = 0;
        let done = match request.task {
            Task::File => self.file(request),
            Task::Numbers | Task::FileOfEach | Task::Links => self.entries(request),
            Task::Link => self.link(request),
            Task::Memory => self.memory(request),
            Task::Descriptor => self.descriptor(request),
        };
        match done {
            Ok(()) => self.send(END),
            Err(errno) => {
                self.used = 4;
                self.bytes[1..5].copy_from_slice(&errno.to_ne_bytes());
                self.send(FAILED);
            }
        }
    }

    fn send(&mut self, kind: u8) {
        self.bytes[0] = kind;
        // SAFETY: `bytes` has one byte more than are used.
        unsafe {
            libc::send(
                0,
                self.bytes.as_ptr().cast(),
                1 + self.used,
                libc::MSG_NOSIGNAL,
            );
        }
        self.used = 0;
    }

    fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[1 + self.used..]
    }

    fn file(&mut self, request: &Request) -> Result<(), Failed> {
        let file = Open::at(libc::AT_FDCWD, &request.path, 0)?;
        loop {
            let read = file.read(self.room())?;
            if read == 0 {
                return Ok(());
            }
            self.used += read;
            if self.room().is_empty() {
                self.send(MORE);
            }
        }
    }

    fn link(&mut self, request: &Request) -> Result<(), Failed> {
        let read = link_at(libc::AT_FDCWD, &request.path, self.room())?;
        self.used = read;
        Ok(())
    }

    fn memory(&mut self, request: &Request) -> Result<(), Failed> {
        let length = (request.length as usize).min(MOST_BYTES);
        if !read_memory(request.pid, request.at, &mut self.bytes[1..=length]) {
            return Err(libc::EFAULT);
        }
        self.used = length;
        Ok(())
    }

    /// A record for each entry of a folder that is a number.
    fn entries(&mut self, request: &Request) -> Result<(), Failed> {
        let folder = Open::at(libc::AT_FDCWD, &request.path, libc::O_DIRECTORY)?;
        let mut names = [0_u8; 4096];
        loop {
            // SAFETY: `names` has as many bytes.
            let got = unsafe {
                libc::syscall(
                    libc::SYS_getdents64,
                    folder.0,
                    names.as_mut_ptr(),
                    names.len(),
                )
            };
            if got < 0 {
                return Err(errno());
            }
            let mut rest = names.get(..got as usize).unwrap_or(&[]);
            if rest.is_empty() {
                return Ok(());
            }
            while let Some((name, after)) = first_name(rest) {
                if let Some(number) = number(name) {
                    self.entry(request, &folder, name, number);
                }
                rest = after;
            }
        }
    }

    fn entry(&mut self, request: &Request, folder: &Open, name: &[u8], number: u32) {
        let wanted = match request.task {
            Task::FileOfEach => MOST_OF_EACH,
            Task::Links => 256,
            _ => 0,
        };
        if self.room().len() < RECORD_HEAD + wanted {
            self.send(MORE);
        }
        let begin = 1 + self.used + RECORD_HEAD;
        let into = &mut self.bytes[begin..begin + wanted];
        let read = match request.task {
            Task::FileOfEach => file_of(folder, name, &request.file, into),
            Task::Links => name_below(name, &[]).map_or(Err(libc::ENAMETOOLONG), |path| {
                link_at(folder.0, &path, into)
            }),
            _ => Ok(0),
        };
        let (failed, length) = read.map_or_else(|errno| (errno, 0), |length| (0, length));
        let head = &mut self.bytes[begin - RECORD_HEAD..begin];
        head[..4].copy_from_slice(&number.to_ne_bytes());
        head[4..8].copy_from_slice(&failed.to_ne_bytes());
        head[8..].copy_from_slice(&(length as u32).to_ne_bytes());
        self.used += RECORD_HEAD + length;
    }

    /// Sends the descriptor, and has no copy of it once the answer ends: one that is kept keeps a listener open.
    fn descriptor(&mut self, request: &Request) -> Result<(), Failed> {
        // SAFETY: system calls on numbers.
        let shared = unsafe {
            let process = libc::syscall(libc::SYS_pidfd_open, request.pid, 0);
            if process < 0 {
                return Err(errno());
            }
            let process = Open(process as RawFd);
            let shared = libc::syscall(libc::SYS_pidfd_getfd, process.0, request.at as i32, 0);
            if shared < 0 {
                return Err(errno());
            }
            Open(shared as RawFd)
        };
        send_descriptor(shared.0)
    }
}

/// A descriptor that is closed with it.
struct Open(RawFd);

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: it is ours alone.
        unsafe { libc::close(self.0) };
    }
}

impl Open {
    /// `path` ends with a zero.
    fn at(folder: RawFd, path: &[u8], flags: i32) -> Result<Self, Failed> {
        let flags = flags | libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOCTTY;
        // SAFETY: `path` ends with a zero.
        let opened = unsafe { libc::openat(folder, path.as_ptr().cast(), flags) };
        if opened < 0 {
            Err(errno())
        } else {
            Ok(Self(opened))
        }
    }

    fn read(&self, into: &mut [u8]) -> Result<usize, Failed> {
        // SAFETY: `into` has as many bytes.
        let read = unsafe { libc::read(self.0, into.as_mut_ptr().cast(), into.len()) };
        usize::try_from(read).map_err(|_| errno())
    }
}

/// Reads a whole file of an entry.
fn file_of(folder: &Open, name: &[u8], file: &[u8], into: &mut [u8]) -> Result<usize, Failed> {
    let path = name_below(name, file).ok_or(libc::ENAMETOOLONG)?;
    let opened = Open::at(folder.0, &path, 0)?;
    let mut used = 0;
    loop {
        match opened.read(&mut into[used..])? {
            0 => return Ok(used),
            read => used += read,
        }
        if used == into.len() {
            return Err(libc::EFBIG);
        }
    }
}

/// `path` ends with a zero.
fn link_at(folder: RawFd, path: &[u8], into: &mut [u8]) -> Result<usize, Failed> {
    // SAFETY: `path` ends with a zero, and `into` has as many bytes.
    let read = unsafe {
        libc::readlinkat(
            folder,
            path.as_ptr().cast(),
            into.as_mut_ptr().cast(),
            into.len(),
        )
    };
    usize::try_from(read).map_err(|_| errno())
}

/// `NAME/FILE`, or `NAME`, with a zero at its end.
fn name_below(name: &[u8], file: &[u8]) -> Option<[u8; 64]> {
    let mut path = [0; 64];
    // Its last byte stays zero.
    let room = &mut path[..63];
    room.get_mut(..name.len())?.copy_from_slice(name);
    let end = file.iter().position(|byte| *byte == 0).unwrap_or(0);
    if end > 0 {
        *room.get_mut(name.len())? = b'/';
        let begin = name.len() + 1;
        room.get_mut(begin..begin + end)?
            .copy_from_slice(&file[..end]);
    }
    Some(path)
}

/// The name of the first `struct linux_dirent64`, and those after it.
fn first_name(entries: &[u8]) -> Option<(&[u8], &[u8])> {
    // d_ino and d_off have eight bytes each, d_reclen two, d_type one.
    let length = u16::from_ne_bytes([*entries.get(16)?, *entries.get(17)?]) as usize;
    let name = entries.get(19..length)?;
    let end = name.iter().position(|byte| *byte == 0)?;
    Some((&name[..end], entries.get(length..)?))
}

fn number(name: &[u8]) -> Option<u32> {
    if name.is_empty() {
        return None;
    }
    name.iter().try_fold(0_u32, |so_far, byte| {
        let digit = byte.is_ascii_digit().then(|| u32::from(byte - b'0'))?;
        so_far.checked_mul(10)?.checked_add(digit)
    })
}

/// The read itself; whether all of it was read. Allocates nothing.
pub(super) fn read_memory(pid: u32, address: u64, bytes: &mut [u8]) -> bool {
    let (Ok(pid), Ok(base)) = (i32::try_from(pid), usize::try_from(address)) else {
        return false;
    };
    let len = bytes.len();
    let remote = [RemoteIoVec { base, len }];
    let read = process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(bytes)], &remote);
    read == Ok(len)
}

fn send_descriptor(shared: RawFd) -> Result<(), Failed> {
    #[repr(align(8))]
    struct Control([u8; 24]);
    let mut control = Control([0; 24]);
    let mut kind = DESCRIPTOR;
    let mut data = libc::iovec {
        iov_base: (&raw mut kind).cast(),
        iov_len: 1,
    };
    // SAFETY: all zeros are a valid header; its parts point to locals that outlive the call, and the room for the
    // descriptor is what CMSG_SPACE says.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut data;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(header)
            .cast::<RawFd>()
            .write_unaligned(shared);
        libc::sendmsg(0, &raw const message, libc::MSG_NOSIGNAL)
    };
    if sent < 0 { Err(errno()) } else { Ok(()) }
}

/// Gives up every capability but those to see other processes, which it has only if we have them. Without the library for
/// it, which allocates. Root without CAP_SYS_PTRACE, as in a container, keeps all: it may look only into processes that have
/// no capability more than itself.
///
/// # Safety
/// System calls only; may be called after a fork.
pub(crate) unsafe fn keep_few_capabilities() {
    const VERSION_3: u32 = 0x2008_0522; // include/uapi/linux/capability.h
    /// CAP_DAC_READ_SEARCH, for /proc/PID/fd, and CAP_SYS_PTRACE.
    const KEPT: u32 = 1 << 2 | SYS_PTRACE;
    const SYS_PTRACE: u32 = 1 << 19;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, of the lower 32 and of the upper.
    let mut sets = [0_u32; 6];
    // SAFETY: both have the layout that the version says.
    unsafe {
        libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr());
        if sets[1] & SYS_PTRACE == 0 && libc::geteuid() == 0 {
            return;
        }
        let kept = sets[1] & KEPT;
        let sets = [kept, kept, 0, 0, 0, 0];
        libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr());
    }
}

fn errno() -> i32 {
    nix::errno::Errno::last_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_numbers_are_read() {
        assert_eq!(number(b"4294967295"), Some(u32::MAX));
        for none in [&b""[..], b"4294967296", b"self", b"1x", b"-1"] {
            assert_eq!(number(none), None);
        }
        let path = name_below(b"12", b"syscall\0\0\0").expect("short");
        assert!(path.starts_with(b"12/syscall\0"));
        assert!(name_below(b"12", &[]).expect("short").starts_with(b"12\0"));
        let long = b"xxxxxxxxxxxxxxxxxxxxxxx\0";
        assert!(name_below(&[b'1'; 64], &[]).is_none() && name_below(&[b'1'; 50], long).is_none());
        assert!(first_name(&[0; 18]).is_none() && first_name(&[]).is_none());
    }
}
