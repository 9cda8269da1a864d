"""A directory gets its name only when all that is in it is safe on disk."""

import os

import pytest

from trainer import disk
from trainer.config import from_mapping
from trainer.data import pack, read, tokenizer


@pytest.fixture
def events(monkeypatch):
    """The inodes that were synced, and "rename", in order."""
    found, fsync, rename = [], os.fsync, os.rename

    def note_sync(handle):
        found.append(os.fstat(handle).st_ino)
        fsync(handle)

    def note_rename(*paths):
        found.append("rename")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    return found


def test_everything_below_is_synced_before_the_rename_and_the_new_name_after_it(tmp_path, events):
    temporary, final = tmp_path / ".new", tmp_path / "new"
    (temporary / "deep").mkdir(parents=True)
    (temporary / "a").write_text("1")
    (temporary / "deep" / "b").write_text("2")
    disk.publish(temporary, final)
    turn = events.index("rename")
    assert set(events[:turn]) == {path.stat().st_ino for path in [final, *final.rglob("*")]}
    assert events[turn + 1 :] == [tmp_path.stat().st_ino]


def test_tokenised_data_is_safe_before_it_has_its_name(tmp_path, events):
    (tmp_path / "a.txt").write_text("some words of a text " * 50)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "vocab_size": 300, "sequence_length": 16})
    tokens = tokenizer.wrap(tokenizer.train(config))
    pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    turn = events.index("rename")
    (facts,) = (tmp_path / "cache").glob("*/train/facts.json")
    names = ("tokens.bin", "starts.bin", "loss.bin", "counts.bin", "facts.json")
    assert {(facts.parent / name).stat().st_ino for name in names} <= set(events[:turn])
