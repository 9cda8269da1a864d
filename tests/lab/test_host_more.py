"""A third host while a run trains on two: the run goes on as it was, the third has part in what comes after it."""

import json
import re
import shutil

import pytest
from plays import ROOT, Plays, changed_tasks
from test_train import LONG, SETTINGS, book, losses, status, stop, wait_for_step

pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def plays(make_lab, tmp_path_factory):
    return Plays(make_lab("more", hosts=3), tmp_path_factory.mktemp("more"))


def members(plays):
    """The hosts that have an etcd."""
    ask = "systemctl is-active trainyard-etcd || true"
    return [host for host in plays.lab.hosts if plays.sh(host, ask).strip() == "active"]


def test_a_host_more_does_not_disturb_the_run_of_the_others(plays, tmp_path):
    inventory = plays.lab.inventory / "hosts.yml"
    whole = inventory.read_text()
    groups = json.loads(whole.split("\n", 1)[1])
    cluster = groups["all"]["children"]["cluster"]["children"]
    cluster["workers"]["hosts"].pop("node3")
    inventory.write_text(json.dumps(groups))
    done = book(plays, "site.yml", seconds=1500)
    assert done.returncode == 0, done.stdout
    assert members(plays) == ["node1"]
    began = book(plays, "train.yml", run="long", detach="true", trainer_results_dir=tmp_path, **LONG)
    assert began.returncode == 0, began.stdout

    inventory.write_text(whole)
    for _ in range(2):
        done = book(plays, "site.yml", seconds=1500)
        assert done.returncode == 0, done.stdout
        words = " ".join(done.stdout.split())
        assert "Active: long. The members of etcd" in words and "node1, node2, node3 are to be" in words
        assert members(plays) == ["node1"]
    wait_for_step(plays, "long", status(plays, "long")["step"] + 3)
    assert status(plays, "long")["attempt"] == 1 and status(plays, "long")["world_size"] == 2
    # Before site.yml has made them members, a run lives by the old one.
    beside = book(plays, "train.yml", run="beside", beside="true", trainer_results_dir=tmp_path, **SETTINGS)
    assert beside.returncode == 0, beside.stdout
    assert status(plays, "beside")["world_size"] == 3 and status(plays, "long")["attempt"] == 1
    stop(plays, "long")

    done = book(plays, "site.yml", seconds=1500)
    assert done.returncode == 0 and "Active:" not in done.stdout, done.stdout
    assert members(plays) == ["node1", "node2", "node3"]
    done = book(plays, "train.yml", run="first", trainer_results_dir=tmp_path, **SETTINGS)
    assert done.returncode == 0, done.stdout
    two = losses(tmp_path / "beside/metrics.jsonl")
    assert losses(tmp_path / "first/metrics.jsonl") == pytest.approx(two, rel=1e-5)

    done = book(plays, "train.yml", run="next", plan="true", strategy="fsdp", **SETTINGS)
    assert done.returncode == 0, done.stdout
    for host in plays.lab.hosts:
        assert re.search(rf"{host} +1  cpu +[\d,]+ MiB +[\d,]+ MiB  fits", done.stdout), done.stdout
    assert status(plays, "next") == {}


def test_one_host_has_a_new_release_and_one_goes_while_the_others_train(plays, tmp_path):
    newer = tmp_path / "newer"
    shutil.copytree(ROOT, newer, ignore=shutil.ignore_patterns(".*", "runs", "build", "__pycache__"))
    with open(newer / "trainer/words.py", "a") as file:
        file.write("# newer\n")
    ours = Plays(plays.lab, plays.directory, newer)

    def current():
        return [plays.sh(host, "readlink -f /opt/trainyard/current").strip() for host in plays.lab.hosts]

    def goes_on():
        wait_for_step(plays, "under", status(plays, "under")["step"] + 3)
        known = [status(plays, "under", host) for host in plays.lab.hosts]
        assert [(one["attempt"], one["world_size"]) for one in known] == [(1, 3)] * 3

    was = current()
    assert len(set(was)) == 1
    began = book(plays, "train.yml", run="under", detach="true", trainer_results_dir=tmp_path, **LONG)
    assert began.returncode == 0, began.stdout
    wait_for_step(plays, "under", 3)

    done = ours.book("site.yml", "-l", "node3", seconds=1500)
    assert done.returncode == 0, done.stdout
    assert changed_tasks(done.stdout).keys() == {"node3"}, done.stdout
    assert current()[:2] == was[:2] and current()[2] != was[2]
    goes_on()
    done = book(ours, "train.yml", run="mixed", beside="true", trainer_results_dir=tmp_path, **SETTINGS)
    assert done.returncode != 0 and "node3 has" in done.stdout, done.stdout
    assert "the hosts have different releases of the trainer" in done.stdout, done.stdout
    done = book(ours, "site.yml", seconds=1500)
    assert done.returncode == 0 and len(set(current())) == 1, done.stdout
    goes_on()

    inventory = plays.lab.inventory / "hosts.yml"
    whole = inventory.read_text()
    groups = json.loads(whole.split("\n", 1)[1])
    groups["all"]["children"]["cluster"]["children"]["workers"]["hosts"].pop("node3")
    inventory.write_text(json.dumps(groups))
    try:
        done = book(ours, "site.yml", seconds=1500)
        assert done.returncode == 0 and "node3" not in changed_tasks(done.stdout), done.stdout
        goes_on()
    finally:
        inventory.write_text(whole)
        stop(plays, "under")
