#!/usr/bin/env python3
"""waits.py PORT KIND: workers that wait for a shared listener in a way that another process cannot change."""
import os, select, socket, sys

port, kind = int(sys.argv[1]), sys.argv[2]
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen(64)
listener.setblocking(False)
ONE_SHOT = select.EPOLLIN | select.EPOLLONESHOT
shared = select.epoll()
if kind == "one-set":
    shared.register(listener, select.EPOLLIN)
for _ in range(0 if kind == "alone" else 1):
    if os.fork() == 0:
        break
if kind == "poll":
    waiter = select.poll()
    waiter.register(listener, select.POLLIN)
elif kind == "one-set":
    waiter = shared
else:
    waiter = select.epoll()
    waiter.register(listener, ONE_SHOT if kind == "one-shot" else select.EPOLLIN)
while True:
    waiter.poll()
    try:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
        connection.close()
    except OSError:
        pass
    if kind == "one-shot":
        waiter.modify(listener, ONE_SHOT)
