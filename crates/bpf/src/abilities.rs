//! Finds out by trying what this kernel and our privileges allow: each program is loaded once, attached to nothing and
//! pinned nowhere, and dropped again.

use std::fmt;
use std::mem::MaybeUninit;
use std::net::Ipv6Addr;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use wakeone_kernel::capability::Capability;

use crate::bursts::Bursts;
use crate::dispatch::open_dispatch;
use crate::error::{Error, bpf_step};
use crate::object::{attempt, prepare};
use crate::probe::Probe;
use crate::quic;
use crate::skeletons::datagram::DatagramSkelBuilder;
use crate::skeletons::lookup::LookupSkelBuilder;
use crate::skeletons::recount::RecountSkelBuilder;
use wakeone_kernel::proc::refusal;
use wakeone_kernel::socket::capture::Capture;
use wakeone_kernel::{capability, cgroup};

/// A feature, with the reason where it is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ability {
    /// Its name, as tests and docs/kernels.md have it.
    pub name: &'static str,
    /// Tells in a few words what it does.
    pub about: &'static str,
    /// Why the feature is missing; `None` where it is available.
    pub missing: Option<Missing>,
}

/// Why a feature is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// We lack these capabilities. Whether the kernel has the feature was not tried.
    Capabilities(Vec<String>),
    /// The kernel does not have it, or a rule forbids it.
    Here(String),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capabilities(names) => write!(f, "it needs {}", names.join(" and ")),
            Self::Here(why) => f.write_str(why),
        }
    }
}

impl Ability {
    fn new(name: &'static str, about: &'static str, tried: &Result<(), Missing>) -> Self {
        Self {
            name,
            about,
            missing: tried.clone().err(),
        }
    }
}

/// The version of the libbpf that is linked in.
pub fn libbpf_version() -> String {
    // SAFETY: the functions take nothing and read constants.
    let (major, minor) = unsafe {
        (
            libbpf_rs::libbpf_sys::libbpf_major_version(),
            libbpf_rs::libbpf_sys::libbpf_minor_version(),
        )
    };
    format!("{major}.{minor}")
}

/// Tries each feature.
pub fn find() -> Vec<Ability> {
    libbpf_rs::set_print(None);
    let looking = refusal::anybody().map_err(|why| Missing::Here(why.to_string()));
    let mut abilities = vec![Ability::new(
        "one-queue",
        "steer workers that share one queue (run, attach)",
        &looking,
    )];
    let dividing = tried(&[Capability::CAP_BPF, Capability::CAP_PERFMON], || {
        // No listener has this cookie.
        Bursts::attach(0, 0).map(drop)
    });
    abilities.push(Ability::new(
        "exact-bursts",
        "divide many connections at once exactly",
        &dividing,
    ));
    let (of_connections, steering) = connections();
    abilities.extend(of_connections);
    abilities.extend(datagrams());
    abilities.extend(watching());
    let rescue = steering.and_then(|()| with(Capability::CAP_SYS_PTRACE));
    abilities.push(Ability::new(
        "rescue",
        "move the queue of a stuck worker of another user",
        &rescue,
    ));
    let priority = with(Capability::CAP_SYS_NICE);
    abilities.push(Ability::new(
        "priority",
        "let nothing delay such a move",
        &priority,
    ));
    abilities
}

/// The abilities that concern TCP, and whether connections are steered at all.
fn connections() -> (Vec<Ability>, Result<(), Missing>) {
    let steering = tried(&[Capability::CAP_BPF, Capability::CAP_PERFMON], || {
        dispatch("wakeone_dispatch")
    });
    let reading = steering.clone().and_then(|()| {
        tried(&[Capability::CAP_PERFMON], || {
            dispatch("wakeone_dispatch_walk")
        })
    });
    let counting = steering.clone().and_then(|()| {
        needs_cgroup()?;
        tried(&[Capability::CAP_NET_ADMIN], || dispatch("wakeone_count"))
    });
    let recount = counting
        .clone()
        .and_then(|()| tried(&[Capability::CAP_BPF, Capability::CAP_PERFMON], recount));
    let lookup = counting
        .clone()
        .and_then(|()| tried(&[Capability::CAP_NET_ADMIN], lookup));
    let abilities = vec![
        Ability::new(
            "steering",
            "choose the worker of each connection",
            &steering,
        ),
        Ability::new(
            "migration",
            "move connections off a closing listener",
            &steering,
        ),
        Ability::new(
            "attach",
            "attach to a server whose workers have a listener each",
            &steering,
        ),
        Ability::new(
            "counting",
            "count each worker's open connections",
            &counting,
        ),
        Ability::new(
            "queues-read-in-program",
            "read accept queues while choosing",
            &reading,
        ),
        Ability::new("recount", "count what was open before an attach", &recount),
        Ability::new(
            "lookup",
            "find listeners on a private port (run --lookup)",
            &lookup,
        ),
    ];
    (abilities, steering)
}

fn datagrams() -> [Ability; 2] {
    let steering = tried(&[Capability::CAP_BPF, Capability::CAP_PERFMON], datagram);
    let of_quic = steering.clone().and_then(|()| {
        needs_cgroup()?;
        tried(&[Capability::CAP_NET_ADMIN], quic::try_loading)
    });
    [
        Ability::new(
            "udp-steering",
            "choose the socket of each datagram",
            &steering,
        ),
        Ability::new(
            "quic",
            "choose the worker of each QUIC connection (--affinity quic)",
            &of_quic,
        ),
    ]
}

fn needs_cgroup() -> Result<(), Missing> {
    match cgroup::mount_point() {
        Ok(_) => Ok(()),
        Err(error) => Err(Missing::Here(format!("no cgroup2 is mounted: {error}"))),
    }
}

/// The abilities of `doctor` and `top` beyond /proc.
fn watching() -> [Ability; 4] {
    let attached = without_capabilities(&capability::TRACING)
        .and_then(|()| Probe::attach(0).map_err(|error| Missing::Here(error.to_string())));
    let told = |gap: fn(&Probe) -> bool| match &attached {
        Ok(probe) if gap(probe) => Err(Missing::Here(probe.missing().join("; "))),
        Ok(_) => Ok(()),
        Err(why) => Err(why.clone()),
    };
    [
        Ability::new(
            "doctor-accepts",
            "doctor, top: connections of each worker",
            &told(|probe| probe.gaps().accepts),
        ),
        Ability::new(
            "doctor-wait-times",
            "doctor, top: waits in the accept queue",
            &told(|probe| probe.gaps().accepts),
        ),
        Ability::new(
            "doctor-wake-ups",
            "doctor, top: wake-ups a connection",
            &told(|probe| probe.gaps().wakeups),
        ),
        Ability::new(
            "doctor-packets",
            "doctor: what QUIC connections need",
            &capturing(),
        ),
    ]
}

fn capturing() -> Result<(), Missing> {
    let anywhere = (Ipv6Addr::UNSPECIFIED, 0).into();
    let began = Capture::start(anywhere, 0, (0, 0)).map(drop);
    began.or_else(|error| {
        with(Capability::CAP_NET_RAW)?;
        Err(Missing::Here(format!("a packet socket failed: {error}")))
    })
}

/// Tries a load. Where capabilities are missing, they are the reason, whatever the kernel says.
fn tried(needed: &[Capability], load: impl FnOnce() -> Result<(), Error>) -> Result<(), Missing> {
    load().map_err(|error| match without_capabilities(needed) {
        Err(missing) => missing,
        Ok(()) => Missing::Here(error.to_string()),
    })
}

fn without_capabilities(needed: &[Capability]) -> Result<(), Missing> {
    // CAP_BPF and CAP_PERFMON were once part of CAP_SYS_ADMIN.
    if capability::has_over_all(Capability::CAP_SYS_ADMIN) {
        return Ok(());
    }
    has_all(needed)
}

fn with(needed: Capability) -> Result<(), Missing> {
    has_all(&[needed])
}

fn has_all(needed: &[Capability]) -> Result<(), Missing> {
    match capability::missing_of(needed.iter().copied()) {
        none if none.is_empty() => Ok(()),
        missing => Err(Missing::Capabilities(missing)),
    }
}

/// Loads one program of the dispatch object.
fn dispatch(name: &str) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = open_dispatch(&mut storage)?;
    let programs = &mut open.progs;
    for program in [
        &mut programs.wakeone_dispatch,
        &mut programs.wakeone_dispatch_walk,
        &mut programs.wakeone_count,
    ] {
        if program.name() == name {
            prepare(program);
        }
    }
    attempt(name, || open.load()).map(drop)
}

fn datagram() -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = DatagramSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    open.progs.wakeone_datagram_walk.set_autoload(false);
    prepare(&mut open.progs.wakeone_datagram);
    attempt("wakeone_datagram", || open.load()).map(drop)
}

fn recount() -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = RecountSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    prepare(&mut open.progs.wakeone_count_in);
    attempt("wakeone_count_in", || open.load()).map(drop)
}

fn lookup() -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let open = LookupSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    attempt("wakeone_lookup", || open.load()).map(drop)
}
