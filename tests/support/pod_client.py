"""A client in the network namespace of a pod: it asks for a page, or for a name by TCP.

    pod_client.py kept http|dns COUNT GAP_MS    opens connections one after the other, and says `open`; for each line that it
                                                reads it asks by each of them, and prints how many gave no answer since the
                                                last time. If one cannot be opened it says why
    pod_client.py new http|dns GAP_MS           asks by one new connection after the other until its input ends, and prints
                                                how many it asked and how many gave no answer
"""

import select
import socket
import struct
import sys
import time

AT = ("127.0.0.1", 8080)
# After so long each connection is used, lest the server close it: unbound waits for two minutes, whatever its configuration.
IDLE_S = 20
GET = b"GET /?word=it HTTP/1.1\r\nHost: pod\r\n\r\n"
NAME = b"".join(bytes([len(part)]) + part for part in [b"a", b"test", b""])
QUERY = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + NAME + struct.pack("!HH", 1, 1)


def received(connection, count):
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("closed before the answer was whole")
        data += part
    return data


def http(connection):
    connection.sendall(GET)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += received(connection, 1)
    lines = head.decode().lower().split("\r\n")
    if not lines[0].startswith("http/1.1 200"):
        raise ConnectionError(lines[0])
    [length] = [line.split(":")[1] for line in lines if line.startswith("content-length:")]
    received(connection, int(length))


def dns(connection):
    connection.sendall(struct.pack("!H", len(QUERY)) + QUERY)
    answer = received(connection, struct.unpack("!H", received(connection, 2))[0])
    if answer[3] & 15 or answer[6:8] != b"\0\1":
        raise ConnectionError("no such name")


def connect():
    return socket.create_connection(AT, timeout=60)


def failures(ask, connections):
    failed = 0
    for connection in connections:
        try:
            ask(connection)
        except OSError as error:
            print(f"client: {error!r}", file=sys.stderr)
            failed += 1
    return failed


def kept(ask, count, gap_s):
    connections = []
    for _ in range(count):
        connections.append(connect())
        ask(connections[-1])
        time.sleep(gap_s)
    print("open", flush=True)
    failed = 0
    while True:
        asked = select.select([sys.stdin], [], [], IDLE_S)[0]
        if asked and not sys.stdin.readline():
            return
        failed += failures(ask, connections)
        if asked:
            print(failed, flush=True)
            failed = 0


def new(ask, gap_s):
    asked = failed = 0
    while not select.select([sys.stdin], [], [], gap_s)[0]:
        asked += 1
        try:
            with connect() as connection:
                ask(connection)
        except OSError as error:
            print(f"client: {error!r}", file=sys.stderr)
            failed += 1
    print(asked, failed, flush=True)


way, ask, *numbers = sys.argv[1:]
ask = {"http": http, "dns": dns}[ask]
if way == "kept":
    try:
        kept(ask, int(numbers[0]), int(numbers[1]) / 1000)
    except ConnectionError as error:
        print(error, flush=True)
else:
    new(ask, int(numbers[0]) / 1000)
