//! One process accepts and hands each connection to the next of N workers over a Unix socket
//! (`SCM_RIGHTS`). node's cluster module does so, and Envoy with its exact balancing. The load is
//! even by construction, at the price of one more process on the way of each connection.
//!
//! A worker is an event loop that watches its end of the channel instead of a listener. On a stop
//! the acceptor closes the channels, and a worker first takes the connections still in them.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use crate::system::fork::{Fork, fork};
use crate::system::stop;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::time::Timespec;

use crate::Error;
use crate::listener::{Accepted, Listener};
use crate::master::become_worker;
use crate::reactor::{Reactor, Ready};
use crate::worker::Worker;

/// A worker as the acceptor sees it.
struct Peer {
    index: usize,
    pid: Pid,
    channel: OwnedFd,
}

/// Makes `count` workers and accepts for them until a stop is requested; then waits until they
/// have finished all connections.
///
/// # Errors
/// When a worker cannot be made, or workers end without having been told to.
pub fn serve(acceptor: Worker, count: usize, ready: impl FnOnce()) -> Result<(), Error> {
    let mut peers: Vec<Peer> = Vec::with_capacity(count);
    let master = std::process::id();
    for index in 0..count {
        let pair = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        );
        let forked = pair
            .map_err(Into::into)
            .and_then(|pair| Ok((pair, fork()?)));
        match forked {
            Ok(((ours, theirs), Fork::Child)) => {
                // A copy of another worker's channel or of the listener would keep it open.
                peers.clear();
                drop(ours);
                let worker = acceptor.without_listeners(index);
                drop(acceptor);
                become_worker(master, || work(&worker, &theirs).map_err(Error::EventLoop));
            }
            Ok(((channel, _), Fork::Parent(pid))) => peers.push(Peer {
                index,
                pid,
                channel,
            }),
            Err(source) => {
                for peer in &peers {
                    let _ = kill(peer.pid, Signal::SIGKILL);
                }
                return Err(Error::Fork {
                    index,
                    count,
                    source,
                });
            }
        }
    }
    ready();
    let failed = accept_for(&acceptor, &mut peers);
    acceptor.faults.report("acceptor");
    finish(peers, failed)
}

/// How long to wait for a connection before the workers are checked again.
const CHECK_WORKERS: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Accepts and hands over until a stop, or until no worker is left; returns how many died.
fn accept_for(acceptor: &Worker, peers: &mut Vec<Peer>) -> usize {
    let (mut next, mut failed) = (0, 0);
    while !stop::requested() && !peers.is_empty() {
        failed += take_dead(peers, Some(WaitPidFlag::WNOHANG));
        for listener in Listener::wait_any(&acceptor.listeners, Some(&CHECK_WORKERS)) {
            match listener.accept(true, &acceptor.faults) {
                Accepted::Connection(connection) => {
                    hand_over(&connection, peers, &mut next, acceptor);
                }
                Accepted::Nothing => {}
                Accepted::Later(wait) => std::thread::sleep(wait),
            }
        }
    }
    failed
}

/// Sends the connection to the next worker whose channel has room; waits when none has.
fn hand_over(connection: &OwnedFd, peers: &[Peer], next: &mut usize, acceptor: &Worker) {
    loop {
        let mut alive = false;
        for _ in 0..peers.len() {
            let peer = &peers[*next % peers.len()];
            *next = next.wrapping_add(1);
            match send(&peer.channel, connection) {
                Ok(()) => return,
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::TOOMANYREFS) => {
                    alive = true;
                }
                // It is dead, and the next check finds it. The others get the connection.
                Err(error) => acceptor.faults.count(error),
            }
        }
        if !alive {
            return;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn send(channel: &OwnedFd, connection: &OwnedFd) -> Result<(), Errno> {
    let rights = [connection.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&rights));
    let data = [IoSlice::new(b"c")];
    sendmsg(channel, &data, &mut control, SendFlags::NOSIGNAL).map(|_| ())
}

/// Takes a connection out of the channel; returns `None` when the channel is at its end.
fn receive(channel: &OwnedFd) -> Result<Option<Vec<OwnedFd>>, Errno> {
    let mut byte = [0];
    let mut data = [IoSliceMut::new(&mut byte)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(channel, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if message.bytes == 0 {
        return Ok(None);
    }
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(Some(rights.flatten().collect()))
}

/// Runs a worker: serves the connections from the channel, until its end and the end of all
/// connections.
fn work(worker: &Worker, channel: &OwnedFd) -> Result<(), Errno> {
    let mut reactor = Reactor::new(worker, EventFlags::IN)?;
    reactor.watch_other(channel)?;
    let mut open = true;
    while open || !reactor.is_empty() {
        for ready in reactor.turn()? {
            if ready != Ready::Other || !open {
                continue;
            }
            match receive(channel) {
                // The kernel has no room for the descriptor and drops it; the client sees a close.
                Ok(Some(connections)) if connections.is_empty() => {
                    worker.faults.count(Errno::MFILE)
                }
                Ok(Some(connections)) => {
                    for connection in connections {
                        reactor.adopt(connection);
                    }
                }
                Ok(None) => {
                    open = false;
                    reactor.forget_other(channel)?;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => worker.faults.count(error),
            }
        }
    }
    worker.faults.report(&worker.app.worker);
    Ok(())
}

/// Removes the workers that have ended from the list and reports them; returns how many.
fn take_dead(peers: &mut Vec<Peer>, flags: Option<WaitPidFlag>) -> usize {
    let mut failed = 0;
    while !peers.is_empty() {
        let (pid, well) = match waitpid(None, flags) {
            Ok(WaitStatus::Exited(pid, code)) => (pid, code == 0 && stop::requested()),
            Ok(WaitStatus::Signaled(pid, ..)) => (pid, false),
            Err(nix::errno::Errno::EINTR) => continue,
            Ok(WaitStatus::StillAlive) | Err(_) => break,
            Ok(_) => continue,
        };
        let Some(position) = peers.iter().position(|peer| peer.pid == pid) else {
            continue;
        };
        let peer = peers.swap_remove(position);
        if !well {
            failed += 1;
            eprintln!(
                "worker {} (pid {pid}) ended without having been told to; {} left",
                peer.index,
                peers.len()
            );
        }
    }
    failed
}

/// Closes the channels, tells the workers, and waits for them.
fn finish(mut peers: Vec<Peer>, failed: usize) -> Result<(), Error> {
    for peer in &peers {
        let _ = rustix::net::shutdown(&peer.channel, rustix::net::Shutdown::Write);
        let _ = kill(peer.pid, Signal::SIGTERM);
    }
    let failed = failed + take_dead(&mut peers, None);
    if failed == 0 {
        Ok(())
    } else {
        Err(Error::Workers { count: failed })
    }
}
