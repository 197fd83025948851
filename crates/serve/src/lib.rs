//! The reference server, a file an architecture.
