"""Who measures the way to whom, in which order, for bench.yml."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from host_runs import WORK, kinds_of
from rdma_ports import fastest

ALL_PAIRS = (
    16  # hosts up to which every way is measured; of more, those to the 1st, 2nd, 4th, 8th, … after each
)


def bench_refusal(hosts: list[str], seen: dict[str, dict], asked: dict[str, dict], local: bool) -> str:
    """Why nothing is measured, with the cure; "" where it is.

    seen, asked: what preflight_survey and run_host registered on each host.
    """
    if local or len(hosts) < 2:
        return (
            "a bench measures the ways between two hosts or more; here all is one machine. "
            "`make bench` measures the trainer."
        )
    silent = [
        f"{host}: {_last_line((seen.get(host) or {}).get('msg'))}"
        for host in hosts
        if "survey" not in (seen.get(host) or {})
    ]
    if silent:
        return f"{'; '.join(silent)}. Cure that, or leave the host out: --limit '!HOST'"
    without = [host for host in hosts if not (asked.get(host) or {}).get("host_facts", {}).get("release")]
    if without:
        return f"{', '.join(without)}: the trainer is not deployed there; run site.yml first"
    active = sorted({run for host in hosts for run in asked[host]["host_facts"]["active"]})
    if active:
        return (
            f"run {active[0]} is active, and each would spoil the other. Wait for its end, or stop it, resumable: "
            f"ansible-playbook playbooks/stop.yml -e run={active[0]}"
        )
    # What listens for a bench that was interrupted is not told: the next one ends it.
    work = {host: [u for u in asked[host]["host_facts"]["at_work"] if u.startswith(WORK)] for host in hosts}
    if there := [host for host in hosts if work[host]]:
        return (
            f"{', '.join(there)}: {work[there[0]][0]} is at work, and each would spoil the other. Wait for its end, or "
            f"stop it: ansible {','.join(there)} -b -a 'systemctl stop "
            f"{' '.join(kinds_of(unit for host in there for unit in work[host]))}'"
        )
    return ""


def _last_line(message: object) -> str:
    lines = str(message or "it was not asked").strip().splitlines()
    return lines[-1][:300] if lines else "no reason given"


def bench_offsets(count: int) -> list[int]:
    """How many places after each host the measured peers of the rounds stand."""
    if count <= ALL_PAIRS:
        return list(range(1, count))
    return [1 << power for power in range((count - 1).bit_length()) if 1 << power < count]


def bench_peer(hosts: list[dict], name: str, offset: int, seen: dict[str, dict]) -> dict:
    """The host that stands `offset` places after `name`: {name, address, device}."""
    order = [host["name"] for host in hosts]
    peer = hosts[(order.index(name) + offset) % len(hosts)]
    return {"name": peer["name"], "address": peer["address"], "device": bench_device(seen[peer["name"]])}


def bench_device(seen: dict) -> str:
    """The RDMA device of a host whose port is up, the fastest, or ""."""
    return fastest(seen["survey"]["rdma"])


class FilterModule:
    def filters(self):
        return {
            "bench_device": bench_device,
            "bench_offsets": bench_offsets,
            "bench_peer": bench_peer,
            "bench_refusal": bench_refusal,
        }
