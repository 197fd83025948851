//! A server as its user would start it: a command line, the files that it needs, and the sign that it is ready.

use serde::Deserialize;
use std::process::Command;
use std::time::Duration;

use crate::error::Error;
use crate::papers::Switch;
use crate::process;
use crate::user::User;

/// Accept queue of every listener: long enough that no experiment here measures a full one by accident.
pub const BACKLOG: &str = "4096";

/// A server to start. Its command line and its files may have names in braces. `{address}`, `{host}` and `{port}` stand for
/// where it listens. It runs in a directory of its own, `{dir}`. `{backlog}` is [`BACKLOG`].
#[derive(Debug, Clone, Default)]
pub struct Launch {
    /// Its name in messages.
    pub what: String,
    /// The command line, its words apart by spaces. `wakeone-lab` is this executable, and `wakeone` the one
    /// beside it.
    pub line: String,
    /// More names and their values. A value may contain spaces.
    pub values: Vec<(&'static str, String)>,
    /// Files in its directory, by name.
    pub files: Vec<(&'static str, String)>,
    /// The conditions under which it is ready.
    pub ready: Ready,
    /// The party that counts its answers.
    pub counted: Counted,
    /// The options of `wakeone attach`, where it is attached to once it is ready.
    pub attach: Option<Vec<&'static str>>,
    /// So many of its workers are steered before it counts as ready, where Wakeone steers it from outside.
    pub steered_workers: usize,
    /// The user who starts and steers it.
    pub user: User,
    /// The scheme of its address for `wakeone attach`: empty, or `udp://`.
    pub scheme: &'static str,
    /// For how long it waits for a connection's request. It may take as much longer to end.
    pub patience: Duration,
    /// How the kernel of the papers is set while it runs.
    pub switch: Option<Switch>,
}

/// The conditions under which a server is ready. All of them must hold.
#[derive(Debug, Clone, Default)]
pub struct Ready {
    /// It has printed a line that begins with this; any line where this is empty.
    pub line: &'static str,
    /// It has printed this number of lines with this text in them.
    pub said: Option<(&'static str, usize)>,
    /// This number of processes without children are below it.
    pub workers: usize,
    /// It answers this path.
    pub answers: Option<&'static str>,
    /// It was left alone for this long after that, so that the other workers come to wait as well.
    pub settles: Duration,
}

/// The party that counts the answers of a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Counted {
    /// `wakeone-lab serve`, where `--counter` says.
    #[default]
    Ours,
    /// A program of [`crate::apps`], in a file.
    InFile,
    /// nginx, over all requests that it served, from any client.
    ByNginx,
    /// The experiment.
    Elsewhere,
    /// No party can.
    Nowhere,
}

impl Launch {
    /// A server that is one of our commands.
    pub fn ours(what: String, line: String) -> Self {
        // A steered server is `wakeone run`; `serve` becomes that where it dispatches.
        let steered = line.starts_with("wakeone run ") || line.contains("--model dispatched");
        let ready = Ready {
            line: if steered { "ready:" } else { "listening on" },
            ..Ready::default()
        };
        Self {
            what,
            line,
            ready,
            ..Self::default()
        }
    }

    /// The same server under `wakeone run --split` with these options: each reader of a socket that they share gets a queue
    /// of its own.
    pub fn split(self, options: &str) -> Self {
        Self {
            line: format!("wakeone run --split {options} -- {}", self.line),
            ..self
        }
    }

    /// The same server, which `wakeone run` starts as it is and then steers.
    pub fn run_command(self) -> Self {
        Self {
            line: format!("wakeone run -- {}", self.line),
            ..self
        }
    }

    /// Replaces the names in braces in a text by their values.
    pub fn fill(&self, text: &str, place: &[(&str, String)]) -> String {
        let own = self.values.iter().map(|(name, value)| (*name, value));
        let all = place.iter().map(|(name, value)| (*name, value)).chain(own);
        let text = text.replace("{backlog}", BACKLOG);
        all.fold(text, |text, (name, value)| {
            text.replace(&format!("{{{name}}}"), value)
        })
    }

    /// The command, with more arguments behind it.
    ///
    /// # Errors
    /// When a program of the line is not installed.
    pub fn command(&self, place: &[(&str, String)], more: &[String]) -> Result<Command, Error> {
        let mut words: Vec<std::ffi::OsString> = Vec::new();
        let mut is_program = true;
        for word in self.line.split_whitespace() {
            words.push(match (is_program, word) {
                (true, "wakeone") => process::wakeone()?.into(),
                (true, "wakeone-lab") => process::own_program()?.into(),
                (true, name) => installed(name)?.into(),
                (false, word) => self.fill(word, place).into(),
            });
            is_program = word == "--";
        }
        let mut words = words.into_iter();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).args(more);
        Ok(command)
    }
}

fn installed(name: &str) -> Result<std::path::PathBuf, Error> {
    process::program(name).ok_or_else(|| Error::Missing(format!("{name} is not installed")))
}

/// The reason why a server that needs these programs cannot be started here.
pub fn lacks(programs: &[&str]) -> Option<String> {
    let missing = programs
        .iter()
        .find(|name| process::program(name).is_none());
    missing.map(|name| format!("{name} is not installed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(launch: &Launch) -> Vec<String> {
        let place = [("port", "80".to_owned()), ("dir", "/a b".to_owned())];
        let command = launch.command(&place, &["-x".into()]).unwrap();
        let all = std::iter::once(command.get_program()).chain(command.get_args());
        all.map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn names_stand_for_values_and_programs_for_their_paths() {
        let launch = Launch {
            line: "sh -p {port} {dir}/f {own}".into(),
            values: vec![("own", "1 2".into())],
            ..Launch::default()
        };
        let shell = process::program("sh").unwrap().display().to_string();
        let mine = process::own_program().unwrap().display().to_string();
        let theirs = [&*shell, "-p", "80", "/a b/f", "1 2", "-x"];
        assert_eq!(words(&launch), theirs);
        let line = format!("wakeone-lab serve -- {}", launch.line);
        let ours = [&[&*mine, "serve", "--"][..], &theirs].concat();
        assert_eq!(words(&Launch { line, ..launch }), ours);
    }

    #[test]
    fn who_is_not_installed_is_named() {
        let none = Launch {
            line: "wakeone-lab serve -- no-such-program".into(),
            ..Launch::default()
        };
        let error = none.command(&[], &[]).unwrap_err().to_string();
        assert_eq!(error, "no-such-program is not installed");
        assert_eq!(lacks(&["sh", "no-such-program"]), Some(error));
        assert_eq!(lacks(&["sh"]), None);
    }

    #[test]
    fn whoever_steers_says_when_it_does() {
        let ready = |line: &str| Launch::ours(String::new(), line.into()).ready.line;
        assert_eq!(ready("wakeone-lab serve --model reuseport"), "listening on");
        assert_eq!(ready("wakeone-lab serve --model dispatched"), "ready:");
        assert_eq!(
            ready("wakeone run -- wakeone-lab serve --model epoll"),
            "ready:"
        );
    }
}
