//! The code between fork and the worker's command: it gives up the supervisor's resources, and becomes the command.

use super::missing::not_started;
use super::spawn::{Order, QUIC_ID, gate_fd, report_fd};
use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use wakeone_control::account::Account;
use wakeone_kernel::inherit;

/// Carries out an order; returns only if that failed. The supervisor has then been sent the reason.
pub fn exec(order: &Order) {
    // Opened by its name, so that no number of a descriptor need be reused. It closes itself on exec.
    let report = File::options()
        .write(true)
        .open(format!("/proc/self/fd/{}", report_fd(order)));
    let Err(reason) = become_worker(order);
    if let Ok(mut report) = report {
        let _ = report.write_all(reason.as_bytes());
    }
}

/// Carries out the order, step by step; the steps that need privileges come before those that drop them.
fn become_worker(order: &Order) -> Result<std::convert::Infallible, String> {
    wait_at_gate(order)?;
    let keep = kept_capabilities(&order.keep_caps)?;
    if let Some(cgroup) = &order.cgroup {
        std::fs::write(cgroup.join("cgroup.procs"), "0")
            .map_err(|error| format!("cannot enter the cgroup {}: {error}", cgroup.display()))?;
    }
    inherit::default_signals().map_err(|error| format!("cannot reset signals: {error}"))?;
    inherit::cloexec_from(report_fd(order)).map_err(|error| {
        format!("cannot keep our descriptors from the worker (close_range): {error}")
    })?;
    if let Some(soft) = order.descriptors {
        let limit = Rlimit {
            current: Some(soft),
            ..getrlimit(Resource::Nofile)
        };
        setrlimit(Resource::Nofile, limit)
            .map_err(|error| format!("cannot set the limit of descriptors: {error}"))?;
    }
    let uid = order
        .account
        .as_ref()
        .map_or(Uid::effective(), |account| Uid::from_raw(account.uid));
    drop_bounding(&keep, uid)?;
    if let Some(account) = &order.account {
        become_account(account, &keep)?;
    }
    keep_ambient(&keep)?;
    let (program, arguments) = order
        .command
        .split_first()
        .ok_or("there is no command to run")?;
    let error = Command::new(program)
        .args(arguments)
        .envs(environment(order))
        .exec();
    Err(not_started(program, &error))
}

/// Waits until the supervisor has written down that there is this worker. If it died first, there must be none.
fn wait_at_gate(order: &Order) -> Result<(), String> {
    File::open(format!("/proc/self/fd/{}", gate_fd(order)))
        .and_then(|mut gate| gate.read_exact(&mut [0]))
        .map_err(|error| format!("cannot wait for the supervisor: {error}"))
}

fn environment(order: &Order) -> Vec<(&str, String)> {
    let mut variables = vec![("WAKEONE_SLOT", order.slot.to_string())];
    variables.extend(order.quic_id.map(|id| (QUIC_ID, id.to_string())));
    if order.protocol {
        variables.push(("LISTEN_PID", std::process::id().to_string()));
        variables.push(("LISTEN_FDS", order.names.len().to_string()));
        variables.push(("LISTEN_FDNAMES", order.names.join(":")));
    }
    if let Some(account) = &order.account {
        let theirs = account.environment.iter();
        variables.extend(theirs.map(|(name, value)| (name.as_str(), value.clone())));
    }
    variables
}

/// The capabilities of `--keep-cap`, in any usual spelling: `net_raw`, `CAP_NET_RAW`.
pub fn kept_capabilities(names: &[String]) -> Result<CapsHashSet, String> {
    let parse = |name: &String| {
        let upper = name.to_ascii_uppercase();
        let canonical = if upper.starts_with("CAP_") {
            upper
        } else {
            format!("CAP_{upper}")
        };
        canonical.parse::<Capability>().map_err(|_| {
            format!("there is no capability `{name}`; `man 7 capabilities` lists them")
        })
    };
    names.iter().map(parse).collect()
}

/// Takes all capabilities that the worker shall not have from the bounding set, so that exec gives them to nobody,
/// not even root.
///
/// Without CAP_SETPCAP that fails. Then a worker that is not root still gets no capability at exec, but root would.
fn drop_bounding(keep: &CapsHashSet, uid: Uid) -> Result<(), String> {
    let bounding = caps::read(None, CapSet::Bounding)
        .map_err(|error| format!("cannot read the capabilities: {error}"))?;
    for cap in bounding.difference(keep) {
        if let Err(error) = caps::drop(None, CapSet::Bounding, *cap)
            && uid.is_root()
        {
            return Err(format!(
                "cannot take {cap} from the worker ({error}); allow us CAP_SETPCAP, or run workers as another user with --user"
            ));
        }
    }
    Ok(())
}

fn become_account(account: &Account, keep: &CapsHashSet) -> Result<(), String> {
    let failed = |what: &str| {
        let what = format!("cannot {what} for the worker");
        move |error: nix::Error| format!("{what}: {error}; that needs CAP_SETUID and CAP_SETGID")
    };
    if !keep.is_empty() {
        caps::securebits::set_keepcaps(true)
            .map_err(|error| format!("cannot keep capabilities: {error}"))?;
    }
    let groups: Vec<Gid> = account.groups.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups).map_err(failed("set the supplementary groups"))?;
    setgid(Gid::from_raw(account.gid)).map_err(failed("set the group"))?;
    setuid(Uid::from_raw(account.uid)).map_err(failed("set the user"))
}

/// Empties the inheritable and ambient sets, or fills them with what the worker keeps.
fn keep_ambient(keep: &CapsHashSet) -> Result<(), String> {
    let failed = |error: caps::errors::CapsError| {
        let own = caps::read(None, CapSet::Permitted).unwrap_or_default();
        let lacking = keep.difference(&own);
        let mut names: Vec<String> = lacking.map(ToString::to_string).collect();
        if names.is_empty() {
            names = keep.iter().map(ToString::to_string).collect();
        }
        names.sort();
        if names.is_empty() {
            format!("cannot drop capabilities: {error}")
        } else {
            format!(
                "cannot keep {}: {error}; allow us what the workers are to keep",
                names.join(", ")
            )
        }
    };
    caps::clear(None, CapSet::Ambient).map_err(failed)?;
    caps::set(None, CapSet::Inheritable, keep).map_err(failed)?;
    for cap in keep {
        caps::raise(None, CapSet::Ambient, *cap).map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_in_any_spelling() {
        let names = ["net_raw", "CAP_NET_RAW", "Net_Bind_Service"].map(str::to_owned);
        let kept = kept_capabilities(&names).expect("known");
        assert_eq!(
            kept,
            [Capability::CAP_NET_RAW, Capability::CAP_NET_BIND_SERVICE]
                .into_iter()
                .collect()
        );
        assert!(
            kept_capabilities(&["fly".to_owned()])
                .expect_err("unknown")
                .contains("`fly`")
        );
    }
}
