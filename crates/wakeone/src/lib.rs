//! Groups: servers that are started ([`group`]), that run already ([`attach`]), or that read datagrams ([`udp_group`]).

pub mod attach;
pub mod detach;
pub mod group;
pub mod metrics;
pub mod steered;
pub mod udp_group;
