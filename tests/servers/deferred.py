"""A server whose listener has TCP_DEFER_ACCEPT: it gets a connection with its first data. It answers one after the other.

    deferred.py FD            serves this descriptor
    deferred.py PORT COUNT    so many processes, with a socket each
"""

import os
import socket
import sys


def serve(listener):
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 30)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            continue
        with connection:
            if connection.recv(4096):
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nok\n")


if len(sys.argv) == 2:
    serve(socket.socket(fileno=int(sys.argv[1])))
for _ in range(int(sys.argv[2])):
    if not os.fork():
        serve(socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True))
os.wait()
