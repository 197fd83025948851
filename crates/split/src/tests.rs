//! The broker's answers to messages in every order in which processes can send them. If one process binds a socket
//! and several listen on it, the first one's message may come after the others see that it listens.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use std::path::PathBuf;
use std::time::Duration;

use super::broker::{Answer, QueueRequest};
use super::config::{Options, Steering};
use super::splitter::{MOST_SAID, Splitter};
use rustix::net::{AddressFamily, Ipv4Addr, SocketAddrV4, SocketType};
use wakeone_shim::protocol::{How, Reply};

fn splitter() -> Splitter {
    let options = Options {
        command: vec!["server".into()],
        policy: None,
        affinity: None,
        rescue: false,
        stuck_after: Duration::from_millis(5),
        runtime_dir: PathBuf::from("/nonexistent/wakeone-test"),
        check: false,
        metrics: None,
        metrics_tracing: false,
        grace: Duration::from_secs(30),
    };
    Splitter::new(&options, Steering::None, std::process::id())
}

fn bound() -> OwnedFd {
    let socket =
        rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("socket");
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
    rustix::net::bind(&socket, &address).expect("bind");
    socket
}

fn listen(socket: &OwnedFd) {
    rustix::net::sockopt::set_socket_reuseport(socket, true).expect("SO_REUSEPORT");
    rustix::net::listen(socket, 8).expect("listen");
}

fn told(splitter: &mut Splitter, socket: &OwnedFd, own: bool) -> Reply {
    let copy = socket.try_clone().expect("dup");
    splitter.listens(std::process::id(), socket.as_raw_fd(), own, copy)
}

fn asks(splitter: &mut Splitter, socket: &OwnedFd) {
    let claim = QueueRequest {
        pid: std::process::id(),
        fd: socket.as_raw_fd(),
        how: How::Accept,
        socket: socket.as_fd(),
    };
    // Nothing steers, so the first process that asks serves the shared socket.
    assert!(splitter.request(&claim).is_none());
}

#[test]
fn the_sentences_that_were_logged_do_not_fill_memory() {
    let mut splitter = splitter();
    for name in 0..3 * MOST_SAID {
        splitter.once(format!("worker {name}"));
        assert!(splitter.said.len() <= MOST_SAID);
    }
    let last = format!("worker {}", 3 * MOST_SAID - 1);
    assert!(splitter.said.contains(&last));
    splitter.end();
}

#[test]
fn a_second_one_that_listens_first_is_believed() {
    let (mut splitter, socket) = (splitter(), bound());
    assert_eq!(splitter.opens(&socket), Reply::Done);
    listen(&socket);
    assert_eq!(told(&mut splitter, &socket, false), Reply::Done);
    assert_eq!(told(&mut splitter, &socket, true), Reply::Done);
    assert_eq!(splitter.shared.len(), 1);
    splitter.end();
}

#[test]
fn a_second_one_that_waits_first_is_believed() {
    let (mut splitter, socket) = (splitter(), bound());
    assert_eq!(splitter.opens(&socket), Reply::Done);
    listen(&socket);
    asks(&mut splitter, &socket);
    assert_eq!(splitter.shared.len(), 1);
    assert_eq!(told(&mut splitter, &socket, true), Reply::Done);
    assert_eq!(splitter.shared.len(), 1);
    splitter.end();
}

#[test]
fn a_group_of_the_servers_own_making_is_left_alone_in_any_order() {
    let (mut splitter, ours, foreign) = (splitter(), bound(), bound());
    assert_eq!(splitter.opens(&ours), Reply::Done);
    listen(&foreign);
    asks(&mut splitter, &foreign);
    assert_eq!(told(&mut splitter, &foreign, false), Reply::Leave);
    assert!(splitter.shared.is_empty());
    splitter.end();
}
