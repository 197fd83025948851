//! `wakeone-lab kernel`: experiments in the kernel of the papers.

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use wakeone_lab::machine::{EXPERIMENTS, Machine};
use wakeone_lab::store::Store;

use crate::experiments::{ShowArgs, SizeArgs, cancel_on_signals};

/// Run experiments in the kernel of the papers, which an emulated machine boots
#[derive(Debug, Parser)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Boot the kernel in an emulated machine, and run experiments in it
    Run(RunArgs),
}

#[derive(Debug, Parser)]
#[command(
    after_help = "Example:\n  make kernel && wakeone-lab kernel run herd --quick --html herd.html"
)]
struct RunArgs {
    /// Experiments that have variants for this kernel
    #[arg(required = true, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(EXPERIMENTS))]
    names: Vec<String>,
    #[command(flatten)]
    size: SizeArgs,
    /// Processors of the machine
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    cpus: u16,
    /// Seconds that each experiment may take
    #[arg(long, default_value_t = 7200, value_name = "N")]
    seconds: u64,
    #[command(flatten)]
    shown: ShowArgs,
    /// Where results are kept [default: `papers` in the state directory of the user]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Verb::Run(args) = args.verb;
    if !args.shown.fit(args.names.len()) {
        return Ok(ExitCode::from(2));
    }
    let machine = Machine::find(args.cpus.into(), args.seconds)?;
    let cancel = cancel_on_signals()?;
    let settings = args.size.settings();
    let results = args.results;
    let store = Store::at(results.unwrap_or_else(|| Store::default_directory().join("papers")));
    let mut outcomes = Vec::new();
    for name in &args.names {
        let outcome = machine.run(name, &settings, &cancel, |line| eprintln!("{line}"))?;
        args.shown.show(&outcome, &store)?;
        outcomes.push(outcome);
    }
    args.shown.finish(&outcomes)
}
