//! The presentation as plain text, for a terminal or a pipe.

use std::fmt::Write;

use crate::card::Card;
use crate::experiment::{Experiment, Settings};
use crate::present::{Block, Histogram, Row, Table, number};
use crate::result::Outcome;

/// Width of the bars of a histogram, in characters: the sources' own.
const BAR: usize = 50;

/// Everything about a result, as text that fits into `width` columns as far as its tables allow.
pub fn render(experiment: &dyn Experiment, outcome: &Outcome, width: usize) -> String {
    let card = experiment.card();
    let mut text = String::new();
    heading(&mut text, &format!("{}: {}", card.name, card.title), '=');
    paragraph(&mut text, &card.question, width);
    for warning in &outcome.environment.warnings {
        paragraph(&mut text, &format!("Noisy: {warning}"), width);
    }
    for block in experiment.present(outcome) {
        match block {
            Block::Heading(line) => heading(&mut text, &line, '-'),
            Block::Paragraph(words) => paragraph(&mut text, &words, width),
            Block::Table(shown) => table(&mut text, &shown),
            Block::Histograms(all) => histograms(&mut text, &all, width),
            // Only a page can show a chart: `--html` draws it.
            Block::Chart(_) => {}
        }
    }
    closing(&mut text, card, outcome, width);
    text
}

/// The part of a result that fits a screen of 80 columns and 24 lines: the table, two sentences and the verdict. `ink`
/// draws bad cells.
pub fn render_brief(
    experiment: &dyn Experiment,
    outcome: &Outcome,
    width: usize,
    ink: Ink,
) -> String {
    let card = experiment.card();
    let mut text = format!("{}: {}\n\n", card.name, card.title);
    let left_out = outcome.left_out();
    for block in experiment.brief(outcome) {
        match block {
            // This sentence has a place of its own.
            Block::Paragraph(words) if left_out.as_ref() == Some(&words) => {}
            Block::Table(shown) if shown.rows.is_empty() => {}
            Block::Table(shown) => brief_table(&mut text, &shown, width, ink),
            Block::Paragraph(words) => paragraph(&mut text, &words, width),
            Block::Heading(_) | Block::Histograms(_) | Block::Chart(_) => {}
        }
    }
    verdict(&mut text, outcome, width);
    if let Some(left_out) = left_out {
        paragraph_hanging(&mut text, &shortened(&left_out, 3 * width - 24), width, 0);
    }
    if let Some(warning) = outcome.environment.warnings.first() {
        let all = outcome.environment.warnings.len();
        let others = if all > 1 {
            format!(" (and {} more)", all - 1)
        } else {
            String::new()
        };
        let said = format!("Noisy: {}{others}", shortened(warning, 2 * width - 24));
        paragraph_hanging(&mut text, &said, width, 0);
    }
    text
}

/// How bad cells are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// By a mark alone.
    Plain,
    /// By a mark, in red.
    Colour,
}

/// Lines of a table that fit one screen, with what surrounds them.
const BRIEF_ROWS: usize = 10;

/// The rows and columns of a table that there is room for, and how many there are more.
fn brief_table(text: &mut String, shown: &Table, width: usize, ink: Ink) {
    paragraph_hanging(text, &shown.caption, width, 0);
    text.push('\n');
    let rows = &shown.rows[..shown.rows.len().min(BRIEF_ROWS)];
    let mut layout = Layout::new(&shown.head, rows);
    let (more_rows, more_columns) = (shown.rows.len() - rows.len(), layout.fit(width));
    let _ = writeln!(text, "{}", layout.line(&shown.head, &[], ink));
    for row in rows {
        let _ = writeln!(text, "{}", layout.line(&row.cells, &row.bad, ink));
    }
    if more_rows + more_columns > 0 {
        let _ = writeln!(
            text,
            "({more_rows} more rows and {more_columns} more columns: --full, or the page)"
        );
    }
    text.push('\n');
}

/// Which expectations hold, in as few words as possible.
fn verdict(text: &mut String, outcome: &Outcome, width: usize) {
    let all = &outcome.expectations;
    if all.is_empty() {
        return;
    }
    let fails: Vec<&str> = all
        .iter()
        .filter(|e| !e.holds && e.measured.is_some())
        .map(|e| e.name.as_str())
        .collect();
    let open = all.iter().filter(|e| e.measured.is_none()).count();
    let mut said = format!(
        "{} of {} expectations hold",
        all.iter().filter(|e| e.holds).count(),
        all.len()
    );
    if !fails.is_empty() {
        let _ = write!(said, "; these do not: {}", fails.join(", "));
    }
    if open > 0 {
        let _ = write!(said, "; {open} not measured");
    }
    said.push('.');
    paragraph_hanging(text, &said, width, 0);
}

/// The first `most` characters.
fn shortened(words: &str, most: usize) -> String {
    if words.chars().count() <= most {
        return words.to_owned();
    }
    words
        .chars()
        .take(most.saturating_sub(1))
        .chain(['…'])
        .collect()
}

/// The end of every result: comparisons, expectations, machine, source.
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

/// An experiment in the list of all: a line of at most `width` columns, with about how long a quick and a full run take. The
/// list has no head, so that it fits a screen of 24 lines.
pub fn listed(experiment: &dyn Experiment, width: usize) -> String {
    let time = |quick| {
        let design = experiment.design(&Settings {
            quick,
            ..Settings::default()
        });
        // The experiment lacks something on this machine; running it names that.
        if design.arms.is_empty() {
            return "–".into();
        }
        short_time(design.seconds(design.rounds))
    };
    let card = experiment.card();
    let head = format!("{:<13}  {:>6}  {:>6}  ", card.name, time(true), time(false));
    let room = width.saturating_sub(head.chars().count());
    format!("{head}{}\n", shortened(&card.title, room))
}

/// A rounded duration: `40 s`, `12 min`.
fn short_time(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{:.0} s", s.max(1.0)),
        s if s < 90.0 * 60.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
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
    let layout = Layout::new(&table.head, &table.rows);
    let line = |cells: &[String], bad: &[usize]| layout.line(cells, bad, Ink::Plain);
    let _ = writeln!(text, "{}\n\n{}", table.caption, line(&table.head, &[]));
    for row in &table.rows {
        let _ = writeln!(text, "{}", line(&row.cells, &row.bad));
    }
    text.push('\n');
}

/// The mark of a bad cell, and what takes its place beside a good one of the same table.
const BAD: [&str; 2] = [" ✗", "  "];

/// How the lines of a table are laid out.
struct Layout {
    /// The width of each column, marks included.
    widths: Vec<usize>,
    /// Whether any cell is marked.
    marked: bool,
}

impl Layout {
    fn new(head: &[String], rows: &[Row]) -> Self {
        let marked = rows.iter().any(|row| !row.bad.is_empty());
        let width_of = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.cells.get(column));
            let all = cells.chain(head.get(column)).map(|c| c.chars().count());
            let mark = usize::from(marked && column > 0) * BAD[0].chars().count();
            all.max().unwrap_or(0) + mark
        };
        Self {
            widths: (0..head.len()).map(width_of).collect(),
            marked,
        }
    }

    /// Leaves out the columns on the right for which `width` has no room. Returns how many.
    fn fit(&mut self, width: usize) -> usize {
        let all = self.widths.len();
        while self.widths.len() > 1
            && self.widths.iter().sum::<usize>() + 2 * (self.widths.len() - 1) > width
        {
            self.widths.pop();
        }
        all - self.widths.len()
    }

    fn line(&self, cells: &[String], bad: &[usize], ink: Ink) -> String {
        let mut text = String::new();
        for (column, (cell, width)) in cells.iter().zip(&self.widths).enumerate() {
            let is_bad = bad.contains(&column);
            let mark = match (self.marked, is_bad) {
                (false, _) => "",
                (true, true) => BAD[0],
                (true, false) => BAD[1],
            };
            let shown = format!("{cell}{mark}");
            let _ = match (column, is_bad && ink == Ink::Colour) {
                (0, _) => write!(text, "{cell:width$}"),
                (_, true) => write!(text, "  \x1b[31m{shown:>width$}\x1b[0m"),
                (_, false) => write!(text, "  {shown:>width$}"),
            };
        }
        text.trim_end().to_owned()
    }
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
        let lines = crate::experiments::all().iter().map(|e| listed(*e, 80));
        let list: String = lines.collect();
        assert!(
            list.lines().all(|line| line.chars().count() <= 80),
            "{list}"
        );
        assert!(
            !list.contains('…'),
            "a title is too long for its line:\n{list}"
        );
        assert!(list.lines().count() <= 24, "{list}");
    }

    #[test]
    fn a_brief_result_fits_one_screen() {
        let row = |name: &str, bad: Vec<usize>| {
            let cells = std::iter::once(name).chain(["1,234.5"; 12]);
            Row::ours(cells.map(str::to_owned).collect()).marking(bad)
        };
        let mut rows = vec![row("a way of handing out connections", vec![1])];
        rows.resize(30, row("another", vec![]));
        let shown = Table {
            caption:
                "What is shown, in which unit, over how many rounds, and what a mark means: ✗ bad."
                    .into(),
            head: vec!["some column".into(); 13],
            rows,
        };
        let mut text = String::new();
        brief_table(&mut text, &shown, 80, Ink::Plain);
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        assert!(text.contains("20 more rows and 9 more columns"), "{text}");
        assert!(
            text.contains("1,234.5 ✗") && text.lines().count() <= 16,
            "{text}"
        );
    }

    #[test]
    fn bad_cells_are_marked_and_numbers_stay_aligned() {
        let shown = Table {
            caption: "What".into(),
            head: vec!["way".into(), "ms".into()],
            rows: vec![
                Row::ours(vec!["a".into(), "900".into()]).marking(vec![1]),
                Row::ours(vec!["b".into(), "3".into()]),
            ],
        };
        let mut text = String::new();
        table(&mut text, &shown);
        assert_eq!(text, "What\n\nway   ms\na    900 ✗\nb      3\n\n");
        text.clear();
        brief_table(&mut text, &shown, 80, Ink::Colour);
        assert!(text.contains("a    \x1b[31m900 ✗\x1b[0m"), "{text:?}");
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
