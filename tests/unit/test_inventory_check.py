"""The whole check of an inventory, without any host: good inventories have no problem, of bad ones all come at once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import inventory_base
import pytest
import yaml
from inventories import ROLES, SPECS, inventory, renamed

from plugins.action import inventory_check as ic

ROOT = Path(__file__).resolve().parents[2]


def test_a_good_inventory_has_no_problem():
    assert ic.check(inventory()) == []


def test_all_problems_come_at_once():
    bad = inventory(
        renamed("node3", "no_de"),
        head=("node1", "node2"),
        workers=["no_de"],
        node2={"ansible_host": "192.168.1.100", "nproc_per_node": 0, "cluster_nam": "x"},
    )
    keys = [problem.key for problem in ic.check(bad)]
    assert sorted(keys) == ["ansible_host", "cluster_nam", "head", "host name", "nproc_per_node"]
    text = ic.report(ic.check(bad), contacted=False)
    assert text.startswith("The inventory has 5 problems; no host was contacted.")
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {
            "node2": {
                "nproc_per_node": "4",
                "accept_new_host_keys": "true",
                "firewall_allow": [{"port": 9100, "from": ["10.0.0.0/8"]}],
                "trainer_refresh_seconds": "0.5",
                "trainer_results_dir": "/srv/my runs",
                "trainer_stop_timeout": "1min 30s",
                "network_interfaces": [
                    {"name": "eth0", "options": {"routes": [{"to": "default"}], "optional": True}}
                ],
                "my_cluster_note": 1,
                "networking": "no variable of ours",
            }
        },
        {"node2": {"identity_hostname": "node2.example.org"}},
        {"node1": {"ansible_connection": "local"}},
        *(
            {"node2": {"cluster_name": name}}
            for name in ("a", 7, "Küche", "Anna's lab (2nd floor)", "R&D: A/B, x-y_z")
        ),
        # One public address, told apart by ports; the cluster's own addresses differ.
        {
            "node1": {
                "ansible_host": "gate.example.org",
                "ansible_port": 2201,
                "cluster_address": "192.168.1.1",
            },
            "node2": {
                "ansible_host": "gate.example.org",
                "ansible_port": 2202,
                "cluster_address": "192.168.1.2",
            },
        },
        {"node2": {"tuning_nofile": inventory_base.Undefined("a template over facts")}},
    ],
)
def test_what_is_allowed(changes):
    assert ic.check(inventory(**changes)) == []


def test_local_mode_needs_no_addresses_but_is_checked_otherwise():
    hosts = {name: {"local_mode": True, "nproc_per_node": 0} for name in ("node1", "node2")}
    assert {problem.key for problem in ic.check(inventory(hosts))} == {"nproc_per_node"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "inventory").glob("**/hosts.yml")), ids=lambda path: path.parent.name
)
def test_the_inventories_that_ship_are_good(path):
    """As Ansible itself reads them; nothing is contacted to read an inventory."""
    if "lab" in path.parts:
        pytest.skip("written by the lab")
    command = [str(Path(sys.executable).with_name("ansible-inventory")), "-i", str(path.parent), "--list"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    members = {}

    def walk(group):
        inner = listed.get(group, {})
        members[group] = [
            *inner.get("hosts", []),
            *(host for child in inner.get("children", []) for host in walk(child)),
        ]
        return members[group]

    walk("all")
    hosts = listed["_meta"]["hostvars"]
    for variables in hosts.values():  # templates that only a run resolves
        for key, value in variables.items():
            if "{{" in json.dumps(value):
                variables[key] = inventory_base.Undefined("a template")
    assert ic.check(inventory_base.Inventory(members, hosts, SPECS, ROLES, str(path))) == []


@pytest.mark.parametrize("name", ["site", "train", "stop"])
def test_plays_on_hosts_do_not_become_root_as_a_whole_whatever_b_says(name):
    plays = yaml.safe_load((ROOT / f"playbooks/{name}.yml").read_text())
    on_hosts = [play for play in plays if play["hosts"] == "cluster"]
    assert on_hosts and all(play["become"] is False for play in on_hosts)


SITE_TAGS = ic.tags_of(yaml.safe_load((ROOT / "playbooks/site.yml").read_text()))


@pytest.mark.parametrize(
    ("cli", "words"),
    [
        ({"args": ["site.yml"], "tags": ["nvidai"]}, ["--tags nvidai: found a tag that no task has", "Write nvidia"]),
        ({"args": ["/a/site.yml"], "tags": ["all"], "skip_tags": ["gpu"]}, ["--skip-tags gpu: found", "nvidia"]),
        ({"args": ["train.yml"], "tags": ["trainer"]}, ["--tags trainer: train.yml has no tags", "Leave it out"]),
        ({"args": ["train.yml"], "tags": ["all"], "skip_tags": ["nvida"]}, ["--skip-tags nvida"]),
    ],
)  # fmt: skip
def test_tags_by_which_ansible_would_silently_do_nothing_or_too_much(cli, words):
    (fault,) = ic.tag_faults(cli, SITE_TAGS)
    assert all(word in fault for word in words), fault


@pytest.mark.parametrize(
    "cli",
    [
        {},
        {"args": ["site.yml"], "tags": ["all"], "skip_tags": []},
        {"args": ["site.yml"], "tags": sorted(SITE_TAGS), "skip_tags": ["nvidia", "never"]},
        {"args": ["site.yml", "train.yml"], "tags": ["all"], "skip_tags": ["nvidia"]},
        {"args": ["site.yml"], "tags": ["identity"], "skip_tags": ["molecule-notest", "notest"]},
        {"args": ["converge.yml"], "tags": ["of_its_own"]},
    ],
)
def test_tags_that_there_are(cli):
    assert {"always", "first_contact", "nvidia", "python_env", "roce_qos"} <= SITE_TAGS
    scenarios = " ".join(path.read_text() for path in (ROOT / "molecule").glob("*/molecule.yml"))
    assert set(",".join(re.findall(r"--tags=(\S+)", scenarios)).split(",")) <= SITE_TAGS
    assert ic.tag_faults(cli, SITE_TAGS) == []


def test_plays_have_a_strategy_of_their_own_whatever_the_environment_says():
    """By ANSIBLE_STRATEGY=free what runs once would run on each host, before the others have said what it takes."""
    for path in (ROOT / "playbooks").glob("*.yml"):
        for play in yaml.safe_load(path.read_text()):
            assert play["strategy"] == (
                "free" if (path.stem, play["name"]) == ("stop", "The run") else "linear"
            )


def test_every_scenario_has_its_example():
    names = {path.parent.name for path in (ROOT / "inventory/examples").glob("*/hosts.yml")}
    assert names == {"home-lan", "single-gpu", "two-by-eight", "rdma-pair", "two-hosts"}
    text = yaml.safe_load((ROOT / "inventory/examples/rdma-pair/hosts.yml").read_text())
    assert text["all"]["vars"]["cluster_network"] == "192.168.250.0/24"
