//! One connection's conversation, without its I/O: bytes received go in, bytes to send come out,
//! and [`Session::step`] returns what the connection needs next. The blocking models and the event
//! loops drive the same code.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::system::stop;

use crate::app::{App, Outcome};
use crate::http::{self, Answer, Content, Parsed, Status};
use crate::store::{Call, Failed, Reply};

/// How much of a file is read at a time.
const FILE_PIECE_BYTES: u64 = 64 * 1024;

/// The next need of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// More bytes from the client.
    Read,
    /// [`Session::unsent`] sent to the client.
    Write,
    /// A call to the store, which [`Session::question`] returns.
    Ask,
    /// The store's reply, given to [`Session::reply`].
    Reply,
    /// The end: close the connection.
    Close {
        /// The client may still be sending: end our side, then read and drop what comes for a
        /// moment. Closing at once would reset the connection and take the answer with it.
        linger: bool,
    },
}

/// One connection's conversation.
#[derive(Debug, Default)]
pub struct Session {
    input: Vec<u8>,
    output: Vec<u8>,
    sent: usize,
    file: Option<Piece>,
    continued: bool,
    ended: bool,
    closing: bool,
    linger: bool,
    answered: u64,
    asked: Option<Asked>,
}

/// A question to the store without its reply.
#[derive(Debug)]
struct Asked {
    /// `None` once it has been taken.
    call: Option<Call>,
    head_only: bool,
}

/// The part of a file that is left to send.
#[derive(Debug)]
struct Piece {
    file: File,
    offset: u64,
    left: u64,
}

impl Session {
    /// A conversation that has not begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes that the client sent.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// Records that the client has ended its side. Its requests so far are still answered.
    pub fn end_of_input(&mut self) {
        self.ended = true;
    }

    /// Bytes to send now.
    pub fn unsent(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    /// Whether the connection is closed once [`Self::unsent`] is sent: nothing follows it.
    pub fn is_last(&self) -> bool {
        self.closing && self.file.is_none() && self.asked.is_none()
    }

    /// The first `count` bytes of [`Self::unsent`] are sent.
    pub fn sent(&mut self, count: usize) {
        self.sent += count;
    }

    /// Returns the question to the store, once after each [`Next::Ask`].
    pub fn question(&mut self) -> Option<Call> {
        self.asked.as_mut()?.call.take()
    }

    /// Takes the store's reply.
    pub fn reply(&mut self, app: &App, reply: Result<Reply, Failed>) {
        if let Some(asked) = self.asked.take() {
            self.encode(app, app.answer(reply), asked.head_only);
        }
    }

    /// Whether the connection is between two requests: closing it loses nothing.
    pub fn is_idle(&self) -> bool {
        self.answered > 0 && self.is_silent()
    }

    /// Whether nothing of a request has come yet.
    pub fn is_silent(&self) -> bool {
        self.input.is_empty()
            && self.unsent().is_empty()
            && self.file.is_none()
            && self.asked.is_none()
    }

    /// The client took too long. A client that has begun a request gets an answer that tells it so.
    pub fn time_out(&mut self, app: &App) {
        let reading = self.unsent().is_empty() && self.file.is_none() && self.asked.is_none();
        if !self.closing && reading && !self.input.is_empty() {
            self.refuse(app, Status(408));
        } else {
            self.closing = true;
            self.sent = self.output.len();
            self.file = None;
            self.asked = None;
        }
    }

    /// Goes on as far as it can without I/O on the connection, by at most one request: an answer
    /// is sent before the next request is worked on, however many are waiting.
    pub fn step(&mut self, app: &App) -> Next {
        loop {
            if !self.unsent().is_empty() {
                return Next::Write;
            }
            self.output.clear();
            self.sent = 0;
            if let Some(asked) = &self.asked {
                return match asked.call {
                    Some(_) => Next::Ask,
                    None => Next::Reply,
                };
            } else if self.file.is_some() {
                self.read_file();
            } else if self.closing {
                return Next::Close {
                    linger: self.linger,
                };
            } else if let Some(next) = self.next_request(app) {
                return next;
            }
        }
    }

    /// Takes the next request and answers it; returns `None` when there is output now.
    fn next_request(&mut self, app: &App) -> Option<Next> {
        let input = std::mem::take(&mut self.input);
        let consumed = match http::parse(&input) {
            Parsed::Incomplete {
                expects_continue: true,
            } if !self.continued => {
                self.continued = true;
                self.output
                    .extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
                0
            }
            Parsed::Incomplete { .. } => {
                self.input = input;
                return Some(if self.ended {
                    Next::Close { linger: false }
                } else {
                    Next::Read
                });
            }
            Parsed::Complete(request, consumed) => {
                let outcome = app.handle(&request);
                let head_only = request.method == http::Method::Head;
                self.continued = false;
                self.closing = !request.keep_alive || !app.keep_alive;
                match outcome {
                    Outcome::Answer(answer) => self.encode(app, answer, head_only),
                    Outcome::Ask(call) => {
                        self.asked = Some(Asked {
                            call: Some(call),
                            head_only,
                        });
                    }
                }
                consumed
            }
            Parsed::Bad(status) => {
                self.refuse(app, status);
                input.len()
            }
        };
        self.input = input;
        self.input.drain(..consumed);
        None
    }

    fn refuse(&mut self, app: &App, status: Status) {
        self.closing = true;
        self.linger = true;
        self.encode(app, Answer::status(status), false);
    }

    fn encode(&mut self, app: &App, answer: Answer, head_only: bool) {
        self.answered += 1;
        if let Some(counter) = &app.counter {
            counter.increment();
        }
        self.closing |= stop::requested();
        let connection = if self.closing { "close" } else { "keep-alive" };
        let mut length = String::new();
        if answer.status != Status(304) {
            length = format!("Content-Length: {}\r\n", answer.content.length());
        }
        let written = with_date(|date| {
            write!(
                self.output,
                "HTTP/1.1 {} {}\r\nDate: {date}\r\nX-Worker: {}\r\nX-Pid: {}\r\n\
                 Content-Type: {}\r\n{length}Connection: {connection}\r\n{}\r\n",
                answer.status.0,
                answer.status.reason(),
                app.worker,
                app.pid,
                answer.content_type,
                answer.headers,
            )
        });
        debug_assert!(written.is_ok(), "writing into a vector does not fail");
        if head_only {
            return;
        }
        match answer.content {
            Content::Bytes(bytes) => self.output.extend_from_slice(&bytes),
            Content::Static(bytes) => self.output.extend_from_slice(bytes),
            Content::File {
                file,
                offset,
                length,
            } => {
                self.file = (length > 0).then_some(Piece {
                    file,
                    offset,
                    left: length,
                });
                // A small file goes out in one piece with its head.
                self.read_file();
            }
        }
    }

    /// Appends the next piece of the file to the output.
    fn read_file(&mut self) {
        let Some(piece) = &mut self.file else { return };
        let before = self.output.len();
        let wanted = piece.left.min(FILE_PIECE_BYTES) as usize;
        self.output.resize(before + wanted, 0);
        match piece.file.read_at(&mut self.output[before..], piece.offset) {
            Ok(count) if count > 0 => {
                self.output.truncate(before + count);
                piece.offset += count as u64;
                piece.left -= count as u64;
                if piece.left == 0 {
                    self.file = None;
                }
            }
            _ => {
                // The file has become shorter than announced: closing early is the only way to
                // tell the client.
                self.output.truncate(before);
                self.file = None;
                self.closing = true;
            }
        }
    }
}

/// Passes the value of the `Date` header, made once a second and thread, to `use_it`.
fn with_date<R>(use_it: impl FnOnce(&str) -> R) -> R {
    thread_local! {
        static DATE: RefCell<(u64, String)> = const { RefCell::new((0, String::new())) };
    }
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
        .as_secs();
    DATE.with_borrow_mut(|(second, text)| {
        if *second != now {
            *second = now;
            *text = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(now));
        }
        use_it(text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::tests::app;
    use proptest::prelude::*;

    /// All answers when `input` arrives in pieces that end at `cuts`.
    fn answers(input: &[u8], cuts: &[usize]) -> (String, Option<Next>) {
        let (mut session, app) = (Session::new(), app());
        let (mut said, mut last, mut from) = (Vec::new(), None, 0);
        for cut in cuts.iter().copied().chain([input.len()]) {
            let to = cut.clamp(from, input.len());
            session.receive(&input[from..to]);
            from = to;
            last = loop {
                match session.step(&app) {
                    Next::Write => {
                        said.extend_from_slice(session.unsent());
                        session.sent(session.unsent().len());
                    }
                    Next::Ask => {
                        let call = session.question().expect("a question");
                        assert_eq!(session.step(&app), Next::Reply);
                        session.reply(&app, Err(Failed(format!("{call:?}"))));
                    }
                    next => break Some(next),
                }
            };
            if let Some(Next::Close { .. }) = last {
                break;
            }
        }
        let text = String::from_utf8_lossy(&said)
            .lines()
            .filter(|line| !line.starts_with("Date: "))
            .collect::<Vec<_>>()
            .join("\n");
        (text, last)
    }

    #[test]
    fn says_who_answers() {
        let (said, next) = answers(b"GET /whoami HTTP/1.0\r\n\r\n", &[]);
        assert!(said.contains("\nX-Worker: 3\n"), "{said}");
        assert!(said.contains("\nX-Pid: 7\n"), "{said}");
        assert!(said.contains("\nConnection: close\n"), "{said}");
        assert_eq!(next, Some(Next::Close { linger: false }));
    }

    #[test]
    fn a_refusal_ends_the_conversation() {
        let (said, next) = answers(b"nonsense\r\n\r\nGET / HTTP/1.0\r\n\r\n", &[]);
        assert!(said.starts_with("HTTP/1.1 400 "), "{said}");
        assert_eq!(said.matches("HTTP/1.1").count(), 1);
        assert_eq!(next, Some(Next::Close { linger: true }));
    }

    #[test]
    fn continue_is_said_once() {
        let head =
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n";
        let input = [&head[..], b"ab"].concat();
        let (said, _) = answers(&input, &[head.len(), head.len() + 1]);
        assert_eq!(said.matches("100 Continue").count(), 1, "{said}");
    }

    #[test]
    fn a_late_request_is_told_and_a_silent_client_is_not() {
        let app = app();
        let mut session = Session::new();
        session.time_out(&app);
        assert_eq!(session.step(&app), Next::Close { linger: false });

        let mut session = Session::new();
        session.receive(b"GET / HT");
        assert_eq!(session.step(&app), Next::Read);
        session.time_out(&app);
        assert_eq!(session.step(&app), Next::Write);
        assert!(session.unsent().starts_with(b"HTTP/1.1 408 "));
    }

    fn requests() -> impl Strategy<Value = Vec<u8>> {
        let one = prop_oneof![
            Just("GET /whoami HTTP/1.1\r\nHost: a\r\n\r\n"),
            Just("HEAD / HTTP/1.1\r\nHost: a\r\n\r\n"),
            Just("GET /no HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"),
            Just("POST /whoami HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"),
            Just("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
            Just("\r\n"),
            Just("oops"),
        ];
        proptest::collection::vec(one, 0..8).prop_map(|all| all.concat().into_bytes())
    }

    proptest! {
        #[test]
        fn splits_do_not_matter(
            input in requests(),
            mut cuts in proptest::collection::vec(0_usize..400, 0..20),
        ) {
            cuts.sort_unstable();
            prop_assert_eq!(answers(&input, &cuts), answers(&input, &[]));
        }
    }
}
