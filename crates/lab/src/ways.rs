//! The ways of handing out connections that are compared, each started as its user would start it: this executable again,
//! as `wakeone-lab serve` or under `wakeone run`.

use serde::Deserialize;
use wakeone_waitqueue::Policy;

use crate::error::Error;
use crate::experiment::Arm;
use crate::launch::Launch;
use crate::papers::{self, Switch};
use crate::under_test::ServerUnderTest;

/// A way of handing out connections to workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One shared socket; every worker blocks in accept().
    SharedAccept,
    /// One shared socket; every worker waits in its own epoll with EPOLLEXCLUSIVE.
    SharedEpollExclusive,
    /// One shared socket; every worker waits in its own epoll, and all are woken for each connection.
    SharedEpollWakeAll,
    /// One shared socket with EPOLLEXCLUSIVE. A worker that has accepted goes to the end of the wait queue.
    SharedEpollRotate,
    /// One shared socket; every worker has a multishot accept of io_uring under way.
    SharedIoUring,
    /// A socket a worker; the kernel's hash chooses.
    ReuseportHash,
    /// A socket a worker; Wakeone chooses the one with the fewest open connections.
    LeastConnections,
    /// The same, and the queue of a stuck worker is moved to the others.
    LeastConnectionsRescue,
    /// [`Way::SharedEpollExclusive`] under `wakeone run --queue one`, which has the kernel wake those with the fewest
    /// connections.
    OneQueue,
    /// The same with [`Way::SharedEpollWakeAll`].
    OneQueueWakeAll,
    /// [`Way::SharedEpollExclusive`] on the kernel of the papers, whose exclusive waiters take turns.
    PatchedEpollRotate,
    /// [`Way::SharedAccept`] on the kernel of the papers, under this policy.
    Patched(Policy),
}

/// The four policies of the kernel of the papers, for an accept queue that all share.
pub const PATCHED_ACCEPT: [Way; 4] = [
    Way::Patched(Policy::WakeAll),
    Way::Patched(Policy::TaskExclusive),
    Way::Patched(Policy::WakeOne),
    Way::Patched(Policy::AlwaysWake),
];

/// The ways that `tills` compares, in the order of history; those whose connections are kept too.
pub const WITH_ROTATE: [Way; 8] = [
    Way::SharedAccept,
    Way::SharedEpollExclusive,
    Way::SharedEpollRotate,
    Way::ReuseportHash,
    Way::LeastConnections,
    Way::LeastConnectionsRescue,
    Way::OneQueueWakeAll,
    Way::OneQueue,
];

/// How each worker serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Serving {
    /// One connection at a time.
    #[default]
    Blocking,
    /// An event loop: many connections at a time.
    Loops,
}

impl Way {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Way::SharedAccept => "shared-accept",
            Way::SharedEpollExclusive => "shared-epoll-exclusive",
            Way::SharedEpollWakeAll => "shared-epoll-wake-all",
            Way::SharedEpollRotate => "shared-epoll-rotate",
            Way::SharedIoUring => "shared-io-uring",
            Way::ReuseportHash => "reuseport-hash",
            Way::LeastConnections => "least-connections",
            Way::LeastConnectionsRescue => "least-connections+rescue",
            Way::OneQueue => "one-queue",
            Way::OneQueueWakeAll => "one-queue-wake-all",
            Way::PatchedEpollRotate => "patched-epoll-rotate",
            Way::Patched(Policy::WakeAll) => "patched-wake-all",
            Way::Patched(Policy::TaskExclusive) => "patched-task-exclusive",
            Way::Patched(Policy::WakeOne) => "patched-wake-one",
            Way::Patched(Policy::AlwaysWake) => "patched-always-wake",
        }
    }

    /// The way of this name.
    pub fn named(name: &str) -> Option<Self> {
        let more = [
            Way::SharedEpollWakeAll,
            Way::SharedIoUring,
            Way::PatchedEpollRotate,
        ];
        let mut all = WITH_ROTATE.into_iter().chain(PATCHED_ACCEPT).chain(more);
        all.find(|way| way.name() == name)
    }

    /// Its place in the palette of the charts.
    pub fn colour(self) -> usize {
        match self {
            Way::SharedAccept => 0,
            Way::SharedEpollExclusive => 1,
            Way::ReuseportHash => 2,
            Way::LeastConnections => 3,
            Way::LeastConnectionsRescue => 4,
            Way::SharedEpollWakeAll | Way::OneQueueWakeAll => 5,
            Way::SharedEpollRotate => 6,
            Way::SharedIoUring | Way::OneQueue | Way::Patched(Policy::WakeAll) => 7,
            Way::PatchedEpollRotate | Way::Patched(Policy::AlwaysWake) => 4,
            Way::Patched(Policy::TaskExclusive) => 6,
            Way::Patched(Policy::WakeOne) => 2,
        }
    }

    /// Whether this kernel lets us.
    pub fn is_here(self) -> bool {
        match self {
            Way::SharedIoUring => wakeone_serve::system::ring::Ring::new(8).is_ok(),
            Way::PatchedEpollRotate | Way::Patched(_) => papers::is_here(),
            _ => true,
        }
    }

    /// The switch of the kernel of the papers that it needs.
    fn switch(self) -> Option<Switch> {
        match self {
            Way::PatchedEpollRotate => Some(Switch::EpollRotate),
            Way::Patched(policy) => Some(Switch::AcceptWake(policy)),
            _ => None,
        }
    }

    /// Whether Wakeone chooses: `wakeone run` starts it, and replaces its workers.
    pub fn steered(self) -> bool {
        self.is_one_queue() || matches!(self, Way::LeastConnections | Way::LeastConnectionsRescue)
    }

    /// Whether Wakeone has some of the workers woken that share a socket.
    pub fn is_one_queue(self) -> bool {
        matches!(self, Way::OneQueue | Way::OneQueueWakeAll)
    }

    /// The command line of a server of `workers` workers.
    ///
    /// An event loop cannot block in accept(): where all accept from one socket, each connection wakes all of them.
    fn line(self, serving: Serving, workers: usize) -> String {
        let rest = format!("-w {workers} -l {{address}} --backlog {{backlog}}");
        let serve = |how: &str| format!("wakeone-lab serve --model {how} {rest}");
        // Each worker of `run` is a server of one worker on the listener that it inherits.
        let model = match serving {
            Serving::Blocking => "preforked",
            Serving::Loops => "epoll",
        };
        let run = |how: &str, model: &str| {
            format!("wakeone run {how} {rest} -- wakeone-lab serve --model {model} -w 1")
        };
        let each = "--queue each --policy least-connections";
        match self {
            Way::SharedAccept if serving == Serving::Loops => {
                serve("epoll-prefork --epoll wake-all")
            }
            Way::SharedAccept | Way::Patched(_) => serve("preforked"),
            Way::SharedEpollExclusive | Way::PatchedEpollRotate => {
                serve("epoll-prefork --epoll exclusive")
            }
            Way::SharedEpollWakeAll => serve("epoll-prefork --epoll wake-all"),
            Way::OneQueue => run("--queue one", "epoll-prefork --epoll exclusive"),
            Way::OneQueueWakeAll => run("--queue one", "epoll-prefork --epoll wake-all"),
            Way::SharedEpollRotate => serve("epoll-prefork --epoll rotate"),
            Way::SharedIoUring => serve("io-uring"),
            Way::ReuseportHash if serving == Serving::Loops => serve("reuseport"),
            Way::ReuseportHash => serve("preforked --reuseport"),
            Way::LeastConnections => run(&format!("{each} --no-rescue"), model),
            Way::LeastConnectionsRescue => run(&format!("{each} --rescue"), model),
        }
    }

    /// The launch of a server whose workers serve in this way.
    pub fn launch(self, serving: Serving, workers: usize) -> Launch {
        let what = format!("the server {}", self.name());
        Launch {
            switch: self.switch(),
            ..Launch::ours(what, self.line(serving, workers))
        }
    }

    /// Starts the server, whose workers serve one connection at a time.
    ///
    /// # Errors
    /// When it does not become ready; the reason is in the message.
    pub fn start(self, workers: usize) -> Result<ServerUnderTest, Error> {
        ServerUnderTest::start(self.launch(Serving::Blocking, workers))
    }
}

/// Name of the variant that measures a way of something: `stuck/least-connections`.
pub fn arm_name(of: &str, way: Way) -> String {
    format!("{of}/{}", way.name())
}

/// Splits the name of a variant into what is measured and the way, one of `ways`. The inverse of [`arm_name`].
///
/// # Errors
/// When no variant has this name.
pub fn parse_arm<'a>(name: &'a str, ways: &[Way]) -> Result<(&'a str, Way), Error> {
    let parts = name.rsplit_once('/').and_then(|(of, way)| {
        let way = ways.iter().find(|w| w.name() == way)?;
        Some((of, *way))
    });
    parts.ok_or_else(|| Error::Unknown(name.into()))
}

/// A variant for each way, all in one group; `seconds` is how long one measurement of one takes.
pub fn arms(of: &str, ways: &[Way], group: usize, seconds: f64) -> Vec<Arm> {
    let arm = |way: &Way| Arm {
        name: arm_name(of, *way),
        group,
        seconds,
    };
    ways.iter().map(arm).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variants_go_both_ways() {
        for way in WITH_ROTATE {
            let name = arm_name("300ms", way);
            assert_eq!(parse_arm(&name, &WITH_ROTATE).unwrap(), ("300ms", way));
        }
        for none in ["", "x", "300ms/", "300ms/shared", "x/shared-io-uring"] {
            assert!(parse_arm(none, &WITH_ROTATE).is_err(), "{none}");
        }
    }
}
