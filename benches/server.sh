# shellcheck shell=bash
# For the benches that source it: one server in the background, which ends with the shell that started it.

# Starts this command. Its files go to $folder, what it prints to $folder/log.
start() {
    "$@" >"$folder/log" 2>&1 &
    server=$!
    trap 'kill "$server" 2>/dev/null || true; wait; rm -r "$folder"' EXIT
}

# Waits until the server has printed a line with this in it, or fails when it has ended.
printed() {
    until grep -q "$1" "$folder/log"; do
        kill -0 "$server"
        sleep 0.1
    done
}
