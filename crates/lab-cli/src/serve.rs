//! `wakeone-lab serve`: the reference server.

use std::convert::Infallible;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use wakeone_lab::process::{own_program, wakeone};
use wakeone_serve::system::shared_counter::SharedCounter;
use wakeone_serve::{
    AcceptLock, EpollMode, Listen, Model, Options, Place, Root, parse_address, serve,
};

/// Serve a small HTTP application in a chosen architecture
///
/// Paths: / is a guest book (a POST signs it), /work?us=N&kind=cpu|sleep works for N microseconds,
/// /whoami says who answers, and all others are files of --files. Every answer names its worker in
/// X-Worker and its process in X-Pid.
///
/// SIGTERM finishes what has been accepted, then ends with 0.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  wakeone-lab serve --model preforked -w 4 -l 127.0.0.1:8080
  wakeone-lab serve --model epoll-prefork --epoll rotate -w 4 -l :8080
  wakeone-lab serve --model dispatched -w 4 -l 127.0.0.1:8080  (becomes `wakeone run`)
  wakeone run -w 4 -l 127.0.0.1:8080 -- wakeone-lab serve --model preforked")]
pub struct Args {
    /// The architecture
    #[arg(long, value_name = "MODEL", default_value = "preforked")]
    model: ModelArg,

    /// How many workers [default: 1]
    #[arg(short, long, value_name = "N", default_value_t = 1, hide_default_value = true,
          value_parser = clap::value_parser!(u16).range(1..))]
    workers: u16,

    /// Listen here, HOST:PORT or :PORT [default: the sockets handed over in LISTEN_FDS, else
    /// 127.0.0.1:8080]
    #[arg(short, long, value_name = "ADDR", value_parser = parse_address)]
    listen: Option<SocketAddr>,

    /// How many connections may wait in a listener's queue
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(i32).range(0..))]
    backlog: i32,

    /// Give each worker a listener of its own; the kernel's hash chooses
    #[arg(long)]
    reuseport: bool,

    /// epoll-prefork: whom a connection wakes
    #[arg(long, value_name = "WHOM", default_value = "exclusive")]
    epoll: EpollArg,

    /// preforked, prethreaded: the lock around accept [default: none, prethreaded: pthread]
    #[arg(long, value_name = "KIND")]
    accept_lock: Option<AcceptLockArg>,

    /// Keep the guest book in this directory, or in redis://HOST:PORT [default: a directory under
    /// $XDG_STATE_HOME]
    #[arg(long, value_name = "PLACE", value_parser = Place::parse)]
    store: Option<Place>,

    /// Serve the files of this directory
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,

    /// Count the answers of all workers in this file, 8 bytes in this machine's byte order
    #[arg(long, value_name = "FILE")]
    counter: Option<PathBuf>,

    /// Close each connection after one answer
    #[arg(long)]
    no_keep_alive: bool,

    /// How long a client may take to send a request, and be idle between two
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    header_timeout: u64,
}

#[derive(Clone, Copy, Debug)]
struct ModelArg(Model);

impl ValueEnum for ModelArg {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [ModelArg; Model::ALL.len()] = {
            let mut all = [ModelArg(Model::ALL[0]); Model::ALL.len()];
            let mut index = 0;
            while index < all.len() {
                all[index] = ModelArg(Model::ALL[index]);
                index += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()).help(self.0.about()))
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EpollArg {
    /// Everyone who waits
    WakeAll,
    /// One worker, the first in the list that waits (EPOLLEXCLUSIVE)
    Exclusive,
    /// One worker, who then goes to the end of the list
    Rotate,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AcceptLockArg {
    /// All wait in accept, the kernel wakes one
    None,
    /// flock(2) on a file
    Flock,
    /// fcntl(2) on a file
    Fcntl,
    /// A mutex in shared memory
    Pthread,
}

/// Serves until told to stop.
///
/// # Errors
/// The server cannot start.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let listen = match args.listen {
        Some(address) => Listen::Address(address),
        None if wakeone_kernel::socket::inherited::count()? > 0 => Listen::Inherited,
        None => Listen::Address(SocketAddr::from(([127, 0, 0, 1], 8080))),
    };
    let files = match &args.files {
        Some(path) => {
            let root = Root::open(path).with_context(|| {
                format!(
                    "cannot serve the files of {}; give a directory that can be read with --files",
                    path.display()
                )
            })?;
            Some(Arc::new(root))
        }
        None => None,
    };
    let counter = match &args.counter {
        Some(path) => {
            let counter = SharedCounter::open(path).with_context(|| {
                format!(
                    "cannot count answers in {}; give a file that can be written with --counter",
                    path.display()
                )
            })?;
            Some(Arc::new(counter))
        }
        None => None,
    };
    let place = match args.store {
        // The requested store is tried before the first visitor needs it.
        Some(place) => {
            place.open()?;
            place
        }
        None => Place::default_directory(),
    };
    if args.model.0 == Model::Dispatched
        && let Listen::Address(address) = listen
    {
        return Err(supervised(address, args.workers, args.backlog));
    }
    serve(&Options {
        workers: args.workers.into(),
        backlog: args.backlog,
        reuseport: args.reuseport,
        epoll: match args.epoll {
            EpollArg::WakeAll => EpollMode::WakeAll,
            EpollArg::Exclusive => EpollMode::Exclusive,
            EpollArg::Rotate => EpollMode::Rotate,
        },
        accept_lock: args.accept_lock.map(|kind| match kind {
            AcceptLockArg::None => AcceptLock::None,
            AcceptLockArg::Flock => AcceptLock::Flock,
            AcceptLockArg::Fcntl => AcceptLock::Fcntl,
            AcceptLockArg::Pthread => AcceptLock::Pthread,
        }),
        place,
        files,
        counter,
        keep_alive: !args.no_keep_alive,
        header_timeout: Duration::from_secs(args.header_timeout),
        ..Options::new(args.model.0, listen)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Becomes `wakeone run` with this very command as its workers, which are handed their listeners. Returns only if
/// that is not possible.
fn supervised(address: SocketAddr, workers: u16, backlog: i32) -> anyhow::Error {
    let run = || -> anyhow::Result<Infallible> {
        let (workers, backlog) = (workers.to_string(), backlog.to_string());
        let mut command = Command::new(wakeone()?);
        command
            .args(["run", "-w", &workers, "--backlog", &backlog, "-l"])
            .arg(address.to_string())
            .arg("--")
            .arg(own_program()?)
            .args(worker_arguments(std::env::args_os().skip(1)));
        Err(command.exec().into())
    };
    match run() {
        Ok(never) => match never {},
        Err(error) => error
            .context("cannot become `wakeone run`; start it as `wakeone run -- wakeone-lab serve`"),
    }
}

/// The arguments without those of the supervisor: the address, the number of workers, the backlog.
fn worker_arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut given = given;
    while let Some(argument) = given.next() {
        let text = argument.to_string_lossy();
        match &*text {
            "-l" | "--listen" | "-w" | "--workers" | "--backlog" => drop(given.next()),
            _ if ["-l", "-w", "--listen=", "--workers=", "--backlog="]
                .iter()
                .any(|flag| text.starts_with(flag)) => {}
            _ => kept.push(argument),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_gets_what_the_supervisor_does_not_take() {
        let given = [
            "serve",
            "-w",
            "4",
            "--model",
            "dispatched",
            "-l",
            ":80",
            "--backlog=9",
            "-w2",
            "--listen",
            "a:1",
            "--files",
            "w",
            "--no-keep-alive",
        ];
        let kept = worker_arguments(given.iter().map(OsString::from));
        let expected = [
            "serve",
            "--model",
            "dispatched",
            "--files",
            "w",
            "--no-keep-alive",
        ];
        assert_eq!(kept, expected.map(OsString::from));
    }
}
