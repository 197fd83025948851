//! A server that is measured, from its start until its answers are reconciled with the client's.

use nix::sys::signal::Signal;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use wakeone_load::Plan;

use crate::answers::Answers;
use crate::apps::Count;
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::launch::{Counted, Launch};
use crate::papers::{self, Switch};
use crate::scratch::Scratch;
use crate::server::{Server, free_address};
use crate::steered::Attached;
use crate::{measure, nginx, probe, process, status};

/// How long a server may take to become ready, or to restart.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest time that a successor takes to bind and to signal the old process. Nothing outside shows when it is done.
const TAKES_OVER: Duration = Duration::from_millis(150);

/// A running server, and both counts of its answers. Dropping it detaches, ends the server and removes its files.
#[derive(Debug)]
pub struct ServerUnderTest {
    /// The address on which it listens.
    pub address: SocketAddr,
    /// Both counts. The caller enters each request that [`ServerUnderTest::load`] does not send.
    pub answers: Answers,
    /// Its workers when it became ready, by process id, rising.
    pub workers: Vec<u32>,
    launch: Launch,
    count: Count,
    // Fields are dropped in this order.
    attached: Option<Attached>,
    server: Server,
    /// The servers whose successors told them to end.
    retired: Vec<Server>,
    scratch: Scratch,
    _switched: Option<papers::Set>,
}

/// How a server is restarted.
#[derive(Debug, Clone, Copy)]
pub enum Restart {
    /// The next one starts when this one has ended.
    EndFirst,
    /// The next one is ready before this one is told to end.
    StartFirst,
    /// The next one has this option to name the one that it tells to end.
    TakeOver(&'static str),
    /// A signal. It is over when the server has printed this number of lines with this text.
    Signal(Signal, &'static str, usize),
}

impl ServerUnderTest {
    /// Starts a server on a free address. Returns when it is ready, and steered where the launch says so.
    ///
    /// # Errors
    /// When it does not become ready, or cannot be attached to.
    pub fn start(launch: Launch) -> Result<Self, Error> {
        let mut this = Self::start_alone(launch)?;
        this.steer()?;
        Ok(this)
    }

    /// Starts a server on a free address. Returns when it is ready, and before anything attaches to it.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn start_alone(launch: Launch) -> Result<Self, Error> {
        let (scratch, address, answers) =
            (Scratch::new("server")?, free_address()?, Answers::new()?);
        let count = Count::new(&scratch)?;
        let switched = launch.switch.map(Switch::set).transpose()?;
        for (name, text) in &launch.files {
            scratch.write(name, launch.fill(text, &place(address, &scratch)))?;
        }
        launch.user.take(&scratch)?;
        let server = start_one(&launch, address, &scratch, &count, &answers, &[])?;
        let mut this = Self {
            address,
            answers,
            workers: Vec::new(),
            launch,
            count,
            attached: None,
            server,
            retired: Vec::new(),
            scratch,
            _switched: switched,
        };
        this.await_ready()?;
        Ok(this)
    }

    /// Attaches to it where its launch says so, as by `wakeone attach`. Returns once its workers are steered, where they
    /// share a listener.
    ///
    /// # Errors
    /// What `wakeone attach` says.
    pub fn steer(&mut self) -> Result<(), Error> {
        if let Some(options) = self.launch.attach.take() {
            let target = format!("{}{}", self.launch.scheme, self.address);
            let runtime = self.launch.user.runtime(self.scratch.path());
            let attached = Attached::by(self.launch.user, runtime, target, &options)?;
            self.attached = Some(attached);
        }
        self.await_steered()
    }

    /// Waits until as many of its workers are steered as its launch says, after its start or after a restart.
    ///
    /// # Errors
    /// When they are not, after a minute.
    pub fn await_steered(&self) -> Result<(), Error> {
        let wanted = self.launch.steered_workers;
        let deadline = Instant::now() + PATIENCE;
        while wanted > 0 && self.state().workers()? < wanted {
            if Instant::now() > deadline {
                return Err(Error::Server(format!(
                    "{}: fewer than {wanted} workers are steered after {} s",
                    self.launch.what,
                    PATIENCE.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// The state of its group, where it is steered.
    pub fn state(&self) -> status::Steered {
        status::Steered {
            address: self.address,
            runtime: self.launch.user.runtime(self.scratch.path()),
            user: self.launch.user,
        }
    }

    fn await_ready(&mut self) -> Result<(), Error> {
        let ready = self.launch.ready.clone();
        if let Some((part, count)) = ready.said {
            self.server.wait_said(part, count, PATIENCE)?;
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.workers = process::leaves(self.server.pid());
            let answers = |path| probe::body(self.address, path).is_ok();
            if self.workers.len() >= ready.workers && ready.answers.is_none_or(answers) {
                break;
            }
            self.server.still_runs()?;
            if Instant::now() > deadline {
                return Err(Error::Server(format!(
                    "{} is not ready after {} s: it has {} of {} workers, or does not answer",
                    self.launch.what,
                    PATIENCE.as_secs(),
                    self.workers.len(),
                    ready.workers
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(ready.settles);
        self.workers.sort_unstable();
        if ready.answers.is_some() && self.counts_itself() {
            // The requests until now, and the one that asks for their number.
            let asking = u64::from(self.launch.counted == Counted::ByNginx);
            self.answers.client_counted(self.made()? + asking, 0);
        }
        Ok(())
    }

    /// Whether its count can be read while it runs.
    fn counts_itself(&self) -> bool {
        matches!(self.launch.counted, Counted::InFile | Counted::ByNginx)
    }

    /// The lines that it has printed so far.
    pub fn said(&mut self) -> &[String] {
        self.server.said()
    }

    /// A command whose names in braces are filled in as those of the server's own.
    ///
    /// # Errors
    /// When its program is not installed.
    pub fn client(
        &self,
        line: &str,
        values: Vec<(&'static str, String)>,
    ) -> Result<Command, Error> {
        let launch = Launch {
            line: line.into(),
            values,
            ..Launch::default()
        };
        launch.command(&place(self.address, &self.scratch), &[])
    }

    fn made(&self) -> Result<u64, Error> {
        match self.launch.counted {
            Counted::InFile => self.count.made(),
            Counted::ByNginx => nginx::requests(self.address),
            Counted::Ours | Counted::Elsewhere | Counted::Nowhere => Ok(self.answers.made()),
        }
    }

    /// The process that was started first.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Sends a load, and enters the clients' counts; see [`measure::load`].
    ///
    /// # Errors
    /// Those of [`measure::load`].
    pub fn load(
        &mut self,
        plan: &Plan,
        context: &mut Context<'_>,
    ) -> Result<wakeone_load::Outcome, Error> {
        let outcome = measure::load(plan, context)?;
        self.answers.client_saw(&outcome);
        Ok(outcome)
    }

    /// Writes one of its files anew.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn rewrite(&self, name: &str, text: &str) -> Result<(), Error> {
        let text = self.launch.fill(text, &place(self.address, &self.scratch));
        self.scratch.write(name, text).map(drop)
    }

    /// Restarts it once, and returns when that is over. Both counts continue.
    ///
    /// # Errors
    /// When it does not end well, or the next one does not become ready.
    pub fn restart(&mut self, how: Restart) -> Result<(), Error> {
        match how {
            Restart::Signal(signal, said, count) => {
                self.server.signal(signal)?;
                return self.server.wait_said(said, count, PATIENCE);
            }
            Restart::EndFirst => {
                self.server.end()?;
                self.server = self.successor(&[])?;
            }
            Restart::StartFirst => {
                let next = self.successor(&[])?;
                std::mem::replace(&mut self.server, next).end()?;
            }
            Restart::TakeOver(option) => {
                let next = self.successor(&[option.into(), self.pid().to_string()])?;
                self.retired.push(std::mem::replace(&mut self.server, next));
                std::thread::sleep(TAKES_OVER);
            }
        }
        Ok(())
    }

    fn successor(&self, more: &[String]) -> Result<Server, Error> {
        let (launch, count) = (&self.launch, &self.count);
        let (scratch, answers) = (&self.scratch, &self.answers);
        start_one(launch, self.address, scratch, count, answers, more)
    }

    /// Detaches, stops the server and checks that the counts agree. Both go into the sample, where there are two.
    ///
    /// # Errors
    /// When it does not end well, or the counts contradict each other.
    pub fn stop(mut self, sample: &mut Sample) -> Result<(), Error> {
        let made = self.end()?;
        match self.launch.counted {
            Counted::Elsewhere | Counted::Nowhere => Ok(()),
            _ => self.answers.close_with(made, &self.launch.what, sample),
        }
    }

    /// [`ServerUnderTest::stop`] of two servers that one load was sent to in turns.
    ///
    /// # Errors
    /// When one does not end well, or the counts contradict each other.
    pub fn stop_both(mut self, mut other: Self, sample: &mut Sample) -> Result<(), Error> {
        let made = self.end()? + other.end()?;
        self.answers.merge(&other.answers);
        let what = format!("{} and {}", self.launch.what, other.launch.what);
        self.answers.close_with(made, &what, sample)
    }

    /// Ends the server, and returns how many answers it has made.
    fn end(&mut self) -> Result<u64, Error> {
        if let Some(attached) = self.attached.take() {
            attached.end()?;
        }
        // nginx only answers while it runs.
        let told = match self.launch.counted {
            Counted::ByNginx => Some(self.made()?),
            _ => None,
        };
        let ended = self.server.end();
        match self.launch.counted {
            // Other projects' servers may end at SIGTERM in any way.
            Counted::InFile | Counted::Nowhere => {}
            _ => ended?,
        }
        told.map_or_else(|| self.made(), Ok)
    }
}

/// The values of the names in command lines and files.
fn place(address: SocketAddr, scratch: &Scratch) -> [(&'static str, String); 4] {
    [
        ("address", address.to_string()),
        ("host", address.ip().to_string()),
        ("port", address.port().to_string()),
        ("dir", scratch.path().display().to_string()),
    ]
}

fn start_one(
    launch: &Launch,
    address: SocketAddr,
    scratch: &Scratch,
    count: &Count,
    answers: &Answers,
    more: &[String],
) -> Result<Server, Error> {
    let mut command = launch.command(&place(address, scratch), more)?;
    match launch.counted {
        Counted::Ours => drop(command.args(answers.arguments())),
        Counted::InFile => count.tell(&mut command),
        Counted::ByNginx | Counted::Elsewhere | Counted::Nowhere => {}
    }
    command.current_dir(scratch.path());
    launch.user.runs(&mut command);
    if let Some(runtime) = launch.user.runtime(scratch.path()) {
        command.env("WAKEONE_RUNTIME_DIR", runtime);
        command.env("HOME", scratch.path());
    }
    let server = Server::start(&launch.what, &mut command, launch.ready.line)?;
    Ok(server.ends_later(launch.patience))
}
