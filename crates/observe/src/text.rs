//! What was watched, as text for a person. Pure: the same data gives the same text.

use wakeone_model::listener::Protocol;
use wakeone_model::snapshot::{Queue, Row, Totals, Watch};
use wakeone_model::verdict::{Finding, time};

/// The report on one listener: its model, its workers and queues, and what is wrong.
pub fn report(watch: &Watch, findings: &[Finding]) -> String {
    let mut lines = vec![headline(watch)];
    lines.push(format!("  {}", sentence(watch.model.describe())));
    lines.extend(watch.model.evidence.iter().map(|e| format!("    {e}")));
    lines.push(format!("  {}", totals(watch)));
    lines.extend(workers(&watch.rows()));
    let bytes = watch.last.listener.protocol == Protocol::Udp;
    lines.extend(queues(&watch.queues(), bytes));
    lines.push(String::new());
    lines.extend(verdicts(findings, told(watch)));
    lines.join("\n") + "\n"
}

fn headline(watch: &Watch) -> String {
    let listener = &watch.last.listener;
    let names: std::collections::BTreeSet<&str> =
        watch.last.workers.values().map(|w| &*w.name).collect();
    let names: Vec<&str> = names.into_iter().collect();
    format!(
        "{} {}  {}  {}  [{}]",
        listener.protocol,
        listener.address,
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

fn totals(watch: &Watch) -> String {
    let Totals {
        seconds,
        connections,
        connections_per_s,
        ..
    } = watch.totals();
    let totals = watch.totals();
    let udp = watch.last.listener.protocol == Protocol::Udp;
    let connections = format!(
        "{seconds:.1} s: {connections} connections{} ({connections_per_s:.0}/s)",
        if watch.traced_connections().is_some() {
            ""
        } else {
            " in the network namespace"
        }
    );
    // Nobody counts datagrams; what waits and what was dropped is in bytes and in the queues' rows.
    let mut parts = vec![if udp {
        format!("{seconds:.1} s")
    } else {
        connections
    }];
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
    if let Some(skew) = totals.skew_max_over_mean {
        let of = if watch.rows().iter().all(|r| r.share.is_some()) {
            "connections"
        } else {
            "CPU"
        };
        parts.push(format!("busiest/mean {skew:.2} by {of}"));
    }
    if totals.dropped > 0 {
        parts.push(format!("{} dropped", totals.dropped));
    }
    parts.join(", ")
}

/// More workers than this are not listed one by one.
const MOST_ROWS: usize = 32;

fn workers(rows: &[Row]) -> Vec<String> {
    if rows.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![format!(
        "  {:>8} {:<15} {:>8} {:>6} {:>6} {:>6} {:>9} {:>10} {:>8} {:>10}  {}",
        "pid",
        "name",
        "taken",
        "share",
        "active",
        "cpu",
        "sleeps/s",
        "wait p99",
        "waiting",
        "idle*",
        "state"
    )];
    let dash = || "-".to_owned();
    for row in rows.iter().take(MOST_ROWS) {
        lines.push(format!(
            "  {:>8} {:<15} {:>8} {:>6} {:>6} {:>5.0}% {:>9.0} {:>10} {:>7.0}% {:>10}  {}",
            row.pid,
            row.name,
            row.taken.map_or_else(dash, |n| n.to_string()),
            row.share
                .map_or_else(dash, |s| format!("{:.0}%", s * 100.0)),
            row.active,
            row.cpu * 100.0,
            row.switches_voluntary_per_s,
            row.wait_us_p99.map_or_else(dash, time),
            row.waiting * 100.0,
            time(row.idle_beside_queue_s * 1e6),
            row.state
        ));
    }
    if rows.len() > MOST_ROWS {
        lines.push(format!(
            "  … and {} more (--json has all)",
            rows.len() - MOST_ROWS
        ));
    }
    if rows.iter().any(|r| r.idle_beside_queue_s > 0.0) {
        lines.push("  * time in which it waited while another's queue was blocked".into());
    }
    lines
}

/// `bytes`: what waits is counted in bytes, of UDP.
fn queues(queues: &[Queue], bytes: bool) -> Vec<String> {
    let mut lines = vec![format!(
        "  {:>12} {:>8} {:>8} {:>8} {:>8} {:>10}  {}",
        "socket",
        if bytes { "bytes" } else { "queued" },
        "highest",
        "limit",
        "dropped",
        "blocked",
        "served by"
    )];
    for queue in queues.iter().take(MOST_ROWS) {
        let pids: Vec<String> = queue.pids.iter().take(8).map(u32::to_string).collect();
        lines.push(format!(
            "  {:>12} {:>8} {:>8} {:>8} {:>8} {:>10}  {}{}",
            queue.inode,
            queue.length,
            queue.highest,
            queue.limit,
            queue.dropped,
            time(queue.blocked_s * 1e6),
            match (queue.kept_by, pids.is_empty()) {
                (Some(keeper), _) => format!("nobody: {keeper} keeps it as a last resort"),
                (None, true) => "nobody seen".into(),
                (None, false) => pids.join(", "),
            },
            if queue.pids.len() > 8 { ", …" } else { "" }
        ));
    }
    if queues.len() > MOST_ROWS {
        lines.push(format!(
            "  … and {} more (--json has all)",
            queues.len() - MOST_ROWS
        ));
    }
    lines
}

/// Whether enough is seen to call a server healthy: somebody who serves the listener.
pub fn told(watch: &Watch) -> bool {
    !watch.last.workers.is_empty()
}

fn verdicts(findings: &[Finding], told: bool) -> Vec<String> {
    if findings.is_empty() && !told {
        return vec![
            "  not told: nobody who serves it may be seen, and its queues show nothing wrong"
                .into(),
        ];
    }
    if findings.is_empty() {
        return vec!["  healthy: nothing found".into()];
    }
    let mut lines = Vec::new();
    for finding in findings {
        lines.push(format!("  ! {}  ({})", finding.title, finding.code));
        lines.push(format!("      why   {}", finding.cause));
        for (n, evidence) in finding.evidence.iter().enumerate() {
            lines.push(format!(
                "      {}  {evidence}",
                if n == 0 { "seen" } else { "    " }
            ));
        }
        for (n, next) in finding.next.iter().enumerate() {
            lines.push(format!(
                "      {}  {next}",
                if n == 0 { "do  " } else { "    " }
            ));
        }
    }
    lines
}
