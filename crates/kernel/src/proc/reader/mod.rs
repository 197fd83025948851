//! Reads what another process can make hang: its files in /proc, its memory, its descriptors.
//!
//! A reader waits for locks of that process, or for its pages, and the process may see to it that neither comes. It
//! waits in a page of a FUSE file that is never answered, or of userfaultfd, with its epoll instance locked
//! (`ep_send_events` and `ep_show_fdinfo` in fs/eventpoll.c). Or it executes a program with a file open whose close is
//! never answered: the kernel then keeps its `exec_update_lock`, which /proc/PID/stat, syscall and fd take. No signal
//! ends all of these waits.
//!
//! So a helper process reads, one for each thread that asks. A helper that does not answer in time is killed and left
//! behind, and the caller goes on without an answer: `TimedOut`. The process that it read from is then not read for a
//! while; nor are the others of its user, after a few.

pub(crate) mod child;
pub(crate) mod helper;
pub(crate) mod request;
mod suspects;

use std::cell::RefCell;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::helper::{Helper, Outcome, has_ended};
use self::request::{MOST_BYTES, RECORD_HEAD, Request, Task};
use self::suspects::Suspects;
use crate::capability::{self, Capability};
use crate::proc::line;

/// The most bytes of a file that is kept whole.
const MOST_OF_FILE: usize = 1024 * 1024;
/// A line that is longer is cut.
const MOST_OF_LINE: usize = 8192;

/// How long the end of a helper that nobody asks any more is waited for. It takes microseconds where a CPU is free.
const RETIREMENT: Duration = Duration::from_secs(1);

static SUSPECTS: Mutex<Option<Suspects>> = Mutex::new(None);

thread_local! {
    static HELPER: RefCell<Kept> = const { RefCell::new(Kept::none()) };
}

/// The helper of a thread, which ends with it.
pub(crate) struct Kept(Option<Helper>);

impl Kept {
    /// None yet.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Takes it, or starts one that serves by `serve`.
    ///
    /// # Errors
    /// Out of processes or descriptors.
    pub fn take(&mut self, serve: fn(RawFd, bool) -> !) -> io::Result<Helper> {
        match self.0.take().filter(Helper::is_ours) {
            Some(helper) => Ok(helper),
            None => Helper::start(|socket, real_time| serve(socket, real_time)),
        }
    }

    /// Keeps it for the next question.
    pub fn keep(&mut self, helper: Helper) {
        self.0 = Some(helper);
    }

    /// Lets the helper end. Returns its process.
    fn end(&mut self) -> Option<Pid> {
        let helper = self.0.take().filter(Helper::is_ours)?;
        Some(helper.pid)
    }
}

impl Drop for Kept {
    /// Waits for the helper, so that nothing is left of a process that has ended.
    fn drop(&mut self) {
        if let Some(pid) = self.end() {
            wait_for_end(pid);
        }
    }
}

/// Ends this thread's helper, and waits until it has ended. The next question starts another one.
pub(crate) fn retire() {
    if let Some(pid) = HELPER.with_borrow_mut(Kept::end) {
        wait_for_end(pid);
    }
}

pub(crate) fn wait_for_end(helper: Pid) {
    let since = Instant::now();
    while !has_ended(helper) {
        if since.elapsed() >= RETIREMENT {
            return with_suspects(|suspects| suspects.leave(helper, Some(0)));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A file `below` /proc/PID, whole.
///
/// # Errors
/// The error of reading it, `FileTooLarge`, or `TimedOut`.
pub(crate) fn file(pid: u32, below: &str) -> io::Result<Vec<u8>> {
    let request = named(Task::File, pid, below, "")?;
    let (mut all, mut is_whole) = (Vec::new(), true);
    ask(&request, |bytes| {
        is_whole &= all.len() + bytes.len() <= MOST_OF_FILE;
        if is_whole {
            all.extend_from_slice(bytes);
        }
    })?;
    if is_whole {
        Ok(all)
    } else {
        Err(io::ErrorKind::FileTooLarge.into())
    }
}

/// Each line of a file `below` /proc/PID, however long the file is.
///
/// # Errors
/// The error of reading it, or `TimedOut`. There may have been lines before.
pub(crate) fn lines(pid: u32, below: &str, mut line: impl FnMut(&[u8])) -> io::Result<()> {
    let request = named(Task::File, pid, below, "")?;
    let mut begun: Vec<u8> = Vec::new();
    ask(&request, |bytes| {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = MOST_OF_LINE.saturating_sub(begun.len());
            begun.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                line(begun.strip_suffix(b"\n").unwrap_or(&begun));
                begun.clear();
            }
        }
    })?;
    if !begun.is_empty() {
        line(&begun);
    }
    Ok(())
}

/// The entries of a folder `below` /proc/PID that are numbers.
///
/// # Errors
/// The error of reading it, or `TimedOut`.
pub(crate) fn numbers(pid: u32, below: &str) -> io::Result<Vec<u32>> {
    let all = records(&named(Task::Numbers, pid, below, "")?)?;
    Ok(all.into_iter().map(|(number, _)| number).collect())
}

/// A file of each entry of a folder `below` /proc/PID that is a number.
///
/// # Errors
/// The error of reading the folder, or `TimedOut`.
pub(crate) fn file_of_each(
    pid: u32,
    below: &str,
    file: &str,
) -> io::Result<Vec<(u32, io::Result<Vec<u8>>)>> {
    let mut all = records(&named(Task::FileOfEach, pid, below, file)?)?;
    if reads_itself() {
        for (number, read) in &mut all {
            if matches!(read, Err(error) if error.kind() == io::ErrorKind::PermissionDenied) {
                *read = std::fs::read(format!("/proc/{pid}/{below}/{number}/{file}"));
            }
        }
    }
    Ok(all)
}

/// The links of a folder `below` /proc/PID whose names are numbers, and where they lead.
///
/// # Errors
/// The error of reading the folder, or `TimedOut`.
pub(crate) fn links(pid: u32, below: &str) -> io::Result<Vec<(u32, Vec<u8>)>> {
    let mut all = Vec::new();
    for (number, target) in records(&named(Task::Links, pid, below, "")?)? {
        match target {
            Ok(target) => all.push((number, target)),
            // CAP_DAC_READ_SEARCH lets list another user's folder, but not read the links there.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            // It was closed meanwhile.
            Err(_) => {}
        }
    }
    Ok(all)
}

/// Where a link `below` /proc/PID leads.
///
/// # Errors
/// The error of reading it, or `TimedOut`.
pub(crate) fn link(pid: u32, below: &str) -> io::Result<Vec<u8>> {
    let mut target = Vec::new();
    ask(&named(Task::Link, pid, below, "")?, |bytes| {
        target.extend_from_slice(bytes);
    })?;
    Ok(target)
}

/// All of `length` bytes of another process's memory, or nothing.
pub(crate) fn memory(pid: u32, address: u64, length: usize) -> Option<Vec<u8>> {
    if length > MOST_BYTES {
        return None;
    }
    let mut bytes = Vec::with_capacity(length);
    if reads_itself() {
        bytes.resize(length, 0);
        return child::read_memory(pid, address, &mut bytes).then_some(bytes);
    }
    let request = Request::at(Task::Memory, pid, address, length as u32);
    ask(&request, |some| bytes.extend_from_slice(some)).ok()?;
    (bytes.len() == length).then_some(bytes)
}

/// A descriptor of another process, shared with it.
///
/// # Errors
/// `ESRCH`, `EBADF`, `EPERM`, or `TimedOut`.
pub(crate) fn descriptor(pid: u32, fd: i32) -> io::Result<OwnedFd> {
    let request = Request::at(Task::Descriptor, pid, fd as u32 as u64, 0);
    ask(&request, |_| {})?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Whether this process reads memory, descriptors and what its helper may not read itself. Without the privilege only those
/// of one's own user can be had, and others have no way to it. (Yama lets a helper, which is no ancestor of theirs, read
/// less than this process.)
pub(crate) fn reads_itself() -> bool {
    !capability::has(Capability::CAP_SYS_PTRACE)
}

fn named(task: Task, pid: u32, below: &str, file: &str) -> io::Result<Request> {
    Request::of(task, pid, below, file).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// An entry's number, and what was read of it.
type Record = (u32, io::Result<Vec<u8>>);

fn records(request: &Request) -> io::Result<Vec<Record>> {
    let mut all = Vec::new();
    ask(request, |mut bytes| {
        while let Some((record, rest)) = first_record(bytes) {
            all.push(record);
            bytes = rest;
        }
    })?;
    Ok(all)
}

fn first_record(bytes: &[u8]) -> Option<(Record, &[u8])> {
    let head = bytes.first_chunk::<RECORD_HEAD>()?;
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
    let (errno, length) = (word(4) as i32, word(8) as usize);
    let (read, rest) = bytes[RECORD_HEAD..].split_at_checked(length)?;
    let read = match errno {
        0 => Ok(read.to_vec()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    };
    Some(((word(0), read), rest))
}

/// Asks this thread's helper, if the process may be read.
fn ask(request: &Request, take: impl FnMut(&[u8])) -> io::Result<Option<OwnedFd>> {
    if !may_be_read(request.pid) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match ask_helper(request, take)? {
        Outcome::Answered(answer) => answer.map_err(io::Error::from_raw_os_error),
        Outcome::Hangs(helper) => {
            tracing::debug!("process {} cannot be read in time", request.pid);
            let user = user_of(request.pid);
            with_suspects(|suspects| suspects.suspect(request.pid, user, helper));
            Err(io::ErrorKind::TimedOut.into())
        }
        Outcome::Lost(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Asks this thread's helper. One that does not answer is ended, if it can be.
fn ask_helper(request: &Request, take: impl FnMut(&[u8])) -> io::Result<Outcome> {
    let mut helper = HELPER.with_borrow_mut(|kept| kept.take(child::serve))?;
    let outcome = helper.ask(request, take);
    match outcome {
        Outcome::Answered(_) => HELPER.with_borrow_mut(|kept| kept.keep(helper)),
        Outcome::Hangs(pid) | Outcome::Lost(pid) => drop(kill(pid, Signal::SIGKILL)),
    }
    if let Outcome::Lost(pid) = outcome {
        with_suspects(|suspects| suspects.leave(pid, Some(0)));
    }
    Ok(outcome)
}

fn may_be_read(pid: u32) -> bool {
    let (nobody, paused) = with_suspects(|suspects| {
        if !suspects.is_empty() {
            suspects.forget();
        }
        (suspects.is_empty(), suspects.is_paused(pid))
    });
    // It is only then that it matters whose the process is.
    nobody || {
        let is_shunned = |user| with_suspects(|suspects| suspects.is_shunned(user));
        !paused && !is_shunned(user_of(pid))
    }
}

/// The user who started a process (not whom it acts for, nor the owner of /proc/PID: that is root's for a process that
/// hides its memory). /proc/PID/status waits for none of the locks that others of its files wait for.
fn user_of(pid: u32) -> Option<u32> {
    let request = named(Task::File, pid, "status", "").ok()?;
    let mut status = Vec::new();
    match ask_helper(&request, |bytes| status.extend_from_slice(bytes)).ok()? {
        Outcome::Answered(answer) => answer.ok()?,
        Outcome::Hangs(helper) => {
            with_suspects(|suspects| suspects.leave(helper, None));
            return None;
        }
        Outcome::Lost(_) => return None,
    };
    let [real, ..] = line::users(&status)?;
    Some(real)
}

fn with_suspects<R>(act: impl FnOnce(&mut Suspects) -> R) -> R {
    let mut suspects = SUSPECTS.lock().unwrap_or_else(PoisonError::into_inner);
    act(suspects.get_or_insert_with(Suspects::default))
}

#[cfg(test)]
mod tests;
