"""datagrams.py PORT THREADS [WAIT]: threads that receive from one UDP socket and answer each datagram with their number.

WAIT: recv (default); `epoll`: all wait on one epoll set, `unbound`: which has the socket since before it was bound. A
datagram `end` ends the thread that gets it, and another one is started.
"""
import select
import socket
import sys
import threading

port, count = int(sys.argv[1]), int(sys.argv[2])
wait = sys.argv[3] if len(sys.argv) > 3 else "recv"
shared = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
epoll = select.epoll()
if wait == "unbound":
    epoll.register(shared, select.EPOLLIN)
shared.bind(("127.0.0.1", port))
if wait == "epoll":
    epoll.register(shared, select.EPOLLIN)
shared.setblocking(wait == "recv")


def receive():
    """One datagram."""
    while True:
        if wait != "recv":
            epoll.poll()
        try:
            return shared.recvfrom(2048)
        except BlockingIOError:
            pass


def serve():
    """Serves until told to end."""
    while True:
        data, peer = receive()
        if data == b"end":
            break
        shared.sendto(b"%d %s" % (threading.get_native_id(), data), peer)
    threading.Thread(target=serve).start()


for _ in range(count):
    threading.Thread(target=serve).start()
