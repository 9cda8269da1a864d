"""The inventory's rules, without any host: each kind of bad input, and that good inventories have no problem."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from plugins.action import inventory_check as ic
from plugins.filter import roce_switch

ROOT = Path(__file__).resolve().parents[2]
ROLES, SPECS = ic.read_specs(str(ROOT / "roles"))

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
    return ic.Inventory(groups, hosts, SPECS, ROLES, "hosts.yml")


def renamed(old, new):
    return {new if name == old else name: variables for name, variables in GOOD.items()}


def everywhere(**variables):
    return {name: variables for name in GOOD}


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
    "an address twice": (
        inventory(node3={"ansible_host": "192.168.1.101"}),
        "node3",
        "ansible_host",
        ["node2 has, too"],
    ),
    "a cluster address twice": (
        inventory(node3={"cluster_address": "192.168.1.101"}),
        "node3",
        "cluster_address",
        ["192.168.1.101", "node2 has, too"],
    ),
    "reached at one place": (
        inventory(
            node1={"ansible_host": "gate.example.org", "cluster_address": "192.168.1.100"},
            node2={"ansible_host": "gate.example.org", "cluster_address": "192.168.1.101"},
        ),
        "node2",
        "ansible_host",
        ["gate.example.org port 22", "node1 is reached"],
    ),
    "outside of the network": (
        inventory(node2={"ansible_host": "192.168.2.101"}),
        "node2",
        "ansible_host",
        ["192.168.2.101", "outside of cluster_network 192.168.1.0/24"],
    ),
    "not an address": (
        inventory(node2={"ansible_host": "192.168.1.300"}),
        "node2",
        "ansible_host",
        ["192.168.1.300"],
    ),
    "a name where an address must be": (
        inventory(node2={"ansible_host": "node2.example.org"}),
        "node2",
        "ansible_host",
        ["not an IPv4 address", "set cluster_address"],
    ),
    "an address with its prefix": (
        inventory(node2={"cluster_address": "192.168.1.101/24"}),
        "node2",
        "cluster_address",
        ["/24"],
    ),
    "IPv6": (
        inventory(node2={"cluster_address": "fd00::2"}),
        "node2",
        "cluster_address",
        ["fd00::2", "IPv4"],
    ),
    "a number as address": (inventory(node2={"cluster_address": 7}), "node2", "cluster_address", ["found 7"]),
    "no address": (inventory(node2={"ansible_host": None}), "node2", "ansible_host", ["found nothing"]),
    "the network's address": (
        inventory(node2={"ansible_host": "192.168.1.0"}),
        "node2",
        "ansible_host",
        ["network itself"],
    ),
    "broadcast": (inventory(node2={"ansible_host": "192.168.1.255"}), "node2", "ansible_host", ["broadcast"]),
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
    "a configuration of runs that one host has of its own": (
        inventory(node2={"trainer_config": {"device": "cpu"}}),
        "hosts.yml",
        "trainer_config",
        ['several values: {} (node1, node3); {"device": "cpu"} (node2)', "a run has one configuration"],
    ),
    "another place for runs on one host": (
        inventory(node2={"trainer_state_dir": "/data/trainyard"}),
        "hosts.yml",
        "trainer_state_dir",
        ["/var/lib/trainyard (node1, node3); /data/trainyard (node2)", "a bind mount makes it so"],
    ),
    "host bits in the network": (
        inventory(**everywhere(cluster_network="192.168.1.5/24")),
        "node1",
        "cluster_network",
        ["host bits set", "Write cluster_network: 192.168.1.0/24"],
    ),
    "no prefix": (
        inventory(**everywhere(cluster_network="192.168.1.0")),
        "node1",
        "cluster_network",
        ["no prefix length"],
    ),
    "no network": (
        inventory(**everywhere(cluster_network=None)),
        "hosts.yml",
        "cluster_network",
        ["found nothing"],
    ),
    "an IPv6 network": (
        inventory(**everywhere(cluster_network="fd00::/64")),
        "node1",
        "cluster_network",
        ["fd00::/64"],
    ),
    "loopback": (
        inventory(**everywhere(cluster_network="127.0.0.0/8")),
        "node1",
        "cluster_network",
        ["between machines"],
    ),
    "a slip in the prefix": (
        inventory(**everywhere(cluser_network="192.168.1.0/24")),
        "hosts.yml",
        "cluser_network",
        ["no role has", "Write cluster_network"],
    ),
    "an unknown one of ours": (
        inventory(node2={"cluster_adress_v4": "x"}),
        "node2",
        "cluster_adress_v4",
        ["no role has", "cluster_address"],
    ),
    "a role's unknown one": (
        inventory(node2={"tuning_sysctls": {}}),
        "node2",
        "tuning_sysctls",
        ["Write tuning_sysctl "],
    ),
    "far from all": (inventory(node2={"trainyard_xyz": 1}), "node2", "trainyard_xyz", ["no role has"]),
    "neighbours swapped": (
        inventory(node2={"nproc_pre_node": 1}),
        "node2",
        "nproc_pre_node",
        ["nproc_per_node"],
    ),
    "no number": (
        inventory(node2={"nproc_per_node": "four"}),
        "node2",
        "nproc_per_node",
        ["'four'", "an integer"],
    ),
    "zero processes": (
        inventory(node2={"nproc_per_node": 0}),
        "node2",
        "nproc_per_node",
        ["found 0", "1 or more"],
    ),
    "fewer than none": (inventory(node2={"nproc_per_node": "-2"}), "node2", "nproc_per_node", ["found -2"]),
    "no choice": (
        inventory(node2={"network_renderer": "ifupdown"}),
        "node2",
        "network_renderer",
        ["one of auto, networkd"],
    ),
    "no mapping": (inventory(node2={"tuning_sysctl": "a"}), "node2", "tuning_sysctl", ["'a'", "a mapping"]),
    "a mapping's unknown key": (
        inventory(node2={"network_interfaces": [{"name": "eth0", "adresses": []}]}),
        "node2",
        "network_interfaces",
        ["adresses"],
    ),
    "becoming root for everything": (
        inventory(node2={"ansible_become": True}),
        "node2",
        "ansible_become",
        ["found True", "becomes root itself", "Remove it"],
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
    "one address for a network": (
        inventory(**everywhere(cluster_network="192.168.1.100/32")),
        "node1",
        "cluster_network",
        ["a single address", "such as 192.168.1.0/24. Set it under all: vars:"],
    ),
    "two hosts that are the controller": (
        inventory(
            node1={"ansible_connection": "local"}, node2={"ansible_connection": "ansible.builtin.local"}
        ),
        "node2",
        "ansible_connection",
        ["found local, which node1 has, too", "this controller itself"],
    ),
    "tasks becoming somebody": (
        inventory(node2={"ansible_become_user": "anna"}),
        "node2",
        "ansible_become_user",
        ["found anna", "who logs in is ansible_user"],
    ),
    "an address by its old name": (
        inventory(node2={"ansible_host": None, "ansible_ssh_host": "192.168.1.101"}),
        "node2",
        "ansible_ssh_host",
        ["found 192.168.1.101", "its name of today, ansible_host", "Rename it"],
    ),
    "a port by its old name": (
        inventory(node2={"ansible_ssh_port": 2222}),
        "node2",
        "ansible_ssh_port",
        ["its name of today, ansible_port"],
    ),
    "a port that is a word": (
        inventory(node2={"ansible_port": "ssh"}),
        "node2",
        "ansible_port",
        ["found ssh", "a port, 1 to 65535"],
    ),
    "a port that is out of range": (
        inventory(node2={"ansible_port": 70000}),
        "node2",
        "ansible_port",
        ["found 70000"],
    ),
    "a port by a template that fails": (
        inventory(node2={"ansible_port": ic.Undefined("a template that fails: 'p' is undefined")}),
        "node2",
        "ansible_port",
        ["'p' is undefined"],
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
    "a word for the other boolean": (
        inventory(node2={"firewall_manage": "Yes"}),
        "node2",
        "firewall_manage",
        ["found 'Yes'", "in an INI inventory firewall_manage=True", """-e '{"firewall_manage": true}'"""],
    ),
    "a list by commas": (
        inventory(node2={"time_sync_servers": "a.org, b.org"}),
        "node2",
        "time_sync_servers",
        ["time_sync_servers=['a.org', 'b.org'], after -e", """'{"time_sync_servers": ["a.org", "b.org"]}'"""],
    ),
    "a word for a boolean": (
        inventory(node2={"firewall_manage": "false"}),
        "node2",
        "firewall_manage",
        ["found 'false'", "expected true or false", """-e '{"firewall_manage": false}'"""],
    ),
    "a word for local_mode": (
        inventory(node2={"local_mode": "false"}),
        "node2",
        "local_mode",
        ["'false'", "true or false"],
    ),
    "a word for a list": (
        inventory(node2={"firewall_ssh_from": "10.0.0.0/8"}),
        "node2",
        "firewall_ssh_from",
        ["'10.0.0.0/8'", "expected a list", '{"firewall_ssh_from": ['],
    ),
    "a word for a mapping": (
        inventory(node2={"trainer_config": "threads=2"}),
        "node2",
        "trainer_config",
        ["'threads=2'", "a mapping"],
    ),
    "a word for an item": (
        inventory(node2={"network_interfaces": ["name=eth0"]}),
        "node2",
        "network_interfaces",
        ["found 'name=eth0' in [0]", "expected a mapping"],
    ),
    "a word for another item": (
        inventory(node2={"firewall_allow": [{"port": "80"}, "port=9100"]}),
        "node2",
        "firewall_allow",
        ["found 'port=9100' in [1]", "a mapping"],
    ),
    "a word for a list in an item": (
        inventory(node2={"firewall_allow": [{"port": "80", "from": "10.0.0.0/8"}]}),
        "node2",
        "firewall_allow",
        ["'10.0.0.0/8' in [0].from", "a list"],
    ),
    "nothing": (
        inventory({**GOOD, "node2": {**GOOD["node2"], "firewall_allow": None}}),
        "node2",
        "firewall_allow",
        ["found nothing", "a list", "leave the key out"],
    ),
    "a port too great": (
        inventory(node2={"trainer_port": "70000"}),
        "node2",
        "trainer_port",
        ["70000", "1024 to 65535"],
    ),
    "a port of root's": (inventory(node2={"trainer_port": 0}), "node2", "trainer_port", ["1024 or more"]),
    "a time before now": (
        inventory(node2={"trainer_refresh_seconds": "-1"}),
        "node2",
        "trainer_refresh_seconds",
        ["-1", "0.1 or more"],
    ),
    "no finite number": (
        inventory(node2={"trainer_min_free_gb": "nan"}),
        "node2",
        "trainer_min_free_gb",
        ["nan", "0 to"],
    ),
    "a guard too quick": (inventory(node2={"guard_timeout": 5}), "node2", "guard_timeout", ["20 or more"]),
    "a relative path": (
        inventory(node2={"trainer_state_dir": "mydir"}),
        "node2",
        "trainer_state_dir",
        ["mydir", "an absolute path"],
    ),
    "a path with a way up": (
        inventory(node2={"trainer_opt_dir": "/opt/../etc"}),
        "node2",
        "trainer_opt_dir",
        ["/opt/../etc", "without .."],
    ),
    "a path that a unit would split": (
        inventory(node2={"trainer_state_dir": "/srv/my runs"}),
        "node2",
        "trainer_state_dir",
        ["/srv/my runs", "plainer path"],
    ),
    "a directory of the system's": (
        inventory(node2={"trainer_state_dir": "/var/lib"}),
        "node2",
        "trainer_state_dir",
        ["found /var/lib", "/var/lib/trainyard"],
    ),
    "a directory that runs do not see": (
        inventory(node2={"trainer_state_dir": "/var/tmp/runs"}),
        "node2",
        "trainer_state_dir",
        ["found /var/tmp/runs", "ProtectHome and PrivateTmp", "/srv/trainyard"],
    ),
    "the directory of homes": (
        inventory(node2={"trainer_state_dir": "/home"}),
        "node2",
        "trainer_state_dir",
        ["found /home;", "ProtectHome and PrivateTmp", "/srv/trainyard"],
    ),
    "an environment that runs do not see": (
        inventory(node2={"python_env_dir": "/tmp/env"}),
        "node2",
        "python_env_dir",
        ["found /tmp/env", "ProtectHome and PrivateTmp"],
    ),
    "a cluster's name that Prometheus would fill in": (
        inventory(node2={"cluster_name": "lab $1"}),
        "node2",
        "cluster_name",
        ["found 'lab $1'", "letters, digits, spaces"],
    ),
    "a user that is no name": (
        inventory(node2={"trainer_user": "anna smith"}),
        "node2",
        "trainer_user",
        ["anna smith", "lower case letters"],
    ),
    "a time server with an option": (
        inventory(node2={"time_sync_servers": ["ntp.example.org", "10.0.0.1 trust"]}),
        "node2",
        "time_sync_servers",
        ["found '10.0.0.1 trust'", "names or addresses"],
    ),
    "a time span that is none": (
        inventory(node2={"trainer_stop_timeout": "a while"}),
        "node2",
        "trainer_stop_timeout",
        ["a while", "90s or 10min"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_problem_with_its_place_and_its_cure(what):
    bad, where, key, words = BAD[what]
    problems = ic.check(bad)
    assert len(problems) == 1, problems
    assert (problems[0].where, problems[0].key) == (where, key)
    for word in words:
        assert word in str(problems[0])
    assert problems[0].cure


def test_a_number_with_its_unit_is_told_without_words_of_ansibles_inside():
    (problem,) = ic.check(inventory(node2={"trainer_min_free_gb": "10GB"}))
    assert str(problem) == "node2: trainer_min_free_gb: found '10GB'; expected a number. Correct it"


# A YAML inventory -> (group, key) of what Ansible passes over with a warning at most.
PASSED_OVER = (
    ("all: {children: {cluster: {children: {workers: {hosts: {a: {}, b: }, vars: {x: 1}}}}}}", []),
    ("all: {children: {cluster: {children: {workers: {a: {ansible_host: 10.0.0.1}, b: }}}}}",
     [("workers", "a"), ("workers", "b")]),
    ("workers: {host: {a: {}}}", [("workers", "host")]),
    ("all: {cluster_network: 10.0.0.0/24, hosts: {a: {}}}", [("all", "cluster_network")]),
    ("cluster: {children: {workers: [a, b]}}", [("workers", "['a', 'b']")]),
    ("cluster: {hosts: a, children: }", []),
    ("services: {web: {image: x}}", []),  # a file of something else, beside
    ("model: tiny", []),
    ("- a", []),
)  # fmt: skip


@pytest.mark.parametrize(("text", "found"), PASSED_OVER)
def test_what_ansible_passes_over_in_an_inventory(text, found):
    assert [(group, key) for _, group, key in ic.passed_over(yaml.safe_load(text))] == found


def test_the_files_of_an_inventory_that_are_yaml(tmp_path):
    for name in ("group_vars/all.yml", ".git/a.yml", "b/hosts.yaml", "hosts", "hosts.ini", "old.yml.bak"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = list(ic.yaml_files(str(tmp_path)))
    assert [str(Path(one).relative_to(tmp_path)) for one in found] == ["b/hosts.yaml", "hosts"]
    assert list(ic.yaml_files("192.168.1.1,")) == []


def given(*addresses, **more):
    return {"network_interfaces": [{"name": "eth1", "addresses": list(addresses), **more}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # RDMA's addresses, beside those that the controller uses.
        ({"node1": given("10.9.0.1/24"), "node2": given("10.9.0.1/24")}, ["10.9.0.1/24, an address that node1 has"]),
        ({"node2": given("192.168.1.102/24")}, ["node3 has, too"]),
        # With sshd on a port of its own, and no other address than that.
        ({"node1": given("192.168.1.200/24", "192.168.1.100/24"),
          "node2": {"ansible_host": "192.168.1.200", "ansible_port": 2222, "cluster_address": None}},
         ["192.168.1.200/24, an address that node2 has"]),
        ({"node1": {**given("10.0.0.1/24", gateway="none"), "cluster_address": "10.0.0.1",
                    "cluster_network": "10.0.0.0/22"},
          "node2": {"cluster_address": "10.0.1.2", "cluster_network": "10.0.0.0/22"},
          "node3": {"cluster_address": "10.0.0.3", "cluster_network": "10.0.0.0/22"}},
         ["10.0.0.1/24, and 10.0.1.2, node2's address, is not in that network"]),
    ],
)  # fmt: skip
def test_addresses_that_contradict_those_of_other_hosts(changes, words):
    problems = ic.check(inventory(**changes))
    assert len(problems) == len(words), problems
    for problem, said in zip(problems, words, strict=True):
        assert said in str(problem) and problem.key == "network_interfaces"


@pytest.mark.parametrize(
    "changes",
    [
        {"node1": given("10.9.0.1/24"), "node2": given("10.9.0.2/24", "192.168.1.101/24")},
        {"node1": given("fe80::1/64"), "node2": given("fe80::1/64")},
        {"node1": given("172.17.0.1/16", kind="bridges"), "node2": given("172.17.0.1/16", kind="bridges")},
        {"node1": given("192.168.1.100/32", routes=[{"to": "192.168.1.0/24", "via": "192.168.1.1"}])},
        {"node1": given("192.168.1.100/32", gateway="192.168.1.1", options={"routes": []})},
        {"node1": given("192.168.1.100/32", "192.168.1.1/24")},
        {"node1": given("192.168.1.100/32", options={"gateway4": "192.168.1.1"})},
        {"node1": given("192.168.1.100/32", options={"dhcp4": True})},
        {"node1": given("192.168.1.100/24"), "node2": {"ansible_host": "192.168.1.100", "ansible_port": 2222,
                                                       "cluster_address": "192.168.1.101"}},
        {"node1": {"ansible_host": "192.168.1.9", "cluster_address": "192.168.1.100", **given("192.168.1.9/24")},
         "node2": {"ansible_host": "192.168.1.9", "cluster_address": "192.168.1.101", "ansible_port": 2222}},
    ],
)  # fmt: skip
def test_addresses_that_do_not(changes):
    assert [
        one
        for one in ic.check(inventory(**changes))
        if "has, too" in str(one) or "in that network" in str(one)
    ] == []


def test_files_of_the_controllers_are_looked_at_before_any_host_is(tmp_path):
    good, private = tmp_path / "id.pub", tmp_path / "id"
    good.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@here\n")
    private.write_text("----- a key that is nobody else's\n")

    def found(**variables):
        return [str(one) for one in ic.check(inventory(**everywhere(**variables)))]

    assert found(ssh_mesh_controller_key=str(good), nvidia_repository_key=str(private)) == []
    (said,) = found(ssh_mesh_controller_key=str(private))  # once, of all hosts
    assert (
        "no public key in its first line" in said
        and "ssh-keygen -t ed25519" in said
        and "nobody else" not in said
    )
    (said,) = found(ssh_mesh_controller_key="~/.ssh/there-is-no-such-key.pub")
    assert "cannot be read: No such file" in said and said.startswith("node1: ssh_mesh_controller_key")
    (said,) = found(nvidia_repository_key=str(tmp_path / "gone"))
    assert "nvidia_repository_key" in said and "Correct the path" in said


LAN = {"name": "eth0", "addresses": ["192.168.1.101/24"], "gateway": "192.168.1.1"}
BOND = {"name": "bond0", "kind": "bonds", "options": {"interfaces": ["eth0", "eth1"]}}
SET_HERE = ("node2", "network_interfaces")


@pytest.mark.parametrize(
    ("interfaces", "words"),
    [
        ([{**LAN, "gateway": "10.0.0.1"}], ["[0].gateway 10.0.0.1 lies in none of the interface's networks"]),
        ([{**LAN, "addresses": ["192.168.1.101"]}], ["[0].addresses: '192.168.1.101' has no prefix length"]),
        (
            [LAN, {"name": "eth1", "addresses": ["10.0.0.2/24"], "gateway": "10.0.0.1"}],
            ["[1] and network_interfaces[0] both have a default route"],
        ),
        ([{**LAN, "options": {"routes": [{"to": "10.0.0.1/8"}]}}], ["[0].options.routes: 'to: 10.0.0.1/8'"]),
        ([{**LAN, "options": {"routes": ["x"]}}], ["[0].options.routes: 'x' is no mapping with 'to'"]),
        (
            [{"name": "eth0", "options": {"nameservers": ["1.1.1.1"]}}],
            ["[0].options.nameservers is ['1.1.1.1']: write a mapping such as {addresses"],
        ),
        ([LAN, {"name": "eth0"}], ["[1] and network_interfaces[0] are both for eth0"]),
        (
            [{"name": "a", "macaddress": "52:54:00:00:00:01"}, {"macaddress": "52:54:00:00:00:01"}],
            ["[1] and network_interfaces[0] are both for 52:54:00:00:00:01"],
        ),
        ([{"addresses": ["10.0.0.1/24"]}], ["[0] says neither name nor macaddress: write one of them."]),
        ([BOND, {"name": "eth1"}], ["[0].options takes in 'eth0', which has no entry"]),
        ([BOND, LAN, {"name": "eth1"}], ["[1].addresses: bond0 takes eth0 in"]),
        ([{"name": "v7", "kind": "vlans", "options": {"id": 7}}], ["[0].options needs id and link"]),
        ([{**LAN, "mtu": 1279}], ["[0].mtu is 1279: IPv6 needs 1280 bytes"]),
        # All at once, but for what the entries together show.
        ([{**LAN, "gateway": "router"}, {**LAN, "mtu": 12}], ["[0].gateway is 'router'", "[1].mtu is 12"]),
    ],
)
def test_network_interfaces_that_no_host_could_have_are_refused_before_any_is_touched(interfaces, words):
    made = inventory(node2={"network_interfaces": interfaces})
    made = dataclasses.replace(made, origins={SET_HERE: "hosts.yml:7"})
    problems = ic.check(made)
    assert len(problems) == len(words), problems
    for problem, said in zip(problems, words, strict=True):
        assert (problem.where, problem.key) == ("node2 (hosts.yml:7)", "network_interfaces")
        assert str(problem).startswith(f"node2 (hosts.yml:7): network_interfaces{said}")


KEY = "hunter2-of-the-house"
POINTS = {"access-points": {"home": {"password": KEY}}}
WLAN = {"name": "wlan0", "kind": "wifis", "addresses": ["192.168.1.101/24"]}


@pytest.mark.parametrize(
    ("interfaces", "words"),
    [
        # A key that is none, or of another type, beside the wireless one.
        ([{**WLAN, "adresses": [], "options": POINTS}], "found a fault in it; expected a list"),
        ([{**WLAN, "mtu": "large", "options": POINTS}], "argument 'mtu' is of type"),
        ([{**WLAN, "kind": "wifi", "options": POINTS}], "kind must be one of"),
        ([{**WLAN, "options": [POINTS]}], "found a list in [0].options; expected a mapping"),
        # As -e and an INI inventory have it.
        (json.dumps([{**WLAN, "options": POINTS}]), "found a text of"),
        ([{**WLAN, "options": yaml.safe_dump(POINTS)}], "in [0].options; expected a mapping"),
        ([{**WLAN, "addresses": POINTS}], "found a mapping in [0].addresses; expected a list"),
        ([{**WLAN, "routes": [POINTS]}], "[0].routes: a mapping is no mapping with 'to'"),
        ([{**WLAN, "options": {"routes": POINTS}}], "[0].options.routes is a mapping: write a list"),
        ([{**WLAN, "options": {"match": [POINTS]}}], "[0].options.match is a list: write a mapping"),
        (
            [{**WLAN, "nameservers": {"addresses": POINTS}}],
            "nameservers.addresses is a mapping: write a list",
        ),
    ],
)
def test_no_message_has_a_wireless_key_in_it(interfaces, words):
    problems = ic.check(inventory(node2={"network_interfaces": interfaces}))
    said = ic.report(problems, contacted=False)
    assert words in said and "network_interfaces" in said and KEY not in said, said


@pytest.mark.parametrize("options", [["interfaces"], "interfaces: [eth0]", 7])
def test_options_that_are_no_mapping_are_refused_whatever_the_entry_makes(options):
    for kind in ("bridges", "bonds", "ethernets"):
        entry = {"name": "br0", "kind": kind, "addresses": ["192.168.1.101/24"], "options": options}
        said = ic.report(ic.check(inventory(node2={"network_interfaces": [entry]})), contacted=False)
        assert "in [0].options; expected a mapping" in said, said
        assert ic._given_up("192.168.1.101", {"network_interfaces": [entry]}) == ("", "")


@pytest.mark.parametrize(
    "interfaces",
    [
        [LAN],
        [{**LAN, "gateway": "none"}],
        [BOND, {"name": "eth0"}, {"name": "eth1"}],
        # What a host's interfaces decide: which name a card has, what is there.
        [BOND, {"macaddress": "52:54:00:00:00:01"}, {"macaddress": "52:54:00:00:00:02"}],
        [{**LAN, "macaddress": "52:54:00:00:00:01"}, {"name": "eth1", "macaddress": "52:54:00:00:00:02"}],
        [{"name": "br0.7", "kind": "vlans", "options": {"id": 7, "link": "br0"}}],
        ic.Undefined("a template over facts"),
        [],
    ],
)
def test_network_interfaces_that_a_host_may_have(interfaces):
    assert ic.check(inventory(node2={"network_interfaces": interfaces})) == []


def test_a_good_inventory_has_no_problem():
    assert ic.check(inventory()) == []


def test_no_host_at_all_is_one_problem_that_names_where_hosts_are():
    empty = ic.Inventory(
        {"all": ["a"], "ungrouped": [], "gpus": ["a"], "cluster": []}, {}, SPECS, ROLES, "hosts.yml"
    )
    (problem,) = ic.check(empty)
    assert "gpus" in problem.found
    assert "inventory/examples" in problem.cure


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
        {"node2": {"tuning_nofile": ic.Undefined("a template over facts")}},
    ],
)
def test_what_is_allowed(changes):
    assert ic.check(inventory(**changes)) == []


@pytest.mark.parametrize(
    "name", ["", " a", "a ", 'a"', "a\\", "a%b", "a;b", "a #b", "a\nb", "{{ a }}", "x" * 64]
)
def test_a_clusters_name_that_a_file_would_not_take_as_it_is(name):
    (problem,) = ic.check(inventory(node2={"cluster_name": name}))
    assert problem.key == "cluster_name" and problem.found == repr(name)


def test_two_addresses_of_a_point_to_point_network_are_good():
    hosts = {
        "a": {"cluster_network": "10.0.0.0/31", "cluster_address": "10.0.0.0"},
        "b": {"cluster_network": "10.0.0.0/31", "cluster_address": "10.0.0.1"},
    }
    assert ic.check(inventory(hosts, head=("a",))) == []


def test_local_mode_needs_no_addresses_but_is_checked_otherwise():
    hosts = {name: {"local_mode": True, "nproc_per_node": 0} for name in ("node1", "node2")}
    assert {problem.key for problem in ic.check(inventory(hosts))} == {"nproc_per_node"}


def test_a_host_that_claims_local_mode_alone_loosens_nothing():
    bad = inventory(node1={"local_mode": True}, node2={"ansible_host": "10.0.0.1"})
    assert [problem.key for problem in ic.check(bad)] == ["ansible_host"]


def facts(*interfaces, key="AAAA"):
    return {"interfaces": list(interfaces), "ssh_host_key_ed25519_public": key}


def test_interfaces_that_a_host_has_not_got_are_named_with_those_that_it_has():
    bad = inventory(
        node1={"cluster_interface": "eth0", "ansible_facts": facts("lo", "eth0", key="A")},
        node2={"cluster_interface": "enp5s0", "ansible_facts": facts("lo", "eth0", key="B")},
        node3={"cluster_interface": "enp5s0"},  # its facts are not known: -l
    )
    (problem,) = ic.check_facts(bad)
    assert (problem.where, problem.key) == ("node2", "cluster_interface")
    assert "enp5s0" in problem.found
    assert problem.expected == "one of eth0, lo"


def test_interfaces_of_the_network_role_must_exist_unless_it_makes_or_renames_them():
    wanted = [
        {"name": "eth0"},
        {"name": "eth7", "addresses": ["192.168.1.171/24"]},
        {"name": "bond0", "kind": "bonds"},
        {"name": "lan0", "macaddress": "02:00:00:00:00:01"},
        {"macaddress": "02:00:00:00:00:02"},
    ]
    bad = inventory(
        node2={
            "network_interfaces": wanted,
            "cluster_interface": "bond0",
            "ansible_facts": facts("lo", "eth0"),
        }
    )
    (problem,) = ic.check_facts(bad)
    assert problem.key == "network_interfaces"
    assert "eth7" in problem.found


def test_every_number_of_the_roles_has_its_limits():
    numbers = {name for name, option in SPECS.items() if option.get("type") in ("int", "float")}
    assert numbers == set(ic.LIMITS), "plugins/action/inventory_check.py: LIMITS must name every number"
    for name in numbers & {name for name in SPECS if "default" in SPECS[name]}:
        assert ic.LIMITS[name][0] <= SPECS[name]["default"] <= ic.LIMITS[name][1]


def test_an_address_that_a_host_neither_has_nor_gets_is_told_before_any_change():
    def there(*addresses, key):
        return {**facts("eth0", key=key), "all_ipv4_addresses": list(addresses)}

    bad = inventory(
        node1={"ansible_facts": there("192.168.1.100", key="A")},
        node2={"cluster_address": "192.168.1.7", "ansible_facts": there("192.168.1.101", key="B")},
        node3={  # the role network is about to give it
            "cluster_address": "192.168.1.8",
            "network_interfaces": [{"name": "eth0", "addresses": ["192.168.1.8/24"]}],
            "ansible_facts": there("192.168.1.102", key="C"),
        },
    )
    (problem,) = ic.check_facts(bad)
    assert (problem.where, problem.key) == ("node2", "cluster_address")
    assert "192.168.1.7, which no interface" in problem.found
    assert problem.expected == "one of 192.168.1.101"
    # By the lease that it is reached at now its peers would know it, and it is about to give that up.
    eth0 = {"macaddress": "52:54:00:00:00:01", "ipv4": {"address": "192.168.1.57"}}
    for match in ({"name": "eth0"}, {"macaddress": "52:54:00:00:00:01"}, {"name": "eth1"}):
        host = {
            "ansible_host": "192.168.1.57",
            "network_interfaces": [{**match, "addresses": ["192.168.1.100/24"]}],
            "ansible_facts": {
                **there("192.168.1.57", key="D"),
                "interfaces": ["lo", "eth0", "eth1"],
                "eth0": eth0,
            },
        }
        told = list(ic.check_facts(inventory(node2=host)))
        assert len(told) == (match.get("name") != "eth1"), told  # another card's: it stays as it is
        assert not told or "192.168.1.57, which eth0 will not have any more" in told[0].found
        assert not told or "Set cluster_address: 192.168.1.100" in told[0].cure
        assert not list(ic.check_facts(inventory(node2={**host, "cluster_address": "192.168.1.100"})))
    # What the interface keeps, and what is another's with its hardware address.
    lease = {"name": "eth0", "addresses": ["192.168.1.100/24"], "options": {"dhcp4": True}}
    assert not list(ic.check_facts(inventory(node2={**host, "network_interfaces": [lease]})))
    card = [{"macaddress": eth0["macaddress"], "addresses": ["10.0.0.5/24"]}]
    vlan = {**there("192.168.1.57", key="D"), "interfaces": ["eth0", "eth0.10"], "eth0_10": eth0}
    assert not list(
        ic.check_facts(inventory(node2={**host, "network_interfaces": card, "ansible_facts": vlan}))
    )
    # Behind a forwarding gateway, what Ansible calls is not what the peers call.
    (behind,) = ic.check_facts(inventory(node2={"ansible_facts": there("10.0.0.5", key="B")}))
    assert behind.key == "ansible_host" and "Set cluster_address" in behind.cure


def test_an_interface_that_is_named_for_the_training_must_hold_its_address():
    def host(name, **more):
        links = {
            "eth0": {"ipv4": {"address": "192.168.1.101"}},
            "br_0": {"ipv4_secondaries": [{"address": "10.0.0.2"}]},
        }
        there = {
            **facts("lo", "eth0", "br-0", "eth9"),
            "all_ipv4_addresses": ["192.168.1.101", "10.0.0.2"],
            **links,
        }
        return inventory(node2={"cluster_interface": name, "ansible_facts": there, **more})

    assert not ic.check_facts(host("eth0")) and not ic.check_facts(host("br-0", cluster_address="10.0.0.2"))
    (problem,) = ic.check_facts(host("br-0"))
    assert (problem.where, problem.key) == ("node2", "cluster_interface")
    assert problem.found == "br-0, where eth0 has 192.168.1.101"
    assert "Set cluster_address to one of br-0's" in problem.cure
    # What the role network is about to do counts.
    to_be = {
        "cluster_address": "10.0.0.9",
        "network_interfaces": [{"name": "eth9", "addresses": ["10.0.0.9/24"]}],
    }
    assert not ic.check_facts(host("eth9", **to_be))
    (problem,) = ic.check_facts(host("eth0", **to_be))
    assert problem.found == "eth0, where eth9 gets 10.0.0.9"
    to_be["network_interfaces"] = [{"macaddress": "02:00:00:00:00:02", "addresses": ["10.0.0.9/24"]}]
    assert not ic.check_facts(host("eth0", **to_be))


def test_hosts_with_one_host_key_are_one_machine_or_clones():
    same = facts("eth0", key="AAAA")
    (problem,) = ic.check_facts(inventory(node1={"ansible_facts": same}, node3={"ansible_facts": same}))
    assert problem.where == "node3"
    assert "node1" in problem.found
    assert "dpkg-reconfigure openssh-server" in problem.cure


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
                variables[key] = ic.Undefined("a template")
    assert ic.check(ic.Inventory(members, hosts, SPECS, ROLES, str(path))) == []


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


# ---- RDMA's groups ----


def with_groups(made, **groups):
    return dataclasses.replace(made, groups={**made.groups, **groups})


LOSSLESS = everywhere(roce_qos_mode="lossless")


@pytest.mark.parametrize(
    ("made", "where", "key", "words"),
    [
        (with_groups(inventory(), rdma=["node4"]), "node4", "rdma", ["in rdma, but not in cluster"]),
        (with_groups(inventory(), opensm=["node1"]), "node1", "opensm", ["not in rdma", "Put it into rdma"]),
        (
            with_groups(inventory(), rdma=list(GOOD), opensm=list(GOOD)),
            "hosts.yml",
            "opensm",
            ["3 hosts", "a master and its standby"],
        ),
        (
            with_groups(inventory(node1={"roce_qos_mode": "lossless"}), rdma=["node1"]),
            "node1",
            "roce_qos_mode",
            ["without roce_qos_switch_confirmed", "playbooks/switch.yml"],
        ),
        (
            with_groups(inventory(node1={"roce_qos_priority": 6}), rdma=["node1"]),
            "node1",
            "roce_qos_priority",
            ["6"],
        ),
        (
            with_groups(inventory(node2={"roce_qos_mode": "lossy", "roce_qos_dscp": 48}), rdma=list(GOOD)),
            "node2",
            "roce_qos_dscp",
            ["48", "congestion notices", "26"],
        ),
        (
            with_groups(
                inventory(
                    node1={"roce_qos_mode": "lossy"}, node3={"roce_qos_mode": "lossy", "roce_qos_dscp": 34}
                ),
                rdma=list(GOOD),
            ),
            "node3",
            "roce_qos_dscp",
            ["34, where node1 has 26", "a switch serves one class"],
        ),
    ],
)
def test_what_rdma_needs(made, where, key, words):
    (problem,) = ic.check(made)
    assert (problem.where, problem.key) == (where, key)
    assert all(word in str(problem) for word in words), problem


def test_prometheus_runs_on_hosts_of_the_cluster():
    (problem,) = ic.check(with_groups(inventory(), monitoring=["node1", "nas"]))
    assert (problem.where, problem.key) == (
        "nas",
        "monitoring",
    ) and "Put the head into the group" in problem.cure
    assert ic.check(with_groups(inventory(), monitoring=["node1", "node3"])) == []
    (problem,) = ic.check(inventory(node1={"monitoring_port": 80}))
    assert problem.key == "monitoring_port" and problem.expected == "1024 or more"


def watched(group=("node1",), **variables):
    return with_groups(inventory(**variables), monitoring=list(group))


@pytest.mark.parametrize(
    ("made", "where", "key", "found"),
    [
        (inventory(**everywhere(etcd_port=2390)), "hosts.yml", "etcd_port", "2390, which etcd_peer_port has on node1,"),
        (inventory(node2={"etcd_peer_port": 2389}), "node2", "etcd_peer_port", "2389, which etcd_port has on node2,"),
        (inventory(node2={"etcd_port": 4000, "etcd_peer_port": "4000"}), "node2", "etcd_peer_port", "4000, which"),
        (watched(node1={"monitoring_grafana_port": 9090}), "node1", "monitoring_grafana_port", "9090, which"),
        (watched(node1={"monitoring_port": 3001}), "node1", "monitoring_port", "3001, which monitoring_grafana_port"),
        (watched(node3={"monitoring_exporter_port": 2389}), "node3", "monitoring_exporter_port", "2389, which etcd"),
        (watched(node1={"monitoring_port": 29500}), "node1", "monitoring_port", "29500, which trainer_port"),
        (watched(node1={"monitoring_port": 9400}), "node1", "monitoring_port", "9400, which DCGM's exporter"),
        (inventory(node2={"bench_port": 2386}), "node2", "bench_port", "2389, which etcd_port has on node2, too"),
        (inventory(node2={"ansible_port": 2390}), "node2", "etcd_peer_port", "2390, which SSH has on node2, too"),
        (inventory(**everywhere(trainer_config={"metrics_port": 29500})), "hosts.yml", "trainer_config.metrics_port",
         "29500, which trainer_port has on node1, node2, node3, too"),
        (watched(**everywhere(trainer_config={"metrics_port": 9098}, nproc_per_node="4")), "hosts.yml",
         "trainer_config.metrics_port", "9100, which monitoring_exporter_port has"),
        (with_groups(inventory(node2={"trainer_port": 2049}), storage_server=["node2"]), "node2", "trainer_port",
         "2049, which NFS has on node2, too"),
    ],
)  # fmt: skip
def test_two_services_of_a_host_have_no_port_together(made, where, key, found):
    (problem,) = ic.check(made)
    assert (problem.where, problem.key) == (where, key) and problem.found.startswith(found), problem
    assert problem.cure == f"Set {key} to another one"


@pytest.mark.parametrize(
    "made",
    [
        # What a host has not: no group, no peers, no gateway's port.
        inventory(**everywhere(monitoring_exporter_port=2389, monitoring_grafana_port=9090)),
        watched(node2={"monitoring_port": 2389, "monitoring_grafana_port": 9090}),
        watched(node1={"monitoring_grafana_port": 9090, "monitoring_grafana": "never"}),
        watched(node1={"monitoring_port": 9400, "monitoring_dcgm": "never"}),
        inventory({"node1": {**GOOD["node1"], "etcd_port": 2390}}),
        inventory(
            node2={"ansible_host": "192.168.1.9", "ansible_port": 2390, "cluster_address": "192.168.1.101"}
        ),
        inventory(node2={"trainer_port": 2049}),
        # At other addresses of its: the loopback, and the cluster's.
        watched(node1={"monitoring_port": 9100}),
        watched(node1={"monitoring_exporter_port": 9400}),
        watched(**everywhere(trainer_config={"metrics_port": 9097}, nproc_per_node=3)),
        inventory(**everywhere(trainer_config={"metrics_port": 0})),
        inventory(node2={"etcd_port": ic.Undefined("a template over facts")}),
    ],
)
def test_ports_that_do_not_meet(made):
    assert ic.check(made) == []


def test_a_port_that_is_none_is_told_once():
    assert [one.key for one in ic.check(inventory(node2={"etcd_port": "many"}))] == ["etcd_port"]


def test_the_ports_that_no_variable_has_are_the_roles():
    role = (ROOT / "roles/monitoring/vars/main.yml").read_text()
    assert f"http://127.0.0.1:{ic.DCGM_PORT}/metrics" in role
    ports = {name for name in SPECS if name.endswith("_port")} - {"roce_qos_switch_port"}  # of a switch
    named = {name for name, _, _ in ic.ports_of(watched(), "node1")}
    assert ports <= named


def test_the_mark_of_congestion_notices_is_the_switchs():
    assert int(ic.CNP_DSCP) == roce_switch.CNP_DSCP


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"tuning_nofile": 2_000_000}, True),
        ({"tuning_nofile": 2_000_000, "tuning_sysctl": {"fs.nr_open": "1500000"}}, True),
        ({"tuning_nofile": 2_000_000, "tuning_sysctl": {"fs.nr_open": "2000000"}}, False),
        ({"tuning_nofile": 1_048_576, "tuning_sysctl": {"fs.nr_open": ""}}, False),
        ({"tuning_nofile": 4096}, False),
        ({"tuning_sysctl": {"fs.nr_open": "65536"}}, True),  # the role's own is more
        ({"tuning_nofile": 65536, "tuning_sysctl": {"fs.nr_open": "65536"}}, False),
    ],
)
def test_more_files_than_the_kernel_grants(settings, refused):
    found = [problem for problem in ic.check(inventory(node2=settings)) if problem.key == "tuning_nofile"]
    assert len(found) == refused
    assert not refused or ("fs.nr_open" in found[0].cure and found[0].where.startswith("node2"))
    assert not refused or found[0].found.endswith(", its default") == ("tuning_nofile" not in settings)


def test_where_the_kernels_setting_alone_is_given_that_is_the_place():
    origins = {("node2", "tuning_sysctl"): "hosts.yml:7"}
    given = dataclasses.replace(inventory(node2={"tuning_sysctl": {"fs.nr_open": "65536"}}), origins=origins)
    (problem,) = ic.check(given)
    assert (problem.where, problem.key) == ("node2 (hosts.yml:7)", "tuning_nofile")


def test_rdma_with_its_managers_and_a_confirmed_switch_is_well():
    confirmed = {"roce_qos_mode": "lossless", "roce_qos_switch_confirmed": True}
    assert ic.check(with_groups(inventory(node1=confirmed), rdma=list(GOOD), opensm=["node1", "node2"])) == []
    assert ic.check(inventory(**LOSSLESS)) == []  # without RDMA it says nothing


# ---- the shared directory ----


@pytest.mark.parametrize(
    ("made", "where", "key", "words"),
    [
        (
            with_groups(inventory(), storage_server=["node1", "node3"]),
            "hosts.yml",
            "storage_server",
            ["2 hosts (node1, node3)", "at most one", "Leave one of them"],
        ),
        (
            with_groups(inventory(), storage_server=["nas"]),
            "nas",
            "storage_server",
            ["not in cluster", "leave the group empty"],
        ),
        (
            with_groups(inventory(node2={"storage_path": "/data"}), storage_server=["node1"]),
            "hosts.yml",
            "storage_path",
            ["/srv/trainyard/shared (node1, node3); /data (node2)", "Set it once"],
        ),
        *(
            (inventory(**everywhere(storage_path=path)), "node1", "storage_path", [f"found {path}, {words}"])
            for path, words in {
                "/srv": "which is the system's",
                "/usr/share/models": "which is the system's",
                "/home": "where runs see nothing",
                "/home/me/models": "where runs see nothing",
                "/tmp/shared": "where runs see nothing",
                "/var/lib/trainyard/shared": "which overlaps /var/lib/trainyard (trainer_state_dir)",
                "/opt/trainyard": "which overlaps /opt/trainyard (trainer_opt_dir)",
            }.items()
        ),
    ],
)
def test_what_is_not_shared(made, where, key, words):
    (problem,) = ic.check(made)
    assert (problem.where, problem.key) == (where, key)
    assert all(word in str(problem) for word in words), problem


def test_the_root_and_a_relative_path_are_not_shared_either():
    said = " ".join(map(str, ic.check(inventory(**everywhere(storage_path="/")))))
    assert "found /, which is the system's" in said
    (problem, *_) = ic.check(inventory(**everywhere(storage_path="srv/shared")))
    assert "an absolute path" in str(problem)


@pytest.mark.parametrize("path", ["/srv/trainyard/shared", "/data", "/mnt/big", "/var/lib/models"])
def test_a_directory_of_its_own_is_shared_by_one_host(path):
    made = inventory(**everywhere(storage_path=path))
    assert ic.check(with_groups(made, storage_server=["node2"])) == []
    assert ic.check(with_groups(made, storage_server=[])) == []


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("NCCL_DEBUG", "INFO", True),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", True),
        ("NCCL_P2P_DISABLE", 1, True),
        ("TORCH_LOGS", "", True),
        ("no_proxy", "localhost,10.0.0.0/8", True),
        ("NCCL_DEBUG", True, False),  # which would be the word True
        ("NCCL_DEBUG", None, False),
        ("NCCL_DEBUG", "IN\nRANK=3", False),
        ("NCCL_DEBUG", "it's", False),
        ("NCCL_DEBUG", "INFO\r", False),
        ("NCCL_DEBUG", "a\tb 100% $x ü", True),
        ("GRÖSSE", "1", False),
        ("NCCL-DEBUG", "INFO", False),
        ("1X", "INFO", False),
        ("RANK", "0", False),
        ("RANKS", "0", True),
        ("GLOO_SOCKET_IFNAME", "eth1", False),
        ("TRAINYARD_STORE", "http://10.0.0.1:1", False),
        ("PYTHONPATH", "/tmp", False),
    ],
)
def test_a_runs_environment_is_given_what_trainyard_does_not_set(name, value, fits):
    fault = ic.value_fault("trainer_environment", {name: value}, {"type": "dict"}, False)
    assert (fault is None) == fits, fault
