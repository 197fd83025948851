//! The published figures: a CSV beside each experiment, so that they can be read, checked and drawn beside ours.

use serde::Deserialize;

/// One published figure.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Figure {
    /// The variant that was measured, in the source's words: `single queue`, `Taskex`, `epoll`.
    pub series: String,
    /// The place on the horizontal axis: threads, concurrency, lower border of a bucket; empty where there is none.
    pub x: Option<f64>,
    /// The metric, by the name that it has in our results.
    pub metric: String,
    /// Unit of the value.
    pub unit: String,
    /// The figure; empty where the source has words instead.
    pub value: Option<f64>,
    /// The source's words where it gives no number.
    #[serde(default)]
    pub note: String,
}

/// All figures of one source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Published(pub Vec<Figure>);

impl Published {
    /// Reads `series,x,metric,unit,value,note`; lines that start with `#` are comments.
    ///
    /// # Panics
    /// When the text is not such a CSV: it is compiled in, and a test reads each.
    pub fn parse(text: &str) -> Self {
        let mut reader = csv::ReaderBuilder::new()
            .comment(Some(b'#'))
            .trim(csv::Trim::All)
            .from_reader(text.as_bytes());
        Self(
            reader
                .deserialize()
                .collect::<Result<_, _>>()
                .expect("a published CSV has a row that does not parse"),
        )
    }

    /// The one figure of a series in a metric.
    pub fn value(&self, series: &str, metric: &str) -> Option<f64> {
        self.0
            .iter()
            .find(|f| f.series == series && f.metric == metric && f.x.is_none())?
            .value
    }

    /// A curve: the `(x, value)` of a series in a metric, where there is a number.
    pub fn curve(&self, series: &str, metric: &str) -> Vec<(f64, f64)> {
        self.0
            .iter()
            .filter(|f| f.series == series && f.metric == metric)
            .filter_map(|f| Some((f.x?, f.value?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_values_curves_and_words() {
        let published = Published::parse(
            "# a source\nseries,x,metric,unit,value,note\na,,mean_ms,ms,3.5,\na,100,settle_us,us,7,\na,200,settle_us,us,,wide variations\n",
        );
        assert_eq!(published.value("a", "mean_ms"), Some(3.5));
        assert_eq!(published.curve("a", "settle_us"), [(100.0, 7.0)]);
        assert_eq!(published.0[2].note, "wide variations");
    }
}
