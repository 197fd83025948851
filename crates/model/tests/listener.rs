//! Which sockets a process waits for.

use wakeone_model::listener::{Polled, Process, Thread, Wait};

#[test]
fn a_process_waits_by_the_calls_of_its_threads_and_by_its_epoll_sets() {
    let thread = |tid, wait| Thread { tid, wait };
    let polled = |inode| Polled {
        epoll: 5,
        inode,
        events: 1,
    };
    let process = Process {
        pid: 10,
        parent: 1,
        name: "server".into(),
        holds: vec![1, 2, 3, 4, 5, 6],
        descriptors: Vec::new(),
        polls: vec![polled(5)],
        rings: false,
        connections: 0,
        threads: vec![
            thread(10, Wait::Accept(1)),
            thread(11, Wait::Receive(2)),
            thread(12, Wait::Poll(vec![3, 4])),
            thread(13, Wait::IoUring),
        ],
    };
    assert_eq!(process.awaited().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
}
