"""Threads with a socket each that serve one request at a time.

    thread_sockets.py PORT accept|epoll [PROCESSES]      four threads in each process; /work?us=N answers after N µs
"""

import os
import re
import select
import socket
import sys
import threading
import time

port, means = int(sys.argv[1]), sys.argv[2]
processes = int(sys.argv[3]) if len(sys.argv) > 3 else 1


def serve():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    wait = None
    if means == "epoll":
        listener.setblocking(False)
        epoll = select.epoll()
        epoll.register(listener, select.EPOLLIN)
        wait = epoll.poll
    while True:
        if wait:
            wait()
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            continue
        with connection:
            try:
                connection.setblocking(True)
                work = re.search(rb"us=(\d+)", connection.recv(4096))
                time.sleep(int(work[1]) / 1e6 if work else 0)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n")
            except OSError:
                pass


for _ in range(processes - 1):
    if not os.fork():
        break
for _ in range(4):
    threading.Thread(target=serve).start()
