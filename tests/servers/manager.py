"""A manager that makes the listeners of its workers and keeps them, as a socket-activating one does.

    manager.py PORT SOCKETS [--all] [--each N]

Each socket has N workers (1 unless told), which block in accept. A worker has its own socket only, or with --all every one.
Commands on standard input, each answered with a line: `start SOCKET` starts a worker and tells its pid, `kill SOCKET` ends
the workers of a socket, `program` sets the manager's own program on the group (always the first socket), `detach` takes away
whatever program there is, `reopen MS` ends all workers and closes all sockets, and opens others after MS ms, with new workers;
`reopen MS program` sets its own program on these. A request for /work?ms=N keeps its worker for that long, and one for /hold until the client ends
the connection. The answer is the socket's number and the worker's pid.
"""

import ctypes
import os
import signal
import socket
import struct
import sys
import time

SO_ATTACH_REUSEPORT_CBPF = 51
SO_DETACH_REUSEPORT_BPF = 68
RETURN = 0x06  # BPF_RET | BPF_K


def serve(number, listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(0.001)  # its queue is being moved
            continue
        with connection:
            connection.settimeout(5)
            try:
                path = connection.recv(4096).split(b" ")[1]
                if path.startswith(b"/work?ms="):
                    time.sleep(int(path[9:]) / 1000)
                body = b"%d %d" % (number, os.getpid())
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                if path == b"/hold":
                    connection.settimeout(None)
                    connection.recv(1)
            except (OSError, IndexError):
                pass


def start(number, sockets, everything):
    pid = os.fork()
    if pid:
        return pid
    os.close(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not everything:
        for other in sockets[:number] + sockets[number + 1 :]:
            other.close()
    serve(number, sockets[number])


def program(listener):
    """A classic program that always chooses the first socket."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, struct.pack("HP", 1, ctypes.addressof(code)))


def listen(port, count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", port))
    for one in sockets:
        one.listen(256)
    return sockets


def kill(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.001)


def main():
    port, count = int(sys.argv[1]), int(sys.argv[2])
    everything = "--all" in sys.argv
    each = int(sys.argv[sys.argv.index("--each") + 1]) if "--each" in sys.argv else 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sockets = listen(port, count)

    def start_all():
        return {number: [start(number, sockets, everything) for _ in range(each)] for number in range(count)}

    workers = start_all()
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "start":
            number = int(arguments[0])
            workers[number].append(start(number, sockets, everything))
            print(workers[number][-1], flush=True)
        elif command == "kill":
            kill(workers[int(arguments[0])])
            workers[int(arguments[0])] = []
            print("killed", flush=True)
        elif command == "program":
            program(sockets[0])
            print("set", flush=True)
        elif command == "detach":
            sockets[0].setsockopt(socket.SOL_SOCKET, SO_DETACH_REUSEPORT_BPF, 0)
            print("detached", flush=True)
        elif command == "reopen":
            kill(sum(workers.values(), []))
            for one in sockets:
                one.close()
            time.sleep(int(arguments[0]) / 1000)
            sockets[:] = listen(port, count)
            if arguments[1:]:
                program(sockets[0])
            workers = start_all()
            print("reopened", flush=True)
    for pid in sum(workers.values(), []):
        os.kill(pid, signal.SIGKILL)


main()
