//! The skeletons that libbpf-cargo generates from the programs in `bpf/` (see `build.rs`), a module
//! for each.

/// Takes in the skeleton of one object.
macro_rules! skeleton {
    ($name:ident, $file:literal) => {
        #[allow(
            missing_docs,
            rust_2018_idioms,
            dead_code,
            unused_imports,
            clippy::all,
            clippy::undocumented_unsafe_blocks
        )]
        pub(crate) mod $name {
            include!(concat!(env!("OUT_DIR"), "/", $file));
        }
    };
}

skeleton!(dispatch, "dispatch.skel.rs");
skeleton!(datagram, "datagram.skel.rs");
skeleton!(quic, "quic.skel.rs");
skeleton!(recount, "recount.skel.rs");
skeleton!(chooser, "chooser.skel.rs");
skeleton!(observe, "observe.skel.rs");
skeleton!(locks, "locks.skel.rs");
skeleton!(bursts, "bursts.skel.rs");
skeleton!(lookup, "lookup.skel.rs");
skeleton!(join, "join.skel.rs");
