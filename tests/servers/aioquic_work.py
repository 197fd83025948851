"""A server of QUIC by aioquic, whose connection IDs are random. Its socket is descriptor 3.

The request is one line, `BYTES MS`. The answer is a line with the worker's number of process, and then as many bytes over as
many milliseconds.
"""
import asyncio
import datetime
import os
import socket

from aioquic.asyncio import QuicConnectionProtocol
from aioquic.asyncio.server import QuicServer
from aioquic.quic.configuration import QuicConfiguration
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

PROTOCOLS = ["work"]


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


if __name__ == "__main__":
    asyncio.run(serve())
