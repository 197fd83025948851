//! Resolves a target, which may also be the name of a steered group.

use wakeone_control::paths::Paths;
use wakeone_control::status;
use wakeone_model::listener::Protocol;
use wakeone_observe::{Found, Target, find};

/// The listeners of a target; if it is the name of a group, those of the group.
///
/// # Errors
/// There is none.
pub fn listeners(target: &Target, paths: &Paths) -> Result<Vec<Found>, wakeone_observe::Error> {
    let Some(places) = group(target, paths) else {
        return find(target);
    };
    let mut found = Vec::new();
    for place in places {
        found.extend(find(&place)?);
    }
    Ok(found)
}

/// Whether the probes of so many listeners are no load of their own. Those of UNIX sockets have none.
pub fn may_trace(found: &[Found]) -> bool {
    let traced = |one: &&Found| one.listener.protocol != Protocol::Unix;
    found.iter().filter(traced).count() <= 8
}

/// The addresses of the group with this name. Without the right to read the groups' state, no group is known.
fn group(target: &Target, paths: &Paths) -> Option<Vec<Target>> {
    let (protocol, Target::Name(name)) = target.parts() else {
        return None;
    };
    let groups = status::read(paths).ok()?.groups;
    let group = groups.into_iter().find(|group| group.name == *name)?;
    let places = group.listen.iter().filter_map(|at| {
        if let Ok(address) = at.parse() {
            return Some(Target::at(Protocol::Tcp, address));
        }
        at.parse().ok()
    });
    let meant = |place: &Target| {
        let of = place.parts().0;
        protocol.is_none_or(|protocol| of.is_none_or(|_| place.is_of(protocol)))
    };
    Some(places.filter(meant).collect())
}
