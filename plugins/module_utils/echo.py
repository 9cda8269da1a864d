"""Echo requests (ICMP, RFC 792) from an address to a peer, timed; needs root."""

from __future__ import annotations

import errno
import itertools
import select
import socket
import struct
import time

ECHO_SECONDS = 1.0  # that an echo may take
ECHO_INTERVAL = 0.005
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = (
    10,
    3,
)  # linux/in.h: do not fragment, and ask for no path's MTU that is known
HEADERS = 28  # bytes of IPv4's (the kernel's to write) and ICMP's


def checksum(data: bytes) -> int:
    """RFC 1071's, of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def echo_request(identity: int, number: int, size: int) -> bytes:
    """An ICMP echo request that makes an IPv4 packet of `size` bytes."""
    body = bytes((size - HEADERS) // 2 * 2)  # an odd last byte of zero adds nothing to the sum
    odd = bytes((size - HEADERS) % 2)
    head = struct.pack("!BBHHH", 8, 0, 0, identity, number)
    return struct.pack("!BBHHH", 8, 0, checksum(head + body), identity, number) + body + odd


def echoes(address: str, own: str, count: int, size: int, identity: int) -> tuple[int, list[float]]:
    """(requests sent, seconds until each answer) of `count` packets of `size` bytes. Raises OSError."""
    sent: dict[int, float] = {}
    times: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as probe:
        probe.bind((own, 0))
        probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        probe.connect((address, 0))
        begin = time.monotonic()
        end = begin + count * ECHO_INTERVAL + ECHO_SECONDS
        while (now := time.monotonic()) < end and len(times) < count:
            if len(sent) < count and now >= begin + len(sent) * ECHO_INTERVAL:
                number = len(sent)
                sent[number] = time.monotonic()
                try:
                    probe.send(echo_request(identity, number, size))
                except OSError as error:
                    if error.errno == errno.EMSGSIZE:  # this host's own interface does not take it
                        return count, []
                    raise
            wait = begin + len(sent) * ECHO_INTERVAL - now if len(sent) < count else end - now
            if not select.select([probe], [], [], max(0.0, min(wait, 0.05)))[0]:
                continue
            answer, heard = probe.recv(65536), time.monotonic()
            head = (answer[0] & 15) * 4
            kind, _, _, who, number = struct.unpack("!BBHHH", answer[head : head + 8])
            if kind == 0 and who == identity and number in sent:
                times.append(heard - sent.pop(number))
                sent[number] = float("inf")  # a second answer to the same request is none
    return count, [value for value in times if value >= 0]


def jitter(values: list[float]) -> float:
    """How much two delays in a row differ, on average (RFC 3550's measure, unsmoothed); 0 of fewer than two."""
    steps = [abs(after - before) for before, after in itertools.pairwise(values)]
    return sum(steps) / max(1, len(steps))


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
