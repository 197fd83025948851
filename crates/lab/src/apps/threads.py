"""threads.py HOST PORT THREADS: threads that share a listener, each with an event loop and an epoll set of its own.

A request blocks its loop for as long as it says, is counted before it is answered, and names the thread.
"""

import asyncio
import os
import socket
import sys
import threading
import time
from urllib.parse import parse_qs, urlsplit

listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=4096)
listener.setblocking(False)
count = os.open(os.environ["WAKEONE_COUNT"], os.O_WRONLY | os.O_APPEND)


async def serve(reader, writer):
    """Answers the requests of one connection."""
    name = threading.current_thread().name
    try:
        while True:
            request = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            us = int(parse_qs(urlsplit(request.split(" ", 2)[1]).query).get("us", ["0"])[0])
            time.sleep(us / 1e6)
            os.write(count, b".")
            writer.write(f"HTTP/1.1 200 OK\r\nX-Worker: {name}\r\nContent-Length: 3\r\n\r\nok\n".encode())
            if "connection: close" in request.lower():
                break
    except (asyncio.IncompleteReadError, OSError):
        pass
    writer.close()


async def loop():
    """Serves until the process ends."""
    server = await asyncio.start_server(serve, sock=listener.dup())
    await server.serve_forever()


for number in range(int(sys.argv[3])):
    threading.Thread(target=asyncio.run, args=(loop(),), name=f"thread-{number}").start()
print("started", flush=True)
