//! Loads from several machines: when and what each sends, and `wakeone load merge`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use wakeone_kernel::clock;
use wakeone_load::{
    Clock, Interval, Outcome, PART_SCHEMA, Parameters, Part, Plan, Shard, plan_hash,
};
use wakeone_terminal::{print, print_wrapped};

/// Other tasks of `wakeone load` than to send.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Merge the results of all shards of a plan, exactly: as one machine would have measured them
    Merge(MergeArgs),
}

/// The arguments of `wakeone load merge`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: wakeone load merge shard-*.part")]
pub struct MergeArgs {
    /// The files that the shards wrote with --part=FILE
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Print the result as JSON, or write it to FILE (--json=FILE)
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Which shard is sent, as it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardArg {
    Known(Shard),
    /// One of so many, by the environment.
    Of(usize),
    /// By Slurm's environment.
    Slurm,
}

impl FromStr for ShardArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "slurm" {
            return Ok(Self::Slurm);
        }
        if let Some(of) = text.strip_prefix('/') {
            let of = of.parse().map_err(|_| format!("'{of}' is no number"))?;
            return Shard::new(0, of).map(|shard| Self::Of(shard.of));
        }
        text.parse().map(Self::Known)
    }
}

impl ShardArg {
    /// Which one that is.
    ///
    /// # Errors
    /// The environment does not tell.
    pub fn known(self) -> Result<Shard, String> {
        self.by(|name| std::env::var(name).ok())
    }

    fn by(self, variable: impl Fn(&str) -> Option<String>) -> Result<Shard, String> {
        let number = |name: &str| -> Result<Option<usize>, String> {
            let Some(text) = variable(name) else {
                return Ok(None);
            };
            let number = text.parse().ok();
            number
                .map(Some)
                .ok_or_else(|| format!("{name}={} is no number", text.escape_default()))
        };
        let missing = |names: &str| format!("{names} is not set: give --shard NUMBER/OF");
        match self {
            Self::Known(shard) => Ok(shard),
            Self::Of(of) => {
                let own = number("SLURM_PROCID")?.or(number("JOB_COMPLETION_INDEX")?);
                Shard::new(
                    own.ok_or_else(|| missing("neither SLURM_PROCID nor JOB_COMPLETION_INDEX"))?,
                    of,
                )
            }
            Self::Slurm => Shard::new(
                number("SLURM_PROCID")?.ok_or_else(|| missing("SLURM_PROCID"))?,
                number("SLURM_NTASKS")?.ok_or_else(|| missing("SLURM_NTASKS"))?,
            ),
        }
    }
}

/// When a load is to begin, since 1970.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StartAt(Duration);

impl FromStr for StartAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds = text.strip_prefix('@').and_then(|text| text.parse().ok());
        let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        time.map(Self).ok_or_else(|| {
            format!("'{text}' is no time: give @SECONDS since 1970, as in @$(($(date +%s) + 60))")
        })
    }
}

/// A load that is to begin later than this was planned wrongly.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);
/// So long before the time it no longer sleeps for long: the clock may be set meanwhile.
const STEP: Duration = Duration::from_millis(50);

impl StartAt {
    fn left(self) -> Option<Duration> {
        self.0.checked_sub(since_1970(SystemTime::now()))
    }

    /// Waits for the time; `interrupted`: whether a signal came. A time that has passed is not waited for.
    ///
    /// # Errors
    /// A signal came; or it would be too long.
    pub fn wait(self, interrupted: &mut dyn FnMut() -> bool) -> anyhow::Result<()> {
        while let Some(left) = self.left() {
            if left > LONGEST_WAIT {
                bail!("--start-at is more than a day from now: begin sooner");
            }
            if interrupted() {
                bail!("interrupted before the load began");
            }
            std::thread::sleep(left.min(STEP));
        }
        Ok(())
    }
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Writes the whole result of a shard.
///
/// # Errors
/// The file cannot be written.
pub fn write(
    path: &Path,
    plan: &Plan,
    start_at: Option<StartAt>,
    began: SystemTime,
    outcome: &Outcome,
    intervals: &[Interval],
) -> anyhow::Result<()> {
    let clock = clock::state().context("cannot ask for the state of the clock")?;
    let part = Part {
        schema: PART_SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        shard: plan.shard,
        plan_sha256: plan_hash(plan),
        parameters: Parameters::new(plan),
        start_at_ms: start_at.map(|at| at.0.as_secs_f64() * 1e3),
        began_ms: since_1970(began).as_secs_f64() * 1e3,
        clock: Clock {
            synchronized: clock.synchronized,
            error_ms_max: clock.error_us_max as f64 / 1e3,
        },
        outcome: outcome.clone(),
        intervals: intervals.to_vec(),
    };
    let text = serde_json::to_string(&part)? + "\n";
    if path.as_os_str() == "-" {
        return Ok(print(&text)?);
    }
    std::fs::write(path, text)
        .with_context(|| format!("cannot write the shard's result to {}", path.display()))
}

/// Merges. The exit code is 2 for shards that do not belong together.
pub fn merge(args: &MergeArgs) -> anyhow::Result<ExitCode> {
    let parts: Vec<(String, Part)> = args
        .files
        .iter()
        .map(|path| read(path).map(|part| (path.display().to_string(), part)))
        .collect::<Result<_, _>>()?;
    let merged = match wakeone_load::merge(&parts) {
        Ok(merged) => merged,
        Err(why) => {
            crate::complain(&format!("cannot merge: {why}"));
            return Ok(ExitCode::from(2));
        }
    };
    super::give(&merged.summary, args.json.as_deref())?;
    let is_text = args
        .json
        .as_deref()
        .is_none_or(|path| path.as_os_str() != "-");
    if is_text {
        print_wrapped(&format!("\n{}\n", merged.notes.join("\n")))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<Part> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the part {}", path.display()))?;
    let part: Part = serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is not the result of a shard: write one with --shard NUMBER/OF --part=FILE",
            path.display()
        )
    })?;
    if part.schema != PART_SCHEMA {
        bail!(
            "{} is of the form {}, and {PART_SCHEMA} is known here: merge with the version that sent it",
            path.display(),
            part.schema
        );
    }
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_named_or_known_by_its_environment() {
        let none = |_: &str| None;
        let slurm = |name: &str| match name {
            "SLURM_PROCID" => Some("2".to_owned()),
            "SLURM_NTASKS" => Some("4".to_owned()),
            _ => None,
        };
        let job = |name: &str| (name == "JOB_COMPLETION_INDEX").then(|| "1".to_owned());
        let arg = |text: &str| text.parse::<ShardArg>().expect(text);
        assert_eq!(arg("1/4").by(none), Ok(Shard { number: 1, of: 4 }));
        assert_eq!(arg("slurm").by(slurm), Ok(Shard { number: 2, of: 4 }));
        assert_eq!(arg("/8").by(slurm), Ok(Shard { number: 2, of: 8 }));
        assert_eq!(arg("/8").by(job), Ok(Shard { number: 1, of: 8 }));
        assert!(arg("/1").by(job).is_err() && arg("/8").by(none).is_err());
        assert!(arg("slurm").by(none).is_err());
        let wrong = arg("/8")
            .by(|_| Some("x\n".to_owned()))
            .expect_err("no number");
        assert!(!wrong.contains('\n'), "{wrong}");
        for bad in ["", "4/4", "/0", "/x", "Slurm"] {
            assert!(bad.parse::<ShardArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_time_is_in_seconds_since_1970() {
        let at: StartAt = "@1800000000.25".parse().expect("a time");
        assert_eq!(at.0, Duration::from_millis(1_800_000_000_250));
        for bad in ["1800000000", "@", "@-1", "@nan", "tomorrow"] {
            assert!(bad.parse::<StartAt>().is_err(), "{bad}");
        }
        let past: StartAt = "@1".parse().expect("a time");
        past.wait(&mut || false).expect("it has passed");
        let far: StartAt = "@9999999999".parse().expect("a time");
        far.wait(&mut || false).expect_err("too long");
    }
}
