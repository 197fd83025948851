//! One process that serves one connection after the other: meanwhile all others wait. The
//! `iterative` column of "Linux Applications Performance", and the reference for all others.

use crate::system::stop;

use crate::blocking::converse;
use crate::store::Lazy;
use crate::worker::Worker;

/// Serves until a stop is requested; the connection in hand is finished.
pub fn serve(worker: &Worker) {
    let mut store = Lazy::default();
    while !stop::requested() {
        if let Some(connection) = worker.accept() {
            converse(connection, &worker.app, &mut store);
        }
    }
}
