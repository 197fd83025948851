//! Shows a recording.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use wakeone_top::{Action, Frame, Replay, Source, State};

use super::screen::{Pressed, Screen};
use super::{texts, wrote};

/// How often to check the keys and the clock.
const BEAT: Duration = Duration::from_millis(20);
/// The longest wait between two refreshes, even if the recording has a longer one.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

fn open(path: &Path) -> anyhow::Result<Replay<BufReader<File>>> {
    let file = File::open(path)?;
    anyhow::ensure!(!file.metadata()?.is_dir(), "it is a folder");
    Ok(Replay::new(BufReader::new(file))?)
}

/// The time from one refresh to the next, as recorded.
fn apart(earlier: &[Frame], later: &[Frame]) -> Duration {
    let at = |frames: &[Frame]| frames.first().map_or(0, Frame::at_ns);
    // Two recordings in one file may be of two machines: then the clock goes back.
    let ns = at(later).saturating_sub(at(earlier));
    Duration::from_nanos(ns).min(LONGEST_WAIT)
}

/// Shows it in the terminal, at the pace at which it was recorded; the last refresh stays.
pub fn on_screen(path: &Path, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut recording = open(path)?;
    let mut state = State::new(Source::Replay);
    let mut shown = recording.refresh()?.unwrap_or_default();
    state.refresh(shown.clone());
    let mut next = recording.refresh()?;
    let mut screen = Screen::open()?;
    let mut left = wait(&shown, next.as_ref());
    let mut clock = Instant::now();
    screen.draw(&state)?;
    while !stop.load(Ordering::Relaxed) {
        match screen.keys(BEAT, &mut state)? {
            Pressed::Asked(Action::Quit) => break,
            Pressed::Nothing => {}
            Pressed::Drawn | Pressed::Asked(_) => screen.draw(&state)?,
        }
        let passed = clock.elapsed();
        clock = Instant::now();
        // While it is paused, its time does not pass.
        if !state.paused {
            left = left.saturating_sub(passed);
        }
        if !left.is_zero() || state.paused {
            continue;
        }
        let Some(frames) = next.take() else {
            continue;
        };
        state.refresh(frames.clone());
        shown = frames;
        next = recording.refresh()?;
        left = wait(&shown, next.as_ref());
        if next.is_none() {
            state.notice = Some(end(&recording).into());
        }
        screen.draw(&state)?;
    }
    Ok(())
}

fn wait(shown: &[Frame], next: Option<&Vec<Frame>>) -> Duration {
    next.map_or(Duration::ZERO, |next| apart(shown, next))
}

fn end(recording: &Replay<BufReader<File>>) -> &'static str {
    if recording.is_cut() {
        "the recording ends here, in the middle of a line; q quits"
    } else {
        "the recording ends here; q quits"
    }
}

/// Prints all of it as text, without waiting; `once`: its last refresh only.
pub fn as_text(path: &Path, once: bool, json: bool, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut recording = open(path)?;
    let mut before: Vec<Frame> = Vec::new();
    let mut last: Vec<Frame> = Vec::new();
    let mut first = true;
    while let Some(frames) = recording.refresh()? {
        if stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        before = std::mem::replace(&mut last, frames);
        if once {
            continue;
        }
        let gap = if first { "" } else { "\n" };
        first = false;
        if !wrote(&format!("{gap}{}", texts(&last, &before, false)?))? {
            return Ok(());
        }
    }
    if once {
        wrote(&texts(&last, &before, json)?)?;
    }
    if recording.is_cut() {
        eprintln!("note: {}", end(&recording));
    }
    Ok(())
}
