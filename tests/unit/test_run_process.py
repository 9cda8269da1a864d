"""What keeps a run alive where there is no systemd: the module run_process, with a launcher of the test's own."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from trainer.commands import launch

LAUNCHER = """import pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
pathlib.Path("up").touch()
while len(asked) < int(sys.argv[1]):
    time.sleep(0.05)
pathlib.Path("word").write_text("stopped")
sys.exit(75)
"""


@pytest.mark.parametrize(("hears", "code"), [(1, "75\n"), (2, "75\n"), (3, None)])
def test_a_launcher_is_asked_again_before_it_is_killed(load_module, tmp_path, monkeypatch, hears, code):
    """It has the last word then: a run that waits for this one would wait for ever for `running` to change."""
    module = load_module("run_process")
    monkeypatch.setattr(module, "LAST_CALL", 2.0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "RUN.env").write_text("")
    module.start(str(tmp_path), str(tmp_path / "RUN.env"), [sys.executable, "-c", LAUNCHER, str(hears)])
    while not (tmp_path / "up").exists():
        pass
    module.stop(str(tmp_path), 1.0)
    assert not module.run_processes(str(tmp_path))
    assert (tmp_path / "word").exists() == bool(code)
    assert ((tmp_path / "exit").read_text() if code else None) == code
    assert launch._has_ended(tmp_path)
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["state"] == "stopped" and ("was killed" in told["reason"]) is (code is None)


# Its rank outlives it, as one does that saves.
KILLED = """import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import pathlib, time; pathlib.Path('up').touch(); time.sleep(2); "
                  "pathlib.Path('status.json').write_text('{\\"state\\": \\"ending\\", \\"step\\": 7}')"])
time.sleep(600)
"""


CODE = """import os, sys
code = int(sys.argv[1])
sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


def wait_for(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(module, run_dir, text, *words):
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "RUN.env").write_text("")
    module.start(str(run_dir), str(run_dir / "RUN.env"), [sys.executable, "-c", text, *words])


def test_of_a_launcher_that_was_killed_the_keeper_has_the_last_word_once_no_rank_is_left(
    load_module, tmp_path
):
    """Nothing starts it again, and a run that is queued behind it goes by status.json alone."""
    module = load_module("run_process")
    start(module, tmp_path, KILLED)
    wait_for((tmp_path / "up").exists)
    (tmp_path / "status.json").write_text('{"state": "running", "step": 5, "launch": "now"}')
    os.kill(int((tmp_path / "launch.pid").read_text()), signal.SIGKILL)
    time.sleep(0.5)
    assert not launch._has_ended(tmp_path) and not (tmp_path / "exit").exists()
    wait_for((tmp_path / "exit").exists)
    told = json.loads((tmp_path / "status.json").read_text())
    assert told.pop("updated") > time.time() - 60 and "its launcher was killed" in told.pop("reason")
    assert told == {"state": "failed", "step": 7, "launch": None} and launch._has_ended(tmp_path)
    wait_for(lambda: not module.run_processes(str(tmp_path)))
    assert (tmp_path / "exit").read_text() == "137\n"


def test_a_stop_tells_of_no_patience_where_the_launcher_was_gone(load_module, tmp_path):
    module = load_module("run_process")
    start(module, tmp_path, KILLED)
    wait_for((tmp_path / "up").exists)
    (tmp_path / "status.json").write_text('{"state": "running", "step": 5, "launch": "now"}')
    os.kill(int((tmp_path / "launch.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: int((tmp_path / "launch.pid").read_text()) not in module.run_processes(str(tmp_path)))
    module.stop(str(tmp_path), 60)
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["state"] == "stopped"
    assert told["reason"] == "stopped on request; its launcher was gone: its last checkpoint counts"


@pytest.mark.parametrize(
    ("before", "code", "after"),
    [
        ('{"state": "starting"}', 3, ("failed", "its launcher ended with 3; logs/launch.log says more")),
        ('{"state": "queued"}', 75, ("stopped", "stopped on request")),
        ('{"state": "starting"}', -15, ("stopped", "stopped on request")),  # before it could hear a TERM
        (None, 3, ("failed", "its launcher ended with 3; logs/launch.log says more")),
        ("half a l", 3, ("failed", "its launcher ended with 3; logs/launch.log says more")),
        (
            '{"state": "failed", "reason": "the card fell off the bus"}',
            3,
            ("failed", "the card fell off the bus"),
        ),
        ('{"state": "finished"}', 0, ("finished", None)),
    ],
)
def test_a_launchers_own_last_word_stands(load_module, tmp_path, before, code, after):
    module = load_module("run_process")
    if before is not None:
        (tmp_path / "status.json").write_text(before)
    start(module, tmp_path, CODE, str(code))
    wait_for((tmp_path / "exit").exists)
    told = json.loads((tmp_path / "status.json").read_text())
    assert (told["state"], told.get("reason")) == after
    assert not list(Path(tmp_path).glob(".*"))
    wait_for(lambda: not module.run_processes(str(tmp_path)))
