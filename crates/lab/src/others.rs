//! Other projects' servers that share one listener among their workers, and the ways to start them: data for [`Launch`].

use std::time::Duration;

use crate::apps;
use crate::launch::{self, Counted, Launch, Ready};
use crate::nginx::Setup;
use crate::steered;

/// Workers of each.
pub const WORKERS: usize = 4;

/// The way in which workers share listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// The server unchanged: one listener for all workers.
    Shared,
    /// One a worker by the server's own setting; the kernel's hash.
    Hash,
    /// The server unchanged, under `wakeone run --split`.
    Split,
}

impl Sharing {
    /// Last part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Sharing::Shared => "shared",
            Sharing::Hash => "hash",
            Sharing::Split => "split",
        }
    }

    /// Its place in the palette.
    pub fn colour(self) -> usize {
        match self {
            Sharing::Shared => 1,
            Sharing::Hash => 2,
            Sharing::Split => 4,
        }
    }
}

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other {
    /// First part of the variants' names.
    pub name: &'static str,
    /// The programs that it needs; nginx with its module is looked for by itself.
    needs: &'static [&'static str],
    /// Its command line, as in [`Launch`]. `{hash}` stands for the option for a listener each.
    line: &'static str,
    /// The option for a listener each.
    hash: &'static str,
    /// The program that it runs.
    file: (&'static str, &'static str),
    /// Processes without children beside the workers.
    beside: usize,
    /// How long the other workers take to come and wait, once one answers.
    settles_ms: u64,
}

/// gunicorn's sync workers: select() and accept().
pub const GUNICORN: Other = Other {
    name: "gunicorn",
    needs: &["gunicorn"],
    line: "gunicorn --workers {workers} --backlog {backlog} {hash} --bind {address} wsgi:app",
    hash: "--reuse-port",
    file: ("wsgi.py", apps::WSGI),
    beside: 0,
    settles_ms: 300,
};
/// A small server in Python: blocking accept().
pub const PREFORK: Other = Other {
    name: "prefork",
    needs: &["python3"],
    line: "python3 {dir}/prefork.py {host} {port} {workers} {hash}",
    hash: "reuseport",
    file: ("prefork.py", apps::PREFORK),
    ..GUNICORN
};
/// nginx: epoll with EPOLLEXCLUSIVE. Its command line is that of [`Setup`].
pub const NGINX: Other = Other {
    name: "nginx",
    needs: &[],
    line: "",
    hash: "reuseport",
    ..GUNICORN
};
/// uvicorn with `--workers`. Python starts a process beside them to clean up.
pub const UVICORN: Other = Other {
    name: "uvicorn",
    needs: &["uvicorn"],
    line: "uvicorn --workers {workers} --host {host} --port {port} --backlog {backlog} --timeout-keep-alive 75 --lifespan off --no-access-log asgi:app",
    file: ("asgi.py", apps::ASGI),
    beside: 1,
    settles_ms: 1000,
    ..GUNICORN
};
/// gunicorn with uvicorn's worker class.
pub const GUNICORN_UVICORN: Other = Other {
    name: "gunicorn-uvicorn",
    needs: &["gunicorn", "uvicorn"],
    line: "gunicorn -k uvicorn.workers.UvicornWorker --workers {workers} --backlog {backlog} --keep-alive 75 --bind {address} asgi:app",
    beside: 0,
    ..UVICORN
};
/// gunicorn with its threaded workers.
pub const GUNICORN_THREADS: Other = Other {
    name: "gunicorn-gthread",
    line: "gunicorn -k gthread --threads 2 --workers {workers} --backlog {backlog} --keep-alive 75 --bind {address} wsgi:app",
    settles_ms: 1000,
    ..GUNICORN
};
/// node's cluster, in which the workers accept (`SCHED_NONE`).
pub const NODE: Other = Other {
    name: "node-cluster",
    needs: &["node"],
    line: "node {dir}/cluster.js {port} {workers}",
    file: ("cluster.js", apps::CLUSTER),
    settles_ms: 1000,
    ..GUNICORN
};

impl Other {
    /// The reason why it cannot be measured here in any way.
    pub fn is_missing(&self) -> Option<String> {
        if *self == NGINX {
            return crate::nginx::perl_module().err();
        }
        launch::lacks(self.needs)
    }

    /// The reason why it cannot be measured here in this way.
    pub fn lacks(&self, way: Sharing) -> Option<String> {
        let steered = || (way == Sharing::Split).then(steered::lacks).flatten();
        self.is_missing().or_else(steered)
    }

    /// The launch of the server in this way.
    ///
    /// # Errors
    /// When nginx has no module whose handlers block.
    pub fn launch(&self, way: Sharing) -> Result<Launch, crate::error::Error> {
        let hash = if way == Sharing::Hash { self.hash } else { "" };
        let what = format!("{}/{}", self.name, way.name());
        let mut launch = if *self == NGINX {
            Setup {
                listen: hash,
                ..Setup::blocking(WORKERS)?
            }
            .launch(what)
        } else {
            Launch {
                what,
                line: self.line.replace("{hash}", hash),
                values: vec![("workers", WORKERS.to_string())],
                files: vec![(self.file.0, self.file.1.into())],
                counted: Counted::InFile,
                ..Launch::default()
            }
        };
        launch.ready = Ready {
            workers: WORKERS + self.beside,
            answers: Some("/work?us=0"),
            settles: Duration::from_millis(self.settles_ms),
            ..launch.ready
        };
        Ok(if way == Sharing::Split {
            launch.split()
        } else {
            launch
        })
    }
}
