//! One object file with one program: loading it with the verifier's reason where that refuses, and sharing and pinning
//! its maps.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use libbpf_rs::btf::{Btf, types::Func};
use libbpf_rs::libbpf_sys::bpf_prog_info;
use libbpf_rs::{MapCore, MapHandle, MapMut, OpenMapMut, OpenProgramMut, ProgramMut};

use crate::error::{Error, LOADING, bpf_step, failed, from_bpf};

/// The name under which an address's program is pinned tells whether it reads the queues itself.
pub(crate) fn program_name(address: usize, walk: bool) -> String {
    let kind = if walk { "walk" } else { "plain" };
    format!("dispatch-{address}-{kind}")
}

/// Has a map that is not loaded yet be the one that is pinned under a name. Returns whether there is none yet, so that
/// this one is to be pinned.
pub(crate) fn share(map: &mut OpenMapMut<'_>, dir: &Path, name: &str) -> Result<bool, Error> {
    let path = dir.join(name);
    if !path.exists() {
        return Ok(true);
    }
    map.reuse_pinned_map(path)
        .map_err(bpf_step(format!("sharing the map {name}")))?;
    Ok(false)
}

/// Does that for several maps, each under its name.
pub(crate) fn share_all<const N: usize>(
    maps: [&mut OpenMapMut<'_>; N],
    dir: &Path,
    names: &[String; N],
) -> Result<[bool; N], Error> {
    let mut new = [false; N];
    for ((map, name), new) in maps.into_iter().zip(names).zip(&mut new) {
        *new = share(map, dir, name)?;
    }
    Ok(new)
}

/// Pins those of several maps that are new, each under its name.
pub(crate) fn pin_new<const N: usize>(
    maps: [&mut MapMut<'_>; N],
    dir: &Path,
    names: &[String; N],
    new: [bool; N],
) -> Result<(), Error> {
    let all = maps.into_iter().zip(names).zip(new);
    all.filter(|(_, new)| *new)
        .try_for_each(|((map, name), _)| pin_map(map, dir, name))
}

/// Pins a map under a name.
pub(crate) fn pin_map(map: &mut MapMut<'_>, dir: &Path, name: &str) -> Result<(), Error> {
    map.pin(dir.join(name))
        .map_err(bpf_step(format!("pinning the map {name}")))
}

/// Pins the program of an address, under a name that tells whether it reads the queues itself.
pub(crate) fn pin_program(
    program: &mut ProgramMut<'_>,
    dir: &Path,
    address: usize,
    walk: bool,
) -> Result<(), Error> {
    program
        .pin(dir.join(program_name(address, walk)))
        .map_err(bpf_step("pinning the dispatch program"))
}

/// Has a program loaded with its object, once: libbpf loads a program again where the first time had no log.
pub(crate) fn prepare(program: &mut OpenProgramMut<'_>) {
    /// `BPF_LOG_STATS` (include/linux/bpf_verifier.h): the verifier's complaint and its statistics alone.
    const STATISTICS: u32 = 4;
    /// `BPF_LOG_LEVEL1`: each instruction on the way there too, which is slow.
    const INSTRUCTIONS: u32 = 1;
    let level = if tracing::enabled!(target: "verifier", tracing::Level::DEBUG) {
        STATISTICS | INSTRUCTIONS
    } else {
        STATISTICS
    };
    program.set_autoload(true);
    program.set_log_level(level);
    spoil(program);
}

/// Makes a program bad for a test that names it in `WAKEONE_TEST_BROKEN`: loaded as another type, it calls what that type
/// may not call. Release builds do not have this.
#[cfg(debug_assertions)]
fn spoil(program: &mut OpenProgramMut<'_>) {
    let broken = std::env::var("WAKEONE_TEST_BROKEN").unwrap_or_default();
    if broken.split(',').any(|name| program.name() == name) {
        program.set_prog_type(libbpf_rs::ProgramType::SocketFilter);
    }
}

#[cfg(not(debug_assertions))]
fn spoil(_: &mut OpenProgramMut<'_>) {}

thread_local! {
    /// The verifier's log of the program that this thread tries to load.
    static VERIFIER: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Logs libbpf's messages at debug level: our own errors name step and reason. Keeps the verifier's log for those.
pub(crate) fn take_message(_: libbpf_rs::PrintLevel, text: String) {
    const BEGIN: &str = "-- BEGIN PROG LOAD LOG --\n";
    const END: &str = "-- END PROG LOAD LOG --";
    match text.split_once(BEGIN) {
        Some((_, log)) => {
            let log = log.split(END).next().unwrap_or_default().to_owned();
            VERIFIER.replace(log);
        }
        None => tracing::debug!(target: "libbpf", "{}", text.trim_end()),
    }
}

/// Loads an object with one program. The error tells the verifier's reason; its last lines are logged.
pub(crate) fn attempt<T>(
    program: &str,
    load: impl FnOnce() -> libbpf_rs::Result<T>,
) -> Result<T, Error> {
    /// Lines of the verifier that tell where it stopped.
    const LINES: usize = 20;
    tracing::debug!("{LOADING}{program}");
    VERIFIER.take();
    load().map_err(|error| {
        let log = VERIFIER.take();
        let lines: Vec<&str> = log.lines().collect();
        for line in &lines[lines.len().saturating_sub(LINES)..] {
            tracing::debug!(target: "verifier", "{program}: {line}");
        }
        Error {
            step: format!("{LOADING}{program}"),
            source: refusal(&error, &log),
        }
    })
}

/// The kernel's error, with the verifier's reason where the verifier refused. A kernel that lacks the whole feature is
/// reported as such: the verifier would only name the first instruction that it does not know.
fn refusal(error: &libbpf_rs::Error, log: &str) -> io::Error {
    let plain = from_bpf(error);
    if plain.kind() != io::ErrorKind::PermissionDenied && moves_no_connections() {
        return io::Error::new(
            plain.kind(),
            "this kernel does not move connections from a closing listener, which came with Linux 5.14 (tested from 6.1 on)",
        );
    }
    match reason(log) {
        Some(reason) => io::Error::new(
            plain.kind(),
            format!("the kernel's verifier refuses it: {reason}"),
        ),
        None => plain,
    }
}

/// Whether the kernel's BTF is there and lacks the function that moves connections (net/core/sock_reuseport.c).
fn moves_no_connections() -> bool {
    let btf = Btf::from_vmlinux();
    btf.is_ok_and(|btf| {
        btf.type_by_name::<Func<'_>>("reuseport_migrate_sock")
            .is_none()
    })
}

/// The verifier's complaint: its last line but for the statistics.
fn reason(log: &str) -> Option<&str> {
    const STATISTICS: [&str; 3] = ["verification time ", "stack depth ", "processed "];
    let told =
        |line: &&str| !line.is_empty() && !STATISTICS.iter().any(|about| line.starts_with(about));
    log.lines().map(str::trim).rfind(told)
}

/// The kernel's own description of a program.
pub(crate) fn info_of(program: BorrowedFd<'_>) -> Option<bpf_prog_info> {
    let mut info = bpf_prog_info::default();
    let mut size = size_of_val(&info) as u32;
    // SAFETY: `info` is a zeroed bpf_prog_info of `size` bytes: all its pointers are null and their lengths 0.
    let done = unsafe {
        libbpf_rs::libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &mut info, &mut size)
    };
    (done == 0).then_some(info)
}

/// Keeps a map beyond its object.
pub(crate) fn keep(map: &MapMut<'_>) -> io::Result<MapHandle> {
    MapHandle::try_from(map).map_err(|e| failed("keeping a map", &e))
}

/// Removes all entries of a map.
pub(crate) fn clear(map: &MapHandle) -> io::Result<()> {
    let keys: Vec<Vec<u8>> = map.keys().collect();
    for key in keys {
        map.delete(&key).map_err(|e| failed("clearing a map", &e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_complaint_stands_before_the_statistics() {
        let log = "0: R1=ctx() R10=fp0\n; int wakeone_dispatch()\ninvalid bpf_context access off=40 size=8\n\
                   verification time 12 usec\nstack depth 0\nprocessed 3 insns (limit 1000000) max_states_per_insn 0\n";
        assert_eq!(
            reason(log),
            Some("invalid bpf_context access off=40 size=8")
        );
        assert_eq!(reason("processed 3 insns\n\n"), None);
        assert_eq!(reason(""), None);
    }
}
