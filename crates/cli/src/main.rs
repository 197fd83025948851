//! The `wakeone` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    wakeone_cli::main()
}
