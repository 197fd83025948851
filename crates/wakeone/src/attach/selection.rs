//! The listeners that a target means, and whether their users are trusted.

use std::collections::BTreeMap;

use wakeone_model::listener::Protocol;
use wakeone_observe::{Found, Target};

use super::error::Error;

/// A target may mean this many listeners at most. Each has a thread here, and anybody can listen.
pub const MOST_GROUPS: usize = 32;

/// The users whose servers a target may mean, beside root and ourselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owners {
    /// Any.
    Any,
    /// These.
    These(Vec<u32>),
}

impl Owners {
    fn has(&self, user: u32) -> bool {
        match self {
            Self::Any => true,
            Self::These(users) => users.contains(&user),
        }
    }
}

impl Default for Owners {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

/// Returns the id of a user given by name or number.
///
/// # Errors
/// There is none of that name.
pub fn user(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match nix::unistd::User::from_name(text) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        _ => Err(format!("there is no user `{text}`")),
    }
}

/// Checks that all sockets of a listener belong to users that are trusted: root, ourselves, and those that were named.
///
/// # Errors
/// [`Error::Owner`], with the first user that is not trusted.
fn admit(found: &Found, owners: &Owners) -> Result<(), (u32, Error)> {
    let own = rustix::process::geteuid().as_raw();
    let trusted = |uid: u32| uid == 0 || uid == own || owners.has(uid);
    let mut sockets = found.listener.sockets.iter();
    match sockets.find(|socket| !trusted(socket.uid)) {
        None => Ok(()),
        Some(socket) => {
            let known = nix::unistd::User::from_uid(socket.uid.into())
                .ok()
                .flatten();
            let error = Error::Owner {
                address: found.listener.address.into(),
                user: known.map_or_else(|| socket.uid.to_string(), |user| user.name),
            };
            Err((socket.uid, error))
        }
    }
}

/// Returns those of the found listeners that a target means. It means UDP if it names UDP, or if nothing else was
/// found. The datagrams beside a web server's listener are QUIC's, and QUIC knows better where each belongs.
pub fn meant(found: Vec<Found>, target: &Target) -> Vec<Found> {
    let udp = |f: &Found| f.listener.protocol == Protocol::Udp;
    let named = target.parts().0.is_some();
    let only = found.iter().all(udp);
    let fits = |f: &Found| named || only || !udp(f);
    found.into_iter().filter(fits).collect()
}

/// Splits a target's listeners into those to steer and the reasons against others. The reasons are that users were not
/// named, or that there are too many. Strangers' listeners are left out unexamined and do not count; each of these
/// users is reported once.
pub fn admitted(found: Vec<Found>, owners: &Owners) -> (Vec<Found>, Vec<Error>) {
    let (mut all, mut refused) = (Vec::new(), BTreeMap::new());
    for one in found {
        match admit(&one, owners) {
            Ok(()) => all.push(one),
            Err((user, error)) => drop(refused.entry(user).or_insert(error)),
        }
    }
    let mut refused: Vec<_> = refused.into_values().collect();
    let others = all.split_off(all.len().min(MOST_GROUPS));
    if let Some(first) = others.first() {
        refused.push(Error::Many {
            address: first.listener.address.into(),
            others: others.len() - 1,
            most: MOST_GROUPS,
        });
    }
    (all, refused)
}
