"""Addresses of an inventory's hosts, and how they are reached: each kind of bad input, and what is allowed."""

import dataclasses
import json

import inventory_base
import inventory_facts
import pytest
import yaml
from inventories import everywhere, inventory, is_one_problem

from plugins.action import inventory_check as ic

# What is wrong: (inventory, where, key, words of the message). Exactly this problem, and no other, must be found.
BAD = {
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
    "becoming root for everything": (
        inventory(node2={"ansible_become": True}),
        "node2",
        "ansible_become",
        ["found True", "becomes root itself", "Remove it"],
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
        inventory(
            node2={"ansible_port": inventory_base.Undefined("a template that fails: 'p' is undefined")}
        ),
        "node2",
        "ansible_port",
        ["'p' is undefined"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_problem_with_its_place_and_its_cure(what):
    is_one_problem(*BAD[what])


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
        assert inventory_facts._given_up("192.168.1.101", {"network_interfaces": [entry]}) == ("", "")


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
        inventory_base.Undefined("a template over facts"),
        [],
    ],
)
def test_network_interfaces_that_a_host_may_have(interfaces):
    assert ic.check(inventory(node2={"network_interfaces": interfaces})) == []


def test_two_addresses_of_a_point_to_point_network_are_good():
    hosts = {
        "a": {"cluster_network": "10.0.0.0/31", "cluster_address": "10.0.0.0"},
        "b": {"cluster_network": "10.0.0.0/31", "cluster_address": "10.0.0.1"},
    }
    assert ic.check(inventory(hosts, head=("a",))) == []


def test_a_host_that_claims_local_mode_alone_loosens_nothing():
    bad = inventory(node1={"local_mode": True}, node2={"ansible_host": "10.0.0.1"})
    assert [problem.key for problem in ic.check(bad)] == ["ansible_host"]
