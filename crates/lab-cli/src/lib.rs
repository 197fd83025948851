//! The `wakeone-lab` command: the published experiments of this field, and the server that they measure. It is a library,
//! so that the manual pages and completions come from the same command line (`crates/manual`).

mod experiments;
mod kernel;
mod reader;
mod serve;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  wakeone-lab list
  wakeone-lab run tills --quick
  wakeone-lab run tills --check --json tills.json --html tills.html
  wakeone-lab run all && wakeone-lab report
  make kernel && wakeone-lab kernel run herd --quick";

/// Run the published experiments of this field here, beside their numbers
#[derive(Debug, Parser)]
#[command(name = "wakeone-lab", version = wakeone_result::VERSION, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(experiments::ListArgs),
    Run(experiments::RunArgs),
    Report(experiments::ReportArgs),
    Kernel(kernel::Args),
    Serve(serve::Args),
    #[command(hide = true)]
    Reader(reader::Args),
}

/// The whole command line, as the manual pages and completions describe it.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    wakeone_terminal::main("wakeone-lab", |cli: Cli| match cli.command {
        Command::List(args) => experiments::list(&args),
        Command::Run(args) => experiments::run(&args),
        Command::Report(args) => experiments::report(&args),
        Command::Kernel(args) => kernel::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Reader(args) => reader::run(args),
    })
}

/// Prints an error on standard error.
pub(crate) fn complain(sentence: &str) {
    wakeone_terminal::complain("wakeone-lab", sentence);
}
