//! The `wakeone` command: for each connection, wake one worker, the right one. It is a library, so that the manual
//! pages and completions come from the same command line (`crates/manual`).

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;

mod agent;
mod attach;
mod detach;
mod doctor;
mod duration;
mod exec_worker;
mod lab;
mod load;
mod log;
mod metrics;
mod output;
mod policy;
mod run;
mod runtime_dir;
mod self_check;
mod serve;
mod sim;
mod status;
mod target;
mod top;
mod version;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(
    name = "wakeone",
    version = version::text(),
    about = "For each connection, wake one worker: the right one"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Status(status::Args),
    Metrics(metrics::Args),
    Policy(policy::Args),
    Attach(attach::Args),
    Agent(agent::Args),
    Detach(detach::Args),
    Doctor(doctor::Args),
    Top(top::Args),
    Serve(serve::Args),
    Load(Box<load::Args>),
    Sim(Box<sim::Args>),
    Lab(lab::Args),
    #[command(name = "__exec-worker", hide = true)]
    ExecWorker(exec_worker::Args),
}

/// The whole command line, as the manual pages and completions describe it.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if is_asked_for(error.kind()) => error.exit(),
        Err(error) => {
            complain(&sentence(&error.render().to_string()));
            return ExitCode::from(2);
        }
    };
    let result = match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Status(args) => status::run(args),
        Command::Metrics(args) => metrics::run(args),
        Command::Policy(args) => policy::run(args),
        Command::Attach(args) => attach::run(args),
        Command::Agent(args) => agent::run(args),
        Command::Detach(args) => detach::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Top(args) => top::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Load(args) => load::run(*args),
        Command::Sim(args) => sim::run_args(&args),
        Command::Lab(args) => lab::run(args),
        Command::ExecWorker(args) => exec_worker::run(args),
    };
    result.unwrap_or_else(|error| {
        complain(&whole(&error));
        ExitCode::from(1)
    })
}

/// Prints an error on standard error.
pub(crate) fn complain(sentence: &str) {
    let told = format!("wakeone: {sentence}");
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
fn sentence(message: &str) -> String {
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

    #[test]
    fn what_the_parser_says_is_one_sentence() {
        let of = |arguments: &[&str]| {
            let error = Cli::try_parse_from(arguments).expect_err("bad arguments");
            sentence(&error.render().to_string())
        };
        assert_eq!(
            of(&["wakeone", "run", "-l", ":1", "-w", "257", "--", "x"]),
            "invalid value '257' for '--workers <N>': 257 is not in 1..=256; see --help"
        );
        assert_eq!(
            of(&["wakeone", "run"]),
            "the following required arguments were not provided: --listen <ADDR>, <CMD>...; see --help"
        );
        assert_eq!(
            of(&["wakeone", "statu"]),
            "unrecognized subcommand 'statu'; tip: a similar subcommand exists: 'status'; see --help"
        );
    }
}
