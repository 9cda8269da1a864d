"""Several runs on the same hosts: one beside another, and one that waits for its turn."""

import pytest
from plays import wait_for
from test_train import LONG, SETTINGS, active, book, losses, plays, results, status, stop, wait_for_step

pytestmark = pytest.mark.full
HOSTS = ("node1", "node2", "node3")
__all__ = ["plays", "results"]  # the fixtures of test_train


def test_one_beside_another_and_one_that_waits(plays, results):
    calm = book(plays, "train.yml", run="calm", trainer_results_dir=results, **SETTINGS)
    assert calm.returncode == 0, calm.stdout
    expected = losses(results / "calm/metrics.jsonl")
    began = book(plays, "train.yml", run="long", detach="true", trainer_results_dir=results, **LONG)
    assert began.returncode == 0, began.stdout
    try:
        refused = book(plays, "train.yml", run="other", trainer_results_dir=results, **SETTINGS)
        assert refused.returncode != 0
        for cure in ("-e queue=true", "-e beside=true"):
            assert cure in refused.stdout, refused.stdout

        waits = {"queue": "true", "detach": "true", "trainer_results_dir": results}
        done = book(plays, "train.yml", run="second", **waits, **SETTINGS)
        assert done.returncode == 0, done.stdout
        assert "waits for the end of long" in done.stdout, done.stdout
        wait_for(lambda: {status(plays, "second", host).get("state") for host in HOSTS} == {"queued"}, 60)

        step = status(plays, "long")["step"]
        share = {"beside": "true", "trainer_results_dir": results}
        done = book(plays, "train.yml", run="beside", **share, **SETTINGS)
        assert done.returncode == 0, done.stdout
        assert losses(results / "beside/metrics.jsonl") == pytest.approx(expected, rel=1e-5)
        wait_for_step(plays, "long", step + 1)  # which the other did not hurt
        assert status(plays, "long")["attempt"] == 1
        assert status(plays, "second")["state"] == "queued"
    except BaseException:
        stop(plays, "second")
        raise
    finally:
        stop(plays, "long")

    done = book(plays, "train.yml", run="second", follow="true", trainer_results_dir=results)
    assert done.returncode == 0, done.stdout
    assert losses(results / "second/metrics.jsonl") == pytest.approx(expected, rel=1e-5)
    assert active(plays, "second") == []


def test_one_that_waits_is_stopped(plays, results):
    began = book(plays, "train.yml", run="first-long", detach="true", trainer_results_dir=results, **LONG)
    assert began.returncode == 0, began.stdout
    try:
        waits = {"queue": "true", "detach": "true", "trainer_results_dir": results}
        done = book(plays, "train.yml", run="third", **waits, **SETTINGS)
        assert done.returncode == 0, done.stdout
        stop(plays, "third")
        assert status(plays, "third")["state"] == "stopped"
        assert active(plays, "first-long") == list(HOSTS)
    finally:
        stop(plays, "first-long")
