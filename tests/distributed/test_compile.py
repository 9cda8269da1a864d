"""compile: the same curve; where there is nothing to compile with, a refusal with the cure."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import ranks

from trainer import environment
from trainer.config import load as read
from trainer.errors import BadInput
from trainer.model import load
from trainer.world import World

pytestmark = pytest.mark.distributed


def able():
    """Whether there is a compiler here, with Python's headers."""
    compiler = any(map(shutil.which, ("g++", "clang++")))
    return compiler and Path(sysconfig.get_path("include"), "Python.h").is_file()


@pytest.mark.full
def test_losses_are_equal(material, whole, tmp_path):
    left = tmp_path / "node0" / "compiled" / "node0" / "half.so"  # of a compiler that was killed
    left.parent.mkdir(parents=True)
    left.touch()
    one = ranks.Ranks(tmp_path, 1, material / "run.yaml", "compile=true")
    if able():
        assert one.codes() == [0], one.log()
        assert ranks.losses(one.directory()) == pytest.approx(whole, rel=1e-5)
        assert not left.exists() and any(left.parent.rglob("*.so"))
    else:
        assert one.codes() == [2]
        assert "error: compile: " in one.log() and "apt install" in one.log()


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2"])
def test_losses_are_equal_on_two_ranks(material, whole, tmp_path, strategy):
    """A micro-batch has one size: another would be compiled anew."""
    if not able():
        pytest.skip("no compiler here, or not Python's headers: apt install g++ python3-dev")
    settings = ("compile=true", f"strategy={strategy}", "timeout_seconds=300")
    assert ranks.run(tmp_path, 2, material / "run.yaml", *settings) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_what_is_lacking_is_named_with_the_cure(material, lacking, monkeypatch, tmp_path):
    monkeypatch.setattr(
        load.shutil, "which", lambda name: None if lacking == "compiler" else f"/usr/bin/{name}"
    )
    monkeypatch.setattr(load.sysconfig, "get_path", lambda name: str(tmp_path))
    config = read(material / "run.yaml", ["compile=true", "device=cpu"])
    world = World(config, environment.read("run"))
    with pytest.raises(BadInput, match=r"apt install (g\+\+|python3\.\d+-dev)\), or set compile to false"):
        load.source(config, world)
