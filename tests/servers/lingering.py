"""lingering.py PORT WORKERS: forked event loops that share a listener. They close a connection a minute after its client has."""

import asyncio
import os
import socket
import sys

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=512)
listener.setblocking(False)


async def serve(reader, writer):
    """Answers each request by the process id."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nX-Worker: %d\r\nContent-Length: 2\r\n\r\nhi" % os.getpid())
            if b"close" in head.lower():
                break
    except (OSError, asyncio.IncompleteReadError):
        await asyncio.sleep(60)
    writer.close()


async def main():
    """Serves until it is killed."""
    server = await asyncio.start_server(serve, sock=listener)
    await server.serve_forever()


for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        asyncio.run(main())
while True:
    os.wait()
