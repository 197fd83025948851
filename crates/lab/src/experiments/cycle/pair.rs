//! The two halves of the source's program, in a network namespace of their own.

use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, getsockname, listen, socket,
};
use nix::sys::time::TimeValLike;
use std::collections::BTreeMap;
use std::net::{SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wakeone_kernel::proc::netstat::Counters;

use crate::error::{Error, joined};

use crate::cpus;

/// The parameters of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// sched_yield() after each connect.
    pub yielding: bool,
    /// Both threads on one CPU.
    pub one_cpu: bool,
    /// Backlog of the listener.
    pub backlog: i32,
}

/// The result of one run.
#[derive(Debug, Default)]
pub struct Found {
    /// Connections made.
    pub connections: usize,
    /// From the first connect to the end of the last one.
    pub elapsed: Duration,
    /// Connects that took more than half a second.
    pub slow_connects: usize,
    /// CPU time of the thread that connects: in user space, and in the kernel.
    pub cpu: (Duration, Duration),
    /// The kernel's counters of the namespace.
    pub counters: BTreeMap<String, u64>,
}

/// Makes `count` connections, as many as fit into `limit`.
///
/// # Errors
/// When no network namespace can be created, or a socket fails.
pub fn run(
    setup: Setup,
    count: usize,
    limit: Duration,
    cancel: &AtomicBool,
) -> Result<Found, Error> {
    // A thread of its own: the namespace and the CPU are the thread's, and go with it.
    let found =
        std::thread::scope(|scope| scope.spawn(|| isolated(setup, count, limit, cancel)).join());
    joined(found)
}

fn isolated(
    setup: Setup,
    count: usize,
    limit: Duration,
    cancel: &AtomicBool,
) -> Result<Found, Error> {
    let missing = |what: &str, e: String| {
        Error::Missing(format!("{what} failed: {e}; the experiment needs root"))
    };
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(|e| missing("making a network namespace", e.to_string()))?;
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .stdin(Stdio::null())
        .output();
    match up {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            return Err(missing(
                "setting lo up",
                String::from_utf8_lossy(&output.stderr).trim().into(),
            ));
        }
        Err(e) => return Err(missing("running ip (package iproute2)", e.to_string())),
    }
    let (client, server) = of_both(setup.one_cpu)?;
    cpus::pin(client)?;
    connect_all(setup, count, limit, server, cancel)
        .map_err(|e| Error::Server(format!("connecting to ourselves failed: {e}")))
}

/// The CPUs of client and server.
fn of_both(one: bool) -> Result<(usize, usize), Error> {
    let mine = cpus::mine()?;
    match (one, mine.as_slice()) {
        (true, [first, ..]) => Ok((*first, *first)),
        (false, [first, second, ..]) => Ok((*first, *second)),
        _ => Err(Error::Missing(
            "two CPUs are needed, this process may use one".into(),
        )),
    }
}

fn connect_all(
    setup: Setup,
    count: usize,
    limit: Duration,
    server_cpu: usize,
    cancel: &AtomicBool,
) -> std::io::Result<Found> {
    let listener = listener(setup.backlog)?;
    let SocketAddr::V4(address) = listener.local_addr()? else {
        return Err(std::io::ErrorKind::Unsupported.into());
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| accept_all(&listener, server_cpu, &over));
        let connected = connect_each(setup, count, limit, address, cancel);
        over.store(true, Ordering::Release);
        // One more connection ends an accept() that waits.
        let _ = TcpStream::connect_timeout(&address.into(), Duration::from_secs(10));
        let _ = server.join();
        let mut found = connected?;
        found.counters = counters();
        Ok(found)
    })
}

/// Opens a listener with this backlog; std's listener chooses its own.
fn listener(backlog: i32) -> std::io::Result<TcpListener> {
    let fd = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    bind(fd.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0))?;
    listen(&fd, Backlog::new(backlog)?)?;
    let _: SockaddrIn = getsockname(fd.as_raw_fd())?;
    Ok(TcpListener::from(fd))
}

fn accept_all(listener: &TcpListener, cpu: usize, over: &AtomicBool) {
    let _ = cpus::pin(cpu);
    let mut kept = Vec::new();
    while !over.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => kept.push(stream),
            Err(_) => break,
        }
    }
}

fn connect_each(
    setup: Setup,
    count: usize,
    limit: Duration,
    address: SocketAddrV4,
    cancel: &AtomicBool,
) -> std::io::Result<Found> {
    let mut found = Found::default();
    let mut kept = Vec::with_capacity(count);
    let cpu = cpu_time()?;
    let start = Instant::now();
    let mut last = start;
    while kept.len() < count && start.elapsed() < limit && !cancel.load(Ordering::Relaxed) {
        kept.push(TcpStream::connect(address)?);
        if setup.yielding {
            std::thread::yield_now();
        }
        let now = Instant::now();
        found.slow_connects += usize::from(now - last > Duration::from_millis(500));
        last = now;
    }
    found.elapsed = start.elapsed();
    let now = cpu_time()?;
    found.cpu = (now.0.saturating_sub(cpu.0), now.1.saturating_sub(cpu.1));
    found.connections = kept.len();
    Ok(found)
}

/// CPU time of this thread so far: in user space, and in the kernel.
fn cpu_time() -> std::io::Result<(Duration, Duration)> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
    let of = |time: nix::sys::time::TimeVal| {
        Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap_or(0))
    };
    Ok((of(usage.user_time()), of(usage.system_time())))
}

/// The counters of this thread's network namespace that explain slow connects.
fn counters() -> BTreeMap<String, u64> {
    let all = Counters::read(None);
    [
        ("ListenOverflows", "listen_overflows"),
        ("ListenDrops", "listen_drops"),
        ("TCPSynRetrans", "syn_retransmissions"),
    ]
    .into_iter()
    .map(|(kernel, ours)| (ours.to_owned(), all.get("TcpExt", kernel)))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_this_thread_s() {
        let before = cpu_time().unwrap();
        let mut sum = 0u64;
        while cpu_time().unwrap() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let after = cpu_time().unwrap();
        assert!(after.0 + after.1 > before.0 + before.1);
    }
}
