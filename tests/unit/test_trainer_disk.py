"""A directory gets its name only when all that is in it is safe on disk; a full disk costs a process no word."""

import errno
import io
import json
import os
import tracemalloc

import pytest

from trainer import disk, metrics
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


class Filling(io.FileIO):
    """A file on a disk with `room` for so many bytes more."""

    room = 1 << 20

    def write(self, data):
        if data and not Filling.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(bytes(data[: Filling.room]))
        Filling.room -= written
        return written


def steps(path):
    return [one["step"] for one in metrics.read(path)]


def test_lines_that_a_full_disk_does_not_take_come_with_a_later_one(tmp_path, monkeypatch):
    """Also the half of a line that it took."""
    monkeypatch.setattr(io, "FileIO", Filling)
    told = metrics.Metrics(tmp_path, 0)
    told.write({"kind": "train", "step": 1})
    monkeypatch.setattr(Filling, "room", 10)
    for step in (2, 3):
        told.write({"kind": "train", "step": step})
    assert told.held and steps(told.path) == [1]
    assert told.path.read_text().splitlines()[1] == '{"kind": "'
    monkeypatch.setattr(Filling, "room", 1 << 20)
    told.write({"kind": "train", "step": 4})
    assert steps(told.path) == [1, 2, 3, 4] and not told.held


def test_what_is_held_is_cut_back_with_the_rest(tmp_path, monkeypatch):
    """A roll-back while the disk is full; a line of an earlier step stays, though it stands behind."""
    monkeypatch.setattr(io, "FileIO", Filling)
    told = metrics.Metrics(tmp_path, 0)
    told.write({"kind": "train", "step": 1})
    monkeypatch.setattr(Filling, "room", 10)
    for kind, step in (("train", 2), ("train", 3), ("event", 2), ("train", 4)):
        told.write({"kind": kind, "step": step})
    told.cut(2)
    assert [(one["kind"], one["step"]) for one in map(json.loads, told.lines())] == [
        ("train", 1),
        ("train", 2),
        ("event", 2),
    ]
    monkeypatch.setattr(Filling, "room", 1 << 20)
    told.write({"kind": "train", "step": 3})
    assert steps(told.path) == [1, 2, 2, 3]


def test_a_disk_that_fails_otherwise_is_no_full_one(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "FULL", ())
    monkeypatch.setattr(io, "FileIO", Filling)
    told = metrics.Metrics(tmp_path, 0)
    monkeypatch.setattr(Filling, "room", 0)
    with pytest.raises(OSError, match="No space left"):
        told.write({"kind": "train", "step": 1})


def test_a_status_on_a_full_disk_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    """Where that has the room; else the next update tries again."""
    status = metrics.Status(tmp_path, run="r")
    status.update(state="running")

    def full(path, content, settle=True):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(metrics, "write_json", full)
        status.update(state="saving")
        assert json.loads(status.path.read_text())["state"] == "saving"
        status.update(state="running", note="x" * (1 << 20))
        assert json.loads(status.path.read_text())["state"] == "saving"
        assert status.update(state="saving", note=None)
        # What is short is told, if all does not fit; and what does not fit either is tried again.
        assert status.update(state="failed", reason="why", losses=["x" * (1 << 20)])
        assert {
            name: json.loads(status.path.read_text()).get(name) for name in ("state", "reason", "losses")
        } == {
            "state": "failed",
            "reason": "why",
            "losses": None,
        }
        assert not status.update(state="running", note="x" * (1 << 20))
    assert status.update(note=None)
    assert json.loads(status.path.read_text())["state"] == "running"


def test_a_file_without_room_for_it_leaves_no_half_of_itself(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        metrics.write_json(tmp_path / "status.json", {})
    assert not list(tmp_path.iterdir())


def test_what_a_long_run_tells_is_summed_up_without_being_in_memory(tmp_path):
    """A million steps of eight ranks would be gigabytes; hosts that joined later are no part of the times."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 3001):
            ranks = 3 if step <= 1000 else 8
            train = {
                "kind": "train",
                "step": step,
                "loss": abs(1500 - step),
                "tokens": 7,
                "world_size": ranks,
            }
            times = {
                "step_seconds": 2.0,
                "compute_seconds": 1.0,
                "comm_seconds": 0.5,
                "memory_peak_bytes": step,
            }
            file.write(json.dumps({**train, **times, "rank_seconds": [1.0] * ranks}) + "\n")
            if step % 1000 == 0:
                file.write(
                    json.dumps({"kind": "epoch", "epoch": step // 1000, "step": step, "loss": 1.0}) + "\n"
                )
                file.write(json.dumps({"kind": "eval", "step": step, "loss": 2.0}) + "\n")
    metrics.curve(tmp_path, 10)  # what is imported at first use
    tracemalloc.start()
    found = metrics.curve(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (tmp_path / "metrics.jsonl").stat().st_size / 2
    assert (found["steps"], found["best"], found["tokens"]) == (3000, {"step": 1500, "loss": 0}, 21000)
    assert found["losses"][:2] == [[1, 1499], [4, 1496]] and found["losses"][-1] == [3000, 1500]
    assert found["epochs"] == [[1, 1.0], [2, 1.0], [3, 1.0]] and found["evals"][0] == [1000, 2.0]
    assert found["memory_peak_bytes"] == 3000 and len(found["parts"]["compute"]) == 8
    assert metrics.curve(tmp_path, 1000)["parts"]["wire"] == pytest.approx(0.5)
