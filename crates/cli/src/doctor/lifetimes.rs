//! How long connections stay accepted: the service times of workers that serve a connection at a time.
//!
//! No probe is needed. sock_diag gives a connection an inode from accept() to close() (net/ipv4/inet_diag.c), so
//! many looks tell how long each one has it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Listener;

/// The time between two looks, where looking is cheap.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A look walks a table of all connections of the machine. That may take one part in this many of the time.
const LOOKING_SHARE: u32 = 50;
/// A connection seen so often has a service time of its own. One seen less often is known only as part of a mean.
const TOLD_FROM: u32 = 3;

/// The accepted connections of a listener, as many looks saw them.
#[derive(Debug, Default)]
pub struct Lifetimes {
    /// By cookie: how many looks saw a connection, and the time for which these looks stand, s.
    seen: HashMap<u64, (u32, f64)>,
    /// Of each look, how many connections were accepted and open.
    open: Vec<usize>,
}

/// The part of the looks that may see too many. The kernel does not dump all connections at one moment: one may end
/// and the next begin meanwhile.
const TORN: f64 = 0.02;

impl Lifetimes {
    /// One look. It stands for the time since the one before.
    fn add(&mut self, accepted: &[u64], since_s: f64) {
        for cookie in accepted {
            let (looks, seconds) = self.seen.entry(*cookie).or_default();
            *looks += 1;
            *seconds += since_s;
        }
        self.open.push(accepted.len());
    }

    /// The most connections that are open at once, without a few looks that saw more.
    pub fn most_open(&self) -> usize {
        let mut open = self.open.clone();
        open.sort_unstable();
        let torn = (open.len() as f64 * TORN) as usize;
        open.iter().rev().nth(torn).copied().unwrap_or(0)
    }

    /// Service times of so many connections: weights, and times in s. Each long one is itself. The short ones share one
    /// mean: the sum over all looks is right for them too (Little's law), although most were never seen.
    pub fn service(&self, connections: u64) -> Vec<(f64, f64)> {
        let (long, short): (Vec<_>, Vec<_>) = self
            .seen
            .values()
            .partition(|(looks, _)| *looks >= TOLD_FROM);
        let mut parts: Vec<(f64, f64)> = long.iter().map(|(_, time)| (1.0, *time)).collect();
        let others = connections.saturating_sub(parts.len() as u64) as f64;
        let sum: f64 = short.iter().map(|(_, time)| time).sum();
        if others > 0.0 && sum > 0.0 {
            parts.push((others, sum / others));
        }
        // The same seed gives the same result only with the same order.
        parts.sort_by(|a, b| a.1.total_cmp(&b.1));
        parts
    }
}

/// Looks at the accepted connections of each listener until `stop`. A listener that cannot be asked for has no looks.
pub fn watch(listeners: &[&Listener], stop: &AtomicBool) -> Vec<Lifetimes> {
    let mut all: Vec<Lifetimes> = listeners.iter().map(|_| Lifetimes::default()).collect();
    let mut last = Instant::now();
    let mut pause = LOOK_EVERY;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(pause);
        let began = Instant::now();
        let since_s = (began - last).as_secs_f64();
        last = began;
        for (one, listener) in all.iter_mut().zip(listeners) {
            let Ok(open) = diag::sockets_at(listener.protocol, Which::Open, listener.address)
            else {
                continue;
            };
            let accepted = open.iter().filter(|entry| entry.socket.inode > 0);
            let cookies: Vec<u64> = accepted.map(|entry| entry.socket.cookie).collect();
            one.add(&cookies, since_s);
        }
        pause = LOOK_EVERY.max(began.elapsed() * LOOKING_SHARE);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_ones_are_themselves_and_short_ones_share_a_mean() {
        let mut lifetimes = Lifetimes::default();
        for look in 0..10 {
            // Connection 1 is there all the time; of 40 short ones each look sees another.
            lifetimes.add(&[1, 100 + look], 0.01);
        }
        let service = lifetimes.service(41);
        assert_eq!(service.len(), 2);
        assert!((service[0].0 - 40.0).abs() < 1e-9 && (service[0].1 - 0.0025).abs() < 1e-9);
        assert!((service[1].0 - 1.0).abs() < 1e-9 && (service[1].1 - 0.1).abs() < 1e-9);
        assert_eq!(lifetimes.most_open(), 2);
    }

    #[test]
    fn one_look_of_many_may_see_too_many() {
        let mut lifetimes = Lifetimes::default();
        assert_eq!(lifetimes.most_open(), 0);
        lifetimes.add(&[1, 2, 3, 4, 5], 0.01);
        for _ in 0..48 {
            lifetimes.add(&[1, 2, 3, 4], 0.01);
        }
        assert_eq!(lifetimes.most_open(), 5, "one of 49 looks");
        lifetimes.add(&[], 0.01);
        assert_eq!(lifetimes.most_open(), 4, "one of 50");
    }
}
