"""The role monitoring on real hosts: the distribution's Prometheus asks them all, alerts fire, a browser shows it.

The tests follow one lab of two hosts through its life, in this order.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import alerts
import browser as browsers
import pytest
import yaml
from plays import ROOT, playground, wait_for

from trainer import metrics

pytestmark = pytest.mark.full  # minutes; tests/unit/test_monitoring.py has what is told
RULES = ROOT / "roles/monitoring/files/rules.yml"
TAGS = "firewall,monitoring"
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
MADE = (
    "ls -d /etc/systemd/system/trainyard-[emp]* /etc/trainyard-monitoring /usr/local/lib/trainyard-monitoring "
    "/var/lib/trainyard-prometheus"
)
CARD = (
    "0, 00000000:01:00.0, NVIDIA GeForce RTX 3070 Ti, GPU-7d, 570.86.15, 0x0, "
    "61, 241.07, 290.00, 98, 7011, 8192, 1290, [N/A], [N/A]"
)


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-mon", 2, tmp_path_factory.mktemp("monitoring")) as plays:
        group(plays, "node1")
        yield plays


def group(plays, *hosts):
    """The group monitoring is these hosts."""
    text = yaml.safe_dump({"monitoring": {"hosts": {host: {} for host in hosts}}})
    (plays.lab.inventory / "monitoring.yml").write_text(text)


def ask(plays, query):
    """Prometheus' answer: [({label: value}, value), …]."""
    url = "http://127.0.0.1:9090/api/v1/query?query=" + query.replace(" ", "%20")
    data = json.loads(plays.lab.exec("node1", "python3", "-c", ASK, url))["data"]["result"]
    return [(one["metric"], float(one["value"][1])) for one in data]


def up(plays):
    return {labels["instance"]: value for labels, value in ask(plays, "up")}


def firing(plays):
    return {(one["alertname"], one.get("instance")) for one, _ in ask(plays, 'ALERTS{alertstate="firing"}')}


def listening(plays, host):
    """{(address, port)} on which programs of `host` wait for TCP."""
    lines = plays.sh(host, "ss -Hltn").splitlines()
    return {tuple(line.split()[3].rsplit(":", 1)) for line in lines}


def test_check_mode_on_untouched_hosts_changes_nothing(plays):
    play = plays.run("monitoring", "cluster", None, "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > play.changed["node2"] > 0
    for host in ("node1", "node2"):
        assert (
            plays.sh(host, f"{MADE} 2>/dev/null || true; ls /usr/bin/prometheus* 2>/dev/null || true") == ""
        )


def test_a_port_that_another_program_has_is_named(plays):
    plays.sh("node2", "systemd-run --unit=other python3 -m http.server 9100")
    play = plays.run("monitoring", "node2")
    plays.sh("node2", "systemctl stop other")
    assert play.rc != 0
    assert "/metrics: found another program" in play.words, play.text
    assert "set monitoring_exporter_port" in play.words


def test_the_group_turns_it_on_and_a_second_run_changes_nothing(plays):
    play = plays.run(TAGS)
    assert play.rc == 0, play.text
    wait_for(lambda: up(plays) == {"node1": 1, "node2": 1}, 30)
    assert plays.run("monitoring").changed == {"node1": 0, "node2": 0}


def test_only_the_loopback_and_the_cluster_address_are_listened_at(plays):
    for host, more in (("node1", {("127.0.0.1", "9090")}), ("node2", set())):
        address = plays.lab.host(host).address
        ssh = {("0.0.0.0", "22"), ("[::]", "22")}
        assert listening(plays, host) - ssh == {(address, "9100"), *more}
    # The distribution's own, which would listen on all, never ran.
    said = plays.sh(
        "node1", "journalctl -o cat -u prometheus -u prometheus-node-exporter; systemctl is-system-running"
    )
    assert "Started" not in said and said.splitlines()[-1] == "running"


def test_a_peer_sees_what_a_host_tells_and_a_stranger_nothing(plays):
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
    for host in ("node1", "node2"):
        address = plays.lab.host(host).address
        plays.lab.exec("node2", "python3", "-c", reach, address, "9100")
        for port in ("9100", "9090"):
            assert plays.lab.stranger("python3", "-c", reach, address, port).returncode != 0
    beside = plays.sh("node2", f"python3 -c '{reach}' {plays.lab.host('node1').address} 9090 2>&1 || true")
    assert "Error" in beside


def test_runs_and_cards_are_told_within_a_minute(plays, tmp_path):
    """By a status.json of the trainer's own writer, as the service user's files are; by a stand-in for nvidia-smi."""
    plays.sh("node2", "systemctl stop trainyard-exporter")  # for HostDown, below, which takes its time
    step = {
        "step_seconds": 2.0,
        "compute_seconds": 0.5,
        "comm_seconds": 1.2,
        "rank_seconds": [0.5, 1.0],
        "loss": 2.0,
    }
    metrics.Status(tmp_path, run="first").update(
        state="running",
        step=7,
        steps=100,
        loss=2.5,
        tokens_per_second=1234.5,
        eta_seconds=3000,
        attempt=1,
        world_size=2,
        parts={**metrics.parts([step]), "ranks": ["node1", "node2"]},
    )
    status = (tmp_path / "status.json").read_text()
    run = "/var/lib/trainyard/runs/first"
    plays.sh(
        "node1",
        f"install -d -o trainyard -g trainyard -m 0750 /var/lib/trainyard/runs {run}\n"
        f"cat > {run}/status.json <<'END'\n{status}\nEND\n"
        f"chown trainyard:trainyard {run}/status.json; chmod 0640 {run}/status.json\n"
        f"printf '#!/bin/sh\\necho \"{CARD}\"\\n' > /usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi",
    )
    wait_for(lambda: ask(plays, "trainyard_run_loss") and ask(plays, "trainyard_gpu_temperature_celsius"), 60)
    ((labels, loss),) = ask(plays, "trainyard_run_loss")
    assert (labels["instance"], labels["run"], loss) == ("node1", "first", 2.5)
    ((labels, degrees),) = ask(plays, "trainyard_gpu_temperature_celsius")
    assert (labels["instance"], labels["gpu"], labels["bus"], degrees) == ("node1", "0", "0000:01:00", 61)
    # Its capabilities are what it needs for the kernel's log, and no more; it is nobody's root.
    about = plays.sh(
        "node1", "grep -hE '^(Uid|CapEff)' /proc/$(systemctl show -P MainPID trainyard-metrics)/status"
    )
    uid, capabilities = re.search(r"Uid:\s+(\d+)", about)[1], int(re.search(r"CapEff:\s+(\w+)", about)[1], 16)
    assert uid != "0" and capabilities & ~(1 << 34) == 0


def test_each_alert_is_caused_once_and_a_healthy_cluster_causes_none(plays):
    """By promtool of the very package, on the file that Prometheus reads."""
    text = RULES.read_text()
    assert {
        rule["alert"] for one in yaml.safe_load(text)["groups"] for rule in one["rules"]
    } == alerts.caused()
    there = "/etc/trainyard-monitoring/rules.yml"
    assert plays.sh("node1", f"cat {there}") == text
    tests = alerts.promtool_tests(text, there)
    plays.sh(
        "node1", f"cat > /tmp/rules_test.yml <<'END'\n{tests}\nEND\npromtool test rules /tmp/rules_test.yml"
    )


@pytest.fixture(scope="module")
def page(plays, tmp_path_factory):
    """The address of the page, by `make dashboard`'s tunnel, whose SSH asks for the lab's password."""
    asked = tmp_path_factory.mktemp("askpass") / "askpass"
    asked.write_text(f"#!/bin/sh\necho '{plays.lab.password}'\n")
    asked.chmod(0o700)
    environment = {**plays.environment(), "SSH_ASKPASS": str(asked), "SSH_ASKPASS_REQUIRE": "force"}
    process = subprocess.Popen(
        [sys.executable, "scripts/dashboard.py", "-i", str(plays.lab.inventory)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process.stdout.readline().split()[0]
    tunnel = [int(pid) for pid in children(process.pid)]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert tunnel and not [pid for pid in tunnel if Path(f"/proc/{pid}").exists()]


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_host_that_is_gone_fires_and_the_page_says_so(plays, page, tmp_path):
    browsers.have()
    shots = Path(os.environ.get("TRAINYARD_SHOTS") or tmp_path)
    wait_for(lambda: ("HostDown", "node2") in firing(plays), 150)
    with browsers.Browser(tmp_path / "profile") as browser:
        for name, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 360, False)):
            browser.open(page, width=width, dark=dark)
            wait_for(lambda: browser.value("document.querySelectorAll('.plot svg').length") >= 4, 20)
            browser.picture(shots / f"monitoring-{name}.png")
            text = browser.value("document.body.innerText")
            for words in ("t-mon", "1 of 2 hosts up", "Run first", "RTX 3070 Ti", "rank 1 on node2"):
                assert words in text
            assert "node2 does not answer: it is down, off the network, or its exporter is." in text
            assert "systemctl status trainyard-exporter" in text
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
            ink = browser.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ink[4:-1].split(","))) < 150) is dark
        assert browser.errors == []


def test_what_was_stopped_or_edited_is_mended(plays):
    plays.sh(
        "node1",
        "echo 'groups: []' > /etc/trainyard-monitoring/rules.yml; systemctl restart trainyard-prometheus",
    )
    play = plays.run("monitoring")
    assert play.rc == 0 and play.changed["node1"] > 0 and play.changed["node2"] > 0, play.text
    wait_for(lambda: up(plays) == {"node1": 1, "node2": 1}, 40)
    assert plays.sh("node1", "cat /etc/trainyard-monitoring/rules.yml") == RULES.read_text()
    wait_for(lambda: ("HostDown", "node2") not in firing(plays), 40)


def test_reset_and_an_empty_group_take_it_away(plays):
    remove = {
        "name": "Remove",
        "ansible.builtin.include_role": {"name": "monitoring", "tasks_from": "remove"},
    }
    play = plays.run([remove], "node1")
    assert play.rc == 0 and play.changed["node1"] > 0, play.text
    group(plays)
    play = plays.run("monitoring")
    assert play.rc == 0 and play.changed["node1"] == 0 and play.changed["node2"] > 0, play.text
    for host in ("node1", "node2"):
        address = plays.lab.host(host).address
        assert plays.sh(host, f"{MADE} /run/trainyard-metrics 2>/dev/null || true") == ""
        assert not [place for place in listening(plays, host) if place[0] == address or place[1] == "9090"]
        # The package stays; its own instance neither runs nor comes at the next boot.
        assert plays.sh(host, "systemctl is-enabled prometheus-node-exporter || true").strip() == "disabled"
        assert plays.sh(host, "systemctl is-active prometheus-node-exporter || true").strip() == "inactive"
