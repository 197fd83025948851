//! Preforked: N processes made at the start, each in a blocking `accept` on the same listener, each
//! serving one connection at a time. The kernel wakes the waiting process that has waited longest,
//! so the connections go round.
//!
//! Source: "Linux Applications Performance, part III: Preforked Servers", the `preforked` column.
//! With `--accept-lock` only the holder of the lock is in accept, as in servers for kernels that
//! woke everyone (Apache's accept mutex). The lab measures the cost of the lock today. With a
//! listener for each process (`--reuseport`) the kernel's hash chooses instead, and a connection
//! waits for its process even while others are idle.

use crate::system::stop;

use crate::accept_lock::Lock;
use crate::blocking::converse;
use crate::store::Lazy;
use crate::worker::Worker;

/// Serves until a stop is requested; the connection in hand is finished.
pub fn serve(worker: &Worker, lock: &Lock) {
    let mut store = Lazy::default();
    while !stop::requested() {
        let Some(turn) = lock.acquire(&worker.faults) else {
            continue; // interrupted: there may be a stop
        };
        let accepted = worker.accept();
        drop(turn);
        if let Some(connection) = accepted {
            converse(connection, &worker.app, &mut store);
        }
    }
}
