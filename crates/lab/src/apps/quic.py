"""A QUIC server and its clients, by aioquic.

quic.py serve HOST PORT|FD: one worker on a SO_REUSEPORT socket of its own, or on an inherited one. It answers with its process
id. A request of one number has it block its loop for so many µs first. To one of two, BYTES MS, it sends as many bytes more, over
as many milliseconds.
quic.py ask HOST PORT SECONDS SEED SITUATION: requests over 24 kept connections (`kept`, `stuck`), or over new ones
(`steady`, `restart`). A connection that breaks is opened anew. Prints the result as one line of JSON.
"""

import asyncio
import datetime
import json
import os
import random
import signal
import socket
import sys
import time

from aioquic.asyncio import QuicConnectionProtocol
from aioquic.asyncio.client import connect
from aioquic.asyncio.server import QuicServer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import StreamDataReceived

CONNECTIONS, PATIENCE = 24, 4
# Requests a second over kept connections, and over new ones, whose handshakes cost this client most.
RATE_KEPT, RATE_NEW = 60, 12


class Answering(QuicConnectionProtocol):
    """Answers each stream."""

    def quic_event_received(self, event):
        if not isinstance(event, StreamDataReceived) or not event.end_stream:
            return
        first, *more = map(int, event.data.split())
        if more:
            asyncio.ensure_future(self.send_over(event.stream_id, first, more[0]))
            return
        time.sleep(first / 1e6)
        self.send(event.stream_id, str(os.getpid()).encode(), end_stream=True)

    def send(self, stream, text, end_stream=False):
        """Sends at once."""
        self._quic.send_stream_data(stream, text, end_stream=end_stream)
        self.transmit()

    async def send_over(self, stream, size, ms):
        """Answers with so many bytes over so many milliseconds."""
        self.send(stream, f"{os.getpid()}\n".encode())
        parts = max(1, ms // 100)
        for part in range(parts):
            self.send(stream, b"a" * (size * (part + 1) // parts - size * part // parts))
            await asyncio.sleep(0.1 if ms else 0)
        self.send(stream, b"", end_stream=True)


def certificate():
    """Returns the configuration of a server with a new certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
    made = made.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    configuration = QuicConfiguration(is_client=False, alpn_protocols=["work"], idle_timeout=30)
    configuration.certificate, configuration.private_key = made, key
    return configuration


def bound(place):
    """Returns the worker's socket."""
    if len(place) == 1:
        return socket.socket(fileno=int(place[0]))
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((place[0], int(place[1])))
    return made


async def serve(place):
    """Serves until SIGTERM."""
    ended = asyncio.Event()
    loop, configuration = asyncio.get_running_loop(), certificate()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    make = lambda: QuicServer(configuration=configuration, create_protocol=Answering)
    await loop.create_datagram_endpoint(make, sock=bound(place))
    print("serving", flush=True)
    await ended.wait()


class Client:
    """One client, whose connection is opened when a request needs it."""

    def __init__(self, host, port):
        self.place, self.opened, self.context, self.lock = (host, port), None, None, asyncio.Lock()

    async def open(self):
        configuration = QuicConfiguration(alpn_protocols=["work"], verify_mode=0, idle_timeout=30)
        self.context = connect(*self.place, configuration=configuration)
        self.opened = await asyncio.wait_for(self.context.__aenter__(), PATIENCE)

    async def close(self):
        context, self.opened, self.context = self.context, None, None
        if context:
            try:
                await asyncio.wait_for(context.__aexit__(None, None, None), 1)
            except (OSError, asyncio.TimeoutError, ConnectionError):
                pass

    async def ask(self, us):
        """Returns whether there was an answer in time."""
        async with self.lock:
            try:
                if not self.opened:
                    await self.open()
                reader, writer = await self.opened.create_stream()
                writer.write(str(us).encode())
                writer.write_eof()
                return bool(await asyncio.wait_for(reader.read(), PATIENCE))
            except (OSError, asyncio.TimeoutError, ConnectionError):
                await self.close()
                return False


async def ask(host, port, seconds, seed, situation):
    """Sends the load."""
    draw, latency_ms, lost, tasks = random.Random(seed), [], 0, []
    keeps = situation in ("kept", "stuck")
    clients = [Client(host, port) for _ in range(CONNECTIONS)]
    if keeps:
        for client in clients:
            await client.ask(0)
            await asyncio.sleep(0.01)

    async def one(client, us, due):
        nonlocal lost
        answered = await client.ask(us)
        lost += not answered
        if answered and us < 10000:
            latency_ms.append((time.monotonic() - due) * 1e3)
        if not keeps:
            await client.close()

    start, due = time.monotonic(), 0.0
    while due < seconds:
        await asyncio.sleep(max(0, start + due - time.monotonic()))
        us = 100000 if situation == "stuck" and draw.random() < 0.01 else 2000
        client = draw.choice(clients) if keeps else Client(host, port)
        tasks.append(asyncio.create_task(one(client, us, start + due)))
        due += draw.expovariate(RATE_KEPT if keeps else RATE_NEW)
    await asyncio.gather(*tasks)
    for client in clients:
        await client.close()
    print(json.dumps({"sent": len(tasks), "lost": lost, "latency_ms": latency_ms}))


if sys.argv[1] == "serve":
    asyncio.run(serve(sys.argv[2:]))
else:
    asyncio.run(ask(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), sys.argv[6]))
