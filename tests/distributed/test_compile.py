"""compile: the same curve; where there is nothing to compile with, a refusal with the cure."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import ranks

from trainer import environment
from trainer.config import from_mapping
from trainer.errors import BadInput
from trainer.model import load
from trainer.world import World

pytestmark = pytest.mark.distributed


def test_losses_are_equal(material, whole, tmp_path):
    one = ranks.Ranks(tmp_path, 1, material / "run.yaml", "compile=true")
    there = (
        any(map(shutil.which, ("g++", "clang++")))
        and Path(sysconfig.get_path("include"), "Python.h").is_file()
    )
    if there:
        assert one.codes() == [0], one.log()
        assert ranks.losses(one.directory()) == pytest.approx(whole, rel=1e-5)
    else:
        assert one.codes() == [2]
        assert "error: compile: " in one.log() and "apt install" in one.log()


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_what_is_lacking_is_named_with_the_cure(lacking, monkeypatch, tmp_path):
    monkeypatch.setattr(
        load.shutil, "which", lambda name: None if lacking == "compiler" else f"/usr/bin/{name}"
    )
    monkeypatch.setattr(load.sysconfig, "get_path", lambda name: str(tmp_path))
    world = World(from_mapping({"device": "cpu"}), environment.read("run"))
    with pytest.raises(BadInput, match=r"apt install (g\+\+|python3\.\d+-dev)\), or set compile to false"):
        load._compile(None, world)
