//! The messages between the library in a server's processes and the broker: fixed sizes, native byte order (both ends
//! run on one machine), one message a packet. The other side is `src/c/broker.c`.

use std::fmt;

const MAGIC: u32 = 0x6b61_572e;
const VERSION: u16 = 2;
/// Bytes of a token.
pub const TOKEN_BYTES: usize = 16;
/// Bytes of a request.
pub const REQUEST_BYTES: usize = 32;
/// Bytes of a reply.
pub const REPLY_BYTES: usize = 8;

/// The secret that lets a process ask: 128 bits that only the broker and the processes that it started know.
#[derive(Clone, Copy)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// Makes a token of random bytes.
    pub fn new(bytes: [u8; TOKEN_BYTES]) -> Self {
        Self(bytes)
    }

    /// Compares in a time that does not depend on where the two differ.
    fn is(&self, other: &[u8]) -> bool {
        let difference = self
            .0
            .iter()
            .zip(other)
            .fold(0, |sum, (one, other)| sum | (one ^ other));
        other.len() == TOKEN_BYTES && std::hint::black_box(difference) == 0
    }

    /// Returns the value of [`crate::VARIABLE`]: the broker's name and this token.
    pub fn variable(&self, name: &str) -> String {
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{name}:{hex}")
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// How a process came to wait for datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// It is about to add the socket to an epoll set.
    Epoll,
    /// In poll or select.
    Poll,
    /// In a call that receives datagrams.
    Receive,
}

/// A message of the library to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The process is about to receive from the attached UDP socket, which it inherited, or to wait for that.
    Claim {
        /// Its number in the process.
        fd: i32,
        /// The call with which it waits.
        how: How,
    },
    /// Another thread of the process begins to receive from the attached UDP socket.
    Reader {
        /// Its number in the process.
        fd: i32,
    },
    /// A thread has stopped receiving from its queue, which is attached. The queue is to be chosen no more.
    GivenBack {
        /// Its number in the process.
        fd: i32,
    },
    /// An empty datagram came on the attached UDP socket. Did the broker send it, to have an orphaned queue read?
    Left {
        /// Its number in the process.
        fd: i32,
    },
    /// The granted queue is in the socket's place, or, a thread's queue, at a number of its own.
    Taken {
        /// Its number in the process.
        fd: i32,
    },
}

/// Why a message is not one of the library's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It has another size, or does not begin as ours do.
    #[error("not a message of ours")]
    Foreign,
    /// The token is another one.
    #[error("a wrong token")]
    Token,
    /// It asks for something that does not exist.
    #[error("an impossible request")]
    Request,
}

impl Request {
    /// Reads a request.
    ///
    /// # Errors
    /// It is no request, or its sender does not know the token.
    pub fn parse(bytes: &[u8], token: &Token) -> Result<Self, Malformed> {
        let bytes: &[u8; REQUEST_BYTES] = bytes.try_into().map_err(|_| Malformed::Foreign)?;
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let half = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        if u32::from_ne_bytes(word(0)) != MAGIC || half(4) != VERSION {
            return Err(Malformed::Foreign);
        }
        if !token.is(&bytes[8..24]) {
            return Err(Malformed::Token);
        }
        let fd = i32::from_ne_bytes(word(24));
        let how = u32::from_ne_bytes(word(28));
        match (half(6), how, fd >= 0) {
            (1, 1..=3, true) => Ok(Self::Claim {
                fd,
                how: match how {
                    1 => How::Epoll,
                    2 => How::Poll,
                    _ => How::Receive,
                },
            }),
            (2, 0, true) => Ok(Self::Taken { fd }),
            (3, 0, true) => Ok(Self::Reader { fd }),
            (4, 0, true) => Ok(Self::GivenBack { fd }),
            (5, 0, true) => Ok(Self::Left { fd }),
            _ => Err(Malformed::Request),
        }
    }
}

/// The broker's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Leave the socket as it is.
    Leave,
    /// Put the attached queue in the socket's place, or receive from it. For an orphaned queue: read it as well.
    Queue,
    /// Noted.
    Done,
}

impl Reply {
    /// As bytes.
    pub fn encode(self) -> [u8; REPLY_BYTES] {
        let what: u16 = match self {
            Self::Leave => 0,
            Self::Queue => 1,
            Self::Done => 2,
        };
        let mut bytes = [0; REPLY_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_ne_bytes());
        bytes[6..].copy_from_slice(&what.to_ne_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(what: u16, fd: i32, how: u32, token: [u8; TOKEN_BYTES]) -> Vec<u8> {
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend(VERSION.to_ne_bytes());
        bytes.extend(what.to_ne_bytes());
        bytes.extend(token);
        bytes.extend(fd.to_ne_bytes());
        bytes.extend(how.to_ne_bytes());
        bytes
    }

    const KEY: [u8; TOKEN_BYTES] = *b"0123456789abcdef";

    #[test]
    fn requests_are_understood() {
        let parse = |what, fd, how| Request::parse(&message(what, fd, how, KEY), &Token::new(KEY));
        let claim = |how| Request::Claim { fd: 0, how };
        for (what, fd, how, request) in [
            (1, 0, 1, claim(How::Epoll)),
            (1, 0, 2, claim(How::Poll)),
            (1, 0, 3, claim(How::Receive)),
            (2, 9, 0, Request::Taken { fd: 9 }),
            (3, 9, 0, Request::Reader { fd: 9 }),
            (4, 9, 0, Request::GivenBack { fd: 9 }),
            (5, 9, 0, Request::Left { fd: 9 }),
        ] {
            assert_eq!(parse(what, fd, how), Ok(request));
        }
        for (what, fd, how) in [
            (0, 1, 1),
            (1, 1, 0),
            (1, 1, 4),
            (1, -1, 1),
            (2, 1, 1),
            (3, 1, 1),
            (4, 1, 1),
            (5, 1, 1),
            (6, 1, 0),
        ] {
            assert_eq!(parse(what, fd, how), Err(Malformed::Request));
        }
        // The differences of two bytes must not cancel each other.
        for differ in [&[15][..], &[0, 15]] {
            let mut other = KEY;
            differ.iter().for_each(|at| other[*at] ^= 1);
            let parsed = Request::parse(&message(3, 3, 0, other), &Token::new(KEY));
            assert_eq!(parsed, Err(Malformed::Token));
        }
        for (at, size) in [(0, 32), (4, 32), (31, 31), (31, 33)] {
            let mut foreign = message(3, 3, 0, KEY);
            foreign[at] ^= 1;
            foreign.resize(size, 0);
            let parsed = Request::parse(&foreign, &Token::new(KEY));
            assert_eq!(parsed, Err(Malformed::Foreign), "{at} {size}");
        }
    }

    /// `src/c/broker.c` reads them.
    #[test]
    fn the_library_understands_the_replies() {
        let kind = |reply: Reply| {
            let bytes = reply.encode();
            assert_eq!(bytes[..6], message(0, 0, 0, KEY)[..6], "as requests begin");
            u16::from_ne_bytes([bytes[6], bytes[7]])
        };
        assert_eq!(
            [Reply::Leave, Reply::Queue, Reply::Done].map(kind),
            [0, 1, 2]
        );
        let variable = Token::new([0xf0; TOKEN_BYTES]).variable("name");
        assert_eq!(variable, format!("name:{}", "f0".repeat(16)));
    }

    #[test]
    fn no_log_shows_a_token() {
        assert_eq!(format!("{:?}", Token::new(KEY)), "Token(…)");
    }

    #[test]
    fn messages_survive_foreign_bytes() {
        let seeds = [message(1, 3, 3, KEY), message(5, i32::MAX, 0, KEY)];
        crate::foreign::survives("broker-request", &seeds, |bytes| {
            if Request::parse(bytes, &Token::new(KEY)).is_ok() {
                assert!(bytes.len() == REQUEST_BYTES && bytes[8..24] == KEY);
            }
        });
    }

    proptest! {
        #[test]
        fn nothing_without_the_token_is_understood(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            prop_assert!(Request::parse(&bytes, &Token::new(KEY)).is_err());
        }

        #[test]
        fn what_is_understood_is_whole(what: u16, fd: i32, how: u32, cut in 0_usize..40) {
            let mut bytes = message(what, fd, how, KEY);
            bytes.truncate(cut);
            if let Ok(request) = Request::parse(&bytes, &Token::new(KEY)) {
                prop_assert_eq!(bytes.len(), REQUEST_BYTES);
                let (Request::Claim { fd: told, .. }
                | Request::Reader { fd: told }
                | Request::GivenBack { fd: told }
                | Request::Left { fd: told }
                | Request::Taken { fd: told }) = request;
                prop_assert!(told == fd && fd >= 0 && (1..=5).contains(&what));
            }
        }
    }
}
