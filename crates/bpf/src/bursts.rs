//! Divides a burst among workers that share one listener: `bpf/bursts.bpf.c`.
//!
//! The programs stay attached as long as a [`Bursts`] lives. Nothing is pinned, so that not even kill -9 leaves one behind.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapHandle, ProgramMut, RingBuffer, RingBufferBuilder, libbpf_sys};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::contract::number::{SHARER_REFUSABLE, SHARERS};
use crate::error::{Error, bpf_step};
use crate::object::{attempt, keep};
use crate::skeletons::bursts::{BurstsSkelBuilder, types};

/// As many workers of one listener can take part. Each has a place below that.
pub const MOST: usize = SHARERS as usize;

/// How long a worker is refused at most, and how long one counts that was seen to wait. A worker that was woken needs less
/// to come, and nobody notices the time.
const LIMIT: Duration = Duration::from_millis(20);

/// The inode of the first PID namespace (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The programs, attached for one listener.
#[derive(Debug)]
pub struct Bursts {
    shared: NonNull<types::wakeone_bursts>,
    refused: RingBuffer<'static>,
    find_set: OwnedFd,
    _links: [Link; 3],
}

// SAFETY: the mapping is shared memory that is only ever accessed through atomics.
unsafe impl Send for Bursts {}

impl Drop for Bursts {
    fn drop(&mut self) {
        // SAFETY: mapped by `load` with this length, and no reference into it outlives `self`.
        let _ = unsafe {
            munmap(
                self.shared.as_ptr().cast(),
                size_of::<types::wakeone_bursts>(),
            )
        };
    }
}

macro_rules! word {
    ($kind:ident, $place:expr) => {
        // SAFETY: the place lies in the mapping, which lives as long as `self`, and is aligned as its type is. Everybody
        // accesses it atomically; the programs' plain loads and stores are such.
        unsafe { $kind::from_ptr(&raw mut $place) }
    };
}

impl Bursts {
    /// Attaches the programs for a TCP listener, known by its cookie and port. Nobody is refused before a worker is
    /// [enlisted](Self::enlist) and [`Self::renew`] is called.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF and CAP_PERFMON, or where the kernel refuses trampolines. It knows processes by their
    /// numbers in the first PID namespace, and is refused in others.
    pub fn attach(cookie: u64, port: u16) -> Result<Self, Error> {
        let namespace = rustix::fs::stat("/proc/self/ns/pid");
        if namespace.is_ok_and(|about| about.st_ino != FIRST_NAMESPACE) {
            return Err(Error {
                step: "numbering workers".into(),
                source: io::Error::other("processes have other numbers in this PID namespace"),
            });
        }
        // libbpf's message on standard error is in the error, too.
        libbpf_rs::set_print(None);
        let mut storage = MaybeUninit::uninit();
        let open = BurstsSkelBuilder::default()
            .open(&mut storage)
            .map_err(bpf_step("reading the BPF object"))?;
        let loaded = attempt("wakeone_refuse", || open.load())?;
        let attach = |program: &ProgramMut<'_>| {
            let link = program.attach();
            link.map_err(bpf_step("attaching the programs for bursts"))
        };
        let kept = |error| Error::at("keeping the map of bursts")(error);
        let map = keep(&loaded.maps.data_bursts).map_err(kept)?;
        let programs = &loaded.progs;
        let find_set = programs.wakeone_set.as_fd().try_clone_to_owned();
        let bursts = Self {
            shared: map_shared(map.as_fd()).map_err(kept)?,
            refused: ring(&keep(&loaded.maps.refused).map_err(kept)?)?,
            find_set: find_set.map_err(kept)?,
            _links: [
                attach(&programs.wakeone_closed)?,
                attach(&programs.wakeone_arrival)?,
                attach(&programs.wakeone_refuse)?,
            ],
        };
        let shared = bursts.shared.as_ptr();
        word!(AtomicU64, (*shared).limit_ns).store(LIMIT.as_nanos() as u64, Relaxed);
        word!(AtomicU64, (*shared).port).store(port.into(), Relaxed);
        word!(AtomicU64, (*shared).cookie).store(cookie, Relaxed);
        Ok(bursts)
    }

    fn sharer(&self, place: usize) -> *mut types::wakeone_sharer {
        assert!(place < MOST, "place {place} of {MOST}");
        // SAFETY: within the array, just checked.
        unsafe {
            (&raw mut (*self.shared.as_ptr()).sharer)
                .cast::<types::wakeone_sharer>()
                .add(place)
        }
    }

    fn pid(&self, place: usize) -> &AtomicU32 {
        word!(AtomicU32, (*self.sharer(place)).pid)
    }

    /// A process takes part from now on, by its epoll set. `again`: whether it is woken again after a refusal; others are
    /// never refused. It gets a share as soon as it has been [told](Self::tell) how many connections it has.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF on some kernels.
    pub fn enlist(
        &self,
        place: usize,
        pid: u32,
        set: BorrowedFd<'_>,
        again: bool,
    ) -> io::Result<()> {
        self.dismiss(place);
        let sharer = self.sharer(place);
        for number in [
            word!(AtomicU64, (*sharer).accepted),
            word!(AtomicU64, (*sharer).closed),
            word!(AtomicU64, (*sharer).seen_ns),
            word!(AtomicU64, (*sharer).called_ns),
            word!(AtomicU64, (*sharer).refused_ns),
            word!(AtomicU64, (*sharer).refusals),
        ] {
            number.store(0, Relaxed);
        }
        let flags = if again { SHARER_REFUSABLE } else { 0 };
        word!(AtomicU32, (*sharer).flags).store(flags, Relaxed);
        word!(AtomicU32, (*sharer).absent).store(0, Relaxed);
        let arguments = [place as u64, set.as_raw_fd() as u64];
        let mut run = libbpf_sys::bpf_test_run_opts {
            sz: size_of::<libbpf_sys::bpf_test_run_opts>() as u64,
            ctx_in: arguments.as_ptr().cast(),
            ctx_size_in: size_of_val(&arguments) as u32,
            ..Default::default()
        };
        // SAFETY: the descriptor is open; `run` is a zeroed struct of `sz` bytes but for `arguments`, which the kernel only
        // reads.
        let done =
            unsafe { libbpf_sys::bpf_prog_test_run_opts(self.find_set.as_raw_fd(), &raw mut run) };
        if done != 0 {
            return Err(io::Error::from_raw_os_error(-done));
        }
        self.pid(place).store(pid, Relaxed);
        Ok(())
    }

    /// Nobody is at a place any more.
    pub fn dismiss(&self, place: usize) {
        self.pid(place).store(0, Relaxed);
        let sharer = self.sharer(place);
        word!(AtomicU32, (*sharer).weight).store(0, Relaxed);
        word!(AtomicU64, (*sharer).set).store(0, Relaxed);
    }

    /// Whether a process takes part already.
    pub fn has(&self, pid: u32) -> bool {
        (0..MOST).any(|place| self.pid(place).load(Relaxed) == pid)
    }

    /// Returns how many connections the worker at a place has accepted and closed since it takes part.
    pub fn taken(&self, place: usize) -> (u64, u64) {
        let sharer = self.sharer(place);
        (
            word!(AtomicU64, (*sharer).accepted).load(Relaxed),
            word!(AtomicU64, (*sharer).closed).load(Relaxed),
        )
    }

    /// Tells how many connections a worker has, if it has neither accepted nor closed any since it had `taken` so many.
    pub fn tell(&self, place: usize, connections: u64, taken: (u64, u64)) {
        if self.taken(place) == taken {
            let base = connections.wrapping_sub(taken.0).wrapping_add(taken.1);
            word!(AtomicU64, (*self.sharer(place)).base).store(base, Relaxed);
        }
    }

    /// Sets a worker's share relative to the others'. Of weight 0 it gets none while others wait.
    pub fn set_weight(&self, place: usize, weight: u32) {
        word!(AtomicU32, (*self.sharer(place)).weight).store(weight, Relaxed);
    }

    /// Nobody is refused for a worker that is absent, until it accepts again.
    pub fn set_absent(&self, place: usize) {
        word!(AtomicU32, (*self.sharer(place)).absent).store(1, Relaxed);
    }

    /// Returns how often a worker has been refused.
    pub fn refusals(&self, place: usize) -> u64 {
        word!(AtomicU64, (*self.sharer(place)).refusals).load(Relaxed)
    }

    /// Workers may be refused until `CLOCK_MONOTONIC` is there, in ns.
    pub fn renew(&self, until_ns: u64) {
        word!(AtomicU64, (*self.shared.as_ptr()).until_ns).store(until_ns, Relaxed);
    }

    /// Whether a worker was refused for the first time in a burst since the last call.
    pub fn take_notice(&self) -> bool {
        self.refused.consume_raw() > 0
    }
}

impl AsFd for Bursts {
    /// A descriptor that is readable while there is a notice to take.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns this descriptor, and `self` owns the ring.
        unsafe { BorrowedFd::borrow_raw(self.refused.epoll_fd()) }
    }
}

fn map_shared(map: BorrowedFd<'_>) -> io::Result<NonNull<types::wakeone_bursts>> {
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            size_of::<types::wakeone_bursts>(),
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            map,
            0,
        )?
    };
    NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory.into())
}

fn ring(map: &MapHandle) -> Result<RingBuffer<'static>, Error> {
    let step = || bpf_step("opening the notices of refused workers");
    let mut ring = RingBufferBuilder::new();
    ring.add(map, |_| 0).map_err(step())?;
    ring.build().map_err(step())
}

#[cfg(test)]
mod tests;
