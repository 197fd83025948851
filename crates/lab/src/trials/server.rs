//! A server as data: a row of `servers.toml`, or of an experiment's own table.

use nix::sys::signal::Signal;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;
use toml::{Table, Value};

use crate::error::Error;
use crate::launch::{self, Counted, Launch, Ready};
use crate::under_test::{Restart, ServerUnderTest};
use crate::user::User;
use crate::ways::{Serving, Way};
use crate::{apps, nginx, steered};

/// A way to hand out a server's connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// The server, without us.
    #[default]
    AsItIs,
    /// `wakeone attach`.
    Attach,
    /// `wakeone attach --rescue`.
    #[serde(rename = "attach+rescue")]
    AttachRescue,
    /// `wakeone run`, a process for each worker.
    Run,
    /// `wakeone run --split`, of readers that share a socket.
    Split,
    /// `wakeone run --`, which starts the server as it is.
    RunCommand,
    /// [`How::Attach`], and a user without capabilities starts the server and attaches.
    PlainAttach,
    /// [`How::RunCommand`] by a user without capabilities.
    PlainRunCommand,
}

impl How {
    /// Its name in the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            How::AsItIs => "as-it-is",
            How::Attach => "attach",
            How::AttachRescue => "attach+rescue",
            How::Run => "run",
            How::Split => "split",
            How::RunCommand => "run-command",
            How::PlainAttach => "plain-attach",
            How::PlainRunCommand => "plain-run-command",
        }
    }

    /// The user who starts the server and steers it.
    fn user(self) -> User {
        match self {
            How::PlainAttach | How::PlainRunCommand => User::Plain,
            _ => User::Own,
        }
    }
}

/// A server, and how it is started, asked and restarted. Command lines are those of [`Launch`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Server {
    /// Its name, by which an experiment's loads choose it.
    #[serde(skip)]
    pub name: String,
    /// Its place in the palette of the charts.
    pub colour: usize,
    /// The way in which its connections are handed out.
    pub how: How,
    /// The command of one worker on a descriptor; empty where it takes none.
    pub run: String,
    /// Whether its workers share one socket.
    pub shared: bool,
    /// The command of its clients, which print one line of JSON. Where it is empty they speak HTTP.
    pub client: String,
    /// The scheme of its address: empty, or `udp://`.
    pub scheme: String,
    needs: Vec<String>,
    /// A module of Python's that it needs.
    module: String,
    line: String,
    /// More words of its command line.
    more: String,
    /// Options of `wakeone run` that its worker needs.
    run_options: String,
    /// Options of `wakeone run` and `wakeone attach` for its kind of traffic.
    steer_options: String,
    /// It is nginx, with this configuration.
    nginx: Option<Nginx>,
    /// The files in its directory, of [`apps`].
    files: Vec<String>,
    /// A line that begins with this is a sign that it is ready.
    begins: String,
    /// Lines with this text, so many times, are a sign that it is ready.
    said: Option<(String, usize)>,
    /// Processes without children below it, once it is ready.
    processes: usize,
    /// The path that it is asked for until it answers; empty where it is not.
    answers: String,
    settles_ms: u64,
    counted: Counted,
    restart: Option<Reload>,
}

/// The configuration of an nginx.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Nginx {
    /// The options of `listen`.
    listen: String,
    /// Directives of `events`.
    events: String,
    /// It keeps connections.
    keeps: bool,
    /// It answers every request alike, and nothing blocks its workers.
    fixed: bool,
    /// It serves files, as its packages ship it, without an end to a connection after a thousand requests.
    files: bool,
}

/// How a server as it is is restarted or reloaded.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Reload {
    /// A signal. It is over when this text was printed so many times before any restart, and so many for each.
    Signal(String, String, usize, usize),
    /// A successor with this option to name the process that ends.
    TakeOver(String),
    /// nginx's reload with so many workers, and with all of them again.
    Resize(usize),
}

const EACH: &str = "python3 {dir}/each.py {host} {port} {workers}";
/// Lets workers of another user read the directory, and then starts the server.
const READABLE: &str = "chmod 755 \"$0\" && exec \"$@\"";

/// The rows of `servers.toml`.
static ALL: LazyLock<Table> = LazyLock::new(|| {
    toml::from_str(include_str!("servers.toml")).unwrap_or_else(|e| panic!("servers.toml: {e}"))
});

/// The server of this name, of `servers.toml` or of these rows; None where there is none.
///
/// # Panics
/// When its row is none.
pub fn named(name: &str, own: &Table) -> Option<Server> {
    let row = merged(name, own)?;
    let server: Result<Server, _> = Value::Table(row).try_into();
    let server = server.unwrap_or_else(|e| panic!("the server {name}: {e}"));
    Some(Server {
        name: name.into(),
        ..server
    })
}

/// A row with what it takes over from the one that it is `of`.
fn merged(name: &str, own: &Table) -> Option<Table> {
    let row = own.get(name).or_else(|| ALL.get(name))?.as_table()?;
    let mut row = row.clone();
    let Some(base) = row.remove("of") else {
        return Some(row);
    };
    // It may take the name of the one that it is of.
    let mut others = own.clone();
    others.remove(name);
    let mut all = merged(base.as_str()?, &others)?;
    all.extend(row);
    Some(all)
}

/// A variant's server: one of ours in some way, or another project's.
#[derive(Debug, Clone, Copy)]
pub enum Who {
    /// Our own server.
    Ours(Way),
    /// Another one.
    Other(&'static Server),
}

impl Who {
    /// Its name in the variants' names.
    pub fn name(&self) -> &'static str {
        match self {
            Who::Ours(way) => way.name(),
            Who::Other(server) => &server.name,
        }
    }

    /// Its place in the palette of the charts.
    pub fn colour(&self) -> usize {
        match self {
            Who::Ours(way) => way.colour(),
            Who::Other(server) => server.colour,
        }
    }

    /// Whether Wakeone counts its connections. A server that hides its sockets from the library is not split.
    pub fn is_counted(&self) -> bool {
        match self {
            Who::Ours(way) => way.steered(),
            Who::Other(server) => server.how != How::Split && server.is_steered(),
        }
    }

    /// The reason why it cannot be measured here.
    pub fn lacks(&self) -> Option<String> {
        match self {
            Who::Ours(way) => (!way.is_here()).then(|| "this kernel does not let us".into()),
            Who::Other(server) => server.lacks(),
        }
    }

    /// Its launch.
    ///
    /// # Errors
    /// When nginx has no module whose handlers block.
    pub fn launch(&self, serving: Serving, workers: usize) -> Result<Launch, Error> {
        match self {
            Who::Ours(way) => Ok(way.launch(serving, workers)),
            Who::Other(server) => server.launch(workers, &[]),
        }
    }

    /// Restarts it for the `nth` time, from 1, as its user would, and returns when that is over.
    ///
    /// # Errors
    /// When the restart fails.
    pub fn restart(
        &self,
        running: &mut ServerUnderTest,
        workers: usize,
        nth: usize,
    ) -> Result<(), Error> {
        let rolls = Restart::Signal(Signal::SIGHUP, "rolling restart done", nth);
        let how = match self {
            Who::Ours(way) if way.steered() => rolls,
            Who::Ours(Way::ReuseportHash) => Restart::StartFirst,
            // The next one cannot have the address before this one has left it.
            Who::Ours(_) => Restart::EndFirst,
            Who::Other(server) if server.how == How::Run => rolls,
            Who::Other(server) => server.reload(running, workers, nth)?,
        };
        running.restart(how)
    }
}

impl Server {
    /// The same server, whose connections are handed out like this.
    pub fn with(&self, how: How) -> Self {
        Self {
            how,
            ..self.clone()
        }
    }

    /// Whether it is of TCP, and its connections are handed out by us.
    pub fn is_steered(&self) -> bool {
        self.how != How::AsItIs && self.scheme.is_empty()
    }

    /// The reason why it cannot be measured here.
    pub fn lacks(&self) -> Option<String> {
        let server = match &self.nginx {
            Some(nginx) if nginx.fixed || nginx.files => nginx::program().err(),
            Some(_) => nginx::perl_module().err(),
            None => {
                let needs: Vec<&str> = self.needs.iter().map(String::as_str).collect();
                launch::lacks(&needs)
            }
        };
        let module = || (!self.module.is_empty()).then(|| lacks_module(&self.module))?;
        let is_steered = self.how != How::AsItIs || self.line.starts_with("wakeone ");
        let needs_capabilities = is_steered && !self.is_one_queue();
        server
            .or_else(module)
            .or_else(|| needs_capabilities.then(steered::lacks).flatten())
            .or_else(|| {
                let needs: Vec<&str> = self.needs.iter().map(String::as_str).collect();
                self.how.user().lacks(&needs)
            })
    }

    /// Whether its workers share a listener of TCP. To steer those takes no capability.
    pub fn is_one_queue(&self) -> bool {
        self.shared && self.scheme.is_empty()
    }

    /// Its launch; where it is steered, with these options.
    ///
    /// # Errors
    /// When nginx has no module whose handlers block.
    pub fn launch(
        &'static self,
        workers: usize,
        options: &[&'static str],
    ) -> Result<Launch, Error> {
        let plain = match &self.nginx {
            Some(nginx) => {
                let of_nginx = nginx.setup(workers)?.launch(String::new());
                let ready = Ready {
                    workers,
                    said: of_nginx.ready.said,
                    ..self.ready()
                };
                let mut files = of_nginx.files;
                files.extend(self.files());
                Launch {
                    ready,
                    files,
                    ..of_nginx
                }
            }
            None => self.plain(workers),
        };
        let mut launch = Launch {
            what: format!("{} {}", self.name, self.how.name()),
            scheme: &self.scheme,
            user: self.how.user(),
            ..plain
        };
        if self.is_one_queue() && self.how != How::AsItIs {
            launch.steered_workers = workers;
        }
        let own = self.steer_options.split_whitespace();
        let options: Vec<&'static str> = own.chain(options.iter().copied()).collect();
        match self.how {
            How::AsItIs => {}
            How::Attach | How::PlainAttach => launch.attach = Some(options),
            How::RunCommand | How::PlainRunCommand => launch = launch.run_command(),
            How::AttachRescue => launch.attach = Some([&["--rescue"], &options[..]].concat()),
            How::Run => {
                let (scheme, run) = (&self.scheme, &self.run);
                let options = [&[self.run_options.as_str()], &options[..]]
                    .concat()
                    .join(" ");
                launch.line =
                    format!("wakeone run -w {{workers}} {options} -l {scheme}{{address}} -- {run}");
                launch.ready.line = "ready:";
                launch.ready.said = None;
                launch.ready.workers = 0;
            }
            How::Split => {
                launch = launch.split(&self.steer_options);
                // A server over UDP is never said to be ready: a receiver is seen only once it receives.
                if !self.scheme.is_empty() {
                    launch.ready.said = Some(("is split", 1));
                }
            }
        }
        Ok(launch)
    }

    fn ready(&'static self) -> Ready {
        Ready {
            line: &self.begins,
            said: self.said.as_ref().map(|(text, n)| (text.as_str(), *n)),
            workers: self.processes,
            answers: (!self.answers.is_empty()).then_some(&self.answers),
            // The other workers come to wait meanwhile.
            settles: Duration::from_millis(self.settles_ms),
        }
    }

    fn files(&'static self) -> impl Iterator<Item = (&'static str, String)> {
        let all = self.files.iter();
        all.map(|name| (name.as_str(), apps::text(name).to_owned()))
    }

    fn plain(&'static self, workers: usize) -> Launch {
        let line = format!("{} {}", self.line, self.more);
        let line = line.replace("{each}", &format!("{EACH} tcp"));
        Launch {
            line: line.replace("{each-udp}", &format!("{EACH} udp")),
            values: vec![
                ("workers", workers.to_string()),
                ("readable", READABLE.to_owned()),
                ("own-port", "{port}".to_owned()),
            ],
            files: self.files().collect(),
            ready: self.ready(),
            counted: self.counted,
            ..Launch::default()
        }
    }

    fn reload(
        &'static self,
        running: &mut ServerUnderTest,
        workers: usize,
        nth: usize,
    ) -> Result<Restart, Error> {
        let none = || Error::Missing(format!("{} has no way to be restarted", self.name));
        Ok(match self.restart.as_ref().ok_or_else(none)? {
            Reload::Signal(signal, said, first, each) => {
                let signal = signal.parse().map_err(|_| none())?;
                Restart::Signal(signal, said, first + each * nth)
            }
            Reload::TakeOver(option) => Restart::TakeOver(option),
            Reload::Resize(few) => {
                // 4 workers, 2, 4, 2 (or 8, 1, 8, 1): both ways of changing their number.
                let next = if nth % 2 == 1 { *few } else { workers };
                let nginx = self.nginx.as_ref().ok_or_else(none)?;
                running.rewrite(nginx::FILE, &nginx.setup(next)?.text())?;
                Restart::Signal(Signal::SIGHUP, "start worker processes", nth + 1)
            }
        })
    }
}

impl Nginx {
    fn setup(&'static self, workers: usize) -> Result<nginx::Setup, Error> {
        let of_kind = if self.fixed {
            nginx::Setup {
                workers,
                http: "keepalive_timeout 0;",
                server: "location / { return 200 \"ok\\n\"; }".into(),
                ..nginx::Setup::default()
            }
        } else if self.files {
            nginx::Setup {
                workers,
                http: "sendfile on; tcp_nopush on; keepalive_requests 1000000000; types { text/html html; }",
                server: "root {dir};".into(),
                ..nginx::Setup::default()
            }
        } else {
            nginx::Setup::blocking(workers)?
        };
        let http = if self.keeps {
            "perl_modules {dir}; perl_require Work.pm; keepalive_timeout 75s; keepalive_requests 100000;"
        } else {
            of_kind.http
        };
        Ok(nginx::Setup {
            listen: &self.listen,
            events: &self.events,
            http,
            ..of_kind
        })
    }
}

/// The reason why Python cannot load a module.
fn lacks_module(name: &str) -> Option<String> {
    // Each variant of a server asks, and Python takes a while.
    static ASKED: Mutex<BTreeMap<String, bool>> = Mutex::new(BTreeMap::new());
    let mut asked = ASKED.lock().unwrap_or_else(PoisonError::into_inner);
    let here = *asked.entry(name.to_owned()).or_insert_with(|| {
        let python = std::process::Command::new("python3")
            .args(["-c", &format!("import {name}")])
            .stderr(std::process::Stdio::null())
            .status();
        python.is_ok_and(|status| status.success())
    });
    (!here).then(|| format!("Python's module {name} is not installed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaked(name: &str, own: &str) -> &'static Server {
        let own = toml::from_str(own).unwrap();
        Box::leak(Box::new(named(name, &own).unwrap()))
    }

    #[test]
    fn each_row_is_a_server_with_a_command() {
        for name in ALL.keys() {
            let server = leaked(name, "");
            assert!(server.nginx.is_some() || !server.line.is_empty(), "{name}");
            for file in &server.files {
                assert!(!apps::text(file).is_empty(), "{name}: {file}");
            }
        }
        assert!(named("no-such-server", &Table::new()).is_none());
    }

    #[test]
    fn a_row_has_what_it_is_of() {
        let own = "[puma]\nof = 'puma'\nhow = 'run'\nrun = 'puma {fd}'";
        let server = leaked("puma", own);
        assert_eq!((server.how, server.processes), (How::Run, 2));
        let launch = server.launch(2, &["--policy", "random"]).unwrap();
        let line = launch.line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            line,
            "wakeone run -w {workers} --policy random -l {address} -- puma {fd}"
        );
        assert_eq!((launch.ready.line, launch.ready.workers), ("ready:", 0));
    }

    #[test]
    fn who_attaches_says_so_with_its_options() {
        let attach = leaked("a", "[a]\nof = 'gunicorn'\nhow = 'attach+rescue'");
        let launch = attach.launch(4, &["--stuck-after", "1ms"]).unwrap();
        let options = ["--rescue", "--stuck-after", "1ms"];
        assert_eq!(launch.attach.unwrap(), options);
        let plain = leaked("gunicorn", "").launch(4, &[]).unwrap();
        assert_eq!(plain.attach, None);
    }
}
