"""A plain asyncio server on the first descriptor of LISTEN_FDS. SIGTERM: what was accepted is finished."""

import asyncio
import json
import os
import signal
import socket

ME = json.dumps({"slot": int(os.environ["WAKEONE_SLOT"]), "pid": os.getpid()}).encode()


async def serve(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(ME), ME))
    await writer.drain()
    writer.close()


async def main():
    listener = socket.socket(fileno=3)
    server = await asyncio.start_server(serve, sock=listener)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    loop.remove_reader(listener)  # accept no more; close() would drop what was accepted just now
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)
    server.close()


asyncio.run(main())
