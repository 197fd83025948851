//! The presentation as plain text, for a terminal or a pipe.

use std::fmt::Write;

use crate::experiment::{Card, Experiment};
use crate::present::{Block, Histogram, Table, number};
use crate::result::Outcome;

/// Width of the bars of a histogram, in characters: the sources' own.
const BAR: usize = 50;

/// Everything about a result, as text that fits into `width` columns as far as its tables allow.
pub fn render(experiment: &dyn Experiment, outcome: &Outcome, width: usize) -> String {
    let card = experiment.card();
    let mut text = String::new();
    heading(&mut text, &format!("{}: {}", card.name, card.title), '=');
    paragraph(&mut text, card.question, width);
    for warning in &outcome.environment.warnings {
        paragraph(&mut text, &format!("Noisy: {warning}"), width);
    }
    for block in experiment.present(outcome) {
        match block {
            Block::Heading(line) => heading(&mut text, &line, '-'),
            Block::Paragraph(words) => paragraph(&mut text, &words, width),
            Block::Table(shown) => table(&mut text, &shown),
            Block::Histograms(all) => histograms(&mut text, &all, width),
            // A chart needs a page: --html has it.
            Block::Chart(_) => {}
        }
    }
    closing(&mut text, card, outcome, width);
    text
}

/// What every result ends with: comparisons, expectations, machine, source.
fn closing(text: &mut String, card: &Card, outcome: &Outcome, width: usize) {
    if !outcome.contrasts.is_empty() {
        heading(text, "Ratios of neighbouring slices", '-');
        for c in &outcome.contrasts {
            let _ = writeln!(
                text,
                "{}  ({} slices)  {}: {} / {}, {}",
                c.shown(),
                c.slices,
                c.variant,
                c.a,
                c.b,
                c.per.name()
            );
        }
        text.push('\n');
    }
    if !outcome.comparisons.is_empty() {
        heading(text, "Ratios, paired by round", '-');
        for c in &outcome.comparisons {
            let each: Vec<String> = c.ratios.iter().map(|r| number(*r)).collect();
            let _ = writeln!(
                text,
                "{}  (rounds: {})  {}",
                number(c.median),
                each.join(" "),
                c.name
            );
        }
        text.push('\n');
    }
    if !outcome.expectations.is_empty() {
        heading(text, "Expectations", '-');
        for e in &outcome.expectations {
            let mark = if e.holds { "holds" } else { "FAILS" };
            let measured = e.measured.map_or_else(|| "not".into(), number);
            paragraph_hanging(
                text,
                &format!("{mark}  {}: {measured} measured  [{}]", e.claim, e.source),
                width,
                7,
            );
        }
        text.push('\n');
    }
    let e = &outcome.environment;
    paragraph(
        text,
        &format!(
            "Measured {} in {:.0} s on Linux {}, {} × {}, {:.1} GiB; load {:.2} before, {:.2} after, {:.1} % stolen; wakeone {} ({}).",
            e.started,
            e.elapsed_s,
            e.kernel,
            e.cpus,
            e.cpu_model,
            e.memory_bytes as f64 / f64::from(1u32 << 30),
            e.load_before,
            e.load_after,
            e.steal_share * 100.0,
            outcome.version,
            outcome.commit
        ),
        width,
    );
    paragraph(
        text,
        &format!("Source: {} {}", card.source.long, card.source.url),
        width,
    );
}

fn heading(text: &mut String, line: &str, underline: char) {
    let rule: String = std::iter::repeat_n(underline, line.chars().count()).collect();
    let _ = writeln!(text, "{line}\n{rule}\n");
}

/// An experiment in the list of all, as text that fits into `width` columns.
pub fn listed(card: &Card, width: usize) -> String {
    const INDENT: usize = 15;
    let mut text = String::new();
    let said = [card.title, card.question, card.source.short];
    let lines = std::iter::once(format!("{:<14} {}", card.name, said[0]))
        .chain(said[1..].iter().map(|words| format!("{:14} {words}", "")));
    for line in lines {
        let (head, words) = line.split_at(INDENT);
        let mut wrapped = String::new();
        let room = width.saturating_sub(INDENT).max(20);
        paragraph(&mut wrapped, words, room);
        for (at, part) in wrapped.lines().enumerate() {
            let margin = if at == 0 { head } else { "               " };
            let _ = writeln!(text, "{margin}{part}");
        }
    }
    text
}

fn paragraph(text: &mut String, words: &str, width: usize) {
    paragraph_hanging(text, words, width, 0);
    text.push('\n');
}

/// Words in lines of at most `width` columns; all lines but the first are indented.
fn paragraph_hanging(text: &mut String, words: &str, width: usize, indent: usize) {
    let mut column = 0;
    for word in words.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            let _ = write!(text, "\n{:indent$}", "");
            column = indent;
        } else if column > 0 {
            // Two spaces behind a mark are kept by the caller's choice of indent, not of words.
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += length;
    }
    text.push('\n');
}

fn table(text: &mut String, table: &Table) {
    let columns = table.head.len();
    let width_of = |column: usize| {
        let cells = table.rows.iter().filter_map(|r| r.cells.get(column));
        cells
            .chain(table.head.get(column))
            .map(|c| c.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width_of).collect();
    let line = |cells: &[String]| {
        let mut line = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let width = widths.get(column).copied().unwrap_or(0);
            let _ = if column == 0 {
                write!(line, "{cell:width$}")
            } else {
                write!(line, "  {cell:>width$}")
            };
        }
        line.trim_end().to_owned()
    };
    let _ = writeln!(text, "{}\n\n{}", table.caption, line(&table.head));
    for row in &table.rows {
        let _ = writeln!(text, "{}", line(&row.cells));
    }
    text.push('\n');
}

/// Histograms one under the other, or two side by side where there is room.
fn histograms(text: &mut String, all: &[Histogram], width: usize) {
    let blocks: Vec<Vec<String>> = all.iter().map(histogram).collect();
    let one = blocks
        .iter()
        .flatten()
        .map(|l| l.chars().count())
        .max()
        .unwrap_or(0);
    let across = if width >= 2 * one + 4 { 2 } else { 1 };
    for pair in blocks.chunks(across) {
        let height = pair.iter().map(Vec::len).max().unwrap_or(0);
        for row in 0..height {
            let cells: Vec<&str> = pair
                .iter()
                .map(|b| b.get(row).map_or("", String::as_str))
                .collect();
            let line = cells
                .iter()
                .map(|c| format!("{c:one$}"))
                .collect::<Vec<_>>()
                .join("    ");
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text.push('\n');
    }
}

/// One histogram, line by line, in the form of mmhistogram.
pub fn histogram(shown: &Histogram) -> Vec<String> {
    let most = shown.rows.iter().map(|r| r.1).max().unwrap_or(0).max(1);
    let mut lines = vec![
        shown.summary.clone(),
        format!("{}:", shown.title),
        format!("{:>8} |{} count", shown.unit, "-".repeat(BAR)),
    ];
    for (lower, count) in &shown.rows {
        let stars = (*count as f64 / most as f64 * BAR as f64).round() as usize;
        lines.push(format!("{lower:>8} |{:BAR$} {count}", "*".repeat(stars)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::present::Row;

    #[test]
    fn a_histogram_looks_as_in_the_source() {
        let shown = Histogram {
            title: "Duration in ms (multiple queues)".into(),
            published: true,
            summary: "min:1.49 avg:31.37 med=24.67 max:144.55 dev:25.27 count:100000".into(),
            unit: "value".into(),
            rows: vec![
                (0, 0),
                (1, 1023),
                (2, 5321),
                (4, 9986),
                (8, 18443),
                (16, 25852),
                (32, 27949),
                (64, 11368),
                (128, 58),
            ],
        };
        insta::assert_snapshot!(histogram(&shown).join("\n"));
    }

    #[test]
    fn the_list_fits_the_terminal() {
        for experiment in crate::experiments::all() {
            let text = listed(experiment.card(), 80);
            assert!(text.starts_with(experiment.card().name), "{text}");
            assert!(
                text.lines().all(|line| line.chars().count() <= 80),
                "{text}"
            );
        }
    }

    #[test]
    fn words_wrap_and_hang() {
        let mut text = String::new();
        paragraph_hanging(&mut text, "one two three four", 9, 2);
        assert_eq!(text, "one two\n  three\n  four\n");
    }

    #[test]
    fn tables_align() {
        let mut text = String::new();
        let shown = Table {
            caption: "What".into(),
            head: vec!["way".into(), "ms".into()],
            rows: vec![
                Row::ours(vec!["long name".into(), "1.0".into()]),
                Row::published(vec!["b".into(), "10.0".into()]),
            ],
        };
        table(&mut text, &shown);
        assert_eq!(
            text,
            "What\n\nway          ms\nlong name   1.0\nb          10.0\n\n"
        );
    }
}
