"""Sessions over UDP: a worker knows only the clients that greeted it, as QUIC, DTLS and RADIUS with EAP do.

sessions.py serve FD|HOST:PORT[:shared]: one worker on an inherited socket or on a SO_REUSEPORT socket of its own; with
`shared`, four forked workers on one socket. One datagram in fifty keeps its worker 20 ms.
sessions.py ask HOST PORT SECONDS SEED: 40 clients send 400 datagrams a second. An answer from a worker that does not know its
client is a lost session; the client greets again. Prints the result as one line of JSON.
"""

import json
import os
import random
import select
import signal
import socket
import sys
import time

CLIENTS, RATE, BUSY, WORKERS = 40, 400, 0.02, 4


def bound(host, port, reuse):
    """Returns a socket on the address."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if reuse:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    return made


def work(own):
    """Serves for ever."""
    known, draw = set(), random.Random(os.getpid())
    while True:
        data, client = own.recvfrom(2048)
        if draw.random() < 0.02:
            time.sleep(BUSY)
        if data[:1] == b"H":
            known.add(client)
        own.sendto(data[1:] + (b" ok" if client in known else b" stranger"), client)


def serve(place):
    """Serves on a descriptor, a socket of its own, or a shared one."""
    print("serving", flush=True)
    if ":" not in place:
        work(socket.socket(fileno=int(place)))
    host, port, *shared = place.split(":")
    own = bound(host, int(port), not shared)
    pids = []
    while shared and len(pids) < WORKERS:
        pid = os.fork()
        if pid == 0:
            work(own)
        pids.append(pid)
    if not shared:
        work(own)

    def end(*_):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    while True:
        signal.pause()


class Asker:
    """The clients, what they sent, and what came back."""

    def __init__(self, host, port):
        self.poller, self.sockets = select.epoll(), {}
        self.sent, self.due, self.lost, self.latency_ms = 0, {}, 0, []
        for _ in range(CLIENTS):
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.connect((host, port))
            made.setblocking(False)
            self.poller.register(made, select.EPOLLIN)
            self.sockets[made.fileno()] = made

    def send(self, client, kind):
        """Sends a datagram that bears a number."""
        number = b"%d" % self.sent
        self.sent += 1
        try:
            client.send(kind + number)
            self.due[number] = time.monotonic()
        except OSError:
            self.lost += 1

    def take(self, timeout):
        """Takes what has come."""
        for fd, _ in self.poller.poll(timeout):
            try:
                number, word = self.sockets[fd].recv(100).split()
            except OSError:
                continue
            sent = self.due.pop(number, None)
            if sent is None:
                continue
            self.latency_ms.append((time.monotonic() - sent) * 1e3)
            if word == b"stranger":
                self.lost += 1
                self.send(self.sockets[fd], b"H")


def ask(host, port, seconds, seed):
    """Sends the load."""
    asker, draw = Asker(host, port), random.Random(seed)
    every = list(asker.sockets.values())
    for client in every:
        asker.send(client, b"H")
        asker.take(0.005)
    start, due = time.monotonic(), 0.0
    while due < seconds:
        while time.monotonic() - start >= due:
            asker.send(draw.choice(every), b"D")
            due += draw.expovariate(RATE)
        asker.take(0.001)
    deadline = time.monotonic() + 2
    while asker.due and time.monotonic() < deadline:
        asker.take(0.01)
    lost = asker.lost + len(asker.due)
    print(json.dumps({"sent": asker.sent, "lost": lost, "latency_ms": asker.latency_ms}))


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    ask(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
