#!/usr/bin/env python3
"""Counts how evenly bursts of held connections are shared by event loops (node) under `wakeone run`.

    benches/held-bursts.py [WORKERS] [CONNECTIONS] [TRIES] [ROUNDS] [BUSY] [WAKEONE]     (default 3 17 50 2 0)

Each try opens all connections at once, counts those of each slot, and closes them. Servers with the default patience, with
a longer one and without rescue alternate. BUSY processes compute meanwhile, so that workers wait for a CPU. It runs in a network namespace of its own, as root, and needs node and iproute2.
One process opens the connections over loopback, so each handshake ends before the next SYN.
"""

import collections
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/servers/node_server.js")
WAYS = [[], ["--stuck-after", "50ms"], ["--stuck-after", "2s"], ["--no-rescue"]]
ADDRESS = ("127.0.0.1", 8080)
PATIENCE_S = 30


def start(wakeone, folder, workers, way):
    listen = ["-w", str(workers), "-l", "%s:%d" % ADDRESS, "--name", f"held-bursts-{os.getpid()}"]
    command = [wakeone, "run", *listen, "--runtime-dir", folder, *way, "--", "node", SERVER, "{fd}"]
    with open(f"{folder}/log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    until(lambda: "ready: " in open(f"{folder}/log").read() or server.poll() is not None, "the server is ready")
    if server.poll() is not None:
        sys.exit(f"held-bursts: wakeone run ended: {open(f'{folder}/log').read()}")
    return server


def until(done, what):
    end = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > end:
            sys.exit(f"held-bursts: waited {PATIENCE_S} s in vain until {what}")
        time.sleep(0.01)


def active(wakeone, folder):
    command = [wakeone, "status", "--json", "--runtime-dir", folder]
    status = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return [slot["active"] for slot in status["groups"][0]["slots"]]


def burst(wakeone, folder, connections):
    """The connections of each slot, the most first."""
    held = []
    for _ in range(connections):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(ADDRESS)
    for one in held:
        select.select([], [one], [], PATIENCE_S)
    until(lambda: sum(active(wakeone, folder)) == connections, "all connections are counted")
    time.sleep(0.02)  # a queue that is going to be moved has been moved
    shares = tuple(sorted(active(wakeone, folder), reverse=True))
    for one in held:
        one.close()
    until(lambda: sum(active(wakeone, folder)) == 0, "all connections are closed")
    return shares


def main():
    numbers = [int(text) for text in sys.argv[1:6]]
    workers, connections, tries, rounds, busy = numbers + [3, 17, 50, 2, 0][len(numbers) :]
    wakeone = os.path.realpath(sys.argv[6] if len(sys.argv) > 6 else "target/release/wakeone")
    if "HELD_BURSTS_ISOLATED" not in os.environ:
        os.environ["HELD_BURSTS_ISOLATED"] = "1"
        os.execvp("unshare", ["unshare", "-n", sys.executable, os.path.abspath(__file__), *sys.argv[1:]])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    computing = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        compare(wakeone, workers, connections, tries, rounds)
    finally:
        for one in computing:
            one.kill()
            one.wait()


def compare(wakeone, workers, connections, tries, rounds):
    found = [collections.Counter() for _ in WAYS]
    for _ in range(rounds):
        for way, counter in zip(WAYS, found):
            with tempfile.TemporaryDirectory() as folder:
                server = start(wakeone, folder, workers, way)
                try:
                    counter.update(burst(wakeone, folder, connections) for _ in range(tries))
                finally:
                    server.send_signal(signal.SIGTERM)
                    server.wait()
    for way, counter in zip(WAYS, found):
        even = sum(count for shares, count in counter.items() if shares[0] - shares[-1] <= 1)
        worst = "/".join(map(str, max(counter)))
        name = " ".join(way) or "default"
        print(f"{name:<20} within one of even in {even} of {tries * rounds}, worst {worst}")


main()
