//! The steering of a group, as asked for.

use std::path::Path;

use wakeone_bpf::table::{AFFINITY, DATAGRAMS, DEFERS, QUIC, SHARED};
use wakeone_kernel::socket::private::Place;
use wakeone_model::listener::Protocol;

use super::error::Error;
use wakeone_control::paths::Paths;
use wakeone_control::policy::{Affinity, Policy};

/// The steering of one group, as asked for.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The group's name.
    pub name: &'a str,
    /// Its paths.
    pub paths: &'a Paths,
    /// How a worker is chosen.
    pub policy: Policy,
    /// The policy was asked for by name: no other will do where connections cannot be counted.
    pub by_name: bool,
    /// Weights of slots whose weight is not 1.
    pub weights: &'a [(usize, u32)],
    /// The cgroup that the listeners were created in, or one above; for QUIC one that all workers run in.
    pub cgroup: Option<&'a Path>,
    /// Why there is none.
    pub no_cgroup: Option<&'a str>,
    /// Length of each accept queue.
    pub backlog: i32,
    /// Workers of an earlier supervisor still serve: use its program and counts if they fit.
    pub adopt: bool,
    /// Have the program read the queues itself where it may; otherwise it uses the lengths that the agent publishes.
    pub read_queues: bool,
    /// The sockets are of UDP, with this affinity of flows; `None`: they listen by TCP. Nothing of UDP is counted, so
    /// `cgroup` is ignored then, but for QUIC.
    pub datagrams: Option<Affinity>,
    /// The kernel's hash has placed flows on these sockets already, so they stay where it puts them.
    pub earlier_flows: bool,
    /// The workers shared one UDP socket, so a flow that is too much for one of them may be spread.
    pub shared_socket: bool,
    /// For listeners on private ports: the place of each address where connections arrive. Otherwise empty.
    pub lookup: &'a [Place],
    /// For workers that run in `cgroup` and open their own listeners: the port of each address. Otherwise empty.
    pub joins: &'a [u16],
}

impl<'a> Plan<'a> {
    /// Returns a plan for connections by this policy, with a program that reads the queues where it may. All else is
    /// set by its fields.
    pub fn new(name: &'a str, paths: &'a Paths, policy: Policy) -> Self {
        Self {
            name,
            paths,
            policy,
            by_name: false,
            weights: &[],
            cgroup: None,
            no_cgroup: None,
            backlog: 0,
            adopt: false,
            read_queues: true,
            datagrams: None,
            earlier_flows: false,
            shared_socket: false,
            lookup: &[],
            joins: &[],
        }
    }

    /// Returns the protocol of the sockets.
    pub fn protocol(&self) -> Protocol {
        match self.datagrams {
            Some(_) => Protocol::Udp,
            None => Protocol::Tcp,
        }
    }

    /// Whether packets go by the connection IDs of QUIC.
    pub(super) fn is_quic(&self) -> bool {
        self.datagrams == Some(Affinity::Quic)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let fits = match self.datagrams {
            Some(affinity) => self.policy.fits_datagrams(affinity),
            None => Ok(()),
        };
        fits.map_err(|why| Error::Unfit {
            name: self.name.to_owned(),
            why,
        })
    }

    /// Returns the table's flags that tell the kind of sockets.
    pub(super) fn kind(&self) -> u32 {
        let shared = if self.shared_socket { SHARED } else { 0 };
        match self.datagrams {
            None => 0,
            Some(Affinity::None) => DATAGRAMS | shared,
            Some(Affinity::Flow) => DATAGRAMS | AFFINITY | shared,
            // Of equals the one that was chosen longest ago is next.
            Some(Affinity::Quic) => DATAGRAMS | QUIC | DEFERS,
        }
    }
}
