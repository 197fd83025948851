//! nginx as a server under test: whether it is here, and how many requests it has counted.
//!
//! The count is that of its `ngx_http_stub_status_module`. Where that is built in, nginx counts each request over all
//! workers when it has the request's first bytes, whether anybody asks or not. The count lies in shared memory that
//! outlives a reload. So it is the same kind of count as that of `wakeone-lab serve --counter`, and one read of it costs
//! nothing that is measured.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use crate::error::Error;
use crate::launch::{Counted, Launch, Ready};
use crate::{apps, probe, process};

/// The path at which nginx reports the count.
const PATH: &str = "/.requests";

/// The executable, or why nginx cannot be measured here.
pub fn program() -> Result<PathBuf, String> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    FOUND.get_or_init(find).clone()
}

fn find() -> Result<PathBuf, String> {
    let program = process::program("nginx").ok_or("nginx is not installed")?;
    let told = Command::new(&program)
        .arg("-V")
        .output()
        .map_err(|e| format!("nginx does not start: {e}"))?;
    if String::from_utf8_lossy(&told.stderr).contains("--with-http_stub_status_module") {
        Ok(program)
    } else {
        Err("nginx is built without http_stub_status_module, with which it counts requests".into())
    }
}

/// The differences between the servers under test. None writes a log of accesses, and all listen with the same backlog.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    /// Worker processes.
    pub workers: usize,
    /// The options after the address in `listen`: `reuseport`.
    pub listen: &'static str,
    /// Directives outside of all blocks.
    pub main: String,
    /// Directives of `events`.
    pub events: &'static str,
    /// Directives of `http`.
    pub http: &'static str,
    /// Directives of the one `server`.
    pub server: String,
    /// Files beside the configuration.
    pub files: Vec<(&'static str, String)>,
}

/// The configuration's name.
pub const FILE: &str = "nginx.conf";

impl Setup {
    /// One that answers `/work` by a handler that blocks its worker for as long as a request says.
    ///
    /// # Errors
    /// When there is no perl module.
    pub fn blocking(workers: usize) -> Result<Self, Error> {
        let module = perl_module().map_err(Error::Missing)?;
        Ok(Self {
            workers,
            main: format!("load_module {};", module.display()),
            http: "perl_modules {dir}; perl_require Work.pm; keepalive_timeout 0;",
            server: "location = /work { perl Work::handler; }".into(),
            files: vec![("Work.pm", apps::text("Work.pm").into())],
            ..Self::default()
        })
    }

    /// The server that it makes.
    pub fn launch(&self, what: String) -> Launch {
        let mut files = self.files.clone();
        files.push((FILE, self.text()));
        Launch {
            what,
            line: format!("nginx -p {{dir}} -c {{dir}}/{FILE} -e stderr"),
            files,
            ready: Ready {
                // At the level `notice` the master logs when it starts its workers.
                said: Some(("start worker process ", self.workers)),
                workers: self.workers,
                ..Ready::default()
            },
            counted: Counted::ByNginx,
            ..Launch::default()
        }
    }

    /// The configuration, as a file of a [`Launch`].
    pub fn text(&self) -> String {
        let Self {
            workers,
            listen,
            main,
            events,
            http,
            server,
            ..
        } = self;
        format!(
            "daemon off;
worker_processes {workers};
pid {{dir}}/pid;
error_log stderr notice;
{main}
events {{ worker_connections 8192; {events} }}
http {{
  access_log off;
  client_body_temp_path {{dir}}/b; proxy_temp_path {{dir}}/p; fastcgi_temp_path {{dir}}/f;
  uwsgi_temp_path {{dir}}/u; scgi_temp_path {{dir}}/s;
  {http}
  server {{ listen {{address}} {listen} backlog={{backlog}}; {server} location = {PATH} {{ stub_status; }} }}
}}
"
        )
    }
}

/// The path of the perl module, or the reason why no handler can block a worker here.
pub fn perl_module() -> Result<PathBuf, String> {
    let program = program()?;
    let told = Command::new(program)
        .arg("-V")
        .output()
        .map_err(|e| format!("nginx does not start: {e}"))?;
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    let folders = told
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("--modules-path="));
    folders
        .map(|folder| PathBuf::from(folder).join("ngx_http_perl_module.so"))
        .find(|module| module.exists())
        .ok_or_else(|| {
            "nginx's perl module (libnginx-mod-http-perl) is not installed, and without it no handler can block a worker".into()
        })
}

/// The number of requests that nginx has counted so far, without the one that asks.
///
/// # Errors
/// When nginx does not give the number.
pub fn requests(address: SocketAddr) -> Result<u64, Error> {
    let text = probe::body(address, PATH)?;
    let all = parse(&text).ok_or_else(|| {
        Error::Server(format!(
            "nginx tells no number of requests; it says: {}",
            text.trim()
        ))
    })?;
    Ok(all.saturating_sub(1))
}

/// The last of the three counts (accepted, handled, requests) below their names.
fn parse(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    lines.find(|line| line.trim() == "server accepts handled requests")?;
    let counts: Vec<u64> = lines
        .next()?
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()
        .ok()?;
    <[u64; 3]>::try_from(counts).ok().map(|counts| counts[2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_requests_is_read_and_no_other() {
        let text = "Active connections: 3 \nserver accepts handled requests\n 10 11 42 \nReading: 0 Writing: 1 Waiting: 2 \n";
        assert_eq!(parse(text), Some(42));
        for other in [
            "",
            "ok\n",
            "server accepts handled requests\n",
            "server accepts handled requests\n 10 11 \n",
            "server accepts handled requests\n 10 11 x \n",
            "server accepts handled requests request_time\n 10 11 42 7 \n",
        ] {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }
}
