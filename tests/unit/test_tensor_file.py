"""Files that are written tensor by tensor are what safetensors itself reads."""

import itertools
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trainer import tensor_file
from trainer.tensor_file import TYPES, TensorFile


def test_safetensors_reads_every_type_in_any_order_of_writing(tmp_path):
    torch.manual_seed(0)
    tensors = {
        f"{key}.{dtype}": (100 * torch.rand(shape)).to(dtype)
        for dtype in TYPES
        for key, shape in (("matrix", (3, 5)), ("scalar", ()), ("none", (0, 4)), ("odd", (7,)))
    }
    path = tmp_path / "some.safetensors"
    with TensorFile(path, {key: one.to("meta") for key, one in tensors.items()}) as file:
        for key in reversed(tensors):
            file.write(key, tensors[key])
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for key, one in tensors.items():
        assert found[key].dtype == one.dtype and torch.equal(found[key], one), key
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_slice("matrix.torch.float32")[1:], tensors["matrix.torch.float32"][1:])


def test_it_is_the_librarys_own_file(tmp_path):
    tensors = {"b": torch.arange(5.0), "a": torch.ones(2, 2), "step": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    with TensorFile(tmp_path / "ours", tensors) as file:
        for key, one in tensors.items():
            file.write(key, one)
    theirs, ours = load_file(tmp_path / "theirs"), load_file(tmp_path / "ours")
    assert {key: one.tolist() for key, one in theirs.items()} == {
        key: one.tolist() for key, one in ours.items()
    }
    assert (tmp_path / "theirs").read_bytes()[-40:] == (tmp_path / "ours").read_bytes()[-40:]


def test_another_tensor_than_was_told_is_refused_and_so_is_none(tmp_path):
    told = {"a": torch.empty(2, 3, device="meta"), "b": torch.empty((), device="meta")}
    with (
        pytest.raises(ValueError, match="a: 20 bytes, told were 24"),
        TensorFile(tmp_path / "some", told) as file,
    ):
        file.write("a", torch.zeros(5))
    with pytest.raises(ValueError, match="not written: b"), TensorFile(tmp_path / "some", told) as file:
        file.write("a", torch.zeros(2, 3))


def test_no_more_waits_for_the_disk_than_it_takes_in_a_moment(tmp_path, monkeypatch):
    """What a host's etcd syncs would wait for all of a checkpoint's bytes."""
    settled = []
    monkeypatch.setattr(tensor_file, "SETTLE", 1000)
    monkeypatch.setattr(tensor_file.os, "fdatasync", lambda handle: settled.append(os.fstat(handle).st_size))
    tensors = {
        "large": torch.arange(900),
        "small": torch.arange(60),
        "none": torch.zeros(0),
        "last": torch.ones(70),
    }
    with TensorFile(tmp_path / "ours", tensors) as file:
        for key, one in tensors.items():
            file.write(key, one)
    assert len(settled) == 7 and max(b - a for a, b in itertools.pairwise(settled)) <= 2000
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys() and all(
        torch.equal(found[key], one) for key, one in tensors.items()
    )
