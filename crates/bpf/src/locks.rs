//! Contention on the locks of a UDP socket: how often and how long threads wait, by the kernel's contention
//! tracepoints.
//!
//! The probes of `bpf/locks.bpf.c` stay attached as long as a [`Locks`] lives; nothing is pinned. The tracepoints
//! report only locks that a thread has to wait for. How often a lock is taken, and for how long, only a kernel with
//! `CONFIG_LOCK_STAT` knows. Without paravirtual spinlocks (on bare metal) the tracepoints also miss the first waiter
//! at a spinlock (`kernel/locking/qspinlock.c`, the pending bit). They report only those behind it.

use std::io::{self, Read};
use std::mem::MaybeUninit;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link, MapCore, MapFlags, MapHandle};

use crate::error::failed;
use crate::skeletons::locks::{LocksSkelBuilder, types};

/// Contention on one kind of lock, over all sockets watched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contended {
    /// Times that a thread had to wait for one.
    pub contentions: u64,
    /// Waits whose beginning and end were seen.
    pub waits: u64,
    /// The total time of those waits, in ns.
    pub wait_ns: u64,
}

/// Contention since the probes were attached, by kind of lock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// `sk_receive_queue.lock`: where datagrams are put.
    pub receive_queue: Contended,
    /// `reader_queue.lock`: where readers take them from, since Linux 4.13.
    pub reader_queue: Contended,
    /// `sk_lock.slock`: of the socket as a whole.
    pub socket: Contended,
    /// `sk_wq->wait.lock`: where readers sleep and are woken.
    pub wait_queue: Contended,
    /// All other locks, waited for by the process watched.
    pub other: Contended,
}

/// The probes, attached.
pub struct Locks {
    data: MapHandle,
    sockets: u32,
    locks: u32,
    _links: [Link; 2],
}

impl Locks {
    /// Attaches the probes for the locks of the UDP sockets that are bound to this port now, in this thread's network
    /// namespace. All waiters for these locks are counted, and the waits of one process for all other locks.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF and CAP_PERFMON, or where lockdown or a container forbid tracing; otherwise what the
    /// kernel says of the step named. Contention tracepoints and the iterator over UDP sockets are Linux 5.19.
    pub fn watch(port: u16, tgid: u32) -> io::Result<Self> {
        // libbpf's message on standard error is in the error, too.
        libbpf_rs::set_print(None);
        let mut storage = MaybeUninit::uninit();
        let mut open = LocksSkelBuilder::default()
            .open(&mut storage)
            .map_err(|e| failed("reading the probes of locks", &e))?;
        if let Some(data) = &mut open.maps.data_locks_data {
            data.locks.port = port.into();
            data.locks.tgid = tgid;
        }
        let loaded = open
            .load()
            .map_err(|e| failed("loading the probes of locks", &e))?;
        let walk = loaded.progs.wakeone_udp_locks.attach();
        let walk = walk.map_err(|e| failed("attaching the walk over UDP sockets", &e))?;
        let mut walk =
            Iter::new(&walk).map_err(|e| failed("starting the walk over UDP sockets", &e))?;
        // It prints nothing: reading drives it.
        walk.read_to_end(&mut Vec::new())?;
        let attach = |program: &libbpf_rs::ProgramMut<'_>| {
            let link = program.attach();
            link.map_err(|e| failed("attaching a probe of locks", &e))
        };
        // The end first: a wait without a beginning is no wait.
        let links = [
            attach(&loaded.progs.wakeone_contention_end)?,
            attach(&loaded.progs.wakeone_contention_begin)?,
        ];
        let mut this = Self {
            data: MapHandle::try_from(&loaded.maps.data_locks)
                .map_err(|e| failed("keeping the map of locks", &e))?,
            sockets: 0,
            locks: 0,
            _links: links,
        };
        let found = this.read()?.locks;
        (this.sockets, this.locks) = (found.sockets, found.locks);
        Ok(this)
    }

    /// How many sockets were found.
    pub fn sockets(&self) -> u32 {
        self.sockets
    }

    /// How many locks those have.
    pub fn locks(&self) -> u32 {
        self.locks
    }

    fn read(&self) -> io::Result<types::data_locks> {
        let bytes = self
            .data
            .lookup(&0_u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| failed("reading the probes of locks", &e))?
            .unwrap_or_default();
        if bytes.len() < size_of::<types::data_locks>() {
            return Err(io::Error::other("the map of locks has another size"));
        }
        // SAFETY: the map's value is a `data_locks`, whose fields are integers of which any bits are valid; there are
        // enough bytes, and they need not be aligned.
        Ok(unsafe { bytes.as_ptr().cast::<types::data_locks>().read_unaligned() })
    }

    /// Returns the contention until now.
    ///
    /// # Errors
    /// The error of the map operation.
    pub fn counts(&self) -> io::Result<Counts> {
        let kind = self.read()?.locks.kind;
        let of = |which: usize| Contended {
            contentions: kind[which].contentions,
            waits: kind[which].waits,
            wait_ns: kind[which].wait_ns,
        };
        // In the order of `enum wakeone_lock_kind`.
        Ok(Counts {
            receive_queue: of(0),
            reader_queue: of(1),
            socket: of(2),
            wait_queue: of(3),
            other: of(4),
        })
    }
}

impl Contended {
    /// Returns the contention since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            contentions: self.contentions.saturating_sub(earlier.contentions),
            waits: self.waits.saturating_sub(earlier.waits),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
        }
    }
}

impl Counts {
    /// Each kind with its name.
    pub fn kinds(&self) -> [(&'static str, Contended); 5] {
        [
            ("receive_queue", self.receive_queue),
            ("reader_queue", self.reader_queue),
            ("socket", self.socket),
            ("wait_queue", self.wait_queue),
            ("other", self.other),
        ]
    }

    /// Returns the contention since an earlier reading.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            receive_queue: self.receive_queue.since(&earlier.receive_queue),
            reader_queue: self.reader_queue.since(&earlier.reader_queue),
            socket: self.socket.since(&earlier.socket),
            wait_queue: self.wait_queue.since(&earlier.wait_queue),
            other: self.other.since(&earlier.other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom};
    use std::net::UdpSocket;
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    #[test]
    fn a_socket_has_its_locks_and_counts_only_rise() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let _another = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let (to, patience) = (
            socket.local_addr().expect("address"),
            Duration::from_millis(20),
        );
        socket.set_read_timeout(Some(patience)).expect("timeout");
        let watched = Locks::watch(to.port(), std::process::id()).expect("watch");
        assert_eq!((watched.sockets(), watched.locks()), (1, 4));
        let last = Mutex::new(watched.counts().expect("counts"));
        let end = Instant::now() + Duration::from_millis(400);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let sender = UdpSocket::bind("127.0.0.1:0").expect("bind");
                    while Instant::now() < end {
                        let _ = sender.send_to(b"datagram", to);
                    }
                });
                scope.spawn(|| {
                    while Instant::now() < end {
                        let _ = socket.recv(&mut [0; 16]);
                    }
                });
            }
            scope.spawn(|| {
                while Instant::now() < end {
                    let now = watched.counts().expect("counts");
                    let mut before = last.lock().expect("lock");
                    for ((name, now), (_, before)) in now.kinds().iter().zip(before.kinds()) {
                        assert!(now.contentions >= before.contentions, "{name}");
                        assert!(now.wait_ns >= before.wait_ns, "{name}");
                    }
                    *before = now;
                    drop(before);
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
        });
        let counts = watched.counts().expect("counts");
        for (name, kind) in &counts.kinds()[..4] {
            assert!(kind.waits <= kind.contentions, "{name}: {kind:?}");
        }
    }

    /// A lock that sleeps tells of each wait everywhere: that of a file's position, which a long read holds.
    #[test]
    fn waits_for_other_locks_are_counted_from_end_to_end() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        const BYTES: usize = 16 << 20;
        let file = tempfile::tempfile().expect("a file");
        file.set_len(BYTES as u64).expect("its length");
        let watched = Locks::watch(0, std::process::id()).expect("watch");
        let before = watched.counts().expect("counts").other;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut buffer = vec![0; BYTES];
                    let mut file = &file;
                    for _ in 0..16 {
                        file.seek(SeekFrom::Start(0)).expect("seek");
                        let _ = file.read(&mut buffer).expect("read");
                    }
                });
            }
        });
        let waited = watched.counts().expect("counts").other.since(&before);
        assert!(waited.contentions > 0, "{waited:?}");
        assert!(waited.waits > 0 && waited.wait_ns > 0, "{waited:?}");
    }

    #[test]
    fn where_nobody_is_bound_there_are_no_locks() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        let gone = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let port = gone.local_addr().expect("address").port();
        drop(gone);
        let watched = Locks::watch(port, u32::MAX).expect("watch");
        assert_eq!((watched.sockets(), watched.locks()), (0, 0));
        assert_eq!(watched.counts().expect("counts"), Counts::default());
    }
}
