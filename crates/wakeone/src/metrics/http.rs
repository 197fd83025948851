//! The part of HTTP/1.1 that a scrape needs: one request for /metrics on a connection, answered and closed.

/// The longest request; no scraper's is longer.
pub const MOST_BYTES: usize = 8 << 10;
/// The most header lines; no scraper sends more.
const MOST_HEADERS: usize = 64;
/// The content type of an answer with metrics.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The next step after some bytes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Wait for more.
    Partial,
    /// Send the metrics, or their headers alone.
    Metrics {
        /// The request was HEAD.
        head: bool,
    },
    /// Send this status and nothing else.
    Refused(Refusal),
}

/// A request that is not for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// 400
    Malformed,
    /// 404
    NotFound,
    /// 405
    Method,
    /// 431
    TooLarge,
}

/// Returns the next step for the bytes of a request so far.
pub fn parse(bytes: &[u8]) -> Request {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) if bytes.len() < MOST_BYTES => Request::Partial,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            Request::Refused(Refusal::TooLarge)
        }
        Err(_) => Request::Refused(Refusal::Malformed),
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            let path = path.split_once('?').map_or(path, |(path, _)| path);
            match (path, request.method) {
                ("/metrics", Some("GET")) => Request::Metrics { head: false },
                ("/metrics", Some("HEAD")) => Request::Metrics { head: true },
                ("/metrics", _) => Request::Refused(Refusal::Method),
                _ => Request::Refused(Refusal::NotFound),
            }
        }
    }
}

/// Returns the whole answer with metrics.
pub fn answer(text: &str, head: bool) -> Vec<u8> {
    let body = if head { "" } else { text };
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {OPENMETRICS}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        text.len()
    )
    .into_bytes()
}

/// Returns the whole answer to a refused request.
pub fn refusal(why: Refusal) -> Vec<u8> {
    let (status, more) = match why {
        Refusal::Malformed => ("400 Bad Request", ""),
        Refusal::NotFound => ("404 Not Found", ""),
        Refusal::Method => ("405 Method Not Allowed", "Allow: GET, HEAD\r\n"),
        Refusal::TooLarge => ("431 Request Header Fields Too Large", ""),
    };
    format!("HTTP/1.1 {status}\r\n{more}Content-Length: 0\r\nConnection: close\r\n\r\n")
        .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Request {
        parse(text.as_bytes())
    }

    #[test]
    fn scrapes_are_answered_and_nothing_else() {
        use Refusal::*;
        for (text, then) in [
            (
                "GET /metrics HTTP/1.1\r\n\r\n",
                Request::Metrics { head: false },
            ),
            (
                "GET /metrics?x=1 HTTP/1.0\r\nA: b\r\n\r\n",
                Request::Metrics { head: false },
            ),
            (
                "HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
                Request::Metrics { head: true },
            ),
            ("", Request::Partial),
            ("GET /metr", Request::Partial),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n", Request::Partial),
            ("POST /metrics HTTP/1.1\r\n\r\n", Request::Refused(Method)),
            ("get /metrics HTTP/1.1\r\n\r\n", Request::Refused(Method)),
            ("GET / HTTP/1.1\r\n\r\n", Request::Refused(NotFound)),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", Request::Refused(NotFound)),
            (
                "GET /../metrics HTTP/1.1\r\n\r\n",
                Request::Refused(NotFound),
            ),
            ("GET /metrics HTTP/2.0\r\n\r\n", Request::Refused(Malformed)),
            ("\x16\x03\x01\x02\0\x01", Request::Refused(Malformed)),
        ] {
            assert_eq!(of(text), then, "{text:?}");
        }
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
        assert_eq!(of(&many), Request::Refused(TooLarge));
        let long = format!("GET /{}", "a".repeat(MOST_BYTES));
        assert_eq!(of(&long), Request::Refused(TooLarge));
    }

    proptest! {
        /// Any bytes get an answer, and more bytes do not change it.
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..MOST_BYTES * 2)) {
            let whole = parse(&bytes);
            if bytes.len() >= MOST_BYTES {
                prop_assert_ne!(whole, Request::Partial);
            }
        }

        /// A request in pieces gives the same result as a whole one.
        #[test]
        fn pieces_make_no_difference(
            method in "GET|HEAD|POST|[A-Z]{1,8}",
            path in "/metrics|/[a-z?=/]{0,12}",
            names in proptest::collection::vec("[A-Za-z-]{1,10}: [ -~]{0,20}", 0..70),
        ) {
            let head: String = names.iter().map(|line| format!("{line}\r\n")).collect();
            let text = format!("{method} {path} HTTP/1.1\r\n{head}\r\n");
            let whole = parse(text.as_bytes());
            prop_assert_ne!(whole, Request::Partial);
            for end in 0..text.len() {
                let so_far = parse(&text.as_bytes()[..end]);
                prop_assert!(so_far == Request::Partial || so_far == whole, "{end} of {text:?}: {so_far:?}");
            }
        }
    }
}
