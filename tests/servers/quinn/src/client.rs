//! A client of QUIC. It prints a line for each connection: the worker that answered, or `failed: WHY`.
//!
//!   quinn_client ADDRESS CONNECTIONS [bytes=N] [ms=N] [moves=N] [rebind] [path=/PATH] [apart=MS]
//!
//! Each connection has a socket of its own, and gets `bytes` over `ms` milliseconds, by the protocol of `quinn_server`.
//! By `path` it gets that path by HTTP/3 instead, and the worker is the answer's header `x-worker`.
//!
//! After the download a client changes its address `moves` times, as one that knows it does: with another connection
//! ID (RFC 9000 §9.5). After each change it asks again, and the same worker must answer. With `rebind` all clients are
//! behind a NAT, which changes their ports once in the middle of the download.
//!
//! Connections are opened `apart` milliseconds apart, or at once without it. Without `ms` 64 are open at a time.

mod nat;
mod options;
mod session;
mod tls;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use options::Options;
use quinn::Endpoint;
use session::{Failed, Session};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

/// How long each step may take, beside the download's own time.
const PATIENCE: Duration = Duration::from_secs(20);
/// As many connections are open at a time, unless downloads take long.
const AT_A_TIME: usize = 64;
/// The server sees a client's address that often, also while the client only receives.
const KEEP_ALIVE: Duration = Duration::from_millis(200);

/// A free port beside the server.
fn any_port(server: SocketAddr) -> SocketAddr {
    match server {
        SocketAddr::V4(_) => (Ipv4Addr::LOCALHOST, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::LOCALHOST, 0).into(),
    }
}

/// Waits for one step of a connection, and says which one took too long.
async fn within<T, E: Into<Failed>>(
    limit: Duration,
    step: &str,
    done: impl Future<Output = Result<T, E>>,
) -> Result<T, Failed> {
    match timeout(limit, done).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(format!("too late: {step}").into()),
    }
}

/// Opens one connection, asks, and moves. Returns the worker that answered.
async fn one(to: SocketAddr, options: &Options) -> Result<String, Failed> {
    let own = any_port(to);
    let protocol: &[u8] = if options.path.is_some() {
        b"h3"
    } else {
        b"work"
    };
    let keep_alive = (!options.length.is_zero()).then_some(KEEP_ALIVE);
    let mut endpoint = Endpoint::client(own)?;
    endpoint.set_default_client_config(tls::config(protocol, keep_alive));
    let connection = within(PATIENCE, "handshake", endpoint.connect(to, "localhost")?).await?;
    let mut session = Session::begin(connection.clone(), options.path.as_deref()).await?;
    let asked = session.ask(options.bytes, options.length);
    let worker = within(PATIENCE + options.length, "answer", asked).await?;
    for number in 1..=options.moves {
        endpoint.rebind(UdpSocket::bind(own)?)?;
        let step = format!("answer after move {number}");
        let now = within(PATIENCE, &step, session.ask(1, Duration::ZERO)).await?;
        if now != worker {
            return Err(format!("move {number} leads from {worker} to {now}").into());
        }
    }
    connection.close(0_u8.into(), b"");
    // The close is sent in the meantime.
    let _ = timeout(Duration::from_secs(1), endpoint.wait_idle()).await;
    Ok(worker)
}

/// Opens one connection when it is its turn. Returns the line that tells how it went.
async fn told(number: u32, to: SocketAddr, options: Arc<Options>, room: Arc<Semaphore>) -> String {
    sleep(options.apart * number).await;
    let _turn = room.acquire().await;
    one(to, &options)
        .await
        .unwrap_or_else(|error| format!("failed: {error}"))
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let options = Arc::new(Options::read(std::env::args().skip(1)));
    let to = if options.rebind {
        nat::before(options.server, options.middle()).expect("a NAT")
    } else {
        options.server
    };
    let at_a_time = if options.length.is_zero() {
        AT_A_TIME
    } else {
        options.connections as usize
    };
    let room = Arc::new(Semaphore::new(at_a_time));
    let mut all = tokio::task::JoinSet::new();
    for number in 0..options.connections {
        all.spawn(told(number, to, Arc::clone(&options), Arc::clone(&room)));
    }
    while let Some(line) = all.join_next().await {
        println!(
            "{}",
            line.unwrap_or_else(|error| format!("failed: {error}"))
        );
    }
}
