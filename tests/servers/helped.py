"""A server whose workers have helpers that hold its listener too.

    helped.py KIND fd N                 one worker, on this descriptor
    helped.py KIND port N WORKERS       so many workers, each with a socket of its own (SO_REUSEPORT)

KIND: none; `pool`, a process pool; `child`, a command; `late`, a process that was forked when the event loop ran already, so
that it has the loop's epoll set; `master`, a process above the one that accepts, which has a pool below it; `nap`, no helper,
but the worker sleeps between two attempts to accept; `orphan`, a helper that outlives its worker.

Each request takes 2 ms, `/slow?ms=N` as long as it says. The answer is the worker's pid and those of its helpers.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

FORK = get_context("fork")
helpers = []


def pool():
    executor = ProcessPoolExecutor(2, mp_context=FORK)
    list(executor.map(abs, [1, 2]))
    helpers.append(executor)  # or it would end


def answer(head):
    path = head.split(b" ")[1]
    time.sleep(int(path[9:]) / 1000 if path.startswith(b"/slow?ms=") else 0.002)
    body = json.dumps({"pid": os.getpid(), "helpers": children()}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)


def children():
    return [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]


async def reply(reader, writer):
    try:
        writer.write(answer(await reader.readuntil(b"\r\n\r\n")))
        await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        pass
    writer.close()


async def serve(listener, kind):
    async with await asyncio.start_server(reply, sock=listener, backlog=512):
        if kind == "late":
            process = FORK.Process(target=time.sleep, args=(1000,), daemon=True)
            process.start()
            helpers.append(process)
        await asyncio.Event().wait()


def nap(listener):
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            time.sleep(0.001)
            continue
        except OSError:
            continue
        with connection:
            connection.settimeout(5)
            try:
                connection.sendall(answer(connection.recv(4096)))
            except OSError:
                pass


def work(listener, kind):
    if kind == "nap":
        nap(listener)
    if kind in ("pool", "master"):
        pool()
    elif kind in ("child", "orphan"):
        orphan = kind == "orphan"
        out = subprocess.DEVNULL if orphan else None
        helpers.append(subprocess.Popen(["sleep", "1000"], close_fds=False, start_new_session=orphan, stdout=out, stderr=out))
    asyncio.run(serve(listener, kind))


def main():
    kind, way, number, *workers = sys.argv[1:]
    if way == "fd":
        if kind != "master" or os.fork() == 0:
            work(socket.socket(fileno=int(number)), kind)
        os.wait()
        return
    for _ in range(int(workers[0])):
        if os.fork() == 0:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", int(number)))
            listener.listen(512)
            listener.set_inheritable(True)
            work(listener, kind)
    while True:
        os.wait()


main()
