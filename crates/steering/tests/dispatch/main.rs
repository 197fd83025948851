//! The dispatch program in the kernel, with real connections. Needs root. Each test has its own network namespace,
//! cgroup and bpffs folder, and leaves nothing behind.

mod choice;
mod counts;
mod datagrams;
#[path = "../../../../tests/support/distance.rs"]
mod distance;
mod drift;
mod exits;
#[path = "../../../../tests/support/from.rs"]
mod from;
mod ground;
mod lookup;
#[path = "../../../../tests/support/patience.rs"]
mod patience;
mod quic;
mod rescue;
mod restarts;
mod source;
mod transaction;
