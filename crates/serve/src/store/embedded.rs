//! The store on disk: a log of entries that only grows, and a counter.
//!
//! Any number of processes may have it open. An entry is one `write` to a file opened with
//! `O_APPEND`, which local file systems keep whole, and is acknowledged after `fdatasync`. No
//! process takes a lock, so none waits for one that was stopped or killed. Readers go on from where
//! they were. A record that was torn by a crash fails its checksum and is skipped. Nothing is ever
//! cut off, so that damage in the middle cannot take the records after it with it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::system::shared_counter::SharedCounter;

use super::{Call, Entry, Failed, NAME_CHARS_MAX, Reply, SHOWN, Store, TEXT_CHARS_MAX};

/// The first bytes of a record. The first byte occurs in no UTF-8 text.
const MAGIC: [u8; 8] = *b"\xfewakeone";
/// Magic, length, checksum.
const HEADER_BYTES: usize = 16;
/// The longest entry: at most 4 bytes a character.
const PAYLOAD_BYTES_MAX: usize = 10 + 4 * (NAME_CHARS_MAX + TEXT_CHARS_MAX);
/// How much of the log is read at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// The store on disk.
#[derive(Debug)]
pub struct Embedded {
    directory: PathBuf,
    log: File,
    visits: SharedCounter,
    /// Up to where the log has been read.
    offset: u64,
    total: u64,
    latest: VecDeque<Entry>,
    shown: Arc<[Entry]>,
}

impl Embedded {
    /// Opens the store in `directory`, which is made if it is not there.
    ///
    /// # Errors
    /// When its files cannot be opened.
    pub fn open(directory: &Path) -> Result<Self, Failed> {
        let failed = |error| fault("open", directory, &error);
        std::fs::create_dir_all(directory).map_err(failed)?;
        let path = directory.join("entries.log");
        let mut how = File::options();
        how.read(true).append(true);
        let log = match how.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let log = how.create(true).open(&path).map_err(failed)?;
                // The name of a new file must be as durable as its content.
                File::open(directory)
                    .and_then(|directory| directory.sync_all())
                    .map_err(failed)?;
                log
            }
            opened => opened.map_err(failed)?,
        };
        let visits = SharedCounter::open(&directory.join("visits")).map_err(failed)?;
        let mut store = Self {
            directory: directory.to_owned(),
            log,
            visits,
            offset: 0,
            total: 0,
            latest: VecDeque::new(),
            shown: Arc::new([]),
        };
        store.read_on().map_err(failed)?;
        Ok(store)
    }

    /// Returns the content of the page; never waits for a disk that has the log's end in memory.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn page(&mut self, visit: bool) -> Result<Reply, Failed> {
        self.read_on()
            .map_err(|error| fault("read", &self.directory, &error))?;
        Ok(Reply::Page {
            visits: if visit {
                self.visits.increment()
            } else {
                self.visits.get()
            },
            total: self.total,
            entries: Arc::clone(&self.shown),
        })
    }

    /// Appends entries and waits until the disk has them.
    ///
    /// # Errors
    /// When one cannot be written whole, or the disk does not confirm.
    pub fn add(&mut self, entries: &[&Entry]) -> Result<(), Failed> {
        let mut append = || -> io::Result<()> {
            for entry in entries {
                let record = record(entry);
                // One write, not write_all: the rest of a short write could come after another
                // process's record.
                if self.log.write(&record)? != record.len() {
                    return Err(io::ErrorKind::StorageFull.into());
                }
            }
            self.log.sync_data()
        };
        append().map_err(|error| fault("write to", &self.directory, &error))
    }

    /// Reads the records appended since the last time, by any process.
    fn read_on(&mut self) -> io::Result<()> {
        let end = self.log.metadata()?.len();
        let mut changed = false;
        while self.offset < end {
            let length = (end - self.offset).min(PIECE_BYTES);
            let mut piece = vec![0; length as usize];
            self.log.read_exact_at(&mut piece, self.offset)?;
            let (consumed, entries) = scan(&piece);
            for entry in entries {
                changed = true;
                self.total += 1;
                self.latest.push_front(entry);
                self.latest.truncate(SHOWN);
            }
            let more = self.offset + length < end;
            self.offset += consumed as u64;
            match (consumed, more) {
                // A piece without any record: damage. A record may begin at its end.
                (0, true) => self.offset += length - (HEADER_BYTES + PAYLOAD_BYTES_MAX) as u64,
                (_, true) => {}
                // The rest may still be being written.
                (_, false) => break,
            }
        }
        if changed {
            self.shown = self.latest.iter().cloned().collect();
        }
        Ok(())
    }
}

impl Store for Embedded {
    fn call(&mut self, call: &Call) -> Result<Reply, Failed> {
        match call {
            Call::Page { visit } => self.page(*visit),
            Call::Add(entry) => self.add(&[entry]).map(|()| Reply::Added),
        }
    }
}

fn fault(what: &str, directory: &Path, error: &io::Error) -> Failed {
    Failed(format!(
        "cannot {what} the guest book in {}: {error}; give another directory with --store",
        directory.display()
    ))
}

fn record(entry: &Entry) -> Vec<u8> {
    let payload = entry.encode();
    let mut record = Vec::with_capacity(HEADER_BYTES + payload.len());
    record.extend_from_slice(&MAGIC);
    record.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    record.extend_from_slice(&crc32fast::hash(&payload).to_le_bytes());
    record.extend_from_slice(&payload);
    record
}

/// Returns all whole records in `bytes`, and how many bytes are done with. Bytes that are no record
/// are skipped when a whole record follows, else they are left: the rest may still come.
fn scan(bytes: &[u8]) -> (usize, Vec<Entry>) {
    let (mut done, mut entries) = (0, Vec::new());
    let mut at = 0;
    while at + HEADER_BYTES <= bytes.len() {
        match record_at(&bytes[at..]) {
            Some((entry, length)) => {
                entries.push(entry);
                at += length;
                done = at;
            }
            None => {
                let next = bytes[at + 1..].iter().position(|byte| *byte == MAGIC[0]);
                match next {
                    Some(distance) => at += 1 + distance,
                    None => break,
                }
            }
        }
    }
    (done, entries)
}

/// The record that begins at the first byte, and its length.
fn record_at(bytes: &[u8]) -> Option<(Entry, usize)> {
    let rest = bytes.strip_prefix(&MAGIC)?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let (checksum, rest) = rest.split_first_chunk::<4>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let payload = rest.get(..length)?;
    if length > PAYLOAD_BYTES_MAX || crc32fast::hash(payload) != u32::from_le_bytes(*checksum) {
        return None;
    }
    Some((Entry::decode(payload)?, HEADER_BYTES + length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(text: &str) -> Entry {
        Entry {
            at_unix_s: 1,
            name: "n".to_owned(),
            text: text.to_owned(),
        }
    }

    fn texts(store: &mut Embedded) -> Vec<String> {
        match store.page(false) {
            Ok(Reply::Page { entries, .. }) => {
                entries.iter().map(|entry| entry.text.clone()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_torn_record_is_passed_over_once_another_follows() -> Result<(), Box<dyn std::error::Error>>
    {
        let directory = tempfile::tempdir()?;
        let mut reader = Embedded::open(directory.path())?;
        let mut writer = Embedded::open(directory.path())?;
        writer.add(&[&entry("one")])?;
        let torn = record(&entry("two"));
        // A crash after each byte of the record in turn.
        for length in 0..torn.len() {
            writer.log.write_all(&torn[..length])?;
            assert_eq!(
                reader.offset,
                reader.offset.min(writer.log.metadata()?.len())
            );
            assert!(!texts(&mut reader).contains(&"two".to_owned()));
            writer.add(&[&entry(&format!("after {length}"))])?;
            assert_eq!(texts(&mut reader)[0], format!("after {length}"));
        }
        let again = texts(&mut Embedded::open(directory.path())?);
        assert_eq!(again, texts(&mut reader));
        Ok(())
    }

    #[test]
    fn a_record_being_written_is_read_when_it_is_whole() -> Result<(), Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let mut store = Embedded::open(directory.path())?;
        for byte in record(&entry("slow")) {
            assert_eq!(texts(&mut store), Vec::<String>::new());
            store.log.write_all(&[byte])?;
        }
        assert_eq!(texts(&mut store), ["slow"]);
        Ok(())
    }

    #[test]
    fn damage_larger_than_a_piece() -> Result<(), Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let mut store = Embedded::open(directory.path())?;
        store.add(&[&entry("before")])?;
        store.log.write_all(&vec![0xfe; 3 * PIECE_BYTES as usize])?;
        store.add(&[&entry("behind")])?;
        assert_eq!(
            texts(&mut Embedded::open(directory.path())?),
            ["behind", "before"]
        );
        assert_eq!(texts(&mut store), ["behind", "before"]);
        Ok(())
    }

    proptest! {
        #[test]
        fn entries_come_back(name in ".{0,64}", text in ".{0,200}", at in any::<u64>()) {
            let entry = Entry { at_unix_s: at, name, text };
            prop_assert_eq!(Entry::decode(&entry.encode()), Some(entry.clone()));
            let bytes = record(&entry);
            prop_assert_eq!(scan(&bytes), (bytes.len(), vec![entry]));
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Entry::decode(&bytes);
            let _ = scan(&[&MAGIC[..], &bytes].concat());
        }
    }
}
