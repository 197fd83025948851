//! Groups: servers whose workers we start ([`group`]), that we start as they are ([`started`]), that run already ([`attach`]), or that read datagrams ([`udp_group`]).

pub mod attach;
pub mod detach;
pub mod group;
pub mod metrics;
pub mod started;
pub mod steered;
pub mod udp_group;
