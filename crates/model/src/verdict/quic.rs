//! Servers of QUIC, by the packets that come: each must reach the worker that has its connection.

use super::case::Case;
use super::{Finding, finding};
use crate::accept::Shape;
use crate::layout::count;
use crate::listener::Protocol;
use crate::snapshot::Watch;

/// How packets find their workers, where connections suffer from it.
enum Way {
    /// Several processes read one socket.
    OneSocket,
    /// Several threads do.
    OneSocketOfThreads,
    /// Our program places each packet by itself.
    EachByItself,
    /// Our program, or the kernel, goes by the addresses.
    Addresses,
}

fn way(watch: &Watch) -> Option<Way> {
    let is_quic = watch.is_quic() == Some(true) && watch.last.workers.len() > 1;
    let several = watch.last.listener.sockets.len() > 1;
    match (watch.affinity.as_deref(), watch.model.shape) {
        _ if !is_quic => None,
        (Some("none"), _) => Some(Way::EachByItself),
        (Some("flow"), _) => Some(Way::Addresses),
        (Some(_), _) => None,
        (None, Shape::Shared) => Some(Way::OneSocket),
        (None, Shape::SharedByThreads) => Some(Way::OneSocketOfThreads),
        (None, Shape::SocketPerWorker | Shape::SocketPerThread) if several => {
            (watch.has_program == Some(false)).then_some(Way::Addresses)
        }
        (None, _) => None,
    }
}

pub(super) fn scattered(case: &Case<'_>) -> Option<Finding> {
    let workers = case.watch.last.workers.len();
    let (cause, workers) = match way(case.watch)? {
        Way::OneSocket => (
            "several workers read one socket: whoever is first takes a packet, and one of them has the keys of its connection",
            format!("{workers} processes read one socket on {}", case.address),
        ),
        Way::EachByItself => (
            "`--affinity none` places each packet by itself, and one worker has the keys of its connection",
            format!("{workers} workers on {}", case.address),
        ),
        Way::OneSocketOfThreads | Way::Addresses => return None,
    };
    let begun = case.watch.sampled.datagrams.long;
    let found = finding(
        "quic-scattered",
        "Packets of one QUIC connection reach several workers",
        cause,
    )
    .shown(workers)
    .shown(format!(
        "{} of QUIC",
        count(
            begun,
            "packet has a long header",
            "packets have a long header"
        )
    ));
    Some(match case.watch.affinity {
        Some(_) => found.then("`--affinity quic` of `wakeone run` or `wakeone attach`"),
        None => found.then(split()).then(format!(
            "or give each worker a socket (SO_REUSEPORT), then {}",
            attach(case.watch)
        )),
    })
}

fn split() -> &'static str {
    "`wakeone run --split --affinity quic -- COMMAND` gives each worker a queue, and each packet to the worker that has its connection"
}

fn attach(watch: &Watch) -> String {
    let target = watch.last.listener.address.target();
    format!("`wakeone attach udp://{target} --affinity quic`")
}

/// Tells of connections that break at times, or perhaps.
pub(super) fn note(watch: &Watch) -> Option<String> {
    match way(watch)? {
        Way::OneSocket | Way::EachByItself => None,
        Way::OneSocketOfThreads => Some(format!(
            "its packets are QUIC's, and several threads read one socket: unless these share their connections, {}",
            split()
        )),
        Way::Addresses => Some(format!(
            "its packets are QUIC's, and addresses and ports choose the worker: connections break when a client's address changes{}; {} gives each packet to the worker that has its connection",
            match watch.affinity {
                // Our program keeps flows while workers come and go.
                Some(_) => "",
                None => ", and when workers come or go, as in a reload",
            },
            match watch.affinity {
                Some(_) => "`--affinity quic` of `wakeone run` or `wakeone attach`".into(),
                None => attach(watch),
            }
        )),
    }
}

impl Watch {
    /// Whether the datagrams that came are QUIC's; `None` where none was looked at.
    pub fn is_quic(&self) -> Option<bool> {
        let seen = &self.sampled.datagrams;
        let is_udp = self.last.listener.protocol == Protocol::Udp;
        (is_udp && seen.long + seen.others > 0).then(|| seen.are_quic())
    }
}
