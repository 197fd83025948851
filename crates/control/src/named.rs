//! Finds the groups that a user means: by a group's name, or by any text that other commands take for a server.

use std::io;

use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;
use wakeone_observe::{Found, Target, find_anywhere};

use crate::paths::Paths;
use crate::status::{self, Group, Status};

/// Why no group is meant.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no group of this name, nor where the text points.
    #[error("there is no group `{what}`; {known}")]
    Unknown {
        /// The argument.
        what: String,
        /// The groups that exist.
        known: String,
    },
    /// The groups cannot be read.
    #[error("cannot read {}; groups that root started only root may see", .folder.display())]
    Unreadable {
        /// The folder with the groups.
        folder: std::path::PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Reads all groups.
///
/// # Errors
/// [`Error::Unreadable`].
pub fn all(paths: &Paths) -> Result<Status, Error> {
    status::read(paths).map_err(|source| Error::Unreadable {
        folder: paths.runtime.clone(),
        source,
    })
}

/// Returns the groups that a text means, in whichever network namespace. It is a group's name, or `:PORT`, `ADDRESS:PORT` or
/// `unix:NAME` where it listens. It may also be the id of a process or of the supervisor, or the name of a process or unit. A
/// container is meant by its id, a pod by its id or name.
///
/// # Errors
/// There is no such group, or the groups cannot be read.
pub fn groups(paths: &Paths, what: &str) -> Result<Vec<Group>, Error> {
    let all = all(paths)?.groups;
    let names: Vec<String> = all.iter().map(|group| group.name.clone()).collect();
    let meant = meant(all, what, &|target| {
        // The groups' own records may not name the process, so look for it.
        let found = find_anywhere(target).unwrap_or_default();
        let place = |one: Found| {
            let namespace = one.network.map(|network| network.namespace);
            (one.listener.protocol, one.listener.address, namespace)
        };
        found.into_iter().map(place).collect()
    });
    if meant.is_empty() {
        return Err(Error::Unknown {
            what: what.to_owned(),
            known: known(&names),
        });
    }
    Ok(meant)
}

/// Returns the names of the existing groups, for an error.
pub fn known(names: &[String]) -> String {
    if names.is_empty() {
        "there is none at all".to_owned()
    } else {
        format!("there are {}", names.join(", "))
    }
}

/// Addresses, each with the network namespace if that is not ours.
type Places = Vec<(Protocol, Address, Option<u64>)>;

fn meant(all: Vec<Group>, what: &str, listening: &dyn Fn(&Target) -> Places) -> Vec<Group> {
    if all.iter().any(|group| group.name == what) {
        return all.into_iter().filter(|group| group.name == what).collect();
    }
    let Ok(target) = what.parse::<Target>() else {
        return Vec::new();
    };
    let readings = target.readings();
    let is_one = |reading: &&Target| all.iter().any(|group| is_meant(reading, group));
    let Some(target) = readings.iter().find(is_one).or(readings.last()) else {
        return Vec::new();
    };
    let fits = |group: &Group| is_meant(target, group);
    let (found, others): (Vec<Group>, Vec<Group>) = all.into_iter().partition(fits);
    // A file has many paths, and a server may have bound another one than the user knows.
    let searched = matches!(
        target.parts().1,
        Target::Pid(_) | Target::Name(_) | Target::Address(Address::Unix(_))
    );
    if !found.is_empty() || !searched || others.is_empty() {
        return found;
    }
    let there = listening(target);
    let here = |group: &Group| {
        places(group).any(|(p, at)| {
            let wanted = (p == Protocol::Udp, at, group.namespace());
            there
                .iter()
                .any(|one| (one.0 == Protocol::Udp, one.1, one.2) == wanted)
        })
    };
    others.into_iter().filter(here).collect()
}

/// Whether a target means a group by its addresses or its processes.
fn is_meant(target: &Target, group: &Group) -> bool {
    let listens = |at: &dyn Fn(Address) -> bool| {
        places(group).any(|(protocol, address)| target.is_of(protocol) && at(address))
    };
    match target.parts().1 {
        Target::Pid(pid) => {
            group.supervisor_pid == Some(*pid)
                || group.slots.iter().any(|slot| slot.pid == Some(*pid))
        }
        Target::Name(name) => {
            let network = group.network.as_ref();
            network.is_some_and(|network| network.is_named(name))
        }
        Target::All => false,
        place => listens(&|address| place.may_be_at(address)),
    }
}

/// Returns the addresses that a group listens on.
fn places(group: &Group) -> impl Iterator<Item = (Protocol, Address)> {
    group.listen.iter().filter_map(|at| {
        let (udp, address) = match at.strip_prefix("udp://") {
            Some(address) => (true, address),
            None => (false, at.as_str()),
        };
        let address: Address = address.parse().ok()?;
        let protocol = match address {
            Address::Unix(_) => Protocol::Unix,
            Address::Inet(_) if udp => Protocol::Udp,
            Address::Inet(_) => Protocol::Tcp,
        };
        Some((protocol, address))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state;
    use crate::state::Identity;
    use wakeone_model::network::Network;

    /// Returns a group without a program, whose worker is this process.
    fn group(name: &str, listen: &[&str]) -> Group {
        let own = Identity::of(std::process::id()).expect("own process");
        let mut group = status::group(name.into(), None, None);
        group.listen = listen.iter().map(|at| (*at).to_owned()).collect();
        group.supervisor_pid = Some(own.pid);
        assert!(state::is_name(name));
        group
    }

    fn names(what: &str) -> Vec<String> {
        let all = vec![
            group("web", &["0.0.0.0:80", "[::1]:443"]),
            group("dns", &["udp://127.0.0.1:53"]),
            group("at-127-0-0-1-8090", &["127.0.0.1:8090"]),
            group("app", &["unix:/run/app.sock"]),
            group("own", &["0.0.0.0:7"]),
            group("pod", &["0.0.0.0:7"]),
            group("pot", &["0.0.0.0:7"]),
        ];
        let mut all = all;
        all[1].supervisor_pid = None;
        all[2].supervisor_pid = Some(4_000_000);
        for (group, namespace) in all[3..].iter_mut().zip([None, None, Some(8), Some(9)]) {
            group.supervisor_pid = None;
            group.network = namespace.map(Network::new);
        }
        all[6].network.as_mut().expect("network").pod_name = Some("default/web-1".into());
        let listening = |target: &Target| match target.parts().1 {
            Target::Name(name) if name == "unbound" => {
                vec![(
                    Protocol::Udp,
                    "127.0.0.1:53".parse().expect("address"),
                    None,
                )]
            }
            Target::Address(address) if address.to_string() == "unix:/var/run/app.sock" => {
                vec![(
                    Protocol::Unix,
                    "unix:/run/app.sock".parse().expect("address"),
                    None,
                )]
            }
            Target::Pid(77) => vec![(
                Protocol::Tcp,
                "127.0.0.1:8090".parse().expect("address"),
                None,
            )],
            Target::Pid(78) => vec![(
                Protocol::Tcp,
                "0.0.0.0:7".parse().expect("address"),
                Some(8),
            )],
            _ => Vec::new(),
        };
        let meant = meant(all, what, &listening);
        meant.into_iter().map(|group| group.name).collect()
    }

    #[test]
    fn a_group_is_meant_by_its_name_its_address_or_a_process() {
        for (what, group) in [
            ("web", "web"),
            ("at-127-0-0-1-8090", "at-127-0-0-1-8090"),
            (":80", "web"),
            ("80", "web"),
            ("localhost:80", "web"),
            ("[::1]:443", "web"),
            // A listener of all addresses.
            ("127.0.0.1:80", "web"),
            ("udp://:53", "dns"),
            ("udp://53", "dns"),
            ("udp://localhost:53", "dns"),
            (":53", "dns"),
            ("127.0.0.1:8090", "at-127-0-0-1-8090"),
            ("unix:/run/app.sock", "app"),
            ("unix:/var/run/app.sock", "app"),
            ("4000000", "at-127-0-0-1-8090"),
            // By a process that listens.
            ("unbound", "dns"),
            ("77", "at-127-0-0-1-8090"),
            // In another network namespace.
            ("78", "pod"),
            ("web-1", "pot"),
        ] {
            assert_eq!(names(what), [group], "{what}");
        }
        assert_eq!(names(&std::process::id().to_string()), ["web"]);
        assert_eq!(names(":7"), ["own", "pod", "pot"]);
        for none in [
            "tcp://:53",
            "tcp://53",
            ":81",
            "localhost:81",
            "127.0.0.2:8090",
            "[::1]:80",
            "nginx",
            "unix:@/run/app.sock",
            "unix:/run/another.sock",
            "79",
            "pid:80",
            "/",
            "",
        ] {
            assert!(names(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn names_of_containers_survive_foreign_bytes() {
        let id = "3f2a51c09b7e4d1d8c7b6a5f4e3d2c1b0a9f8e7d6c5b4a39281706f5e4d3c2b1";
        let pod = "0f5c1d2e-3a4b-4c5d-8e6f-7a8b9c0d1e2f";
        let seeds = [
            format!("0::/system.slice/docker-{id}.scope\n"),
            format!("0::/kubepods/burstable/pod{pod}/{id}\n"),
            format!("default_web_{pod}"),
        ];
        let seeds = seeds.map(String::into_bytes);
        crate::foreign::survives("cgroups", &seeds, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let mut network = Network::of_cgroups(9, &text);
            network.pod.get_or_insert_with(|| pod.to_owned());
            network.see_folder(&text);
            assert!(network.is_sound(), "{network:?}");
            assert!(!network.to_string().contains(char::is_control));
        });
    }

    #[test]
    fn what_is_not_there_is_told_with_what_is() {
        let folder = tempfile::tempdir().expect("folder");
        let error = groups(&Paths::of(folder.path()), "web").expect_err("there is none");
        assert_eq!(
            error.to_string(),
            "there is no group `web`; there is none at all"
        );
        assert_eq!(known(&["a".into(), "b".into()]), "there are a, b");
    }
}
