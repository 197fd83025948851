//! Times on the command line and in files: a number and its unit.

use std::time::Duration;

/// The longest time: longer than anything here can last, and yet it can be added to a clock without overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Parses a time: `5ms`, `1.5s`, `2m`. A bare number is in seconds, as `-d 10` is for other load generators.
///
/// # Errors
/// One sentence for a person, with an example.
pub fn parse(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("`{text}` is no time: give a number with us, ms, s, m or h, as in 5ms or 30s");
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let at = text.find(|c| !is_number(c)).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let seconds = match unit {
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" | "" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds)
        .ok()
        .filter(|time| *time <= LONGEST)
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_and_a_unit_or_seconds() {
        for (text, micros) in [
            ("500us", 500),
            ("500µs", 500),
            ("5ms", 5_000),
            ("1.5s", 1_500_000),
            ("30s", 30_000_000),
            ("2m", 120_000_000),
            ("1h", 3_600_000_000),
            ("0s", 0),
            ("10", 10_000_000),
            ("0.5", 500_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_micros(micros)), "{text}");
        }
        for text in [
            "",
            ".",
            "1e3",
            "-1",
            "NaN",
            "inf",
            "ten",
            "99999999999999999999",
            "s",
            "5d",
            "-5s",
            "5.5.5s",
            ".s",
            "5 s",
            "5 parsecs",
            "NaNs",
            "infs",
            "1e9s",
            "99999999999999999999s",
            "9999999999999m",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
