"""Workers in event loops that write down whatever they see of a rescue: events that a listener never has, and errors of
accept. Each has a socket of its own at PORT.

  epoll_watch.py PORT WORKERS LOG KIND

KIND: words joined by commas. edge: edge-triggered; exclusive: EPOLLEXCLUSIVE; copied: the epoll set has two descriptors;
twice: the listener is in the set under two numbers; forked: two processes of a worker wait in one set; at0: the listener is
descriptor 0. A request for /bMS blocks its worker for MS ms."""

import os
import select
import signal
import socket
import sys
import time

port, workers, log, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")


def seen(what):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}: {what}\n")


def answer(connection):
    connection.settimeout(20)
    try:
        path = connection.recv(4096).split(b" ")[1]
        if path.startswith(b"/b"):
            time.sleep(int(path[2:]) / 1000)
        body = b"%d" % os.getpid()
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    except (OSError, IndexError):
        pass
    connection.close()


def accept(listener):
    """Returns whether there may be another connection."""
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return False
    except OSError as error:
        seen(f"accept: {error}")
        return False
    answer(connection)
    return True


def work():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    listener.setblocking(False)
    if "at0" in kind:
        os.dup2(listener.fileno(), 0)
        listener.close()
        listener = socket.socket(fileno=0)
    epoll = select.epoll()
    if "copied" in kind:
        os.dup(epoll.fileno())
    events = select.EPOLLIN
    events |= select.EPOLLET if "edge" in kind else 0
    events |= select.EPOLLEXCLUSIVE if "exclusive" in kind else 0
    numbers = [listener.fileno()] + [os.dup(listener.fileno())] * ("twice" in kind)
    for number in numbers:
        epoll.register(number, events)
    if "forked" in kind:
        os.fork()
    while True:
        for _, what in epoll.poll():
            if what & ~select.EPOLLIN:
                seen(f"events: {what:x}")
            while accept(listener) and "edge" in kind:
                pass


os.setpgid(0, 0)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
for _ in range(workers):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
signal.pause()
