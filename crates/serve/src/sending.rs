//! Sends the output of a session.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::session::Session;

/// Sends as many of the session's bytes as the socket takes; returns how many that were.
///
/// The end of the last answer is held back (`MSG_MORE`) for the moment until the socket is closed. So it travels in
/// one segment with the end of the connection, which saves one packet and one wake-up of the client for each
/// connection. nginx has the same of its `tcp_nopush`.
///
/// # Errors
/// The error of send(2).
pub fn send_unsent(socket: impl AsFd, session: &Session) -> Result<usize, Errno> {
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::MORE, session.is_last());
    send(socket, session.unsent(), flags)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::tests::app;
    use crate::session::Next;
    use std::io::{ErrorKind, Read as _};
    use std::net::{TcpListener, TcpStream};

    /// Answers a request on one end of a connection without closing it; returns both ends.
    fn answered(request: &str) -> std::io::Result<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let (server, _) = listener.accept()?;
        server.set_nodelay(true)?;
        let mut session = Session::new();
        session.receive(request.as_bytes());
        while session.step(&app()) == Next::Write {
            let count = send_unsent(&server, &session)?;
            session.sent(count);
        }
        Ok((client, server))
    }

    #[test]
    fn the_last_answer_comes_with_the_end_of_the_connection() -> std::io::Result<()> {
        let (mut client, server) = answered("GET /whoami HTTP/1.0\r\n\r\n")?;
        client.set_nonblocking(true)?;
        // On loopback, sent bytes have arrived when send returns.
        let before = client.read(&mut [0; 1024]).map_err(|error| error.kind());
        assert_eq!(before, Err(ErrorKind::WouldBlock));
        drop(server);
        let mut all = String::new();
        client.set_nonblocking(false)?;
        client.read_to_string(&mut all)?;
        assert!(all.starts_with("HTTP/1.1 200 OK\r\n"), "{all}");
        Ok(())
    }

    #[test]
    fn an_answer_that_others_follow_is_not_held_back() -> std::io::Result<()> {
        let (mut client, _server) = answered("GET /whoami HTTP/1.1\r\nHost: a\r\n\r\n")?;
        client.set_nonblocking(true)?;
        assert!(client.read(&mut [0; 1024])? > 0);
        Ok(())
    }
}
