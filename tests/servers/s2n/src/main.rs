//! A server of QUIC by s2n-quic. Its socket is descriptor 3, or the one that is named:
//!
//!   s2n_server [DESCRIPTOR]
//!
//! The request is one line, `BYTES MS`. The answer is a line with the worker's number of process, and then as many bytes
//! over as many milliseconds.

use std::error::Error;
use std::net::UdpSocket;
use std::os::fd::FromRawFd;
use std::time::Duration;

use s2n_quic::provider::connection_id::{ConnectionInfo, Generator, LocalId, Validator};
use s2n_quic::provider::io::tokio::Builder;
use s2n_quic::provider::tls::rustls;
use s2n_quic::stream::BidirectionalStream;
use s2n_quic::{Connection, Server};
use tokio::io::AsyncReadExt;

/// The length of a connection ID.
const LENGTH: usize = 8;

/// Makes connection IDs that carry the worker's number, by the plaintext algorithm of QUIC-LB. Without a number they are
/// random.
struct Ids(Option<u16>);

impl Generator for Ids {
    fn generate(&mut self, _: &ConnectionInfo) -> LocalId {
        let mut id: [u8; LENGTH] = rand::random();
        if let Some(number) = self.0 {
            id[0] = LENGTH as u8 - 1;
            id[1..3].copy_from_slice(&number.to_be_bytes());
        }
        LocalId::try_from(&id[..]).expect("a connection ID")
    }
}

impl Validator for Ids {
    fn validate(&self, _: &ConnectionInfo, bytes: &[u8]) -> Option<usize> {
        (bytes.len() >= LENGTH).then_some(LENGTH)
    }
}

/// The number that `wakeone run` gives to this worker.
fn number() -> Option<u16> {
    std::env::var("WAKEONE_QUIC_ID").ok()?.parse().ok()
}

type Failed = Box<dyn Error + Send + Sync>;

/// Returns the settings of TLS, with a certificate that this process signs for itself.
fn tls() -> Result<rustls::Server, Failed> {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    rustls::Server::builder()
        .with_certificate(
            own.cert.pem().as_str(),
            own.key_pair.serialize_pem().as_str(),
        )?
        .with_application_protocols(["work"].iter())?
        .build()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failed> {
    let descriptor = std::env::args().nth(1).map_or(Ok(3), |word| word.parse())?;
    // SAFETY: it is the socket that this process was given, and nobody else uses it.
    let socket = unsafe { UdpSocket::from_raw_fd(descriptor) };
    let mut server = Server::builder()
        .with_tls(tls()?)?
        .with_io(Builder::default().with_rx_socket(socket)?.build()?)?
        .with_connection_id(Ids(number()))?
        .start()?;
    while let Some(connection) = server.accept().await {
        tokio::spawn(serve(connection));
    }
    Ok(())
}

async fn serve(mut connection: Connection) {
    while let Ok(Some(stream)) = connection.accept_bidirectional_stream().await {
        tokio::spawn(answer(stream));
    }
}

async fn answer(mut stream: BidirectionalStream) -> Option<()> {
    let mut request = String::new();
    stream.read_to_string(&mut request).await.ok()?;
    let mut words = request.split_whitespace();
    let mut number = || words.next()?.parse::<u64>().ok();
    let (bytes, ms) = (number()?, number()?);
    let line = format!("{}\n", std::process::id());
    stream.send(line.into()).await.ok()?;
    let parts = (ms / 10).max(1);
    for part in 0..parts {
        let size = bytes * (part + 1) / parts - bytes * part / parts;
        stream.send(vec![b'a'; size as usize].into()).await.ok()?;
        if ms > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    stream.finish().ok()
}
