//! How workers of `wakeone run` get their listeners: blocking or not, and as standard input.

#[path = "support/mod.rs"]
mod support;

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use support::{Ground, Run, everyone, pid_of, server, whoami};

const ANY: &str = "127.0.0.1:0";
const WARNING: &str = "hangs in accept4";

impl Served {
    /// A group of one whose worker is an event loop.
    fn by(options: &[&str], command: &[&str]) -> Self {
        let ground = Ground::new();
        let mut run = ground.run(
            &[&["-w", "1", "-l", ANY, "--grace", "1s"], options].concat(),
            command,
        );
        let address = run.ready();
        Self {
            run,
            address,
            _ground: ground,
        }
    }

    fn is_warned_of(&self) -> bool {
        self.run.lines().iter().any(|line| line.contains(WARNING))
    }
}

struct Served {
    run: Run,
    address: SocketAddr,
    _ground: Ground,
}

/// Whether a request is answered within half a second; those of a hanging worker are never.
fn answers(address: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(address).expect("connect");
    let half = Some(Duration::from_millis(500));
    stream.set_read_timeout(half).expect("timeout");
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("write");
    stream.read(&mut [0]).is_ok_and(|bytes| bytes == 1)
}

/// The worker itself, and one below a shell.
fn event_loops(events: &str) -> [Vec<String>; 2] {
    let script = server("event_loop.py");
    let direct = ["python3", &script, events, "{fd}"].map(str::to_owned);
    let below = format!("python3 {script} {events} {{fd}} & trap 'kill $!' TERM; wait; wait");
    let shell = ["sh", "-c", &below].map(str::to_owned);
    [direct.to_vec(), shell.to_vec()]
}

#[test]
fn an_event_loop_with_a_blocking_listener_is_warned_of() {
    for command in event_loops("level") {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let mut served = Served::by(&[], &command);
        // Some lines of the start come after `ready`.
        assert!(served.is_warned_of() || served.run.line(WARNING).contains("--nonblocking"));
        assert!(!answers(served.address), "this server is a hanging one");
    }
}

#[test]
fn with_nonblocking_an_event_loop_answers_and_so_do_its_successors() {
    for command in event_loops("edge") {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let mut served = Served::by(&["--nonblocking"], &command);
        let first = pid_of(&whoami(served.address));
        served.run.signal(rustix::process::Signal::HUP);
        served.run.line("rolling restart done: 1 worker replaced");
        for _ in 0..3 {
            assert_ne!(pid_of(&whoami(served.address)), first);
        }
        assert!(!served.is_warned_of(), "{:?}", served.run.lines());
        served.run.stop();
    }
}

/// Servers that set the option themselves, and those that wait in accept, are as they should be.
#[test]
fn nobody_else_is_warned_of() {
    const SETS_IT: &str = "import asyncio, socket\n\
        async def main():\n\
        \x20async def serve(reader, writer):\n\
        \x20\x20await reader.read(10); writer.write(b'x'); writer.close()\n\
        \x20server = await asyncio.start_server(serve, sock=socket.socket(fileno=3))\n\
        \x20await server.serve_forever()\n\
        asyncio.run(main())";
    const ACCEPTS: &str = "import socket\n\
        s = socket.socket(fileno=3)\n\
        while True: c, _ = s.accept(); c.recv(10); c.send(b'x'); c.close()";
    for text in [SETS_IT, ACCEPTS] {
        let served = Served::by(&[], &["python3", "-c", text]);
        assert!(answers(served.address));
        assert!(!served.is_warned_of(), "{:?}", served.run.lines());
    }
}

/// A group that was started without the option is taken over with it.
#[test]
fn a_takeover_with_nonblocking_replaces_the_workers() {
    let ground = Ground::new();
    let command = ["python3", &server("event_loop.py"), "level", "{fd}"];
    let options = ["-w", "1", "-l", ANY, "--name", "web", "--grace", "1s"];
    let mut first = ground.run(&options, &command);
    let address = first.ready();
    assert!(!answers(address));
    first.murder();
    let mut second = ground.run(&[&options[..], &["--nonblocking"]].concat(), &command);
    second.line("rolling restart done: 1 worker replaced");
    assert!(whoami(address)["pid"].is_number());
    second.stop();
}

#[test]
fn the_listener_is_standard_input() {
    let ground = Ground::new();
    let command = ["python3", &server("event_loop.py"), "level", "0"];
    let options = ["-w", "2", "-l", ANY, "--stdin", "--nonblocking"];
    let mut run = ground.run(&options, &command);
    let address = run.ready();
    let before = everyone(address, 2);
    for worker in &before {
        assert_eq!(worker["listener"][1], address.port());
        assert_eq!(
            worker["fds"],
            serde_json::json!([0, 1, 2]),
            "and nowhere else"
        );
        let environment = std::fs::read(format!("/proc/{}/environ", pid_of(worker)));
        let environment = environment.expect("environment");
        assert!(!String::from_utf8_lossy(&environment).contains("LISTEN_FDS"));
    }
    run.signal(rustix::process::Signal::HUP);
    run.line("rolling restart done: 2 workers replaced");
    let after: Vec<u32> = everyone(address, 2).iter().map(pid_of).collect();
    assert!(
        before
            .iter()
            .all(|one: &Value| !after.contains(&pid_of(one)))
    );
    run.stop();
}

#[test]
fn only_one_listener_can_be_standard_input() {
    let ground = Ground::new();
    let two = ["-w", "1", "-l", ANY, "-l", "127.0.0.2:0", "--stdin"];
    for (options, command) in [(&two[..], "x"), (&["-l", ANY, "--stdin"], "{fd}")] {
        let (code, line) = ground.refused(options, &["true", command]);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains("--stdin makes one listener"), "{line}");
    }
}
