"""Connections that stay open: each is told the worker's slot, as a byte, and held until SIGTERM. Descriptor: the first argument."""

import asyncio
import os
import signal
import socket
import sys

SLOT = bytes([int(os.environ["WAKEONE_SLOT"])])
HELD = set()


async def serve(reader, writer):
    HELD.add(writer)
    writer.write(SLOT)
    await reader.read()  # until the client ends it
    HELD.discard(writer)
    writer.close()


async def main():
    listener = socket.socket(fileno=int(sys.argv[1]))
    await asyncio.start_server(serve, sock=listener, backlog=1024)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    for writer in list(HELD):
        writer.close()
    await asyncio.sleep(0.1)
    os._exit(0)


asyncio.run(main())
