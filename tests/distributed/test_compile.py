"""compile: the same curve; where there is nothing to compile with, a refusal with the cure."""

import sysconfig
from pathlib import Path

import installed
import pytest
import ranks

from trainer import environment
from trainer.config import from_mapping
from trainer.errors import BadInput
from trainer.model import load
from trainer.world import World

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def compiler():
    installed.have("g++", "g++")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no Python.h of this Python here: apt install python3-dev")


def test_losses_are_equal(material, whole, tmp_path):
    assert ranks.run(tmp_path, 1, material / "run.yaml", "compile=true") == pytest.approx(whole, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2"])
def test_losses_are_equal_on_two_ranks(material, whole, tmp_path, strategy):
    """A micro-batch has one size: another would be compiled anew."""
    settings = ("compile=true", f"strategy={strategy}", "timeout_seconds=300")
    assert ranks.run(tmp_path, 2, material / "run.yaml", *settings) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_what_is_lacking_is_named_with_the_cure(lacking, monkeypatch, tmp_path):
    monkeypatch.setattr(
        load.shutil, "which", lambda name: None if lacking == "compiler" else f"/usr/bin/{name}"
    )
    monkeypatch.setattr(load.sysconfig, "get_path", lambda name: str(tmp_path))
    world = World(from_mapping({"device": "cpu"}), environment.read("run"))
    with pytest.raises(BadInput, match=r"apt install (g\+\+|python3\.\d+-dev)\), or set compile to false"):
        load._compile(None, world)
