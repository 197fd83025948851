"""A server and a client of QUIC by aioquic, whose connection IDs are random.

    aioquic_work.py serve                      on the socket that is descriptor 3
    aioquic_work.py share PORT WORKERS         starts so many of those on one socket, as hypercorn does
    aioquic_work.py ask PORT COUNT BYTES MS    prints for each connection who answered, or `failed: WHY`

The request is one line, `BYTES MS`. The answer is a line with the worker's number of process, and then as many bytes over as
many milliseconds.
"""
import asyncio
import datetime
import os
import signal
import socket
import subprocess
import sys

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.asyncio.server import QuicServer
from aioquic.quic.configuration import QuicConfiguration
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

PROTOCOLS = ["work"]
# A path that is lost shows soon.
IDLE_S = 8.0


def certified():
    """A configuration with a certificate of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    configuration = QuicConfiguration(is_client=False, alpn_protocols=PROTOCOLS)
    configuration.certificate = builder.sign(key, hashes.SHA256())
    configuration.private_key = key
    return configuration


async def answer(reader, writer):
    size, ms = (int(word) for word in (await reader.readline()).split())
    writer.write(f"{os.getpid()}\n".encode())
    parts = max(1, ms // 20)
    for part in range(parts):
        writer.write(b"a" * (size * (part + 1) // parts - size * part // parts))
        if ms:
            await asyncio.sleep(0.02)
    writer.write_eof()


def spawned(reader, writer):
    asyncio.ensure_future(answer(reader, writer))


async def serve():
    own = socket.socket(fileno=3)
    own.setblocking(False)

    def server():
        return QuicServer(configuration=certified(), create_protocol=QuicConnectionProtocol, stream_handler=spawned)

    await asyncio.get_running_loop().create_datagram_endpoint(server, sock=own)
    await asyncio.Event().wait()


async def keep_alive(client):
    """Has the server see the client's address again and again, as many clients do: who only receives would not notice that
    it has changed."""
    while True:
        await asyncio.sleep(0.2)
        await client.ping()


async def ask_one(port, size, ms):
    configuration = QuicConfiguration(is_client=True, alpn_protocols=PROTOCOLS, verify_mode=0, idle_timeout=IDLE_S)
    try:
        async with asyncio.timeout(20 + ms / 1000):
            async with connect("127.0.0.1", port, configuration=configuration) as client:
                reader, writer = await client.create_stream()
                alive = asyncio.ensure_future(keep_alive(client))
                writer.write(f"{size} {ms}\n".encode())
                writer.write_eof()
                worker = (await reader.readline()).decode().strip()
                rest = await reader.read()
                alive.cancel()
                return worker if len(rest) == size else f"failed: {len(rest)} bytes of {size}"
    except Exception as error:
        return f"failed: {error!r}"


async def ask(port, count, size, ms):
    for one in asyncio.as_completed([ask_one(port, size, ms) for _ in range(count)]):
        print(await one)


def share(port, workers):
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    own.bind(("127.0.0.1", port))
    os.dup2(own.fileno(), 3)
    command = [sys.executable, __file__, "serve"]
    started = [subprocess.Popen(command, pass_fds=[3]) for _ in range(workers)]

    def end(*_):
        for one in started:
            one.terminate()

    signal.signal(signal.SIGTERM, end)
    for one in started:
        one.wait()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    elif sys.argv[1] == "share":
        share(*map(int, sys.argv[2:]))
    else:
        asyncio.run(ask(*map(int, sys.argv[2:])))
