//! A request costs no allocation: a run of many requests allocates as often as one of few.
#![allow(unsafe_code)] // an allocator that counts cannot be had without

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use wakeone_sim::{Arrivals, Dispatch, Kind, Load, Service, Setup, Wake, run};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

fn allocations(setup: &Setup, requests: u64) -> u64 {
    let load = Load {
        arrivals: Arrivals::Poisson {
            per_s: 0.8 * setup.capacity() * 1e3,
        },
        service: Service::Exponential(1e-3),
        requests,
        kept: None,
        seed: 1,
    };
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    run(setup, &load).expect("it can be simulated");
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

/// One test alone in its program: nobody else allocates meanwhile.
#[test]
fn a_run_of_many_requests_allocates_as_often_as_one_of_few() {
    let steered = Dispatch::steered;
    // A queue that once gets longer than ever before grows, ever more rarely. The agent's judge notes what all had accepted
    // when one becomes suspect: once in some hundred requests.
    for (way, more) in [
        (Dispatch::Shared(Wake::LongestAsleep), 50),
        (steered(0, None), 50),
        (steered(3, None), 50),
        (steered(3, Some(0.005)), 3_500),
    ] {
        for kind in [Kind::Threads(1), Kind::EventLoop] {
            let setup = Setup {
                kind,
                ..Setup::new(8, way)
            };
            let (few, many) = (allocations(&setup, 50_000), allocations(&setup, 400_000));
            assert!(many < few + more, "{way:?} {kind:?}: {few}, then {many}");
        }
    }
}
