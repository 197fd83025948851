"""udp_sockets.py PORT KIND: two processes with a socket of UDP each, of one address.

KIND: group (SO_REUSEPORT before bind), or what makes no group of them: address (SO_REUSEADDR only), mixed (one has
SO_REUSEPORT), after (SO_REUSEPORT after bind), users (of two users), multicast
"""

import os
import socket
import sys

port, kind = int(sys.argv[1]), sys.argv[2]


def bound(nth):
    """The socket of a process."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if kind != "group":
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kind in ("group", "users") or kind == "mixed" and nth:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    opened.bind(("239.1.2.3" if kind == "multicast" else "127.0.0.1", port))
    if kind == "after":
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return opened


for nth in range(2):
    if not os.fork():
        if kind == "users":
            os.setuid(65534 * nth)
        receiver = bound(nth)
        while True:
            _, sender = receiver.recvfrom(2048)
            receiver.sendto(b"%d" % nth, sender)
for _ in range(2):
    os.wait()
