"""An event loop around the listener that it was given, as tokio's: it accepts until no connection is left, and does not set the
listener non-blocking.

    event_loop.py level|edge FD                 serves this descriptor; ends at SIGTERM
    event_loop.py level|edge ADDRESS:PORT HOW   opens a listener itself: `blocking`; or one that it never takes a second connection
                                                from, and calls accept (`spins`) or epoll_wait (`polls`) without end

Each connection gets one answer: this worker, as JSON.
"""

import json
import os
import select
import signal
import socket
import sys

EVENTS = {"level": select.EPOLLIN, "edge": select.EPOLLIN | select.EPOLLET}


def given():
    if ":" not in sys.argv[2]:
        return socket.socket(fileno=int(sys.argv[2]))
    host, port = sys.argv[2].split(":")
    return socket.create_server((host, int(port)), reuse_port=True)


def spin(listener):
    connection, _ = listener.accept()
    connection.close()
    listener.setblocking(False)
    if sys.argv[3] == "polls":
        # A listener is never ready to be written, but this end of a pipe is.
        loop, (reader, writer) = select.epoll(), os.pipe()
        loop.register(listener, select.EPOLLIN)
        loop.register(writer, select.EPOLLOUT)
        while True:
            loop.poll()
    while True:
        try:
            listener.accept()
        except BlockingIOError:
            pass


def main():
    listener = given()
    if sys.argv[3:] in (["spins"], ["polls"]):
        spin(listener)
    me = {"slot": int(os.environ.get("WAKEONE_SLOT", 0)), "pid": os.getpid(), "listener": listener.getsockname()[:2]}
    body = json.dumps({**me, "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    wake, stop = socket.socketpair()
    stop.setblocking(False)
    signal.set_wakeup_fd(stop.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    loop, connections = select.epoll(), {}
    loop.register(wake, select.EPOLLIN)
    loop.register(listener, EVENTS[sys.argv[1]])
    while True:
        for fd, _ in loop.poll():
            if fd == wake.fileno():
                return
            if fd != listener.fileno():
                with connections.pop(fd) as connection:
                    loop.unregister(fd)
                    if connection.recv(4096):
                        connection.sendall(answer)
                continue
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    break
                connections[connection.fileno()] = connection
                loop.register(connection, select.EPOLLIN)


main()
