//! Tells which program chooses for a reuseport group: `bpf/chooser.bpf.c`, iterators over the sockets of this thread's
//! network namespace.

use std::io::{self, ErrorKind, Read};
use std::mem::MaybeUninit;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link};
use wakeone_model::listener::Protocol;

use crate::error::failed;
use crate::skeletons::chooser::ChooserSkelBuilder;

/// The chooser of a socket's reuseport group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chooser {
    /// The socket.
    pub cookie: u64,
    /// The id of the program, 0 for a classic one; `None`: the kernel's hash chooses.
    pub program: Option<u32>,
}

/// A loaded iterator. A look takes some 100 µs.
#[derive(Debug)]
pub struct Choosers {
    link: Link,
}

/// Bytes of a `struct wakeone_chooser`.
const RECORD: usize = 16;

impl Choosers {
    /// Prepares for sockets of a port that are of UDP, or listen by TCP.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF and CAP_PERFMON; or the kernel knows no such iterator.
    pub fn of(protocol: Protocol, port: u16) -> io::Result<Self> {
        // libbpf's message on standard error is in the error, too.
        libbpf_rs::set_print(None);
        let udp = protocol == Protocol::Udp;
        let mut storage = MaybeUninit::uninit();
        let mut open = ChooserSkelBuilder::default()
            .open(&mut storage)
            .map_err(|e| failed("reading the iterator of programs", &e))?;
        if let Some(constants) = &mut open.maps.rodata_data {
            constants.port = port.into();
        }
        open.progs.wakeone_tcp_choosers.set_autoload(!udp);
        open.progs.wakeone_udp_choosers.set_autoload(udp);
        let loaded = open
            .load()
            .map_err(|e| failed("loading the iterator of programs", &e))?;
        let program = match udp {
            true => &loaded.progs.wakeone_udp_choosers,
            false => &loaded.progs.wakeone_tcp_choosers,
        };
        let link = program
            .attach()
            .map_err(|e| failed("attaching the iterator of programs", &e))?;
        Ok(Self { link })
    }

    /// Returns the chooser of each socket there is now.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn look(&self) -> io::Result<Vec<Chooser>> {
        let mut sockets =
            Iter::new(&self.link).map_err(|e| failed("starting the iterator of programs", &e))?;
        let mut told = Vec::new();
        match sockets.read_to_end(&mut told) {
            Ok(_) => {}
            // The end of the listening sockets.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(told.chunks_exact(RECORD).map(chooser).collect())
    }
}

fn chooser(record: &[u8]) -> Chooser {
    let word = |at: usize| {
        let bytes = record[at..at + 4].try_into().unwrap_or_default();
        u32::from_ne_bytes(bytes)
    };
    let bytes = record[..8].try_into().unwrap_or_default();
    Chooser {
        cookie: u64::from_ne_bytes(bytes),
        program: (word(8) != 0).then(|| word(12)),
    }
}
