//! `wakeone top --from`: the groups of many machines, by the metrics that their agents serve. It reads, and changes nothing.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Deserialize;
use wakeone_model::layout::Style;
use wakeone_terminal::{style, to_json};
use wakeone_top::fleet::{self, Fleet, Sample};

use super::{Args, screen::Screen, wrote};

/// A machine has this long to answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// An answer is no longer.
const MOST_BYTES: u64 = 64 << 20;
/// All metrics of ours.
const QUERY: &str = "/api/v1/query?query=%7B__name__%3D~%22wakeone_.%2B%22%7D";

/// Where metrics come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct From {
    /// As it is shown.
    name: String,
    /// HOST:PORT.
    authority: String,
    path: String,
    is_prometheus: bool,
}

impl FromStr for From {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (url, is_prometheus) = match text.strip_prefix("prometheus:") {
            Some(url) => (url, true),
            None => (text, false),
        };
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            None => url,
            Some((scheme, _)) => {
                return Err(format!(
                    "'{scheme}' is not spoken here: give an http:// URL"
                ));
            }
        };
        let (authority, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let port = authority
            .rsplit_once(':')
            .and_then(|(_, port)| port.parse::<u16>().ok());
        let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if port.is_none() || !is_plain(rest) {
            return Err(format!(
                "'{}' names no port: give HOST:PORT of an agent's metrics, or prometheus:http://HOST:PORT",
                text.escape_default()
            ));
        }
        let prefix = prefix.trim_end_matches('/');
        Ok(Self {
            name: authority.to_owned(),
            authority: authority.to_owned(),
            path: match (is_prometheus, prefix) {
                (true, prefix) => format!("{prefix}{QUERY}"),
                (false, "") => "/metrics".to_owned(),
                (false, path) => path.to_owned(),
            },
            is_prometheus,
        })
    }
}

impl From {
    fn samples(&self) -> Result<Vec<Sample>, String> {
        let body = self.get().map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&body);
        match self.is_prometheus {
            true => queried(&text),
            false => Ok(fleet::parse(&text)),
        }
    }

    /// Asks by HTTP/1.0: the answer ends with the connection, and has no chunks.
    fn get(&self) -> std::io::Result<Vec<u8>> {
        let other = |why: String| std::io::Error::other(why);
        let until = Instant::now() + PATIENCE;
        let address = self.authority.to_socket_addrs()?.next();
        let address = address.ok_or_else(|| other("it has no address".into()))?;
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let request = format!(
            "GET {} HTTP/1.0\r\nHost: {}\r\nAccept: application/openmetrics-text, application/json\r\n\r\n",
            self.path, self.authority
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        let mut chunk = [0; 64 << 10];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(other("it did not answer in time".into()));
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut chunk)? {
                0 => break,
                count => answer.extend_from_slice(&chunk[..count]),
            }
            if answer.len() as u64 > MOST_BYTES {
                return Err(other("its answer is too long".into()));
            }
        }
        body_of(&answer).map_err(other)
    }
}

/// The body of a whole answer.
fn body_of(answer: &[u8]) -> Result<Vec<u8>, String> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Response::new(&mut headers);
    match head.parse(answer) {
        Ok(httparse::Status::Complete(length)) if head.code == Some(200) => {
            Ok(answer[length..].to_vec())
        }
        Ok(httparse::Status::Complete(_)) => Err(format!("it answers {}", head.code.unwrap_or(0))),
        _ => Err("it does not answer by HTTP".to_owned()),
    }
}

/// The answer of a Prometheus server to a query.
#[derive(Deserialize)]
struct Queried {
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    result: Vec<Series>,
}

#[derive(Deserialize)]
struct Series {
    metric: std::collections::BTreeMap<String, String>,
    value: (f64, String),
}

fn queried(text: &str) -> Result<Vec<Sample>, String> {
    let answer: Queried = serde_json::from_str(text)
        .map_err(|error| format!("it does not answer as a Prometheus server does: {error}"))?;
    let sample = |mut series: Series| {
        let name = series.metric.remove("__name__")?;
        let value = series.value.1.parse().ok()?;
        Some(Sample::new(&name, series.metric, value))
    };
    Ok(answer.data.result.into_iter().filter_map(sample).collect())
}

/// Asks all at the same time.
fn ask(all: &[From]) -> Vec<(String, Result<Vec<Sample>, String>)> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = all
            .iter()
            .map(|one| (one, scope.spawn(|| one.samples())))
            .collect();
        let answer = |(one, thread): (&From, std::thread::ScopedJoinHandle<'_, _>)| {
            let failed = |_| Err("asking failed".to_owned());
            (one.name.clone(), thread.join().unwrap_or_else(failed))
        };
        asked.into_iter().map(answer).collect()
    })
}

/// Prints each look as text, until told to stop or the reader has ended. Rates take two looks.
pub fn as_text(args: &Args, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut fleet = Fleet::default();
    let mut looked = Instant::now();
    fleet.look(&ask(&args.from), 0.0);
    loop {
        if !sleep(args.interval, stop) && !args.once {
            return Ok(());
        }
        let answers = ask(&args.from);
        let rows = fleet.look(&answers, looked.elapsed().as_secs_f64());
        looked = Instant::now();
        let text = match args.json {
            true => to_json(&serde_json::json!({ "groups": rows }))?,
            false => fleet::text(&rows, style()),
        };
        if !wrote(&text)? || args.once {
            return Ok(());
        }
        wrote("\n")?;
    }
}

/// Sleeps; false if told to stop meanwhile.
fn sleep(time: Duration, stop: &AtomicBool) -> bool {
    let until = Instant::now() + time;
    while Instant::now() < until && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(50).min(time));
    }
    !stop.load(Ordering::Relaxed)
}

/// Shows each look on the terminal until the user quits.
pub fn on_screen(from: &[From], interval: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut fleet = Fleet::default();
    let mut screen = Screen::open()?;
    let mut looked = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let rows = fleet.look(&ask(from), looked.elapsed().as_secs_f64());
        looked = Instant::now();
        let columns = ratatui::crossterm::terminal::size().map_or(80, |(columns, _)| columns);
        let shown = Style {
            width: Some(columns.into()),
            colour: false,
        };
        screen.text(&format!("{}\nq ends", fleet::text(&rows, shown)))?;
        if screen.quits(interval)? {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_named_by_address_or_by_a_prometheus_server() {
        let from = |text: &str| text.parse::<From>().expect(text);
        let node = from("node1:9464");
        assert_eq!(
            (node.authority.as_str(), node.path.as_str()),
            ("node1:9464", "/metrics")
        );
        assert_eq!(from("http://[::1]:9464/m").path, "/m");
        let prometheus = from("prometheus:http://127.0.0.1:9090/prefix/");
        assert!(prometheus.is_prometheus && prometheus.path.starts_with("/prefix/api/v1/query?"));
        for bad in [
            "",
            "node",
            "node:",
            "node:x",
            "https://node:1",
            "a b:1",
            "node:1/\r\nX: y",
        ] {
            assert!(bad.parse::<From>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_answer_must_be_whole_and_good() {
        assert_eq!(
            body_of(b"HTTP/1.0 200 OK\r\n\r\nx 1\n").expect("a body"),
            b"x 1\n"
        );
        assert!(
            body_of(b"HTTP/1.0 404 Not Found\r\n\r\n")
                .expect_err("no")
                .contains("404")
        );
        for bad in [&b""[..], b"HTTP/1.0 200 OK\r\n", b"SSH-2.0\r\n\r\n"] {
            assert!(body_of(bad).expect_err("no").contains("by HTTP"));
        }
    }

    #[test]
    fn a_prometheus_server_answers_with_json() {
        let text = r#"{"status":"success","data":{"resultType":"vector","result":[{"metric":{"__name__":"wakeone_group_agent","group":"web","instance":"a:1"},"value":[1.5,"1"]},{"metric":{},"value":[1,"x"]}]}}"#;
        let samples = queried(text).expect("an answer");
        assert_eq!(samples.len(), 1);
        assert_eq!(samples[0].labels["instance"], "a:1");
        assert!(queried("{}").expect_err("no").contains("Prometheus"));
    }
}
