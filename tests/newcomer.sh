#!/usr/bin/env bash
# A newcomer's first hour: what README and each --help show, typed by an ordinary user, with the mistakes of one.
#
#   tests/newcomer.sh [SERVER ...]
#
# `wakeone` is in PATH, and ports 8000 to 8003 of the network are free. SERVER is a server of four workers that share a
# listener on 127.0.0.1:8000 and wait in epoll; without one it is uvicorn with examples/app.py, as in README. It ends with
# the number of steps, or with the first that is not as it should be.
set -euo pipefail
examples=$(cd "$(dirname "$0")/../examples" 2>/dev/null && pwd || true)
[ $# != 0 ] || set -- uvicorn --workers 4 --port 8000 --app-dir "$examples" app:app
place=$(mktemp -d)
cd "$place"
export WAKEONE_RUNTIME_DIR=$place/run
steps=0 started=()

finish() {
    [ "${#started[@]}" = 0 ] || kill "${started[@]}" 2>/dev/null || true
    wait
    rm -rf "$place"
}
trap finish EXIT

fail() {
    printf 'newcomer: %s\n' "$1" >&2
    exit 1
}

# `try CODE TEXT COMMAND...`: the command ends with the code, and prints the text.
try() {
    local code=$1 text=$2 found=0 said
    shift 2
    said=$(timeout 60 "$@" 2>&1 </dev/null) || found=$?
    [ "$found" = "$code" ] || fail "\`$*\` ended with $found, not $code: $said"
    [[ $said = *"$text"* ]] || fail "\`$*\` does not say \"$text\": $said"
    steps=$((steps + 1))
}

# `until_so TEXT COMMAND...`: the command prints the text within a minute.
until_so() {
    local text=$1 said
    shift
    for _ in $(seq 300); do
        said=$(timeout 60 "$@" 2>&1 </dev/null) || true
        [[ $said != *"$text"* ]] || { steps=$((steps + 1)); return; }
        sleep 0.2
    done
    fail "\`$*\` never says \"$text\": $said"
}

# Starts a command beside this script, which ends it. $last is its process.
start() {
    "$@" >"$place/log" 2>&1 &
    last=$!
    started+=($last)
}

# Ends the last one by SIGTERM, as a user would; it ends well.
stop() {
    local code=0
    kill $last
    wait $last || code=$?
    [ "$code" = 0 ] || fail "it ended with $code: $(cat "$place/log")"
    unset 'started[-1]'
    steps=$((steps + 1))
}

[ "$(id -u)" != 0 ] || fail "a newcomer is an ordinary user, not root"

# What is there, and what takes root.
try 0 "wakeone 0." wakeone --version
try 2 "Usage: wakeone <COMMAND>" wakeone
try 1 "as root: choose the worker of each connection" wakeone doctor --self
try 0 "nothing is steered; start a server" wakeone status
for command in run status metrics policy attach agent detach doctor top load sim; do
    try 0 "xample" wakeone "$command" --help
done

# README's first commands.
start "$@"
server=$last
until_so "50 of 50" wakeone load -n 50 localhost:8000
try 0 "latency" wakeone load --rate 900 -c 64 --keep-alive --apart 4ms -d 2 localhost:8000
try 0 "latency" wakeone load --rate 20 -d 2 --json=load.json localhost:8000
# The same server by each of its names. doctor ends with 3 if it finds something.
for target in :8000 8000 localhost:8000 127.0.0.1:8000 tcp://8000 "$server" "pid:$server"; do
    said=$(wakeone doctor "$target" --for 0.2 2>&1) || [ $? = 3 ] || fail "doctor $target: $said"
    [[ $said = *"tcp 127.0.0.1:8000"*epoll* ]] || fail "doctor $target does not show the server: $said"
    try 0 "127.0.0.1:8000" wakeone top "$target" --once --interval 0.2
    try 0 "one queue" wakeone attach "$target" --dry-run
done
try 0 "one queue by least-connections" wakeone attach localhost:8000
try 0 "latency" wakeone load --rate 900 -c 64 --keep-alive --apart 4ms -d 2 localhost:8000
for target in :8000 8000 localhost:8000 127.0.0.1:8000 "$server" at-127-0-0-1-8000; do
    try 0 "armed" wakeone status "$target"
    try 0 "wakeone_slot_active_connections" wakeone metrics "$target"
done
try 0 "round-robin instead of least-connections" wakeone policy localhost:8000 round-robin
try 0 "woken as before" wakeone detach 8000

# A server that Wakeone starts, with the `--` forgotten.
command=("${@//8000/8001}")
start wakeone run "${command[@]}"
until_so "started by process" wakeone status 8001
try 0 "latency" wakeone load -n 200 http://localhost:8001/
kill $last
wait $last || true # with the server's own code
unset 'started[-1]'

# Workers on a listener of Wakeone's.
cat >worker.py <<'END'
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    connection.close()
END
start wakeone run -w 2 -l 8002 --grace 5 python3 worker.py '{fd}'
until_so "50 of 50" wakeone load -n 50 localhost:8002
try 0 "one queue" wakeone status 8002
stop

# A name that is misspelt, or in a virtual environment that this shell does not know, in each way to start.
for way in "" "--split" "-w 2 -l :8003"; do
    for separated in "--" ""; do
        try 1 'there is no command `no-such-server` in PATH' wakeone run $way $separated no-such-server --port 8003
    done
done
try 1 'sudo has a PATH of its own' env SUDO_UID=1000 wakeone run no-such-server
try 1 'there is no file `/no/such-server`' wakeone run /no/such-server
try 2 "unexpected argument '--wrokers'" wakeone run --wrokers 2 -l :8003 -- "${command[@]}"
try 1 "nothing listens on port 8003" wakeone attach 8003
try 1 "nothing listens on localhost:8003" wakeone attach localhost:8003

# Predictions, of every example that needs no server.
few=(-n 2000)
wakeone sim --help | sed -n 's/^ *wakeone sim //p' | while read -r line; do
    # shellcheck disable=SC2086
    wakeone sim $(sed 's/ > .*//' <<<"$line") "${few[@]}" >sim.out 2>&1 || fail "sim $line: $(cat sim.out)"
done
try 0 "the slowest one percent take 2" wakeone sim --rate 1000 --service 2ms --find workers --p99 1ms
try 0 "" wakeone load --compare load.json load.json
echo "newcomer: $steps steps"
