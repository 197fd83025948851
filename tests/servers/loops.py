#!/usr/bin/env python3
"""loops.py PORT THREADS: threads that share a listener, each with an event loop and an epoll set of its own."""
import asyncio, socket, sys, threading

listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen(512)
listener.setblocking(False)


async def serve(reader, writer):
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            name = threading.current_thread().name.encode()
            writer.write(b"HTTP/1.1 200 OK\r\nX-Worker: " + name + b"\r\nContent-Length: 2\r\n\r\nhi")
            if b"close" in head.lower():
                break
        writer.close()
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


async def loop():
    server = await asyncio.start_server(serve, sock=listener.dup())
    await server.serve_forever()


for number in range(int(sys.argv[2])):
    threading.Thread(target=asyncio.run, args=(loop(),), name=f"thread-{number}").start()
