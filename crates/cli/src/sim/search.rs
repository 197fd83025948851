//! Many simulations: searches for a number of workers or a rate, and sweeps over either.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde_json::json;
use wakeone_result::environment::Watch;
use wakeone_sim::{Arrivals, Dispatch, Faults, Load, MOST_SLOTS, Setup, Variant, Wake, run};

use super::arguments::{Find, Sweep};
use super::show::number;
use super::ways::Named;
use super::{Args, Found, load, rate, setup, show, utilisation};

/// The most workers that a way is simulated with.
fn most_workers(way: Dispatch) -> usize {
    match way {
        Dispatch::Steered {
            variant: Variant::Chance,
            ..
        } => Variant::Chance.slots(),
        _ => MOST_SLOTS,
    }
}

/// The name of a way, and the number that was found for it or the reason why none fits.
type Row = (String, Result<f64, String>);

/// Finds the fewest workers, or the highest rate, of each way.
pub fn found(args: &Args, ways: &[Named], find: Find, p99: Duration) -> anyhow::Result<String> {
    let (rate, limit_s) = (rate(args)?, p99.as_secs_f64());
    let alone_s = alone(args)?;
    if alone_s > limit_s {
        let why = format!(
            "the slowest one percent take {} ms where nothing waits, so no number of workers and no rate will do",
            number(alone_s * 1e3)
        );
        let none = |named: &Named| (named.name.clone(), Err(why.clone()));
        let rows: Vec<Row> = ways.iter().map(none).collect();
        return Ok(show_found(args, rate, find, p99, &rows));
    }
    let mut rows = Vec::new();
    for named in ways {
        // None where queues would grow without end.
        let p99_s = |workers: usize, rate: f64| -> anyhow::Result<Option<f64>> {
            if utilisation(args, workers, rate) >= 1.0 {
                return Ok(None);
            }
            let setup = setup(args, workers, named.way);
            let outcome = run(&setup, &load(args, args.arrivals.at(rate)))?;
            Ok(Some(outcome.quantile_s(0.99)))
        };
        let keeps = |workers: usize, rate: f64| {
            p99_s(workers, rate).map(|found| found.is_some_and(|p99_s| p99_s <= limit_s))
        };
        let most = most_workers(named.way);
        let (value, least) = match find {
            Find::Workers => {
                let least = fewest(most, |workers| keeps(workers, rate))?;
                (least.map(|n| n as f64), (most, rate))
            }
            Find::Rate => {
                let value = highest(rate, |rate| keeps(args.workers, rate))?;
                (value, (args.workers, rate * LEAST))
            }
        };
        let value = match value {
            Some(value) => Ok(value),
            None => Err(why_none(least, p99_s(least.0, least.1)?)),
        };
        rows.push((named.name.clone(), value));
    }
    Ok(show_found(args, rate, find, p99, &rows))
}

/// The 99th percentile of requests that meet no other and no fault, in s.
fn alone(args: &Args) -> anyhow::Result<f64> {
    let setup = Setup {
        faults: Faults::default(),
        ..setup(args, args.workers, Dispatch::Shared(Wake::LongestAsleep))
    };
    // At a thousandth of what the workers can do.
    let per_s = 1e-3 * setup.capacity() / args.service.mean_s();
    let load = Load {
        kept: None,
        ..load(args, Arrivals::Constant { per_s })
    };
    Ok(run(&setup, &load)?.quantile_s(0.99))
}

/// Why not even the easiest case fits: the most workers, or the lowest rate.
fn why_none((workers, rate): (usize, f64), p99_s: Option<f64>) -> String {
    let of = format!("{workers} workers at {} requests/s", number(rate));
    match p99_s {
        Some(p99_s) => format!("{of} have a p99 of {} ms", number(p99_s * 1e3)),
        None => format!("{of} have more to do than they can"),
    }
}

fn show_found(args: &Args, rate: f64, find: Find, p99: Duration, rows: &[Row]) -> String {
    let (what, words) = match find {
        Find::Workers => (
            "workers",
            format!("the fewest workers for {rate} requests/s"),
        ),
        Find::Rate => (
            "rate_per_s",
            format!("the most requests/s of {} workers", args.workers),
        ),
    };
    if args.json {
        let row = |(name, value): &Row| {
            let found = match value {
                Ok(value) => json!({ what: value }),
                Err(why) => json!({ what: null, "why": why }),
            };
            (name.clone(), found)
        };
        let rows: serde_json::Map<_, _> = rows.iter().map(row).collect();
        return format!("{:#}\n", json!({ "simulated": true, "found": rows }));
    }
    let limit = number(p99.as_secs_f64() * 1e3);
    let mut text = format!("Simulated: {words} with a p99 of at most {limit} ms.\n\n");
    if let Some((_, Err(why))) = rows.first()
        && rows
            .iter()
            .all(|(_, value)| value.as_ref().err() == Some(why))
    {
        let _ = writeln!(text, "None fits: {why}.");
        return text;
    }
    for (name, value) in rows {
        let _ = match value {
            Ok(value) => writeln!(text, "{name:<24}{value:>10.0}"),
            Err(why) => writeln!(text, "{name:<24}{:>10}  {why}", "none"),
        };
    }
    text
}

/// The most points of a sweep.
const MOST_POINTS: usize = 13;

/// The points of a sweep: how many workers, and what rate.
fn points(args: &Args, sweep: &Sweep) -> anyhow::Result<Vec<(usize, f64)>> {
    let steps = |low: f64, high: f64| {
        let step = (high / low).powf(1.0 / (MOST_POINTS - 1) as f64);
        (0..MOST_POINTS).map(move |n| low * step.powi(n as i32))
    };
    Ok(match sweep {
        Sweep::Rate(low, high) => {
            let of = |rate: f64| (args.workers, (rate * 1e3).round() / 1e3);
            let mut points: Vec<_> = steps(*low, *high).map(of).collect();
            points.dedup();
            points
        }
        Sweep::Workers(range) => {
            let rate = rate(args)?;
            let (low, high) = (*range.start(), *range.end());
            let mut all: Vec<usize> = range.clone().take(MOST_POINTS + 1).collect();
            if all.len() > MOST_POINTS {
                let rounded = |workers: f64| workers.round() as usize;
                all = steps(low as f64, high as f64).map(rounded).collect();
                all.dedup();
            }
            all.into_iter().map(|workers| (workers, rate)).collect()
        }
    })
}

/// Simulates every way for a range of workers or rates.
pub fn swept(args: &Args, ways: &[Named], sweep: &Sweep) -> anyhow::Result<String> {
    let watch = args.json.then(Watch::start);
    let begun = Instant::now();
    let (mut all, mut rows) = (Vec::new(), Vec::new());
    for (workers, rate) in points(args, sweep)? {
        let point = match sweep {
            Sweep::Workers(_) => format!("workers-{workers}"),
            Sweep::Rate(..) => format!("rate-{rate}"),
        };
        let serves = utilisation(args, workers, rate) < 1.0;
        let mut row = Vec::new();
        for named in ways {
            // Nothing is simulated where queues would grow without limit.
            row.push(if serves {
                let outcome = run(
                    &setup(args, workers, named.way),
                    &load(args, args.arrivals.at(rate)),
                )?;
                let p99 = outcome.quantile_s(0.99);
                all.push((format!("{point}/{}", named.name), outcome));
                Some(p99)
            } else {
                None
            });
        }
        rows.push((point, row));
    }
    let took = begun.elapsed();
    anyhow::ensure!(
        !all.is_empty(),
        "none of these can serve the load: queues would grow without end; give more workers or a lower rate"
    );
    let found = Found { all, took };
    match watch {
        Some(watch) => show::json(args, args.rate, &found, watch.finish()),
        None => Ok(sweep_table(ways, &rows, &found)),
    }
}

fn sweep_table(ways: &[Named], rows: &[(String, Vec<Option<f64>>)], found: &Found) -> String {
    let mut text = String::from("Simulated: the slowest one percent, in ms.\n\n");
    for (place, named) in (1..).zip(ways) {
        let _ = writeln!(text, "({place}) {}", named.name);
    }
    let _ = write!(text, "\n{:<14}", "");
    for place in 1..=ways.len() {
        let _ = write!(text, "{:>8}", format!("({place})"));
    }
    text.push('\n');
    for (point, row) in rows {
        let _ = write!(text, "{point:<14}");
        for p99 in row {
            let shown = p99.map_or_else(|| "-".to_owned(), |p99| number(p99 * 1e3));
            let _ = write!(text, "{shown:>8}");
        }
        text.push('\n');
    }
    let _ = write!(
        text,
        "\n-: these workers cannot serve the load. {}\n",
        show::speed(found)
    );
    text
}

/// The smallest number of workers for which `keeps` holds; it is assumed to hold for every larger one.
fn fewest(
    most: usize,
    keeps: impl Fn(usize) -> anyhow::Result<bool>,
) -> anyhow::Result<Option<usize>> {
    if !keeps(most)? {
        return Ok(None);
    }
    let (mut too_few, mut enough) = (0, most);
    while enough - too_few > 1 {
        let middle = (too_few + enough) / 2;
        if keeps(middle)? {
            enough = middle;
        } else {
            too_few = middle;
        }
    }
    Ok(Some(enough))
}

/// The precision of a rate.
const FINE: f64 = 1.01;

/// The lowest rate that is tried, as a part of the first guess.
const LEAST: f64 = 1e-6;

/// The highest rate for which `keeps` holds, to one percent, from a first guess on.
fn highest(guess: f64, keeps: impl Fn(f64) -> anyhow::Result<bool>) -> anyhow::Result<Option<f64>> {
    let (mut low, mut high) = (guess, guess);
    while keeps(high)? {
        (low, high) = (high, high * 2.0);
    }
    while low >= guess * LEAST && !keeps(low)? {
        (low, high) = (low / 2.0, low);
    }
    if low < guess * LEAST {
        return Ok(None);
    }
    while high / low > FINE {
        let middle = (low * high).sqrt();
        if keeps(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(Some(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_and_the_highest_are_found() {
        for least in [1, 2, 37, 1024] {
            assert_eq!(fewest(1024, |n| Ok(n >= least)).unwrap(), Some(least));
        }
        assert_eq!(fewest(1024, |_| Ok(false)).unwrap(), None);
        for most in [3.0, 100.0, 54_321.0] {
            let found = highest(100.0, |rate| Ok(rate <= most)).unwrap().unwrap();
            assert!(found <= most && found * FINE >= most, "{found} of {most}");
        }
        assert_eq!(highest(100.0, |_| Ok(false)).unwrap(), None);
    }
}
