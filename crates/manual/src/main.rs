//! Writes the files installed beside the commands into a folder for each of them: manual pages (`wakeone/man/`) and
//! completions (`wakeone/completions/`).
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
    for command in [wakeone_cli::command(), wakeone_lab_cli::command()] {
        let name = command.get_name().to_owned();
        let folder = folder.join(&name);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        let (pages, completions) = (folder.join("man"), folder.join("completions"));
        for place in [&pages, &completions] {
            fs::create_dir_all(place)?;
        }
        let command = shown(&command).disable_help_subcommand(true);
        clap_mangen::generate_to(command.clone(), &pages)?;
        for shell in SHELLS {
            generate_to(shell, &mut command.clone(), &name, &completions)?;
        }
    }
    Ok(())
}

/// The same command line without the hidden subcommands: clap_complete offers those too.
fn shown(whole: &Command) -> Command {
    let version: &'static str = whole.get_version().unwrap_or_default().to_owned().leak();
    let about = whole.get_about().cloned().unwrap_or_default();
    let arguments = whole.get_arguments().cloned();
    let subcommands = whole.get_subcommands().filter(|one| !one.is_hide_set());
    let name: &'static str = whole.get_name().to_owned().leak();
    let examples = whole.get_after_help().cloned().unwrap_or_default();
    Command::new(name)
        .version(version)
        .after_help(examples)
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
        for (command, option) in [
            (wakeone_cli::command(), "run --workers"),
            (wakeone_lab_cli::command(), "run --rounds"),
        ] {
            let name = command.get_name();
            let (verb, option) = option.split_once(' ').expect("a verb and its option");
            let place = folder.path().join(name);
            let mut expected = vec![format!("{name}.1")];
            let shown = command.get_subcommands().filter(|one| !one.is_hide_set());
            expected.extend(shown.map(|one| format!("{name}-{}.1", one.get_name())));
            let pages = names(&place.join("man"));
            for page in &expected {
                assert!(pages.contains(page), "{page} is not in {pages:?}");
            }
            let hidden = ["__", "wakeone-serve", "lab-reader"];
            let shows = |page: &String| hidden.iter().any(|part| page.contains(part));
            assert!(expected.len() > 4 && !pages.iter().any(shows), "{pages:?}");
            let page = place.join(format!("man/{name}-{verb}.1"));
            let page = fs::read_to_string(page).expect("a page");
            let written = option.replace('-', "\\-");
            assert!(
                page.contains(&written) && page.contains("Example"),
                "{page}"
            );
            let completions = names(&place.join("completions"));
            let wanted = [
                format!("_{name}"),
                format!("{name}.bash"),
                format!("{name}.fish"),
            ];
            assert_eq!(completions, wanted);
            let bash = place.join(format!("completions/{name}.bash"));
            let bash = fs::read_to_string(bash).expect("bash");
            assert!(
                bash.contains(option) && !bash.contains("__exec-worker"),
                "hidden commands show"
            );
        }
    }
}
