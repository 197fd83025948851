//! The view as plain text, for pipes and for `--once`; and the sentences that the picture has too.

use wakeone_model::accept::Confidence;
use wakeone_model::layout::{self, Cell, Style, Tone, connections, count, pack, paint, wrap};
use wakeone_model::listener::Protocol;
use wakeone_model::snapshot::Watch;
use wakeone_model::verdict::time;

use crate::frame::{Frame, Steering};
use crate::table::{self, Column, FORMS, Form, Line, ShareOf, Table};
use wakeone_model::layout::printable;

/// Returns the address of a listener, its workers and its accept model.
pub fn headline(watch: &Watch) -> String {
    let listener = &watch.last.listener;
    let names: std::collections::BTreeSet<&str> =
        watch.last.workers.values().map(|w| &*w.name).collect();
    let names: Vec<&str> = names.into_iter().collect();
    let model = match (listener.sockets.is_empty(), watch.model.confidence) {
        (true, _) => "nothing listens here any more".to_owned(),
        (_, Confidence::Certain) => watch.model.name(),
        (_, Confidence::Likely) => format!("{}, likely", watch.model.name()),
        (_, Confidence::Possible) => format!("{}, possibly", watch.model.name()),
    };
    let words = [listener.title(), printable(&names.join(", ")), model];
    let words: Vec<String> = words.into_iter().filter(|w| !w.is_empty()).collect();
    words.join("  ")
}

/// The group's totals, a few words each.
pub fn totals(frame: &Frame) -> Vec<String> {
    let watch = &frame.watch;
    let totals = watch.totals();
    let mut parts = Vec::new();
    if counts_connections(watch) {
        parts.push(format!(
            "{:.0} connections/s{}",
            totals.connections_per_s,
            if watch.traced_connections().is_some() {
                ""
            } else {
                " in the namespace"
            }
        ));
    }
    parts.extend(open(frame).map(|open| format!("{open} open")));
    parts.push(format!("{:.0}% cpu", totals.cpu * 100.0));
    if let Some(p99) = totals.wait_us_p99 {
        parts.push(format!("wait p99 {}", time(p99)));
    }
    if let Some(oldest) = totals.oldest_wait_us {
        parts.push(format!("oldest waits {}", time(oldest)));
    }
    if let Some(woken) = totals.wakeups_per_connection {
        parts.push(format!("{woken:.2} wake-ups a connection"));
    }
    if let Some((skew, of)) = watch.unevenness() {
        parts.push(format!("busiest/mean {skew:.2} by {of}"));
    }
    if totals.dropped > 0 {
        parts.push(format!("{} dropped", totals.dropped));
    }
    let keepers: std::collections::BTreeSet<u32> = watch.keeps.values().copied().collect();
    for pid in keepers {
        parts.push(format!("{pid} keeps a socket as a last resort"));
    }
    parts
}

/// Whether the kernel counts the connections that come: it counts neither those of UNIX sockets nor datagrams.
pub fn counts_connections(watch: &Watch) -> bool {
    ![Protocol::Unix, Protocol::Udp].contains(&watch.last.listener.protocol)
}

/// The open connections of all workers, where there are connections.
fn open(frame: &Frame) -> Option<u64> {
    let slots = frame.steering.iter().flat_map(|one| &one.slots);
    match frame.watch.last.listener.protocol {
        Protocol::Udp => slots
            .filter_map(|slot| slot.open)
            .reduce(u64::saturating_add),
        _ => Some(
            frame
                .watch
                .rows()
                .iter()
                .map(|row| u64::from(row.active))
                .sum(),
        ),
    }
}

/// How the group is steered, a few words each.
pub fn steering(steering: &Steering) -> Vec<String> {
    let mut parts = vec![
        format!("group {}", printable(&steering.group)),
        format!(
            "policy {}",
            printable(steering.policy.as_deref().unwrap_or("unknown"))
        ),
    ];
    let down = steering.slots.iter().filter(|s| s.state == "down").count();
    if down > 0 {
        parts.push(format!("{} down", count(down as u64, "slot", "slots")));
    }
    let moved = steering
        .slots
        .iter()
        .fold(0_u64, |sum, s| sum.saturating_add(s.rescued));
    if moved > 0 {
        parts.push(format!("{} moved", connections(moved)));
    }
    if steering.fallbacks > 0 {
        parts.push(format!(
            "{} placed by the kernel, as no slot could be chosen",
            connections(steering.fallbacks)
        ));
    }
    parts.extend(steering.heavy.as_deref().map(printable));
    if !steering.agent {
        parts.push("no agent, so no rescue".into());
    }
    parts
}

/// Formats a listener at one refresh. `before`: how it was steered at the refresh before.
pub fn text(frame: &Frame, before: Option<&Steering>, style: Style) -> String {
    let table = table::table(frame, before);
    let head = headline(&frame.watch);
    let head = wrap(&head, "", style);
    let mut lines: Vec<String> = head
        .iter()
        .map(|line| paint(line, Tone::Bold, style))
        .collect();
    lines.extend(pack(&totals(frame), ", ", "", style));
    for shared in &table.shared {
        lines.extend(wrap(shared, "", style));
    }
    if let Some(told) = &frame.steering {
        lines.extend(pack(&steering(told), ", ", "", style));
    }
    if !table.lines.is_empty() {
        lines.extend(workers(&table, frame.steering.is_some(), style));
    }
    lines.join("\n") + "\n"
}

fn workers(table: &Table, steered: bool, style: Style) -> Vec<String> {
    let shown = |form: &&Form| {
        // Where the shares are of choices, the choices are not shown twice.
        let twice = form.column == Column::Chosen && table.share_of == ShareOf::Choices;
        (steered || !form.steered()) && !twice
    };
    let forms: Vec<&Form> = FORMS.iter().filter(shown).collect();
    let columns: Vec<layout::Column> = forms
        .iter()
        .map(|form| layout::Column {
            title: match form.column {
                Column::Share => table.share_of.title(),
                _ => form.title,
            },
            rank: form.rank,
            words: form.words && form.column != Column::Share,
        })
        .collect();
    let cell = |line: &Line, form: &Form| {
        let tone = match form.column {
            Column::State => Tone::of_state(&line.state),
            _ => Tone::Plain,
        };
        Cell::toned(line.cell(form.column), tone)
    };
    let rows: Vec<Vec<Cell>> = table
        .lines
        .iter()
        .map(|line| forms.iter().map(|form| cell(line, form)).collect())
        .collect();
    layout::table(&columns, &rows, 0, style)
}

/// Returns the notes on data that cannot be seen, a sentence each.
pub fn notes(watch: &Watch) -> impl Iterator<Item = String> + '_ {
    watch.view.missing.iter().map(|note| printable(note))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;
    use wakeone_model::waits::Waits;

    fn style(width: usize) -> Style {
        Style {
            width: Some(width),
            colour: false,
        }
    }

    #[test]
    fn a_table_of_text() {
        let shared = [
            "tcp 127.0.0.1:8080  server  shared-epoll-exclusive",
            "800 connections/s, 10 open, 115% cpu, wait p99 101 µs, 1.50 wake-ups a connection, busiest/mean 2.25 by connections",
            "queue 3/64, highest 12, shared by 3 workers",
            "pid  name    share  open   queue  wait p99  wakeups  cpu  state",
            "301  server    75%     7  shared    101 µs     1.12  90%  busy",
            "302  server    25%     2  shared    101 µs     0.38  25%  waiting",
            "303  server     0%     1  shared         -     0.00   0%  stopped",
        ];
        assert_eq!(
            text(&fixtures::shared(), None, Style::default())
                .lines()
                .collect::<Vec<_>>(),
            shared
        );
        for width in [80, 100, 160] {
            let text = text(&fixtures::steered(), None, style(width));
            for line in text.lines() {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
            insta::assert_snapshot!(format!("steered-text-{width}"), text);
        }
    }

    /// Only of QUIC there are connections.
    #[test]
    fn datagrams_have_no_connections_unless_they_are_of_quic() {
        let shown = |is_quic| text(&fixtures::datagrams(is_quic), None, Style::default());
        let (quic, others) = (shown(true), shown(false));
        assert!(quic.contains("\n126 open, "), "{quic}");
        assert!(
            quic.contains("\n401  server     0") && quic.contains("  30  "),
            "{quic}"
        );
        assert!(
            !others.contains("open, ") && others.contains("     -  "),
            "{others}"
        );
        for text in [quic, others] {
            assert!(!text.contains("connections/s"), "{text}");
        }
    }

    /// The supervisor keeps a socket for a worker that is to come.
    #[test]
    fn a_queue_that_is_only_kept_is_no_worker_that_is_missing() {
        let mut frame = fixtures::datagrams(true);
        let shown = |frame: &Frame| text(frame, None, Style::default());
        frame.watch.serves.remove(&1);
        assert!(shown(&frame).contains("nobody seen to serve it"));
        frame.watch.keeps.insert(1, 400);
        assert!(!shown(&frame).contains("nobody seen"));
    }

    #[test]
    fn what_waits_still_and_what_is_too_little_to_compare() {
        let mut frame = fixtures::shared();
        frame.watch.last.waiting = Some(Waits::of([100_000, 3_100_000]));
        let told = totals(&frame).join(", ");
        assert!(
            told.contains("wait p99 102 µs, oldest waits 3.10 s"),
            "{told}"
        );
        // A worker that does a little in an idle server is not the busiest of them.
        for worker in frame.watch.last.workers.values_mut() {
            worker.cpu_ns = 0;
        }
        let trace = frame.watch.last.trace.as_mut().expect("traced");
        for worker in trace.workers.values_mut() {
            *worker = Default::default();
        }
        trace.connections = 0;
        let idle = &mut frame.watch.last.workers;
        idle.values_mut().next().expect("worker").cpu_ns = 3_000_000;
        let told = totals(&frame).join(", ");
        assert!(
            told.starts_with("0 connections/s") && !told.contains("busiest"),
            "{told}"
        );
    }

    #[test]
    fn no_name_acts_on_the_terminal() {
        let mut frame = fixtures::steered();
        for worker in frame.watch.last.workers.values_mut() {
            worker.name = "\u{1b}]0;x\u{7}".into();
        }
        let steering = frame.steering.as_mut().expect("steered");
        steering.group = "\u{1b}[2J".into();
        steering.policy = Some("\r".into());
        steering.slots[0].state = "\u{8}".into();
        let text = text(&frame, None, Style::default());
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
        assert_eq!(text.lines().count(), 8);
    }
}
