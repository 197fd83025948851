//! The account that workers run as.

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use serde::{Deserialize, Serialize};
use std::ffi::CString;

/// A user and groups, by number, and the environment that a login would set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Account {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The supplementary groups.
    pub groups: Vec<u32>,
    /// HOME, USER and LOGNAME of a named user.
    pub environment: Vec<(String, String)>,
}

/// Why there is no such account.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AccountError {
    /// No such user.
    #[error("there is no user `{0}`; `getent passwd` lists those that there are")]
    User(String),
    /// No such group.
    #[error("there is no group `{0}`; `getent group` lists those that there are")]
    Group(String),
    /// A user by number, unknown to the user database.
    #[error(
        "user {0} has no entry in the user database, which would tell its group; give one with --group"
    )]
    NoGroup(u32),
    /// Changing to it needs root.
    #[error(
        "only root can start workers as another user or group; start wakeone as root, or leave --user and --group away"
    )]
    NotRoot,
}

impl Account {
    /// Finds the account of `--user` and `--group`: names or numbers. A user alone brings its own groups.
    ///
    /// # Errors
    /// There is no such account, or we may not become it.
    pub fn find(user: Option<&str>, group: Option<&str>) -> Result<Option<Self>, AccountError> {
        if user.is_none() && group.is_none() {
            return Ok(None);
        }
        if !Uid::effective().is_root() {
            return Err(AccountError::NotRoot);
        }
        let user = user.map(find_user).transpose()?;
        let group = group.map(find_group).transpose()?;
        let account = match (user, group) {
            (Some((uid, Some(user))), group) => {
                let gid = group.unwrap_or(user.gid);
                Self {
                    uid,
                    gid: gid.as_raw(),
                    groups: groups_of(&user, gid),
                    environment: environment(&user),
                }
            }
            // The group of the same number may belong to anybody: 27 is `sudo` on many machines.
            (Some((uid, None)), None) => return Err(AccountError::NoGroup(uid)),
            (Some((uid, None)), Some(group)) => Self::bare(uid, group.as_raw()),
            (None, group) => Self::bare(
                Uid::current().as_raw(),
                group.unwrap_or(Gid::current()).as_raw(),
            ),
        };
        Ok(Some(account))
    }

    fn bare(uid: u32, gid: u32) -> Self {
        Self {
            uid,
            gid,
            groups: vec![gid],
            environment: Vec::new(),
        }
    }
}

/// Finds a user by name or number; a number needs no entry in the user database.
fn find_user(text: &str) -> Result<(u32, Option<User>), AccountError> {
    let unknown = || AccountError::User(text.to_owned());
    match text.parse::<u32>() {
        Ok(u32::MAX) => Err(unknown()),
        Ok(uid) => Ok((uid, User::from_uid(Uid::from_raw(uid)).ok().flatten())),
        Err(_) => match User::from_name(text) {
            Ok(Some(user)) => Ok((user.uid.as_raw(), Some(user))),
            _ => Err(unknown()),
        },
    }
}

fn find_group(text: &str) -> Result<Gid, AccountError> {
    let unknown = || AccountError::Group(text.to_owned());
    match text.parse::<u32>() {
        Ok(u32::MAX) => Err(unknown()),
        Ok(gid) => Ok(Gid::from_raw(gid)),
        Err(_) => Group::from_name(text)
            .ok()
            .flatten()
            .map(|group| group.gid)
            .ok_or_else(unknown),
    }
}

fn groups_of(user: &User, gid: Gid) -> Vec<u32> {
    let groups = CString::new(user.name.as_str())
        .ok()
        .and_then(|name| getgrouplist(&name, gid).ok());
    groups
        .unwrap_or_else(|| vec![gid])
        .into_iter()
        .map(Gid::as_raw)
        .collect()
}

fn environment(user: &User) -> Vec<(String, String)> {
    let home = user.dir.to_string_lossy().into_owned();
    [
        ("HOME", home),
        ("USER", user.name.clone()),
        ("LOGNAME", user.name.clone()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_asked_is_nothing_changed() {
        assert_eq!(Account::find(None, None), Ok(None));
    }

    #[test]
    fn names_and_numbers() {
        let root = find_user("root").expect("root");
        assert_eq!((root.0, root.1.expect("entry").name.as_str()), (0, "root"));
        assert_eq!(find_user("0").expect("0").0, 0);
        assert_eq!(
            find_user("4000000000").expect("a number needs no entry"),
            (4_000_000_000, None)
        );
        for unknown in ["no-such-user", "", "-1", "4294967295", "a\0b"] {
            assert_eq!(
                find_user(unknown),
                Err(AccountError::User(unknown.to_owned()))
            );
            assert_eq!(
                find_group(unknown),
                Err(AccountError::Group(unknown.to_owned()))
            );
        }
    }
}
