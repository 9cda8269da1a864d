"""A run on real hosts that something is done to."""

import contextlib
import itertools
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import run_page
from plays import Plays
from processes import kill_all
from test_train import LONG, book, command, status, stop

from lab.lab import Lab, Options, install_missing_tools
from lab.shell import LabError

HOSTS = ("node1", "node2", "node3")
# The rate is low: at 0.001 this model has steps at which the last bits of a sum make a thousandth of the loss.
# Even shares: on as many ranks sums have one order, and losses are equal to 1e-6.
RUN = {
    **LONG,
    "checkpoint_every": 5,
    "timeout_seconds": 20,
    "lr_schedule": "constant",
    "lr": 0.0003,
    "balance": "even",
}
RANKS = re.compile(r"(; |^)\d+ ranks on .*")  # by whom an attempt is made, behind why
numbers = itertools.count(1)
AFTER = 20  # steps that are compared after the last restart, at least


@contextlib.contextmanager
def deployed(name, hosts, directory):
    """A lab of so many hosts, each deployed by site.yml; down at the end."""
    install_missing_tools()
    lab = Lab(name)
    try:
        lab.up(Options(name=name, hosts=hosts), replace=True)
        plays = Plays(lab, directory)
        done = book(plays, "site.yml", seconds=1800)
        assert done.returncode == 0, done.stdout + done.stderr
        yield plays
    finally:
        lab.down()


class Calm:
    """The losses of the run that nothing meets, as far as somebody asks: it is resumed for more."""

    def __init__(self, plays, folder):
        self.plays, self.folder, self.losses = plays, folder, {}
        self.name = f"calm{next(numbers)}"  # two modules of tests may share a lab

    def until(self, step):
        """{step: loss} of the first `step` steps; no other run may be under way."""
        if step > len(self.losses):
            more = {"resume": "true"} if self.losses else {}
            settings = {**RUN, "steps": step, "run": self.name, "trainer_results_dir": self.folder}
            done = book(self.plays, "train.yml", seconds=3600, **settings, **more)
            assert done.returncode == 0, done.stdout
            self.losses = losses((self.folder / self.name / "metrics.jsonl").read_text())
        return {number: self.losses[number] for number in range(1, step + 1)}


class Run:
    """A run under way on all of `hosts`, started by train.yml, which then was killed: nobody watches.

    before: what is done first, with the run's directory on each host.
    """

    def __init__(self, plays, hosts=HOSTS, before=None, **settings):
        self.plays, self.hosts, self.name = plays, hosts, f"fault{next(numbers)}"
        if before:
            before(f"/var/lib/trainyard/runs/{self.name}")
        self.settings = {**RUN, **settings}
        self.saved = {}  # by attempt, the newest checkpoint that a host was seen to know of
        arguments = {**self.settings, "run": self.name}
        process = subprocess.Popen(
            command(plays, "train.yml", arguments),
            env=plays.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.wait(lambda: all((self.status(host).get("step") or 0) >= 8 for host in hosts))
        finally:
            kill_all(process)

    def status(self, host):
        with contextlib.suppress(LabError, ValueError):  # it is off, or boots
            known = status(self.plays, self.name, host)
            attempt, step = known.get("attempt") or 0, known.get("last_checkpoint") or 0
            self.saved[attempt] = max(self.saved.get(attempt, 0), step)
            return known
        return {}

    def goes_on(self, attempt, *hosts):
        """Whether the attempt, of these hosts alone, has made steps on all of them.

        Until its ranks speak, status.json has what those of the one before said, but for the state.
        """
        wanted = ("running", attempt, len(hosts))
        return all(
            tuple(map(known.get, ("state", "attempt", "world_size"))) == wanted and known.get("slowest")
            for known in map(self.status, hosts)
        )

    def wait(self, condition, seconds=240):
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < seconds, {host: self.status(host) for host in self.hosts}
            time.sleep(0.3)
        return time.monotonic() - begin

    def end(self, curve, *hosts, reason="", damaged=None):
        """Stop it; its losses are those of the calm run, on each of `hosts`, and it lost no step that was saved.

        curve: a Calm, which goes on to the last step of this one. reason: a pattern of what the report names, an event
        and why, without the ranks. damaged: the step whose checkpoint was, and the one before is taken; or, of damage
        at random moments, the attempt in which each was done, which may cost the next two a checkpoint each.
        """
        told, every = [], self.settings["checkpoint_every"]
        try:
            begun = [row["step"] for row in records(self.metrics(hosts[0])) if row.get("event") == "restart"]
            last = max(begun, default=0)
            self.wait(lambda: all((self.status(host).get("step") or 0) >= last + AFTER for host in hosts))
            stop(self.plays, self.name)
            for host in hosts:
                text = self.metrics(host)
                found = losses(text)
                known = curve.until(len(found))
                assert list(found) == list(range(1, len(found) + 1)), host
                same = all(
                    len(row["shares"]) == len(self.hosts) for row in records(text) if row["kind"] == "train"
                )
                assert len(found) >= last + AFTER
                for step in found:
                    assert found[step] == pytest.approx(known[step], rel=1e-6 if same else 1e-5), (host, step)
                restarts = [row for row in records(text) if row.get("event") == "restart"]
                for one in restarts:
                    assert one["reason"]
                    before = max((step for n, step in self.saved.items() if n < one["attempt"]), default=0)
                    if isinstance(damaged, list):
                        before -= every * sum(0 < one["attempt"] - attempt <= 2 for attempt in damaged)
                    elif damaged:
                        before = damaged - every
                    assert one["step"] >= before, (host, one, self.saved, damaged)
                told += reported(text)
            if isinstance(damaged, int):
                assert damaged > every
            print("The report:", *dict.fromkeys(told), sep="\n  ")
            assert not reason or any(re.search(reason, one) for one in told), (reason, told)
        finally:
            stop(self.plays, self.name)

    def metrics(self, host):
        return self.plays.sh(host, f"cat /var/lib/trainyard/runs/{self.name}/metrics.jsonl")


@contextlib.contextmanager
def memory_eaten(plays, host):
    """Somebody's program takes a host's memory for so long; the kernel kills what is largest there, a rank."""
    eat = "meal = bytearray(200 << 20); import time; time.sleep(600)"
    plays.lab.set_memory(host, 50 << 20)
    try:
        plays.sh(host, f"systemd-run --quiet --unit=glutton -p OOMScoreAdjust=-900 python3 -c '{eat}'")
        yield
    finally:
        plays.lab.set_memory(host, None)
        plays.sh(host, "systemctl stop glutton; systemctl reset-failed glutton 2>/dev/null || true")


def reported(text):
    """What stands under "What happened" in the report of a run with these metrics, but for checkpoints and ranks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metrics.jsonl").write_text(text)
        run_page.write(Path(folder))
        events = [one for one in run_page.found(Path(folder))["events"] if one["event"] != "checkpoint"]
    return [f"{one['event']}: {RANKS.sub('', one['text'])}" for one in events]


def records(text):
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def losses(text):
    return {row["step"]: row["loss"] for row in records(text) if row["kind"] == "train"}


def rank_of(plays, host):
    return plays.sh(host, "pgrep -f 'trainer [t]rain' | head -1").strip()


def saved(run):
    """The step of the run's newest checkpoint, as the hosts know it."""
    return max((run.status(host).get("last_checkpoint") or 0) for host in HOSTS)
