//! Replacing the programs of a living group by those of this build. The maps stay, and with them all counts.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use libbpf_rs::{Link, MapHandle};

use crate::dispatch::{COUNT, COUNT_LINK, with_counting};
use crate::error::{Error, bpf_step};
use crate::load::{Temporary, load_selection};
use crate::notices::NOTICES;
use crate::object::program_name;
use crate::pinned::{BUILD, Pinned};
use crate::recount::RELEASE_LINK;
use crate::{LoadPlan, Loaded, join, lookup, quic};

/// Loads the programs of a pinned group anew, on its maps, and pins them in place of the old ones. The counting program is
/// replaced within its link, so no connection goes uncounted. The caller attaches the selection programs: until then the
/// old ones choose.
///
/// Only for a group of the same contract: the maps are taken as they are.
///
/// # Errors
/// Which step failed. Before the first pin is replaced nothing has changed; if it fails after that, the next attempt
/// replaces the rest, for the table still names the old build.
pub fn replace(plan: &LoadPlan<'_>) -> Result<Loaded, Error> {
    let temporary = Temporary::beside(plan.dir)?;
    let new = temporary.0.as_path();
    pin_maps_again(plan.dir, new)?;
    let loading = load_selection(plan, new)?;
    let (walks, missing) = (loading.walks, loading.missing);
    if plan.dir.join(COUNT_LINK).exists() {
        replace_counting(plan.dir, new)?;
    }
    if plan.quic {
        quic::replace_learning(plan.dir, new)?;
    }
    for (address, place) in plan.lookup.iter().enumerate() {
        lookup::replace(plan.dir, address, place)?;
    }
    if !plan.joins.is_empty() {
        join::replace(plan.dir, plan.joins)?;
    }
    if !plan.dir.join(NOTICES).exists() {
        // The old build had none.
        move_pin(new, plan.dir, NOTICES)?;
    }
    for address in 0..plan.addresses {
        move_pin(new, plan.dir, &program_name(address, walks))?;
        let _ = fs::remove_file(plan.dir.join(program_name(address, !walks)));
    }
    let pinned = Pinned::open(plan.dir)?;
    pinned.table().build().store(BUILD, Ordering::Relaxed);
    Ok(Loaded { pinned, missing })
}

/// Pins the maps of a group in another folder too, where the loader looks for those that it is to share.
fn pin_maps_again(from: &Path, to: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(from).map_err(Error::at(format!("reading {}", from.display())))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text.starts_with("dispatch-")
            || text == COUNT
            || text == COUNT_LINK
            || text == RELEASE_LINK
            || lookup::is_pin(&text)
            || join::is_pin(&text)
            || quic::is_program(&text)
        {
            continue;
        }
        let step = || bpf_step(format!("pinning the map {text} again"));
        let mut map = MapHandle::from_pinned_path(entry.path()).map_err(step())?;
        map.pin(to.join(&name)).map_err(step())?;
    }
    Ok(())
}

fn replace_counting(dir: &Path, new: &Path) -> Result<(), Error> {
    with_counting(new, |count| {
        count
            .pin(new.join(COUNT))
            .map_err(bpf_step("pinning the counting program"))?;
        let step = || bpf_step("replacing the counting program");
        let mut link = Link::open(dir.join(COUNT_LINK)).map_err(step())?;
        link.update_prog(count).map_err(step())?;
        move_pin(new, dir, COUNT)
    })
}

/// Replaces a pin by one of another folder of the same bpffs, atomically: an open finds the old or the new
/// (simple_rename, fs/libfs.c).
fn move_pin(from: &Path, to: &Path, name: &str) -> Result<(), Error> {
    fs::rename(from.join(name), to.join(name)).map_err(Error::at(format!(
        "replacing the pin {}",
        to.join(name).display()
    )))
}
