//! The `wakeone` command: for each connection, wake one worker, the right one.

mod detach;
mod exec_worker;
mod lab;
mod load;
mod run;
mod serve;
mod status;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(
    name = "wakeone",
    version,
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
    Detach(detach::Args),
    Serve(serve::Args),
    Load(Box<load::Args>),
    Lab(lab::Args),
    #[command(name = "__exec-worker", hide = true)]
    ExecWorker(exec_worker::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(*args),
        Command::Status(args) => status::run(args),
        Command::Detach(args) => detach::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Load(args) => load::run(*args),
        Command::Lab(args) => lab::run(args),
        Command::ExecWorker(args) => exec_worker::run(args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("wakeone: {error:#}");
        ExitCode::from(1)
    })
}
