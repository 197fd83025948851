//! The work of requests.

use std::str::FromStr;
use std::sync::Arc;

use rand_distr::weighted::WeightedAliasIndex;
use rand_distr::{Distribution, LogNormal, Pareto};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::error::Error;
use crate::random::{exponential, stream};

/// The distribution of a request's work.
#[derive(Debug, Clone, PartialEq)]
pub enum Service {
    /// The same for all requests.
    Constant(f64),
    /// Exponential with this mean.
    Exponential(f64),
    /// Lognormal with this mean, and this deviation of the logarithm.
    Lognormal(f64, f64),
    /// Pareto with this mean and this shape, above 1.
    Pareto(f64, f64),
    /// Some of each: weights, and times in s. A measured distribution has a part for each time.
    Mix(Vec<(f64, f64)>),
    /// As recorded: the work of each request, one after another. After the last one the first comes again.
    Recorded(Arc<[f64]>),
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
            Self::Recorded(works) => mean(works, |time| time),
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
            Self::Recorded(works) => mean(works, |time| time * time),
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let positive = |times: &[f64]| times.iter().all(|t| t.is_finite() && *t > 0.0);
        let sound = match self {
            Self::Constant(mean) | Self::Exponential(mean) => positive(&[*mean]),
            Self::Lognormal(mean, sigma) => positive(&[*mean, *sigma]),
            Self::Pareto(mean, shape) => positive(&[*mean]) && *shape > 1.0 && shape.is_finite(),
            Self::Recorded(works) => !works.is_empty() && positive(works),
            Self::Mix(parts) => {
                !parts.is_empty()
                    && parts
                        .iter()
                        .all(|(weight, time)| positive(&[*weight, *time]))
            }
        };
        if sound {
            return Ok(());
        }
        Err(Error(
            "this is no service time: times, weights and deviations are above 0, the shape of a Pareto above 1".into(),
        ))
    }
}

fn mean(works: &[f64], of: impl Fn(f64) -> f64) -> f64 {
    works.iter().map(|time| of(*time)).sum::<f64>() / works.len() as f64
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

/// `5ms` in s; none where it is no time.
pub fn time_s(text: &str) -> Option<f64> {
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

/// Draws the work of requests, in s.
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
    /// Which part, and the times of all.
    Mix(WeightedAliasIndex<f64>, Vec<f64>),
    /// All of them, and which is next.
    Recorded(Arc<[f64]>, usize),
}

impl Works {
    /// # Errors
    /// When the load cannot be simulated.
    pub(crate) fn new(service: &Service, seed: u64) -> Result<Self, Error> {
        service.check()?;
        let wrong = |error: &dyn std::fmt::Display| {
            Error(format!("this service time cannot be drawn: {error}"))
        };
        let shape = match service {
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
            Service::Mix(parts) => {
                let which = WeightedAliasIndex::new(parts.iter().map(|part| part.0).collect());
                let times = parts.iter().map(|part| part.1).collect();
                Shape::Mix(which.map_err(|e| wrong(&e))?, times)
            }
            Service::Recorded(works) => Shape::Recorded(works.clone(), 0),
        };
        Ok(Self {
            shape,
            random: stream(seed, 2),
        })
    }

    #[inline]
    pub(crate) fn draw(&mut self) -> f64 {
        let random = &mut self.random;
        match &mut self.shape {
            Shape::Constant(time) => *time,
            Shape::Exponential(mean) => exponential(random) * *mean,
            Shape::Lognormal(of) => of.sample(random),
            Shape::Pareto(of) => of.sample(random),
            Shape::Mix(which, times) => times[which.sample(random)],
            Shape::Recorded(works, next) => {
                let work = works[*next];
                *next = (*next + 1) % works.len();
                work
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let mut works = Works::new(&service, 7).unwrap();
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
    fn recorded_work_comes_again() {
        let service = Service::Recorded([0.001, 0.1].into());
        assert!((service.mean_s() - 0.0505).abs() < 1e-12);
        let mut works = Works::new(&service, 7).unwrap();
        assert_eq!([(); 3].map(|()| works.draw()), [0.001, 0.1, 0.001]);
        for none in [&[][..], &[0.001, 0.0], &[f64::NAN]] {
            assert!(Works::new(&Service::Recorded(none.into()), 7).is_err());
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
