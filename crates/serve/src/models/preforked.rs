//! Preforked: N processes made at the start, each in a blocking `accept` on the same listener,
//! each serving one connection at a time. The kernel wakes one of those that wait, the one that
//! has waited longest, so the connections go round.
//!
//! Source: "Linux Applications Performance, part III: Preforked Servers", the `preforked` column.
//! With a listener for each process (`--reuseport`) the kernel's hash chooses instead, and a
//! connection waits for its process even while others are idle.

use wakeone_kernel::stop;

use crate::blocking::converse;
use crate::listener::{Accepted, Listener};
use crate::worker::Worker;

/// Serves until a stop is requested; the connection in hand is finished.
pub fn serve(worker: &Worker) {
    match worker.listeners.as_slice() {
        [listener] => serve_one(worker, listener),
        several => serve_several(worker, several),
    }
}

/// One listener: simply wait in accept.
fn serve_one(worker: &Worker, listener: &Listener) {
    // Ours blocks; one that was handed over may not.
    let nonblocking = listener.is_nonblocking();
    while !stop::requested() {
        match listener.accept(false, &worker.faults) {
            Accepted::Connection(connection) => converse(connection, &worker.app),
            Accepted::Nothing if nonblocking => {
                Listener::wait_any(std::slice::from_ref(listener));
            }
            Accepted::Nothing => {}
            Accepted::Later(wait) => std::thread::sleep(wait),
        }
    }
}

/// Several listeners, which do not block: wait for all, accept from those that have something.
fn serve_several(worker: &Worker, listeners: &[Listener]) {
    while !stop::requested() {
        for listener in Listener::wait_any(listeners) {
            match listener.accept(false, &worker.faults) {
                Accepted::Connection(connection) => converse(connection, &worker.app),
                Accepted::Nothing => {}
                Accepted::Later(wait) => std::thread::sleep(wait),
            }
            if stop::requested() {
                break;
            }
        }
    }
}
