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
mod load;
mod log;
mod metrics;
mod policy;
mod run;
mod runtime_dir;
mod scale;
mod self_check;
mod sim;
mod status;
mod target;
mod top;

use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;
use wakeone_supervisor::{spawn::Order, trampoline};

#[derive(Debug, Parser)]
#[command(
    name = "wakeone",
    version = self_check::version(),
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
    Scale(scale::Args),
    Attach(attach::Args),
    Agent(agent::Args),
    Detach(detach::Args),
    Doctor(doctor::Args),
    Top(top::Args),
    Load(Box<load::Args>),
    Sim(Box<sim::Args>),
    #[command(name = "lab", hide = true, disable_help_flag = true)]
    Lab(Rest),
    #[command(name = "serve", hide = true, disable_help_flag = true)]
    Serve(Rest),
    /// Becomes a worker, in whose place `wakeone run` started it (not for typing).
    #[command(name = "__exec-worker", hide = true)]
    ExecWorker {
        /// The order, as JSON.
        order: Order,
    },
}

/// The arguments of a command that is a program of its own now, whatever they are.
#[derive(Debug, clap::Args)]
struct Rest {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<OsString>,
}

/// The whole command line, as the manual pages and completions describe it.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    wakeone_terminal::main("wakeone", |cli: Cli| match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Status(args) => status::run(args),
        Command::Metrics(args) => metrics::run(args),
        Command::Policy(args) => policy::run(args),
        Command::Scale(args) => scale::run(args),
        Command::Attach(args) => attach::run(args),
        Command::Agent(args) => agent::run(args),
        Command::Detach(args) => detach::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Top(args) => top::run(args),
        Command::Load(args) => load::run(*args),
        Command::Sim(args) => sim::run_args(&args),
        Command::Lab(_) => Ok(has_moved("lab", "wakeone-lab")),
        Command::Serve(_) => Ok(has_moved("serve", "wakeone-lab serve")),
        Command::ExecWorker { order } => {
            trampoline::exec(&order); // returns only if it failed, and the supervisor has been told why
            Ok(ExitCode::from(127))
        }
    })
}

/// Names the program to use instead of a command.
fn has_moved(command: &str, instead: &str) -> ExitCode {
    complain(&format!(
        "`wakeone {command}` is a program of its own: use `{instead}`"
    ));
    ExitCode::from(2)
}

/// Prints an error on standard error.
pub(crate) fn complain(sentence: &str) {
    wakeone_terminal::complain("wakeone", sentence);
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::error::ErrorKind;
    use std::path::Path;

    #[test]
    fn what_the_parser_says_is_one_sentence() {
        let of = |arguments: &[&str]| {
            let error = Cli::try_parse_from(arguments).expect_err("bad arguments");
            wakeone_terminal::sentence(&error.render().to_string())
        };
        assert_eq!(
            of(&["wakeone", "run", "-l", ":1", "-w", "257", "--", "x"]),
            "invalid value '257' for '--workers <N>': 257 is not in 1..=256; see --help"
        );
        assert_eq!(
            of(&["wakeone", "run"]),
            "the following required arguments were not provided: <CMD>...; see --help"
        );
        assert_eq!(
            of(&["wakeone", "run", "--wrokers", "2", "x"]),
            "unexpected argument '--wrokers' found; tip: a similar argument exists: '--workers'; tip: to pass '--wrokers' as a value, use '-- --wrokers'; see --help"
        );
        assert_eq!(
            of(&["wakeone", "statu"]),
            "unrecognized subcommand 'statu'; tip: a similar subcommand exists: 'status'; see --help"
        );
    }

    /// The command of `wakeone run` with these arguments.
    fn started(arguments: &[&str]) -> Vec<String> {
        let cli = Cli::try_parse_from([&["wakeone", "run"], arguments].concat());
        match cli.expect("arguments").command {
            Command::Run(args) => args.command,
            _ => Vec::new(),
        }
    }

    #[test]
    fn the_servers_own_arguments_begin_with_its_name() {
        let gunicorn = ["gunicorn", "-w", "1", "--bind", "fd://{fd}", "app:app"];
        for before in [
            &[][..],
            &["--"],
            &["-w", "4", "-l", ":8080"],
            &["--split", "--"],
        ] {
            assert_eq!(
                started(&[before, &gunicorn].concat()),
                gunicorn,
                "{before:?}"
            );
        }
        assert_eq!(
            started(&["sh", "-c", "x", "--", "y"]),
            ["sh", "-c", "x", "--", "y"]
        );
        assert_eq!(started(&["--", "sh", "--", "-l"]), ["sh", "--", "-l"]);
    }

    /// The commands in a text that stand in a line of their own, as a user would type them.
    fn commands(text: &str) -> Vec<Vec<String>> {
        let begins = ["$ ", "sudo ", "Example: ", "Examples: "];
        let lines = text.lines().map(|line| {
            let mut line = line.trim();
            while let Some(rest) = begins.iter().find_map(|begin| line.strip_prefix(begin)) {
                line = rest.trim_start();
            }
            line
        });
        lines
            .filter(|line| line.starts_with("wakeone "))
            .map(words)
            .collect()
    }

    /// The words of a line of shell, up to a comment, a pipe, a redirection or a column of prose.
    fn words(line: &str) -> Vec<String> {
        let line = line.split("   ").next().unwrap_or_default();
        let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
        for char in line.chars().chain([' ']) {
            match (char, quote) {
                (char, Some(open)) if char == open => quote = None,
                (char, Some(_)) => word.push(char),
                ('\'' | '"', None) => quote = Some(char),
                ('#' | '|' | '>' | '&' | ',', None) if word.is_empty() => break,
                (' ', None) if word.is_empty() => {}
                (' ', None) => words.push(std::mem::take(&mut word)),
                (char, None) => word.push(char),
            }
        }
        words
    }

    /// Every command that a newcomer may copy is one that the parser takes.
    #[test]
    fn the_commands_that_are_shown_can_be_typed() {
        let mut texts = vec![("--help".to_owned(), String::new())];
        for subcommand in command().get_subcommands_mut() {
            texts[0].1 += &subcommand.render_long_help().to_string();
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for folder in ["", "docs", "docs/internals"] {
            for entry in std::fs::read_dir(root.join(folder))
                .expect("folder")
                .flatten()
            {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.ends_with(".md") {
                    let text = std::fs::read_to_string(entry.path()).expect("a text");
                    texts.push((name, text));
                }
            }
        }
        let mut count = 0;
        for (name, text) in texts {
            // Files that an example reads are not here.
            let is_whole = |words: &Vec<String>| !words.iter().any(|word| word.contains("file:"));
            for words in commands(&text).into_iter().filter(is_whole) {
                count += 1;
                if let Err(error) = Cli::try_parse_from(&words)
                    && !matches!(
                        error.kind(),
                        ErrorKind::DisplayVersion | ErrorKind::DisplayHelp
                    )
                {
                    panic!("{name}: {words:?}: {error}");
                }
            }
        }
        assert!(count > 80, "only {count} commands were found");
    }
}
