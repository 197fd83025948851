//! Tells what the threads of a process do, for a log.

use std::collections::HashMap;
use std::io;

use crate::proc::line::{Stat, as_text};
use crate::proc::reader;

/// Returns what each thread of a process does, a line each: its state, its system call, and where in the kernel it is as far as
/// that may be seen.
pub fn of(pid: u32, most: usize) -> Vec<String> {
    let files = |file| reader::file_of_each(pid, "task", file).unwrap_or_default();
    let text = |read: io::Result<Vec<u8>>| read.map(as_text).unwrap_or_default();
    let of = |file| -> HashMap<u32, String> {
        files(file)
            .into_iter()
            .map(|(tid, read)| (tid, text(read)))
            .collect()
    };
    let (places, calls, stacks) = (of("wchan"), of("syscall"), of("stack"));
    let line = |(tid, read): (u32, io::Result<Vec<u8>>)| {
        let stat = Stat::parse(&read.ok()?)?;
        let name = String::from_utf8_lossy(&stat.name).into_owned();
        let place = places
            .get(&tid)
            .filter(|place| !matches!(place.trim(), "" | "0"));
        let call = calls
            .get(&tid)
            .and_then(|line| line.split_whitespace().next());
        let frames = stacks.get(&tid).into_iter().flat_map(|stack| stack.lines());
        let frames: Vec<&str> = frames
            .filter_map(|line| line.split_whitespace().nth(1))
            .collect();
        Some(format!(
            "thread {tid} `{}` {}, system call {}, in {}, stack {}",
            name.escape_default(),
            stat.state,
            call.unwrap_or("unknown"),
            place.map_or("no known place", |place| place.trim()),
            if frames.is_empty() {
                "unknown".to_owned()
            } else {
                frames.join(" < ")
            },
        ))
    };
    files("stat")
        .into_iter()
        .filter_map(line)
        .take(most)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_is_told_by_name_and_call() {
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let sleeper = std::thread::Builder::new().name("one\nother".into());
        let sleeper = sleeper
            .spawn(move || ends.recv().is_err())
            .expect("a thread");
        let told = of(std::process::id(), 1000);
        assert!(
            told.iter().any(|line| line.contains(r"`one\nother`")),
            "{told:?}"
        );
        assert!(
            told.iter().all(|line| line.contains("system call")),
            "{told:?}"
        );
        assert_eq!(of(std::process::id(), 1).len(), 1);
        drop(end);
        sleeper.join().expect("ends");
    }
}
