//! Looks at the first bytes of the datagrams that come to a UDP socket: at some, for as long as a server is watched.

use std::io;

use wakeone_bpf::chooser::Choosers;
use wakeone_kernel::capability::{self, Capability};
use wakeone_kernel::socket::capture::{self, Capture};
use wakeone_model::listener::{Listener, Protocol};
use wakeone_model::quic::{self, Datagrams};
use wakeone_model::snapshot::View;

/// As many datagrams are looked at: they tell what the others are.
const MOST: usize = 1_000;
/// As many at once, so that a flood does not keep us.
const AT_ONCE: usize = 100;

const _: () = assert!(quic::HEAD_BYTES <= capture::CONTENT);

/// The datagrams that come to a listener and may have a long header of QUIC. Those with short ones tell nothing, and are most of what
/// such a server gets.
#[derive(Debug)]
pub(crate) struct Contents {
    capture: Option<Capture>,
    left: usize,
}

impl Contents {
    /// Begins to look, where it is a UDP socket and we may. `asked`: whether more than /proc and sock_diag may be used.
    pub(crate) fn of(listener: &Listener, asked: bool, view: &mut View) -> Self {
        let address = listener.address.inet();
        let address = address.filter(|_| listener.protocol == Protocol::Udp);
        let capture = address.and_then(|address| {
            let capture = match asked {
                true => Capture::start(address, listener.interface, quic::SHORT).map_err(why),
                false => Err("tracing was not asked for".into()),
            };
            let missing = |why: &String| {
                view.missing.push(format!(
                    "datagrams may not be seen ({why}): whether they are QUIC's, and reach the right worker, is not known"
                ));
            };
            capture.inspect_err(missing).ok()
        });
        let left = MOST;
        Self { capture, left }
    }

    /// Counts those that came since the last look.
    pub(crate) fn look(&mut self, seen: &mut Datagrams) {
        let Some(capture) = &self.capture else { return };
        let most = self.left.min(AT_ONCE);
        let taken = capture.take(most, &mut |one| seen.count(one.head, one.length));
        // An interface that went away shows nothing more.
        self.left -= taken.unwrap_or(self.left);
        if self.left == 0 {
            self.capture = None;
        }
    }
}

fn why(error: io::Error) -> String {
    match capability::has(Capability::CAP_NET_RAW) {
        true => error.to_string(),
        false => format!("it needs {}", Capability::CAP_NET_RAW),
    }
}

/// Whether a program chooses among the sockets of a listener, whoever set it; `None`: we may not see it, which is then missing.
pub(crate) fn has_program(listener: &Listener, missing: &mut Vec<String>) -> Option<bool> {
    let port = listener.address.port()?;
    let choosers = Choosers::of(listener.protocol, port).and_then(|choosers| choosers.look(None));
    let choosers = choosers.inspect_err(|error| {
        let lacking = capability::missing_of([Capability::CAP_BPF, Capability::CAP_PERFMON]);
        let why = match lacking.is_empty() {
            true => error.to_string(),
            false => format!("it needs {}", lacking.join(", ")),
        };
        missing.push(format!(
            "programs that choose a socket may not be seen ({why}): whether packets of QUIC reach the right worker is not known"
        ));
    });
    let is_ours = |cookie| listener.sockets.iter().any(|one| one.cookie == cookie);
    let mut ours = choosers.ok()?.into_iter().filter(|one| is_ours(one.cookie));
    Some(ours.any(|one| one.program.is_some()))
}
