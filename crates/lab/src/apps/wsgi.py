"""Sleeps for as long as the request says, on the worker's only thread, and counts before it answers."""

import os
import time
from urllib.parse import parse_qs

COUNT = os.open(os.environ["WAKEONE_COUNT"], os.O_WRONLY | os.O_APPEND)


def app(environ, start_response):
    us = int(parse_qs(environ["QUERY_STRING"]).get("us", ["0"])[0])
    time.sleep(us / 1e6)
    os.write(COUNT, b".")
    start_response(
        "200 OK",
        [("Content-Type", "text/plain"), ("Content-Length", "3"), ("X-Worker", str(os.getpid()))],
    )
    return [b"ok\n"]
