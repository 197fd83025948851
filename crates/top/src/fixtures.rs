//! Frames for the tests.

use std::collections::BTreeMap;

use wakeone_model::accept::{AcceptModel, Confidence, Means, Shape};
use wakeone_model::address::Address;
use wakeone_model::listener::{Listener, Protocol, Socket};
use wakeone_model::snapshot::{
    HostLook, Sampled, Snapshot, TraceLook, View, Watch, WorkerLook, WorkerTrace,
};
use wakeone_model::waits::Waits;

use crate::frame::{Frame, SlotLook, Steering};

pub fn socket(cookie: u64, queued: u32) -> Socket {
    Socket {
        inode: 1000 + cookie,
        cookie,
        protocol: Protocol::Tcp,
        uid: 0,
        queued,
        queue_limit: 64,
        drops: 0,
        receive_buffer_bytes: 0,
    }
}

fn snapshot(at_ns: u64, sockets: Vec<Socket>) -> Snapshot {
    Snapshot {
        at_ns,
        listener: Listener {
            address: "127.0.0.1:8080".parse().expect("address"),
            interface: 0,
            protocol: Protocol::Tcp,
            sockets,
        },
        workers: BTreeMap::new(),
        trace: None,
        host: HostLook::default(),
        waiting: None,
    }
}

/// Adds a worker that took this many connections in a second, each of which waited 100 µs.
fn took(watch: &mut Watch, pid: u32, taken: u64, look: WorkerLook) {
    watch.first.workers.insert(pid, WorkerLook::default());
    watch.last.workers.insert(pid, look);
    watch.model.workers.push(pid);
    let mut waits = Waits {
        count: taken,
        sum_us: taken * 100,
        max_us: 101,
        buckets: vec![0; 64],
    };
    // 100 to 103 µs: octave 6, step 9.
    waits.buckets[57] = taken as u32;
    let trace = WorkerTrace {
        accepted: taken,
        woken: taken + taken / 2,
        waits,
        ..WorkerTrace::default()
    };
    let all = watch.last.trace.get_or_insert_default();
    all.connections += taken;
    all.wakeups += trace.woken;
    all.workers.insert(pid, trace);
}

fn worker(cpu: f64, active: u32, state: char) -> WorkerLook {
    WorkerLook {
        name: "server".into(),
        cpu_ns: (cpu * 1e9) as u64,
        active,
        state,
        waiting: state == 'S',
        ..WorkerLook::default()
    }
}

fn watch(sockets: Vec<Socket>, shape: Shape) -> Watch {
    let mut watch = Watch {
        model: AcceptModel {
            shape,
            means: Means::EpollExclusive,
            confidence: Confidence::Certain,
            evidence: Vec::new(),
            workers: Vec::new(),
        },
        first: snapshot(1_000_000_000, sockets.clone()),
        last: snapshot(2_000_000_000, sockets),
        sampled: Sampled {
            looks: 100,
            ..Sampled::default()
        },
        serves: BTreeMap::new(),
        keeps: BTreeMap::new(),
        reuseport: Some(false),
        steered: None,
        has_program: None,
        affinity: None,
        heavy_flows: 0,
        threads: std::collections::BTreeMap::new(),
        pools: false,
        ungrouped: None,
        orphans: Vec::new(),
        view: View {
            tracing: true,
            missing: Vec::new(),
        },
    };
    watch.first.trace = Some(TraceLook::default());
    watch
}

/// Three workers on one socket: one takes most, one is stopped.
pub fn shared() -> Frame {
    let mut watch = watch(vec![socket(1, 3)], Shape::Shared);
    watch.sampled.queue_highest.insert(1, 12);
    took(&mut watch, 301, 600, worker(0.9, 7, 'R'));
    took(&mut watch, 302, 200, worker(0.25, 2, 'S'));
    took(&mut watch, 303, 0, worker(0.0, 1, 'T'));
    watch.serves.insert(1, vec![301, 302, 303]);
    Frame {
        watch,
        steering: None,
    }
}

/// Four workers with a socket each, steered; the third drains.
pub fn steered() -> Frame {
    let sockets = (1..=4).map(|n| socket(n, n as u32)).collect();
    let mut watch = watch(sockets, Shape::SocketPerWorker);
    watch.reuseport = Some(true);
    for n in 1..=4 {
        took(&mut watch, 400 + n, 100, worker(0.5, n, 'S'));
        watch.serves.insert(u64::from(n), vec![400 + n]);
    }
    let slot = |n: u32| SlotLook {
        slot: n,
        pid: Some(401 + n),
        state: if n == 2 { "draining" } else { "up" }.into(),
        open: None,
        selected: 1000 + u64::from(n) * 10,
        rescues: u64::from(n),
        rescued: 2,
    };
    Frame {
        watch,
        steering: Some(Steering {
            group: "web".into(),
            policy: Some("least-connections".into()),
            agent: true,
            fallbacks: 0,
            heavy: None,
            slots: (0..4).map(slot).collect(),
        }),
    }
}

/// Four workers with a socket of UDP each; where these are QUIC's, they have 30 connections and more.
pub fn datagrams(is_quic: bool) -> Frame {
    let mut frame = steered();
    for snapshot in [&mut frame.watch.first, &mut frame.watch.last] {
        snapshot.listener.protocol = Protocol::Udp;
        snapshot.trace = None;
        for worker in snapshot.workers.values_mut() {
            worker.active = 0;
        }
    }
    frame.watch.view.tracing = false;
    let slots = frame.steering.iter_mut().flat_map(|one| &mut one.slots);
    for slot in slots {
        slot.open = is_quic.then(|| 30 + u64::from(slot.slot));
    }
    frame
}

/// Without tracing.
pub fn untraced() -> Frame {
    let mut frame = shared();
    frame.watch.first.trace = None;
    frame.watch.last.trace = None;
    frame.watch.view = View {
        tracing: false,
        missing: vec!["the tracepoints may not be used: waits are not known".into()],
    };
    frame.watch.last.host.passive_opens = 321;
    frame
}

/// The same on another port.
pub fn at(mut frame: Frame, port: u16) -> Frame {
    for snapshot in [&mut frame.watch.first, &mut frame.watch.last] {
        if let Address::Inet(address) = &mut snapshot.listener.address {
            address.set_port(port);
        }
    }
    frame
}
