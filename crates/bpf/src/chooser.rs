//! Tells which program chooses for a reuseport group: `bpf/chooser.bpf.c`, iterators over the sockets of this thread's
//! network namespace.

use std::io::{self, ErrorKind, Read};
use std::mem::MaybeUninit;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link, MapCore, MapFlags, MapHandle};
use wakeone_kernel::socket::diag::Listening;
use wakeone_model::listener::Protocol;

use crate::error::failed;
use crate::object::{clear, keep};
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
    choosers: MapHandle,
    left: MapHandle,
    protocol: Protocol,
    port: u16,
}

/// Listeners at a port. Each look walks all buckets of the map, so it is no larger than it must be.
const MOST_LISTENERS: u32 = 4096;

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
        if !udp {
            open.maps
                .choosers
                .set_max_entries(MOST_LISTENERS)
                .map_err(|e| failed("sizing the map of programs", &e))?;
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
        Ok(Self {
            link,
            choosers: keep(&loaded.maps.choosers)?,
            left: keep(&loaded.maps.data_left)?,
            protocol,
            port,
        })
    }

    /// Returns the chooser of each socket there is now. `listening`: those that there are now, if they are known.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn look(&self, listening: Option<&Listening>) -> io::Result<Vec<Chooser>> {
        let left = match self.protocol {
            // Connected ones are in the groups, too. The walk over these is safe.
            Protocol::Udp => u32::MAX,
            _ => {
                let asked = Listening::at(self.port);
                let listening = listening.unwrap_or(&asked);
                listening.count(self.protocol, self.port)? as u32
            }
        };
        if left == 0 {
            return Ok(Vec::new());
        }
        clear(&self.choosers)?;
        self.left
            .update(&0_u32.to_ne_bytes(), &left.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| failed("telling how many sockets there are", &e))?;
        let mut sockets =
            Iter::new(&self.link).map_err(|e| failed("starting the iterator of programs", &e))?;
        match sockets.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            // The last of them was found.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        let keys = self.choosers.keys();
        let found = keys.filter_map(|key| {
            let value = self.choosers.lookup(&key, MapFlags::ANY).ok().flatten()?;
            chooser(&key, &value)
        });
        Ok(found.collect())
    }
}

/// Of an entry of the map: a cookie, and a `struct wakeone_chooser`.
fn chooser(key: &[u8], value: &[u8]) -> Option<Chooser> {
    let there = u32::from_ne_bytes(*value.first_chunk()?);
    let program = u32::from_ne_bytes(*value.last_chunk()?);
    Some(Chooser {
        cookie: u64::from_ne_bytes(*key.first_chunk()?),
        program: (there != 0).then_some(program),
    })
}
