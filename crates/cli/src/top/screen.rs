//! The terminal: set up, drawn on, and put back on every way out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
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
        let mut wait = wait;
        let mut pressed = Pressed::Nothing;
        while event::poll(wait).context("cannot read keys")? {
            wait = Duration::ZERO;
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
        ratatui::restore();
    }
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
        KeyCode::Esc => Some(Key::Escape),
        _ => None,
    }
}

/// Shows what is watched until it is quit.
pub fn live(live: &mut Live, interval: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut state = State::new(Source::Live);
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
                    state.notice = Some(steering::act(&paths, &action));
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
        screen.draw(&state)?;
    }
    Ok(())
}
