"""preflight.yml on this machine as two nodes: steps on both, faults of both, and the exit status."""

import json
import shlex
import socket
import subprocess
import time

import pytest
import yaml
from yard import ROOT, SMALL, Yard, changed, failures, said


@pytest.fixture(scope="module")
def yard(tmp_path_factory):
    yard = Yard(tmp_path_factory.mktemp("preflight"))
    yield yard
    yard.clear()


def result(yard):
    return json.loads((yard.results / "preflight/last.json").read_text())


def test_two_healthy_nodes_pass_and_nothing_of_it_stays(yard):
    run = yard.play("playbooks/preflight.yml")
    text = said(run)
    assert (run.status, run.rc) == ("successful", 0), text
    assert "train.yml -e run=NAME" in text.split("Next: ")[1]
    found = {one["check"]: one for one in result(yard)["checks"]}
    assert found["steps"]["result"] == "pass" and "2 steps on 2 ranks" in found["steps"]["found"]
    assert found["machines"]["result"] == "skip"
    assert {one["result"] for one in found.values()} == {"pass", "skip"}, text
    for node in ("node1", "node2"):
        assert not list((yard.node(node) / "var/runs").iterdir())
    assert yard.processes() == []
    assert list((yard.results / "preflight").glob("baseline-*.json"))


@pytest.mark.full
def test_a_burn_loads_every_node_for_half_of_its_minutes(yard):
    begin = time.monotonic()
    run = yard.play("playbooks/preflight.yml", depth="burn", preflight_burn_minutes=1)
    assert time.monotonic() - begin > 30
    assert run.rc == 0, said(run)
    (found,) = [one for one in result(yard)["checks"] if one["check"] == "burn"]
    assert (found["result"], found["hosts"]) == ("pass", ["node1", "node2"])
    assert found["found"].endswith("TFLOP/s, each product the same")


@pytest.mark.full
def test_a_warning_ends_with_1(yard):
    """By ansible-playbook itself: ansible-runner brings callbacks of its own instead of the checkout's."""
    (yard.results / "two words.txt").write_text("It was.")
    typed = ["run=mine", "model=tiny", json.dumps({"dataset": str(yard.results / "two words.txt")})]
    done = play(yard, "preflight_steps=0", "preflight_memory_gb=0.001", *typed)
    assert done.returncode == 0, done.stdout + done.stderr
    # What is to be typed next is of the run that was asked about.
    _, _, following = done.stdout.partition("Next: ")
    words = shlex.split(following.splitlines()[0])
    assert words[words.index("-e") :] == [word for one in typed for word in ("-e", one)]
    # A card that was there the last time.
    (baseline,) = (yard.results / "preflight").glob("baseline-*.json")
    before = json.loads(baseline.read_text())
    before["best"]["gpus"] = {node: (count, before["time"]) for node, count in (("node1", 1), ("node2", 0))}
    baseline.write_text(json.dumps(before))
    done = play(yard, "preflight_steps=0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WARN  baseline: node1: node1: 0 GPUs, 1 on" in done.stdout and "cure:  rm " in done.stdout
    # Before a run it keeps nothing from starting; a failure does.
    settings = [f"{key}={value}" for key, value in SMALL.items()]
    done = play(yard, "preflight_steps=0", "run=first", *settings, then="train.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN  baseline" in done.stdout and "step 4/4" in done.stdout
    done = play(yard, "preflight_memory_gb=99999", "run=second", *settings, then="train.yml")
    assert done.returncode == 2 and "Preflight failed: memory" in done.stdout, done.stdout + done.stderr
    assert not (yard.node("node1") / "var/runs/second").exists()
    baseline.unlink()


def play(yard, *extra, then=None):
    books = ["playbooks/preflight.yml", *([then] if then else [])]
    words = ["ansible-playbook", "-i", str(yard.inventory), *books]
    return subprocess.run(
        [*words, *(word for one in extra for word in ("-e", one))],
        cwd=ROOT,
        env=yard.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_a_fault_ends_with_2_and_no_step_is_tried(yard):
    with socket.create_server(("", yard.port)):
        run = yard.play("playbooks/preflight.yml")
    text = said(run)
    assert run.rc == 2 and "Next: " not in text, text
    assert (
        "FAIL  port: node1:" in text
        and "trainer_port=" in text
        and "not tried, since this failed: port" in text
    )
    assert failures(run) == ["Preflight failed: port. What to do stands above."]


def test_a_dead_host_is_given_up_by_a_connection_of_its_own(yard, tmp_path):
    """An earlier command's connection may wait a minute for a host that is gone: preflight does not use it."""
    dead = yaml.safe_load(yard.inventory.read_text())
    ssh, asked = tmp_path / "ssh", tmp_path / "asked"
    # Asked by the way of other playbooks it would wait; by preflight's it says what ssh says once its patience is over.
    ssh.write_text(
        f'#!/bin/sh\ncat > /dev/null\necho "$*" >> {asked}\n'
        f'case "$*" in *"{tmp_path}/.ansible/preflight/"*) ;; *) sleep 60 ;; esac\n'
        'echo "ssh: connect to host node2 port 22: Connection timed out" >&2\nexit 255\n'
    )
    ssh.chmod(0o755)
    dead["all"]["children"]["cluster"]["children"]["workers"]["hosts"]["node2"] = {
        "ansible_connection": "ssh",
        "ansible_ssh_executable": str(ssh),
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump(dead))
    begin = time.monotonic()
    done = subprocess.run(
        ["ansible-playbook", "-i", str(inventory), "playbooks/preflight.yml"],
        cwd=ROOT,
        env={**yard.environment(), "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert time.monotonic() - begin < 60, done.stdout
    assert done.returncode == 2, done.stdout + done.stderr
    assert "FAIL  answer: node2: " in done.stdout and "Connection timed out" in done.stdout, done.stdout
    words = asked.read_text().splitlines()
    assert 1 <= len(words) <= 2  # once for each look at the host, and no more
    for line in words:
        assert (
            "ControlPersist=60s" in line and "ConnectTimeout=5 " in line and "ServerAliveInterval=3" in line
        )
    kept = result(yard)
    failed = [(one["check"], one["hosts"]) for one in kept["checks"] if one["result"] == "fail"]
    assert kept["result"] == "fail" and failed == [("answer", ["node2"])]


def test_check_mode_changes_nothing_and_tries_nothing(yard):
    run = yard.play("playbooks/preflight.yml", "--check")
    assert run.rc == 0 and changed(run) == 0, said(run)
    found = {one["check"]: one["result"] for one in result(yard)["checks"]}
    assert found["steps"] == "skip"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"depth": "deep"}, "depth: found deep; expected one of quick, full, burn"),
        ({"preflight_steps": "two"}, "preflight_steps"),
        ({"preflight_stepz": "2"}, "preflight_steps"),
        ({"dept": "full"}, "-e dept: found an unknown word; expected depth?"),
    ],
)
def test_bad_words_are_refused_before_any_host_is_touched(yard, extra, words):
    run = yard.play("playbooks/preflight.yml", **extra)
    assert run.rc != 0 and words in failures(run)[0]
