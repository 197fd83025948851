//! The load: when requests come, and how much work they are.

use std::str::FromStr;

use rand::{Rng, RngExt, SeedableRng};
use rand_distr::{Distribution, Exp1, LogNormal, Pareto};
use rand_xoshiro::Xoshiro256PlusPlus;

/// A load or a setup that cannot be simulated, in one sentence.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Error(pub String);

/// When requests come.
#[derive(Debug, Clone, Copy, PartialEq)]
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
}

impl Arrivals {
    /// Requests a second in the mean.
    pub fn per_s(self) -> f64 {
        match self {
            Self::Constant { per_s } | Self::Poisson { per_s } | Self::Bursts { per_s, .. } => {
                per_s
            }
        }
    }

    /// The same pattern at another rate.
    pub fn at(self, rate: f64) -> Self {
        match self {
            Self::Constant { .. } => Self::Constant { per_s: rate },
            Self::Poisson { .. } => Self::Poisson { per_s: rate },
            Self::Bursts {
                peak,
                length_s,
                part,
                ..
            } => Self::Bursts {
                per_s: rate,
                peak,
                length_s,
                part,
            },
        }
    }

    fn check(self) -> Result<(), Error> {
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
        } = self
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

/// How long a worker works on a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Service {
    /// Always as long.
    Constant(f64),
    /// Exponential with this mean.
    Exponential(f64),
    /// Lognormal with this mean, and this deviation of the logarithm.
    Lognormal(f64, f64),
    /// Pareto with this mean and this shape, above 1.
    Pareto(f64, f64),
    /// Some of each: weights, and times in s.
    Mix(Vec<(f64, f64)>),
    /// What was measured: times in s, each as likely as the others.
    Measured(Vec<f64>),
}

impl Service {
    /// The mean, in s.
    pub fn mean_s(&self) -> f64 {
        match self {
            Self::Constant(mean)
            | Self::Exponential(mean)
            | Self::Lognormal(mean, _)
            | Self::Pareto(mean, _) => *mean,
            Self::Mix(parts) => weighted(parts, |time| time),
            Self::Measured(times) => times.iter().sum::<f64>() / times.len() as f64,
        }
    }

    /// The mean of the square, in s²; infinite for a Pareto of shape 2 or less.
    pub fn mean_square_s2(&self) -> f64 {
        match self {
            Self::Constant(time) => time * time,
            Self::Exponential(mean) => 2.0 * mean * mean,
            Self::Lognormal(mean, sigma) => mean * mean * (sigma * sigma).exp(),
            Self::Pareto(mean, shape) if *shape > 2.0 => {
                mean * mean * (shape - 1.0) * (shape - 1.0) / (shape * (shape - 2.0))
            }
            Self::Pareto(..) => f64::INFINITY,
            Self::Mix(parts) => weighted(parts, |time| time * time),
            Self::Measured(times) => times.iter().map(|t| t * t).sum::<f64>() / times.len() as f64,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let positive = |times: &[f64]| times.iter().all(|t| t.is_finite() && *t > 0.0);
        let sound = match self {
            Self::Constant(mean) | Self::Exponential(mean) => positive(&[*mean]),
            Self::Lognormal(mean, sigma) => positive(&[*mean, *sigma]),
            Self::Pareto(mean, shape) => positive(&[*mean]) && *shape > 1.0 && shape.is_finite(),
            Self::Mix(parts) => {
                !parts.is_empty()
                    && parts
                        .iter()
                        .all(|(weight, time)| positive(&[*weight, *time]))
            }
            Self::Measured(times) => !times.is_empty() && positive(times),
        };
        if sound {
            return Ok(());
        }
        Err(Error(format!(
            "{self:?} is no service time: times, weights and deviations are above 0, the shape of a Pareto above 1"
        )))
    }
}

fn weighted(parts: &[(f64, f64)], of: impl Fn(f64) -> f64) -> f64 {
    let total: f64 = parts.iter().map(|(weight, _)| weight).sum();
    parts.iter().map(|(w, time)| w * of(*time)).sum::<f64>() / total
}

impl FromStr for Service {
    type Err = Error;

    /// `1ms`, `exp:1ms`, `lognormal:1ms:2`, `pareto:1ms:1.5`, `99:1ms,1:100ms`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error(format!(
                "`{text}` is no service time: give one such as 1ms, exp:1ms, lognormal:1ms:2, pareto:1ms:1.5 or 99:1ms,1:100ms"
            ))
        };
        let time = |text: &str| time_s(text).ok_or_else(wrong);
        let number = |text: &str| text.parse::<f64>().map_err(|_| wrong());
        let parts: Vec<&str> = text.split(':').collect();
        let service = match parts.as_slice() {
            ["exp", mean] => Self::Exponential(time(mean)?),
            ["lognormal", mean, sigma] => Self::Lognormal(time(mean)?, number(sigma)?),
            ["pareto", mean, shape] => Self::Pareto(time(mean)?, number(shape)?),
            [constant] => Self::Constant(time(constant)?),
            _ => {
                let part = |part: &str| {
                    let (weight, of) = part.split_once(':').ok_or_else(wrong)?;
                    Ok((number(weight)?, time(of)?))
                };
                let parts: Result<Vec<_>, Error> = text.split(',').map(part).collect();
                Self::Mix(parts?)
            }
        };
        service.check().map_err(|_| wrong())?;
        Ok(service)
    }
}

/// `5ms` in s.
fn time_s(text: &str) -> Option<f64> {
    let at = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let (number, unit) = text.split_at(at);
    let scale = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * scale)
}

/// A load on the workers.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// When.
    pub arrivals: Arrivals,
    /// How much work.
    pub service: Service,
    /// So many requests.
    pub requests: u64,
    /// Requests come over so many connections that are opened beforehand, one after another. None: over one each.
    pub kept: Option<usize>,
    /// Decides both.
    pub seed: u64,
}

impl Load {
    /// The part of `workers` workers' time that it takes.
    pub fn utilisation(&self, workers: usize) -> f64 {
        self.arrivals.per_s() * self.service.mean_s() / workers as f64
    }

    /// Whether it can be simulated.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), Error> {
        self.arrivals.check()?;
        self.service.check()?;
        if self.requests == 0 {
            return Err(Error("no request is no load: give at least one".into()));
        }
        if self.kept == Some(0) {
            return Err(Error("requests need at least one connection".into()));
        }
        Ok(())
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
}

impl Gaps {
    pub(crate) fn new(load: &Load) -> Self {
        Self {
            arrivals: load.arrivals,
            random: stream(load.seed, 1),
            bursting: false,
            left_s: 0.0,
        }
    }

    /// The time until the next request.
    pub(crate) fn draw(&mut self) -> f64 {
        match self.arrivals {
            Arrivals::Constant { per_s } => per_s.recip(),
            Arrivals::Poisson { per_s } => exponential(&mut self.random) / per_s,
            Arrivals::Bursts {
                per_s,
                peak,
                length_s,
                part,
            } => self.draw_burst(per_s, peak, length_s, part),
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

/// Draws how much work requests are, in s.
#[derive(Debug)]
pub(crate) struct Works {
    shape: Shape,
    random: Xoshiro256PlusPlus,
}

#[derive(Debug)]
enum Shape {
    Constant(f64),
    Exponential(f64),
    Lognormal(LogNormal<f64>),
    Pareto(Pareto<f64>),
    /// Sums of the weights, as parts of the whole, and the times.
    Mix(Vec<(f64, f64)>),
    Measured(Vec<f64>),
}

impl Works {
    /// # Errors
    /// When the load cannot be simulated.
    pub(crate) fn new(load: &Load) -> Result<Self, Error> {
        load.check()?;
        let wrong = |error: &dyn std::fmt::Display| Error(format!("{:?}: {error}", load.service));
        let shape = match &load.service {
            Service::Constant(time) => Shape::Constant(*time),
            Service::Exponential(mean) => Shape::Exponential(*mean),
            Service::Lognormal(mean, sigma) => {
                let of = LogNormal::new(mean.ln() - sigma * sigma / 2.0, *sigma);
                Shape::Lognormal(of.map_err(|e| wrong(&e))?)
            }
            Service::Pareto(mean, shape) => {
                let of = Pareto::new(mean * (shape - 1.0) / shape, *shape);
                Shape::Pareto(of.map_err(|e| wrong(&e))?)
            }
            Service::Mix(parts) => Shape::Mix(cumulated(parts)),
            Service::Measured(times) => Shape::Measured(times.clone()),
        };
        Ok(Self {
            shape,
            random: stream(load.seed, 2),
        })
    }

    pub(crate) fn draw(&mut self) -> f64 {
        let random = &mut self.random;
        match &self.shape {
            Shape::Constant(time) => *time,
            Shape::Exponential(mean) => exponential(random) * mean,
            Shape::Lognormal(of) => of.sample(random),
            Shape::Pareto(of) => of.sample(random),
            Shape::Mix(parts) => {
                let at: f64 = random.random();
                let found = parts.iter().find(|(upto, _)| at < *upto);
                found.or(parts.last()).map_or(0.0, |(_, time)| *time)
            }
            Shape::Measured(times) => times[random.random_range(0..times.len())],
        }
    }
}

fn cumulated(parts: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let total: f64 = parts.iter().map(|(weight, _)| weight).sum();
    let mut sum = 0.0;
    let add = |(weight, time): &(f64, f64)| {
        sum += weight / total;
        (sum, *time)
    };
    parts.iter().map(add).collect()
}

fn exponential(random: &mut impl Rng) -> f64 {
    Exp1.sample(random)
}

/// A stream of random numbers of its own for each use: two ways of handing out the same load then see the same load.
pub(crate) fn stream(seed: u64, of: u64) -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(arrivals: Arrivals, service: Service) -> Load {
        Load {
            arrivals,
            service,
            requests: 1,
            kept: None,
            seed: 7,
        }
    }

    #[test]
    fn means_are_as_asked_for() {
        const DRAWS: usize = 400_000;
        for text in [
            "2ms",
            "exp:2ms",
            "lognormal:2ms:1",
            "pareto:2ms:3",
            "3:1ms,1:5ms",
        ] {
            let service: Service = text.parse().unwrap();
            let mut works =
                Works::new(&load(Arrivals::Poisson { per_s: 1.0 }, service.clone())).unwrap();
            let drawn: Vec<f64> = (0..DRAWS).map(|_| works.draw()).collect();
            let mean = drawn.iter().sum::<f64>() / DRAWS as f64;
            let square = drawn.iter().map(|t| t * t).sum::<f64>() / DRAWS as f64;
            assert!((service.mean_s() / 0.002 - 1.0).abs() < 1e-9, "{text}");
            assert!((mean / 0.002 - 1.0).abs() < 0.02, "{text}: {mean}");
            assert!(
                (square / service.mean_square_s2() - 1.0).abs() < 0.15,
                "{text}: {square} of {}",
                service.mean_square_s2()
            );
        }
    }

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
            let mut gaps = Gaps::new(&load(arrivals, Service::Constant(1.0)));
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
                Arrivals::Bursts { .. } => assert!(squared > 1.5, "{squared}"),
            }
        }
    }

    #[test]
    fn what_is_no_service_time_is_refused_in_a_sentence() {
        for text in [
            "",
            "ms",
            "1",
            "0ms",
            "-1ms",
            "exp:",
            "exp:1ms:2",
            "pareto:1ms:1",
            "lognormal:1ms:0",
            "lognormal:1ms:x",
            "1:1ms,x",
            "0:1ms,1:2ms",
            "1ms,2ms",
            "infms",
            "nan:1ms",
        ] {
            let error = text.parse::<Service>().expect_err(text);
            assert!(error.0.contains("is no service time"), "{text}: {error}");
        }
    }

    #[test]
    fn a_mix_has_its_parts() {
        assert_eq!(
            "99:1ms,1:100ms".parse::<Service>().unwrap(),
            Service::Mix(vec![(99.0, 0.001), (1.0, 0.1)])
        );
    }
}
