//! Observations as text for a person. Pure: the same data and style give the same text.

use wakeone_model::layout::{
    self, Cell, Column, Style, Tone, connections, number, pack, paint, words, wrap,
};
use wakeone_model::listener::Protocol;
use wakeone_model::snapshot::{Queue, Row, Totals, Watch};
use wakeone_model::verdict::{Finding, time};

/// The report on one listener: its model, its workers and queues, and what is wrong.
pub fn report(watch: &Watch, findings: &[Finding], style: Style) -> String {
    let mut lines = wrap(&headline(watch), "", style);
    if let Some(first) = lines.first_mut() {
        *first = paint(first, Tone::Bold, style);
    }
    lines.extend(wrap(&sentence(watch.model.describe()), "  ", style));
    for evidence in &watch.model.evidence {
        lines.extend(wrap(evidence, "    ", style));
    }
    lines.extend(pack(&totals(watch), ", ", "  ", style));
    let rows = watch.rows();
    let datagrams = watch.last.listener.protocol == Protocol::Udp;
    lines.extend(workers(&rows, datagrams, style));
    lines.extend(queues(&watch.queues(), datagrams, style));
    lines.push(String::new());
    lines.extend(verdicts(findings, watch, style));
    lines.join("\n") + "\n"
}

/// The meaning of the columns whose titles cannot say it, if the reports show them.
pub fn legend(reports: &str, style: Style) -> String {
    const WORDS: [(&str, &str); 6] = [
        (
            "taken",
            "connections accepted meanwhile; open: those that it holds now",
        ),
        ("wait p99", "99 of 100 waited no longer in the accept queue"),
        (
            "idle",
            "part of the time in which it waited for something to come",
        ),
        (
            "unused",
            "time it was idle while another's queue was not empty",
        ),
        (
            "held up",
            "time it was not empty, its workers were busy and another idle",
        ),
        ("sleeps/s", "times a second that the worker went to sleep"),
    ];
    let line = |(word, meaning): &(&str, &str)| wrap(meaning, &format!("  {word:<10}"), style);
    let shown = WORDS.iter().filter(|(word, _)| reports.contains(word));
    let lines: Vec<String> = shown.flat_map(line).collect();
    lines
        .iter()
        .map(|line| paint(line, Tone::Dim, style) + "\n")
        .collect()
}

fn headline(watch: &Watch) -> String {
    let listener = &watch.last.listener;
    let names: std::collections::BTreeSet<&str> =
        watch.last.workers.values().map(|w| &*w.name).collect();
    let names: Vec<&str> = names.into_iter().collect();
    format!(
        "{}  {}  {}  [{}]",
        listener.title(),
        if names.is_empty() {
            "nobody that may be seen".into()
        } else {
            names.join(", ")
        },
        watch.model.name(),
        match watch.model.confidence {
            wakeone_model::accept::Confidence::Certain => "certain",
            wakeone_model::accept::Confidence::Likely => "likely",
            wakeone_model::accept::Confidence::Possible => "possible",
        }
    )
}

fn sentence(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

/// The totals, a few words each.
fn totals(watch: &Watch) -> Vec<String> {
    let totals = watch.totals();
    let Totals {
        seconds,
        connections_per_s,
        ..
    } = totals;
    // The kernel counts neither datagrams nor connections of UNIX sockets. Waiting and dropped data is in the rows of the
    // queues.
    let uncounted = [Protocol::Udp, Protocol::Unix].contains(&watch.last.listener.protocol);
    let mut parts = vec![if uncounted {
        format!("{seconds:.1} s")
    } else {
        format!(
            "{seconds:.1} s: {}{} ({connections_per_s:.0}/s)",
            connections(totals.connections),
            if watch.traced_connections().is_some() {
                ""
            } else {
                " in the network namespace"
            }
        )
    }];
    if watch.is_quic() == Some(true) {
        parts.push("packets of QUIC".into());
    }
    if let Some(woken) = totals.wakeups_per_connection {
        parts.push(format!("{woken:.2} wake-ups each"));
    }
    if let (Some(p50), Some(p99), Some(max)) =
        (totals.wait_us_p50, totals.wait_us_p99, totals.wait_us_max)
    {
        parts.push(format!(
            "wait in the queue p50 {} p99 {} max {}",
            time(p50),
            time(p99),
            time(max)
        ));
    }
    if let Some(oldest) = totals.oldest_wait_us {
        parts.push(format!("oldest waits {}", time(oldest)));
    }
    if let Some((skew, of)) = watch.unevenness() {
        parts.push(format!("busiest/mean {skew:.2} by {of}"));
    }
    if totals.dropped > 0 {
        parts.push(format!("{} dropped", totals.dropped));
    }
    parts
}

/// More workers than this are not listed one by one.
const MOST_ROWS: usize = 32;

const WORKERS: [Column; 11] = [
    number("pid", 0),
    words("name", 7),
    number("taken", 3),
    number("share", 1),
    number("open", 4),
    number("cpu", 2),
    number("sleeps/s", 8),
    number("wait p99", 0),
    number("idle", 5),
    number("unused", 6),
    words("state", 0),
];

fn dash() -> Cell {
    "-".into()
}

/// Formats a time for a table: a dash for zero.
fn seconds(seconds: f64) -> Cell {
    if seconds > 0.0 {
        time(seconds * 1e6).into()
    } else {
        dash()
    }
}

fn percent(share: f64) -> Cell {
    format!("{:.0}%", share * 100.0).into()
}

fn more(rows: usize) -> Option<String> {
    let more = rows.checked_sub(MOST_ROWS).filter(|more| *more > 0)?;
    Some(format!("  … and {more} more (--json has all)"))
}

/// Columns that are of connections only.
const OF_CONNECTIONS: [&str; 4] = ["taken", "share", "open", "wait p99"];

fn workers(rows: &[Row], datagrams: bool, style: Style) -> Vec<String> {
    if rows.is_empty() {
        return Vec::new();
    }
    let columns = WORKERS
        .map(|column| (!datagrams || !OF_CONNECTIONS.contains(&column.title)).then_some(column));
    let cells = |row: &Row| {
        vec![
            row.pid.into(),
            row.name.as_str().into(),
            row.taken.map_or_else(dash, Cell::from),
            row.share.map_or_else(dash, percent),
            match row.thread_of {
                Some(_) => dash(),
                None => row.active.into(),
            },
            percent(row.cpu),
            format!("{:.0}", row.switches_voluntary_per_s).into(),
            row.wait_us_p99.map_or_else(dash, |us| time(us).into()),
            percent(row.waiting),
            seconds(row.idle_beside_queue_s),
            Cell::toned(row.state.as_str(), Tone::of_state(&row.state)),
        ]
    };
    let of_these = |row| {
        let cells: Vec<Cell> = cells(row);
        let kept = cells
            .into_iter()
            .zip(&columns)
            .filter(|(_, column)| column.is_some());
        kept.map(|(cell, _)| cell).collect()
    };
    let shown: Vec<Vec<Cell>> = rows.iter().take(MOST_ROWS).map(of_these).collect();
    let columns: Vec<Column> = columns.iter().flatten().copied().collect();
    let mut lines = layout::table(&columns, &shown, 2, style);
    lines.extend(more(rows.len()));
    lines
}

/// `bytes`: the queues are those of UDP, whose waiting data is counted in bytes.
fn queues(queues: &[Queue], bytes: bool, style: Style) -> Vec<String> {
    let columns = [
        number("socket", 3),
        number(if bytes { "bytes" } else { "queued" }, 0),
        number("highest", 1),
        number("limit", 0),
        number("dropped", 0),
        number("held up", 0),
        words("served by", 0),
    ];
    let cells = |queue: &Queue| {
        vec![
            queue.inode.into(),
            queue.length.into(),
            queue.highest.into(),
            queue.limit.into(),
            match queue.dropped {
                0 => 0.into(),
                dropped => Cell::toned(dropped.to_string(), Tone::Bad),
            },
            seconds(queue.blocked_s),
            served_by(queue).into(),
        ]
    };
    let shown: Vec<Vec<Cell>> = queues.iter().take(MOST_ROWS).map(cells).collect();
    let mut lines = layout::table(&columns, &shown, 2, style);
    lines.extend(more(queues.len()));
    lines
}

fn served_by(queue: &Queue) -> String {
    let pids: Vec<String> = queue.pids.iter().take(8).map(u32::to_string).collect();
    match (queue.kept_by, pids.is_empty()) {
        (Some(keeper), _) => format!("nobody ({keeper} keeps it)"),
        (None, true) => "nobody seen".into(),
        (None, false) => {
            let more = if queue.pids.len() > 8 { ", …" } else { "" };
            pids.join(", ") + more
        }
    }
}

/// Whether enough was observed to call a server healthy: a worker that serves the listener.
pub fn told(watch: &Watch) -> bool {
    !watch.last.workers.is_empty()
}

fn verdicts(findings: &[Finding], watch: &Watch, style: Style) -> Vec<String> {
    if findings.is_empty() && !told(watch) {
        let told = "not told: nobody who serves it may be seen, and its queues show nothing wrong";
        return wrap(told, "  ", style);
    }
    if findings.is_empty() {
        let healthy = paint("healthy", Tone::Good, style);
        let counted = ![Protocol::Udp, Protocol::Unix].contains(&watch.last.listener.protocol);
        let but = if counted && watch.totals().connections == 0 {
            ", but no connection came meanwhile"
        } else {
            ""
        };
        return vec![format!("  {healthy}: nothing found{but}")];
    }
    findings
        .iter()
        .flat_map(|finding| verdict(finding, style))
        .collect()
}

fn verdict(finding: &Finding, style: Style) -> Vec<String> {
    let mut lines = wrap(
        &format!("{}  ({})", finding.title, finding.code),
        "  ! ",
        style,
    );
    for line in &mut lines {
        *line = paint(line, Tone::Bad, style);
    }
    lines.extend(wrap(&finding.cause, "      why   ", style));
    for (parts, label) in [(&finding.evidence, "seen"), (&finding.next, "do  ")] {
        for (n, part) in parts.iter().enumerate() {
            let label = if n == 0 { label } else { "    " };
            lines.extend(wrap(part, &format!("      {label}  "), style));
        }
    }
    lines
}
