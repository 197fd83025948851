"""kept_listener.py PORT KEEPERS: the server has ended, and processes that inherited its listener keep it."""

import os
import socket
import sys

listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen(1024)
listener.set_inheritable(True)
for _ in range(int(sys.argv[2]) - 1):
    if not os.fork():
        break
os.execvp("sleep", ["sleep", "600"])
