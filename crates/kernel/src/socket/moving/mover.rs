//! The mover's own side. It makes only system calls: another thread of the process that it was forked from may have held
//! any lock, the allocator's among them.
//!
//! An entry of an epoll set is known by an open file and the number that it had (`struct epoll_filefd` in
//! fs/eventpoll.c). So whoever takes it out must have the listener at that number, which a process with threads cannot
//! arrange. The mover has no descriptor but those of a request.
//!
//! It does not end with the agent: once it has taken the first entry out, it puts all back whatever becomes of the agent.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;

use super::request::{
    ENTRY, HEAD, Head, MOST_DESCRIPTORS, MOST_ENTRIES, MOST_THREADS, MOST_WORDS, RUNNING, THREAD,
    fate, hash,
};
use crate::proc::reader::child::{allow_any_number, become_helper};
use crate::proc::reader::request::{END, FAILED};

/// An errno.
type Failed = i32;

/// Answers until its other end is closed.
pub(super) fn serve(socket: RawFd, real_time: bool) -> ! {
    become_helper(socket, c"wakeone-mover", real_time);
    allow_any_number();
    let mut mover = Mover {
        socket: 0,
        // SAFETY: a system call.
        agent: unsafe { libc::getppid() },
        words: [0; MOST_WORDS],
        used: 0,
        fds: [-1; MOST_DESCRIPTORS],
        heartbeat: None,
    };
    while mover.hear() {
        let answer = mover.act();
        mover.close_all();
        mover.answer(answer);
    }
    mover.end_marks();
    // SAFETY: ends the process, without anything that exit() would run.
    unsafe { libc::_exit(0) }
}

struct Mover {
    socket: RawFd,
    agent: i32,
    words: [u64; MOST_WORDS],
    used: usize,
    /// Those of the request: the listener, perhaps the array and the table, and the sets.
    fds: [RawFd; MOST_DESCRIPTORS],
    /// The agent's heartbeat in the last request's table.
    heartbeat: Option<Heartbeat>,
}

#[repr(align(8))]
struct Control([u8; 16 + 4 * MOST_DESCRIPTORS + 8]);

impl Mover {
    /// Waits for a request. Returns whether one came.
    fn hear(&mut self) -> bool {
        let mut control = Control([0; _]);
        let mut data = libc::iovec {
            iov_base: self.words.as_mut_ptr().cast(),
            iov_len: size_of_val(&self.words),
        };
        // SAFETY: all zeros are a valid header; its parts point to memory that outlives the call.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut data;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len() as _;
        let got = loop {
            // SAFETY: as above.
            let got = unsafe { libc::recvmsg(self.socket, &raw mut message, 0) };
            if got >= 0 || errno() != libc::EINTR {
                break got;
            }
        };
        self.fds = [-1; MOST_DESCRIPTORS];
        // SAFETY: the kernel filled the control message.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            if !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let from = libc::CMSG_DATA(header).cast::<RawFd>();
                for at in 0..(bytes / 4).min(MOST_DESCRIPTORS) {
                    self.fds[at] = from.add(at).read_unaligned();
                }
            }
        }
        self.used = usize::try_from(got).unwrap_or(0) / 8;
        got > 0
    }

    fn act(&mut self) -> Result<[i32; 2], Failed> {
        let head = Head::of(&self.words[..self.used]).ok_or(libc::EINVAL)?;
        self.make_room(head)?;
        if let Some(at) = head.heartbeat_at {
            self.heartbeat = Heartbeat::in_table(self.fd(2)?, at as usize);
        }
        let mut out = TakenOut::new();
        let done = if head.only_back {
            out = TakenOut([u64::MAX; _]);
            Ok(())
        } else {
            self.watch(head)
                .and_then(|threads| self.move_queue(head, &threads, &mut out))
        };
        // One that could not listen again stays out: its worker would see it closed.
        let back = if done.is_ok() || listens(self.listener()?) {
            self.put_back(head, &out)
        } else {
            Ok(())
        };
        Ok([done.err().unwrap_or(0), back.err().unwrap_or(0)])
    }

    /// Leaves the numbers of the entries to the listener.
    fn make_room(&mut self, head: Head) -> Result<(), Failed> {
        self.socket = self.elsewhere(head, self.socket)?;
        for at in 0..self.fds.len() {
            if self.fds[at] >= 0 {
                self.fds[at] = self.elsewhere(head, self.fds[at])?;
            }
        }
        for at in 0..head.entries {
            let number = self.number(at);
            // SAFETY: a system call on numbers, and nothing else of ours has this one.
            if unsafe { libc::dup2(self.listener()?, number) } < 0 {
                return Err(errno());
            }
        }
        Ok(())
    }

    /// Moves a descriptor of ours to a number that no entry has.
    fn elsewhere(&self, head: Head, fd: RawFd) -> Result<RawFd, Failed> {
        let taken = |fd| (0..head.entries).any(|at| self.number(at) == fd);
        let mut now = fd;
        while taken(now) {
            // SAFETY: system calls on numbers of ours.
            let next = unsafe { libc::fcntl(fd, libc::F_DUPFD, now + 1) };
            if next < 0 {
                return Err(errno());
            }
            if now != fd {
                // SAFETY: as above.
                unsafe { libc::close(now) };
            }
            now = next;
        }
        if now != fd {
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
        Ok(now)
    }

    fn entry(&self, at: usize) -> &[u64] {
        &self.words[HEAD + ENTRY * at..][..ENTRY]
    }

    /// The number by which an entry is known.
    fn number(&self, at: usize) -> RawFd {
        RawFd::try_from(self.entry(at)[1]).unwrap_or(RawFd::MAX)
    }

    fn listener(&self) -> Result<RawFd, Failed> {
        self.fd(0)
    }

    fn fd(&self, at: usize) -> Result<RawFd, Failed> {
        self.fds
            .get(at)
            .copied()
            .filter(|fd| *fd >= 0)
            .ok_or(libc::EBADF)
    }

    /// Opens the state of each thread that is looked at again, and goes to the CPU of one that runs.
    ///
    /// While this process runs there, that thread does not, so it cannot reach its accept. It would run on after the
    /// next tick if this process had no real-time priority.
    fn watch(&self, head: Head) -> Result<Watched, Failed> {
        let mut watched = Watched([-1; MOST_THREADS]);
        let mut runs = None;
        for at in 0..head.threads {
            let [pid, tid, line] = self.thread(head, at);
            let file = open_of(pid, tid, b"syscall\0")?;
            // One with the number of an entry would be in its listener's way: those numbers are all in use.
            watched.0[at] = file;
            if line == hash(RUNNING) {
                runs = runs.or(Some((pid, tid)));
            }
        }
        if let Some(cpu) = runs.and_then(|(pid, tid)| cpu_of(pid, tid)) {
            go_to(cpu);
        }
        Ok(watched)
    }

    fn thread(&self, head: Head, at: usize) -> [u64; THREAD] {
        let words = &self.words[HEAD + ENTRY * head.entries + THREAD * at..];
        words.first_chunk().copied().unwrap_or_default()
    }

    /// Takes the entries out, looks once more, and moves the queue.
    fn move_queue(&self, head: Head, threads: &Watched, out: &mut TakenOut) -> Result<(), Failed> {
        let listener = self.listener()?;
        let address = Address::of(listener)?;
        for at in 0..head.entries {
            let set = self.fd(self.entry(at)[0] as usize)?;
            match control(set, libc::EPOLL_CTL_DEL, self.number(at), 0, 0) {
                Ok(()) => out.note(at),
                // Another descriptor of the same set was first, or its owner.
                Err(libc::ENOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        for at in 0..head.threads {
            let [.., line] = self.thread(head, at);
            if !shows(threads.0[at], line) {
                return Err(libc::EAGAIN);
            }
        }
        // Nothing stands between these two, not even bind(): until the second one has the socket's lock, an accept on it
        // fails. Later ones wait for that lock.
        // SAFETY: system calls on numbers.
        let listens = unsafe {
            if libc::shutdown(listener, libc::SHUT_RD) < 0 {
                return Err(errno());
            }
            self.meet(head.fate)?;
            libc::listen(listener, head.backlog)
        };
        if listens < 0 {
            return Err(errno());
        }
        address.restore(listener, head.backlog)?;
        self.choose(head)
    }

    /// Meets the fate that a test has planned.
    fn meet(&self, planned: u64) -> Result<(), Failed> {
        let kill = |pid, signal| {
            // SAFETY: system calls on numbers; the agent is this process's parent.
            unsafe { libc::kill(pid, signal) };
        };
        // SAFETY: as above.
        let own = unsafe { libc::getpid() };
        match planned {
            fate::BOTH_DIE => {
                kill(self.agent, libc::SIGKILL);
                kill(own, libc::SIGKILL);
            }
            fate::STOPS => {
                kill(self.agent, libc::SIGSTOP);
                // Its threads stop one after the other, and one of them would notice our end.
                pause(10);
                kill(own, libc::SIGKILL);
            }
            fate::AGENT_DIES => kill(self.agent, libc::SIGKILL),
            fate::MOVER_DIES => kill(own, libc::SIGKILL),
            fate::IS_SLOW => pause(10),
            fate::REFUSED => return Err(libc::EADDRINUSE),
            _ => {}
        }
        Ok(())
    }

    /// Has the program choose the listener again. The agent does so too, if it is still there.
    fn choose(&self, head: Head) -> Result<(), Failed> {
        if head.heartbeat_at.is_some() {
            update(self.fd(1)?, head.key, self.listener()?);
        }
        Ok(())
    }

    /// Has the program ignore the marks of an agent that was killed, at once and not after a second without a heartbeat:
    /// the worker of the queue just moved is marked.
    fn end_marks(&self) {
        let Some(heartbeat) = &self.heartbeat else {
            return;
        };
        // An agent's descriptors are closed before it has ended (do_exit in kernel/exit.c). One that ended well still has
        // its process, or has taken its marks back.
        for _ in 0..1000 {
            // SAFETY: a system call.
            if unsafe { libc::getppid() } != self.agent {
                return heartbeat.stop();
            }
            pause(1);
        }
    }

    /// Puts back what was taken out, bit by bit.
    fn put_back(&self, head: Head, out: &TakenOut) -> Result<(), Failed> {
        let mut failed = Ok(());
        for at in (0..head.entries).filter(|at| out.has(*at)) {
            let [set, _, events, data] = *self.entry(at) else {
                continue;
            };
            let set = self.fd(set as usize)?;
            let number = self.number(at);
            match control(set, libc::EPOLL_CTL_ADD, number, events as u32, data) {
                // Its owner was first.
                Ok(()) | Err(libc::EEXIST) => {}
                Err(errno) => failed = Err(errno),
            }
        }
        failed
    }

    /// Has no copy of anything of a request: one that is kept keeps a listener open.
    fn close_all(&mut self) {
        go_anywhere();
        // SAFETY: system calls on numbers; only the socket is used after this, at 0.
        unsafe {
            if self.socket != 0 {
                libc::dup2(self.socket, 0);
                self.socket = 0;
            }
            libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0);
        }
    }

    fn answer(&self, answer: Result<[i32; 2], Failed>) {
        let mut packet = [0_u8; 9];
        let length = match answer {
            Ok([moved, back]) => {
                packet[0] = END;
                packet[1..5].copy_from_slice(&moved.to_ne_bytes());
                packet[5..].copy_from_slice(&back.to_ne_bytes());
                9
            }
            Err(errno) => {
                packet[0] = FAILED;
                packet[1..5].copy_from_slice(&errno.to_ne_bytes());
                5
            }
        };
        // SAFETY: `packet` is as long.
        unsafe {
            libc::send(
                self.socket,
                packet.as_ptr().cast(),
                length,
                libc::MSG_NOSIGNAL,
            )
        };
    }
}

/// An agent's heartbeat, which is mapped.
struct Heartbeat {
    page: *mut u8,
    length: usize,
    at: usize,
}

impl Heartbeat {
    fn in_table(table: RawFd, at: usize) -> Option<Self> {
        // SAFETY: system calls; a new mapping disturbs nothing.
        let (page, length) = unsafe {
            let length = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).ok()?;
            let from = libc::off_t::try_from(at / length * length).ok()?;
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED;
            let page = libc::mmap(std::ptr::null_mut(), length, protection, flags, table, from);
            (page, length)
        };
        (page != libc::MAP_FAILED).then_some(Self {
            page: page.cast(),
            length,
            at: at % length,
        })
    }

    fn stop(&self) {
        // SAFETY: an aligned word of the mapping, which everybody accesses atomically.
        unsafe { AtomicU64::from_ptr(self.page.add(self.at).cast()) }.store(0, Ordering::Relaxed);
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        // SAFETY: nobody else has this mapping.
        unsafe { libc::munmap(self.page.cast(), self.length) };
    }
}

/// The entries that this process took out.
struct TakenOut([u64; MOST_ENTRIES / 64]);

impl TakenOut {
    fn new() -> Self {
        Self([0; _])
    }

    fn note(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    fn has(&self, at: usize) -> bool {
        self.0[at / 64] & (1 << (at % 64)) != 0
    }
}

/// Open files of /proc.
struct Watched([RawFd; MOST_THREADS]);

/// Where a socket is bound.
struct Address {
    bytes: libc::sockaddr_storage,
    length: libc::socklen_t,
}

impl Address {
    fn of(socket: RawFd) -> Result<Self, Failed> {
        let mut length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        // SAFETY: all zeros are a valid address, and the kernel fills as much of it.
        unsafe {
            let mut bytes: libc::sockaddr_storage = std::mem::zeroed();
            if libc::getsockname(socket, (&raw mut bytes).cast(), &raw mut length) < 0 {
                return Err(errno());
            }
            Ok(Self { bytes, length })
        }
    }

    fn port(&self) -> [u8; 2] {
        // SAFETY: the port has these bytes in IPv4 and IPv6.
        unsafe {
            (&raw const self.bytes).cast::<[u8; 4]>().read()[2..]
                .first_chunk()
                .copied()
        }
        .unwrap_or_default()
    }

    /// Brings a socket back to this port. The kernel gives up a port at shutdown() that was not asked for by number
    /// (`tcp_set_state`, unless SOCK_BINDPORT_LOCK), and then listen() chose another one.
    fn restore(&self, socket: RawFd, backlog: i32) -> Result<(), Failed> {
        if Self::of(socket)?.port() == self.port() {
            return Ok(());
        }
        // SAFETY: system calls on numbers, and on an address of this length.
        unsafe {
            libc::shutdown(socket, libc::SHUT_RD);
            libc::bind(socket, (&raw const self.bytes).cast(), self.length);
            if libc::listen(socket, backlog) < 0 {
                return Err(errno());
            }
        }
        if Self::of(socket)?.port() == self.port() {
            Ok(())
        } else {
            Err(libc::EADDRINUSE)
        }
    }
}

/// Whether a socket listens.
fn listens(socket: RawFd) -> bool {
    let (mut on, mut length) = (0_i32, 4);
    // SAFETY: `on` has as many bytes.
    let done = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_ACCEPTCONN,
            (&raw mut on).cast(),
            &raw mut length,
        )
    };
    done == 0 && on != 0
}

fn pause(ms: i64) {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: ms * 1_000_000,
    };
    // SAFETY: a valid time.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}

fn control(set: RawFd, what: i32, fd: RawFd, events: u32, data: u64) -> Result<(), Failed> {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: a system call on numbers and a valid event.
    match unsafe { libc::epoll_ctl(set, what, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Whether a thread's state has the line with this hash.
fn shows(file: RawFd, line: u64) -> bool {
    let mut bytes = [0_u8; 256];
    // SAFETY: `bytes` has as many bytes.
    let read = unsafe { libc::pread(file, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    usize::try_from(read).is_ok_and(|read| hash(&bytes[..read]) == line)
}

/// Opens a file of a thread.
fn open_of(pid: u64, tid: u64, file: &[u8]) -> Result<RawFd, Failed> {
    let mut path = [0_u8; 96];
    let mut used = 0;
    let mut put = |bytes: &[u8]| {
        path[used..used + bytes.len()].copy_from_slice(bytes);
        used += bytes.len();
    };
    put(b"/proc/");
    put(Digits::of(pid as u32).text());
    put(b"/task/");
    put(Digits::of(tid as u32).text());
    put(b"/");
    put(file);
    // SAFETY: `path` ends with a zero.
    let opened = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if opened < 0 { Err(errno()) } else { Ok(opened) }
}

/// A number in decimal digits.
struct Digits {
    digits: [u8; 10],
    from: usize,
}

impl Digits {
    fn of(mut number: u32) -> Self {
        let (mut digits, mut from) = ([0; 10], 10);
        loop {
            from -= 1;
            digits[from] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return Self { digits, from };
            }
        }
    }

    fn text(&self) -> &[u8] {
        &self.digits[self.from..]
    }
}

/// The CPU of a thread, by /proc/PID/task/TID/stat.
fn cpu_of(pid: u64, tid: u64) -> Option<usize> {
    /// The field `processor`, counted after the name.
    const FIELD: usize = 36;
    let file = open_of(pid, tid, b"stat\0").ok()?;
    let mut bytes = [0_u8; 1024];
    // SAFETY: `bytes` has as many bytes.
    let read = unsafe {
        let read = libc::read(file, bytes.as_mut_ptr().cast(), bytes.len());
        libc::close(file);
        read
    };
    let line = bytes.get(..usize::try_from(read).ok()?)?;
    let name_end = line.iter().rposition(|byte| *byte == b')')?;
    let mut fields = line.get(name_end + 2..)?.split(|byte| *byte == b' ');
    std::str::from_utf8(fields.nth(FIELD)?).ok()?.parse().ok()
}

/// Binds this process to a CPU.
fn go_to(cpu: usize) {
    // SAFETY: all zeros are an empty set, and `cpu` is compared with its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if cpu < 8 * size_of::<libc::cpu_set_t>() {
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
        }
    }
}

/// Lets it run on every CPU again that it may run on.
fn go_anywhere() {
    // SAFETY: a set is plain bits; the kernel leaves out the CPUs that it does not have.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        std::ptr::write_bytes(&raw mut set, 0xff, 1);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

/// Puts a socket into an array (`BPF_MAP_UPDATE_ELEM` with `BPF_ANY`).
fn update(array: RawFd, key: u32, socket: RawFd) {
    /// `struct` of the element commands in `union bpf_attr` (include/uapi/linux/bpf.h).
    #[repr(C)]
    struct Element {
        map: u32,
        padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    const UPDATE: i32 = 2;
    let value = socket as u64;
    let element = Element {
        map: array.cast_unsigned(),
        padding: 0,
        key: (&raw const key) as u64,
        value: (&raw const value) as u64,
        flags: 0,
    };
    // SAFETY: key and value are as long as the map has them, and outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_bpf,
            UPDATE,
            &raw const element,
            size_of::<Element>(),
        )
    };
}

fn errno() -> i32 {
    nix::errno::Errno::last_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_in_digits() {
        for number in [0, 9, 10, 4_294_967_295] {
            assert_eq!(Digits::of(number).text(), number.to_string().as_bytes());
        }
    }

    #[test]
    fn the_cpu_of_a_thread_is_found() {
        let own = u64::from(std::process::id());
        let tid = nix::unistd::gettid().as_raw() as u64;
        let cpus = std::thread::available_parallelism().expect("CPUs").get();
        // Any of them: the thread may move at any moment.
        assert!(cpu_of(own, tid).is_some_and(|cpu| cpu < 4096.max(cpus)));
        assert_eq!(cpu_of(u64::from(u32::MAX), 1), None);
    }
}
