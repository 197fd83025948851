"""sessions.py PORT own|shared WORKERS, or sessions.py FD given: processes that answer only clients that greeted them, as
servers of QUIC, DTLS and RADIUS with EAP do.

own: each has a socket (SO_REUSEPORT); shared: all read one; given: one process, with this descriptor. A datagram is
`hello TEXT`, `TEXT`, or `nap MS TEXT`, which keeps its process for so long. The answer is `PID known TEXT` or `PID stranger TEXT`.
"""
import os
import signal
import socket
import sys
import time

number, kind = int(sys.argv[1]), sys.argv[2]


def bound(reuse):
    """A socket on the port."""
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if reuse:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(("127.0.0.1", number))
    return one


def serve(one):
    """Serves for ever."""
    known = set()
    while True:
        data, client = one.recvfrom(2048)
        words = data.split()
        if words[0] == b"nap":
            time.sleep(int(words[1]) / 1000)
        if words[0] == b"hello":
            known.add(client)
        who = b"known" if client in known else b"stranger"
        one.sendto(b"%d %s %s" % (os.getpid(), who, words[-1]), client)


if kind == "given":
    serve(socket.socket(fileno=number))
shared = bound(False) if kind == "shared" else None
workers = []
for _ in range(int(sys.argv[3])):
    pid = os.fork()
    if pid == 0:
        serve(shared or bound(True))
    workers.append(pid)


def stop(*_):
    """Ends everything."""
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    os._exit(0)


for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, stop)
while True:
    os.wait()
