"""A power cut takes what a file system had not put on the disk yet: of a checkpoint that was told of, nothing. A disk
that fills while a checkpoint is written takes that one alone.

The file system is a real one, ext4 in an image, and ends as at a power cut: what the kernel only holds in memory, its
journal's last lines among it, never gets there. (A lab host's power cut leaves all that with this machine's kernel.)
"""

import contextlib
import fcntl
import os
import random
import struct
import subprocess
import time

import pytest
import ranks

from trainer import checkpoint

pytestmark = pytest.mark.distributed

SHUT_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN of linux/ext4.h
NO_LOG_FLUSH = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH
STEPS, EVERY = 12, 2  # those of `whole`


class Disk:
    """A folder that is a file system of its own; `power_cut` leaves what was safe."""

    def __init__(self, folder):
        self.image, self.path = folder / "image", folder / "disk"
        self.path.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(256 << 20)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)
        self.mount()

    def mount(self):
        subprocess.run(["mount", "-o", "loop", self.image, self.path], check=True)

    def umount(self):
        subprocess.run(["umount", self.path], check=True)

    @contextlib.contextmanager
    def power_cut(self):
        """All that it had in memory is lost; within, whoever writes there has yet to end."""
        handle = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(handle, SHUT_DOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(handle)
        yield
        self.umount()
        self.mount()


@pytest.fixture
def disk(tmp_path):
    if os.geteuid() or not os.path.exists("/dev/loop-control"):
        pytest.skip("mounts an image: needs root and loop devices")
    disk = Disk(tmp_path)
    yield disk
    disk.umount()


def told(run):
    """The newest checkpoint that the first host was told is safe."""
    with contextlib.suppress(OSError, ValueError):  # not there yet
        return ranks.status(run.directory()).get("last_checkpoint") or 0
    return 0


def test_this_disk_loses_what_is_not_safe(disk):
    (disk.path / "safe").write_text("safe")
    os.sync()
    (disk.path / "not safe").write_text("not safe")
    with disk.power_cut():
        pass
    assert (disk.path / "safe").read_text() == "safe"
    assert not (disk.path / "not safe").exists()


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.full)])
def test_no_checkpoint_that_was_told_is_lost(material, whole, disk, hosts):
    """All hosts lose their power, again and again, right after they saved or while they make the next steps."""
    chance = random.Random(0)
    config = (material / "run.yaml", f"checkpoint_every={EVERY}")
    patch = {("trainer.loop", "token_loss"): _slow}
    for cut in range(EVERY, STEPS, EVERY):
        run = ranks.Ranks(disk.path, hosts, *config, patch=patch)
        deadline = time.monotonic() + 120
        while told(run) < cut:
            assert time.monotonic() < deadline, run.log()
            time.sleep(0.01)
        time.sleep(chance.choice([0, chance.uniform(0, 0.6)]))
        safe = told(run)
        with disk.power_cut():
            for process in run.processes:
                process.kill()
                process.join()
        for host in range(hosts):
            checkpoint.validate(run.directory(host) / f"checkpoints/step-{safe:08d}")
    assert ranks.run(disk.path, hosts, *config) == pytest.approx(whole, rel=1e-6 if hosts == 1 else 1e-5)
    assert f"resuming after step {safe}" in run.log() or f"resuming after step {STEPS}" in run.log()


def test_a_disk_that_fills_while_a_checkpoint_is_written(material, whole, disk):
    """When it began there was room."""
    patch = {("trainer.checkpoint", "_write_tensors"): _while_somebody_fills_the_disk}
    assert ranks.run(disk.path, 1, material / "run.yaml", patch=patch) == pytest.approx(whole, rel=1e-6)
    directory = disk.path / "node0"
    events = ranks.records(directory, "event")
    (failed,) = (one for one in events if one["event"] == "checkpoint failed")
    assert 8 <= failed["step"] < 12 and "the checkpoint cannot be saved: no space left" in failed["reason"]
    assert [one["step"] for one in events if one["event"] == "checkpoint"] == [4, 12]
    left = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert left == ["step-00000004", "step-00000012"]
    shown = {step for step, name, _ in ranks.shown(directory / "tensorboard") if name == "train/loss"}
    assert shown == set(range(1, STEPS + 1))


def _while_somebody_fills_the_disk(folder, told, tensors):
    import contextlib
    import os

    from trainer import checkpoint

    if "00000008" not in folder.name:
        return checkpoint._write_tensors_really(folder, told, tensors)
    other = folder.parents[2] / "somebody's"
    with open(other, "wb") as file, contextlib.suppress(OSError):  # more than there is: it takes all there is
        os.posix_fallocate(file.fileno(), 0, 256 << 20)
    try:
        return checkpoint._write_tensors_really(folder, told, tensors)
    finally:
        other.unlink()


def _slow(run, sequences):
    import time

    from trainer import loop

    time.sleep(0.2)
    return loop.token_loss_really(run, sequences)
