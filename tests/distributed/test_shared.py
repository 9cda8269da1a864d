"""Hosts that have one run directory, as a home on NFS: what lies there once is written once, and is right for all."""

import functools
import os
import signal
import time

import pytest
import ranks

from trainer import cli

pytestmark = pytest.mark.distributed

LEFT = ("*.tmp", ".host-*", ".step-*")  # what must not stay


def look(directory, hosts):
    """A run directory that `hosts` share, after a run to the end."""
    assert not [path for pattern in LEFT for path in directory.rglob(pattern)]
    assert ranks.status(directory)["state"] == "finished"
    saved = [one for one in ranks.records(directory, "event") if one["event"] == "checkpoint"]
    assert saved and all(one["hosts"] == hosts for one in saved)
    assert (directory / "model" / "model.safetensors").is_file()
    assert (directory / "summary.json").is_file()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_in_one_directory(material, tmp_path, strategy):
    """Stopped, and gone on with: its losses are those of hosts that have a directory each, to the last bit."""
    run = (material / "run.yaml", f"strategy={strategy}")
    apart = ranks.run(tmp_path / "apart", 3, *run)
    together = {"shared": [0, 0, 0]}
    ranks.run(tmp_path, 3, *run, **together, stop_in=6, codes=[75] * 3)
    assert ranks.status(tmp_path / "node0")["state"] == "stopped"
    assert ranks.run(tmp_path, 3, *run, **together) == apart
    look(tmp_path / "node0", ["node0", "node1", "node2"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apart", "cache", "node0"]
    names = {f"rank-{rank}.log" for rank in range(3)}
    assert names <= {path.name for path in (tmp_path / "node0" / "logs").iterdir()}
    kept = (tmp_path / "node0" / "model" / "model.safetensors").read_bytes()
    assert kept == (tmp_path / "apart" / "node2" / "model" / "model.safetensors").read_bytes()


def test_some_share_and_others_do_not(material, tmp_path):
    """Two hosts have one directory, the third its own, and two ranks: two copies of what there is, and no more."""
    run = (material / "run.yaml", "strategy=fsdp")
    three = {"nodes": [0, 1, 2, 2], "shared": [0, 0, 2]}
    apart = ranks.run(tmp_path / "apart", 4, *run, nodes=[0, 1, 2, 2])
    ranks.run(tmp_path, 4, *run, **three, stop_in=6, codes=[75] * 4)
    assert ranks.run(tmp_path, 4, *run, **three) == apart
    for node in ("node0", "node2"):
        look(tmp_path / node, ["node0", "node1", "node2"])
        assert ranks.losses(tmp_path / node) == apart
    assert not (tmp_path / "node1").exists()


def test_hosts_that_share_no_more(material, whole, tmp_path):
    """The second one had the directory of the first; with one of its own it receives what it lacks."""
    run = (material / "run.yaml",)
    ranks.run(tmp_path, 2, *run, shared=[0, 0], stop_in=6, codes=[75] * 2)
    assert ranks.run(tmp_path, 2, *run) == pytest.approx(whole, rel=1e-5)
    assert ranks.losses(tmp_path / "node1") == ranks.losses(tmp_path / "node0")
    look(tmp_path / "node1", ["node0", "node1"])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_run_goes_on(material, tmp_path, killed):
    """Also where the host that had written for both is the one whose rank dies, and while a checkpoint is written."""
    long = (material / "run.yaml", "steps=4000", "checkpoint_every=2", "lr_schedule=constant")
    straight = ranks.Ranks(tmp_path / "straight", 2, *long)
    attempt = ranks.Ranks(tmp_path, 2, *long, shared=[0, 0])
    attempt.wait_for_step(6)
    os.kill(attempt.processes[killed].pid, signal.SIGKILL)
    assert attempt.codes(120)[killed] == -signal.SIGKILL
    again = ranks.Ranks(tmp_path, 2, *long, shared=[0, 0])
    reached = 20
    for one in (straight, again):
        one.wait_for_step(reached)
        os.kill(one.processes[0].pid, signal.SIGTERM)
    assert straight.codes(120) == again.codes(120) == [75, 75]
    curves = (ranks.losses(tmp_path / "straight" / "node0"), ranks.losses(tmp_path / "node0"))
    assert curves[0][:reached] == curves[1][:reached]
    assert "resuming after step" in again.log()
    assert not [path for pattern in LEFT for path in (tmp_path / "node0").rglob(pattern)]


def test_the_copy_is_damaged(material, whole, tmp_path):
    """There is one for all, and one before it."""
    run = (material / "run.yaml",)
    ranks.run(tmp_path, 2, *run, shared=[0, 0], stop_in=6, codes=[75] * 2)
    with (tmp_path / "node0/checkpoints/step-00000006/model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert ranks.run(tmp_path, 2, *run, shared=[0, 0]) == pytest.approx(whole, rel=1e-5)
    log = (tmp_path / "node0/logs/rank-0.log").read_text()
    assert "passed over a damaged checkpoint" in log and "resuming after step 4" in log


@pytest.mark.full
def test_under_the_launcher(material, tmp_path, monkeypatch):
    """One host shuts down and comes back; the other goes on by itself until it does."""
    words = ("steps=100000", "lr_schedule=constant", "lr=0.001", "checkpoint_every=5")
    run = ranks.Launch(tmp_path, [1, 1], material / "run.yaml", *words, shared=True)
    directory = tmp_path / "node0"

    def wait_for(size, more):
        """Until the run has made `more` steps with `size` ranks."""
        begin, first = time.monotonic(), None
        while True:
            assert time.monotonic() - begin < 120, ranks.status(directory)
            train = ranks.records(directory)
            if train and train[-1]["world_size"] == size:
                first = train[-1]["step"] if first is None else first
                if train[-1]["step"] >= first + more:
                    return
            time.sleep(0.1)

    wait_for(2, 10)
    monkeypatch.setenv("TRAINYARD_HOST", "node1")  # as RUN.env tells its unit
    assert cli.main(["stop", "--leave", str(directory)]) == 0
    assert run.nodes[1].wait(timeout=120) == 75
    wait_for(1, 10)
    run.nodes[1] = run.start(1)
    wait_for(2, 10)
    (directory / "stop").touch()
    for code, said in run.ended(120):
        assert code == 75, said
    assert ranks.losses(directory)  # each step once
    assert ranks.status(directory)["state"] == "stopped"
    assert not [path for pattern in LEFT for path in directory.rglob(pattern)]


def _sharers(run_dir, world, config):
    world.find_sharers(run_dir)
    return world.keepers, world.keeps


def test_who_shares_with_whom(tmp_path):
    """By marks that are gone once all have looked, with those of a start that was cut short."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".host-0123-0").touch()
    (tmp_path / "ranks").mkdir()
    found = ranks.together(
        tmp_path / "ranks", functools.partial(_sharers, tmp_path / "run"), nodes=[0, 0, 1, 2]
    )
    assert found == [([0, 0, 0, 0], rank == 0) for rank in range(4)]
    assert not list((tmp_path / "run").iterdir())
