//! Read-only tracing of one port: accepts and wake-ups by worker, and how long connections wait in the accept queue.
//!
//! The probes of `bpf/observe.bpf.c` stay attached as long as a [`Probe`] lives. Nothing is pinned, so that not even
//! kill -9 leaves one behind.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::{Func, Struct, Typedef};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, ProgramMut};
use nix::libc;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsmount, fsopen};
use wakeone_model::snapshot::TraceGaps;
use wakeone_model::waits::Waits;

use crate::error::failed as step;
use crate::skeletons::observe::{ObserveSkel, ObserveSkelBuilder, types};
use wakeone_kernel::proc::waits;

/// The probes' counters of one process since they were attached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Worker {
    /// Connections that its accept() calls returned.
    pub accepted: u64,
    /// accept() calls that found nothing.
    pub accepted_empty: u64,
    /// Its threads woken for a connection.
    pub woken: u64,
    /// From the end of the handshake to accept()'s return.
    pub waits: Waits,
    /// Connections accepted while another was open.
    pub overlapping: u64,
    /// From accept()'s return to the worker's close(), where no other was accepted between.
    pub held: Waits,
}

/// The probes' counters since they were attached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections put into an accept queue of the port.
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
    /// The place of each process, and the counters there of the process before it.
    known: BTreeMap<u32, (u32, Worker)>,
    lacks: Lacks,
    slows_system_calls: bool,
    _links: Vec<Link>,
}

/// The probes that do not work here.
#[derive(Debug, Clone, Default)]
struct Lacks {
    gaps: TraceGaps,
    /// The reasons, and the counts that are unknown because of them: a sentence each.
    missing: Vec<String>,
}

impl Lacks {
    /// Without connections there is no moment to count wake-ups at.
    fn connections(&mut self, why: &str) {
        self.gaps = TraceGaps {
            connections: true,
            wakeups: true,
            ..self.gaps
        };
        self.missing
            .push(format!("{why}: connections and wake-ups are not counted"));
    }

    fn accepts(&mut self, why: &str) {
        self.gaps.accepts = true;
        self.missing.push(format!(
            "{why}: connections taken and waits in the queue are not counted"
        ));
    }

    fn wakeups(&mut self, why: &str) {
        if !self.gaps.wakeups {
            self.gaps.wakeups = true;
            self.missing
                .push(format!("{why}: wake-ups are not counted"));
        }
    }

    fn everything(&self) -> bool {
        self.gaps.connections && self.gaps.accepts
    }
}

/// Takes a connection from an accept queue, for every way of accept().
const ACCEPT: &str = "inet_csk_accept";

/// The kernel refused a trampoline. It will do so for each listener that is watched.
static NO_TRAMPOLINES: AtomicBool = AtomicBool::new(false);

/// Opens the tracing file system.
type Tracefs = dyn Fn() -> io::Result<OwnedFd>;

/// Where accept() is watched.
#[derive(Clone, Copy)]
enum Accepts<'a> {
    /// In the function that all of its ways lead to.
    Function,
    /// The same with the arguments that it had before Linux 6.10.
    FunctionByFlags,
    /// At the end of its system calls.
    SystemCalls(&'a Tracefs),
}

impl Accepts<'_> {
    /// The function's kind of arguments, where the kernel has it.
    fn by_function(kernel: &Btf<'_>) -> Option<Self> {
        kernel.type_by_name::<Func<'_>>(ACCEPT)?;
        match kernel.type_by_name::<Struct<'_>>("proto_accept_arg") {
            Some(_) => Some(Accepts::Function),
            None => Some(Accepts::FunctionByFlags),
        }
    }
}

/// As many processes as can be told apart.
const MOST_WORKERS: usize = crate::contract::number::WATCHED_WORKERS as usize;

impl Probe {
    /// Attaches the probes for a port of this thread's network namespace. A probe that the kernel has no attach point
    /// for is left out, and [`Probe::missing`] says so.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF and CAP_PERFMON, or where lockdown or a container forbid tracing; otherwise what the
    /// kernel says of the step named. Also where no probe at all can be attached.
    pub fn attach(port: u16) -> io::Result<Self> {
        let kernel = Btf::from_vmlinux().map_err(|e| step("reading the kernel's BTF", &e))?;
        let lacks = lacks(&kernel);
        let function = Accepts::by_function(&kernel);
        if let Some(function) = function.filter(|_| !NO_TRAMPOLINES.load(Relaxed)) {
            // Whether there are trampolines is only found out by trying: once.
            let attached = Self::attach_where(port, function, lacks.clone());
            match attached {
                Ok(probe) if !probe.lacks.gaps.accepts => return Ok(probe),
                Ok(_) => {}
                Err(error) => tracing::debug!("accept() is watched by its system calls: {error}"),
            }
        }
        let probe = Self::attach_where(port, Accepts::SystemCalls(&tracefs), lacks)?;
        // This way works, so the other one did not fail for want of a capability.
        NO_TRAMPOLINES.store(true, Relaxed);
        Ok(probe)
    }

    /// Attaches the probes that are not known to be missing.
    fn attach_where(port: u16, accepts: Accepts<'_>, mut lacks: Lacks) -> io::Result<Self> {
        libbpf_rs::set_print(None);
        let mut storage = MaybeUninit::uninit();
        let mut open = ObserveSkelBuilder::default()
            .open(&mut storage)
            .map_err(|e| step("reading the probes", &e))?;
        if let Some(data) = &mut open.maps.bss_data {
            data.watched.port = port.into();
            data.watched.netns = namespace()?;
        }
        let programs = &mut open.progs;
        programs.wakeone_state.set_autoload(!lacks.gaps.connections);
        programs.wakeone_waking.set_autoload(!lacks.gaps.wakeups);
        let by = |way: bool| way && !lacks.gaps.accepts;
        let by_call = matches!(accepts, Accepts::SystemCalls(_));
        programs
            .wakeone_accept
            .set_autoload(by(matches!(accepts, Accepts::Function)));
        programs
            .wakeone_accept_by_flags
            .set_autoload(by(matches!(accepts, Accepts::FunctionByFlags)));
        programs.wakeone_call_accept4.set_autoload(by(by_call));
        programs.wakeone_call_accept.set_autoload(by(by_call));
        let skeleton = open.load().map_err(|e| step("loading the probes", &e))?;
        let links = links(&skeleton, accepts, &mut lacks)?;
        if lacks.everything() {
            return Err(io::Error::other(lacks.missing.join("; ")));
        }
        let handle = |map: &libbpf_rs::MapMut<'_>| {
            MapHandle::try_from(map).map_err(|e| step("keeping the probes' maps", &e))
        };
        Ok(Self {
            watched: handle(&skeleton.maps.bss)?,
            places: handle(&skeleton.maps.places)?,
            known: BTreeMap::new(),
            slows_system_calls: matches!(accepts, Accepts::SystemCalls(_)) && !lacks.gaps.accepts,
            lacks,
            _links: links,
        })
    }

    /// Which counts are always 0 here, because their probe could not be attached.
    pub fn gaps(&self) -> TraceGaps {
        self.lacks.gaps
    }

    /// Whether every system call of the machine takes a little longer meanwhile: the kernel has no trampolines.
    pub fn slows_system_calls(&self) -> bool {
        self.slows_system_calls
    }

    /// Why some counts are missing: a sentence for each reason.
    pub fn missing(&self) -> &[String] {
        &self.lacks.missing
    }

    /// Watches these processes as well; the counters of the others stay.
    ///
    /// # Errors
    /// The error of the map operation. More than 256 processes are not told apart: the rest is left out.
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

    /// Returns a free place, or that of a process that is gone, with its counters; `None` where all are in use.
    fn place(&mut self) -> io::Result<Option<(u32, Worker)>> {
        if self.known.len() < MOST_WORKERS {
            let place = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
            return Ok(Some((place, Worker::default())));
        }
        let gone = self.known.keys().copied();
        let Some(gone) = gone.into_iter().find(|pid| waits::identity(*pid).is_none()) else {
            return Ok(None);
        };
        let data = self.data()?;
        let _ = self.places.delete(&gone.to_ne_bytes());
        let (place, _) = self.known.remove(&gone).unwrap_or_default();
        Ok(Some((place, counted(&data.watched.worker[place as usize]))))
    }

    fn data(&self) -> io::Result<Box<types::bss>> {
        let bytes = self
            .watched
            .lookup(&0_u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| step("reading the probes", &e))?
            .unwrap_or_default();
        if bytes.len() < size_of::<types::bss>() {
            return Err(io::Error::other("the probes' map has another size"));
        }
        // Never on the stack, which has no room for a megabyte.
        let mut data = Box::<types::bss>::new_uninit();
        // SAFETY: the map's value is a `bss`, whose fields are integers of which any bits are valid; there
        // are enough bytes, and they are copied one by one.
        unsafe {
            let to = data.as_mut_ptr().cast::<u8>();
            to.copy_from_nonoverlapping(bytes.as_ptr(), size_of::<types::bss>());
            Ok(data.assume_init())
        }
    }

    /// Reads the counters.
    ///
    /// # Errors
    /// The error of the map operation.
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
        woken: seen.woken,
        waits: times(&seen.wait),
        overlapping: seen.overlapping,
        held: times(&seen.held),
    }
}

fn times(seen: &types::wakeone_times) -> Waits {
    Waits {
        count: seen.count,
        sum_us: seen.us_sum,
        max_us: seen.us_max,
        buckets: seen.bucket.to_vec(),
    }
}

impl Worker {
    /// Returns the difference to an earlier reading.
    fn since(&self, earlier: &Self) -> Self {
        Self {
            accepted: self.accepted.saturating_sub(earlier.accepted),
            accepted_empty: self.accepted_empty.saturating_sub(earlier.accepted_empty),
            woken: self.woken.saturating_sub(earlier.woken),
            waits: self.waits.since(&earlier.waits),
            overlapping: self.overlapping.saturating_sub(earlier.overlapping),
            held: self.held.since(&earlier.held),
        }
    }
}

/// The number of this thread's network namespace.
fn namespace() -> io::Result<u32> {
    let inode = rustix::fs::stat("/proc/thread-self/ns/net")?.st_ino;
    u32::try_from(inode).map_err(io::Error::other)
}

/// Compares what the probes need with the types of this kernel.
fn lacks(kernel: &Btf<'_>) -> Lacks {
    let traced = |name: &str| {
        let name = format!("btf_trace_{name}");
        kernel.type_by_name::<Typedef<'_>>(&name).is_some()
    };
    let mut lacks = Lacks::default();
    if !traced("inet_sock_set_state") {
        lacks.connections("the kernel lacks the tracepoint inet_sock_set_state (Linux 4.16)");
    }
    if !traced("sched_waking") {
        lacks.wakeups("the kernel lacks the tracepoint sched_waking");
    }
    if !has_queued_spinlocks(kernel) {
        lacks.wakeups("the kernel has no queued spinlocks (PREEMPT_RT, or built for one CPU)");
    }
    lacks
}

/// Whether a socket's lock is a word that is 0 while it is free. On PREEMPT_RT a `spinlock_t` is a mutex with another
/// layout.
fn has_queued_spinlocks(kernel: &Btf<'_>) -> bool {
    let spinlock = kernel.type_by_name::<Struct<'_>>("spinlock");
    let is_mutex = |lock: Struct<'_>| {
        lock.iter()
            .any(|member| member.name.is_some_and(|name| name == "lock"))
    };
    kernel.type_by_name::<Struct<'_>>("qspinlock").is_some()
        && spinlock.is_some_and(|lock| !is_mutex(lock))
}

/// Attaches each probe that was loaded; one that cannot be attached leaves the others.
fn links(
    skeleton: &ObserveSkel<'_>,
    accepts: Accepts<'_>,
    lacks: &mut Lacks,
) -> io::Result<Vec<Link>> {
    let programs = &skeleton.progs;
    let mut links = Vec::new();
    if !lacks.gaps.connections {
        match programs.wakeone_state.attach() {
            Ok(link) => links.push(link),
            Err(error) if denied(&error) => return Err(step("attaching the probes", &error)),
            Err(error) => lacks.connections(&format!(
                "attaching to the tracepoint inet_sock_set_state failed ({error})"
            )),
        }
    }
    if !lacks.gaps.wakeups {
        match programs.wakeone_waking.attach() {
            Ok(link) => links.push(link),
            Err(error) => lacks.wakeups(&format!(
                "attaching to the tracepoint sched_waking failed ({error})"
            )),
        }
    }
    if lacks.gaps.accepts {
        return Ok(links);
    }
    match accept_links(skeleton, accepts) {
        Ok(accepts) => links.extend(accepts),
        Err(error) => lacks.accepts(&format!("accept() cannot be watched ({error})")),
    }
    Ok(links)
}

fn denied(error: &libbpf_rs::Error) -> bool {
    error.kind() == libbpf_rs::ErrorKind::PermissionDenied
}

/// All probes of one way of watching accept(), or none.
fn accept_links(skeleton: &ObserveSkel<'_>, accepts: Accepts<'_>) -> io::Result<Vec<Link>> {
    let programs = &skeleton.progs;
    let to_function = |program: &ProgramMut<'_>| {
        let attached = program.attach();
        Ok(vec![attached.map_err(|e| {
            step(&format!("attaching to {ACCEPT}"), &e)
        })?])
    };
    let tracefs = match accepts {
        Accepts::Function => return to_function(&programs.wakeone_accept),
        Accepts::FunctionByFlags => return to_function(&programs.wakeone_accept_by_flags),
        Accepts::SystemCalls(tracefs) => tracefs()?,
    };
    let attach = |(program, name): (&ProgramMut<'_>, &str)| {
        let event = system_call_event(&tracefs, name)?;
        let attached = program.attach_perf_event(event.into_raw_fd());
        attached.map_err(|e| step("attaching a probe to accept", &e))
    };
    let calls = [
        (&programs.wakeone_call_accept4, "sys_exit_accept4"),
        (&programs.wakeone_call_accept, "sys_exit_accept"),
    ];
    calls.into_iter().map(attach).collect()
}

/// Opens the tracing file system, which need not be mounted: a mount of our own that is in nobody's tree goes away with
/// its descriptor.
fn tracefs() -> io::Result<OwnedFd> {
    let open = || {
        let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_create(context.as_fd())?;
        fsmount(
            context.as_fd(),
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::empty(),
        )
    };
    open().map_err(|error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("opening tracefs failed: {error}"))
    })
}

/// Opens the tracepoint of a system call, whose number is in tracefs.
fn system_call_event(root: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let of = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("asking tracefs for {name} failed: {error}"),
        )
    };
    let file = rustix::fs::openat(
        root,
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
        how_long_it_had_each(&listener, &probe);

        // Two sleep in accept, one connection: one is woken.
        listener.set_nonblocking(false).expect("blocking");
        let (before, after) = std::thread::scope(|scope| {
            let sleepers = [
                scope.spawn(|| listener.accept().map(drop)),
                scope.spawn(|| listener.accept().map(drop)),
            ];
            std::thread::sleep(Duration::from_millis(50));
            let before = probe.read().expect("read");
            drop(TcpStream::connect(address).expect("connect"));
            std::thread::sleep(Duration::from_millis(50));
            let after = probe.read().expect("read");
            drop(TcpStream::connect(address).expect("connect"));
            for sleeper in sleepers {
                sleeper.join().expect("thread").expect("accept");
            }
            (before, after)
        });
        // Only now: nobody would wake the second one after a failure.
        assert_eq!(after.connections - before.connections, 1);
        assert_eq!(after.wakeups - before.wakeups, 1);
    }

    /// One has a connection for 30 ms and closes it first, and one closes it after its client.
    fn how_long_it_had_each(listener: &TcpListener, probe: &Probe) {
        let address = listener.local_addr().expect("address");
        let own = std::process::id();
        let before = probe.read().expect("read").workers[&own].clone();
        listener.set_nonblocking(false).expect("blocking");
        for client_first in [false, true] {
            let client = TcpStream::connect(address).expect("connect");
            let (accepted, _) = listener.accept().expect("accept");
            std::thread::sleep(Duration::from_millis(30));
            let client = (!client_first).then_some(client);
            drop(accepted);
            drop(client);
        }
        let two: Vec<_> = (0..2)
            .map(|_| TcpStream::connect(address).expect("connect"))
            .map(|client| (listener.accept().expect("accept"), client))
            .collect();
        drop(two);
        let held = probe.read().expect("read").workers[&own].since(&before);
        assert_eq!((held.accepted, held.overlapping), (4, 1), "{held:?}");
        assert_eq!(held.held.count, 3, "{held:?}");
        let longer = held.held.quantile_us(0.5).expect("three");
        assert!(longer > 25_000.0, "{longer}");
    }

    /// Two handshakes and one accept, seen by probes of which some are missing.
    fn seen_with(lacks: Lacks, tracefs: &Tracefs) -> io::Result<Probe> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let mut probe = Probe::attach_where(address.port(), Accepts::SystemCalls(tracefs), lacks)?;
        probe.follow([std::process::id()]).expect("follow");
        let _clients = [(); 2].map(|()| TcpStream::connect(address).expect("connect"));
        listener.accept().expect("accept");
        Ok(probe)
    }

    #[test]
    fn what_the_kernel_lacks_leaves_the_rest() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        let own = std::process::id();
        let counted = |probe: &Probe| {
            let counts = probe.read().expect("read");
            let worker = &counts.workers[&own];
            (counts.connections, worker.accepted, worker.waits.count)
        };
        let no_tracefs = || Err(io::Error::from(io::ErrorKind::PermissionDenied));

        let without = |change: fn(&mut Lacks)| {
            let mut lacks = Lacks::default();
            change(&mut lacks);
            lacks
        };
        let probe = seen_with(without(|l| l.wakeups("a reason")), &tracefs).expect("attach");
        assert_eq!(counted(&probe), (2, 1, 1));
        assert_eq!(probe.missing(), ["a reason: wake-ups are not counted"]);

        let probe = seen_with(without(|l| l.connections("a reason")), &tracefs).expect("attach");
        assert_eq!(counted(&probe), (0, 1, 1));
        assert!(probe.gaps().wakeups && !probe.gaps().accepts);
        assert_eq!(probe.missing().len(), 1, "{:?}", probe.missing());

        let probe = seen_with(Lacks::default(), &no_tracefs).expect("attach");
        assert_eq!(counted(&probe), (2, 0, 0));
        assert!(probe.gaps().accepts && !probe.gaps().wakeups);
        assert_eq!(probe.missing().len(), 1, "{:?}", probe.missing());

        let nothing = seen_with(without(|l| l.connections("a reason")), &no_tracefs);
        assert!(nothing.is_err_and(|error| error.to_string().contains("a reason")));
    }

    #[test]
    fn what_finds_the_queue_full_is_no_connection() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        rustix::net::listen(&listener, 1).expect("listen");
        let address = listener.local_addr().expect("address");
        let probe = Probe::attach(address.port()).expect("attach");
        let patience = Duration::from_millis(200);
        // One more than the backlog finds room.
        let connect = |_| TcpStream::connect_timeout(&address, patience).ok();
        let connected: Vec<TcpStream> = (0..4).filter_map(connect).collect();
        assert_eq!(connected.len(), 2);
        assert_eq!(probe.read().expect("read").connections, 2);
    }

    /// Waits until each of these threads sleeps in a system call.
    fn wait_until_asleep(threads: &[u32]) {
        let asleep = |thread: &u32| {
            let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
            status.is_ok_and(|status| status.contains(") S "))
        };
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !threads.iter().all(asleep) && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Wake-ups for each of 50 connections, one after another, to threads that all wait by epoll.
    fn wakeups_each(waiters: usize, exclusive: bool) -> f64 {
        use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
        const CONNECTIONS: u64 = 50;
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        listener.set_nonblocking(true).expect("nonblocking");
        let address = listener.local_addr().expect("address");
        let mut probe = Probe::attach(address.port()).expect("attach");
        probe.follow([std::process::id()]).expect("follow");
        let end = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).expect("eventfd");
        let (started, threads) = std::sync::mpsc::channel();
        let wait = |started: std::sync::mpsc::Sender<u32>| {
            let poll = epoll::create(CreateFlags::CLOEXEC).expect("epoll");
            let mut how = EventFlags::IN;
            how.set(EventFlags::EXCLUSIVE, exclusive);
            epoll::add(&poll, &listener, EventData::new_u64(1), how).expect("add");
            epoll::add(&poll, &end, EventData::new_u64(2), EventFlags::IN).expect("add");
            let own = rustix::thread::gettid().as_raw_nonzero().get();
            started.send(own as u32).expect("send");
            loop {
                let mut events = Vec::with_capacity(1);
                let waited = epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None);
                waited.expect("wait");
                if events[0].data.u64() == 2 {
                    return;
                }
                let _ = listener.accept();
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..waiters {
                let started = started.clone();
                scope.spawn(|| wait(started));
            }
            let threads: Vec<u32> = threads.iter().take(waiters).collect();
            for _ in 0..CONNECTIONS {
                wait_until_asleep(&threads);
                drop(TcpStream::connect(address).expect("connect"));
            }
            wait_until_asleep(&threads);
            rustix::io::write(&end, &1_u64.to_ne_bytes()).expect("write");
        });
        let counts = probe.read().expect("read");
        assert_eq!(counts.connections, CONNECTIONS);
        counts.wakeups as f64 / CONNECTIONS as f64
    }

    #[test]
    fn a_herd_is_counted_to_the_last_thread() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: tracing needs root");
        }
        assert_eq!(wakeups_each(16, false), 16.0);
        assert_eq!(wakeups_each(16, true), 1.0);
    }
}
