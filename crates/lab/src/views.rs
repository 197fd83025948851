//! Tables and charts of a result, declared by what they show: columns and bars by their metrics, rows by their variants.

use crate::present::{Bar, Block, Chart, Kind, Row, Style, Table, cell, number};
use crate::result::{Metric, Variant};

/// The number that a column shows of a metric.
#[derive(Debug, Clone, Copy)]
pub enum Of<'a> {
    /// The median of the rounds.
    Median(&'a str),
    /// The sum of the rounds.
    Sum(&'a str),
    /// The smallest and the largest of the rounds.
    Ends(&'a str),
}

impl Of<'_> {
    /// The cell of a variant.
    pub fn cell(self, found: &Variant) -> String {
        let of = |metric: &str| found.metrics.get(metric);
        match self {
            Of::Median(metric) => cell(found.median(metric)),
            Of::Sum(metric) => cell(of(metric).map(|m| m.values.iter().sum())),
            Of::Ends(metric) => of(metric).map_or_else(|| cell(None), ends),
        }
    }
}

fn ends(metric: &Metric) -> String {
    let (least, most) = (number(metric.min), number(metric.max));
    if least == most {
        return least;
    }
    format!("{least} … {most}")
}

/// A table with a row for each variant and a column for each metric, by its head.
pub fn table<'a, L: Into<String>>(
    caption: impl Into<String>,
    columns: &[(&str, Of<'_>)],
    rows: impl IntoIterator<Item = (L, &'a Variant)>,
) -> Table {
    let row = |(label, found): (L, &Variant)| {
        Row::named(label, columns.iter().map(|(_, of)| of.cell(found)))
    };
    let head = columns.iter().map(|(head, _)| *head);
    Table::new(caption, head, rows.into_iter().map(row))
}

/// Median and range of the rounds.
pub fn bar(style: Style, found: &Variant, metric: &str) -> Option<Bar> {
    let metric = found.metrics.get(metric)?;
    Some(Bar {
        style,
        value: metric.median,
        range: Some((metric.min, metric.max)),
    })
}

/// Bars of a metric of several variants, those left out that do not have it.
pub fn bars<'a>(
    variants: impl IntoIterator<Item = (Style, &'a Variant)>,
    metric: &str,
) -> Vec<Bar> {
    let all = variants.into_iter();
    all.filter_map(|(style, found)| bar(style, found, metric))
        .collect()
}

/// The latency at each percentile of several variants; `of` names their common part.
pub fn percentiles<'a>(
    of: &str,
    variants: impl IntoIterator<Item = (Style, &'a Variant)>,
) -> Chart {
    let series = variants.into_iter().filter_map(|(style, found)| {
        let distribution = found.distributions.get("latency_ms")?;
        Some((style, distribution.clone()))
    });
    Chart {
        title: format!("{of}: how long the slowest wait."),
        note: "Lower is better. Every step to the right is ten times rarer; both axes are logarithmic.".into(),
        kind: Kind::Percentiles {
            unit: "latency, ms".into(),
            series: series.collect(),
        },
    }
}

/// The first section of a presentation.
pub fn meaning(told: impl IntoIterator<Item = String>) -> Vec<Block> {
    let heading = Block::Heading("What it means".into());
    let told = told.into_iter().map(Block::Paragraph);
    std::iter::once(heading).chain(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::outcome;

    #[test]
    fn columns_show_what_they_say() {
        let found = outcome(&[("a", &[("ms", &[1.0, 9.0, 2.0]), ("same", &[3.0, 3.0])])]);
        let columns = [
            ("middle", Of::Median("ms")),
            ("all", Of::Sum("ms")),
            ("range", Of::Ends("ms")),
            ("one", Of::Ends("same")),
            ("none", Of::Sum("errors")),
        ];
        let shown = table("t", &columns, [("row", &found.variants[0])]);
        assert_eq!(shown.head, ["", "middle", "all", "range", "one", "none"]);
        assert_eq!(shown.rows[0].cells, ["row", "2", "12", "1 … 9", "3", "–"]);
    }

    #[test]
    fn who_does_not_have_it_has_no_bar() {
        let found = outcome(&[("a", &[("ms", &[1.0, 9.0, 2.0])]), ("b", &[])]);
        let named = |v| (Style::ours("x", 0), v);
        let drawn = bars(found.variants.iter().map(named), "ms");
        assert_eq!(drawn.len(), 1);
        assert_eq!((drawn[0].value, drawn[0].range), (2.0, Some((1.0, 9.0))));
    }
}
