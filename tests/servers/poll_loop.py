"""poll_loop.py PORT: two processes that share a blocking listener, each with a loop around poll. Both are woken for a connection, one
gets it, and the other waits in accept for the next one, while those that it has wait for an answer."""

import os
import select
import socket
import sys
import time

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def serve(listener):
    poll, open_ones = select.poll(), {}
    poll.register(listener, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                # The other has seen it, too.
                time.sleep(0.02)
                connection, _ = listener.accept()
                open_ones[connection.fileno()] = connection
                poll.register(connection, select.POLLIN)
            elif open_ones[fd].recv(4096):
                open_ones[fd].sendall(ANSWER)
            else:
                poll.unregister(fd)
                open_ones.pop(fd).close()


listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
for _ in range(2):
    if not os.fork():
        serve(listener)
os.wait()
