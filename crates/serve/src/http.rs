//! HTTP/1.0 and HTTP/1.1 as far as a server of small pages needs it: bytes in, a request out, and
//! an answer into bytes. No I/O here.
//!
//! The parser is called again with everything received so far until it says that a request is
//! complete. Its verdict does not depend on how the bytes were split on their way.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::fs::File;

/// The request line's target may have this many bytes; more is answered with 414.
pub const TARGET_BYTES_MAX: usize = 8 * 1024;
/// The request line and all headers together may have this many bytes; more is answered with 431.
pub const HEAD_BYTES_MAX: usize = 16 * 1024;
/// More headers than this are answered with 431.
pub const HEADERS_MAX: usize = 64;
/// A body may have this many bytes; more is answered with 413.
pub const BODY_BYTES_MAX: usize = 16 * 1024;
/// The most that a body may take on the wire with all the framing of its chunks.
const CHUNKED_BYTES_MAX: usize = 4 * BODY_BYTES_MAX;

/// A status code that this server gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u16);

impl Status {
    /// The reason phrase of RFC 9110.
    pub fn reason(self) -> &'static str {
        match self.0 {
            200 => "OK",
            206 => "Partial Content",
            303 => "See Other",
            304 => "Not Modified",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            413 => "Content Too Large",
            414 => "URI Too Long",
            415 => "Unsupported Media Type",
            416 => "Range Not Satisfiable",
            431 => "Request Header Fields Too Large",
            500 => "Internal Server Error",
            501 => "Not Implemented",
            503 => "Service Unavailable",
            505 => "HTTP Version Not Supported",
            _ => "Unknown",
        }
    }
}

/// The method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GET
    Get,
    /// HEAD: as GET, but the answer has no body.
    Head,
    /// POST
    Post,
    /// Any other token.
    Other,
}

/// A complete request; it borrows from the bytes received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The method.
    pub method: Method,
    /// The path of the target, still percent-encoded, without the query.
    pub path: &'a str,
    /// The target's part after its first `?`, still percent-encoded; empty if there is none.
    pub query: &'a str,
    /// Whether the client speaks HTTP/1.1 (else 1.0).
    pub http_11: bool,
    /// Whether the client wants the connection to stay open after the answer.
    pub keep_alive: bool,
    /// The value of the `Range` header.
    pub range: Option<&'a str>,
    /// The value of the `If-Modified-Since` header.
    pub if_modified_since: Option<&'a str>,
    /// The value of the `If-Range` header.
    pub if_range: Option<&'a str>,
    /// The value of the `Content-Type` header.
    pub content_type: Option<&'a str>,
    /// The body, without the framing of its chunks.
    pub body: Cow<'a, [u8]>,
}

/// The parser's verdict over the bytes received so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// More bytes are needed.
    Incomplete {
        /// The head is complete and the client waits for `100 Continue` before it sends the body.
        expects_continue: bool,
    },
    /// A request, and how many bytes it took.
    Complete(Request<'a>, usize),
    /// The bytes are no request: answer with the status and close.
    Bad(Status),
}

const MORE: Parsed<'static> = Parsed::Incomplete {
    expects_continue: false,
};

/// Parses the first request in `input`.
pub fn parse(input: &[u8]) -> Parsed<'_> {
    // Judged line by line: a decision over complete lines stays the same when the same bytes arrive in other pieces.
    let window = &input[..input.len().min(HEAD_BYTES_MAX)];
    let mut start = 0;
    while let [b'\n', ..] | [b'\r', b'\n', ..] = &window[start..] {
        start += 1; // empty lines before a request are read over (RFC 9112, 2.2)
    }
    let first_line_end = window[start..].iter().position(|byte| *byte == b'\n');
    if first_line_end.unwrap_or(window.len() - start) > TARGET_BYTES_MAX + 32 {
        return Parsed::Bad(Status(414));
    }
    let Some(last_newline) = window.iter().rposition(|byte| *byte == b'\n') else {
        return too_long_or_more(input);
    };
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut headers);
    match head.parse(&window[..=last_newline]) {
        Ok(httparse::Status::Partial) => too_long_or_more(input),
        Ok(httparse::Status::Complete(length)) => complete(&head, input, length),
        Err(httparse::Error::TooManyHeaders) => Parsed::Bad(Status(431)),
        Err(httparse::Error::Version) => Parsed::Bad(Status(505)),
        Err(_) => Parsed::Bad(Status(400)),
    }
}

fn too_long_or_more(input: &[u8]) -> Parsed<'static> {
    if input.len() >= HEAD_BYTES_MAX {
        Parsed::Bad(Status(431))
    } else {
        MORE
    }
}

/// The parts of the headers that concern the connection and the body.
#[derive(Default)]
struct Framing {
    host: bool,
    close: bool,
    keep_alive: bool,
    expects_continue: bool,
    chunked: bool,
    content_length: Option<usize>,
}

/// The head is parsed: read the framing, then the body.
fn complete<'a>(
    head: &httparse::Request<'_, 'a>,
    input: &'a [u8],
    head_length: usize,
) -> Parsed<'a> {
    let (Some(method), Some(target), Some(version)) = (head.method, head.path, head.version) else {
        return Parsed::Bad(Status(400));
    };
    if target.len() > TARGET_BYTES_MAX {
        return Parsed::Bad(Status(414));
    }
    let framing = match framing(head.headers) {
        Ok(framing) => framing,
        Err(status) => return Parsed::Bad(status),
    };
    let http_11 = version == 1;
    if http_11 && !framing.host {
        return Parsed::Bad(Status(400));
    }
    // A proxy of HTTP/1.0 knows no chunks, so it may take the bytes that follow for another request (RFC 9112, 6.1).
    if !http_11 && framing.chunked && framing.keep_alive && !framing.close {
        return Parsed::Bad(Status(400));
    }
    let rest = &input[head_length..];
    let (body, body_length) = match body(&framing, rest) {
        Ok(Some(body)) => body,
        Ok(None) => {
            return Parsed::Incomplete {
                expects_continue: framing.expects_continue && http_11 && rest.is_empty(),
            };
        }
        Err(status) => return Parsed::Bad(status),
    };
    let (path, query) = split_target(target);
    let header = |name: &str| {
        head.headers
            .iter()
            .find(|header| header.name.eq_ignore_ascii_case(name))
            .and_then(|header| std::str::from_utf8(header.value).ok())
    };
    let request = Request {
        method: match method {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            _ => Method::Other,
        },
        path,
        query,
        http_11,
        keep_alive: !framing.close && (http_11 || framing.keep_alive),
        range: header("range"),
        if_modified_since: header("if-modified-since"),
        if_range: header("if-range"),
        content_type: header("content-type"),
        body,
    };
    Parsed::Complete(request, head_length + body_length)
}

fn framing(headers: &[httparse::Header<'_>]) -> Result<Framing, Status> {
    let mut framing = Framing::default();
    for header in headers {
        let value = header.value;
        if header.name.eq_ignore_ascii_case("host") {
            // A proxy before us may go by the other one (RFC 9112, 3.2).
            if framing.host {
                return Err(Status(400));
            }
            framing.host = true;
        } else if header.name.eq_ignore_ascii_case("connection") {
            framing.close |= has_token(value, "close");
            framing.keep_alive |= has_token(value, "keep-alive");
        } else if header.name.eq_ignore_ascii_case("expect") {
            framing.expects_continue |= has_token(value, "100-continue");
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            if framing.chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(Status(501));
            }
            framing.chunked = true;
        } else if header.name.eq_ignore_ascii_case("content-length") {
            let length = content_length(value)?;
            if framing.content_length.is_some_and(|other| other != length) {
                return Err(Status(400));
            }
            framing.content_length = Some(length);
        }
    }
    if framing.chunked && framing.content_length.is_some() {
        // Two lengths for one body is how requests are smuggled past proxies (RFC 9112, 6.3).
        return Err(Status(400));
    }
    Ok(framing)
}

fn has_token(value: &[u8], token: &str) -> bool {
    value
        .split(|byte| *byte == b',')
        .any(|part| part.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

fn content_length(value: &[u8]) -> Result<usize, Status> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Status(400));
    }
    match std::str::from_utf8(value).map(str::parse::<usize>) {
        Ok(Ok(length)) if length <= BODY_BYTES_MAX => Ok(length),
        _ => Err(Status(413)),
    }
}

/// A body, and how many bytes it took on the wire.
type Body<'a> = (Cow<'a, [u8]>, usize);

fn body<'a>(framing: &Framing, rest: &'a [u8]) -> Result<Option<Body<'a>>, Status> {
    if framing.chunked {
        let decoded = dechunk(&rest[..rest.len().min(CHUNKED_BYTES_MAX)])?;
        return match decoded {
            None if rest.len() >= CHUNKED_BYTES_MAX => Err(Status(413)),
            decoded => Ok(decoded.map(|(body, length)| (body.into(), length))),
        };
    }
    let length = framing.content_length.unwrap_or(0);
    Ok(rest.get(..length).map(|body| (body.into(), length)))
}

/// Removes the framing of chunks. Returns the body and its length on the wire, or `None` when more bytes are needed.
/// Extensions and trailers are skipped.
fn dechunk(mut rest: &[u8]) -> Result<Option<(Vec<u8>, usize)>, Status> {
    let available = rest.len();
    let mut body = Vec::new();
    loop {
        if has_bare_newline(rest) {
            return Err(Status(400));
        }
        let (line, size) = match httparse::parse_chunk_size(rest) {
            Ok(httparse::Status::Complete(found)) => found,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err(Status(400)),
        };
        rest = &rest[line..];
        if size > (BODY_BYTES_MAX - body.len()) as u64 {
            return Err(Status(413));
        }
        if size == 0 {
            return Ok(after_trailers(rest).map(|rest| (body, available - rest.len())));
        }
        let size = size as usize;
        if rest.len() < size + 2 {
            return Ok(None);
        }
        if &rest[size..size + 2] != b"\r\n" {
            return Err(Status(400));
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}

/// Whether the first line ends with a newline alone. In an extension of a chunk httparse reads over it, while others end
/// the line there: they would see another body (RFC 9112, 7.1.1).
fn has_bare_newline(bytes: &[u8]) -> bool {
    let end = bytes.iter().position(|byte| *byte == b'\n');
    end.is_some_and(|end| !bytes[..end].ends_with(b"\r"))
}

/// Returns the bytes after the trailers, which are lines up to an empty one.
fn after_trailers(mut rest: &[u8]) -> Option<&[u8]> {
    loop {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let line = &rest[..end];
        rest = &rest[end + 1..];
        if line.is_empty() || line == b"\r" {
            return Some(rest);
        }
    }
}

/// Path and query of a target, which may be in absolute form (`http://host/path?query`).
fn split_target(target: &str) -> (&str, &str) {
    let path = match target.split_once("://") {
        Some((scheme, rest)) if !scheme.contains('/') => match rest.find('/') {
            Some(slash) => &rest[slash..],
            None => "/",
        },
        _ => target,
    };
    path.split_once('?').unwrap_or((path, ""))
}

/// The value of a parameter in a query, still percent-encoded.
pub fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find_map(|(key, value)| (key == name).then_some(value))
}

/// The content of an answer.
#[derive(Debug)]
pub enum Content {
    /// Bytes made for this answer.
    Bytes(Vec<u8>),
    /// Bytes that are part of the program.
    Static(&'static [u8]),
    /// A part of a file, sent piece by piece.
    File {
        /// The open file.
        file: File,
        /// Where the part starts.
        offset: u64,
        /// How many bytes it has.
        length: u64,
    },
}

impl Content {
    /// The length in bytes.
    pub fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Static(bytes) => bytes.len() as u64,
            Self::File { length, .. } => *length,
        }
    }
}

/// An answer, before it is turned into bytes.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: Status,
    /// The `Content-Type`.
    pub content_type: Cow<'static, str>,
    /// Further headers, each with its `\r\n`.
    pub headers: String,
    /// The body.
    pub content: Content,
}

impl Answer {
    /// An answer with `text` in it.
    pub fn text(status: Status, text: impl Into<String>) -> Self {
        Self {
            status,
            content_type: "text/plain; charset=utf-8".into(),
            headers: String::new(),
            content: Content::Bytes(text.into().into_bytes()),
        }
    }

    /// An answer with only its status.
    pub fn status(status: Status) -> Self {
        Self::text(status, format!("{} {}\n", status.0, status.reason()))
    }

    /// The same answer with one more header.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: &str) -> Self {
        let _ = write!(self.headers, "{name}: {value}\r\n");
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bad(input: &[u8]) -> u16 {
        match parse(input) {
            Parsed::Bad(status) => status.0,
            other => panic!("{other:?}"),
        }
    }

    fn good(input: &str) -> (Request<'_>, usize) {
        match parse(input.as_bytes()) {
            Parsed::Complete(request, length) => (request, length),
            other => panic!("{input:?}: {other:?}"),
        }
    }

    #[test]
    fn a_request_and_what_follows() {
        let input = "GET /work?us=5&kind=cpu HTTP/1.1\r\nHost: a\r\n\r\nGET / ";
        let (request, length) = good(input);
        assert_eq!(&input[length..], "GET / ");
        assert_eq!(request.path, "/work");
        assert_eq!(parameter(request.query, "us"), Some("5"));
        assert_eq!(parameter(request.query, "kind"), Some("cpu"));
        assert_eq!(parameter(request.query, "k"), None);
        assert!(request.keep_alive);
    }

    #[test]
    fn who_keeps_the_connection() {
        let keep = |text: &str| good(text).0.keep_alive;
        assert!(!keep("GET / HTTP/1.0\r\n\r\n"));
        assert!(keep("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"));
        assert!(!keep(
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: x, close\r\n\r\n"
        ));
    }

    #[test]
    fn absolute_targets() {
        assert_eq!(good("GET http://a:8/x?y=1 HTTP/1.0\r\n\r\n").0.path, "/x");
        assert_eq!(good("GET http://a HTTP/1.0\r\n\r\n").0.path, "/");
        assert_eq!(good("GET /x?u=http://b HTTP/1.0\r\n\r\n").0.path, "/x");
    }

    #[test]
    fn bodies() {
        let (request, length) = good("POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabcd");
        assert_eq!((&*request.body, length), (&b"abc"[..], 41));
        let chunked = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\
             3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: z\r\n\r\n";
        let more = format!("{chunked}GET / ");
        let (request, length) = good(&more);
        assert_eq!((&*request.body, length), (&b"abcde"[..], chunked.len()));
        let waits =
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n";
        assert_eq!(
            parse(waits),
            Parsed::Incomplete {
                expects_continue: true
            }
        );
    }

    #[test]
    fn what_is_refused() {
        assert_eq!(bad(b"hello\r\n\r\n"), 400);
        assert_eq!(bad(b"GET / HTTP/1.1\r\n\r\n"), 400); // no Host
        assert_eq!(bad(b"GET / HTTP/2.0\r\n\r\n"), 505);
        assert_eq!(bad(b"GET / HTTP/1.0\r\nContent-Length: -1\r\n\r\n"), 400);
        assert_eq!(bad(b"GET / HTTP/1.0\r\nContent-Length: \r\n\r\n"), 400);
        assert_eq!(
            bad(b"GET / HTTP/1.0\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
            400
        );
        assert_eq!(
            bad(b"POST / HTTP/1.0\r\nContent-Length: 999999\r\n\r\n"),
            413
        );
        assert_eq!(
            bad(b"POST / HTTP/1.0\r\nContent-Length: 99999999999999999999999\r\n\r\n"),
            413
        );
        assert_eq!(
            bad(b"POST / HTTP/1.0\r\nTransfer-Encoding: gzip\r\n\r\n"),
            501
        );
        assert_eq!(
            bad(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n"),
            400
        );
        assert_eq!(
            bad(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n"),
            413
        );
        let long = format!("GET /{} HTTP/1.0\r\n\r\n", "x".repeat(TARGET_BYTES_MAX));
        assert_eq!(bad(long.as_bytes()), 414);
        assert_eq!(bad("x".repeat(TARGET_BYTES_MAX * 2).as_bytes()), 414);
        let many = format!(
            "GET / HTTP/1.0\r\n{}\r\n",
            "A: b\r\n".repeat(HEADERS_MAX + 1)
        );
        assert_eq!(bad(many.as_bytes()), 431);
        let large = format!(
            "GET / HTTP/1.0\r\nA: {}\r\n\r\n",
            "b".repeat(HEAD_BYTES_MAX)
        );
        assert_eq!(bad(large.as_bytes()), 431);
    }

    #[test]
    fn heads_are_limited_as_documented() {
        let target = |bytes: usize| format!("GET /{} HTTP/1.0\r\n\r\n", "x".repeat(bytes - 1));
        assert_eq!(good(&target(8192)).0.path.len(), 8192);
        assert_eq!(bad(target(8193).as_bytes()), 414);
        // A line that has not ended yet has room for method and version beside its target.
        assert_eq!(parse("x".repeat(8192 + 32).as_bytes()), MORE);
        assert_eq!(bad("x".repeat(8192 + 33).as_bytes()), 414);
        let after_newlines = "\n".repeat(100) + &"x".repeat(8192);
        assert_eq!(parse(after_newlines.as_bytes()), MORE);
        let head = |bytes: usize| {
            let rest = "GET / HTTP/1.0\r\nA: \r\n\r\n".len();
            format!("GET / HTTP/1.0\r\nA: {}\r\n\r\n", "b".repeat(bytes - rest))
        };
        assert_eq!(good(&head(16_384)).1, 16_384);
        assert_eq!(bad(head(16_385).as_bytes()), 431);
    }

    #[test]
    fn bodies_are_limited_as_documented() {
        let body = |bytes: usize| {
            let body = "b".repeat(bytes);
            format!("POST / HTTP/1.0\r\nContent-Length: {bytes}\r\n\r\n{body}")
        };
        assert_eq!(good(&body(16_384)).0.body.len(), 16_384);
        assert_eq!(bad(body(16_385).as_bytes()), 413);
        let chunks = |sizes: &[usize]| {
            let mut text = "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
            for size in sizes {
                let _ = write!(text, "{size:x}\r\n{}\r\n", "b".repeat(*size));
            }
            text + "0\r\n\r\n"
        };
        assert_eq!(good(&chunks(&[16_000, 384])).0.body.len(), 16_384);
        assert_eq!(bad(chunks(&[16_000, 385]).as_bytes()), 413);
        // The framing is limited to 64 kB too.
        assert_eq!(good(&chunks(&[1; 10_000])).0.body.len(), 10_000);
        assert_eq!(bad(chunks(&[1; 11_000]).as_bytes()), 413);
    }

    #[test]
    fn a_body_that_has_not_come_is_waited_for() {
        let waits = |head: &str, rest: &str| {
            let text = format!("POST / HTTP/{head}\r\n\r\n{rest}");
            match parse(text.as_bytes()) {
                Parsed::Incomplete { expects_continue } => expects_continue,
                other => panic!("{text:?}: {other:?}"),
            }
        };
        let length = "Content-Length: 3\r\nExpect: 100-continue";
        assert!(waits(&format!("1.1\r\nHost: a\r\n{length}"), ""));
        assert!(!waits(&format!("1.1\r\nHost: a\r\n{length}"), "ab"));
        assert!(!waits(&format!("1.0\r\n{length}"), ""));
        let chunked = "1.0\r\nTransfer-Encoding: chunked";
        for rest in ["", "3", "3\r\nab", "3\r\nabc\r", "3\r\nabc\r\n0\r\n"] {
            assert!(!waits(chunked, rest), "{rest:?}");
        }
        let wrong = format!("POST / HTTP/{chunked}\r\n\r\n3\r\nabcXY");
        assert_eq!(bad(wrong.as_bytes()), 400);
    }

    #[test]
    fn what_the_application_learns_of_a_request() {
        let method = |method: &str| good(&format!("{method} / HTTP/1.0\r\n\r\n")).0.method;
        assert_eq!(method("GET"), Method::Get);
        assert_eq!(method("HEAD"), Method::Head);
        assert_eq!(method("POST"), Method::Post);
        assert_eq!(method("PUT"), Method::Other);
        let text = "\r\n\nGET / HTTP/1.0\r\nRange: a\r\nIf-Modified-Since: b\r\nIf-Range: c\r\nContent-Type: d\r\n\r\n";
        let (request, length) = good(text);
        assert_eq!(length, text.len(), "with the empty lines before it");
        assert_eq!(request.range, Some("a"));
        assert_eq!(request.if_modified_since, Some("b"));
        assert_eq!(request.if_range, Some("c"));
        assert_eq!(request.content_type, Some("d"));
    }

    #[test]
    fn statuses_have_the_phrases_of_the_standard() {
        for (code, phrase) in [
            (200, "OK"),
            (206, "Partial Content"),
            (303, "See Other"),
            (304, "Not Modified"),
            (400, "Bad Request"),
            (404, "Not Found"),
            (405, "Method Not Allowed"),
            (408, "Request Timeout"),
            (413, "Content Too Large"),
            (414, "URI Too Long"),
            (415, "Unsupported Media Type"),
            (416, "Range Not Satisfiable"),
            (431, "Request Header Fields Too Large"),
            (500, "Internal Server Error"),
            (501, "Not Implemented"),
            (503, "Service Unavailable"),
            (505, "HTTP Version Not Supported"),
        ] {
            assert_eq!(Status(code).reason(), phrase);
        }
    }

    #[test]
    fn answers_tell_their_length() {
        let answer = Answer::status(Status(404)).with_header("Allow", "GET");
        assert_eq!(answer.status, Status(404));
        assert_eq!(answer.headers, "Allow: GET\r\n");
        assert_eq!(answer.content.length(), "404 Not Found\n".len() as u64);
        assert_eq!(Content::Static(b"abc").length(), 3);
        let file = Content::File {
            file: File::open("/dev/null").expect("/dev/null"),
            offset: 5,
            length: 7,
        };
        assert_eq!(file.length(), 7);
    }

    #[test]
    fn what_others_could_read_as_another_request_is_refused() {
        let chunked = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        for body in [
            "2;x\nab\r\n0\r\n\r\n",
            "2;x\nGET\r\nab\r\n0\r\n\r\n",
            "2;\n",
            "2\nab\r\n0\r\n\r\n",
            "2\r\nab\r\n0;x\n\r\n\r\n",
        ] {
            assert_eq!(bad(format!("{chunked}{body}").as_bytes()), 400, "{body:?}");
        }
        for version in ["1.0", "1.1"] {
            let two = format!("GET / HTTP/{version}\r\nHost: a\r\nX: y\r\nhost: a\r\n\r\n");
            assert_eq!(bad(two.as_bytes()), 400, "{two:?}");
        }
        let old = |connection: &str| {
            format!(
                "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n{connection}\r\n2\r\nab\r\n0\r\n\r\n"
            )
        };
        assert_eq!(bad(old("Connection: keep-alive\r\n").as_bytes()), 400);
        for once in ["", "Connection: keep-alive, close\r\n"] {
            let text = old(once);
            let request = good(&text).0;
            assert!(!request.keep_alive && *request.body == *b"ab");
        }
    }

    #[test]
    fn a_stray_carriage_return_is_judged_before_what_follows() {
        let input = format!("\r\r\n{}", "x".repeat(HEAD_BYTES_MAX));
        assert_eq!(bad(b"\r\r\n"), 400);
        assert_eq!(bad(input.as_bytes()), 400);
    }

    /// The first verdict other than "more", when the bytes arrive in pieces that end at `cuts`.
    fn verdict(input: &[u8], cuts: &[usize]) -> String {
        for cut in cuts.iter().copied().chain([input.len()]) {
            match parse(&input[..cut.min(input.len())]) {
                Parsed::Incomplete { .. } => {}
                decided => return format!("{decided:?}"),
            }
        }
        "more".to_owned()
    }

    fn pieces() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            Just("GET ".to_owned()),
            Just("POST /x?y=%zz HTTP/1.1\r\n".to_owned()),
            Just("GET / HTTP/1.1\r\nHost: a\r\n".to_owned()),
            Just("Content-Length: 4\r\n".to_owned()),
            Just("Transfer-Encoding: chunked\r\n".to_owned()),
            Just("Connection: close\r\n".to_owned()),
            Just("\r\n".to_owned()),
            Just("\n".to_owned()),
            Just("\r".to_owned()),
            Just("\0".to_owned()),
            Just("2\r\nab\r\n0\r\n\r\n".to_owned()),
            Just("long".repeat(3000)),
            Just("A: b\r\n".repeat(40)),
            "[ -~]{0,20}",
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat().into_bytes())
    }

    #[test]
    fn requests_survive_foreign_bytes() {
        crate::foreign::survives("http-request", &[], |bytes| {
            let halves = [bytes.len() / 2];
            assert_eq!(verdict(bytes, &halves), verdict(bytes, &[]));
            if let Parsed::Complete(request, length) = parse(bytes) {
                assert!(length <= bytes.len() && request.body.len() <= BODY_BYTES_MAX);
            }
        });
    }

    proptest! {
        #[test]
        fn garbage_never_panics(input in proptest::collection::vec(any::<u8>(), 0..40_000)) {
            let _ = parse(&input);
        }

        #[test]
        fn splits_do_not_matter(
            input in pieces(),
            mut cuts in proptest::collection::vec(0_usize..50_000, 0..20),
        ) {
            cuts.sort_unstable();
            prop_assert_eq!(verdict(&input, &cuts), verdict(&input, &[]));
        }
    }
}
