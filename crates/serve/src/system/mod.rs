//! What a server asks of the kernel that the standard library has no call for. All unsafe code of this crate is here.
#![allow(unsafe_code)]

pub mod fork;
pub mod process_mutex;
pub mod ring;
pub mod shared_counter;
pub mod stop;
