//! Writes the files installed beside the command into a folder: manual pages (`man/`) and completions
//! (`completions/`).
//!
//! A program of its own: as a hidden subcommand it would be in every installed binary.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::{Shell, generate_to};

/// The shells that completions are written for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("wakeone-manual: no folder to write to was given; usage: wakeone-manual FOLDER");
        return ExitCode::from(2);
    };
    match write(&folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let place = folder.display();
            eprintln!(
                "wakeone-manual: writing to {place} failed: {error}; check its owner and the free space"
            );
            ExitCode::FAILURE
        }
    }
}

/// Writes all pages and completions. Files of commands that are gone do not stay.
fn write(folder: &Path) -> io::Result<()> {
    let (pages, completions) = (folder.join("man"), folder.join("completions"));
    for place in [&pages, &completions] {
        if place.exists() {
            fs::remove_dir_all(place)?;
        }
        fs::create_dir_all(place)?;
    }
    let command = shown(&wakeone_cli::command()).disable_help_subcommand(true);
    clap_mangen::generate_to(command.clone(), &pages)?;
    for shell in SHELLS {
        generate_to(shell, &mut command.clone(), "wakeone", &completions)?;
    }
    Ok(())
}

/// The same command line without the hidden subcommands: clap_complete offers those too.
fn shown(whole: &Command) -> Command {
    let version: &'static str = whole.get_version().unwrap_or_default().to_owned().leak();
    let about = whole.get_about().cloned().unwrap_or_default();
    let arguments = whole.get_arguments().cloned();
    let subcommands = whole.get_subcommands().filter(|one| !one.is_hide_set());
    Command::new("wakeone")
        .version(version)
        .about(about)
        .args(arguments)
        .subcommands(subcommands.cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of the files in a folder.
    fn names(folder: &Path) -> Vec<String> {
        let files = fs::read_dir(folder).expect("a folder");
        let mut names: Vec<_> = files
            .map(|file| {
                file.expect("a file")
                    .file_name()
                    .into_string()
                    .expect("a name")
            })
            .collect();
        names.sort();
        names
    }

    #[test]
    fn each_command_has_a_page_and_each_shell_its_completions() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path()).expect("pages");
        write(folder.path()).expect("the same again");
        let mut expected = vec!["wakeone.1".to_owned()];
        let command = wakeone_cli::command();
        let shown = command.get_subcommands().filter(|one| !one.is_hide_set());
        expected.extend(shown.map(|one| format!("wakeone-{}.1", one.get_name())));
        let pages = names(&folder.path().join("man"));
        for page in &expected {
            assert!(pages.contains(page), "{page} is not in {pages:?}");
        }
        assert!(
            expected.len() > 10 && pages.iter().all(|page| !page.contains("__")),
            "{pages:?}"
        );
        let run = fs::read_to_string(folder.path().join("man/wakeone-run.1")).expect("a page");
        assert!(
            run.contains("\\-\\-workers") && run.contains("Example"),
            "{run}"
        );
        let completions = names(&folder.path().join("completions"));
        assert_eq!(completions, ["_wakeone", "wakeone.bash", "wakeone.fish"]);
        let bash =
            fs::read_to_string(folder.path().join("completions/wakeone.bash")).expect("bash");
        assert!(
            bash.contains("--split") && !bash.contains("__exec-worker"),
            "hidden commands show"
        );
    }
}
