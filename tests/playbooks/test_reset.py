"""reset.yml on two nodes of this machine: all goes where both answers are given, and nothing else."""

import subprocess

import pytest
from yard import ROOT, Yard

pytestmark = pytest.mark.full


@pytest.fixture
def yard(tmp_path):
    return Yard(tmp_path)


def reset(yard, **answers):
    """(exit status, what was said), without a terminal."""
    words = [word for key, value in answers.items() for word in ("-e", f"{key}={value}")]
    done = subprocess.run(
        ["ansible-playbook", "-i", str(yard.inventory), "playbooks/reset.yml", *words],
        cwd=ROOT,
        env=yard.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_one_answer_changes_nothing_and_two_leave_nothing(yard):
    there = sorted(yard.path.glob("nodes/*/opt/*"))
    assert there
    for answers in ({}, {"reset": "node1,node2"}, {"sure": "true"}, {"reset": "node1,node2", "sure": "no"}):
        code, text = reset(yard, **answers)
        assert code != 0 and "Nothing was changed." in text, text
        assert sorted(yard.path.glob("nodes/*/opt/*")) == there
    code, text = reset(yard, reset="node1,node2", sure="true")
    assert code == 0, text
    assert not list(yard.path.glob("nodes/*/opt/*"))
    code, text = reset(yard)
    assert code == 0 and "nothing of Trainyard's is there" in text, text
