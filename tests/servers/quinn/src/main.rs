//! A server of QUIC by quinn, whose workers get their socket as descriptor 3, or as the one that is named:
//!
//!   quinn_server [DESCRIPTOR]
//!
//! The request is one line, `BYTES MS`. The answer is a line with the worker's number of process, and then as many bytes
//! over as many milliseconds.

use std::net::UdpSocket;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicServerConfig;
use quinn::{
    ConnectionId, ConnectionIdGenerator, Endpoint, EndpointConfig, Incoming, RecvStream,
    SendStream, ServerConfig, TokioRuntime,
};
use tokio::signal::unix::{SignalKind, signal};

/// The protocol inside QUIC (ALPN).
const PROTOCOL: &[u8] = b"work";

/// Makes IDs that tell the worker by a token: the plaintext algorithm of draft-ietf-quic-load-balancers. The
/// token leads from any of its IDs to the worker, also from those that were given to the client under encryption.
struct WithToken(u16);

/// Configuration 0, and how many bytes follow.
const FIRST: u8 = 7;

impl ConnectionIdGenerator for WithToken {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut id = [0; 8];
        getrandom(&mut id[3..]);
        id[0] = FIRST;
        id[1..3].copy_from_slice(&self.0.to_be_bytes());
        ConnectionId::new(&id)
    }

    fn cid_len(&self) -> usize {
        8
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

fn getrandom(bytes: &mut [u8]) {
    use rustls::crypto::ring::default_provider;
    let filled = default_provider().secure_random.fill(bytes);
    filled.expect("the kernel's random numbers");
}

/// The token that `wakeone run` gives to this worker.
fn token() -> Option<u16> {
    std::env::var("WAKEONE_QUIC_ID").ok()?.parse().ok()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let key =
        rustls::pki_types::PrivateKeyDer::try_from(own.key_pair.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .expect("the certificate fits");
    tls.alpn_protocols = vec![PROTOCOL.to_vec()];
    let tls = QuicServerConfig::try_from(tls).expect("ciphers of QUIC");
    let server = ServerConfig::with_crypto(Arc::new(tls));
    let mut config = EndpointConfig::default();
    if let Some(token) = token() {
        config.cid_generator(move || Box::new(WithToken(token)));
    }
    let descriptor = std::env::args().nth(1).map_or(3, |word| word.parse().expect("DESCRIPTOR"));
    // SAFETY: it is the socket that this process was given, and nobody else uses it.
    let socket = unsafe { UdpSocket::from_raw_fd(descriptor) };
    let endpoint =
        Endpoint::new(config, Some(server), socket, Arc::new(TokioRuntime)).expect("an endpoint");
    let mut end = signal(SignalKind::terminate()).expect("SIGTERM");
    loop {
        tokio::select! {
            incoming = endpoint.accept() => match incoming {
                Some(incoming) => drop(tokio::spawn(serve(incoming))),
                None => break,
            },
            _ = end.recv() => break,
        }
    }
}

async fn serve(incoming: Incoming) {
    let Ok(connection) = incoming.await else {
        return;
    };
    while let Ok((send, receive)) = connection.accept_bi().await {
        tokio::spawn(answer(send, receive));
    }
}

async fn answer(mut send: SendStream, mut receive: RecvStream) -> Option<()> {
    let request = receive.read_to_end(64).await.ok()?;
    let request = String::from_utf8(request).ok()?;
    let mut words = request.split_whitespace();
    let mut number = || words.next()?.parse::<u64>().ok();
    let (bytes, ms) = (number()?, number()?);
    let line = format!("{}\n", std::process::id());
    send.write_all(line.as_bytes()).await.ok()?;
    let parts = (ms / 10).max(1);
    for part in 0..parts {
        let size = bytes * (part + 1) / parts - bytes * part / parts;
        send.write_all(&vec![b'a'; size as usize]).await.ok()?;
        if ms > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    send.finish().ok()
}
