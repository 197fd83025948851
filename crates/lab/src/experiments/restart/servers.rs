//! The servers and how each is restarted.

use nix::sys::signal::Signal;

use crate::error::Error;
use crate::launch::{self, Counted, Launch, Ready};
use crate::under_test::{Restart, ServerUnderTest};
use crate::ways::{Serving, Way};
use crate::{nginx, steered};

/// Workers of each, where nothing else is asked for.
pub const WORKERS: usize = 4;

/// A kind of server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Our own server, its connections handed out in this way.
    Ours(Way),
    /// nginx with `reuseport`, reloaded with half of its workers and with all of them again.
    Nginx,
    /// The same, reloaded with one worker and with all of them again.
    NginxToOne,
    /// The same, attached to.
    NginxToOneAttached,
    /// HAProxy with a listener a thread.
    Haproxy,
    /// The same, attached to.
    HaproxyAttached,
}

/// Our own server, as a plain server with a listener a worker.
pub const REUSEPORT: Kind = Kind::Ours(Way::ReuseportHash);
/// Our own server under `wakeone run`.
pub const WAKEONE: Kind = Kind::Ours(Way::LeastConnectionsRescue);

/// All kinds that the experiment compares under its loads.
pub const ALL: [Kind; 3] = [REUSEPORT, Kind::Nginx, WAKEONE];

impl Kind {
    /// Last part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            REUSEPORT => "reuseport",
            WAKEONE => "wakeone",
            Kind::Ours(way) => way.name(),
            Kind::Nginx => "nginx-reload",
            Kind::NginxToOne => "nginx-to-one",
            Kind::NginxToOneAttached => "nginx-to-one+attach",
            Kind::Haproxy => "haproxy",
            Kind::HaproxyAttached => "haproxy+attach",
        }
    }

    /// The reason why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        match self {
            Kind::Nginx | Kind::NginxToOne => nginx::program().err(),
            Kind::NginxToOneAttached => nginx::program().err().or_else(steered::lacks),
            Kind::Haproxy => launch::lacks(&["haproxy"]),
            Kind::HaproxyAttached => launch::lacks(&["haproxy"]).or_else(steered::lacks),
            Kind::Ours(_) => None,
        }
    }

    /// The path that the load requests: 200 µs of sleep from our server, a fixed answer from the others.
    pub fn path(self) -> &'static str {
        match self {
            Kind::Ours(_) => "/work?us=200&kind=sleep",
            _ => "/",
        }
    }

    /// Whether it is attached to.
    fn attached(self) -> bool {
        matches!(self, Kind::NginxToOneAttached | Kind::HaproxyAttached)
    }
}

impl Kind {
    /// The server.
    pub fn launch(self, workers: usize) -> Launch {
        let what = format!("the server {} and those that followed it", self.name());
        let launch = match self {
            Kind::Ours(way) => way.launch(Serving::Blocking, workers),
            Kind::Haproxy | Kind::HaproxyAttached => haproxy(workers),
            _ => nginx_of(workers).launch(String::new()),
        };
        Launch {
            what,
            attached: self.attached().then_some(false),
            ..launch
        }
    }

    /// Restarts it for the `nth` time, from 1, and returns when that is over.
    ///
    /// # Errors
    /// When the restart fails.
    pub fn restart(
        self,
        server: &mut ServerUnderTest,
        workers: usize,
        nth: usize,
    ) -> Result<(), Error> {
        let how = match self {
            Kind::Ours(way) if way.steered() => {
                Restart::Signal(Signal::SIGHUP, "rolling restart done", nth)
            }
            Kind::Ours(Way::ReuseportHash) => Restart::StartFirst,
            // The next one cannot have the address before this one has left it.
            Kind::Ours(_) => Restart::EndFirst,
            Kind::Haproxy | Kind::HaproxyAttached => Restart::TakeOver("-sf"),
            Kind::Nginx | Kind::NginxToOne | Kind::NginxToOneAttached => {
                // 4 workers, 2, 4, 2 (or 8, 1, 8, 1): both ways of changing their number.
                let few = if self == Kind::Nginx { workers / 2 } else { 1 };
                let next = if nth % 2 == 1 { few } else { workers };
                server.rewrite(nginx::FILE, &nginx_of(next).text())?;
                Restart::Signal(Signal::SIGHUP, "start worker processes", nth + 1)
            }
        };
        server.restart(how)
    }
}

fn nginx_of(workers: usize) -> nginx::Setup {
    nginx::Setup {
        workers,
        listen: "reuseport",
        http: "keepalive_timeout 0;",
        server: "location / { return 200 \"ok\\n\"; }",
        ..nginx::Setup::default()
    }
}

/// HAProxy with a listener for each thread, restarted as its manual says: a new process tells the old one to finish (`-sf`).
fn haproxy(threads: usize) -> Launch {
    let text = format!(
        "global
  nbthread {threads}
  maxconn 8192
defaults
  mode http
  timeout client 10s
  timeout server 10s
  timeout connect 10s
frontend all
  bind {{address}} shards by-thread backlog {{backlog}}
  http-after-response set-header Connection close
  http-request return status 200 content-type text/plain string ok
"
    );
    Launch {
        line: "haproxy -V -db -f {dir}/haproxy.cfg".into(),
        files: vec![("haproxy.cfg", text)],
        ready: Ready {
            line: "Using ",
            answers: Some("/"),
            ..Ready::default()
        },
        // Its count does not outlive it.
        counted: Counted::Nowhere,
        ..Launch::default()
    }
}
