//! All that talks to the kernel, and all unsafe code: BPF skeletons, sockets, pidfd, sock_diag, procfs, cgroups.
#![allow(unsafe_code)]

pub mod fork;
pub mod inherit;
pub mod inherited;
pub mod run_stats;
pub mod stop;
