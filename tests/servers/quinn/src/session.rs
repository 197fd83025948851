//! A client asks a server over one connection: for a download of the protocol `work`, or for a path by HTTP/3.

use std::future::poll_fn;
use std::time::Duration;

use bytes::{Buf, Bytes};
use h3::client::SendRequest;
use h3_quinn::OpenStreams;
use http::{Request, StatusCode, header::CONTENT_LENGTH};
use quinn::Connection;

pub type Failed = Box<dyn std::error::Error + Send + Sync>;

pub enum Session {
    Work(Connection),
    Http3(SendRequest<OpenStreams, Bytes>, String),
}

impl Session {
    pub async fn begin(connection: Connection, path: Option<&str>) -> Result<Self, Failed> {
        let Some(path) = path else {
            return Ok(Self::Work(connection));
        };
        let (mut driver, sender) = h3::client::new(h3_quinn::Connection::new(connection)).await?;
        tokio::spawn(async move { poll_fn(|context| driver.poll_close(context)).await });
        Ok(Self::Http3(sender, format!("https://localhost{path}")))
    }

    /// Asks for so many bytes over some time, or for the path. Returns the worker that answered.
    pub async fn ask(&mut self, bytes: usize, length: Duration) -> Result<String, Failed> {
        match self {
            Self::Work(connection) => download(connection, bytes, length).await,
            Self::Http3(sender, uri) => get(sender, uri).await,
        }
    }
}

async fn download(
    connection: &Connection,
    bytes: usize,
    length: Duration,
) -> Result<String, Failed> {
    let (mut send, mut receive) = connection.open_bi().await?;
    send.write_all(format!("{bytes} {}\n", length.as_millis()).as_bytes())
        .await?;
    send.finish()?;
    let answer = receive.read_to_end(1 << 26).await?;
    let end = answer
        .iter()
        .position(|byte| *byte == b'\n')
        .ok_or("an answer without a line")?;
    check_length(answer.len() - end - 1, bytes)?;
    Ok(String::from_utf8_lossy(&answer[..end]).into_owned())
}

async fn get(sender: &mut SendRequest<OpenStreams, Bytes>, uri: &str) -> Result<String, Failed> {
    let mut stream = sender.send_request(Request::get(uri).body(())?).await?;
    stream.finish().await?;
    let answer = stream.recv_response().await?;
    if answer.status() != StatusCode::OK {
        return Err(format!("status {}", answer.status()).into());
    }
    let mut bytes = 0;
    while let Some(part) = stream.recv_data().await? {
        bytes += part.remaining();
    }
    if let Some(announced) = answer.headers().get(CONTENT_LENGTH) {
        check_length(bytes, announced.to_str()?.parse()?)?;
    }
    let worker = answer
        .headers()
        .get("x-worker")
        .ok_or("an answer without the header worker")?;
    Ok(worker.to_str()?.to_owned())
}

fn check_length(bytes: usize, expected: usize) -> Result<(), Failed> {
    if bytes == expected {
        Ok(())
    } else {
        Err(format!("{bytes} bytes of {expected}").into())
    }
}
