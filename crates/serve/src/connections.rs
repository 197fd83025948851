//! The connections of an event loop: sockets that never block, each with its session.
//!
//! How a loop waits and which worker it wakes is the loop's own business, in its file. The handling of a ready
//! connection is the same in all of them, and here.

use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use crate::system::stop;
use rustix::io::Errno;

use crate::app::App;
use crate::blocking::LINGER;
use crate::sending::send_unsent;
use crate::session::{Next, Session};
use crate::store::{Deferred, Driver};

/// A connection's number, never used twice: an event for one that is gone finds nothing.
pub type Token = u64;

/// The event that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes from the client.
    Read,
    /// Room for bytes to the client.
    Write,
    /// The reply of the store. Of the socket only its end is noticed.
    Store,
    /// Nothing: it is closed, and its descriptor with it.
    Closed,
}

/// The connections of one loop.
#[derive(Debug)]
pub struct Connections {
    slots: Vec<Option<Connection>>,
    free: Vec<u32>,
    generation: u32,
    buffer: Vec<u8>,
    live: usize,
    store: Deferred,
}

/// A connection that was driven, with its interest before and its interest now.
pub type Change = (Token, Interest, Interest);

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    session: Session,
    generation: u32,
    deadline: Instant,
    interest: Interest,
    lingering: bool,
}

impl Connections {
    /// No connections yet.
    ///
    /// # Errors
    /// When the kernel has no descriptor left.
    pub fn new(app: &App) -> Result<Self, Errno> {
        Ok(Self {
            slots: Vec::new(),
            free: Vec::new(),
            generation: 0,
            buffer: vec![0; 64 * 1024],
            live: 0,
            store: Deferred::new(&app.place)?,
        })
    }

    /// Returns the descriptor that becomes readable when the store has replies; [`Self::store_ready`] takes them.
    pub fn store_fd(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }

    /// Goes on with the connections for which the store has replied.
    pub fn store_ready(&mut self, app: &App) -> Vec<Change> {
        let replies = self.store.ready();
        replies
            .into_iter()
            .filter_map(|(token, reply)| {
                self.get(token)?; // the client may have gone
                let connection = self.slots[token as u32 as usize].as_mut()?;
                let before = connection.interest;
                connection.session.reply(app, reply);
                connection.interest = Interest::Write;
                Some((token, before, self.drive(token, app)))
            })
            .collect()
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether none is open.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Takes over a connection, which waits to be read from now on.
    pub fn insert(&mut self, stream: OwnedFd, app: &App) -> Token {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.generation = self.generation.wrapping_add(1);
        self.live += 1;
        self.slots[index as usize] = Some(Connection {
            stream: TcpStream::from(stream),
            session: Session::new(),
            generation: self.generation,
            deadline: Instant::now() + app.header_timeout,
            interest: Interest::Read,
            lingering: false,
        });
        u64::from(self.generation) << 32 | u64::from(index)
    }

    /// The socket of a connection, and its interest.
    pub fn get(&self, token: Token) -> Option<(BorrowedFd<'_>, Interest)> {
        let connection = self.slots.get(token as u32 as usize)?.as_ref()?;
        (u64::from(connection.generation) == token >> 32)
            .then(|| (connection.stream.as_fd(), connection.interest))
    }

    /// Closes a connection.
    pub fn remove(&mut self, token: Token) {
        if self.get(token).is_some() {
            let index = token as u32;
            self.slots[index as usize] = None;
            self.free.push(index);
            self.live -= 1;
        }
    }

    /// All connections.
    pub fn tokens(&self) -> impl Iterator<Item = Token> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let connection = slot.as_ref()?;
            Some(u64::from(connection.generation) << 32 | index as u64)
        })
    }

    /// Goes on with a connection that may be ready, until it has to wait; returns its interest. The work of a request
    /// is done in here.
    pub fn drive(&mut self, token: Token, app: &App) -> Interest {
        if self.get(token).is_none() {
            return Interest::Closed;
        }
        let index = token as u32 as usize;
        let Some(connection) = &mut self.slots[index] else {
            return Interest::Closed;
        };
        let interest = connection
            .drive(token, app, &mut self.buffer, &mut self.store)
            .unwrap_or(Interest::Closed);
        connection.interest = interest;
        if interest == Interest::Closed {
            self.remove(token);
        }
        interest
    }

    /// Ends connections that took too long, and idle ones if the server stops. Returns each connection touched, with
    /// its interest before and its interest now. Call it about once a second, and often while stopping.
    pub fn sweep(&mut self, app: &App) -> Vec<Change> {
        let mut changes = self.store_ready(app);
        let now = Instant::now();
        let stopping = stop::requested();
        let due: Vec<Token> = self
            .tokens()
            .filter(|token| {
                let connection = self.slots[*token as u32 as usize].as_ref();
                connection.is_some_and(|connection| {
                    connection.deadline <= now || (stopping && connection.session.is_idle())
                })
            })
            .collect();
        changes.extend(due.into_iter().filter_map(|token| {
            let connection = self.slots[token as u32 as usize].as_mut()?;
            let before = connection.interest;
            connection.overdue(app, now);
            Some((token, before, self.drive(token, app)))
        }));
        changes
    }
}

impl Connection {
    fn drive(
        &mut self,
        token: Token,
        app: &App,
        buffer: &mut [u8],
        store: &mut Deferred,
    ) -> io::Result<Interest> {
        if self.lingering {
            return self.drop_input(buffer);
        }
        // One read a turn: a client that sends without end does not keep the others waiting. This also saves the read
        // that would find nothing after an answer. Bytes that are left make the socket ready again.
        let mut may_read = true;
        loop {
            match self.session.step(app) {
                Next::Ask => {
                    let call = self.session.question();
                    if let Some(reply) = call.and_then(|call| store.submit(token, call)) {
                        self.session.reply(app, reply);
                    }
                }
                Next::Reply if self.interest == Interest::Store => {
                    // Only the end of the connection wakes it now.
                    return Ok(Interest::Closed);
                }
                Next::Reply => return Ok(Interest::Store),
                Next::Write => match send_unsent(&self.stream, &self.session) {
                    Ok(count) => {
                        self.session.sent(count);
                        self.deadline = Instant::now() + app.header_timeout;
                    }
                    Err(Errno::AGAIN) => return Ok(Interest::Write),
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                },
                Next::Read if !may_read => return Ok(Interest::Read),
                Next::Read => match self.stream.read(buffer) {
                    Ok(0) => self.session.end_of_input(),
                    Ok(count) => {
                        self.session.receive(&buffer[..count]);
                        may_read = false;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        if stop::requested() && self.session.is_idle() {
                            return Ok(Interest::Closed);
                        }
                        return Ok(Interest::Read);
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                },
                Next::Close { linger: false } => return Ok(Interest::Closed),
                Next::Close { linger: true } => {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.lingering = true;
                    self.deadline = Instant::now() + LINGER;
                    return self.drop_input(buffer);
                }
            }
        }
    }

    /// Drops the client's further bytes after a refusal; see [`Next::Close`].
    fn drop_input(&mut self, buffer: &mut [u8]) -> io::Result<Interest> {
        loop {
            if self.deadline <= Instant::now() {
                return Ok(Interest::Closed);
            }
            match self.stream.read(buffer) {
                Ok(0) => return Ok(Interest::Closed),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Interest::Read),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn overdue(&mut self, app: &App, now: Instant) {
        if !self.lingering && self.deadline <= now {
            self.interest = Interest::Read;
            self.session.time_out(app);
            self.deadline = now + LINGER;
        }
    }
}
