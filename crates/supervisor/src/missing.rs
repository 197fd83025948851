//! Why a command cannot be started, in a sentence that names what to do.

use std::io::ErrorKind::{NotFound, PermissionDenied};

/// The reason for an error of exec(2).
pub fn not_started(program: &str, error: &std::io::Error) -> String {
    let is_path = program.contains('/');
    match error.kind() {
        NotFound if is_path => {
            format!(
                "there is no file `{program}` to run (or the interpreter that its first line names is missing)"
            )
        }
        // If the user may not search a folder of PATH, the error is as if it might not execute the command.
        NotFound | PermissionDenied if !is_path && !is_in_path(program) => {
            let advice = match std::env::var_os("SUDO_UID") {
                Some(_) => format!(
                    "sudo has a PATH of its own, without your virtual environment: write \"$(command -v {program})\" for it"
                ),
                None => "give its path, or correct the name".to_owned(),
            };
            format!("there is no command `{program}` in PATH; {advice}")
        }
        PermissionDenied => {
            format!(
                "`{program}` may not be executed; look at its mode and at the folders above it with `namei -l`, and at --user if you gave one"
            )
        }
        _ if error.raw_os_error() == Some(nix::libc::ENOEXEC) => {
            format!(
                "`{program}` is neither a program nor a script: a script begins with a line `#!` that names its interpreter"
            )
        }
        _ => format!("cannot run `{program}`: {error}"),
    }
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}
