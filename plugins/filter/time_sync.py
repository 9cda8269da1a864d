"""What the role time_sync says of a clock, from chronyc's words."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

SPREAD = 0.1  # seconds that clocks may be apart
OWN_CLOCK = "7F7F0101"  # the reference of a chronyd that no source answers, and that serves all the same
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
    others = [one for one in map(_network, peers) if one]
    found, allowed = "", False
    for line in lines if peers else ():
        word, value = [*line.split(None, 1), "", ""][:2]
        place = _network(value)
        if word == "allow" and (value == "all" or (place and place == cluster)):
            allowed = True
            found = "" if found == "deny all" or (found.startswith("deny ") and value == "all") else found
        elif (
            (word == "port" and value != "123")
            or (word == "bindaddress" and _is_another(place, own))
            or (word == "binddevice" and value == "lo")
            or (word == "deny" and value == "all" and allowed)  # before our file it does nothing to us
            or (word == "deny" and _shuts(place, cluster, others))
        ):
            found = line.strip()
    return found


def _network(text: str):
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:  # a name, or 10.1 for 10.1.0.0/16
        return None


def _is_another(place, own) -> bool:
    """Whether an address that chrony binds to is of the head's kind, and not its own; all of them are its own, too."""
    return bool(place and own) and place.version == own.version and place not in (own, _network("0.0.0.0"))


def _shuts(place, cluster, others) -> bool:
    """Whether a `deny` of chrony's is for a smaller network than our `allow`, and one of the others is in it."""
    if not place or not cluster or place.version != cluster.version or place.prefixlen <= cluster.prefixlen:
        return False
    return any(one.version == place.version and one.subnet_of(place) for one in others)


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
