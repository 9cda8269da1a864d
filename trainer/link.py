"""What is known of the network between a run's hosts, and how much is to travel at once over it. No torch here.

preflight.yml and bench.yml measure it, and keep their good results on the controller as baseline-….json, one for each
set of hosts.
"""

import json
import math
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import BadInput
from trainer.ways import BUCKET_MB, USED

RESULTS = Path("runs")  # where the playbooks keep what they have measured
PLACES = ("bench", "preflight")  # below runs/
LESS = 40  # times that a bucket's bytes take as long as its way from host to host
ASSUMED = 1e9  # bits a second of a network of which nothing is known: gigabit Ethernet
WIRELESS = 0.3e9  # of one that says no speed: what good Wi-Fi carries in a house
SLOW = 2.5e9  # at most, of what takes long to carry a model


@dataclass(frozen=True)
class Link:
    """The slowest pair of those that were measured."""

    hosts: frozenset[str]
    stream: float  # bits a second of a TCP connection
    hop: float | None  # seconds from one host to another; None: not measured, or RDMA goes another way
    measured: float  # s since 1970
    file: Path

    @property
    def bits(self) -> float:
        """A second, as a link is named: a stream carries ways.USED of it."""
        return self.stream / USED

    @property
    def source(self) -> str:
        """When it was measured, what, and where that stands."""
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.measured))
        return f"measured {day}: {self.stream / 1e6:,.0f} Mbit/s of the slowest pair, {self.file}"


def of_run(asked: str | None, nodes: int) -> tuple[float, str, float | None]:
    """Bits a second of the link between hosts, what says so, and the seconds of a hop where that was measured.

    asked: a speed, or a result of preflight.yml or bench.yml. Else the newest such result below runs/ for so many hosts
    counts, then what the interface that the ranks would talk over reports, then a plain network.
    """
    if asked and asked.endswith(".json"):
        if not (found := read(Path(asked))):
            raise BadInput(
                f"--link: {asked}: expected a result of preflight.yml or bench.yml (runs/preflight/last.json, "
                "runs/bench/last.json) with a bandwidth between hosts; give one, or a speed such as 1gbit"
            )
        return found.bits, found.source, found.hop
    if asked:
        return bits(asked), "", None
    for found in newest(RESULTS):
        if len(found.hosts) == nodes > 1:
            return found.bits, found.source, found.hop
    if speed := interface_speed():
        return speed, f"as {os.environ.get('GLOO_SOCKET_IFNAME', 'the interface')} reports", None
    return ASSUMED, "assumed: nothing was measured", None


def bits(link: str) -> float:
    """Bits a second of a link written like 1gbit, 2.5gbit or 100mbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mg])bit(?:/s)?", link.strip().lower())
    if not found or not float(found[1]):
        raise BadInput(f"--link: expected a speed such as 1gbit, 2.5gbit or 100mbit, found {link}")
    return float(found[1]) * {"m": 1e6, "g": 1e9}[found[2]]


def interface_speed(interfaces: Path = Path("/sys/class/net")) -> float | None:
    """Bits a second of the interface that the ranks would talk over, where it says so; of a wireless one WIRELESS."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not name:
        return None
    if (interfaces / name / "phy80211").exists():
        return WIRELESS
    try:
        megabits = int((interfaces / name / "speed").read_text())
    except (OSError, ValueError):
        megabits = 0
    return megabits * 1e6 if megabits > 0 else None


def read(file: Path) -> Link | None:
    """What a result of preflight.yml or bench.yml says; None where it has no bandwidth."""
    try:
        result = json.loads(file.read_text())
        figures = result["figures"]
        megabits = min(float(one) for one in figures["mbit"].values())
        times = [] if figures.get("gbit") else [float(one) for one in (figures.get("rtt_ms") or {}).values()]
        hosts, measured = frozenset(result["hosts"]), float(result["time"])
        time.localtime(measured)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    if not megabits > 0:
        return None
    return Link(hosts, megabits * 1e6, max(times) / 2000 if times else None, measured, file)


def newest(runs: Path) -> list[Link]:
    """All good results below `runs`, the newest first."""
    files = [file for place in PLACES for file in (runs / place).glob("baseline-*.json")]
    return sorted(filter(None, map(read, files)), key=lambda found: found.measured, reverse=True)


def between(runs: Path, hosts: Collection[str], rdma: Collection[str]) -> list[Link]:
    """Of `newest` what was measured between just these hosts; nothing where some have RDMA, for this is TCP's."""
    if set(hosts) & set(rdma):
        return []
    return [found for found in newest(runs) if found.hosts == set(hosts)]


def bucket_mb(stream: float, hop: float | None, hosts: int) -> int:
    """MB of gradients to travel together between so many hosts: the least power of two that pays, BUCKET_MB at most.

    stream: bits a second. hop: seconds from host to host, None where that is not known. A sum goes around all hosts
    twice: 2 (hosts - 1) hops, and 2 (hosts - 1) / hosts of the bytes over each wire. With fewer bytes more of them
    leave while backward still runs; with so few that hops count, all take longer.
    """
    if hop is None or hosts < 2:
        return BUCKET_MB
    least = LESS * hosts * hop * stream / 8 / (1 << 20)
    return min(BUCKET_MB, 1 << max(0, math.ceil(math.log2(least)))) if least > 0 else 1
