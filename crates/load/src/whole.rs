//! Whole histograms as text: the compressed V2 form that HdrHistogram libraries read, in base64.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::{Deserializer, Serializer as _, V2DeflateSerializer};
use serde::Deserialize;
use serde::de::Error as _;

/// Writes a histogram.
pub(crate) fn encode(histogram: &Histogram<u64>) -> String {
    let mut bytes = Vec::new();
    V2DeflateSerializer::new()
        .serialize(histogram, &mut bytes)
        .expect("writing to memory does not fail");
    BASE64_STANDARD.encode(bytes)
}

/// Reads a histogram, also one of the lines of an interval log.
///
/// # Errors
/// It is none, as one sentence.
pub fn decode(text: &str) -> Result<Histogram<u64>, String> {
    let bytes = BASE64_STANDARD
        .decode(text)
        .map_err(|error| error.to_string())?;
    Deserializer::new()
        .deserialize(&mut bytes.as_slice())
        .map_err(|error| format!("its histogram cannot be read: {error}"))
}

/// For fields of serde.
pub(crate) fn serialize<S: serde::Serializer>(
    histogram: &Histogram<u64>,
    into: S,
) -> Result<S::Ok, S::Error> {
    into.serialize_str(&encode(histogram))
}

/// The same backwards.
pub(crate) fn deserialize<'de, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Histogram<u64>, D::Error> {
    decode(&String::deserialize(from)?).map_err(D::Error::custom)
}
