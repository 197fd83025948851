//! The guest book in a Redis server: a counter and a list.
//!
//! Both clients send the same commands, encoded and decoded by the `redis` crate. The one for
//! event loops does its own I/O: a socket that never blocks, all calls sent at once, replies in
//! the order of the calls.

use std::collections::VecDeque;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use redis::{Client, Connection, ConnectionAddr, Pipeline, Value, from_redis_value};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{self, SocketFlags, SocketType, sockopt};

use super::{Call, Driver, Entry, Failed, Reply, SHOWN, Store};

const VISITS: &str = "wakeone:guestbook:visits";
const ENTRIES: &str = "wakeone:guestbook:entries";
/// How long to wait for the server.
const PATIENCE: Duration = Duration::from_secs(5);
/// A reply longer than this is not from our list.
const REPLY_BYTES_MAX: usize = 16 << 20;

/// A Redis server.
#[derive(Clone, Debug)]
pub struct Address {
    client: Client,
    name: String,
    at: SocketAddr,
}

impl Address {
    /// Reads a `redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]` URL.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn parse(url: &str) -> Result<Self, String> {
        let wrong = |why: &dyn fmt::Display| {
            format!("{url:?} is no store: {why}; give a directory or redis://HOST:PORT")
        };
        let client = Client::open(url).map_err(|error| wrong(&error))?;
        let ConnectionAddr::Tcp(host, port) = client.get_connection_info().addr().clone() else {
            return Err(wrong(&"only redis:// over TCP is supported"));
        };
        let at = (host.as_str(), port)
            .to_socket_addrs()
            .map_err(|error| wrong(&error))?
            .next()
            .ok_or_else(|| wrong(&"the host has no address"))?;
        Ok(Self {
            client,
            name: format!("redis://{host}:{port}"),
            at,
        })
    }

    fn fault(&self, why: &dyn fmt::Display) -> Failed {
        Failed(format!(
            "the store at {} failed: {why}; check that the server runs (redis-cli ping)",
            self.name
        ))
    }

    /// Returns the first commands of a new connection.
    fn greeting(&self) -> Pipeline {
        let settings = self.client.get_connection_info().redis_settings();
        let mut pipe = redis::pipe();
        if let Some(password) = settings.password() {
            let mut auth = redis::cmd("AUTH");
            if let Some(user) = settings.username() {
                auth.arg(user);
            }
            auth.arg(password);
            pipe.add_command(auth);
        }
        if settings.db() != 0 {
            pipe.cmd("SELECT").arg(settings.db());
        }
        pipe
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

/// The commands for a call.
fn commands(call: &Call) -> Pipeline {
    let mut pipe = redis::pipe();
    match call {
        Call::Page { visit } => {
            pipe.cmd(if *visit { "INCR" } else { "GET" }).arg(VISITS);
            pipe.cmd("LLEN").arg(ENTRIES);
            pipe.cmd("LRANGE").arg(ENTRIES).arg(0).arg(SHOWN - 1);
        }
        Call::Add(entry) => {
            pipe.cmd("LPUSH").arg(ENTRIES).arg(entry.encode());
        }
    }
    pipe
}

/// The reply to a call, from what the server answered to its commands.
fn reply(call: &Call, values: Vec<Value>) -> Result<Reply, String> {
    let values = values
        .into_iter()
        .map(|value| value.extract_error().map_err(|error| error.to_string()))
        .collect::<Result<Vec<_>, _>>()?;
    let wrong = |error: redis::ParsingError| error.to_string();
    match (call, <[Value; 3]>::try_from(values)) {
        (Call::Add(_), _) => Ok(Reply::Added),
        (Call::Page { .. }, Ok([visits, total, entries])) => {
            let entries: Vec<Vec<u8>> = from_redis_value(entries).map_err(wrong)?;
            Ok(Reply::Page {
                visits: from_redis_value::<Option<u64>>(visits)
                    .map_err(wrong)?
                    .unwrap_or(0),
                total: from_redis_value(total).map_err(wrong)?,
                entries: entries
                    .iter()
                    .filter_map(|bytes| Entry::decode(bytes))
                    .collect(),
            })
        }
        (Call::Page { .. }, Err(values)) => Err(format!("{} answers instead of 3", values.len())),
    }
}

/// The client that waits.
pub struct Blocking {
    address: Address,
    connection: Option<Connection>,
}

impl Blocking {
    /// Connects.
    ///
    /// # Errors
    /// When the server is not reached.
    pub fn open(address: &Address) -> Result<Self, Failed> {
        let mut new = Self {
            address: address.clone(),
            connection: None,
        };
        new.connect()?;
        Ok(new)
    }

    fn connect(&mut self) -> Result<&mut Connection, Failed> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self
                .address
                .client
                .get_connection_with_timeout(PATIENCE)
                .and_then(|connection| {
                    connection.set_read_timeout(Some(PATIENCE))?;
                    connection.set_write_timeout(Some(PATIENCE))?;
                    Ok(connection)
                })
                .map_err(|error| self.address.fault(&error))?,
        };
        Ok(self.connection.insert(connection))
    }
}

impl Store for Blocking {
    fn call(&mut self, call: &Call) -> Result<Reply, Failed> {
        let commands = commands(call);
        let result = commands.query::<Vec<Value>>(self.connect()?);
        let result = result
            .map_err(|error| error.to_string())
            .and_then(|values| reply(call, values));
        result.map_err(|why| {
            // The next call starts anew; this one is not repeated, it may have been done.
            self.connection = None;
            self.address.fault(&why)
        })
    }
}

/// The client that never waits. Its descriptor is an epoll instance with the socket in it, so
/// that it stays the same when the connection is made anew.
pub struct Pipelined {
    address: Address,
    epoll: OwnedFd,
    link: Option<Link>,
    failed: Vec<(u64, Result<Reply, Failed>)>,
}

/// One connection to the server.
struct Link {
    stream: TcpStream,
    unsent: Vec<u8>,
    received: Vec<u8>,
    waiting: VecDeque<Waiting>,
}

/// A call whose reply has not come.
struct Waiting {
    /// The caller's token and call; `None` for the first commands of a new connection.
    asked: Option<(u64, Call)>,
    commands: usize,
    values: Vec<Value>,
    since: Instant,
}

impl Pipelined {
    /// A client for the server at `address`; it connects at the first call.
    ///
    /// # Errors
    /// When no epoll instance can be made.
    pub fn new(address: &Address) -> Result<Self, Failed> {
        Ok(Self {
            address: address.clone(),
            epoll: epoll::create(CreateFlags::CLOEXEC).map_err(|error| address.fault(&error))?,
            link: None,
            failed: Vec::new(),
        })
    }

    /// Starts a connection, without waiting until it is there.
    fn connect(&self) -> Result<Link, Errno> {
        let family = match self.address.at {
            SocketAddr::V4(_) => net::AddressFamily::INET,
            SocketAddr::V6(_) => net::AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        match net::connect(&socket, &self.address.at) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error),
        }
        let events = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        epoll::add(&self.epoll, &socket, EventData::new_u64(0), events)?;
        let mut link = Link {
            stream: TcpStream::from(socket),
            unsent: Vec::new(),
            received: Vec::new(),
            waiting: VecDeque::new(),
        };
        let greeting = self.address.greeting();
        if !greeting.is_empty() {
            link.enqueue(None, &greeting);
        }
        Ok(link)
    }

    /// Gives up the connection and all calls that wait for it.
    fn give_up(&mut self, why: &dyn fmt::Display) {
        let fault = self.address.fault(why);
        if let Some(link) = self.link.take() {
            let asked = link.waiting.into_iter().filter_map(|waiting| waiting.asked);
            self.failed
                .extend(asked.map(|(token, _)| (token, Err(fault.clone()))));
        }
    }
}

impl AsFd for Pipelined {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Driver for Pipelined {
    fn submit(&mut self, token: u64, call: Call) -> Option<Result<Reply, Failed>> {
        let commands = commands(&call);
        let mut link = match self.link.take().map_or_else(|| self.connect(), Ok) {
            Ok(link) => link,
            Err(error) => return Some(Err(self.address.fault(&error))),
        };
        link.enqueue(Some((token, call)), &commands);
        // An error shows in `ready`, which is called because the socket is ready then.
        let _ = link.flush();
        self.link = Some(link);
        None
    }

    fn ready(&mut self) -> Vec<(u64, Result<Reply, Failed>)> {
        let mut events = Vec::with_capacity(4);
        let now = rustix::time::Timespec::default();
        let spare = rustix::buffer::spare_capacity(&mut events);
        let _ = epoll::wait(&self.epoll, spare, Some(&now));
        let mut replies = Vec::new();
        if let Some(link) = &mut self.link {
            let exchanged = link.flush().and_then(|()| link.receive(&mut replies));
            if let Err(why) = exchanged {
                self.give_up(&why);
            }
        }
        let fault = |why: String| self.address.fault(&why);
        let mut replies: Vec<_> = replies
            .into_iter()
            .map(|(token, result)| (token, result.map_err(fault)))
            .collect();
        replies.append(&mut self.failed);
        replies
    }
}

impl Link {
    fn enqueue(&mut self, asked: Option<(u64, Call)>, commands: &Pipeline) {
        self.unsent
            .extend_from_slice(&commands.get_packed_pipeline());
        self.waiting.push_back(Waiting {
            asked,
            commands: commands.len(),
            values: Vec::new(),
            since: Instant::now(),
        });
    }

    /// Sends as much as the socket takes.
    fn flush(&mut self) -> Result<(), String> {
        let mut sent = 0;
        while sent < self.unsent.len() {
            match self.stream.write(&self.unsent[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_not_ready(&error) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        self.unsent.drain(..sent);
        Ok(())
    }

    /// Reads the bytes that have come, and takes the complete replies out of them.
    fn receive(&mut self, replies: &mut Vec<(u64, Result<Reply, String>)>) -> Result<(), String> {
        let mut buffer = [0; 16 * 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err("the server closed the connection".to_owned()),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_not_ready(&error) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        self.take_replies(replies)?;
        match self.waiting.front() {
            Some(waiting) if waiting.since.elapsed() > PATIENCE => {
                Err(format!("no answer for {} s", PATIENCE.as_secs()))
            }
            _ => Ok(()),
        }
    }

    fn take_replies(
        &mut self,
        replies: &mut Vec<(u64, Result<Reply, String>)>,
    ) -> Result<(), String> {
        let mut done = 0;
        while let Some(length) = value_length(&self.received[done..])? {
            let bytes = &self.received[done..done + length];
            let value = redis::parse_redis_value(bytes).map_err(|error| error.to_string())?;
            done += length;
            let Some(first) = self.waiting.front_mut() else {
                return Err("an answer that nobody asked for".to_owned());
            };
            first.values.push(value);
            if first.values.len() < first.commands {
                continue;
            }
            let Some(Waiting { asked, values, .. }) = self.waiting.pop_front() else {
                continue;
            };
            match asked {
                Some((token, call)) => replies.push((token, reply(&call, values))),
                None => {
                    for value in values {
                        value.extract_error().map_err(|error| error.to_string())?;
                    }
                }
            }
        }
        self.received.drain(..done);
        Ok(())
    }
}

/// Whether the socket takes or has no bytes now, also because the connection is still being made.
fn is_not_ready(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::NotConnected
    )
}

/// How many bytes the first value (RESP 2) in `bytes` takes; `None` if it is not complete.
fn value_length(bytes: &[u8]) -> Result<Option<usize>, String> {
    let (mut at, mut values) = (0, 1_u64);
    while values > 0 {
        let Some(end) = bytes[at..].windows(2).position(|pair| pair == b"\r\n") else {
            return Ok(None);
        };
        let line = &bytes[at..at + end];
        at += end + 2;
        values -= 1;
        let number = |digits: &[u8]| -> Result<i64, String> {
            let text = std::str::from_utf8(digits).unwrap_or("");
            let number = text
                .parse()
                .map_err(|_| "an answer that is not Redis".to_owned())?;
            if number > REPLY_BYTES_MAX as i64 {
                return Err(format!("an answer of more than {REPLY_BYTES_MAX} bytes"));
            }
            Ok(number)
        };
        match line.split_first() {
            Some((b'+' | b'-' | b':', _)) => {}
            Some((b'$', digits)) => {
                if let Ok(length) = usize::try_from(number(digits)?) {
                    at += length + 2;
                }
            }
            Some((b'*', digits)) => values += u64::try_from(number(digits)?).unwrap_or(0),
            _ => return Err("an answer that is not Redis".to_owned()),
        }
        if at > bytes.len() {
            return Ok(None);
        }
    }
    Ok(Some(at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_of_values() {
        for whole in [
            &b"+OK\r\n"[..],
            b"-ERR no\r\n",
            b":12\r\n",
            b"$3\r\na\r\n\r\n",
            b"$-1\r\n",
            b"*-1\r\n",
            b"*0\r\n",
            b"*2\r\n:1\r\n*1\r\n$2\r\nab\r\n",
        ] {
            for length in 0..whole.len() {
                assert_eq!(
                    value_length(&whole[..length]),
                    Ok(None),
                    "{length} of {whole:?}"
                );
            }
            let more = [whole, b"+more"].concat();
            assert_eq!(value_length(&more), Ok(Some(whole.len())));
        }
        assert!(value_length(b"HTTP/1.1 400\r\n").is_err());
        assert!(value_length(b"$99999999999\r\n").is_err());
    }

    #[test]
    fn addresses() {
        assert!(Address::parse("redis://127.0.0.1:1/2").is_ok());
        for wrong in [
            "http://127.0.0.1/",
            "redis://",
            "redis+unix:///tmp/x",
            "redis://127.0.0.1:x",
        ] {
            let said = Address::parse(wrong).expect_err(wrong);
            assert!(said.contains("redis://HOST:PORT"), "{said}");
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in "[-+:$*0-9a\r\n]{0,60}") {
            if let Ok(Some(length)) = value_length(bytes.as_bytes()) {
                let _ = redis::parse_redis_value(&bytes.as_bytes()[..length]);
            }
        }
    }
}
