//! Hides the sockets of `wakeone run --lookup` from `doctor`, `top` and `attach`. At the public address these would
//! find a socket that nobody reads. At the private one they would find queues whose connections have another address.

use std::collections::HashSet;

use wakeone_observe::Found;

use crate::paths::Paths;
use crate::state::{self, State};
use crate::status;

/// Leaves out the sockets of such groups, and returns a sentence about each group.
pub fn set_apart(paths: &Paths, mut found: Vec<Found>) -> (Vec<Found>, Vec<String>) {
    let mut sentences = Vec::new();
    for name in status::names(paths).unwrap_or_default() {
        let Ok(Some(state)) = state::load(&paths.runtime, &name) else {
            continue;
        };
        let own = sockets_of(&state);
        let before = found.len();
        found.retain(|one| {
            !one.listener
                .sockets
                .iter()
                .any(|socket| own.contains(&socket.inode))
        });
        if found.len() < before {
            sentences.push(sentence(&state));
        }
    }
    (found, sentences)
}

/// The inodes of the sockets that reserve addresses, and of the listeners behind them.
fn sockets_of(state: &State) -> HashSet<u64> {
    if state.boot != state::boot_id() {
        return HashSet::new();
    }
    let mut own = HashSet::new();
    for (address, reserved) in state.reserved.iter().enumerate() {
        let Some(reserved) = reserved else { continue };
        own.insert(reserved.inode);
        for slot in &state.slots {
            // Includes those of a second worker, which is about to take the slot over.
            let beside = slot.beside.as_ref().map(|beside| &beside.inodes);
            let both = [Some(&slot.inodes), beside].into_iter().flatten();
            own.extend(both.filter_map(|inodes| inodes.get(address)));
        }
    }
    own
}

fn sentence(state: &State) -> String {
    let places = state.listen.iter().zip(&state.reserved);
    let places: Vec<String> = places
        .filter_map(|(public, reserved)| Some((public, (*reserved)?)))
        .map(|(public, reserved)| format!("{public} (queues on port {})", reserved.private_port))
        .collect();
    format!(
        "{} belongs to group `{}` of `wakeone run --lookup`, whose queues are on a private port; see them with `wakeone status {}`",
        places.join(" and "),
        state.name,
        state.name
    )
}
