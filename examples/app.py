"""An application for uvicorn and hypercorn: each request waits 2 ms, as for a database, and is answered by `hello`."""

import asyncio

HEADERS = [(b"content-length", b"6"), (b"content-type", b"text/plain")]


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await asyncio.sleep(0.002)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b"hello\n"})
