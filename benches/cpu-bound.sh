#!/usr/bin/env bash
# Measures how latencies scatter where the CPUs are the limit: 200 clients, a new connection for each request, 300 µs of CPU
# time each (*cpu* of lab run tills). Four workers have one shared socket, or a queue each under `wakeone run`, or that
# with each worker kept to one CPU. The three alternate, each in a network namespace of its own. It needs root, iproute2
# and util-linux.
#
#   benches/cpu-bound.sh [ROUNDS] [REQUESTS] [WAKEONE]        (default 3 rounds of 20,000 requests)
set -euo pipefail
# shellcheck source=benches/server.sh
. "$(dirname "$(realpath "$0")")/server.sh"
rounds=${1:-3}
requests=${2:-20000}
wakeone=$(realpath "${3:-target/release/wakeone}")
at=127.0.0.1:8080

# One server, and its load.
turn() {
    ip link set lo up
    folder=$(mktemp -d)
    worker=("$wakeone" serve --model preforked)
    case $1 in
        shared)
            serving=("${worker[@]}" -w 4 -l "$at")
            sign='^listening on '
            ;;
        steered | pinned)
            # shellcheck disable=SC2016 # The worker's shell knows its slot.
            [ "$1" = steered ] || worker=(sh -c 'exec taskset -c $((WAKEONE_SLOT % $(nproc))) "$@"' sh "${worker[@]}")
            serving=("$wakeone" run -w 4 -l "$at" --runtime-dir "$folder/run" -- "${worker[@]}")
            sign='^ready: '
            ;;
    esac
    start "${serving[@]}"
    printed "$sign"
    "$wakeone" load "http://$at/work?us=300&kind=cpu" -c 200 -n "$requests" --json >"$folder/result"
    python3 - "$1" "$folder/result" <<'PYTHON'
import json, sys

latency = json.load(open(sys.argv[2]))["latency_ms"]
print(f"{sys.argv[1]:8} mean {latency['mean']:6.2f} ms  deviation {latency['stddev']:5.2f} ms  p99 {latency['p99']:6.2f} ms")
PYTHON
}

if [ -n "${WAKEONE_BENCH_TURN+x}" ]; then
    turn "$WAKEONE_BENCH_TURN"
    exit
fi
for ((round = 0; round < rounds; round++)); do
    for way in shared steered pinned; do
        WAKEONE_BENCH_TURN=$way unshare --net "$(realpath "$0")" 1 "$requests" "$wakeone"
    done
done
