//! Read-only tracing of one port: who accepts, who is woken, how long connections wait in the accept queue.
//!
//! The probes of `bpf/observe.bpf.c`, attached as long as a [`Probe`] lives; nothing is pinned, so that not even
//! kill -9 leaves one behind.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};
use nix::libc;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsmount, fsopen};
use wakeone_model::waits::Waits;

use crate::bpf::failed as step;
use crate::peek;
use crate::skeletons::observe::{ObserveSkel, ObserveSkelBuilder, types};

/// What the probes counted of one process since they were attached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Worker {
    /// Connections that its accept() calls returned.
    pub accepted: u64,
    /// accept() calls that found nothing.
    pub accepted_empty: u64,
    /// accept() calls that failed otherwise.
    pub accepted_error: u64,
    /// Its threads woken for a connection.
    pub woken: u64,
    /// From the end of the handshake to accept()'s return.
    pub waits: Waits,
}

/// What the probes counted since they were attached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections announced to the listeners of the port.
    pub connections: u64,
    /// Threads of the watched processes woken for those.
    pub wakeups: u64,
    /// By process id.
    pub workers: BTreeMap<u32, Worker>,
}

/// The probes, attached.
pub struct Probe {
    watched: MapHandle,
    places: MapHandle,
    /// The place of each process, and what was counted there for one before it.
    known: BTreeMap<u32, (u32, Worker)>,
    _links: Vec<Link>,
}

/// As many processes as can be told apart.
const MOST_WORKERS: usize = 256;

impl Probe {
    /// Attaches the probes for a port of this thread's network namespace.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF and CAP_PERFMON, or where lockdown or a container forbid tracing; otherwise what the
    /// kernel says of the step named.
    pub fn attach(port: u16) -> io::Result<Self> {
        libbpf_rs::set_print(None);
        let mut storage = MaybeUninit::uninit();
        let mut open = ObserveSkelBuilder::default()
            .open(&mut storage)
            .map_err(|e| step("reading the probes", &e))?;
        if let Some(data) = &mut open.maps.data_watched_data {
            data.watched.port = port.into();
            data.watched.netns = namespace()?;
        }
        let skeleton = open.load().map_err(|e| step("loading the probes", &e))?;
        let links = links(&skeleton)?;
        let handle = |map: &libbpf_rs::MapMut<'_>| {
            MapHandle::try_from(map).map_err(|e| step("keeping the probes' maps", &e))
        };
        Ok(Self {
            watched: handle(&skeleton.maps.data_watched)?,
            places: handle(&skeleton.maps.places)?,
            known: BTreeMap::new(),
            _links: links,
        })
    }

    /// Watches these processes as well; what was counted of others stays.
    ///
    /// # Errors
    /// What the map says. More than 256 processes are not told apart: the rest is left out.
    pub fn follow(&mut self, pids: impl IntoIterator<Item = u32>) -> io::Result<()> {
        for pid in pids {
            if self.known.contains_key(&pid) {
                continue;
            }
            let Some((place, before)) = self.place()? else {
                continue;
            };
            self.places
                .update(&pid.to_ne_bytes(), &place.to_ne_bytes(), MapFlags::ANY)
                .map_err(|e| step("noting a worker", &e))?;
            self.known.insert(pid, (place, before));
        }
        Ok(())
    }

    /// A place that is free, or that of a process that is gone, with what was counted there; None where all are in use.
    fn place(&mut self) -> io::Result<Option<(u32, Worker)>> {
        if self.known.len() < MOST_WORKERS {
            let place = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
            return Ok(Some((place, Worker::default())));
        }
        let gone = self.known.keys().copied();
        let Some(gone) = gone.into_iter().find(|pid| peek::identity(*pid).is_none()) else {
            return Ok(None);
        };
        let data = self.data()?;
        let _ = self.places.delete(&gone.to_ne_bytes());
        let (place, _) = self.known.remove(&gone).unwrap_or_default();
        Ok(Some((place, counted(&data.watched.worker[place as usize]))))
    }

    fn data(&self) -> io::Result<Box<types::data_watched>> {
        let bytes = self
            .watched
            .lookup(&0_u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| step("reading the probes", &e))?
            .unwrap_or_default();
        if bytes.len() < size_of::<types::data_watched>() {
            return Err(io::Error::other("the probes' map has another size"));
        }
        // SAFETY: the map's value is a `data_watched`, whose fields are integers of which any bits are valid; there
        // are enough bytes, and they need not be aligned.
        let data = unsafe {
            bytes
                .as_ptr()
                .cast::<types::data_watched>()
                .read_unaligned()
        };
        Ok(Box::new(data))
    }

    /// What was counted until now.
    ///
    /// # Errors
    /// What the map says.
    pub fn read(&self) -> io::Result<Counts> {
        let data = self.data()?;
        let worker = |(pid, (place, before)): (&u32, &(u32, Worker))| {
            let now = counted(&data.watched.worker[*place as usize]);
            (*pid, now.since(before))
        };
        Ok(Counts {
            connections: data.watched.connections,
            wakeups: data.watched.wakeups,
            workers: self.known.iter().map(worker).collect(),
        })
    }
}

fn counted(seen: &types::wakeone_watched_worker) -> Worker {
    Worker {
        accepted: seen.accepted,
        accepted_empty: seen.accepted_empty,
        accepted_error: seen.accepted_error,
        woken: seen.woken,
        waits: Waits {
            count: seen.waits,
            sum_us: seen.wait_us_sum,
            max_us: seen.wait_us_max,
            buckets: seen.wait.to_vec(),
        },
    }
}

impl Worker {
    /// What was counted since an earlier reading.
    fn since(&self, earlier: &Self) -> Self {
        Self {
            accepted: self.accepted.saturating_sub(earlier.accepted),
            accepted_empty: self.accepted_empty.saturating_sub(earlier.accepted_empty),
            accepted_error: self.accepted_error.saturating_sub(earlier.accepted_error),
            woken: self.woken.saturating_sub(earlier.woken),
            waits: self.waits.since(&earlier.waits),
        }
    }
}

/// The number of this thread's network namespace.
fn namespace() -> io::Result<u32> {
    let inode = rustix::fs::stat("/proc/thread-self/ns/net")?.st_ino;
    u32::try_from(inode).map_err(io::Error::other)
}

fn links(skeleton: &ObserveSkel<'_>) -> io::Result<Vec<Link>> {
    let programs = &skeleton.progs;
    let mut links = Vec::new();
    for program in [
        &programs.wakeone_established,
        &programs.wakeone_ready,
        &programs.wakeone_waking,
    ] {
        links.push(
            program
                .attach()
                .map_err(|e| step("attaching a probe", &e))?,
        );
    }
    let calls = [
        (&programs.wakeone_accept4, "sys_exit_accept4"),
        (&programs.wakeone_accept, "sys_exit_accept"),
    ];
    for (program, name) in calls {
        let event = system_call_event(name)?;
        let attached = program
            .attach_perf_event(event.into_raw_fd())
            .map_err(|e| step("attaching a probe to accept", &e))?;
        links.push(attached);
    }
    Ok(links)
}

/// Opens the tracepoint of a system call. Its number stands in tracefs, which need not be mounted: a mount of our own
/// that is in nobody's tree goes away with its descriptor.
fn system_call_event(name: &str) -> io::Result<OwnedFd> {
    let of = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("asking tracefs for {name} failed: {error}"),
        )
    };
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(|e| of(e.into()))?;
    rustix::mount::fsconfig_create(context.as_fd()).map_err(|e| of(e.into()))?;
    let root = fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )
    .map_err(|e| of(e.into()))?;
    let file = rustix::fs::openat(
        &root,
        format!("events/syscalls/{name}/id"),
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .map_err(|e| of(e.into()))?;
    let text = io::read_to_string(std::fs::File::from(file)).map_err(of)?;
    let id: u64 = text.trim().parse().map_err(io::Error::other)?;
    open_tracepoint(id)
}

/// `struct perf_event_attr` of the first ABI that is long enough here; the kernel takes the rest for zeros.
#[repr(C)]
struct EventAttributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    rest: [u64; 5],
}

fn open_tracepoint(id: u64) -> io::Result<OwnedFd> {
    const PERF_TYPE_TRACEPOINT: u32 = 2;
    const EVERY_PROCESS: i32 = -1;
    const ANY_GROUP: i32 = -1;
    const PERF_FLAG_FD_CLOEXEC: u64 = 8;
    let attributes = EventAttributes {
        kind: PERF_TYPE_TRACEPOINT,
        size: size_of::<EventAttributes>() as u32,
        config: id,
        sample_period: 1,
        rest: [0; 5],
    };
    // SAFETY: the attributes are readable for their `size` (PERF_ATTR_SIZE_VER0). A BPF program attached to the event
    // of one CPU runs for the tracepoint on all of them (kernel/trace/trace_syscalls.c).
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            EVERY_PROCESS,
            0,
            ANY_GROUP,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    if fd < 0 {
        let error = io::Error::last_os_error();
        let told = format!("opening the tracepoint of accept failed: {error}");
        return Err(io::Error::new(error.kind(), told));
    }
    // SAFETY: the kernel has just given this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn places_of_those_that_ended_are_used_again() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let mut probe = Probe::attach(address.port()).expect("attach");
        // Numbers that no process has.
        let gone = (0..MOST_WORKERS as u32).map(|n| u32::MAX / 2 + n);
        probe.follow(gone).expect("follow");
        let own = std::process::id();
        probe.follow([own]).expect("follow");
        let client = TcpStream::connect(address).expect("connect");
        listener.accept().expect("accept");
        let counts = probe.read().expect("read");
        assert_eq!(counts.workers[&own].accepted, 1);
        assert_eq!(counts.workers.len(), MOST_WORKERS);
        drop(client);
    }

    #[test]
    fn accepts_waits_and_wake_ups_are_counted() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let other = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let mut probe = Probe::attach(address.port()).expect("attach");
        let own = std::process::id();
        probe.follow([own, own]).expect("follow");
        // Three wait 30 ms, and one, of another listener, is none of ours.
        let clients: Vec<_> = (0..3)
            .map(|_| TcpStream::connect(address).expect("connect"))
            .collect();
        let stranger = TcpStream::connect(other.local_addr().expect("address")).expect("connect");
        std::thread::sleep(Duration::from_millis(30));
        for _ in &clients {
            listener.accept().expect("accept");
        }
        other.accept().expect("accept");
        listener.set_nonblocking(true).expect("nonblocking");
        listener.accept().expect_err("nothing waits");
        let counts = probe.read().expect("read");
        let worker = &counts.workers[&own];
        assert_eq!((counts.connections, worker.accepted), (3, 3));
        assert!(worker.accepted_empty >= 1);
        assert_eq!(worker.waits.count, 3);
        let shortest = worker.waits.quantile_us(0.01).expect("three");
        assert!(shortest > 25_000.0, "{shortest}");
        assert_eq!(worker.woken, 0, "nobody slept in accept");
        drop(stranger);

        // Two sleep in accept, one connection: one is woken.
        listener.set_nonblocking(false).expect("blocking");
        std::thread::scope(|scope| {
            let sleepers = [
                scope.spawn(|| listener.accept().map(drop)),
                scope.spawn(|| listener.accept().map(drop)),
            ];
            std::thread::sleep(Duration::from_millis(50));
            let before = probe.read().expect("read");
            drop(TcpStream::connect(address).expect("connect"));
            std::thread::sleep(Duration::from_millis(50));
            let after = probe.read().expect("read");
            assert_eq!(after.connections - before.connections, 1);
            assert_eq!(after.wakeups - before.wakeups, 1);
            drop(TcpStream::connect(address).expect("connect"));
            for sleeper in sleepers {
                sleeper.join().expect("thread").expect("accept");
            }
        });
    }
}
