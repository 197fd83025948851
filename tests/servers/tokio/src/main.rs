//! tokio_server ADDRESS|fd:N current|multi: one worker on a SO_REUSEPORT listener of its own, or on an inherited listener.
//!
//! `/work?us=N` blocks its thread for N µs, as a handler that computes does. Each answer is counted in $WAKEONE_COUNT, and
//! names the process in X-Worker. SIGTERM closes the listener, and the process ends when its connections have ended.

use std::io::Write;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};

/// The longest time that connections may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);

struct Worker {
    count: Option<std::fs::File>,
    busy: AtomicUsize,
}

fn listener(from: &str) -> std::io::Result<std::net::TcpListener> {
    let listener = if let Some(number) = from.strip_prefix("fd:") {
        let number = number.parse().expect("fd:N");
        // SAFETY: the parent passed this descriptor to us, and nobody else in this process uses it.
        unsafe { std::net::TcpListener::from_raw_fd(number) }
    } else {
        let address: std::net::SocketAddr = from.parse().expect("ADDRESS");
        let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(true)?;
        socket.bind(&address.into())?;
        socket.listen(4096)?;
        socket.into()
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Answers the requests of a connection until either side closes it.
async fn serve(mut stream: TcpStream, worker: Arc<Worker>) {
    let mut request = Vec::new();
    loop {
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            match stream.read_buf(&mut request).await {
                Ok(read) if read > 0 && request.len() < 65536 => {}
                _ => return,
            }
        }
        let text = String::from_utf8_lossy(&request).to_ascii_lowercase();
        let us = text.split("us=").nth(1).and_then(|rest| rest.split([' ', '&']).next()?.parse().ok());
        let close = text.contains("connection: close");
        request.clear();
        worker.busy.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(us.unwrap_or(0)));
        if let Some(mut count) = worker.count.as_ref() {
            let _ = count.write_all(b".");
        }
        let kept = if close { "close" } else { "keep-alive" };
        let head = format!("X-Worker: {}\r\nContent-Length: 3\r\nConnection: {kept}", std::process::id());
        let sent = stream.write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\nok\n").as_bytes()).await;
        worker.busy.fetch_sub(1, Ordering::Relaxed);
        if close || sent.is_err() {
            return;
        }
    }
}

async fn run(from: String, worker: Arc<Worker>) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener(&from)?)?;
    let mut end = signal(SignalKind::terminate())?;
    println!("serving {from}");
    loop {
        tokio::select! {
            accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                tokio::spawn(serve(stream, worker.clone()));
            },
            _ = end.recv() => break,
        }
    }
    drop(listener);
    // A connection that was just accepted has its request a moment later.
    tokio::time::sleep(Duration::from_millis(50)).await;
    for _ in 0..GRACE.as_millis() / 10 {
        if worker.busy.load(Ordering::Relaxed) == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let (from, kind) = (args.next().expect("ADDRESS|fd:N"), args.next().expect("current|multi"));
    let open = |path| std::fs::OpenOptions::new().append(true).open(path);
    let count = std::env::var_os("WAKEONE_COUNT").map(open).transpose()?;
    let worker = Arc::new(Worker { count, busy: AtomicUsize::new(0) });
    let mut runtime = match &*kind {
        "current" => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    runtime.worker_threads(2).enable_all().build()?.block_on(run(from, worker))
}
