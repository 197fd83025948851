//! How `wakeone` and `wakeone-lab` speak with their users: failures, and standard output, whose reader may have ended and
//! has a width and colours.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use serde::Serialize;
use wakeone_model::layout::{Style, wrap};

/// Runs the command line of this process as that of a program. A bad one ends with 2, and a failure with 1.
pub fn main<C: Parser>(program: &str, run: impl FnOnce(C) -> anyhow::Result<ExitCode>) -> ExitCode {
    let parsed = match C::try_parse() {
        Ok(parsed) => parsed,
        Err(error) if is_asked_for(error.kind()) => error.exit(),
        Err(error) => {
            complain(program, &sentence(&error.render().to_string()));
            return ExitCode::from(2);
        }
    };
    run(parsed).unwrap_or_else(|error| {
        complain(program, &whole(&error));
        ExitCode::from(1)
    })
}

/// Prints an error of a program on standard error.
pub fn complain(program: &str, sentence: &str) {
    let told = format!("{program}: {sentence}");
    eprint!("{}", wrapped(&told, "", error_style()));
}

/// Formats an error with its causes, as one sentence. Many of our errors contain their cause already: it is not
/// repeated.
fn whole(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |told, cause| {
        let cause = cause.to_string();
        if told.is_empty() {
            cause
        } else if told.contains(&cause) {
            told
        } else {
            format!("{told}: {cause}")
        }
    })
}

/// Help and version are answers, not errors.
fn is_asked_for(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    )
}

/// Turns the parser's message into one sentence: the error and its tips, and where to read on instead of the usage.
pub fn sentence(message: &str) -> String {
    let told = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty());
    let mut sentence = String::new();
    for line in told {
        let line = line.strip_prefix("error: ").unwrap_or(line);
        let between = match sentence.chars().last() {
            None => "",
            Some(':') => " ",
            Some(_) if line.starts_with("tip: ") => "; ",
            Some(_) if line.starts_with('[') => " ",
            Some(_) => ", ",
        };
        sentence.push_str(between);
        sentence.push_str(line);
    }
    sentence + "; see --help"
}

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
    fn a_cause_is_told_once() {
        let cause = std::io::Error::from_raw_os_error(2);
        let plain = anyhow::Error::new(cause).context("reading x");
        assert_eq!(
            whole(&plain),
            "reading x: No such file or directory (os error 2)"
        );
        let cause = std::io::Error::from_raw_os_error(2);
        let text = format!("reading x failed: {cause}; write it first");
        let told = anyhow::Error::new(cause).context(text.clone());
        assert_eq!(whole(&told), text);
    }

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
