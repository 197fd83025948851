//! Which capabilities this process has, and letting go of those it needs no more.

use caps::CapSet;
pub use caps::Capability;
use rustix::thread::{
    CapabilitiesSecureBits, capabilities_secure_bits, set_capabilities_secure_bits,
};

/// Capabilities that dispatching needs, each with its purpose.
pub const NEEDED: [(Capability, &str); 3] = [
    (Capability::CAP_BPF, "loads the program"),
    (
        Capability::CAP_PERFMON,
        "lets it look up slots by a computed index, which the verifier otherwise takes for a leak",
    ),
    (Capability::CAP_NET_ADMIN, "counts connections"),
];

/// Whether a capability is effective now.
pub fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false)
}

/// The inode of the first user namespace (`PROC_USER_INIT_INO`, include/linux/proc_ns.h).
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFD;

/// Whether a capability is effective now, and over the whole machine. Another user namespace than the first gives its
/// root every capability, and none of them loads a program (`capable`, kernel/capability.c).
pub fn has_over_all(capability: Capability) -> bool {
    let namespace = rustix::fs::stat("/proc/self/ns/user");
    let is_first = namespace.map_or(true, |about| about.st_ino == FIRST_NAMESPACE);
    is_first && has(capability)
}

/// Capabilities that watching with probes needs; the last one for the tracing file system, where a kernel without
/// trampolines has to be watched by tracepoints of system calls.
pub const TRACING: [Capability; 3] = [
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_SYS_ADMIN,
];

/// Names of the needed capabilities that are missing.
pub fn missing() -> Vec<String> {
    missing_of(NEEDED.map(|(cap, _)| cap))
}

/// Names of those of these capabilities that are missing, see [`has_over_all`].
pub fn missing_of(wanted: impl IntoIterator<Item = Capability>) -> Vec<String> {
    let missing = wanted.into_iter().filter(|cap| !has_over_all(*cap));
    missing.map(|cap| cap.to_string()).collect()
}

/// Removes the privileges of user 0 as such for good, for this thread and those it starts. A program that they run
/// gets no capability for being run by root, and one that changes its user gets none back (`SECBIT_NOROOT`,
/// `SECBIT_NO_SETUID_FIXUP`, security/commoncap.c). Call it before [`keep_only`], once no program that needs
/// capabilities is run any more.
///
/// # Errors
/// `EPERM` without CAP_SETPCAP.
pub fn forbid_root() -> std::io::Result<()> {
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED;
    let set = capabilities_secure_bits()?;
    Ok(set_capabilities_secure_bits(set | bits)?)
}

/// Gives up every capability but these for good, for this thread and those it starts. The capabilities of `reserve`
/// stay within reach of [`with`], but have no effect meanwhile.
///
/// # Errors
/// The error of capset.
pub fn keep_only(
    keep: &[Capability],
    reserve: &[Capability],
) -> Result<(), caps::errors::CapsError> {
    let held = caps::read(None, CapSet::Permitted)?;
    let of_held = |wanted: &[Capability]| -> caps::CapsHashSet {
        wanted
            .iter()
            .copied()
            .filter(|cap| held.contains(cap))
            .collect()
    };
    let (keep, reserve) = (of_held(keep), of_held(reserve));
    caps::set(None, CapSet::Effective, &keep)?;
    caps::set(
        None,
        CapSet::Permitted,
        &keep.union(&reserve).copied().collect(),
    )
}

/// Runs something with the reserved capabilities in effect, where they are held.
pub fn with<T>(reserved: &[Capability], run: impl FnOnce() -> T) -> T {
    let raised: Vec<_> = reserved
        .iter()
        .filter(|cap| !has(**cap) && caps::raise(None, CapSet::Effective, **cap).is_ok())
        .collect();
    let result = run();
    for cap in raised {
        let _ = caps::drop(None, CapSet::Effective, *cap);
    }
    result
}

/// Runs something without these capabilities in effect: the kernel then allows what it would allow a process that lacks
/// them.
pub fn without<T>(these: &[Capability], run: impl FnOnce() -> T) -> T {
    let lowered: Vec<_> = these
        .iter()
        .filter(|cap| has(**cap) && caps::drop(None, CapSet::Effective, **cap).is_ok())
        .collect();
    let result = run();
    for cap in lowered {
        let _ = caps::raise(None, CapSet::Effective, *cap);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The capabilities of a program that this thread runs.
    fn effective_of_a_program() -> u64 {
        let status = std::process::Command::new("cat")
            .arg("/proc/self/status")
            .output()
            .expect("cat");
        let status = String::from_utf8(status.stdout).expect("text");
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        u64::from_str_radix(line.expect("a line").trim(), 16).expect("bits")
    }

    #[test]
    fn root_gets_nothing_back_by_running_a_program() {
        if !rustix::process::geteuid().is_root() || !has(Capability::CAP_SETPCAP) {
            return eprintln!("skipped: only root has something to lose");
        }
        // Capabilities and these bits belong to a thread.
        let thread = std::thread::spawn(|| {
            keep_only(&[Capability::CAP_SETPCAP], &[]).expect("given up");
            assert_ne!(effective_of_a_program(), 0, "root by its number");
            forbid_root().expect("forbidden");
            keep_only(&[], &[]).expect("given up");
            assert_eq!(effective_of_a_program(), 0);
            assert!(forbid_root().is_err(), "and for good");
        });
        thread.join().expect("thread");
    }
}
