"""Whether another machine answers for an address of this host's own: RFC 5227's probe; needs root."""

from __future__ import annotations

import glob
import select
import socket
import struct
import time

ETH_P_ARP, ARPHRD_ETHER = 0x0806, 1  # linux/if_ether.h, linux/if_arp.h
ARP = struct.Struct("!HHBBH6s4s6s4s")  # RFC 826's packet, for IPv4 on Ethernet
REQUEST = 1
PROBES, INTERVAL, LISTEN = 3, 0.3, 1.0  # how many, s between two, s in all


def probe_of(hardware: bytes, address: str) -> bytes:
    """An ARP probe: a question for `address` whose sender claims none, so that nobody's table changes by it."""
    nobody, wanted = bytes(4), socket.inet_aton(address)
    return ARP.pack(ARPHRD_ETHER, 0x0800, 6, 4, REQUEST, hardware, nobody, bytes(6), wanted)


def claimant(packet: bytes, address: str, ours: set[str]) -> str:
    """The hardware address of who says in an ARP packet that `address` is its own; "" for nobody, or one of `ours`."""
    if len(packet) < ARP.size:
        return ""
    _, _, _, _, _, hardware, sender, _, _ = ARP.unpack_from(packet)
    said = hardware.hex(":")
    return said if sender == socket.inet_aton(address) and said not in ours else ""


def others_with(interface: str, address: str) -> list[str] | None:
    """Hardware addresses of other machines that have `address`, which this host holds on `interface`.

    Takes LISTEN seconds. None where that cannot be known: on a link that is no Ethernet (nor Wi-Fi), or without root.
    """
    ours = set()
    try:
        for file in glob.glob("/sys/class/net/*/address"):
            with open(file, encoding="ascii") as stream:
                ours.add(
                    stream.read().strip()
                )  # a second card in the same network answers for the first one, too
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ARP)) as probe:
            probe.bind((interface, ETH_P_ARP))
            _, _, _, kind, hardware = probe.getsockname()
            return _asked(probe, interface, hardware, address, ours) if kind == ARPHRD_ETHER else None
    except OSError:
        return None


def _asked(probe: socket.socket, interface: str, hardware: bytes, address: str, ours: set[str]) -> list[str]:
    """Send the probes and listen; who claimed the address. Raises OSError."""
    begin, sent = time.monotonic(), 0
    found: set[str] = set()
    while (now := time.monotonic()) < begin + LISTEN:
        if sent < PROBES and now >= begin + sent * INTERVAL:
            probe.sendto(probe_of(hardware, address), (interface, ETH_P_ARP, 0, 0, b"\xff" * 6))
            sent += 1
        if select.select([probe], [], [], 0.05)[0]:
            found.add(claimant(probe.recv(1024), address, ours))
    return sorted(found - {""})
