//! The groups of many machines in one table, the worst first, by the metrics that their agents serve.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use wakeone_model::layout::{Cell, Column, Style, Tone, number, printable, table, words};

/// More of an exposition is not read: no agent serves as much.
const MOST_SAMPLES: usize = 200_000;
/// A name or a value of a label is no longer.
const MOST_OF_A_LABEL: usize = 256;
/// Fewer open connections a worker say nothing about how they are divided.
const FEW: f64 = 2.0;
/// The busiest worker has so many times the mean, from which on a group counts as uneven.
const UNEVEN: f64 = 1.5;

/// One number of an exposition.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The metric.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

impl Sample {
    /// One that was read elsewhere, with control characters in its texts made `?`.
    pub fn new(name: &str, labels: impl IntoIterator<Item = (String, String)>, value: f64) -> Self {
        let labels = labels.into_iter();
        Self {
            name: plain(name),
            labels: labels
                .map(|(name, value)| (plain(&name), plain(&value)))
                .collect(),
            value,
        }
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }
}

/// Reads the samples of an exposition in the OpenMetrics or Prometheus format: `NAME{LABEL="VALUE",…} NUMBER …`. Lines of another
/// form are passed over. Control characters in labels become `?`, as they go to a terminal.
pub fn parse(text: &str) -> Vec<Sample> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(sample).take(MOST_SAMPLES).collect()
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    let rest = match rest.strip_prefix('{') {
        Some(inner) => labels_of(inner, &mut labels)?,
        None => rest,
    };
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    let name = plain(name);
    (!name.is_empty()).then_some(Sample {
        name,
        labels,
        value,
    })
}

/// Reads labels up to the closing brace. Returns what follows it.
fn labels_of<'a>(mut rest: &'a str, labels: &mut BTreeMap<String, String>) -> Option<&'a str> {
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some(after);
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (at, '"') => break at,
                (_, other) => value.push(other),
            }
        };
        labels.insert(plain(name), plain(&value));
        rest = &after[end + 1..];
    }
}

fn plain(text: &str) -> String {
    printable(text).chars().take(MOST_OF_A_LABEL).collect()
}

/// A group of a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The machine, as it was asked for.
    pub node: String,
    /// The group; empty if the machine did not answer, or has none.
    pub group: String,
    /// Its pod or container, if it is in one.
    pub place: Option<String>,
    /// How a worker is chosen; `None` if our program does not choose.
    pub policy: Option<String>,
    /// Whether an agent looks after it.
    pub agent: bool,
    /// Workers that are up.
    pub workers: usize,
    /// Slots whose worker is stuck.
    pub stuck: usize,
    /// Connections open.
    pub open: f64,
    /// The busiest worker's open connections over the mean; `None` if too few are open.
    pub max_over_mean: Option<f64>,
    /// Connections that wait to be accepted.
    pub queued: f64,
    /// Connections or datagrams that came, a second; `None` at the first look.
    pub arrivals_per_s: Option<f64>,
    /// Queues that were moved, a second.
    pub rescues_per_s: Option<f64>,
    /// Connections and datagrams that found no room, a second.
    pub overflows_per_s: Option<f64>,
    /// The 99th percentile of waits to be accepted, of all time, ms; `None` where nothing is traced.
    pub wait_ms_p99: Option<f64>,
    /// Why the machine told nothing.
    pub error: Option<String>,
}

impl Row {
    fn of_nobody(node: &str, error: Option<String>) -> Self {
        Self {
            node: node.to_owned(),
            group: String::new(),
            place: None,
            policy: None,
            agent: false,
            workers: 0,
            stuck: 0,
            open: 0.0,
            max_over_mean: None,
            queued: 0.0,
            arrivals_per_s: None,
            rescues_per_s: None,
            overflows_per_s: None,
            wait_ms_p99: None,
            error,
        }
    }

    /// How bad it is: rows are sorted by this, the largest first.
    fn badness(&self) -> [f64; 5] {
        let wrong = |is: bool| f64::from(is);
        [
            wrong(self.error.is_some()),
            self.stuck as f64 + wrong(!self.group.is_empty() && !self.agent),
            self.overflows_per_s.unwrap_or(0.0) + self.rescues_per_s.unwrap_or(0.0),
            self.max_over_mean
                .filter(|skew| *skew >= UNEVEN)
                .unwrap_or(0.0),
            self.queued,
        ]
    }
}

/// What only grows.
#[derive(Debug, Clone, Copy, Default)]
struct Counters {
    arrivals: f64,
    rescues: f64,
    overflows: f64,
}

/// The groups of all machines, with what they counted before.
#[derive(Debug, Default)]
pub struct Fleet {
    before: HashMap<(String, String), Counters>,
}

impl Fleet {
    /// The rows of a look at all machines, the worst first. `answers` has the samples of each, or why it told none. `seconds`: the time since
    /// the last look.
    pub fn look(
        &mut self,
        answers: &[(String, Result<Vec<Sample>, String>)],
        seconds: f64,
    ) -> Vec<Row> {
        let mut rows = Vec::new();
        let mut now = HashMap::new();
        for (node, answer) in answers {
            match answer {
                Ok(samples) => {
                    let of_node = self.rows(node, samples, seconds, &mut now);
                    match of_node.is_empty() {
                        true => rows.push(Row::of_nobody(node, None)),
                        false => rows.extend(of_node),
                    }
                }
                Err(why) => rows.push(Row::of_nobody(node, Some(plain(why)))),
            }
        }
        self.before = now;
        rows.sort_by(|a, b| {
            let by = |row: &Row| (row.node.clone(), row.group.clone());
            let (worse, better) = (b.badness(), a.badness());
            let order = worse.partial_cmp(&better);
            order
                .unwrap_or(std::cmp::Ordering::Equal)
                .then_with(|| by(a).cmp(&by(b)))
        });
        rows
    }

    fn rows(
        &self,
        node: &str,
        samples: &[Sample],
        seconds: f64,
        now: &mut HashMap<(String, String), Counters>,
    ) -> Vec<Row> {
        // A Prometheus server tells of many machines.
        let mut groups: BTreeMap<(String, String), Vec<&Sample>> = BTreeMap::new();
        for sample in samples {
            if let Some(group) = sample.label("group") {
                let node = sample.label("instance").unwrap_or(node);
                let key = (node.to_owned(), group.to_owned());
                groups.entry(key).or_default().push(sample);
            }
        }
        let row = |(key, samples): ((String, String), Vec<&Sample>)| {
            let (mut row, counted) = row(&key, &samples);
            if let Some(before) = self.before.get(&key).filter(|_| seconds > 0.0) {
                let rate = |now: f64, before: f64| Some(((now - before) / seconds).max(0.0));
                row.arrivals_per_s = rate(counted.arrivals, before.arrivals);
                row.rescues_per_s = rate(counted.rescues, before.rescues);
                row.overflows_per_s = rate(counted.overflows, before.overflows);
            }
            now.insert(key, counted);
            row
        };
        groups.into_iter().map(row).collect()
    }
}

fn row((node, group): &(String, String), samples: &[&Sample]) -> (Row, Counters) {
    let named = |name: &'static str| samples.iter().filter(move |one| one.name == name);
    let sum = |name| named(name).map(|one| one.value).sum::<f64>();
    let label = |name, label: &'static str| {
        named(name).find_map(move |one| one.label(label).map(str::to_owned))
    };
    let in_state = |state: &'static str| {
        let is = move |one: &&&Sample| one.label("state") == Some(state) && one.value > 0.0;
        let slots = named("wakeone_slot_state").filter(is);
        slots
            .filter_map(|one| one.label("slot"))
            .collect::<Vec<_>>()
    };
    let (up, stuck) = (in_state("up"), in_state("stuck"));
    let active: Vec<f64> = named("wakeone_slot_active_connections")
        .filter(|one| {
            one.label("slot")
                .is_some_and(|slot| up.contains(&slot) || stuck.contains(&slot))
        })
        .map(|one| one.value.max(0.0))
        .collect();
    let open: f64 = active.iter().sum();
    let mean = open / active.len().max(1) as f64;
    let most = active.iter().copied().fold(0.0, f64::max);
    let counters = Counters {
        arrivals: sum("wakeone_slot_selected_connections_total"),
        rescues: sum("wakeone_slot_rescues_total"),
        overflows: sum("wakeone_slot_dropped_datagrams_total")
            + sum("wakeone_host_listen_overflows_total"),
    };
    let row = Row {
        place: label("wakeone_group_pod_info", "pod")
            .or(label("wakeone_group_container_info", "container")),
        policy: label("wakeone_group_policy_info", "policy"),
        agent: sum("wakeone_group_agent") > 0.0,
        workers: up.len() + stuck.len(),
        stuck: stuck.len(),
        open,
        max_over_mean: (mean >= FEW).then(|| most / mean),
        queued: sum("wakeone_slot_queued_connections") + sum("wakeone_group_queue_connections"),
        wait_ms_p99: wait_p99(samples),
        group: group.clone(),
        ..Row::of_nobody(node, None)
    };
    (row, counters)
}

/// The upper end of the bucket that has the 99th percentile of waits, ms.
fn wait_p99(samples: &[&Sample]) -> Option<f64> {
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for one in samples
        .iter()
        .filter(|one| one.name == "wakeone_worker_accept_wait_seconds_bucket")
    {
        let upper: f64 = one.label("le")?.parse().ok()?;
        match buckets.iter_mut().find(|(le, _)| *le == upper) {
            Some((_, count)) => *count += one.value,
            None => buckets.push((upper, one.value)),
        }
    }
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all = buckets.last().filter(|(_, count)| *count > 0.0)?.1;
    let (upper, _) = buckets.iter().find(|(_, count)| *count >= 0.99 * all)?;
    upper.is_finite().then_some(upper * 1e3)
}

const COLUMNS: [Column; 11] = [
    words("node", 0),
    words("group", 0),
    words("in", 3),
    words("policy", 5),
    number("workers", 2),
    number("open", 1),
    number("max/mean", 0),
    number("queued", 1),
    number("/s", 2),
    number("rescues/s", 4),
    number("wait p99", 6),
];

/// The table of all groups.
pub fn text(rows: &[Row], style: Style) -> String {
    let cells: Vec<Vec<Cell>> = rows.iter().map(cells).collect();
    let mut lines = table(&COLUMNS, &cells, 0, style);
    for row in rows {
        if let Some(why) = &row.error {
            lines.push(format!("{}: {why}", row.node));
        }
    }
    lines.join("\n") + "\n"
}

fn cells(row: &Row) -> Vec<Cell> {
    let told = |value: Option<f64>, digits: usize| match value {
        Some(value) => Cell::from(format!("{value:.digits$}")),
        None => Cell::toned("-", Tone::Dim),
    };
    let words = |text: &Option<String>| match text {
        Some(text) => Cell::from(text),
        None => Cell::toned("-", Tone::Dim),
    };
    if row.group.is_empty() {
        let told = match row.error {
            Some(_) => Cell::toned("no answer", Tone::Bad),
            None => Cell::toned("no group", Tone::Dim),
        };
        return vec![Cell::from(&row.node), told];
    }
    let workers = match row.stuck {
        0 => Cell::from(row.workers),
        stuck => Cell::toned(format!("{} ({stuck} stuck)", row.workers), Tone::Bad),
    };
    let skew = match row.max_over_mean {
        Some(skew) if skew >= UNEVEN => Cell::toned(format!("{skew:.2}"), Tone::Warning),
        skew => told(skew, 2),
    };
    let policy = match (&row.policy, row.agent) {
        (Some(policy), true) => Cell::from(policy),
        (Some(policy), false) => Cell::toned(format!("{policy}, no agent"), Tone::Warning),
        (None, _) => Cell::toned("the kernel's", Tone::Warning),
    };
    vec![
        Cell::from(&row.node),
        Cell::from(&row.group),
        words(&row.place),
        policy,
        workers,
        Cell::from(row.open),
        skew,
        Cell::from(row.queued),
        told(row.arrivals_per_s, 1),
        told(row.rescues_per_s, 2),
        match row.wait_ms_p99 {
            Some(ms) => Cell::from(format!("{ms:.3} ms")),
            None => Cell::toned("-", Tone::Dim),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exposition(open: [u32; 3], selected: u32, stuck: bool) -> String {
        let mut text = String::from(
            "# TYPE wakeone_group_policy info\nwakeone_group_policy_info{group=\"web\",policy=\"least-connections\"} 1\nwakeone_group_agent{group=\"web\"} 1\nwakeone_group_pod_info{group=\"web\",pod=\"default/web-1\"} 1\n",
        );
        for (slot, open) in open.iter().enumerate() {
            let is_stuck = u8::from(stuck && slot == 0);
            text += &format!(
                "wakeone_slot_state{{group=\"web\",slot=\"{slot}\",state=\"up\"}} {}\nwakeone_slot_state{{group=\"web\",slot=\"{slot}\",state=\"stuck\"}} {is_stuck}\nwakeone_slot_active_connections{{group=\"web\",slot=\"{slot}\"}} {open}\nwakeone_slot_selected_connections_total{{group=\"web\",slot=\"{slot}\"}} {selected}\n",
                1 - is_stuck
            );
        }
        text + "# EOF\n"
    }

    fn answer(node: &str, text: &str) -> (String, Result<Vec<Sample>, String>) {
        (node.to_owned(), Ok(parse(text)))
    }

    #[test]
    fn the_worst_comes_first() {
        let mut fleet = Fleet::default();
        let look = |fleet: &mut Fleet, selected| {
            let answers = [
                answer("even:1", &exposition([10, 10, 11], selected, false)),
                answer("uneven:1", &exposition([30, 1, 2], selected, false)),
                answer("stuck:1", &exposition([3, 3, 3], selected, true)),
                answer("empty:1", "# EOF\n"),
                ("gone:1".to_owned(), Err("Connection refused".to_owned())),
            ];
            fleet.look(&answers, 2.0)
        };
        let first = look(&mut fleet, 100);
        let nodes: Vec<&str> = first.iter().map(|row| row.node.as_str()).collect();
        assert_eq!(
            nodes,
            ["gone:1", "stuck:1", "uneven:1", "empty:1", "even:1"]
        );
        assert!(first.iter().all(|row| row.arrivals_per_s.is_none()));
        let uneven = &first[2];
        assert!(
            uneven
                .max_over_mean
                .is_some_and(|skew| (skew - 30.0 / 11.0).abs() < 1e-9)
        );
        assert_eq!((uneven.workers, uneven.open), (3, 33.0));
        assert_eq!(uneven.place.as_deref(), Some("default/web-1"));
        assert_eq!((first[1].stuck, first[1].workers), (1, 3));
        let second = look(&mut fleet, 150);
        assert_eq!(second[2].arrivals_per_s, Some(75.0));
        let style = Style {
            width: Some(100),
            colour: false,
        };
        let text = text(&second, style);
        assert!(
            text.contains("no answer") && text.contains("gone:1: Connection refused"),
            "{text}"
        );
        assert!(
            text.lines().all(|line| line.chars().count() <= 100),
            "{text}"
        );
    }

    #[test]
    fn a_prometheus_server_tells_of_many_machines() {
        let one = exposition([1, 1, 1], 5, false).replace("{group", "{instance=\"a:1\",group");
        let other = exposition([1, 1, 1], 5, false).replace("{group", "{instance=\"b:1\",group");
        let rows = Fleet::default().look(&[answer("prometheus", &(one + &other))], 1.0);
        let nodes: Vec<&str> = rows.iter().map(|row| row.node.as_str()).collect();
        assert_eq!(nodes, ["a:1", "b:1"]);
    }

    #[test]
    fn waits_are_those_of_all_workers() {
        let buckets = |slot: u32, counts: [u32; 3]| {
            let bucket = |(le, count): (&str, u32)| {
                format!(
                    "wakeone_worker_accept_wait_seconds_bucket{{group=\"web\",slot=\"{slot}\",le=\"{le}\"}} {count}\n"
                )
            };
            let all = ["0.001", "0.01", "+Inf"].into_iter().zip(counts);
            all.map(bucket).collect::<String>()
        };
        let text =
            exposition([1, 1, 1], 5, false) + &buckets(0, [98, 98, 98]) + &buckets(1, [0, 2, 2]);
        let rows = Fleet::default().look(&[answer("a", &text)], 1.0);
        assert_eq!(rows[0].wait_ms_p99, Some(10.0));
    }

    #[test]
    fn labels_may_have_any_text() {
        let samples = parse("a{b=\"x\\\"y\\\\z\\n\",c=\"d}\"} 1.5 123\nd 2\n");
        assert_eq!(samples.len(), 2);
        assert_eq!(samples[0].label("b"), Some("x\"y\\z?"));
        assert_eq!(samples[0].label("c"), Some("d}"));
        assert_eq!((samples[0].value, samples[1].value), (1.5, 2.0));
        for bad in [
            "",
            "a",
            "a{",
            "a{b",
            "a{b=\"",
            "a{b=\"c\"",
            "a{b=\"c\"}",
            "a x",
            "{b=\"c\"} 1",
        ] {
            assert!(parse(bad).is_empty(), "{bad}");
        }
    }

    #[test]
    fn expositions_survive_foreign_bytes() {
        let seed = exposition([1, 2, 3], 4, true).into_bytes();
        crate::foreign::survives("exposition", &[seed], |bytes| {
            let samples = parse(&String::from_utf8_lossy(bytes));
            let rows = Fleet::default().look(&[("a".to_owned(), Ok(samples))], 1.0);
            let style = Style {
                width: Some(80),
                colour: false,
            };
            let text = text(&rows, style);
            assert!(
                !text.contains(|c: char| c.is_control() && c != '\n'),
                "{text:?}"
            );
        });
    }
}
