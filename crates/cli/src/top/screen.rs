//! The terminal: sets it up, draws on it, and restores it on every way out.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use wakeone_control::policy::Policy;
use wakeone_top::{Action, Key, Source, State, draw};

use super::live::Live;
use super::steering;

/// How soon after the start the first refresh is shown.
const FIRST: Duration = Duration::from_millis(250);

/// The terminal in raw mode with a screen of its own. Dropping this restores it. A panic restores it before it prints
/// its message.
pub struct Screen(DefaultTerminal);

/// The result of reading the terminal.
pub enum Pressed {
    /// Nothing.
    Nothing,
    /// A key or a new size that takes a redraw.
    Drawn,
    /// A key that requests an action.
    Asked(Action),
}

impl Screen {
    /// Takes the terminal over.
    pub fn open() -> anyhow::Result<Self> {
        let terminal = ratatui::try_init();
        if terminal.is_err() {
            // The set-up may have failed halfway.
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

    /// Shows a text, cut where the terminal ends.
    pub fn text(&mut self, text: &str) -> anyhow::Result<()> {
        let shown = ratatui::widgets::Paragraph::new(text);
        self.0
            .draw(|frame| frame.render_widget(shown, frame.area()))
            .context("cannot draw on the terminal")?;
        Ok(())
    }

    /// Waits that long for a key that quits; a new size ends the wait.
    pub fn quits(&self, wait: Duration) -> anyhow::Result<bool> {
        if hung_up(wait) {
            return Ok(true);
        }
        while event::poll(Duration::ZERO).context("cannot read keys")? {
            if let Event::Key(key) = event::read().context("cannot read keys")?
                && matches!(
                    key_of(key),
                    Some(Key::Interrupt | Key::Escape | Key::Char('q'))
                )
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits that long for keys, and passes all of them to the view.
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
        // A terminal that was closed cannot be restored, nor shown an error.
        let _ = ratatui::try_restore();
    }
}

/// Waits that long for keys or a new size; returns whether the terminal was closed. (crossterm reads a closed
/// terminal again and again, without end.)
fn hung_up(wait: Duration) -> bool {
    let stdin = io::stdin();
    let mut keys = [PollFd::new(&stdin, PollFlags::IN)];
    let wait = Timespec::try_from(wait).ok();
    // A signal ends the wait early, for example that of a new size.
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

/// Shows the watched listeners until the user quits.
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
        // The last observations are recorded as well.
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

    /// The test below sets this when it starts this program again.
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
