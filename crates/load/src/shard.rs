//! A load from several machines: each sends a shard of one plan, and the results are merged exactly.
//!
//! A result of percentiles cannot be merged: the percentile of several machines is none of theirs, nor their mean. So a shard
//! writes its histograms whole.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Interval, Outcome, Parameters, Plan, Summary};

/// The name and version of the form of [`Part`].
pub const PART_SCHEMA: &str = "wakeone-load-part/1";
/// Parts must have sent at the same time for this share of the load, at least.
const OVERLAP: f64 = 0.9;

/// One of several equal parts of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// Its number, from 0.
    pub number: usize,
    /// How many there are.
    pub of: usize,
}

impl Default for Shard {
    /// The whole plan.
    fn default() -> Self {
        Self { number: 0, of: 1 }
    }
}

/// No plan is divided among more.
const MOST_SHARDS: usize = 10_000;

impl Shard {
    /// One of so many.
    ///
    /// # Errors
    /// There is no such one, as a sentence.
    pub fn new(number: usize, of: usize) -> Result<Self, String> {
        if number < of && of <= MOST_SHARDS {
            return Ok(Self { number, of });
        }
        Err(format!(
            "there is no shard {number} of {of}: they are numbered from 0, and are {MOST_SHARDS} at most"
        ))
    }

    /// How many of so many requests it sends.
    pub(crate) fn share(&self, all: u64) -> u64 {
        let (number, of) = (self.number as u64, self.of as u64);
        all / of + u64::from(number < all % of)
    }
}

impl FromStr for Shard {
    type Err = String;

    /// `NUMBER/OF`.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok();
        let parts = text.split_once('/');
        let parts = parts.and_then(|(one, of)| Some((number(one)?, number(of)?)));
        let (one, of) = parts
            .ok_or_else(|| format!("'{text}' is no shard: give NUMBER/OF, as 0/4 for the first"))?;
        Self::new(one, of)
    }
}

/// How far the machine's clock can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// Whether something, as NTP, keeps it right.
    pub synchronized: bool,
    /// The kernel's bound of its error.
    pub error_ms_max: f64,
}

/// The result of a shard, whole.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// [`PART_SCHEMA`].
    pub schema: String,
    /// The version of Wakeone that sent it.
    pub version: String,
    /// Which part it is.
    pub shard: Shard,
    /// The hash of the plan: of all that decides what is sent, and when.
    pub plan_sha256: String,
    /// The plan in numbers.
    pub parameters: Parameters,
    /// When it was to begin, ms since 1970; `None`: at once.
    pub start_at_ms: Option<f64>,
    /// When it began.
    pub began_ms: f64,
    /// The clock by which it began.
    pub clock: Clock,
    /// The outcome of its requests.
    pub outcome: Outcome,
    /// The same of each second.
    pub intervals: Vec<Interval>,
}

impl Part {
    /// How late it began, ms.
    pub fn late_ms(&self) -> f64 {
        self.start_at_ms.map_or(0.0, |at| self.began_ms - at)
    }
}

/// Returns the hash of a plan, which is the same for each of its shards.
pub fn plan_hash(plan: &Plan) -> String {
    let form = &plan.mix.form;
    let headers: Vec<_> = form.headers.iter().map(|h| (&h.name, &h.value)).collect();
    let encrypted = form.tls.as_ref().map(|tls| &tls.name);
    let all = serde_json::json!([
        Parameters::new(plan),
        plan.host,
        format!("{:?}", plan.arrivals),
        headers,
        form.body,
        encrypted,
    ]);
    let mut text = String::new();
    for byte in Sha256::digest(all.to_string()) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The results of all shards as one.
#[derive(Debug, Clone)]
pub struct Merged {
    /// The result that one machine would have.
    pub summary: Summary,
    /// The sum of all.
    pub outcome: Outcome,
    /// Sentences about the shards that a reader should know.
    pub notes: Vec<String>,
}

/// Merges the parts of one plan, each with a name for errors.
///
/// # Errors
/// A sentence with the names of those that do not belong together: a shard is missing or there twice, they are of different
/// plans or versions, or they were not sent at the same time.
pub fn merge(parts: &[(String, Part)]) -> Result<Merged, String> {
    let [(first_name, first), ..] = parts else {
        return Err("there is nothing to merge: give the file of each shard".to_owned());
    };
    for (name, part) in parts {
        check_alike((first_name, first), (name, part))?;
    }
    check_complete(parts)?;
    check_overlap(parts)?;
    let begin = parts.iter().map(|(_, part)| part.began_ms);
    let begin = begin.fold(f64::INFINITY, f64::min);
    let mut outcome: Option<Outcome> = None;
    let mut seconds: BTreeMap<u64, Interval> = BTreeMap::new();
    for (_, part) in parts {
        // By the clocks: a shard that began late is so much later in each second.
        let offset_ms = (part.began_ms - begin).max(0.0);
        let mut own = part.outcome.clone();
        own.elapsed += Duration::from_secs_f64(offset_ms / 1e3);
        match &mut outcome {
            Some(sum) => sum.add(&own),
            None => outcome = Some(own),
        }
        for interval in &part.intervals {
            let mut own = interval.clone();
            let whole = (offset_ms / 1e3).round();
            own.start += Duration::from_secs_f64(whole);
            seconds
                .entry(own.start.as_secs())
                .and_modify(|sum| sum.add(&own))
                .or_insert(own);
        }
    }
    let Some(outcome) = outcome else {
        return Err("there is nothing to merge".to_owned());
    };
    let mut parameters = first.parameters.clone();
    parameters.threads *= first.shard.of;
    let intervals: Vec<Interval> = seconds.into_values().collect();
    Ok(Merged {
        summary: Summary::of(parameters, &outcome, &intervals),
        outcome,
        notes: notes(parts, begin),
    })
}

fn check_alike(one: (&String, &Part), other: (&String, &Part)) -> Result<(), String> {
    let ((a, first), (b, part)) = (one, other);
    if first.version != part.version {
        return Err(format!(
            "{a} is of version {} and {b} of {}: send all shards with the same one",
            first.version, part.version
        ));
    }
    if first.parameters.seed != part.parameters.seed {
        return Err(format!(
            "{a} has the seed {} and {b} {}: the shards of a plan have one",
            first.parameters.seed, part.parameters.seed
        ));
    }
    if first.shard.of != part.shard.of {
        return Err(format!(
            "{a} is one of {} shards and {b} one of {}",
            first.shard.of, part.shard.of
        ));
    }
    if first.plan_sha256 != part.plan_sha256 {
        return Err(format!(
            "{a} and {b} are of different plans: give each shard the same arguments but for its number"
        ));
    }
    Ok(())
}

fn check_complete(parts: &[(String, Part)]) -> Result<(), String> {
    let mut by_number: BTreeMap<usize, &str> = BTreeMap::new();
    for (name, part) in parts {
        if let Some(earlier) = by_number.insert(part.shard.number, name) {
            return Err(format!(
                "{earlier} and {name} are both shard {} of {}",
                part.shard.number, part.shard.of
            ));
        }
    }
    let of = parts.first().map_or(0, |(_, part)| part.shard.of);
    let missing = (0..of).filter(|number| !by_number.contains_key(number));
    let missing: Vec<String> = missing.map(|number| number.to_string()).collect();
    match missing.as_slice() {
        [] => Ok(()),
        [one] => Err(format!("shard {one} of {of} is missing")),
        several => Err(format!("shards {} of {of} are missing", several.join(", "))),
    }
}

fn check_overlap(parts: &[(String, Part)]) -> Result<(), String> {
    let times = |part: &Part| {
        let length = part.outcome.elapsed.as_secs_f64() * 1e3;
        (part.began_ms, part.began_ms + length)
    };
    let all = parts.iter().map(|(_, part)| times(part));
    let longest = all
        .clone()
        .map(|(begin, end)| end - begin)
        .fold(0.0, f64::max);
    for (name, part) in parts {
        let (begin, end) = times(part);
        for (other, with) in parts {
            let (from, to) = times(with);
            let common = end.min(to) - begin.max(from);
            if common < OVERLAP * longest {
                return Err(format!(
                    "{name} and {other} were sent at the same time for {:.0} % of the load, and {:.0} % are needed: begin all shards \
                     with the same --start-at, with clocks that are right",
                    100.0 * (common / longest).max(0.0),
                    100.0 * OVERLAP
                ));
            }
        }
    }
    Ok(())
}

fn notes(parts: &[(String, Part)], begin: f64) -> Vec<String> {
    let last = parts.iter().map(|(_, part)| part.began_ms);
    let last = last.fold(f64::NEG_INFINITY, f64::max);
    let mut notes = vec![format!(
        "{} shards began within {:.1} ms of each other",
        parts.len(),
        last - begin
    )];
    for (name, part) in parts {
        if part.late_ms() > 100.0 {
            notes.push(format!("{name} began {:.0} ms late", part.late_ms()));
        }
        if !part.clock.synchronized {
            notes.push(format!("{name}: nothing keeps that machine's clock right"));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::tests::outcome;
    use crate::plan::tests::plan;

    fn part(number: usize, latencies_us: &[u64]) -> (String, Part) {
        let mut plan = plan();
        plan.shard = Shard { number, of: 3 };
        let outcome = outcome(&plan, latencies_us);
        let part = Part {
            schema: PART_SCHEMA.to_owned(),
            version: "1".to_owned(),
            shard: plan.shard,
            plan_sha256: plan_hash(&plan),
            parameters: Parameters::new(&plan),
            start_at_ms: Some(1000.0),
            began_ms: 1000.0 + number as f64,
            clock: Clock {
                synchronized: true,
                error_ms_max: 1.0,
            },
            outcome,
            intervals: Vec::new(),
        };
        (format!("part{number}"), part)
    }

    fn three() -> Vec<(String, Part)> {
        vec![
            part(0, &[100, 2000]),
            part(1, &[70_000]),
            part(2, &[100, 100, 5_000_000]),
        ]
    }

    #[test]
    fn merged_is_one_histogram_of_all_values() {
        let parts: Vec<(String, Part)> = three()
            .into_iter()
            .map(|(name, part)| {
                let json = serde_json::to_string(&part).expect("JSON");
                (name, serde_json::from_str(&json).expect("read"))
            })
            .collect();
        let merged = merge(&parts).expect("they belong together");
        let all = outcome(&plan(), &[100, 2000, 70_000, 100, 100, 5_000_000]);
        assert_eq!(merged.outcome.latency, all.latency);
        assert_eq!(merged.outcome.service, all.service);
        assert_eq!(merged.outcome.completed, 6);
        assert_eq!(
            merged.summary.latency_ms,
            Summary::new(&plan(), &all, &[]).latency_ms
        );
        assert_eq!(merged.notes, ["3 shards began within 2.0 ms of each other"]);
    }

    #[test]
    fn what_does_not_belong_together_is_refused_by_name() {
        type Spoil = fn(&mut Vec<(String, Part)>);
        let cases: [(Spoil, &str); 9] = [
            (|p| p.clear(), "nothing to merge"),
            (|p| drop(p.remove(1)), "shard 1 of 3 is missing"),
            (|p| p.truncate(1), "shards 1, 2 of 3 are missing"),
            (
                |p| p.push(part(1, &[1])),
                "part1 and part1 are both shard 1",
            ),
            (|p| p[1].1.version = "2".into(), "part1 of 2"),
            (|p| p[2].1.parameters.seed = 5, "part2 5"),
            (|p| p[2].1.shard.of = 4, "part2 one of 4"),
            (
                |p| p[1].1.plan_sha256 = "0".into(),
                "part0 and part1 are of different plans",
            ),
            (|p| p[1].1.began_ms += 120.0, "for 88 % of the load"),
        ];
        for (spoil, told) in cases {
            let mut parts = three();
            spoil(&mut parts);
            let why = merge(&parts).expect_err(told);
            assert!(why.contains(told), "{why} is not {told}");
        }
    }

    #[test]
    fn a_late_begin_and_a_wrong_clock_are_told() {
        let mut parts = three();
        parts
            .iter_mut()
            .for_each(|(_, part)| part.start_at_ms = Some(800.0));
        parts[2].1.clock.synchronized = false;
        let notes = merge(&parts).expect("they belong together").notes;
        assert_eq!(notes.len(), 5, "{notes:?}");
        assert!(notes[3].contains("part2 began 202 ms late"), "{notes:?}");
    }

    #[test]
    fn the_hash_is_that_of_all_that_is_sent() {
        let one = plan();
        let hash = plan_hash(&one);
        let shard = Plan {
            shard: Shard { number: 3, of: 4 },
            ..one.clone()
        };
        assert_eq!(plan_hash(&shard), hash);
        let mut other = one.clone();
        other.mix.form.headers = vec!["X-A: b".parse().expect("a header")];
        assert_ne!(plan_hash(&other), hash);
        other = one.clone();
        other.mix.form.body = Some(b"x".to_vec());
        assert_ne!(plan_hash(&other), hash);
        other = one;
        other.host = "elsewhere".to_owned();
        assert_ne!(plan_hash(&other), hash);
    }

    #[test]
    fn shards_are_written_as_a_number_of_how_many() {
        assert_eq!("1/4".parse(), Ok(Shard { number: 1, of: 4 }));
        for bad in ["4/4", "1", "/", "-1/4", "0/0", "0/99999", "a/b", "1/2/3"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
        let shares: Vec<u64> = (0..3)
            .map(|number| Shard { number, of: 3 }.share(10))
            .collect();
        assert_eq!(shares, [4, 3, 3]);
    }
}
