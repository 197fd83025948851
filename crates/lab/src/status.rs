//! Reads the status of a steered group from `wakeone status --json`, as a user would.

use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::process;
use crate::user::User;

/// The longest time until closing connections no longer count as open.
const REST: Duration = Duration::from_secs(3);

/// A steered group.
#[derive(Debug, Clone)]
pub struct Steered {
    /// Where it listens.
    pub address: SocketAddr,
    /// Where Wakeone's state is, where it is not in the usual place.
    pub runtime: Option<PathBuf>,
    /// Whose it is. Wakeone does not trust the state of others.
    pub user: User,
}

impl Steered {
    /// The group on this address.
    pub fn on(address: SocketAddr) -> Self {
        Self {
            address,
            runtime: None,
            user: User::Own,
        }
    }

    /// Sum of the active counts of all its slots once it has come to rest. It is 0 as soon as the sum is 0, and otherwise
    /// the sum after three seconds.
    ///
    /// # Errors
    /// When the status cannot be read or shows no such group.
    pub fn active_at_rest(&self) -> Result<u64, Error> {
        let deadline = Instant::now() + REST;
        loop {
            let active = active(&self.read()?, self.address)?;
            if active == 0 || Instant::now() >= deadline {
                return Ok(active);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// How many queues of it were moved so far, and how many connections with them.
    ///
    /// # Errors
    /// When the status cannot be read or shows no such group.
    pub fn moves(&self) -> Result<(u64, u64), Error> {
        let status = self.read()?;
        let group = group(&status, self.address)?;
        let of = |field| sum(group, field).unwrap_or(0);
        Ok((of("rescues"), of("rescued")))
    }

    /// How many workers it has; 0 where there is no group yet.
    ///
    /// # Errors
    /// When the status cannot be read.
    pub fn workers(&self) -> Result<usize, Error> {
        let status = self.read()?;
        let slots = |group: &Value| Some(group.get("slots")?.as_array()?.clone());
        let slots = group(&status, self.address).ok().and_then(slots);
        let has_worker = |slot: &&Value| slot.get("pid").is_some_and(|pid| !pid.is_null());
        Ok(slots.iter().flatten().filter(has_worker).count())
    }

    fn read(&self) -> Result<Value, Error> {
        read_by(self.user, self.runtime.as_deref())
    }
}

/// The whole status as JSON.
///
/// # Errors
/// When `wakeone status` fails.
pub fn read() -> Result<Value, Error> {
    read_by(User::Own, None)
}

fn read_by(user: User, runtime: Option<&Path>) -> Result<Value, Error> {
    let failed =
        |why: String| Error::Server(format!("reading `wakeone status --json` failed: {why}"));
    let mut command = Command::new(process::wakeone()?);
    command.args(["status", "--json"]).stdin(Stdio::null());
    user.runs(&mut command);
    if let Some(runtime) = runtime {
        command.env("WAKEONE_RUNTIME_DIR", runtime);
    }
    let output = command.output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| failed(e.to_string()))
}

/// The groups of a status: its `groups`, or the value itself where it is a list.
fn groups(status: &Value) -> &[Value] {
    status
        .get("groups")
        .unwrap_or(status)
        .as_array()
        .map_or(&[], Vec::as_slice)
}

/// The group on an address: the one that names it anywhere outside its slots.
fn group(status: &Value, address: SocketAddr) -> Result<&Value, Error> {
    let name = address.to_string();
    let names_it = |group: &&Value| {
        group.as_object().is_some_and(|fields| {
            fields
                .iter()
                .any(|(key, value)| key != "slots" && mentions(value, &name))
        })
    };
    groups(status).iter().find(names_it).ok_or_else(|| {
        Error::Server(format!(
            "`wakeone status --json` shows no group on {address}, which should be steered"
        ))
    })
}

fn mentions(value: &Value, text: &str) -> bool {
    match value {
        Value::String(s) => s == text,
        Value::Array(all) => all.iter().any(|v| mentions(v, text)),
        Value::Object(all) => all.values().any(|v| mentions(v, text)),
        _ => false,
    }
}

/// Sum of the active counts of a group's slots. A count below 0 is as wrong as one above, so it is their sizes that add up.
fn active(status: &Value, address: SocketAddr) -> Result<u64, Error> {
    let group = group(status, address)?;
    if group.get("steered") == Some(&Value::Bool(false)) {
        return Err(Error::Server(format!(
            "the group on {address} is not steered by Wakeone's program, which is what is to be measured; `wakeone run` says on stderr what it lacks"
        )));
    }
    sum(group, "active").ok_or_else(|| {
        Error::Server(format!(
            "`wakeone status --json` has no active counts for {address}"
        ))
    })
}

/// A count of a group's slots, summed up. None where it has no slots, or they have no such count.
fn sum(group: &Value, field: &str) -> Option<u64> {
    let slots = group.get("slots").and_then(Value::as_array)?;
    let count = |slot: &Value| Some(slot.get(field)?.as_i64()?.unsigned_abs());
    let counts = slots.iter().map(count).collect::<Option<Vec<u64>>>()?;
    (!counts.is_empty()).then(|| counts.iter().sum())
}

/// How often the BPF programs of the group with `part` in their name have run, and how long all of that took in ns. None
/// where the kernel counted nothing. (The kernel cuts names after 15 characters.)
pub fn program(status: &Value, address: SocketAddr, part: &str) -> Option<(u64, u64)> {
    let of = |value: &Value| value.get("programs").and_then(Value::as_array).cloned();
    let programs = group(status, address)
        .ok()
        .and_then(of)
        .or_else(|| of(status))?;
    let named = |p: &&Value| {
        p.get("name")
            .and_then(Value::as_str)
            .is_some_and(|n| n.contains(part))
    };
    let number = |p: &Value, field: &str| p.get(field).and_then(Value::as_u64);
    let counts = programs
        .iter()
        .filter(named)
        .map(|p| Some((number(p, "run_cnt")?, number(p, "run_time_ns")?)));
    counts
        .collect::<Option<Vec<_>>>()?
        .into_iter()
        .reduce(|a, b| (a.0 + b.0, a.1 + b.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status() -> Value {
        json!({"groups": [
            {"listen": "127.0.0.1:1", "slots": [{"active": 7}]},
            {"listen": ["127.0.0.1:2"], "slots": [{"slot": 0, "active": 1}, {"slot": 1, "active": 2}],
             "programs": [{"name": "wakeone_dispatc", "run_cnt": 10, "run_time_ns": 2000},
                          {"name": "wakeone_dispat2", "run_cnt": 0, "run_time_ns": 0}]},
        ]})
    }

    #[test]
    fn only_the_asked_for_group_counts() {
        assert_eq!(
            active(&status(), "127.0.0.1:2".parse().unwrap()).unwrap(),
            3
        );
        assert_eq!(
            active(&status(), "127.0.0.1:1".parse().unwrap()).unwrap(),
            7
        );
    }

    #[test]
    fn a_missing_group_or_count_is_an_error_and_not_a_zero() {
        assert!(active(&status(), "127.0.0.1:3".parse().unwrap()).is_err());
        let group = |group: Value| json!({"groups": [group]});
        let below =
            group(json!({"listen": "127.0.0.1:1", "slots": [{"active": -1}, {"active": 1}]}));
        assert_eq!(active(&below, "127.0.0.1:1".parse().unwrap()).unwrap(), 2);
        let not_ours =
            group(json!({"listen": "127.0.0.1:1", "steered": false, "slots": [{"active": 0}]}));
        assert!(active(&not_ours, "127.0.0.1:1".parse().unwrap()).is_err());
        let none = group(json!({"listen": "127.0.0.1:1", "slots": []}));
        assert!(active(&none, "127.0.0.1:1".parse().unwrap()).is_err());
        assert!(active(&json!({}), "127.0.0.1:1".parse().unwrap()).is_err());
    }

    #[test]
    fn programs() {
        assert_eq!(
            program(&status(), "127.0.0.1:2".parse().unwrap(), "dispat"),
            Some((10, 2000))
        );
        assert_eq!(
            program(&status(), "127.0.0.1:2".parse().unwrap(), "sockops"),
            None
        );
    }
}
