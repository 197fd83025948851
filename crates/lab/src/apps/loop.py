"""loop.py FD none|pool|child: an asyncio worker on the socket FD, without helpers, with a pool of forked processes, or with a
child command that inherits the socket.

It blocks its loop for as long as a request says, counts before it answers, and keeps connections.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from urllib.parse import parse_qs, urlsplit

listener = socket.socket(fileno=int(sys.argv[1]))
os.set_inheritable(listener.fileno(), True)
count = os.open(os.environ["WAKEONE_COUNT"], os.O_WRONLY | os.O_APPEND)
helpers = None
if sys.argv[2] == "pool":
    helpers = ProcessPoolExecutor(2, mp_context=get_context("fork"))
    list(helpers.map(abs, [1, 2]))
elif sys.argv[2] == "child":
    helpers = subprocess.Popen(["sleep", "600"], close_fds=False)


async def serve(reader, writer):
    """Answers the requests of one connection."""
    try:
        while True:
            request = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            us = int(parse_qs(urlsplit(request.split(" ", 2)[1]).query).get("us", ["0"])[0])
            time.sleep(us / 1e6)
            os.write(count, b".")
            writer.write(f"HTTP/1.1 200 OK\r\nX-Worker: {os.getpid()}\r\nContent-Length: 3\r\n\r\nok\n".encode())
            await writer.drain()
            if "connection: close" in request.lower():
                break
    except (asyncio.IncompleteReadError, OSError):
        pass
    writer.close()


async def main():
    """Serves until SIGTERM, and then for as long as what was accepted needs."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = await asyncio.start_server(serve, sock=listener, backlog=4096)
    print("serving", flush=True)
    await ended.wait()
    server.close()
    await asyncio.sleep(0.2)


asyncio.run(main())
if isinstance(helpers, subprocess.Popen):
    helpers.kill()
elif helpers:
    for helper in list(helpers._processes.values()):
        helper.kill()
os._exit(0)
