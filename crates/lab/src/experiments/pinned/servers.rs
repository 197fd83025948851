//! Servers of two workers with one thread each.

use crate::apps;
use crate::launch::{self, Counted, Launch, Ready};
use crate::steered;

/// Workers of each.
pub const WORKERS: usize = 2;

/// A server, and the party that hands out its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Name of the variant.
    pub name: &'static str,
    /// Its place in the palette of the charts.
    pub colour: usize,
    /// The program that it needs.
    program: &'static str,
    /// Its command line; `{puma}` is that of a single one, without the configuration that may be around.
    line: &'static str,
    /// A line that it says, and how often, once its workers are there.
    said: Option<(&'static str, usize)>,
    /// Wakeone chooses.
    steered: bool,
    /// Whether `wakeone attach` steers it.
    attached: bool,
}

const PUMA: &str = "puma -C - -e production -t 1:1 -b tcp://{address} config.ru";

/// Puma's cluster mode as it is: one socket that both workers wait for.
const PUMA_SHARED: Kind = Kind {
    name: "puma/shared",
    colour: 0,
    program: "puma",
    line: "{puma} -w 2",
    said: None,
    steered: false,
    attached: false,
};
/// Two single Pumas with a socket each; the kernel's hash chooses.
pub const PUMA_HASH: Kind = Kind {
    name: "puma/hash",
    colour: 2,
    line: "wakeone run -w 2 -l {address} --policy hash --no-rescue -- {puma}",
    said: Some(("ready:", 1)),
    ..PUMA_SHARED
};
/// The same under `wakeone run`.
pub const PUMA_RUN: Kind = Kind {
    name: "puma/run",
    colour: 4,
    line: "wakeone run -w 2 -l {address} --policy least-connections --rescue -- {puma}",
    steered: true,
    ..PUMA_HASH
};
/// gunicorn with `--reuse-port`; the kernel's hash chooses.
pub const GUNICORN_HASH: Kind = Kind {
    name: "gunicorn/hash",
    colour: 2,
    program: "gunicorn",
    line: "gunicorn --reuse-port --workers 2 --timeout 60 --bind {address} wsgi:app",
    said: Some(("Booting worker", WORKERS)),
    ..PUMA_SHARED
};
/// The same, and `wakeone attach --rescue`.
pub const GUNICORN_ATTACH: Kind = Kind {
    name: "gunicorn/attach",
    colour: 4,
    steered: true,
    attached: true,
    ..GUNICORN_HASH
};

/// All of them.
pub const ALL: [Kind; 5] = [
    PUMA_SHARED,
    PUMA_HASH,
    PUMA_RUN,
    GUNICORN_HASH,
    GUNICORN_ATTACH,
];

impl Kind {
    /// The reason why it cannot be measured here.
    pub fn lacks(&self) -> Option<String> {
        let steered = || self.steered.then(steered::lacks).flatten();
        launch::lacks(&[self.program]).or_else(steered)
    }

    /// The server.
    pub fn launch(&self) -> Launch {
        Launch {
            what: self.name.into(),
            line: self.line.replace("{puma}", PUMA),
            files: vec![
                ("config.ru", apps::RACK.into()),
                ("wsgi.py", apps::WSGI.into()),
            ],
            ready: Ready {
                said: self.said,
                workers: WORKERS,
                answers: Some("/work?us=0"),
                ..Ready::default()
            },
            counted: Counted::InFile,
            attached: self.attached.then_some(true),
            ..Launch::default()
        }
    }
}
