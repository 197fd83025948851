//! All code that talks to the kernel for steering and observing: [`bpf`] has the programs, [`socket`] has queries and
//! settings of sockets, and [`proc`](crate::proc) sees other processes. What only the reference server needs is in
//! `wakeone_serve::system`. There is no unsafe code elsewhere.
//!
//! This crate makes no decisions: it queries the kernel, or changes something in it, and returns
//! the result.
#![allow(unsafe_code)]

pub mod bpf;
pub mod capability;
pub mod cgroup;
pub mod folder;
pub mod inherit;
pub mod netns;
pub mod proc;
pub mod schedule;
pub mod socket;

/// The types of `bpf/contract.h`, generated from the compiled object's BTF.
pub mod contract {
    pub use crate::bpf::types::{
        wakeone_draw, wakeone_note, wakeone_slot, wakeone_table, wakeone_tag,
    };

    /// The numbers of `bpf/contract.h` and `bpf/observe.h`, without their prefix.
    pub mod number {
        include!(concat!(env!("OUT_DIR"), "/contract.rs"));
    }
}

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
