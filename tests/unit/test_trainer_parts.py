"""Shares, learning rates, checkpoints on disk, and the commands' answers to bad input."""

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from plugins.filter.cluster import etcd_members
from trainer import checkpoint, cli, metrics, optim, snapshot, strategies
from trainer.compress import _whole_rows, orthonormal
from trainer.config import from_mapping
from trainer.errors import BadInput
from trainer.model.loss import TokenLoss
from trainer.strategies.compressed import KEEPS


def test_learning_rates():
    rates = {
        schedule: [
            optim.learning_rate(from_mapping({"lr_schedule": schedule, "warmup_steps": 2}), 1.0, step, 12)
            for step in range(1, 13)
        ]
        for schedule in ("cosine", "linear", "constant")
    }
    for curve in rates.values():
        assert curve[:3] == [0.5, 1.0, 1.0]
        assert all(a >= b > 0 for a, b in itertools.pairwise(curve[1:]))
    assert rates["constant"][-1] == 1.0
    assert rates["linear"][-1] == pytest.approx(0.1)
    assert 0.1 < rates["cosine"][-1] < 0.13
    for schedule, last in (
        ("cosine", 0.1),
        ("linear", 0.0),
    ):  # it does not come up again, nor goes below nothing
        config = from_mapping({"lr_schedule": schedule, "warmup_steps": 2})
        assert optim.learning_rate(config, 1.0, 20, 12) == pytest.approx(last)


@pytest.mark.parametrize(
    ("adapter", "trained", "rate"),
    [("none", False, 1e-3), ("none", True, 5e-5), ("lora", True, 2e-4)],
)
def test_the_rate_that_nobody_names_goes_by_what_is_trained(adapter, trained, rate):
    assert optim.default_rate(from_mapping({"adapter": adapter}), trained) == rate


def test_columns_that_are_orthonormal_whatever_they_come_of():
    chance = torch.Generator().manual_seed(1)
    full = torch.randn(768, 4, generator=chance)
    unlike = full * torch.tensor([1.0, 1e-12, 1e12, 1e-3])
    flat = torch.randn(300, 2, generator=chance) @ torch.randn(2, 4, generator=chance)
    near = full[:, :1] + 1e-3 * full  # whose columns have little of their own
    matrices = [full, unlike, near, 1e-30 * full, full[:9], flat, torch.zeros(20, 4), torch.ones(20, 4)]
    directions = [4, 4, 4, 4, 4, 2, 0, 1]
    for one, found, count in zip(matrices, orthonormal(matrices), directions, strict=True):
        assert found.shape == one.shape and found.dtype == torch.float32
        lengths = torch.linalg.svdvals(found)
        assert torch.allclose(lengths[:count], torch.ones(count), atol=3e-2 if one is near else 1e-5)
        assert (lengths[count:] < 0.1).all()  # of rounding, and never longer than what is there
        largest = one.abs().amax(dim=0)
        assert ((found @ (found.T @ one) - one).abs() <= 1e-4 * largest).all()
    broken = full.clone()
    broken[5, 2] = torch.inf
    whole, part, after = orthonormal([torch.full((20, 4), torch.inf), broken, full])
    assert whole.isnan().all() and part.isnan().any() and torch.equal(after, orthonormal([full])[0])


def test_orthonormal_columns_have_the_same_bits_however_sums_are_added_up():
    chance = torch.Generator().manual_seed(2)
    full = torch.randn(5000, 24, generator=chance)
    ones = torch.full((8192, 3), 1 - 2**-24)  # whose sums are the largest that there can be, 2 ** 53
    flat = torch.randn(3000, 3, generator=chance) @ torch.randn(3, 24, generator=chance)
    near = 0.9 + 0.1 * torch.rand(8192, 40, generator=chance)
    matrices = [full, ones, flat, 1e-30 * full, near]
    for one in matrices:
        whole, _ = _whole_rows(one)
        assert torch.equal(whole.T @ whole, whole.flip(0).T @ whole.flip(0))
    found = orthonormal(matrices)
    rows = [torch.randperm(len(one), generator=chance) for one in matrices]
    mixed = orthonormal([one[order] for one, order in zip(matrices, rows, strict=True)])
    for one, other, order in zip(found, mixed, rows, strict=True):
        assert torch.equal(one[order], other)
    torch.set_flush_denormal(True)  # as some libraries have it
    try:
        again = orthonormal(matrices)
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))


@pytest.mark.parametrize("comm", ["8bit", "powersgd", "diloco"])
def test_one_rank_alone_takes_the_gradients_that_had_not_travelled_to_its_first_step(comm):
    config = from_mapping({"comm": comm})
    world = SimpleNamespace(size=1, rank=0, alike=True, device=torch.device("cpu"))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    strategy = strategies.make(config, TokenLoss(model), world)
    name, parameter = next(iter(strategy.trainable.items()))
    key = f"{KEEPS[comm][0]}.{name}"
    strategy.restore({key: torch.full_like(parameter, 3.0)})
    once = 0.0 if comm == "diloco" else 3.0  # that is of weights, for the next meeting
    for taken, found in ((False, once), (True, once), (True, 0.0)):
        strategy.zero_grad()
        strategy.finish()
        assert (parameter.grad == found).all()
        if taken:
            strategy.stepped(1, last=False)
    kept = dict(strategy.kept())
    assert list(kept) == ([key] if comm == "diloco" else [])


def stored(folder: Path, step: int, launch: str = "") -> Path:
    """A checkpoint of a few bytes, valid by its manifest. launch: the start of the run that saved it."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for name in ("model.safetensors", "optimizer.safetensors"):
        (path / name).write_bytes(b"weights")
        files[name] = checkpoint._settled(path / name)
    progress = {"launch": launch} if launch else {}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": files, **progress}))
    return path


def test_newest_valid_wins(tmp_path):
    for step in (3, 10, 9):
        stored(tmp_path, step)
    assert checkpoint.newest(tmp_path)[1].name == "step-00000010"
    (tmp_path / "step-00000010" / "model.safetensors").write_bytes(b"weightz")
    manifest, path, damaged = checkpoint.newest(tmp_path)
    assert (manifest["step"], path.name) == (9, "step-00000009")
    assert "sha256 differs" in damaged[tmp_path / "step-00000010"]
    assert checkpoint.newest(tmp_path / "none") == (None, None, {})


def test_one_of_a_step_that_is_asked_for_or_none_up_to_one(tmp_path):
    for step in (3, 9, 10):
        stored(tmp_path, step)
    (tmp_path / "step-00000011.bak").mkdir()  # somebody's own copy
    assert checkpoint.newest(tmp_path)[0]["step"] == 10
    assert checkpoint.newest(tmp_path, step=9)[0]["step"] == 9
    assert checkpoint.newest(tmp_path, step=4) == (None, None, {})
    assert checkpoint.newest(tmp_path, beyond=9)[0]["step"] == 10
    assert checkpoint.newest(tmp_path, beyond=10) == (None, None, {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda manifest: manifest.update(format=2), "format 2; this trainer reads format 1"),
        (lambda manifest: manifest.update(step=4), "has changed since"),  # another's, by its directory's name
        (lambda manifest: manifest["files"].pop("optimizer.safetensors"), "has changed since"),
        (lambda manifest: manifest.update(sha256="0" * 64), "has changed since"),
        (lambda manifest: manifest["files"].update({"config.json": {}}), "config.json: missing"),
    ],
)
def test_a_manifest_that_does_not_fit_is_no_checkpoints(tmp_path, change, said):
    path = stored(tmp_path, 9)
    assert checkpoint.validate(path)["step"] == 9
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"] = checkpoint._digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.validate(path)["step"] == 9
    del manifest["sha256"]
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=said):
        checkpoint.validate(path)


def test_a_host_whose_copy_has_other_content_is_none_that_has_it(tmp_path):
    """Of the same step: what its ranks read must be the same to the bit, and comes from the first that has it."""
    for other, everywhere in ((None, True), ("0" * 64, False)):
        me = SimpleNamespace(first=False, keeps=True, rank=0, keepers=[0, 1], hosts=["a", "b"])

        def gather(mine, other=other):
            theirs = json.loads(json.dumps(mine))
            if other:
                theirs["manifest"]["files"]["model.safetensors"]["sha256"] = other
            return [mine, theirs]

        me.gather = gather
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        stored(tmp_path / "checkpoints", 4)
        found = checkpoint.find(tmp_path, me)
        assert (found.source, found.everywhere) == (0, everywhere)
        me.rank = 1
        assert (checkpoint.find(tmp_path, me).path is None) is not everywhere


def test_what_the_later_start_of_a_run_saved_is_newer_than_later_steps_of_the_one_before(tmp_path):
    for step, launch in ((4, ""), (40, "20261101T1"), (9, "20261102T1"), (7, "20261102T1")):
        stored(tmp_path, step, launch)
    assert checkpoint.newest(tmp_path)[0]["step"] == 9
    # One whose manifest is gone may be of the last start; what is older than a good one is not looked at.
    for step, damaged in ((8, 0), (41, 1)):
        stored(tmp_path, step)
        (tmp_path / f"step-{step:08d}" / "manifest.json").write_text("")
        found, _, problems = checkpoint.newest(tmp_path)
        assert found["step"] == 9 and len(problems) == damaged


def test_a_checkpoint_that_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    """A bad sector under the newest one, a manifest without a size: the one before is taken."""
    for step in (3, 9, 10):
        stored(tmp_path, step)
    manifest = json.loads((tmp_path / "step-00000010" / "manifest.json").read_text())
    del manifest["files"]["model.safetensors"]["bytes"]
    (tmp_path / "step-00000010" / "manifest.json").write_text(json.dumps(manifest))
    sha256 = checkpoint.disk.sha256

    def bad_sector(file):
        if "00000009" in str(file):
            raise OSError(5, "Input/output error")
        return sha256(file)

    monkeypatch.setattr(checkpoint.disk, "sha256", bad_sector)
    found, _, damaged = checkpoint.newest(tmp_path)
    assert found["step"] == 3 and len(damaged) == 2
    assert "Input/output error" in damaged[tmp_path / "step-00000009"]


@pytest.mark.parametrize("count", [0, 1, 39, 40, 41, 80, 81, 1234])
def test_the_trend_of_any_number_of_losses(count):
    """At most 40 means; each of as many steps as the others, but the last."""
    from trainer import metrics

    trend = metrics.Trend(range(count))
    means = trend.means()
    assert len(means) == count if count <= 40 else 20 < len(means) <= 40
    each = 1
    while count > 40 * each:
        each *= 2
    expected = [range(count)[first : first + each] for first in range(0, count, each)]
    assert means == [sum(part) / len(part) for part in expected]


def test_the_lost_peer_is_named_and_never_oneself():
    from trainer import world

    me = SimpleNamespace(
        rank=1,
        environment=SimpleNamespace(host="b"),
        addresses={"10.0.0.1": "a", "10.0.0.2": "b", "10.0.0.11": "c"},
    )
    one = world._peer_message(me, "Connection closed by peer [10.0.0.1]:4711 at [10.0.0.2]:99")
    assert one.startswith("lost a peer: rank 1 on b: ") and "(that is a)" in one
    assert "that is" not in world._peer_message(me, "timed out: 10.0.0.1, 10.0.0.11")
    assert "that is" not in world._peer_message(me, "timed out")


def test_an_unfinished_checkpoint_is_invisible(tmp_path):
    stored(tmp_path, 1)
    stored(tmp_path, 2).rename(tmp_path / ".step-00000002.tmp")
    assert checkpoint.newest(tmp_path)[0]["step"] == 1


def test_rotation_keeps_what_was_just_written(tmp_path):
    for step in (1, 2, 3, 9):
        stored(tmp_path, step)
    (tmp_path / ".step-00000002.tmp").mkdir()
    checkpoint._rotate(tmp_path, step=3, kept={3, 1})
    names = ["step-00000001", "step-00000003", "step-00000009"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    checkpoint._rotate(tmp_path, step=3, kept={3, None})
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]


def test_what_cannot_be_deleted_keeps_nothing_else_from_it(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        stored(tmp_path, step)

    def refused(path):
        if "step-00000001" in path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(path)

    really = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint._rotate(tmp_path, step=3, kept={3})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000001.old", "step-00000003"]


def test_the_newest_that_was_saved_is_that_of_the_lines_that_are_left(tmp_path):
    nothing = {"launch": "", "attempt": 0, "step": 0, "hosts": []}
    assert metrics.last_saved(tmp_path) == nothing
    told = metrics.Metrics(tmp_path, 0)
    for attempt, name, step in ((1, "start", 0), (2, "restart", 4)):
        told.write({"kind": "event", "event": name, "launch": "L1", "attempt": attempt, "step": step})
        told.write({"kind": "train", "step": step + 4, "loss": 1.0})
        told.write({"kind": "event", "event": "checkpoint", "step": step + 4, "hosts": ["a", "b"]})
    assert metrics.last_saved(tmp_path) == {"launch": "L1", "attempt": 2, "step": 8, "hosts": ["a", "b"]}
    told.cut(4)
    told._file._file.write(b'{"kind": "event", "event": "checkpoint", "step": 9')  # cut short by a crash
    assert metrics.last_saved(tmp_path)["step"] == 4


def test_one_that_is_damaged_again_is_set_aside_again(tmp_path):
    """The first time, something kept what was set aside from being deleted."""
    folder = tmp_path / "checkpoints"
    me = SimpleNamespace(
        first=False, keeps=True, rank=0, keepers=[0], hosts=["a"], gather=lambda message: [message]
    )
    for _ in range(2):
        for step in (4, 8):
            shutil.rmtree(folder / f"step-{step:08d}", ignore_errors=True)
            stored(folder, step)
        (folder / "step-00000008" / "model.safetensors").unlink()
        assert checkpoint.find(tmp_path, me).manifest["step"] == 4
        assert sorted(path.name for path in folder.iterdir()) == [".step-00000008.damaged", "step-00000004"]


@pytest.mark.parametrize(
    ("launch", "attempt", "given_up", "set_aside", "missed"),
    [
        ("L1", 2, 0, False, True),
        ("L1", 2, 9, False, False),
        ("L1", 2, 0, True, False),
        ("L1", 1, 0, False, False),
        ("L0", 3, 0, False, False),
    ],
)
def test_one_that_was_saved_is_missed(tmp_path, launch, attempt, given_up, set_aside, missed):
    """Unless it is given up, was damaged, or the others have gone on from an older one since."""
    me = SimpleNamespace(first=False, keeps=True, rank=0, keepers=[0, 1], hosts=["b", "c"])
    there = {"launch": launch, "attempt": attempt, "step": 9, "hosts": ["a", "d"]}
    me.gather = lambda mine: [mine, {**mine, "saved": there}]
    stored(tmp_path / "checkpoints", 4)
    told = metrics.Metrics(tmp_path, 0)
    told.write({"kind": "event", "event": "restart", "launch": "L1", "attempt": 2, "step": 4})
    if set_aside:
        (tmp_path / "checkpoints" / ".step-00000009.damaged").mkdir()
    if not missed:
        assert checkpoint.find(tmp_path, me, given_up=given_up).manifest["step"] == 4
        return
    with pytest.raises(checkpoint.Absent, match="of step 9, is on a and d, and on no host") as raised:
        checkpoint.find(tmp_path, me, given_up=given_up)
    assert raised.value.hosts == ["a", "d"]
    assert "lost_step=9 goes on from step 4" in str(raised.value)


@pytest.mark.parametrize(("hosts", "copies"), [(1, 2), (2, 2), (4, 2), (5, 3), (16, 3)])
def test_a_checkpoint_outlives_as_many_hosts_as_the_memory_of_runs(hosts, copies):
    assert checkpoint.copies(hosts) == copies
    names = [f"node{number}" for number in range(hosts)]
    members = len(etcd_members(names, {name: {"cluster_address": name} for name in names}))
    assert copies > (members - 1) // 2  # that may be lost


def test_another_model_or_dataset_is_named():
    manifest = {
        "step": 4,
        "identity": {"model": "a", "dataset": "d", "seed": 0},
        "settings": {"model": "tiny", "dataset": "austen", "seed": 0},
    }
    same = dict(manifest["identity"])
    checkpoint.check_identity(manifest, same, {})
    with pytest.raises(BadInput) as refused:
        checkpoint.check_identity(
            manifest, same | {"dataset": "e", "seed": 1}, {"dataset": "austen", "seed": 1}
        )
    message = str(refused.value)
    assert (
        "dataset: austen then, austen now (the same name, another content), or an earlier release of "
        in message
    )
    assert "seed: 0 then, 1 now" in message and "model" not in message
    checkpoint.check_identity(manifest, same | {"tokens": "t"}, {})  # which an earlier release did not note
    by_host = manifest | {"identity": same | {"weights": ["x", "y"]}}
    checkpoint.check_identity(by_host, {"weights": ["y", "z"]}, {})  # one host is there that was before
    with pytest.raises(BadInput, match="weights: x then, z now"):
        checkpoint.check_identity(by_host, {"weights": ["z"]}, {})


@pytest.mark.parametrize(
    ("before", "cards", "wanted", "refused"),
    [
        ("cuda", False, "auto", True),
        ("cuda", False, "cpu", False),
        (
            "cuda",
            True,
            "auto",
            False,
        ),  # on the CPU all the same, where hosts that are one machine share too few
        ("cpu", True, "auto", False),
        (None, False, "auto", False),  # of a release that did not note it
    ],
)
def test_a_run_of_gpus_does_not_go_on_slowly_without_a_word(before, cards, wanted, refused):
    manifest = {"step": 4} | ({"device": before} if before else {})
    with pytest.raises(BadInput, match="step 4 was made on GPUs") if refused else contextlib.nullcontext():
        checkpoint.check_device(manifest, wanted, cards)


def test_what_made_it_another_model_is_named():
    settings = {"model": "tiny", "adapter": "lora", "lora_rank": 8, "lora_targets": ""}
    manifest = {"step": 4, "identity": {"model": "a"}, "settings": settings}
    for key, now in (("lora_rank", 16), ("model", "small"), ("adapter", "none")):
        with pytest.raises(BadInput) as refused:
            checkpoint.check_identity(manifest, {"model": "b"}, settings | {key: now})
        assert f"something else: {key}: {settings[key]} then, {now} now. Cure" in str(refused.value)
    with pytest.raises(BadInput, match=r"model: tiny then, tiny now \(the same name, another content\)"):
        checkpoint.check_identity(manifest, {"model": "b"}, settings)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    before = metrics.Metrics(tmp_path, 0)
    for step in (1, 2, 3):
        before.write({"kind": "train", "step": step, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "lo')  # a crash in mid-line
    metrics.Metrics(tmp_path, 2).write({"kind": "train", "step": 3, "loss": 2.0})
    found = [(record["step"], record["loss"]) for record in metrics.read(tmp_path / "metrics.jsonl")]
    assert found == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_status_is_written_whole_at_each_change_of_state(tmp_path):
    status = metrics.Status(tmp_path, run="r")
    status.update(state="running")
    status.update(step=1)  # too soon
    assert json.loads((tmp_path / "status.json").read_text())["step"] is None
    status.update(state="saving")
    written = json.loads((tmp_path / "status.json").read_text())
    assert written["step"] == 1 and set(written) == set(metrics.KEYS)


def answer(capfd, *arguments) -> tuple[int, str]:
    """Exit code and message of a command."""
    code = cli.main([str(argument) for argument in arguments])
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    return code, said.err


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "data.txt").write_text("a few words to read\n" * 30)
    (tmp_path / "run.yaml").write_text(
        f"dataset: {tmp_path}/data.txt\nvocab_size: 300\nsequence_length: 16\n"
    )
    return tmp_path / "run.yaml"


def pickled(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "pytorch_model.bin").write_bytes(b"x")


def without_tokenizer(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}')


def broken_config(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text("{")


def unknown_type(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "nothing_like_it"}')


def own_code(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')


MODELS = {
    "pickled weights": (pickled, "pickled"),
    "no tokenizer": (without_tokenizer, "no tokenizer.json in it; put the model's own there"),
    "broken config": (broken_config, "configuration cannot be loaded"),
    "unknown type": (unknown_type, "nothing_like_it"),
    "own code": (own_code, "trust_remote_code"),
    "no config": (lambda folder: folder.mkdir(), "with a config.json, found nothing; export the model"),
    "missing": (lambda folder: None, "no such directory"),
    "a file": (lambda folder: folder.write_text("x"), "not a directory"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_is_refused(tmp_path, config_file, capfd, name):
    make, message = MODELS[name]
    make(tmp_path / "model")
    code, said = answer(capfd, "check", config_file, f"model={tmp_path}/model")
    assert code == 2
    assert said.startswith(f"error: model: {tmp_path}/model: ") and message in said


def _unknown_kind(folder):
    from transformers import AutoConfig

    (folder / "config.json").write_text('{"model_type": "no_such_kind"}')
    AutoConfig.from_pretrained(folder)


def _translator(folder):
    from transformers import AutoModelForCausalLM, T5Config

    AutoModelForCausalLM.from_config(T5Config())


def _pickled(folder):
    from transformers import AutoModelForCausalLM, GPT2Config

    GPT2Config(n_layer=1).save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)


def _part_missing(folder):
    raise OSError("org/name does not appear to have a file named model-00002-of-00003.safetensors")


def _full(folder):
    raise OSError(errno.ENOSPC, "No space left on device")


def _gated(folder):
    raise OSError("You are trying to access a gated repo. Make sure to have access to it")


def _bare(folder):
    raise ImportError("this tokenizer needs sentencepiece")


@pytest.mark.parametrize(
    ("fault", "cure"),
    [
        (_unknown_kind, "does not know that kind of model: choose another"),
        (_translator, "it does not write text token by token"),
        (_pickled, "weights must be safetensors; pickled ones"),
        (_full, "make room where what is fetched is kept"),
        (_part_missing, "must hold config.json|neither a directory here"),
        (_gated, "accept its terms on the hub"),
        (_bare, "install what it names beside the trainer"),
    ],
)
@pytest.mark.parametrize("name", ["org/name", ""])
def test_the_cure_of_a_model_is_that_of_its_fault(tmp_path, fault, cure, name):
    from trainer.config import from_mapping
    from trainer.model import load

    with (
        pytest.raises(BadInput, match=cure),
        load._explained(from_mapping({"model": name or str(tmp_path)}), "weights"),
    ):
        fault(tmp_path)


def test_a_hub_name_without_internet(config_file, capfd, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, said = answer(capfd, "check", config_file, "model=nobody/nothing")
    assert code == 2 and "neither a directory here nor to be had" in said and "HF_HUB_OFFLINE is set" in said


def test_a_run_whose_directory_is_in_use_leaves_its_log_alone(config_file, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs/run"
    (directory / "logs").mkdir(parents=True)
    (directory / "logs/rank-0.log").write_text("another's\n")
    other = os.open(directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        code, said = answer(capfd, "train", config_file)
    finally:
        os.close(other)
    assert code == 2 and "another process trains there" in said
    assert (directory / "logs/rank-0.log").read_text() == "another's\n"


@pytest.mark.parametrize(("words", "few"), [((), True), (("steps=2",), False), (("epochs=50",), False)])
def test_plan_tells_of_data_of_a_handful_of_steps(config_file, capfd, words, few):
    small = ("model=tiny", "vocab_size=300", "batch_size=8", "sequence_length=256", "max_samples=20")
    assert cli.main(["plan", str(config_file), "device=cpu", *small, *words]) == 0
    assert ("too few to learn by" in capfd.readouterr().out) == few


def test_check_lists_model_and_data_together(tmp_path, config_file, capfd):
    code, said = answer(capfd, "check", config_file, f"model={tmp_path}/none", "dataset=none.txt")
    assert code == 2 and "dataset: none.txt" in said and "model: " in said


@pytest.mark.parametrize("words", ["loss_kernel=liger device=cpu", "report_to=wandb"])
def test_check_refuses_what_a_run_would_before_its_first_step(config_file, capfd, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, said = answer(capfd, "check", config_file, *words.split())
    assert code == 2 and words.split("=")[0] in said


def test_a_good_check(config_file, capfd):
    assert cli.main(["check", str(config_file)]) == 0
    assert "are good" in capfd.readouterr().out


def test_sequences_longer_than_the_model(tmp_path, config_file, capfd):
    from transformers import GPT2Config

    from trainer.data import tokenizer

    GPT2Config(n_positions=8, n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path / "model")
    tokenizer.wrap(tokenizer.train(from_mapping({"dataset": "austen", "vocab_size": 300}))).save_pretrained(
        tmp_path / "model"
    )
    code, said = answer(capfd, "check", config_file, f"model={tmp_path}/model")
    assert code == 2 and "sequence_length 16 is more than the 8 positions" in said and "set it to 8" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/nonexistent"], "no such directory"),
        (["generate", "/tmp"], "neither a model (config.json), an adapter"),
        (["stop", "/tmp"], "not a run's directory"),
        (["train", "/nonexistent.yaml"], "no such file"),
    ],
)
def test_bad_directories(capfd, arguments, message):
    code, said = answer(capfd, *arguments)
    assert code == 2 and message in said


def test_ranks_without_a_launcher(config_file, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    code, said = answer(capfd, "train", config_file)
    assert code == 2 and "trainer launch" in said


def test_train_and_generate_by_hand(tmp_path, config_file):
    """The commands as a user types them, in an empty directory."""

    def typed(*arguments):
        command = [sys.executable, "-m", "trainer", *map(str, arguments)]
        environment = {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)

    trained = typed("train", config_file, "run=mine", "steps=2", "threads=1", "device=cpu")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert trained.stderr == ""
    assert "finished: model in" in trained.stdout
    assert "finished: model in" in (tmp_path / "runs/mine/logs/rank-0.log").read_text()
    first, other = (
        typed(
            "generate", tmp_path / "runs" / "mine", "--prompt", "a few", "--max-new-tokens", 8, "--seed", seed
        )
        for seed in (1, 2)
    )
    assert first.returncode == 0 and first.stderr == ""
    assert first.stdout.startswith("a few") and first.stdout != other.stdout
    assert (tmp_path / ".cache" / "trainyard").is_dir()
    shutil.rmtree(tmp_path / "runs" / "mine" / "model")  # a run that has not ended: its checkpoint speaks
    unfinished = typed(
        "generate", tmp_path / "runs" / "mine", "--prompt", "a few", "--max-new-tokens", 8, "--seed", 1
    )
    assert unfinished.stdout == first.stdout, unfinished.stderr


@pytest.mark.parametrize(
    ("launch", "begun", "saved", "own"),
    [
        ("b", None, {"launch": "b"}, True),
        ("b", None, {"launch": "a"}, False),
        ("b", "0", {"launch": "a"}, False),
        ("", None, {"launch": ""}, False),  # by torchrun, of which nothing tells
        ("", "100.5", {"launch": ""}, True),  # by hand: an attempt of this launcher's wrote it
        ("", "200.5", {"launch": ""}, False),  # an earlier start did, however many attempts there were
    ],
)
def test_whose_start_wrote_a_checkpoint(monkeypatch, launch, begun, saved, own):
    from trainer.commands import train

    monkeypatch.delenv("TRAINYARD_BEGUN", raising=False)
    if begun:
        monkeypatch.setenv("TRAINYARD_BEGUN", begun)
    here = SimpleNamespace(launch=launch, attempt=2)
    assert train._own({**saved, "time": 150.0}, here) is own


def test_names_in_another_encoding_are_told(tmp_path, config_file):
    """By the log and the terminal, whatever letters that has."""
    folder = os.fsencode(tmp_path) + b"/data"
    os.mkdir(folder)
    Path(os.fsdecode(folder + b"/caf\xe9.jsonl")).write_text('{"other": 1}\n')
    command = [sys.executable, "-m", "trainer", "train", config_file, "run=r", f"dataset={tmp_path}/data"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert found.returncode == 2 and "Traceback" not in found.stdout + found.stderr
    for said in (found.stdout, (tmp_path / "runs/r/logs/rank-0.log").read_text()):
        assert "caf\\udce9.jsonl:1: no field 'text'" in said
    command[-1] = os.fsdecode(folder + b"/caf\xe9.jsonl")
    found = subprocess.run(
        [*command[:-1], f"dataset={command[-1]}"],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert found.returncode == 2 and "expected UTF-8, found" in found.stderr


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "paged_adamw"])
def test_an_optimizers_state_is_restored_in_another(kind):
    """Through the 32 bits of a checkpoint, into the same optimizer and into torch's AdamW."""
    import torch

    from trainer import config, optim

    torch.manual_seed(0)
    chosen = config.from_mapping({"optimizer": kind})
    part = torch.nn.Parameter(torch.randn(130, 64))
    optimizer = optim.adamw({"weight": part}, chosen)
    assert not optim.state(optimizer, part)["exp_avg"].any()
    for _ in range(3):
        part.grad = torch.randn_like(part)
        optimizer.step()
    kept = {name: value.clone() for name, value in optim.state(optimizer, part).items()}
    assert kept["step"] == 3 and kept["exp_avg"].abs().max() > 0.1
    for other in (kind, "adamw"):
        again = torch.nn.Parameter(part.detach().clone())
        into = optim.adamw({"weight": again}, config.from_mapping({"optimizer": other}))
        optim.restore(into, again, kept["step"].item(), kept["exp_avg"], kept["exp_avg_sq"])
        found = optim.state(into, again)
        allowed = 0.02 if other == "adamw_8bit" else 0.0  # of the largest in a block, for it is rounded again
        for name in ("exp_avg", "exp_avg_sq"):
            assert (found[name] - kept[name]).abs().max() <= allowed * kept[name].abs().max()
        assert found["step"] == 3
        again.grad = torch.ones_like(again)
        into.step()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_paged_moments_are_given_where_their_parameter_is(dtype):
    """bitsandbytes' say that they are on the CPU; its kernels, NCCL too, want them on the GPU. A made-up one, here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        part = torch.nn.Parameter(torch.empty(400, 300, device="cuda"))
        paged = torch.empty(400, 300, dtype=dtype)
        scales = {"absmax": torch.empty(469, device="cuda"), "qmap": torch.empty(256, device="cuda")}
        kept = {"step": 3, "state1": paged, "state2": paged}
        kept |= {f"{name}{number}": one for name, one in scales.items() for number in (1, 2)}
        found = optim.state(SimpleNamespace(state={part: kept}), part)
    assert {found[name].device.type for name in ("exp_avg", "exp_avg_sq")} == {"cuda"}


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_moments_that_a_checkpoint_averages_are_gone_on_from(name):
    """Also those in 8 bits, which a strategy sees a copy of."""
    model = torch.nn.Linear(64, 80, bias=False)
    optimizer = optim.adamw({"weight": model.weight}, from_mapping({"optimizer": name}))
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    before = {kind: one.clone() for kind, one in optim.state(optimizer, model.weight).items()}

    def halved(name, parts, ranks, group=None):
        for one in parts[1:]:
            one.div_(2)
        return [one.clone() for one in parts]

    strategy = SimpleNamespace(
        model=model,
        trainable={"weight": model.weight},
        in_parts=False,
        averages=True,
        whole=halved,
        kept=dict,
        world=SimpleNamespace(rank=0),
    )
    snapshot.Snapshot(strategy, optimizer, [0], apart=True, group=None)
    after = optim.state(optimizer, model.weight)
    for kind in snapshot.MOMENTS[1:]:
        rounded = (0.02 if name == "adamw_8bit" else 0.0) * before[kind].abs().max()
        assert (after[kind] - before[kind] / 2).abs().max() <= rounded
    assert after["step"] == before["step"] == 1


def test_what_is_trained_while_a_checkpoint_is_written_is_none_of_it():
    """All that is trained, how many steps that took, and what is frozen or kept beside; but no passing buffer."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight.requires_grad_(False)
    model.register_buffer("routing", torch.ones(2))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    trained = model[0].weight
    optimizer = optim.adamw({"0.weight": trained}, from_mapping({}))

    def step():
        trained.grad = torch.randn_like(trained)
        optimizer.step()

    step()
    strategy = SimpleNamespace(
        model=model,
        trainable={"0.weight": trained},
        in_parts=False,
        averages=False,
        whole=lambda name, parts, ranks, group=None: parts,
        kept=dict,
        world=SimpleNamespace(rank=0),
    )
    state = {kind: one.clone() for kind, one in optim.state(optimizer, trained).items()}
    weights = {
        "0.weight": trained.detach().clone(),
        "1.weight": model[1].weight.clone(),
        "routing": torch.ones(2),
    }
    taken = snapshot.Snapshot(strategy, optimizer, [0], apart=True, group=None)
    with torch.no_grad():
        step()
        model[1].weight.zero_()
        model.routing.zero_()
    found = {"model.safetensors": {}, snapshot.OPTIMIZER: {}}
    for file, key, one in taken:
        found[file][key] = one
    assert found["model.safetensors"].keys() == weights.keys()
    assert all(torch.equal(one, weights[key]) for key, one in found["model.safetensors"].items())
    moments = {f"{kind}.0.weight": one for kind, one in state.items()}
    assert found[snapshot.OPTIMIZER].keys() == moments.keys()
    assert all(torch.equal(one, moments[key]) for key, one in found[snapshot.OPTIMIZER].items())


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_an_optimizer_s_state_goes_through_a_checkpoint(name):
    """On the CPU, too, where nothing is paged. Large tensors are in 8 bits, and rounded once more on their way."""
    torch.manual_seed(0)
    config = from_mapping({"optimizer": name})

    def stepped(parameter, optimizer, steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        for step in range(steps):
            parameter.grad = torch.sin(parameter.detach() + step)
            optimizer.step()

    start = torch.randn(80, 64)
    straight = torch.nn.Parameter(start.clone())
    optimizer = optim.adamw({"weight": straight}, config)
    stepped(straight, optimizer, 3)
    assert (straight - start).abs().mean() > 0.01
    resumed = torch.nn.Parameter(straight.detach().clone())
    other = optim.adamw({"weight": resumed}, config)
    state = optim.state(optimizer, straight)
    assert state["step"] == 3 and state["exp_avg"].shape == state["exp_avg_sq"].shape == start.shape
    optim.restore(other, resumed, *(state[kind] for kind in ("step", "exp_avg", "exp_avg_sq")))
    for one, its in ((straight, optimizer), (resumed, other)):
        stepped(one, its, 2)
    assert torch.allclose(straight, resumed, atol=1e-3 if "8bit" in name else 1e-7)
    kinds = {one.dtype for one in other.state[resumed].values() if torch.is_tensor(one) and one.ndim > 1}
    assert (torch.uint8 in kinds) == ("8bit" in name)


def test_weight_decay_is_for_matrices_and_no_biases_stacked_ones_neither():
    names = {
        "up.weight": (4, 4),
        "up.bias": (4,),
        "norm.weight": (4,),
        "experts.up_proj": (2, 4, 4),
        "experts.up_proj_bias": (2, 4),
    }
    parameters = {name: torch.nn.Parameter(torch.ones(*shape)) for name, shape in names.items()}
    decayed, others = optim.adamw(parameters, from_mapping({"weight_decay": 0.1})).param_groups
    told = [
        {name for name, one in parameters.items() if any(one is p for p in group["params"])}
        for group in (decayed, others)
    ]
    assert told == [{"up.weight", "experts.up_proj"}, {"up.bias", "norm.weight", "experts.up_proj_bias"}]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    (alone,) = optim.adamw(
        {"w": parameters["up.weight"]}, from_mapping({"beta1": 0.8, "beta2": 0.95})
    ).param_groups
    assert alone["betas"] == (0.8, 0.95)


def test_positions_of_two_kinds_are_refused_where_sequences_may_need_the_second():
    from transformers import LlamaConfig, Phi3Config

    from trainer.data import tokenizer
    from trainer.model import load

    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    small = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 300}
    phi = Phi3Config(
        rope_scaling={"type": "longrope", **factors},
        original_max_position_embeddings=64,
        max_position_embeddings=1024,
        pad_token_id=0,
        **small,
    )
    assert load._short_positions(phi) == 64 and load._short_positions(LlamaConfig(**small)) is None
    tokens = tokenizer.wrap(tokenizer.train(from_mapping({"dataset": "austen", "vocab_size": 300})))
    found = load.Source(phi, tokens, None, {})
    load._check(from_mapping({"model": "phi", "sequence_length": 64}), found)
    with pytest.raises(BadInput, match=r"longrope.*set sequence_length to 64 or less"):
        load._check(from_mapping({"model": "phi", "sequence_length": 65}), found)


def test_the_checkpoints_of_random_weights_tell_the_format_that_they_have(tmp_path):
    from transformers import LlamaConfig

    from trainer.model import load

    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 300,
        "num_hidden_layers": 1,
    }
    LlamaConfig(**small, dtype="bfloat16").save_pretrained(tmp_path)
    found = load.Source(LlamaConfig.from_pretrained(tmp_path), None, None, {})
    model = load._weights(from_mapping({"model": str(tmp_path)}), found, None)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    model.config.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "float32"


def test_a_part_without_rows_is_as_far_as_the_others_after_a_resume():
    """Its host may be the one that keeps the checkpoint's second copy, and write its own count of steps there."""
    optimizers, parts = [], []
    for _ in range(2):
        part, other = torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.ones(2, 4))
        optimizers.append(optim.adamw({"part": part, "other": other}, from_mapping({})))
        parts.append((part, other))

    def steps(number, count):
        for _ in range(count):
            for one in parts[number]:
                one.grad = torch.ones_like(one)
            optimizers[number].step()

    steps(0, 3)
    for before, after in zip(*parts, strict=True):
        kept = optim.state(optimizers[0], before)
        optim.restore(optimizers[1], after, *(kept[kind] for kind in ("step", "exp_avg", "exp_avg_sq")))
    steps(1, 2)
    assert [float(optim.state(optimizers[1], one)["step"]) for one in parts[1]] == [5, 5]


def test_bitsandbytes_says_nothing_of_a_kernel_that_it_does_without(caplog):
    """By its own code where the CPU has bfloat16; its other messages come through."""
    code = "from trainer import cli; cli._quiet(); import bitsandbytes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kernels-community" not in done.stderr
    cli._quiet()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no such module")
    logger.warning("this one matters")
    assert [record.getMessage() for record in caplog.records] == ["this one matters"]


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capfd):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["export", "run", "out"]) == 130
    assert capfd.readouterr().err.strip() == ""
