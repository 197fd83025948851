//! The server with a lock around accept(), and the two clients that drive it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use wakeone_load::{Arrivals, Event, Mix, Plan, Spacing};

use super::sweep::Step;
use super::{CLIENTS, LOST_CPU, SLEEPS, WORKERS, httperf};
use crate::cpus::Apart;
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::launch::Launch;
use crate::measure;
use crate::process::Usage;
use crate::under_test::ServerUnderTest;
use crate::{answers, probe};

const PATH: &str = "/whoami";
/// The timeout of a request: longer than any of them waits before it is abandoned.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause after a rate that was too high. The server takes some connections from its queue, so that there is room
/// for one.
const ROOM: Duration = Duration::from_millis(30);

/// The lateness of the slowest percent of requests, as a share of the step, above which the client did not offer its
/// rate. Such a step says nothing about the server.
const LATE: f64 = 0.02;
/// How often such a step is done again; the one with the least delay counts.
const AGAIN: usize = 2;

/// The client that sends the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// Our own load generator.
    Load,
    /// The source's.
    Httperf,
}

impl Client {
    /// Both clients.
    pub const ALL: [Self; 2] = [Self::Load, Self::Httperf];

    /// First part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Httperf => "httperf",
        }
    }
}

/// A server that is driven by a client.
pub struct Driven {
    client: Client,
    trial: ServerUnderTest,
    /// Failed requests of the steps that the server kept up with, and of the others.
    errors: u64,
    errors_overloaded: u64,
    /// How late our own client sent the slowest percent of a step, the worst step of all.
    late_ns: u64,
    /// Steps done again because our own client was late.
    repeated: u64,
    /// CPU time and switches of the workers before the first request.
    before: Usage,
}

impl Driven {
    /// Starts the server on its CPU, and leaves this thread on the client's.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn start(client: Client, lock: &str, apart: &Apart) -> Result<Self, Error> {
        apart.server()?;
        let trial = ServerUnderTest::start(Launch::ours(
            format!("the server with --accept-lock {lock}"),
            format!(
                "wakeone-lab serve --model preforked --no-keep-alive --accept-lock {lock} -w {WORKERS} --backlog {{backlog}} -l {{address}}"
            ),
        ))?;
        apart.client()?;
        Ok(Self {
            before: Usage::of_leaves(trial.pid()),
            client,
            trial,
            errors: 0,
            errors_overloaded: 0,
            late_ns: 0,
            repeated: 0,
        })
    }

    /// Requests a second that a closed loop of our own client gets answered.
    ///
    /// # Errors
    /// When the load cannot be sent.
    pub fn capacity(&mut self, seconds: f64, context: &mut Context<'_>) -> Result<f64, Error> {
        let clients = Arrivals::Closed {
            concurrency: CLIENTS,
        };
        let plan = self.plan(clients, seconds, context.seed);
        let found = self.trial.load(&plan, context)?;
        self.errors += found.error_count();
        Ok(found.throughput_per_s())
    }

    /// One rate for a time.
    ///
    /// # Errors
    /// When it cannot be sent, or the server does not answer any more.
    pub fn step(
        &mut self,
        rate: f64,
        seconds: f64,
        context: &mut Context<'_>,
    ) -> Result<Step, Error> {
        if self.client == Client::Httperf {
            context.check()?;
            let step = self.httperf(rate, seconds)?;
            self.work_off()?;
            return Ok(step);
        }
        let (mut step, mut late_ns) = self.open_loop(rate, seconds, context)?;
        for _ in 0..AGAIN {
            if late_ns as f64 <= LATE * seconds * 1e9 {
                break;
            }
            self.repeated += 1;
            let again = self.open_loop(rate, seconds, context)?;
            if again.1 < late_ns {
                (step, late_ns) = again;
            }
        }
        self.late_ns = self.late_ns.max(late_ns);
        Ok(step)
    }

    /// Ends the server and notes what all steps had in common.
    ///
    /// # Errors
    /// Those of [`ServerUnderTest::stop`].
    pub fn end(self, sample: &mut Sample) -> Result<(), Error> {
        sample.put("errors", "count", self.errors as f64);
        sample.put("errors_overloaded", "count", self.errors_overloaded as f64);
        sample.put("repeated_steps", "count", self.repeated as f64);
        sample.put("late_ms_p99_worst", "ms", self.late_ns as f64 / 1e6);
        let used = Usage::of_leaves(self.trial.pid()).since(&self.before);
        self.trial.stop(sample)?;
        let answered = sample.metrics.get(answers::BY_SERVER).map_or(0.0, |m| m.1);
        for (name, count) in [
            (SLEEPS, used.voluntary_switches),
            (LOST_CPU, used.involuntary_switches),
        ] {
            sample.put(name, "ratio", count as f64 / answered.max(1.0));
        }
        Ok(())
    }

    fn plan(&self, arrivals: Arrivals, seconds: f64, seed: u64) -> Plan {
        let end = measure::for_seconds(seconds);
        Plan {
            timeout: PATIENCE,
            ..measure::plan(self.trial.address, arrivals, end, Mix::one(PATH), seed)
        }
    }

    /// Drives one rate with our own client. It abandons the requests that have no answer at the end of the time. It also
    /// returns how late the slowest percent was sent.
    fn open_loop(
        &mut self,
        rate: f64,
        seconds: f64,
        context: &Context<'_>,
    ) -> Result<(Step, u64), Error> {
        context.check()?;
        let arrivals = Arrivals::Open {
            rate_per_s: rate,
            spacing: Spacing::Constant,
        };
        let plan = self.plan(arrivals, seconds, context.seed);
        let window = Duration::from_secs_f64(seconds);
        let (over, mut within) = (AtomicBool::new(false), None);
        let found = wakeone_load::observe(&plan, &over, Some(window), &mut |event| {
            if let Event::Interval(interval) = event
                && within.is_none()
            {
                within = Some(interval.completed);
                over.store(true, Ordering::Relaxed);
            }
            if context.cancel.load(Ordering::Relaxed) {
                over.store(true, Ordering::Relaxed);
            }
        });
        let found = found.map_err(|source| Error::Load {
            target: plan.target.into(),
            source,
        })?;
        context.check()?;
        self.trial.answers.client_saw(&found);
        let step = Step {
            offered: found.planned as f64 / seconds,
            replied: within.unwrap_or(found.completed) as f64 / seconds,
        };
        if step.keeps_up() {
            self.errors += found.error_count();
        } else {
            self.errors_overloaded += found.error_count();
        }
        self.work_off()?;
        Ok((step, found.lateness.value_at_quantile(0.99)))
    }

    fn httperf(&mut self, rate: f64, seconds: f64) -> Result<Step, Error> {
        let counted = httperf::drive(self.trial.address, PATH, rate, seconds)?;
        let open = counted.requests.saturating_sub(counted.replies);
        self.trial.answers.client_counted(counted.replies, open);
        Ok(counted.step(rate))
    }

    /// Waits until the server has come to the end of its queue. It accepts connections in the order in which they
    /// came, so the last one is answered last.
    fn work_off(&mut self) -> Result<(), Error> {
        std::thread::sleep(ROOM);
        probe::who_answers(self.trial.address, PATH)?;
        self.trial.answers.client_counted(1, 0);
        Ok(())
    }
}
