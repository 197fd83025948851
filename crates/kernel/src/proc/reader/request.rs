//! The questions to the helper, and its answers: packets on a socket between two processes of the same binary.

/// The most bytes of one packet of an answer, its kind left out; and of memory that is read at a time.
pub(super) const MOST_BYTES: usize = 32 * 1024;
/// The most bytes of one file where a file of each entry of a folder is read.
pub(super) const MOST_OF_EACH: usize = 16 * 1024;
/// Bytes before those of an entry: its number, an errno, and how many bytes follow.
pub(super) const RECORD_HEAD: usize = 12;

const PATH_BYTES: usize = 96;
const FILE_BYTES: usize = 24;
/// Bytes of a request.
pub(super) const REQUEST_BYTES: usize = 24 + PATH_BYTES + FILE_BYTES;

/// The kind of a packet, its first byte: more follow.
pub(super) const MORE: u8 = 0;
/// The answer ends with this one.
pub(crate) const END: u8 = 1;
/// There is no answer, or it ends early: an errno follows.
pub(crate) const FAILED: u8 = 2;
/// A descriptor comes with this one, and an end after it.
pub(super) const DESCRIPTOR: u8 = 3;

/// The kind of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Read a file.
    File,
    /// List the entries of a folder that are numbers.
    Numbers,
    /// Read a file of each entry of a folder that is a number.
    FileOfEach,
    /// Read the links of a folder that are numbers.
    Links,
    /// Read a link.
    Link,
    /// Read memory.
    Memory,
    /// Share a descriptor.
    Descriptor,
}

const TASKS: [Task; 7] = [
    Task::File,
    Task::Numbers,
    Task::FileOfEach,
    Task::Links,
    Task::Link,
    Task::Memory,
    Task::Descriptor,
];

/// One question.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub task: Task,
    pub pid: u32,
    /// Where memory begins; the number of a descriptor.
    pub at: u64,
    /// Bytes of memory.
    pub length: u32,
    /// With the zeros that end them.
    pub path: [u8; PATH_BYTES],
    pub file: [u8; FILE_BYTES],
}

impl Request {
    /// A question about a process's file or folder, `below` /proc/PID. `None`: the name is too long.
    pub fn of(task: Task, pid: u32, below: &str, file: &str) -> Option<Self> {
        let mut request = Self {
            task,
            pid,
            at: 0,
            length: 0,
            path: [0; PATH_BYTES],
            file: [0; FILE_BYTES],
        };
        put(&mut request.path, &format!("/proc/{pid}/{below}"))?;
        put(&mut request.file, file)?;
        Some(request)
    }

    /// A question about memory, or a descriptor.
    pub fn at(task: Task, pid: u32, at: u64, length: u32) -> Self {
        Self {
            task,
            pid,
            at,
            length,
            path: [0; PATH_BYTES],
            file: [0; FILE_BYTES],
        }
    }

    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&(self.task as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.pid.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.at.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.length.to_ne_bytes());
        bytes[24..24 + PATH_BYTES].copy_from_slice(&self.path);
        bytes[24 + PATH_BYTES..].copy_from_slice(&self.file);
        bytes
    }

    /// The reverse. Allocates nothing.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let mut path = [0; PATH_BYTES];
        path.copy_from_slice(&bytes[24..24 + PATH_BYTES]);
        let mut file = [0; FILE_BYTES];
        file.copy_from_slice(&bytes[24 + PATH_BYTES..]);
        Some(Self {
            task: *TASKS.get(word(0) as usize)?,
            pid: word(4),
            at: u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|byte| bytes[8 + byte])),
            length: word(16),
            path,
            file,
        })
    }
}

/// Copies a text that leaves room for the zero that ends it.
fn put(room: &mut [u8], text: &str) -> Option<()> {
    let last = room.len() - 1;
    room[..last]
        .get_mut(..text.len())?
        .copy_from_slice(text.as_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_back() {
        for task in TASKS {
            let request = Request::of(task, 7, "task", "syscall").expect("short");
            let again = Request::decode(&request.encode()).expect("a request");
            assert_eq!((again.task, again.pid), (task, 7));
            assert!(again.path.starts_with(b"/proc/7/task\0"));
            assert!(again.file.starts_with(b"syscall\0"));
        }
        let memory = Request::at(Task::Memory, u32::MAX, u64::MAX, 9);
        let again = Request::decode(&memory.encode()).expect("a request");
        assert_eq!((again.pid, again.at, again.length), (u32::MAX, u64::MAX, 9));
        assert!(Request::of(Task::File, 7, &"x".repeat(PATH_BYTES), "").is_none());
        assert!(Request::of(Task::FileOfEach, 7, "task", &"x".repeat(FILE_BYTES)).is_none());
    }
}
