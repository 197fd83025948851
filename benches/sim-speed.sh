#!/usr/bin/env bash
# Measures events a second of the simulator, and of the same M/M/4 in SimPy and ciw.
#
#   benches/sim-speed.sh [ROUNDS] [REQUESTS]        (default 5 rounds of 2,000,000 requests)
#
# All numbers are for a second of CPU time, which a busy machine distorts less than wall time. Each round runs
# every simulator once, and every second round runs them backwards. SimPy and ciw simulate a hundredth of the requests, so
# their means are rough. An event is an arrival or the end of a request, so a request is two of them in each simulator.
#
# Needs: cargo, python3 with simpy and ciw (pip install simpy ciw); PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5} requests=${2:-2000000}
python=${PYTHON:-python3}
"$python" -c 'import simpy, ciw' 2>/dev/null || {
    echo "sim-speed: $python has no simpy or ciw; install them with pip, or name another interpreter in PYTHON" >&2
    exit 1
}
cargo build --quiet --release --locked --package wakeone-sim --example speed
results=$(mktemp)
trap 'rm -f "$results"' EXIT

one() {
    case $1 in
        wakeone) target/release/examples/speed "$requests" >> "$results" ;;
        *) "$python" benches/sim-peers.py "$1" $((requests / 100)) >> "$results" ;;
    esac
}

for ((round = 0; round < rounds; round++)); do
    order="wakeone simpy ciw"
    if ((round % 2)); then order="ciw simpy wakeone"; fi
    for simulator in $order; do one "$simulator"; done
done

# NAME WORKERS EVENTS CPU_SECONDS MEAN_MS, a line a run; the median of each name's rounds.
"$python" - "$results" <<'PYTHON'
import collections, statistics, sys

speeds, means = collections.defaultdict(list), {}
for line in open(sys.argv[1]):
    name, workers, events, seconds, mean = line.split()
    speeds[name, int(workers)].append(int(events) / float(seconds) / 1e6)
    means[name, int(workers)] = float(mean)
ours = statistics.median(speeds["shared", 4])
print(f"{'':<28}{'workers':>8}{'million events/s':>18}{'mean ms':>10}{'shared, 4: times as fast':>26}")
for (name, workers), all in speeds.items():
    speed = statistics.median(all)
    ratio = f"{ours / speed:.0f}" if name in ("simpy", "ciw") else ""
    print(f"{name:<28}{workers:>8}{speed:>18.3f}{means[name, workers]:>10.4f}{ratio:>26}")
PYTHON
