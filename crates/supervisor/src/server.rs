//! A server that is started as it is and starts its workers itself: its processes, the signals for it, and how it ends.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::missing::not_started;
use crate::rest::Rest;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, wait};
use wakeone_kernel::inherit::start_ignoring;
use wakeone_kernel::proc::process::children;

/// Signals that are passed on to the server.
const PASSED: [(i32, Signal); 7] = [
    (nix::libc::SIGTERM, Signal::TERM),
    (nix::libc::SIGINT, Signal::INT),
    (nix::libc::SIGHUP, Signal::HUP),
    (nix::libc::SIGQUIT, Signal::QUIT),
    (nix::libc::SIGUSR1, Signal::USR1),
    (nix::libc::SIGUSR2, Signal::USR2),
    (nix::libc::SIGWINCH, Signal::WINCH),
];

/// The signals that arrived, and a socket to wait for the next one.
#[derive(Debug)]
pub struct Signals {
    came: Vec<(Signal, Arc<AtomicBool>)>,
    child: Arc<AtomicBool>,
    wake: UnixStream,
    /// Those that were ignored before.
    ignored: Vec<i32>,
}

impl Signals {
    /// Takes them from now on, also those that were ignored (nohup): a server may handle them all the same, as nginx does.
    ///
    /// # Errors
    /// sigaction(2) fails.
    pub fn take() -> io::Result<Self> {
        let (wake, written) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        written.set_nonblocking(true)?;
        let mask = ignored();
        let ignored = PASSED.map(|(number, _)| number).into_iter();
        let ignored = ignored.filter(|number| mask >> (number - 1) & 1 == 1);
        let ignored = ignored.collect();
        let take = |number: i32| -> io::Result<Arc<AtomicBool>> {
            let flag = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(number, flag.clone())?;
            signal_hook::low_level::pipe::register(number, written.try_clone()?)?;
            Ok(flag)
        };
        let came = PASSED
            .into_iter()
            .map(|(number, signal)| Ok((signal, take(number)?)))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            came,
            child: take(nix::libc::SIGCHLD)?,
            wake,
            ignored,
        })
    }

    /// The signals that arrived since the last call.
    pub fn pending(&self) -> Vec<Signal> {
        let mut sink = [0_u8; 64];
        while matches!(io::Read::read(&mut &self.wake, &mut sink), Ok(read) if read > 0) {}
        self.child.store(false, Ordering::SeqCst);
        let came = self.came.iter();
        came.filter(|(_, flag)| flag.swap(false, Ordering::SeqCst))
            .map(|(signal, _)| *signal)
            .collect()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// The mask of ignored signals: bit n-1 for signal n.
fn ignored() -> u64 {
    let status = wakeone_kernel::proc::stat::text("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// A server that was started.
#[derive(Debug)]
pub struct Server {
    pid: Pid,
    /// How its first process ended: an exit code.
    code: Option<u8>,
    /// It was told to end.
    told: bool,
    /// The processes that outlive the first one.
    rest: Rest,
}

impl Server {
    /// Starts it with some more environment variables. It ignores the signals that we were told to ignore.
    ///
    /// # Errors
    /// It cannot be started, for the reason that the sentence tells.
    pub fn start(
        command: &[String],
        variables: &[(&str, OsString)],
        signals: &Signals,
    ) -> Result<Self, String> {
        let (program, arguments) = command.split_first().ok_or("there is no command to run")?;
        // Daemons, and workers whose master died, become our children: they may be the server from then on.
        set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(|error| format!("its processes cannot become our children: {error}"))?;
        let mut start = Command::new(program);
        start
            .args(arguments)
            .envs(variables.iter().map(|(name, value)| (*name, value)))
            // A terminal's ^C reaches only us, and we pass it on: so the server gets it once.
            .process_group(0);
        if io::stdin().is_terminal() {
            // It is not in the terminal's foreground process group any more, and would be stopped for reading.
            start.stdin(Stdio::null());
        }
        start_ignoring(&mut start, signals.ignored.clone());
        let child = start
            .spawn()
            .map_err(|error| not_started(program, &error))?;
        Ok(Self {
            pid: Pid::from_child(&child),
            code: None,
            told: false,
            rest: Rest::default(),
        })
    }

    /// Its first process.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// Passes a signal on to its first process, or to those that outlived it (a daemon). A signal of the terminal's
    /// keys goes to all processes, as the terminal would have sent it.
    pub fn signal(&mut self, signal: Signal) {
        self.told |= matches!(signal, Signal::TERM | Signal::INT | Signal::QUIT);
        let by_key = matches!(signal, Signal::INT | Signal::QUIT) && io::stdin().is_terminal();
        if by_key && rustix::process::kill_process_group(self.pid, signal).is_ok() {
            return;
        }
        if self.code.is_none() {
            let _ = kill_process(self.pid, signal);
            return;
        }
        for pid in children(std::process::id()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// Waits for processes that ended. Returns the exit code of the first process once none is left that is waited for:
    /// a daemon, or a worker whose master died, is the server from then on. Others have `grace` to end.
    ///
    /// # Errors
    /// waitpid(2) fails.
    pub fn reap(&mut self, grace: Duration) -> io::Result<Option<u8>> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    let signalled = status.terminating_signal().map(|signal| 128 + signal);
                    let code = status.exit_status().or(signalled).unwrap_or(1);
                    self.code = Some(u8::try_from(code).unwrap_or(1));
                }
                Ok(Some(_)) => {}
                Ok(None) => {
                    let first = self.pid();
                    let over = |_: &u8| self.rest.is_over(first, self.told, grace);
                    return Ok(self.code.filter(over));
                }
                Err(rustix::io::Errno::CHILD) => return Ok(Some(self.code.unwrap_or(1))),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
