"""bench.yml on three real hosts: a slow wire stands out, and one that has become slower is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plays import Plays, wait_for
from processes import kill_all

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("node1", "node2", "node3")


@pytest.fixture(scope="module")
def plays(deployed, tmp_path_factory):
    """Three hosts, deployed by site.yml, with node2 behind 50 Mbit/s."""
    deployed.set_rate("node2", "50mbit")
    yield Plays(deployed, tmp_path_factory.mktemp("bench"))
    deployed.set_rate("node2", None)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


def bench(plays, results):
    done = plays.book("playbooks/bench.yml", bench_largest_mib=4, trainer_results_dir=results)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    return said, json.loads((results / "bench/last.json").read_text())


def test_a_slow_wire_stands_out(plays, results):
    said, found = bench(plays, results)
    for a in HOSTS:
        for b in HOSTS:
            if a == b:
                continue
            mbit = found["pairs"][a][b]["mbit"]
            slow = "node2" in (a, b)
            assert (40 < mbit < 52) if slow else mbit > 100, (a, b, mbit)
    for one in (way for ways in found["pairs"].values() for way in ways.values()):
        assert 0 <= one["idle"]["jitter_ms"] < one["idle"]["ms_99"] and one["loaded"]["jitter_ms"] > 0, one
    assert "Jitter in ms, idle > under that load" in said and "Jitter at most: " in said
    loaded = found["pairs"]["node1"]["node2"]["loaded"]["ms"]
    assert loaded > 2 * found["pairs"]["node1"]["node2"]["idle"]["ms"]  # its queue is full
    reduce = [row for row in found["collectives"]["rows"] if row["collective"] == "all_reduce"][-1]
    assert 20 < reduce["bus"] * 8 / 1e6 < 60  # a ring is as fast as its slowest wire
    assert all(max(ways, key=ways.get).startswith("eth") for ways in found["collectives"]["ways"].values()), (
        found
    )
    assert "Mbit/s by TCP" in said and "Collectives over gloo, 3 ranks" in said
    assert (results / "bench/last.svg").read_text().startswith("<svg")
    for host in HOSTS:
        assert plays.sh(host, "pgrep -c iperf3 || true").strip() == "0"
    if os.environ.get("TRAINYARD_SHOW"):
        print(said)


def test_what_became_slower_is_found_and_is_no_baseline(plays, results):
    plays.lab.set_rate("node2", "10mbit")
    said, found = bench(plays, results)
    assert "Worse than the best so far" in said and "node1 to node2" in said, said
    plays.lab.set_rate("node2", "50mbit")
    said, found = bench(plays, results)
    worse = [key for key, _ in found["worse"] if "node2" in key]
    assert not [key for key in worse if found["figures"]["mbit"].get(key, 0) < 40], found["worse"]


def test_it_refuses_while_a_run_is_active(plays, results):
    words = ["train.yml", "-e", "model=tiny", "-e", "run=benched", "-e", "steps=20000"]
    program = Path(sys.executable).with_name("ansible-playbook")
    train = subprocess.Popen(
        [str(program), "-i", str(plays.lab.inventory), *words],
        cwd=ROOT,
        env=plays.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(
            lambda: plays.sh("node1", "systemctl is-active trainyard@benched || true").strip() == "active",
            300,
        )
        done = plays.book("playbooks/bench.yml", trainer_results_dir=results)
        assert done.returncode != 0 and "run benched is active" in done.stdout, done.stdout
    finally:
        kill_all(train)
        done = plays.book("playbooks/stop.yml", run="benched")
    assert done.returncode == 0, done.stdout
