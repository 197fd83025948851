//! A wait queue in user space with the kernel's interface, which chooses itself which waiters it wakes.
//!
//! It follows sections 3.1 to 3.3 of Steve Molloy and Chuck Lever, *Accept() scalability on Linux*, USENIX 2000. Its
//! policies are their two patches (`task exclusive`, `wake one`) and the kernel's behaviour before (`wake all`). The
//! fourth policy is the hybrid (`always wake`) that they thought the soundest and that had no implementation.
//!
//! Every waiter sleeps on a futex word of its own, so that the queue and not the order of a shared futex chooses.
//!
//! ```
//! use wakeone_waitqueue::{Acceptor, Policy, Waiter};
//!
//! let acceptor = Acceptor::new(Policy::AlwaysWake, 10);
//! std::thread::scope(|scope| {
//!     let worker = scope.spawn(|| acceptor.accept(&mut Waiter::new()));
//!     acceptor.connect("hello").unwrap();
//!     assert_eq!(worker.join().unwrap(), Some("hello"));
//! });
//! ```

mod acceptor;
mod queue;
mod spin;

pub use acceptor::{Acceptor, Arrivals, Refused, TimedOut};
pub use queue::{Kind, Policy, Slept, WaitQueue, Waiter, Waiting};
