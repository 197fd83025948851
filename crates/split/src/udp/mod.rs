//! UDP sockets that several threads or processes receive from.

pub(crate) mod datagrams;
pub(crate) mod left;
pub(crate) mod readers;
