//! Loads by https: whole answers, certificates that are checked, connections that break.

mod common;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use common::{check, plan};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedKey, IsCa, Issuer, KeyPair,
    generate_simple_self_signed,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use wakeone_load::{ErrorKind, Outcome, Plan, Stop, Tls};

type Stream = StreamOwned<ServerConnection, TcpStream>;

/// Serves TLS with a certificate for `localhost` that no authority signed. `handle` answers a request; it returns whether
/// the connection goes on.
fn serve(handle: impl Fn(&str, &mut Stream) -> bool + Send + Sync + 'static) -> SocketAddr {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    serve_as(cert.der().clone(), &signing_key, handle)
}

fn serve_as(
    certificate: CertificateDer<'static>,
    key: &KeyPair,
    handle: impl Fn(&str, &mut Stream) -> bool + Send + Sync + 'static,
) -> SocketAddr {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let (config, handle) = (Arc::new(config), Arc::new(handle));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let tls = ServerConnection::new(Arc::clone(&config)).unwrap();
            let handle = Arc::clone(&handle);
            thread::spawn(move || converse(StreamOwned::new(tls, stream), &*handle));
        }
    });
    address
}

fn converse(mut stream: Stream, handle: &dyn Fn(&str, &mut Stream) -> bool) {
    let mut pending = Vec::new();
    loop {
        let mut piece = [0; 4096];
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(n) => pending.extend_from_slice(&piece[..n]),
        }
        if !pending.windows(4).any(|w| w == b"\r\n\r\n") {
            continue;
        }
        let request = String::from_utf8(std::mem::take(&mut pending)).unwrap();
        if !handle(&request, &mut stream) {
            stream.conn.send_close_notify();
            let _ = stream.flush();
            return;
        }
    }
}

fn encrypted(target: SocketAddr, insecure: bool) -> Plan {
    let mut plan = Plan {
        stop: Stop {
            requests: Some(40),
            duration: None,
        },
        ..plan(target)
    };
    plan.mix.form.tls = Some(Tls {
        name: "localhost".to_owned(),
        insecure,
    });
    plan
}

fn run(plan: &Plan) -> Outcome {
    let outcome = wakeone_load::run(plan, &AtomicBool::new(false), &mut |_| {}).unwrap();
    check(&outcome);
    outcome
}

#[test]
fn answers_of_all_lengths_arrive_whole() {
    // One record, several, and more than the engine's buffer.
    for size in [2_usize, 40_000, 300_000] {
        let address = serve(move |request, stream| {
            assert!(request.contains("Host: localhost\r\n"), "{request}");
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nX-Worker: 7\r\nConnection: close\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&vec![b'x'; size]).unwrap();
            false
        });
        let outcome = run(&encrypted(address, true));
        assert_eq!(outcome.completed, 40, "{:?}", outcome.errors);
        assert_eq!(outcome.connections, 40);
        assert!(outcome.bytes_received >= 40 * size as u64);
        assert_eq!(outcome.by_worker, BTreeMap::from([("7".to_owned(), 40)]));
        assert_eq!(outcome.phases.connect.len(), 40);
    }
}

#[test]
fn connections_are_used_again() {
    let address = serve(|_, stream| {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        stream.write_all(text.as_bytes()).is_ok()
    });
    let plan = Plan {
        keep_alive: true,
        ..encrypted(address, true)
    };
    let outcome = run(&plan);
    assert_eq!(outcome.completed, 40, "{:?}", outcome.errors);
    assert_eq!(outcome.connections, 10);
}

/// A server need not read a body before it answers. It may close then, and the kernel resets what still comes.
#[test]
fn an_answer_may_come_before_the_body_is_sent() {
    let server = serve(|_, stream| {
        let text = "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno";
        let _ = stream.write_all(text.as_bytes());
        // A reset may overtake the answer on another CPU, if that is busy.
        thread::sleep(Duration::from_millis(100));
        false
    });
    for keep_alive in [false, true] {
        let mut plan = Plan {
            keep_alive,
            ..encrypted(server, true)
        };
        plan.stop.requests = Some(8);
        plan.mix.form.body = Some(vec![b'x'; 20_000_000]);
        let outcome = run(&plan);
        assert_eq!(
            outcome.errors.keys().collect::<Vec<_>>(),
            [&ErrorKind::Status]
        );
        assert_eq!(outcome.by_status.keys().collect::<Vec<_>>(), [&413]);
    }
}

#[test]
fn a_certificate_that_nobody_signed_is_refused() {
    let address = serve(|_, _| panic!("a request was sent in spite of the certificate"));
    let outcome = run(&encrypted(address, false));
    let expected = BTreeMap::from([(ErrorKind::Certificate, 40)]);
    assert_eq!(outcome.errors, expected);
}

const ADDRESS: &str = "WAKEONE_TEST_TLS_ADDRESS";

/// The authorities are those of the process, so another process sends the load: this same test, given the target.
#[test]
fn a_certificate_of_a_trusted_authority_is_taken_for_its_own_name() {
    if let Ok(address) = std::env::var(ADDRESS) {
        let mut plan = encrypted(address.parse().unwrap(), false);
        assert_eq!(run(&plan).completed, 40);
        plan.mix.form.tls.as_mut().unwrap().name = "elsewhere".to_owned();
        let refused = BTreeMap::from([(ErrorKind::Certificate, 40)]);
        assert_eq!(run(&plan).errors, refused);
        return;
    }
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let address = serve_as(certificate.der().clone(), &key, |_, stream| {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(text.as_bytes()).unwrap();
        false
    });
    let text = BASE64_STANDARD.encode(authority.der());
    let text = format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
    let file = std::env::temp_dir().join(format!("wakeone-authority-{}.pem", std::process::id()));
    std::fs::write(&file, text).unwrap();
    let sent = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "a_certificate_of_a_trusted_authority_is_taken_for_its_own_name",
            "--exact",
        ])
        .env(ADDRESS, address.to_string())
        .env("SSL_CERT_FILE", &file)
        .output()
        .unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(
        sent.status.success(),
        "{}",
        String::from_utf8_lossy(&sent.stdout)
    );
}

#[test]
fn an_answer_that_is_cut_off_is_no_answer() {
    // An answer without a length ends with the connection. Without a farewell anybody may have ended it.
    let address = serve(|_, stream| {
        let text = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf";
        stream.write_all(text.as_bytes()).unwrap();
        let _ = stream.sock.shutdown(std::net::Shutdown::Both);
        false
    });
    let outcome = run(&encrypted(address, true));
    assert_eq!(outcome.completed, 0);
    assert_eq!(outcome.errors, BTreeMap::from([(ErrorKind::EofEarly, 40)]));
    // With the farewell it is whole.
    let address = serve(|_, stream| {
        let text = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall";
        stream.write_all(text.as_bytes()).unwrap();
        false
    });
    let outcome = run(&encrypted(address, true));
    assert_eq!(outcome.completed, 40, "{:?}", outcome.errors);
}

#[test]
fn what_is_not_tls_is_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let outcome = run(&encrypted(address, true));
    assert_eq!(outcome.errors, BTreeMap::from([(ErrorKind::Tls, 40)]));
}

#[test]
fn a_handshake_that_does_not_end_is_a_timeout_of_connecting() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let plan = Plan {
        timeout: std::time::Duration::from_millis(200),
        ..encrypted(listener.local_addr().unwrap(), true)
    };
    let outcome = run(&plan);
    assert_eq!(
        outcome.errors,
        BTreeMap::from([(ErrorKind::ConnectTimeout, 40)])
    );
}
