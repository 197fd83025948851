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
            of(&["wakeone", "statu"]),
            "unrecognized subcommand 'statu'; tip: a similar subcommand exists: 'status'; see --help"
        );
    }
}
