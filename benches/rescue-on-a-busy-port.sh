#!/usr/bin/env bash
# Measures how long a rescue takes with many connections in TIME_WAIT on the port, without and with
# `wakeone run --lookup`. The policy is hash, so that connections come to wait behind stuck workers. It runs in a network
# namespace of its own, and needs root, python3 and iproute2.
#
#   benches/rescue-on-a-busy-port.sh [CONNECTIONS] [WAKEONE]
set -euo pipefail
# shellcheck source=benches/server.sh
. "$(dirname "$(realpath "$0")")/server.sh"
count=${1:-100000}
wakeone=$(realpath "${2:-target/release/wakeone}")
if [ -z "${WAKEONE_BENCH_INSIDE-}" ]; then
    exec env WAKEONE_BENCH_INSIDE=1 unshare --net "$(realpath "$0")" "$count" "$wakeone"
fi
ip link set lo up
echo $((2 * count)) >/proc/sys/net/ipv4/tcp_max_tw_buckets

# One request a connection; the server closes first, and keeps it in TIME_WAIT.
fill() {
    python3 - "$1" <<'PYTHON'
import socket
import sys

for n in range(int(sys.argv[1])):
    client = socket.socket()
    client.bind((f"127.0.2.{n // 10000 + 1}", 10000 + n % 10000))
    client.connect(("127.0.0.1", 8080))
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    while client.recv(4096):
        pass
    client.close()
PYTHON
}

# One server, and its load. It is a subshell, so that it ends its server in any case.
turn() (
    folder=$(mktemp -d)
    # shellcheck disable=SC2086
    start "$wakeone" run $1 -w 6 -l 127.0.0.1:8080 --policy hash --stuck-after 1ms --log json --log-level debug \
        --runtime-dir "$folder/run" -- \
        "$wakeone" serve --model preforked
    printed '"ready: '
    fill "$count"
    filled=$(wc -l <"$folder/log")
    echo "wakeone run $1: $(ss -tanH state time-wait sport = :8080 | wc -l) connections in TIME_WAIT"
    "$wakeone" load http://127.0.0.1:8080/ --rate 1000 --duration 10s --mix '97:/work?us=100&kind=sleep' \
        --mix '3:/work?us=40000&kind=sleep' >"$folder/load"
    tail -n "+$((filled + 1))" "$folder/log" | sed -n 's/.*"event":"rescue".*"took_us":\([0-9]*\).*/\1/p' | sort -n |
        awk '{ us[NR] = $1 } END { print "  rescues " NR ", median " us[int((NR + 1) / 2)] " µs, longest " us[NR] " µs" }'
    sed 's/^/  /' "$folder/load"
)

for option in "" --lookup; do
    turn "$option"
done
