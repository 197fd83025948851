//! The programs in the kernel (`bpf/`) and the maps of a group: loaded (see [`crate::load`]), and found again by their pins.
//!
//! A group is a folder on bpffs. Loading fills a temporary folder and renames it as its last step, so a folder with
//! the final name is always complete. After that, and after a restart, everything is reached through the pins alone.
#![allow(unsafe_code)]

pub mod abilities;
pub mod bpffs;
pub mod bursts;
pub mod chooser;
pub mod count_switch;
pub mod datagram;
mod dispatch;
pub mod error;
#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
pub mod group;
mod join;
pub mod load;
pub mod locks;
pub mod lookup;
pub mod notes;
pub mod notices;
mod object;
pub mod pinned;
pub mod policy;
pub mod policy_group;
pub mod probe;
pub mod quic;
#[cfg(test)]
mod quic_head;
pub mod recount;
pub mod replace;
pub mod run_stats;
mod skeletons;
pub mod table;

pub use error::Error;
pub use load::{Feature, LoadPlan, Loaded, Missing, TEMPORARY, load};
pub use pinned::{BUILD, Pinned, RunStatistics, empty_arrays, remove_pins};
pub use replace::replace;
pub use skeletons::dispatch::types;

/// The types of `bpf/contract.h`, generated from the compiled object's BTF.
pub mod contract {
    pub use crate::types::{wakeone_draw, wakeone_note, wakeone_slot, wakeone_table, wakeone_tag};

    /// The numbers of `bpf/contract.h`, `bpf/policy.h` and `bpf/observe.h`, without their prefix.
    pub mod number {
        include!(concat!(env!("OUT_DIR"), "/contract.rs"));
    }
}
