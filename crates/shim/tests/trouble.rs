//! Failures around a question of the library: no descriptor is free, signals and forks in the middle, a broker that
//! is slow or dies at any point. `trouble.c` has the scenes.

mod support;

use std::time::Duration;
use support::{Bench, Broker, Fault, Point};

/// Plays a scene. Returns its lines on standard output, and those on standard error.
fn play(scene: &str, broker: &Broker) -> (String, Vec<String>) {
    let output = Bench::new("trouble").run(&[scene], Some(broker));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{scene}: {text}{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    (text, said.lines().map(str::to_owned).collect())
}

fn slow(point: Point) -> Broker {
    Broker::with(Fault::Slow(point, Duration::from_millis(400)))
}

#[test]
fn without_a_free_descriptor_the_listener_is_shared_until_there_is_one() {
    let broker = Broker::open(false);
    let (_, said) = play("full", &broker);
    assert_eq!(said, [""; 0]);
    assert_eq!(broker.given(), 9, "every worker had its queue in the end");
    let (_, said) = play("full-listen", &broker);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("no descriptor was free"), "{said:?}");
}

#[test]
fn signals_have_the_effect_that_they_have_without() {
    let (_, said) = play("signals", &slow(Point::Claim));
    assert_eq!(said, [""; 0]);
}

#[test]
fn a_child_of_a_process_whose_thread_asks_inherits_nothing_of_it() {
    for point in [Point::Claim, Point::Queue, Point::Taken] {
        let (_, said) = play("threads-fork", &slow(point));
        assert_eq!(said, [""; 0], "{point:?}");
    }
}

#[test]
fn a_broker_that_dies_at_any_point_leaves_the_shared_listener() {
    for point in [Point::Claim, Point::Queue, Point::Taken] {
        let (_, said) = play("hangs-up", &Broker::with(Fault::HangsUp(point)));
        // Each worker that had no answer says so; one that already had its queue does not.
        assert!(
            said.len() <= 2 && said.iter().all(|l| l.contains("does not answer")),
            "{point:?}: {said:?}"
        );
    }
    for point in [Point::Opens, Point::Listen] {
        let broker = Broker::with(Fault::HangsUp(point));
        play("hangs-up-at-listen", &broker);
    }
}

#[test]
fn servers_that_close_what_they_do_not_know_are_split_all_the_same() {
    let broker = Broker::open(false);
    let (_, said) = play("daemons", &broker);
    assert_eq!(said, [""; 0]);
    assert_eq!(broker.given(), 4);
}

#[test]
fn a_child_of_vfork_leaves_its_parents_queues_alone() {
    let broker = Broker::open(false);
    play("vfork", &broker);
    assert_eq!(broker.given(), 2);
}

/// The first worker's messages may come late: the others still get queues, and SO_REUSEPORT stays.
#[test]
fn workers_that_listen_while_another_begins_to_are_split() {
    for point in [Point::Opens, Point::Listen, Point::Claim] {
        let broker = Broker::with(Fault::Slow(point, Duration::from_millis(150)));
        let (text, said) = play("listen-race", &broker);
        assert_eq!(said, [""; 0], "{point:?}");
        let own = text.lines().filter(|line| *line == "own").count();
        assert!(own >= 2, "{point:?}: {text}");
    }
}

/// The name in /proc/net/unix is free once the broker was killed, and its token is in every process's environment.
#[test]
fn another_user_with_the_brokers_name_gets_nothing() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user");
    }
    let (_, said) = play("squatted", &Broker::nobody());
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("does not answer"), "{said:?}");
}
