"""trainer bench: ranks of two hosts meet as a run's do, and say what collectives carry."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import ROOT, free_port

from tests.playbooks.processes import descendants


def place(node: int, port: int, processes: int = 1, world: int = 2) -> dict:
    return {
        **os.environ,
        "TRAINYARD_HOST": f"host{node}",
        "NNODES": "2",
        "NODE_RANK": str(node),
        "RANK_OFFSET": str(node),  # the first host has one process
        "NPROC_PER_NODE": str(processes),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def bench(environment: dict, *arguments: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "trainer", "bench", "--device", "cpu", *arguments]
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_two_hosts_with_one_and_two_ranks_measure_every_collective():
    port = free_port()
    hosts = [
        bench(place(node, port, node + 1, world=3), "--largest", "1", "--seconds", "0.05") for node in (0, 1)
    ]
    (first, _), (second, _) = [host.communicate(timeout=120) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    assert second == ""
    answer = json.loads(first)
    assert answer["backend"] == "gloo" and answer["ranks"] == 3 and answer["hosts"] == ["host0", "host1"]
    rows = {(row["collective"], row["bytes"]): row for row in answer["rows"]}
    assert {name for name, _ in rows} == {"all_reduce", "all_gather", "all_to_all", "broadcast"}
    for (name, count), row in rows.items():
        share = {"all_reduce": 4 / 3, "broadcast": 1.0}.get(name, 2 / 3)
        assert row["bus"] == pytest.approx(count / row["seconds"] * share)
        assert count % 12 == 0  # whole numbers of floats for three ranks
    # A ring moves 4/3 of a buffer of 1 MiB a rank each time, and this host's counters see it leave.
    assert all(ways["lo"] > 1 << 20 for ways in answer["ways"].values())


@pytest.mark.full
def test_nobody_stays_when_a_host_is_killed_or_alone_for_too_long():
    port = free_port()
    first = bench(place(0, port), "--largest", "64", "--seconds", "30")
    second = bench(place(1, port), "--largest", "64", "--seconds", "30")
    while not (family := descendants(second.pid)):
        assert second.poll() is None
        time.sleep(0.1)
    time.sleep(8)  # torch is loaded, and they have met or are about to
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, said = first.communicate(timeout=120)
    assert first.returncode == 5, said
    assert "error: " in said and "Traceback" not in said
    assert not [pid for pid in family if os.path.exists(f"/proc/{pid}/exe")]


def test_one_process_has_nobody_to_talk_to():
    environment = {**place(0, free_port()), "WORLD_SIZE": "1", "NNODES": "1"}
    host = bench(environment)
    _, said = host.communicate(timeout=60)
    assert host.returncode == 2 and "two ranks or more" in said
