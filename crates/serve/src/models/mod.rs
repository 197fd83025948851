//! The architectures, one file each.

pub mod epoll_prefork;
pub mod preforked;
