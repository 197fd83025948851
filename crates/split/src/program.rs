//! Whether LD_PRELOAD has an effect in a program at all, judged by its file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// More scripts than this that name each other as interpreter are a loop.
const MOST_SCRIPTS: usize = 4;

/// Why the library has no effect in a program; `None` if it has, or if that is unknown.
pub fn obstacle(command: &str) -> Option<String> {
    let path = find(command)?;
    inspect(&path, MOST_SCRIPTS).ok().flatten()
}

/// The file that a command names, found by PATH.
fn find(command: &str) -> Option<PathBuf> {
    if command.contains('/') {
        return Some(command.into());
    }
    let path = std::env::var_os("PATH")?;
    let runs = |file: &PathBuf| {
        file.metadata()
            .is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path)
        .map(|folder| folder.join(command))
        .find(runs)
}

fn inspect(path: &Path, scripts: usize) -> io::Result<Option<String>> {
    let name = path.display();
    let mut file = File::open(path)?;
    let about = file.metadata()?;
    if about.mode() & 0o6000 != 0 && (about.uid() != rustix::process::geteuid().as_raw()) {
        return Ok(Some(format!(
            "{name} runs as another user (setuid or setgid), and the loader ignores LD_PRELOAD then"
        )));
    }
    let mut head = [0_u8; 256];
    let read = file.read(&mut head)?;
    let head = &head[..read];
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        let program = if first.ends_with("/env") {
            words.find(|word| !word.starts_with('-')).and_then(find)
        } else {
            Some(first.into())
        };
        return match (program, scripts.checked_sub(1)) {
            (Some(program), Some(left)) => inspect(&program, left),
            _ => Ok(None),
        };
    }
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return Ok(None);
    }
    Ok(match elf(&mut file, head)? {
        Elf::Static => Some(format!(
            "{name} is statically linked, and LD_PRELOAD has no effect in it"
        )),
        Elf::Go => Some(format!(
            "{name} is a Go program, which makes its system calls itself and not through the C library"
        )),
        Elf::Dynamic => None,
    })
}

enum Elf {
    Static,
    Go,
    Dynamic,
}

/// Parses a 64-bit little-endian ELF file: does it have an interpreter, and Go's build information?
fn elf(file: &mut File, head: &[u8]) -> io::Result<Elf> {
    let short = || io::Error::from(io::ErrorKind::InvalidData);
    let half = |bytes: &[u8], at: usize| {
        let bytes = bytes
            .get(at..at + 2)
            .and_then(|bytes| bytes.try_into().ok());
        bytes.map(u16::from_le_bytes).ok_or_else(short)
    };
    let long = |bytes: &[u8], at: usize| {
        let bytes = bytes
            .get(at..at + 8)
            .and_then(|bytes| bytes.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or_else(short)
    };
    let (offset, size, count) = (long(head, 32)?, half(head, 54)?, half(head, 56)?);
    const INTERPRETER: u32 = 3;
    const NOTE: u32 = 4;
    let (mut dynamic, mut go) = (false, false);
    for number in 0..u64::from(count) {
        let mut entry = [0_u8; 56];
        file.seek(SeekFrom::Start(offset + number * u64::from(size)))?;
        file.read_exact(&mut entry)?;
        let kind = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        dynamic |= kind == INTERPRETER;
        if kind == NOTE {
            let mut note = vec![0_u8; usize::try_from(long(&entry, 32)?.min(4096)).unwrap_or(0)];
            file.seek(SeekFrom::Start(long(&entry, 8)?))?;
            file.read_exact(&mut note)?;
            // A note's owner is its name: "Go\0\0" is that of the build id.
            go |= note.windows(4).any(|owner| owner == b"Go\0\0");
        }
    }
    Ok(match (go, dynamic) {
        (true, _) => Elf::Go,
        (false, false) => Elf::Static,
        (false, true) => Elf::Dynamic,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_this_machine() {
        assert_eq!(obstacle("sh"), None);
        assert_eq!(obstacle("no-such-program"), None);
        let own = std::env::current_exe().expect("own path");
        assert_eq!(obstacle(own.to_str().expect("path")), None);
    }

    #[test]
    fn static_programs_are_told() {
        let dir = tempfile::tempdir().expect("folder");
        let program = dir.path().join("static");
        // An ELF head with a program header table of no entries: nothing loads it but the kernel.
        let mut bytes = vec![0_u8; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[54] = 56;
        std::fs::write(&program, &bytes).expect("write");
        let told = obstacle(program.to_str().expect("path")).expect("an obstacle");
        assert!(told.ends_with("is statically linked, and LD_PRELOAD has no effect in it"));
        let script = dir.path().join("script");
        std::fs::write(&script, format!("#!{} -x\n", program.display())).expect("write");
        assert!(obstacle(script.to_str().expect("path")).is_some());
    }
}
