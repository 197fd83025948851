#!/usr/bin/env python3
"""Shows what wakeone load, wrk, oha and ab say of three servers that fail some of their requests.

    benches/load-on-faults.py [SECONDS] [WAKEONE]     (default 6 target/release/wakeone)

- time-outs: one request of twenty gets no answer within the 2 s that each tool waits;
- busy: one request of three gets a quick 503;
- closing: connections are kept, and closed after ten answers each, without a word.

Each tool sends 50 clients' closed loop to each server. A tool that is not installed is left out.
"""

import asyncio
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CLIENTS = "50"
WAITS = "2"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok"
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n"


async def answer(fault, number, of_connection):
    """The answer to a request, and whether the connection is kept."""
    if fault == "time-outs" and number % 20 == 7:
        await asyncio.sleep(2 * int(WAITS))
    if fault == "busy" and number % 3 == 2:
        return BUSY, True
    return OK, fault != "closing" or of_connection < 9


async def serve(fault, listener):
    numbers = itertools.count()

    async def client(reader, writer):
        try:
            for of_connection in itertools.count():
                await reader.readuntil(b"\r\n\r\n")
                text, kept = await answer(fault, next(numbers), of_connection)
                writer.write(text)
                await writer.drain()
                if not kept:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(client, sock=listener, backlog=1024)
    await server.serve_forever()


def found(pattern, text, otherwise="-"):
    match = re.search(pattern, text)
    return match.group(1) if match else otherwise


# Each returns what the tool says of failures, its p50 and its p99.


def of_wakeone(out):
    result = json.loads(out)
    kinds = ", ".join(f"{kind} {n}" for kind, n in result["errors"].items()) or "none"
    failed = f"{kinds}; of {result['planned']}"
    ms = [f"{result['latency_ms'][at]:.0f} ms" for at in ("p50", "p99")]
    least = f"≥ {result['latency_all_ms']['p99']:.0f} ms"
    if result["latency_all_ms"]["p99"] >= int(WAITS) * 1e3:
        ms[1] += f", with failures {least}"
    return failed, *ms


def of_wrk(out):
    errors = re.findall(r"(connect|read|write|timeout) ([1-9]\d*)", out)
    other = found(r"Non-2xx or 3xx responses: (\d+)", out, "")
    kinds = [f"{kind} {n}" for kind, n in errors] + ([f"non-2xx {other}"] if other else [])
    whole = found(r"(\d+) requests in", out)
    failed = f"{', '.join(kinds) or 'none'}; of {whole} answers"
    return failed, found(r"50%\s+(\S+)", out), found(r"99%\s+(\S+)", out)


def of_oha(out):
    result = json.loads(out)
    kinds = [f"{kind} {n}" for kind, n in result["errorDistribution"].items()]
    statuses = result["statusCodeDistribution"]
    kinds += [f"{status}: {n}" for status, n in statuses.items() if status != "200"]
    ms = [f"{result['latencyPercentiles'][at] * 1e3:.0f} ms" for at in ("p50", "p99")]
    return f"{', '.join(kinds) or 'none'}; of {sum(statuses.values())} answers", *ms


def of_ab(out):
    failed = "failed " + found(r"Failed requests: +(\d+)", out)
    other = found(r"Non-2xx responses: +(\d+)", out, "")
    failed += f", non-2xx {other}" if other else ""
    if gave_up := found(r"(apr_\w+: [^(\n]+)", out, ""):
        return f"stopped: {gave_up.strip()}", "-", "-"
    failed += "; of " + found(r"Complete requests: +(\d+)", out)
    ms = [found(rf"\n +{at}% +(\d+)", out) for at in (50, 99)]
    return failed, *[f"{one} ms" for one in ms]


def tools(wakeone, seconds, url):
    return [
        ("wakeone load", of_wakeone, [wakeone, "load", "-c", CLIENTS, "-d", seconds, "--timeout", WAITS, "--keep-alive", "--json", url]),
        ("wrk", of_wrk, ["wrk", "-t1", "-c", CLIENTS, "-d", seconds, "--timeout", WAITS, "--latency", url]),
        ("oha", of_oha, ["oha", "--no-tui", "-c", CLIENTS, "-z", f"{seconds}s", "-t", f"{WAITS}s", "--output-format", "json", url]),
        ("ab", of_ab, ["ab", "-k", "-q", "-c", CLIENTS, "-t", seconds, "-n", "10000000", "-s", WAITS, url]),
    ]


def main():
    seconds = sys.argv[1] if len(sys.argv) > 1 else "6"
    wakeone = sys.argv[2] if len(sys.argv) > 2 else os.path.join(HERE, "../target/release/wakeone")
    print("| server | tool | failures that it tells | p50 | p99 | exit code |\n|---|---|---|---|---|---|")
    for fault in ["time-outs", "busy", "closing"]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        url = "http://127.0.0.1:%d/" % listener.getsockname()[1]
        child = os.fork()
        if child == 0:
            asyncio.run(serve(fault, listener))
        listener.close()
        for name, read, command in tools(wakeone, seconds, url):
            if not shutil.which(command[0]):
                continue
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if name == "ab" else subprocess.DEVNULL, text=True, check=False)
            print("|", " | ".join([fault, name, *read(run.stdout), str(run.returncode)]), "|", flush=True)
        os.kill(child, 15)
        os.waitpid(child, 0)


main()
