"""docs/upgrades.md: from the version before to this one while a run trains, and back; on two nodes of this machine."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from test_local import Machine
from yard import LONG, ROOT, SMALL, changed, said, wait_for

pytestmark = pytest.mark.full  # it makes environments, and plays for minutes
NODES = ("node1", "node2")


def older(place):
    """The checkout before the newest commit that changed the trainer, or before TRAINYARD_UPGRADE_FROM's child."""
    git = ["git", "-C", str(ROOT)]
    newest = subprocess.run([*git, "rev-list", "-1", "HEAD", "--", "trainer"], capture_output=True, text=True)
    commit = os.environ.get("TRAINYARD_UPGRADE_FROM") or f"{newest.stdout.strip()}^"
    packed = subprocess.run([*git, "archive", commit], capture_output=True)
    if packed.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(place, filter="data")
        return place
    # A clone without history: this version, with another trainer.
    listed = subprocess.run([*git, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place / name, follow_symlinks=False)
    with (place / "trainer/__init__.py").open("a") as file:
        file.write("\n# An older one.\n")
    return place


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "machine").mkdir()
    machine = Machine(tmp_path / "machine")
    yield machine
    machine.clear()


def played(machine, checkout, *playbook, **extra):
    """A playbook of that checkout, which must end well."""
    machine.checkout = checkout
    run = machine.play(*playbook, **extra)
    assert run.rc == 0, said(run)
    return run


def current(machine):
    """The release in use, which is the same on both nodes."""
    (name,) = {Path(os.readlink(machine.node(node) / "opt/current")).name for node in NODES}
    return name


def releases(machine):
    """{node and release: inode}: what is built anew has another; one that is used again has another time alone."""
    found = [path for node in NODES for path in (machine.node(node) / "opt/releases").iterdir()]
    kept = {path: path.stat() for path in found if not path.name.startswith(".")}
    return {(path.parts[-4], path.name): facts.st_ino for path, facts in kept.items()}


def records(machine, run, kind):
    lines = (machine.results / run / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def losses(machine, run):
    return [one["loss"] for one in records(machine, run, "train")]


def places(machine, run):
    """Where the processes of a run have their trainer from."""
    found = set()
    for pid in machine.processes():
        words = []
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"TRAINYARD_RUN_DIR={machine.node('node1')}/var/runs/{run}".encode() in words:
            found |= {word.decode() for word in words if word.startswith(b"PYTHONPATH=")}
    return found


def test_an_upgrade_under_a_run_and_back(machine, tmp_path):
    before = older(tmp_path / "before")
    played(machine, before, "site.yml")
    was, there = current(machine), releases(machine)
    played(machine, before, run="calm", **SMALL)
    played(machine, before, run="long", detach="true", checkpoint_every=2, **LONG)
    wait_for(lambda: (machine.status("long").get("step") or 0) > 4)

    # The new version comes beside the old one, and the run goes on as it began.
    played(machine, ROOT, "site.yml")
    now = current(machine)
    assert now != was and releases(machine).items() >= there.items()
    assert changed(played(machine, ROOT, "site.yml")) == 0
    step = machine.status("long")["step"]
    wait_for(lambda: machine.status("long")["step"] > step)
    assert machine.status("long")["attempt"] == 1
    assert all(was in place for place in places(machine, "long")) and places(machine, "long")

    # Its next start has the new one; no step is lost or taken twice.
    played(machine, ROOT, "playbooks/stop.yml", run="long")
    step = machine.status("long")["step"]
    played(machine, ROOT, run="long", resume="true", steps=step + 3)
    assert [one["step"] for one in records(machine, "long", "train")] == list(range(1, step + 4))
    (resumed,) = [one for one in records(machine, "long", "event") if one["event"] == "resume"]
    assert [one["trainer"] for one in resumed["machines"]] == [now.rpartition("-")[0]]
    played(machine, ROOT, run="after", **SMALL)
    assert losses(machine, "after") == pytest.approx(losses(machine, "calm"), rel=1e-5)

    # Back: nothing is built, and it trains as it did.
    both = releases(machine)
    back = played(machine, before, "site.yml")
    assert current(machine) == was and releases(machine) == both
    assert back.stats["changed"] == dict.fromkeys(NODES, 1), said(back)
    assert changed(played(machine, before, "site.yml")) == 0
    played(machine, before, run="back", **SMALL)
    assert losses(machine, "back") == losses(machine, "calm")
