//! The terminal: set up, drawn on, and put back on every way out.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use wakeone::policy::Policy;
use wakeone_top::{Action, Key, Source, State, draw};

use super::live::Live;
use super::steering;

/// So soon after the start something is shown.
const FIRST: Duration = Duration::from_millis(250);

/// The terminal in raw mode with a screen of its own; as it was, once this is dropped. A panic puts it back before it
/// says why.
pub struct Screen(DefaultTerminal);

/// What came from the terminal.
pub enum Pressed {
    /// Nothing.
    Nothing,
    /// Something to draw anew for.
    Drawn,
    /// Something that the view asks for.
    Asked(Action),
}

impl Screen {
    /// Takes the terminal over.
    pub fn open() -> anyhow::Result<Self> {
        let terminal = ratatui::try_init();
        if terminal.is_err() {
            // Half of it may have been done.
            ratatui::restore();
        }
        Ok(Self(terminal.context(
            "cannot take over the terminal; --once prints plain text",
        )?))
    }

    /// Draws.
    pub fn draw(&mut self, state: &State) -> anyhow::Result<()> {
        self.0
            .draw(|frame| draw(frame, state))
            .context("cannot draw on the terminal")?;
        Ok(())
    }

    /// Waits that long for keys, and gives all that came to the view.
    pub fn keys(&self, wait: Duration, state: &mut State) -> anyhow::Result<Pressed> {
        let mut pressed = Pressed::Nothing;
        if hung_up(wait) {
            return Ok(Pressed::Asked(Action::Quit));
        }
        while event::poll(Duration::ZERO).context("cannot read keys")? {
            match event::read().context("cannot read keys")? {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    pressed = Pressed::Drawn;
                    if let Some(action) = key_of(key).and_then(|key| state.press(key)) {
                        return Ok(Pressed::Asked(action));
                    }
                }
                Event::Resize(..) => pressed = Pressed::Drawn,
                _ => {}
            }
        }
        Ok(pressed)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone cannot be put back, nor told so.
        let _ = ratatui::try_restore();
    }
}

/// Waits that long for keys, a new size or nothing; whether the terminal is gone. (crossterm reads a terminal that was
/// closed again and again, without an end.)
fn hung_up(wait: Duration) -> bool {
    let stdin = io::stdin();
    let mut keys = [PollFd::new(&stdin, PollFlags::IN)];
    let wait = Timespec::try_from(wait).ok();
    // A signal ends it early: that of a new size, say.
    let ready = poll(&mut keys, wait.as_ref()).unwrap_or(0);
    ready > 0
        && keys[0]
            .revents()
            .intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
}

fn key_of(key: KeyEvent) -> Option<Key> {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => Some(Key::Interrupt),
        KeyCode::Char(_) if control => None,
        KeyCode::Char(sign) => Some(Key::Char(sign)),
        KeyCode::Tab | KeyCode::Right => Some(Key::Tab),
        KeyCode::BackTab | KeyCode::Left => Some(Key::BackTab),
        KeyCode::Up => Some(Key::Up),
        KeyCode::Down => Some(Key::Down),
        KeyCode::Enter => Some(Key::Enter),
        KeyCode::Esc => Some(Key::Escape),
        _ => None,
    }
}

/// Shows what is watched until it is quit.
pub fn live(live: &mut Live, interval: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut state = State::new(Source::Live);
    state.policies = Policy::ALL.map(|policy| policy.name().to_owned()).into();
    let mut screen = Screen::open()?;
    let mut wait = interval.min(FIRST);
    let mut quit = false;
    screen.draw(&state)?;
    while !quit {
        let (shown, paths) = (state.tab, live.paths.clone());
        live.look_for(wait, Some(shown), &mut |wait| {
            match screen.keys(wait, &mut state)? {
                Pressed::Nothing => {}
                Pressed::Asked(Action::Quit) => quit = true,
                Pressed::Asked(action) => {
                    match (steering::act(&paths, &action), &action) {
                        (Ok(_), Action::ChangePolicy(change)) => state.changed(change),
                        (Ok(done), _) => state.notice = Some(done),
                        (Err(why), _) => state.notice = Some(why),
                    }
                    screen.draw(&state)?;
                }
                Pressed::Drawn => screen.draw(&state)?,
            }
            quit |= stop.load(Ordering::Relaxed);
            Ok(!quit)
        })?;
        wait = interval;
        // What was seen until now is written down as well.
        state.refresh(live.lap()?);
        if !quit {
            screen.draw(&state)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::{Command, Stdio};

    /// Set where the test below starts this program again.
    const TOLD: &str = "WAKEONE_TEST_PANICS";

    #[test]
    fn panics_where_it_is_told_to() {
        if std::env::var_os(TOLD).is_some() {
            let _screen = Screen::open().expect("a terminal");
            panic!("on purpose");
        }
    }

    #[test]
    fn a_panic_puts_the_terminal_back_before_it_says_why() {
        let folder = tempfile::tempdir().expect("folder");
        let file = |name: &str| folder.path().join(name);
        let own = std::env::current_exe().expect("this program");
        let command = format!(
            "stty rows 24 cols 100; stty -g > '{}'; '{}' --exact --nocapture top::screen::tests::panics_where_it_is_told_to; stty -g > '{}'",
            file("before").display(),
            own.display(),
            file("after").display()
        );
        let mut script = Command::new("script")
            .args(["-qefc", &command, &file("typescript").display().to_string()])
            .env("TERM", "xterm")
            .env(TOLD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("script");
        script.wait().expect("its end");
        let read = |name: &str| {
            let bytes = std::fs::read(Path::new(&file(name))).expect(name);
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let text = read("typescript");
        let (entered, left) = (text.find("\x1b[?1049h"), text.find("\x1b[?1049l"));
        let said = text.find("on purpose");
        assert!(
            entered.is_some() && entered < left && left < said,
            "{text:?}"
        );
        assert!(
            text.rfind("\x1b[?25l") <= text.rfind("\x1b[?25h"),
            "{text:?}"
        );
        assert_eq!(read("before"), read("after"));
    }
}
