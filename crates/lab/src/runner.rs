//! Runs a design: rounds of interleaved variants, with progress, kept points, and the arithmetic that all share.

use indicatif::{ProgressBar, ProgressStyle};
use rand::seq::SliceRandom;
use rand::{SeedableRng, rngs::StdRng};
use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use crate::environment::{NOISY_SPREAD, Watch};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings};
use crate::present::number;
use crate::result::{Comparison, Metric, Outcome, SCHEMA, Variant};
use crate::stats;
use crate::store::{Points, Store};

/// Runs an experiment to its end.
///
/// Each round measures every variant once. Within a group the order is shuffled anew in each round. So neither a drift of
/// the machine nor a neighbour's after-effects favour one of them. All variants of a round get the same seed.
///
/// # Errors
/// When a point cannot be measured, or on `cancel`; points that were finished are kept in `store`.
pub fn run(
    experiment: &dyn Experiment,
    settings: &Settings,
    store: &Store,
    cancel: &AtomicBool,
) -> Result<Outcome, Error> {
    let card = experiment.card();
    let mut design = experiment.design(settings);
    if let Some(rounds) = settings.rounds {
        design.rounds = rounds;
    }
    narrow(&mut design, settings)?;
    note_parameters(&mut design, settings);
    let watch = Watch::start();
    let mut run = Run {
        experiment,
        settings,
        store,
        cancel,
        points: store.points(&card.name, &design.parameters),
    };
    run.measure(&design, 0..design.rounds)?;
    let mut outcome = assemble(&card.name, &design, &mut run.points, &watch);
    let more = again(&design, &experiment.doubtful(&outcome));
    if !more.arms.is_empty() {
        run.measure(&more, design.rounds..3 * design.rounds)?;
        outcome = assemble(&card.name, &design, &mut run.points, &watch);
    }
    outcome.derived = experiment.derive(&outcome);
    outcome.expectations = experiment.judge(&outcome);
    Ok(outcome)
}

/// A run of an experiment, with the points that it has so far.
struct Run<'a> {
    experiment: &'a dyn Experiment,
    settings: &'a Settings,
    store: &'a Store,
    cancel: &'a AtomicBool,
    points: Points,
}

impl Run<'_> {
    /// Measures what the design has in these rounds, but for the points that are there.
    fn measure(&mut self, design: &Design, rounds: Range<usize>) -> Result<(), Error> {
        let name = &self.experiment.card().name;
        let of_these = |(round, arm, _): &&(usize, String, Sample)| {
            rounds.contains(round) && design.arms.iter().any(|a| a.name == *arm)
        };
        let kept = self.points.iter().filter(of_these).count();
        let mut progress = Progress::start(name, design, rounds.len(), kept);
        for (round, arm) in order(design, rounds, self.settings.seed) {
            let mut points = self.points.iter();
            if points.any(|(r, name, _)| *r == round && *name == arm.name) {
                progress.skip(arm);
                continue;
            }
            let seed = self.settings.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut context = Context {
                settings: self.settings,
                round,
                seed: seed.wrapping_add(round as u64),
                cancel: self.cancel,
                progress: &mut |share| progress.within(arm, share),
            };
            context.check()?;
            let sample = self.experiment.measure(arm, &mut context)?;
            context.check()?;
            progress.done(round, arm, &sample, design.steady);
            self.points.push((round, arm.name.clone(), sample));
            self.store
                .keep_points(name, &design.parameters, &self.points)?;
        }
        progress.finish();
        Ok(())
    }
}

/// The groups of these variants.
fn again(design: &Design, doubtful: &[String]) -> Design {
    let mut more = design.clone();
    let all = design.arms.iter();
    let groups: BTreeSet<usize> = all
        .filter(|arm| doubtful.contains(&arm.name))
        .map(|arm| arm.group)
        .collect();
    more.arms.retain(|arm| groups.contains(&arm.group));
    more
}

/// Keeps the variants that the user asked for.
fn narrow(design: &mut Design, settings: &Settings) -> Result<(), Error> {
    if settings.only.is_empty() {
        return Ok(());
    }
    let all: Vec<String> = design.arms.iter().map(|a| a.name.clone()).collect();
    design
        .arms
        .retain(|arm| settings.only.iter().any(|part| arm.name.contains(part)));
    if design.arms.is_empty() {
        return Err(Error::Missing(format!(
            "no variant has {} in its name; there are {}",
            settings.only.join(" or "),
            all.join(", ")
        )));
    }
    design
        .parameters
        .insert("only".into(), settings.only.join(" ").into());
    Ok(())
}

fn note_parameters(design: &mut Design, settings: &Settings) {
    design
        .parameters
        .insert("seed".into(), settings.seed.into());
    design
        .parameters
        .insert("rounds".into(), design.rounds.into());
    design
        .parameters
        .insert("quick".into(), settings.quick.into());
}

/// Every `(round, arm)` in the order of measuring.
fn order(design: &Design, rounds: Range<usize>, seed: u64) -> Vec<(usize, &Arm)> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut order = Vec::new();
    for round in rounds {
        let mut groups: BTreeMap<usize, Vec<&Arm>> = BTreeMap::new();
        for arm in &design.arms {
            groups.entry(arm.group).or_default().push(arm);
        }
        for (_, mut arms) in groups {
            arms.shuffle(&mut rng);
            order.extend(arms.into_iter().map(|arm| (round, arm)));
        }
    }
    order
}

/// The samples of all rounds, in the order of the rounds, as a result without expectations.
fn assemble(name: &str, design: &Design, points: &mut Points, watch: &Watch) -> Outcome {
    points.sort_by_key(|(round, _, _)| *round);
    let variants: Vec<Variant> = design
        .arms
        .iter()
        .map(|arm| variant(&arm.name, points))
        .collect();
    let mut environment = watch.finish();
    environment
        .warnings
        .extend(unsteady(&variants, design.steady));
    let comparisons = design.pairings.iter().filter_map(|pairing| {
        let values = |name: &str| {
            variants
                .iter()
                .find(|v| v.name == name)
                .and_then(|v| v.metrics.get(&pairing.metric))
                .map(|m| m.values.clone())
        };
        let ratios = stats::paired_ratios(&values(&pairing.a)?, &values(&pairing.b)?);
        (!ratios.is_empty()).then(|| Comparison {
            name: pairing.name.clone(),
            a: pairing.a.clone(),
            b: pairing.b.clone(),
            metric: pairing.metric.clone(),
            median: stats::median(&ratios),
            ratios,
        })
    });
    let comparisons = comparisons.collect();
    let seed = design.parameters.get("seed").and_then(|s| s.as_u64());
    let contrasts = variants.iter().flat_map(|variant| {
        let slices = variant.slices.iter();
        slices.flat_map(|slices| slices.contrasts(&variant.name, seed.unwrap_or(0)))
    });
    let contrasts = contrasts.collect();
    Outcome {
        schema: SCHEMA.into(),
        experiment: name.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        commit: wakeone_result::COMMIT.into(),
        environment,
        parameters: design.parameters.clone(),
        variants,
        comparisons,
        contrasts,
        derived: Vec::new(),
        expectations: Vec::new(),
    }
}

fn variant(name: &str, points: &Points) -> Variant {
    let mut values: BTreeMap<String, (String, Vec<f64>)> = BTreeMap::new();
    let mut variant = Variant {
        name: name.into(),
        metrics: BTreeMap::new(),
        distributions: BTreeMap::new(),
        slices: None,
        notes: BTreeMap::new(),
    };
    for (_, _, sample) in points.iter().filter(|(_, arm, _)| arm == name) {
        for (metric, (unit, value)) in &sample.metrics {
            values
                .entry(metric.clone())
                .or_insert_with(|| (unit.clone(), Vec::new()))
                .1
                .push(*value);
        }
        for (metric, distribution) in &sample.distributions {
            variant
                .distributions
                .entry(metric.clone())
                .or_default()
                .merge(distribution);
        }
        variant.notes.extend(sample.notes.clone());
        match (&mut variant.slices, &sample.slices) {
            (Some(all), Some(more)) => all.merge(more),
            (none, slices) => *none = none.take().or_else(|| slices.clone()),
        }
    }
    variant.metrics = values
        .into_iter()
        .map(|(name, (unit, values))| (name, Metric::new(unit, values)))
        .collect();
    variant
}

/// One warning that names all variants whose rounds lie too far apart.
fn unsteady(variants: &[Variant], metric: &str) -> Option<String> {
    let apart = variants.iter().filter_map(|variant| {
        let steady = variant.metrics.get(metric)?;
        let range = format!(
            "{} {} to {} {}",
            variant.name,
            number(steady.min),
            number(steady.max),
            steady.unit
        );
        (stats::spread(&steady.values) > NOISY_SPREAD).then_some(range)
    });
    let apart: Vec<String> = apart.collect();
    (!apart.is_empty()).then(|| {
        format!(
            "Rounds lie far apart in {metric} ({}): the machine or the workload was too noisy to tell small differences; more --rounds help.",
            apart.join(", ")
        )
    })
}

/// Progress with time left: a bar on a terminal, a line a point elsewhere. The unit is a tenth of a second of work.
struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    finished: usize,
    before: f64,
    left: f64,
}

impl Progress {
    fn start(name: &str, design: &Design, rounds: usize, kept: usize) -> Self {
        let seconds = design.seconds(rounds);
        let total = design.arms.len() * rounds;
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new((seconds * 10.0) as u64);
            if let Ok(style) = ProgressStyle::with_template(
                "{prefix} [{bar:30}] {percent:>3} %, {eta} left  {wide_msg}",
            ) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(name.to_owned());
            bar
        });
        if kept > 0 {
            eprintln!("{name}: {kept} of {total} points were measured before and are kept");
        }
        Self {
            bar,
            total,
            finished: 0,
            before: 0.0,
            left: seconds,
        }
    }

    fn within(&self, arm: &Arm, share: f64) {
        if let Some(bar) = &self.bar {
            bar.set_message(arm.name.clone());
            bar.set_position(((self.before + arm.seconds * share.clamp(0.0, 1.0)) * 10.0) as u64);
        }
    }

    fn advance(&mut self, arm: &Arm) {
        self.finished += 1;
        self.before += arm.seconds;
        self.left -= arm.seconds;
    }

    fn skip(&mut self, arm: &Arm) {
        self.advance(arm);
        if let Some(bar) = &self.bar {
            bar.set_position((self.before * 10.0) as u64);
            bar.reset_eta();
        }
    }

    fn done(&mut self, round: usize, arm: &Arm, sample: &Sample, steady: &str) {
        self.advance(arm);
        match &self.bar {
            Some(bar) => bar.set_position((self.before * 10.0) as u64),
            None => {
                let value = sample
                    .metrics
                    .get(steady)
                    .map_or_else(String::new, |(unit, v)| {
                        format!(" {steady} {} {unit}", number(*v))
                    });
                eprintln!(
                    "{} of {}: round {}, {}{value}, about {:.0} s left",
                    self.finished,
                    self.total,
                    round + 1,
                    arm.name,
                    self.left.max(0.0)
                );
            }
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::Card;
    use crate::experiment::Pairing;
    use crate::present::Block;
    use crate::result::{Derived, Expectation};
    use crate::slices::{Per, Slices};
    use std::sync::atomic::Ordering;
    use std::sync::{LazyLock, Mutex};

    /// An experiment that measures nothing: it records the calls, and fails where a test says so.
    #[derive(Default)]
    struct Recorder {
        asked: Mutex<Vec<(usize, String, u64)>>,
        fail_at: Option<usize>,
        doubts: &'static [&'static str],
    }

    static CARD: LazyLock<Card> = LazyLock::new(|| {
        let text = "name = 'recorder'\ntitle = ''\nquestion = ''\n[source]\nshort = ''\nlong = ''";
        Card::read(text, "", "")
    });

    fn arm(name: &str, group: usize) -> Arm {
        Arm {
            name: name.into(),
            group,
            seconds: 1.0,
        }
    }

    impl Experiment for Recorder {
        fn card(&self) -> &'static Card {
            &CARD
        }
        fn design(&self, _settings: &Settings) -> Design {
            Design {
                rounds: 4,
                arms: vec![
                    arm("x/a", 0),
                    arm("x/b", 0),
                    arm("x/c", 0),
                    arm("y/a", 1),
                    arm("y/b", 1),
                ],
                pairings: vec![Pairing {
                    name: "b/a".into(),
                    a: "x/b".into(),
                    b: "x/a".into(),
                    metric: "m".into(),
                }],
                steady: "m",
                parameters: serde_json::Map::new(),
            }
        }
        fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
            let mut asked = self.asked.lock().unwrap();
            if self.fail_at == Some(asked.len()) {
                return Err(Error::Interrupted);
            }
            asked.push((context.round, arm.name.clone(), context.seed));
            let mut sample = Sample::default();
            // The machine is ten times slower in round 2: no paired ratio may show it.
            let mood = if context.round == 2 { 10.0 } else { 1.0 };
            sample.put(
                "m",
                "ms",
                mood * if arm.name.ends_with('b') { 3.0 } else { 2.0 },
            );
            if arm.name == "y/a" {
                // Three to two, whatever the machine's mood.
                let block = |speed: f64| vec![2.0 * speed * mood, 3.0 * speed * mood];
                sample.slices = Some(Slices {
                    arms: vec!["old".into(), "new".into()],
                    pairs: vec![(1, 0)],
                    counted_ms: 125.0,
                    settling_ms: 25.0,
                    rounds: vec![vec![block(100.0), block(300.0)]],
                    cpu_rounds: vec![vec![block(90.0), block(80.0)]],
                });
            }
            Ok(sample)
        }
        fn derive(&self, outcome: &Outcome) -> Vec<Derived> {
            vec![Derived {
                name: "variants".into(),
                meaning: "how many there are".into(),
                published: false,
                unit: "count".into(),
                value: outcome.variants.len() as f64,
            }]
        }
        fn doubtful(&self, outcome: &Outcome) -> Vec<String> {
            assert_eq!(outcome.comparisons[0].ratios, [1.5; 4]);
            self.doubts.iter().map(ToString::to_string).collect()
        }
        fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
            assert_eq!(outcome.derived("variants"), Some(5.0), "judged after it");
            vec![Expectation::new(
                "ratio",
                "b is 1.5 a",
                "arithmetic",
                outcome.ratio("b/a"),
                |r| (r - 1.5).abs() < 1e-9,
            )]
        }
        fn present(&self, _outcome: &Outcome) -> Vec<Block> {
            Vec::new()
        }
    }

    fn recorder(fail_at: Option<usize>) -> Recorder {
        Recorder {
            fail_at,
            ..Recorder::default()
        }
    }

    #[test]
    fn each_round_measures_every_variant_once_with_one_seed() {
        let directory = tempfile::tempdir().unwrap();
        let experiment = recorder(None);
        let cancel = AtomicBool::new(false);
        let outcome = run(
            &experiment,
            &Settings::default(),
            &Store::at(directory.path()),
            &cancel,
        )
        .unwrap();
        let asked = experiment.asked.lock().unwrap();
        assert_eq!(asked.len(), 20);
        for round in asked.chunks(5) {
            let mut names: Vec<&str> = round.iter().map(|a| a.1.as_str()).collect();
            assert!(
                names[..3].iter().all(|n| n.starts_with('x')),
                "groups stay together: {names:?}"
            );
            names.sort_unstable();
            assert_eq!(names, ["x/a", "x/b", "x/c", "y/a", "y/b"]);
            assert!(round.iter().all(|a| a.2 == round[0].2 && a.0 == round[0].0));
        }
        let orders: std::collections::BTreeSet<Vec<&str>> = asked
            .chunks(5)
            .map(|r| r[..3].iter().map(|a| a.1.as_str()).collect())
            .collect();
        assert!(
            orders.len() > 1,
            "the order must change from round to round"
        );
        assert_eq!(outcome.comparisons[0].ratios, [1.5; 4]);
        let contrast = outcome
            .contrast("y/a", ("new", "old"), Per::Second)
            .unwrap();
        assert_eq!((contrast.blocks, contrast.rounds.len()), (8, 4));
        assert!((contrast.ratio - 1.5).abs() < 1e-9 && contrast.half_width() < 1e-9);
        assert_eq!(outcome.values("x/a", "m"), [2.0, 2.0, 20.0, 2.0]);
        assert!(outcome.holds());
        assert!(
            outcome
                .environment
                .warnings
                .iter()
                .any(|w| w.contains("x/a")),
            "a tenfold spread is said"
        );
    }

    #[test]
    fn what_is_doubtful_is_measured_in_more_rounds_with_its_group() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::at(directory.path());
        let cancel = AtomicBool::new(false);
        let measured = |fail_at, doubts| {
            let experiment = Recorder {
                doubts,
                ..recorder(fail_at)
            };
            let found = run(&experiment, &Settings::default(), &store, &cancel);
            (found, experiment.asked.into_inner().unwrap())
        };
        // It goes on where it was interrupted, there too.
        let (interrupted, before) = measured(Some(27), &["y/b"]);
        assert!(interrupted.is_err());
        let (found, after) = measured(None, &["y/b"]);
        assert_eq!((before.len(), after.len()), (27, 20 + 8 * 2 - 27));
        let (found, later) = (found.unwrap(), &after[..]);
        assert!(
            later
                .iter()
                .all(|(round, arm, _)| *round >= 4 && arm.starts_with('y'))
        );
        assert_eq!(found.values("y/a", "m").len(), 12);
        assert_eq!(found.values("x/a", "m").len(), 4);
    }

    #[test]
    fn a_result_follows_the_published_schema_and_a_spoiled_one_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let cancel = AtomicBool::new(false);
        let store = Store::at(directory.path());
        let outcome = run(&recorder(None), &Settings::default(), &store, &cancel).unwrap();
        let schema: serde_json::Value = serde_json::from_str(crate::result::SCHEMA_TEXT).unwrap();
        let validator = jsonschema::draft202012::new(&schema).unwrap();
        let good = serde_json::to_value(&outcome).unwrap();
        let errors: Vec<String> = validator
            .iter_errors(&good)
            .map(|e| e.to_string())
            .collect();
        assert!(errors.is_empty(), "{errors:?}");
        let spoil: [(&str, serde_json::Value); 12] = [
            ("/contrasts/0/low", 0.into()),
            ("/contrasts/0/rounds", serde_json::json!([])),
            ("/variants/3/slices/arms", serde_json::json!(["old"])),
            ("/variants/3/slices/rounds/0/0/0", "fast".into()),
            ("/derived/0/value", "much".into()),
            ("/schema", "other/1".into()),
            ("/variants", serde_json::json!([])),
            ("/variants/0/metrics/m/values", serde_json::json!(["1"])),
            ("/variants/0/name", "Not A Name".into()),
            ("/expectations/0/measured", "much".into()),
            ("/environment/steal_share", 2.into()),
            ("/parameters/rounds", serde_json::Value::Null),
        ];
        for (place, value) in spoil {
            let mut bad = good.clone();
            *bad.pointer_mut(place).unwrap() = value;
            assert!(!validator.is_valid(&bad), "{place}");
        }
        for name in ["commit", "environment", "comparisons", "expectations"] {
            let mut bad = good.clone();
            bad.as_object_mut().unwrap().remove(name);
            assert!(!validator.is_valid(&bad), "{name} missing");
        }
        let mut bad = good;
        bad["surplus"] = 1.into();
        assert!(!validator.is_valid(&bad));
    }

    #[test]
    fn an_interrupted_run_goes_on_where_it_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::at(directory.path());
        let cancel = AtomicBool::new(false);
        let first = recorder(Some(7));
        assert!(matches!(
            run(&first, &Settings::default(), &store, &cancel),
            Err(Error::Interrupted)
        ));
        let second = recorder(None);
        let outcome = run(&second, &Settings::default(), &store, &cancel).unwrap();
        assert_eq!(second.asked.lock().unwrap().len(), 20 - 7);
        assert_eq!(outcome.values("y/b", "m").len(), 4);
        store.keep(&outcome).unwrap();
        assert!(
            store.points("recorder", &outcome.parameters).is_empty(),
            "a finished run leaves no points"
        );
    }

    #[test]
    fn cancel_stops_before_the_next_point() {
        let directory = tempfile::tempdir().unwrap();
        let experiment = recorder(None);
        let cancel = AtomicBool::new(false);
        cancel.store(true, Ordering::Relaxed);
        assert!(
            run(
                &experiment,
                &Settings::default(),
                &Store::at(directory.path()),
                &cancel
            )
            .is_err()
        );
        assert!(experiment.asked.lock().unwrap().is_empty());
    }
}
