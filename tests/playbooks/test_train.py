"""train.yml on two nodes of this machine: a run from its start to its results, and what is refused before it.

The nodes have the checkout's trainer, run by the tests' own Python: site.yml is not what is tested here.
"""

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ansible_runner
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"steps": 4, "sequence_length": 32, "batch_size": 4, "vocab_size": 300, "max_samples": 40}
LONG = {**SMALL, "steps": 100_000}
RUN_VARIABLE = "TRAINYARD_RUN_DIR="


class Yard:
    """Two nodes in a directory of their own, with a trainer deployed on each."""

    def __init__(self, path):
        self.path, self.results = path, path / "runs"
        local = yaml.safe_load((ROOT / "inventory/local/hosts.yml").read_text())
        variables = local["all"]["children"]["cluster"]["vars"]
        variables["local_root"] = str(path / "nodes")
        variables["trainer_results_dir"] = str(self.results)
        variables["trainer_port"] = free_port()
        variables["trainer_refresh_seconds"] = 0.5
        variables["trainer_log_seconds"] = 1
        self.port = variables["trainer_port"]
        self.inventory = path / "hosts.yml"
        self.inventory.write_text(yaml.safe_dump(local, sort_keys=False))
        for node in ("node1", "node2"):
            self.deploy(node)

    def node(self, name):
        return self.path / "nodes" / name

    def deploy(self, node, release="test", script=None):
        """Give a node a release whose `trainer` is the checkout's, or `script`."""
        opt = self.node(node) / "opt"
        program = opt / "releases" / release / "bin/trainer"
        program.parent.mkdir(parents=True, exist_ok=True)
        python = shlex.quote(sys.executable)
        program.write_text(
            script
            or f'#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\nexec {python} -m trainer "$@"\n'
        )
        program.chmod(0o755)
        with contextlib.suppress(FileNotFoundError):
            (opt / "current").unlink()
        (opt / "current").symlink_to(f"releases/{release}")

    def environment(self):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        return {
            **kept,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_HOME": str(self.path / "ansible"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def play(self, playbook="train.yml", arguments="", **extra):
        """Run a playbook by ansible-runner, extra variables as an operator types them; returns the run."""
        # Ansible splits what follows -e at spaces, as a shell does.
        words = [
            "-e " + shlex.quote(f"{key}={shlex.quote(str(value)) if isinstance(value, Path) else value}")
            for key, value in extra.items()
        ]
        runner = self.path / f"runner-{time.monotonic_ns()}"
        runner.mkdir()
        return ansible_runner.run(
            private_data_dir=str(runner),
            project_dir=str(ROOT),
            playbook=playbook,
            inventory=str(self.inventory),
            cmdline=" ".join([*words, arguments]).strip() or None,
            envvars=self.environment(),
            quiet=True,
        )

    def command(self, **extra):
        words = ["ansible-playbook", "-i", str(self.inventory), "train.yml"]
        return words + [word for key, value in extra.items() for word in ("-e", f"{key}={value}")]

    def processes(self):
        """Pids of all that runs for this yard."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{RUN_VARIABLE}{self.path}".encode() in environ.read_bytes():
                    found.append(int(environ.parent.name))
        return found

    def status(self, run, node="node1"):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.node(node) / "var/runs" / run / "status.json").read_text())
        return {}

    def clear(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def yard(tmp_path):
    path = tmp_path / "a yard"  # with a space
    path.mkdir()
    yard = Yard(path)
    yield yard
    yard.clear()


def failures(run):
    """The message of every failed task."""
    return [
        event["event_data"]["res"]["msg"]
        for event in run.events
        if event["event"] in ("runner_on_failed", "runner_on_unreachable")
    ]


def task_names(run):
    return [e["event_data"]["task"] for e in run.events if e["event"] == "playbook_on_task_start"]


def changed(run):
    return sum(run.stats["changed"].values())


def said(run):
    return re.sub(r"\x1b\[[0-9;]*m", "", run.stdout.read())


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        time.sleep(0.2)


# ---- a run ----


def test_a_run_from_its_start_to_its_results(yard):
    run = yard.play(run="first", **SMALL)
    text = said(run)
    assert run.rc == 0, text
    results = yard.results / "first"
    steps = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in steps if row["kind"] == "train"}
    assert list(losses) == [1, 2, 3, 4]
    summary = json.loads((results / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["last_loss"] == losses[4]
    assert json.loads((results / "status.json").read_text())["state"] == "finished"
    assert yaml.safe_load((results / "config.yaml").read_text())["steps"] == 4
    assert (results / "model/config.json").exists() and (results / "model/model.safetensors").exists()
    assert (results / "logs/node1/rank-0.log").exists() and (results / "logs/node2/rank-1.log").exists()
    assert re.search(r"first  step 4/4 \(100 %\)  finished  loss \d+\.\d{4}", text)
    assert re.search(r"trainer'? generate .*runs/first'? --prompt", text)
    assert not yard.processes()
    # Two ranks took part, and saw the same losses.
    other = (yard.node("node2") / "var/runs/first/metrics.jsonl").read_text().splitlines()
    assert {r["step"]: r["loss"] for r in map(json.loads, other) if r["kind"] == "train"} == losses
    assert {row["world_size"] for row in steps if row["kind"] == "train"} == {2}

    again = yard.play(run="first", **SMALL)
    (message,) = failures(again)
    assert "run first exists on node1, node2 (state: finished)" in message
    assert "-e resume=true" in message and "another name" in message
    assert changed(again) == 0


def test_check_mode_changes_nothing_and_starts_nothing(yard):
    run = yard.play(run="first", arguments="--check", **SMALL)
    assert run.rc == 0, said(run)
    assert not (yard.node("node1") / "var").exists() and not yard.results.exists()


def test_a_smoke_test_comes_first_and_leaves_nothing(yard):
    run = yard.play(run="first", smoke="true", trainer_smoke_steps=1, **SMALL)
    assert run.rc == 0, said(run)
    assert len([name for name in task_names(run) if "Follow the run" in name]) == 3
    assert (yard.results / "first/summary.json").exists()
    for node in ("node1", "node2"):
        assert os.listdir(yard.node(node) / "var/runs") == ["first"]
        assert sorted(os.listdir(yard.node(node) / "etc/runs")) == ["first.env", "first.yaml"]


BROKEN = """#!/bin/sh
echo "the card fell off the bus" > "$TRAINYARD_RUN_DIR/logs/rank-$RANK_OFFSET.log"
exit 4
"""


def test_a_smoke_test_names_the_host_that_fails_alone(yard):
    yard.deploy("node2", script=BROKEN)
    run = yard.play(run="first", smoke="true", trainer_smoke_steps=1, **SMALL)
    assert run.rc != 0
    (message,) = failures(run)
    assert message.startswith("Smoke test, each host alone: ")
    assert "failed on node2" in message and "out of memory (exit code 4)" in message
    assert "the card fell off the bus" in message
    assert "node1: finished" in message
    assert "The run itself was not started." in message
    assert not (yard.node("node1") / "var/runs/first").exists()


def test_a_host_that_fails_is_named_with_its_last_lines_and_the_others_are_stopped(yard):
    yard.deploy("node2", script=BROKEN)
    run = yard.play(run="first", **LONG)
    assert run.rc != 0
    (message,) = failures(run)
    assert "Run first failed on node2" in message and "out of memory (exit code 4)" in message
    assert "the card fell off the bus" in message
    assert "Lower micro_batch_size" in message and "-e run=first -e resume=true" in message
    assert not yard.processes()
    assert "fell off" in (yard.results / "first/logs/node2/rank-1.log").read_text()
    assert "Traceback" not in said(run)


# ---- leaving it, stopping it, coming back ----


def leave(yard, how, **extra):
    """Start train.yml on a terminal and, once the run is followed, leave it by `how` (Ctrl-C, or a signal)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe("ansible-playbook", yard.command(**extra), yard.environment())
    text, left, deadline = b"", False, time.monotonic() + 180
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                block = os.read(terminal, 65536)
            except OSError:  # the terminal's other end is closed
                break
            text += block
        if not left and re.search(rb"step [1-9]\d*/", text):
            left = True
            if how == "Ctrl-C":
                os.write(terminal, b"\x03")
            else:
                os.kill(pid, how)
    else:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"ansible-playbook did not end: {text.decode()}")
    os.close(terminal)
    return os.waitpid(pid, 0)[1], text.decode()


def test_ctrl_c_leaves_the_run_running_and_says_how_to_come_back(yard):
    code, text = leave(yard, "Ctrl-C", run="first", **LONG)
    assert os.waitstatus_to_exitcode(code) == 99, text  # Ansible's own for a user's interrupt
    assert "Traceback" not in text
    for words in (
        "goes on without this terminal",
        "-e follow=true",
        "playbooks/stop.yml -e run=first",
        "-e resume=true",
    ):
        assert words in text
    assert "\r\x1b[K" in text  # one line, redrawn
    step = yard.status("first")["step"]
    wait_for(lambda: yard.status("first")["step"] > step)

    refused = yard.play(run="first", **LONG)
    (message,) = failures(refused)
    assert "run first is already active on node1, node2" in message and "-e follow=true" in message
    other = yard.play(run="second", **LONG)
    assert "run first is already active" in failures(other)[0]

    stopped = yard.play("playbooks/stop.yml", run="first")
    assert stopped.rc == 0, said(stopped)
    assert yard.status("first")["state"] == "stopped"
    assert not yard.processes()

    step = yard.status("first")["step"]
    resumed = yard.play(run="first", resume="true", steps=step + 2)
    assert resumed.rc == 0, said(resumed)
    assert yard.status("first")["attempt"] == 2
    summary = json.loads((yard.results / "first/summary.json").read_text())
    assert summary["steps"] == step + 2
    kept = yaml.safe_load((yard.results / "first/config.yaml").read_text())
    assert kept["vocab_size"] == SMALL["vocab_size"]  # of the run's own configuration, though not said anew


def test_a_killed_controller_leaves_the_run_and_it_can_be_followed_again(yard):
    leave(yard, signal.SIGKILL, run="first", **{**SMALL, "steps": 60})
    assert yard.processes()
    run = yard.play(run="first", follow="true")
    assert run.rc == 0, said(run)
    assert json.loads((yard.results / "first/summary.json").read_text())["steps"] == 60


def test_killed_at_the_start_it_is_simply_run_again(yard):
    """The first node was started, the second was not yet."""
    process = subprocess.Popen(
        yard.command(run="first", **SMALL),
        cwd=ROOT,
        env={**yard.environment(), "ANSIBLE_FORKS": "1"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(yard.processes)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run = yard.play(run="first", **SMALL)
    assert run.rc == 0, said(run)
    assert (yard.results / "first/summary.json").exists()


# ---- what is refused ----


def bad_line(path):
    file = path / "data.jsonl"
    file.write_text('{"text": "a"}\n{oops\n')
    return file


def bad_config(path):
    file = path / "c.yaml"
    file.write_text("seed: 1\nlerning_rate: 3\n")
    return file


REFUSED = {
    "an unknown key": (lambda _: {"batchsize": 3}, ["batchsize", "did you mean 'batch_size'?"]),
    "a bad value": (lambda _: {"steps": "many"}, ["-e: steps", "whole number", "'many'"]),
    "an unknown strategy": (lambda _: {"strategy": "fdsp"}, ["strategy", "ddp"]),
    "a bad run name": (lambda _: {"run": "../etc"}, ["'../etc'", "letter or digit"]),
    "a space": (lambda _: {"run": "my run"}, ["-e … run: expected key=value", "quote it twice"]),
    "no such model": (lambda _: {"model": "/no/such"}, ["model: /no/such", "found nothing"]),
    "no such dataset": (lambda _: {"dataset": "no.jsonl"}, ["dataset: no.jsonl", "no such file"]),
    "a bad line": (lambda path: {"dataset": bad_line(path)}, ["data.jsonl:2: not JSON"]),
    "a bad file": (lambda path: {"config": bad_config(path)}, ["c.yaml:2", "unknown key 'lerning_rate'"]),
    "no such file": (lambda path: {"config": path / "none.yaml"}, ["none.yaml: no such file"]),
    "resume what": (lambda _: {"resume": "true"}, ["which run?"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_host_is_touched(yard, case):
    make, words = REFUSED[case]
    run = yard.play(**make(yard.path))
    assert run.rc != 0
    (message,) = failures(run)
    for word in [*words, "Nothing was started."]:
        assert word in message
    assert "Traceback" not in said(run)
    plays = [e["event_data"]["play"] for e in run.events if e["event"] == "playbook_on_play_start"]
    assert plays == ["On the controller, before any host is touched"]
    assert not (yard.node("node1") / "var").exists()


def occupied(yard):
    server = socket.create_server(("127.0.0.1", yard.port))
    return {}, server, [f"node1: port {yard.port}", f"process {os.getpid()}", "-e trainer_port="]


def full(yard):
    return {"trainer_min_free_gb": 10**9}, None, ["GB free below", "trainer_min_free_gb"]


def no_trainer(yard):
    (yard.node("node2") / "opt/current").unlink()
    return {}, None, ["node2: the trainer is not deployed there; run site.yml first"]


def another_release(yard):
    yard.deploy("node2", release="newer")
    return {}, None, ["node1 has test, node2 has newer"]


def unknown_run(yard):
    return {"run": "nobody", "resume": "true"}, None, ["run nobody", "nothing to resume"]


@pytest.mark.parametrize("make", [occupied, full, no_trainer, another_release, unknown_run])
def test_refused_before_anything_is_changed(yard, make):
    extra, held, words = make(yard)
    run = yard.play(**{"run": "first", **extra})
    if held:
        held.close()
    assert run.rc != 0
    (message,) = failures(run)
    for word in [*words, "Nothing was changed."]:
        assert word in message
    assert "Traceback" not in said(run)
    assert changed(run) == 0
    assert not (yard.node("node1") / "var").exists()
