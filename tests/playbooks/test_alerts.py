"""The alerts of the role monitoring, by the distribution's own promtool and exporter."""

import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import alerts
import installed
import yaml

RULES = Path(__file__).resolve().parents[2] / "roles/monitoring/files/rules.yml"


def test_each_alert_is_caused_once_and_a_healthy_cluster_causes_none(tmp_path):
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == alerts.caused()
    promtool = installed.unpacked("prometheus", tmp_path) / "usr/bin/promtool"
    tests = tmp_path / "tests.yml"
    tests.write_text(alerts.promtool_tests(RULES.read_text(), str(RULES)))
    done = subprocess.run([promtool, "test", "rules", tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_exporter_has_what_alerts_and_page_ask_for(tmp_path):
    """Its own names, by the collectors of our unit; of cards and memory that are not here, on a /sys that has them."""
    sys_ = tmp_path / "sys"
    port = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "100 Gb/sec (4X EDR)"}
    for name, value in {**port, "counters/link_downed": "1", "counters/port_xmit_data": "2"}.items():
        write(sys_ / "class/infiniband/mlx5_0/ports/1" / name, value)
    for name in ("ce_count", "ce_noinfo_count", "ue_count", "ue_noinfo_count"):
        write(sys_ / "devices/system/edac/mc/mc0" / name, "0")
    for name in ("fw_ver", "board_id", "hca_type"):
        write(sys_ / "class/infiniband/mlx5_0" / name, "1")
    write(sys_ / "class/net/eth0/carrier_changes", "2")
    write(sys_ / "class/net/eth0/address", "02:00:00:00:00:01")
    write(tmp_path / "text/trainyard.prom", "trainyard_something 1")

    unit = (RULES.parents[1] / "templates/trainyard-exporter.service.j2").read_text()
    flags = [flag for flag in re.findall(r"--collector\.\S+", unit) if "{{" not in flag]
    flags = [
        flag.replace("$$", "$") for flag in flags if not flag.startswith("--collector.textfile.directory")
    ]
    exporter = installed.unpacked("prometheus-node-exporter", tmp_path) / "usr/bin/prometheus-node-exporter"
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    paths = [f"--path.sysfs={sys_}", f"--collector.textfile.directory={tmp_path}/text"]
    process = subprocess.Popen(
        [exporter, f"--web.listen-address={place}", *flags, *paths], stderr=(tmp_path / "log").open("w")
    )
    try:
        page = read(f"http://{place}/metrics")
    finally:
        process.kill()
        process.wait()
    asked = RULES.read_text() + (RULES.parent / "page.html").read_text()
    names = set(re.findall(r"\bnode_[a-z0-9]+(?:_[a-zA-Z0-9]+)+", asked))
    assert len(names) > 12
    there = set(re.findall(r"^node_\w+", page, re.MULTILINE))
    assert names - there == set(), (tmp_path / "log").read_text()


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def read(url, seconds=20):
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)
