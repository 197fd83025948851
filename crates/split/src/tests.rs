//! The broker's decisions, asked as its library asks.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use wakeone::attach::AttachConfig;
use wakeone_control::policy::Affinity;
use wakeone_shim::protocol::How;

use super::broker::{Answer, QueueRequest};
use super::config::Options;
use super::splitter::{MOST_SAID, Splitter};

fn splitter() -> Splitter {
    let stuck_after = Duration::from_millis(5);
    let options = Options {
        command: vec!["server".into()],
        policy: None,
        affinity: None,
        stuck_after,
        listeners: AttachConfig {
            policy: None,
            affinity: Affinity::Flow,
            rescue: false,
            stuck_after,
            weights: Vec::new(),
        },
        runtime_dir: PathBuf::from("/nonexistent/wakeone-test"),
        check: false,
        metrics: None,
        metrics_tracing: false,
        grace: Duration::from_secs(30),
    };
    Splitter::new(&options, Some("root".into()))
}

#[test]
fn the_sentences_that_were_logged_do_not_fill_memory() {
    let mut splitter = splitter();
    for name in 0..3 * MOST_SAID {
        splitter.once(format!("worker {name}"));
        assert!(splitter.said.len() <= MOST_SAID);
    }
    let last = format!("worker {}", 3 * MOST_SAID - 1);
    assert!(splitter.said.contains(&last));
    splitter.end();
}

/// Anything may be sent under the token: a process that is not the library gets no queue beside a TCP listener.
#[test]
fn only_udp_sockets_are_split() {
    let mut splitter = splitter();
    let listener = OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").expect("bind"));
    let claim = QueueRequest {
        pid: std::process::id(),
        fd: listener.as_raw_fd(),
        how: How::Receive,
        socket: listener.as_fd(),
    };
    assert!(splitter.request(&claim).is_none());
    let (pid, fd) = (std::process::id(), listener.as_raw_fd());
    assert!(splitter.reader(pid, fd, &listener).is_none());
    assert!(splitter.readers.is_empty());
    splitter.end();
}
