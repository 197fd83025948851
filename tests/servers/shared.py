"""shared.py MODE PORT WORKERS: a server whose workers share one listening socket, and are started again when they die.

MODE is how a worker waits: accept, epoll, exclusive, poll or select. Others are a way that is easily broken:
  early     the workers wait in an epoll set that was filled before the fork
  dup       each accepts from a duplicate of the listener
  passed    each gets the listener by SCM_RIGHTS, as a new number
  clone     the workers are made by clone(2), past the C library
  owner     the first process accepts as well
  relisten  the listener is shut down and listens again before the fork
  late      the workers are started once a connection waits
Answers with the worker's pid, or the word of ?word=WORD; after N ms where there is an ms=N. SIGTERM ends it.
"""
import ctypes
import os
import platform
import select
import signal
import socket
import struct
import sys
import time

mode, port, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
host = sys.argv[4] if len(sys.argv) > 4 else "127.0.0.1"
family = socket.AF_INET6 if ":" in host else socket.AF_INET
listener = socket.socket(family, socket.SOCK_STREAM)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((host, port))
listener.listen(128)
if mode == "relisten":
    listener.shutdown(socket.SHUT_RD)
    listener.listen(128)
early = None
if mode == "early":
    listener.setblocking(False)
    early = select.epoll()
    early.register(listener, select.EPOLLIN)


def waiter(own):
    """Returns a function that waits for a connection."""
    if mode in ("epoll", "exclusive"):
        own.setblocking(False)
        epoll = select.epoll()
        epoll.register(own, select.EPOLLIN | (1 << 28 if mode == "exclusive" else 0))
        return epoll.poll
    if mode == "early":
        return early.poll
    if mode == "poll":
        own.setblocking(False)
        poll = select.poll()
        poll.register(own, select.POLLIN)
        return poll.poll
    if mode == "select":
        own.setblocking(False)
        return lambda: select.select([own], [], [])
    return lambda: None


def serve(own):
    """Serves for ever."""
    wait = waiter(own)
    while True:
        wait()
        try:
            connection, _ = own.accept()
        except OSError:
            continue
        with connection:
            connection.setblocking(True)
            connection.settimeout(5)
            try:
                path = connection.recv(4096).split(b" ")[1]
                asked = dict(pair.split(b"=") for pair in path.partition(b"?")[2].split(b"&") if pair)
                time.sleep(int(asked.get(b"ms", 0)) / 1000)
                body = asked.get(b"word", str(os.getpid()).encode())
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            except (OSError, IndexError):
                pass


def work(channel):
    """One worker."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    own = listener
    if mode == "dup":
        own = listener.dup()
    if mode == "passed":
        _, numbers, _, _ = socket.recv_fds(channel, 1, 1)
        own = socket.socket(fileno=numbers[0])
        listener.close()
    serve(own)


def fork():
    """A new process, by the C library or past it."""
    if mode != "clone":
        return os.fork()
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    return ctypes.CDLL(None, use_errno=True).syscall(number, signal.SIGCHLD, 0, 0, 0, 0)


def start():
    """Starts a worker."""
    ours, theirs = socket.socketpair()
    pid = fork()
    if pid == 0:
        try:
            work(theirs)
        finally:
            os._exit(1)
    if mode == "passed":
        socket.send_fds(ours, [b"x"], [listener.fileno()])
    return pid


children = set()


def end(*_):
    """Ends with all workers."""
    for child in children:
        os.kill(child, signal.SIGKILL)
    os._exit(0)


signal.signal(signal.SIGTERM, end)
if mode == "late":
    # The library would see a poll or select, and take this process for a worker. This is tcpi_unacked.
    while not struct.unpack_from("I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)[0]:
        time.sleep(0.001)
for _ in range(workers):
    children.add(start())
if mode == "owner":
    serve(listener)
while True:
    pid, _ = os.wait()
    children.discard(pid)
    children.add(start())
