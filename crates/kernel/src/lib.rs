//! Code that talks to the kernel for steering and observing: [`socket`] has queries and settings of sockets, and
//! [`proc`](crate::proc) sees other processes. `wakeone-bpf` has the programs, and what only the reference server needs is in
//! `wakeone_serve::system`. There is no unsafe code elsewhere.
//!
//! This crate makes no decisions: it queries the kernel, or changes something in it, and returns
//! the result.
#![allow(unsafe_code)]

pub mod capability;
pub mod cgroup;
pub mod clock;
pub mod folder;
pub mod inherit;
pub mod netns;
pub mod proc;
pub mod schedule;
pub mod socket;

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
