//! Clients that choose the address from which they come.

use std::net::{SocketAddr, TcpStream};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

/// Connects over IPv4 from this address; port 0 is any.
pub fn connect_from(source: SocketAddr, to: SocketAddr) -> TcpStream {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
    let socket = socket.expect("socket");
    bind(&socket, &source).expect("bind");
    connect(&socket, &to).expect("connect");
    socket.into()
}
