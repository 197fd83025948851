//! The times at which requests come.

use std::str::FromStr;
use std::sync::Arc;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::error::Error;
use crate::random::{exponential, stream};
use crate::service::time_s;

/// The times at which requests come.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrivals {
    /// One after another at equal distances.
    Constant {
        /// Requests a second.
        per_s: f64,
    },
    /// Independent clients: exponential gaps.
    Poisson {
        /// Requests a second in the mean.
        per_s: f64,
    },
    /// Poisson whose rate changes between two values (a Markov-modulated Poisson process with two states).
    Bursts {
        /// Requests a second in the mean.
        per_s: f64,
        /// How many times the mean rate a burst has.
        peak: f64,
        /// How long a burst lasts in the mean, in s.
        length_s: f64,
        /// The part of the time that is bursts, above 0 and below 1 / peak.
        part: f64,
    },
    /// As recorded: the gaps between requests, in s. After the last one the first comes again.
    Recorded(Arc<[f64]>),
    /// A closed loop: so many clients, each of which sends its next request when its last one has ended.
    Closed(usize),
}

impl Arrivals {
    /// The recorded moments at which requests came, in s, in any order.
    ///
    /// # Errors
    /// When there are fewer than two, or all are the same.
    pub fn recorded(mut times_s: Vec<f64>) -> Result<Self, Error> {
        times_s.sort_by(f64::total_cmp);
        let mut gaps: Vec<f64> = times_s.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let span: f64 = gaps.iter().sum();
        if !(span.is_finite() && span > 0.0) {
            return Err(Error(
                "recorded arrivals need at least two requests at different times".into(),
            ));
        }
        // From the last request to the first of the next turn.
        gaps.push(span / gaps.len() as f64);
        Ok(Self::Recorded(gaps.into()))
    }

    /// Arrivals by count: each interval, given by its length in s and its number of requests, has them at random
    /// moments.
    ///
    /// # Errors
    /// When there are fewer than two requests.
    pub fn counted(intervals: &[(f64, u64)], seed: u64) -> Result<Self, Error> {
        let mut random = stream(seed, 7);
        let (mut begin, mut times) = (0.0, Vec::new());
        for (length, requests) in intervals {
            times.extend((0..*requests).map(|_| begin + length * random.random::<f64>()));
            begin += length;
        }
        Self::recorded(times)
    }

    /// Requests a second in the mean; not a number in a closed loop, where the workers decide.
    pub fn per_s(&self) -> f64 {
        match self {
            Self::Closed(_) => f64::NAN,
            Self::Constant { per_s } | Self::Poisson { per_s } | Self::Bursts { per_s, .. } => {
                *per_s
            }
            Self::Recorded(gaps) => gaps.len() as f64 / gaps.iter().sum::<f64>(),
        }
    }

    /// The same pattern at another rate; a closed loop has none.
    pub fn at(&self, rate: f64) -> Self {
        match self {
            Self::Recorded(gaps) => {
                let scale = self.per_s() / rate;
                Self::Recorded(gaps.iter().map(|gap| gap * scale).collect())
            }
            Self::Closed(clients) => Self::Closed(*clients),
            Self::Constant { .. } => Self::Constant { per_s: rate },
            Self::Poisson { .. } => Self::Poisson { per_s: rate },
            Self::Bursts {
                peak,
                length_s,
                part,
                ..
            } => Self::Bursts {
                per_s: rate,
                peak: *peak,
                length_s: *length_s,
                part: *part,
            },
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        match self {
            Self::Closed(0) => return Err(Error("a closed loop needs at least one client".into())),
            Self::Closed(_) => return Ok(()),
            _ => {}
        }
        let rate = self.per_s();
        if !(rate.is_finite() && rate > 0.0) {
            return Err(Error(format!(
                "{rate} requests/s cannot be simulated: give a rate above 0"
            )));
        }
        if let Self::Bursts {
            peak,
            length_s,
            part,
            ..
        } = *self
        {
            let sound = peak > 1.0 && part > 0.0 && peak * part < 1.0 && length_s > 0.0;
            if !(sound && peak.is_finite() && length_s.is_finite()) {
                return Err(Error(format!(
                    "bursts of {peak} times the mean rate in {part} of the time, {length_s} s each, cannot be: the rate times the part must be below 1, and each above 0"
                )));
            }
        }
        Ok(())
    }
}

impl FromStr for Arrivals {
    type Err = Error;

    /// `poisson`, `constant`, `bursts:5:200ms:0.1` (times the mean rate, mean length, part of the time); at 1 request/s.
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error(format!(
                "`{text}` is no pattern of arrivals: give poisson, constant or bursts:PEAK:LENGTH:PART, as in bursts:5:200ms:0.1"
            ))
        };
        let number = |text: &str| text.parse::<f64>().map_err(|_| wrong());
        let parts: Vec<&str> = text.split(':').collect();
        let arrivals = match parts.as_slice() {
            ["poisson"] => Self::Poisson { per_s: 1.0 },
            ["constant"] => Self::Constant { per_s: 1.0 },
            ["bursts", peak, length, part] => Self::Bursts {
                per_s: 1.0,
                peak: number(peak)?,
                length_s: time_s(length).ok_or_else(wrong)?,
                part: number(part)?,
            },
            _ => return Err(wrong()),
        };
        arrivals.check()?;
        Ok(arrivals)
    }
}

/// Draws the gaps between arrivals, in s.
#[derive(Debug)]
pub(crate) struct Gaps {
    arrivals: Arrivals,
    random: Xoshiro256PlusPlus,
    bursting: bool,
    /// How long the state lasts that it is in, in s.
    left_s: f64,
    /// Which recorded gap is next.
    next: usize,
}

impl Gaps {
    pub(crate) fn new(arrivals: &Arrivals, seed: u64) -> Self {
        Self {
            arrivals: arrivals.clone(),
            random: stream(seed, 1),
            next: 0,
            bursting: false,
            left_s: 0.0,
        }
    }

    /// The time until the next request.
    #[inline]
    pub(crate) fn draw(&mut self) -> f64 {
        match &self.arrivals {
            Arrivals::Recorded(gaps) => {
                let gap = gaps[self.next];
                self.next = (self.next + 1) % gaps.len();
                gap
            }
            // Its requests come when others end.
            Arrivals::Closed(_) => f64::INFINITY,
            Arrivals::Constant { per_s } => per_s.recip(),
            Arrivals::Poisson { per_s } => exponential(&mut self.random) / *per_s,
            Arrivals::Bursts {
                per_s,
                peak,
                length_s,
                part,
            } => {
                let (per_s, peak, length_s, part) = (*per_s, *peak, *length_s, *part);
                self.draw_burst(per_s, peak, length_s, part)
            }
        }
    }

    fn draw_burst(&mut self, per_s: f64, peak: f64, length_s: f64, part: f64) -> f64 {
        let calm = per_s * (1.0 - peak * part) / (1.0 - part);
        let mut gap = 0.0;
        loop {
            let rate = if self.bursting { per_s * peak } else { calm };
            let next = exponential(&mut self.random) / rate;
            // The rest of an exponential gap is exponential too: it may be drawn anew in the next state.
            if next <= self.left_s {
                self.left_s -= next;
                return gap + next;
            }
            gap += self.left_s;
            self.bursting = !self.bursting;
            let mean = if self.bursting {
                length_s
            } else {
                length_s * (1.0 - part) / part
            };
            self.left_s = exponential(&mut self.random) * mean;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_as_asked_for() {
        const DRAWS: usize = 400_000;
        for arrivals in [
            Arrivals::Constant { per_s: 50.0 },
            Arrivals::Poisson { per_s: 50.0 },
            Arrivals::Bursts {
                per_s: 50.0,
                peak: 5.0,
                length_s: 0.2,
                part: 0.1,
            },
        ] {
            let mut gaps = Gaps::new(&arrivals, 7);
            let all: Vec<f64> = (0..DRAWS).map(|_| gaps.draw()).collect();
            let rate = DRAWS as f64 / all.iter().sum::<f64>();
            assert!((rate / 50.0 - 1.0).abs() < 0.05, "{arrivals:?}: {rate}");
            // Gaps of bursts vary more than exponential ones, and constant ones not at all.
            let mean = all.iter().sum::<f64>() / DRAWS as f64;
            let variance = all.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / DRAWS as f64;
            let squared = variance / (mean * mean);
            match arrivals {
                Arrivals::Constant { .. } => assert!(squared < 1e-9),
                Arrivals::Poisson { .. } => assert!((squared - 1.0).abs() < 0.05, "{squared}"),
                _ => assert!(squared > 1.5, "{squared}"),
            }
        }
    }

    #[test]
    fn recorded_arrivals_come_again_at_their_distances() {
        let recorded = Arrivals::recorded(vec![10.0, 13.0, 11.0]).unwrap();
        assert!((recorded.per_s() - 3.0 / 4.5).abs() < 1e-12);
        let mut gaps = Gaps::new(&recorded.at(2.0 * recorded.per_s()), 7);
        assert_eq!([(); 4].map(|()| gaps.draw()), [0.5, 1.0, 0.75, 0.5]);
        for none in [vec![], vec![1.0], vec![1.0, 1.0]] {
            assert!(Arrivals::recorded(none).is_err());
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused_in_a_sentence() {
        assert_eq!(
            "bursts:5:200ms:0.1".parse(),
            Ok(Arrivals::Bursts {
                per_s: 1.0,
                peak: 5.0,
                length_s: 0.2,
                part: 0.1
            })
        );
        for text in [
            "",
            "burst",
            "bursts:5:200ms",
            "bursts:5:200:0.1",
            "bursts:20:1s:0.1",
        ] {
            assert!(text.parse::<Arrivals>().is_err(), "{text}");
        }
    }
}
