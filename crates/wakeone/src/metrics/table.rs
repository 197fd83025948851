//! The list of all metrics: name, type, unit, help, and the field of the JSON that each comes from.

use std::fmt::{self, Write};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use wakeone_model::network::Network;
use wakeone_model::waits;

use super::values::{DOING, GroupMetrics, Metrics, Traced, TracedWorker, WorkerMetrics};
use wakeone_control::status::Slot;

/// One metric.
pub struct Metric {
    /// Its name without unit and `_total`.
    stem: &'static str,
    /// Its unit, the end of its name.
    unit: &'static str,
    kind: Kind,
    help: &'static str,
    /// Its place in the JSON, below `groups[]`.
    pub fields: &'static [&'static str],
    from: From,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Only grows; its name ends with `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A constant 1 with labels; its name ends with `_info`.
    Info,
    /// Durations, in buckets.
    Histogram,
}

/// A number as it is written.
enum Number {
    Whole(u64),
    Signed(i64),
    Real(f64),
    Waits(waits::Waits),
}

/// Numbers with the label that tells them apart, beyond group and slot.
type Labelled = Vec<(Option<(&'static str, String)>, Number)>;

/// Where a metric is read from.
enum From {
    /// A group: one number, or one for each value of a label.
    Group(fn(&GroupMetrics) -> Labelled),
    /// Each slot: one number.
    Slot(fn(&Slot) -> Number),
    /// Each slot: a few numbers, told apart by a label.
    SlotLabelled(fn(&Slot) -> Labelled),
    /// Each living worker: one number.
    Worker(fn(&WorkerMetrics) -> Number),
    /// Each living worker: a few numbers.
    WorkerLabelled(fn(&WorkerMetrics) -> Labelled),
    /// Each traced worker: one number, if the kernel has a probe for it.
    Traced(fn(&TracedWorker) -> Option<Number>),
    /// The program itself.
    Own(fn() -> Labelled),
}

/// The states of a slot.
const STATES: [&str; 4] = ["up", "stuck", "draining", "down"];
/// Upper ends of the buckets of waits, in µs: powers of two, as in the counts that they come from.
const WAIT_BUCKETS_US: [u64; 12] = [
    16,
    64,
    256,
    1 << 10,
    1 << 11,
    1 << 12,
    1 << 13,
    1 << 14,
    1 << 16,
    1 << 18,
    1 << 20,
    1 << 22,
];

use Kind::{Counter, Gauge, Histogram, Info};
use Number::{Real, Signed, Whole};

fn one(number: Number) -> Labelled {
    vec![(None, number)]
}

fn flag(set: bool) -> Labelled {
    one(Whole(set.into()))
}

fn ones(label: &'static str, values: impl Iterator<Item = String>) -> Labelled {
    values
        .map(|value| (Some((label, value)), Whole(1)))
        .collect()
}

fn network(group: &GroupMetrics) -> impl Iterator<Item = &Network> {
    group.status.network.iter()
}

/// Returns 1 for the current state and 0 for each other one.
fn state(label: &'static str, all: &[&str], is: &str) -> Labelled {
    let each = |one: &&str| (Some((label, (*one).to_owned())), Whole((*one == is).into()));
    all.iter().map(each).collect()
}

fn seconds(ns: u64) -> Number {
    Real(ns as f64 / 1e9)
}

const fn metric(
    stem: &'static str,
    unit: &'static str,
    kind: Kind,
    help: &'static str,
    fields: &'static [&'static str],
    from: From,
) -> Metric {
    Metric {
        stem,
        unit,
        kind,
        help,
        fields,
        from,
    }
}

/// All metrics, in the order in which they are served.
#[rustfmt::skip]
pub const METRICS: &[Metric] = &[
    metric("wakeone_build", "", Info, "The version of the program that says this", &[],
        From::Own(|| vec![(Some(("version", env!("CARGO_PKG_VERSION").to_owned())), Whole(1))])),

    metric("wakeone_group_listen", "", Info, "Where a group listens, by address", &["listen"],
        From::Group(|g| ones("address", g.status.listen.iter().cloned()))),
    metric("wakeone_group_namespace", "", Info, "The network namespace of its sockets, by inode, where that is not the agent's", &["network.namespace"],
        From::Group(|g| ones("namespace", network(g).map(|n| n.namespace.to_string())))),
    metric("wakeone_group_container", "", Info, "The container of its server, by id, where that is not the agent's", &["network.container"],
        From::Group(|g| ones("container", network(g).filter_map(|n| n.container.clone())))),
    metric("wakeone_group_pod", "", Info, "The pod of its server, as namespace/name, else by id", &["network.pod", "network.pod_name"],
        From::Group(|g| ones("pod", network(g).filter_map(|n| n.pod_name.clone().or(n.pod.clone()))))),
    metric("wakeone_group_protocol", "", Info, "tcp or udp: what is said of connections is of datagrams then", &["protocol"],
        From::Group(|g| ones("protocol", std::iter::once(g.status.protocol.to_owned())))),
    metric("wakeone_group_affinity", "", Info, "Of UDP: what keeps the datagrams of a flow together", &["affinity"],
        From::Group(|g| ones("affinity", g.status.affinity.iter().map(ToString::to_string)))),
    metric("wakeone_group_heavy_flows", "", Gauge, "Of UDP: flows that have more datagrams than their worker can read, while others are idle", &["heavy_flows"],
        From::Group(|g| one(Whole(g.status.heavy_flows.map_or(0, u64::from))))),
    metric("wakeone_group_spread_flows", "", Gauge, "Of UDP: such flows that are spread over all workers, which shared one socket before", &["spread_flows"],
        From::Group(|g| one(Whole(g.status.spread_flows.map_or(0, u64::from))))),
    metric("wakeone_group_policy", "", Info, "How a worker is chosen, by policy; absent where our program does not choose", &["policy"],
        From::Group(|g| ones("policy", g.status.policy.iter().map(ToString::to_string)))),
    metric("wakeone_group_steered", "", Gauge, "1: connections go where our program says; 0: where the kernel or a classic program says", &["steered"],
        From::Group(|g| flag(g.status.steered))),
    metric("wakeone_group_replaced", "", Gauge, "1: the server has set a program of its own in place of ours, or taken ours away", &["replaced"],
        From::Group(|g| flag(g.status.replaced))),
    metric("wakeone_group_attached", "", Gauge, "1: a server that was there before, steered from outside; 0: one that wakeone run started", &["attached"],
        From::Group(|g| flag(g.status.attached))),
    metric("wakeone_group_started", "", Gauge, "1: a server that wakeone run started as it is, and steers from outside", &["started"],
        From::Group(|g| flag(g.status.started))),
    metric("wakeone_group_queue_connections", "", Gauge, "Connections that wait in the one queue that its workers share; 0 where each has its own", &["queued"],
        From::Group(|g| one(Whole(g.status.queued.map_or(0, u64::from))))),
    metric("wakeone_group_queue_limit_connections", "", Gauge, "The limit of that queue; 0 where each worker has its own", &["queue_limit"],
        From::Group(|g| one(Whole(g.status.queue_limit.map_or(0, u64::from))))),
    metric("wakeone_group_agent", "", Gauge, "1: an agent looks after it; 0: none does, so nothing is rescued", &["agent"],
        From::Group(|g| flag(g.status.agent))),
    metric("wakeone_group_counting", "", Gauge, "1: its connections are counted", &["counting"],
        From::Group(|g| flag(g.status.counting))),
    metric("wakeone_group_closing", "", Gauge, "1: it takes no new connections any more", &["closing"],
        From::Group(|g| flag(g.status.closing))),
    metric("wakeone_group_supervisor_pid", "", Gauge, "Process id of its living supervisor or agent", &["supervisor_pid"],
        From::Group(|g| g.status.supervisor_pid.map(|pid| (None, Whole(pid.into()))).into_iter().collect())),
    metric("wakeone_group_fallbacks", "", Counter, "Connections that the kernel placed because our program could not", &["fallbacks"],
        From::Group(|g| one(Whole(g.status.fallbacks)))),
    metric("wakeone_group_exits", "", Counter, "Ways out of the program, by exit", &["exits"],
        From::Group(|g| g.status.exits.iter().map(|(way, count)| (Some(("exit", (*way).to_owned())), Whole(*count))).collect())),
    metric("wakeone_group_moved_open", "connections", Gauge, "Connections that were moved while they waited and are still open", &["moved_live"],
        From::Group(|g| one(Whole(g.status.moved_live)))),
    metric("wakeone_group_drift_mended", "connections", Counter, "Connections by which counts of open ones were found wrong, and mended; 0 unless something failed", &["drift_mended"],
        From::Group(|g| one(Whole(g.status.drift_mended)))),
    metric("wakeone_program_runs", "", Counter, "Times that a BPF program ran, by program; 0 unless kernel.bpf_stats_enabled", &["programs[].name", "programs[].run_cnt"],
        From::Group(|g| g.status.programs.iter().map(|p| (Some(("program", p.name.clone())), Whole(p.run_cnt))).collect())),
    metric("wakeone_program_run", "seconds", Counter, "Time that a BPF program took, by program; 0 unless kernel.bpf_stats_enabled", &["programs[].run_time_ns"],
        From::Group(|g| g.status.programs.iter().map(|p| (Some(("program", p.name.clone())), seconds(p.run_time_ns))).collect())),

    metric("wakeone_slot_state", "", Gauge, "1 for the state that a slot is in, 0 for the others", &["slots[].state"],
        From::SlotLabelled(|s| state("state", &STATES, s.state))),
    metric("wakeone_slot_worker_pid", "", Gauge, "Process id of its worker; 0 where there is none", &["slots[].pid"],
        From::Slot(|s| Whole(s.pid.unwrap_or(0).into()))),
    metric("wakeone_slot_weight", "", Gauge, "Its share relative to the others'", &["slots[].weight"],
        From::Slot(|s| Whole(s.weight.into()))),
    metric("wakeone_slot_active", "connections", Gauge, "Connections open, those that wait included", &["slots[].active"],
        From::Slot(|s| Signed(s.active))),
    metric("wakeone_slot_queued", "connections", Gauge, "Connections waiting to be accepted", &["slots[].queued"],
        From::Slot(|s| Whole(s.queued.into()))),
    metric("wakeone_slot_queue_limit", "connections", Gauge, "How many may wait", &["slots[].queue_limit"],
        From::Slot(|s| Whole(s.queue_limit.into()))),
    metric("wakeone_slot_armed", "", Gauge, "1: the worker is woken for connections of the one queue; 0: it is not, or has a queue of its own", &["slots[].armed"],
        From::Slot(|s| Whole((s.armed == Some(true)).into()))),
    metric("wakeone_slot_waiting", "bytes", Gauge, "Memory of the datagrams that wait to be read; 0 where it is not UDP", &["slots[].waiting_bytes"],
        From::Slot(|s| Whole(s.waiting_bytes.unwrap_or(0).into()))),
    metric("wakeone_slot_buffer", "bytes", Gauge, "How many bytes of datagrams may wait; 0 where it is not UDP", &["slots[].buffer_bytes"],
        From::Slot(|s| Whole(s.buffer_bytes.unwrap_or(0).into()))),
    metric("wakeone_slot_dropped", "datagrams", Counter, "Datagrams that its sockets had no room for; 0 where it is not UDP", &["slots[].dropped"],
        From::Slot(|s| Whole(s.dropped.unwrap_or(0)))),
    metric("wakeone_slot_selected", "connections", Counter, "Times that the program chose it", &["slots[].selected"],
        From::Slot(|s| Whole(s.selected))),
    metric("wakeone_slot_selected_share", "ratio", Gauge, "Its part of all choices so far, 0 to 1", &["slots[].selected_share"],
        From::Slot(|s| Real(s.selected_share))),
    metric("wakeone_slot_established", "connections", Counter, "Connections that completed their handshake here", &["slots[].established"],
        From::Slot(|s| Whole(s.established))),
    metric("wakeone_slot_closed", "connections", Counter, "Connections counted out", &["slots[].closed"],
        From::Slot(|s| Whole(s.closed))),
    metric("wakeone_slot_migrated_in", "connections", Counter, "Waiting connections that came from another slot", &["slots[].migrated_in"],
        From::Slot(|s| Whole(s.migrated_in))),
    metric("wakeone_slot_migrated_out", "connections", Counter, "Waiting connections that went to another slot", &["slots[].migrated_out"],
        From::Slot(|s| Whole(s.migrated_out))),
    metric("wakeone_slot_rescues", "", Counter, "Times that its queue was moved", &["slots[].rescues"],
        From::Slot(|s| Whole(s.rescues))),
    metric("wakeone_slot_rescued", "connections", Counter, "Connections moved by that", &["slots[].rescued"],
        From::Slot(|s| Whole(s.rescued))),
    metric("wakeone_slot_stuck", "seconds", Counter, "Time that its worker was seen stuck, counted when it is over", &["slots[].stuck_ms"],
        From::Slot(|s| Real(s.stuck_ms as f64 / 1e3))),
    metric("wakeone_slot_restarts", "", Counter, "Workers started again here", &["slots[].restarts"],
        From::Slot(|s| Whole(s.restarts))),

    metric("wakeone_worker_doing", "", Gauge, "1 for what the worker does, waiting for connections, busy or stopped; 0 for the others", &["workers[].doing"],
        From::WorkerLabelled(|w| state("doing", &DOING, w.doing))),
    metric("wakeone_worker_cpu", "seconds", Counter, "CPU that the worker of a slot used", &["workers[].cpu_ns"],
        From::Worker(|w| seconds(w.cpu_ns))),
    metric("wakeone_worker_run_delay", "seconds", Counter, "Time that it was ready and had no CPU", &["workers[].run_delay_ns"],
        From::Worker(|w| seconds(w.run_delay_ns))),
    metric("wakeone_worker_switches_voluntary", "", Counter, "Times that it gave its CPU up", &["workers[].switches_voluntary"],
        From::Worker(|w| Whole(w.switches_voluntary))),
    metric("wakeone_worker_switches_forced", "", Counter, "Times that its CPU was taken from it", &["workers[].switches_forced"],
        From::Worker(|w| Whole(w.switches_forced))),
    metric("wakeone_worker_open", "descriptors", Gauge, "Descriptors that it has open", &["workers[].descriptors"],
        From::Worker(|w| Whole(w.descriptors.into()))),
    metric("wakeone_worker_descriptors_limit", "", Gauge, "Descriptors that it may have open", &["workers[].descriptors_limit"],
        From::Worker(|w| Whole(w.descriptors_limit))),

    metric("wakeone_group_announced", "connections", Counter, "Handshakes that its listeners completed (with --metrics-tracing)", &["traced.connections"],
        From::Group(|g| traced(g, |t| t.connections))),
    metric("wakeone_group_wakeups", "", Counter, "Threads of the workers woken for them (with --metrics-tracing)", &["traced.wakeups"],
        From::Group(|g| traced(g, |t| t.wakeups))),
    metric("wakeone_worker_accepted", "connections", Counter, "Connections that accept() returned to it (with --metrics-tracing)", &["traced.workers[].accepted"],
        From::Traced(|w| w.accepted.map(Whole))),
    metric("wakeone_worker_empty_accepts", "", Counter, "accept() calls that found nothing (with --metrics-tracing)", &["traced.workers[].accepted_empty"],
        From::Traced(|w| w.accepted_empty.map(Whole))),
    metric("wakeone_worker_wakeups", "", Counter, "Threads of it woken for a connection (with --metrics-tracing)", &["traced.workers[].woken"],
        From::Traced(|w| w.woken.map(Whole))),
    metric("wakeone_worker_accept_wait", "seconds", Histogram, "How long the connections that it accepted had waited in the queue (with --metrics-tracing)",
        &["traced.workers[].waits.count", "traced.workers[].waits.sum_us", "traced.workers[].waits.max_us", "traced.workers[].waits.buckets"],
        From::Traced(|w| w.waits.clone().map(Number::Waits))),
    metric("wakeone_host_listen_overflows", "", Counter, "Accept queues found full, in the whole network namespace (with --metrics-tracing)", &["host.listen_overflows"],
        From::Group(|g| host(g, |h| h.listen_overflows))),
    metric("wakeone_host_listen_drops", "", Counter, "Those, and other reasons to drop at a listener (with --metrics-tracing)", &["host.listen_drops"],
        From::Group(|g| host(g, |h| h.listen_drops))),
    metric("wakeone_host_syn_retransmissions", "", Counter, "SYNs and SYN-ACKs sent again (with --metrics-tracing)", &["host.syn_retransmissions"],
        From::Group(|g| host(g, |h| h.syn_retransmissions))),
    metric("wakeone_host_passive_opens", "connections", Counter, "Connections accepted by any listener of the namespace (with --metrics-tracing)", &["host.passive_opens"],
        From::Group(|g| host(g, |h| h.passive_opens))),
    metric("wakeone_host_resets_sent", "", Counter, "Resets sent by any socket of the namespace (with --metrics-tracing)", &["host.resets_sent"],
        From::Group(|g| host(g, |h| h.resets_sent))),
    metric("wakeone_host_migrated", "connections", Counter, "Connections that the kernel moved from a listener that closed (with --metrics-tracing)", &["host.migrated"],
        From::Group(|g| host(g, |h| h.migrated))),
    metric("wakeone_host_somaxconn", "connections", Gauge, "net.core.somaxconn: the longest queue that a program may ask for (with --metrics-tracing)", &["host.somaxconn"],
        From::Group(|g| host(g, |h| h.somaxconn.into()))),
    metric("wakeone_host_cpus", "", Gauge, "CPUs that are online (with --metrics-tracing)", &["host.cpus"],
        From::Group(|g| host(g, |h| h.cpus.into()))),
];

/// Fields that serve as labels of the others.
pub const LABELS: [&str; 4] = [
    "name",
    "slots[].slot",
    "workers[].slot",
    "traced.workers[].slot",
];

fn traced(group: &GroupMetrics, of: fn(&Traced) -> Option<u64>) -> Labelled {
    let counted = group.traced.iter().filter_map(of);
    counted.map(|count| (None, Whole(count))).collect()
}

fn host(group: &GroupMetrics, of: fn(&wakeone_model::snapshot::HostLook) -> u64) -> Labelled {
    group
        .host
        .iter()
        .map(|host| (None, Whole(of(host))))
        .collect()
}

impl Metric {
    /// Returns the name of its samples.
    pub fn name(&self) -> String {
        let unit = if self.unit.is_empty() { "" } else { "_" };
        let end = match self.kind {
            Counter => "_total",
            Info => "_info",
            Gauge | Histogram => "",
        };
        format!("{}{unit}{}{end}", self.stem, self.unit)
    }

    fn kind(&self) -> MetricType {
        match self.kind {
            Counter => MetricType::Counter,
            Gauge => MetricType::Gauge,
            Info => MetricType::Info,
            Histogram => MetricType::Histogram,
        }
    }

    /// Returns the labels that `help` names, beside those of the sample itself.
    fn labels(&self) -> &'static str {
        match self.from {
            From::Own(_) => "",
            From::Group(_) => "group",
            _ => "group, slot",
        }
    }

    fn encode(&self, metrics: &Metrics, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let unit = (!self.unit.is_empty()).then(|| Unit::Other(self.unit.to_owned()));
        let mut metric =
            encoder.encode_descriptor(self.stem, self.help, unit.as_ref(), self.kind())?;
        if let From::Own(read) = self.from {
            return self.samples(&mut metric, &[], read());
        }
        for group in &metrics.groups {
            let mut labels = vec![("group", group.status.name.clone())];
            if let From::Group(read) = self.from {
                self.samples(&mut metric, &labels, read(group))?;
                continue;
            }
            labels.push(("slot", String::new()));
            for (slot, numbers) in self.by_slot(group) {
                labels[1].1 = slot.to_string();
                self.samples(&mut metric, &labels, numbers)?;
            }
        }
        Ok(())
    }

    fn by_slot(&self, group: &GroupMetrics) -> Vec<(usize, Labelled)> {
        let slots = group.status.slots.iter();
        let traced = group.traced.iter().flat_map(|t| &t.workers);
        match self.from {
            From::Slot(read) => slots.map(|s| (s.slot, one(read(s)))).collect(),
            From::SlotLabelled(read) => slots.map(|s| (s.slot, read(s))).collect(),
            From::Worker(read) => group
                .workers
                .iter()
                .map(|w| (w.slot, one(read(w))))
                .collect(),
            From::WorkerLabelled(read) => group.workers.iter().map(|w| (w.slot, read(w))).collect(),
            From::Traced(read) => traced
                .filter_map(|w| Some((w.slot, one(read(w)?))))
                .collect(),
            From::Group(_) | From::Own(_) => Vec::new(),
        }
    }

    fn samples(
        &self,
        metric: &mut MetricEncoder<'_>,
        labels: &[(&'static str, String)],
        numbers: Labelled,
    ) -> fmt::Result {
        for (more, number) in numbers {
            let labels: Vec<(&'static str, String)> = labels.iter().cloned().chain(more).collect();
            if self.kind == Info {
                metric.encode_info(&labels)?;
            } else if labels.is_empty() {
                self.sample(metric, &number)?;
            } else {
                self.sample(&mut metric.encode_family(&labels)?, &number)?;
            }
        }
        Ok(())
    }

    fn sample(&self, metric: &mut MetricEncoder<'_>, number: &Number) -> fmt::Result {
        match (self.kind, number) {
            (Counter, Whole(value)) => metric.encode_counter::<NoLabelSet, _, u64>(value, None),
            (Counter, Real(value)) => metric.encode_counter::<NoLabelSet, _, u64>(value, None),
            (_, Whole(value)) => metric.encode_gauge(value),
            (_, Signed(value)) => metric.encode_gauge(value),
            (_, Real(value)) => metric.encode_gauge(value),
            (_, Number::Waits(waits)) => histogram(metric, waits),
        }
    }
}

fn histogram(metric: &mut MetricEncoder<'_>, waits: &waits::Waits) -> fmt::Result {
    let mut buckets: Vec<(f64, u64)> = WAIT_BUCKETS_US
        .iter()
        .map(|end| (*end as f64 / 1e6, 0))
        .chain([(f64::INFINITY, 0)])
        .collect();
    for (bucket, count) in waits.buckets.iter().enumerate() {
        // A bucket's waits lie below the lower end of the next bucket.
        let end = waits::floor_us(bucket + 1);
        let place = WAIT_BUCKETS_US.iter().position(|most| end <= *most);
        buckets[place.unwrap_or(WAIT_BUCKETS_US.len())].1 += u64::from(*count);
    }
    // Sums the buckets, as the total that was counted may have grown between two reads.
    let count = buckets.iter().map(|(_, n)| n).sum();
    metric.encode_histogram::<NoLabelSet>(waits.sum_us as f64 / 1e6, count, &buckets, None)
}

/// One metric of the figures, for the library that writes them.
#[derive(Debug)]
struct Served(Metrics);

impl Collector for Served {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        METRICS
            .iter()
            .try_for_each(|metric| metric.encode(&self.0, &mut encoder))
    }
}

/// Returns the metrics as OpenMetrics 1.0 text.
pub fn exposition(metrics: Metrics) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Served(metrics)));
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => text,
        // Writing to a String never fails.
        Err(fmt::Error) => String::new(),
    }
}

/// Returns an explanation of every metric.
pub fn help() -> String {
    let mut text = String::new();
    for metric in METRICS {
        let labels = match metric.labels() {
            "" => String::new(),
            labels => format!("{{{labels}}}"),
        };
        let unit = match metric.unit {
            "" => String::new(),
            unit => format!(", {unit}"),
        };
        let from = match metric.fields {
            [] => String::new(),
            fields => format!(" [{}]", fields.join(", ")),
        };
        let _ = writeln!(
            text,
            "{}{labels}  {}{unit}\n    {}{from}",
            metric.name(),
            metric.kind().as_str(),
            metric.help
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::collections::{BTreeMap, BTreeSet};
    use wakeone_bpf::RunStatistics;
    use wakeone_control::policy::Policy;
    use wakeone_control::status;
    use wakeone_model::snapshot::HostLook;
    use wakeone_model::waits::Waits;

    fn slot(slot: usize) -> Slot {
        Slot {
            slot,
            pid: Some(4711),
            state: "stuck",
            armed: Some(true),
            weight: 2,
            active: 3,
            queued: 4,
            queue_limit: 128,
            waiting_bytes: Some(768),
            buffer_bytes: Some(4608),
            dropped: Some(13),
            selected: 5,
            selected_share: 0.25,
            established: 6,
            closed: 7,
            migrated_in: 8,
            migrated_out: 9,
            rescues: 10,
            rescued: 11,
            stuck_ms: 1_500,
            restarts: 12,
        }
    }

    /// Returns a group of which everything is known.
    fn group() -> GroupMetrics {
        let worker = WorkerMetrics {
            slot: 0,
            doing: "busy",
            cpu_ns: 2_500_000_000,
            run_delay_ns: 1,
            switches_voluntary: 13,
            switches_forced: 14,
            descriptors: 15,
            descriptors_limit: 1024,
        };
        let mut buckets = vec![0; 40];
        buckets[3] = 2; // 3 µs
        buckets[36] = 1; // 40 to 41 µs
        let traced = TracedWorker {
            slot: 0,
            accepted: Some(16),
            accepted_empty: Some(17),
            woken: Some(18),
            waits: Some(Waits {
                count: 3,
                sum_us: 46,
                max_us: 40,
                buckets,
            }),
        };
        GroupMetrics {
            status: status::Group {
                name: "web".into(),
                protocol: "udp",
                affinity: Some(wakeone_control::policy::Affinity::Flow),
                heavy_flows: Some(1),
                spread_flows: Some(0),
                listen: vec!["127.0.0.1:80".into(), "[::1]:80".into()],
                network: Some(Network {
                    namespace: 4_026_532_281,
                    container: Some("3f2a51c09b7e4d1d8c7b6a5f4e3d2c1b".into()),
                    pod: Some("0f5c1d2e-3a4b-4c5d-8e6f-7a8b9c0d1e2f".into()),
                    pod_name: Some("default/web-1".into()),
                }),
                steered: true,
                replaced: false,
                queued: Some(20),
                queue_limit: Some(21),
                policy: Some(Policy::LeastConnections),
                supervisor_pid: Some(9),
                attached: false,
                started: true,
                agent: true,
                counting: true,
                closing: false,
                fallbacks: 1,
                exits: BTreeMap::from([("selected", 5), ("no_slot", 1)]),
                moved_live: 2,
                drift_mended: 3,
                orphans: Vec::new(),
                slots: vec![slot(0), slot(1)],
                programs: vec![RunStatistics {
                    name: "count".into(),
                    run_cnt: 4,
                    run_time_ns: 5_000,
                }],
            },
            workers: vec![worker],
            traced: Some(Traced {
                connections: Some(19),
                wakeups: Some(20),
                workers: vec![traced],
            }),
            host: Some(HostLook::default()),
        }
    }

    fn sample() -> Metrics {
        Metrics {
            groups: vec![group()],
        }
    }

    /// Collects the paths of all numbers and words of a document; `exits` is a map, one metric by its keys.
    fn paths(value: &Value, at: &str, found: &mut BTreeSet<String>) {
        let below = |name: &str| match at {
            "" => name.to_owned(),
            at => format!("{at}.{name}"),
        };
        match value {
            Value::Object(map) if at != "exits" => {
                map.iter()
                    .for_each(|(name, value)| paths(value, &below(name), found));
            }
            Value::Array(values) if values.iter().any(Value::is_object) => {
                values
                    .iter()
                    .for_each(|value| paths(value, &format!("{at}[]"), found));
            }
            _ => {
                found.insert(at.to_owned());
            }
        }
    }

    #[test]
    fn every_figure_is_a_metric_and_every_metric_a_figure() {
        let json = serde_json::to_value(group()).expect("JSON");
        let mut there = BTreeSet::new();
        paths(&json, "", &mut there);
        // The status has no field that is not among them.
        let status = serde_json::to_value(group().status).expect("JSON");
        let mut of_status = BTreeSet::new();
        paths(&status, "", &mut of_status);
        assert!(of_status.is_subset(&there));

        let fields = METRICS
            .iter()
            .flat_map(|metric| metric.fields)
            .chain(&LABELS);
        let told: BTreeSet<String> = fields.map(|field| (*field).to_owned()).collect();
        assert_eq!(told, there);
    }

    /// Returns a line of the served text.
    fn line<'a>(text: &'a str, of: &str) -> &'a str {
        let found = text.lines().find(|line| line.starts_with(of));
        found.unwrap_or_else(|| panic!("no {of} in {text}"))
    }

    #[test]
    fn what_is_served_is_openmetrics() {
        let text = exposition(sample());
        assert!(text.ends_with("# EOF\n"));
        for (of, is) in [
            (
                "wakeone_slot_active_connections{group=\"web\",slot=\"1\"}",
                "3",
            ),
            (
                "wakeone_slot_selected_connections_total{group=\"web\",slot=\"0\"}",
                "5",
            ),
            (
                "wakeone_slot_selected_share_ratio{group=\"web\",slot=\"0\"}",
                "0.25",
            ),
            (
                "wakeone_slot_stuck_seconds_total{group=\"web\",slot=\"0\"}",
                "1.5",
            ),
            (
                "wakeone_slot_state{group=\"web\",slot=\"0\",state=\"stuck\"}",
                "1",
            ),
            (
                "wakeone_slot_state{group=\"web\",slot=\"0\",state=\"up\"}",
                "0",
            ),
            (
                "wakeone_group_policy_info{group=\"web\",policy=\"least-connections\"}",
                "1",
            ),
            (
                "wakeone_group_listen_info{group=\"web\",address=\"[::1]:80\"}",
                "1",
            ),
            (
                "wakeone_group_pod_info{group=\"web\",pod=\"default/web-1\"}",
                "1",
            ),
            (
                "wakeone_group_exits_total{group=\"web\",exit=\"no_slot\"}",
                "1",
            ),
            (
                "wakeone_worker_cpu_seconds_total{group=\"web\",slot=\"0\"}",
                "2.5",
            ),
            (
                "wakeone_worker_accept_wait_seconds_count{group=\"web\",slot=\"0\"}",
                "3",
            ),
            (
                "wakeone_worker_accept_wait_seconds_bucket{le=\"0.000016\",group=\"web\",slot=\"0\"}",
                "2",
            ),
            (
                "wakeone_worker_accept_wait_seconds_bucket{le=\"0.000064\",group=\"web\",slot=\"0\"}",
                "3",
            ),
            (
                "wakeone_worker_accept_wait_seconds_bucket{le=\"+Inf\",group=\"web\",slot=\"0\"}",
                "3",
            ),
            ("# TYPE wakeone_slot_stuck_seconds", "counter"),
            ("# UNIT wakeone_slot_stuck_seconds", "seconds"),
            ("# TYPE wakeone_group_policy", "info"),
        ] {
            assert_eq!(line(&text, of), format!("{of} {is}"));
        }
        // Each metric is served under its explained name, with help and type. Its lines are together, and none comes
        // twice.
        let mut seen = BTreeSet::new();
        for metric in METRICS {
            let name = metric.name();
            assert!(seen.insert(name.clone()), "{name} twice");
            assert!(text.contains(&format!("\n{name}")), "{name} is not served");
            assert!(
                help().contains(&format!("{name}{{")) || name == "wakeone_build_info",
                "{name} is not explained"
            );
            assert!(
                !metric.help.is_empty() && !metric.help.ends_with('.'),
                "{name}"
            );
        }
        let samples: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
        let distinct: BTreeSet<&str> = samples
            .iter()
            .filter_map(|l| l.rsplit_once(' '))
            .map(|l| l.0)
            .collect();
        assert_eq!(distinct.len(), samples.len(), "a sample is there twice");
    }

    #[test]
    fn names_cannot_break_out_of_their_labels() {
        let mut odd = sample();
        odd.groups[0].status.listen = vec!["a\"} 1\nb\\".into()];
        let text = exposition(odd);
        assert!(
            line(&text, "wakeone_group_listen_info").ends_with(r#"address="a\"} 1\nb\\"} 1"#),
            "{text}"
        );
    }

    #[test]
    fn nothing_steered_is_an_exposition_too() {
        let text = exposition(Metrics { groups: Vec::new() });
        assert!(text.contains("wakeone_build_info{version="));
        assert!(text.ends_with("# EOF\n"));
    }
}
