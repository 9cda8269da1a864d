"""Two hosts: the head goes on alone, a worker that is alone pauses, and each is taken in again."""

import pytest
from cupboard import Calm, Run, deployed
from test_train import book

PAIR = ("node1", "node2")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with deployed("pair", len(PAIR), tmp_path_factory.mktemp("pair")) as plays:
        yield plays


@pytest.fixture(scope="module")
def curve(pair, tmp_path_factory):
    """The losses of the run that nothing meets."""
    return Calm(pair, tmp_path_factory.mktemp("curve"))


def test_each_loses_its_power_and_comes_back(pair, curve):
    run = Run(pair, PAIR)
    pair.lab.power("node2", False)
    try:
        run.wait(lambda: run.goes_on(2, "node1"))
    finally:
        pair.lab.power("node2", True)
    run.wait(lambda: run.goes_on(3, *PAIR))

    pair.lab.power("node1", False)
    try:
        run.wait(lambda: run.status("node2").get("state") == "stalled")
        assert "etcd" in run.status("node2")["reason"], run.status("node2")
        assert not pair.sh("node2", "pgrep -f 'trainer [t]rain' || true")
    finally:
        pair.lab.power("node1", True)
    run.wait(lambda: run.goes_on(4, *PAIR) or run.goes_on(5, *PAIR))
    run.end(curve, *PAIR, reason="node2 is gone")


def test_a_run_that_was_stopped_without_the_head_does_not_begin_again_there(pair):
    """The head alone has the store: the other host tells it once it is back, before a step is made."""
    run = Run(pair, PAIR)
    pair.lab.power("node1", False)
    try:
        run.wait(lambda: run.status("node2").get("state") == "stalled")
        done = book(pair, "playbooks/stop.yml", run=run.name)
        told = " ".join(done.stdout.split())
        assert "stopped on node2; not asked, since there was no answer: node1" in told, done.stdout
        assert "Nothing was stopped on node1" in told
        assert pair.sh("node2", "ls /var/lib/trainyard/untold").startswith(f"{run.name}.")
        run.wait(lambda: pair.sh("node2", "systemctl is-active trainyard-tell || true").strip() == "active")
    finally:
        pair.lab.power("node1", True)
    run.wait(lambda: run.status("node1").get("state") == "stopped")
    assert "on node2, while the store could not be asked" in run.status("node1")["reason"]
    assert run.status("node1")["attempt"] == 1, run.status("node1")
    run.wait(lambda: pair.sh("node2", "systemctl is-active trainyard-tell || true").strip() == "inactive")
    assert not pair.sh("node2", "ls /var/lib/trainyard/untold")


def test_the_wire_between_them_is_out(pair, curve):
    """The head trains alone; the worker's ranks end before that."""
    run = Run(pair, PAIR)
    pair.lab.cut("node2")
    try:
        run.wait(lambda: run.goes_on(2, "node1"))
        assert not pair.sh("node2", "pgrep -f 'trainer [t]rain' || true")
        run.wait(lambda: run.status("node2").get("state") == "stalled", 30)
    finally:
        pair.lab.join("node2")
    run.wait(lambda: run.goes_on(3, *PAIR))
    run.end(curve, *PAIR, reason="node2 is gone")
