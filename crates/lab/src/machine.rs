//! The emulated machine that runs the kernel of the papers, and experiments in it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::Error;
use crate::experiment::Settings;
use crate::process::own_program;
use crate::result::Outcome;

/// The script of the source that boots a kernel.
const BOOTS: &str = "scripts/vm/run";
/// The experiments that have variants for the kernel of the papers.
pub const EXPERIMENTS: [&str; 6] = [
    "herd",
    "spread",
    "throughput",
    "udp-readers",
    "udp-locks",
    "reopen",
];
/// Stand around the result in what the machine prints.
const RESULT: [&str; 2] = ["@@ result", "@@ end"];
/// Memory of the machine, in MiB: two hundred processes, and sockets that hold a portion of datagrams.
const MEMORY_MIB: &str = "3000";
/// How often we look whether the user wants to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The machine.
#[derive(Debug)]
pub struct Machine {
    script: PathBuf,
    /// Its processors.
    pub cpus: usize,
    /// How long an experiment may take in it, in seconds.
    pub seconds: u64,
}

impl Machine {
    /// Finds the script that boots it, from the current directory upwards.
    ///
    /// # Errors
    /// Outside a checkout of the source.
    pub fn find(cpus: usize, seconds: u64) -> Result<Self, Error> {
        let here = std::env::current_dir().unwrap_or_default();
        let found = here.ancestors().map(|dir| dir.join(BOOTS));
        let script = found.into_iter().find(|path| path.exists());
        let script = script.ok_or_else(|| {
            Error::Missing(format!(
                "there is no {BOOTS} in {} or above it: the kernel of the papers is built and booted in a checkout of the source, after `make kernel`",
                here.display()
            ))
        })?;
        Ok(Self {
            script,
            cpus,
            seconds,
        })
    }

    /// Boots the kernel, runs an experiment in it, and returns the result. `progress` gets each line that it prints.
    ///
    /// # Errors
    /// When the kernel is not built, the machine does not come to the end, or the experiment fails in it; the reason has
    /// been given to `progress`.
    pub fn run(
        &self,
        name: &str,
        settings: &Settings,
        cancel: &AtomicBool,
        mut progress: impl FnMut(&str),
    ) -> Result<Outcome, Error> {
        // The machine must not outlive us, whatever ends us (PR_SET_PDEATHSIG).
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "TERM", "--"])
            .arg(&self.script)
            .args(["--seconds", &self.seconds.to_string()])
            .args(["--cpus", &self.cpus.to_string()])
            .args(["papers", "--", "bash", "-c", &line(name, settings)?])
            .env("WAKEONE_VM_MEMORY", MEMORY_MIB)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let failed = |why: String| Error::Missing(format!("{BOOTS} failed: {why}"));
        let mut guest = command.spawn().map_err(|e| failed(e.to_string()))?;
        let mut result = Collected::default();
        let lines = guest.stdout.take().map(BufReader::new);
        let lines = lines.into_iter().flat_map(BufRead::lines);
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| end_on(cancel, &ended, guest.id()));
            for text in lines.map_while(Result::ok) {
                if !result.take(text.trim_end()) {
                    progress(text.trim_end());
                }
            }
            ended.store(true, Ordering::Relaxed);
        });
        let status = guest.wait().map_err(|e| failed(e.to_string()))?;
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        result.outcome(name).ok_or_else(|| {
            Error::Server(format!(
                "{name} gave no result in the emulated machine, which ended with {}",
                status.code().unwrap_or(-1)
            ))
        })
    }
}

/// Tells the script to end once the user wants to stop. Its process is not waited for before `ended`.
fn end_on(cancel: &AtomicBool, ended: &AtomicBool, script: u32) {
    while !ended.load(Ordering::Relaxed) {
        if cancel.load(Ordering::Relaxed) {
            let pid = Pid::from_raw(i32::try_from(script).unwrap_or(i32::MAX));
            let _ = kill(pid, Signal::SIGTERM);
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The command that the machine runs.
fn line(name: &str, settings: &Settings) -> Result<String, Error> {
    let program = own_program()?;
    let mut words = vec![
        format!("'{}' run {name}", program.display()),
        format!("--seed {}", settings.seed),
        "--json /run/wakeone.json --results /run/wakeone-lab".into(),
    ];
    if settings.quick {
        words.push("--quick".into());
    }
    if let Some(rounds) = settings.rounds {
        words.push(format!("--rounds {rounds}"));
    }
    words.extend(settings.only.iter().map(|part| format!("--only '{part}'")));
    let [begin, end] = RESULT;
    Ok(format!(
        "set -o pipefail; {} 2>&1 >/dev/null | cat && echo && echo '{begin}' && cat /run/wakeone.json && echo && echo '{end}'",
        words.join(" ")
    ))
}

/// The result among the lines that the machine prints.
#[derive(Debug, Default)]
struct Collected {
    inside: bool,
    whole: bool,
    text: String,
}

impl Collected {
    /// Whether a line is part of it.
    fn take(&mut self, line: &str) -> bool {
        let [begin, end] = RESULT;
        if line == begin {
            self.inside = true;
        } else if line == end {
            (self.inside, self.whole) = (false, true);
        } else if self.inside {
            self.text.push_str(line);
            self.text.push('\n');
        } else {
            return false;
        }
        true
    }

    fn outcome(&self, name: &str) -> Option<Outcome> {
        let outcome: Outcome = self
            .whole
            .then(|| serde_json::from_str(&self.text).ok())??;
        (outcome.experiment == name).then_some(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_is_taken_out_of_what_is_printed() {
        let mut collected = Collected::default();
        let lines = ["herd 1/3", "@@ result", "{\"a\":", "1}", "@@ end", "done"];
        let shown: Vec<_> = lines.iter().filter(|l| !collected.take(l)).collect();
        assert_eq!(shown, [&"herd 1/3", &"done"]);
        assert_eq!(collected.text, "{\"a\":\n1}\n");
        assert!(collected.whole);
        assert!(
            collected.outcome("herd").is_none(),
            "no result has this form"
        );
    }

    #[test]
    fn a_result_that_was_cut_off_is_none() {
        let mut collected = Collected::default();
        for line in ["@@ result", "{}"] {
            collected.take(line);
        }
        assert!(!collected.whole && collected.outcome("herd").is_none());
    }

    #[test]
    fn the_machine_runs_what_the_user_chose() {
        let settings = Settings {
            quick: true,
            rounds: Some(2),
            seed: 7,
            only: vec!["patched".into()],
        };
        let line = line("herd", &settings).unwrap();
        for part in [
            "run herd",
            "--quick",
            "--rounds 2",
            "--seed 7",
            "--only 'patched'",
        ] {
            assert!(line.contains(part), "{line}");
        }
    }

    #[test]
    fn there_are_experiments_of_these_names() {
        for name in EXPERIMENTS {
            assert!(crate::experiments::find(name).is_ok(), "{name}");
        }
    }
}
