"""A server for the tests of `wakeone run`: one request a connection, answered with what this worker is.

    whoami.py [--deaf] [FD…]      serves these descriptors, or those of LISTEN_FDS
    whoami.py --at HOST:PORT      opens a listener of its own

`/slow?ms=N` answers at once and sends the body after N ms; `/spin?ms=N` is busy all that time; `/keep?mib=N` keeps so much
memory. SIGTERM: the request in hand is finished, no other is accepted; with --deaf it is ignored.
"""

import json
import os
import select
import signal
import socket
import sys
import time


def descriptors():
    """What is open before we open anything (the listing's own descriptor is closed again by then)."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return sorted(number for number in numbers if os.path.exists(f"/proc/self/fd/{number}"))


def about(fds):
    status = dict(line.split(":\t", 1) for line in open("/proc/self/status", errors="replace").read().splitlines() if ":\t" in line)
    return {
        "slot": int(os.environ["WAKEONE_SLOT"]),
        "pid": os.getpid(),
        "fds": fds,
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": os.getgroups(),
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("LISTEN_", "NOTIFY_", "HOME", "USER"))},
        "capabilities": {key: status[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
        "blocked": status["SigBlk"],
        "ignored": status["SigIgn"],
        "arguments": sys.argv[1:],
    }


def main():
    me = about(descriptors())
    if "--at" in sys.argv:
        host, port = sys.argv[sys.argv.index("--at") + 1].rsplit(":", 1)
        return serve(me, [socket.create_server((host, int(port)), backlog=512)])
    numbers = [int(arg) for arg in sys.argv[1:] if arg.isdigit()] or range(3, 3 + int(os.environ["LISTEN_FDS"]))
    serve(me, [socket.socket(fileno=number) for number in numbers])


def serve(me, listeners):
    kept = []
    wake, stop = socket.socketpair()
    stop.setblocking(False)
    signal.set_wakeup_fd(stop.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    for listener in listeners:
        listener.setblocking(False)
    while True:
        ready, _, _ = select.select([wake, *listeners], [], [])
        if wake in ready and "--deaf" not in sys.argv:
            return
        if wake in ready:
            wake.recv(1)
        for listener in filter(listeners.__contains__, ready):
            try:
                connection, _ = listener.accept()
            except OSError:
                continue  # another was faster, or the queue is being moved
            with connection:
                connection.settimeout(5)
                path = connection.recv(4096).split(b" ")[1]
                body = json.dumps({**me, "address": listener.getsockname()[:2]}).encode()
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
                if path.startswith(b"/slow?ms="):
                    time.sleep(int(path[9:]) / 1000)
                elif path.startswith(b"/spin?ms="):
                    until = time.monotonic() + int(path[9:]) / 1000
                    while time.monotonic() < until:
                        pass
                elif path.startswith(b"/keep?mib="):
                    kept.append(os.urandom(int(path[10:]) << 20))
                connection.sendall(body)


main()
