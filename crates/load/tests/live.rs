//! A load that is read, and aimed anew, while it runs.

mod common;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use common::{Server, answer, check, plan};
use wakeone_load::{Live, Plan, Stop};

fn wait_for(live: &Live, completed: u64) {
    let start = Instant::now();
    while live.completed() < completed {
        assert!(start.elapsed() < Duration::from_secs(60), "no answers");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_load_goes_where_it_is_aimed() {
    let servers = [0, 1].map(|n: u64| Server::start(move |r| answer(r, &n.to_string())));
    let endless = Plan {
        stop: Stop {
            requests: Some(u64::MAX),
            duration: None,
        },
        threads: 2,
        ..plan(servers[0].address)
    };
    let live = Live::among(&endless, servers.iter().map(|s| s.address));
    let over = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        let load =
            scope.spawn(|| wakeone_load::observe_live(&endless, &over, None, &live, &mut |_| {}));
        wait_for(&live, 200);
        assert_eq!(servers[1].requests(), 0, "the first target to begin with");
        live.aim(1);
        assert_eq!(live.target(), servers[1].address.into());
        // Requests under way may still end there.
        wait_for(&live, live.completed() + 100);
        let before = servers[0].requests();
        wait_for(&live, live.completed() + 200);
        assert_eq!(servers[0].requests(), before, "nothing new comes");
        live.aim(9);
        assert_eq!(
            live.target(),
            servers[1].address.into(),
            "there are no more"
        );
        over.store(true, SeqCst);
        load.join().unwrap().unwrap()
    });
    check(&outcome);
    assert_eq!(live.completed(), outcome.completed);
    assert!(outcome.by_worker["0"] >= 200 && outcome.by_worker["1"] >= 200);
}
