//! io_uring as a server uses it, without its dangers: buffers that the kernel reads and writes
//! belong to the ring until the kernel is done with them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use nix::libc;

/// A ring, with the operations that have not been completed.
pub struct Ring {
    ring: IoUring,
    pending: HashMap<u64, Operation>,
    /// Entries for which the submission queue had no room.
    overflow: VecDeque<squeue::Entry>,
    next: u64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("pending", &self.pending.len())
            .finish_non_exhaustive()
    }
}

/// An operation in progress, with the memory that the kernel uses for it.
enum Operation {
    Accept(u64),
    Receive(u64, Vec<u8>),
    Send(
        u64,
        #[expect(dead_code, reason = "the kernel reads it")] Vec<u8>,
    ),
    Poll(u64),
    Sleep(
        u64,
        #[expect(dead_code, reason = "the kernel reads it")] Box<types::Timespec>,
    ),
    Cancel,
}

/// A completed operation. `token` is the one given with the operation.
#[derive(Debug)]
pub enum Event {
    /// A connection was accepted, or accepting failed.
    Accepted {
        /// Which listener.
        token: u64,
        /// The connection.
        result: io::Result<OwnedFd>,
        /// Whether more will come; if not, [`Ring::accept`] has to be called again.
        more: bool,
    },
    /// Bytes were received: none at the end of the stream.
    Received {
        /// Which connection.
        token: u64,
        /// The bytes.
        result: io::Result<Vec<u8>>,
    },
    /// Bytes were sent.
    Sent {
        /// Which connection.
        token: u64,
        /// How many.
        result: io::Result<usize>,
    },
    /// A descriptor is readable, or has failed.
    Readable {
        /// Which one.
        token: u64,
    },
    /// The time is over.
    Elapsed {
        /// Which one.
        token: u64,
    },
}

impl Ring {
    /// A ring with room for `entries` submissions at a time.
    ///
    /// # Errors
    /// `EPERM` where io_uring is forbidden, `ENOSYS` where it is not built in;
    /// [`io::ErrorKind::Unsupported`] where the kernel is too old to accept more than once.
    pub fn new(entries: u32) -> io::Result<Self> {
        let ring = IoUring::new(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        // There is no question for "multishot accept"; it came with the same kernel as this.
        if !probe.is_supported(opcode::Socket::CODE) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "multishot accept needs Linux 5.19",
            ));
        }
        Ok(Self {
            ring,
            pending: HashMap::new(),
            overflow: VecDeque::new(),
            next: 0,
        })
    }

    /// Accepts connections from a listener until it fails or [`Self::cancel_accepts`].
    pub fn accept(&mut self, listener: BorrowedFd<'_>, token: u64) {
        let entry = opcode::AcceptMulti::new(types::Fd(listener.as_raw_fd()))
            .flags(libc::SOCK_CLOEXEC)
            .build();
        self.push(entry, Operation::Accept(token));
    }

    /// Receives bytes, at most the buffer's capacity.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, token: u64, mut buffer: Vec<u8>) {
        buffer.clear();
        let length = u32::try_from(buffer.capacity()).unwrap_or(u32::MAX);
        let fd = types::Fd(socket.as_raw_fd());
        let entry = opcode::Recv::new(fd, buffer.as_mut_ptr(), length).build();
        self.push(entry, Operation::Receive(token, buffer));
    }

    /// Sends the bytes, or as many of them as there is room for. `more`: their end may be held back
    /// for bytes that follow at once, or for the end of the connection (`MSG_MORE`).
    pub fn send(&mut self, socket: BorrowedFd<'_>, token: u64, bytes: Vec<u8>, more: bool) {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let fd = types::Fd(socket.as_raw_fd());
        let entry = opcode::Send::new(fd, bytes.as_ptr(), length)
            .flags(libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 })
            .build();
        self.push(entry, Operation::Send(token, bytes));
    }

    /// Waits, once, until the descriptor is readable.
    pub fn poll_readable(&mut self, fd: BorrowedFd<'_>, token: u64) {
        let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).build();
        self.push(entry, Operation::Poll(token));
    }

    /// Waits, once, for so long.
    pub fn sleep(&mut self, time: Duration, token: u64) {
        let time = Box::new(
            types::Timespec::new()
                .sec(time.as_secs())
                .nsec(time.subsec_nanos()),
        );
        let entry = opcode::Timeout::new(&raw const *time).build();
        self.push(entry, Operation::Sleep(token, time));
    }

    /// Ends all accepting. Connections accepted meanwhile are still reported.
    pub fn cancel_accepts(&mut self) {
        let accepts: Vec<u64> = self
            .pending
            .iter()
            .filter(|(_, operation)| matches!(operation, Operation::Accept(_)))
            .map(|(id, _)| *id)
            .collect();
        for id in accepts {
            self.push(opcode::AsyncCancel::new(id).build(), Operation::Cancel);
        }
    }

    /// Whether a listener is still being accepted from.
    pub fn is_accepting(&self) -> bool {
        self.pending
            .values()
            .any(|operation| matches!(operation, Operation::Accept(_)))
    }

    fn push(&mut self, entry: squeue::Entry, operation: Operation) {
        self.next += 1;
        self.pending.insert(self.next, operation);
        self.overflow.push_back(entry.user_data(self.next));
        self.fill();
    }

    /// Moves entries into the submission queue as far as there is room.
    fn fill(&mut self) {
        let mut queue = self.ring.submission();
        while let Some(entry) = self.overflow.pop_front() {
            // SAFETY: all memory that an entry points to (buffers on the heap, a boxed timespec) is
            // in `pending` under the entry's number until its completion is seen. It is leaked if
            // the ring is dropped before. A descriptor that has been closed meanwhile makes the
            // operation fail or act on another file, which is wrong but not unsafe.
            if unsafe { queue.push(&entry) }.is_err() {
                self.overflow.push_front(entry);
                return;
            }
        }
    }

    /// Submits the operations requested so far, waits for a completion, and returns the completed
    /// ones. Returns none when a signal came.
    ///
    /// # Errors
    /// The error of `io_uring_enter`.
    pub fn wait(&mut self) -> io::Result<Vec<Event>> {
        loop {
            self.fill();
            let want = usize::from(self.overflow.is_empty());
            match self.ring.submit_and_wait(want) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Vec::new()),
                // The completion queue is full: it is emptied below.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(error),
            }
            let completed: Vec<cqueue::Entry> = self.ring.completion().collect();
            let events: Vec<Event> = completed
                .iter()
                .filter_map(|entry| self.complete(entry))
                .collect();
            if !events.is_empty() || self.overflow.is_empty() {
                return Ok(events);
            }
        }
    }

    fn complete(&mut self, entry: &cqueue::Entry) -> Option<Event> {
        let id = entry.user_data();
        let more = cqueue::more(entry.flags());
        let result = match entry.result() {
            code if code < 0 => Err(io::Error::from_raw_os_error(-code)),
            count => Ok(count),
        };
        if let (true, Some(Operation::Accept(token))) = (more, self.pending.get(&id)) {
            return Some(accepted(*token, result, true));
        }
        Some(match self.pending.remove(&id)? {
            Operation::Accept(token) => accepted(token, result, false),
            Operation::Receive(token, mut buffer) => Event::Received {
                token,
                result: result.map(|count| {
                    let count = (count as usize).min(buffer.capacity());
                    // SAFETY: the kernel has written the first `count` bytes, which are within
                    // the capacity that it was told.
                    unsafe { buffer.set_len(count) };
                    buffer
                }),
            },
            Operation::Send(token, _) => Event::Sent {
                token,
                result: result.map(|count| count as usize),
            },
            Operation::Poll(token) => Event::Readable { token },
            Operation::Sleep(token, _) => Event::Elapsed { token },
            Operation::Cancel => return None,
        })
    }
}

fn accepted(token: u64, result: io::Result<i32>, more: bool) -> Event {
    Event::Accepted {
        token,
        // SAFETY: the kernel has just opened this descriptor for us, and nobody else knows it.
        result: result.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
        more,
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still use the memory of operations that are not complete: leak it.
        for (_, operation) in self.pending.drain() {
            std::mem::forget(operation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    fn wait_for(ring: &mut Ring) -> Event {
        loop {
            if let Some(event) = ring.wait().expect("the ring works").pop() {
                return event;
            }
        }
    }

    #[test]
    fn accepts_receives_and_sends() -> io::Result<()> {
        let mut ring = match Ring::new(4) {
            Ok(ring) => ring,
            Err(error) => {
                eprintln!("not run: no io_uring here ({error})");
                return Ok(());
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0")?;
        ring.accept(listener.as_fd(), 1);
        let mut served = Vec::new();
        // More connections than the ring has entries.
        for number in 0..9_u8 {
            let mut client = TcpStream::connect(listener.local_addr()?)?;
            let Event::Accepted {
                token: 1,
                result: Ok(connection),
                more: true,
            } = wait_for(&mut ring)
            else {
                panic!("no connection");
            };
            ring.receive(connection.as_fd(), 2, Vec::with_capacity(100));
            client.write_all(&[number; 3])?;
            match wait_for(&mut ring) {
                Event::Received {
                    token: 2,
                    result: Ok(bytes),
                } => ring.send(connection.as_fd(), 3, bytes, false),
                other => panic!("{other:?}"),
            }
            assert!(matches!(
                wait_for(&mut ring),
                Event::Sent {
                    token: 3,
                    result: Ok(3)
                }
            ));
            let mut answer = [0; 3];
            client.read_exact(&mut answer)?;
            assert_eq!(answer, [number; 3]);
            served.push((client, connection));
        }
        ring.sleep(Duration::from_millis(1), 4);
        assert!(matches!(wait_for(&mut ring), Event::Elapsed { token: 4 }));
        ring.cancel_accepts();
        assert!(matches!(
            wait_for(&mut ring),
            Event::Accepted {
                token: 1,
                result: Err(_),
                more: false
            }
        ));
        assert!(!ring.is_accepting());
        Ok(())
    }
}
