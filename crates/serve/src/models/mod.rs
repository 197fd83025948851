//! The architectures, one file each, each as its author would write it.

pub mod dispatched;
pub mod epoll;
pub mod epoll_prefork;
pub mod fd_passing;
pub mod forking;
pub mod io_uring;
pub mod iterative;
pub mod poll;
pub mod preforked;
pub mod prethreaded;
pub mod reuseport;
pub mod threaded;
