//! How long one run of each program takes: by policy, and by how many workers there are to choose from.
//!
//! One thread holds the listeners of all the workers, in a network namespace of its own. With a process each, 256 processes
//! would be measured as well. The kernel's statistics count runs and time. The policies take turns on one live group, and
//! the median of the turns is taken: a burst of other work spoils one turn, and no policy.

use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use rand::seq::SliceRandom;
use rand::{SeedableRng, rngs::StdRng};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use wakeone_bpf as bpf;
use wakeone_bpf::run_stats::{PlainProgram, RunStats, Runs};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_kernel::{cgroup, netns, socket};
use wakeone_steering::dispatcher::{Dispatcher, Plan};

use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::stats;

/// One number of slots, and the amount of work to measure it by.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    /// Workers to choose from.
    pub slots: usize,
    /// Turns of each policy.
    pub turns: usize,
    /// Connections in a turn.
    pub connections: usize,
}

/// Connections that stay open, so that a policy that chooses by counts sees some. Their number does not depend on the
/// slots: otherwise the caches would hold more sockets with more slots.
const OPEN: usize = 64;
const ADDRESS: &str = "127.0.0.1:8080";
const BACKLOG: i32 = 1024;
const NAME: &str = "programs";

/// The program that has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    /// A program that does nothing.
    Empty,
    /// One that selects a socket by the hash, and does nothing else.
    Select,
    /// The dispatch program, by the policy of this number.
    Policy(u32),
}

impl Turn {
    fn metric(self) -> String {
        match self {
            Turn::Empty => "empty_ns".into(),
            Turn::Select => "select_ns".into(),
            Turn::Policy(number) => metric(Policy::of_number(number).unwrap_or_default()),
        }
    }
}

/// The name of the metric that has a policy's time.
pub fn metric(policy: Policy) -> String {
    format!("{}_ns", policy.name().replace('-', "_"))
}

/// Measures one cell. In a thread of its own, which takes its network namespace away with it.
///
/// # Errors
/// When the group cannot be made or steered.
pub fn measure(cell: Cell, context: &mut Context<'_>) -> Result<Sample, Error> {
    let (seed, cancel) = (context.seed, context.cancel);
    let (told, progress) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let mut group = Group::start(cell)?;
            let sample = group.measure(cell, seed, |share| {
                let _ = told.send(share);
                !cancel.load(Relaxed)
            });
            group.end();
            sample
        });
        for share in progress {
            (context.progress)(share);
        }
        worker
            .join()
            .unwrap_or_else(|_| Err(missing("a thread that measures panicked")))
    })
}

fn missing(why: impl std::fmt::Display) -> Error {
    Error::Missing(format!("measuring the programs failed: {why}"))
}

/// A steered group whose listeners all belong to this process.
struct Group {
    dispatcher: Option<Dispatcher>,
    empty: PlainProgram,
    select: Option<PlainProgram>,
    listeners: Vec<TcpListener>,
    poll: OwnedFd,
    paths: Paths,
    cgroup: PathBuf,
    /// Both ends of each open connection, the oldest first.
    open: VecDeque<(TcpStream, TcpStream)>,
    _statistics: RunStats,
    _folder: tempfile::TempDir,
}

impl Group {
    fn start(cell: Cell) -> Result<Self, Error> {
        many_descriptors();
        netns::isolate().map_err(missing)?;
        let folder = tempfile::tempdir().map_err(missing)?;
        let paths = Paths::of(&folder.path().join("run"));
        let cgroup = cgroup::own()
            .map_err(missing)?
            .join(paths.cgroup_name(NAME));
        let listen_all = || (0..cell.slots).map(|_| listen()).collect();
        let (_, listeners) = cgroup::create_sockets_in(&cgroup, listen_all).map_err(missing)?;
        let listeners: Vec<TcpListener> = match listeners {
            Ok(listeners) => listeners,
            Err(error) => {
                let _: std::io::Result<()> = cgroup::remove(&cgroup);
                return Err(missing(error));
            }
        };
        let mut group = Self {
            dispatcher: None,
            empty: PlainProgram::empty().map_err(missing)?,
            select: None,
            poll: watch(&listeners).map_err(missing)?,
            listeners,
            paths,
            cgroup,
            open: VecDeque::new(),
            _statistics: RunStats::enable().map_err(missing)?,
            _folder: folder,
        };
        let dispatcher = group.steer()?;
        let sockets = dispatcher.pinned().sockets(0);
        let select = PlainProgram::selecting(sockets, cell.slots as u32);
        group.select = Some(select.map_err(missing)?);
        group.dispatcher = Some(dispatcher);
        Ok(group)
    }

    fn steer(&self) -> Result<Dispatcher, Error> {
        let plan = Plan {
            name: NAME,
            paths: &self.paths,
            policy: Policy::LeastConnections,
            by_name: true,
            weights: &[],
            cgroup: Some(&self.cgroup),
            no_cgroup: None,
            backlog: BACKLOG,
            adopt: false,
            read_queues: true,
            datagrams: None,
            earlier_flows: false,
            shared_socket: false,
            lookup: &[],
            joins: &[],
        };
        let copies: std::io::Result<Vec<Vec<OwnedFd>>> = self
            .listeners
            .iter()
            .map(|one| Ok(vec![OwnedFd::from(one.try_clone()?)]))
            .collect();
        Dispatcher::start(&plan, copies.map_err(missing)?).map_err(missing)
    }

    fn measure(
        &mut self,
        cell: Cell,
        seed: u64,
        mut go_on: impl FnMut(f64) -> bool,
    ) -> Result<Sample, Error> {
        let mut order: Vec<Turn> = Policy::ALL.map(|p| Turn::Policy(p.number())).into();
        order.extend([Turn::Empty, Turn::Select]);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut found: BTreeMap<Turn, Vec<f64>> = BTreeMap::new();
        let mut counting = Vec::new();
        self.run(Turn::Policy(Policy::Random.number()), cell.connections)?; // warms up
        for turn in 0..cell.turns {
            order.shuffle(&mut rng);
            for whose in &order {
                let (choosing, counted) = self.run(*whose, cell.connections)?;
                found.entry(*whose).or_default().push(mean_ns(choosing));
                counting.push(counted);
            }
            if !go_on((turn + 1) as f64 / cell.turns as f64) {
                return Err(Error::Interrupted);
            }
        }
        let mut sample = Sample::default();
        for (whose, ns) in found {
            sample.put(whose.metric(), "ns", stats::median(&ns));
        }
        let each: Vec<f64> = counting.iter().map(|runs| mean_ns(*runs)).collect();
        let runs: u64 = counting.iter().map(|runs| runs.count).sum();
        let connections = counting.len() * cell.connections;
        sample.put("sock_ops_ns", "ns", stats::median(&each));
        sample.put(
            "sock_ops_runs_per_connection",
            "ratio",
            runs as f64 / connections as f64,
        );
        Ok(sample)
    }

    /// Makes the connections of one turn. Returns the runs of the program that chooses, and of the one that counts.
    fn run(&mut self, whose: Turn, connections: usize) -> Result<(Runs, Runs), Error> {
        self.choose_by(whose)?;
        let (chose, counted) = self.runs(whose)?;
        for _ in 0..connections {
            self.connect().map_err(missing)?;
        }
        let (chose_after, counted_after) = self.runs(whose)?;
        let chose = since(chose, chose_after);
        if chose.count < connections as u64 {
            return Err(missing(format!(
                "the program ran {} times for {connections} connections",
                chose.count
            )));
        }
        Ok((chose, since(counted, counted_after)))
    }

    /// The program of a turn that is not the group's.
    fn plain(&self, whose: Turn) -> Option<&PlainProgram> {
        match whose {
            Turn::Empty => Some(&self.empty),
            Turn::Select => self.select.as_ref(),
            Turn::Policy(_) => None,
        }
    }

    fn choose_by(&self, whose: Turn) -> Result<(), Error> {
        let Some(dispatcher) = &self.dispatcher else {
            return Err(missing("there is no group"));
        };
        if let Some(plain) = self.plain(whose) {
            return socket::attach_reuseport(&self.listeners[0], plain.as_fd()).map_err(missing);
        }
        match whose {
            Turn::Empty | Turn::Select => Err(missing("a program was not loaded")),
            Turn::Policy(number) => {
                dispatcher.set_policy(Policy::of_number(number).unwrap_or_default());
                dispatcher
                    .pinned()
                    .attach(0, &self.listeners[0])
                    .map_err(missing)
            }
        }
    }

    fn runs(&self, whose: Turn) -> Result<(Runs, Runs), Error> {
        let of_group = self
            .dispatcher
            .iter()
            .flat_map(|dispatcher| dispatcher.pinned().run_statistics());
        let (mut chose, mut counted) = (Runs::default(), Runs::default());
        for program in of_group {
            let counts = program.name == "count";
            let sum = if counts { &mut counted } else { &mut chose };
            sum.count += program.run_cnt;
            sum.ns += program.run_time_ns;
        }
        if let Some(plain) = self.plain(whose) {
            chose = Runs::of(plain.as_fd()).map_err(missing)?;
        }
        Ok((chose, counted))
    }

    /// One connection comes; when enough are open, the oldest goes, closed by its server first.
    fn connect(&mut self) -> std::io::Result<()> {
        let client = TcpStream::connect(ADDRESS)?;
        let mut ready: [epoll::Event; 1] = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        while epoll::wait(&self.poll, &mut ready, None)? == 0 {}
        let slot = ready[0].data.u64() as usize;
        let (server, _) = self.listeners[slot].accept()?;
        self.open.push_back((server, client));
        if self.open.len() > OPEN
            && let Some((server, client)) = self.open.pop_front()
        {
            drop(server);
            drop(client);
        }
        Ok(())
    }

    fn end(mut self) {
        self.open.clear();
        if let Some(dispatcher) = self.dispatcher.take() {
            dispatcher.end(&self.paths, Some(&self.cgroup));
        }
    }
}

impl Drop for Group {
    /// Cleans up after a failure half-way. [`Group::end`] leaves nothing to do here.
    fn drop(&mut self) {
        let _ = bpf::remove_pins(&self.paths.group_pins(NAME));
        let _ = cgroup::remove(&self.cgroup);
        self.paths.tidy();
    }
}

fn mean_ns(runs: Runs) -> f64 {
    runs.ns as f64 / runs.count.max(1) as f64
}

fn since(before: Runs, after: Runs) -> Runs {
    Runs {
        count: after.count.saturating_sub(before.count),
        ns: after.ns.saturating_sub(before.ns),
    }
}

/// A listener and two ends of a few connections for each slot are more than the usual 1,024 descriptors.
fn many_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

fn listen() -> std::io::Result<TcpListener> {
    let address: SocketAddr = ADDRESS.parse().map_err(std::io::Error::other)?;
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    sockopt::set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// An epoll that tells which of the listeners has a connection, by its place.
fn watch(listeners: &[TcpListener]) -> std::io::Result<OwnedFd> {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (place, listener) in listeners.iter().enumerate() {
        epoll::add(
            &poll,
            listener,
            epoll::EventData::new_u64(place as u64),
            epoll::EventFlags::IN,
        )?;
    }
    Ok(poll)
}
