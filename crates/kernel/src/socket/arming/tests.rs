use super::*;
use rustix::event::epoll;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

const DATA: u64 = 0x1234_5678_9abc_def0;

/// A listener that waits in a set, and the guardian in charge of the entry.
struct Ground {
    set: OwnedFd,
    listener: TcpListener,
    guardian: Guardian,
    file: File,
}

impl Ground {
    fn new(flags: epoll::EventFlags) -> Self {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let data = epoll::EventData::new_u64(DATA);
        epoll::add(&set, &listener, data, flags).expect("add");
        let file = tempfile::tempfile().expect("file");
        let mut guardian = Guardian::start(&file).expect("guardian");
        let (entry, held) = entry(&set, &listener);
        guardian.enlist(3, &entry, held).expect("enlisted");
        Self {
            set,
            listener,
            guardian,
            file,
        }
    }

    fn change(&mut self, change: Change) -> io::Result<()> {
        let now = crate::schedule::monotonic_ns();
        self.guardian.promise(now + 60_000_000_000);
        self.guardian
            .change(&[(3, change)])
            .expect("asked")
            .remove(0)
    }

    fn events(&self) -> u32 {
        entry(&self.set, &self.listener).0.events
    }

    /// The data of what is ready, for which it waits a little.
    fn ready(&self) -> Vec<u64> {
        let mut events = Vec::with_capacity(4);
        let wait = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 30_000_000,
        };
        let room = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&self.set, room, Some(&wait)).expect("wait");
        events.iter().map(|event| event.data.u64()).collect()
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.listener.local_addr().expect("address")).expect("connects")
    }
}

fn entry(set: &OwnedFd, listener: &TcpListener) -> (Entry, i32) {
    let inode = rustix::fs::fstat(listener).expect("stat").st_ino;
    let all = waiters_of(std::process::id(), inode).expect("own sets");
    let found = all.iter().find(|one| one.entry.epoll == set.as_raw_fd());
    found.map_or_else(
        || panic!("no entry among {all:?}"),
        |one| (one.entry, one.held),
    )
}

fn kinds() -> [epoll::EventFlags; 4] {
    let (readable, edge) = (epoll::EventFlags::IN, epoll::EventFlags::ET);
    let exclusive = readable | epoll::EventFlags::EXCLUSIVE;
    [readable, readable | edge, exclusive, exclusive | edge]
}

fn eventually(what: &str, done: impl Fn() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_disarmed_worker_is_not_woken_and_misses_nothing() {
    for kind in kinds() {
        let mut ground = Ground::new(kind);
        let before = entry(&ground.set, &ground.listener);
        ground.change(Change::Disarm).expect("disarmed");
        let _client = ground.connect();
        assert_eq!(ground.ready(), [], "{kind:?}");
        ground.change(Change::Arm).expect("armed");
        assert_eq!(ground.ready(), [DATA], "{kind:?}");
        assert_eq!(entry(&ground.set, &ground.listener), before, "{kind:?}");
    }
}

#[test]
fn an_entry_that_goes_to_the_end_is_as_before() {
    for kind in kinds() {
        let mut ground = Ground::new(kind);
        let before = entry(&ground.set, &ground.listener);
        let moved = ground.change(Change::ToEnd);
        assert_eq!(moved.is_ok(), kind.contains(epoll::EventFlags::EXCLUSIVE));
        assert_eq!(entry(&ground.set, &ground.listener), before, "{kind:?}");
        let _client = ground.connect();
        assert_eq!(ground.ready(), [DATA], "{kind:?}");
    }
}

#[test]
fn what_the_server_took_out_stays_out() {
    for kind in kinds() {
        let mut ground = Ground::new(kind);
        ground.change(Change::Disarm).expect("disarmed");
        epoll::delete(&ground.set, &ground.listener).expect("delete");
        let error = ground.change(Change::Arm).expect_err("it is gone");
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{kind:?}");
        assert_eq!(ground.guardian.records().condition(3), Condition::Gone);
        let _client = ground.connect();
        assert_eq!(ground.ready(), [], "{kind:?}");
    }
}

#[test]
fn every_entry_is_as_the_server_made_it_after_the_guardian() {
    for kind in kinds() {
        let mut ground = Ground::new(kind);
        let made = ground.events();
        ground.change(Change::Disarm).expect("disarmed");
        assert_ne!(ground.events(), made);
        drop(ground.guardian);
        assert_eq!(
            entry(&ground.set, &ground.listener).0.events,
            made,
            "{kind:?}"
        );
    }
}

#[test]
fn a_promise_that_is_not_kept_releases_all() {
    for kind in kinds() {
        let mut ground = Ground::new(kind);
        let made = ground.events();
        ground.change(Change::Disarm).expect("disarmed");
        ground.guardian.promise(1);
        // A change wakes the guardian up; another steerer would only have stopped.
        let _ = ground.guardian.dismiss(200);
        eventually("released", || ground.guardian.releases() > 0);
        assert_eq!(ground.events(), made, "{kind:?}");
        assert!(!ground.guardian.records().is_changed());
    }
}

/// As by somebody else: its end is not waited for.
fn kill_guardian(guardian: &Guardian) {
    let pid = guardian.pid().expect("guardian");
    kill(pid, Signal::SIGKILL).expect("killed");
    eventually("ended", || {
        Stat::of(pid.as_raw().unsigned_abs()).map_or(true, |stat| stat.state == 'Z')
    });
}

#[test]
fn what_a_guardian_is_lent_it_keeps_while_the_entry_is_changed_and_no_longer() {
    for kind in kinds() {
        let mut ground = Ground::new(kind);
        let kept = |ground: &Ground| {
            let pid = ground.guardian.pid().expect("guardian");
            let folder = std::fs::read_dir(format!("/proc/{pid}/fd"));
            folder.expect("descriptors").count()
        };
        let before = kept(&ground);
        ground.guardian.lent.insert(3);
        for is_killed in [false, true] {
            ground.change(Change::Disarm).expect("disarmed");
            assert_eq!(kept(&ground), before + 2, "{kind:?}");
            if is_killed {
                kill_guardian(&ground.guardian);
            }
            ground.change(Change::Arm).expect("armed");
            assert_eq!(kept(&ground), before, "{kind:?}");
        }
        let _client = ground.connect();
        assert_eq!(ground.ready(), [DATA], "{kind:?}");
    }
}

#[test]
fn a_guardian_that_was_killed_is_replaced_by_one_that_knows_all() {
    let mut ground = Ground::new(epoll::EventFlags::IN);
    let made = ground.events();
    ground.change(Change::Disarm).expect("disarmed");
    kill_guardian(&ground.guardian);
    ground.change(Change::Arm).expect("armed by another one");
    assert_eq!(ground.events(), made);
}

#[test]
fn whoever_comes_after_both_repairs_by_their_records() {
    for kind in kinds() {
        let mut ground = Ground::new(kind);
        let made = ground.events();
        ground.change(Change::Disarm).expect("disarmed");
        kill_and_forget(&mut ground.guardian);
        repair(&ground.file).expect("repaired");
        assert_eq!(ground.events(), made, "{kind:?}");
        // Killed in the middle of a change, between the two steps.
        epoll::delete(&ground.set, &ground.listener).expect("delete");
        ground.guardian.records().set(3, Condition::Out);
        repair(&ground.file).expect("repaired");
        assert_eq!(ground.events(), made, "{kind:?}");
        repair(&ground.file).expect("nothing is left to do");
    }
}

fn kill_and_forget(guardian: &mut Guardian) {
    if let Some(helper) = guardian.helper.take() {
        kill(helper.pid, Signal::SIGKILL).expect("killed");
        reader::wait_for_end(helper.pid);
    }
}

#[test]
fn a_set_is_told_from_another() {
    let set = || epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
    let (one, other) = (set(), set());
    let again = one.try_clone().expect("descriptor");
    assert!(is_same_set(one.as_fd(), again.as_fd()).expect("two sets"));
    assert!(!is_same_set(one.as_fd(), other.as_fd()).expect("two sets"));
    assert!(is_same_set(one.as_fd(), one.as_fd()).expect("two sets"));
}

#[test]
fn a_number_that_the_guardian_uses_itself_is_left_to_the_listener() {
    let mut ground = Ground::new(epoll::EventFlags::IN);
    let (entry, held) = entry(&ground.set, &ground.listener);
    // Its descriptors are numbered from 0 on, and there are more than this process has.
    for place in 10..250 {
        ground
            .guardian
            .enlist(place, &entry, held)
            .expect("enlisted");
    }
    ground.change(Change::Disarm).expect("disarmed");
    let others: Vec<_> = (10..250).map(|place| (place, Change::Arm)).collect();
    for done in ground.guardian.change(&others).expect("asked") {
        done.expect("armed");
    }
    assert_eq!(ground.events(), entry.events);
}

#[test]
fn who_waits_in_a_set_is_seen() {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
    let number = set.as_raw_fd();
    let own = std::process::id();
    assert!(!waits_in(own, number).expect("own threads"));
    let thread = std::thread::spawn(move || {
        let mut events = Vec::with_capacity(1);
        let long = rustix::time::Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let room = rustix::buffer::spare_capacity(&mut events);
        let _ = epoll::wait(&set, room, Some(&long));
    });
    eventually("it waits", || waits_in(own, number).expect("own threads"));
    thread.join().expect("thread");
}
