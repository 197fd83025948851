//! The programs for QUIC: one chooses a socket for each packet by the ID of its connection, the other learns those IDs from
//! what the server sends (see `bpf/quic.bpf.c`).

use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{ErrorKind, Link, MapCore, MapFlags, MapHandle, OpenObject, ProgramMut};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::contract::number::HOME_AT;
use crate::error::{Error, bpf_step, failed};
use crate::notices::NOTICES;
use crate::object::{attempt, pin_new, pin_program, prepare, share, share_all};
use crate::skeletons::quic::{OpenQuicSkel, QuicSkelBuilder};
use crate::table::{MAX_SLOTS, flow_clock};

/// The names of the pinned maps.
const IDS: &str = "ids";
const OFFERS: &str = "offers";
const TOKENS: &str = "tokens";
/// The program that learns, and its link to a cgroup.
const LEARN: &str = "learn";
const LEARN_LINK: &str = "learn_link";

/// Opens the object. No program is loaded unless [`prepare`] is called for it.
pub(crate) fn open_quic(storage: &mut MaybeUninit<OpenObject>) -> Result<OpenQuicSkel<'_>, Error> {
    let mut open = QuicSkelBuilder::default()
        .open(storage)
        .map_err(bpf_step("reading the BPF object"))?;
    let programs = &mut open.progs;
    for program in [
        &mut programs.wakeone_quic,
        &mut programs.wakeone_quic_walk,
        &mut programs.wakeone_quic_learn,
    ] {
        program.set_autoload(false);
    }
    // Nothing is tagged.
    for map in [&mut open.maps.tags, &mut open.maps.moved] {
        map.set_autocreate(false)
            .map_err(bpf_step("leaving out the maps for counting"))?;
    }
    Ok(open)
}

/// Loads one variant of the program for one address; only then pins it and its maps.
pub(crate) fn load_program(
    dir: &Path,
    (address, addresses): (usize, usize),
    walk: bool,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = open_quic(&mut storage)?;
    if let Some(constants) = &mut open.maps.rodata_data {
        constants.address_number = address as u32;
        constants.address_count = addresses as u32;
    }
    let name = match walk {
        true => "wakeone_quic_walk",
        false => "wakeone_quic",
    };
    prepare(match walk {
        true => &mut open.progs.wakeone_quic_walk,
        false => &mut open.progs.wakeone_quic,
    });
    let names = [
        "table".to_owned(),
        "listeners".to_owned(),
        format!("sockets-{address}"),
        format!("homes-{address}"),
        NOTICES.to_owned(),
        IDS.to_owned(),
        OFFERS.to_owned(),
        TOKENS.to_owned(),
    ];
    let maps = [
        &mut open.maps.data_table,
        &mut open.maps.listeners,
        &mut open.maps.sockets,
        &mut open.maps.homes,
        &mut open.maps.notices,
        &mut open.maps.ids,
        &mut open.maps.offers,
        &mut open.maps.tokens,
    ];
    let new = share_all(maps, dir, &names)?;
    let mut loaded = attempt(name, || open.load())?;
    let program = match walk {
        true => &mut loaded.progs.wakeone_quic_walk,
        false => &mut loaded.progs.wakeone_quic,
    };
    pin_program(program, dir, address, walk)?;
    let maps = [
        &mut loaded.maps.data_table,
        &mut loaded.maps.listeners,
        &mut loaded.maps.sockets,
        &mut loaded.maps.homes,
        &mut loaded.maps.notices,
        &mut loaded.maps.ids,
        &mut loaded.maps.offers,
        &mut loaded.maps.tokens,
    ];
    pin_new(maps, dir, &names, new)
}

/// Has the IDs of what the processes of a cgroup send learned. That lasts as long as the pins.
pub(crate) fn load_learning(dir: &Path, cgroup: &Path) -> Result<(), Error> {
    let at = File::open(cgroup).map_err(Error::at(format!("opening {}", cgroup.display())))?;
    with_learning(dir, |learn| {
        let mut link = learn
            .attach_cgroup(at.as_raw_fd())
            .map_err(bpf_step("attaching the learning program to the cgroup"))?;
        learn
            .pin(dir.join(LEARN))
            .map_err(bpf_step("pinning the learning program"))?;
        link.pin(dir.join(LEARN_LINK)).map_err(|error| {
            let _ = fs::remove_file(dir.join(LEARN));
            bpf_step("pinning the learning program's link")(error)
        })
    })
}

/// Has the link of a pinned group run the program of this build. `new`: where the group's maps are pinned, too.
pub(crate) fn replace_learning(dir: &Path, new: &Path) -> Result<(), Error> {
    with_learning(new, |learn| {
        learn
            .pin(new.join(LEARN))
            .map_err(bpf_step("pinning the learning program"))?;
        let step = || bpf_step("replacing the learning program");
        let mut link = Link::open(dir.join(LEARN_LINK)).map_err(step())?;
        link.update_prog(learn).map_err(step())?;
        fs::rename(new.join(LEARN), dir.join(LEARN))
            .map_err(Error::at("replacing the pin of the learning program"))
    })
}

/// Loads both programs, and drops them again.
pub(crate) fn try_loading() -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = open_quic(&mut storage)?;
    prepare(&mut open.progs.wakeone_quic);
    prepare(&mut open.progs.wakeone_quic_learn);
    attempt("wakeone_quic", || open.load()).map(drop)
}

/// Whether a pin of a group is no map.
pub(crate) fn is_program(name: &str) -> bool {
    name == LEARN || name == LEARN_LINK
}

/// Whether the group that is pinned there steers packets of QUIC.
pub(crate) fn is_pinned(dir: &Path) -> bool {
    dir.join(IDS).exists()
}

/// Loads the learning program with the maps that are pinned in a folder, and does something to it.
fn with_learning(
    dir: &Path,
    act: impl FnOnce(&mut ProgramMut<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = open_quic(&mut storage)?;
    prepare(&mut open.progs.wakeone_quic_learn);
    let unused = [
        &mut open.maps.sockets,
        &mut open.maps.homes,
        &mut open.maps.notices,
        &mut open.maps.ids,
    ];
    for map in unused {
        map.set_autocreate(false)
            .map_err(bpf_step("leaving out the maps for choosing"))?;
    }
    share(&mut open.maps.data_table, dir, "table")?;
    share(&mut open.maps.listeners, dir, "listeners")?;
    share(&mut open.maps.offers, dir, OFFERS)?;
    share(&mut open.maps.tokens, dir, TOKENS)?;
    let mut loaded = attempt("wakeone_quic_learn", || open.load())?;
    act(&mut loaded.progs.wakeone_quic_learn)
}

/// The maps of a group for QUIC.
#[derive(Debug)]
pub struct Quic {
    ids: MapHandle,
    offers: MapHandle,
    tokens: MapHandle,
}

/// The number of a place in the map of sockets: a slot has two of them.
pub fn place_of(slot: usize, second: bool) -> usize {
    slot + if second { MAX_SLOTS } else { 0 }
}

impl Quic {
    /// Opens those of a pinned group.
    ///
    /// # Errors
    /// A pin is missing, or may not be opened.
    pub(crate) fn open(dir: &Path) -> Result<Self, Error> {
        let map = |name: &str| {
            MapHandle::from_pinned_path(dir.join(name))
                .map_err(bpf_step(format!("opening {}", dir.join(name).display())))
        };
        Ok(Self {
            ids: map(IDS)?,
            offers: map(OFFERS)?,
            tokens: map(TOKENS)?,
        })
    }

    /// Counts the IDs that clients used within so many ticks of the [`flow_clock`], by place.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn in_use(&self, ticks: u32) -> io::Result<Vec<u64>> {
        let mut counts = vec![0; 2 * MAX_SLOTS];
        let now = flow_clock();
        each(&self.ids, |_, at, used| {
            // A program may have a newer clock.
            let place = (at & HOME_AT).checked_sub(1).map(|place| place as usize);
            if let Some(count) = place.and_then(|place| counts.get_mut(place))
                && now.saturating_sub(used) <= ticks
            {
                *count += 1;
            }
        })?;
        Ok(counts)
    }

    /// Forgets all IDs of a place: its socket is gone.
    ///
    /// # Errors
    /// A map cannot be read.
    pub fn forget(&self, place: usize) -> io::Result<()> {
        for map in [&self.ids, &self.offers] {
            let mut keys = Vec::new();
            each(map, |key, at, _| {
                if (at & HOME_AT) as usize == place + 1 {
                    keys.push(key.to_vec());
                }
            })?;
            for key in keys {
                // Another one may have been pushed out meanwhile.
                let _ = map.delete(&key);
            }
        }
        self.forget_tokens(place);
        Ok(())
    }

    fn forget_tokens(&self, place: usize) {
        let at = (place as u32 + 1).to_ne_bytes();
        for token in self.tokens.keys().collect::<Vec<_>>() {
            if self.tokens.lookup(&token, MapFlags::ANY).ok().flatten() == Some(at.to_vec()) {
                let _ = self.tokens.delete(&token);
            }
        }
    }

    /// Returns a token that no place has yet, for this place: packets whose ID has it go there. Its earlier one is forgotten.
    ///
    /// # Errors
    /// There is no room for another one, or no random number.
    pub fn new_token(&self, place: usize) -> io::Result<u16> {
        self.forget_tokens(place);
        let at = (place as u32 + 1).to_ne_bytes();
        loop {
            let mut bytes = [0; 2];
            getrandom(&mut bytes, GetRandomFlags::empty())?;
            let token = u16::from_ne_bytes(bytes);
            // An ID that is too short for a token has none, which reads as 0.
            if token == 0 {
                continue;
            }
            let key = u32::from(token).to_ne_bytes();
            match self.tokens.update(&key, &at, MapFlags::NO_EXIST) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed("noting a token", &error)),
                Ok(()) => return Ok(token),
            }
        }
    }
}

/// Runs `act` with each key of a map of IDs, and its two numbers: where its connection is, and when it was used.
fn each(map: &MapHandle, mut act: impl FnMut(&[u8], u32, u32)) -> io::Result<()> {
    /// So many are read at a time.
    const BATCH: u32 = 4096;
    let batch = map
        .lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY)
        .map_err(|error| failed("reading the connection IDs", &error))?;
    for (key, value) in batch {
        let word = |at: usize| Some(u32::from_ne_bytes(value.get(at..at + 4)?.try_into().ok()?));
        if let (Some(at), Some(used)) = (word(0), word(4)) {
            act(&key, at, used);
        }
    }
    Ok(())
}
