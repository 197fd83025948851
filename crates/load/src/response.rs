//! Reads one HTTP/1.x answer from pieces of any size: the head by httparse, then a body by length, in chunks, or until
//! the connection closes. The body is counted, not kept.

use std::mem::MaybeUninit;

/// Why bytes are not an HTTP/1.x answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an HTTP answer: {0}")]
pub struct BadResponse(pub &'static str);

/// How far an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Bytes are missing; all of the piece was used.
    More,
    /// The answer is whole and ends after this many of the bytes given.
    Done {
        /// Bytes of the last piece that belong to it.
        used: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    Length(u64),
    Chunks(Chunk),
    UntilClose,
    Done,
}

/// The position in a chunked body (RFC 9112, 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Size { value: u64, digits: u8 },
    Extension { value: u64 },
    Data(u64),
    DataEnd,
    Trailer { empty: bool },
}

/// More than any sane head; keeps a server that never ends its head from filling memory.
const HEAD_MAX: usize = 64 * 1024;
const HEADERS_USUAL: usize = 32;
const HEADERS_MAX: usize = 512;

const NO_HEAD: BadResponse = BadResponse("its head does not parse");

/// Reads one answer; [`reset`](Self::reset) makes it ready for the next and keeps its buffers.
#[derive(Debug)]
pub struct ResponseReader {
    state: State,
    /// A head that came in pieces; a head that comes whole is parsed where it lies.
    partial: Vec<u8>,
    status: u16,
    keep_alive: bool,
    worker: Vec<u8>,
    body: u64,
    /// The requests are HEAD: no answer has a body, whatever length it names.
    bodiless: bool,
}

impl Default for ResponseReader {
    fn default() -> Self {
        Self {
            state: State::Head,
            partial: Vec::new(),
            status: 0,
            keep_alive: false,
            worker: Vec::new(),
            body: 0,
            bodiless: false,
        }
    }
}

impl ResponseReader {
    /// Reads answers to this method.
    pub fn of(method: &str) -> Self {
        Self {
            bodiless: method == "HEAD",
            ..Self::default()
        }
    }

    /// Forgets the answer.
    pub fn reset(&mut self) {
        self.state = State::Head;
        self.partial.clear();
        self.status = 0;
        self.worker.clear();
        self.keep_alive = false;
        self.body = 0;
    }

    /// The status code, once the head is read; 0 before.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The value of `X-Worker`, empty without one.
    pub fn worker(&self) -> &[u8] {
        &self.worker
    }

    /// Whether the server lets the connection be used again.
    pub fn keep_alive(&self) -> bool {
        self.keep_alive
    }

    /// Bytes of body (without chunk framing) so far.
    pub fn body_bytes(&self) -> u64 {
        self.body
    }

    /// Takes the next piece.
    pub fn feed(&mut self, piece: &[u8]) -> Result<Step, BadResponse> {
        let mut used = 0;
        loop {
            let rest = &piece[used..];
            if self.state == State::Done {
                return Ok(Step::Done { used });
            }
            if rest.is_empty() {
                return Ok(Step::More);
            }
            used += match self.state {
                State::Head => self.head(rest)?,
                State::Length(left) => {
                    let taken = rest.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    self.body += taken as u64;
                    let left = left - taken as u64;
                    self.state = if left == 0 {
                        State::Done
                    } else {
                        State::Length(left)
                    };
                    taken
                }
                State::Chunks(chunk) => self.chunk(chunk, rest)?,
                State::UntilClose => {
                    self.body += rest.len() as u64;
                    rest.len()
                }
                State::Done => 0,
            };
        }
    }

    /// The server closed. Returns true if this answer ends so, false if it is cut off.
    pub fn finish(&mut self) -> bool {
        if self.state == State::UntilClose {
            self.state = State::Done;
        }
        self.state == State::Done
    }

    /// Reads a head, or keeps its beginning for later; returns how many bytes of `rest` it took.
    ///
    /// A kept beginning is parsed again with each line, not with each piece. A server may send a long head byte by byte.
    fn head(&mut self, rest: &[u8]) -> Result<usize, BadResponse> {
        let blank = self.blank(rest);
        if blank > 0 {
            return Ok(blank);
        }
        if self.partial.is_empty() {
            let used = self.judge_head(rest)?;
            return Ok(used.unwrap_or_else(|| {
                self.partial.extend_from_slice(rest);
                rest.len()
            }));
        }
        let before = self.partial.len();
        let mut whole = std::mem::take(&mut self.partial);
        whole.extend_from_slice(rest);
        let used = if rest.contains(&b'\n') {
            self.judge_head(&whole)?
        } else if begins_like_http(&whole) {
            None
        } else {
            return Err(NO_HEAD);
        };
        if used.is_none() {
            if whole.len() > HEAD_MAX {
                return Err(BadResponse("its head is longer than 64 KiB"));
            }
            self.partial = whole;
            return Ok(rest.len());
        }
        whole.clear();
        self.partial = whole;
        Ok(used.map_or(rest.len(), |n| n - before))
    }

    /// How many bytes end an empty line before the answer. Such lines are read over, as by httparse.
    fn blank(&mut self, rest: &[u8]) -> usize {
        match (&self.partial[..], rest) {
            ([], [b'\n', ..]) => 1,
            ([], [b'\r', b'\n', ..]) => 2,
            ([b'\r'], [b'\n', ..]) => {
                self.partial.clear();
                1
            }
            _ => 0,
        }
    }

    /// Judges a head by its whole lines alone: the verdict is the same for any pieces. `None` where it is not whole yet.
    fn judge_head(&mut self, bytes: &[u8]) -> Result<Option<usize>, BadResponse> {
        self.parse_head::<HEADERS_USUAL>(bytes).or_else(|error| {
            match bytes.iter().rposition(|byte| *byte == b'\n') {
                Some(end) if end + 1 < bytes.len() => {
                    self.parse_head::<HEADERS_USUAL>(&bytes[..=end])
                }
                Some(_) => Err(error),
                None if begins_like_http(bytes) => Ok(None),
                None => Err(error),
            }
        })
    }

    /// `None` where the head is not whole yet.
    fn parse_head<const HEADERS: usize>(
        &mut self,
        bytes: &[u8],
    ) -> Result<Option<usize>, BadResponse> {
        #[cfg(test)]
        tests::PARSED.set(tests::PARSED.get() + bytes.len());
        let mut headers = [const { MaybeUninit::uninit() }; HEADERS];
        let mut response = httparse::Response::new(&mut []);
        let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(
            &mut response,
            bytes,
            &mut headers,
        );
        match parsed {
            Ok(httparse::Status::Complete(used)) => self.take_head(&response).map(|()| Some(used)),
            Ok(httparse::Status::Partial) => Ok(None),
            Err(httparse::Error::TooManyHeaders) if HEADERS < HEADERS_MAX => {
                self.parse_head::<HEADERS_MAX>(bytes)
            }
            Err(httparse::Error::TooManyHeaders) => {
                Err(BadResponse("it has more than 512 headers"))
            }
            Err(_) => Err(NO_HEAD),
        }
    }

    fn take_head(&mut self, response: &httparse::Response<'_, '_>) -> Result<(), BadResponse> {
        // A head that is refused may be judged once more.
        self.worker.clear();
        self.status = response.code.unwrap_or(0);
        if (100..200).contains(&self.status) && self.status != 101 {
            return Ok(()); // an interim answer: the real head follows
        }
        self.keep_alive = response.version == Some(1);
        let mut length = None;
        let mut coded = None;
        for header in response.headers.iter() {
            // By length first: most headers are none of these.
            match header.name.len() {
                8 if header.name.eq_ignore_ascii_case("x-worker") => {
                    self.worker.extend_from_slice(header.value)
                }
                10 if header.name.eq_ignore_ascii_case("connection") => {
                    self.connection(header.value)
                }
                14 if header.name.eq_ignore_ascii_case("content-length") => {
                    let value = parse_length(header.value)?;
                    if length.replace(value).is_some_and(|before| before != value) {
                        return Err(BadResponse("it has two different content lengths"));
                    }
                }
                17 if header.name.eq_ignore_ascii_case("transfer-encoding") => {
                    coded = Some(list_ends_with(header.value, b"chunked"));
                }
                _ => {}
            }
        }
        self.state = match (self.status, coded, length) {
            _ if self.bodiless => State::Done,
            (101 | 204 | 304, ..) | (_, None, Some(0)) => State::Done,
            (_, Some(true), _) => State::Chunks(Chunk::Size {
                value: 0,
                digits: 0,
            }),
            (_, None, Some(length)) => State::Length(length),
            (_, Some(false), _) | (_, None, None) => State::UntilClose,
        };
        if self.state == State::UntilClose || self.status == 101 {
            self.keep_alive = false;
        }
        Ok(())
    }

    fn connection(&mut self, value: &[u8]) {
        for token in value.split(|&b| b == b',').map(<[u8]>::trim_ascii) {
            if token.eq_ignore_ascii_case(b"close") {
                self.keep_alive = false;
            } else if token.eq_ignore_ascii_case(b"keep-alive") {
                self.keep_alive = true;
            }
        }
    }

    /// Takes one step in a chunked body; returns how many bytes it took.
    fn chunk(&mut self, chunk: Chunk, rest: &[u8]) -> Result<usize, BadResponse> {
        let byte = rest[0];
        let after_size = |value| {
            if value == 0 {
                Chunk::Trailer { empty: true }
            } else {
                Chunk::Data(value)
            }
        };
        let (next, used) = match chunk {
            Chunk::Size { value, digits } => match (byte, (byte as char).to_digit(16)) {
                (_, Some(_)) if digits == 15 => {
                    return Err(BadResponse("a chunk size is too long"));
                }
                (_, Some(digit)) => (
                    Chunk::Size {
                        value: value << 4 | u64::from(digit),
                        digits: digits + 1,
                    },
                    1,
                ),
                (b'\n', None) if digits > 0 => (after_size(value), 1),
                (b'\r' | b';' | b' ' | b'\t', None) if digits > 0 => {
                    (Chunk::Extension { value }, 1)
                }
                _ => return Err(BadResponse("a chunk has no size")),
            },
            Chunk::Extension { value } => match rest.iter().position(|&b| b == b'\n') {
                Some(end) => (after_size(value), end + 1),
                None => (chunk, rest.len()),
            },
            Chunk::Data(left) => {
                let taken = rest.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                self.body += taken as u64;
                let left = left - taken as u64;
                (
                    if left == 0 {
                        Chunk::DataEnd
                    } else {
                        Chunk::Data(left)
                    },
                    taken,
                )
            }
            Chunk::DataEnd => match byte {
                b'\r' => (chunk, 1),
                b'\n' => (
                    Chunk::Size {
                        value: 0,
                        digits: 0,
                    },
                    1,
                ),
                _ => return Err(BadResponse("a chunk is longer than its size")),
            },
            Chunk::Trailer { empty } => match byte {
                b'\n' if empty => {
                    self.state = State::Done;
                    return Ok(1);
                }
                b'\n' => (Chunk::Trailer { empty: true }, 1),
                b'\r' => (chunk, 1),
                _ => (Chunk::Trailer { empty: false }, 1),
            },
        };
        self.state = State::Chunks(next);
        Ok(used)
    }
}

/// Whether a line that has not ended may become the first one of an answer.
fn begins_like_http(bytes: &[u8]) -> bool {
    const BEGIN: &[u8] = b"HTTP/1.";
    bytes == b"\r" || bytes.iter().zip(BEGIN).all(|(a, b)| a == b)
}

fn parse_length(value: &[u8]) -> Result<u64, BadResponse> {
    let digits = value.trim_ascii();
    let text = std::str::from_utf8(digits)
        .ok()
        .filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
    text.and_then(|text| text.parse().ok())
        .ok_or(BadResponse("its content length is not a number"))
}

fn list_ends_with(value: &[u8], token: &[u8]) -> bool {
    value
        .rsplit(|&b| b == b',')
        .next()
        .is_some_and(|last| last.trim_ascii().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    thread_local! {
        /// Bytes of heads that were parsed, each time that they were.
        pub(super) static PARSED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    /// A parsed answer: status, worker, keep-alive, body bytes, whole.
    type Read = (u16, Vec<u8>, bool, u64, bool);

    /// Feeds `pieces`, then the end of the stream.
    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Read, BadResponse> {
        let mut reader = ResponseReader::default();
        for piece in pieces {
            match reader.feed(piece)? {
                Step::More => {}
                Step::Done { used } if used == piece.len() => {}
                Step::Done { .. } => return Err(BadResponse("bytes after its end")),
            }
        }
        let whole = reader.finish();
        Ok((
            reader.status(),
            reader.worker().to_vec(),
            reader.keep_alive(),
            reader.body_bytes(),
            whole,
        ))
    }

    fn whole(text: &str) -> Result<Read, BadResponse> {
        read([text.as_bytes()])
    }

    #[test]
    fn answers_of_every_framing() {
        let ok = |worker: &str, keep, body| Ok((200, worker.as_bytes().to_vec(), keep, body, true));
        assert_eq!(
            whole("HTTP/1.1 200 OK\r\nX-Worker: 3\r\nContent-Length: 2\r\n\r\nok"),
            ok("3", true, 2)
        );
        assert_eq!(
            whole("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: close\r\n\r\n"),
            ok("", false, 0)
        );
        assert_eq!(
            whole("HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ok("", false, 2)
        );
        assert_eq!(
            whole("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok"),
            ok("", true, 2)
        );
        assert_eq!(
            whole("HTTP/1.1 200 OK\r\nx-worker: a\r\n\r\nuntil the end"),
            ok("a", false, 13)
        );
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n";
        assert_eq!(whole(&format!("{chunked}\r\n")), ok("", true, 13));
        assert_eq!(
            whole(&format!("{chunked}Trailer: 1\r\n\r\n")),
            ok("", true, 13)
        );
        assert_eq!(
            whole(chunked),
            Ok((200, vec![], true, 13, false)),
            "the last line is missing"
        );
        let interim = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx";
        assert_eq!(whole(interim), ok("", true, 1));
        assert_eq!(
            whole("HTTP/1.1 204 No Content\r\n\r\n"),
            Ok((204, vec![], true, 0, true))
        );
        let many: String = (0..100).map(|n| format!("h{n}: x\r\n")).collect();
        assert_eq!(
            whole(&format!(
                "HTTP/1.1 200 OK\r\n{many}Content-Length: 1\r\n\r\nx"
            )),
            ok("", true, 1)
        );
    }

    #[test]
    fn answers_without_a_body() {
        let mut reader = ResponseReader::of("HEAD");
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        let used = head.len();
        assert_eq!(reader.feed(head), Ok(Step::Done { used }));
        assert_eq!(reader.feed(b"next"), Ok(Step::Done { used: 0 }));
        let none = |status, keep| Ok((status, Vec::new(), keep, 0, true));
        assert_eq!(
            whole("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
            none(304, true)
        );
        // The connection speaks another protocol from then on.
        assert_eq!(
            whole("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\n\r\n"),
            none(101, false)
        );
    }

    #[test]
    fn a_reader_is_as_new_for_the_next_answer() {
        let mut reader = ResponseReader::default();
        let answer = b"HTTP/1.1 404 Not Found\r\nX-Worker: a\r\nContent-Length: 2\r\n\r\nok";
        for _ in 0..2 {
            assert_eq!(reader.status(), 0);
            assert!(!reader.keep_alive() && reader.worker().is_empty());
            assert_eq!(reader.body_bytes(), 0);
            // In two pieces, of which the first is not a whole head.
            assert_eq!(reader.feed(&answer[..20]), Ok(Step::More));
            let used = answer.len() - 20;
            assert_eq!(reader.feed(&answer[20..]), Ok(Step::Done { used }));
            assert_eq!((reader.status(), reader.worker()), (404, &b"a"[..]));
            assert!(reader.keep_alive());
            assert_eq!(reader.body_bytes(), 2);
            reader.reset();
        }
        assert_eq!(reader.feed(&answer[..20]), Ok(Step::More));
        reader.reset();
        let used = answer.len();
        assert_eq!(
            reader.feed(answer),
            Ok(Step::Done { used }),
            "from its beginning"
        );
    }

    #[test]
    fn heads_and_chunk_sizes_are_limited_as_documented() {
        let head = |bytes: usize| {
            let rest = "HTTP/1.1 200 OK\r\nX: ".len();
            format!("HTTP/1.1 200 OK\r\nX: {}", "a".repeat(bytes - rest))
        };
        let in_pieces = |bytes: usize| {
            let text = head(bytes);
            read([&text.as_bytes()[..100], &text.as_bytes()[100..]])
        };
        assert!(in_pieces(64 * 1024).is_ok());
        assert!(in_pieces(64 * 1024 + 1).is_err());
        let headers = |count: usize| {
            let headers = "h: x\r\n".repeat(count - 1);
            whole(&format!(
                "HTTP/1.1 200 OK\r\n{headers}Content-Length: 1\r\n\r\nx"
            ))
        };
        assert!(headers(512).is_ok_and(|read| read.4));
        assert!(headers(513).is_err());
        let size = |digits: &str| {
            whole(&format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{digits}\r\na"
            ))
        };
        assert!(size("fffffffffffffff").is_ok());
        assert!(size("0fffffffffffffff").is_err());
    }

    #[test]
    fn chunks_as_other_servers_write_them() {
        let chunked = |body: &str| {
            whole(&format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}"
            ))
        };
        let ok = |body| Ok((200, Vec::new(), true, body, true));
        for body in [
            "1f\r\n0123456789012345678901234567890\r\n0\r\n\r\n",
            "1f\n0123456789012345678901234567890\n0\n\n",
            "1f \r\n0123456789012345678901234567890\r\n0\t\r\nA: b\r\nC: d\r\n\r\n",
        ] {
            assert_eq!(chunked(body), ok(31), "{body:?}");
        }
        for body in ["\r\n", "\n", ";x\r\n", "1x\r\na"] {
            assert!(chunked(body).is_err(), "{body:?}");
        }
    }

    #[test]
    fn what_is_not_an_answer_is_refused() {
        let cut = whole("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc").unwrap();
        assert!(!cut.4, "a body cut short is not whole");
        assert!(!whole("HTTP/1.1 20").unwrap().4);
        for bad in [
            "SSH-2.0-OpenSSH\r\n",
            "HTTP/2.0 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\nx",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxx",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000000000000000\r\n",
        ] {
            assert!(whole(bad).is_err(), "{bad:?} was taken");
        }
        let endless = vec![b'a'; HEAD_MAX];
        let head = b"HTTP/1.1 200 OK\r\nX: ";
        assert!(read([&head[..], &endless, &endless]).is_err());
    }

    #[test]
    fn a_long_head_in_small_pieces_is_not_parsed_again_with_each() {
        const LONG: usize = 60 * 1024;
        for (begin, filling) in [("HTTP/1.1 200 ", "O"), ("", "\n"), ("", "\r\n")] {
            let end = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx";
            let end = if begin.is_empty() { end } else { &end[15..] };
            let text = format!("{begin}{}{end}", filling.repeat(LONG / filling.len()));
            for piece in [1, 2, 7] {
                PARSED.set(0);
                let read = read(text.as_bytes().chunks(piece)).expect("an answer");
                assert_eq!((read.0, read.3, read.4), (200, 1, true));
                assert!(PARSED.get() <= 4 * text.len(), "{} bytes", PARSED.get());
            }
        }
        // With many lines it is parsed for each of them, but their number is limited.
        let lines = format!("HTTP/1.1 200 OK\r\n{}", "a:\n".repeat(LONG / 3));
        PARSED.set(0);
        assert!(read(lines.as_bytes().chunks(1)).is_err());
        assert!(PARSED.get() <= 2 * 513 * 4 * 513, "{} bytes", PARSED.get());
    }

    #[test]
    fn what_can_become_no_answer_is_refused_before_its_line_ends() {
        for begin in ["SSH-2.0-OpenSSH", "\x15\x03\x03", "HTTP/2", "\rH"] {
            assert!(whole(begin).is_err(), "{begin:?}");
            assert!(read(begin.as_bytes().chunks(1)).is_err(), "{begin:?}");
        }
        for begin in ["\r", "\r\n\r", "HTTP/1.1 200 OK", "\r\n\nHTTP/1.1"] {
            assert_eq!(whole(begin).map(|read| read.4), Ok(false), "{begin:?}");
        }
    }

    fn header() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a-zA-Z][a-zA-Z0-9-]{0,12}: [ -~]{0,20}".prop_filter("not a framing header", |h| {
                let name = h.split(':').next().unwrap().to_ascii_lowercase();
                ![
                    "x-worker",
                    "connection",
                    "content-length",
                    "transfer-encoding",
                ]
                .contains(&name.as_str())
            }),
            Just("Connection: close".to_owned()),
            Just("connection: keep-alive".to_owned()),
        ]
    }

    prop_compose! {
        /// A valid answer and what must be read from it.
        fn answer()(
            status in prop_oneof![Just(200u16), Just(404), Just(503), Just(301)],
            headers in prop::collection::vec(header(), 0..40),
            worker in "[0-9a-z]{1,5}",
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..60), 0..6),
            interim in any::<bool>(),
            framing in 0..3,
        ) -> (Vec<u8>, u16, String, u64) {
            let body: u64 = chunks.iter().map(|c| c.len() as u64).sum();
            let mut bytes = Vec::new();
            if interim { bytes.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n"); }
            bytes.extend_from_slice(format!("HTTP/1.1 {status} Some Reason\r\nX-Worker: {worker}\r\n").as_bytes());
            headers.iter().for_each(|h| bytes.extend_from_slice(format!("{h}\r\n").as_bytes()));
            match framing {
                0 => bytes.extend_from_slice(format!("Content-Length: {body}\r\n\r\n").as_bytes()),
                1 => bytes.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n"),
                _ => bytes.extend_from_slice(b"\r\n"),
            }
            for chunk in &chunks {
                if framing == 1 { bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes()); }
                bytes.extend_from_slice(chunk);
                if framing == 1 { bytes.extend_from_slice(b"\r\n"); }
            }
            if framing == 1 { bytes.extend_from_slice(b"0\r\n\r\n"); }
            (bytes, status, worker, body)
        }
    }

    fn split(bytes: &[u8], cuts: &[prop::sample::Index]) -> Vec<Vec<u8>> {
        let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        at.windows(2).map(|w| bytes[w[0]..w[1]].to_vec()).collect()
    }

    #[test]
    fn answers_survive_foreign_bytes() {
        crate::foreign::survives("http-response", &[], |bytes| {
            for piece in [bytes.len().max(1), 7, 1] {
                let mut reader = ResponseReader::default();
                let mut rest = bytes;
                while !rest.is_empty() {
                    let next = &rest[..rest.len().min(piece)];
                    match reader.feed(next) {
                        Ok(Step::More) => rest = &rest[next.len()..],
                        Ok(Step::Done { used }) => {
                            assert!(used <= next.len());
                            break;
                        }
                        Err(_) => break,
                    }
                }
                reader.finish();
                assert!(reader.body_bytes() <= bytes.len() as u64);
                assert!(reader.worker().len() <= bytes.len());
            }
        });
    }

    proptest! {
        #[test]
        fn any_split_reads_the_same(
            (bytes, status, worker, body) in answer(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let at_once = read([&bytes[..]]).unwrap();
            prop_assert_eq!((at_once.0, &at_once.1[..], at_once.3, at_once.4), (status, worker.as_bytes(), body, true));
            let pieces = split(&bytes, &cuts);
            prop_assert_eq!(&read(pieces.iter().map(Vec::as_slice)).unwrap(), &at_once);
            prop_assert_eq!(&read(bytes.chunks(1)).unwrap(), &at_once, "byte by byte");
        }

        #[test]
        fn an_answer_cut_short_is_never_whole((bytes, ..) in answer(), cut in any::<prop::sample::Index>()) {
            let cut = cut.index(bytes.len());
            let read = read([&bytes[..cut]]);
            let until_close = !bytes.windows(15).any(|w| w.eq_ignore_ascii_case(b"content-length:"))
                && !bytes.windows(18).any(|w| w.eq_ignore_ascii_case(b"transfer-encoding:"));
            if !until_close { prop_assert!(!read.unwrap().4); }
        }

        #[test]
        fn garbage_never_panics(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..8)) {
            let _ = read(pieces.iter().map(Vec::as_slice));
        }

        /// Garbage that gets past the status line.
        #[test]
        fn damaged_answers_never_panic(
            (mut bytes, ..) in answer(),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            for (at, byte) in damage { let at = at.index(bytes.len()); bytes[at] = byte; }
            let pieces = split(&bytes, &cuts);
            let apart = read(pieces.iter().map(Vec::as_slice));
            let whole = read([&bytes[..]]);
            prop_assert_eq!(apart.is_ok(), whole.is_ok(), "a split may not change the verdict");
        }
    }
}
