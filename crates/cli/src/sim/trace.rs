//! A part of simulated runs as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

use serde_json::{Value, json};
use wakeone_sim::{Mark, Span, Trace, What};

/// Converts all traces: a process for each way, a thread for each worker. Requests that overlap within a worker are
/// drawn over one another.
pub fn chrome(all: &[(&str, Trace)], overlapping: bool) -> Value {
    let mut events = Vec::new();
    for (pid, (name, trace)) in (1..).zip(all) {
        events.push(json!({
            "name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": { "name": name },
        }));
        for (id, span) in trace.spans.iter().enumerate() {
            let id = format!("{pid}.{id}");
            events.extend(waited(pid, span, &id));
            if overlapping {
                let part = (span.began_s, span.ended_s);
                events.extend(drawn_over("request", pid, span.worker, part, &id));
            } else {
                events.push(json!({
                    "name": "request", "ph": "X", "pid": pid, "tid": span.worker,
                    "ts": span.began_s * 1e6, "dur": (span.ended_s - span.began_s) * 1e6,
                }));
            }
        }
        events.extend(trace.marks.iter().map(|one| mark(pid, one)));
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

/// The time in a queue, if there was any.
fn waited(pid: u32, span: &Span, id: &str) -> Vec<Value> {
    if span.began_s <= span.arrived_s {
        return Vec::new();
    }
    let part = (span.arrived_s, span.began_s);
    drawn_over("waits", pid, span.worker, part, id).into()
}

fn drawn_over(name: &str, pid: u32, worker: usize, (from, to): (f64, f64), id: &str) -> [Value; 2] {
    [("b", from), ("e", to)].map(|(phase, at)| {
        json!({
            "name": name, "cat": name, "ph": phase, "id": id, "pid": pid, "tid": worker, "ts": at * 1e6,
        })
    })
}

fn mark(pid: u32, mark: &Mark) -> Value {
    let name = match mark.what {
        What::Moved => "queue moved",
        What::Halted => "halted",
        What::WentOn => "goes on",
        What::Crashed => "crashed",
        What::Restarted => "restarted",
        What::Dropped => "SYN dropped",
    };
    json!({
        "name": name, "ph": "i", "s": "t", "pid": pid, "tid": mark.worker, "ts": mark.at_s * 1e6,
    })
}
