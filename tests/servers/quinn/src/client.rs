//! A client of `quinn_server`. Prints a line for each connection: the worker that answered, or why none did.
//!
//!   quinn_client ADDRESS CONNECTIONS BYTES MS MOVES
//!
//! Each connection has a socket of its own, and gets `BYTES` over `MS` milliseconds. Then it changes its address `MOVES`
//! times, as a client that knows it does: with another connection ID (RFC 9000 §9.5). After each change it asks again.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Connection, Endpoint, TransportConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// As many connections are opened at a time.
const AT_A_TIME: usize = 64;

/// The server's certificate is its own: anybody's will do.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::ring::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

fn config() -> ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody))
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"work".to_vec()];
    let tls = QuicClientConfig::try_from(tls).expect("ciphers of QUIC");
    let mut config = ClientConfig::new(Arc::new(tls));
    let mut transport = TransportConfig::default();
    // A path that is lost shows soon.
    transport.max_idle_timeout(Some(Duration::from_secs(8).try_into().expect("a time")));
    config.transport_config(Arc::new(transport));
    config
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

async fn ask(connection: &Connection, request: &str) -> Result<String, Failed> {
    let (mut send, mut receive) = connection.open_bi().await?;
    send.write_all(request.as_bytes()).await?;
    send.finish()?;
    let answer = receive.read_to_end(1 << 26).await?;
    let end = answer.iter().position(|byte| *byte == b'\n').unwrap_or(0);
    Ok(String::from_utf8_lossy(&answer[..end]).into_owned())
}

async fn one(to: SocketAddr, request: &str, moves: usize) -> Result<String, Failed> {
    let own: SocketAddr = if to.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" }.parse()?;
    let mut endpoint = Endpoint::client(own)?;
    endpoint.set_default_client_config(config());
    let connection = endpoint.connect(to, "localhost")?.await?;
    let worker = ask(&connection, request).await?;
    for number in 0..moves {
        endpoint.rebind(UdpSocket::bind(own)?)?;
        let now = ask(&connection, "1 0").await?;
        if now != worker {
            return Err(format!("move {number} leads from {worker} to {now}").into());
        }
    }
    connection.close(0_u8.into(), b"");
    endpoint.wait_idle().await;
    Ok(worker)
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let to: SocketAddr = arguments.next().expect("ADDRESS").parse().expect("ADDRESS");
    let mut number = || -> usize { arguments.next().expect("a number").parse().expect("a number") };
    let (connections, bytes, ms, moves) = (number(), number(), number(), number());
    let request: Arc<str> = format!("{bytes} {ms}").into();
    let room = Arc::new(tokio::sync::Semaphore::new(AT_A_TIME.max(if ms > 0 { connections } else { 0 })));
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let (request, room) = (Arc::clone(&request), Arc::clone(&room));
        all.spawn(async move {
            let _turn = room.acquire().await;
            let limit = PATIENCE + Duration::from_millis(ms as u64);
            match tokio::time::timeout(limit, one(to, &request, moves)).await {
                Ok(Ok(worker)) => worker,
                Ok(Err(error)) => format!("failed: {error}"),
                Err(_) => "failed: too late".to_owned(),
            }
        });
    }
    while let Some(told) = all.join_next().await {
        println!("{}", told.unwrap_or_else(|error| format!("failed: {error}")));
    }
}
