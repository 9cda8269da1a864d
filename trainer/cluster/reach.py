"""Which of an attempt's other hosts answer this one at all: what is asked once its ranks have lost a peer.

A port at which nobody listens is an answer; silence is none, nor is a router's word that there is no way. The store may
be reached where a host is not: a firewall, one direction of a cable, a switch that keeps two ports apart.
"""

import contextlib
import errno
import select
import socket
import time

from trainer.cluster.membership import Host

PATIENCE = 2.0  # seconds for all answers: the first packet to each may be lost
NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


def unreached(hosts: list[Host]) -> list[int]:
    """The nodes of those `hosts` that do not answer; who cannot be asked (no socket is left) is none of them."""
    silent, asked, answers = [], {}, select.poll()
    with contextlib.ExitStack() as stack:
        for host in hosts:
            with contextlib.suppress(OSError):
                family, *_, place = socket.getaddrinfo(host.address, host.port, type=socket.SOCK_STREAM)[0]
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setblocking(False)
                code = probe.connect_ex(place)
                if code in NO_WAY:
                    silent.append(host.node)
                elif code == errno.EINPROGRESS:
                    asked[probe.fileno()] = probe, host.node
                    answers.register(probe, select.POLLOUT)
        end = time.perf_counter() + PATIENCE
        while asked and (left := end - time.perf_counter()) > 0:
            for number, _ in answers.poll(left * 1000):
                answers.unregister(number)
                probe, node = asked.pop(number)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in NO_WAY:
                    silent.append(node)
    return sorted([*silent, *(node for _, node in asked.values())])
