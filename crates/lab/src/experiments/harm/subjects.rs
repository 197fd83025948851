//! The servers: a row each. To add one is to add a row to [`ALL`].

use nix::sys::signal::Signal;
use std::time::Duration;

use super::{Situation, Way, moves};
use crate::error::Error;
use crate::launch::{self, Counted, Launch, Ready};
use crate::under_test::{Restart, ServerUnderTest};
use crate::{apps, nginx, steered};

/// Workers of each.
pub const WORKERS: usize = 4;

/// A server, and how it is started, asked and restarted. Command lines are those of [`Launch`].
#[derive(Clone, Copy)]
pub struct Subject {
    /// First part of the variants' names.
    pub name: &'static str,
    /// The programs that it needs.
    needs: &'static [&'static str],
    /// A module of Python's that it needs.
    module: Option<&'static str>,
    /// Its command as it is. `{each}` starts what follows once for each worker.
    line: &'static str,
    /// The command of one worker on a descriptor, where it takes one.
    run: Option<&'static str>,
    /// Options of `wakeone run` that its worker needs.
    run_options: &'static [&'static str],
    /// Whether its workers share one socket, which `wakeone run --split` divides.
    shared: bool,
    /// The files in its directory, and others that the row's launch makes.
    files: &'static [(&'static str, &'static str)],
    /// Lines with this text, so many times, are a sign that it is ready.
    said: Option<(&'static str, usize)>,
    /// Whether it is asked over HTTP until it answers.
    answers: bool,
    /// The party that counts its answers.
    counted: Counted,
    /// How it is restarted.
    restart: Reload,
    /// The situations that it can be in.
    pub situations: &'static [Situation],
    /// The command of its clients, which print one line of JSON. Without it they speak HTTP.
    pub client: Option<&'static str>,
    /// The scheme of its address: empty, or `udp://`.
    pub scheme: &'static str,
}

/// How a server as it is is restarted or reloaded.
#[derive(Clone, Copy)]
enum Reload {
    /// A signal. It is over when this text has been printed so many times before any restart, and so many for each.
    Signal(Signal, &'static str, usize, usize),
    /// A successor with this option to name the process that ends.
    TakeOver(&'static str),
    /// nginx's reload with half of the workers, and with all of them again.
    Resize,
}

use Situation::{Boot, Busy, Kept, Moves, Restart as Restarted, Roll, Steady, Stuck};

const EACH: &str = "python3 {dir}/each.py {host} {port} {workers} tcp";
const EACH_UDP: &str = "python3 {dir}/each.py {host} {port} {workers} udp";
/// The situations of a server whose connections are kept, and whose workers name themselves.
const USUAL: &[Situation] = &[Steady, Kept, Stuck, Restarted, Roll, Moves];

/// An asyncio worker, started once for each socket.
const ASYNCIO: Subject = Subject {
    name: "asyncio",
    needs: &["python3"],
    module: None,
    line: "{each} python3 {dir}/loop.py {fd} none",
    run: Some("python3 {dir}/loop.py {fd} none"),
    run_options: &[],
    shared: false,
    files: &[("each.py", apps::EACH), ("loop.py", apps::LOOP)],
    said: Some(("started", 1)),
    answers: true,
    counted: Counted::InFile,
    restart: Reload::Signal(Signal::SIGHUP, "rolled", 0, 1),
    situations: USUAL,
    client: None,
    scheme: "",
};
const GUNICORN: Subject = Subject {
    name: "gunicorn-sync",
    needs: &["gunicorn"],
    line: "gunicorn --reuse-port --workers {workers} --timeout 60 --backlog {backlog} --bind {address} wsgi:app",
    run: Some("gunicorn --workers 1 --timeout 60 --backlog {backlog} --bind fd://{fd} wsgi:app"),
    files: &[("wsgi.py", apps::WSGI)],
    said: Some(("Booting worker", WORKERS)),
    restart: Reload::Signal(Signal::SIGHUP, "Booting worker", WORKERS, WORKERS),
    // It closes each connection after its answer.
    situations: &[Steady, Stuck, Restarted, Moves],
    ..ASYNCIO
};
const TOKIO: Subject = Subject {
    name: "tokio-current",
    needs: &["python3", "tokio_server"],
    line: "{each} tokio_server {address} current",
    run: Some("tokio_server fd:{fd} current"),
    files: &[("each.py", apps::EACH)],
    situations: &[Steady, Kept, Stuck, Busy, Restarted, Roll, Moves],
    ..ASYNCIO
};
/// Sessions over UDP, a socket for each worker.
const SESSIONS: Subject = Subject {
    name: "sessions",
    line: "{each-udp} python3 {dir}/sessions.py serve {address}",
    run: Some("python3 {dir}/sessions.py serve {fd}"),
    files: &[("each.py", apps::EACH), ("sessions.py", apps::SESSIONS)],
    answers: false,
    counted: Counted::Nowhere,
    situations: &[Steady],
    client: Some("python3 {dir}/sessions.py ask {host} {port} {seconds} {seed}"),
    scheme: "udp://",
    ..ASYNCIO
};

/// All of them: the servers of the field, then small ones that each show one kind of fault.
pub const ALL: &[Subject] = &[
    Subject {
        name: "nginx",
        needs: &[],
        line: "",
        run: None,
        files: &[],
        said: None,
        counted: Counted::ByNginx,
        restart: Reload::Resize,
        situations: &[Steady, Kept, Stuck, Restarted, Moves],
        ..ASYNCIO
    },
    Subject {
        name: "haproxy",
        needs: &["haproxy"],
        line: "env THREADS=4 BIND={address} haproxy -V -db -f {dir}/haproxy.cfg",
        run: Some("env THREADS=1 BIND=fd@{fd} haproxy -V -db -f {dir}/haproxy.cfg"),
        run_options: &["--stop-signal", "USR1"],
        files: &[("haproxy.cfg", HAPROXY), ("work.lua", HAPROXY_LUA)],
        said: Some(("Using ", 1)),
        counted: Counted::Nowhere,
        restart: Reload::TakeOver("-sf"),
        situations: &[Steady, Kept, Stuck, Restarted],
        ..ASYNCIO
    },
    GUNICORN,
    Subject {
        name: "gunicorn-gthread",
        line: "gunicorn -k gthread --threads 2 --keep-alive 75 --reuse-port --workers {workers} --timeout 60 --backlog {backlog} --bind {address} wsgi:app",
        run: Some(
            "gunicorn -k gthread --threads 2 --keep-alive 75 --workers 1 --timeout 60 --backlog {backlog} --bind fd://{fd} wsgi:app",
        ),
        situations: &[Steady, Kept, Stuck, Restarted, Moves],
        ..GUNICORN
    },
    Subject {
        name: "uvicorn",
        needs: &["python3", "uvicorn"],
        line: "{each} uvicorn --fd {fd} --backlog {backlog} --timeout-keep-alive 75 --lifespan off --no-access-log asgi:app",
        run: Some(
            "uvicorn --fd {fd} --backlog {backlog} --timeout-keep-alive 75 --lifespan off --no-access-log asgi:app",
        ),
        files: &[("each.py", apps::EACH), ("asgi.py", apps::ASGI)],
        ..ASYNCIO
    },
    TOKIO,
    Subject {
        name: "tokio-multi",
        line: "{each} tokio_server {address} multi",
        run: Some("tokio_server fd:{fd} multi"),
        ..TOKIO
    },
    Subject {
        name: "granian",
        needs: &["granian"],
        line: "granian --interface asgi --workers {workers} --host {host} --port {port} asgi:app",
        run: None,
        files: &[("asgi.py", apps::ASGI)],
        said: Some(("Started worker", WORKERS)),
        // It replaces one worker after another.
        restart: Reload::Signal(Signal::SIGHUP, "Stopped old worker", 0, WORKERS),
        situations: &[Steady, Kept, Stuck, Restarted, Moves],
        ..ASYNCIO
    },
    Subject {
        name: "go",
        needs: &["python3", "go_server"],
        // A server that listens by Multipath TCP is refused, with this advice.
        line: "{each} env GODEBUG=multipathtcp=0 go_server {address}",
        run: Some("go_server fd:{fd}"),
        files: &[("each.py", apps::EACH)],
        ..ASYNCIO
    },
    Subject {
        name: "node",
        needs: &["python3", "node"],
        line: "{each} node {dir}/own.js {fd}",
        run: Some("node {dir}/own.js {fd}"),
        files: &[("each.py", apps::EACH), ("own.js", apps::OWN_JS)],
        ..ASYNCIO
    },
    Subject {
        name: "apache",
        needs: &["apache2"],
        line: "sh -c {readable} {dir} apache2 -D FOREGROUND -d {dir} -f {dir}/apache.conf",
        run: None,
        files: &[("apache.conf", APACHE), ("work.lua", APACHE_LUA)],
        said: Some(("resuming normal operations", 1)),
        counted: Counted::Nowhere,
        restart: Reload::Signal(Signal::SIGUSR1, "resuming normal operations", 1, 1),
        situations: &[Steady, Kept, Stuck, Restarted, Moves],
        ..ASYNCIO
    },
    Subject {
        name: "unbound",
        needs: &["unbound", "dnsperf", "python3"],
        line: "unbound -d -c {dir}/unbound.conf",
        run: None,
        files: &[("unbound.conf", UNBOUND), ("dns.py", apps::DNS)],
        said: Some(("start of service", 1)),
        restart: Reload::Signal(Signal::SIGHUP, "start of service", 1, 1),
        situations: &[Steady, Restarted],
        client: Some("python3 {dir}/dns.py {host} {port} {seconds} {seed}"),
        ..SESSIONS
    },
    Subject {
        name: "aioquic",
        module: Some("aioquic"),
        line: "{each-udp} python3 {dir}/quic.py serve {host} {port}",
        run: Some("python3 {dir}/quic.py serve {fd}"),
        files: &[("each.py", apps::EACH), ("quic.py", apps::QUIC)],
        situations: &[Steady, Kept, Stuck, Restarted],
        client: Some("python3 {dir}/quic.py ask {host} {port} {seconds} {seed} {situation}"),
        ..SESSIONS
    },
    ASYNCIO,
    Subject {
        name: "asyncio-pool",
        line: "{each} python3 {dir}/loop.py {fd} pool",
        run: Some("python3 {dir}/loop.py {fd} pool"),
        situations: &[Steady, Stuck, Restarted],
        ..ASYNCIO
    },
    Subject {
        name: "asyncio-child",
        line: "{each} python3 {dir}/loop.py {fd} child",
        run: Some("python3 {dir}/loop.py {fd} child"),
        situations: &[Steady, Stuck, Restarted],
        ..ASYNCIO
    },
    Subject {
        name: "prefork",
        line: "python3 {dir}/prefork.py {host} {port} {workers} slow",
        run: None,
        shared: true,
        files: &[("prefork.py", apps::PREFORK)],
        situations: &[Boot],
        // Its workers accept half a second after it listens. Earlier requests wait, and are part of the case.
        answers: false,
        ..ASYNCIO
    },
    SESSIONS,
    Subject {
        name: "sessions-shared",
        line: "python3 {dir}/sessions.py serve {address}:shared",
        run: None,
        shared: true,
        said: Some(("serving", 1)),
        ..SESSIONS
    },
];

impl Subject {
    /// The ways that it can be served in.
    pub fn ways(&self, situation: Situation) -> Vec<Way> {
        let ours: &[Way] = match (self.shared, self.run) {
            (true, _) => &[Way::Split],
            (_, Some(_)) => &[Way::Attach, Way::AttachRescue, Way::Run],
            _ => &[Way::Attach, Way::AttachRescue],
        };
        // A datagram socket has no accept queue to move.
        let fits = |way: &&Way| match way {
            Way::AttachRescue => self.scheme.is_empty(),
            // It moves nothing.
            Way::Attach => situation != Moves,
            _ => true,
        };
        let ours = ours.iter().filter(fits).copied();
        std::iter::once(Way::AsItIs).chain(ours).collect()
    }

    /// The reason why it cannot be measured here in this way.
    pub fn lacks(&self, way: Way) -> Option<String> {
        let server = match self.restart {
            Reload::Resize => nginx::perl_module().err(),
            _ => launch::lacks(self.needs),
        };
        let module = || self.module.and_then(lacks_module);
        let steered = || (way != Way::AsItIs).then(steered::lacks).flatten();
        server.or_else(module).or_else(steered)
    }

    /// The server in this way.
    ///
    /// # Errors
    /// When nginx has no module whose handlers block.
    pub fn launch(&self, situation: Situation, way: Way) -> Result<Launch, Error> {
        let plain = match self.restart {
            Reload::Resize => nginx_of(WORKERS)?.launch(String::new()),
            _ => self.plain(),
        };
        let launch = match (way, self.run) {
            (Way::Run, Some(line)) => Launch {
                line: format!(
                    "wakeone run -w {{workers}} {} -l {}{{address}} -- {line}",
                    [self.run_options, rescue_options(situation)]
                        .concat()
                        .join(" "),
                    self.scheme
                ),
                ..plain
            },
            (Way::Split, _) => plain.split(),
            _ => plain,
        };
        let ready = match way {
            // The load begins as soon as it listens.
            Way::Split if self.situations == [Boot] => launch.ready,
            Way::Run => Ready {
                line: "ready:",
                said: None,
                ..launch.ready
            },
            // A server over UDP is never said to be ready: a receiver is seen only once it receives.
            Way::Split => Ready {
                said: Some(("is split", 1)),
                ..launch.ready
            },
            _ => launch.ready,
        };
        Ok(Launch {
            what: format!("{} {}", self.name, way.name()),
            ready,
            ..launch
        })
    }

    fn plain(&self) -> Launch {
        let line = self.line.replace("{each}", EACH);
        Launch {
            line: line.replace("{each-udp}", EACH_UDP),
            values: vec![
                ("workers", WORKERS.to_string()),
                ("readable", READABLE.to_owned()),
            ],
            files: self
                .files
                .iter()
                .map(|(name, text)| (*name, (*text).to_owned()))
                .collect(),
            ready: Ready {
                said: self.said,
                answers: self.answers.then_some("/work?us=0"),
                // The other workers come to wait meanwhile.
                settles: Duration::from_millis(if self.answers { 300 } else { 0 }),
                ..Ready::default()
            },
            counted: self.counted,
            ..Launch::default()
        }
    }

    /// Restarts it for the `nth` time, from 1, as its user would in this way.
    ///
    /// # Errors
    /// When the restart fails.
    pub fn restart(&self, way: Way, server: &mut ServerUnderTest, nth: usize) -> Result<(), Error> {
        let how = match (way, self.restart) {
            (Way::Run, _) => Restart::Signal(Signal::SIGHUP, "rolling restart done", nth),
            (_, Reload::Signal(signal, said, first, each)) => {
                Restart::Signal(signal, said, first + each * nth)
            }
            (_, Reload::TakeOver(option)) => Restart::TakeOver(option),
            (_, Reload::Resize) => {
                let workers = if nth % 2 == 1 { WORKERS / 2 } else { WORKERS };
                server.rewrite(nginx::FILE, &nginx_of(workers)?.text())?;
                Restart::Signal(Signal::SIGHUP, "start worker processes", nth + 1)
            }
        };
        server.restart(how)
    }
}

/// The options of steering in a situation.
pub fn rescue_options(situation: Situation) -> &'static [&'static str] {
    match situation {
        Moves => moves::OPTIONS,
        _ => &[],
    }
}

/// The reason why Python cannot load a module.
fn lacks_module(name: &str) -> Option<String> {
    let python = std::process::Command::new("python3")
        .args(["-c", &format!("import {name}")])
        .stderr(std::process::Stdio::null())
        .status();
    let here = python.is_ok_and(|status| status.success());
    (!here).then(|| format!("Python's module {name} is not installed"))
}

fn nginx_of(workers: usize) -> Result<nginx::Setup, Error> {
    Ok(nginx::Setup {
        listen: "reuseport",
        http: "perl_modules {dir}; perl_require Work.pm; keepalive_timeout 75s; keepalive_requests 100000;",
        ..nginx::Setup::blocking(workers)?
    })
}

/// HAProxy with a listener for each thread. Its service computes for as long as a request says.
const HAPROXY: &str = r#"global
  nbthread "${THREADS}"
  maxconn 8192
  lua-load-per-thread {dir}/work.lua
defaults
  mode http
  timeout client 75s
  timeout server 10s
  timeout connect 10s
frontend all
  bind "${BIND}" shards by-thread backlog {backlog}
  http-request use-service lua.work
"#;
/// `core.now` stands still while a service computes, and HAProxy's Lua cannot sleep without yielding.
const HAPROXY_LUA: &str = r#"core.register_service("work", "http", function(applet)
  local us = tonumber(string.match(applet.qs or "", "us=(%d+)")) or 0
  if us > 10000 then
    local ends = os.clock() + us / 1e6
    while os.clock() < ends do end
  end
  applet:set_status(200)
  applet:add_header("content-length", "3")
  applet:start_response()
  applet:send("ok\n")
end)
"#;
/// Apache's workers are of another user than its first process.
const READABLE: &str = "chmod 755 \"$0\" && exec \"$@\"";
const APACHE: &str = "ServerName localhost
PidFile {dir}/pid
ErrorLog /dev/stderr
LogLevel notice
User www-data
Group www-data
LoadModule mpm_prefork_module /usr/lib/apache2/modules/mod_mpm_prefork.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule lua_module /usr/lib/apache2/modules/mod_lua.so
Listen {address}
ListenBackLog {backlog}
ListenCoresBucketsRatio 1
StartServers 8
ServerLimit 8
MaxRequestWorkers 8
MinSpareServers 8
MaxSpareServers 8
KeepAlive On
KeepAliveTimeout 75
MaxKeepAliveRequests 0
LuaMapHandler /work {dir}/work.lua
";
const APACHE_LUA: &str = r#"require "apache2"
function handle(r)
  r.usleep(tonumber(string.match(r.args or "", "us=(%d+)")) or 0)
  r:puts("ok\n")
  return apache2.OK
end
"#;
const UNBOUND: &str = "server:
  interface: {host}@{port}
  num-threads: 4
  so-reuseport: yes
  do-ip6: no
  do-daemonize: no
  username: \"\"
  chroot: \"\"
  directory: \"{dir}\"
  pidfile: \"{dir}/pid\"
  use-syslog: no
  verbosity: 1
  module-config: \"iterator\"
  local-zone: \"test.\" redirect
  local-data: \"test. A 127.0.0.1\"
remote-control:
  control-enable: no
";
