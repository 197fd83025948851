"""dropped.py PORT WORKERS: root opens a listener for each worker, without SO_REUSEADDR; the workers run as nobody.

A worker answers /keep and keeps the connection open, and is busy with /slow for two seconds.
"""
import os
import signal
import socket
import sys
import time

port, workers = int(sys.argv[1]), int(sys.argv[2])
NOBODY = 65534
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def listen():
    """Opens a listener."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    opened.bind(("127.0.0.1", port))
    opened.listen(64)
    return opened


def work(listener):
    """Serves for ever."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    kept = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(0.001)
            continue
        request = connection.recv(4096)
        if b"/slow" in request:
            time.sleep(2)
        connection.sendall(ANSWER)
        if b"/keep" in request:
            kept.append(connection)
        else:
            connection.close()


listeners = [listen() for _ in range(workers)]
pids = []
for listener in listeners:
    pid = os.fork()
    if pid == 0:
        work(listener)
    pids.append(pid)


def end(*_):
    """Ends with the workers."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
while True:
    time.sleep(100)
