//! Parsers of foreign bytes: with any input they end soon, and take bounded memory.
//!
//! Each parser has a folder of inputs in `tests/corpus`. All of them are tried first, then mutations of them, for a
//! second or for `WAKEONE_FUZZ_SECONDS`. An input that makes a parser fail is shortened as far as possible, and written
//! to that folder. So is one for which a parser does not end, as it is. From then on it is tried each time.

use std::cell::Cell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, TestError, TestRunner};

/// A parser that takes this long for one input counts as endless.
const ENDLESS: Duration = Duration::from_secs(20);
/// The most memory that a parser of inputs of some kB may add to the whole test program.
const MOST_MEMORY_KB: u64 = 512 << 10;
/// The longest mutated input.
const MOST_BYTES: usize = 64 << 10;

/// Tries a parser with the inputs in `tests/corpus/NAME`, with these `seeds`, and with mutations of both.
pub fn survives(name: &str, seeds: &[Vec<u8>], parse: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus");
    let folder = folder.join(name);
    let mut seeds = seeds.to_vec();
    seeds.extend(kept(&folder));
    assert!(!seeds.is_empty(), "nothing is in {}", folder.display());
    let before = resident_kb();
    let guard = Guard::watch(name, &folder);
    let parse = |bytes: &[u8]| {
        guard.now(bytes);
        parse(bytes);
    };
    seeds.iter().for_each(|seed| parse(seed));
    let until = Instant::now() + fuzz_time();
    let inputs = changed(seeds);
    let count = Cell::new(0u64);
    while Instant::now() < until {
        // A new runner each time: one that has run its cases tries no more.
        let mut runner = TestRunner::new(Config {
            cases: 50,
            failure_persistence: None,
            ..Config::default()
        });
        let tried = runner.run(&inputs, |input| {
            count.set(count.get() + 1);
            parse(&input);
            Ok(())
        });
        if let Err(TestError::Fail(why, input)) = tried {
            panic!("{why}: kept as {}", keep(&folder, &input).display());
        }
    }
    // No macro of std is used, because the test harness captures its output.
    let _ = writeln!(std::io::stderr(), "{name}: {} inputs", count.get());
    let grown = resident_kb().saturating_sub(before);
    assert!(grown < MOST_MEMORY_KB, "{name} took {grown} kB");
}

/// A second; ten minutes under `make soak`.
fn fuzz_time() -> Duration {
    let seconds = std::env::var("WAKEONE_FUZZ_SECONDS").ok();
    Duration::from_secs(seconds.map_or(1, |n| n.parse().expect("WAKEONE_FUZZ_SECONDS")))
}

fn kept(folder: &Path) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    let read = |path: PathBuf| std::fs::read(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
    paths.into_iter().map(read).collect()
}

fn keep(folder: &Path, input: &[u8]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    input.hash(&mut hasher);
    let path = folder.join(format!("found-{:016x}", hasher.finish()));
    let _ = std::fs::create_dir_all(folder);
    let _ = std::fs::write(&path, input);
    path
}

/// The largest resident memory of this process so far.
fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().split(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Ends the program when a parser does not end, and keeps the input.
struct Guard {
    input: Arc<Mutex<(Instant, Vec<u8>)>>,
    /// Dropped with this, which ends the thread.
    _end: std::sync::mpsc::Sender<()>,
}

impl Guard {
    fn watch(name: &str, folder: &Path) -> Self {
        let input = Arc::new(Mutex::new((Instant::now(), Vec::new())));
        let (sender, end) = channel();
        let (watched, name, folder) = (Arc::clone(&input), name.to_owned(), folder.to_owned());
        std::thread::spawn(move || {
            while end.recv_timeout(ENDLESS / 4) == Err(RecvTimeoutError::Timeout) {
                let now = watched.lock().unwrap_or_else(PoisonError::into_inner);
                if now.0.elapsed() > ENDLESS {
                    let path = keep(&folder, &now.1);
                    let path = path.display();
                    let _ = writeln!(std::io::stderr(), "{name} does not end for {path}");
                    std::process::exit(101);
                }
            }
        });
        Self {
            input,
            _end: sender,
        }
    }

    fn now(&self, bytes: &[u8]) {
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        input.0 = Instant::now();
        input.1.clear();
        input.1.extend_from_slice(bytes);
    }
}

/// One change of an input.
#[derive(Debug, Clone)]
enum Change {
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, Index),
    /// A part once more, many times.
    Repeat(Index, Index, usize),
    /// A part of another input.
    Graft(Index, Vec<u8>, Index, Index),
}

fn part(bytes: &[u8], from: &Index, to: &Index) -> std::ops::Range<usize> {
    let (from, to) = (from.index(bytes.len() + 1), to.index(bytes.len() + 1));
    from.min(to)..from.max(to)
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Set(at, to) if !bytes.is_empty() => {
                let at = at.index(bytes.len());
                bytes[at] = *to;
            }
            Self::Set(_, to) => bytes.push(*to),
            Self::Insert(at, more) => {
                let at = at.index(bytes.len() + 1);
                bytes.splice(at..at, more.iter().copied());
            }
            Self::Remove(from, to) => drop(bytes.drain(part(bytes, from, to))),
            Self::Repeat(from, to, times) => {
                let range = part(bytes, from, to);
                let more = bytes[range.clone()].repeat(*times);
                bytes.splice(range.end..range.end, more);
            }
            Self::Graft(at, other, from, to) => {
                let at = at.index(bytes.len() + 1);
                bytes.splice(at..at, other[part(other, from, to)].iter().copied());
            }
        }
        bytes.truncate(MOST_BYTES);
    }
}

/// Byte strings that often break parsers.
const WORDS: [&[u8]; 16] = [
    b"0",
    b"-1",
    b"255",
    b"65536",
    b"4294967296",
    b"9223372036854775808",
    b"99999999999999999999999999",
    b"1e999",
    b"\r\n",
    b"\n",
    b"\0",
    b"\xd0",
    b"\xff\xfe",
    b"\xc2\x9b2J",
    b"((((((((",
    b"[[[[{{{{",
];

fn changed(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let index = any::<Index>;
    let word = select(WORDS.to_vec()).prop_map(<[u8]>::to_vec);
    let change = prop_oneof![
        3 => (index(), any::<u8>()).prop_map(|(at, to)| Change::Set(at, to)),
        1 => (index(), vec(any::<u8>(), 1..9)).prop_map(|(at, more)| Change::Insert(at, more)),
        3 => (index(), word).prop_map(|(at, more)| Change::Insert(at, more)),
        2 => (index(), index()).prop_map(|(from, to)| Change::Remove(from, to)),
        1 => (index(), index(), 1_usize..200).prop_map(|(a, b, n)| Change::Repeat(a, b, n)),
        2 => (index(), select(seeds.clone()), index(), index())
            .prop_map(|(at, other, a, b)| Change::Graft(at, other, a, b)),
    ];
    let of_seed = (select(seeds), vec(change, 0..6)).prop_map(|(mut bytes, changes)| {
        changes.iter().for_each(|change| change.apply(&mut bytes));
        bytes
    });
    prop_oneof![9 => of_seed, 1 => vec(any::<u8>(), 0..2000)]
}
