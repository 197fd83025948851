//! A connection served by a thread of control of its own, with blocking calls.

use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::system::stop;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::app::App;
use crate::sending::send_unsent;
use crate::session::{Next, Session};
use crate::store::Lazy;

/// How long a client may go on sending bytes that are only dropped.
pub const LINGER: Duration = Duration::from_secs(1);

/// Serves a connection to its end. Errors of the connection end it; no one is left to report them
/// to.
pub fn converse(connection: OwnedFd, app: &App, store: &mut Lazy) {
    let mut stream = TcpStream::from(connection);
    // A client that reads nothing must not hold the worker for ever.
    let _ = stream.set_write_timeout(Some(app.header_timeout));
    let mut session = Session::new();
    let mut timeout = Duration::ZERO;
    loop {
        let done = match session.step(app) {
            Next::Write => write_some(&stream, &mut session),
            Next::Read => read_request(&mut stream, &mut session, app, &mut timeout),
            Next::Ask | Next::Reply => {
                if let Some(call) = session.question() {
                    session.reply(app, store.call(&app.place, &call));
                }
                Ok(())
            }
            Next::Close { linger } => {
                if linger {
                    drop_input(&mut stream);
                }
                return;
            }
        };
        if done.is_err() {
            return;
        }
    }
}

fn write_some(stream: &TcpStream, session: &mut Session) -> io::Result<()> {
    match send_unsent(stream, session) {
        Ok(count) => session.sent(count),
        Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Reads until the session has something to do: a request is there, the client has ended, or its
/// time is up. The time is for the whole request, however it is split: a client that sends a byte
/// now and then does not get more.
///
/// `timeout` is the current timeout of the socket, so that it is set only when it changes.
fn read_request(
    stream: &mut TcpStream,
    session: &mut Session,
    app: &App,
    timeout: &mut Duration,
) -> io::Result<()> {
    let deadline = Instant::now() + app.header_timeout;
    let mut left = app.header_timeout;
    let mut buffer = [0; 16 * 1024];
    loop {
        if *timeout != left {
            stream.set_read_timeout(Some(left))?;
            *timeout = left;
        }
        match stream.read(&mut buffer) {
            Ok(0) => {
                session.end_of_input();
                return Ok(());
            }
            Ok(count) => {
                session.receive(&buffer[..count]);
                if session.step(app) != Next::Read {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {
                if stop::requested() && session.is_idle() {
                    return last_look(stream, session, &mut buffer);
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                session.time_out(app);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        left = deadline.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(1) {
            session.time_out(app);
            return Ok(());
        }
    }
}

/// We stop and the connection is between two requests: close it, unless the next one has come.
fn last_look(stream: &TcpStream, session: &mut Session, buffer: &mut [u8]) -> io::Result<()> {
    match recv(stream, &mut *buffer, RecvFlags::DONTWAIT) {
        Ok((_, count)) if count > 0 => session.receive(&buffer[..count]),
        _ => session.end_of_input(),
    }
    Ok(())
}

/// Ends our side and drops the client's further bytes, so that closing does not reset the
/// connection before the client has read the answer.
fn drop_input(stream: &mut TcpStream) {
    let end = Instant::now() + LINGER;
    let mut buffer = [0; 16 * 1024];
    if stream.shutdown(Shutdown::Write).is_err() {
        return;
    }
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(1) || stream.set_read_timeout(Some(left)).is_err() {
            return;
        }
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
