//! `wakeone doctor` reports the accept model of real servers. All of them run in one network namespace, with some load,
//! and doctor looks at all of them at once.
//!
//! A server that is not installed is skipped, with a message.

#[path = "support/mod.rs"]
mod support;

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::real::{Started, installed, program};
use support::{WAKEONE, eventually, is_root, server};

/// A server to start, and the accept models that doctor must report.
struct Case {
    name: &'static str,
    port: u16,
    /// `(protocol, accept model)` of each listener on the port.
    expected: &'static [(&'static str, &'static str)],
    /// The program that must be installed.
    needs: &'static str,
    command: fn(&Path, u16) -> Command,
}

/// Writes a configuration for one server, and returns its path.
fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("configuration");
    path.display().to_string()
}

fn nginx(folder: &Path, port: u16, listen: &str, events: &str) -> Command {
    let here = folder.display();
    let text = format!(
        "daemon off; user root; worker_processes 4; pid {here}/nginx-{port}.pid; error_log {here}/nginx-{port}.log;
         events {{ worker_connections 256; {events} }}
         http {{ access_log off; client_body_temp_path {here}/b{port}; proxy_temp_path {here}/p{port};
                fastcgi_temp_path {here}/f{port}; uwsgi_temp_path {here}/u{port}; scgi_temp_path {here}/s{port};
                server {{ listen 127.0.0.1:{port} {listen}; location / {{ return 200 ok; }} }} }}"
    );
    program(&[
        "nginx",
        "-c",
        &file(folder, &format!("nginx-{port}.conf"), &text),
    ])
}

fn haproxy(folder: &Path, port: u16, bind: &str) -> Command {
    let text = format!(
        "global\n nbthread 4\ndefaults\n mode http\n timeout client 5s\n timeout server 5s\n timeout connect 5s\n\
         frontend f\n bind 127.0.0.1:{port} {bind}\n http-request return status 200\n"
    );
    program(&[
        "haproxy",
        "-db",
        "-f",
        &file(folder, &format!("haproxy-{port}.cfg"), &text),
    ])
}

fn gunicorn(port: u16, options: &[&str]) -> Command {
    let app = server("app.py");
    let mut command = program(&["gunicorn", "-w", "3", "--log-level", "error"]);
    command
        .args(["--bind", &format!("127.0.0.1:{port}")])
        .args(["--chdir", app.trim_end_matches("app.py")])
        .args(options)
        .arg("app:wsgi")
        .env("WAKEONE_SLOT", "0");
    command
}

fn prefork(port: u16, mode: &str) -> Command {
    program(&[
        "python3",
        &server("prefork.py"),
        mode,
        &port.to_string(),
        "3",
    ])
}

fn apache(folder: &Path, port: u16, mpm: &str, listens: &[u16]) -> Command {
    let here = folder.display();
    let listens: String = listens
        .iter()
        .map(|p| format!("Listen 127.0.0.1:{p}\n"))
        .collect();
    let text = format!(
        "ServerRoot {here}\nPidFile {here}/apache-{port}.pid\nErrorLog {here}/apache-{port}.log\nServerName localhost\n\
         DefaultRuntimeDir {here}\nDocumentRoot {here}\nLoadModule mpm_{mpm}_module /usr/lib/apache2/modules/mod_mpm_{mpm}.so\n\
         LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so\n\
         StartServers 3\nMinSpareServers 3\nMaxSpareServers 6\nMinSpareThreads 5\nMaxSpareThreads 500\n{listens}"
    );
    // `MinSpareServers` is a directive of the prefork module, `MinSpareThreads` of the event module.
    let foreign = if mpm == "prefork" {
        "SpareThreads"
    } else {
        "SpareServers"
    };
    let text: Vec<&str> = text
        .lines()
        .filter(|line| !line.contains(foreign))
        .collect();
    let conf = file(
        folder,
        &format!("apache-{port}.conf"),
        &(text.join("\n") + "\n"),
    );
    program(&["apache2", "-DFOREGROUND", "-f", &conf])
}

fn php_fpm(folder: &Path, port: u16) -> Command {
    let here = folder.display();
    let text = format!(
        "[global]\npid = {here}/fpm.pid\nerror_log = {here}/fpm.log\ndaemonize = no\n\
         [www]\nuser = root\ngroup = root\nlisten = 127.0.0.1:{port}\npm = static\npm.max_children = 3\n"
    );
    program(&[
        "php-fpm8.2",
        "-R",
        "-F",
        "-y",
        &file(folder, "fpm.conf", &text),
    ])
}

fn unbound(folder: &Path, port: u16) -> Command {
    let here = folder.display();
    let text = format!(
        "server:\n num-threads: 3\n interface: 127.0.0.1@{port}\n so-reuseport: yes\n do-daemonize: no\n chroot: \"\"\n\
         username: \"\"\n directory: \"{here}\"\n pidfile: \"{here}/unbound.pid\"\n use-syslog: no\n logfile: \"{here}/unbound.log\"\n\
         remote-control:\n control-enable: no\n"
    );
    program(&["unbound", "-c", &file(folder, "unbound.conf", &text)])
}

fn go(folder: &Path, port: u16) -> Command {
    let binary = folder.join("go-server");
    let built = program(&["go", "build", "-o"])
        .arg(&binary)
        .arg(server("go/main.go"))
        .env("GOFLAGS", "-mod=mod")
        .env("GO111MODULE", "off")
        .status();
    assert!(built.expect("go").success());
    let mut command = Command::new(binary);
    // This is Go's default from 1.24 on.
    command
        .arg(format!("127.0.0.1:{port}"))
        .env("GODEBUG", "multipathtcp=1");
    command
}

const TCP: &str = "tcp";

fn cases() -> Vec<Case> {
    let case = |name, port, expected, needs, command| Case {
        name,
        port,
        expected,
        needs,
        command,
    };
    vec![
        case(
            "nginx",
            7001,
            &[(TCP, "shared-epoll-exclusive")],
            "nginx",
            |f, p| nginx(f, p, "", ""),
        ),
        case(
            "nginx accept_mutex",
            7002,
            &[(TCP, "accept-mutex")],
            "nginx",
            |f, p| nginx(f, p, "", "accept_mutex on; accept_mutex_delay 5ms;"),
        ),
        case(
            "nginx reuseport",
            7003,
            &[(TCP, "socket-per-worker")],
            "nginx",
            |f, p| nginx(f, p, "reuseport", ""),
        ),
        case(
            "haproxy",
            7004,
            &[(TCP, "threads-epoll-wake-all")],
            "haproxy",
            |f, p| haproxy(f, p, ""),
        ),
        case(
            "haproxy shards by-thread",
            7005,
            &[(TCP, "socket-per-thread")],
            "haproxy",
            |f, p| haproxy(f, p, "shards by-thread"),
        ),
        case(
            "gunicorn sync",
            7006,
            &[(TCP, "shared-poll")],
            "gunicorn",
            |_, p| gunicorn(p, &[]),
        ),
        case(
            "gunicorn gthread",
            7007,
            &[(TCP, "shared-epoll-wake-all")],
            "gunicorn",
            |_, p| gunicorn(p, &["-k", "gthread", "--threads", "4"]),
        ),
        case(
            "gunicorn --reuse-port",
            7008,
            &[(TCP, "socket-per-worker")],
            "gunicorn",
            |_, p| gunicorn(p, &["--reuse-port"]),
        ),
        case(
            "uvicorn --workers",
            7009,
            &[(TCP, "shared-epoll-wake-all")],
            "uvicorn",
            |_, p| {
                let app = server("app.py");
                let mut command = program(&["uvicorn", "--workers", "3", "--log-level", "error"]);
                command
                    .args([
                        "--port",
                        &p.to_string(),
                        "--app-dir",
                        app.trim_end_matches("app.py"),
                        "app:asgi",
                    ])
                    .env("WAKEONE_SLOT", "0");
                command
            },
        ),
        case(
            "node cluster, round robin",
            7010,
            &[(TCP, "passes-descriptors")],
            "node",
            |_, p| program(&["node", &server("cluster.js"), &p.to_string(), "rr", "3"]),
        ),
        case(
            "node cluster, none",
            7011,
            &[(TCP, "shared-epoll-wake-all")],
            "node",
            |_, p| program(&["node", &server("cluster.js"), &p.to_string(), "none", "3"]),
        ),
        case(
            "Apache prefork",
            7012,
            &[(TCP, "shared-epoll-wake-all")],
            "apache2",
            |f, p| apache(f, p, "prefork", &[p]),
        ),
        case(
            "Apache prefork, two Listens",
            7013,
            &[(TCP, "accept-mutex")],
            "apache2",
            |f, p| apache(f, p, "prefork", &[p, p + 100]),
        ),
        case(
            "Apache event",
            7014,
            &[(TCP, "shared-epoll-wake-all")],
            "apache2",
            |f, p| apache(f, p, "event", &[p]),
        ),
        case(
            "php-fpm",
            7015,
            &[(TCP, "shared-accept")],
            "php-fpm8.2",
            php_fpm,
        ),
        case(
            "redis",
            7016,
            &[(TCP, "single-epoll")],
            "redis-server",
            |f, p| {
                let mut command = program(&[
                    "redis-server",
                    "--save",
                    "",
                    "--bind",
                    "127.0.0.1",
                    "--port",
                ]);
                command
                    .arg(p.to_string())
                    .args(["--dir", &f.display().to_string()]);
                command
            },
        ),
        case(
            "memcached",
            7017,
            &[(TCP, "hands-to-threads")],
            "memcached",
            |_, p| {
                program(&[
                    "memcached",
                    "-u",
                    "root",
                    "-U",
                    "0",
                    "-l",
                    "127.0.0.1",
                    "-t",
                    "4",
                    "-p",
                    &p.to_string(),
                ])
            },
        ),
        case(
            "unbound so-reuseport",
            7018,
            &[("udp", "socket-per-thread"), (TCP, "socket-per-thread")],
            "unbound",
            unbound,
        ),
        case("Go", 7019, &[("mptcp", "single-epoll-edge")], "go", go),
        case(
            "Python accept",
            7020,
            &[(TCP, "shared-accept")],
            "python3",
            |_, p| prefork(p, "accept"),
        ),
        case(
            "Python epoll",
            7021,
            &[(TCP, "shared-epoll-wake-all")],
            "python3",
            |_, p| prefork(p, "epoll"),
        ),
        case(
            "Python EPOLLEXCLUSIVE",
            7022,
            &[(TCP, "shared-epoll-exclusive")],
            "python3",
            |_, p| prefork(p, "exclusive"),
        ),
        case(
            "Python poll",
            7023,
            &[(TCP, "shared-poll")],
            "python3",
            |_, p| prefork(p, "poll"),
        ),
        case(
            "Python select",
            7024,
            &[(TCP, "shared-poll")],
            "python3",
            |_, p| prefork(p, "select"),
        ),
    ]
}

fn start(case: &Case, folder: &Path) -> Option<Started> {
    if !installed(case.needs) {
        eprintln!("skipped: {} is not installed", case.needs);
        return None;
    }
    Some(Started::spawn((case.command)(folder, case.port)))
}

/// Sends one request, and ignores the answer.
fn knock(port: u16) {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) else {
        return;
    };
    let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
    let _ = stream.write_all(b"GET / HTTP/1.0\r\n\r\n");
    let _ = stream.read(&mut [0; 64]);
}

#[test]
fn real_servers_are_told_by_their_accept_model() {
    if !is_root() {
        return eprintln!("skipped: a network namespace needs root");
    }
    wakeone_kernel::netns::isolate().expect("network namespace");
    let folder = tempfile::tempdir().expect("folder");
    let cases = cases();
    let started: Vec<(&Case, Started)> = cases
        .iter()
        .filter_map(|case| Some((case, start(case, folder.path())?)))
        .collect();
    for (case, _) in &started {
        eventually(&format!("{} listens", case.name), || {
            TcpStream::connect(("127.0.0.1", case.port)).is_ok()
        });
    }
    // Workers start after the socket listens.
    std::thread::sleep(Duration::from_secs(3));
    let ports: Vec<u16> = started.iter().map(|(case, _)| case.port).collect();
    let found = watched_under_load(&ports);
    let mut wrong = Vec::new();
    for (case, _) in &started {
        for (protocol, model) in case.expected {
            let key = (case.port, (*protocol).to_owned());
            match found.get(&key) {
                Some(report) if report["accept_model"] == *model => {}
                Some(report) => wrong.push(format!(
                    "{}: {} instead of {model}; {}",
                    case.name, report["accept_model"], report["model"]["evidence"]
                )),
                None => wrong.push(format!("{}: no {protocol} listener was found", case.name)),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(started.len() > 4, "hardly any server is installed");
}

/// Returns doctor's report for each port and protocol, with a little load on all of them.
fn watched_under_load(ports: &[u16]) -> BTreeMap<(u16, String), Value> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                ports.iter().for_each(|port| knock(*port));
            }
        });
        let output = Command::new(WAKEONE)
            .args(["doctor", "--for", "4s", "--json"])
            .output()
            .expect("doctor");
        stop.store(true, Ordering::Relaxed);
        let code = output.status.code();
        assert!(
            matches!(code, Some(0 | 3)),
            "{code:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let whole: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let listeners = whole["listeners"].as_array().expect("listeners").clone();
        listeners
            .into_iter()
            .map(|report| {
                let address: SocketAddr = report["address"]
                    .as_str()
                    .expect("address")
                    .parse()
                    .expect("address");
                let protocol = report["protocol"].as_str().expect("protocol").to_owned();
                ((address.port(), protocol), report)
            })
            .collect()
    })
}
