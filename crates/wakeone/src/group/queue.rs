//! Which accept queues the workers of a group get by TCP: one for all, or one each.

use wakeone_kernel::capability;
use wakeone_kernel::socket::arming::MOST;
use wakeone_supervisor::{Options, Queue, opens_own};

use super::config::{Error, Protocols, SteeringConfig};

/// Refuses options that do not go with one queue.
pub(super) fn check_queue(options: &Options, config: &SteeringConfig) -> Result<(), Error> {
    match options.queue {
        Some(Queue::One) => why_each(options, config).map_or(Ok(()), |why| {
            Err(Error::Usage(format!("--queue one cannot be: {why}")))
        }),
        _ => Ok(()),
    }
}

/// Whether all workers are to share one queue from the start.
pub(super) fn is_one(options: &Options, config: &SteeringConfig) -> bool {
    match options.queue {
        Some(queue) => queue == Queue::One,
        None => may_share(options, config) && !capability::missing().is_empty(),
    }
}

/// Whether they may share one where no program can choose between several.
pub(super) fn may_share(options: &Options, config: &SteeringConfig) -> bool {
    options.queue.is_none() && why_each(options, config).is_none()
}

/// Why the workers need a queue each, as the end of a sentence.
fn why_each(options: &Options, config: &SteeringConfig) -> Option<String> {
    let most = options.workers.max(options.most_workers.unwrap_or(0));
    let tcp = options.listen.iter().filter(|one| !one.is_udp()).count();
    let needs = |what: &str| {
        Some(format!(
            "{what} needs a queue for each worker; leave one of the two away"
        ))
    };
    match () {
        () if !Protocols::of(options).tcp => {
            Some("it is for connections, and every -l is a udp:// address; leave it away".into())
        }
        () if tcp * most > MOST => Some(format!(
            "{most} workers that wait for {tcp} listeners each are more than {MOST} waits; leave some of either away",
        )),
        () if options.lookup => needs("--lookup"),
        () if opens_own(options) => needs("{port} in the command"),
        () if options.refuse => needs("--refuse"),
        () if options.limits.connections.is_some() => needs("--max-requests"),
        () if config.rescue == Some(true) => needs("--rescue"),
        () => config.policy?.fits_one_queue().err(),
    }
}
