"""Where the role roce_qos keeps what its unit reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.fixture
def host(tmp_path):
    """A host's files below a directory, and a `dcb` that takes all and shows nothing."""
    (tmp_path / "sys/kernel/config/rdma_cm").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    dcb = tmp_path / "bin/dcb"
    dcb.parent.mkdir()
    dcb.write_text(
        '#!/bin/sh\necho "$*" >> $ROOT/asked\ncase $* in *gone*) echo no device >&2; exit 1;; esac\n'
    )
    dcb.chmod(0o755)
    return tmp_path


def qos(host, what, *ports):
    wanted = {"dscp": 26, "priority": 3, "pfc": True, "tos": 106, "ports": list(ports)}
    (host / "wanted.json").write_text(json.dumps(wanted))
    command = [sys.executable, ROLE / "files/roce_qos.py", what, host / "wanted.json"]
    environment = {**os.environ, "ROOT": str(host), "PATH": f"{host}/bin:{os.environ['PATH']}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def name_device(host, interface, device):
    """As udev names it, and configfs makes its files."""
    there = host / f"sys/class/net/{interface}/device/infiniband"
    subprocess.run(["rm", "-rf", there], check=True)
    (there / device).mkdir(parents=True)
    (host / f"sys/kernel/config/rdma_cm/{device}/ports/1").mkdir(parents=True)


def test_a_device_that_has_another_name_since_the_boot_is_found_by_its_interface(host):
    port = {"device": "mlx5_0", "port": 1, "interface": "eth1"}
    name_device(host, "eth1", "mlx5_0")
    assert qos(host, "apply", port).returncode == 0
    assert (host / "sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos").read_text() == "106"
    subprocess.run(["rm", "-rf", host / "sys/kernel/config/rdma_cm/mlx5_0"], check=True)
    name_device(host, "eth1", "rocep1s0")
    (host / "run/trainyard-roce-qos.json").unlink()  # a boot
    done = qos(host, "apply", port)
    assert done.returncode == 0, done.stderr
    assert (host / "sys/kernel/config/rdma_cm/rocep1s0/ports/1/default_roce_tos").read_text() == "106"


def test_congestion_control_is_switched_as_it_was(host):
    port = {"device": "mlx5_0", "port": 1, "interface": "eth1"}
    name_device(host, "eth1", "mlx5_0")
    switches = {}
    for end, text in (("np", "0"), ("rp", "1")):
        switches[end] = host / f"sys/class/net/eth1/ecn/roce_{end}/enable/3"
        switches[end].parent.mkdir(parents=True)
        switches[end].write_text(text)
    assert qos(host, "apply", port).returncode == 0
    assert [one.read_text() for one in switches.values()] == ["1", "1"]
    assert qos(host, "apply", port).returncode == 0  # again: what was there before stays known
    done = qos(host, "clear", port)
    assert done.returncode == 0, done.stderr
    assert [one.read_text() for one in switches.values()] == ["0", "1"]


def test_a_port_that_cannot_be_cleared_does_not_keep_the_other_from_its_class(host):
    names = {"mlx5_0": "gone0", "mlx5_1": "eth1"}
    ports = [{"device": device, "port": 1, "interface": name} for device, name in names.items()]
    for port in ports:  # dcb knows nothing of the first
        name_device(host, port["interface"], port["device"])
    applied = {"dscp": 26, "priority": 3, "pfc": True, "tos": 106, "ports": ports}
    (host / "run/trainyard-roce-qos.json").write_text(json.dumps(applied))
    done = qos(host, "apply", ports[1])
    assert done.returncode == 0 and "warning: gone0: `dcb" in done.stderr, done.stderr
    assert "dev eth1" in (host / "asked").read_text()


def test_what_was_applied_to_a_card_that_is_gone_is_forgotten(host):
    """Else nothing could be set again until the next boot."""
    applied = {"dscp": 26, "priority": 3, "pfc": True, "tos": 106}
    applied["ports"] = [{"device": "mlx5_0", "port": 1, "interface": "gone1"}]
    (host / "run/trainyard-roce-qos.json").write_text(json.dumps(applied))
    name_device(host, "eth1", "mlx5_1")
    done = qos(host, "apply", {"device": "mlx5_1", "port": 1, "interface": "eth1"})
    assert done.returncode == 0, done.stderr
    assert "gone1" not in (host / "asked").read_text()
    assert json.loads((host / "run/trainyard-roce-qos.json").read_text())["ports"][0]["interface"] == "eth1"
