//! The program that reads datagrams in `udp-readers`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use wakeone_lab::experiments::udp_readers::reader;

/// Read what an experiment sends.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address to read from
    #[arg(long, value_name = "ADDR", required_unless_present = "fifo")]
    udp: Option<SocketAddr>,
    /// Named pipe to read from
    #[arg(long, value_name = "FILE", conflicts_with = "udp")]
    fifo: Option<PathBuf>,
    /// Sockets on the address
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    sockets: u16,
    /// Threads that read
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Keep thread N on CPU N
    #[arg(long)]
    pin: bool,
    /// Read what waits when told so, instead of what comes
    #[arg(long, conflicts_with = "fifo")]
    portions: bool,
    /// Bytes that each socket may hold
    #[arg(long, value_name = "BYTES")]
    buffer: Option<usize>,
    /// Receive queues of the socket, on the kernel of the papers
    #[arg(long, value_name = "N")]
    queues: Option<i32>,
    /// File in which reader and sender count
    #[arg(long, value_name = "FILE")]
    board: PathBuf,
}

/// Reads until the sender has ended.
///
/// # Errors
/// Nothing to read from was named, or it cannot be read.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let from = match (args.fifo, args.udp) {
        (Some(path), _) => reader::From::Fifo(path),
        (None, Some(address)) => reader::From::Udp(address, args.sockets.into()),
        (None, None) => bail!("reader: nothing to read from"),
    };
    eprintln!("reading");
    reader::run(&reader::Plan {
        from,
        threads: args.threads.into(),
        pin: args.pin,
        portions: args.portions,
        buffer_bytes: args.buffer,
        queues: args.queues,
        board: args.board,
    })?;
    Ok(ExitCode::SUCCESS)
}
