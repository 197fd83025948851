//! The calls that a server's processes wait in, seen through /proc, without stopping or changing any of them.
//!
//! Everything read here was written by other processes or names them: it is parsed as hostile input, and a process that
//! ends meanwhile is left out.

use std::collections::{BTreeMap, HashSet};
use std::io;

use nix::libc;
use wakeone_model::layout::printable;
use wakeone_model::listener::{Polled, Wait};

use crate::proc::process;
use crate::proc::reader;
use crate::proc::stat::Stat;

/// A descriptor that is a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The process.
    pub pid: u32,
    /// The descriptor's number there.
    pub fd: i32,
    /// The socket.
    pub inode: u64,
}

/// Parent and name of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Its parent's id.
    pub parent: u32,
    /// /proc/PID/comm, with nothing in it that a terminal would act on.
    pub name: String,
    /// The same as the kernel has it: any bytes.
    pub comm: Vec<u8>,
}

/// Bytes that the kernel keeps of a process's name (`TASK_COMM_LEN`, without the zero that ends it).
const COMM_BYTES: usize = 15;

impl From<Stat> for Identity {
    fn from(stat: Stat) -> Self {
        Self {
            parent: stat.parent,
            name: printable(&String::from_utf8_lossy(&stat.name)),
            comm: stat.name,
        }
    }
}

impl Identity {
    /// Whether it has this name, of which the kernel may have kept the first bytes only.
    pub fn is_named(&self, name: &str) -> bool {
        let name = name.as_bytes();
        self.comm == name[..name.len().min(COMM_BYTES)]
    }
}

/// All processes that may be seen.
#[derive(Debug, Clone, Default)]
pub struct Processes {
    /// By id.
    pub identities: BTreeMap<u32, Identity>,
    /// Every socket held by one of them.
    pub held: Vec<Held>,
    /// Processes whose descriptors may not be seen.
    pub hidden: usize,
}

impl Processes {
    /// Reads all of /proc: some 20 µs a process.
    pub fn read() -> Self {
        Self::of(process::pids())
    }

    /// Reads those of them that are there.
    pub fn of(pids: impl IntoIterator<Item = u32>) -> Self {
        let mut all = Self::default();
        for pid in pids {
            let Some(identity) = identity(pid) else {
                continue;
            };
            all.identities.insert(pid, identity);
            match process::sockets_of(pid) {
                Ok(sockets) => {
                    all.held.extend(
                        sockets
                            .into_iter()
                            .map(|(fd, inode)| Held { pid, fd, inode }),
                    )
                }
                Err(error) if is_hidden(error.kind()) => {
                    all.hidden += 1;
                }
                Err(_) => {}
            }
        }
        all
    }

    /// Whether each of these sockets is held by one of them.
    pub fn hold(&self, inodes: &HashSet<u64>) -> bool {
        let held: HashSet<u64> = self.held.iter().map(|held| held.inode).collect();
        inodes.is_subset(&held)
    }

    /// Returns the processes that a listener is about: the holders of one of these sockets, and their children.
    pub fn around(&self, inodes: &HashSet<u64>) -> Vec<u32> {
        let holders: HashSet<u32> = self
            .held
            .iter()
            .filter(|h| inodes.contains(&h.inode))
            .map(|h| h.pid)
            .collect();
        self.identities
            .iter()
            .filter(|(pid, identity)| holders.contains(pid) || holders.contains(&identity.parent))
            .map(|(pid, _)| *pid)
            .collect()
    }
}

/// Parent and name; `None` where it is gone.
pub fn identity(pid: u32) -> Option<Identity> {
    Stat::of(pid).ok().map(Identity::from)
}

/// Hands on what an epoll instance of a process watches: inode and events.
fn watched(pid: u32, epoll: i32, mut take: impl FnMut(u64, u32)) -> io::Result<()> {
    reader::lines(pid, &format!("fdinfo/{epoll}"), |line| {
        if let Some((inode, events)) = std::str::from_utf8(line).ok().and_then(parse_tfd) {
            take(inode, events);
        }
    })
}

/// Returns the files that an epoll instance of a process waits for.
///
/// # Errors
/// The process cannot be seen.
pub(super) fn polled(pid: u32, epoll: i32) -> io::Result<Vec<Polled>> {
    let mut all = Vec::new();
    watched(pid, epoll, |inode, events| {
        if events & READABLE != 0 {
            all.push(Polled {
                epoll,
                inode,
                events,
            });
        }
    })?;
    Ok(all)
}

/// Whether an epoll instance of a process has a socket, under whatever number and for whatever events.
///
/// # Errors
/// The process cannot be seen.
pub fn polls(pid: u32, inode: u64) -> io::Result<bool> {
    let mut found = false;
    for epoll in process::Descriptors::of(pid)?.epolls {
        match watched(pid, epoll, |at, _| found |= at == inode) {
            // Closed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        if found {
            break;
        }
    }
    Ok(found)
}

/// EPOLLIN. A process that waits for a listener without it only watches, as our own agent does.
const READABLE: u32 = 1;

/// `tfd: N events: HEX data: HEX pos:N ino:HEX sdev:HEX` (fs/eventpoll.c, `ep_show_fdinfo`): inode and events.
pub fn parse_tfd(line: &str) -> Option<(u64, u32)> {
    let rest = line.trim_start().strip_prefix("tfd:")?;
    let events = rest.split_once("events:")?.1.split_whitespace().next()?;
    let inode = rest.split_once("ino:")?.1.split_whitespace().next()?;
    Some((
        u64::from_str_radix(inode, 16).ok()?,
        u32::from_str_radix(events, 16).ok()?,
    ))
}

/// Whether a line of /proc/PID/task/TID/syscall is of a call that a server waits for connections in. io_uring_enter is
/// one: a ring may hold an accept.
pub(crate) fn is_wait(line: &str) -> bool {
    Call::parse(line).is_some_and(|call| {
        matches!(
            call.kind(),
            Kind::Accept | Kind::Epoll | Kind::Poll | Kind::Select | Kind::IoUring
        )
    })
}

/// Whether a line of /proc/PID/task/TID/syscall is of a thread on a CPU, or one that waits for a CPU. A thread that
/// sleeps outside a system call, in a page fault say, is neither.
pub(crate) fn is_running(line: &str) -> bool {
    line.trim_end() == "running"
}

/// Whether one of these sockets is in an epoll instance; `None` if that cannot be seen.
pub(crate) fn is_in(pid: u32, epoll: i32, inodes: &HashSet<u64>) -> Option<bool> {
    let mut found = false;
    let see = |inode, events| found |= events & READABLE != 0 && inodes.contains(&inode);
    match watched(pid, epoll, see) {
        Ok(()) => Some(found),
        Err(error) if is_hidden(error.kind()) => None,
        Err(_) => Some(false),
    }
}

/// Whether a process is there and may not be seen, or lets its readers hang.
pub(crate) fn is_hidden(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::PermissionDenied | io::ErrorKind::TimedOut
    )
}

/// Returns the call that a thread waits in, by its line of /proc/PID/task/TID/syscall, as far as the sockets with these
/// `inodes` are concerned. The process has these `sockets`.
pub(crate) fn wait_of(pid: u32, line: &str, sockets: &[(i32, u64)], inodes: &HashSet<u64>) -> Wait {
    let Some(call) = Call::parse(line) else {
        return Wait::Running;
    };
    let of = |fd: u64| {
        let fd = i32::try_from(fd).ok()?;
        sockets.iter().find(|s| s.0 == fd).map(|s| s.1)
    };
    let listening = |fd: u64| of(fd).filter(|inode| inodes.contains(inode));
    match call.kind() {
        Kind::Accept => of(call.arguments[0]).map_or(Wait::Other(call.number), Wait::Accept),
        Kind::Receive => {
            listening(call.arguments[0]).map_or(Wait::Other(call.number), Wait::Receive)
        }
        Kind::Epoll => Wait::Epoll(call.arguments[0] as i32),
        Kind::Poll => set(poll_set(pid, &call), of, inodes),
        Kind::Select => set(select_set(pid, &call), of, inodes),
        Kind::Futex => Wait::Futex,
        Kind::Lock => Wait::Lock,
        Kind::IoUring => Wait::IoUring,
        Kind::Other => Wait::Other(call.number),
    }
}

fn set(fds: Option<Vec<u64>>, of: impl Fn(u64) -> Option<u64>, inodes: &HashSet<u64>) -> Wait {
    match fds {
        Some(fds) => Wait::Poll(
            fds.into_iter()
                .filter_map(of)
                .filter(|inode| inodes.contains(inode))
                .collect(),
        ),
        None => Wait::PollUnseen,
    }
}

/// A line of /proc/PID/task/TID/syscall.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Call {
    number: u64,
    arguments: [u64; 6],
}

enum Kind {
    Accept,
    Receive,
    Epoll,
    Poll,
    Select,
    Futex,
    Lock,
    IoUring,
    Other,
}

impl Call {
    /// `None` for `running`, and for a thread outside a system call.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let mut arguments = [0; 6];
        for argument in &mut arguments {
            let word = words.next()?.strip_prefix("0x")?;
            *argument = u64::from_str_radix(word, 16).ok()?;
        }
        Some(Self { number, arguments })
    }

    fn kind(&self) -> Kind {
        // System calls that only older architectures have.
        #[cfg(target_arch = "x86_64")]
        match self.number as i64 {
            libc::SYS_epoll_wait => return Kind::Epoll,
            libc::SYS_poll => return Kind::Poll,
            libc::SYS_select => return Kind::Select,
            _ => {}
        }
        match self.number as i64 {
            libc::SYS_accept | libc::SYS_accept4 => Kind::Accept,
            libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_recvmmsg | libc::SYS_read => {
                Kind::Receive
            }
            libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => Kind::Epoll,
            libc::SYS_ppoll => Kind::Poll,
            libc::SYS_pselect6 => Kind::Select,
            libc::SYS_futex | SYS_FUTEX_WAIT => Kind::Futex,
            libc::SYS_flock | libc::SYS_semop | libc::SYS_semtimedop => Kind::Lock,
            libc::SYS_fcntl if self.waits_for_a_record() => Kind::Lock,
            libc::SYS_io_uring_enter => Kind::IoUring,
            _ => Kind::Other,
        }
    }

    fn waits_for_a_record(&self) -> bool {
        let waits = [libc::F_SETLKW as u64, libc::F_OFD_SETLKW as u64];
        waits.contains(&self.arguments[1])
    }
}

/// futex_wait of Linux 6.7.
const SYS_FUTEX_WAIT: i64 = 455;
/// A set larger than this is not read.
const MOST_POLLED: usize = 4096;

/// Descriptors that a thread in poll or ppoll asks about.
fn poll_set(pid: u32, call: &Call) -> Option<Vec<u64>> {
    let entries = usize::try_from(call.arguments[1]).ok()?.min(MOST_POLLED);
    let bytes = reader::memory(pid, call.arguments[0], entries * 8)?;
    let number = |entry: &[u8]| entry[..4].try_into().map(i32::from_ne_bytes);
    Some(
        bytes
            .chunks_exact(8)
            .filter_map(|entry| u64::try_from(number(entry).ok()?).ok())
            .collect(),
    )
}

/// Descriptors whose readability a thread in select or pselect6 asks about.
fn select_set(pid: u32, call: &Call) -> Option<Vec<u64>> {
    let most = usize::try_from(call.arguments[0]).ok()?.min(MOST_POLLED);
    if call.arguments[1] == 0 {
        return Some(Vec::new());
    }
    let bytes = reader::memory(pid, call.arguments[1], most.div_ceil(64) * 8)?;
    let set = |fd: &usize| bytes[fd / 8] & (1 << (fd % 8)) != 0;
    Some((0..most).filter(set).map(|fd| fd as u64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::TcpListener;

    #[test]
    fn holders_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let processes = Processes::read();
        let inode = rustix::fs::fstat(&listener).expect("stat").st_ino;
        let around = processes.around(&HashSet::from([inode]));
        assert!(around.contains(&std::process::id()));
    }

    #[test]
    fn names_are_made_harmless() {
        let of = |line: &[u8]| Stat::parse(line).map(Identity::from);
        let identity = of(b"12 (a) b\x1b[2J) S 7 1 1").expect("a line");
        assert_eq!((identity.parent, &*identity.name), (7, "a) b?[2J"));
        assert!(of(b"12 (a").is_none());
    }

    #[test]
    fn a_name_that_the_kernel_cut_is_still_known() {
        let of = |comm: &[u8]| {
            let line = [b"12 (", comm, b") S 7 1 1"].concat();
            Identity::from(Stat::parse(&line).expect("a line"))
        };
        let cyrillic = "обработчик";
        let cut = of(&cyrillic.as_bytes()[..15]);
        assert!(cut.is_named(cyrillic) && !cut.is_named("обработка") && !cut.is_named(&cut.name));
        assert!(cut.name.ends_with('\u{fffd}'));
        assert!(of(b"nginx").is_named("nginx") && !of(b"nginx").is_named("nginx2"));
        assert!(of(b"systemd-resolve").is_named("systemd-resolved"));
    }

    #[test]
    fn calls_that_wait_for_connections() {
        let line = |number: i64| format!("{number} 0x3 0x0 0x0 0x0 0x0 0x0 0x7ffc 0x7f4c\n");
        for number in [
            libc::SYS_accept4,
            libc::SYS_epoll_pwait,
            libc::SYS_ppoll,
            libc::SYS_pselect6,
            libc::SYS_io_uring_enter,
        ] {
            assert!(is_wait(&line(number)), "{number}");
        }
        let none = [
            "running\n",
            "-1 0x7ffc 0x7f\n",
            "",
            "99999999999999999999999 0x1\n",
        ];
        let others = [libc::SYS_nanosleep, libc::SYS_read, libc::SYS_futex].map(line);
        for line in others.iter().map(String::as_str).chain(none) {
            assert!(!is_wait(line), "{line:?}");
        }
    }

    #[test]
    fn lines_of_proc_survive_foreign_bytes() {
        crate::foreign::survives("proc", &[], |bytes| {
            if let Some(stat) = Stat::parse(bytes) {
                let name = Identity::from(stat).name;
                assert!(!name.contains(char::is_control), "{name:?}");
            }
            let text = String::from_utf8_lossy(bytes);
            for line in text.lines() {
                let _ = (parse_tfd(line), Call::parse(line), is_wait(line));
            }
        });
    }

    proptest! {
        #[test]
        fn no_line_of_proc_breaks_a_parser(line in "\\PC{0,200}", bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Call::parse(&line);
            let _ = parse_tfd(&line);
            let _ = parse_tfd(&format!("tfd: {line} events: {line} ino:{line}"));
            let _ = Stat::parse(&bytes).map(Identity::from);
        }

        #[test]
        fn tfd_lines_are_read_back(inode in any::<u64>(), events in any::<u32>()) {
            let line = format!("tfd: {:8} events: {events:8x} data: {:16x}  pos:0 ino:{inode:x} sdev:8", 7, 9);
            prop_assert_eq!(parse_tfd(&line), Some((inode, events)));
        }
    }
}
