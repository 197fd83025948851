"""A plain asyncio server on the descriptors of LISTEN_FDS. SIGTERM: requests in hand are finished. SIGUSR1: it shuts its
listeners down, and serves on."""

import asyncio
import json
import os
import signal
import socket

ME = json.dumps({"slot": int(os.environ["WAKEONE_SLOT"]), "pid": os.getpid()}).encode()
ANSWER = b"HTTP/1.1 200 OK\r\nX-Worker: %d\r\nContent-Length: %d\r\n\r\n%s" % (os.getpid(), len(ME), ME)
idle = set()


async def serve(reader, writer):
    head = b""
    while b"close" not in head:
        if head:
            idle.add(asyncio.current_task())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        except (OSError, asyncio.IncompleteReadError):
            break
        finally:
            idle.discard(asyncio.current_task())
        writer.write(ANSWER)
        await writer.drain()
    writer.close()


async def main():
    given = range(3, 3 + int(os.environ["LISTEN_FDS"]))
    listeners = [socket.socket(fileno=number) for number in given]
    servers = [await asyncio.start_server(serve, sock=listener) for listener in listeners]
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # A listener that was shut down fails again and again.
    loop.set_exception_handler(lambda *_: None)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    shut_down = lambda: [listener.shutdown(socket.SHUT_RDWR) for listener in listeners]
    loop.add_signal_handler(signal.SIGUSR1, shut_down)
    await stop.wait()
    for listener in listeners:
        loop.remove_reader(listener)  # accept no more; close() would drop what was accepted just now
    while tasks := asyncio.all_tasks() - {asyncio.current_task()} - idle:
        await asyncio.wait(tasks, timeout=0.1)
    for server in servers:
        server.close()
    os._exit(0)


asyncio.run(main())
