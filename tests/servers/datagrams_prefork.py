"""datagrams_prefork.py PORT PROCESSES WAIT: processes that receive from one UDP socket and answer each datagram with
their number.

WAIT: recv, poll, epoll or asyncio; `threads`: two that recv; `before`: epoll, registered before the fork. A datagram `end` ends the process that
gets it, and another one is started.
"""
import asyncio
import os
import select
import signal
import socket
import sys
import threading

port, count, wait = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
shared = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
shared.bind(("127.0.0.1", port))
early = select.epoll()
if wait == "before":
    shared.setblocking(False)
    early.register(shared, select.EPOLLIN)


def answer(data, peer):
    """Answers one datagram."""
    if data == b"end":
        os._exit(0)
    if data == b"end thread":
        threading.Thread(target=recv).start()
        sys.exit()
    shared.sendto(b"%d %s" % (os.getpid(), data), peer)


def receive():
    """Receives what there is."""
    try:
        answer(*shared.recvfrom(2048))
    except BlockingIOError:
        pass


class Answers(asyncio.DatagramProtocol):
    """The same by asyncio."""

    def datagram_received(self, data, addr):
        """Answers one datagram."""
        answer(data, addr)


async def listen():
    """Serves by asyncio."""
    await asyncio.get_running_loop().create_datagram_endpoint(Answers, sock=shared)
    await asyncio.Event().wait()


def recv():
    """Receives for ever."""
    while True:
        receive()


def serve():
    """Serves for ever."""
    if wait == "threads":
        threading.Thread(target=recv).start()
        threading.Thread(target=recv).start()
        while True:
            signal.pause()
    if wait == "recv":
        recv()
    shared.setblocking(False)
    if wait == "asyncio":
        asyncio.run(listen())
    if wait == "poll":
        poll = select.poll()
        poll.register(shared, select.POLLIN)
        while True:
            poll.poll()
            receive()
    epoll = early if wait == "before" else select.epoll()
    if wait != "before":
        epoll.register(shared, select.EPOLLIN)
    while True:
        epoll.poll()
        receive()


workers = set()
ENDING = (signal.SIGTERM, signal.SIGINT)


def stop(*_):
    """Ends everything."""
    for worker in workers:
        try:
            os.kill(worker, signal.SIGTERM)
        except ProcessLookupError:
            pass
    os._exit(0)


for each in ENDING:
    signal.signal(each, stop)
while True:
    while len(workers) < count:
        # Whoever is told to end must know all of them, and a child must not end the others.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        child = os.fork()
        if child == 0:
            for each in ENDING:
                signal.signal(each, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            serve()
        workers.add(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    gone, _ = os.wait()
    workers.discard(gone)
