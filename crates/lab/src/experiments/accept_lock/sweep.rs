//! The search for the knee: the highest offered rate at which a server replies to all requests. It is pure: the caller
//! sends the requests.

/// A server keeps up where it replies to at least this share of the requests.
pub const KEPT: f64 = 0.97;
/// How often a sweep goes on upwards where the server keeps up at its end.
const HIGHER: usize = 4;
/// The factor of each such step.
const STEP_UP: f64 = 1.15;

/// One step: a time of one rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Requests a second.
    pub offered: f64,
    /// Replies a second within that time.
    pub replied: f64,
}

impl Step {
    fn share(&self) -> f64 {
        self.replied / self.offered
    }

    /// Whether the server answers as fast as it is asked.
    pub fn keeps_up(&self) -> bool {
        self.share() >= KEPT
    }
}

/// The result of a sweep.
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    /// A step for each rate of the grid, in its order.
    pub grid: Vec<Step>,
    /// The highest offered rate at which the server keeps up.
    pub knee: f64,
}

/// Drives each rate of the rising `grid`, and then bisects `halvings` times. The two ends are the highest rate at
/// which the server kept up and the next one at which it did not. The knee is where the line between these two crosses
/// [`KEPT`].
///
/// A rate below the highest one that went well does not count if it went badly: a server that keeps up at 1,000 a second does
/// so at 900, and was disturbed.
pub fn sweep<E>(
    grid: &[f64],
    halvings: usize,
    mut drive: impl FnMut(f64) -> Result<Step, E>,
) -> Result<Sweep, E> {
    let mut steps = Vec::with_capacity(grid.len());
    for rate in grid {
        steps.push(drive(*rate)?);
    }
    let kept = steps.iter().rposition(Step::keeps_up);
    // At rate 0 there are no requests, and all of them are answered.
    let mut good = kept.map_or((0.0, 1.0), |at| (steps[at].offered, steps[at].share()));
    let next = steps.get(kept.map_or(0, |at| at + 1));
    let mut bad = next.map(|step| (step.offered, step.share()));
    for _ in 0..HIGHER {
        if bad.is_none() {
            let step = drive(good.0 * STEP_UP)?;
            sort(step, &mut good, &mut bad);
        }
    }
    for _ in 0..halvings {
        if let Some((above, _)) = bad {
            let step = drive((good.0 + above) / 2.0)?;
            sort(step, &mut good, &mut bad);
        }
    }
    let knee = bad.map_or(good.0, |bad| {
        good.0 + (bad.0 - good.0) * (good.1 - KEPT) / (good.1 - bad.1)
    });
    Ok(Sweep { grid: steps, knee })
}

fn sort(step: Step, good: &mut (f64, f64), bad: &mut Option<(f64, f64)>) {
    let point = (step.offered, step.share());
    if step.keeps_up() {
        *good = point;
    } else {
        *bad = Some(point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that replies to all up to `limit`, and to `limit` of more.
    fn knee(limit: f64, grid: &[f64], halvings: usize) -> (f64, usize) {
        let mut asked = 0;
        let found = sweep(grid, halvings, |rate| {
            asked += 1;
            Ok::<_, ()>(Step {
                offered: rate,
                replied: rate.min(limit),
            })
        });
        (found.unwrap().knee, asked)
    }

    const GRID: [f64; 4] = [300.0, 600.0, 900.0, 1200.0];

    #[test]
    fn the_knee_is_found_within_the_last_halving() {
        for limit in [310.0, 700.0, 899.0, 1000.0, 1150.0] {
            let (knee, asked) = knee(limit, &GRID, 6);
            let exact = limit / KEPT;
            assert!((knee / exact - 1.0).abs() < 0.01, "{limit}: {knee}");
            assert_eq!(asked, 10);
        }
    }

    #[test]
    fn beyond_both_ends_of_the_grid() {
        let (low, _) = knee(100.0, &GRID, 6);
        assert!((low / (100.0 / KEPT) - 1.0).abs() < 0.05, "{low}");
        let (high, _) = knee(1500.0, &GRID, 6);
        assert!((high / (1500.0 / KEPT) - 1.0).abs() < 0.01, "{high}");
        let (endless, asked) = knee(1e9, &GRID, 6);
        assert!((endless / (1200.0 * STEP_UP.powi(4)) - 1.0).abs() < 1e-9);
        assert_eq!(asked, 8, "it does not go on for ever");
    }

    #[test]
    fn a_disturbed_step_below_is_passed_over_and_errors_end_it() {
        let found = sweep(&GRID, 0, |rate| {
            let replied = if rate == 600.0 {
                100.0
            } else {
                rate.min(900.0)
            };
            Ok::<_, ()>(Step {
                offered: rate,
                replied,
            })
        });
        let found = found.unwrap();
        assert!(found.knee > 900.0, "{found:?}");
        assert_eq!(found.grid.len(), 4);
        assert_eq!(sweep(&GRID, 0, |_| Err("gone")), Err("gone"));
    }
}
