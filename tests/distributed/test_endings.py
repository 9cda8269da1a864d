"""Every ending has its exit code, a reason in status.json, and no traceback."""

import errno
import io
import math
import os
import shutil
from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.distributed

KEYS = {
    *(
        "kind",
        "step",
        "epoch",
        "loss",
        "router_loss",
        "lr",
        "grad_norm",
        "tokens",
        "tokens_total",
        "tokens_per_second",
        "mfu",
        "time",
    ),
    *(
        "step_seconds",
        "compute_seconds",
        "comm_seconds",
        "rank_seconds",
        "rank_compression_seconds",
        "rank_optimizer_seconds",
        "wire_bytes",
        "world_size",
        "shares",
    ),
    *("memory_allocated_bytes", "memory_reserved_bytes", "memory_peak_bytes", "rank_memory_peak_bytes"),
}


def ended(tmp_path, size, material, *overrides, code, node=0, **options):
    """Run to the expected exit code on all ranks; the reason that a host's status gives."""
    ranks.run(tmp_path, size, material / "run.yaml", *overrides, codes=[code] * size, **options)
    state = ranks.status(tmp_path / f"node{node}")
    assert state["state"] == "failed"
    for path in tmp_path.rglob("rank-*.log"):
        assert "Traceback" not in path.read_text()
    return state["reason"]


def _asked(module: str, name: str):
    """A function in whose stead one sends this rank a SIGTERM first, on one rank of two."""
    import importlib

    def sent(*arguments):
        import signal

        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return getattr(importlib.import_module(module), f"{name}_really")(*arguments)

    return sent


def _asked_with_the_data(config, world):
    return _asked("trainer.commands.train", "_data_digests")(config, world)


def _asked_with_the_model(config, source, world, in_parts):
    return _asked("trainer.model.load", "build")(config, source, world, in_parts)


def _downloads(config, source, world, in_parts):
    """Others' code, which asks nobody, and two times Ctrl-C."""
    import signal
    import time

    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(3600)


def _downloads_by_threads(config, source, world, in_parts):
    """As huggingface_hub does, whose threads are waited for, come what may."""
    import signal
    import time
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(time.sleep, 3600)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        slow.result()


@pytest.mark.parametrize("downloads", [_downloads, _downloads_by_threads])
def test_a_second_ctrl_c_ends_at_once_what_nobody_can_ask(material, tmp_path, downloads):
    """As a large model is downloaded whose name was mistyped."""
    patch = {("trainer.model.load", "build"): downloads}
    ranks.run(tmp_path, 1, material / "run.yaml", codes=[75], patch=patch)
    status = ranks.status(tmp_path / "node0")
    assert status["state"] == "stopped" and status["reason"].startswith(
        "ended before the first step, at once"
    )


def _no_step(run, observer):
    raise AssertionError("a step was begun")


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        (("trainer.commands.train", "_data_digests"), _asked_with_the_data),
        (("trainer.model.load", "build"), _asked_with_the_model),
    ],
)
def test_who_is_asked_to_stop_before_the_first_step_does_not_come_to_it(material, tmp_path, place, asked):
    """A large set takes half an hour to tokenise: Ctrl-C, systemd and a launcher do not wait for that."""
    patch = {place: asked, ("trainer.loop", "train_step"): _no_step}
    ranks.run(tmp_path, 2, material / "run.yaml", codes=[75, 75], patch=patch)
    for node in ("node0", "node1"):
        status = ranks.status(tmp_path / node)
        assert (status["state"], status["step"]) == ("stopped", None)
        assert status["reason"].endswith("asked to end before the first step; start it again to go on")


def test_a_run_whose_directory_is_in_use_does_not_touch_it(material, tmp_path):
    """Two terminals, or two configurations that give their runs no name."""
    import fcntl

    directory = tmp_path / "node0"
    directory.mkdir()
    (directory / "status.json").write_text("{}")
    (directory / "stop").touch()
    other = os.open(directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    running = ranks.Ranks(tmp_path, 1, material / "run.yaml")
    assert running.codes() == [2]
    assert "another process trains there, and goes on" in running.log(0)
    assert (directory / "status.json").read_text() == "{}" and (directory / "stop").exists()
    assert not (directory / "metrics.jsonl").exists()
    os.close(other)
    # And a word that nobody was left to hear is not for who comes next.
    ranks.run(tmp_path, 1, material / "run.yaml", "steps=2")
    assert not (directory / "stop").exists()


def test_diverged(material, tmp_path):
    """A number too large for float32 in the weights, after a good checkpoint."""
    ranks.run(tmp_path, 2, material / "run.yaml", "steps=4")
    before = ranks.losses(tmp_path / "node0")
    patch = {("trainer.machine", "memory"): _poison}
    reason = ended(tmp_path, 2, material, "steps=9", code=3, patch=patch)
    assert "diverged at step 6" in reason and "lower lr" in reason
    assert ranks.losses(tmp_path / "node0")[:4] == before
    assert [path.name for path in (tmp_path / "node0" / "checkpoints").glob("step-*")] == ["step-00000004"]


def _poison(device):
    """Called once a step, after it: spoil the weights of this rank."""
    import gc

    import torch

    for model in (found for found in gc.get_objects() if type(found).__name__ == "GPT2LMHeadModel"):
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
    return {"memory_peak_bytes": 0}


def test_out_of_memory(material, tmp_path):
    """An allocation that no machine has, on the second rank: it says so, the other says that it lost a peer."""
    patch = {("trainer.loop", "token_loss"): _greedy}
    ranks.run(tmp_path, 2, material / "run.yaml", codes=[5, 4], patch=patch)
    assert "out of memory: rank 1 on node1 (cpu)" in ranks.status(tmp_path / "node1")["reason"]
    assert "micro_batch_size" in ranks.status(tmp_path / "node1")["reason"]
    assert "lost a peer" in ranks.status(tmp_path / "node0")["reason"]


def _greedy(run, sequences):
    import torch

    if run.world.rank == 1:
        torch.empty(1 << 50)
    return sum(parameter.sum() for parameter in run.strategy.model.parameters())


@pytest.mark.parametrize("strategy", ["strategy=ddp", "strategy=fsdp"])
def test_a_full_disk(material, tmp_path, strategy):
    """One save fails on one host: that is told, training goes on, and the next save is as good as any."""
    patch = {("trainer.checkpoint", "TensorFile"): _full}
    assert len(ranks.run(tmp_path, 2, material / "run.yaml", strategy, patch=patch)) == 12
    for node in ("node0", "node1"):
        events = ranks.records(tmp_path / node, "event")
        (event,) = [one for one in events if one["event"] == "checkpoint failed"]
        assert (
            "node1: " in event["reason"]
            and "no space left" in event["reason"]
            and "MiB free" in event["reason"]
        )
        names = sorted(path.name for path in (tmp_path / node / "checkpoints").iterdir())
        assert names == ["step-00000004", "step-00000012"]
        assert ranks.status(tmp_path / node)["warning"] is None
    assert "warning: node1: " in (tmp_path / "node0/logs/rank-0.log").read_text()


def _full(path, tensors):
    """From the fourth tensor on, when what others write is still to be made of this rank's parts, too."""
    import errno
    import os

    from trainer import checkpoint

    file = checkpoint.TensorFile_really(path, tensors)
    if os.environ["RANK"] == "1" and "step-00000008" in str(path):
        left, really = iter(range(3)), file.write

        def write(key, tensor):
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            really(key, tensor)

        file.write = write
    return file


class _Filling(io.FileIO):
    """A file on the disk of node1, which somebody fills after step 3 of the run, until after step 8."""

    def write(self, data):
        _refuse_without_room()
        return super().write(data)


def _refuse_without_room():
    there = Path(os.environ["TRAINYARD_RUN_DIR"]).with_name("node0")
    if os.environ["RANK"] == "1" and 3 <= len(ranks.records(there)) < 8:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _status_without_room(path, content, settle=True):
    from trainer import metrics

    _refuse_without_room()
    metrics.write_json_really(path, content, settle)


def test_a_disk_that_somebody_fills(material, tmp_path):
    """No rank ends over its metrics, status or log: all hosts say so, and every line is there when there is room."""
    patch = {("io", "FileIO"): _Filling, ("trainer.metrics", "write_json"): _status_without_room}
    assert len(ranks.run(tmp_path, 2, material / "run.yaml", "checkpoint_every=0", patch=patch)) == 12
    assert ranks.losses(tmp_path / "node1") == ranks.losses(tmp_path / "node0")
    for node in ("node0", "node1"):
        events = {one["event"]: one for one in ranks.records(tmp_path / node, "event")}
        assert "node1: no space left for metrics.jsonl" in events["disk full"]["reason"]
        assert events["disk full"]["step"] < events["disk has room"]["step"]
        state = ranks.status(tmp_path / node)
        assert (state["state"], state["warning"]) == ("finished", None)
    log = (tmp_path / "node0/logs/rank-0.log").read_text()
    assert "warning: node1: no space left" in log and "there is room again" in log


def test_more_ranks_than_sequences(material, tmp_path):
    reason = ended(tmp_path, 3, material, "batch_size=2", code=2)
    assert "batch_size 2 is less than the 3 ranks" in reason and "set batch_size to 3" in reason


def _little():
    """A host with hardly any memory left."""
    return 8 << 20


def test_no_memory_for_one_sequence(material, tmp_path):
    patch = {("trainer.plan.resources", "_host_memory"): _little}
    reason = ended(tmp_path, 2, material, code=2, patch=patch)
    assert "a step of a single sequence needs about" in reason and "gradient_checkpointing: true" in reason
    assert reason.startswith("node0: rank 0")


def test_bad_data_is_refused_on_all_hosts_by_name(material, tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "good"}\n{"text": 3}\n')
    reason = ended(tmp_path, 2, material, f"dataset={data}", code=2)
    assert f"{data}:2: field 'text': expected a text, found 3" in reason


def test_hosts_with_other_data_are_named(material, tmp_path):
    """A path that leads to another file on the second host."""
    shutil.copy(material / "data.jsonl", tmp_path / "data0.jsonl")
    (tmp_path / "data1.jsonl").write_text('{"text": "something else"}\n')
    patch = {("trainer.commands.train", "_train"): _own_data}
    reason = ended(tmp_path, 2, material, f"dataset={tmp_path}/data", code=2, patch=patch)
    assert "the hosts differ in their dataset" in reason and "on node0" in reason and "on node1" in reason


def _own_data(config, world, *rest):
    import dataclasses

    from trainer.commands.train import _train_really

    return _train_really(
        dataclasses.replace(config, dataset=f"{config.dataset}{world.rank}.jsonl"), world, *rest
    )


def test_hosts_with_other_settings_are_named(material, tmp_path):
    first = ranks.Ranks(tmp_path, 2, material / "run.yaml", per_rank=[[], ["lr=0.5"]])
    assert first.codes() == [2, 2]
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert "setting lr" in reason and "0.01 on node0" in reason and "0.5 on node1" in reason


def test_a_directory_for_moments_that_cannot_be_one_is_refused_before_anything_is_loaded(material, tmp_path):
    """By the one host that has no such home, for all."""
    pair = ranks.Ranks(
        tmp_path,
        2,
        material / "run.yaml",
        "strategy=infinity",
        "model=/nowhere",
        per_rank=[[], ["offload_dir=~nobody-at-all/x"]],
    )
    assert pair.codes() == [2, 2]
    for node in ("node0", "node1"):
        reason = ranks.status(tmp_path / node)["reason"]
        assert reason.startswith(
            "node1: offload_dir: '~nobody-at-all/x': cannot be a path: that user's home"
        ), reason


def test_a_silent_peer_is_a_lost_peer(material, tmp_path):
    """A rank that hangs (a frozen host) is noticed after timeout_seconds."""
    import os
    import signal

    pair = ranks.Ranks(
        tmp_path, 2, material / "run.yaml", "steps=4000", "timeout_seconds=3", "checkpoint_every=0"
    )
    pair.wait_for_step(3)
    os.kill(pair.processes[1].pid, signal.SIGSTOP)
    pair.processes[0].join(120)
    assert pair.processes[0].exitcode == 5
    os.kill(pair.processes[1].pid, signal.SIGKILL)
    assert "lost a peer" in ranks.status(tmp_path / "node0")["reason"]


def test_metrics_and_status_have_their_keys(material, tmp_path):
    from trainer import metrics

    ranks.run(tmp_path, 2, material / "run.yaml", "steps=3")
    for node in ("node0", "node1"):
        record = ranks.records(tmp_path / node)[0]
        assert set(record) == KEYS
        most = record["rank_memory_peak_bytes"]
        assert len(most) == 2 and min(most) > 50e6
        assert record["memory_peak_bytes"] >= most[int(node[-1])]  # the optimizer has had its step since
        state = ranks.status(tmp_path / node)
        assert set(state) == set(metrics.KEYS)
        assert state["host"] == node and len(state["compute_seconds"]) == 2
        assert state["slowest"]["host"] in ("node0", "node1")


def test_a_start_that_fails_does_not_forget_what_can_be_gone_on_from(material, tmp_path):
    """Who looks meanwhile, or afterwards, must not take the run for one without a checkpoint."""
    ranks.run(tmp_path, 1, material / "run.yaml", "steps=8")
    ranks.run(tmp_path, 1, material / "run.yaml", "dataset=/nowhere", codes=[2])
    known = ranks.status(tmp_path / "node0")
    assert (known["state"], known["last_checkpoint"]) == ("failed", 8)
