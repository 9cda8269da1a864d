"""Groups and names of an inventory's hosts: each kind of bad input is one problem, with its place and its cure."""

import dataclasses

import inventory_base
import pytest
from inventories import GOOD, ROLES, SPECS, inventory, is_one_problem, renamed

from plugins.action import inventory_check as ic

# What is wrong: (inventory, where, key, words of the message). Exactly this problem, and no other, must be found.
BAD = {
    "two heads": (
        inventory(head=("node1", "node2"), workers=["node3"]),
        "hosts.yml",
        "head",
        ["2 hosts", "node1, node2"],
    ),
    "no head": (inventory(head=()), "hosts.yml", "head", ["no host", "exactly one", "one of the workers"]),
    "head and worker": (
        inventory(workers=["node1", "node2", "node3"]),
        "node1",
        "head, workers",
        ["both groups", "Remove it from workers"],
    ),
    "in no group": (inventory(workers=["node2"]), "node3", "cluster", ["neither in head nor in workers"]),
    "cluster is no parent": (
        inventory(cluster=["node1", "node2"]),
        "node3",
        "cluster",
        ["not in cluster", "children"],
    ),
    "an underscore": (
        inventory(renamed("node2", "node_2")),
        "node_2",
        "host name",
        ["underscore", "RFC 1123", "node-2"],
    ),
    "a name too long": (inventory(renamed("node2", "n" * 65)), "n" * 65, "host name", ["65 characters"]),
    "a part too long": (inventory(renamed("node2", "n" * 64)), "n" * 64, "host name", ["63 are allowed"]),
    "a hyphen at the end": (inventory(renamed("node2", "node2-")), "node2-", "host name", ["'node2-'"]),
    "an empty part": (inventory(renamed("node2", "node2..lan")), "node2..lan", "host name", ["''"]),
    "an address as name": (
        inventory(renamed("node2", "192.168.1.101")),
        "192.168.1.101",
        "host name",
        ["reads as an address", "ansible_host: 192.168.1.101"],
    ),
    "localhost": (
        inventory(renamed("node2", "localhost")),
        "localhost",
        "host name",
        ["every machine itself"],
    ),
    "a host name set twice": (
        inventory(node3={"identity_hostname": "NODE2"}),
        "node3",
        "host name",
        ["NODE2, which node2 has, too"],
    ),
    "a bad host name set": (
        inventory(node3={"identity_hostname": "no_de"}),
        "node3",
        "identity_hostname",
        ["no_de", "underscore"],
    ),
    "workers by another name": (
        dataclasses.replace(
            inventory(workers=[], cluster=["node1"]),
            groups={"all": [*GOOD], "cluster": ["node1"], "head": ["node1"], "worker": ["node2", "node3"]},
        ),
        "hosts.yml",
        "worker",
        ["found node2, node3 in it, and no host in workers", "Rename worker to workers"],
    ),
    "a group that is off by a slip": (
        dataclasses.replace(inventory(), groups={**inventory().groups, "monitorng": ["node1"]}),
        "hosts.yml",
        "monitorng",
        ["nothing here reads", "Rename it to monitoring"],
    ),
    "a group that is off by a hyphen": (
        dataclasses.replace(inventory(), groups={**inventory().groups, "storage-server": ["node1"]}),
        "hosts.yml",
        "storage-server",
        ["Rename it to storage_server"],
    ),
    "a host that is not below hosts": (
        dataclasses.replace(inventory(), left_out=[("hosts.yml:7", "workers", "node4")]),
        "hosts.yml:7",
        "workers",
        ["found node4, which Ansible leaves out", "children, hosts or vars alone", "a host below hosts:"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_problem_with_its_place_and_its_cure(what):
    is_one_problem(*BAD[what])


def test_no_host_at_all_is_one_problem_that_names_where_hosts_are():
    empty = inventory_base.Inventory(
        {"all": ["a"], "ungrouped": [], "gpus": ["a"], "cluster": []}, {}, SPECS, ROLES, "hosts.yml"
    )
    (problem,) = ic.check(empty)
    assert "gpus" in problem.found
    assert "inventory/examples" in problem.cure
