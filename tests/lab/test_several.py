"""Several runs on the same hosts: one beside another, one that waits for its turn, and what is in the way of all."""

import re
import subprocess

import pytest
from plays import ROOT, wait_for
from processes import kill_all
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


BURN = {
    "program": "/opt/trainyard/current/bin/trainer",
    "arguments": ["burn", "--minutes=60", "--device=cpu", "--dtype=auto"],
    "user": "trainyard",
    "state_dir": "/var/lib/trainyard",
    "most": 4200,
}


def test_a_burn_that_a_lost_controller_left_is_in_the_way_until_it_is_stopped(plays, results):
    units = "systemctl list-units --plain --no-legend 'trainyard-work-*'"
    burn = subprocess.Popen(
        plays.command([{"trainer_command": BURN, "become": True}], "node2"),
        cwd=ROOT,
        env=plays.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: "running" in plays.sh("node2", units), 120)
        kill_all(burn)
        refused = book(plays, "train.yml", run="hot", trainer_results_dir=results, **SETTINGS)
        assert refused.returncode != 0
        found = r"node2: found (trainyard-work-burn-[0-9a-f]{8}\.service) at work"
        assert re.search(found, refused.stdout)[1] in plays.sh("node2", units), refused.stdout
        (stop_it,) = set(re.findall(r"-b -a '(systemctl stop [^']*)'", refused.stdout))
        limit = plays.sh("node2", "systemctl show 'trainyard-work-*' --property=RuntimeMaxUSec --value")
        assert limit.strip() == "1h 10min"
        plays.sh("node2", stop_it)
        done = book(plays, "train.yml", run="hot", trainer_results_dir=results, **SETTINGS)
        assert done.returncode == 0, done.stdout
    finally:
        kill_all(burn)
        plays.sh("node2", "systemctl stop 'trainyard-work-*' || true")
