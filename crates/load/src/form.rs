//! The common form of a load's requests: method, headers, body, encryption.

use std::str::FromStr;

use crate::Tls;

/// Headers that follow from the plan, and the reason or the option to use instead.
const PLANNED: [(&str, &str); 3] = [
    ("connection", "--keep-alive decides it"),
    ("content-length", "it follows from the body"),
    ("transfer-encoding", "bodies are sent with a length"),
];
/// Methods whose requests say the length of their body even where it is 0 (RFC 9110, 8.6).
const WITH_BODY: [&str; 3] = ["POST", "PUT", "PATCH"];

/// The form of a load's requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Form {
    /// `None`: GET, or POST where there is a body.
    pub method: Option<String>,
    /// In this order, after our own.
    pub headers: Vec<Header>,
    /// Sent with its length.
    pub body: Option<Vec<u8>>,
    /// `None`: plain HTTP.
    pub tls: Option<Tls>,
}

/// A header of each request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// As given.
    pub name: String,
    /// Without spaces around it.
    pub value: String,
}

impl FromStr for Header {
    type Err = String;

    /// `NAME: VALUE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text
            .split_once(':')
            .ok_or_else(|| format!("{text:?} is no header: give NAME: VALUE"))?;
        let header = Self {
            name: name.to_owned(),
            value: value.trim().to_owned(),
        };
        header.check()?;
        Ok(header)
    }
}

impl Header {
    fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }

    /// It goes into the request as it is, so it must not be able to end its line.
    fn check(&self) -> Result<(), String> {
        let (name, value) = (&self.name, &self.value);
        if !is_token(name) {
            return Err(format!("{name:?} is no name of a header"));
        }
        if value.bytes().any(|b| (b < b' ' && b != b'\t') || b == 0x7f) {
            return Err(format!("the header {name} has a control character in it"));
        }
        match PLANNED.iter().find(|(planned, _)| self.is(planned)) {
            Some((_, why)) => Err(format!("the header {name} cannot be given: {why}")),
            None => Ok(()),
        }
    }
}

/// Returns whether `text` is a token of RFC 9110, 5.6.2: the syntax of methods and header names.
fn is_token(text: &str) -> bool {
    let may = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    !text.is_empty() && text.bytes().all(may)
}

impl Form {
    /// The method that is sent.
    pub fn method(&self) -> &str {
        match (&self.method, &self.body) {
            (Some(method), _) => method,
            (None, Some(_)) => "POST",
            (None, None) => "GET",
        }
    }

    /// Checks that the form can be sent; the error is one sentence.
    pub(crate) fn check(&self) -> Result<(), String> {
        let method = self.method();
        if !is_token(method) {
            return Err(format!("{method:?} is no method: give one word, as in PUT"));
        }
        if method == "CONNECT" {
            return Err("CONNECT opens a tunnel and has no answer to measure".to_owned());
        }
        self.headers.iter().try_for_each(Header::check)
    }

    /// The bytes of one request.
    pub(crate) fn request(&self, host: &str, path: &str, keep_alive: bool) -> Vec<u8> {
        let mut text = format!("{} {path} HTTP/1.1\r\n", self.method());
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let given = |name: &str| self.headers.iter().any(|header| header.is(name));
        let own = [
            ("Host", host),
            ("User-Agent", "wakeone-load"),
            ("Connection", connection),
        ];
        let own = own.into_iter().filter(|(name, _)| !given(name));
        let more = self.headers.iter().map(|h| (&*h.name, &*h.value));
        for (name, value) in own.chain(more) {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        let body = self.body.as_deref().unwrap_or_default();
        if self.body.is_some() || WITH_BODY.contains(&self.method()) {
            text.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        text.push_str("\r\n");
        [text.as_bytes(), body].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(form: &Form) -> String {
        String::from_utf8(form.request("here", "/a", false)).unwrap()
    }

    #[test]
    fn requests() {
        let plain = "GET /a HTTP/1.1\r\nHost: here\r\nUser-Agent: wakeone-load\r\nConnection: close\r\n\r\n";
        assert_eq!(text(&Form::default()), plain);
        let form = Form {
            headers: vec![
                "host: there".parse().unwrap(),
                "X-A:  b: c ".parse().unwrap(),
            ],
            body: Some(b"xyz".to_vec()),
            ..Form::default()
        };
        let posted = "POST /a HTTP/1.1\r\nUser-Agent: wakeone-load\r\nConnection: close\r\n\
                      host: there\r\nX-A: b: c\r\nContent-Length: 3\r\n\r\nxyz";
        assert_eq!(text(&form), posted);
        let put = Form {
            method: Some("PUT".to_owned()),
            ..Form::default()
        };
        assert!(text(&put).contains("Content-Length: 0\r\n"));
    }

    #[test]
    fn what_would_break_a_request_is_refused() {
        for bad in [
            "",
            "no colon",
            ": empty",
            "a b: c",
            "a: b\r\nEvil: 1",
            "Content-Length: 5",
            "transfer-encoding: chunked",
            "Connection: close",
        ] {
            assert!(bad.parse::<Header>().is_err(), "{bad:?}");
        }
        for bad in ["", "GET /", "GET\r\n", "CONNECT"] {
            let form = Form {
                method: Some(bad.to_owned()),
                ..Form::default()
            };
            assert!(form.check().is_err(), "{bad:?}");
        }
    }
}
