"""Two workers with a socket each that serve one request at a time. Each has a thread that waits in poll on a pipe, as Puma's and
prometheus_client's do.

    helper_thread.py PORT      serves there; /work?us=N answers after N µs
"""

import os
import re
import select
import socket
import sys
import threading
import time


def wait_for_ever():
    reader, _writer = os.pipe()
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    while True:
        poller.poll()


def serve():
    threading.Thread(target=wait_for_ever, daemon=True).start()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen(512)
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                work = re.search(rb"us=(\d+)", connection.recv(4096))
                time.sleep(int(work[1]) / 1e6 if work else 0)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n")
            except OSError:
                pass


for _ in range(2):
    if not os.fork():
        serve()
os.wait()
