//! Instructions that the running kernel verifies for each program, and the time of loading.
//! `scripts/kernels` collects the lines for docs/kernels.md. Needs root.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use libbpf_rs::{Error, ObjectBuilder, libbpf_sys};
use wakeone_kernel::capability;

/// On every kernel. A kernel to come may count differently: this is far from the limit of 1,000,000.
const MOST: u32 = 25_000;

macro_rules! object {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".bpf.o"))
    };
}

const OBJECTS: [&[u8]; 10] = [
    object!("dispatch"),
    object!("datagram"),
    object!("quic"),
    object!("lookup"),
    object!("join"),
    object!("recount"),
    object!("chooser"),
    object!("observe"),
    object!("locks"),
    object!("bursts"),
];

struct Loaded {
    /// `None` before Linux 5.16, which does not tell.
    instructions: Option<u32>,
    took: Duration,
}

/// Loads one program of an object, and its maps.
fn load(object: &'static [u8], program: &str) -> Result<Loaded, Error> {
    let mut open = ObjectBuilder::default().open_memory(object)?;
    for mut other in open.progs_mut() {
        let chosen = other.name() == program;
        other.set_autoload(chosen);
    }
    let start = Instant::now();
    let loaded = open.load()?;
    let took = start.elapsed();
    let own = loaded.progs().find(|one| one.name() == program);
    let instructions = verified(own.expect("the program").as_fd().as_raw_fd());
    Ok(Loaded { instructions, took })
}

fn verified(program: i32) -> Option<u32> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut size = size_of_val(&info) as u32;
    // SAFETY: `info` is a zeroed bpf_prog_info of `size` bytes: all its pointers are null and their lengths 0.
    let done = unsafe { libbpf_sys::bpf_prog_get_info_by_fd(program, &mut info, &mut size) };
    assert_eq!(done, 0, "bpf_prog_info");
    Some(info.verified_insns).filter(|count| *count > 0)
}

fn names(object: &'static [u8]) -> Vec<String> {
    let open = ObjectBuilder::default()
        .open_memory(object)
        .expect("object");
    let names = open
        .progs()
        .map(|one| one.name().to_string_lossy().into_owned());
    names.collect()
}

#[test]
fn each_program_is_far_from_the_verifiers_limit() {
    if !nix::unistd::geteuid().is_root() || !capability::missing().is_empty() {
        return eprintln!("skipped: not root");
    }
    libbpf_rs::set_print(None);
    let mut above = Vec::new();
    for object in OBJECTS {
        for name in names(object) {
            match load(object, &name) {
                Ok(loaded) => {
                    let count = loaded
                        .instructions
                        .map_or("?".to_owned(), |n| n.to_string());
                    println!(
                        "program {name} {count} {:.1}",
                        loaded.took.as_secs_f64() * 1e3
                    );
                    above.extend(loaded.instructions.filter(|n| *n > MOST).map(|n| (name, n)));
                }
                Err(error) => println!("program {name} refused {error}"),
            }
        }
    }
    assert!(above.is_empty(), "more than {MOST}: {above:?}");
}
