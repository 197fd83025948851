use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::proc::process;

#[test]
fn files_are_read_as_they_are() {
    let own = std::process::id();
    let direct = std::fs::read(format!("/proc/{own}/limits")).expect("limits");
    assert_eq!(file(own, "limits").expect("limits"), direct);
    let mut count = 0;
    lines(own, "limits", |line| {
        assert!(!line.contains(&b'\n'));
        count += 1;
    })
    .expect("limits");
    assert_eq!(count, direct.iter().filter(|byte| **byte == b'\n').count());
    let kind = |error: io::Error| error.kind();
    assert_eq!(
        file(own, "nothing").map_err(kind),
        Err(io::ErrorKind::NotFound)
    );
    assert_eq!(
        numbers(u32::MAX, "task").map_err(kind),
        Err(io::ErrorKind::NotFound)
    );
    assert_eq!(
        file(own, &"x".repeat(200)).map_err(kind),
        Err(io::ErrorKind::InvalidInput)
    );
}

/// Long enough for several packets.
#[test]
fn a_long_file_is_read_whole() {
    let own = std::process::id();
    let set =
        rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("epoll");
    let mut watched = Vec::new();
    for number in 0..900 {
        let one = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("eventfd");
        let data = rustix::event::epoll::EventData::new_u64(number);
        let flags = rustix::event::epoll::EventFlags::IN;
        rustix::event::epoll::add(&set, &one, data, flags).expect("add");
        watched.push(one);
    }
    let place = format!("fdinfo/{}", set.as_raw_fd());
    let whole = file(own, &place).expect("fdinfo");
    assert!(whole.len() > 2 * MOST_BYTES, "{}", whole.len());
    let mut found = 0;
    lines(own, &place, |line| {
        found += u32::from(line.starts_with(b"tfd:"))
    })
    .expect("fdinfo");
    assert_eq!(found, 900);
}

#[test]
fn folders_are_read_with_a_file_or_link_of_each_entry() {
    let own = std::process::id();
    let tid = rustix::thread::gettid().as_raw_pid() as u32;
    assert!(numbers(own, "task").expect("threads").contains(&tid));
    let names = file_of_each(own, "task", "comm").expect("threads");
    let (_, name) = names
        .into_iter()
        .find(|one| one.0 == tid)
        .expect("this one");
    let direct = std::fs::read("/proc/thread-self/comm").expect("comm");
    assert_eq!(name.expect("comm"), direct);
    let missing = file_of_each(own, "task", "nothing").expect("threads");
    assert!(missing.iter().all(|(_, read)| read.is_err()) && !missing.is_empty());
    let opened = std::fs::File::open("/proc/self/limits").expect("file");
    let all = links(own, "fd").expect("descriptors");
    let number = opened.as_raw_fd() as u32;
    let (_, target) = all.iter().find(|one| one.0 == number).expect("that file");
    assert!(target.ends_with(b"/limits"));
    let namespace = link(own, "ns/net").expect("namespace");
    assert!(namespace.starts_with(b"net:["));
}

#[test]
fn memory_is_read_whole_or_not_at_all() {
    let own = std::process::id();
    let text = b"what is here".to_vec();
    let at = text.as_ptr() as u64;
    for _ in 0..3 {
        assert_eq!(memory(own, at, text.len()).as_deref(), Some(&text[..]));
        assert_eq!(memory(own, 8, 16), None, "nothing is mapped there");
    }
    assert_eq!(memory(u32::MAX, at, 1), None);
    assert_eq!(memory(own, at, MOST_BYTES + 1), None);
}

#[test]
fn a_descriptor_of_another_process_is_shared() {
    let mut cat = Command::new("cat")
        .stdin(Stdio::piped())
        .spawn()
        .expect("cat");
    let theirs = process::descriptor_of(cat.id(), 0);
    if reads_itself() && theirs.is_err() {
        cat.kill().expect("kill");
        cat.wait().expect("wait");
        return eprintln!("skipped: without CAP_SYS_PTRACE it may be refused");
    }
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("stat").st_ino;
    let ours = OwnedFd::from(cat.stdin.take().expect("pipe"));
    assert_eq!(inode(&theirs.expect("its end")), inode(&ours));
    assert!(
        process::descriptor_of(cat.id(), 999).is_err()
            && process::descriptor_of(u32::MAX, 0).is_err()
    );
    drop(ours);
    cat.wait().expect("its end: nobody else has the pipe");
}

#[test]
fn the_user_is_the_one_who_started_it() {
    let status = b"Name:\tUid:\nUmask:\t0022\nUid:\t1000\t0\t0\t0\nGid:\t7\n";
    assert_eq!(line::users(status), Some([1000, 0, 0, 0]));
    assert_eq!(line::users(b"Name:\tx\n"), None);
    let own = rustix::process::getuid().as_raw();
    assert_eq!(user_of(std::process::id()), Some(own));
    assert_eq!(user_of(u32::MAX), None);
}

/// Nothing is left of a process of ours that has ended. Tests and service managers look for that.
#[test]
fn a_thread_ends_after_its_helper() {
    let ask = || {
        file(std::process::id(), "limits").expect("limits");
        HELPER.with_borrow(|kept| kept.0.as_ref().map(|helper| helper.pid))
    };
    for _ in 0..100 {
        let helper = std::thread::spawn(ask).join().expect("thread");
        let helper = helper.expect("a helper that answered is kept");
        let gone = kill(helper, None);
        assert_eq!(gone, Err(nix::errno::Errno::ESRCH), "{helper} is left");
    }
}

#[test]
fn records_are_taken_apart() {
    let mut bytes = Vec::new();
    for (number, errno, text) in [(7_u32, 0_i32, &b"abc"[..]), (9, 2, b"")] {
        bytes.extend_from_slice(&number.to_ne_bytes());
        bytes.extend_from_slice(&errno.to_ne_bytes());
        bytes.extend_from_slice(&(text.len() as u32).to_ne_bytes());
        bytes.extend_from_slice(text);
    }
    let (first, rest) = first_record(&bytes).expect("one");
    assert_eq!((first.0, first.1.expect("read")), (7, b"abc".to_vec()));
    let (second, rest) = first_record(rest).expect("two");
    assert_eq!(second.1.expect_err("failed").raw_os_error(), Some(2));
    assert!(rest.is_empty() && first_record(rest).is_none());
    assert!(first_record(&bytes[..14]).is_none(), "cut");
}

/// A process that lets its readers hang in that way, and what it says of it: a number.
struct Hostile(Child, u64);

impl Hostile {
    fn start(how: &str) -> Option<Self> {
        if !capability::has(Capability::CAP_SYS_PTRACE)
            || !capability::has(Capability::CAP_SYS_ADMIN)
        {
            eprintln!("skipped: without CAP_SYS_PTRACE nobody else's memory is read");
            return None;
        }
        let script = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/servers/hostile.py"
        );
        let mut process = Command::new("python3")
            .args([script, how])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut line = String::new();
        let out = process.stdout.take().expect("output");
        BufReader::new(out).read_line(&mut line).expect("a line");
        let number = line.trim().parse().expect("a number");
        Some(Self(process, number))
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_late<T: std::fmt::Debug>(read: io::Result<T>) {
    let error = read.expect_err("nobody answers");
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
}

/// The next read after one that hangs does not wait, and others are read.
fn others_are_read(hostile: u32) {
    assert!(with_suspects(|suspects| suspects.is_paused(hostile)));
    is_late(file(hostile, "syscall"));
    let own = std::process::id();
    assert!(file(own, "stat").is_ok());
    let text = [7_u8; 8];
    let read = memory(own, text.as_ptr() as u64, 8);
    assert_eq!(read.as_deref(), Some(&text[..]));
}

/// A page that nobody fills.
#[test]
fn a_read_of_memory_that_hangs_is_left_behind() {
    let Some(hostile) = Hostile::start("page") else {
        return;
    };
    assert_eq!(memory(hostile.0.id(), hostile.1, 8), None);
    others_are_read(hostile.0.id());
}

/// epoll_wait, which writes its events to such a page, with the instance locked.
#[test]
fn an_epoll_instance_that_is_locked_is_left_behind() {
    let Some(hostile) = Hostile::start("epoll") else {
        return;
    };
    is_late(file(hostile.0.id(), &format!("fdinfo/{}", hostile.1)));
    others_are_read(hostile.0.id());
}

/// A process that executes a program and never gets to it. Its files wait for the lock that it holds.
#[test]
fn a_process_that_never_executes_is_left_behind() {
    // Without FUSE there is no such process either.
    if std::fs::metadata("/dev/fuse").is_err() {
        return;
    }
    let Some(hostile) = Hostile::start("exec") else {
        return;
    };
    let pid = hostile.1 as u32;
    is_late(file_of_each(pid, "task", "syscall").map(drop));
    others_are_read(pid);
    assert!(user_of(pid).is_some(), "its status is read");
    is_late(process::descriptor_of(pid, 0));
}
