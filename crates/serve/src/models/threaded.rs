//! A thread for each connection, made when it is accepted. The `threaded` column of "Linux
//! Applications Performance".

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::system::stop;
use rustix::io::Errno;

use crate::app::App;
use crate::blocking::converse;
use crate::store::Pool;
use crate::threads::{STACK_BYTES, interrupt};
use crate::worker::Worker;

/// How often a thread is tried again while the system has no room for one.
const SPAWN_TRIES: u32 = 100;
const SPAWN_WAIT: Duration = Duration::from_millis(10);

type Threads = HashMap<u64, JoinHandle<()>>;

/// Serves until a stop is requested; all connections accepted are finished.
pub fn serve(worker: &Worker) {
    let shared = Arc::new((worker.app.clone(), Pool::default()));
    let mut threads = Threads::new();
    let (ended, ends) = channel();
    let mut number = 0;
    while !stop::requested() {
        if let Some(connection) = worker.accept() {
            number += 1;
            match spawn(number, connection, &shared, &ended, worker) {
                Some(thread) => {
                    threads.insert(number, thread);
                }
                None => worker.faults.count(Errno::AGAIN), // the client sees the close
            }
        }
        while let Ok(number) = ends.try_recv() {
            join(&mut threads, number);
        }
    }
    finish(threads, &ends);
}

fn spawn(
    number: u64,
    connection: OwnedFd,
    shared: &Arc<(App, Pool)>,
    ended: &Sender<u64>,
    worker: &Worker,
) -> Option<JoinHandle<()>> {
    // The connection must outlive a failed try.
    let connection = Arc::new(std::sync::Mutex::new(Some(connection)));
    for _ in 0..SPAWN_TRIES {
        let (shared, ended) = (Arc::clone(shared), ended.clone());
        let connection = Arc::clone(&connection);
        let spawned = std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let connection = connection.lock().ok().and_then(|mut slot| slot.take());
                if let Some(connection) = connection {
                    let (app, stores) = &*shared;
                    stores.lend(|store| converse(connection, app, store));
                }
                let _ = ended.send(number);
            });
        match spawned {
            Ok(thread) => return Some(thread),
            Err(error) => {
                if let Some(code) = error.raw_os_error() {
                    worker.faults.count(Errno::from_raw_os_error(code));
                }
                std::thread::sleep(SPAWN_WAIT);
            }
        }
    }
    None
}

fn join(threads: &mut Threads, number: u64) {
    if let Some(thread) = threads.remove(&number) {
        let _ = thread.join();
    }
}

/// Waits for the threads. A thread that waits for an idle client is interrupted, so that it sees
/// the stop. Threads that have ended are removed first: with thousands of them, interrupting all
/// again for each that is joined would take seconds.
fn finish(mut threads: Threads, ends: &Receiver<u64>) {
    loop {
        while let Ok(number) = ends.try_recv() {
            join(&mut threads, number);
        }
        if threads.is_empty() {
            return;
        }
        threads.values().for_each(interrupt);
        if let Ok(number) = ends.recv_timeout(Duration::from_millis(stop::REPEAT_MS.into())) {
            join(&mut threads, number);
        }
    }
}
