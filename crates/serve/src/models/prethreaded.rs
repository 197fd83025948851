//! N threads made at the start. The holder of the mutex waits in accept and the others wait for the
//! mutex: the `prethreaded` column of "Linux Applications Performance". With `--accept-lock none`
//! all of them are in accept, and the kernel wakes one.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::system::stop;

use crate::app::App;
use crate::blocking::converse;
use crate::store::Lazy;
use crate::threads::{STACK_BYTES, interrupt};
use crate::worker::Worker;

/// Serves with `count` threads until a stop is requested; the connections in hand are finished.
///
/// # Errors
/// When the threads cannot be made.
pub fn serve(worker: Worker, count: usize, locked: bool) -> std::io::Result<()> {
    let worker = Arc::new(worker);
    let mutex = locked.then(|| Arc::new(Mutex::new(())));
    let mut threads = Vec::with_capacity(count);
    for index in 0..count {
        let (worker, mutex) = (Arc::clone(&worker), mutex.clone());
        let thread = std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(move || work(&worker, &worker.app_for(index), mutex.as_deref()));
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                stop::request();
                finish(&threads);
                return Err(error);
            }
        }
    }
    while !stop::requested() {
        // A signal ends the sleep, or a thread that gets it sets the flag as well.
        std::thread::park_timeout(Duration::from_millis(500));
    }
    finish(&threads);
    Ok(())
}

fn work(worker: &Worker, app: &App, mutex: Option<&Mutex<()>>) {
    let mut store = Lazy::default();
    while !stop::requested() {
        let turn = mutex.map(|mutex| mutex.lock().unwrap_or_else(PoisonError::into_inner));
        // The thread before may have released the mutex because it has seen the stop.
        let accepted = if stop::requested() {
            None
        } else {
            worker.accept()
        };
        drop(turn);
        if let Some(connection) = accepted {
            converse(connection, app, &mut store);
        }
    }
}

/// Interrupts the threads until all have seen the stop and ended.
fn finish(threads: &[JoinHandle<()>]) {
    while threads.iter().any(|thread| !thread.is_finished()) {
        threads
            .iter()
            .filter(|thread| !thread.is_finished())
            .for_each(interrupt);
        std::thread::sleep(Duration::from_millis(5));
    }
}
