//! Small programs for other projects' servers. Each does what a request says (sleep for some µs), names its worker in
//! `X-Worker` by the process id, and counts its answers.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::error::Error;
use crate::scratch::Scratch;

/// For gunicorn and others that speak WSGI: `app` of a module.
pub const WSGI: &str = include_str!("apps/wsgi.py");
/// For uvicorn and others that speak ASGI: `app` of a module.
pub const ASGI: &str = include_str!("apps/asgi.py");
/// For node: a cluster whose workers accept for themselves.
pub const CLUSTER: &str = include_str!("apps/cluster.js");
/// For Puma and others that speak Rack: a `config.ru`.
pub const RACK: &str = include_str!("apps/config.ru");
/// A server of its own: workers that block in accept().
pub const PREFORK: &str = include_str!("apps/prefork.py");
/// For nginx's perl module; nginx counts by itself.
pub const PERL: &str = include_str!("apps/Work.pm");

/// Starts a server that is one worker several times, a socket each.
pub const EACH: &str = include_str!("apps/harm/each.py");
/// A worker of asyncio, with or without helper processes.
pub const LOOP: &str = include_str!("apps/harm/loop.py");
/// A worker of node on an inherited socket.
pub const OWN_JS: &str = include_str!("apps/harm/own.js");
/// Sessions over UDP: server and clients.
pub const SESSIONS: &str = include_str!("apps/harm/sessions.py");
/// QUIC by aioquic: server and clients.
pub const QUIC: &str = include_str!("apps/harm/quic.py");
/// dnsperf, whose result is printed as the other clients print theirs.
pub const DNS: &str = include_str!("apps/harm/dns.py");

/// A file to which the programs add a byte before each answer.
#[derive(Debug)]
pub struct Count(PathBuf);

impl Count {
    /// Makes it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn new(scratch: &Scratch) -> Result<Self, Error> {
        scratch.write("count", "").map(Self)
    }

    /// Makes a command's processes count in this file.
    pub fn tell(&self, command: &mut Command) {
        command.env("WAKEONE_COUNT", &self.0);
    }

    /// How many answers there were.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn made(&self) -> Result<u64, Error> {
        let read = fs::metadata(&self.0).map_err(|source| Error::File {
            action: "reading",
            path: self.0.clone(),
            source,
        })?;
        Ok(read.len())
    }
}

/// Replaces workers' process ids in `answers` by their places among `workers`. Those of none keep their names.
pub fn by_place(
    answers: &std::collections::BTreeMap<String, u64>,
    workers: &[u32],
) -> std::collections::BTreeMap<String, u64> {
    let place = |name: &str| {
        let pid: u32 = name.parse().ok()?;
        workers.iter().position(|worker| *worker == pid)
    };
    let named = |(name, count): (&String, &u64)| match place(name) {
        Some(place) => (place.to_string(), *count),
        None => (format!("pid {name}"), *count),
    };
    answers.iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_told_by_their_places() {
        let answers = [("712".to_owned(), 5), ("99".to_owned(), 2)].into();
        let found = by_place(&answers, &[700, 712]);
        assert_eq!(found["1"], 5);
        assert_eq!(crate::measure::by_worker(&found, 2), [0, 5, 2]);
    }

    #[test]
    fn a_byte_is_an_answer() {
        let scratch = Scratch::new("test").unwrap();
        let count = Count::new(&scratch).unwrap();
        assert_eq!(count.made().unwrap(), 0);
        fs::write(&count.0, "...").unwrap();
        assert_eq!(count.made().unwrap(), 3);
    }
}
