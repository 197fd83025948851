//! The supervisor: it holds the listeners, keeps a worker in each slot, and tells the steering which workers run.
//!
//! One thread waits for signals, for the workers' pidfds and for the next deadline. Its decisions are in modules that
//! know no process: [`backoff`], [`roll`]. Its persistent data is in [`state`], so that the next supervisor takes
//! over workers that outlive this one.

pub mod address;
pub mod adopt;
pub mod backoff;
mod closing;
mod elsewhere;
mod error;
mod hook;
pub mod listen;
mod missing;
pub mod notify;
mod own;
pub mod process;
mod ready;
mod remains;
mod report;
pub mod reserve;
mod rest;
pub mod retirement;
pub mod roll;
mod rolling;
mod scaling;
pub mod server;
pub mod settle;
mod signals;
pub mod slot;
pub mod spawn;
mod stopping;
mod succession;
pub mod trampoline;
mod watch;
pub mod wear;
mod wearing;
mod workers;
mod wrapper;

pub use error::Error;

use address::Address;
use adopt::{Place, Sockets, Wanted};
use listen::{Company, Endpoint, ListenError};
use nix::sys::signal::Signal;
use remains::Remains;
use reserve::Reserved;
use signals::Signals;
use slot::Slot;
use spawn::Order;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wakeone_control::account::Account;
use wakeone_control::state::{self, GroupDir, MOST_ADDRESSES, MOST_SLOTS, StateError, Task};
use wakeone_kernel::socket::private;
use wear::Limits;

/// The options of a supervisor.
#[derive(Debug, Clone)]
pub struct Options {
    /// The group's name; `None` takes it from the first address.
    pub name: Option<String>,
    /// How many workers, 1 to 256.
    pub workers: usize,
    /// How many there may be while it runs, up to 256; `None`: twice as many, 32 at most, if there are descriptors for
    /// them.
    pub most_workers: Option<usize>,
    /// Where to listen, 1 to 16 addresses.
    pub listen: Vec<Address>,
    /// Which queues the workers have by TCP; `None`: those of workers that still run, else what fits best.
    pub queue: Option<Queue>,
    /// Length of each accept queue; `None` takes the most that the kernel allows.
    pub backlog: Option<i32>,
    /// The command of a worker, with placeholders (see [`spawn::fill`]).
    pub command: Vec<String>,
    /// The user (name or number) that workers run as.
    pub user: Option<String>,
    /// The group that workers run as.
    pub group: Option<String>,
    /// Capabilities that workers keep.
    pub keep_caps: Vec<String>,
    /// Make listeners non-blocking for the workers.
    pub nonblocking: bool,
    /// Give workers their listener as standard input.
    pub stdin: bool,
    /// The signal that asks a worker to end.
    pub stop_signal: Signal,
    /// How long a worker may take to end after that.
    pub grace: Duration,
    /// How a rolling restart replaces a worker; `None`: the new one starts first if that is possible.
    pub restart: Option<Restart>,
    /// Refuse new connections from SIGTERM on, instead of leaving them to the next supervisor.
    pub refuse: bool,
    /// When a worker is replaced though it serves, or as it hangs.
    pub limits: Limits,
    /// The command, for sh, that is run before a worker that hangs is replaced. `{pid}` is its process.
    pub on_hang: Option<String>,
    /// The UDP sockets are for QUIC: a new worker gets a socket of its own, and the old one goes on with its connections.
    pub quic: bool,
    /// Have TCP listeners on a private port, where a program finds them; see [`reserve`].
    pub lookup: bool,
    /// Where the group has its folder; see [`state::default_runtime_dir`].
    pub runtime_dir: PathBuf,
}

/// The accept queues of a group's workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// All have the same.
    One,
    /// Each has its own.
    Each,
}

/// In which order a rolling restart replaces a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// The new worker starts beside the old one, which ends when the new one is ready.
    StartFirst,
    /// The old worker ends, and then the new one starts on its listener.
    StopFirst,
}

/// A group with its listeners, and with workers if some outlived an earlier supervisor.
#[derive(Debug)]
pub struct Supervisor {
    dir: GroupDir,
    signals: Signals,
    endpoints: Vec<Endpoint>,
    /// The reserving socket of each address whose listeners are on a private port.
    reserved: Vec<Option<Reserved>>,
    /// Sockets that hold the addresses of workers that open their own listeners; else empty.
    homes: Vec<OwnedFd>,
    /// The cgroup that such workers run in.
    cgroup: Option<PathBuf>,
    slots: Vec<Slot>,
    /// The first slots have workers. The others have listeners that do not listen.
    in_use: usize,
    /// How many workers there are to be.
    workers: usize,
    queue: Queue,
    /// Processes that workers which have ended left in their groups.
    remains: Remains,
    task: Task,
    backlog: i32,
    stop_signal: Signal,
    grace: Duration,
    refuse: bool,
    limits: Limits,
    on_hang: Option<String>,
    /// The soft limit of descriptors, which workers get back.
    descriptors: Option<u64>,
    adopted: bool,
}

impl Supervisor {
    /// Checks the options, locks the group, and binds its listeners or takes over those of workers that still run.
    /// New ones listen from [`Supervisor::listen`] on, and each slot has its own: see [`Supervisor::share`].
    ///
    /// From here on SIGTERM, SIGINT, SIGHUP and SIGCHLD wait for [`Supervisor::run`]: call this before starting any
    /// thread.
    ///
    /// # Errors
    /// See [`Error`]. Nothing is left behind then, and workers that still ran were not touched.
    pub fn new(options: &Options) -> Result<Self, Error> {
        let task = check(options)?;
        let name = group_name(options)?;
        let signals = Signals::take().map_err(|source| Error::System {
            what: "take signals",
            source,
        })?;
        let descriptors = raise_descriptor_limit();
        let dir = GroupDir::take(&options.runtime_dir, &name)?;
        listen::warn_of_long(options.backlog);
        let wanted: Vec<Endpoint> = options
            .listen
            .iter()
            .map(Address::resolve)
            .collect::<Result<_, _>>()?;
        let (slots, spare) = room(options, descriptor_limit())?;
        let wanted = Wanted {
            endpoints: &wanted,
            slots,
            workers: options.workers,
            task: &task,
            backlog: options.backlog,
            spare,
            grace: options.grace,
            lookup: options.lookup,
            queue: options.queue,
            opens_own: opens_own(options),
        };
        let (
            Sockets {
                endpoints,
                reserved,
                homes,
                slots,
                queue,
                backlog,
            },
            adopted,
        ) = match take_over(&dir, &wanted)? {
            Some(taken) => (taken, true),
            None => (bind_all(&wanted)?, false),
        };
        let last = slots.iter().rposition(|slot| slot.worker().is_some());
        Ok(Self {
            in_use: options.workers.max(last.map_or(0, |last| last + 1)),
            workers: options.workers,
            dir,
            signals,
            endpoints,
            reserved,
            homes,
            cgroup: None,
            slots,
            queue,
            remains: Remains::default(),
            task,
            backlog,
            stop_signal: options.stop_signal,
            grace: options.grace,
            refuse: options.refuse,
            limits: options.limits,
            on_hang: options.on_hang.clone(),
            descriptors,
            adopted,
        })
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.dir.name()
    }

    /// The group's folder.
    pub fn dir(&self) -> &GroupDir {
        &self.dir
    }

    /// Has workers that open their own listeners run in a cgroup, as those of an earlier supervisor do.
    pub fn run_in(&mut self, cgroup: &Path) {
        self.cgroup = self.opens_own().then(|| cgroup.to_owned());
    }

    /// Which queues the workers have.
    pub fn queue(&self) -> Queue {
        self.queue
    }

    /// Has all slots share the listeners of the first one. None may listen yet. `backlog`: the length of the one queue;
    /// `None`: the most that the kernel allows.
    ///
    /// # Errors
    /// We have too many descriptors.
    pub fn share(&mut self, backlog: Option<i32>) -> Result<(), ListenError> {
        self.queue = Queue::One;
        self.backlog = listen::backlog(backlog, 1);
        let tcp = self.endpoints.iter().enumerate();
        for (at, endpoint) in tcp.filter(|(_, endpoint)| !endpoint.udp) {
            let listener = listen::copy(*endpoint, &self.slots[0].listeners[at])?;
            listen::keep_alone(*endpoint, &listener, self.task.nonblocking)?;
            let all = self.slots.iter_mut().flat_map(|slot| {
                let spare = slot.spare.get_mut(at);
                slot.listeners.get_mut(at).into_iter().chain(spare)
            });
            for one in all {
                *one = listen::copy(*endpoint, &listener)?;
            }
        }
        Ok(())
    }

    /// Whether all slots have the same listener there.
    pub fn shares(&self, endpoint: &Endpoint) -> bool {
        self.queue == Queue::One && !endpoint.udp
    }

    /// The listeners that all slots have, with their addresses.
    pub fn shared(&self) -> impl Iterator<Item = (&Endpoint, &OwnedFd)> {
        let first = self.slots.first().into_iter();
        let listeners = first.flat_map(|slot| &slot.listeners);
        let all = self.endpoints.iter().zip(listeners);
        all.filter(|(endpoint, _)| self.shares(endpoint))
    }

    /// Makes a listener fit for a new worker. Others that share it have set it as they need it.
    ///
    /// # Errors
    /// See [`listen::refresh`].
    fn refresh(&self, endpoint: &Endpoint, listener: &OwnedFd) -> Result<(), ListenError> {
        if self.opens_own() {
            return Ok(()); // it holds the address
        }
        let nonblocking = (!self.shares(endpoint)).then_some(self.task.nonblocking);
        listen::refresh(*endpoint, listener, self.backlog, nonblocking)
    }

    /// Where it listens.
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// The public address and private port of each TCP address; empty if no listeners are on private ports.
    pub fn places(&self) -> Vec<private::Place> {
        self.reserved
            .iter()
            .flatten()
            .map(|one| one.place)
            .collect()
    }

    fn reserved_state(&self) -> Vec<Option<state::Reserved>> {
        if self.places().is_empty() {
            return Vec::new();
        }
        let state = |one: &Option<Reserved>| one.as_ref().map(Reserved::state);
        self.reserved.iter().map(state).collect()
    }

    /// How many workers serve; 0 while there are others than there are to be.
    fn serving(&self) -> usize {
        let slots = self.slots_in_use().iter();
        let ready = slots.filter(|slot| slot.worker().is_some_and(|worker| worker.ready));
        if self.in_use == self.workers {
            ready.count()
        } else {
            0
        }
    }

    fn slots_in_use(&self) -> &[Slot] {
        &self.slots[..self.in_use]
    }

    /// The listeners of each slot that has a worker, in the order of [`Supervisor::endpoints`].
    pub fn listeners(&self) -> impl ExactSizeIterator<Item = &[OwnedFd]> {
        let slots = self.slots_in_use().iter();
        slots.map(|slot| slot.listeners.as_slice())
    }

    /// Makes the listeners listen, slot by slot. After each slot it calls `listens`, which has connections steered
    /// there. Listeners that listen already are included. Workers that open their own do so themselves.
    ///
    /// # Errors
    /// Another process began to listen at an address.
    pub fn listen(&self, mut listens: impl FnMut(usize)) -> Result<(), ListenError> {
        if self.opens_own() {
            return Ok(());
        }
        for (slot, listeners) in self.listeners().enumerate() {
            let sockets = || {
                self.endpoints
                    .iter()
                    .zip(listeners)
                    .filter(|(at, _)| !at.udp)
            };
            // Workers of an earlier supervisor listen already.
            let company = if slot == 0 && !self.adopted {
                Company::Refuse
            } else {
                Company::Join
            };
            for (endpoint, socket) in sockets() {
                listen::start(*endpoint, socket, self.backlog, company)?;
            }
            if slot == 0 {
                self.start_reserved()?;
            }
            listens(slot);
            if company == Company::Refuse {
                let mut own = sockets().filter(|(endpoint, _)| !self.shares(endpoint));
                own.try_for_each(|(endpoint, socket)| listen::share(*endpoint, socket))?;
            }
        }
        Ok(())
    }

    fn start_reserved(&self) -> Result<(), ListenError> {
        let reserved = self.reserved.iter().zip(&self.endpoints);
        for (reserved, endpoint) in reserved {
            if let Some(reserved) = reserved {
                reserved.start(*endpoint)?;
            }
        }
        Ok(())
    }

    /// The length of each accept queue.
    pub fn backlog(&self) -> i32 {
        self.backlog
    }

    /// How many workers of an earlier supervisor were taken over.
    pub fn adopted(&self) -> usize {
        self.slots
            .iter()
            .filter(|slot| slot.worker().is_some())
            .count()
    }

    /// The port of each address.
    pub fn ports(&self) -> Vec<u16> {
        let all = self.endpoints.iter();
        all.map(|endpoint| endpoint.address.port()).collect()
    }

    fn order(&self, slot: usize) -> Order {
        let ports = self.ports();
        let fill = |argument: &String| {
            spawn::fill(argument, slot, &ports).unwrap_or_else(|_| argument.clone())
        };
        let given = !self.opens_own();
        let names = ports.iter().filter(|_| given);
        Order {
            slot,
            quic_id: None,
            protocol: given
                && !self.task.stdin
                && !spawn::names_any(&self.task.command, "fd", ports.len()),
            names: names.map(|port| format!("port-{port}")).collect(),
            cgroup: self.cgroup.clone(),
            reserved: self.reserved.iter().flatten().count(),
            account: self.task.account.clone(),
            keep_caps: self.task.keep_caps.clone(),
            stdin: self.task.stdin,
            descriptors: self.descriptors,
            command: self.task.command.iter().map(fill).collect(),
        }
    }
}

/// Rejects impossible options before anything is changed.
fn check(options: &Options) -> Result<Task, Error> {
    let addresses = &options.listen;
    if !(1..=MOST_SLOTS).contains(&options.workers) {
        return Err(Error::Usage(format!(
            "{} workers cannot be: -w takes 1 to {MOST_SLOTS}",
            options.workers
        )));
    }
    if !(1..=MOST_ADDRESSES).contains(&addresses.len()) {
        return Err(Error::Usage(format!(
            "{} addresses cannot be: -l can be given 1 to {MOST_ADDRESSES} times",
            addresses.len()
        )));
    }
    if let Some(twice) = addresses
        .iter()
        .enumerate()
        .find(|(at, one)| one.port() != 0 && addresses[..*at].contains(one))
    {
        return Err(Error::Usage(format!(
            "-l {} is given twice; leave one away",
            twice.1
        )));
    }
    if options.command.is_empty() {
        return Err(Error::Usage(
            "there is no command to run; give it after the options".to_owned(),
        ));
    }
    let ports = vec![0; addresses.len()];
    for argument in &options.command {
        spawn::fill(argument, 0, &ports).map_err(Error::Usage)?;
    }
    trampoline::kept_capabilities(&options.keep_caps).map_err(Error::Usage)?;
    check_most(options)?;
    check_stdin(options)?;
    check_all_named(options, "fd", "a listener")?;
    check_all_named(options, "port", "a port")?;
    check_own(options)?;
    check_restart(options)?;
    let account = Account::find(options.user.as_deref(), options.group.as_deref())?;
    Ok(Task {
        command: options.command.clone(),
        account,
        keep_caps: options.keep_caps.clone(),
        nonblocking: options.nonblocking,
        stdin: options.stdin,
    })
}

/// Checks that there may be as many workers as there are from the start, and that their number can change.
fn check_most(options: &Options) -> Result<(), Error> {
    let (Some(most), workers) = (options.most_workers, options.workers) else {
        return Ok(());
    };
    let why = match () {
        () if !(workers..=MOST_SLOTS).contains(&most) => {
            format!("it takes {workers} (as -w) to {MOST_SLOTS}")
        }
        () if most > workers && options.restart == Some(Restart::StopFirst) => {
            "--restart stop-first leaves no room beside the workers; leave one of the two away"
                .to_owned()
        }
        () if most > workers && options.listen.iter().any(Address::is_udp) => {
            "what waits in a worker's UDP socket would be lost with it; leave it away".to_owned()
        }
        () => return Ok(()),
    };
    Err(Error::Usage(format!(
        "--max-workers {most} cannot be: {why}"
    )))
}

/// Checks that there is one listener if it is to be the standard input, and that the command does not ask for another
/// number.
fn check_stdin(options: &Options) -> Result<(), Error> {
    let count = options.listen.len();
    let why = match () {
        () if !options.stdin => return Ok(()),
        () if count > 1 => format!("{count} -l are given; leave all but one away"),
        () if spawn::names_any(&options.command, "fd", count) => {
            "the command names {fd}; leave one of the two away".to_owned()
        }
        () => return Ok(()),
    };
    Err(Error::Usage(format!(
        "--stdin makes one listener descriptor 0, and {why}"
    )))
}

/// Checks that a command that names some listeners, or ports, names all: it is not told about the others, so nobody would
/// serve them.
fn check_all_named(options: &Options, kind: &str, what: &str) -> Result<(), Error> {
    let unnamed = |nth: &usize| !spawn::names(&options.command, kind, *nth);
    let count = options.listen.len();
    match (1..=count).find(unnamed) {
        Some(nth) if spawn::names_any(&options.command, kind, count) => Err(Error::Usage(format!(
            "nobody would serve {}: the command names {what} but not this one, {{{kind}{nth}}}; name all, or none to use LISTEN_FDS",
            options.listen[nth - 1]
        ))),
        _ => Ok(()),
    }
}

/// Whether the workers are to open their own listeners.
pub fn opens_own(options: &Options) -> bool {
    spawn::names_any(&options.command, "port", options.listen.len())
}

/// Refuses options for listeners that are given where workers open their own.
fn check_own(options: &Options) -> Result<(), Error> {
    let datagrams = options.listen.iter().find(|address| address.is_udp());
    let why = match () {
        () if !opens_own(options) => return Ok(()),
        () if spawn::names_any(&options.command, "fd", options.listen.len()) => {
            "{fd} names one that is given to it".to_owned()
        }
        () if options.stdin => "--stdin gives it one".to_owned(),
        () if options.nonblocking => "--nonblocking is for one that is given to it".to_owned(),
        () if options.backlog.is_some() => "it chooses the --backlog itself".to_owned(),
        () if options.lookup => "--lookup is for one that is given to it".to_owned(),
        () => match datagrams {
            Some(address) => format!("{address} is an address of UDP"),
            None => return Ok(()),
        },
    };
    Err(Error::Usage(format!(
        "{{port}} in the command has each worker open its own listener, but {why}; leave one of the two away"
    )))
}

/// Checks the order of restarts. Unread datagrams of a UDP socket are read by the process that has the socket next:
/// the worker's successor.
fn check_restart(options: &Options) -> Result<(), Error> {
    let datagrams = options.listen.iter().find(|address| address.is_udp());
    let datagrams = datagrams.filter(|_| !options.quic);
    match (options.restart, datagrams) {
        (Some(Restart::StartFirst), Some(address)) => Err(Error::Usage(format!(
            "--restart start-first cannot be for {address}: a new worker takes the UDP socket of the old one, with what waits in it; leave --restart away"
        ))),
        _ => Ok(()),
    }
}

/// How many slots there are to be, and whether new workers are to start beside the old ones. If the limit of descriptors
/// is too low for either, it is left away, and is an error only if the user asked for it.
fn room(options: &Options, limit: Option<u64>) -> Result<(usize, bool), Error> {
    /// Programs and maps, the log, metrics, and descriptors that are opened for a moment.
    const BESIDES: usize = 96;
    let workers = options.workers;
    let has_datagrams = options.listen.iter().any(Address::is_udp);
    if options.restart == Some(Restart::StopFirst) || has_datagrams && !options.quic {
        return Ok((workers, false));
    }
    // For each slot: two listeners an address, the dispatcher's copy of one, and two workers' pidfds.
    let needed = |slots: usize| (slots * (3 * options.listen.len() + 2) + BESIDES) as u64;
    let lacks = |slots: usize| limit.filter(|limit| *limit < needed(slots));
    let most = options.most_workers;
    let slots = match most {
        // Their number stays.
        None if has_datagrams => workers,
        Some(most) => most,
        None => Some(workers.max(USUAL_ROOM.min(2 * workers)))
            .filter(|slots| lacks(*slots).is_none())
            .unwrap_or(workers),
    };
    match lacks(slots) {
        None => Ok((slots, true)),
        Some(limit) if options.restart.is_some() || most.is_some() => {
            let needed = needed(slots);
            Err(Error::FewDescriptors { needed, limit })
        }
        Some(limit) => {
            report::few_descriptors(needed(slots), limit);
            Ok((workers, false))
        }
    }
}

/// So many workers a group may get without having been asked to: the program compares all of these for a choice.
const USUAL_ROOM: usize = 32;

/// The name of a group with these options.
///
/// # Errors
/// The given name is not valid, or the address makes none.
pub fn group_name(options: &Options) -> Result<String, Error> {
    match (&options.name, options.listen.first()) {
        (Some(name), _) if state::is_name(name) => Ok(name.clone()),
        (Some(name), _) => Err(Error::Usage(format!(
            "`{name}` cannot name a group: use up to 64 letters, digits, `-` and `_`"
        ))),
        (None, Some(first)) if first.port() == 0 => {
            Ok(format!("{}-{}", first.group_name(), std::process::id()))
        }
        (None, first) => {
            let name = first.map(Address::group_name).unwrap_or_default();
            if state::is_name(&name) {
                Ok(name)
            } else {
                Err(Error::Usage(
                    "the address is too long to name the group; give a --name".to_owned(),
                ))
            }
        }
    }
}

/// Takes over living workers. An invalid state is logged and set aside: if workers still run, the address is in use,
/// which is the next error.
fn take_over(dir: &GroupDir, wanted: &Wanted<'_>) -> Result<Option<Sockets>, Error> {
    match dir.load() {
        Ok(Some(state)) => {
            let taken = adopt::adopt(&state, wanted)?;
            if taken.is_none() {
                dir.forget(); // none of its workers runs, so it is of no use
            }
            Ok(taken)
        }
        Ok(None) => Ok(None),
        Err(error @ StateError::Invalid { .. }) => {
            tracing::warn!("{error}; starting afresh");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

fn bind_all(wanted: &Wanted<'_>) -> Result<Sockets, Error> {
    let mut places = Vec::with_capacity(wanted.endpoints.len());
    let mut columns = Vec::with_capacity(wanted.endpoints.len());
    let mut all_reserved = Vec::with_capacity(wanted.endpoints.len());
    for endpoint in wanted.endpoints {
        if wanted.opens_own {
            let owner = wanted.task.account.as_ref().map(|account| account.uid);
            let (bound, home) = listen::hold(*endpoint, owner)?;
            let copies = (0..wanted.slots).map(|_| listen::copy(bound, &home));
            columns.push(copies.collect::<Result<Vec<_>, _>>()?.into_iter());
            places.push(Place::held(bound, home));
            all_reserved.push(None);
            continue;
        }
        let (bound, reserved, listeners) = if wanted.lookup && !endpoint.udp {
            let (bound, reserved, listeners) = reserve::bind(*endpoint, wanted.slots)?;
            (bound, Some(reserved), listeners)
        } else {
            let (bound, listeners) = listen::bind_group(*endpoint, wanted.slots)?;
            (bound, None, listeners)
        };
        let known = reserved.as_ref().map(Reserved::state);
        places.push(Place::own(bound, known.as_ref()));
        all_reserved.push(reserved);
        columns.push(listeners.into_iter());
    }
    let mut slots = Vec::with_capacity(wanted.slots);
    for _ in 0..wanted.slots {
        let slot = Slot::new(columns.iter_mut().filter_map(Iterator::next).collect());
        let spare = if wanted.spare {
            let bound = places.iter().map(Place::one_more);
            bound.collect::<Result<_, _>>()?
        } else {
            Vec::new()
        };
        slots.push(slot.with_spare(spare));
    }
    Ok(Sockets {
        endpoints: places.iter().map(|place| place.public).collect(),
        reserved: all_reserved,
        homes: places.into_iter().filter_map(|place| place.home).collect(),
        slots,
        queue: Queue::Each,
        backlog: wanted.backlog_of(Queue::Each),
    })
}

/// How many descriptors we may have; `None`: no limit.
fn descriptor_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Raises our limit of descriptors, as we hold a few for each of many workers. Returns the limit that workers get:
/// the one before.
pub fn raise_descriptor_limit() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let was = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: was.maximum,
            ..was
        },
    );
    was.current
}
