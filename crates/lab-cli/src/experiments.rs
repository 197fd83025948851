//! Runs the published experiments here, and makes pages of the results.

use anyhow::bail;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use wakeone_lab::experiment::{Experiment, Settings};
use wakeone_lab::experiments::find;
use wakeone_lab::store::{self, Store};
use wakeone_lab::{Error, Outcome, experiments, html, runner, text};
use wakeone_terminal::{print, print_json, style};

/// Show which experiments there are, how long a quick and a full run take, and what each asks
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  wakeone-lab list")]
pub struct ListArgs {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

/// How much of an experiment is measured.
#[derive(Debug, clap::Args)]
pub struct SizeArgs {
    /// Everything smaller, to see it work
    #[arg(long)]
    quick: bool,
    /// How often each variant is measured [default: what the experiment needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    rounds: Option<u64>,
    /// Seed of arrivals and order
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Only variants with this in their name; repeatable
    #[arg(long, value_name = "PART", value_parser = a_part)]
    only: Vec<String>,
}

impl SizeArgs {
    /// The settings of a run.
    pub fn settings(&self) -> Settings {
        Settings {
            quick: self.quick,
            rounds: self.rounds.map(|r| r as usize),
            seed: self.seed,
            only: self.only.clone(),
        }
    }
}

/// How results are shown.
#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    /// Write the result as JSON, after docs/schema/lab-result.schema.json (one experiment only; - is stdout)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the page with all tables and charts here [default: beside the kept result]
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Exit with 1 if an expectation does not hold
    #[arg(long)]
    check: bool,
    /// Print everything: all tables, histograms, ratios, each expectation
    #[arg(long)]
    full: bool,
}

impl ShowArgs {
    /// Whether these fit so many experiments; complains where they do not.
    pub fn fit(&self, experiments: usize) -> bool {
        let fit = experiments == 1 || self.json.is_none();
        if !fit {
            crate::complain(&format!(
                "--json takes one experiment, {experiments} were asked for; each result is kept as a file all the same"
            ));
        }
        fit
    }

    /// Keeps a result and writes its page. Prints the result as text on stdout, or as JSON there if the user gave `--json -`,
    /// and where the rest is.
    pub fn show(&self, outcome: &Outcome, store: &Store) -> anyhow::Result<()> {
        let kept = store.keep(outcome)?;
        let own_page = kept.with_extension("html");
        if self.html.is_none() {
            write_page(&own_page, std::slice::from_ref(outcome))?;
        }
        if self.json.as_ref().is_some_and(|p| p.as_os_str() == "-") {
            print_json(outcome)?;
        } else {
            if let Some(path) = &self.json {
                store::write_json(path, outcome)?;
            }
            render(find(&outcome.experiment)?, outcome, self.full)?;
        }
        let page = self.html.as_deref().unwrap_or(&own_page);
        let page = std::path::absolute(page).unwrap_or_else(|_| page.to_owned());
        eprintln!("Charts: file://{}", page.display());
        if self.full {
            eprintln!("Data: {}", kept.display());
        }
        Ok(())
    }

    /// Writes the page of all results, if it was asked for, and returns the exit code.
    pub fn finish(&self, outcomes: &[Outcome]) -> anyhow::Result<ExitCode> {
        if let Some(path) = &self.html {
            write_page(path, outcomes)?;
        }
        Ok(verdict(outcomes, self.check))
    }
}

/// A part of a variant's name, which may become part of a command.
fn a_part(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-+/._".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        Ok(text.into())
    } else {
        Err("a variant's name has letters, digits, and - + / . _ only".into())
    }
}

/// Run experiments by name, or all of them
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  wakeone-lab run tills --quick --check --html tills.html")]
pub struct RunArgs {
    /// Names as in `wakeone-lab list`, or `all`
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    size: SizeArgs,
    #[command(flatten)]
    shown: ShowArgs,
    /// Begin anew, even where an interrupted run left finished points
    #[arg(long)]
    fresh: bool,
    /// Where results are kept [default: the state directory of the user]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

/// Turn kept results into one self-contained HTML page
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  wakeone-lab run all && wakeone-lab report -o report.html")]
pub struct ReportArgs {
    /// Result files; none: all kept results
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The page to write
    #[arg(
        short,
        long,
        default_value = "wakeone-report.html",
        value_name = "FILE"
    )]
    output: PathBuf,
    /// Write the first chart of one result as an SVG file instead of the page
    #[arg(long, value_name = "FILE", conflicts_with = "output")]
    svg: Option<PathBuf>,
    /// Where results are kept [default: the state directory of the user]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

fn store(directory: Option<&PathBuf>) -> Store {
    Store::at(directory.cloned().unwrap_or_else(Store::default_directory))
}

/// Shows the experiments.
///
/// # Errors
/// They cannot be printed.
pub fn list(args: &ListArgs) -> anyhow::Result<ExitCode> {
    if args.json {
        let cards = experiments::all().iter().map(|e| e.card());
        let all: Vec<serde_json::Value> = cards
            .map(|c| serde_json::json!({"name": c.name, "title": c.title, "question": c.question, "source": c.source}))
            .collect();
        print_json(&all)?;
        return Ok(ExitCode::SUCCESS);
    }
    let all = experiments::all().iter();
    let all: String = all
        .map(|one| text::listed(*one, terminal_width()))
        .collect();
    print(&all)?;
    Ok(ExitCode::SUCCESS)
}

/// The named experiments, each once.
fn chosen(names: &[String]) -> Result<Vec<&'static dyn Experiment>, Error> {
    if names.iter().any(|n| n == "all") {
        return Ok(experiments::all().to_vec());
    }
    let mut chosen: Vec<&'static dyn Experiment> = Vec::new();
    for name in names {
        let experiment = find(name)?;
        if !chosen
            .iter()
            .any(|c| c.card().name == experiment.card().name)
        {
            chosen.push(experiment);
        }
    }
    Ok(chosen)
}

/// Runs experiments, and shows what was found.
///
/// # Errors
/// One sentence for the user.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let experiments = match chosen(&args.names) {
        Ok(chosen) => chosen,
        Err(error) => {
            crate::complain(&error.to_string());
            return Ok(ExitCode::from(2));
        }
    };
    if !args.shown.fit(experiments.len()) {
        return Ok(ExitCode::from(2));
    }
    let cancel = cancel_on_signals()?;
    let settings = args.size.settings();
    let store = store(args.results.as_ref());
    let mut outcomes = Vec::new();
    for experiment in experiments {
        if args.fresh {
            store.forget_points(&experiment.card().name);
        }
        let outcome = runner::run(experiment, &settings, &store, &cancel)?;
        args.shown.show(&outcome, &store)?;
        outcomes.push(outcome);
    }
    args.shown.finish(&outcomes)
}

/// Prints the result as text on stdout: a screenful, or everything.
fn render(experiment: &dyn Experiment, outcome: &Outcome, full: bool) -> anyhow::Result<()> {
    let width = terminal_width();
    let text = if full {
        text::render(experiment, outcome, width)
    } else {
        text::render_brief(experiment, outcome, width, ink())
    };
    Ok(print(&text)?)
}

/// Colour, if stdout is a terminal and the user has not disabled it.
fn ink() -> text::Ink {
    match style().colour {
        true => text::Ink::Colour,
        false => text::Ink::Plain,
    }
}

fn write_page(path: &Path, outcomes: &[Outcome]) -> anyhow::Result<()> {
    let page = match outcomes {
        [one] => html::page(find(&one.experiment)?, one)?,
        many => html::report(many)?,
    };
    store::write(path, &page)?;
    Ok(())
}

fn verdict(outcomes: &[Outcome], check: bool) -> ExitCode {
    let failed: Vec<String> = outcomes
        .iter()
        .flat_map(|o| {
            o.expectations
                .iter()
                .filter(|e| !e.holds)
                .map(|e| format!("{}: {}", o.experiment, e.name))
        })
        .collect();
    if check && !failed.is_empty() {
        crate::complain(&format!(
            "{} expectations do not hold: {}",
            failed.len(),
            failed.join(", ")
        ));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Makes a page of results.
///
/// # Errors
/// One sentence for the user.
pub fn report(args: &ReportArgs) -> anyhow::Result<ExitCode> {
    let store = store(args.results.as_ref());
    let outcomes = if args.files.is_empty() {
        store.all()?
    } else {
        args.files
            .iter()
            .map(|f| store::read(f))
            .collect::<Result<_, _>>()?
    };
    if outcomes.is_empty() {
        bail!(
            "there is no result in {} to report on; `wakeone-lab run all` makes them",
            store.directory().display()
        );
    }
    if let Some(path) = &args.svg {
        let [one] = &outcomes[..] else {
            bail!(
                "--svg draws one result, and there are {}: name the file of one",
                outcomes.len()
            );
        };
        store::write(path, &html::first_chart(one)?)?;
        eprintln!("chart written to {}", path.display());
        return Ok(ExitCode::SUCCESS);
    }
    store::write(&args.output, &html::report(&in_reading_order(outcomes))?)?;
    eprintln!("page written to {}", args.output.display());
    Ok(ExitCode::SUCCESS)
}

/// Results in the order of `wakeone-lab list`, the unknown ones last.
fn in_reading_order(mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
    let place = |o: &Outcome| {
        experiments::all()
            .iter()
            .position(|e| e.card().name == o.experiment)
            .unwrap_or(usize::MAX)
    };
    outcomes.sort_by_key(place);
    outcomes
}

/// Sets a flag on the first SIGINT or SIGTERM, so that servers under test are stopped in order. The second signal
/// ends us at once.
pub fn cancel_on_signals() -> anyhow::Result<Arc<AtomicBool>> {
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&cancel))?;
        signal_hook::flag::register(signal, Arc::clone(&cancel))?;
    }
    Ok(cancel)
}

fn terminal_width() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    size.map_or(80, |s| usize::from(s.ws_col)).clamp(60, 200)
}
