//! The `wakeone-lab` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    wakeone_lab_cli::main()
}
