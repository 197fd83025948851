"""datagrams.py PORT THREADS: threads that receive from one UDP socket and answer each datagram with their number.

A datagram `end` ends the thread that gets it, and another one is started.
"""
import socket
import sys
import threading

port, count = int(sys.argv[1]), int(sys.argv[2])
shared = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
shared.bind(("127.0.0.1", port))


def serve():
    """Serves until told to end."""
    while True:
        data, peer = shared.recvfrom(2048)
        if data == b"end":
            break
        shared.sendto(b"%d %s" % (threading.get_native_id(), data), peer)
    threading.Thread(target=serve).start()


for _ in range(count):
    threading.Thread(target=serve).start()
