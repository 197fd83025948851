//! The capabilities that each part of Wakeone keeps, and those that it raises for one action only.
//!
//! A thread limits itself once. Its first limit holds: `run --split` attaches to listeners later, and keeps what it has.

use std::cell::Cell;

use rustix::process::{Resource, Rlimit, setrlimit};
use wakeone_kernel::capability::{self, Capability};

/// Further capabilities that removing a group needs: for a cgroup below a folder without write permission, for a mount,
/// and before that for filters that keep new connections from its listeners.
pub const FOR_THE_END: [Capability; 3] = [
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_NET_ADMIN,
];

/// The capabilities for loading and attaching programs. They stay permitted, without effect, in `attach` for a server
/// that comes back, and in `run --split`, since servers may listen at any time.
pub const FOR_LOADING: [Capability; 5] = [
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_DAC_OVERRIDE,
];

/// Keeps the capabilities for starting, watching and ending workers, and `also`. Drops the rest: nothing is loaded from
/// here on.
pub fn keep_for_supervising(also: impl IntoIterator<Item = Capability>) {
    let mut keep = vec![
        Capability::CAP_SETUID,
        Capability::CAP_SETGID,
        Capability::CAP_SETPCAP,
        Capability::CAP_KILL,
        Capability::CAP_SYS_NICE,
        Capability::CAP_SYS_PTRACE,
        Capability::CAP_DAC_READ_SEARCH,
    ];
    keep.extend(also);
    keep_only(&keep, &FOR_THE_END);
}

/// Keeps the capabilities for looking at other users' servers and borrowing their listeners; drops the rest. Root without
/// CAP_SYS_PTRACE, as in a container, keeps all: it may look only into processes that have no capability more than itself.
pub fn keep_for_attaching() {
    let keep = [
        Capability::CAP_SYS_PTRACE,
        Capability::CAP_DAC_READ_SEARCH,
        Capability::CAP_SYS_NICE,
    ];
    // Nothing is executed from here on.
    forbid_root();
    lift_memory_limit();
    if capability::has(Capability::CAP_SYS_PTRACE) || !rustix::process::geteuid().is_root() {
        keep_only(&keep, &FOR_LOADING);
    }
}

/// Before Linux 5.11 maps and programs count as locked memory, of which all processes of a user together have 64 KiB
/// (`bpf_map_charge_init` in kernel/bpf/syscall.c). libbpf lifts that when it first loads something, which may come after
/// CAP_SYS_RESOURCE is gone.
fn lift_memory_limit() {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if let Err(error) = setrlimit(Resource::Memlock, unlimited) {
        tracing::debug!("the limit of locked memory stays: {error}");
    }
}

/// Keeps the capabilities for making sockets like another's, attaching to listeners, watching the server's processes and passing on signals.
/// Those for loading programs stay permitted.
pub fn keep_for_splitting() {
    let keep = [
        Capability::CAP_NET_BIND_SERVICE,
        Capability::CAP_NET_RAW,
        Capability::CAP_NET_ADMIN,
        Capability::CAP_CHOWN,
        Capability::CAP_FOWNER,
        Capability::CAP_KILL,
        Capability::CAP_SYS_PTRACE,
        Capability::CAP_DAC_READ_SEARCH,
        Capability::CAP_SYS_NICE,
    ];
    // The server was started before, so this does not apply to it.
    forbid_root();
    keep_only(&keep, &FOR_LOADING);
}

thread_local! {
    /// Whether this thread has limited itself.
    static LIMITED: Cell<bool> = const { Cell::new(false) };
}

fn forbid_root() {
    if let Err(error) = capability::forbid_root() {
        tracing::debug!("what root executes cannot be kept from getting capabilities: {error}");
    }
}

fn keep_only(keep: &[Capability], permitted: &[Capability]) {
    if LIMITED.replace(true) {
        return;
    }
    if let Err(error) = capability::keep_only(keep, permitted) {
        tracing::debug!("keeping all capabilities: {error}");
    }
}
