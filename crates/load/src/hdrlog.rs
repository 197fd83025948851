//! The interval log (version 1.3 of the format, histograms in V2 form) that HdrHistogram's log processors and plotters read.

use std::io::{self, Write};
use std::time::SystemTime;

use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};

use crate::Interval;

/// Writes `intervals` of a load that began at `start`.
///
/// Untagged lines are latency from the planned time, lines tagged `service` are from `connect()`. Lines tagged `failed` are
/// failed requests as waits. Values are ns, and the maximum that the format shows beside each line is in ms.
///
/// # Errors
/// The errors of `into`.
pub fn write_hdr_log(
    into: &mut dyn Write,
    start: SystemTime,
    intervals: &[Interval],
) -> io::Result<()> {
    let mut into = io::BufWriter::new(into);
    let mut serializer = V2DeflateSerializer::new();
    let mut log = IntervalLogWriterBuilder::new()
        .add_comment("[wakeone load: values in ns; untagged from the planned time, Tag=service from connect()]")
        .add_comment("[Tag=failed: failed requests, each as a wait of the timeout or more]")
        .with_start_time(start)
        .with_base_time(start)
        .with_max_value_divisor(1e6)
        .begin_log_with(&mut into, &mut serializer)?;
    let tag = |name| Some(Tag::new(name).expect("this tag is valid"));
    for interval in intervals {
        let failed = (!interval.failed.is_empty()).then_some((&interval.failed, tag("failed")));
        let answered = [
            (&interval.latency, None),
            (&interval.service, tag("service")),
        ];
        for (histogram, tag) in answered.into_iter().chain(failed) {
            log.write_histogram(histogram, interval.start, interval.length, tag)
                .map_err(|error| io::Error::other(format!("{error:?}")))?;
        }
    }
    drop(log);
    into.flush()
}
