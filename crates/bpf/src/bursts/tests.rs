//! This process is the worker that accepts. The other one waits in an epoll set, in a thread, and has a number that no
//! process has.

use super::*;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll;
use wakeone_kernel::schedule::monotonic_ns;
use wakeone_kernel::socket::{self, accept_queue};

/// The places of the two.
const OWN: usize = 3;
const OTHER: usize = 60;
const NOBODY: u32 = u32::MAX;

/// Connections that wait in a queue.
const QUEUED: usize = 4;

struct Scene {
    bursts: Bursts,
    listener: TcpListener,
    at: SocketAddr,
    /// The other one's set, where it waits for this event.
    set: Arc<OwnedFd>,
    call: OwnedFd,
    waits: Option<std::thread::JoinHandle<()>>,
    clients: Vec<TcpStream>,
}

impl Scene {
    /// Own: so many connections, and the other one none. `None`: this kernel has no trampolines.
    fn new(own: u64, again: bool) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: loading needs root");
            return None;
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
        listener.set_nonblocking(true).expect("does not block");
        let at = listener.local_addr().expect("an address");
        let cookie = socket::cookie(&listener).expect("a cookie");
        let bursts = match Bursts::attach(cookie, at.port()) {
            Ok(bursts) => bursts,
            Err(error) => {
                eprintln!("skipped: this kernel has no trampolines: {error}");
                return None;
            }
        };
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
        let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("event");
        let data = epoll::EventData::new_u64(0);
        epoll::add(&set, &call, data, epoll::EventFlags::IN).expect("added");
        let own_set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
        let pid = std::process::id();
        bursts
            .enlist(OWN, pid, own_set.as_fd(), again)
            .expect("enlisted");
        bursts
            .enlist(OTHER, NOBODY, set.as_fd(), true)
            .expect("enlisted");
        for (place, connections) in [(OWN, own), (OTHER, 0)] {
            bursts.tell(place, connections, (0, 0));
            bursts.set_weight(place, 1);
        }
        bursts.renew(monotonic_ns() + 60_000_000_000);
        Some(Self {
            bursts,
            listener,
            at,
            set: Arc::new(set),
            call,
            waits: None,
            clients: Vec::new(),
        })
    }

    /// The other one waits from now on, until it is woken.
    fn wait(&mut self) {
        let set = Arc::clone(&self.set);
        let thread = std::thread::spawn(move || {
            let mut events = Vec::with_capacity(1);
            let _ = epoll::wait(&*set, rustix::buffer::spare_capacity(&mut events), None);
        });
        self.waits = Some(thread);
        std::thread::sleep(Duration::from_millis(100));
    }

    /// A busy machine is slower than one that is waited for.
    fn wait_long(&self) {
        let shared = self.bursts.shared.as_ptr();
        word!(AtomicU64, (*shared).limit_ns).store(60_000_000_000, Relaxed);
    }

    fn wake(&mut self) {
        rustix::io::write(&self.call, &1_u64.to_ne_bytes()).expect("woken");
        if let Some(thread) = self.waits.take() {
            thread.join().expect("waits");
        }
    }

    /// Returns when all wait: a busy machine queues a connection after its client has it.
    fn connect(&mut self) {
        let queued = || accept_queue(&self.listener).expect("a queue").length as usize;
        let all = queued() + QUEUED;
        let clients = (0..QUEUED).map(|_| TcpStream::connect(self.at).expect("connects"));
        self.clients.extend(clients);
        while queued() < all {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_refused(&self) -> bool {
        match self.listener.accept() {
            Ok(accepted) => {
                // It stays open.
                std::mem::forget(accepted);
                false
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                true
            }
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.wake();
    }
}

#[test]
fn who_has_its_share_is_refused_for_one_that_waits_and_not_for_long() {
    let Some(mut scene) = Scene::new(5, true) else {
        return;
    };
    scene.wait();
    scene.connect();
    assert!(!scene.bursts.take_notice());
    let begun = Instant::now();
    assert!(scene.is_refused());
    assert!(scene.bursts.take_notice() && !scene.bursts.take_notice());
    assert_eq!(scene.bursts.refusals(OWN), 1);
    while scene.is_refused() {
        assert!(begun.elapsed() < Duration::from_secs(10), "for ever");
    }
    assert!(begun.elapsed() >= LIMIT, "{:?}", begun.elapsed());
    assert!(!scene.bursts.take_notice(), "one for each burst");
    // The other one did not come, and is not waited for again.
    let before = scene.bursts.refusals(OWN);
    assert!((1..QUEUED).all(|_| !scene.is_refused()));
    scene.connect();
    assert!(!scene.is_refused());
    assert_eq!(scene.bursts.refusals(OWN), before);
}

#[test]
fn all_that_wait_are_divided_and_each_takes_its_share_at_once() {
    let Some(mut scene) = Scene::new(1, true) else {
        return;
    };
    scene.wait();
    scene.connect();
    // Of 5 in all, this one has 1: 3 are above 5 / 2.
    assert!(!scene.is_refused() && !scene.is_refused());
    assert!(scene.is_refused());
    assert_eq!(scene.bursts.taken(OWN), (2, 0));
    // Of three times the weight it may have 15 / 4.
    scene.bursts.set_weight(OWN, 3);
    assert!(!scene.is_refused());
    assert!(scene.is_refused());
    scene.bursts.set_weight(OTHER, 0);
    assert!(!scene.is_refused(), "the other one drains");
    assert!(scene.is_refused(), "nothing waits");
    assert_eq!(scene.bursts.taken(OWN), (4, 0));
}

#[test]
fn nobody_is_refused_for_one_that_does_something_else() {
    let Some(mut scene) = Scene::new(5, true) else {
        return;
    };
    scene.wait();
    scene.wake();
    scene.connect();
    assert!((0..QUEUED).all(|_| !scene.is_refused()));
}

#[test]
fn one_that_was_woken_just_now_is_still_waited_for() {
    let Some(mut scene) = Scene::new(5, true) else {
        return;
    };
    scene.wait();
    scene.wait_long();
    scene.connect();
    scene.wake();
    assert!(scene.is_refused());
}

#[test]
fn who_would_not_be_woken_again_is_not_refused() {
    let Some(mut scene) = Scene::new(5, false) else {
        return;
    };
    scene.wait();
    scene.connect();
    assert!(!scene.is_refused(), "edge-triggered");
    drop(scene);
    let Some(mut scene) = Scene::new(5, true) else {
        return;
    };
    scene.wait();
    scene.connect();
    scene.listener.set_nonblocking(false).expect("blocks");
    assert!(!scene.is_refused(), "it would wait for the next connection");
}

#[test]
fn nobody_is_refused_by_a_steerer_that_is_late() {
    let Some(mut scene) = Scene::new(5, true) else {
        return;
    };
    scene.wait();
    scene.connect();
    scene.bursts.renew(monotonic_ns());
    assert!(!scene.is_refused());
}

#[test]
fn what_a_worker_closes_is_no_load_any_more() {
    let Some(mut scene) = Scene::new(0, true) else {
        return;
    };
    scene.wait();
    scene.connect();
    for closed in 1..=QUEUED as u64 {
        drop(scene.listener.accept().expect("accepted"));
        assert_eq!(scene.bursts.taken(OWN), (closed, closed));
    }
    // A count from before some were taken is not told.
    scene.bursts.tell(OWN, 9, (0, 0));
    scene.connect();
    assert!(!scene.is_refused());
}
