//! All that talks to the kernel, and all unsafe code: BPF skeletons, sockets, pidfd, sock_diag, procfs, cgroups.

pub mod inherit;
