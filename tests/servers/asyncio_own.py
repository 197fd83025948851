"""Plain asyncio servers, each with a socket of its own: asyncio_own.py PORT WORKERS. A request for /bMS blocks its worker for
MS ms."""

import asyncio
import os
import sys
import time


async def serve(reader, writer):
    path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
    if path.startswith(b"/b"):
        time.sleep(int(path[2:]) / 1000)
    body = b"%d" % os.getpid()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), reuse_port=True)
    await server.serve_forever()


for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        asyncio.run(main())
while True:
    os.wait()
