"""The same answer as a WSGI application (gunicorn) and as an ASGI application (uvicorn)."""

import json
import os


def me():
    return json.dumps({"slot": int(os.environ["WAKEONE_SLOT"]), "pid": os.getpid()}).encode()


def wsgi(environ, start_response):
    start_response("200 OK", [("Content-Length", str(len(me())))])
    return [me()]


async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(me())).encode())]})
    await send({"type": "http.response.body", "body": me()})
