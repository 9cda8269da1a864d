"""From `make lab` to a page with a live run in it by two more commands.

TRAINYARD_PICTURES=1 keeps the picture of it for the documents.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time

import browser as browsers
import monitored
import pytest
from plays import ROOT, Plays, wait_for

from lab.lab import Lab

sys.path.append(str(ROOT / "scripts"))
import take_pictures

pytestmark = pytest.mark.full  # minutes
NAME = "t-dash"
OFTEN = 50  # times as often as usual
TIMES = re.compile(r"^\d\d:\d\d$", re.MULTILINE)  # at an axis
# Nanoseconds of CPU that the processes of each unit of a host have had.
USED = """
for unit in trainyard-exporter trainyard-metrics trainyard-prometheus trainyard@demo; do
  sum=0
  for pid in $(cat $(find /sys/fs/cgroup -path "*/$unit.service*" -name cgroup.procs) /dev/null | sort -u); do
    for thread in $(cut -d ' ' -f 1 /proc/$pid/task/*/schedstat 2>/dev/null); do sum=$((sum + thread)); done
  done
  echo $unit $sum
done
"""


@pytest.fixture
def lab(able):
    lab = Lab(NAME)
    try:
        yield lab
    finally:
        lab.down()


def used(lab, host):
    lines = lab.exec(host, "sh", "-c", USED).split("\n")
    return {unit: int(sum) / 1e9 for unit, sum in map(str.split, filter(None, lines))}


def what_watching_costs(lab, seconds=90):
    """What a host's exporters use of CPU beside the training in the same time; on the head Prometheus, too."""
    before = {host: used(lab, host) for host in ("node1", "node3")}
    time.sleep(seconds)
    for host, first in before.items():
        took = {unit: value - first[unit] for unit, value in used(lab, host).items()}
        print(host, *(f"{unit} {value:.3f} s" for unit, value in took.items()))
        assert took["trainyard@demo"] > seconds / 10
        assert took["trainyard-exporter"] > 0 and took["trainyard-metrics"] > 0
        assert took["trainyard-exporter"] + took["trainyard-metrics"] < 0.01 * took["trainyard@demo"]


def speed(lab, seconds):
    """Tokens a second of the run in the next so many seconds."""

    def last():
        text = lab.exec("node1", "tail", "-n", "20", "/var/lib/trainyard/runs/demo/metrics.jsonl")
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [(row["tokens_total"], row["time"]) for row in rows if row["kind"] == "train"][-1]

    tokens, begin = last()
    time.sleep(seconds)
    more, end = last()
    return (more - tokens) / (end - begin)


def what_watching_costs_in_tokens(lab, seconds=45, rounds=3):
    """The run's speed where Prometheus asks and judges so many times as OFTEN, and where nobody watches, by turns.

    A percent of it cannot be told here, where other work comes and goes; OFTEN times what watching takes can. All of
    that is counted here, Prometheus on the head, too, but trainyard-metrics as often as ever: what that takes of
    processors stands above.
    """
    units = ("trainyard-exporter", "trainyard-metrics")
    at_head = (*units, "trainyard-prometheus")
    change = "sed -i 's/_interval: [0-9]*m*s$/_interval: {}/' /etc/trainyard-monitoring/prometheus.yml"
    often = change.format(f"{15_000 // OFTEN}ms")
    lab.exec("node1", "sh", "-ec", f"{often}; systemctl restart trainyard-prometheus")
    speeds = {"start": [], "stop": []}
    for word in ("start", "stop") * rounds + ("start",):
        for host in lab.hosts:
            lab.exec(host, "systemctl", word, *(at_head if host == "node1" else units))
        time.sleep(3)
        speeds[word].append(speed(lab, seconds))
        if word == "start":
            asked = monitored.ask(lab, f"min(count_over_time(up[{seconds}s]))")[0][1]
            assert asked > 0.8 * OFTEN * seconds / 15, asked
    lab.exec("node1", "sh", "-ec", f"{change.format('15s')}; systemctl restart trainyard-prometheus")
    watched, alone = (statistics.mean(speeds[word]) for word in ("start", "stop"))
    cost = (1 - watched / alone) / OFTEN
    unsure = (
        sum((statistics.stdev(found) ** 2 / len(found)) for found in speeds.values()) ** 0.5 / alone / OFTEN
    )
    told = {word: [round(one) for one in found] for word, found in speeds.items()}
    print(
        f"tokens/s: {watched:.0f} asked {OFTEN} times as often, {alone:.0f} unwatched: watching costs {cost:.2%}"
    )
    print(f"(the error of the mean: {unsure:.2%}; {told})")
    assert cost < 0.01, told


def what_goes_wrong_with_a_run_fires(lab, plays):
    """Alerts of the real run, by what causes them; the run goes on after each but the last."""

    def fires(*alerts, seconds=180):
        wait_for(lambda: set(alerts) <= {name for name, _ in monitored.firing(lab)}, seconds)

    def is_over(alert, seconds=300):
        wait_for(lambda: alert not in {name for name, _ in monitored.firing(lab)}, seconds)

    monitored.hasten(lab)
    rank = lab.exec("node3", "sh", "-c", "pgrep -f 'trainer [t]rain' | head -1").strip()
    lab.exec("node3", "kill", "-STOP", rank)  # the others wait for it in their step
    fires("RunSilent")
    lab.exec("node3", "kill", "-CONT", rank)
    is_over("RunSilent")
    lab.cut("node1")  # where Prometheus is: it sees the run pause there, and nobody else
    fires("RunStalled", "HostDown")
    lab.join("node1")
    is_over("RunStalled")
    fires("RunRestartsOften")  # the host is taken in by another attempt
    done = plays.book("playbooks/stop.yml", run="demo")
    assert done.returncode == 0, done.stdout + done.stderr
    toy = {"model": "tiny", "dataset": "austen", "sequence_length": 128, "batch_size": 8, "steps": 100}
    kept = plays.directory / "runs"
    done = plays.book("train.yml", **toy, lr=1e6, warmup_steps=0, run="wild", trainer_results_dir=kept)
    assert done.returncode != 0 and "diverged" in done.stdout, done.stdout + done.stderr
    fires("RunDiverged", "RunFailed")


@pytest.mark.timeout(2400)
def test_two_commands_after_make_lab(lab, tmp_path):
    browsers.have()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")},
        "SSH_ASKPASS_REQUIRE": "force",  # the dashboard's SSH asks for the lab's password, as Ansible does not
        "SSH_ASKPASS": str(tmp_path / "askpass"),
    }
    inventory = f"INVENTORY={lab.inventory}"

    def typed(*command):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    typed("make", "lab", "HOSTS=3", f"LAB=--name {NAME} --replace")
    assert f"make dashboard {inventory}" in typed("make", "lab-demo", inventory).splitlines()[-1]
    asked = tmp_path / "askpass"
    asked.write_text(f"#!/bin/sh\necho '{lab.password}'\n")
    asked.chmod(0o700)
    process = subprocess.Popen(
        ["make", "dashboard", inventory],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        page = process.stdout.readline().split()[0]
        with browsers.Browser(tmp_path / "profile") as browser:
            browser.open(page, width=1280)
            text = "document.body.innerText"
            wait_for(lambda: "Run demo running" in browser.value(text), 180)
            wait_for(lambda: browser.value("document.querySelectorAll('.plot svg').length") >= 4, 180)
            # What each rank does of a step is told from the first one on.
            wait_for(lambda: all(f"{rank} node{rank + 1}" in browser.value(text) for rank in range(3)), 180)
            said = browser.value(text)
            assert "3 of 3 hosts up" in said and "Run demo running" in said
            what_watching_costs(lab)  # and there is more to be seen afterwards
            before = set(TIMES.findall(browser.value(text)))
            browser.value(
                "[...document.querySelectorAll('button')].find((one) => one.innerText === '15 min').click()"
            )
            # Its plots have other times then.
            wait_for(lambda: set(TIMES.findall(browser.value(text))) != before, 60)
            assert browser.errors == []
            picture = tmp_path / "dashboard.png"
            if os.environ.get("TRAINYARD_PICTURES"):
                picture = take_pictures.PICTURES / picture.name
                take_pictures.write_down({picture.name: take_pictures.sources(picture.name)})
            browser.picture(picture, whole=False)
            assert picture.stat().st_size < 150_000  # tests/unit/test_pictures.py
        what_watching_costs_in_tokens(lab)
        what_goes_wrong_with_a_run_fires(lab, Plays(lab, tmp_path))
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(20)
    assert f"lab '{NAME}'" in typed("make", "lab-down", f"LAB=--name {NAME}")
    assert not lab.state.exists() and not lab.inventory.exists()
