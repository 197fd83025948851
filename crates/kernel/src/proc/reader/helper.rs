//! The helper, as the thread that asks it sees it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::libc;
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use super::request::{DESCRIPTOR, END, FAILED, MORE, MOST_BYTES, Request};
use crate::proc::line::Stat;

/// How often a helper that has not answered is looked at.
const SLICE: Duration = Duration::from_millis(20);
/// A helper that was found asleep so often hangs: a read takes microseconds.
const MOST_ASLEEP: u32 = 5;
/// A helper that was found so often on a CPU, or waiting for one, is given up too.
const MOST_RUNNING: u32 = 50;

/// How a question ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It was answered: with the error of the read, or with the descriptor that was asked for.
    Answered(Result<Option<OwnedFd>, i32>),
    /// The process that was read from lets its readers hang: this helper.
    Hangs(Pid),
    /// The helper is gone, or had no CPU.
    Lost(Pid),
}

/// A process that reads for the thread that started it.
#[derive(Debug)]
pub(crate) struct Helper {
    pub pid: Pid,
    socket: OwnedFd,
    /// The process that it was started by.
    of: u32,
    packet: Vec<u8>,
    /// The CPU that it is bound to, that of its thread: only since it has had to wait for one.
    cpu: Option<usize>,
}

impl Helper {
    /// Starts one that serves by `serve`: system calls only, as after a fork of a process with threads.
    pub fn start(serve: impl FnOnce(RawFd, bool)) -> io::Result<Self> {
        let (socket, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        set_socket_timeout(&socket, Timeout::Recv, Some(SLICE))?;
        // SAFETY: asks for the policy of this thread. A real-time thread of ours resets it for its children.
        let policy = unsafe { libc::sched_getscheduler(0) };
        let real_time = policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_FIFO;
        // Without a signal at its end: a plain wait() for any child, as for a server's last process, does not see it
        // (`eligible_child` in kernel/exit.c).
        // SAFETY: a fork in all but the signal. The child calls nothing but system calls, and never returns.
        let pid = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
        match i32::try_from(pid) {
            Ok(0) => {
                serve(theirs.as_raw_fd(), real_time);
                // SAFETY: ends the process, without anything that exit() would run.
                unsafe { libc::_exit(0) }
            }
            Ok(pid) if pid > 0 => Ok(Self {
                pid: Pid::from_raw(pid),
                socket,
                of: std::process::id(),
                packet: vec![0; 1 + MOST_BYTES],
                cpu: None,
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether it is this process's. A fork of this process needs its own: the socket would be shared.
    pub fn is_ours(&self) -> bool {
        self.of == std::process::id()
    }

    /// Asks, and hands the bytes of the answer on as they come.
    pub fn ask(&mut self, request: &Request, take: impl FnMut(&[u8])) -> Outcome {
        if self.cpu.is_some() {
            self.follow();
        }
        let bytes = request.encode();
        if rustix::net::send(&self.socket, &bytes, SendFlags::NOSIGNAL).is_err() {
            return Outcome::Lost(self.pid);
        }
        self.answer(take, Self::follow)
    }

    /// Asks by some bytes that come with descriptors, a helper that chooses its CPU itself.
    pub fn ask_with(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        take: impl FnMut(&[u8]),
    ) -> Outcome {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        let sent = rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        match sent {
            Ok(_) if fits => self.answer(take, |_| {}),
            _ => Outcome::Lost(self.pid),
        }
    }

    fn answer(&mut self, mut take: impl FnMut(&[u8]), on_running: impl Fn(&mut Self)) -> Outcome {
        let (mut asleep, mut running) = (0, 0);
        let mut shared = None;
        loop {
            match self.hear() {
                Ok((length @ 1.., descriptor)) => {
                    shared = shared.or(descriptor);
                    let rest = &self.packet[1..length];
                    match self.packet[0] {
                        MORE => take(rest),
                        DESCRIPTOR => {}
                        END => {
                            take(rest);
                            return Outcome::Answered(Ok(shared));
                        }
                        FAILED if length == 5 => {
                            let errno = [0, 1, 2, 3].map(|at| rest[at]);
                            return Outcome::Answered(Err(i32::from_ne_bytes(errno)));
                        }
                        _ => return Outcome::Lost(self.pid),
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if self.runs() {
                        running += 1;
                        on_running(self);
                    } else {
                        asleep += 1;
                    }
                    if asleep >= MOST_ASLEEP {
                        return Outcome::Hangs(self.pid);
                    }
                    if running >= MOST_RUNNING {
                        return Outcome::Lost(self.pid);
                    }
                }
                _ => return Outcome::Lost(self.pid),
            }
        }
    }

    /// Binds it to the CPU of this thread, which waits for it anyway. Where all CPUs are busy it would wait for others'
    /// work elsewhere. Where they are not, it answers sooner if it is free: the thread wakes up on another CPU each time.
    fn follow(&mut self) {
        let here = sched_getcpu().ok();
        if here == self.cpu {
            return;
        }
        let mut set = CpuSet::new();
        if let Some(cpu) = here
            && set.set(cpu).is_ok()
        {
            let _ = sched_setaffinity(self.pid, &set);
        }
        self.cpu = here;
    }

    fn hear(&mut self) -> rustix::io::Result<(usize, Option<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut self.packet)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let heard = rustix::net::recvmsg(&self.socket, &mut into, &mut control, flags)?;
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        Ok((heard.bytes, descriptor))
    }

    /// Whether it runs, or waits for a CPU. Its own file hangs nobody: it executes no program.
    fn runs(&self) -> bool {
        let line = std::fs::read(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        Stat::parse(&line).is_some_and(|stat| stat.state == 'R')
    }
}

/// Whether a helper has ended; it is waited for then.
pub(crate) fn has_ended(helper: Pid) -> bool {
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    let flags = WaitPidFlag::WNOHANG | WaitPidFlag::__WALL;
    !matches!(waitpid(helper, Some(flags)), Ok(WaitStatus::StillAlive))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn no_plain_wait_sees_the_helper() {
        let helper =
            Helper::start(|socket, real_time| super::super::child::serve(socket, real_time))
                .expect("helper");
        let waited =
            nix::sys::wait::waitpid(helper.pid, Some(nix::sys::wait::WaitPidFlag::WNOHANG));
        assert_eq!(waited, Err(nix::errno::Errno::ECHILD));
        assert!(!has_ended(helper.pid));
        let Helper { pid, socket, .. } = helper;
        drop(socket);
        let since = Instant::now();
        while !has_ended(pid) {
            assert!(since.elapsed() < Duration::from_secs(10), "it stays");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
