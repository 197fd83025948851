"""prefork.py MODE PORT WORKERS [MS]: a prefork server whose requests sleep for MS.

On one shared socket, MODE is the way of waiting: accept, epoll, exclusive, poll or select. Otherwise it is
  own            accept, each worker on a socket of its own in a reuseport group
  hangs          the same, the master has opened all sockets, and the first worker never accepts
  group-of-one   exclusive, on one socket that has SO_REUSEPORT
  mptcp          accept, on a Multipath TCP socket
"""
import os
import select
import socket
import sys
import time

mode, port, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
work_s = float(sys.argv[4]) / 1000 if len(sys.argv) > 4 else 0
EPOLLEXCLUSIVE = 1 << 28
IPPROTO_MPTCP = 262


def listen():
    """Opens the listener."""
    protocol = IPPROTO_MPTCP if mode == "mptcp" else 0
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if mode in ("own", "hangs", "group-of-one"):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    opened.bind(("127.0.0.1", port))
    opened.listen(1024)
    return opened


listener = None if mode in ("own", "hangs") else listen()
listeners = [listen() for _ in range(workers)] if mode == "hangs" else []


def wait():
    """Returns a function that waits for a connection."""
    if mode in ("accept", "own", "hangs", "mptcp"):
        return lambda: None
    listener.setblocking(False)
    if mode in ("epoll", "exclusive", "group-of-one"):
        epoll = select.epoll()
        epoll.register(listener, select.EPOLLIN | (0 if mode == "epoll" else EPOLLEXCLUSIVE))
        return epoll.poll
    if mode == "poll":
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        return poll.poll
    return lambda: select.select([listener], [], [])


def work(nth):
    """Serves for ever."""
    global listener
    listener = listener or (listeners[nth] if listeners else listen())
    if mode == "hangs" and nth == 0:
        time.sleep(600)
    until_ready = wait()
    while True:
        until_ready()
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            continue
        with connection:
            connection.setblocking(True)
            connection.recv(4096)
            time.sleep(work_s)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok")


children = []
for nth in range(workers):
    child = os.fork()
    if child == 0:
        work(nth)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
