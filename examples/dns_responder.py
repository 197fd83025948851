"""Answers every DNS question for an address with 192.0.2.1.

An unprivileged receiver for `wakeone run -l udp://`: it reads the socket that it is given
(descriptor 3, LISTEN_FDS) and knows nothing of the others.

    wakeone run -w 4 -l udp://:5353 --affinity none -- python3 examples/dns_responder.py
"""

import os
import socket
import struct
import sys

HEADER = 12
ADDRESS = socket.inet_aton("192.0.2.1")
TTL_S = 60


def answer(query):
    """The answer to a query (RFC 1035, section 4); None for what is no query."""
    if len(query) < HEADER or query[2] & 0x80 or query[4:6] != b"\0\1":
        return None
    end = HEADER
    while end < len(query) and query[end]:
        if query[end] > 63:
            return None
        end += 1 + query[end]
    if end + 5 > len(query):
        return None
    found = query[end + 1 : end + 5] == b"\0\1\0\1"  # A, IN
    head = query[:2] + bytes([0x84 | query[2] & 0x79, 0]) + struct.pack(">HHHH", 1, found, 0, 0)
    record = struct.pack(">HHHLH", 0xC00C, 1, 1, TTL_S, 4) + ADDRESS if found else b""
    return head + query[HEADER : end + 5] + record


def main():
    if "LISTEN_FDS" not in os.environ:
        sys.exit(f"dns_responder: start it with `wakeone run -l udp://:5353 -- python3 {sys.argv[0]}`")
    given = socket.socket(fileno=3)
    while True:
        query, client = given.recvfrom(1500)
        reply = answer(query)
        if reply:
            try:
                given.sendto(reply, client)
            except OSError as error:  # who asked may be gone already
                print(f"dns_responder: an answer was not sent: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
