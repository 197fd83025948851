"""A prefork server on one shared socket: MODE is accept, epoll, exclusive, poll or select."""
import os
import select
import socket
import sys

mode, port, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
listener = socket.create_server(("127.0.0.1", port), backlog=64)
EPOLLEXCLUSIVE = 1 << 28


def wait():
    """Returns a function that waits for a connection."""
    if mode == "accept":
        return lambda: None
    listener.setblocking(False)
    if mode in ("epoll", "exclusive"):
        epoll = select.epoll()
        epoll.register(listener, select.EPOLLIN | (EPOLLEXCLUSIVE if mode == "exclusive" else 0))
        return epoll.poll
    if mode == "poll":
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        return poll.poll
    return lambda: select.select([listener], [], [])


def work():
    """Serves for ever."""
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
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok")


children = []
for _ in range(workers):
    child = os.fork()
    if child == 0:
        work()
    children.append(child)
for child in children:
    os.waitpid(child, 0)
