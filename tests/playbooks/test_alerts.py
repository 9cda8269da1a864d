"""The alerts of the role monitoring, by the distribution's own promtool and exporter."""

import json
import re
import runpy
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import alerts
import installed
import jinja2
import pytest
import yaml

from plugins.filter.grafana import grafana_dashboard

ROLE = Path(__file__).resolve().parents[2] / "roles/monitoring"
RULES = ROLE / "files/rules.yml"
DASHBOARDS = ROLE / "files/dashboards.yml"


@pytest.fixture(scope="module")
def promtool(tmp_path_factory):
    """Runs the distribution's promtool with those words, which must find nothing wrong; returns what it says."""
    program = installed.unpacked("prometheus", tmp_path_factory.mktemp("prometheus")) / "usr/bin/promtool"

    def run(*words):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_each_alert_is_caused_once_and_a_healthy_cluster_causes_none(tmp_path, promtool):
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules if "alert" in rule} == alerts.caused()
    tests = tmp_path / "tests.yml"
    tests.write_text(alerts.promtool_tests(RULES.read_text(), str(RULES)))
    promtool("test", "rules", tests)


def test_what_dashboards_ask_is_promql(tmp_path, promtool):
    dashboards = yaml.safe_load(DASHBOARDS.read_text())
    asked = [
        target["expr"]
        for name in dashboards
        for panel in json.loads(grafana_dashboard(dashboards, name))["panels"]
        for target in panel["targets"]
    ]
    rules = [{"record": f"asked:{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", tmp_path / "rules.yml")


def test_the_pages_fullest_disk_is_one_that_is_written_to(tmp_path, promtool):
    """By the page's own words, of a host with an image, which is full."""
    asked = re.search(r'^  disk: "(.*)",$', (ROLE / "files/page.html").read_text(), re.MULTILINE)[1]
    series = {alerts.IMAGE: (0, 1), alerts.DISK: (40, 0), alerts.DISK.replace('"/"', '"/home"'): (70, 0)}
    given = [
        {"series": f"node_filesystem_{name}{disk}", "values": str(value)}
        for disk, (free, readonly) in series.items()
        for name, value in (("avail_bytes", free), ("size_bytes", 100), ("readonly", readonly))
    ]
    told = [{"expr": asked, "eval_time": "0m", "exp_samples": [{"labels": alerts.DISK, "value": 0.6}]}]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": told}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [test]}))
    promtool("test", "rules", tmp_path / "tests.yml")


def test_prometheus_takes_what_the_role_writes(tmp_path, promtool):
    """Its configuration, and the ranks that it is told of while a run with a metrics_port goes on."""
    (tmp_path / "rules.yml").write_text(RULES.read_text())
    status = {"state": "running", "run": "a", "metrics_port": 9200, "parts": {"ranks": ["node1", "node2"]}}
    targets = runpy.run_path(str(ROLE / "files/host_metrics.py"))["trainer_targets"]([status])
    (tmp_path / "trainer.json").write_text(json.dumps(targets))
    hosts = {"node1": {"cluster_address": "192.0.2.1"}, "node2": {"ansible_host": "192.0.2.2"}}
    given = {"_monitoring_etc": tmp_path, "_monitoring_run_dir": tmp_path, "_monitoring_hosts": hosts}
    jinja = jinja2.Environment(trim_blocks=True)
    jinja.filters["to_json"] = json.dumps  # Ansible's
    template = jinja.from_string((ROLE / "templates/prometheus.yml.j2").read_text())
    given["cluster_name"] = "Anna's lab (2)"
    (tmp_path / "prometheus.yml").write_text(template.render(monitoring_exporter_port=9100, **given))
    assert "1 rule files found" in promtool("check", "config", tmp_path / "prometheus.yml")
    jobs = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert [one["targets"] for one in jobs[0]["static_configs"]] == [["192.0.2.1:9100"], ["192.0.2.2:9100"]]
    assert len(targets) == 2


def test_the_exporter_has_what_alerts_and_page_ask_for(tmp_path):
    """Its own names, by the collectors of our unit; of cards and memory that are not here, on a /sys that has them."""
    sys_ = tmp_path / "sys"
    port = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "100 Gb/sec (4X EDR)"}
    for name, value in {**port, "counters/link_downed": "1"}.items():
        write(sys_ / "class/infiniband/mlx5_0/ports/1" / name, value)
    for name in ("port_xmit_data", "port_rcv_data"):
        write(sys_ / "class/infiniband/mlx5_0/ports/1/counters" / name, "2")
    for name in ("ce_count", "ce_noinfo_count", "ue_count", "ue_noinfo_count"):
        write(sys_ / "devices/system/edac/mc/mc0" / name, "0")
    for name in ("fw_ver", "board_id", "hca_type"):
        write(sys_ / "class/infiniband/mlx5_0" / name, "1")
    for name, value in {"carrier_changes": "2", "operstate": "up", "speed": "10000"}.items():
        write(sys_ / "class/net/eth0" / name, value)
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
    asked = "".join(file.read_text() for file in (RULES, DASHBOARDS, RULES.parent / "page.html"))
    names = set(re.findall(r"\bnode_(?!exporter)[a-zA-Z0-9_]+", asked))
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
