"""Which collective each rank has come to, as the ranks write it down, and as diagnose.yml says it."""

import json
import os
import signal
import time

import pytest
import ranks

from plugins.filter.diagnosis import behind

pytestmark = pytest.mark.distributed


def told(run, number):
    """What the rank has written."""
    try:
        return json.loads((run.directory(number) / "logs" / f"collectives-{number}.json").read_text())
    except OSError:
        return {"time": 0, "groups": []}


@pytest.mark.parametrize("nodes", [[0, 1, 2], pytest.param([0, 0, 1, 1], marks=pytest.mark.full)])
def test_the_rank_that_was_stopped_is_the_one_behind(material, tmp_path, nodes, load_module):
    """Also where some wait for those who wait for it: sums go inside hosts first."""
    groups_of = load_module("diagnose_host").groups_of
    endless = ("steps=100000", "lr_schedule=constant", "timeout_seconds=120")
    run = ranks.Ranks(
        tmp_path,
        len(nodes),
        material / "run.yaml",
        *endless,
        nodes=nodes,
        patch={("trainer.collectives", "EVERY"): 0.1},
    )
    others = [number for number in range(len(nodes)) if number != 1]
    pids = [process.pid for process in run.processes]
    try:
        run.wait_for_step(3)
        os.kill(pids[1], signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not all(any("op" in one for one in told(run, number)["groups"]) for number in others):
            assert time.monotonic() < deadline, [told(run, number) for number in range(len(nodes))]
            time.sleep(0.1)
        found = [
            {
                "rank": number,
                "host": f"node{nodes[number]}",
                "pid": pid,
                "groups": groups_of(str(run.directory(number)), number, pid),
            }
            for number, pid in enumerate(pids)
        ]
    finally:
        for process in run.processes:
            process.kill()
            process.join()
    lags = behind(found)
    assert list(lags) == [1]
    furthest = lags[1]["furthest"]
    if len(nodes) == 3:
        assert lags[1]["waiting"] == [0, 2] and furthest["ranks"] == [0, 1, 2]
    assert furthest["sequence"] > lags[1]["group"]["sequence"] > 0
    assert furthest["op"].startswith("gloo:") and furthest["sizes"]
    assert groups_of(str(run.directory(1)), 1, pids[1] + 1) == []  # of another attempt
