#!/usr/bin/env python3
"""Compares what doctor simulates for a server with what `wakeone run` then brings it.

    benches/prediction.py [RATE] [SECONDS] [ROUNDS] [WAKEONE]     (default 250 30 3)

The server is gunicorn with four sync workers; one request of twenty goes to a slow endpoint (100 ms, the others 2 ms). In each
round `wakeone doctor` watches it as it is, with --reuse-port, under load. Then the same load goes to the same workers under
`wakeone run`. It runs in a network namespace of its own, as root, and needs gunicorn and iproute2. It ends with 1 if a mean
or a p99 of the prediction is more than 25 % off the median of what was measured.
"""

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ADDRESS = ("127.0.0.1", 8080)
WORKERS = 4
POLICY = "least-connections+rescue"
FIGURES = ["mean", "p50", "p90", "p99"]
GUNICORN = os.path.join(HERE, "../target/servers/bin/gunicorn")
GUNICORN = os.path.realpath(GUNICORN) if os.path.exists(GUNICORN) else shutil.which("gunicorn")
APP = ["--log-level", "error", "--chdir", os.path.join(HERE, "../tests/servers"), "app:wsgi"]


def until(done, what):
    end = time.monotonic() + 30
    while not done():
        if time.monotonic() > end:
            sys.exit(f"prediction: waited 30 s in vain until {what}")
        time.sleep(0.05)


def answers():
    with socket.socket() as one:
        return one.connect_ex(ADDRESS) == 0


def load(wakeone, rate, seconds):
    mixes = ["--mix", "95:/?word=quick&ms=2", "--mix", "5:/?word=slow&ms=100"]
    plan = ["--rate", str(rate), "--duration", f"{seconds}s", "--json"]
    url = "http://%s:%d/" % ADDRESS
    return subprocess.Popen([wakeone, "load", url, *plan, *mixes], stdout=subprocess.PIPE, text=True)


def latency(running):
    """Its latencies in ms."""
    out, _ = running.communicate()
    result = json.loads(out)
    if result["completed"] != result["planned"]:
        sys.exit(f"prediction: {result['completed']} of {result['planned']} requests were answered")
    return [result["latency_ms"][figure] for figure in FIGURES]


def with_server(command, act):
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(answers, "the server answers")
        time.sleep(1)
        return act()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def predicted(wakeone, rate, seconds):
    """What doctor simulates for the policy, and what was measured of the server as it is."""

    def act():
        running = load(wakeone, rate, seconds + 2)
        time.sleep(1)
        doctor = [wakeone, "doctor", ":8080", "--json", "--for", f"{seconds}s"]
        report = json.loads(subprocess.run(doctor, stdout=subprocess.PIPE, check=False).stdout)["listeners"][0]
        if report["prediction"] is None:
            sys.exit(f"prediction: doctor simulates nothing: {report['not_predicted']}")
        way = next(way for way in report["prediction"]["ways"] if way["name"] == POLICY)
        return [way[f"latency_ms_{figure}"] for figure in FIGURES], latency(running)

    plain = [GUNICORN, "-w", str(WORKERS), "--reuse-port", "-b", "%s:%d" % ADDRESS, *APP]
    return with_server(plain, act)


def steered(wakeone, rate, seconds):
    """What is measured under `wakeone run`."""
    with tempfile.TemporaryDirectory() as folder:
        run = [wakeone, "run", "-w", str(WORKERS), "-l", "%s:%d" % ADDRESS, "--runtime-dir", folder, "--"]
        return with_server(
            [*run, GUNICORN, "-w", "1", "-b", "fd://{fd}", *APP], lambda: latency(load(wakeone, rate, seconds))
        )


def main():
    numbers = [int(text) for text in sys.argv[1:4]]
    rate, seconds, rounds = numbers + [250, 30, 3][len(numbers) :]
    wakeone = os.path.realpath(sys.argv[4] if len(sys.argv) > 4 else "target/release/wakeone")
    if "PREDICTION_ISOLATED" not in os.environ:
        os.environ["PREDICTION_ISOLATED"] = "1"
        os.execvp("unshare", ["unshare", "-n", sys.executable, os.path.abspath(__file__), *sys.argv[1:]])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rows = {"as it is, measured": [], "wakeone run, simulated": [], "wakeone run, measured": []}
    for _ in range(rounds):
        simulated, before = predicted(wakeone, rate, seconds)
        for name, figures in zip(rows, [before, simulated, steered(wakeone, rate, seconds)]):
            rows[name].append(figures)
    medians = {name: [statistics.median(column) for column in zip(*all_)] for name, all_ in rows.items()}
    print("%-24s" % "ms" + "".join("%18s" % figure for figure in FIGURES))
    for name, all_ in rows.items():
        cells = ["%.1f (%.1f–%.1f)" % (mid, min(c), max(c)) for mid, c in zip(medians[name], zip(*all_))]
        print("%-24s" % name + "".join("%18s" % cell for cell in cells))
    simulated, measured = medians["wakeone run, simulated"], medians["wakeone run, measured"]
    off = [one / other - 1 for one, other in zip(simulated, measured)]
    print("%-24s" % "simulated / measured" + "".join("%17.0f%%" % (100 * part) for part in off))
    sys.exit(any(abs(off[at]) > 0.25 for at in (0, 3)))


main()
