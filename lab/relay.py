"""Standard input and output to a TCP port and back: what SSH runs as its ProxyCommand inside the lab's namespace."""

import os
import select
import socket
import sys

CHUNK = 1 << 16


def write_all(fd: int, data: bytes) -> None:
    """os.write may take less than it is given."""
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    """relay.py ADDRESS PORT"""
    address, port = sys.argv[1], int(sys.argv[2])
    try:
        peer = socket.create_connection((address, port), timeout=10)
    except OSError as error:
        sys.exit(f"{address} port {port}: {error.strerror or error}")
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sources = [sys.stdin.fileno(), peer.fileno()]
    try:
        while peer.fileno() in sources:
            for fd in select.select(sources, [], [])[0]:
                data = os.read(fd, CHUNK)
                if not data:
                    sources.remove(fd)
                    if fd != peer.fileno():
                        peer.shutdown(socket.SHUT_WR)
                elif fd == peer.fileno():
                    write_all(sys.stdout.fileno(), data)
                else:
                    peer.sendall(data)
    except OSError:
        pass  # the other side is gone; SSH reports that in its own words


if __name__ == "__main__":
    main()
