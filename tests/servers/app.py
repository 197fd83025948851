"""The same answer as a WSGI application (gunicorn) and as an ASGI application (uvicorn).

Who it is, or the word of ?word=WORD; after N ms where there is an ms=N, during which the worker does nothing else."""

import json
import os
import time


def me():
    return json.dumps({"slot": int(os.environ["WAKEONE_SLOT"]), "pid": os.getpid()}).encode()


def answer(query):
    asked = dict(pair.split("=") for pair in query.split("&") if pair)
    time.sleep(int(asked.get("ms", 0)) / 1000)
    return asked["word"].encode() if "word" in asked else me()


def wsgi(environ, start_response):
    body = answer(environ.get("QUERY_STRING", ""))
    start_response("200 OK", [("Content-Length", str(len(body))), ("X-Worker", str(os.getpid()))])
    return [body]


async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body = answer(scope["query_string"].decode())
    headers = [(b"content-length", str(len(body)).encode()), (b"x-worker", str(os.getpid()).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
