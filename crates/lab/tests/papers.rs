//! The promises of the patches in `kernel/`. `scripts/kernels papers` runs this in their kernel; no other has the switches.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use wakeone_kernel::socket::set_udp_queues;
use wakeone_lab::papers::{Switch, UDP_QUEUES_IN_TURN};
use wakeone_lab::trace::{Trace, woken_by_others};
use wakeone_waitqueue::Policy;

/// The switches are the kernel's, so one test at a time turns them.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Name of the threads that are traced.
const WAITER: &str = "papers";
/// How long anything may take that must happen.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long nothing must happen.
const QUIET: Duration = Duration::from_millis(300);

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How a thread waits for a connection.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Accept,
    Poll,
    Epoll(EpollFlags),
}

impl How {
    /// Waits once; true if it took a connection.
    fn wait(self, listener: &TcpListener, epoll: &Epoll) -> bool {
        match self {
            How::Accept => return listener.accept().is_ok(),
            How::Poll => {
                let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
                let _ = poll(&mut fds, PollTimeout::NONE);
            }
            How::Epoll(_) => {
                let _ = epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::NONE);
            }
        }
        false
    }
}

/// Threads that wait for one connection each, and then end.
struct Waiters {
    listener: Arc<TcpListener>,
    accepted: Arc<AtomicUsize>,
    heard: Arc<AtomicUsize>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Waiters {
    fn gather(ways: &[(How, usize)]) -> Self {
        let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let (accepted, heard) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let mut threads = Vec::new();
        for how in ways.iter().flat_map(|(how, count)| vec![*how; *count]) {
            let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
            if let How::Epoll(flags) = how {
                let event = EpollEvent::new(EpollFlags::EPOLLIN | flags, 0);
                epoll.add(&listener, event).unwrap();
            }
            let (listener, accepted, heard) = (listener.clone(), accepted.clone(), heard.clone());
            let life = move || {
                let took = how.wait(&listener, &epoll);
                if took { accepted } else { heard }.fetch_add(1, Ordering::SeqCst);
            };
            let builder = std::thread::Builder::new().name(WAITER.into());
            threads.push(builder.spawn(life).unwrap());
        }
        let this = Self {
            listener,
            accepted,
            heard,
            threads,
        };
        let count = this.threads.len();
        let mut quiet = 0;
        until("rest", || {
            quiet = if asleep() == count { quiet + 1 } else { 0 };
            quiet > 10
        });
        this
    }

    /// Those that have been woken.
    fn woken(&self) -> usize {
        self.accepted.load(Ordering::SeqCst) + self.heard.load(Ordering::SeqCst)
    }

    fn end(self) {
        let _ = socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

fn asleep() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let statuses = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("status")).ok());
    statuses
        .filter(|s| s.starts_with(&format!("Name:\t{WAITER}\n")) && s.contains("State:\tS"))
        .count()
}

/// One connection. Returns how many threads it woke, how many of them accepted it, and how many returned from a wait without.
/// A thread that finds nothing goes back to sleep in the kernel.
fn tap(policy: Policy, ways: &[(How, usize)]) -> (usize, usize, usize) {
    let _set = Switch::AcceptWake(policy).set().unwrap();
    let waiters = Waiters::gather(ways);
    let trace = Trace::start(WAITER).unwrap();
    let _connection = TcpStream::connect(waiters.listener.local_addr().unwrap()).unwrap();
    until("a wake-up", || waiters.woken() > 0);
    std::thread::sleep(QUIET);
    let events = trace.events().unwrap();
    let found = (
        woken_by_others(&events).len(),
        waiters.accepted.load(Ordering::SeqCst),
        waiters.heard.load(Ordering::SeqCst),
    );
    drop(trace);
    waiters.end();
    found
}

#[test]
fn among_acceptors_a_connection_wakes_one_or_all() {
    let _alone = alone();
    for count in [100, 400] {
        for policy in [Policy::TaskExclusive, Policy::WakeOne, Policy::AlwaysWake] {
            let found = tap(policy, &[(How::Accept, count)]);
            assert_eq!(found, (1, 1, 0), "{policy:?}, {count} acceptors");
        }
        let (woken, accepted, _) = tap(Policy::WakeAll, &[(How::Accept, count)]);
        assert_eq!((woken, accepted), (count, 1), "wake all, {count} acceptors");
    }
}

#[test]
fn who_selects_is_always_woken_except_under_wake_one() {
    let _alone = alone();
    let epoll = How::Epoll(EpollFlags::empty());
    let ways = [(How::Accept, 100), (How::Poll, 4), (epoll, 3)];
    for policy in [Policy::TaskExclusive, Policy::AlwaysWake] {
        let (woken, accepted, heard) = tap(policy, &ways);
        assert_eq!((woken, accepted), (8, 1), "{policy:?}");
        assert!(heard <= 7, "{policy:?}: {heard}");
    }
    // The paper's own objection: the only wake-up is that of a thread that accepts nothing.
    assert_eq!(tap(Policy::WakeOne, &ways), (1, 0, 1), "wake one");
    let (woken, accepted, _) = tap(Policy::WakeAll, &ways);
    assert_eq!((woken, accepted), (107, 1), "wake all");
}

#[test]
fn wake_one_passes_over_an_epoll_set_in_which_nobody_waits() {
    let _alone = alone();
    let _set = Switch::AcceptWake(Policy::WakeOne).set().unwrap();
    let waiters = Waiters::gather(&[(How::Accept, 3)]);
    let idle = Epoll::new(EpollCreateFlags::empty()).unwrap();
    let event = EpollEvent::new(EpollFlags::EPOLLIN, 0);
    idle.add(&waiters.listener, event).unwrap();
    let _connection = TcpStream::connect(waiters.listener.local_addr().unwrap()).unwrap();
    until("an acceptor", || {
        waiters.accepted.load(Ordering::SeqCst) == 1
    });
    waiters.end();
}

/// Connections one after another by some clients, each answered by who accepts it. A lost wake-up is no answer.
fn all_are_answered(policy: Policy, connections: usize) {
    const CLIENTS: usize = 4;
    let _set = Switch::AcceptWake(policy).set().unwrap();
    let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    if let Ok((mut stream, _)) = listener.accept() {
                        let _ = stream.write_all(b"!");
                    }
                }
            });
        }
        let ask = move |client: usize| {
            for n in 0..connections / CLIENTS {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut answer = [0];
                let read = stream.read_exact(&mut answer);
                assert!(read.is_ok(), "client {client}, connection {n}: {read:?}");
                // With RST, so that no port is used up by TIME_WAIT.
                let linger = nix::libc::linger {
                    l_onoff: 1,
                    l_linger: 0,
                };
                socket::setsockopt(&stream, sockopt::Linger, &linger).unwrap();
            }
        };
        let clients: Vec<_> = (0..CLIENTS).map(|n| scope.spawn(move || ask(n))).collect();
        let answered = clients.into_iter().all(|client| client.join().is_ok());
        over.store(true, Ordering::Release);
        let _ = socket::shutdown(listener.as_raw_fd(), socket::Shutdown::Both);
        assert!(answered, "{policy:?}: a connection was not answered");
    });
}

#[test]
fn no_wake_up_is_lost_in_a_hundred_thousand_connections() {
    let _alone = alone();
    all_are_answered(Policy::WakeOne, 40_000);
    all_are_answered(Policy::AlwaysWake, 40_000);
    all_are_answered(Policy::TaskExclusive, 10_000);
    all_are_answered(Policy::WakeAll, 10_000);
}

/// The connections of each of 16 workers, of 48 that come one after another. `shared`: all wait in one epoll set.
fn shares(shared: bool, rotate: bool) -> Vec<u64> {
    let _set = rotate.then(|| Switch::EpollRotate.set().unwrap());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let set = || {
        let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
        let how = if shared {
            EpollFlags::EPOLLET
        } else {
            EpollFlags::EPOLLEXCLUSIVE
        };
        let event = EpollEvent::new(EpollFlags::EPOLLIN | how, 0);
        epoll.add(&listener, event).unwrap();
        epoll
    };
    let sets: Vec<Epoll> = (0..if shared { 1 } else { 16 }).map(|_| set()).collect();
    let counts: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(0)).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (n, count) in counts.iter().enumerate() {
            let (epoll, listener, over) = (&sets[n % sets.len()], &listener, &over);
            let life = move || {
                while !over.load(Ordering::Acquire) {
                    let _ = epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::from(2000u16));
                    if listener.accept().is_ok() {
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                }
            };
            let builder = std::thread::Builder::new().name(WAITER.into());
            builder.spawn_scoped(scope, life).unwrap();
        }
        let all = || counts.iter().map(|c| c.load(Ordering::SeqCst)).sum::<u64>();
        for n in 1..=48 {
            until("rest", || asleep() == 16);
            let _connection = TcpStream::connect(address).unwrap();
            until("an accept", || all() == n);
        }
        over.store(true, Ordering::Release);
    });
    counts.into_iter().map(AtomicU64::into_inner).collect()
}

#[test]
fn exclusive_waiters_take_turns() {
    let _alone = alone();
    for shared in [false, true] {
        let turns = shares(shared, true);
        assert!(turns.iter().all(|n| *n <= 4), "shared {shared}: {turns:?}");
        let stock = shares(shared, false);
        assert!(
            stock.iter().any(|n| *n > 24),
            "shared {shared}, without the switch: {stock:?}"
        );
    }
}

fn udp_socket() -> OwnedFd {
    let flags = SockFlag::SOCK_CLOEXEC;
    socket::socket(AddressFamily::Inet, SockType::Datagram, flags, None).unwrap()
}

/// A bound socket with this many queues, and flags.
fn queues(queues: i32) -> UdpSocket {
    let one = udp_socket();
    set_udp_queues(&one, queues).unwrap();
    let _ = socket::setsockopt(&one, sockopt::RcvBufForce, &(4 << 20));
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket::bind(one.as_raw_fd(), &SockaddrStorage::from(any)).unwrap();
    one.into()
}

#[test]
fn the_option_is_set_once_and_before_the_port() {
    let error = |socket: &OwnedFd, value| set_udp_queues(socket, value).unwrap_err().raw_os_error();
    let one = udp_socket();
    for wrong in [-1, 2000, 4 | 0x4_0000] {
        assert_eq!(error(&one, wrong), Some(nix::libc::EINVAL), "{wrong:#x}");
    }
    set_udp_queues(&one, 0).unwrap();
    assert_eq!(error(&one, 4), Some(nix::libc::EBUSY));
    let bound = OwnedFd::from(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    assert_eq!(error(&bound, 4), Some(nix::libc::EBUSY));
}

/// Many flows into one socket, many readers; which reader got which `(flow, number)`.
fn read_by_many(to: &UdpSocket, flows: u64, each: u64, readers: usize) -> Vec<Vec<(u64, u64)>> {
    let address = to.local_addr().unwrap();
    to.set_read_timeout(Some(QUIET)).unwrap();
    let read = AtomicU64::new(0);
    let read_one = || {
        let mut got = Vec::new();
        let mut datagram = [0_u8; 16];
        while read.load(Ordering::Relaxed) < flows * each {
            if to.recv(&mut datagram).is_ok() {
                let (flow, number) = datagram.split_at(8);
                let value = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
                got.push((value(flow), value(number)));
                read.fetch_add(1, Ordering::Relaxed);
            }
        }
        got
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..readers).map(|_| scope.spawn(read_one)).collect();
        let senders: Vec<UdpSocket> = (0..flows)
            .map(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap())
            .collect();
        let deadline = Instant::now() + 5 * PATIENCE;
        for number in 0..each {
            for (flow, sender) in senders.iter().enumerate() {
                let datagram = [(flow as u64).to_le_bytes(), number.to_le_bytes()].concat();
                sender.send_to(&datagram, address).unwrap();
            }
            // As fast as it is read: nothing is dropped for a full buffer.
            while number * flows > read.load(Ordering::Relaxed) + 1000 {
                assert!(Instant::now() < deadline, "datagrams are not read");
                std::thread::yield_now();
            }
        }
        readers.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// The bytes that the kernel holds for a UDP socket, and its drops: columns of /proc/net/udp.
fn held(socket: &UdpSocket) -> (u64, u64) {
    let port = format!(":{:04X}", socket.local_addr().unwrap().port());
    let table = std::fs::read_to_string("/proc/net/udp").unwrap();
    let line = table.lines().find(|l| {
        l.split_whitespace()
            .nth(1)
            .is_some_and(|local| local.ends_with(&port))
    });
    let columns: Vec<&str> = line.unwrap().split_whitespace().collect();
    let (_, rx) = columns[4].split_once(':').unwrap();
    (
        u64::from_str_radix(rx, 16).unwrap(),
        columns.last().unwrap().parse().unwrap(),
    )
}

/// Pages that all UDP sockets hold together.
fn udp_pages() -> u64 {
    let all = std::fs::read_to_string("/proc/net/sockstat").unwrap();
    let udp = all.lines().find(|l| l.starts_with("UDP: ")).unwrap();
    udp.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn no_datagram_is_lost_or_read_twice_and_all_memory_comes_back() {
    let _alone = alone();
    let before = udp_pages();
    for how in [4, 4 | UDP_QUEUES_IN_TURN, 0, 16] {
        let socket = queues(how);
        let got = read_by_many(&socket, 16, 10_000, 8);
        let mut all: Vec<_> = got.into_iter().flatten().collect();
        all.sort_unstable();
        let sent: Vec<_> = (0..16)
            .flat_map(|f| (0..10_000).map(move |n| (f, n)))
            .collect();
        assert!(
            all == sent,
            "{how:#x}: {} of {} were read",
            all.len(),
            sent.len()
        );
        assert_eq!(held(&socket), (0, 0), "{how:#x}");
    }
    // Of 120,000 pages that came and went; each CPU counts up to 256 pages for itself, more or fewer
    // (SK_MEMORY_PCPU_RESERVE), so what is seen may differ by twice that.
    let cpus = std::thread::available_parallelism().unwrap().get() as u64;
    let kept = udp_pages().saturating_sub(before);
    assert!(kept <= 2 * 256 * cpus, "{kept} pages of closed sockets");
}

#[test]
fn a_flow_keeps_its_order() {
    let _alone = alone();
    let socket = queues(8);
    // A reader that is late may tell of an earlier datagram after another told of a later one. For each alone, order holds.
    for (reader, got) in read_by_many(&socket, 16, 5_000, 4).into_iter().enumerate() {
        let mut last = BTreeMap::new();
        for (flow, number) in got {
            let before = last.insert(flow, number);
            assert!(
                before < Some(number),
                "reader {reader}, flow {flow}: {number} after {before:?}"
            );
        }
    }
}

#[test]
fn nothing_waits_for_ever_behind_a_reader_that_is_busy() {
    let _alone = alone();
    let socket = queues(8);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let address = socket.local_addr().unwrap();
    let senders: Vec<UdpSocket> = (0..64)
        .map(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap())
        .collect();
    // One datagram of each of many flows lies in the queues; then this reader's own queue is never empty.
    for (flow, sender) in senders.iter().enumerate() {
        sender.send_to(&[flow as u8], address).unwrap();
    }
    let mut missing: std::collections::BTreeSet<u8> = (0..64).collect();
    let mut datagram = [0];
    for reads in 0.. {
        assert!(reads < 64 * 8 * 64, "still waiting: {missing:?}");
        for sender in &senders {
            sender.send_to(&[255], address).unwrap();
        }
        for _ in &senders {
            socket.recv(&mut datagram).unwrap();
            missing.remove(&datagram[0]);
        }
        if missing.is_empty() {
            break;
        }
    }
}

#[test]
fn poll_tells_of_a_datagram_in_any_queue_and_of_none() {
    let _alone = alone();
    let socket = queues(8);
    socket.set_nonblocking(true).unwrap();
    let readable = || {
        let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    };
    assert!(!readable());
    for _ in 0..32 {
        let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        sender
            .send_to(b"one", socket.local_addr().unwrap())
            .unwrap();
        assert!(readable());
        let mut datagram = [0; 3];
        assert_eq!(socket.peek(&mut datagram).unwrap(), 3);
        assert!(readable(), "a datagram that was peeked at is still there");
        assert_eq!(socket.recv(&mut datagram).unwrap(), 3);
        assert!(!readable());
        let error = socket.recv(&mut datagram).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }
}

#[test]
fn what_does_not_fit_is_dropped_and_counted() {
    let _alone = alone();
    let socket = queues(4);
    socket::setsockopt(&socket, sockopt::RcvBuf, &4096).unwrap();
    let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    for _ in 0..1000 {
        sender
            .send_to(&[0; 100], socket.local_addr().unwrap())
            .unwrap();
    }
    let (bytes, drops) = held(&socket);
    assert!(
        bytes < 2 * 8192 && drops > 900,
        "{bytes} bytes, {drops} drops"
    );
    socket.set_nonblocking(true).unwrap();
    let read = std::iter::from_fn(|| socket.recv(&mut [0; 100]).ok()).count();
    assert_eq!(read as u64 + drops, 1000);
    assert_eq!(held(&socket).0, 0);
}

#[test]
fn a_reader_is_woken_whatever_queue_it_is() {
    let _alone = alone();
    let socket = queues(8);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| (0..2_000).all(|_| socket.recv(&mut [0; 1]).is_ok()));
        for _ in 0..2_000 {
            let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            sender.send_to(b"!", address).unwrap();
            std::thread::yield_now();
        }
        assert!(read.join().unwrap());
    });
}

/// An address whose port nobody has. A listener that was bound to port 0 loses its port when it is shut down.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap()
}

/// A listener of a reuseport group on this address.
fn member(address: SocketAddr) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let one = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    socket::setsockopt(&one, sockopt::ReusePort, &true)?;
    socket::setsockopt(&one, sockopt::ReuseAddr, &true)?;
    socket::bind(one.as_raw_fd(), &SockaddrStorage::from(address))?;
    listen(&one)?;
    Ok(one)
}

fn listen(one: &OwnedFd) -> nix::Result<()> {
    socket::listen(one, socket::Backlog::new(100)?)
}

fn close(one: &OwnedFd) {
    socket::shutdown(one.as_raw_fd(), socket::Shutdown::Both).unwrap();
}

#[test]
fn a_listener_that_comes_back_listens_and_a_stranger_is_refused() {
    let _alone = alone();
    let _set = [Switch::Migrate, Switch::Reopen].map(|s| s.set().unwrap());
    let address = free_address();
    let one = member(address).unwrap();
    let two = member(address).unwrap();
    for _ in 0..100 {
        let mut clients: Vec<TcpStream> = (0..8)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        close(&one);
        let stranger = TcpListener::bind(address).unwrap_err();
        assert_eq!(stranger.raw_os_error(), Some(nix::libc::EADDRINUSE));
        listen(&one).unwrap();
        close(&two);
        listen(&two).unwrap();
        // All were moved to the first by now.
        let listener = TcpListener::from(one.try_clone().unwrap());
        let patience = TimeVal::seconds(PATIENCE.as_secs() as i64);
        socket::setsockopt(&listener, sockopt::ReceiveTimeout, &patience).unwrap();
        for client in &mut clients {
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            listener.accept().unwrap().0.write_all(b"!").unwrap();
        }
        for client in &mut clients {
            client.read_exact(&mut [0]).unwrap();
        }
    }
}

#[test]
fn a_listener_that_comes_back_to_nobody_is_checked() {
    let _alone = alone();
    let _set = [Switch::Migrate, Switch::Reopen].map(|s| s.set().unwrap());
    let address = free_address();
    let one = member(address).unwrap();
    close(&one);
    // SO_REUSEADDR lets a stranger take the address while nobody listens there.
    let _stranger = TcpListener::bind(address).unwrap();
    assert_eq!(listen(&one), Err(nix::Error::EADDRINUSE));
}

#[test]
fn a_listener_that_left_the_group_by_its_options_is_checked() {
    let _alone = alone();
    let _set = [Switch::Migrate, Switch::Reopen].map(|s| s.set().unwrap());
    let address = free_address();
    let (one, _two) = (member(address).unwrap(), member(address).unwrap());
    close(&one);
    socket::setsockopt(&one, sockopt::ReusePort, &false).unwrap();
    assert_eq!(listen(&one), Err(nix::Error::EADDRINUSE));
}

#[test]
fn a_reader_that_sleeps_hears_of_errors_and_of_the_end() {
    let _alone = alone();
    let socket = queues(8);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    // Nobody has this port, so the peer answers that by ICMP.
    socket.connect(free_address()).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| socket.recv(&mut [0; 1]));
        std::thread::sleep(QUIET);
        socket.send(b"!").unwrap();
        let error = reader.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
        let reader = scope.spawn(|| socket.recv(&mut [0; 1]));
        std::thread::sleep(QUIET);
        socket::shutdown(socket.as_raw_fd(), socket::Shutdown::Read).unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), 0);
    });
}
