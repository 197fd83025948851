//! The cost of listen() for a listener that comes back to its reuseport group, by the connections of its port.

use nix::sys::socket::{
    self, AddressFamily, Backlog, Shutdown, SockFlag, SockType, SockaddrStorage, sockopt,
};
use serde_json::json;
use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use crate::card::{Card, card};
use crate::error::{Error, joined};
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::papers::{self, Switch};
use crate::present::{Block, Chart, Row, Style, Table, cell};
use crate::result::{Expectation, Outcome};
use crate::{stats, views};

card!();

/// The experiment.
pub struct Reopen;

/// How often the listener is shut down.
const TIMES: usize = 31;
/// In a namespace of its own, any port is free.
const PORT: u16 = 8080;
/// Connections from one client address: fewer than it has ports.
const FROM_ONE: usize = 10_000;
const METRIC: &str = "listen_us";

/// Whether the kernel looks for a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Checked,
    Unchecked,
}

const WAYS: [Way; 2] = [Way::Checked, Way::Unchecked];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Checked => "checked",
            Way::Unchecked => "unchecked",
        }
    }

    fn colour(self) -> usize {
        match self {
            Way::Checked => 5,
            Way::Unchecked => 3,
        }
    }

    fn is_here(self) -> bool {
        self == Way::Checked || papers::is_here()
    }
}

fn sizes(quick: bool) -> &'static [usize] {
    if quick {
        &[0, 1000, 5000]
    } else {
        &[0, 1000, 5000, 20_000, 60_000]
    }
}

fn arm_name(way: Way, connections: usize) -> String {
    format!("{}/{connections}", way.name())
}

fn parse(name: &str) -> Option<(Way, usize)> {
    let (way, connections) = name.split_once('/')?;
    let way = WAYS.into_iter().find(|w| w.name() == way)?;
    Some((way, connections.parse().ok()?))
}

fn growth_name(way: Way) -> String {
    format!(
        "{}: listen() with the most connections / with none",
        way.name()
    )
}

impl Experiment for Reopen {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let sizes = sizes(settings.quick);
        let ways: Vec<Way> = WAYS.into_iter().filter(|way| way.is_here()).collect();
        let mut arms = Vec::new();
        for (group, connections) in sizes.iter().enumerate() {
            arms.extend(ways.iter().map(|way| Arm {
                name: arm_name(*way, *connections),
                group,
                seconds: 0.2 + *connections as f64 * 60e-6,
            }));
        }
        let most = sizes.last().copied().unwrap_or(0);
        let growth = |way: &Way| Pairing {
            name: growth_name(*way),
            a: arm_name(*way, most),
            b: arm_name(*way, 0),
            metric: METRIC.into(),
        };
        Design {
            rounds: if settings.quick { 3 } else { 5 },
            arms,
            pairings: ways.iter().map(growth).collect(),
            steady: METRIC,
            parameters: parameters([("connections", json!(sizes)), ("times", json!(TIMES))]),
        }
    }

    fn measure(&self, arm: &Arm, _context: &mut Context<'_>) -> Result<Sample, Error> {
        let (way, connections) =
            parse(&arm.name).ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        // A thread of its own: the namespace is the thread's, and goes with it.
        let times = std::thread::scope(|scope| scope.spawn(|| isolated(way, connections)).join());
        let times = joined(times)?;
        let mut sample = Sample::default();
        sample.put(METRIC, "us", stats::median(&times));
        sample.put("listen_us_max", "us", stats::max(&times));
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let most = most(outcome).to_string();
        let grows =
            |name, way| CARD.expect_of(name, &[("most", &most)], outcome.ratio(&growth_name(way)));
        let mut all = vec![grows("checked-grows", Way::Checked)];
        if !curve(outcome, Way::Unchecked, METRIC).is_empty() {
            all.push(grows("unchecked-constant", Way::Unchecked));
        }
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let most = most(outcome).to_string();
        let names = [("most", &*most)];
        let told = ["cost", "patched"].map(|key| CARD.say(key, outcome, &names));
        let mut blocks = views::meaning(told.into_iter().flatten());
        blocks.push(Block::Table(table(outcome)));
        let line = |way: Way| {
            let style = Style::ours(way.name(), way.colour());
            (style, curve(outcome, way, METRIC))
        };
        blocks.push(Block::Chart(Chart::lines(
            "Time in listen() of a listener that comes back to its group.",
            "Median of the rounds. The lock of the port's bucket is held as long.",
            ("connections in TIME_WAIT on the port", "µs", false),
            WAYS.map(line),
        )));
        blocks
    }
}

/// The measured `(connections, value)`, rising.
fn curve(outcome: &Outcome, way: Way, metric: &str) -> Vec<(f64, f64)> {
    let point = |v: &crate::result::Variant| {
        let (of, connections) = parse(&v.name)?;
        (of == way).then_some((connections as f64, v.median(metric)?))
    };
    let mut points: Vec<_> = outcome.variants.iter().filter_map(point).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

fn most(outcome: &Outcome) -> usize {
    let points = curve(outcome, Way::Checked, METRIC);
    points.last().map_or(0, |point| point.0 as usize)
}

fn table(outcome: &Outcome) -> Table {
    let sizes = curve(outcome, Way::Checked, METRIC).into_iter();
    let sizes: Vec<usize> = sizes.map(|point| point.0 as usize).collect();
    let row = |way: Way, metric: &str, name: String| {
        let cells = sizes
            .iter()
            .map(|n| cell(outcome.median(&arm_name(way, *n), metric)));
        Row::named(name, cells)
    };
    let measured = WAYS
        .into_iter()
        .filter(|way| !curve(outcome, *way, METRIC).is_empty());
    let rows = measured.flat_map(|way| {
        [
            row(way, METRIC, way.name().into()),
            row(way, "listen_us_max", format!("{}, longest", way.name())),
        ]
    });
    Table::new(
        "Time in listen(), in µs. Columns: connections in TIME_WAIT on the port.",
        sizes.iter().map(usize::to_string),
        rows,
    )
}

/// The times in listen(), in µs, in a network namespace of this thread.
fn isolated(way: Way, connections: usize) -> Result<Vec<f64>, Error> {
    wakeone_kernel::netns::isolate().map_err(|e| {
        Error::Missing(format!(
            "making a network namespace failed: {e}; the experiment needs root and ip (package iproute2)"
        ))
    })?;
    let _migrate = Switch::Migrate.set()?;
    let _unchecked = match way {
        Way::Checked => None,
        Way::Unchecked => Some(Switch::Reopen.set()?),
    };
    let limit = "/proc/sys/net/ipv4/tcp_max_tw_buckets";
    fs::write(limit, (2 * connections + 1000).to_string()).map_err(|source| Error::File {
        action: "writing",
        path: limit.into(),
        source,
    })?;
    let failed = |e: std::io::Error| Error::Server(format!("reopening a listener failed: {e}"));
    let [one, two] = [listener().map_err(failed)?, listener().map_err(failed)?];
    let listeners = [one, two].map(TcpListener::from);
    for n in 0..connections {
        connect(&listeners, n).map_err(failed)?;
    }
    let [one, _two] = &listeners;
    (0..TIMES).map(|_| reopen(one).map_err(failed)).collect()
}

fn listener() -> std::io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let one = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    socket::setsockopt(&one, sockopt::ReusePort, &true)?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    socket::bind(one.as_raw_fd(), &SockaddrStorage::from(address))?;
    socket::listen(&one, Backlog::new(100)?)?;
    Ok(one)
}

/// One connection, which the server closes first.
fn connect(listeners: &[TcpListener; 2], n: usize) -> std::io::Result<()> {
    let from = [127, 0, 2, 1 + (n / FROM_ONE) as u8];
    let from = SocketAddr::from((from, (10_000 + n % FROM_ONE) as u16));
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let flags = SockFlag::SOCK_CLOEXEC;
    let client = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    socket::bind(client.as_raw_fd(), &SockaddrStorage::from(from))?;
    socket::connect(client.as_raw_fd(), &SockaddrStorage::from(to))?;
    drop(accept_any(listeners)?);
    let mut client = TcpStream::from(client);
    client.read_to_end(&mut Vec::new()).map(drop)
}

/// The connection that waits at one of them.
fn accept_any(listeners: &[TcpListener; 2]) -> std::io::Result<TcpStream> {
    loop {
        for listener in listeners {
            listener.set_nonblocking(true)?;
            match listener.accept() {
                Ok((stream, _)) => return Ok(stream),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
    }
}

/// Shuts it down and lets it listen again; the time in listen(), in µs.
fn reopen(listener: &TcpListener) -> std::io::Result<f64> {
    socket::shutdown(listener.as_raw_fd(), Shutdown::Both)?;
    let before = Instant::now();
    socket::listen(listener, Backlog::new(100)?)?;
    Ok(before.elapsed().as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{failing, outcome, ratio};

    #[test]
    fn names_of_variants_go_both_ways() {
        for way in WAYS {
            assert_eq!(parse(&arm_name(way, 5000)), Some((way, 5000)));
        }
        assert_eq!(parse("nobody/100"), None);
    }

    #[test]
    fn each_limit_bites() {
        let of = |checked: f64, unchecked: f64| {
            let mut outcome = outcome(&[
                ("checked/0", &[(METRIC, &[1.0][..])][..]),
                ("checked/5000", &[(METRIC, &[9.0][..])][..]),
                ("unchecked/5000", &[(METRIC, &[1.0][..])][..]),
            ]);
            outcome.comparisons = vec![
                ratio(growth_name(Way::Checked), checked),
                ratio(growth_name(Way::Unchecked), unchecked),
            ];
            failing(Reopen.judge(&outcome))
        };
        assert_eq!(of(30.0, 1.0), Vec::<String>::new());
        assert_eq!(of(9.0, 1.0), ["checked-grows"]);
        assert_eq!(of(30.0, 4.0), ["unchecked-constant"]);
    }
}
