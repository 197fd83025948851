//! Recordings: a line of JSON for each listener at each refresh.
//!
//! A file from elsewhere is read with suspicion: a line has a longest length, and only one refresh is held at a time.
//! Its text is shown without anything that a terminal would act on.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::frame::{Frame, Place};

/// The version of the lines.
const SCHEMA: u32 = 1;
/// The longest line that is read. 256 workers, the most that are told apart, with full histograms take 2 MB.
pub const LONGEST_LINE: usize = 16 << 20;
/// The most listeners of one refresh.
const MOST_LISTENERS: usize = 1024;
/// The most workers, sockets or slots of one listener.
const MOST_PARTS: usize = 4096;
/// The most workers of all its sockets, each counted once for each socket that it serves.
const MOST_SERVED: usize = 65_536;

#[derive(Serialize)]
struct LineOut<'a> {
    schema: u32,
    watch: &'a wakeone_model::snapshot::Watch,
    steering: &'a Option<crate::Steering>,
}

#[derive(Deserialize)]
struct LineIn {
    schema: u32,
    watch: wakeone_model::snapshot::Watch,
    #[serde(default)]
    steering: Option<crate::Steering>,
}

/// Why a recording cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum BadRecording {
    /// Nothing is in it.
    #[error("it is empty: no refresh was recorded")]
    Empty,
    /// It cannot be read.
    #[error("reading it failed: {0}")]
    Read(#[from] io::Error),
    /// A line is longer than any that is written.
    #[error(
        "line {0} is longer than {limit} MiB: `wakeone top --record` writes no such line",
        limit = LONGEST_LINE >> 20
    )]
    Long(u64),
    /// A line is something else.
    #[error("line {line} was not written by `wakeone top --record`: {why}")]
    Foreign {
        /// Which line.
        line: u64,
        /// The parser's message.
        why: String,
    },
    /// A line is of a later version.
    #[error(
        "line {line} has schema {schema}, this version reads {SCHEMA}: use the version that recorded it"
    )]
    Schema {
        /// Which line.
        line: u64,
        /// Its schema.
        schema: u32,
    },
}

/// Writes frames.
pub struct Recorder<W: Write> {
    out: W,
}

impl<W: Write> Recorder<W> {
    /// Into a file, say.
    pub fn new(out: W) -> Self {
        Self { out }
    }

    /// Writes a refresh: all of it, or an error.
    ///
    /// # Errors
    /// The error of writing.
    pub fn write(&mut self, frames: &[Frame]) -> io::Result<()> {
        for frame in frames {
            let line = LineOut {
                schema: SCHEMA,
                watch: &frame.watch,
                steering: &frame.steering,
            };
            let mut text = serde_json::to_vec(&line)?;
            text.push(b'\n');
            self.out.write_all(&text)?;
        }
        self.out.flush()
    }
}

/// Reads refreshes.
pub struct Replay<R: BufRead> {
    input: R,
    line: u64,
    /// The first of the next refresh.
    next: Option<Frame>,
    /// Its last line was not finished when the recording ended.
    cut: bool,
}

impl<R: BufRead> Replay<R> {
    /// Opens a recording.
    ///
    /// # Errors
    /// [`BadRecording`], where it has not even one refresh.
    pub fn new(input: R) -> Result<Self, BadRecording> {
        let mut replay = Self {
            input,
            line: 0,
            next: None,
            cut: false,
        };
        replay.next = replay.frame()?;
        if replay.next.is_none() {
            return Err(BadRecording::Empty);
        }
        Ok(replay)
    }

    /// Whether the recording ends in the middle of a line, because its writer was ended.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// The frames of the next refresh; `None` at the end.
    ///
    /// # Errors
    /// [`BadRecording`].
    pub fn refresh(&mut self) -> Result<Option<Vec<Frame>>, BadRecording> {
        let Some(first) = self.next.take() else {
            return Ok(None);
        };
        let mut places: Vec<Place> = vec![first.place()];
        let mut frames = vec![first];
        // A listener that comes again is of the next refresh.
        while let Some(frame) = self.frame()? {
            if places.contains(&frame.place()) || places.len() >= MOST_LISTENERS {
                self.next = Some(frame);
                break;
            }
            places.push(frame.place());
            frames.push(frame);
        }
        Ok(Some(frames))
    }

    fn frame(&mut self) -> Result<Option<Frame>, BadRecording> {
        let Some((text, whole)) = self.text()? else {
            return Ok(None);
        };
        match parse(&text, self.line) {
            Ok(frame) => Ok(Some(frame)),
            Err(_) if !whole && self.line > 1 => {
                self.cut = true;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The next line that is not blank, and whether its end was there.
    fn text(&mut self) -> Result<Option<(Vec<u8>, bool)>, BadRecording> {
        loop {
            let mut text = Vec::new();
            let mut limited = io::Read::take(&mut self.input, LONGEST_LINE as u64 + 1);
            if limited.read_until(b'\n', &mut text)? == 0 {
                return Ok(None);
            }
            self.line += 1;
            let whole = text.ends_with(b"\n");
            if text.len() > LONGEST_LINE {
                return Err(BadRecording::Long(self.line));
            }
            if !text.trim_ascii().is_empty() {
                return Ok(Some((text, whole)));
            }
        }
    }
}

fn parse(text: &[u8], line: u64) -> Result<Frame, BadRecording> {
    let foreign = |why: String| BadRecording::Foreign { line, why };
    let read: LineIn = serde_json::from_slice(text).map_err(|error| {
        // Even of a later version the schema can be read.
        #[derive(Deserialize)]
        struct Which {
            schema: u32,
        }
        match serde_json::from_slice::<Which>(text) {
            Ok(which) if which.schema != SCHEMA => BadRecording::Schema {
                line,
                schema: which.schema,
            },
            // The message quotes the file, which may hold anything.
            _ => foreign(wakeone_model::layout::printable(&error.to_string())),
        }
    })?;
    if read.schema != SCHEMA {
        return Err(BadRecording::Schema {
            line,
            schema: read.schema,
        });
    }
    let last = &read.watch.last;
    let slots = read.steering.as_ref().map_or(0, |s| s.slots.len());
    let parts = last.workers.len().max(last.listener.sockets.len());
    let served: usize = read.watch.serves.values().map(Vec::len).sum();
    if parts.max(slots) > MOST_PARTS || served > MOST_SERVED {
        return Err(foreign(format!(
            "it has more than {MOST_PARTS} workers, sockets or slots"
        )));
    }
    Ok(Frame {
        watch: read.watch,
        steering: read.steering,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures;
    use crate::{Source, State, plain};

    fn recorded(refreshes: &[Vec<Frame>]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut recorder = Recorder::new(&mut out);
        for frames in refreshes {
            recorder.write(frames).expect("written");
        }
        out
    }

    fn two() -> Vec<Frame> {
        vec![fixtures::shared(), fixtures::at(fixtures::steered(), 81)]
    }

    fn why(file: &[u8]) -> String {
        let read = || -> Result<(), BadRecording> {
            let mut replay = Replay::new(file)?;
            while replay.refresh()?.is_some() {}
            Ok(())
        };
        read().expect_err("it is bad").to_string()
    }

    #[test]
    fn what_was_recorded_is_read_refresh_by_refresh() {
        let refreshes = [two(), vec![fixtures::shared()], two()];
        let file = recorded(&refreshes);
        assert_eq!(file.iter().filter(|b| **b == b'\n').count(), 5);
        let mut replay = Replay::new(&file[..]).expect("a recording");
        // The second has one listener only. The other one's frame that comes next cannot be known to be of the third.
        // As far as the file shows, it is of the second.
        assert_eq!(replay.refresh().expect("read"), Some(refreshes[0].clone()));
        let mut rest = Vec::new();
        while let Some(frames) = replay.refresh().expect("read") {
            rest.extend(frames);
        }
        assert_eq!(rest, [refreshes[1].clone(), refreshes[2].clone()].concat());
        assert!(!replay.is_cut());
    }

    #[test]
    fn a_recording_that_was_cut_is_shown_as_far_as_it_goes() {
        let file = recorded(&[two(), two()]);
        let mut replay = Replay::new(&file[..file.len() - 40]).expect("a recording");
        assert_eq!(replay.refresh().expect("read").map(|f| f.len()), Some(2));
        assert_eq!(replay.refresh().expect("read").map(|f| f.len()), Some(1));
        assert!(replay.refresh().expect("read").is_none());
        assert!(replay.is_cut());
        // Only the end of its last line missing is not cut.
        let mut replay = Replay::new(&file[..file.len() - 1]).expect("a recording");
        while replay.refresh().expect("read").is_some() {}
        assert!(!replay.is_cut());
    }

    #[test]
    fn what_is_no_recording_is_said_in_a_sentence() {
        assert!(why(b"").contains("it is empty"));
        assert!(why(b"\n\n").contains("it is empty"));
        assert!(why(b"hello\n").starts_with("line 1 was not written by `wakeone top --record`"));
        assert!(why(b"\xff\xfe\n").starts_with("line 1 was not written"));
        assert!(why(b"{\"schema\":2,\"watch\":{}}\n").contains("line 1 has schema 2"));
        let mut second = recorded(&[two()]);
        second.extend(b"{\"\x1b[2J\":1}\n");
        let said = why(&second);
        assert!(said.starts_with("line 3 was not written"), "{said}");
        assert!(!said.contains(char::is_control), "{said:?}");
        let deep = [b"[".repeat(1 << 20), b"\n".to_vec()].concat();
        assert!(why(&deep).starts_with("line 1 was not written"));
    }

    #[test]
    fn a_line_without_end_is_not_kept() {
        /// Gives the same byte for ever, and counts.
        struct Endless(usize);
        impl io::Read for Endless {
            fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
                out.fill(b'1');
                self.0 += out.len();
                Ok(out.len())
            }
        }
        let mut input = io::BufReader::new(Endless(0));
        let error = Replay::new(&mut input).err().expect("it is bad");
        assert_eq!(
            error.to_string(),
            "line 1 is longer than 16 MiB: `wakeone top --record` writes no such line"
        );
        assert!(input.get_ref().0 < LONGEST_LINE + (1 << 20));
    }

    #[test]
    fn more_parts_than_any_server_has_are_refused() {
        let mut frame = fixtures::shared();
        frame.watch.last.listener.sockets = vec![fixtures::socket(1, 1); MOST_PARTS + 1];
        assert!(why(&recorded(&[vec![frame]])).contains("more than 4096"));
        let mut frame = fixtures::shared();
        frame.watch.serves.insert(1, vec![7; MOST_SERVED + 1]);
        assert!(why(&recorded(&[vec![frame]])).contains("more than 4096"));
    }

    /// Changes every number of a recording to one that no kernel reports.
    fn with_numbers(file: &[u8], numbers: &[u64]) -> Vec<u8> {
        fn walk(value: &mut serde_json::Value, next: &mut impl Iterator<Item = u64>) {
            match value {
                serde_json::Value::Number(number) => {
                    if let Some(new) = next.next() {
                        *number = new.into();
                    }
                }
                serde_json::Value::Array(parts) => parts.iter_mut().for_each(|v| walk(v, next)),
                serde_json::Value::Object(parts) => {
                    parts
                        .iter_mut()
                        .filter(|(key, _)| *key != "schema")
                        .for_each(|(_, v)| walk(v, next));
                }
                _ => {}
            }
        }
        let mut numbers = numbers.iter().copied().cycle();
        let mut out = Vec::new();
        for line in file.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
            let mut value = serde_json::from_slice(line).expect("JSON");
            walk(&mut value, &mut numbers);
            out.extend(value.to_string().into_bytes());
            out.push(b'\n');
        }
        out
    }

    /// Shows all of a file, and ignores its errors.
    fn show(file: &[u8]) -> usize {
        let Ok(mut replay) = Replay::new(file) else {
            return 0;
        };
        let mut state = State::new(Source::Replay);
        let mut terminal =
            ratatui::Terminal::new(ratatui::backend::TestBackend::new(80, 24)).expect("terminal");
        let mut shown = 0;
        while let Ok(Some(frames)) = replay.refresh() {
            for frame in &frames {
                plain::text(frame, None, wakeone_model::layout::Style::default());
            }
            state.refresh(frames);
            terminal
                .draw(|frame| crate::draw(frame, &state))
                .expect("draws");
            shown += 1;
        }
        shown
    }

    #[test]
    fn the_largest_numbers_do_no_harm() {
        let file = recorded(&[two(), two()]);
        assert_eq!(show(&file), 2);
        // All fields of 64 bits at their largest would leave those of 32 and 16 unreadable: change them one by one.
        let text = String::from_utf8(file).expect("text");
        for field in [
            "at_ns",
            "accepted",
            "woken",
            "connections",
            "wakeups",
            "count",
            "sum_us",
            "max_us",
            "cpu_ns",
            "passive_opens",
            "looks",
            "selected",
            "rescues",
            "rescued",
            "fallbacks",
            "cookie",
            "inode",
        ] {
            let name = format!("\"{field}\":");
            let largest = text.split(&name).enumerate().map(|(n, part)| {
                let digits = part.chars().take_while(char::is_ascii_digit).count();
                match n {
                    0 => part.to_owned(),
                    // A flag of the same name.
                    _ if digits == 0 => format!("{name}{part}"),
                    _ => format!("{name}{}{}", u64::MAX, &part[digits..]),
                }
            });
            let changed: String = largest.collect();
            assert_ne!(changed, text, "{field}");
            assert!(show(changed.as_bytes()) > 0, "{field}");
        }
    }

    #[test]
    fn recordings_survive_foreign_bytes() {
        let seeds = [recorded(&[two()]), recorded(&[vec![fixtures::shared()]])];
        crate::foreign::survives("recording", &seeds, |bytes| {
            let Ok(mut replay) = Replay::new(bytes) else {
                return;
            };
            let mut lines = 0;
            while let Ok(Some(frames)) = replay.refresh() {
                lines += frames.len();
            }
            assert!(lines <= bytes.split(|byte| *byte == b'\n').count());
        });
    }

    proptest! {
        #[test]
        fn any_numbers_do_no_harm(numbers in prop::collection::vec(0..=u64::from(u16::MAX), 1..50)) {
            let file = recorded(&[two(), two()]);
            prop_assert!(show(&with_numbers(&file, &numbers)) > 0);
        }

        #[test]
        fn any_damage_does_no_harm(at in 0_usize..4000, byte: u8) {
            let mut file = recorded(&[two()]);
            let at = at % file.len();
            file[at] = byte;
            show(&file);
        }
    }
}
