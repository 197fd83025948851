//! Starts a worker through a trampoline, a short-lived exec of this program. The trampoline sets the process up as a
//! worker expects it (systemd's protocol names the worker's own pid), and then becomes the command.

use super::process::Process;
use command_fds::{CommandFdExt, FdMapping};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;
use wakeone_control::account::Account;

/// The number of a worker's first listener (systemd's `SD_LISTEN_FDS_START`).
pub const FIRST_FD: u32 = 3;
/// The argument that makes this program a trampoline; the next one is an [`Order`] in JSON.
pub const TRAMPOLINE: &str = "__exec-worker";
/// The environment variable with the number that a worker may put into the second and third byte of each connection ID that it
/// makes: see docs/quic.md.
pub const QUIC_ID: &str = "WAKEONE_QUIC_ID";
/// Environment variables for this process, not for its workers.
const OURS: [&str; 8] = [
    QUIC_ID,
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "MAINPID",
];

/// The trampoline's orders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// The worker's slot, its `WAKEONE_SLOT`.
    pub slot: usize,
    /// Its number for connection IDs of QUIC.
    #[serde(default)]
    pub quic_id: Option<u16>,
    /// Announce the listeners by systemd's protocol. A command that contains their numbers does not get both:
    /// gunicorn would take each descriptor twice, and fail.
    pub protocol: bool,
    /// A name for each listener (`LISTEN_FDNAMES`); the listeners are descriptors 3, 4, …
    pub names: Vec<String>,
    /// The cgroup that the worker is to run in; `None`: ours.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Number of reserving sockets behind the listeners. The worker does not know of them, and keeps the addresses
    /// reserved by holding them.
    #[serde(default)]
    pub reserved: usize,
    /// The account to change to; `None`: stay as we are.
    pub account: Option<Account>,
    /// Capabilities that the worker keeps, as `CAP_NET_RAW`.
    pub keep_caps: Vec<String>,
    /// The listener becomes descriptor 0, and has no other number.
    #[serde(default)]
    pub stdin: bool,
    /// The soft limit of descriptors to restore (ours is raised).
    pub descriptors: Option<u64>,
    /// The command and its arguments, with placeholders filled in.
    pub command: Vec<String>,
}

impl std::str::FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| {
            format!("this is a hidden part of `wakeone run`, not for typing ({error})")
        })
    }
}

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The trampoline could not be started.
    #[error("cannot start a process: {0}")]
    Process(#[from] io::Error),
    /// The trampoline could not become the command: its reason.
    #[error("{0}")]
    Exec(String),
}

impl SpawnError {
    /// Whether the start would have worked with one process, or a few descriptors, less.
    pub fn is_shortage(&self) -> bool {
        self.lacks_descriptors() || self.is_one_of(&[Errno::AGAIN, Errno::NOMEM])
    }

    /// Whether this process, or the whole machine, has no descriptor left.
    pub fn lacks_descriptors(&self) -> bool {
        self.is_one_of(&[Errno::MFILE, Errno::NFILE])
    }

    fn is_one_of(&self, these: &[Errno]) -> bool {
        let Self::Process(error) = self else {
            return false;
        };
        Errno::from_io_error(error).is_some_and(|errno| these.contains(&errno))
    }
}

/// Checks that there are descriptors to start a worker now: for the [`Gate`], for the pipe and the sockets of [`begin`],
/// and for the standard library's child.
///
/// # Errors
/// There are not enough.
pub fn has_room(order: &Order) -> Result<(), SpawnError> {
    const OF_THE_CHILD: usize = 4;
    const OF_THE_GATE: usize = 3;
    let (one, other) = io::pipe()?;
    let sockets = order.names.len() + order.reserved;
    let mut taken = vec![OwnedFd::from(one), other.into()];
    for _ in 0..sockets + OF_THE_GATE + OF_THE_CHILD {
        taken.push(taken[0].try_clone()?);
    }
    Ok(())
}

/// Keeps workers from running their commands before the state names them.
///
/// The next supervisor finds workers by the state. One that it does not know of would hold the listeners and go on
/// serving, beside the worker that is started in its place. So each waits for a byte. If the supervisor dies before it
/// has sent that, the workers see the pipe end, and end too.
#[derive(Debug)]
pub struct Gate {
    enter: OwnedFd,
    open: OwnedFd,
}

impl Gate {
    /// A gate for workers that start together.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new() -> Result<Self, Errno> {
        let (enter, open) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        Ok(Self { enter, open })
    }

    /// Lets this many workers run their commands.
    pub fn open(self, workers: usize) {
        let mut pipe = io::PipeWriter::from(self.open);
        if let Err(error) = pipe.write_all(&vec![0; workers]) {
            tracing::warn!("cannot have the workers begin: {error}");
        }
    }
}

/// Tells whether a worker has begun its command, by a pipe that closes on exec. If exec fails, the pipe has the
/// reason.
#[derive(Debug)]
pub struct ExecPipe(PipeReader);

impl ExecPipe {
    /// Whether the pipe has closed without a reason: the command runs, or its process has ended.
    pub fn is_over(&self) -> bool {
        let mut pipe = [PollFd::new(&self.0, PollFlags::IN)];
        let ready = rustix::event::poll(&mut pipe, Some(&Timespec::default()));
        ready.is_ok() && pipe[0].revents() == PollFlags::HUP
    }

    /// Waits until the worker runs its command, until a time, or until a signal waits to be read; returns whether the
    /// pipe is over. The kernel may take for ever to open a command on a file system that does not answer.
    ///
    /// # Errors
    /// It cannot become the command; the reason is a sentence.
    pub fn arrived(&mut self, until: Instant, signals: impl AsFd) -> Result<bool, SpawnError> {
        let mut fds = [
            PollFd::new(&self.0, PollFlags::IN),
            PollFd::new(&signals, PollFlags::IN),
        ];
        let left = until.saturating_duration_since(Instant::now());
        // An interrupted wait is over, as after a signal: the caller watches the pipe from then on.
        let _ = rustix::event::poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        if fds[0].revents().is_empty() {
            return Ok(false);
        }
        self.reason()?.map_or(Ok(true), Err)
    }

    /// The reason why the command cannot be run, if there is one. Call it only once the process has ended or reported
    /// one.
    ///
    /// # Errors
    /// read(2) fails.
    pub fn reason(&mut self) -> io::Result<Option<SpawnError>> {
        let mut reason = String::new();
        self.0.read_to_string(&mut reason)?;
        Ok((!reason.is_empty()).then_some(SpawnError::Exec(reason)))
    }
}

/// Starts a worker, which waits at the gate. It takes two execs to its command, and many workers can start at the same
/// time.
///
/// The worker leads a process group of its own, so that a ^C of the terminal reaches only the supervisor, which then
/// drains first. Its standard input is empty, or its listener.
///
/// # Errors
/// No process can be started.
pub fn begin<'a>(
    order: &Order,
    sockets: impl IntoIterator<Item = &'a OwnedFd>,
    gate: &Gate,
) -> Result<(Process, ExecPipe), SpawnError> {
    let (reasons, report) = io::pipe()?;
    let mut mappings = Vec::new();
    let mut stdin = Stdio::null();
    for (child_fd, socket) in (FIRST_FD as i32..).zip(sockets) {
        if order.stdin && child_fd == FIRST_FD as i32 {
            stdin = socket.try_clone()?.into();
            continue;
        }
        mappings.push(FdMapping {
            parent_fd: socket.try_clone()?,
            child_fd,
        });
    }
    mappings.push(FdMapping {
        parent_fd: report.into(),
        child_fd: report_fd(order) as i32,
    });
    mappings.push(FdMapping {
        parent_fd: gate.enter.try_clone()?,
        child_fd: gate_fd(order) as i32,
    });

    let order = serde_json::to_string(order).map_err(io::Error::from)?;
    let mut command = Command::new("/proc/self/exe");
    command
        .args([TRAMPOLINE, &order])
        .stdin(stdin)
        .process_group(0);
    for name in OURS {
        command.env_remove(name);
    }
    command.fd_mappings(mappings).map_err(io::Error::other)?;
    let child = command.spawn()?;
    drop(command); // our copy of the report pipe's end
    Ok((Process::child(child)?, ExecPipe(reasons)))
}

/// The descriptor on which the trampoline reports a failure: the first after the sockets.
pub fn report_fd(order: &Order) -> u32 {
    FIRST_FD + (order.names.len() + order.reserved) as u32
}

/// The descriptor of the trampoline at which it waits for the [`Gate`] to open.
pub fn gate_fd(order: &Order) -> u32 {
    report_fd(order) + 1
}

/// Fills `{fd}` (the first listener's number), `{fd1}`, `{fd2}`, … (the first's, the second's, …), `{port}`, `{port1}`, …
/// (the ports where they are) and `{slot}`.
///
/// # Errors
/// The text names a listener that does not exist.
pub fn fill(argument: &str, slot: usize, ports: &[u16]) -> Result<String, String> {
    let mut filled = String::with_capacity(argument.len());
    let mut rest = argument;
    while let Some(start) = rest.find('{') {
        filled.push_str(&rest[..start]);
        rest = &rest[start..];
        let placeholder = rest.find('}').map(|end| &rest[..=end]).unwrap_or(rest);
        match value(placeholder, slot, ports)? {
            Some(value) => {
                filled.push_str(&value);
                rest = &rest[placeholder.len()..];
            }
            None => {
                filled.push('{');
                rest = &rest[1..];
            }
        }
    }
    filled.push_str(rest);
    Ok(filled)
}

/// The value of a placeholder; `None` for other text in braces.
fn value(placeholder: &str, slot: usize, ports: &[u16]) -> Result<Option<String>, String> {
    let Some(name) = placeholder
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'))
    else {
        return Ok(None);
    };
    if name == "slot" {
        return Ok(Some(slot.to_string()));
    }
    let Some((kind, digits)) = ["fd", "port"]
        .iter()
        .find_map(|kind| Some((*kind, name.strip_prefix(kind)?)))
        .filter(|(_, digits)| digits.bytes().all(|byte| byte.is_ascii_digit()))
    else {
        return Ok(None);
    };
    let nth = match digits {
        "" => Some(1),
        digits => digits.parse::<usize>().ok(),
    };
    let all = ports.len();
    match nth.filter(|nth| (1..=all).contains(nth)) {
        Some(nth) if kind == "port" => Ok(Some(ports[nth - 1].to_string())),
        Some(nth) => Ok(Some((FIRST_FD as usize + nth - 1).to_string())),
        None => Err(format!(
            "`{placeholder}` names a listener that there is not: {all} -l given, so {{{kind}1}} to {{{kind}{all}}}"
        )),
    }
}

/// Whether the command names any of this many listeners, by its descriptor (`fd`) or its port (`port`).
pub fn names_any(command: &[String], kind: &str, listeners: usize) -> bool {
    (1..=listeners).any(|nth| names(command, kind, nth))
}

/// Whether the command names the `nth` listener (from 1).
pub fn names(command: &[String], kind: &str, nth: usize) -> bool {
    let (name, first) = (format!("{{{kind}{nth}}}"), format!("{{{kind}}}"));
    command
        .iter()
        .any(|argument| argument.contains(&name) || (nth == 1 && argument.contains(&first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_filled() {
        let table = [
            ("fd://{fd}", "fd://3"),
            ("{fd1},{fd2},{fd3}", "3,4,5"),
            ("log-{slot}.txt", "log-7.txt"),
            ("{slot}{fd}{slot}", "737"),
            ("{}", "{}"),
            ("{", "{"),
            ("}{", "}{"),
            ("{fd", "{fd"),
            ("{ fd }", "{ fd }"),
            ("{{fd}}", "{3}"),
            ("{\"fd\": {fd}}", "{\"fd\": 3}"),
            ("{fdx}", "{fdx}"),
            ("--port={port}", "--port=80"),
            ("{port3}:{port1}", "8443:80"),
            ("{ports}", "{ports}"),
            ("ü{fd}ü", "ü3ü"),
        ];
        for (argument, filled) in table {
            let ports = [80, 81, 8443];
            assert_eq!(
                fill(argument, 7, &ports).as_deref(),
                Ok(filled),
                "{argument}"
            );
        }
    }

    #[test]
    fn listeners_that_are_not_there_are_refused() {
        for (argument, are) in [
            ("{fd0}", "{fd1} to {fd3}"),
            ("{fd4}", "{fd1} to {fd3}"),
            ("a{fd99999999999999999999}b", "{fd1} to {fd3}"),
            ("{port4}", "{port1} to {port3}"),
        ] {
            let error = fill(argument, 0, &[80, 81, 82]).expect_err(argument);
            assert!(error.contains(are), "{error}");
        }
    }

    #[test]
    fn what_is_short_is_told_from_what_is_wrong() {
        let system = |errno: Errno| SpawnError::Process(errno.into());
        for short in [Errno::AGAIN, Errno::NOMEM, Errno::MFILE, Errno::NFILE] {
            assert!(system(short).is_shortage(), "{short}");
        }
        assert!(system(Errno::MFILE).lacks_descriptors());
        assert!(!system(Errno::AGAIN).lacks_descriptors());
        assert!(!system(Errno::ACCESS).is_shortage());
        assert!(!SpawnError::Exec("no such file".into()).is_shortage());
    }

    #[test]
    fn what_is_typed_by_hand_is_no_order() {
        for text in ["", "{}", "help"] {
            assert!(
                text.parse::<Order>()
                    .expect_err(text)
                    .contains("hidden part")
            );
        }
    }

    #[test]
    fn names_counts_fd_as_the_first() {
        let command = ["server".to_owned(), "--fds={fd},{fd3}".to_owned()];
        assert_eq!(
            [1, 2, 3].map(|nth| names(&command, "fd", nth)),
            [true, false, true]
        );
    }
}
