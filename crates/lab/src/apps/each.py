"""each.py HOST PORT WORKERS tcp|udp|udp-shared COMMAND...: starts a server that is one worker, WORKERS times.

Each has a socket of its own; with udp-shared all have the same. Where the command has {fd}, each worker inherits a bound
SO_REUSEPORT socket, on which it calls listen() itself. SIGHUP replaces all of them: the new ones start, and when their sockets
are there, the old ones get SIGTERM. A worker that ends of its own accord is reported, and not started again.
"""

import os
import signal
import socket
import sys
import time

host, port, wanted, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
command = sys.argv[5:]
kind, _, shares = kind.partition("-")
workers = set()
shared = []


def bound():
    """Returns a socket for one worker, which does not listen yet."""
    if shared:
        return shared[0]
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if kind == "tcp":
        # As servers set it. Without it each move takes longer: it must be known that the listener can listen again.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, port))
    made.set_inheritable(True)
    if shares:
        shared.append(made)
    return made


def start():
    """Starts one worker."""
    inherited = bound() if any("{fd}" in word for word in command) else None
    words = [word.replace("{fd}", str(inherited.fileno())) if inherited else word for word in command]
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(words[0], words)
    if inherited and not shares:
        inherited.close()
    workers.add(pid)


def sockets():
    """How many sockets serve the port."""
    place = f":{port:04X}"
    served = "0A" if kind == "tcp" else "07"
    with open(f"/proc/net/{kind}") as table:
        rows = [line.split() for line in table]
    return sum(row[1].endswith(place) and row[3] == served for row in rows)


def wait_for(count):
    """Waits until so many sockets serve, or a minute."""
    deadline = time.monotonic() + 60
    while sockets() < count and time.monotonic() < deadline:
        time.sleep(0.01)


def reap(pid, status):
    """Forgets a worker that ended unasked."""
    workers.discard(pid)
    print(f"a worker ended: {pid}, status {status}", flush=True)


def end(pids):
    """SIGTERM, and SIGKILL after five seconds."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while pids and time.monotonic() < deadline:
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in pids:
        print(f"a worker did not end: {pid}", flush=True)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def roll():
    """Replaces all workers."""
    old = list(workers)
    workers.clear()
    for _ in range(wanted):
        start()
    wait_for(wanted + len(old))
    end(old)
    print("rolled", flush=True)


signals = [signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
for _ in range(wanted):
    start()
wait_for(1 if shares else wanted)
print("started", flush=True)
while True:
    came = signal.sigwait(signals)
    if came == signal.SIGTERM:
        end(list(workers))
        break
    if came == signal.SIGHUP:
        roll()
        continue
    for pid in list(workers):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            reap(pid, status)
