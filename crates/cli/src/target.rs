//! Resolves a target, which may also be the name of a steered group.

use std::net::SocketAddr;

use wakeone_control::paths::Paths;
use wakeone_control::status;
use wakeone_model::listener::Protocol;
use wakeone_observe::{Error, Found, Target, elsewhere, find};
use wakeone_supervisor::address::{Address, BadAddress};

/// How a target is written, in every command.
pub const FORMS: &str = "8080 or :8080, localhost:8080, ADDRESS:PORT, unix:/PATH, unix:@NAME, a process id, or the name of a \
    process, unit or group; udp:// before it means its UDP sockets";

/// The same, where none means every listener.
pub fn or_all() -> String {
    format!("{FORMS} [default: all TCP and UDP listeners, and the UNIX sockets that workers share]")
}

/// The same, where none means every group.
pub fn only_this() -> String {
    format!("{FORMS} [default: all groups]")
}

/// An address to serve metrics on, written as those of `run -l`.
///
/// # Errors
/// One sentence for a person.
pub fn to_serve(text: &str) -> Result<SocketAddr, String> {
    let address: Address = text
        .parse()
        .map_err(|error: BadAddress| error.to_string())?;
    if address.is_udp() {
        return Err(format!(
            "`{text}` is an address of UDP, and metrics are served by TCP"
        ));
    }
    let endpoint = address.resolve().map_err(|error| error.to_string())?;
    Ok(endpoint.address)
}

/// The listeners of a target; if it is the name of a group, those of the group.
///
/// # Errors
/// There is none. If there is one in a container, the error tells a process of that.
pub fn listeners(target: &Target, paths: &Paths) -> Result<Vec<Found>, Error> {
    let Some(places) = group(target, paths) else {
        return find(target).map_err(|error| match (error, elsewhere(target)) {
            (Error::NotFound(_), Some(pid)) => Error::NotFound(format!(
                "nothing listens on {target} in this network namespace, but process {pid} does in its own: give pid:{pid}"
            )),
            (error, _) => error,
        });
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
