//! The thread for what takes longer than a look: it does the chores of all groups of a process.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wakeone_kernel::netns::{self, Kept};
use wakeone_kernel::schedule::thread_time;

type Work = Box<dyn FnMut(&mut Leisure)>;
type Prepare = Box<dyn FnOnce() -> Option<Work> + Send>;

/// When something that takes long may be done next: all groups share the time for that.
#[derive(Debug)]
pub(super) struct Leisure {
    until: Instant,
    taken: bool,
}

impl Leisure {
    /// Does what takes long, if it is time for that. It then takes one part in `share` of a CPU at most, with all that others do so.
    pub fn take<T>(&mut self, share: u32, act: impl FnOnce() -> T) -> Option<T> {
        if Instant::now() < self.until {
            return None;
        }
        let began = thread_time();
        let done = act();
        self.until = Instant::now() + (thread_time() - began) * share;
        self.taken = true;
        Some(done)
    }
}

/// A thread that does things again and again. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Chores {
    /// `None`: it is to end.
    orders: Option<Sender<Order>>,
    /// The inode of its network namespace.
    network: Option<u64>,
    numbers: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

enum Order {
    Begin {
        number: u64,
        network: Option<Kept>,
        pause: Duration,
        prepare: Prepare,
    },
    /// The answer comes when the work was dropped.
    End(u64, SyncSender<()>),
}

/// Something that is done again and again. Dropping this ends it, after the time that is under way.
#[derive(Debug)]
pub(super) struct Chore {
    chores: Arc<Chores>,
    number: u64,
}

impl Chores {
    /// # Errors
    /// Out of threads.
    pub fn start() -> io::Result<Self> {
        let (orders, ordered) = channel();
        let thread = std::thread::Builder::new().name("recount".into());
        let thread = thread.spawn(move || run(&ordered))?;
        Ok(Self {
            orders: Some(orders),
            network: netns::own().ok(),
            numbers: AtomicU64::new(0),
            thread: Some(thread),
        })
    }

    /// Has the thread prepare some work, and do it after each pause, in the network namespace that the caller is in now. It is
    /// not done if there is none.
    ///
    /// # Errors
    /// That namespace cannot be kept, or the thread has ended.
    pub fn begin<W: FnMut(&mut Leisure) + 'static>(
        self: &Arc<Self>,
        pause: Duration,
        prepare: impl FnOnce() -> Option<W> + Send + 'static,
    ) -> io::Result<Chore> {
        let network = match netns::own().ok() == self.network {
            true => None,
            false => Some(Kept::own()?),
        };
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let order = Order::Begin {
            number,
            network,
            pause,
            prepare: Box::new(move || prepare().map(|work| Box::new(work) as Work)),
        };
        self.order(order)?;
        Ok(Chore {
            chores: Arc::clone(self),
            number,
        })
    }

    fn order(&self, order: Order) -> io::Result<()> {
        let sent = self.orders.as_ref().map(|orders| orders.send(order));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(io::Error::other("its thread has ended")),
        }
    }
}

impl Drop for Chores {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Chore {
    fn drop(&mut self) {
        let (ended, has_ended) = sync_channel(1);
        if self.chores.order(Order::End(self.number, ended)).is_ok() {
            let _ = has_ended.recv();
        }
    }
}

/// A chore, as the thread has it.
struct Running {
    number: u64,
    network: Option<Kept>,
    pause: Duration,
    due: Instant,
    /// When it last did something that takes long.
    took: Instant,
    work: Work,
}

fn run(orders: &Receiver<Order>) {
    let started = Instant::now();
    let mut all: Vec<Running> = Vec::new();
    let mut leisure = Leisure {
        until: started,
        taken: false,
    };
    loop {
        let next = all.iter().map(|one| one.due).min();
        let order = match next {
            Some(due) => orders.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match order {
            Ok(Order::Begin {
                number,
                network,
                pause,
                prepare,
            }) => {
                if let Some(work) = visit(network.as_ref(), prepare).flatten() {
                    all.push(Running {
                        number,
                        network,
                        pause,
                        due: Instant::now(),
                        took: started,
                        work,
                    });
                }
            }
            Ok(Order::End(number, ended)) => {
                all.retain(|one| one.number != number);
                let _ = ended.try_send(());
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        for one in all.iter_mut().filter(|one| one.due <= Instant::now()) {
            visit(one.network.as_ref(), || (one.work)(&mut leisure));
            if std::mem::take(&mut leisure.taken) {
                one.took = Instant::now();
            }
            one.due = together(started, Instant::now(), one.pause);
        }
        // The group whose work took long comes after all others.
        all.sort_by_key(|one| one.took);
    }
}

/// When to do something again that has this pause: with all others that have it, so that the thread wakes up once for them.
fn together(started: Instant, now: Instant, pause: Duration) -> Instant {
    let since = now.duration_since(started).as_nanos();
    let times = since / pause.as_nanos().max(1) + 1;
    started + pause * u32::try_from(times).unwrap_or(u32::MAX)
}

/// Does something in a network namespace; `None` if it cannot be entered.
fn visit<T>(network: Option<&Kept>, act: impl FnOnce() -> T) -> Option<T> {
    match network {
        None => Some(act()),
        Some(there) => there
            .visit(act)
            .inspect_err(|error| {
                tracing::debug!("connections of another network namespace: {error}");
            })
            .ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    const OFTEN: Duration = Duration::from_millis(1);

    fn until(what: impl Fn() -> bool) {
        let begun = Instant::now();
        while !what() {
            assert!(begun.elapsed() < Duration::from_secs(20));
            std::thread::sleep(OFTEN);
        }
    }

    #[test]
    fn work_is_done_again_and_again_until_it_is_dropped() {
        let chores = Arc::new(Chores::start().expect("a thread"));
        let (done, other) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let work = |done: &Arc<AtomicUsize>| {
            let done = Arc::clone(done);
            move || {
                Some(move |_: &mut Leisure| {
                    done.fetch_add(1, Ordering::Relaxed);
                })
            }
        };
        let first = chores.begin(OFTEN, work(&done)).expect("begins");
        let second = chores.begin(OFTEN, work(&other)).expect("begins");
        until(|| done.load(Ordering::Relaxed) > 2 && other.load(Ordering::Relaxed) > 2);
        drop(first);
        // It is gone with all that it had.
        assert_eq!(Arc::strong_count(&done), 1);
        let before = other.load(Ordering::Relaxed);
        until(|| other.load(Ordering::Relaxed) > before);
        drop((second, chores));
        assert_eq!(Arc::strong_count(&other), 1);
    }

    #[test]
    fn what_is_not_there_is_not_done() {
        let chores = Arc::new(Chores::start().expect("a thread"));
        let nothing = || None::<fn(&mut Leisure)>;
        drop(chores.begin(OFTEN, nothing).expect("begins"));
    }

    #[test]
    fn all_share_the_time_for_what_takes_long() {
        let mut leisure = Leisure {
            until: Instant::now(),
            taken: false,
        };
        let long = || {
            let began = thread_time();
            while thread_time() - began < OFTEN {}
        };
        assert!(leisure.take(1_000_000, long).is_some() && leisure.taken);
        assert!(leisure.take(1_000_000, long).is_none());
    }

    #[test]
    fn those_with_one_pause_are_done_together() {
        let started = Instant::now();
        let at = |ms| started + Duration::from_millis(ms);
        let second = Duration::from_secs(1);
        assert_eq!(together(started, at(0), second), at(1_000));
        assert_eq!(together(started, at(999), second), at(1_000));
        assert_eq!(together(started, at(1_001), second), at(2_000));
    }
}
