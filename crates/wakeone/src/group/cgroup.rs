//! The cgroup that a group's listeners are created in, so that their connections are counted.

use std::path::PathBuf;

use wakeone_kernel::cgroup;

use super::config::Error;
use wakeone_control::paths::Paths;
use wakeone_supervisor::{Options, Supervisor};

/// Returns the cgroup that listeners are born in: one below our own, or that of an earlier supervisor, which ran in
/// another.
pub(super) fn counting_cgroup_of(paths: &Paths, name: &str) -> Option<PathBuf> {
    let home = cgroup::own().ok();
    let own = home.map(|home| home.join(paths.cgroup_name(name)));
    let there = own.as_ref().is_some_and(|own| own.exists());
    let earlier = || paths.cgroups_of(name).into_iter().next();
    if there { own } else { earlier().or(own) }
}

/// A cgroup that the listeners were born in, and whether we must remove it on failure.
#[derive(Debug)]
pub(super) struct CountingCgroup {
    pub path: PathBuf,
    made: bool,
}

impl CountingCgroup {
    /// Removes it, unless an earlier supervisor made it.
    pub fn abandon(&self) {
        if self.made {
            let _ = cgroup::remove(&self.path);
        }
    }
}

/// Binds the listeners in this cgroup if that is possible.
pub(super) fn in_counting_cgroup(
    options: &Options,
    path: Option<PathBuf>,
) -> Result<(Supervisor, Option<CountingCgroup>), Error> {
    let Some(path) = path else {
        return Ok((Supervisor::new(options)?, None));
    };
    match cgroup::create_sockets_in(&path, || Supervisor::new(options)) {
        Ok((made, Ok(supervisor))) => Ok((supervisor, Some(CountingCgroup { path, made }))),
        Ok((made, Err(error))) => {
            if made {
                let _ = cgroup::remove(&path);
            }
            Err(error.into())
        }
        Err(error) => {
            tracing::debug!("no cgroup for the listeners: {error}");
            Ok((Supervisor::new(options)?, None))
        }
    }
}
