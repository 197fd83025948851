//! Clients that are far away: packets to [`FAR`] come back to [`NEAR`] after a delay, as from there. No kernel module
//! is needed for it, and it works in any network namespace.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wakeone_kernel::netns;

/// Where servers listen.
pub const NEAR: &str = "10.9.0.1";
/// Where clients connect to.
pub const FAR: &str = "10.9.0.2";

/// The longest time between two checks whether it is over.
const LOOK: Duration = Duration::from_millis(20);

/// A network with a delay, in this thread's network namespace. It ends when this is dropped.
pub struct Distance {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Distance {
    /// Packets take this long, each way.
    pub fn of(delay: Duration) -> Self {
        let device = netns::tun("far").expect("a TUN device");
        let address = format!("{NEAR}/24");
        for arguments in [
            &["address", "add", &address, "dev", "far"][..],
            &["link", "set", "far", "txqueuelen", "10000", "up"],
        ] {
            let done = Command::new("ip").args(arguments).status();
            assert!(done.expect("ip").success(), "{arguments:?}");
        }
        let over = Arc::new(AtomicBool::new(false));
        let thread = {
            let over = Arc::clone(&over);
            std::thread::spawn(move || mirror(device, delay, &over))
        };
        Self {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Distance {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends each packet back with source and destination exchanged, which leaves its checksums right.
fn mirror(mut device: File, delay: Duration, over: &AtomicBool) {
    let mut under_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut buffer = vec![0; 65_536];
    while !over.load(Ordering::Relaxed) {
        let now = Instant::now();
        while under_way.front().is_some_and(|(due, _)| *due <= now) {
            if let Some((_, packet)) = under_way.pop_front() {
                let _ = device.write(&packet);
            }
        }
        let pause = under_way
            .front()
            .map_or(LOOK, |(due, _)| due.saturating_duration_since(now));
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: pause.min(LOOK).as_nanos() as i64,
        };
        let readable = poll(&mut [PollFd::new(&device, PollFlags::IN)], Some(&pause));
        if readable.is_ok_and(|count| count > 0)
            && let Ok(length) = device.read(&mut buffer)
            && length >= 20
            && buffer[0] >> 4 == 4
        {
            let mut packet = buffer[..length].to_vec();
            let (head, tail) = packet.split_at_mut(16);
            head[12..].swap_with_slice(&mut tail[..4]);
            under_way.push_back((Instant::now() + delay, packet));
        }
    }
}
