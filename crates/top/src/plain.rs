//! The view as plain text, for pipes and for `--once`; and the sentences that the picture has too.

use wakeone_model::accept::Confidence;
use wakeone_model::snapshot::Watch;
use wakeone_model::verdict::time;

use crate::frame::{Frame, Steering, printable};
use crate::table::{self, Column, FORMS, ShareOf, Table};

/// Where it listens, who serves, by which accept model.
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
    let address = format!("{} {}", listener.protocol, listener.address);
    let words = [address, printable(&names.join(", ")), model];
    let words: Vec<String> = words.into_iter().filter(|w| !w.is_empty()).collect();
    words.join("  ")
}

/// The group's totals, a few words each.
pub fn totals(watch: &Watch) -> Vec<String> {
    let totals = watch.totals();
    let rows = watch.rows();
    let active = rows
        .iter()
        .fold(0_u64, |sum, row| sum + u64::from(row.active));
    let mut parts = vec![
        format!(
            "{:.0} connections/s{}",
            totals.connections_per_s,
            if watch.traced_connections().is_some() {
                ""
            } else {
                " in the namespace"
            }
        ),
        format!("{active} active"),
        format!("{:.0}% cpu", totals.cpu * 100.0),
    ];
    if let Some(p99) = totals.wait_us_p99 {
        parts.push(format!("wait p99 {}", time(p99)));
    }
    if let Some(woken) = totals.wakeups_per_connection {
        parts.push(format!("{woken:.2} wakes/connection"));
    }
    if let Some(skew) = totals.skew_max_over_mean {
        parts.push(format!("busiest/mean {skew:.2}"));
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
        parts.push(format!("{down} slots down"));
    }
    let moved = steering
        .slots
        .iter()
        .fold(0_u64, |sum, s| sum.saturating_add(s.rescued));
    if moved > 0 {
        parts.push(format!("{moved} moved"));
    }
    if steering.fallbacks > 0 {
        parts.push(format!("{} fallbacks", steering.fallbacks));
    }
    if !steering.agent {
        parts.push("no agent, so no rescue".into());
    }
    parts
}

/// A listener at one refresh. `before`: how it was steered at the one before.
pub fn text(frame: &Frame, before: Option<&Steering>) -> String {
    let Table {
        lines: rows,
        share_of,
        shared,
    } = table::table(frame, before);
    let mut lines = vec![headline(&frame.watch), totals(&frame.watch).join(", ")];
    lines.extend(shared);
    lines.extend(frame.steering.as_ref().map(|s| steering(s).join(", ")));
    let steered = frame.steering.is_some();
    let forms = || {
        FORMS.iter().filter(move |f| {
            // Where the shares are of choices, those are not told twice.
            let twice = f.column == Column::Chosen && share_of == ShareOf::Choices;
            (steered || !f.steered()) && !twice
        })
    };
    let set = |cell: &str, form: &table::Form| {
        let width = usize::from(form.width.max(form.title.len() as u16)).max(match form.column {
            Column::Share => "cpu share".len(),
            _ => 0,
        });
        if form.words && form.column != Column::Share {
            format!("{cell:<width$}")
        } else {
            format!("{cell:>width$}")
        }
    };
    let title = |form: &table::Form| match form.column {
        Column::Share => share_of.title(),
        _ => form.title,
    };
    let line = |cells: Vec<String>| cells.join(" ").trim_end().to_owned();
    if !rows.is_empty() {
        lines.push(line(forms().map(|f| set(title(f), f)).collect()));
    }
    for row in &rows {
        lines.push(line(forms().map(|f| set(&row.cell(f.column), f)).collect()));
    }
    lines.join("\n") + "\n"
}

/// What cannot be seen, a sentence each.
pub fn notes(watch: &Watch) -> impl Iterator<Item = String> + '_ {
    watch.view.missing.iter().map(|note| printable(note))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn a_table_of_text() {
        let shared = [
            "tcp 127.0.0.1:8080  server  shared-epoll-exclusive",
            "800 connections/s, 10 active, 115% cpu, wait p99 101 µs, 1.50 wakes/connection, busiest/mean 2.25",
            "queue 3/64, highest 12, shared by 3 workers",
            "    pid name                share active     queue wait p99 wakes/c   cpu state",
            "    301 server                75%      7    shared   101 µs    1.12   90% busy",
            "    302 server                25%      2    shared   101 µs    0.38   25% waiting",
            "    303 server                 0%      1    shared        -    0.00    0% stopped",
        ];
        assert_eq!(
            text(&fixtures::shared(), None).lines().collect::<Vec<_>>(),
            shared
        );
        insta::assert_snapshot!("steered-text", text(&fixtures::steered(), None));
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
        let text = text(&frame, None);
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
        assert_eq!(text.lines().count(), 8);
    }
}
