//! Failures around a question of the library: no descriptor is free, signals and forks in the middle, a broker that
//! is slow or dies at any point. `trouble.c` has the scenes.

mod support;

use std::time::Duration;
use support::{Bench, Broker, Fault, Point};

/// Plays a scene. Returns its lines on standard error.
fn play(scene: &str, broker: &Broker) -> Vec<String> {
    let output = Bench::new("trouble").run(&[scene], Some(broker));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{scene}: {text}{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    said.lines().map(str::to_owned).collect()
}

fn slow(point: Point) -> Broker {
    Broker::with(Fault::Slow(point, Duration::from_millis(400)))
}

#[test]
fn without_a_free_descriptor_the_socket_is_shared_until_there_is_one() {
    let broker = Broker::open(false);
    let said = play("full", &broker);
    assert_eq!(said, [""; 0]);
    assert_eq!(broker.given(), 8, "every worker had its queue in the end");
}

#[test]
fn signals_have_the_effect_that_they_have_without() {
    let said = play("signals", &slow(Point::Claim));
    assert_eq!(said, [""; 0]);
}

#[test]
fn a_child_of_a_process_whose_thread_asks_inherits_nothing_of_it() {
    for point in [Point::Claim, Point::Queue, Point::Taken] {
        let said = play("threads-fork", &slow(point));
        assert_eq!(said, [""; 0], "{point:?}");
    }
}

#[test]
fn a_broker_that_dies_at_any_point_leaves_the_shared_socket() {
    for point in [Point::Claim, Point::Queue, Point::Taken] {
        let said = play("hangs-up", &Broker::with(Fault::HangsUp(point)));
        // Each worker that had no answer says so; one that already had its queue does not.
        assert!(
            said.len() <= 2 && said.iter().all(|l| l.contains("does not answer")),
            "{point:?}: {said:?}"
        );
    }
}

#[test]
fn servers_that_close_what_they_do_not_know_are_split_all_the_same() {
    let broker = Broker::open(false);
    let said = play("daemons", &broker);
    assert_eq!(said, [""; 0]);
    assert_eq!(broker.given(), 4);
}

#[test]
fn a_child_of_vfork_leaves_its_parents_queues_alone() {
    let broker = Broker::open(false);
    play("vfork", &broker);
    assert_eq!(broker.given(), 2);
}

/// The name in /proc/net/unix is free once the broker was killed, and its token is in every process's environment.
#[test]
fn another_user_with_the_brokers_name_gets_nothing() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user");
    }
    let said = play("squatted", &Broker::nobody());
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("does not answer"), "{said:?}");
}
