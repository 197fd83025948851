//! Commands of another program: the laboratory and its server.

use std::ffi::OsString;
use std::process::ExitCode;

/// Whatever follows.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<OsString>,
}

/// Names the program to use instead.
pub fn run(command: &str, instead: &str) -> ExitCode {
    crate::complain(&format!(
        "`wakeone {command}` is a program of its own: use `{instead}`"
    ));
    ExitCode::from(2)
}
