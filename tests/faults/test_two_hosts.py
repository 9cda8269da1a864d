"""Two hosts: the head goes on alone, a worker that is alone pauses, and each is taken in again."""

import pytest
from cupboard import Calm, Run, deployed

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
