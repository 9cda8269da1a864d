"""The alerts of the role monitoring, each caused once, by the distribution's own promtool."""

import subprocess
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
