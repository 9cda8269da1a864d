"""The role nvidia over several hosts, whose answers are made up: one driver for all, or why theirs differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands in for the module nvidia_survey: what a host would answer, and its facts, lie in a file.
STAND_IN = """#!/usr/bin/python
import json
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"sys_root": {"type": "str"}, "kernel": {"type": "str"}}, supports_check_mode=True)
module.exit_json(changed=False, **json.load(open(module.params["sys_root"])))
"""
DEBIAN_12 = {"distribution": "Debian", "distribution_version": "12.15", "architecture": "x86_64"}
RTX_5070_TI, RTX_3070_TI = "2c05", "2482"


def survey(device, *packages):
    """A host with one card, and packages (name, version) of a driver."""
    card = {"address": "0000:01:00.0", "device": device, "class": "0300", "driver": None}
    mirror = {
        "uris": ["http://mirror.example/debian"],
        "suites": ["bookworm"],
        "components": ["main", "contrib", "non-free", "non-free-firmware"],
        "options": {},
    }
    return {
        **dict.fromkeys(("nouveau", "container", "runfile", "desktop", "initramfs_stale"), False),
        **dict.fromkeys(("loaded", "secure_boot", "enrolled", "own_sources")),
        **{name: [] for name in ("kernel_packages", "kernels_backported", "runs", "units", "modules")},
        **{"headers": True, "nvswitches": 0, "prime": "", "passphrases": []},
        **{"cards": [card], "device_nodes": 0, "kernel": "6.1.0-50-amd64", "sources": [mirror]},
        "free_bytes": {"/usr": 10**11, "/var/lib/dkms": 10**11, "/boot": 10**11},
        "packages": [
            {"name": name, "version": version, "source": "nvidia", "held": True, "whole": True}
            for name, version in packages
        ],
    }


OWN_570 = [("libcuda1", "570.133.20-1"), ("nvidia-kernel-open-dkms", "570.133.20-1")]


@pytest.fixture
def play(tmp_path):
    """play(tasks, {host: {survey, variables}}, limit, **extra): (status, words) of the role on hosts that answer so."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "nvidia_survey.py").write_text(STAND_IN)

    def run(tasks, hosts, limit="all", **extra):
        found = {}
        for name, variables in hosts.items():
            answers = tmp_path / f"{name}.json"
            answers.write_text(
                json.dumps({"survey": variables.pop("survey", None), "ansible_facts": DEBIAN_12})
            )
            local = {
                "ansible_connection": "local",
                "ansible_become": False,
                "ansible_python_interpreter": sys.executable,
            }
            found[name] = {**local, "answers": str(answers), **variables}
        inventory = tmp_path / "hosts.json"
        inventory.write_text(json.dumps({"all": {"children": {"cluster": {"hosts": found}}}}))
        role = {"name": "nvidia", "tasks_from": tasks, "rolespec_validate": False}
        plays = [{"hosts": "cluster", "gather_facts": False, "any_errors_fatal": True}]
        plays[0]["tasks"] = [{"ansible.builtin.include_role": role}]
        book = tmp_path / "play.json"
        book.write_text(json.dumps(plays))
        extra = {"python_env_torch": "torch==2.13.0+cu128", **extra}  # which older drivers run, too
        settings = {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_LIBRARY": f"{modules}:{ROOT / 'plugins/modules'}",
            **{"ANSIBLE_STDOUT_CALLBACK": "default", "ANSIBLE_NOCOLOR": "1"},
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        }
        done = subprocess.run(
            [
                *(Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, book, "--check"),
                *("-l", limit, "-e", json.dumps({"_nvidia_sys_root": "{{ answers }}", **extra})),
            ],
            env={**os.environ, **settings},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).replace("\\n", " ").split())

    return run


def test_a_card_that_needs_a_newer_driver_brings_it_to_all_hosts(play):
    hosts = {"desktop": {"survey": survey(RTX_5070_TI)}, "oldie": {"survey": survey(RTX_3070_TI)}}
    _, said = play("main", hosts)
    assert "oldie: 1 Ampere: driver 580, open kernel modules, from NVIDIA's repository" in said
    assert (
        "one driver for all hosts, 580 of NVIDIA's repository: 535 of Debian does not serve desktop" in said
    )


def test_a_driver_that_would_differ_is_refused_before_any_change_unless_told_otherwise(play):
    hosts = {
        "desktop": {"survey": survey(RTX_5070_TI)},
        "oldie": {"survey": survey(RTX_3070_TI, *OWN_570)},
    }
    status, said = play("main", {name: {**host} for name, host in hosts.items()})
    assert status != 0 and "TASK [nvidia : Have the driver]" not in said
    assert "the hosts' drivers would differ: oldie has 570 already" in said
    assert "nvidia_branch: 580 under all: vars:" in said and "nvidia_version_skew: warn" in said
    _, said = play("main", hosts, nvidia_version_skew="warn")
    assert "WARNING: the hosts' drivers would differ: oldie has 570 already" in said
    assert "TASK [nvidia : Have the driver]" in said


def versions(*found, common=580):
    """Hosts after the role, of which each has a version; `common`: whether one branch would serve all."""
    agreed = {"source": "nvidia" if common else "", "branch": common}
    return {
        f"node{number}": {"__nvidia_outcome": {"version": version}, "__nvidia_common": agreed}
        for number, version in enumerate(found, 1)
    }


def test_versions_that_differ_end_the_play_where_they_need_not(play):
    status, said = play("compare", versions("580.95.05", "570.172.08"))
    assert status != 0 and "the hosts' drivers differ: node2 has 570.172.08 (most have 580.95.05" in said
    assert "-e '{\"nvidia_upgrade\": true}'" in said.replace('\\"', '"')
    status, said = play("compare", versions("580.95.05", "570.172.08"), nvidia_version_skew="warn")
    assert status == 0 and "WARNING: the hosts' drivers differ: node2" in said
    # Of one branch, such as on a machine that came later.
    status, said = play("compare", versions("580.95.05", "580.82.07"))
    assert status == 0 and "WARNING: the hosts' drivers differ: node2 has 580.82.07" in said
    assert "-e '{\"nvidia_upgrade\": true}'" in said.replace('\\"', '"')
    status, said = play("compare", versions("580.95.05", "535.261.03", common=None))
    assert status == 0 and "WARNING: the hosts' drivers differ: node2" in said
    status, said = play("compare", versions("580.95.05", "580.95.05"))
    assert status == 0 and "differ" not in said.replace("__nvidia_differences", "")


def test_hosts_that_a_play_leaves_out_are_named(play):
    status, said = play("compare", versions("580.95.05", "580.82.07", "580.95.05"), limit="node1")
    assert status == 0 and "nor compared with those of node2, node3, which this play leaves out (-l)" in said
    assert "leaves out" not in play("compare", versions("580.95.05", "580.95.05"))[1]


def test_an_answer_of_another_driver_is_refused(play, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '00000000:01:00.0, 580.82.07'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for version, fits in (("580.95.05", False), ("580.82.07", True)):
        outcome = {"version": version, "container": True}
        host = {"__nvidia_plan": {"cards": [{}]}, "__nvidia_outcome": outcome}
        status, said = play("verify", {"node1": host})
        assert (status == 0) == fits, said
    assert play("verify", {"node1": {**host, "__nvidia_plan": {"cards": [{}, {}]}}})[0] != 0
