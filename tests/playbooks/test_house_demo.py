"""`make demo` as a new user meets it: a fresh checkout in a directory with a space, nothing installed, no root.

Afterwards root runs site.yml there once more: even then the machine's own configuration stays as it was.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 54321  # a user id that nothing on the machine belongs to
WATCHED = ("/etc", "/opt", "/usr/local", "/lib/systemd", "/var/spool/cron")


def snapshot():
    """Every file below WATCHED: path -> (kind and mode, owner, size, time of change)."""
    found = {}
    for top in WATCHED:
        for folder, folders, files in os.walk(top):
            for name in folders + files:
                path = os.path.join(folder, name)
                try:
                    facts = os.lstat(path)
                except OSError:
                    continue
                found[path] = (facts.st_mode, facts.st_uid, facts.st_size, facts.st_mtime_ns)
    return found


def copy_checkout(target):
    """The checkout as git knows it, changes that are not committed yet included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


class User:
    """Who runs the demo: where we are root, a user without any right and with a home of its own."""

    def __init__(self, home, checkout):
        self.checkout = checkout
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        self.environment = {**kept, "HOME": str(home), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        self.become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        if os.geteuid() != 0:
            self.become = []
            self.environment["PATH"] = os.environ["PATH"]

    def have(self, top):
        """All below `top` is the user's own."""
        for path in [top, *top.rglob("*")] if self.become else []:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def run(self, *command):
        return subprocess.run(
            [*self.become, *command],
            cwd=self.checkout,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def user():
    # Not tmp_path: only root may enter that.
    top = Path(tempfile.mkdtemp(prefix="trainyard demo "))
    top.chmod(0o755)
    checkout = top / "trainyard"
    copy_checkout(checkout)
    made = User(top, checkout)
    made.have(top)
    yield made
    shutil.rmtree(top)


@pytest.mark.timeout(1200)
def test_make_demo_from_nothing(user):
    before = snapshot()
    words = ["RUN=first"]
    if not os.environ.get("TRAINYARD_FULL"):  # half as long, and held against the same loss
        (demo,) = re.findall(r"^DEMO := (.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert "steps=1000" in demo
        words.append(f"DEMO={demo.replace('steps=1000', 'steps=500')}")
    shown = user.run("make", "demo", *words)
    assert shown.returncode == 0, shown.stdout[-6000:]

    run = user.checkout / "runs/first"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world"]["hosts"] == ["node1", "node2"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= summary["steps"]
    assert (run / "model/model.safetensors").exists()
    picture = shown.stdout[shown.stdout.index("first: loss by step") :]
    for word in (
        "Loss ",
        "Unigram ",
        "tokens/s over 2 ranks",
        "Sample      Captain Wentworth",
        "runs/first/",
    ):
        assert word in picture
    assert (
        summary["unigram_entropy"] - summary["last_loss"] > 1.3
    )  # make demo itself held the mean against 1.5
    assert len((run / "sample.txt").read_text().split()) > 40

    assert user.run("cp", "-r", "runs/first", "runs/second").returncode == 0
    shown = user.run("make", "compare", "RUNS=first second")
    assert shown.returncode == 0, shown.stdout
    loss = f"{summary['last_loss']:.4f}"
    assert re.search(rf"^loss at the end +{loss} +{loss}$", shown.stdout, re.M), shown.stdout
    assert '"name": "second"' in (run.parent / "first-second.html").read_text()

    shown = user.run("make", "help")
    assert shown.returncode == 0, shown.stdout
    assert {"demo", "test", "lab-down", "clean"} <= {line.split()[0] for line in shown.stdout.splitlines()}

    # With the right to change the machine, site.yml does not.
    again = subprocess.run(
        [".venv/bin/ansible-playbook", "-i", "inventory/local", "site.yml"],
        cwd=user.checkout,
        env={**user.environment, "ANSIBLE_CONFIG": str(user.checkout / "ansible.cfg")},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stdout[-6000:]
    assert re.findall(r"^(\w+) +\d+ ok, (\d+) changed$", again.stdout, re.M) == [
        ("node1", "0"),
        ("node2", "0"),
    ], again.stdout[-3000:]

    after = snapshot()
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    assert not changed, f"changed on the machine: {sorted(changed)[:20]}"

    user.have(user.checkout)  # what root has left there, too
    assert all((user.checkout / name).exists() for name in (".venv", ".trainyard", "trainer/__pycache__"))
    shown = user.run("make", "clean")
    assert shown.returncode == 0, shown.stdout
    left = {path.name for path in user.checkout.iterdir()}
    assert not left & {".venv", ".ansible", "build"}, left
    below = user.checkout / ".trainyard"  # what a run is resumed from stays
    kept = {str(path.relative_to(below)) for path in below.rglob("*") if not path.is_dir()}
    assert any(re.search(r"^node\d/var/runs/.*/step-\d+/model.safetensors$", one) for one in kept), kept
    assert any(re.search(r"^node\d/etc/runs/.*\.yaml$", one) for one in kept), kept
    assert [one for one in kept if not re.search(r"^node\d/(var|etc)/runs/", one)] == []
    assert not list(user.checkout.rglob("__pycache__"))
    assert (run / "model/model.safetensors").exists() and (run / "report.html").exists()
