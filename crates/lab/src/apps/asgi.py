"""Sleeps for as long as the request says, on the worker's only thread, and counts before it answers."""

import os
import time
from urllib.parse import parse_qs

COUNT = os.open(os.environ["WAKEONE_COUNT"], os.O_WRONLY | os.O_APPEND)


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    us = int(parse_qs(scope["query_string"].decode()).get("us", ["0"])[0])
    time.sleep(us / 1e6)
    os.write(COUNT, b".")
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"3"), (b"x-worker", str(os.getpid()).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok\n"})
