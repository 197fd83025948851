//! Which capabilities this process has, and letting go of those it needs no more.

use caps::{CapSet, Capability};

/// Capabilities that dispatching needs, each with what it is for.
pub const NEEDED: [(Capability, &str); 2] = [
    (Capability::CAP_BPF, "loads the program"),
    (Capability::CAP_NET_ADMIN, "counts connections"),
];

/// Whether a capability is effective now.
pub fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false)
}

/// Names of the needed capabilities that are missing.
pub fn missing() -> Vec<String> {
    NEEDED
        .iter()
        .filter(|(cap, _)| !has(*cap))
        .map(|(cap, _)| cap.to_string())
        .collect()
}

/// Gives up every capability but these, for this thread and those it starts, for good.
///
/// # Errors
/// What capset says.
pub fn keep_only(keep: &[Capability]) -> Result<(), caps::errors::CapsError> {
    let held = caps::read(None, CapSet::Permitted)?;
    let keep: caps::CapsHashSet = keep
        .iter()
        .copied()
        .filter(|cap| held.contains(cap))
        .collect();
    caps::set(None, CapSet::Effective, &keep)?;
    caps::set(None, CapSet::Permitted, &keep)
}
