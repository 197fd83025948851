"""Starts a command several times on one UDP socket, as servers with worker processes do.

    share_udp.py HOST:PORT WORKERS COMMAND…

The socket is descriptor 3 of each. SIGTERM ends them all.
"""
import os
import signal
import socket
import subprocess
import sys


def shared(address):
    """Makes the socket descriptor 3."""
    host, port = address.rsplit(":", 1)
    host = host.strip("[]")
    own = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    own.bind((host, int(port)))
    if own.fileno() == 3:
        own.detach()
        os.set_inheritable(3, True)
    else:
        os.dup2(own.fileno(), 3)
        own.close()


def main():
    address, workers, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    shared(address)
    started = [subprocess.Popen(command, pass_fds=[3]) for _ in range(workers)]

    def end(*_):
        for one in started:
            one.terminate()

    signal.signal(signal.SIGTERM, end)
    for one in started:
        one.wait()


if __name__ == "__main__":
    main()
