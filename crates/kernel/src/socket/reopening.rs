//! Whether a listener that is closed for a moment may listen again.
//!
//! listen() checks the port as bind() does (`inet_csk_bind_conflict`). A connection of the port is no conflict if it and
//! the listener have `SO_REUSEADDR`, which a connection inherits. Else both need `SO_REUSEPORT` and the same user. A
//! connection gets the user of the process that accepts it. So the conflict arises where root opens the listener and the
//! workers run as another user.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::libc;
use wakeone_model::listener::Protocol;

use super::{address_of, diag, get};
use crate::proc::process;

/// Checks that a listener could listen again after a shutdown. `workers`: processes that accept connections of its
/// port. One of another user may accept between this check and the listen().
///
/// # Errors
/// A sentence if it could not, or the error of a system call if that is not known.
pub fn may_reopen(listener: impl AsFd, workers: impl IntoIterator<Item = u32>) -> io::Result<()> {
    let listener = listener.as_fd();
    let has = |option| get::<i32>(listener, libc::SOL_SOCKET, option).map(|value| value != 0);
    if has(libc::SO_REUSEADDR)? {
        return Ok(());
    }
    let own = rustix::fs::fstat(listener)?.st_uid;
    let user = match has(libc::SO_REUSEPORT)? {
        true => match other_worker(own, workers) {
            None => other_connection(listener, own)?,
            other => other,
        },
        false => Some(own),
    };
    match user {
        None => Ok(()),
        Some(user) => Err(io::Error::other(format!(
            "the listener has no SO_REUSEADDR, and its port has connections of user {user}; once closed, it could not listen again; a server that sets SO_REUSEADDR can be rescued"
        ))),
    }
}

/// Returns the user of a worker that is not this user.
fn other_worker(own: u32, workers: impl IntoIterator<Item = u32>) -> Option<u32> {
    let mut users = workers.into_iter().filter_map(process::file_user);
    users.find(|user| *user != own)
}

/// Returns the user of a connection that is not this user's. sock_diag shows the user that listen() compares with: up to
/// Linux 6.16 that of a connection without a file is root.
fn other_connection(listener: BorrowedFd<'_>, own: u32) -> io::Result<Option<u32>> {
    let address = address_of(listener)?;
    let any = address.ip().is_unspecified();
    let open = diag::sockets_at(Protocol::Tcp, diag::Which::Open, address)?;
    let other = open
        .iter()
        .filter(|one| any || one.local.ip() == address.ip())
        .find(|one| one.socket.uid != own);
    Ok(other.map(|one| one.socket.uid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn set(socket: &TcpListener, option: i32, on: i32) {
        super::super::set(socket.as_fd(), libc::SOL_SOCKET, option, &on).expect("setsockopt");
    }

    #[test]
    fn a_listener_may_reopen_among_connections_of_its_own_user() {
        // The standard library sets SO_REUSEADDR.
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        may_reopen(&listener, [1]).expect("SO_REUSEADDR");
        set(&listener, libc::SO_REUSEADDR, 0);
        may_reopen(&listener, []).expect_err("no SO_REUSEPORT either");
        set(&listener, libc::SO_REUSEPORT, 1);
        may_reopen(&listener, [std::process::id()]).expect("no connection");
        let _client = TcpStream::connect(address).expect("connects");
        let _accepted = listener.accept().expect("accepts");
        may_reopen(&listener, [std::process::id()]).expect("our own connection");
    }

    #[test]
    fn a_listener_may_not_reopen_among_connections_of_another_user() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can give a socket to another user");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        set(&listener, libc::SO_REUSEADDR, 0);
        set(&listener, libc::SO_REUSEPORT, 1);
        let nobody = Some(rustix::fs::Uid::from_raw(65534));
        rustix::fs::fchown(&listener, nobody, None).expect("fchown");
        may_reopen(&listener, []).expect("no connection");
        let error = may_reopen(&listener, [std::process::id()]).expect_err("our user is root");
        assert!(error.to_string().contains("SO_REUSEADDR"), "{error}");
        let _client = TcpStream::connect(address).expect("connects");
        let _accepted = listener.accept().expect("accepts");
        may_reopen(&listener, []).expect_err("a connection of root");
    }
}
