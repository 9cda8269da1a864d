"""What keeps a run alive where there is no systemd: the module run_process, with a launcher of the test's own."""

import sys

import pytest

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
