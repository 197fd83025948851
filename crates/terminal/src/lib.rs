//! How `wakeone` and `wakeone-lab` speak with their users.

pub mod output;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

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
    eprint!("{}", output::wrapped(&told, "", output::error_style()));
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
}
