#!/usr/bin/env bash
# Measures whether rescue stays as good as it begins. It compares the mean wait of *stuck* (lab run tills) in the first
# seconds of a server with that after minutes of 1,000 new connections a second, when the port has many connections in
# TIME_WAIT. Runs without and with `wakeone run --lookup` alternate, each in a network namespace of its own. It needs root
# and iproute2.
#
#   benches/stuck-after-minutes.sh [MINUTES] [ROUNDS] [WAKEONE]
set -euo pipefail
# shellcheck source=benches/server.sh
. "$(dirname "$(realpath "$0")")/server.sh"
minutes=${1:-10}
rounds=${2:-1}
wakeone=$(realpath "${3:-target/release/wakeone}")
window=20s

load() {
    "$wakeone" load http://127.0.0.1:8080/ --rate 1000 --duration "$1" --json \
        --mix '99:/work?us=1150&kind=sleep' --mix '1:/work?us=100000&kind=sleep'
}

mean() {
    python3 -c 'import json, sys; print(json.load(sys.stdin)["latency_ms"]["mean"])'
}

# One server, from its start.
turn() {
    ip link set lo up
    folder=$(mktemp -d)
    # shellcheck disable=SC2086
    start "$wakeone" run $1 -w 4 -l 127.0.0.1:8080 --stuck-after 5ms --runtime-dir "$folder/run" -- \
        "$wakeone" serve --model preforked
    printed '^ready: '
    first=$(load "$window" | mean)
    load "$((minutes * 60))s" >/dev/null
    waiting=$(ss -tanH state time-wait | wc -l)
    last=$(load "$window" | mean)
    awk -v first="$first" -v last="$last" -v tw="$waiting" -v option="$1" 'BEGIN {
        printf "%-8s mean %.2f ms at first, %.2f ms after; ratio %.3f; %d connections in TIME_WAIT\n",
            option ? option : "without", first, last, last / first, tw }'
}

if [ -n "${WAKEONE_BENCH_TURN+x}" ]; then
    turn "$WAKEONE_BENCH_TURN"
    exit
fi
for ((round = 0; round < rounds; round++)); do
    for option in "" --lookup; do
        WAKEONE_BENCH_TURN=$option unshare --net "$(realpath "$0")" "$minutes" 1 "$wakeone"
    done
done
