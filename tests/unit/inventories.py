"""A good inventory of three hosts, and what tests of its checks change in it."""

import dataclasses
from pathlib import Path

import inventory_base
import inventory_reading

from plugins.action import inventory_check as ic

ROOT = Path(__file__).resolve().parents[2]
ROLES, SPECS = inventory_reading.read_specs(str(ROOT / "roles"))

GOOD = {
    "node1": {"cluster_network": "192.168.1.0/24", "ansible_host": "192.168.1.100"},
    "node2": {"cluster_network": "192.168.1.0/24", "ansible_host": "192.168.1.101"},
    "node3": {"cluster_network": "192.168.1.0/24", "ansible_host": "192.168.1.102"},
}


def inventory(hosts=None, head=("node1",), workers=None, cluster=None, **changes):
    """A good inventory of three hosts, with `changes`: host to variables that are added (None: removed)."""
    hosts = {name: dict(variables) for name, variables in (hosts or GOOD).items()}
    for name, variables in changes.items():
        merged = {**hosts[name], **variables}
        hosts[name] = {key: value for key, value in merged.items() if value is not None}
    workers = [name for name in hosts if name not in head] if workers is None else workers
    groups = {
        "all": list(hosts),
        "cluster": list(hosts) if cluster is None else cluster,
        "head": list(head),
        "workers": list(workers),
    }
    return inventory_base.Inventory(groups, hosts, SPECS, ROLES, "hosts.yml")


def renamed(old, new):
    return {new if name == old else name: variables for name, variables in GOOD.items()}


def everywhere(**variables):
    return {name: variables for name in GOOD}


def with_groups(made, **groups):
    return dataclasses.replace(made, groups={**made.groups, **groups})


def is_one_problem(bad, where, key, words):
    """That exactly this is found in a bad inventory, with `words` in the message, and a cure."""
    problems = ic.check(bad)
    assert len(problems) == 1, problems
    assert (problems[0].where, problems[0].key) == (where, key)
    for word in words:
        assert word in str(problems[0])
    assert problems[0].cure
