"""What the role time_sync says of a clock, from chronyc's words."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

SPREAD = 0.1  # seconds that clocks may be apart
OWN_CLOCK = "7F7F0101"  # the reference of a chronyd that no source answers, and that serves all the same
EVERYBODY = [ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")]
TRY = r"refid: (\w+), correction: ([\d.]+)"


def time_sync_off(words: str) -> float:
    """Seconds that the clock is away from the time that chrony follows, by what `chronyc waitsync` said last."""
    tries = re.findall(TRY, words)
    return float(tries[-1][1]) if tries else 0.0


def time_sync_apart(sources: str, head: str) -> float:
    """Seconds at least that a host's clock is from the head's, by its `chronyc -c sources`.

    A source's line: mode, state, address, stratum, poll, answers of late (octal), seconds since the last one, offset,
    the offset as it was measured, error. 0 where the host follows the head (*), or has no answer of it.
    """
    for line in sources.splitlines():
        fields = line.split(",")
        if len(fields) > 9 and fields[2] == head and fields[1] != "*" and int(fields[5], 8):
            return max(0.0, abs(float(fields[7])) - float(fields[9]))
    return 0.0


def time_sync_unserved(lines: Iterable[str], address: str, network: str, peers: Iterable[str]) -> str:
    """The line of `chronyd -p` by which the head would not answer the others, whatever our file says; "" without one.

    address: the head's; network: the cluster's, which our file allows; peers: the others' addresses.
    """
    own, cluster = _network(address), _network(network)
    peers = list(peers)
    others = [one for one in map(_network, peers) if one] or [one for one in [cluster] if one]
    told: list[tuple[str, str, str]] = []
    for line in lines if peers else ():
        word, value = [*line.split(None, 1), "", ""][:2]
        told.append((word.lower(), value.strip(), line.strip()))
    if not any(word == "allow" and _network(value) == cluster for word, value, _ in told):
        told.append(("allow", network, ""))  # ours is not there yet
    kept: dict[str, str] = {}  # of each setting the line that counts, the last one; "" where it is well
    for word, value, line in told:
        place = _network(value)
        if word == "port":
            kept[word] = line if value != "123" else ""
        elif word == "binddevice":
            kept[word] = line if value == "lo" else ""
        elif word == "bindaddress" and place and own and place.version == own.version:
            kept[word] = line if place not in (own, _network("0.0.0.0")) else ""
    access = _access([one for one in told if one[0] in ("allow", "deny")])
    shut = [line for word, line in (_answer(access, one) for one in others) if word == "deny"]
    return next(filter(None, [*kept.values(), *shut]), "")


def _access(told: Iterable[tuple[str, str, str]]) -> list[tuple[Any, str, str]]:
    """Chrony's table of access by its allow and deny (word, value, line): (network, word, line), as they came."""
    access: list[tuple[Any, str, str]] = []
    for word, value, line in told:
        whole = value.split()[:1] == ["all"]
        text = value.removeprefix("all") if whole else value
        for place in [_network(text)] if text.strip() else EVERYBODY:
            if place and whole:  # what was told of smaller networks in it, too, goes
                access = [
                    one for one in access if one[0].version != place.version or not one[0].subnet_of(place)
                ]
            if place:
                access.append((place, word, line))
    return access


def _answer(access: list[tuple[Any, str, str]], address) -> tuple[str, str]:
    """(allow or deny, its line) for an address: that of the smallest network counts, of equal ones the last.

    Equal are those whose prefixes chrony rounds up to the same multiple of 4, as /21 to /24.
    """
    meant = [one for one in access if one[0].version == address.version and address.subnet_of(one[0])]
    _, word, line = max(reversed(meant), key=lambda one: -(-one[0].prefixlen // 4), default=(None, "", ""))
    return word, line


def _network(text: str):
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:  # a name, or 10.1 for 10.1.0.0/16
        return None


def time_sync_fault(rc: int, words: str, head: str = "", apart: float = 0.0) -> str:
    """What is to be said after `chronyc waitsync` ended with `rc` and `words`; empty if the clock is right.

    `head`: the address that the host follows; empty for the head itself. apart: see time_sync_apart.
    """
    tries = re.findall(TRY, words)
    if rc == 0 and apart > SPREAD:
        return (
            f"its clock is {apart:.1f} s from that of the head ({head}): it follows a source that the head does not. "
            "`chronyc sources` on both shows whom they ask. Name one that both reach in time_sync_servers, or let UDP "
            "port 123 out on the head."
        )
    if rc == 0:
        return ""
    if not tries:
        return f"chronyd does not answer ({words.strip()}). `systemctl status chrony` on the host says why."
    refid, _ = tries[-1]
    if refid == OWN_CLOCK and not head:
        return (
            "no time source answers it, so that the others follow its own clock: the hosts agree with each other, and "
            "perhaps with nobody else. Let UDP port 123 out, or name a server that it reaches in time_sync_servers."
        )
    if refid == OWN_CLOCK or int(refid, 16) == 0:
        asks = "`chronyc sources` on the host shows whom it asks."
        if not head:
            return f"no time source answers it yet. {asks}"
        return (
            f"no time source answers it, the head ({head}) neither. {asks} Let UDP port 123 through to the head, where "
            "`chronyc clients` shows who has got there; or, where the host's time is kept otherwise, set "
            "time_sync_manage: false for it."
        )
    return (
        f"its clock is {time_sync_off(words):.1f} s off, and chrony mends that slowly. `sudo chronyc makestep` on the "
        "host does it at once; `chronyc sources` there shows whom it follows."
    )


class FilterModule:
    def filters(self):
        return {
            "time_sync_apart": time_sync_apart,
            "time_sync_fault": time_sync_fault,
            "time_sync_off": time_sync_off,
            "time_sync_unserved": time_sync_unserved,
        }
