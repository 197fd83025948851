//! Standard output, whose reader may have ended, and the width and colours of that reader.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;
use wakeone_model::layout::{Style, wrap};

/// Prints a text as it is. A reader that has ended, such as `head`, has read enough: that is no failure.
///
/// # Errors
/// Writing fails for any other reason.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// A value as a report of `--json`.
///
/// # Errors
/// The value cannot be written as JSON.
pub fn to_json(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Prints a value as [`to_json`].
///
/// # Errors
/// Those of [`print`] and [`to_json`].
pub fn print_json(value: &impl Serialize) -> io::Result<()> {
    print(&to_json(value)?)
}

/// Prints sentences, one a line; for a terminal they are wrapped between words.
///
/// # Errors
/// Those of [`print`].
pub fn print_wrapped(text: &str) -> io::Result<()> {
    let style = style();
    print(
        &text
            .lines()
            .map(|line| wrapped(line, "", style))
            .collect::<String>(),
    )
}

/// Formats a sentence as one line, or as several that a terminal does not break within words.
pub fn wrapped(sentence: &str, first: &str, style: Style) -> String {
    wrap(sentence, first, style).join("\n") + "\n"
}

/// How wide the reader of standard output is, and whether it shows colours.
pub fn style() -> Style {
    style_at(&io::stdout())
}

/// The same for standard error, but only for a terminal: a log's line in a file stays one line, even if COLUMNS is
/// set.
pub fn error_style() -> Style {
    let error = io::stderr();
    if error.is_terminal() {
        style_at(&error)
    } else {
        Style::default()
    }
}

fn style_at<F: IsTerminal + rustix::fd::AsFd>(stream: &F) -> Style {
    let size = rustix::termios::tcgetwinsize(stream).ok();
    let columns = size.map(|size| usize::from(size.ws_col));
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    style_of(stream.is_terminal(), columns, &variable)
}

/// No table is of use on a narrower terminal, which then wraps lines itself.
const NARROWEST: usize = 40;

fn style_of(
    terminal: bool,
    columns: Option<usize>,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Style {
    let told = variable("COLUMNS").and_then(|columns| columns.parse().ok());
    let width = columns.filter(|columns| *columns > 0).or(told);
    let dumb = variable("TERM").is_none_or(|term| term == "dumb");
    Style {
        width: width.map(|width| width.max(NARROWEST)),
        colour: terminal && !dumb && variable("NO_COLOR").is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_wrapped_between_words_and_files_keep_them_whole() {
        let narrow = Style {
            width: Some(12),
            colour: false,
        };
        assert_eq!(
            wrapped("one two three four", "", narrow),
            "one two\nthree four\n"
        );
        let whole = wrapped("one two three four", "", Style::default());
        assert_eq!(whole, "one two three four\n");
    }

    #[test]
    fn colours_and_widths_are_those_of_a_terminal() {
        let style = |terminal, columns, set: &[(&str, &str)]| {
            style_of(terminal, columns, &|name| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        let xterm = ("TERM", "xterm");
        let wide = |width, colour| Style { width, colour };
        assert_eq!(style(true, Some(80), &[xterm]), wide(Some(80), true));
        let no_colour = [xterm, ("NO_COLOR", "1")];
        assert_eq!(style(true, Some(80), &no_colour), wide(Some(80), false));
        assert_eq!(
            style(true, Some(80), &[("TERM", "dumb")]),
            wide(Some(80), false)
        );
        // A file has no limit of width, unless COLUMNS sets one.
        assert_eq!(style(false, None, &[xterm]), wide(None, false));
        assert_eq!(
            style(false, None, &[xterm, ("COLUMNS", "100")]),
            wide(Some(100), false)
        );
        assert_eq!(style(true, Some(0), &[xterm]).width, None);
        assert_eq!(style(true, Some(10), &[xterm]).width, Some(40));
    }
}
