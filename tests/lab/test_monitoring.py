"""The role monitoring on real hosts: the distribution's Prometheus asks them all, alerts fire, a browser shows it.

The tests follow one lab of two hosts through its life, in this order.
"""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import alerts
import browser as browsers
import installed
import jinja2
import monitored
import pytest
import ranks
import yaml
from plays import ROOT, playground, wait_for

from lab.shell import inside_netns
from trainer import metrics

pytestmark = pytest.mark.full  # minutes; tests/unit/test_monitoring.py has what is told
RULES, THERE = monitored.RULES, monitored.THERE
TAGS = "identity,firewall,monitoring"
MADE = (
    "cd /etc/systemd/system; "
    "ls -d trainyard-dcgm* trainyard-exporter* trainyard-grafana* trainyard-metrics* trainyard-prometheus* "
    "/etc/trainyard-monitoring /usr/local/lib/trainyard-monitoring /var/lib/trainyard-prometheus "
    "/var/lib/trainyard-grafana /var/lib/trainyard-units"
)
CARD = (
    "0, 00000000:01:00.0, NVIDIA GeForce RTX 3070 Ti, GPU-7d, 570.86.15, 0x0, "
    "61, 241.07, 290.00, 98, 7011, 8192, 1290, [N/A], [N/A]"
)
# As a data centre's card in trouble: slowed down by heat, hot, with memory errors that were not corrected.
BAD_CARD = CARD.replace("0x0, 61", "0x20, 88").replace("[N/A], [N/A]", "0, 2")
# What a rank with a metrics_port answers, and what it has no business to.
RANK = """
import http.server
class Rank(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        told = 'trainyard_train_lr{run="first",rank="1",host="node2"} 0.5\\ntrainyard_nvidia_smi_up{} 0\\n'
        self.wfile.write(told.encode())
http.server.HTTPServer(("ADDRESS", 9200), Rank).serve_forever()
"""
# A package of a name, from a repository of the host's own, with a program and a unit of the package's, which would
# listen on all addresses, and which its installation starts.
PACKAGE = """
d=/opt/@name@; mkdir -p $d/p/DEBIAN $d/p/usr/lib/systemd/system $d/p/$(dirname @program@)
cat > $d/p/DEBIAN/control <<'END'
Package: @name@
Version: 99
Architecture: all
Maintainer: A Test <test@example.org>
Description: a stand-in
END
cat > $d/p/DEBIAN/postinst <<'END'
#!/bin/sh
getent passwd @name@ > /dev/null || useradd --system --no-create-home --shell /usr/sbin/nologin @name@
systemctl daemon-reload; systemctl enable --now @unit@ || true
END
cat > $d/p/usr/lib/systemd/system/@unit@.service <<'END'
[Service]
ExecStart=/usr/bin/python3 -m http.server 3000
[Install]
WantedBy=multi-user.target
END
cat > $d/p/@program@ <<'END'
#!/usr/bin/python3
@code@
END
chmod 755 $d/p/DEBIAN/postinst $d/p/@program@
dpkg-deb --root-owner-group -b $d/p $d/it.deb
cd $d
{ dpkg-deb -f it.deb; echo "Filename: ./it.deb"; echo "Size: $(stat -c %s it.deb)"
  echo "SHA256: $(sha256sum it.deb | cut -d ' ' -f 1)"; } > Packages
echo "deb [trusted=yes] file:$d ./" > /etc/apt/sources.list.d/@name@.list
apt-get -qq update
"""
# It answers as Grafana does, where its settings say.
GRAFANA = """
import configparser, http.server, sys
(file,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--config=")]
ini = configparser.ConfigParser(interpolation=None, default_section="none")
ini.read(file)
name = ini["metrics.environment_info"]["trainyard"]
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'grafana_environment_info{trainyard="%s"} 1\\n' % name.encode())
http.server.HTTPServer((ini["server"]["http_addr"], int(ini["server"]["http_port"])), Answer).serve_forever()
"""
# And this as DCGM's exporter does, at the address that it is given, the fields of the file that it is given.
DCGM = """
import http.server, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rows = [line.strip().split(", ", 2) for line in open(words["--collectors"]) if not line.startswith("#")]
told = "".join(
    f'# HELP {one} {help}\\n{one}{{gpu="0",pci_bus_id="00000000:01:00.0"}} 0.5\\n' for one, _, help in rows
)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(told.encode())
host, port = words["--address"].split(":")
http.server.HTTPServer((host, int(port)), Answer).serve_forever()
"""


def package(name, unit, program, code):
    """The shell script that has apt know the package PACKAGE."""
    text = PACKAGE
    for key, value in {"name": name, "unit": unit, "program": program, "code": code.strip()}.items():
        text = text.replace(f"@{key}@", value)
    return text


# A disk of a megabyte, of which two per cent are free, of a kind that node_exporter does not leave out; and as full a
# one that nobody can write to.
FULL_DISK = """
mkdir -p /mnt/full; mount -t tmpfs -o size=1m full /mnt/full
mkdir /mnt/full/below /mnt/full/above /mnt/full/scratch /mnt/full/disk /mnt/full/image
mount -t overlay -o lowerdir=/mnt/full/below,upperdir=/mnt/full/above,workdir=/mnt/full/scratch full /mnt/full/disk
mount -t overlay -o lowerdir=/mnt/full/below:/mnt/full/scratch image /mnt/full/image
head -c 1020000 /dev/zero > /mnt/full/disk/file
"""
# A data centre's card as PCI shows it, and a log of the kernel's; a lab's host has neither (lab/host.py).
GPU = """
test ! -e /dev/kmsg; touch /dev/kmsg
mkdir -p /sys/bus/pci/devices/0000:01:00.0; cd /sys/bus/pci/devices/0000:01:00.0
echo 0x10de > vendor; echo 0x030000 > class
"""
XID = "4,1021,73520184,-;NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
# A card for RoCE: its RDMA port as /sys shows it to both exporters, and its network interface, whose driver's counters
# no file has; ours asks ethtool's ioctl for them, which /opt/roce/driver.py answers. From /opt/roce/traffic on there is
# more on the wire than the fabric takes.
PULLED = "cd /sys/class/infiniband/mlx5_0/ports/1; echo 1: DOWN > /sys/new; mv /sys/new state"
ROCE = r"""
port=/sys/class/infiniband/mlx5_0/ports/1
mkdir -p $port/counters $port/hw_counters /opt/roce/net/roce0/device
cd /sys/class/infiniband/mlx5_0; echo 16.35.4030 > fw_ver; echo MT_0000000359 > board_id; echo MT4125 > hca_type
cd $port; echo 4: ACTIVE > state; echo 5: LinkUp > phys_state; echo 100 Gb/sec > rate; echo Ethernet > link_layer
for name in link_downed port_rcv_data port_xmit_data; do echo 0 > counters/$name; done
for name in out_of_sequence np_cnp_sent rp_cnp_handled; do echo 0 > hw_counters/$name; done
echo 10 > hw_counters/lifespan
printf 'rx_prio3_pause 0\ntx_prio3_pause 0\nrx_prio3_pause_duration 0\n' > /opt/roce/counters
cat > /opt/roce/driver.py <<'END'
import ctypes, fcntl, pathlib, runpy, struct, sys
kernel = fcntl.ioctl
def ioctl(door, request, argument):
    if request != 0x8946 or not argument.startswith(b"roce0\0"):
        return kernel(door, request, argument)
    (address,) = struct.unpack("16xP", argument)
    words = pathlib.Path("/opt/roce/counters").read_text().split()
    names, values = words[::2], [int(word) for word in words[1::2]]
    at, answer = {  # linux/ethtool.h: how many, their names, their values
        0x37: (16, struct.pack("I", len(names))),
        0x1B: (12, b"".join(name.encode().ljust(32, b"\0") for name in names)),
        0x1D: (8, struct.pack(f"{len(values)}Q", *values)),
    }[ctypes.c_uint32.from_address(address).value]
    ctypes.memmove(address + at, answer, len(answer))
    return 0
fcntl.ioctl = ioctl
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
END
cat > /opt/roce/traffic <<'END'
put() { cat > /sys/new; mv /sys/new $1; }
cd /sys/class/infiniband/mlx5_0/ports/1; echo 1 | put counters/link_downed
n=0
while sleep 1; do
  n=$((n + 10000))
  for name in out_of_sequence np_cnp_sent rp_cnp_handled; do echo $n | put hw_counters/$name; done
  printf 'rx_prio3_pause 0\ntx_prio3_pause %s\nrx_prio3_pause_duration 0\n' $n > /opt/roce/new
  mv /opt/roce/new /opt/roce/counters
done
END
unit=trainyard-metrics.service; mkdir -p /run/systemd/system/$unit.d
{ echo '[Service]'; echo BindReadOnlyPaths=/opt/roce/net:/sys/class/net; echo ExecStart=
  sed -n 's|^ExecStart=/usr/bin/python3 -I |&/opt/roce/driver.py |p' /etc/systemd/system/$unit; } \
  > /run/systemd/system/$unit.d/roce.conf
systemctl daemon-reload; systemctl restart $unit
"""
NO_ROCE = """
rm -r /run/systemd/system/trainyard-metrics.service.d /opt/roce /sys/class/infiniband
systemctl daemon-reload; systemctl restart trainyard-metrics
"""
# The exporter by the role's unit; and chrony, as the distribution sets it up, follows a clock of ours.
KEPT = """
ln -s /dev/null /etc/systemd/system/prometheus-node-exporter.service
apt-get -qq update; apt-get -qq install -y --no-install-recommends prometheus-node-exporter chrony
echo 'server {clock} iburst minpoll 0 maxpoll 1' > /etc/chrony/conf.d/ours.conf
echo 'makestep 1 -1' >> /etc/chrony/conf.d/ours.conf
cat > /etc/systemd/system/trainyard-exporter.service <<'END'
{unit}
END
systemctl daemon-reload; systemctl restart chrony trainyard-exporter
"""
TOY = """
run: toy
model: tiny
sequence_length: 128
batch_size: 16
balance: even
steps: 1000000
lr: 0.003
lr_schedule: constant
checkpoint_every: 0
checkpoint_minutes: 0.7
threads: 1
device: cpu
timeout_seconds: 60
"""


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
    return monitored.ask(plays.lab, query)


def up(plays):
    """{host: 1 or 0} of what every host tells."""
    return {labels["instance"]: value for labels, value in ask(plays, 'up{job="host"}')}


def firing(plays):
    return monitored.firing(plays.lab)


def fired(plays, alert):
    """The labels of each that fires by that name."""
    return [labels for labels, _ in ask(plays, f'ALERTS{{alertname="{alert}",alertstate="firing"}}')]


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
    plays.sh("node2", "systemd-run --unit=other python3 -m http.server 9100; sleep 2")
    first = plays.run("monitoring", "node2")
    # And one that took it when the ports had been looked at.
    later = ("--start-at-task", "Metrics, alerts, and a page that shows them")
    play = plays.run("monitoring", "node2", None, *later)
    plays.sh("node2", "systemctl stop other")
    assert first.rc != 0 and first.changed["node2"] == 0, first.text
    assert "monitoring_exporter_port: found python3 (process" in first.words, first.text
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
        metrics_port=9200,
    )
    status = (tmp_path / "status.json").read_text()
    run = "/var/lib/trainyard/runs/first"
    plays.sh(
        "node1",
        f"install -d -o trainyard -g trainyard -m 0750 /var/lib/trainyard/runs {run}\n"
        f"cat > {run}/status.json <<'END'\n{status}\nEND\n"
        f"chown trainyard:trainyard {run}/status.json; chmod 0640 {run}/status.json\n{smi(CARD)}",
    )
    answer = RANK.replace("ADDRESS", plays.lab.host("node2").address)
    plays.sh(
        "node2", f"cat > /tmp/rank.py <<'END'\n{answer}\nEND\nsystemd-run --unit=rank python3 /tmp/rank.py"
    )
    wait_for(lambda: ask(plays, "trainyard_run_loss") and ask(plays, "trainyard_gpu_temperature_celsius"), 60)
    ((labels, loss),) = ask(plays, "trainyard_run_loss")
    assert (labels["instance"], labels["run"], loss) == ("node1", "first", 2.5)
    ((labels, degrees),) = ask(plays, "trainyard_gpu_temperature_celsius")
    assert (labels["instance"], labels["gpu"], labels["bus"], degrees) == ("node1", "0", "0000:01:00", 61)
    # Of what a rank answers, what is its own.
    wait_for(lambda: ask(plays, "trainyard_train_lr"), 60)
    ((labels, rate),) = ask(plays, "trainyard_train_lr")
    assert (labels["instance"], labels["run"], labels["rank"], rate) == ("node2", "first", "1", 0.5)
    assert {labels["job"] for labels, _ in ask(plays, "trainyard_nvidia_smi_up")} == {"host"}
    plays.sh("node2", "systemctl stop rank")
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
        rule["alert"] for one in yaml.safe_load(text)["groups"] for rule in one["rules"] if "alert" in rule
    } == alerts.caused()
    assert plays.sh("node1", f"cat {THERE}") == text
    tests = alerts.promtool_tests(text, THERE)
    plays.sh(
        "node1", f"cat > /tmp/rules_test.yml <<'END'\n{tests}\nEND\npromtool test rules /tmp/rules_test.yml"
    )


def smi(card, status=0):
    """What has nvidia-smi on a host list a card, and tell that of it."""
    program = f"#!/bin/sh\\n[ \\$1 = -L ] && echo GPU 0: one || echo '{card}'; exit {status}\\n"
    return f'printf "{program}" > /usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi'


@contextlib.contextmanager
def dashboard(plays, folder):
    """`make dashboard`'s tunnel, whose SSH asks for the lab's password: its process, which goes with the block."""
    asked = folder / "askpass"
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
    try:
        yield process
    finally:
        tunnel = [int(pid) for pid in children(process.pid)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert tunnel and not [pid for pid in tunnel if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def page(plays, tmp_path_factory):
    """The address of the page, through the tunnel."""
    with dashboard(plays, tmp_path_factory.mktemp("askpass")) as process:
        yield process.stdout.readline().split()[0]


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
            for words in (
                "t-mon",
                "1 of 2 hosts up",
                "Run first",
                "RTX 3070 Ti",
                "rank 1 on node2",
                "Network",
                "eth0",
            ):
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
        f"echo 'groups: []' > {THERE}; systemctl restart trainyard-prometheus",
    )
    play = plays.run("monitoring")
    assert play.rc == 0 and play.changed["node1"] > 0 and play.changed["node2"] > 0, play.text
    wait_for(lambda: up(plays) == {"node1": 1, "node2": 1}, 40)
    assert plays.sh("node1", f"cat {THERE}") == RULES.read_text()
    wait_for(lambda: ("HostDown", "node2") not in firing(plays), 40)


def test_what_goes_wrong_on_hosts_fires_until_it_is_mended(plays):
    """By what does it, as far as a container has that: a cable, a disk, a unit; cards by a stand-in for nvidia-smi."""
    monitored.hasten(plays.lab)
    plays.sh("node1", smi(BAD_CARD))
    plays.sh("node2", f"{FULL_DISK}\nsystemctl stop trainyard-metrics")
    host = plays.lab.host("node2")
    for state in ("down", "up", "down", "up"):
        host.network.ip("link", "set", f"p{host.number}", state)
        time.sleep(2)
    lasting = {
        ("GpuHot", "node1"),
        ("DiskSoonFull", "node2"),
        ("HostTellsNothing", "node2"),
        ("EccErrors", "node1"),
    }
    passing = {("GpuThrottled", "node1"), ("LinkFlaps", "node2")}  # they look back for a while
    wait_for(lambda: lasting | passing <= firing(plays), 180)
    assert {labels["mountpoint"] for labels in fired(plays, "DiskSoonFull")} == {"/mnt/full/disk"}
    assert {
        value for labels, value in ask(plays, "node_filesystem_readonly") if "image" in labels["mountpoint"]
    } == {1}
    plays.sh("node1", smi("Unable to determine the device handle", 15))
    wait_for(lambda: ("GpuSilent", "node1") in firing(plays), 90)
    plays.sh("node1", smi(CARD))
    plays.sh("node2", "umount /mnt/full/disk /mnt/full/image /mnt/full; systemctl start trainyard-metrics")
    wait_for(lambda: not {*lasting, ("GpuSilent", "node1")} & firing(plays), 120)


def test_what_cards_and_their_drivers_count_fires(plays):
    """What the kernel tells of such cards is a stand-in; the exporters that read it are those of the role."""
    monitored.hasten(plays.lab)
    plays.sh("node1", f"{GPU}\n{smi(CARD)}")
    plays.sh("node2", ROCE)
    counters = 'sum({__name__=~"trainyard_(gpu_xid_errors|rdma_hw_counter|nic_pause)_total|node_infiniband_link_d.*"})'
    # Each is known before it changes: one of an error, three and one of the port, two of its pauses.
    wait_for(lambda: [value for _, value in ask(plays, counters.replace("sum", "count"))] == [7], 90)
    assert [value for _, value in ask(plays, counters)] == [0]
    congested = {("RdmaLosesPackets", "node2"), ("RdmaCongested", "node2"), ("PauseStorm", "node2")}
    assert not {*congested, ("GpuXid", "node1")} & firing(plays)
    plays.sh("node1", f"cat >> /dev/kmsg <<'END'\n{XID}\nEND")
    plays.sh("node2", "systemd-run --quiet --unit=traffic sh /opt/roce/traffic")
    wait_for(lambda: {*congested, ("GpuXid", "node1")} <= firing(plays), 120)
    (xid,), (pauses,) = fired(plays, "GpuXid"), fired(plays, "PauseStorm")
    assert xid["bus"] == "0000:01:00"
    assert (pauses["device"], pauses["direction"], pauses["priority"]) == ("roce0", "tx", "3")
    assert ("mlx5_0", "1") in {(flap["device"], flap.get("port")) for flap in fired(plays, "LinkFlaps")}
    assert not fired(plays, "RdmaDown")
    plays.sh("node2", PULLED)
    wait_for(lambda: fired(plays, "RdmaDown"), 90)
    plays.sh("node2", "systemctl stop traffic")
    wait_for(lambda: not congested & firing(plays), 150)
    plays.sh("node2", NO_ROCE)
    plays.sh("node1", "rm -r /dev/kmsg /sys/bus/pci; systemctl restart trainyard-metrics")


def test_what_goes_wrong_with_a_run_fires(plays, tmp_path):
    """Of a run whose ranks are this machine's processes: their directories lie on the hosts, whose exporters tell.

    test_dashboard.py has what other alerts need, a run that the hosts themselves train.
    """
    monitored.hasten(plays.lab)
    run = "/var/lib/trainyard/runs/toy"
    config = tmp_path / "run.yaml"
    # A text that is soon known by heart, so that a loss that leaps leaps far.
    text = "the ship sails over a calm sea and nobody on board knows where it will land."
    (tmp_path / "data.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 4000)
    config.write_text(f"{TOY}dataset: {tmp_path}/data.jsonl\n")
    groups = []
    for rank, host in enumerate(("node1", "node2")):  # who call themselves node0 and node1 here
        folders = f"{os.path.dirname(run)} {run} {run}/checkpoints"
        plays.sh(host, f"install -d -o trainyard -g trainyard -m 0750 {folders}")
        (tmp_path / f"node{rank}").symlink_to(f"/proc/{plays.lab.host(host).leader()}/root{run}")
        groups.append(plays.lab.host(host).group)

    def begin(*overrides):
        """The ranks, each of which has its host's share of CPU."""
        toy = ranks.Ranks(tmp_path, 2, config, *overrides)
        for process, group in zip(toy.processes, groups, strict=True):
            for file in group.procs_files("exec"):
                file.write_text(str(process.pid))
        return toy

    toy = begin()
    try:
        toy.wait_for_step(20)
        groups[1].set_cpus(0.2)

        def last():
            """By rank and host; another run's status, of an earlier test, has one, too."""
            found = fired(plays, "OneRankAlwaysLast")
            return [(one["rank"], one["host"]) for one in found if one["run"] == "toy"]

        wait_for(lambda: last() == [("1", "node1")], 150)
        groups[1].set_cpus(None)
        plays.sh("node1", f"mount -t tmpfs -o size=64k full {run}/checkpoints")
        wait_for(lambda: fired(plays, "RunWarns"), 180)
        (warns,) = fired(plays, "RunWarns")
        assert warns["run"] == "toy" and re.match("node0: .* no space left", warns["warning"])
        plays.sh("node1", f"umount {run}/checkpoints")
        of_runs = {"RunWarns", "LossSpike"}
        wait_for(lambda: not last() and not of_runs & {name for name, _ in firing(plays)}, 180)
        toy.processes[0].terminate()
        assert toy.codes(60) == [75, 75], toy.log()
        # It is gone on with, at a rate at which it learns no more.
        steps = len(ranks.losses(toy.directory())) + 30
        toy = begin(f"steps={steps}", "lr=0.3")
        assert toy.codes(120) == [0, 0], toy.log()
        wait_for(lambda: [one["run"] for one in fired(plays, "LossSpike")] == ["toy"], 120)
    finally:
        groups[1].set_cpus(None)
        for process in toy.processes:
            process.kill()
            process.join()


def test_a_mask_goes_again_whose_package_cannot_be_had_and_the_owners_stays(plays):
    """Ours never came then: the note of the mask tells that there is one."""
    mask = "/etc/systemd/system/grafana-server.service"
    there = f"ls {mask} /var/lib/trainyard-units/grafana-server.service 2>/dev/null || true"
    play = plays.run("monitoring", "cluster", {"monitoring_grafana": "always"})
    assert play.rc != 0 and len(plays.sh("node1", there).split()) == 2, play.text
    never = {"monitoring_grafana": "never"}
    play = plays.run("monitoring", "cluster", never)
    assert play.rc == 0 and play.changed["node1"] > 0 and plays.sh("node1", there) == "", play.text
    plays.sh("node1", f"ln -s /dev/null {mask}")
    assert plays.run("monitoring", "cluster", never).changed == {"node1": 0, "node2": 0}
    assert plays.sh("node1", f"readlink {mask}; rm {mask}").strip() == "/dev/null"


def test_grafana_runs_where_apt_has_it(plays, tmp_path):
    plays.sh("node1", package("grafana", "grafana-server", "usr/share/grafana/bin/grafana", GRAFANA))
    play = plays.run("monitoring")
    assert play.rc == 0 and play.changed["node1"] > 0 and play.changed["node2"] == 0, play.text
    assert plays.run("monitoring").changed == {"node1": 0, "node2": 0}
    assert {place for place in listening(plays, "node1") if place[1].startswith("300")} == {
        ("127.0.0.1", "3001")
    }
    assert plays.sh("node1", "systemctl is-enabled grafana-server || true").strip() == "masked"
    owner = plays.sh("node1", "ps -o user= -p $(systemctl show -P MainPID trainyard-grafana)")
    assert owner.strip() == "grafana"
    for name in ("cluster", "run", "network"):
        board = json.loads(plays.sh("node1", f"cat /etc/trainyard-monitoring/grafana/dashboards/{name}.json"))
        assert board["uid"] == f"trainyard-{name}" and board["panels"]
        assert "{{instance}}" in str(board) or name == "run"
    with dashboard(plays, tmp_path) as process:
        assert "/user/ shows the cluster" in process.stdout.readline()
        assert "/dashboards shows it in Grafana" in process.stdout.readline()


def test_grafana_goes_where_it_is_not_wanted(plays):
    play = plays.run("monitoring", "cluster", {"monitoring_grafana": "never"})
    assert play.rc == 0 and play.changed["node1"] > 0 and play.changed["node2"] == 0, play.text
    assert not [place for place in listening(plays, "node1") if place[1].startswith("300")]
    left = (
        "ls -d /etc/systemd/system/*grafana* /etc/trainyard-monitoring/grafana /var/lib/trainyard-grafana "
        "/var/lib/trainyard-units/grafana*"
    )
    assert plays.sh("node1", f"{left} 2>/dev/null || true") == ""
    # The package stays; its own instance neither runs nor comes at the next boot.
    assert plays.sh("node1", "systemctl is-enabled grafana-server || true").strip() == "disabled"
    wait_for(lambda: up(plays) == {"node1": 1, "node2": 1}, 30)
    assert plays.run("monitoring").changed["node1"] > 0  # so that there is one for reset to remove


def test_dcgm_tells_where_apt_has_it_and_a_card_is(plays):
    script = package("datacenter-gpu-manager-exporter", "nvidia-dcgm-exporter", "usr/bin/dcgm-exporter", DCGM)
    for host in ("node1", "node2"):
        plays.sh(host, script)
    plays.sh("node1", smi(CARD))
    plays.sh("node2", "rm -f /usr/local/bin/nvidia-smi")
    play = plays.run("monitoring")
    assert play.rc == 0 and play.changed["node1"] > 0 and play.changed["node2"] == 0, play.text
    assert plays.run("monitoring").changed == {"node1": 0, "node2": 0}
    assert {place for place in listening(plays, "node1") if place[1] == "9400"} == {("127.0.0.1", "9400")}
    assert plays.sh("node1", "systemctl is-enabled nvidia-dcgm-exporter || true").strip() == "masked"
    wait_for(lambda: ask(plays, "trainyard_gpu_tensor_active_ratio"), 90)
    ((labels, busy),) = ask(plays, "trainyard_gpu_tensor_active_ratio")
    assert (labels["instance"], labels["bus"], busy) == ("node1", "0000:01:00", 0.5)


def dcgm_listens(plays, host):
    return [place for place in listening(plays, host) if place[1] == "9400"]


def test_dcgm_that_does_not_answer_stops_nothing_unless_it_has_to_be(plays):
    unit = "/etc/systemd/system/trainyard-dcgm.service"
    break_it = f"printf '#!/bin/sh\\nexit 1\\n' > /usr/bin/dcgm-exporter; echo >> {unit}"
    plays.sh("node1", break_it)
    plays.sh("node2", smi(CARD))  # where it comes in the same run, whatever becomes of the other one
    play = plays.run("monitoring")
    assert play.rc == 0 and "node1: goes on without DCGM." in play.words, play.text
    assert "node2: goes on" not in play.words and dcgm_listens(plays, "node2")
    assert plays.run("monitoring").changed == {"node1": 0, "node2": 0}
    plays.sh("node1", break_it)
    play = plays.run("monitoring", "cluster", {"monitoring_dcgm": "always"})
    assert play.rc != 0 and "9400/metrics: found no answer" in play.words, play.text
    play = plays.run("monitoring", "cluster", {"monitoring_dcgm": "never"})
    assert play.rc == 0 and play.changed["node1"] > 0 and play.changed["node2"] > 0, play.text
    left = f"ls {unit} /usr/local/lib/trainyard-monitoring/dcgm.csv 2>/dev/null || true"
    for host in ("node1", "node2"):
        assert plays.sh(host, left) == "" and not dcgm_listens(plays, host)
        assert plays.sh(host, "systemctl is-enabled nvidia-dcgm-exporter || true").strip() == "disabled"


def test_dcgm_is_not_had_beside_another_one_and_stays_where_a_card_is_sick(plays):
    """The owner's exporter at the port is asked, as it is; nvidia-smi that fails for once takes nothing away."""
    script = package("datacenter-gpu-manager-exporter", "nvidia-dcgm-exporter", "usr/bin/dcgm-exporter", DCGM)
    plays.sh(
        "node1",
        f"{script}\napt-get -qq install -y --reinstall datacenter-gpu-manager-exporter >/dev/null 2>&1",
    )
    theirs = "/usr/bin/dcgm-exporter --address 127.0.0.1:9400 --collectors /tmp/theirs.csv"
    field = "DCGM_FI_PROF_SM_ACTIVE, gauge, Theirs."
    plays.sh("node1", f"echo '{field}' > /tmp/theirs.csv; systemd-run --quiet --unit=theirs {theirs}")
    wait_for(lambda: dcgm_listens(plays, "node1"), 30)
    play = plays.run("monitoring")
    assert play.rc == 0 and play.changed["node1"] == 0 and play.changed["node2"] > 0, play.text
    wait_for(lambda: ask(plays, 'trainyard_gpu_sm_active_ratio{instance="node1"}'), 90)
    plays.sh("node1", "systemctl stop theirs")
    assert plays.run("monitoring").changed["node1"] > 0
    plays.sh("node1", "printf '#!/bin/sh\\nexit 9\\n' > /usr/local/bin/nvidia-smi")
    assert plays.run("monitoring").changed == {"node1": 0, "node2": 0}
    assert dcgm_listens(plays, "node1")  # and reset has one to remove


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
        assert not [
            place for place in listening(plays, host) if place[0] == address or place[1] in ("9090", "3001")
        ]
        # The package stays; its own instance neither runs nor comes at the next boot.
        assert plays.sh(host, "systemctl is-enabled prometheus-node-exporter || true").strip() == "disabled"
        assert plays.sh(host, "systemctl is-active prometheus-node-exporter || true").strip() == "inactive"
    # DCGM's was masked on node2; on node1 it had come before ours.
    assert plays.sh("node2", "systemctl is-enabled nvidia-dcgm-exporter || true").strip() == "disabled"


@pytest.mark.timeout(1800)
def test_a_clock_that_nobody_keeps_fires(able_to_emulate, make_lab, tmp_path):
    """On a virtual machine, for a container's clock is its machine's. Prometheus runs beside it, by this one's."""
    lab = make_lab("t-clock", hosts=1, vms=True)
    program = installed.unpacked("prometheus", tmp_path) / "usr/bin/prometheus"
    host, templates = lab.host("node1"), ROOT / "roles/monitoring/templates"
    given = {
        "_monitoring_etc": tmp_path,
        "_monitoring_run_dir": "/run/trainyard-metrics",
        "_monitoring_hosts": {"node1": {"cluster_address": host.address}},
        "_monitoring_address": host.address,
        "monitoring_exporter_port": 9100,
    }

    jinja = jinja2.Environment(trim_blocks=True)
    jinja.filters["to_json"] = json.dumps  # Ansible's

    def rendered(name):
        return jinja.from_string((templates / name).read_text()).render(given)

    unit = rendered("trainyard-exporter.service.j2")
    lab.exec("node1", "sh", "-ec", f"exec >&2\n{KEPT.format(clock=lab.network.gateway, unit=unit)}")
    (tmp_path / "rules.yml").write_text(monitored.sooner())
    (tmp_path / "prometheus.yml").write_text(rendered("prometheus.yml.j2"))
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    words.append("--web.listen-address=127.0.0.1:9090")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(lab.network.enter(program, *words), stderr=log)

    def clocks():
        """The alerts of clocks that fire."""
        names = {name for name, _ in monitored.firing(lab, monitored.ask_beside)}
        return names & {"ClockOff", "ClockNotSynchronised"}

    def told(name):
        return [value for _, value in monitored.ask_beside(lab, name)]

    try:
        with ntp(lab):
            wait_for(lambda: told("node_timex_sync_status") == [1], 180)
            wait_for(lambda: clocks() == set(), 60)
            lab.exec("node1", "systemctl", "stop", "chrony")
            lab.exec("node1", "python3", "-c", AN_HOUR_LATER)
            wait_for(lambda: clocks() == {"ClockNotSynchronised"}, 120)
            lab.exec("node1", "date", "-s", f"@{time.time() + 30:.0f}")
            wait_for(lambda: clocks() == {"ClockNotSynchronised", "ClockOff"}, 120)
            lab.exec("node1", "systemctl", "start", "chrony")
            wait_for(lambda: clocks() == set(), 180)
    finally:
        process.kill()
        process.wait()
        lab.down()


# The kernel's bound of its clock's error (struct timex, microseconds) as it is after an hour and a half without chrony.
AN_HOUR_LATER = """
import ctypes, struct
told = bytearray(208)
struct.pack_into("I", told, 0, 4)  # ADJ_MAXERROR
struct.pack_into("q", told, 24, 2_700_000)
assert ctypes.CDLL(None).adjtimex((ctypes.c_char * 208).from_buffer(told)) >= 0
"""


@contextlib.contextmanager
def ntp(lab):
    """A server of the time, this machine's, at the lab's gateway."""
    with inside_netns(lab.network.netns):
        door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        door.bind((lab.network.gateway, 123))
    door.settimeout(0.5)
    over = threading.Event()

    def answer():
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                question, peer = door.recvfrom(512)
                since_1900 = time.time() + 2_208_988_800
                now = struct.pack(">Q", int(since_1900 * 2**32))
                # A server (4) of NTP's version 4, itself set by a clock (stratum 1), precise to a microsecond.
                head = struct.pack(">BBBbII4s", 0x24, 1, 0, -20, 0, 0, b"LOCL")
                door.sendto(head + now + question[40:48] + now + now, peer)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        door.close()
