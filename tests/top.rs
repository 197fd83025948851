//! `wakeone top` shows a server of its own user as text and as JSON, records and replays it. It restores the terminal,
//! however it ends. It also shows and changes a steered group, where that is allowed.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use support::steered::{PREFORKED, WEB_BY_HASH, isolated, said, status};
use support::{WAKEONE, eventually, server, signal};

/// A prefork server with three workers, and a client that sends requests all the time.
struct Prefork {
    child: Child,
    port: u16,
    asking: Arc<AtomicBool>,
    asker: Option<std::thread::JoinHandle<()>>,
}

fn ask(port: u16) -> std::io::Result<String> {
    let mut connection = TcpStream::connect(("127.0.0.1", port))?;
    connection.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    Ok(answer)
}

impl Prefork {
    fn start(mode: &str) -> Self {
        // The port is free again once this listener is dropped, and no other process knows it.
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|l| l.local_addr())
            .expect("a port")
            .port();
        let child = Command::new("python3")
            .args([&server("prefork.py"), mode, &port.to_string(), "3"])
            .process_group(0)
            .spawn()
            .expect("python3 starts");
        support::slowly("it answers", || ask(port).is_ok_and(|a| a.ends_with("ok")));
        let asking = Arc::new(AtomicBool::new(true));
        let go_on = asking.clone();
        let asker = std::thread::spawn(move || {
            while go_on.load(Ordering::Relaxed) {
                let _ = ask(port);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        });
        Self {
            child,
            port,
            asking,
            asker: Some(asker),
        }
    }

    fn target(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for Prefork {
    fn drop(&mut self) {
        self.asking.store(false, Ordering::Relaxed);
        let _ = self.asker.take().map(std::thread::JoinHandle::join);
        let group = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
    }
}

fn top(arguments: &[&str]) -> Output {
    Command::new(WAKEONE)
        .arg("top")
        .args(arguments)
        .output()
        .expect("wakeone starts")
}

fn out(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{:?}", said(output));
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// Returns the one sentence of its error.
fn refused(arguments: &[&str], code: i32) -> String {
    let output = top(arguments);
    let lines = said(&output);
    assert_eq!(output.status.code(), Some(code), "{lines:?}");
    assert_eq!(lines.len(), 1, "one sentence: {lines:#?}");
    lines[0].clone()
}

#[test]
fn a_server_of_ones_own_once() {
    let server = Prefork::start("exclusive");
    let target = server.target();
    let text = out(&top(&[&target, "--once", "--interval", "500ms"]));
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with(&format!("tcp {target}  python3"))
            && lines[0].contains("shared-epoll-exclusive"),
        "{text}"
    );
    assert!(lines[1].contains("connections/s"), "{text}");
    assert!(
        text.contains("queue ")
            && text.contains("/1024, highest ")
            && text.contains("shared by 3 workers"),
        "{text}"
    );
    let rows = lines
        .iter()
        .filter(|l| l.contains(" python3 ") && l.contains(" shared "));
    assert_eq!(rows.count(), 3, "{text}");

    let told = out(&top(&[&target, "--once", "--json", "--interval", "500ms"]));
    let told: Value = serde_json::from_str(&told).expect("JSON");
    let listener = &told["listeners"][0];
    assert_eq!(listener["address"], target.as_str());
    assert_eq!(listener["accept_model"], "shared-epoll-exclusive");
    assert_eq!(listener["workers"].as_array().map(Vec::len), Some(3));
    assert_eq!(listener["queues"][0]["limit"], 1024);
    assert!(listener["totals"]["connections"].as_u64() > Some(0));
    assert!(listener["steering"].is_null());
}

#[test]
fn recorded_and_replayed() {
    let server = Prefork::start("accept");
    let target = server.target();
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("slow.jsonl");
    let name = file.display().to_string();
    let mut recording = Command::new(WAKEONE)
        .args(["top", &target, "--interval", "100ms", "--record", &name])
        .stdout(Stdio::piped())
        .spawn()
        .expect("wakeone starts");
    let lines = || std::fs::read_to_string(&file).map_or(0, |text| text.matches('\n').count());
    // Each refresh is in the file at once.
    eventually("three refreshes are recorded", || lines() >= 3);
    signal(recording.id(), Signal::TERM);
    let live = recording.wait_with_text();
    let mode = std::fs::metadata(&file).expect("file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let replayed = out(&top(&["--replay", &name]));
    // A replay shows the same text, except the notes on missing privileges, which appear once when it runs live.
    let of_server = |text: &str| -> Vec<String> {
        let kept = text
            .lines()
            .filter(|l| !l.starts_with("note: "))
            .map(str::to_owned);
        kept.collect()
    };
    assert_eq!(of_server(&replayed), of_server(&live));
    assert_eq!(replayed.matches("tcp ").count(), lines());
    let once = out(&top(&["--replay", &name, "--once"]));
    assert!(replayed.ends_with(&once) && once.matches("tcp ").count() == 1);
    let json = out(&top(&["--replay", &name, "--once", "--json"]));
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["listeners"][0]["address"], target.as_str());

    // It ends well when the reader of its output is gone.
    let shell = format!("'{WAKEONE}' top --replay '{name}' | head -n 1");
    let short = Command::new("sh")
        .args(["-c", &shell])
        .output()
        .expect("sh");
    assert!(short.stderr.is_empty() && short.stdout.starts_with(b"tcp "));

    let again = refused(&[&target, "--once", "--record", &name], 1);
    assert!(
        again.contains("is there already; name a new file"),
        "{again}"
    );
    cut_and_spoiled(folder.path(), &std::fs::read(&file).expect("file"));
}

trait WithText {
    fn wait_with_text(&mut self) -> String;
}

impl WithText for Child {
    /// Returns its output, and checks that it ended well.
    fn wait_with_text(&mut self) -> String {
        let mut text = String::new();
        let mut out = self.stdout.take().expect("stdout");
        out.read_to_string(&mut text).expect("text");
        assert_eq!(self.wait().expect("status").code(), Some(0));
        text
    }
}

/// A recording that ends in the middle of a line is shown up to there. A file that is no recording is refused.
fn cut_and_spoiled(folder: &Path, recording: &[u8]) {
    let cut = folder.join("cut.jsonl");
    std::fs::write(&cut, &recording[..recording.len() - 100]).expect("written");
    let output = top(&["--replay", &cut.display().to_string()]);
    assert!(out(&output).contains("tcp "));
    assert!(said(&output)[0].contains("in the middle of a line"));

    let mut spoiled = recording.to_vec();
    spoiled.extend(b"\x1b[2Jhello\n");
    let bad = folder.join("bad.jsonl");
    std::fs::write(&bad, spoiled).expect("written");
    let output = top(&["--replay", &bad.display().to_string(), "--once"]);
    let lines = said(&output);
    assert_eq!(
        (output.status.code(), lines.len()),
        (Some(1), 1),
        "{lines:?}"
    );
    assert!(
        lines[0].contains("was not written by `wakeone top --record`"),
        "{lines:?}"
    );
    assert!(!lines[0].contains(char::is_control));
}

#[test]
fn what_cannot_be_is_said_in_a_sentence() {
    let folder = tempfile::tempdir().expect("folder");
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "").expect("written");
    let empty = empty.display().to_string();
    let none = folder.path().join("none").display().to_string();
    let dir = folder.path().display().to_string();
    assert!(refused(&["--replay", &empty], 1).contains("no refresh was recorded"));
    assert!(refused(&["--replay", &none], 1).contains("No such file"));
    assert!(refused(&["--replay", &dir], 1).contains("it is a folder"));
    assert!(refused(&["127.0.0.1:1", "--once"], 1).contains("nothing listens on 127.0.0.1:1"));
    assert!(refused(&[":0", "--once"], 2).contains("is no port"));
    assert!(refused(&["--interval", "1ms"], 2).contains("from 100ms to 1h"));
    assert!(refused(&["--json"], 2).contains("--once"));
    assert!(refused(&["--replay", &empty, "--record", &none], 2).contains("cannot be used with"));
}

/// A child that does not outlive a failing test. The command in its terminal then gets SIGHUP.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command in a terminal of `script`, which records everything shown in it.
struct Terminal {
    script: Ended,
    log: PathBuf,
}

impl Terminal {
    /// Starts it, and waits until the terminal shows this text.
    fn showing(until: &str, command: &str, folder: &Path) -> Self {
        let log = folder.join("typescript");
        let _ = std::fs::remove_file(&log);
        // Without a terminal of its own `script` makes one without a size.
        let command = format!("stty rows 24 cols 100; {command}");
        let script = Command::new("script")
            .args(["-qefc", &command, &log.display().to_string()])
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("script");
        let terminal = Self {
            script: Ended(script),
            log,
        };
        eventually("it shows itself", || terminal.text().contains(until));
        terminal
    }

    /// All that was shown so far.
    fn text(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the command has ended well; all that was shown.
    fn ended(mut self) -> String {
        let mut ended = None;
        support::slowly("it ends", || {
            ended = self.script.0.try_wait().expect("wait");
            ended.is_some()
        });
        assert_eq!(ended.and_then(|status| status.code()), Some(0));
        self.text()
    }
}

/// Runs a command in a terminal, does something a while later, and returns all its output.
fn in_terminal(command: &str, folder: &Path, until: &str, then: impl FnOnce(&mut Child)) -> String {
    let mut terminal = Terminal::showing(until, command, folder);
    then(&mut terminal.script.0);
    terminal.ended()
}

#[test]
fn the_terminal_is_as_it_was_however_it_ends() {
    let server = Prefork::start("accept");
    let folder = tempfile::tempdir().expect("folder");
    let (before, after) = (folder.path().join("before"), folder.path().join("after"));
    let (pid, target) = (folder.path().join("pid"), server.target());
    // The settings of the terminal before and after; the process id for signals.
    let command = format!(
        "stty -g > '{}'; sh -c 'echo $$ > {}; exec {WAKEONE} top {target}'; code=$?; stty -g > '{}'; exit $code",
        before.display(),
        pid.display(),
        after.display()
    );
    let read = |path: &Path| std::fs::read_to_string(path).expect("written");
    let own_pid = || -> u32 { read(&pid).trim().parse().expect("a pid") };
    type End<'a> = &'a dyn Fn(&mut Child);
    let ways: [(&str, End<'_>); 5] = [
        ("q", &|script| type_in(script, b"q")),
        ("Ctrl-C", &|script| type_in(script, b"\x03")),
        ("SIGTERM", &|_| signal(own_pid(), Signal::TERM)),
        ("SIGINT", &|_| signal(own_pid(), Signal::INT)),
        ("SIGHUP", &|_| signal(own_pid(), Signal::HUP)),
    ];
    for (way, end) in ways {
        let _ = std::fs::remove_file(&after);
        let text = in_terminal(&command, folder.path(), "quit", |script| end(script));
        // Out of the other screen at the very end, the cursor seen again.
        let (entered, left) = (text.rfind("\x1b[?1049h"), text.rfind("\x1b[?1049l"));
        assert!(entered.is_some() && entered < left, "{way}");
        assert!(text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h"), "{way}");
        assert_eq!(read(&before), read(&after), "{way}");
    }
}

#[test]
fn it_ends_with_its_terminal() {
    let server = Prefork::start("accept");
    let folder = tempfile::tempdir().expect("folder");
    let pid = folder.path().join("pid");
    let command = format!(
        "sh -c 'echo $$ > {}; exec {WAKEONE} top {}'",
        pid.display(),
        server.target()
    );
    let mut terminal = Terminal::showing("quit", &command, folder.path());
    let text = std::fs::read_to_string(&pid).expect("a pid file");
    let pid: u32 = text.trim().parse().expect("a pid");
    assert!(support::runs(pid));
    // The other end of the terminal is gone.
    terminal.script.0.kill().expect("kill");
    support::slowly("it ends", || !support::runs(pid));
}

fn type_in(script: &mut Child, keys: &[u8]) {
    let terminal = script.stdin.as_mut().expect("stdin");
    terminal.write_all(keys).expect("typed");
    terminal.flush().expect("typed");
}

#[test]
fn a_steered_group_is_told_and_changed_by_keys() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&WEB_BY_HASH, &PREFORKED);
    run.ready();
    let runtime = ground.runtime().display().to_string();
    let arguments = [":8080", "--no-tracing", "--runtime-dir", &runtime];
    let once = [&arguments[..], &["--once", "--interval", "200ms"]].concat();
    let text = out(&top(&once));
    assert!(text.contains("group web, policy hash"), "{text}");
    assert!(
        text.contains(" slot ") && text.contains(" moves "),
        "{text}"
    );
    let json: Value =
        serde_json::from_str(&out(&top(&[&once[..], &["--json"]].concat()))).expect("JSON");
    let steering = &json["listeners"][0]["steering"];
    assert_eq!(steering["policy"], "hash");
    assert_eq!(steering["slots"].as_array().map(Vec::len), Some(2));

    let command = format!("{WAKEONE} top {}", arguments.join(" "));
    in_terminal(&command, ground.path(), "policy", |script| {
        let policy_is = |name: &str| status(&ground, "web")["policy"] == name;
        // It asks first: with any key but yes nothing changes.
        type_in(script, b"cn");
        type_in(script, b"c");
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert!(policy_is("hash"));
        type_in(script, b"\r");
        eventually("the policy changes", || policy_is("round-robin"));
        type_in(script, b"u");
        eventually("it is as it was", || policy_is("hash"));
        type_in(script, b"jd");
        let states = || {
            let group = status(&ground, "web");
            let states = group["slots"].as_array().cloned().unwrap_or_default();
            states.iter().filter(|s| s["state"] == "draining").count()
        };
        eventually("a slot drains", || states() == 1);
        // Once the next refresh shows that the slot drains, the same key ends the drain.
        eventually("it takes connections again", || {
            type_in(script, b"d");
            std::thread::sleep(std::time::Duration::from_millis(1200));
            states() == 0
        });
        type_in(script, b"q");
    });
    run.stop();
}

#[test]
fn a_queue_is_moved_by_a_key() {
    let Some(ground) = isolated() else { return };
    let options = |rescue: &'static str| {
        let long = [
            "-w",
            "2",
            "-l",
            "127.0.0.1:8080",
            "--name",
            "web",
            "--stuck-after",
            "60s",
            rescue,
        ];
        long.to_vec()
    };
    let runtime = ground.runtime().display().to_string();
    let command = format!("{WAKEONE} top :8080 --no-tracing --runtime-dir {runtime}");
    // An agent this patient moves nothing by itself. Where rescue is off, it says so.
    for (rescue, says) in [
        ("--rescue", "connections moved from slot"),
        ("--no-rescue", "rescue is off"),
    ] {
        let mut run = ground.run(&options(rescue), &PREFORKED);
        run.ready();
        let group = status(&ground, "web");
        let stopped = support::steered::worker(&group, 0).expect("a worker");
        support::steered::stop_all(stopped);
        let waiting: Vec<TcpStream> = (0..8)
            .map(|_| TcpStream::connect("127.0.0.1:8080").expect("connect"))
            .collect();
        let queued = |slot| support::steered::number(&status(&ground, "web"), slot, "queued");
        eventually("some wait behind the stopped worker", || queued(0) > 0);
        let text = in_terminal(&command, ground.path(), "group web", |script| {
            // The keys go to each row: one is the stopped worker's, another may be the supervisor's.
            for _ in 0..3 {
                type_in(script, b"jm");
                std::thread::sleep(std::time::Duration::from_millis(400));
            }
            type_in(script, b"q");
        });
        let moved = support::steered::sum(&status(&ground, "web"), "rescued");
        assert!(text.contains(says), "{text}");
        assert_eq!(
            moved > 0,
            rescue == "--rescue",
            "{moved} moved with {rescue}"
        );
        support::steered::signal_all(stopped, Signal::CONT);
        drop(waiting);
        run.stop();
    }
}
