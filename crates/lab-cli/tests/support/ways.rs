//! The ways in which `wakeone-lab serve` serves.

use super::Server;

/// A way of serving that the command line offers.
#[derive(Clone, Copy)]
pub struct Way {
    pub arguments: &'static [&'static str],
    /// Whether it may have several workers.
    pub workers: bool,
    /// Whether a worker serves one connection to its end before the next.
    pub one_at_a_time: bool,
}

const fn way(arguments: &'static [&'static str]) -> Way {
    Way {
        arguments,
        workers: true,
        one_at_a_time: false,
    }
}

impl Way {
    const fn alone(self) -> Self {
        Self {
            workers: false,
            ..self
        }
    }

    const fn one_at_a_time(self) -> Self {
        Self {
            one_at_a_time: true,
            ..self
        }
    }
}

/// All ways that need no supervisor.
const WAYS: &[Way] = &[
    way(&["--model", "iterative"]).alone().one_at_a_time(),
    way(&["--model", "forking"]).alone(),
    way(&["--model", "preforked"]).one_at_a_time(),
    way(&["--model", "preforked", "--reuseport"]).one_at_a_time(),
    way(&["--model", "preforked", "--accept-lock", "flock"]).one_at_a_time(),
    way(&["--model", "preforked", "--accept-lock", "fcntl"]).one_at_a_time(),
    way(&["--model", "preforked", "--accept-lock", "pthread"]).one_at_a_time(),
    way(&["--model", "threaded"]).alone(),
    way(&["--model", "prethreaded"]).one_at_a_time(),
    way(&["--model", "prethreaded", "--accept-lock", "none"]).one_at_a_time(),
    way(&["--model", "poll"]).alone(),
    way(&["--model", "epoll"]).alone(),
    way(&["--model", "epoll-prefork", "--epoll", "wake-all"]),
    way(&["--model", "epoll-prefork", "--epoll", "exclusive"]),
    way(&["--model", "epoll-prefork", "--epoll", "rotate"]),
    way(&["--model", "epoll-prefork", "--reuseport"]),
    way(&["--model", "reuseport"]),
    way(&["--model", "fd-passing"]),
    way(&["--model", "io-uring"]),
    way(&["--model", "io-uring", "--reuseport"]),
];

/// Whether io_uring may be used here; prints a line if not.
fn has_io_uring() -> bool {
    let has = wakeone_serve::system::ring::Ring::new(4).is_ok();
    if !has {
        eprintln!("not run: io_uring is not to be had here");
    }
    has
}

/// The ways that this machine offers.
pub fn ways() -> Vec<Way> {
    let io_uring = has_io_uring();
    let offered = |way: &&Way| io_uring || way.arguments[1] != "io-uring";
    WAYS.iter().filter(offered).copied().collect()
}

/// Runs `check` against each way with this many workers, or one if it has only one; some ways at the same time.
pub fn with_each(workers: &str, more: &[&str], check: impl Fn(&Server, &str) + Sync) {
    let ways = ways();
    for ways in ways.chunks(7) {
        std::thread::scope(|scope| {
            for way in ways {
                let check = &check;
                scope.spawn(move || {
                    let count = if way.workers { workers } else { "1" };
                    let arguments = [way.arguments, &["-w", count], more].concat();
                    let server = Server::start(&arguments);
                    check(&server, &arguments.join(" "));
                    server.stop();
                });
            }
        });
    }
}
