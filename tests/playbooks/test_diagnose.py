"""diagnose.yml and status.yml beside a host that is dead, and ranks whose stacks are not to be had."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from yard import ROOT, Yard

# Of the ranks 3 and 7 it never has a stack.
SPY = """#!/bin/sh
grep -qzE '^RANK=[37]$' "/proc/$5/environ" && exec sleep 985
sleep 1
echo '[{"thread_name": "MainThread", "frames": [{"name": "turn", "short_filename": "trainer/loop.py", "line": 7},
      {"name": "main", "short_filename": "a.py", "line": 1}, {"name": "b", "short_filename": "a.py", "line": 2},
      {"name": "the_outermost", "short_filename": "a.py", "line": 3}]}]'
"""


@pytest.fixture
def yard(tmp_path):
    """Two nodes with four ranks each that do nothing, and a third one whose SSH never says a word."""
    yard, ranks = Yard(tmp_path), []
    spy = tmp_path / "env/bin/py-spy"
    spy.parent.mkdir(parents=True)
    spy.write_text(SPY)
    spy.chmod(0o755)
    for host, node in enumerate(("node1", "node2")):
        release = yard.node(node) / "opt/current"
        (release / "environment").write_text(str(tmp_path / "env"))
        run_dir = yard.node(node) / "var/runs/first"
        run_dir.mkdir(parents=True)
        status = (
            f'{{"state": "running", "step": 3, "steps": 9, "world_size": 12, "updated": {time.time() - 600}}}'
        )
        (run_dir / "status.json").write_text(status)
        for rank in range(4 * host, 4 * host + 4):
            place = {"TRAINYARD_RUN_DIR": str(run_dir), "RANK": str(rank)}
            sleeps = [sys.executable, "-c", "import time; time.sleep(900)", "train"]
            ranks.append(subprocess.Popen(sleeps, env={**os.environ, **place}))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        local = yaml.safe_load(yard.inventory.read_text())
        dead = {
            "ansible_connection": "ssh",
            "ansible_host": "127.0.0.1",
            "ansible_port": silent.getsockname()[1],
        }
        local["all"]["children"]["cluster"]["children"]["workers"]["hosts"]["node3"] = dead
        yard.inventory.write_text(yaml.safe_dump(local))
        yield yard
    for rank in ranks:
        rank.kill()
        rank.wait()


def answer(yard, playbook):
    """What was said, and the seconds it took, as this machine's cores would have been its own."""
    begin = time.monotonic()
    done = subprocess.run(
        ["ansible-playbook", "-i", str(yard.inventory), *f"playbooks/{playbook}".split()],
        cwd=ROOT,
        env=yard.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    seconds = time.monotonic() - begin
    return done.stdout + done.stderr, seconds / max(1.0, os.getloadavg()[0] / os.cpu_count())


def test_they_answer_within_ten_seconds(yard):
    text, seconds = answer(yard, "diagnose.yml")
    assert "node3: no answer: " in text and "node3 does not answer" in text, text
    assert text.count("turn (trainer/loop.py:7) < main (a.py:1) < b (a.py:2)") == 6, text
    for node, rank in (("node1", 3), ("node2", 7)):
        assert re.search(rf"{node}: step 3, .*\n  no answer within 4 s: rank {rank}'s stack\n", text), text
    assert seconds < 10, text
    # The screen has three frames of each, the file all.
    file = yard.results / "first/diagnosis.txt"
    assert f"Every rank's whole stack: {os.path.relpath(file, ROOT)}" in text and "the_outermost" not in text
    assert file.read_text().count("the_outermost (a.py:3)") == 6
    text, seconds = answer(yard, "status.yml")
    assert re.search(r"node3 +no answer", text) and seconds < 10, text


def test_a_host_that_answers_and_then_does_nothing_is_not_waited_for_for_ever(yard, tmp_path):
    """As one whose disk hangs: sshd answers, and what it starts does not. Three playbooks wait side by side."""
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 986\n")
    hangs.chmod(0o755)
    local = yaml.safe_load(yard.inventory.read_text())
    half = {"ansible_python_interpreter": str(hangs), "local_root": str(yard.node("node3").parent)}
    local["all"]["children"]["cluster"]["children"]["workers"]["hosts"]["node3"] = half
    yard.inventory.write_text(yaml.safe_dump(local))
    expected = {
        "status.yml": r"node3: no answer within 30 s, though it lets us in: a disk or a mount that hangs",
        "diagnose.yml": r"node3 does not answer",
        "stop.yml -e run=first": r"(?s)run first: .*not asked, since there was no answer: node3",
    }

    def timed(playbook):
        begin = time.monotonic()
        return answer(yard, playbook)[0], time.monotonic() - begin

    try:
        with ThreadPoolExecutor() as pool:
            answers = dict(zip(expected, pool.map(timed, expected), strict=True))
    finally:
        subprocess.run(["pkill", "-f", "^sleep 986$"], check=False)
    for playbook, (text, seconds) in answers.items():
        assert 30 <= seconds < 90, (playbook, text)
        assert re.search(expected[playbook], " ".join(text.split())), (playbook, text)
