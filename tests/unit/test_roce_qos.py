"""Where the role roce_qos keeps what its unit reads."""

from pathlib import Path

import yaml

ROLE = Path(__file__).resolve().parents[2] / "roles/roce_qos"
TASKS = yaml.safe_load((ROLE / "tasks/member.yml").read_text())
FILE, BEFORE = "/etc/trainyard-roce-qos.json", "/etc/trainyard/roce-qos.json"


def of(module):
    return [task[module] for task in TASKS if module in task]


def test_the_trainers_directory_is_left_to_the_trainer():
    """It comes later, and leaves the rights of a directory that is there as they are."""
    files = of("ansible.builtin.file")
    assert [one["path"] for one in files if one["state"] == "directory"] == ["/usr/local/lib/trainyard"]
    assert [one["path"] for one in files if one["state"] == "absent"] == [BEFORE]


def test_what_is_written_is_what_the_unit_reads_and_reset_removes():
    written = [one["dest"] for one in of("ansible.builtin.copy") if "content" in one]
    unit = (ROLE / "files/trainyard-roce-qos.service").read_text()
    commands = [*of("ansible.builtin.command"), *(one for one in unit.splitlines() if one.startswith("Exec"))]
    assert {*written, *(command.split()[-1] for command in commands)} == {FILE}
    made = yaml.safe_load((ROLE / "vars/main.yml").read_text())["_roce_qos_made"]
    assert {FILE, BEFORE} <= {one["path"] for one in made}
