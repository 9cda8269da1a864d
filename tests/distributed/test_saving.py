"""Checkpoints are written while training goes on, and whatever happens then, the one before stays."""

import json
import os
import re
import shutil
import signal

import pytest
import ranks

pytestmark = pytest.mark.distributed


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("background", "strategy"),
    [(True, "ddp"), (False, "ddp"), pytest.param(True, "fsdp", marks=pytest.mark.full)],
)
def test_training_waits_for_the_copy_alone(material, whole, tmp_path, background, strategy):
    """A disk that takes two seconds for a file: the steps after the checkpoint come before its end, or not.

    Those of parts gather them for it meanwhile.
    """
    patch = {("trainer.checkpoint", "TensorFile"): _slow}
    chosen = (f"checkpoint_async={background}", "checkpoint_every=6", f"strategy={strategy}")
    assert ranks.run(tmp_path, 2, material / "run.yaml", *chosen, patch=patch) == pytest.approx(
        whole, rel=1e-5
    )
    for node in ("node0", "node1"):
        told = records(tmp_path / node)
        (place,) = (n for n, one in enumerate(told) if one["kind"] == "event" and one["step"] == 6)
        steps_meanwhile = [one["step"] for one in told[:place] if one["kind"] == "train" and one["step"] > 6]
        event = told[place]
        assert event["seconds"] > 2
        assert (event["copy_seconds"] < event["seconds"] / 2) == background
        assert bool(steps_meanwhile) == background
        assert names(tmp_path / node) == ["step-00000006", "step-00000012"]


def test_the_wait_for_the_checkpoint_before_is_told(material, tmp_path):
    """A disk that takes two seconds for a checkpoint, and one of each step."""
    patch = {("trainer.checkpoint", "TensorFile"): _slow}
    ranks.run(tmp_path, 1, material / "run.yaml", "steps=7", "checkpoint_every=1", patch=patch)
    saved = [one for one in records(tmp_path / "node0") if one.get("event") == "checkpoint"]
    waited = {one["step"]: one["copy_seconds"] for one in saved}
    assert waited[5] < 1 and waited[6] < 1 < waited[7]


def test_what_an_interrupted_save_left_is_not_in_the_way_of_the_next(material, whole, tmp_path):
    """On a disk with room for three, it and two checkpoints would leave none."""
    left = tmp_path / "node0/checkpoints"
    for name in (".step-00000002.tmp", ".step-00000001.old"):
        (left / name).mkdir(parents=True)
    patch = {("shutil", "disk_usage"): _full_of_leftovers}
    assert ranks.run(tmp_path, 1, material / "run.yaml", patch=patch) == whole
    assert names(tmp_path / "node0") == ["step-00000008", "step-00000012"]


def _full_of_leftovers(path):
    import glob
    import types

    left = glob.glob(os.path.join(os.environ["TRAINYARD_RUN_DIR"], "checkpoints/.step-*"))
    return types.SimpleNamespace(free=0 if left else 1 << 40)


def test_what_is_safe_on_disk_before_a_checkpoint_has_its_name(material, whole, tmp_path):
    """After a power cut the steps up to it must be in the metrics, too: the run does not make them again."""
    patch = {("os", "fsync"): _noted_fsync, ("os", "rename"): _noted_rename}
    assert ranks.run(tmp_path, 1, material / "run.yaml", patch=patch) == whole
    told = (tmp_path / "node0/told").read_text().split()
    for number in (4, 8, 12):
        name = f"step-{number:08d}"
        at = told.index(f"is:{name}")
        before = told[told.index(f"is:step-{number - 4:08d}") if number > 4 else 0 : at]
        files = ("model.safetensors", "optimizer.safetensors", "config.json", "manifest.json")
        for file in ("metrics.jsonl", f".{name}.tmp", *(f".{name}.tmp/{file}" for file in files)):
            assert file in before, (number, file, before)
        assert "checkpoints" in told[at:]


def _told(line):
    with open(os.path.join(os.environ["TRAINYARD_RUN_DIR"], "told"), "a") as file:
        file.write(f"{line}\n")


def _noted_fsync(handle):
    path = os.readlink(f"/proc/self/fd/{handle}").removeprefix(os.environ["TRAINYARD_RUN_DIR"]).strip("/")
    os.fsync_really(handle)
    _told(path.removeprefix("checkpoints/") or path)


def _noted_rename(old, new, **more):
    os.rename_really(old, new, **more)
    _told(f"is:{os.path.basename(new)}")


def _slow(path, tensors):
    import time

    from trainer import checkpoint

    if "step-00000006" in str(path) and "model" in path.name:
        time.sleep(2)
    return checkpoint.TensorFile_really(path, tensors)


@pytest.mark.parametrize("background", [True, False])
def test_nobody_holds_all_of_what_is_in_parts(material, whole, tmp_path, background):
    """Writers, too, hold their own part alone, or nothing where training waits, until they write."""
    patch = {("trainer.checkpoint", "Snapshot"): _weighed}
    chosen = ("strategy=fsdp", f"checkpoint_async={background}")
    assert ranks.run(tmp_path, 3, material / "run.yaml", *chosen, patch=patch) == pytest.approx(
        whole, rel=1e-5
    )
    told = (tmp_path / "node1/logs/rank-1.log").read_text()
    held, all_of_it = map(int, re.search(r"holds (\d+) of (\d+)", told).groups())
    assert held < (0.5 if background else 0.1) * all_of_it


def _weighed(*words):
    from trainer import checkpoint
    from trainer.world import log

    def size(tensors):
        return sum(one.nbytes for one in tensors)

    made = checkpoint.Snapshot_really(*words)
    wholes = [one for tensors in made.files.values() for one in tensors.values()]
    held = size(one for one in wholes if not one.is_meta) + sum(map(size, made._parts.values()))
    log(f"holds {held} of {size(wholes)}")
    return made


def test_a_crash_in_the_middle_leaves_the_one_before(material, whole, tmp_path):
    """The second host dies while it writes: neither host has the checkpoint, both have the one before."""
    patch = {("trainer.checkpoint", "TensorFile"): _deadly}
    attempt = ranks.Ranks(tmp_path, 2, material / "run.yaml", "strategy=fsdp", patch=patch)
    assert attempt.codes(120) == [5, -signal.SIGKILL]
    assert [name for name in names(tmp_path / "node0") if name.startswith("step")] == ["step-00000004"]
    assert names(tmp_path / "node1") == [".step-00000008.tmp", "step-00000004"]
    assert ranks.run(tmp_path, 2, material / "run.yaml") == pytest.approx(whole, rel=1e-5)
    assert names(tmp_path / "node1") == ["step-00000008", "step-00000012"]
    assert "resuming after step 4" in attempt.log()


def _deadly(path, tensors):
    import os
    import signal

    from trainer import checkpoint

    file = checkpoint.TensorFile_really(path, tensors)
    if os.environ["RANK"] == "1" and "step-00000008" in str(path) and "optimizer" in path.name:
        path.write_bytes(bytes(100))
        os.kill(os.getpid(), signal.SIGKILL)
    return file


def _full_for_the_tokenizer(path, tensors):
    """As a disk that has room for the tensors alone; what tokenizers raises then is no OSError."""
    import os

    from trainer import checkpoint

    if os.environ["RANK"] == "1" and "step-00000004" not in str(path):
        (path.parent / "tokenizer.json").unlink(missing_ok=True)
        (path.parent / "tokenizer.json").symlink_to("/dev/full")
    return checkpoint.TensorFile_really(path, tensors)


def _faulty(path, tensors):
    """As a mistake in the trainer's own code, which every rank's thread waits for."""
    import os

    from trainer import checkpoint

    if os.environ["RANK"] == "1" and "step-00000004" not in str(path):
        raise KeyError("nobody foresaw this")
    return checkpoint.TensorFile_really(path, tensors)


def _refused(path, tensors):
    import errno
    import os

    from trainer import checkpoint

    if os.environ["RANK"] == "1" and "step-00000004" not in str(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return checkpoint.TensorFile_really(path, tensors)


@pytest.mark.parametrize(
    ("disk", "words"),
    [
        (_refused, "Input/output error"),
        (_full_for_the_tokenizer, "no space left ("),
        (_faulty, "a fault of the trainer itself, please report it: KeyError"),
    ],
)
def test_saves_that_fail_three_times_in_a_row_end_the_run(material, tmp_path, disk, words):
    """The disk of one host refuses the files: all ranks end with the reason, long before the last step."""
    patch = {("trainer.checkpoint", "TensorFile"): disk}
    long = (material / "run.yaml", "steps=5000", "checkpoint_every=4")
    ranks.run(tmp_path, 3, *long, "strategy=zero1", codes=[1] * 3, patch=patch)
    for node in ("node0", "node1", "node2"):
        reason = ranks.status(tmp_path / node)["reason"]
        assert "node1: " in reason and words in reason and "node0: " not in reason
        assert "start the run again. It goes on from its last checkpoint" in reason
    assert 16 <= len(ranks.losses(tmp_path / "node2")) < 5000
    assert names(tmp_path / "node0") == names(tmp_path / "node1") == ["step-00000004"]


def test_no_space_for_the_moments(material, tmp_path):
    patch = {("os", "posix_fallocate"): _no_space}
    ranks.run(tmp_path, 2, material / "run.yaml", "strategy=infinity", codes=[1, 1], patch=patch)
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert "node1: offload_dir: " in reason and "No space left" in reason and "set offload_dir to" in reason


def _no_space(*arguments):
    import errno
    import os

    if os.environ["RANK"] == "1":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate_really(*arguments)


def test_no_space_for_the_next_one(material, tmp_path):
    """Nothing is written where it would not fit; the last one must be there, or the run has not finished."""
    patch = {("shutil", "disk_usage"): _full_later}
    ranks.run(tmp_path, 2, material / "run.yaml", codes=[1, 1], patch=patch)
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert "no space left: it needs 32 MiB, 1 MiB are free" in reason and "free some space" in reason
    assert names(tmp_path / "node0") == ["step-00000004"]
    assert len(ranks.losses(tmp_path / "node0")) == 12


def test_a_host_without_room_is_passed_over(material, whole, tmp_path):
    """Another one has the copy, as long as that is so, and what lies where none is written is rotated, too."""
    patch = {("shutil", "disk_usage"): _full_on_node1_at_first}
    attempt = ranks.Ranks(tmp_path, 3, material / "run.yaml", "checkpoint_keep=1", patch=patch)
    assert attempt.codes() == [0] * 3, attempt.log()
    assert ranks.losses(tmp_path / "node0") == pytest.approx(whole, rel=1e-5)
    told = [one for one in records(tmp_path / "node2") if one["kind"] == "event"]
    saved = [(one["step"], one["hosts"]) for one in told if one["event"] == "checkpoint"]
    assert saved == [(4, ["node0", "node2"]), (8, ["node0", "node2"]), (12, ["node0", "node1"])]
    (event,) = (one for one in told if one["event"] == "checkpoint elsewhere")
    assert event["step"] == 4 and event["reason"].startswith("node1: ") and "room for" in event["reason"]
    assert "until then copies are on node0 and node2" in event["reason"]
    manifest = json.loads((tmp_path / "node1/checkpoints/step-00000012/manifest.json").read_text())
    assert [one["host"] for one in manifest["copies"]] == ["node0", "node1"]
    assert names(tmp_path / "node0") == names(tmp_path / "node1") == ["step-00000012"]
    assert names(tmp_path / "node2") == []
    assert ranks.status(tmp_path / "node0")["warning"] is None


def _full_on_node1_at_first(path):
    found = shutil.disk_usage_really(path)
    node = next(one for one in (path, *path.parents) if one.name.startswith("node"))
    full = node.name == "node1" and not (node.parent / "node0/checkpoints/step-00000008").exists()
    return found._replace(free=1 << 20) if full else found


def test_old_ones_that_cannot_be_deleted_are_a_warning(material, tmp_path):
    """What was saved is saved."""
    patch = {("trainer.checkpoint", "_rotate"): _cannot_delete}
    ranks.run(tmp_path, 2, material / "run.yaml", patch=patch)
    for node in ("node0", "node1"):
        told = [one["event"] for one in records(tmp_path / node) if one["kind"] == "event"]
        assert told == ["start", "checkpoint", "checkpoint", "checkpoint"]
        warning = ranks.status(tmp_path / node)["warning"]
        assert warning.startswith("node1: ") and "old checkpoints cannot be deleted: [Errno 30]" in warning
    assert ranks.status(tmp_path / "node0")["last_checkpoint"] == 12


def _cannot_delete(*words, **more):
    import errno
    import os

    from trainer import checkpoint

    if os.environ["RANK"] == "1":
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    checkpoint._rotate_really(*words, **more)


def test_five_hosts_have_three_copies(material, whole, tmp_path):
    """And any two of them may be lost at once."""
    assert ranks.run(tmp_path, 5, material / "run.yaml", codes=[75] * 5, stop_in=6) == pytest.approx(
        whole[:6], rel=1e-5
    )
    assert [node for node in range(5) if (tmp_path / f"node{node}/checkpoints").exists()] == [0, 1, 2]
    left = ranks.Ranks(tmp_path, 3, material / "run.yaml", absent=2)
    assert left.codes() == [0] * 3
    assert "resuming after step 6, from node2" in left.log()
    assert ranks.losses(tmp_path / "node4") == pytest.approx(whole, rel=1e-5)


def _full_later(path):
    from pathlib import Path

    found = shutil.disk_usage_really(path)
    return found._replace(free=1 << 20) if list(Path(path).glob("step-*")) else found
