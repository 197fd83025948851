//! Encrypted connections: rustls between the engine's buffers and its sockets.
//!
//! Each connection is a client of its own. No session is resumed, so that each handshake costs what a new client's costs.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme,
};

use crate::socket::error_kind;
use crate::{Error, ErrorKind};

/// How connections are encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The name or address that the server's certificate must be for.
    pub name: String,
    /// Takes any certificate.
    pub insecure: bool,
}

/// The common part of all encrypted connections of a thread.
pub(crate) struct Client {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Client {
    pub(crate) fn new(tls: &Tls) -> Result<Self, Error> {
        let name = ServerName::try_from(tls.name.clone())
            .map_err(|_| Error::Plan(format!("'{}' is no name of a TLS server", tls.name)))?;
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Plan(format!("TLS cannot be set up: {error}")))?;
        let mut config = if tls.insecure {
            let any = Arc::new(AnyCertificate(provider));
            let builder = builder.dangerous().with_custom_certificate_verifier(any);
            builder.with_no_client_auth()
        } else {
            builder
                .with_root_certificates(trusted()?)
                .with_no_client_auth()
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Self {
            config: Arc::new(config),
            name,
        })
    }

    /// A new connection, before its handshake.
    pub(crate) fn session(&self) -> Result<Box<Session>, ErrorKind> {
        let mut connection = ClientConnection::new(Arc::clone(&self.config), self.name.clone())
            .map_err(|_| ErrorKind::Tls)?;
        // A request waits here, whole, until the handshake is over.
        connection.set_buffer_limit(None);
        Ok(Box::new(Session {
            connection,
            broken: None,
        }))
    }
}

/// The certificate authorities that this machine trusts.
fn trusted() -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(Error::Plan(
            "no certificate authority was found to check the server by: install ca-certificates, \
             name a file of them in SSL_CERT_FILE, or give --insecure"
                .to_owned(),
        ));
    }
    Ok(roots)
}

/// One encrypted connection.
pub(crate) struct Session {
    connection: ClientConnection,
    /// Why the server takes no more. The bytes that it sent before can still be read.
    broken: Option<ErrorKind>,
}

/// The result of reading.
pub(crate) enum Received {
    /// This much is in the buffer.
    Bytes(usize),
    /// No more for now.
    Nothing,
    /// The server ended the connection in good order.
    End,
}

impl Session {
    /// Takes a whole request; [`Self::flush`] sends it, once the handshake is over.
    pub(crate) fn put(&mut self, request: &[u8]) -> Result<(), ErrorKind> {
        let put = self.connection.writer().write_all(request);
        put.map_err(|_| ErrorKind::Tls)
    }

    /// Sends as much as the socket takes. Returns true once the handshake is over and all is sent.
    pub(crate) fn flush(&mut self, socket: &OwnedFd) -> Result<bool, ErrorKind> {
        let mut socket = Socket(socket);
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(*self.broken.get_or_insert(kind(&error)));
                }
            }
        }
        Ok(self.is_sent())
    }

    /// Whether the handshake is over and the request is sent.
    pub(crate) fn is_sent(&self) -> bool {
        !self.connection.wants_write() && !self.connection.is_handshaking()
    }

    /// Reads from the socket, decrypts into `buffer`, and sends the replies that TLS requires.
    pub(crate) fn receive(
        &mut self,
        socket: &OwnedFd,
        buffer: &mut [u8],
    ) -> Result<Received, ErrorKind> {
        loop {
            match self.connection.reader().read(buffer) {
                Ok(0) => return Ok(Received::End),
                Ok(n) => return Ok(Received::Bytes(n)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Closed without a word of TLS: a host in between may have done that.
                Err(_) => return Err(self.broken.unwrap_or(ErrorKind::EofEarly)),
            }
            match self.connection.read_tls(&mut Socket(socket)) {
                Ok(0) if self.connection.is_handshaking() => {
                    return Err(self.broken.unwrap_or(ErrorKind::EofEarly));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Received::Nothing);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(kind(&error)),
            }
            if let Err(error) = self.connection.process_new_packets() {
                // Tells the server why, if it listens still.
                let _ = self.flush(socket);
                return Err(match error {
                    rustls::Error::InvalidCertificate(_) => ErrorKind::Certificate,
                    _ => ErrorKind::Tls,
                });
            }
            // A server that takes no more may have answered all the same; its answer is read to the end.
            let _ = self.flush(socket);
        }
    }
}

fn kind(error: &io::Error) -> ErrorKind {
    Errno::from_io_error(error).map_or(ErrorKind::Tls, |errno| error_kind(errno, false))
}

/// A socket as rustls reads and writes it.
struct Socket<'a>(&'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (n, _) = rustix::net::recv(self.0, buffer, RecvFlags::empty())?;
        Ok(n)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `--insecure`: accepts any certificate. The handshake is still checked to be made with that certificate's key.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
