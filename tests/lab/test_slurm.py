"""A run that Slurm keeps, on two real hosts: slurmctld, two slurmd and munge, as the distribution has them."""

import base64
import json
import os
from pathlib import Path

import pytest
import yaml
from plays import Plays, wait_for
from test_train import following, losses, of_one_process, status, wait_for_step

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("node1", "node2")
RUN_DIR = "/var/lib/trainyard/runs"
SETTINGS = {
    "model": "tiny",
    "dataset": "austen",
    "max_samples": 200,
    "vocab_size": 400,
    "sequence_length": 64,
    "batch_size": 6,
    "steps": 40,
    "checkpoint_every": 5,
    # At 0.001 this model has steps at which the last bits of a sum make a thousandth of the loss.
    "lr": 0.0003,
    "lr_schedule": "constant",
}
LONG = {**SETTINGS, "steps": 100_000, "checkpoint_every": 20}
# Containers share this machine's cgroups: processes are tracked by their parents. A requeued job begins after
# cred_expire, which is two minutes unless set.
CONFIG = """\
ClusterName=lab
SlurmctldHost=node1
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=cred_expire=10
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
SlurmdTimeout=20
NodeName=node[1-2] CPUs=2 RealMemory=500
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def plays(make_lab, tmp_path_factory):
    """Two hosts, deployed by site.yml, with Slurm."""
    plays = Plays(make_lab("slurm", hosts=2), tmp_path_factory.mktemp("slurm"))
    done = plays.book("site.yml", seconds=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    key = base64.b64encode(os.urandom(512)).decode()
    config = base64.b64encode(CONFIG.encode()).decode()
    for host in HOSTS:
        plays.sh(
            host,
            "apt-get install -qy --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null; "
            f"echo {key} | base64 -d >/etc/munge/munge.key; chown munge: /etc/munge/munge.key; "
            f"chmod 400 /etc/munge/munge.key; mkdir -p /etc/slurm; echo {config} | base64 -d >/etc/slurm/slurm.conf; "
            "mkdir -p /var/lib/slurm/slurmctld; chown -R slurm: /var/lib/slurm; systemctl restart munge",
        )
    plays.sh("node1", "systemctl restart slurmctld slurmd")
    plays.sh("node2", "systemctl disable --now slurmctld; systemctl restart slurmd")
    wait_for(lambda: plays.sh("node1", "sinfo --noheader --states=idle --format=%D").strip() == "2", 60)
    return plays


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process, by step."""
    return of_one_process(tmp_path_factory.mktemp("alone"), **SETTINGS)


def queue(plays):
    """Slurm's jobs, each NUMBER|STATE."""
    return plays.sh("node1", "squeue --noheader --format='%i|%T'").split()


def train(plays, run, results, settings, **extra):
    return plays.book(
        "train.yml", run=run, launcher="slurm", trainer_results_dir=results, **{**settings, **extra}
    )


def watching(plays, run, results, settings):
    return following(plays, {"run": run, "launcher": "slurm", "trainer_results_dir": results, **settings})


def read_until(process, words):
    """The output of `process` up to a line that has `words`."""
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text
    raise AssertionError(f"it ended before it said {words!r}:\n{text}")


def test_a_job_of_two_hosts_gives_the_losses_of_one_process(plays, results, alone):
    done = train(plays, "first", results, SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(results / "first/metrics.jsonl") == pytest.approx(alone, rel=1e-5)
    rows = [json.loads(line) for line in (results / "first/metrics.jsonl").read_text().splitlines()]
    assert {row["world_size"] for row in rows if row["kind"] == "train"} == {2}
    for host in HOSTS:
        assert not plays.sh(host, "journalctl --quiet --unit trainyard@first").strip()  # no unit kept it
    assert plays.sh("node1", f"stat -c %U {RUN_DIR}/first/metrics.jsonl").strip() == "trainyard"
    assert queue(plays) == []


def test_a_job_that_waits_is_told_stopped_and_resumed(plays, results):
    plays.sh("node1", "scontrol update nodename=node2 state=drain reason=test")
    try:
        with watching(plays, "waits", results, LONG) as process:
            read_until(process, "waits  queued  Slurm's job")
            shown = plays.book("playbooks/status.yml").stdout
            assert "waits: Slurm's job" in shown and "pending: " in shown
            stopped = plays.book("playbooks/stop.yml", run="waits")
            assert stopped.returncode == 0, stopped.stdout
            assert "stopped on node1, node2" in stopped.stdout, stopped.stdout
            text, _ = process.communicate(timeout=120)
            assert "Run waits was stopped at step 0" in text, text
    finally:
        plays.sh("node1", "scontrol update nodename=node2 state=resume")
    assert queue(plays) == []

    with watching(plays, "waits", results, {**LONG, "resume": "true"}) as process:
        read_until(process, "waits  step ")
        (job,) = queue(plays)
        with watching(plays, "waits", results, {**LONG, "resume": "true"}) as again:
            read_until(again, "is active with these very settings")
            read_until(again, "waits  step ")
        assert queue(plays) == [job]
        stopped = plays.book("playbooks/stop.yml", run="waits")
        assert stopped.returncode == 0, stopped.stdout
        text, _ = process.communicate(timeout=120)
    assert "Run waits was stopped at step" in text and "Traceback" not in text
    step = status(plays, "waits")["step"]
    assert {status(plays, "waits", host)["state"] for host in HOSTS} == {"stopped"}
    assert queue(plays) == []

    done = train(plays, "waits", results, {}, resume="true", steps=step + 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(losses(results / "waits/metrics.jsonl")) == list(range(1, step + 3))


def test_a_step_that_is_killed_is_requeued_and_goes_on_to_the_same_losses(plays, results, alone):
    with watching(plays, "killed", results, SETTINGS) as process:
        wait_for_step(plays, "killed", 12)
        plays.sh("node2", "pkill --signal KILL -u trainyard")  # all of the job's step there
        assert "  queued  " in read_until(process, "Slurm's job").splitlines()[-1]
        text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    assert losses(results / "killed/metrics.jsonl") == pytest.approx(alone, rel=1e-5)
    assert status(plays, "killed")["attempt"] > 1
    assert queue(plays) == []


def test_a_node_that_loses_its_power_costs_a_requeue_and_no_loss(plays, results, alone):
    with watching(plays, "power", results, SETTINGS) as process:
        wait_for_step(plays, "power", 12)
        plays.lab.power("node2", on=False)
        try:
            assert "  queued  " in read_until(process, "Slurm's job").splitlines()[-1]
        finally:
            plays.lab.power("node2", on=True)
        text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    assert losses(results / "power/metrics.jsonl") == pytest.approx(alone, rel=1e-5)
    assert queue(plays) == []


def test_a_time_limit_saves_and_requeues(plays, results):
    limit = {"all": {"vars": {"trainer_slurm_options": ["--time=2"]}}}
    of_slurm = plays.lab.inventory / "slurm.yml"
    of_slurm.write_text(yaml.safe_dump(limit))
    try:
        with watching(plays, "limited", results, LONG) as process:
            read_until(process, "limited  step ")
            assert "  queued  " in read_until(process, "is pending: BeginTime").splitlines()[-1]
            known = status(plays, "limited")
            saved = known["step"]
            # At no step of checkpoint_every, but by chance.
            assert known["last_checkpoint"] == saved > 20, known
            wait_for_step(plays, "limited", saved + 1)
            stopped = plays.book("playbooks/stop.yml", run="limited")
            assert stopped.returncode == 0, stopped.stdout
            process.communicate(timeout=120)
    finally:
        of_slurm.unlink()
    rows = [json.loads(line) for line in (results / "limited/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > saved
    assert queue(plays) == []


def test_scancel_saves_and_a_unit_takes_the_run_on(plays, results):
    with watching(plays, "cancelled", results, LONG) as process:
        wait_for_step(plays, "cancelled", 5)
        (job,) = queue(plays)
        plays.sh("node1", f"scancel {job.split('|')[0]}")
        text, _ = process.communicate(timeout=120)
    assert "Run cancelled was stopped at step" in text and queue(plays) == []
    known = status(plays, "cancelled")
    step = known["step"]
    assert known["last_checkpoint"] == step >= 5, known
    go_on = {"run": "cancelled", "resume": "true", "steps": step + 2, "trainer_results_dir": results}
    done = plays.book("train.yml", **go_on)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(losses(results / "cancelled/metrics.jsonl")) == list(range(1, step + 3))
    for host in HOSTS:
        assert plays.sh(host, "journalctl --quiet --unit trainyard@cancelled").strip()
        plays.sh(host, "systemctl enable trainyard@cancelled")  # as it is where nobody saw the end
    done = plays.book("train.yml", launcher="slurm", **{**go_on, "steps": step + 4})
    assert done.returncode == 0, done.stdout + done.stderr
    for host in HOSTS:  # the next boot would start it beside a job
        assert "disabled" in plays.sh(host, "systemctl is-enabled trainyard@cancelled || true")


def test_what_slurm_has_against_a_run_is_said_before_anything_is_changed(plays, results):
    done = train(plays, "never", results, SETTINGS, trainer_slurm_partition="nope")
    assert done.returncode != 0
    assert "trainer_slurm_partition: found nope; expected one of Slurm's: all" in done.stdout
    plays.sh("node1", "systemctl stop slurmctld")
    try:
        done = train(plays, "never", results, SETTINGS)
    finally:
        plays.sh("node1", "systemctl start slurmctld")
    assert done.returncode != 0
    assert "Slurm does not answer" in done.stdout and "launcher=slurm out" in done.stdout
    assert not plays.sh("node1", f"ls -d {RUN_DIR}/never 2>/dev/null || true").strip()
