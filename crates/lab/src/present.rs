//! The content of a presentation, independent of its form: text and HTML render the same blocks.

use crate::distribution::Distribution;

/// A part of a presentation, in reading order.
#[derive(Debug, Clone, PartialEq)]
pub enum Block {
    /// A heading.
    Heading(String),
    /// A paragraph.
    Paragraph(String),
    /// A table.
    Table(Table),
    /// Histograms in powers of two, one under the other, as the sources print them.
    Histograms(Vec<Histogram>),
    /// A chart; HTML only.
    Chart(Chart),
}

/// A table; the first column names the row.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// The content of the table, as a sentence.
    pub caption: String,
    /// Heads of the columns.
    pub head: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
}

/// A row of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Published rather than measured here: shown apart.
    pub published: bool,
    /// The cells.
    pub cells: Vec<String>,
    /// Columns whose cells are marked as bad.
    pub bad: Vec<usize>,
}

/// A distribution with its summary line.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// The name of the measured series.
    pub title: String,
    /// Published rather than measured here.
    pub published: bool,
    /// The line above the bars: `min:… avg:… med=… max:… dev:… count:…`.
    pub summary: String,
    /// Unit of the lower borders.
    pub unit: String,
    /// `(lower border, count)`.
    pub rows: Vec<(u64, u64)>,
}

/// A chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// The chart's content, as a headline.
    pub title: String,
    /// How to read it, one or two sentences.
    pub note: String,
    /// The kind of drawing, with its data.
    pub kind: Kind,
}

/// The kinds of charts.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// Latency at each percentile, the slowest stretched out; both axes logarithmic.
    Percentiles {
        /// Unit of the values.
        unit: String,
        /// One line each.
        series: Vec<(Style, Distribution)>,
    },
    /// Histograms in powers of two one over the other, on one axis: each column is a doubling.
    Doublings {
        /// Unit of the lower borders.
        unit: String,
        /// `(lower border, count)` of each.
        rows: Vec<(Style, Vec<(u64, u64)>)>,
    },
    /// Horizontal bars with the range of the rounds.
    Bars {
        /// Unit of the values.
        unit: String,
        /// The bars, top to bottom.
        bars: Vec<Bar>,
        /// A logarithmic axis.
        log: bool,
    },
    /// A table as a drawing: in each cell a bar for how many times the best of its column it is, on one logarithmic axis.
    Times {
        /// Heads of the columns.
        heads: Vec<String>,
        /// A cell is bad from this many times the best on; a line marks it.
        bad: f64,
        /// A label and its cells; None where nothing was measured.
        rows: Vec<(String, Vec<Option<Times>>)>,
    },
    /// Stacked bars of shares that add up to one; a line marks where even shares would end.
    Shares {
        /// `(label, shares)`.
        rows: Vec<(String, Vec<f64>)>,
    },
    /// Lines over an axis of numbers.
    Lines {
        /// Name of the horizontal axis.
        x: String,
        /// Name of the vertical axis.
        y: String,
        /// Logarithmic axes.
        log: bool,
        /// The lines.
        series: Vec<Line>,
    },
}

/// How a series looks; colours stay with what they stand for across the charts of a page.
#[derive(Debug, Clone, PartialEq)]
pub struct Style {
    /// The direct label.
    pub label: String,
    /// Place in the palette.
    pub colour: usize,
    /// Published rather than measured here: dashed or hollow.
    pub published: bool,
}

/// A series of [`Kind::Lines`]: its look and its points.
pub type Line = (Style, Vec<(f64, f64)>);

/// A cell of [`Kind::Times`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// The value itself.
    pub value: f64,
    /// How many times the best of its column it is, 1 at least.
    pub times: f64,
}

/// One bar.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Its look and label.
    pub style: Style,
    /// Its length.
    pub value: f64,
    /// Smallest and largest of the rounds.
    pub range: Option<(f64, f64)>,
}

impl Table {
    /// A table whose first column, which names the rows, has no head.
    pub fn new<H: Into<String>>(
        caption: impl Into<String>,
        head: impl IntoIterator<Item = H>,
        rows: impl IntoIterator<Item = Row>,
    ) -> Self {
        let head = head.into_iter().map(Into::into);
        Self {
            caption: caption.into(),
            head: std::iter::once(String::new()).chain(head).collect(),
            rows: rows.into_iter().collect(),
        }
    }
}

impl Table {
    /// The same with a head over the first column.
    pub fn by(mut self, head: &str) -> Self {
        self.head[0] = head.into();
        self
    }
}

impl Chart {
    /// Bars.
    pub fn bars(
        title: impl Into<String>,
        note: &str,
        (unit, log): (&str, bool),
        bars: Vec<Bar>,
    ) -> Self {
        let unit = unit.into();
        Self::of(title, note, Kind::Bars { unit, bars, log })
    }

    /// Lines over the axes of these names; those without points are left out.
    pub fn lines(
        title: impl Into<String>,
        note: &str,
        (x, y, log): (&str, &str, bool),
        series: impl IntoIterator<Item = Line>,
    ) -> Self {
        let drawn = series.into_iter().filter(|(_, points)| !points.is_empty());
        let (x, y, series) = (x.into(), y.into(), drawn.collect());
        Self::of(title, note, Kind::Lines { x, y, log, series })
    }

    fn of(title: impl Into<String>, note: &str, kind: Kind) -> Self {
        Self {
            title: title.into(),
            note: note.into(),
            kind,
        }
    }
}

impl Row {
    /// A row measured here, by its name.
    pub fn named(name: impl Into<String>, cells: impl IntoIterator<Item = String>) -> Self {
        Self::ours(std::iter::once(name.into()).chain(cells).collect())
    }

    /// A row measured here.
    pub fn ours(cells: Vec<String>) -> Self {
        Self {
            published: false,
            cells,
            bad: Vec::new(),
        }
    }

    /// The same row with these columns marked as bad.
    pub fn marking(self, bad: Vec<usize>) -> Self {
        Self { bad, ..self }
    }

    /// A row of published figures.
    pub fn published(cells: Vec<String>) -> Self {
        Self {
            published: true,
            cells,
            bad: Vec::new(),
        }
    }
}

impl Style {
    /// A series measured here.
    pub fn ours(label: impl Into<String>, colour: usize) -> Self {
        Self {
            label: label.into(),
            colour,
            published: false,
        }
    }

    /// A line to compare the others with. It is drawn as the published ones are, for it was not measured here.
    pub fn guide(label: impl Into<String>) -> Self {
        Self::published(label, 0)
    }

    /// A published series.
    pub fn published(label: impl Into<String>, colour: usize) -> Self {
        Self {
            label: label.into(),
            colour,
            published: true,
        }
    }
}

/// The part of a presentation that fits one screen: its first two sentences and its first table.
pub fn brief(blocks: Vec<Block>) -> Vec<Block> {
    let (mut words, mut shown) = (None, None);
    for block in blocks {
        match block {
            Block::Paragraph(text) => drop(words.get_or_insert(text)),
            Block::Table(table) => drop(shown.get_or_insert(table)),
            Block::Heading(_) | Block::Histograms(_) | Block::Chart(_) => {}
        }
    }
    let table = shown.map(Block::Table);
    let words = words.map(|text| Block::Paragraph(sentences(&text, 2).to_owned()));
    table.into_iter().chain(words).collect()
}

/// The first `most` sentences of a text.
fn sentences(text: &str, most: usize) -> &str {
    let mut ends = text.match_indices(". ").map(|(at, _)| at + 1);
    ends.nth(most.saturating_sub(1))
        .map_or(text, |end| &text[..end])
}

/// A number that may be missing, as a cell of a table.
pub fn cell(value: Option<f64>) -> String {
    value.map_or_else(|| "–".into(), number)
}

/// A number as a person reads it: three significant figures (whole numbers whole), thousands apart, no false precision.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    let magnitude = value.abs();
    match magnitude {
        0.0 => "0".into(),
        m if m >= 1000.0 => thousands(value.round() as i64),
        // A count is a count.
        m if m.fract() == 0.0 => format!("{value:.0}"),
        m if m >= 100.0 => format!("{value:.0}"),
        m if m >= 10.0 => format!("{value:.1}"),
        m if m >= 0.01 => format!("{value:.2}"),
        _ => format!("{value:.1e}"),
    }
}

fn thousands(value: i64) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0 { format!("-{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_brief_is_the_first_table_and_two_sentences() {
        let table = |caption: &str| {
            Block::Table(Table {
                caption: caption.into(),
                head: Vec::new(),
                rows: Vec::new(),
            })
        };
        let told = |words: &str| Block::Paragraph(words.into());
        let all = vec![
            Block::Heading("What it means".into()),
            told("One of 2.5 s. Two. Three. Four."),
            told("Another."),
            table("first"),
            table("second"),
        ];
        assert_eq!(brief(all), [table("first"), told("One of 2.5 s. Two.")]);
        assert_eq!(sentences("Only one.", 2), "Only one.");
    }

    #[test]
    fn numbers_for_people() {
        let shown: Vec<String> = [
            0.0,
            0.00012,
            0.5,
            4.449,
            31.37,
            144.55,
            999.6,
            177_274.0,
            -1234.0,
            f64::NAN,
        ]
        .iter()
        .map(|v| number(*v))
        .collect();
        assert_eq!(
            shown,
            [
                "0", "1.2e-4", "0.50", "4.45", "31.4", "145", "1000", "177,274", "-1,234", "–"
            ]
        );
    }
}
