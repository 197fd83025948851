//! The `wakeone` command: for each connection, wake one worker, the right one.

mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// For each connection, wake one worker: the right one
#[derive(Debug, Parser)]
#[command(name = "wakeone", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(args) => serve::run(args),
    };
    done.unwrap_or_else(|error| {
        eprintln!("wakeone: {error:#}");
        ExitCode::FAILURE
    })
}
