//! Small programs for other projects' servers. Each does what a request says (sleep for some µs), names its worker in
//! `X-Worker` by the process id, and counts its answers.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::error::Error;
use crate::scratch::Scratch;

/// A program or configuration of `apps`, by the name of its file.
///
/// # Panics
/// When there is none. A test asks for each that a server needs.
pub fn text(name: &str) -> &'static str {
    let found = ALL.iter().find(|(file, _)| *file == name);
    found
        .unwrap_or_else(|| panic!("there is no program {name}"))
        .1
}

macro_rules! apps {
    ($($name:literal),*) => { &[$(($name, include_str!(concat!("apps/", $name)))),*] };
}

const ALL: &[(&str, &str)] = apps![
    // For nginx's perl module; nginx counts by itself.
    "Work.pm",
    // For uvicorn, gunicorn, node's cluster, Puma.
    "asgi.py",
    "wsgi.py",
    "cluster.js",
    "config.ru",
    // Threads with an event loop each, which share a listener.
    "threads.py",
    // Starts a server that is one worker several times, a socket each; and such workers.
    "each.py",
    "loop.py",
    "own.js",
    // Over UDP: servers and clients.
    "sessions.py",
    "quic.py",
    "dns.py",
    // Starts a server of HTTP/3, and what nginx serves then.
    "h3.sh",
    "h3.conf",
    // Configurations, and what answers the requests there.
    "apache.conf",
    "apache.lua",
    "haproxy.cfg",
    "haproxy.lua",
    "unbound.conf",
    "squid.sh",
    "traffic_server.sh",
    "tomcat.sh",
    "jetty.sh",
    "pgbouncer.ini",
    // What a server of files serves: 1 KB.
    "page.html"
];

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_an_answer() {
        let scratch = Scratch::new("test").unwrap();
        let count = Count::new(&scratch).unwrap();
        assert_eq!(count.made().unwrap(), 0);
        fs::write(&count.0, "...").unwrap();
        assert_eq!(count.made().unwrap(), 3);
    }
}
