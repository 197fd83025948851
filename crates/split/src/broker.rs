//! The broker's socket, and the conversations on it: one for each question of the library in a process of the server.
//!
//! Nothing here waits for a peer: a process that is slow to answer, or hostile, holds up no other. Everybody can read
//! the socket's name (/proc/net/unix), so the broker first checks who connects: it hears only the server's processes.
//! If there are too many conversations, the user with the most of them gives way.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::time::Timespec;
use wakeone_kernel::netns;
use wakeone_kernel::proc::process;
use wakeone_shim::protocol::{REQUEST_BYTES, Reply, Request, Token};

use super::left::WakeReply;

/// No more than this many conversations are begun at a time: the kernel lets the others wait.
const MOST: usize = 256;
/// No more than this many conversations with one process: the oldest gives way. The library has one at a time, as it
/// asks under a lock. One more may still be open here that its process gave up, or that a former process of the same id
/// had.
const MOST_OF_ONE: usize = 8;
/// A conversation that takes longer is ended. The library waits less.
const PATIENCE: Duration = Duration::from_secs(30);
/// A conversation without any question after this time is ended once half of the room is taken. Once all of it is, so
/// is any conversation of the user that has the most.
const SILENCE: Duration = Duration::from_millis(100);
/// Connections that are accepted, or refused, before the conversations continue.
const AT_ONCE: usize = 256;

/// A question of a process, with the descriptor that came with it.
#[derive(Debug)]
pub struct Question {
    /// The process that asks, by the kernel's credentials.
    pub pid: u32,
    /// The question.
    pub request: Request,
    /// The socket.
    pub socket: Option<OwnedFd>,
}

/// A conversation under way, and the queue that it has granted.
#[derive(Debug)]
struct Conversation<O> {
    connection: OwnedFd,
    pid: u32,
    user: u32,
    since: Instant,
    grant: Option<O>,
}

/// The part that answers the questions. `O` is a grant that the process has not accepted yet.
pub trait Answer<O> {
    /// A thread wants a queue beside a UDP socket.
    fn reader(&mut self, pid: u32, fd: i32, socket: &OwnedFd) -> Option<O>;
    /// A thread has stopped receiving from its queue. `Done`: the broker has others read the queue.
    fn given_back(&mut self, pid: u32, queue: OwnedFd) -> Reply;
    /// A process got an empty datagram on a UDP socket: tells why it was sent.
    fn left(&mut self, pid: u32, socket: &OwnedFd) -> WakeReply;
    /// A process asks for a queue of its own. `None`: it stays with the socket that it has.
    fn request(&mut self, question: &QueueRequest<'_>) -> Option<O>;
    /// The socket of a grant.
    fn socket<'a>(&self, grant: &'a O) -> BorrowedFd<'a>;
    /// The queue is in the shared socket's place, or, a thread's queue, has this number.
    fn accepted(&mut self, pid: u32, fd: i32, grant: O);
    /// The queue was not accepted: the process stays with the shared socket.
    fn rejected(&mut self, pid: u32, grant: O);
}

/// A request for a queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueRequest<'a> {
    /// The process.
    pub pid: u32,
    /// The socket's number in that process.
    pub fd: i32,
    /// The call with which it is about to wait.
    pub how: wakeone_shim::protocol::How,
    /// The socket.
    pub socket: BorrowedFd<'a>,
}

/// The broker.
#[derive(Debug)]
pub struct Broker<O> {
    socket: OwnedFd,
    name: String,
    token: Token,
    conversations: Vec<Conversation<O>>,
}

impl<O> Broker<O> {
    /// Opens its socket, under a random name.
    ///
    /// # Errors
    /// socket(2), bind(2) or listen(2) fails.
    pub fn open() -> io::Result<Self> {
        let name = format!("wakeone-split-{:032x}", rand::random::<u128>());
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        rustix::net::bind(
            &socket,
            &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        )?;
        rustix::net::listen(&socket, 1024)?;
        Ok(Self {
            socket,
            name,
            token: Token::new(rand::random()),
            conversations: Vec::new(),
        })
    }

    /// The value of the environment variable that names the broker to the library.
    pub fn variable(&self) -> String {
        self.token.variable(&self.name)
    }

    /// The descriptors to poll.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let room = self.conversations.len() < MOST;
        let own = room.then(|| self.socket.as_fd());
        let others = self.conversations.iter();
        own.into_iter()
            .chain(others.map(|one| one.connection.as_fd()))
    }

    /// Continues every conversation as far as it goes without waiting.
    pub fn attend(&mut self, to: &mut impl Answer<O>) {
        self.accept(to);
        let crowded = self.conversations.len() >= MOST / 2;
        for conversation in std::mem::take(&mut self.conversations) {
            if let Some(open) = self.go_on(conversation, crowded, to) {
                self.conversations.push(open);
            }
        }
    }

    fn accept(&mut self, to: &mut impl Answer<O>) {
        // To look up the ancestors of a process takes several files of /proc. A process that floods the socket must
        // not have that done for each of its connections.
        let mut strangers = HashSet::new();
        for _ in 0..AT_ONCE {
            if !self.has_room(to) {
                return;
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let Ok(connection) = rustix::net::accept_with(&self.socket, flags) else {
                return;
            };
            let Some((pid, user)) = peer(&connection).filter(|(pid, _)| !strangers.contains(pid))
            else {
                continue;
            };
            if !is_heard(pid, user) {
                strangers.insert(pid);
                continue;
            }
            self.make_way(pid, to);
            self.conversations.push(Conversation {
                connection,
                pid,
                user,
                since: Instant::now(),
                grant: None,
            });
        }
    }

    /// Whether another conversation can begin. If there is no room, ends the oldest one of the user that has the
    /// most, unless it was just begun: many workers may ask at the same time.
    fn has_room(&mut self, to: &mut impl Answer<O>) -> bool {
        if self.conversations.len() < MOST {
            return true;
        }
        if !self.is_asked() {
            return false;
        }
        let mut counts = BTreeMap::new();
        for one in &self.conversations {
            *counts.entry(one.user).or_insert(0) += 1;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        let ends = |one: &Conversation<O>| {
            most.is_some_and(|(user, _)| user == one.user) && one.since.elapsed() >= SILENCE
        };
        let Some(oldest) = self.conversations.iter().position(ends) else {
            return false;
        };
        self.end(oldest, to);
        true
    }

    /// Ends the oldest conversation of a process that has as many as it may have. Each may hold two descriptors here.
    fn make_way(&mut self, pid: u32, to: &mut impl Answer<O>) {
        let its = |one: &Conversation<O>| one.pid == pid;
        let all = self.conversations.iter();
        if all.filter(|one| its(one)).count() < MOST_OF_ONE {
            return;
        }
        if let Some(oldest) = self.conversations.iter().position(its) {
            self.end(oldest, to);
        }
    }

    fn end(&mut self, at: usize, to: &mut impl Answer<O>) {
        let ended = self.conversations.remove(at);
        if let Some(grant) = ended.grant {
            to.rejected(ended.pid, grant);
        }
    }

    /// Whether a process waits to begin a conversation.
    fn is_asked(&self) -> bool {
        let mut own = [PollFd::new(&self.socket, PollFlags::IN)];
        rustix::event::poll(&mut own, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// One step of a conversation; `None` when it is over.
    fn go_on(
        &self,
        mut conversation: Conversation<O>,
        crowded: bool,
        to: &mut impl Answer<O>,
    ) -> Option<Conversation<O>> {
        let silent = crowded && conversation.grant.is_none();
        let patience = if silent { SILENCE } else { PATIENCE };
        match self.hear(&conversation) {
            Heard::Nothing if conversation.since.elapsed() < patience => Some(conversation),
            Heard::Question(question) => self.answer(conversation, question, to),
            Heard::Nothing | Heard::End => {
                if let Some(grant) = conversation.grant.take() {
                    to.rejected(conversation.pid, grant);
                }
                None
            }
        }
    }

    fn answer(
        &self,
        mut conversation: Conversation<O>,
        question: Question,
        to: &mut impl Answer<O>,
    ) -> Option<Conversation<O>> {
        let Question {
            pid,
            request,
            socket,
        } = question;
        if socket.as_ref().is_some_and(is_foreign) {
            tracing::debug!("process {pid} asks with a socket of another network namespace");
            let _ = say(&conversation.connection, Reply::Leave, None);
            if let Some(grant) = conversation.grant.take() {
                to.rejected(pid, grant);
            }
            return None;
        }
        match (request, socket, conversation.grant.take()) {
            (Request::Claim { fd, how }, Some(socket), None) => {
                let claim = QueueRequest {
                    pid,
                    fd,
                    how,
                    socket: socket.as_fd(),
                };
                let grant = to.request(&claim);
                offered(conversation, pid, grant, to)
            }
            (Request::Reader { fd }, Some(socket), None) => {
                let grant = to.reader(pid, fd, &socket);
                offered(conversation, pid, grant, to)
            }
            (Request::GivenBack { .. }, Some(queue), None) => {
                let reply = to.given_back(pid, queue);
                let _ = say(&conversation.connection, reply, None);
                None
            }
            (Request::Left { .. }, Some(socket), None) => {
                let (reply, queue) = match to.left(pid, &socket) {
                    WakeReply::Foreign => (Reply::Leave, None),
                    WakeReply::Nothing => (Reply::Done, None),
                    WakeReply::Read(queue) => (Reply::Queue, Some(queue)),
                };
                let with = queue.as_ref().map(AsFd::as_fd);
                let _ = say(&conversation.connection, reply, with);
                None
            }
            (Request::Taken { fd }, None, Some(grant)) => {
                to.accepted(pid, fd, grant);
                let _ = say(&conversation.connection, Reply::Done, None);
                None
            }
            (_, _, grant) => {
                // Not in this order: this is not the library.
                if let Some(grant) = grant {
                    to.rejected(pid, grant);
                }
                None
            }
        }
    }

    fn hear(&self, from: &Conversation<O>) -> Heard {
        // One byte more than a message has, so that a longer message is recognised.
        let mut bytes = [0_u8; REQUEST_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let heard = rustix::net::recvmsg(
            &from.connection,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            flags,
        );
        let socket = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
            _ => None,
        });
        let heard = match heard {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Heard::Nothing,
            Err(_) => return Heard::End,
            Ok(heard) if heard.flags.contains(ReturnFlags::CTRUNC) => return Heard::End,
            Ok(heard) => heard,
        };
        match Request::parse(&bytes[..heard.bytes], &self.token) {
            Ok(request) => Heard::Question(Question {
                pid: from.pid,
                request,
                socket,
            }),
            Err(error) => {
                if heard.bytes > 0 {
                    tracing::debug!("process {} sent {error}", from.pid);
                }
                Heard::End
            }
        }
    }
}

/// The process and user that connected.
fn peer(connection: &OwnedFd) -> Option<(u32, u32)> {
    let peer = getsockopt(connection, PeerCredentials).ok()?;
    // 0: it is in a PID namespace that we cannot see into.
    let pid = u32::try_from(peer.pid()).ok().filter(|pid| *pid != 0)?;
    Some((pid, peer.uid()))
}

/// Whether a process belongs to the server, or to our own user.
fn is_heard(pid: u32, user: u32) -> bool {
    let own = rustix::process::geteuid().as_raw();
    user == own || process::descends(pid, std::process::id())
}

/// Whether a socket was made in another network namespace, where its maker may be privileged.
fn is_foreign(socket: &OwnedFd) -> bool {
    !netns::has(socket).unwrap_or(false)
}

/// Sends a process its grant, if there is one. The conversation then waits for the process to accept it.
fn offered<O>(
    mut conversation: Conversation<O>,
    pid: u32,
    grant: Option<O>,
    to: &mut impl Answer<O>,
) -> Option<Conversation<O>> {
    let Some(grant) = grant else {
        let _ = say(&conversation.connection, Reply::Leave, None);
        return None;
    };
    let queue = Some(to.socket(&grant));
    if say(&conversation.connection, Reply::Queue, queue).is_err() {
        to.rejected(pid, grant);
        return None;
    }
    conversation.grant = Some(grant);
    Some(conversation)
}

enum Heard {
    Nothing,
    Question(Question),
    End,
}

fn say(to: &OwnedFd, what: Reply, with: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = what.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let sockets = with.as_slice();
    if !sockets.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(sockets));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(to, &[IoSlice::new(&bytes)], &mut control, flags)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answerer that remembers which grants were rejected, by their numbers.
    #[derive(Default)]
    struct Declined(Vec<usize>);

    impl Answer<usize> for Declined {
        fn reader(&mut self, _: u32, _: i32, _: &OwnedFd) -> Option<usize> {
            None
        }
        fn given_back(&mut self, _: u32, _: OwnedFd) -> Reply {
            Reply::Leave
        }
        fn left(&mut self, _: u32, _: &OwnedFd) -> WakeReply {
            WakeReply::Foreign
        }
        fn request(&mut self, _: &QueueRequest<'_>) -> Option<usize> {
            None
        }
        fn socket<'a>(&self, _: &'a usize) -> BorrowedFd<'a> {
            unreachable!("nothing is offered here")
        }
        fn accepted(&mut self, _: u32, _: i32, _: usize) {}
        fn rejected(&mut self, _: u32, grant: usize) {
            self.0.push(grant);
        }
    }

    const FEW: u32 = 1;
    const MANY: u32 = 2;

    /// A broker with as many conversations as there may be, and their other ends. Each has its number as its grant,
    /// and has been open for so long. The user `FEW` has the first five.
    fn full(open_for: Duration) -> (Broker<usize>, Vec<OwnedFd>) {
        let mut broker = Broker::open().expect("broker");
        let since = Instant::now().checked_sub(open_for).expect("a time");
        let mut others = Vec::new();
        for number in 0..MOST {
            let (connection, other) = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )
            .expect("sockets");
            others.push(other);
            broker.conversations.push(Conversation {
                connection,
                pid: 1,
                user: if number < 5 { FEW } else { MANY },
                since,
                grant: Some(number),
            });
        }
        (broker, others)
    }

    fn ask(broker: &Broker<usize>) -> OwnedFd {
        let kind = SocketType::SEQPACKET;
        let asking = rustix::net::socket(AddressFamily::UNIX, kind, None).expect("socket");
        let name = SocketAddrUnix::new_abstract_name(broker.name.as_bytes()).expect("name");
        rustix::net::connect(&asking, &name).expect("connect");
        asking
    }

    #[test]
    fn the_user_with_most_conversations_gives_way_when_there_is_no_room() {
        let (mut broker, others) = full(SILENCE);
        let asking = [ask(&broker), ask(&broker)];
        let mut told = Declined::default();
        broker.attend(&mut told);
        assert_eq!(told.0, [5, 6], "the oldest two of the user that has most");
        let own = rustix::process::geteuid().as_raw();
        let all = &broker.conversations;
        let of = |user| all.iter().filter(|one| one.user == user).count();
        assert_eq!((of(FEW), of(MANY)), (5, MOST - 7));
        assert_eq!(of(own), 2, "both that asked are heard");
        drop((asking, others));
    }

    #[test]
    fn a_process_with_many_grants_loses_its_oldest() {
        let mut broker = Broker::open().expect("broker");
        let mut told = Declined::default();
        let mut asking: Vec<OwnedFd> = (0..MOST_OF_ONE).map(|_| ask(&broker)).collect();
        broker.attend(&mut told);
        let all = broker.conversations.iter_mut().enumerate();
        all.for_each(|(number, one)| one.grant = Some(number));
        asking.extend((0..3).map(|_| ask(&broker)));
        broker.accept(&mut told);
        assert_eq!(told.0, [0, 1, 2]);
        assert_eq!(broker.conversations.len(), MOST_OF_ONE);
    }

    #[test]
    fn nobody_gives_way_to_others_at_once() {
        let (mut broker, others) = full(Duration::ZERO);
        // As if all conversations had only just begun.
        let soon = Instant::now() + Duration::from_secs(60);
        broker
            .conversations
            .iter_mut()
            .for_each(|one| one.since = soon);
        let asking = ask(&broker);
        let mut told = Declined::default();
        broker.attend(&mut told);
        assert!(told.0.is_empty(), "{:?}", told.0);
        assert_eq!(broker.conversations.len(), MOST);
        drop((asking, others));
    }
}
