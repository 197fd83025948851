#!/usr/bin/env python3
"""unix_loops.py NAME HOW WORKERS [PORT]: forked event loops that share a UNIX listener, and keep connections.

NAME is a path, or @ and an abstract name. HOW is how a worker waits: wake-all, exclusive, or poll. With a PORT they share a TCP
listener too. Answers with the worker's pid, in the header X-Worker as well; after N ms of work where the query has work=N.
"""
import os
import re
import select
import socket
import sys
import time

name, how, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
EVENTS = select.EPOLLIN | (1 << 28 if how == "exclusive" else 0)


def listeners():
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0" + name[1:] if name.startswith("@") else name)
    unix.listen(512)
    yield unix
    if len(sys.argv) > 4:
        yield socket.create_server(("127.0.0.1", int(sys.argv[4])), backlog=512)


def answer(connection):
    try:
        asked = connection.recv(65536)
    except OSError:
        asked = b""
    if not asked:
        return False
    work = re.search(rb"[?&]work=(\d+)", asked)
    end = time.thread_time() + (int(work[1]) / 1000 if work else 0)
    while time.thread_time() < end:
        pass
    me = str(os.getpid()).encode()
    head = b"HTTP/1.1 200 OK\r\nX-Worker: " + me + b"\r\nContent-Length: " + str(len(me)).encode()
    connection.sendall(head + b"\r\n\r\n" + me)
    return b"connection: close" not in asked.lower()


shared = {one.fileno(): one for one in listeners()}
for one in shared.values():
    one.setblocking(False)
for _ in range(workers - 1):
    if os.fork() == 0:
        break
loop = select.poll() if how == "poll" else select.epoll()
for one in shared.values():
    loop.register(one, select.POLLIN if how == "poll" else EVENTS)
connections = {}
while True:
    for number, _ in loop.poll():
        if number in shared:
            try:
                connection, _ = shared[number].accept()
            except BlockingIOError:
                continue
            connections[connection.fileno()] = connection
            loop.register(connection, select.POLLIN)
        elif not answer(connections[number]):
            loop.unregister(number)
            connections.pop(number).close()
