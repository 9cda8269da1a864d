"""Five hosts: two of them are lost for good, the head among them, one after the other."""

import pytest
from cupboard import Calm, Run, deployed, losses
from test_train import stop

FIVE = tuple(f"node{number}" for number in range(1, 6))


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    with deployed("five", len(FIVE), tmp_path_factory.mktemp("five")) as plays:
        yield plays


def test_the_head_and_then_a_worker_are_gone_for_good(five, tmp_path):
    """Both are members of etcd. Three of five are a majority, and take the run to its end."""
    curve = Calm(five, tmp_path)
    calm = curve.until(400)
    run = Run(five, FIVE, steps=400)
    left = FIVE[2:]
    try:
        five.lab.power("node1", False)
        run.wait(lambda: run.goes_on(2, *FIVE[1:]))
        five.lab.power("node2", False)
        run.wait(lambda: run.goes_on(3, *left))
        run.wait(lambda: all(run.status(host).get("state") == "finished" for host in left), 400)
    finally:
        for host in FIVE[:2]:
            five.lab.power(host, True)
        run.wait(lambda: all(map(run.status, FIVE[:2])))
        stop(five, run.name)
    for host in left:
        assert losses(run.metrics(host)) == pytest.approx(calm, rel=1e-5)
