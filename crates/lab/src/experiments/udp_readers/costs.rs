//! The costs of a datagram on this machine.

use std::time::{Duration, Instant};
use wakeone_sim::Costs;

use super::WAITING_BYTES;
use super::readers::{Readers, Setup};
use super::sender::{Flows, PORTION, give_up, read_portion};
use crate::error::Error;
use crate::experiment::{Context, Sample};

/// Portions of datagrams that are sent, and read then.
const PORTIONS: u64 = 10;
/// Datagrams that find the reader asleep.
const ALONE: u64 = 5_000;
/// A reader that has counted a datagram is asleep after this time.
const ASLEEP_AFTER: Duration = Duration::from_micros(30);

/// Datagrams that wait before they are read.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    /// How long it takes to send one, in s.
    send_s: f64,
    /// How many are read in a second.
    read_per_s: f64,
}

/// Datagrams that each find the only reader asleep.
#[derive(Debug, Clone, Copy)]
struct Alone {
    /// How long it takes to send one and to wake the reader, in s.
    send_s: f64,
    /// From then until it is read, in s.
    until_read_s: f64,
    /// The reader's CPU time for one, in s.
    reader_s: f64,
}

/// Measures them, on a machine of so many CPUs.
///
/// # Errors
/// When the readers fail.
pub(super) fn measure(cpus: usize, context: &mut Context<'_>) -> Result<Costs, Error> {
    let one = waiting(1, context)?;
    let all = waiting(cpus, context)?;
    let alone = alone(context)?;
    Ok(solve(one, (cpus, all), alone))
}

fn waiting(threads: usize, context: &mut Context<'_>) -> Result<Waiting, Error> {
    let readers = Readers::start(&Setup {
        sockets: 1,
        threads,
        buffer_bytes: Some(WAITING_BYTES),
        portions: true,
        ..Setup::default()
    })?;
    readers.until_ready()?;
    let mut flow = Flows::open(readers.address(), 1, 1)?;
    let (mut sending, mut reading_ns) = (Duration::ZERO, 0);
    for portion in 1..=PORTIONS {
        let start = Instant::now();
        for _ in 0..PORTION {
            flow.send(1)?;
        }
        sending += start.elapsed();
        reading_ns += read_portion(portion, readers.board(), Instant::now(), context)?;
    }
    let read: u64 = readers.end().iter().sum();
    Ok(Waiting {
        send_s: sending.as_secs_f64() / (PORTIONS * PORTION) as f64,
        read_per_s: read as f64 / (reading_ns as f64 * 1e-9),
    })
}

fn alone(context: &mut Context<'_>) -> Result<Alone, Error> {
    let readers = Readers::start(&Setup {
        sockets: 1,
        threads: 1,
        ..Setup::default()
    })?;
    readers.until_ready()?;
    let mut flow = Flows::open(readers.address(), 1, 1)?;
    let board = readers.board();
    board.go();
    let (begin, before) = (Instant::now(), readers.usage());
    let (mut sending, mut reading) = (Duration::ZERO, Duration::ZERO);
    for nth in 1..=ALONE {
        let read = Instant::now();
        while read.elapsed() < ASLEEP_AFTER {}
        let start = Instant::now();
        flow.send(1)?;
        let sent = Instant::now();
        while board.all() < nth {
            give_up(begin, context)?;
        }
        sending += sent - start;
        reading += sent.elapsed();
    }
    let used = readers.usage().since(&before);
    let each = |total: Duration| total.as_secs_f64() / ALONE as f64;
    Ok(Alone {
        send_s: each(sending),
        until_read_s: each(reading),
        reader_s: used.cpu_ns as f64 * 1e-9 / ALONE as f64,
    })
}

fn solve(one: Waiting, (cpus, all): (usize, Waiting), alone: Alone) -> Costs {
    let read_s = 1.0 / one.read_per_s;
    // Threads that never wait for the lock read so many times as much.
    let locked_s = match all.read_per_s < cpus as f64 * one.read_per_s {
        true => 1.0 / all.read_per_s,
        false => read_s / cpus as f64,
    };
    let locked_s = locked_s.min(read_s).min(one.send_s);
    let sleep_s = (alone.reader_s - read_s).max(0.0);
    Costs {
        send_s: one.send_s,
        read_s,
        locked_s,
        wake_s: (alone.send_s - one.send_s).max(0.0),
        sleep_s,
        rouse_s: (alone.until_read_s - sleep_s - read_s).max(0.0),
    }
}

/// The metrics of the costs.
pub(super) const NAMES: [&str; 6] = [
    "send_us",
    "read_us",
    "locked_us",
    "wake_us",
    "sleep_us",
    "rouse_us",
];

/// The costs as numbers of a result, in µs.
pub(super) fn sample(costs: Costs) -> Sample {
    let mut sample = Sample::default();
    let all = [
        costs.send_s,
        costs.read_s,
        costs.locked_s,
        costs.wake_s,
        costs.sleep_s,
        costs.rouse_s,
    ];
    for (name, cost) in NAMES.into_iter().zip(all) {
        sample.put(name, "us", cost * 1e6);
    }
    sample
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_found_from_what_they_make() {
        let of = |read_per_s| Waiting {
            send_s: 4e-6,
            read_per_s,
        };
        let alone = Alone {
            send_s: 7e-6,
            until_read_s: 20e-6,
            reader_s: 6e-6,
        };
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
        let found = solve(of(1e6), (4, of(2e6)), alone);
        near(found.send_s, 4e-6);
        near(found.read_s, 1e-6);
        near(found.locked_s, 0.5e-6);
        near(found.wake_s, 3e-6);
        near(found.sleep_s, 5e-6);
        near(found.rouse_s, 14e-6);
        // Readers at full speed wait for no lock. Where more threads read less, the lock is all there is.
        near(solve(of(1e6), (4, of(4.1e6)), alone).locked_s, 0.25e-6);
        near(solve(of(1e6), (4, of(0.5e6)), alone).locked_s, 1e-6);
        // A reader that is faster than the sender's return has not been late.
        let quick = Alone {
            until_read_s: 0.0,
            ..alone
        };
        assert_eq!(solve(of(1e6), (4, of(2e6)), quick).rouse_s, 0.0);
    }
}
