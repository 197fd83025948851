//! All code that talks to the kernel, and all unsafe code: BPF skeletons, sockets, pidfd, procfs,
//! cgroups.
//!
//! This crate makes no decisions: it queries the kernel, or changes something in it, and returns
//! the result.
#![allow(unsafe_code)]

pub mod abilities;
pub mod batch;
pub mod bpf;
pub mod bpffs;
pub mod capability;
pub mod cgroup;
pub mod clone_listener;
pub mod count_switch;
pub mod datagram;
pub mod diag;
pub mod exits;
pub mod folder;
pub mod fork;
pub mod inherit;
pub mod inherited;
pub mod load;
pub mod locks;
pub mod lookup;
pub mod netns;
pub mod netstat;
pub mod policy;
pub mod policy_group;
pub mod probe;
pub mod proc_stats;
pub mod process;
pub mod process_mutex;
pub mod procfs;
pub mod receive_queue;
pub mod recount;
mod remote_memory;
pub mod replace;
pub mod ring;
pub mod run_stats;
pub mod schedule;
pub mod shared_counter;
mod skeletons;
pub mod socket;
pub mod stat;
pub mod stop;
pub mod table;

/// The types of `bpf/contract.h`, generated from the compiled object's BTF.
pub mod contract {
    pub use crate::bpf::types::{wakeone_draw, wakeone_slot, wakeone_table, wakeone_tag};
}

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
