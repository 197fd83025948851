#!/usr/bin/env bash
# Measures connections a second per client core, one connection per request: wakeone load beside wrk and httperf.
#
#   benches/load-vs-wrk.sh [ROUNDS] [SECONDS]        (default 5 rounds of 4 s a tool)
#
# The server is nginx with one worker on CPU 0; the client has CPU 1 to itself. Rounds are interleaved and every second one
# runs backwards, so that slow changes of the machine affect all tools alike. Each tool has a port of its own, so that its
# connections in TIME_WAIT do not slow another tool down. Each run gives two numbers: answers per second of wall time, and
# answers per second of the client's CPU time (user + system), which a busy machine distorts less. httperf gets the rate at
# which it is best.
#
# Needs: nginx wrk httperf (apt-get install nginx-light wrk httperf), two CPUs, a release build of wakeone.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5} seconds=${2:-4}
wakeone=${WAKEONE:-target/release/wakeone}
clients=50

for tool in nginx wrk httperf taskset "$wakeone"; do
    command -v "$tool" >/dev/null || { echo "load-vs-wrk: $tool is missing; see the top of $0" >&2; exit 1; }
done
[ "$(nproc)" -ge 2 ] || { echo "load-vs-wrk: one CPU for the server and one for the client are needed" >&2; exit 1; }

dir=$(mktemp -d)
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; rm -rf "$dir"' EXIT
cat > "$dir/nginx.conf" <<CONF
daemon off; worker_processes 1; pid $dir/pid; error_log $dir/error crit;
events { worker_connections 16384; multi_accept on; }
http {
    access_log off;
    server {
        listen 127.0.0.1:18191 backlog=4096; listen 127.0.0.1:18192 backlog=4096;
        listen 127.0.0.1:18193 backlog=4096; listen 127.0.0.1:18194 backlog=4096;
        location / { return 200 "ok"; }
    }
}
CONF
ulimit -n "$(ulimit -Hn)"
taskset -c 0 nginx -p "$dir" -c "$dir/nginx.conf" &
server=$!
sleep 0.5
kill -0 "$server"

# Runs "$@" on CPU 1; leaves its output in $dir/out and its CPU seconds in $cpu.
timed() {
    TIMEFORMAT='%U %S'
    { time taskset -c 1 "$@" >"$dir/out" 2>&1 || { cat "$dir/out" >&2; exit 1; }; } 2>"$dir/time"
    cpu=$(awk '{ print $1 + $2 }' "$dir/time")
}

# Each prints "answers seconds errors"; timed has run before.
read_wakeone() { awk -F'[ :,]+' '/"completed"/ && !c { c = $3 } /"elapsed_s"/ { e = $3 } /"planned"/ && !p { p = $3 } END { print c, e, p - c }' "$dir/out"; }
read_wrk() { awk '/requests in/ { n = $1; sub("s,", "", $4); t = $4 } /Socket errors/ { gsub(",", ""); e = $4 + $6 + $8 + $10 } END { print n, t, e + 0 }' "$dir/out"; }
read_httperf() { awk '/^Total:/ { n = $7; t = $9 } /^Errors: total/ { e = $3 } END { print n, t, e }' "$dir/out"; }

run() { # tool -> "answers seconds errors cpu"
    case $1 in
        wakeone) timed "$wakeone" load -c $clients -d "${seconds}s" --sources 0 --json http://127.0.0.1:18191/; read_wakeone ;;
        wakeone-sources) timed "$wakeone" load -c $clients -d "${seconds}s" --json http://127.0.0.1:18192/; read_wakeone ;;
        wrk) timed wrk -t1 -c$clients -d"${seconds}s" -H 'Connection: close' http://127.0.0.1:18193/; read_wrk ;;
        httperf)
            timed httperf --hog --server 127.0.0.1 --port 18194 --num-calls 1 --add-header 'Connection: close\n' \
                --rate "$rate" --num-conns $((rate * seconds))
            read_httperf ;;
    esac > "$dir/result"
    echo "$(cat "$dir/result") $cpu"
}

# httperf spins between its planned times: per CPU second it is best at the highest rate that it holds.
best=0 rate_best=2000
for rate in 3000 5000 7000 9000 11000 14000 17000 20000; do
    read -r answers wall _ cpu <<<"$(seconds=1 run httperf)"
    score=$(awk "BEGIN { print int($answers / $cpu) }")
    if [ "$score" -gt "$best" ]; then best=$score rate_best=$rate; fi
done
rate=$rate_best
echo "nginx $(nginx -v 2>&1 | sed 's/.*\///'), $(wrk -v 2>&1 | awk 'NR == 1 { print $1, $2 }'), $(httperf --version 2>/dev/null | awk '/^httperf: / { print $2 }') at $rate/s, Linux $(uname -r)"
echo "$rounds rounds of $seconds s, $clients clients; load average before: $(cut -d' ' -f1 /proc/loadavg)"

awk '$1 > 1 { print "warning: this machine is busy: ratios of short runs are noise; stop what else runs" }' /proc/loadavg

tools=(wakeone wakeone-sources wrk httperf)
for ((round = 1; round <= rounds; round++)); do
    order=("${tools[@]}")
    if ((round % 2 == 0)); then order=(httperf wrk wakeone-sources wakeone); fi
    for tool in "${order[@]}"; do echo "$round $tool $(run "$tool")"; done
done | tee "$dir/rounds" | awk '{ printf "  round %d %-16s %8d/s  %8d/CPU s  errors %d\n", $1, $2, $3 / $4, $3 / $6, $5 }'

# Ratios within a round, then their median and extremes.
awk -v tools="${tools[*]}" '
    { wall[$1, $2] = $3 / $4; core[$1, $2] = $3 / $6; if ($1 > n) n = $1 }
    function sort(v, n,   i, j, t) { for (i = 2; i <= n; i++) for (j = i; j > 1 && v[j] < v[j - 1]; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t } }
    function middle(v, n) { sort(v, n); return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2 }
    function ratio(a, b,   i, v, w, m) {
        for (i = 1; i <= n; i++) { v[i] = core[i, a] / core[i, b]; w[i] = wall[i, a] / wall[i, b] }
        m = middle(v, n); printf "| %-15s | %-7s | %5.2f (%.2f…%.2f) |", a, b, m, v[1], v[n]
        m = middle(w, n); printf " %5.2f (%.2f…%.2f) |\n", m, w[1], w[n]
    }
    END {
        print "\n| | against | answers per client CPU second: median (least…most) | answers per second |\n|---|---|---|---|"
        ratio("wakeone", "wrk"); ratio("wakeone", "httperf"); ratio("wakeone-sources", "wrk"); ratio("wakeone-sources", "httperf")
    }' "$dir/rounds"
