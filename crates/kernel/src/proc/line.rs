//! Lines of /proc/PID/stat and of /proc/PID/status are read here, whoever has fetched them.
//!
//! Most of /proc is numbers, but names in it are whatever bytes a process chose: a long name in Cyrillic or Chinese is
//! cut by the kernel in the middle of a letter. So nothing of /proc is read as text that must be valid UTF-8.

/// A line of /proc/PID/stat, of a process or thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// Its name: at most 15 bytes (`TASK_COMM_LEN`, include/linux/sched.h), not always text.
    pub name: Vec<u8>,
    /// The letter of its state: `R`, `S`, `D`, `T`, `Z` …
    pub state: char,
    /// Its parent's id.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// It ends: it runs no code of its own any more, but may still hold files (`PF_EXITING`, include/linux/sched.h).
    pub ending: bool,
    /// Its time in the kernel so far, in clock ticks. 0 where the line ends before.
    pub system_ticks: u64,
    /// When it started: clock ticks since boot. 0 where the line ends before.
    pub started: u64,
}

/// A bit of the flags (include/linux/sched.h).
const PF_EXITING: u64 = 4;

impl Stat {
    /// `PID (NAME) STATE PARENT …` (fs/proc/array.c, `do_task_stat`). The name may hold anything, parentheses too: the
    /// last one ends it.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let begin = line.iter().position(|byte| *byte == b'(')?;
        let end = line.iter().rposition(|byte| *byte == b')')?;
        let mut fields = std::str::from_utf8(&line[end + 1..])
            .ok()?
            .split_ascii_whitespace();
        let number = |field: Option<&str>| field.map_or(Some(0), |text| text.parse::<u64>().ok());
        Some(Self {
            name: line.get(begin + 1..end)?.to_vec(),
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            // It is -1 while the process is being removed.
            group: fields
                .next()
                .and_then(|group| group.parse().ok())
                .unwrap_or(0),
            ending: number(fields.nth(3))? & PF_EXITING != 0,
            system_ticks: number(fields.nth(5))?,
            started: number(fields.nth(6))?,
        })
    }
}

/// The users of a process by /proc/PID/status: real, effective, saved and file system (fs/proc/array.c, `task_state`).
pub(crate) fn users(status: &[u8]) -> Option<[u32; 4]> {
    let mut lines = status.split(|byte| *byte == b'\n');
    let users = lines.find_map(|line| line.strip_prefix(b"Uid:"))?;
    let mut users = std::str::from_utf8(users).ok()?.split_ascii_whitespace();
    let mut next = || users.next()?.parse().ok();
    Some([next()?, next()?, next()?, next()?])
}

/// The permitted capabilities of a process by /proc/PID/status, a bit for each.
pub(crate) fn permitted(status: &[u8]) -> Option<u64> {
    let mut lines = status.split(|byte| *byte == b'\n');
    let set = lines.find_map(|line| line.strip_prefix(b"CapPrm:"))?;
    u64::from_str_radix(std::str::from_utf8(set).ok()?.trim(), 16).ok()
}

/// Bytes as text.
pub(crate) fn as_text(bytes: Vec<u8>) -> String {
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &[u8], rest: &str) -> Vec<u8> {
        [b"7 (", name, b") ", rest.as_bytes()].concat()
    }

    #[test]
    fn a_name_may_be_any_bytes() {
        let fields: Vec<String> = (4..=52).map(|field: u32| field.to_string()).collect();
        let rest = format!("S {}\n", fields.join(" "));
        for name in [
            &b"nginx"[..],
            b"",
            b"a) b (c",
            b") S 9 9 (",
            "сервер-".as_bytes(),
            b"\xd1\x81\xd0\xb5\xd1",
            b"\xff\xfe)\xff",
            b"line\nbreak",
        ] {
            let stat = Stat::parse(&line(name, &rest)).expect("a stat");
            assert_eq!((&stat.name[..], stat.state), (name, 'S'));
            assert_eq!((stat.parent, stat.started), (4, 22));
            assert_eq!((stat.ending, stat.system_ticks), (false, 15));
        }
        for broken in ["", "7", "7 (a", "7 a) S 1", ")(", "7 (a) S", "7 (a) S x"] {
            assert_eq!(Stat::parse(broken.as_bytes()), None, "{broken}");
        }
        let ends = "R 1 7 7 0 -1 4194308 1";
        assert!(Stat::parse(&line(b"a", ends)).is_some_and(|stat| stat.ending));
        let rest = "S x x x x x x x x x x x x x x x x x x x x";
        assert_eq!(Stat::parse(&line(b"a", rest)), None);
    }

    #[test]
    fn a_thread_with_such_a_name_is_read_as_any_other() {
        let thread = std::thread::spawn(|| {
            let cut = std::ffi::CString::new("обработчик").expect("no zero");
            nix::sys::prctl::set_name(&cut).expect("a name");
            let tid = rustix::thread::gettid();
            let place = format!("/proc/self/task/{tid}");
            let stat = std::fs::read(format!("{place}/stat")).expect("stat");
            assert!(std::str::from_utf8(&stat).is_err());
            let stat = Stat::parse(&stat).expect("a stat");
            assert_eq!(stat.name, &"обработчик".as_bytes()[..15]);
            assert_eq!(
                (stat.state, stat.parent),
                (
                    'R',
                    rustix::process::getppid().map_or(0, |pid| pid.as_raw_pid() as u32)
                )
            );
            assert!(stat.started > 0);
            let status = as_text(std::fs::read(format!("{place}/status")).expect("status"));
            assert!(status.contains("\nvoluntary_ctxt_switches:"), "{status}");
        });
        thread.join().expect("thread");
    }
}
