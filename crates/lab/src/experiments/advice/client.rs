//! Clients that connect one after another, say something, and stay.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::error::Error;

/// How many of them.
pub const CONNECTIONS: usize = 64;
/// Doctor watches for so long: it begins first, and ends before they go.
pub const WATCHED: &str = "4s";

const BEGINS: Duration = Duration::from_millis(1500);
const APART: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(5);
const STAYS: Duration = Duration::from_secs(3);

/// Opens them. Returns how many were answered.
///
/// # Errors
/// When one cannot connect.
pub fn keep(address: SocketAddr, hello: Vec<u8>) -> Result<usize, Error> {
    std::thread::sleep(BEGINS);
    let mut kept = Vec::new();
    for _ in 0..CONNECTIONS {
        let failed = |e| Error::Server(format!("connecting to {address}: {e}"));
        let mut one = TcpStream::connect_timeout(&address, PATIENCE).map_err(failed)?;
        let _ = one.write_all(&hello);
        kept.push(one);
        std::thread::sleep(APART);
    }
    let answered = kept.iter_mut().filter(|one| is_answered(one)).count();
    std::thread::sleep(STAYS);
    Ok(answered)
}

fn is_answered(mut one: &TcpStream) -> bool {
    let timeout = one.set_read_timeout(Some(PATIENCE));
    timeout.is_ok() && one.read(&mut [0; 512]).is_ok_and(|length| length > 0)
}
