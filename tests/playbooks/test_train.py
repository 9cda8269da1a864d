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
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml
from processes import descendants, kill_all
from yard import LONG, ROOT, SMALL, Yard, changed, failures, said, task_names, wait_for


@pytest.fixture
def yard(tmp_path):
    path = tmp_path / "a yard"  # with a space
    path.mkdir()
    yard = Yard(path)
    yield yard
    yard.clear()


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
    assert '"state": "finished"' in (results / "report.html").read_text() and "report.html" in text
    assert re.search(r"first  step 4/4 \(100 %\)  finished  loss \d+\.\d{4}", text)
    assert re.search(r"trainer'? generate .*runs/first'? --prompt", text)
    assert re.search(r"ansible-playbook .*export\.yml -e run=first", text)
    assert not yard.processes()
    told = (yard.node("node2") / "etc/runs/first.env").read_text()
    assert re.search(r"^TRAINYARD_RELEASE=.*/node2/opt/releases/[^/]+-test'?$", told, re.MULTILINE), told
    # Two ranks took part, and saw the same losses.
    other = (yard.node("node2") / "var/runs/first/metrics.jsonl").read_text().splitlines()
    assert {r["step"]: r["loss"] for r in map(json.loads, other) if r["kind"] == "train"} == losses
    assert {row["world_size"] for row in steps if row["kind"] == "train"} == {2}

    # What one rank said, and what was said of late; a rank that is none is told.
    lines = said(yard.play("playbooks/logs.yml", run="first", rank=1)).splitlines()
    told = [line for line in lines if re.search(r"node\d/", line)]
    assert told and all("node2/r1 |" in line for line in told), lines
    late = said(yard.play("playbooks/logs.yml", run="first", since="10m"))
    assert {"node1/r0 |", "node2/r1 |"} <= set(re.findall(r"node\d/r\d \|", late)), late
    for slip, words in (
        ({"since": "yesterday"}, "since: found 'yesterday'; expected a time span"),
        ({"rank": 99}, "rank: found 99; expected one of run first's ranks: 0, 1."),
        ({"folow": "true"}, "-e folow: found an unknown word; expected follow?"),
    ):
        refused = yard.play("playbooks/logs.yml", **slip)
        assert refused.rc and failures(refused)[0].startswith(words), said(refused)
    for book in ("status", "diagnose", "stop", "bench"):
        refused = yard.play(f"playbooks/{book}.yml", detph="full")
        assert refused.rc and failures(refused)[0].startswith("-e detph: found an unknown word"), said(
            refused
        )

    again = yard.play(run="first", **SMALL)
    (message,) = failures(again)
    assert "run first exists on node1, node2 (state: finished)" in message
    assert "-e resume=true" in message and "another name" in message
    assert changed(again) == 0


def test_detached_it_comes_back_when_the_run_trains_and_the_run_goes_on(yard):
    run = yard.play(run="first", detach="true", **{**SMALL, "steps": 100_000})
    assert run.rc == 0, said(run)
    status = yard.status("first", "node1")
    assert status["state"] == "running" and 1 <= status["step"] < 100_000
    assert not (yard.results / "first").exists()
    text = said(run)
    assert "Run first goes on. Watch it: " in text and "train.yml -e run=first -e follow=true" in text
    assert "stop.yml -e run=first" in text
    wait_for(lambda: yard.status("first", "node1")["step"] > status["step"])


def test_two_that_follow_a_run_both_bring_its_results(yard):
    run = yard.play(run="first", detach="true", **SMALL)
    assert run.rc == 0, said(run)
    asked = {"cwd": ROOT, "env": yard.environment(), "stdin": subprocess.DEVNULL, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = yard.command(run="first", follow="true")
    both = [subprocess.Popen(words, **asked, **pipes) for _ in range(2)]
    texts = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], texts
    results = yard.results / "first"
    assert len((results / "metrics.jsonl").read_text().splitlines()) > 4
    assert (results / "logs/node2/rank-1.log").exists() and (results / "model/model.safetensors").exists()
    assert list(results.rglob("*.part")) == [] and "no report of the run" not in "".join(texts)


def test_check_mode_changes_nothing_and_starts_nothing(yard):
    run = yard.play(run="first", arguments="--check", **SMALL)
    assert run.rc == 0, said(run)
    assert not (yard.node("node1") / "var").exists() and not yard.results.exists()


MODEL = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel
from trainer.config import from_mapping
from trainer.data import tokenizer
tokenizer.wrap(tokenizer.train(from_mapping({"vocab_size": 300}))).save_pretrained(sys.argv[1])
GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=48, n_layer=1, n_head=2)).save_pretrained(sys.argv[1])
"""


def test_a_model_and_a_file_of_ones_own(yard, tmp_path):
    """The model's directory is brought to both nodes; the file's settings hold where the command line has none."""
    model, file = tmp_path / "own model", tmp_path / "own.yaml"
    subprocess.run([sys.executable, "-c", MODEL, str(model)], cwd=ROOT, check=True)
    file.write_text(yaml.safe_dump({"sequence_length": 32, "batch_size": 4, "max_samples": 40, "steps": 3}))
    run = yard.play("train.yml", model=model, config=file, steps=2, run="first")
    assert run.rc == 0, said(run)
    trained = json.loads((yard.results / "first/model/config.json").read_text())
    assert (trained["n_embd"], trained["n_layer"]) == (48, 1)
    settings = yaml.safe_load((yard.results / "first/config.yaml").read_text())
    assert (settings["sequence_length"], settings["steps"]) == (32, 2)


def test_a_plan_of_all_hosts_says_what_a_run_takes_and_starts_nothing(yard):
    run = yard.play(run="first", plan="true", **SMALL)
    text = said(run)
    assert run.rc == 0, text
    assert "run 'first': model tiny" in text and "2 ranks on 2 hosts" in text
    assert re.search(r"shares: \d, \d of 4 sequences a step; by these speeds", text)
    for node in ("node1", "node2"):
        assert re.search(rf"{node} +1  cpu +[\d,]+ MiB +[\d,]+ MiB  fits", text), text
        assert not (yard.node(node) / "var/runs/first").exists()
        assert not list((yard.node(node) / "etc/runs").glob("*"))
    assert "fits on all of them: ddp, zero1, zero2, fsdp, offload, infinity" in text
    assert not yard.processes() and not yard.results.exists()
    refused = yard.play(run="first", plan="true", **{**SMALL, "quantize": "4bit"})
    assert refused.rc and "quantize" in failures(refused)[0], said(refused)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "runs"), [("ddp", 3), ("zero1", 2)])
def test_a_smoke_test_comes_first_and_leaves_nothing(yard, strategy, runs):
    """On each host alone, too, unless only all together have room for what is shared out."""
    run = yard.play(run="first", smoke="true", trainer_smoke_steps=1, strategy=strategy, **SMALL)
    assert run.rc == 0, said(run)
    assert len([name for name in task_names(run) if "Follow the run" in name]) == runs
    assert (yard.results / "first/summary.json").exists()
    for node in ("node1", "node2"):
        assert os.listdir(yard.node(node) / "var/runs") == ["first"]
        assert sorted(os.listdir(yard.node(node) / "etc/runs")) == ["first.env", "first.yaml"]


@pytest.mark.full
def test_killed_in_its_smoke_test_it_is_simply_run_again(yard):
    process = subprocess.Popen(
        yard.command(run="first", smoke="true", trainer_smoke_steps=100_000, **SMALL),
        cwd=ROOT,
        env=yard.environment(),
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: yard.status("smoke-first", "node2").get("step"))
    kill_all(process)
    assert yard.processes()
    run = yard.play(run="first", smoke="true", trainer_smoke_steps=1, **SMALL)
    assert run.rc == 0, said(run)
    assert (yard.results / "first/summary.json").exists()
    assert os.listdir(yard.node("node1") / "var/runs") == ["first"]
    assert not yard.processes()


BROKEN = """#!/bin/sh
echo "trainer: no card answers" >&2
echo "the card fell off the bus" > "$TRAINYARD_RUN_DIR/logs/rank-$RANK_OFFSET.log"
exit 4
"""


@pytest.mark.full
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
    assert "node2/launch | trainer: no card answers" in said(yard.play("playbooks/logs.yml", run="first"))


# ---- leaving it, stopping it, coming back ----


def test_a_stop_names_the_hosts_that_did_not_answer_and_what_becomes_of_the_run_there(yard):
    for node in ("node1", "node2"):
        run_dir = yard.node(node) / "var/runs/first"
        run_dir.mkdir(parents=True)
        (run_dir / "status.json").write_text('{"state": "stopped", "last_checkpoint": 30}')
    inventory = yaml.safe_load(yard.inventory.read_text())
    silent = {
        "ansible_connection": "ssh",
        "ansible_host": "127.0.0.1",
        "ansible_port": 1,
    }  # nobody listens there
    inventory["all"]["children"]["cluster"]["children"]["workers"]["hosts"]["node3"] = silent
    yard.inventory.write_text(yaml.safe_dump(inventory, sort_keys=False))
    text = " ".join(said(yard.play("playbooks/stop.yml", run="first")).split())
    assert (
        "run first: stopped on node1, node2; not asked, since there was no answer: node3; its newest" in text
    )
    assert "Nothing was stopped on node3: the run may go on there, or begin again at the next boot" in text


# A bar, a line of the run, and what each host does, drawn anew. Either host may be the first to tell a step.
FOLLOWED = (
    r"\r(\x1b\[\dA)?\[#*-+\]\x1b\[K\r\nfirst  step [1-9]\d*/[^\r]*\r\n"
    r"  node1  running, computes [^\r]* GiB\x1b\[K\r\n  node2  [a-z]"
)


def leave(yard, how, **extra):
    """Start train.yml on a terminal and, once the run is followed, leave it by `how` (Ctrl-C, a signal, or what is done
    to the run meanwhile). Returns the wait status and what it printed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe("ansible-playbook", yard.command(**extra), yard.environment() | {"TERM": "xterm-256color"})
    text, left, deadline = b"", False, time.monotonic() + 180
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                block = os.read(terminal, 65536)
            except OSError:  # the terminal's other end is closed
                break
            text += block
        if not left and re.search(FOLLOWED.encode(), text):
            left = True
            if how == "Ctrl-C":
                os.write(terminal, b"\x03")
            elif callable(how):
                how()
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
    assert re.search(FOLLOWED, text), text
    step = yard.status("first")["step"]
    wait_for(lambda: yard.status("first")["step"] > step)

    pids = yard.processes()
    code, text = leave(yard, "Ctrl-C", run="first", **LONG)  # the very same command, again
    assert os.waitstatus_to_exitcode(code) == 99, text
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    assert "Run first is active with these very settings: it is followed, and not started again." in words
    assert yard.processes() == pids

    refused = yard.play(run="first", **{**LONG, "lr": 0.5})
    (message,) = failures(refused)
    assert "run first is already active on node1, node2" in message and "-e follow=true" in message
    other = yard.play(run="second", **LONG)
    assert "run first is already active" in failures(other)[0]

    would = yard.play("playbooks/stop.yml", "--check", run="first")
    assert would.rc == 0, said(would)
    assert "run first: would be stopped on node1, node2; " in " ".join(said(would).split())
    assert yard.processes() == pids

    unknown = yard.play("playbooks/stop.yml", run="frist")
    assert failures(unknown) == [
        "run frist: none of node1, node2 knows it (active: first); correct the name after -e run="
    ]
    stopped = yard.play("playbooks/stop.yml", run="first")
    assert stopped.rc == 0, said(stopped)
    assert re.search(
        r"run first: stopped on node1, node2; its newest checkpoint is of step \d+; to go on: "
        r"train.yml -e run=first -e resume=true",
        " ".join(said(stopped).split()),  # Ansible breaks lines where they grow long
    )
    assert yard.status("first")["state"] == "stopped"
    assert not yard.processes()

    step = yard.status("first")["step"]
    # Of the head, another machine by now, nothing is left: the configuration comes from the others, as the weights do.
    (yard.node("node1") / "etc/runs/first.yaml").unlink()
    shutil.rmtree(yard.node("node1") / "var/runs/first")
    resumed = yard.play(run="first", resume="true", steps=step + 2)
    assert resumed.rc == 0, said(resumed)
    assert yard.status("first")["attempt"] == 2
    summary = json.loads((yard.results / "first/summary.json").read_text())
    assert summary["steps"] == step + 2
    kept = yaml.safe_load((yard.results / "first/config.yaml").read_text())
    assert kept["vocab_size"] == SMALL["vocab_size"]  # of the run's own configuration, though not said anew


@pytest.mark.full
def test_a_killed_controller_leaves_the_run_and_it_can_be_followed_again(yard):
    leave(yard, signal.SIGKILL, run="first", **LONG)
    assert yard.processes()
    stops = []
    code, text = leave(
        yard,
        lambda: stops.append(yard.play("playbooks/stop.yml", run="first")),
        run="first",
        follow="true",
    )
    assert stops[0].rc == 0, said(stops[0])
    assert os.waitstatus_to_exitcode(code) == 2, text
    step = yard.status("first")["step"]
    assert f"Run first was stopped at step {step}; it is saved. Resume it: " in text
    rows = [json.loads(line) for line in (yard.results / "first/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, step + 1))


@pytest.mark.full
def test_where_it_does_not_start_on_one_host_what_has_begun_elsewhere_is_ended(yard):
    in_the_way = yard.node("node2") / "var/runs/first/logs/launch.log"  # where a file is to be written
    in_the_way.mkdir(parents=True)
    run = yard.play(run="first", **LONG)
    assert run.rc and not yard.processes(), said(run)
    (told,) = [one for one in failures(run) if "does not start" in one]
    assert "on the others was ended" in told and "does not answer" not in said(run)
    assert re.search(r"go on with it: ansible-playbook .*-e run=first -e resume=true$", told), told
    in_the_way.rmdir()
    again = yard.play(run="first", resume="true", steps=4)
    assert again.rc == 0 and "step 4/4" in said(again), said(again)


@pytest.mark.full
def test_killed_at_the_start_it_is_simply_run_again(yard):
    """The first node was started, the second was not yet, or its launcher went with the controller's last breath."""
    process = subprocess.Popen(
        yard.command(run="first", **SMALL), cwd=ROOT, env=yard.environment(), stdout=subprocess.DEVNULL
    )
    # A launcher is the playbook's own until the module that started it has ended; till then it would die with it.
    wait_for(lambda: set(yard.processes("node1")) - set(descendants(process.pid)))
    kill_all(process)
    yard.clear("node2")
    assert yard.processes("node1") and not yard.processes("node2")
    run = yard.play(run="first", **SMALL)
    assert run.rc == 0, said(run)
    assert (yard.results / "first/summary.json").exists()


# ---- with a dead host ----


def dying(yard, tmp_path, node):
    """The yard's inventory with `node` behind an ssh that says what ssh says of a host that is off.

    While there is a file tmp_path/on, the host is on, which is this machine.
    """
    dead = yaml.safe_load(yard.inventory.read_text())
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\ncase " $* " in *" -O "*) exit ;; esac\n'
        f'for last; do :; done; [ ! -e {shlex.quote(str(tmp_path / "on"))} ] || exec sh -c "$last"\n'
        'echo "ssh: connect to host port 22: Connection timed out" >&2\nexit 255\n'
    )
    ssh.chmod(0o755)
    group = "head" if node == "node1" else "workers"
    dead["all"]["children"]["cluster"]["children"][group]["hosts"][node] = {
        "ansible_connection": "ssh",
        "ansible_ssh_executable": str(ssh),
    }
    inventory = tmp_path / "dead.yml"
    inventory.write_text(yaml.safe_dump(dead, sort_keys=False))
    return inventory


@pytest.mark.full
@pytest.mark.parametrize("node", ["node1", "node2"])
def test_with_a_dead_host_a_run_is_followed_on_the_other_and_resumed_only_where_that_is_asked_for(
    yard, tmp_path, node
):
    other = {"node1": "node2", "node2": "node1"}[node]
    assert yard.play(run="first", checkpoint_every=2, **SMALL).rc == 0
    shutil.rmtree(yard.results)
    yard.inventory = dying(yard, tmp_path, node)

    followed = yard.play(run="first", follow="true")
    text = said(followed)
    assert followed.rc == 0, text
    assert f"{node}: no answer: " in text and "Connection timed out" in text
    assert (yard.results / "first/summary.json").exists() and (yard.results / "first/report.html").exists()
    assert os.listdir(yard.results / "first/logs") == [other]

    resumed = yard.play(run="first", resume="true", steps=6)
    assert resumed.rc != 0 and changed(resumed) == 0
    message = failures(resumed)[-1]
    assert f"{node}: no answer: " in message and "Nothing was changed." in message
    (command,) = re.findall(r"or without, if it is off: (.*)", message)
    assert command.endswith(f"-e run=first -e resume=true -l '!{node}'")
    alone = yard.play(run="first", resume="true", steps=6, arguments=f"-l '!{node}'")
    assert alone.rc == 0, said(alone)
    assert yard.status("first", other)["step"] == 6 and yard.status("first", node)["step"] == 4


@pytest.mark.full
@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_host_that_answers_and_whose_disk_hangs_holds_up_no_one_who_follows(yard, node):
    """Two minutes of silence, and nothing more is asked of it: what reads its run directory would not come back."""
    other = {"node1": "node2", "node2": "node1"}[node]
    assert yard.play(run="first", **SMALL).rc == 0
    shutil.rmtree(yard.results)
    status = yard.node(node) / "var/runs/first/status.json"
    status.unlink()
    os.mkfifo(status)
    began = time.monotonic()
    try:
        followed = yard.play(run="first", follow="true", trainer_unreachable_seconds=5)
    finally:
        with contextlib.suppress(OSError):  # ENXIO: nobody waits for it
            os.close(os.open(status, os.O_WRONLY | os.O_NONBLOCK))
    took, text = time.monotonic() - began, said(followed)
    assert followed.rc == 0 and took < 300, (took, text)
    assert f"{node} unreachab" in text, text
    assert (yard.results / "first/summary.json").exists()
    assert os.listdir(yard.results / "first/logs") == [other]


def test_logs_are_followed_on_a_host_that_was_dead_and_dies_again(yard, tmp_path):
    """Each node has a process that is the run's, and a log."""
    ranks = []
    for node in ("node1", "node2"):
        run_dir = yard.node(node) / "var/runs/first"
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "status.json").write_text(json.dumps({"state": "running", "updated": time.time()}))
        environment = {**os.environ, "TRAINYARD_RUN_DIR": str(run_dir)}
        ranks.append(subprocess.Popen(["sleep", "1000"], env=environment))
    log = yard.node("node2") / "var/runs/first/logs/rank-1.log"

    def says(text):
        with log.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    yard.inventory, on, shown = dying(yard, tmp_path, "node2"), tmp_path / "on", tmp_path / "shown"
    words = [word for word in yard.command(run="first", follow="true") if word != "train.yml"]
    with shown.open("wb") as output:
        process = subprocess.Popen(
            [*words, "playbooks/logs.yml"],
            cwd=ROOT,
            env=yard.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def count(text):
        assert process.poll() is None, shown.read_text()
        return shown.read_text().count(text)

    try:
        log.write_text("00:00:01 of before\n")
        os.utime(log, (time.time() - 3600,) * 2)
        wait_for(lambda: count("node2: no answer: ") == 1, 100)
        on.touch()
        wait_for(lambda: count("node2 answers") == 1)
        says("one")
        wait_for(lambda: count("node2/r1 | one") == 1)
        on.unlink()
        wait_for(lambda: count("node2: no answer: ") == 2)
        says("two")
        on.touch()
        wait_for(lambda: count("node2/r1 | two") == 1 and count("node2 answers") == 2)
        assert count("of before") == 0 and count("node1: no answer") == 0
        on.unlink()
        wait_for(lambda: count("node2: no answer: ") == 3)
        ranks[0].kill()
        ranks[0].wait()
        # The run has ended where it answers: nobody waits for the dead one.
        assert process.wait(120) == 0, shown.read_text()
    finally:
        kill_all(process)
        for rank in ranks:
            rank.kill()
            rank.wait()


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
    return {}, None, ["-test, node2 has newer"]


def another_checkouts(yard):
    """As after a `git pull`, before site.yml: the release may not know a key that RUN.yaml has."""
    for node in ("node1", "node2"):
        yard.deploy(node, release="0.1.0+g01234567-abc")
    found = "node1, node2: found the release 0.1.0+g01234567-abc of the trainer"
    return {}, None, [found, "this checkout's", "have this one there: ansible-playbook -i ", "site.yml\n"]


def unknown_run(yard):
    return {"run": "nobody", "resume": "true"}, None, ["run nobody", "nothing to resume"]


@pytest.mark.parametrize(
    "make", [occupied, full, no_trainer, another_release, another_checkouts, unknown_run]
)
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


MEANWHILE = """\
- hosts: all:localhost
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: trainer, tasks_from: ask, rolespec_validate: false}
- hosts: cluster
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: trainer, tasks_from: plan, rolespec_validate: false}
    - run_process:
        run_dir: "{{ trainer_state_dir }}/runs/theirs"
        env_file: /dev/null
        command: [sleep, "600"]
    - ansible.builtin.set_fact: {__trainer_offered: [{key: dataset, name: brought, path: data/brought}]}
    - ansible.builtin.include_role: {name: trainer, tasks_from: start, rolespec_validate: false}
"""


def test_a_run_that_somebody_started_while_data_was_brought_is_seen(yard):
    """As one finds it who waits for a hundred GB."""
    for node in ("node1", "node2"):
        (yard.node(node) / "var/runs/theirs/logs").mkdir(parents=True)
    book = yard.path / "meanwhile.yml"
    book.write_text(MEANWHILE)
    run = yard.play(str(book), run="ours", **SMALL)
    assert run.rc != 0
    (message,) = failures(run)
    assert "run theirs is already active on node1, node2" in message
    assert message.endswith("What was brought stays; the run was not started.")
    assert not yard.status("ours") and not (yard.node("node1") / "var/runs/ours").exists()
