"""train.yml on three real hosts: equal to one process, left and found again, and what is said when a host fails."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from plays import Plays
from processes import kill_all

from lab.shell import LabError

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "model": "tiny",
    "dataset": "austen",
    "max_samples": 200,
    "vocab_size": 400,
    "sequence_length": 64,
    "batch_size": 6,
    "steps": 8,
    "lr": 0.001,
}
LONG = {**SETTINGS, "steps": 100_000}


@pytest.fixture(scope="module")
def plays(deployed, tmp_path_factory):
    return Plays(deployed, tmp_path_factory.mktemp("train"))


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def command(plays, playbook, extra):
    words = [f"{key}={value}" for key, value in extra.items()]
    program = Path(sys.executable).with_name("ansible-playbook")
    return [
        str(program),
        "-i",
        str(plays.lab.inventory),
        playbook,
        *(w for word in words for w in ("-e", word)),
    ]


def book(plays, playbook, seconds=400, **extra):
    """Run one of the checkout's playbooks."""
    return plays.book(playbook, seconds=seconds, **extra)


def losses(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


def status(plays, run, host="node1"):
    """The run's status.json on a host; empty before there is one."""
    return json.loads(
        plays.sh(host, f"cat /var/lib/trainyard/runs/{run}/status.json 2>/dev/null || echo {{}}")
    )


def active(plays, run):
    """The hosts on which the run's unit is active."""
    return [
        host
        for host in plays.lab.hosts
        if plays.sh(host, f"systemctl is-active trainyard@{run} || true").strip()
        in ("active", "deactivating")
    ]


def stop(plays, run):
    done = book(plays, "playbooks/stop.yml", run=run)
    assert done.returncode == 0, done.stdout
    assert active(plays, run) == []


def wait_for_step(plays, run, step, seconds=180):
    deadline = time.monotonic() + seconds
    while (status(plays, run).get("step") or 0) < step:
        assert time.monotonic() < deadline, f"step {step} of {run} was not reached: {status(plays, run)}"
        time.sleep(1)


def of_one_process(directory, **settings):
    """The losses of a run of one process on this machine, that nothing meets."""
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump({**settings, "run": "alone", "threads": 1}))
    place = {"TRAINYARD_RUN_DIR": str(directory / "alone"), "TRAINYARD_CACHE_DIR": str(directory / "cache")}
    subprocess.run(
        [sys.executable, "-m", "trainer", "train", str(config)],
        cwd=ROOT,
        env={**os.environ, **place},
        check=True,
        timeout=300,
    )
    return losses(directory / "alone/metrics.jsonl")


def test_three_hosts_give_the_losses_of_one_process(plays, results, tmp_path):
    done = book(plays, "train.yml", run="first", trainer_results_dir=results, **SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    on_three = losses(results / "first/metrics.jsonl")
    rows = [json.loads(line) for line in (results / "first/metrics.jsonl").read_text().splitlines()]
    assert {row["world_size"] for row in rows if row["kind"] == "train"} == {3}

    alone = of_one_process(tmp_path, **SETTINGS)
    assert list(on_three) == list(alone) == list(range(1, SETTINGS["steps"] + 1))
    for step, loss in alone.items():
        assert on_three[step] == pytest.approx(loss, rel=1e-5), f"step {step}"

    assert "step 8/8 (100 %)  finished" in done.stdout
    for host, rank in (("node1", 0), ("node2", 1), ("node3", 2)):
        assert (results / f"first/logs/{host}/rank-{rank}.log").stat().st_size > 0
        environment = plays.sh(host, "cat /etc/trainyard/runs/first.env")
        assert f"NODE_RANK={rank}\n" in environment and "GLOO_SOCKET_IFNAME=eth0\n" in environment
        assert f"CLUSTER_ADDRESS={plays.lab.host(host).address}\n" in environment
    for name in ("config.yaml", "summary.json", "status.json", "model/model.safetensors"):
        assert (results / "first" / name).exists()


@pytest.mark.full
def test_a_dataset_of_the_controller_is_brought_to_every_host(plays, results, tmp_path):
    data = tmp_path / "talk.jsonl"
    data.write_text("".join(json.dumps({"text": f"Sentence number {n} of many."}) + "\n" for n in range(300)))
    small = {**SETTINGS, "steps": 2, "dataset": data, "max_samples": 300}
    done = book(plays, "train.yml", run="own-data", trainer_results_dir=results, **small)
    assert done.returncode == 0, done.stdout + done.stderr
    named = yaml.safe_load((results / "own-data/config.yaml").read_text())["dataset"]
    assert named.startswith("/var/lib/trainyard/data/") and named.endswith("/talk.jsonl")
    for host in ("node1", "node2", "node3"):
        assert plays.sh(host, f"sha256sum < {named}") == plays.sh("node1", f"sha256sum < {named}")
        assert plays.sh(host, f"stat -c %a {named}").strip() == "640"

    # Another machine in the head's place has nothing of it, and is given all: the data, too.
    plays.sh(
        "node1",
        "rm -r /var/lib/trainyard/runs/own-data /var/lib/trainyard/data /etc/trainyard/runs/own-data.*",
    )
    done = book(plays, "train.yml", run="own-data", resume="true", steps=4, trainer_results_dir=results)
    assert done.returncode == 0, done.stdout + done.stderr
    assert plays.sh("node1", f"sha256sum < {named}") == plays.sh("node2", f"sha256sum < {named}")
    assert plays.sh("node1", f"stat -c %U:%G:%a {named} /var/lib/trainyard/data").split() == [
        "root:trainyard:640",
        "root:trainyard:750",
    ]
    for host in ("node1", "node2", "node3"):
        assert status(plays, "own-data", host)["step"] == 4
    assert list(losses(results / "own-data/metrics.jsonl")) == [1, 2, 3, 4]


@pytest.fixture
def shared(plays, tmp_path):
    """A directory that all hosts have at one path: one disk, for they have one kernel."""
    image, place = tmp_path / "disk.img", "/srv/own"
    subprocess.run(["mkfs.ext4", "-q", image, "16M"], check=True)
    attach = ["losetup", "--find", "--show", image]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    try:
        for host in plays.lab.hosts:
            node = f"mknod /dev/own b 7 {device.removeprefix('/dev/loop')}"
            plays.sh(host, f"{node}; mkdir {place}; mount /dev/own {place}")
        yield place
    finally:
        for host in plays.lab.hosts:
            plays.sh(host, f"! mountpoint -q {place} || umount {place}; rm -rf {place} /dev/own")
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.mark.full
def test_a_dataset_in_a_directory_that_all_hosts_share_is_used_where_it_is(plays, shared, results, tmp_path):
    data = tmp_path / "talk.jsonl"
    data.write_text("".join(json.dumps({"text": f"Sentence number {n} of many."}) + "\n" for n in range(300)))
    small = {**SETTINGS, "steps": 2, "max_samples": 300, "trainer_results_dir": results}
    done = book(plays, "train.yml", run="brought", **{**small, "dataset": data})
    assert done.returncode == 0, done.stdout
    plays.sh("node1", f"cat > {shared}/talk.jsonl <<'END'\n{data.read_text()}END")
    brought = {host: plays.sh(host, "ls /var/lib/trainyard/data") for host in plays.lab.hosts}

    there = {**small, "dataset": f"{shared}/talk.jsonl", "storage_path": shared}
    done = book(plays, "train.yml", run="there", **there)
    assert done.returncode == 0, done.stdout
    assert yaml.safe_load((results / "there/config.yaml").read_text())["dataset"] == there["dataset"]
    brought_losses = losses(results / "brought/metrics.jsonl")  # by other shares, perhaps
    assert losses(results / "there/metrics.jsonl") == pytest.approx(brought_losses, rel=1e-5)
    assert {host: plays.sh(host, "ls /var/lib/trainyard/data") for host in plays.lab.hosts} == brought

    plays.sh("node3", f"umount {shared}")
    done = book(plays, "train.yml", run="not-there", **there)
    assert done.returncode != 0 and "node3" in done.stdout and there["dataset"] in done.stdout, done.stdout
    assert status(plays, "not-there") == {}


@pytest.mark.full
def test_a_smoke_test_leaves_nothing_that_the_run_would_go_on_from(plays, results, tmp_path):
    done = book(plays, "train.yml", run="smoked", smoke="true", trainer_results_dir=results, **SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (results / "smoked/metrics.jsonl").read_text().splitlines()]
    assert next(row["event"] for row in rows if row["kind"] == "event") == "start"
    alone = of_one_process(tmp_path, **SETTINGS)
    assert losses(results / "smoked/metrics.jsonl") == pytest.approx(alone, rel=1e-5)
    for host in ("node1", "node2", "node3"):
        assert status(plays, "smoked", host)["attempt"] == 1
        assert plays.sh(host, "ls -A /var/lib/trainyard/runs /etc/trainyard/runs | grep smoke- || true") == ""


@pytest.mark.full
def test_a_failed_host_is_named_with_its_reason_and_the_others_are_stopped(plays, results):
    """Where the first fault shall end the run."""
    arguments = {"run": "broken", "trainer_results_dir": results, "restarts": 0, **LONG}
    with following(plays, arguments) as process:
        wait_for_step(plays, "broken", 2)
        plays.sh("node2", "pkill --signal KILL -f 'trainer [t]rain'")
        text, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "Run broken failed on node2 after step" in text
    assert "rank 1 on node2 was killed by SIGKILL" in text
    assert "-e run=broken -e resume=true" in text
    assert "Traceback" not in text
    assert active(plays, "broken") == []
    assert (results / "broken/logs/node2/rank-1.log").exists()


@pytest.mark.full
def test_a_power_cut_at_the_head_stops_nothing_and_the_head_is_taken_in_again(plays, results):
    """No hand is laid on it: the others go on without it, and take it back when it has booted."""
    arguments = {"run": "alive", "trainer_results_dir": results, **LONG, "checkpoint_every": 5}
    with following(plays, arguments) as process:
        wait_for_step(plays, "alive", 12)
        plays.lab.power("node1", False)
        try:
            wait_for_attempt(plays, "alive", 2, 2, "node2")
        finally:
            plays.lab.power("node1", True)
        wait_for_attempt(plays, "alive", 3, 3, "node1")
        assert process.poll() is None  # it is followed all the while
        stop(plays, "alive")
        text, _ = process.communicate(timeout=120)
    assert "attempt 2, from step " in text and "node1 is gone" in text and "node1 takes part" in text
    assert "was stopped at step" in text and "Traceback" not in text
    for host in ("node1", "node2", "node3"):
        rows = plays.sh(host, "cat /var/lib/trainyard/runs/alive/metrics.jsonl").splitlines()
        steps = [row["step"] for row in map(json.loads, rows) if row["kind"] == "train"]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 12, host  # the returned head's, too
    assert plays.sh("node1", "systemctl is-enabled trainyard@alive || true").strip() == "disabled"


def wait_for_attempt(plays, run, attempt, hosts, host, seconds=240):
    """Until the attempt, on so many hosts, has made a step; `host` is asked."""
    deadline, known = time.monotonic() + seconds, {}
    while True:
        with contextlib.suppress(LabError, ValueError):  # it boots
            known = status(plays, run, host)
            wanted = ("running", attempt, hosts)  # the state apart, ranks of the attempt before have said it
            if tuple(map(known.get, ("state", "attempt", "world_size"))) == wanted and known.get("slowest"):
                return
        assert time.monotonic() < deadline, f"attempt {attempt} of {run} made no step: {known}"
        time.sleep(1)


@contextlib.contextmanager
def following(plays, arguments):
    """train.yml in the background, its output in a pipe."""
    process = subprocess.Popen(
        command(plays, "train.yml", arguments),
        cwd=ROOT,
        env=plays.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_all(process)


# Of the calls to a host, those that FAIL_AT names do not get through, as where all is slow.
BROKEN_SSH = r"""#!/bin/sh
case "$*" in *" -O "*) exec {ssh} "$@";; esac
host=$(echo "$*" | grep -oE '10[.]77[.][0-9]+[.][0-9]+' | head -1)
echo >> "$COUNTS/$host"
case " $FAIL_AT " in *" $(wc -l < "$COUNTS/$host") "*) echo "Connection timed out" >&2; exit 255;; esac
exec {ssh} "$@"
"""


@pytest.mark.full
def test_a_stop_that_does_not_get_through_is_tried_again_and_is_no_success(
    plays, results, tmp_path, monkeypatch
):
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(BROKEN_SSH.format(ssh=shutil.which("ssh")))
    program.chmod(0o755)
    started = book(plays, "train.yml", run="deaf", trainer_results_dir=results, **LONG, detach="true")
    assert started.returncode == 0, started.stdout
    wait_for_step(plays, "deaf", 3)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def told(run, *fail_at):
        counts = tmp_path / f"{run}{len(fail_at)}"
        counts.mkdir()
        monkeypatch.setenv("COUNTS", str(counts))
        monkeypatch.setenv("FAIL_AT", " ".join(map(str, fail_at)))
        done = book(plays, "playbooks/stop.yml", run=run)
        return done, len((counts / plays.lab.host("node1").address).read_text().splitlines())

    # What no host knows is only asked for, twice.
    unknown, calls = told("nobody")
    assert unknown.returncode != 0 and calls > 1
    done, _ = told("deaf", calls, calls + 2)
    assert done.returncode != 0 and done.stdout.count("Connection timed out") >= 6, done.stdout
    assert "found it still active on node1, node2, node3 after it was told twice" in done.stdout
    assert active(plays, "deaf") == ["node1", "node2", "node3"]
    done, _ = told("deaf", calls)
    assert done.returncode == 0 and done.stdout.count("Connection timed out") >= 3, done.stdout
    assert active(plays, "deaf") == [] and "stopped on node1, node2, node3" in done.stdout


@pytest.mark.full
def test_ctrl_c_and_a_kill_of_the_controller_leave_the_run_which_is_followed_stopped_and_resumed(
    plays, results, tmp_path
):
    """Stopped and resumed, it has the losses of a run that never was."""
    # The steps to come are no part of this schedule. At a higher rate this model's last bits of a sum come to show.
    settings = {**LONG, "lr_schedule": "constant", "lr": 0.0003}
    arguments = {"run": "left", "trainer_results_dir": results, **settings}
    with following(plays, arguments) as process:
        for line in process.stdout:  # lines of progress reach a pipe at once
            if "left  step " in line:
                break
        os.kill(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 99
    assert "Run left goes on without this terminal." in text and "-e run=left -e follow=true" in text
    assert active(plays, "left") == ["node1", "node2", "node3"]

    refused = book(plays, "train.yml", **{**arguments, "lr": 0.5})
    assert refused.returncode != 0
    assert "run left is already active on node1, node2, node3" in refused.stdout + refused.stderr

    with following(plays, arguments) as process:  # the very same command, again
        for line in process.stdout:
            if "left  step " in line:
                break
            assert "Start the unit" not in line
    step = status(plays, "left")["step"]
    wait_for_step(plays, "left", step + 2)

    stop(plays, "left")
    assert {status(plays, "left", host)["state"] for host in ("node1", "node2", "node3")} == {"stopped"}
    step = status(plays, "left")["step"]
    done = book(plays, "train.yml", run="left", resume="true", steps=step + 2, trainer_results_dir=results)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = losses(results / "left/metrics.jsonl")
    assert list(resumed) == list(range(1, step + 3))
    alone = of_one_process(tmp_path, **{**settings, "steps": step + 2})
    for number, loss in alone.items():
        assert resumed[number] == pytest.approx(loss, rel=1e-5), f"step {number}"


@pytest.mark.full
def test_diagnose_says_why_a_run_is_slow(plays):
    """A processor that is slow, somebody else's program, and a network that is; then none of them."""

    def said():
        begin = status(plays, "slow")["step"]
        wait_for_step(plays, "slow", begin + 25)  # the means are over the last steps
        done = book(plays, "playbooks/diagnose.yml", run="slow")
        assert done.returncode == 0, done.stdout
        return " ".join(done.stdout.split())

    began = book(plays, "train.yml", run="slow", detach="true", **{**LONG, "lr": 1e-5})
    assert began.returncode == 0, began.stdout
    try:
        slowest = (
            r"rank \d on node2 is the slowest, [\d.]+ s of own work a step where the fastest takes [\d.]+ s"
        )
        plays.lab.set_cpus("node2", 0.2)
        words = said()
        # Of a container the load is the whole machine's.
        why = r"(; nothing else runs there, so its processor or card is the slower|, because its load is \d+ on)"
        assert re.search(slowest + why, words), words
        plays.lab.set_cpus("node2", 0.8)
        plays.sh("node2", "systemd-run --quiet --unit=glutton -p Nice=-10 sh -c 'while :; do :; done'")
        words = said()
        assert re.search(
            f"{slowest}, because `sh` .process \\d+. takes \\d+% of a core there: end it", words
        ), words
        plays.sh("node2", "systemctl stop glutton")
        plays.lab.set_cpus("node2", None)
        plays.lab.set_rate("node3", "15mbit")
        words = said()
        assert re.search(
            r"The run goes on \(step [^)]+\); the network takes .*; playbooks/bench.yml", words
        ), words
        plays.lab.set_rate("node3", None)
        words = said()
        assert "The run goes on (step" in words and "; the network takes" not in words, words
    finally:
        plays.sh("node2", "systemctl stop glutton || true")
        plays.lab.set_cpus("node2", None)
        plays.lab.set_rate("node3", None)
        stop(plays, "slow")


@pytest.mark.full
def test_a_finished_runs_model_comes_here_and_old_runs_go(plays, results):
    """From hosts whose runs are the service user's: its adapter, and merged; then nothing of it is left there."""

    def there():
        return {
            host: plays.sh(host, "find /var/lib/trainyard/ /etc/trainyard | sort") for host in plays.lab.hosts
        }

    keys = {"trainer_results_dir": results}
    done = book(plays, "train.yml", run="thin", adapter="lora", lora_rank=2, **SETTINGS, **keys)
    assert done.returncode == 0, done.stdout
    before = there()
    for to, more in (
        (results / "thin/export", {}),
        (results / "merged", {"merge": "true", "to": results / "merged"}),
    ):
        done = book(plays, "playbooks/export.yml", run="thin", **more, **keys)
        assert done.returncode == 0, done.stdout
        assert (to / "adapter_config.json").exists() == (not more)
    sums = {
        host: plays.sh(host, "sha256sum /var/lib/trainyard/runs/thin/model/adapter_model.safetensors || true")
        for host in plays.lab.hosts
    }
    digest = hashlib.sha256((results / "thin/export/adapter_model.safetensors").read_bytes()).hexdigest()
    assert any(one.startswith(digest) for one in sums.values()), sums
    assert (results / "merged/model.safetensors").stat().st_size > 10_000
    assert there() == before
    for run, more in (("newer", {}), ("last", {"trainer_runs_kept": 1})):
        done = book(plays, "train.yml", run=run, **more, **SETTINGS, **keys)
        assert done.returncode == 0, done.stdout
    assert "old runs were removed" in done.stdout and "thin" in done.stdout, done.stdout
    left = there()
    for text in left.values():
        assert "runs/last" in text and "runs/newer" in text and "runs/thin" not in text, left
    assert (results / "thin/summary.json").exists()
