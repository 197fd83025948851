"""prefork.py ADDRESS PORT WORKERS [reuseport] [slow]: workers that block in accept() and answer one connection at a time.

They share one listening socket, or have one each with SO_REUSEPORT. Each sleeps for as long as a request says, and counts
before it answers. With `slow`, they begin to accept half a second after it listens.
"""

import os
import signal
import socket
import sys
import time
from urllib.parse import parse_qs, urlsplit

host, port, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
reuseport = "reuseport" in sys.argv[4:]
count = os.open(os.environ["WAKEONE_COUNT"], os.O_WRONLY | os.O_APPEND)


def listen():
    """Returns a listening socket."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuseport:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(4096)
    return listener


def answer(connection):
    """Reads one request and answers it."""
    request = b""
    while b"\r\n\r\n" not in request:
        more = connection.recv(4096)
        if not more:
            return
        request += more
    target = request.split(b" ", 2)[1].decode("latin-1")
    us = int(parse_qs(urlsplit(target).query).get("us", ["0"])[0])
    time.sleep(us / 1e6)
    os.write(count, b".")
    head = f"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\nX-Worker: {os.getpid()}\r\n\r\n"
    connection.sendall(head.encode() + b"ok\n")


def serve(listener):
    """Serves for ever."""
    if "slow" in sys.argv[4:]:
        time.sleep(0.5)
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                answer(connection)
            except OSError:
                pass


def end(*_):
    """Ends the workers, then this process."""
    for worker in children:
        os.kill(worker, signal.SIGTERM)
    for worker in children:
        os.waitpid(worker, 0)
    os._exit(0)


children = []
own = None if reuseport else listen()
for _ in range(workers):
    child = os.fork()
    if child == 0:
        serve(own or listen())
    children.append(child)
signal.signal(signal.SIGTERM, end)
print("started", flush=True)
while True:
    signal.pause()
