"""Five hosts: two of them are lost for good at one moment, the head among them."""

import pytest
from cupboard import Calm, Run, deployed, losses, records
from test_train import stop

FIVE = tuple(f"node{number}" for number in range(1, 6))


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    with deployed("five", len(FIVE), tmp_path_factory.mktemp("five")) as plays:
        yield plays


@pytest.mark.timeout(1800)
def test_the_head_and_a_worker_are_gone_for_good(five, tmp_path):
    """Both are members of etcd, and have copies of the checkpoints, as when somebody trips over their power strip.

    Three of five are a majority, one of which has the third copy, and take the run to its end.
    """
    curve = Calm(five, tmp_path)
    calm = curve.until(200)
    run = Run(five, FIVE, steps=200)
    left = FIVE[2:]
    try:
        run.wait(lambda: all((run.status(host).get("last_checkpoint") or 0) >= 10 for host in FIVE))
        for host in FIVE[:2]:
            five.lab.power(host, False)
        # The record of one may outlive the other's.
        run.wait(lambda: any(run.goes_on(attempt, *left) for attempt in (2, 3, 4)))
        run.wait(lambda: all(run.status(host).get("state") == "finished" for host in left), 400)
    finally:
        for host in FIVE[:2]:
            five.lab.power(host, True)
        run.wait(lambda: all(map(run.status, FIVE[:2])))
        stop(five, run.name)
    for host in left:
        text = run.metrics(host)
        assert losses(text) == pytest.approx(calm, rel=1e-5)
        first = next(one for one in records(text) if one.get("event") == "restart")
        assert first["step"] >= run.saved[1] >= 10, (first, run.saved)  # no step that was saved is lost
