"""From a host's network as it is to the change of the role network (plugins/filter/network_plan.py). Sends nothing."""

import copy
import json
import os
import random
import subprocess

import pytest
import yaml
from networks import DEFAULT, ETH0, ETH1, STATIC, card, planned, survey

from plugins.filter import network_plan as planner
from plugins.filter.network_back import network_back
from plugins.filter.network_plan import network_plan
from plugins.module_utils.host_survey import interfaces, routes
from plugins.module_utils.network_files import IFUPDOWN_RECORD, OUR_FILE, keyed, profile_for, read_netplan
from plugins.module_utils.network_settings import of_netplan

GUARD = "/usr/local/lib/trainyard/guard"


def written(plan, path=OUR_FILE):
    """The change at `path` in a plan, or None."""
    return next((change for change in plan["files"] if change["path"] == path), None)


def test_one_static_interface():
    plan = planned([{**STATIC, "nameservers": ["192.168.1.1"], "mtu": 9000}])
    assert [change["path"] for change in plan["files"]] == [OUR_FILE]
    assert written(plan)["mode"] == "0600"
    assert yaml.safe_load(written(plan)["content"]) == {
        "network": {
            "version": 2,
            "ethernets": {
                "eth0": {
                    "renderer": "networkd",
                    "addresses": ["192.168.1.100/24"],
                    "dhcp4": False,
                    "dhcp6": False,
                    "routes": [{"to": "default", "via": "192.168.1.1"}],
                    "nameservers": {"addresses": ["192.168.1.1"]},
                    "mtu": 9000,
                }
            },
        }
    }
    assert plan["addresses"] == ["192.168.1.100"]
    assert plan["verify"] == [
        [GUARD, "holds", "192.168.1.100/24", "eth0"],
        [GUARD, "reachable", "192.168.1.1", "eth0"],
    ]
    assert not plan["stands"]


def test_what_is_written_stands_at_the_second_run():
    first = written(planned([STATIC]))["content"]
    plan = planned([STATIC], files={"netplan": {OUR_FILE: first}})
    assert plan["stands"]
    assert [change["content"] for change in plan["files"]] == [first]


def test_a_route_beside_the_default_one_bonds_and_vlans():
    plan = planned(
        [
            {
                "name": "eth1",
                "addresses": ["192.168.250.201/24"],
                "routes": [{"to": "192.168.251.0/24", "via": "192.168.250.10"}],
            },
            {"name": "eth2"},
            {
                "name": "bond0",
                "kind": "bonds",
                "options": {"interfaces": ["eth2"], "parameters": {"mode": "802.3ad"}},
            },
            {
                "name": "bond0.7",
                "kind": "vlans",
                "addresses": ["10.7.0.1/24"],
                "options": {"id": 7, "link": "bond0"},
            },
        ],
        interfaces=[copy.deepcopy(ETH0), copy.deepcopy(ETH1), card("eth2")],
    )
    network = yaml.safe_load(written(plan)["content"])["network"]
    assert network["bonds"]["bond0"]["parameters"] == {"mode": "802.3ad"}
    assert network["vlans"]["bond0.7"]["link"] == "bond0"
    assert plan["verify"] == [
        [GUARD, "holds", "192.168.250.201/24", "eth1"],  # no gateway to ask, but an address to have
        [GUARD, "holds", "10.7.0.1/24", "bond0.7"],
    ]
    assert plan["addresses"] == []  # the interface in use is not among them


BARE = {"name": "eth0"}
BOND = {
    "name": "bond0",
    "kind": "bonds",
    "addresses": ["192.168.1.100/24"],
    "gateway": "192.168.1.1",
    "options": {"interfaces": ["eth0", "eth1"], "parameters": {"mode": "active-backup"}},
}
VLAN = {
    "name": "eth0.7",
    "kind": "vlans",
    "addresses": ["192.168.1.100/24"],
    "options": {"id": 7, "link": "eth0"},
}


def test_name_servers_routes_and_mtu_of_a_bond():
    """As of any interface: in netplan's file, in what must hold afterwards, and in a host without a resolver."""
    route = {"to": "10.8.0.0/16", "via": "192.168.1.7"}
    bond = {**BOND, "mtu": 9000, "routes": [route], "nameservers": ["192.168.1.1"]}
    wanted = [BARE, {"name": "eth1"}, bond]
    active = {**survey()["active"], "systemd-resolved": False}
    plan = planned(wanted, active=active, resolv_conf="")
    made = yaml.safe_load(written(plan)["content"])["network"]["bonds"]["bond0"]
    assert made["mtu"] == 9000 and made["nameservers"] == {"addresses": ["192.168.1.1"]}
    assert made["routes"] == [{"to": "default", "via": "192.168.1.1"}, route]
    assert "nameserver 192.168.1.1\n" in written(plan, "/etc/resolv.conf")["content"]
    assert plan["verify"] == [
        [GUARD, "holds", "192.168.1.100/24", "bond0"],
        [GUARD, "reachable", "192.168.1.1", "bond0"],
    ]
    members = [{**ETH0, "addresses": [], "master": "bond0"}, {**copy.deepcopy(ETH1), "master": "bond0"}]
    there = card("bond0", kind="bond", addresses=["192.168.1.100/24"], mtu=9000, mac=ETH0["mac"])
    routes = [{**DEFAULT, "interface": "bond0"}, {**route, "interface": "bond0"}]
    for mtu, known, live in ((9000, routes, True), (1500, routes, False), (9000, routes[:1], False)):
        interfaces = [*members, {**there, "mtu": mtu}]
        assert planned(wanted, interfaces=interfaces, routes=known)["live"] is live


def test_devices_that_a_change_makes_are_removed_when_it_is_undone():
    on_it = {**VLAN, "name": "bond0.7", "addresses": ["10.7.0.1/24"], "options": {"id": 7, "link": "bond0"}}
    wanted = [BARE, {"name": "eth1"}, BOND, on_it]
    plan = planned(wanted)
    assert plan["apply"] == [["netplan", "apply"]]
    assert plan["undo"] == [
        [GUARD, "remove", "bond0.7"],
        [GUARD, "remove", "bond0"],
        ["netplan", "apply"],
    ]
    there = planned(wanted, interfaces=[*survey()["interfaces"], card("bond0", kind="bond")])
    assert there["undo"] == [[GUARD, "remove", "bond0.7"], ["netplan", "apply"]]


def test_devices_that_we_made_and_nobody_wants_any_more_are_removed():
    made = written(planned([BARE, {"name": "eth1"}, BOND]))["content"]
    netplan = {OUR_FILE: made}
    bond = card("bond0", kind="bond", addresses=["192.168.1.100/24"])
    interfaces = [{**ETH0, "addresses": []}, copy.deepcopy(ETH1), bond]
    alone = planned([STATIC], interfaces=interfaces, files={"netplan": netplan})
    assert alone["apply"] == [[GUARD, "remove", "bond0"], ["netplan", "apply"]]
    assert alone["undo"] == [["netplan", "apply"]]
    netplan["/etc/netplan/99-mine.yaml"] = "network: {bonds: {bond0: {interfaces: [eth1]}}}"
    elsewhere = planned([STATIC], interfaces=interfaces, files={"netplan": netplan})
    assert elsewhere["apply"] == [["netplan", "apply"]]


def ethernets(plan):
    return yaml.safe_load(written(plan)["content"])["network"]["ethernets"]


def test_by_macaddress():
    plan = planned([{"macaddress": "52:54:00:00:00:02", "addresses": ["10.1.0.1/24"]}])
    assert ethernets(plan)["eth1"]["match"] == {"macaddress": ETH1["mac"]}
    assert "set-name" not in ethernets(plan)["eth1"]


def test_by_macaddress_and_with_a_name_to_be_given():
    wanted = [{**STATIC, "macaddress": ETH0["mac"], "name": "lan0"}]
    plan = planned(wanted)
    assert list(ethernets(plan)) == ["lan0"]
    assert ethernets(plan)["lan0"]["set-name"] == "lan0"
    assert plan["addresses"] == ["192.168.1.100"]  # the interface in use is still found by its present name
    assert plan["undo"] == [[GUARD, "rename", "lan0", "eth0"], ["netplan", "apply"]]
    assert [command[-1] for command in plan["verify"]] == ["lan0", "lan0"]
    assert not plan["live"]

    # Once it has the name, the second run changes nothing.
    renamed = {**ETH0, "name": "lan0", "addresses": ["192.168.1.100/24"]}
    files = {"netplan": {OUR_FILE: written(plan)["content"]}}
    routes = [{**DEFAULT, "interface": "lan0"}]
    again = planned(wanted, interfaces=[renamed, copy.deepcopy(ETH1)], routes=routes, files=files)
    assert again["stands"] and again["live"]
    assert written(again)["content"] == written(plan)["content"]
    assert again["undo"] == [["netplan", "apply"]]


def test_what_speaks_for_the_old_name_gives_way_to_the_new_one():
    path = "/etc/systemd/network/10-netplan-f.network"  # before lan0's file of netplan, after eth0's
    wanted = [{**STATIC, "macaddress": ETH0["mac"], "name": "lan0"}]
    networkd = {"networkd": {path: "[Match]\nName=eth0\n"}}
    assert written(planned([STATIC], files=networkd), path) is None
    assert written(planned(wanted, files=networkd), path)["move_to"] == f"{path}.before-trainyard"
    cloud = "network: {ethernets: {lan0: {dhcp4: true}}}"  # netplan would merge it into ours
    assert written(
        planned(wanted, files={"netplan": {"/etc/netplan/50.yaml": cloud}}), "/etc/netplan/50.yaml"
    )


@pytest.mark.parametrize(
    ("addresses", "state", "live"),
    [
        (["192.168.1.100/24"], {}, True),
        (["192.168.1.100/24", "192.168.1.7/24"], {}, True),
        (["192.168.1.50/24"], {}, False),  # somebody took it away by hand
        (["192.168.1.100/16"], {}, False),
        ([], {"up": False}, True),  # no cable
        ([], {"up": False, "enabled": False}, False),  # `ip link set eth0 down`
    ],
)
def test_files_that_stand_are_applied_again_where_they_are_not_in_force(addresses, state, live):
    interfaces = [{**ETH0, "addresses": addresses, **state}, copy.deepcopy(ETH1)]
    wanted = [
        {**STATIC, "addresses": ["192.168.1.100/24", "fe80::5/64"]}
    ]  # the survey leaves link-local ones out
    files = {"netplan": {OUR_FILE: written(planned(wanted))["content"]}}
    plan = planned(wanted, interfaces=interfaces, files=files)
    assert plan["stands"] and plan["live"] is live


@pytest.mark.parametrize(
    ("mtu", "routes", "live"),
    [
        (9000, [DEFAULT, {"to": "10.8.0.0/16", "via": "192.168.1.7", "interface": "eth0"}], True),
        (1500, [DEFAULT, {"to": "10.8.0.0/16", "via": "192.168.1.7", "interface": "eth0"}], False),
        (9000, [{"to": "10.8.0.0/16", "via": "192.168.1.7", "interface": "eth0"}], False),
        (9000, [DEFAULT, {"to": "10.8.0.0/16", "via": "192.168.1.8", "interface": "eth0"}], False),
        (9000, [DEFAULT, {"to": "10.8.0.0/16", "via": "192.168.1.7", "interface": "eth1"}], False),
    ],
)
def test_an_mtu_or_a_route_that_somebody_changed_by_hand_is_put_right(mtu, routes, live):
    wanted = [{**STATIC, "mtu": 9000, "routes": [{"to": "10.8.0.0/16", "via": "192.168.1.7"}]}]
    files = {"netplan": {OUR_FILE: written(planned(wanted))["content"]}}
    interfaces = [{**ETH0, "addresses": ["192.168.1.100/24"], "mtu": mtu}, copy.deepcopy(ETH1)]
    plan = planned(wanted, interfaces=interfaces, routes=routes, files=files)
    assert plan["stands"] and plan["live"] is live


def little(item, **options):
    """It with a small MTU, and without IPv6, which needs more."""
    return {**item, "mtu": 500, "options": {**item["options"], "link-local": [], **options}}


TAKES = "takes 68 to 9194 bytes (`ip -details link show eth0`): write a number of these"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([{**STATIC, "mtu": 9194}], None),
        ([{**STATIC, "mtu": 9195}], f"network_interfaces[0].mtu is 9195: eth0 {TAKES}"),
        ([{**STATIC, "options": {"mtu": 9195}}], f"network_interfaces[0].mtu is 9195: eth0 {TAKES}"),
        ([{**STATIC, "macaddress": ETH0["mac"], "name": "lan0", "mtu": 9195}], f"eth0 {TAKES}"),
        ([BARE, {"name": "eth1"}, {**BOND, "mtu": 9500}], f"network_interfaces[2].mtu is 9500: eth0 {TAKES}"),
        ([BARE, {**VLAN, "gateway": "none", "mtu": 9500}], f"eth0 {TAKES}"),
        ([BARE, {**VLAN, "gateway": "none", "mtu": 9000}], None),
        # A bond's ports have to take little, too; what a VLAN lies on carries more beside it.
        ([{"name": "eth3", "mtu": 500, "options": {"link-local": []}}], "eth3 takes 576 to 9000 bytes"),
        ([{"name": "eth3"}, little(BOND, interfaces=["eth3"])], "eth3 takes 576 to 9000 bytes"),
        ([{"name": "eth3"}, {**little(VLAN, link="eth3"), "gateway": "none"}], None),
        ([{"name": "eth2", "mtu": 12000}], None),  # which does not tell
        ([{"name": "eth2", "mtu": 1000, "options": {"link-local": []}}], None),
        ([{"name": "eth2", "mtu": 1000, "options": {"link-local": ["ipv4"]}}], None),
        ([{"name": "eth2", "mtu": 1000}], "mtu is 1000: IPv6 needs 1280 bytes, so it would become that"),
        (
            [{"name": "eth2", "addresses": ["fd00::1/64"], "mtu": 1000, "options": {"link-local": []}}],
            "IPv6 needs 1280 bytes",
        ),
        (
            [
                {"name": "eth2", "mtu": 1000},
                {"name": "br0", "kind": "bridges", "options": {"interfaces": ["eth2"], "dhcp4": True}},
            ],
            None,  # a port has no IPv6
        ),
    ],
)
def test_a_size_that_a_card_does_not_take_is_refused(wanted, said):
    """networkd would set the nearest one, and each run after it that of the inventory again."""
    there = [copy.deepcopy(ETH0), copy.deepcopy(ETH1), card("eth2", mtu_range=[0, 0])]
    there.append(card("eth3", mtu_range=[576, 9000]))
    errors = network_plan(survey(interfaces=there), wanted)["errors"]
    assert bool(errors) is bool(said) and (not said or said in errors[0]), errors


@pytest.mark.parametrize(
    "options",
    [
        {"routes": [{"to": "10.8.0.0/16", "via": "192.168.1.7", "congestion-window": 20}]},
        {"routes": [{"to": "::/0", "via": "fe80::1"}]},
        {"routes": [{"to": "10.8.0.0/16", "via": "10.9.9.9", "on-link": True}]},
        {"routes": [{"to": "10.8.0.0/16", "via": "10.9.9.9"}], "dhcp4": True},  # which a lease may bring near
        {"routes": [{"to": "10.8.0.7", "scope": "link"}]},
    ],
)
@pytest.mark.parametrize("addresses", [["192.168.1.50/24"], ["192.168.1.100/24"]])
def test_routes_in_netplans_own_words(options, addresses):
    interfaces = [{**ETH0, "addresses": addresses}, copy.deepcopy(ETH1)]
    plan = planned([{**STATIC, "options": {**options}, "gateway": None}], interfaces=interfaces)
    assert ethernets(plan)["eth0"]["routes"] == options["routes"]


def test_addresses_that_come_when_somebody_brings_the_interface_up_are_not_waited_for():
    plan = planned([{"name": "eth1", "addresses": ["10.1.0.1/24"], "options": {"activation-mode": "manual"}}])
    assert plan["verify"] == [] and plan["live"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            [{"name": "enp9s0"}],
            "network_interfaces[0]: the host has no interface 'enp9s0'. The host has: eth0 (52:54",
        ),
        ([{"macaddress": "52:54:00:00:00:99"}], "no interface has the macaddress 52:54:00:00:00:99"),
        ([{"macaddress": "52-54"}], "macaddress is '52-54'"),
        ([{"addresses": ["10.0.0.1/24"]}], "neither name nor macaddress"),
        (["eth0"], "network_interfaces[0] is 'eth0': write a mapping"),
        ([{"macaddress": 41135446596}], "'52:54:00:12:34:56' (in quotes: YAML takes some for numbers)"),
        ([{**STATIC, "name": ["eth0"]}], "name is ['eth0']: write the interface's name"),
        ([{"name": "eth1", "macaddress": ETH0["mac"]}], "another interface has the name 'eth1'"),
        ([{"name": "a name", "macaddress": ETH0["mac"]}], "it needs a name of at most 15 characters"),
        (
            [{"name": "lan0", "macaddress": ETH0["mac"]}, {"name": "eth0"}],
            "network_interfaces[1] and network_interfaces[0] are both for eth0",
        ),
        (
            [{**STATIC, "options": {"nameservers": ["1.1.1.1"]}}],
            "options.nameservers is ['1.1.1.1']: write a mapping such as {addresses",
        ),
        (
            [{**STATIC, "options": {"nameservers": {"addresses": ["dns"]}}}],
            "nameservers is 'dns': write an IP",
        ),
        (
            [{**STATIC, "options": {"nameservers": {"addresses": ["1.1.1.1"], "search": "lan"}}}],
            "options.nameservers.search is 'lan': write a list",
        ),
        ([{"name": "eth0", "options": {"routes": ["x"]}}], "options.routes: 'x' is no mapping with 'to'"),
        ([{"name": "eth0", "options": {"routes": [{"via": "10.0.0.1"}]}}], "is no mapping with 'to'"),
        *(
            ([{**STATIC, "gateway": None, "options": {"routes": [route]}}], f"[0].options.routes: {said}")
            for route, said in (
                ({"to": "10.0.0.1/8", "via": "192.168.1.1"}, "'to: 10.0.0.1/8' is neither default nor a"),
                ({"to": "10.0.0.0/33", "via": "192.168.1.1"}, "'to: 10.0.0.0/33' is neither default nor a"),
                ({"to": 10, "via": "192.168.1.1"}, "'to: 10' is neither default nor a network"),
                ({"to": "10.0.0.0/8", "via": "gw"}, "via is 'gw': write an IP address"),
                ({"to": "10.0.0.0/8", "via": "10.9.9.9"}, "via 10.9.9.9 lies in none of the interface's"),
                ({"to": "10.0.0.0/8", "metrik": 1}, "unknown key 'metrik'"),
            )
        ),
        (
            [{"name": "eth0", "options": {"routes": {"to": "x"}}}],
            "options.routes is {'to': 'x'}: write a list",
        ),
        ([{"name": "eth0", "options": {"addresses": "10.0.0.1/24"}}], "options.addresses is '10.0.0.1/24'"),
        ([{"name": "eth0", "options": ["mtu=9000"]}], "options is ['mtu=9000']: write netplan's own keys"),
        (
            [{"name": "b0", "kind": "bonds", "options": {"interfaces": "eth1"}}],
            "interfaces is 'eth1': write a list",
        ),
        ([{"name": "b0", "kind": "bonds", "options": {"interfaces": [["eth1"]]}}], "is not the name of an"),
        (
            [{"name": "b0", "kind": "bonds", "options": {"parameters": ["stp"]}}],
            "parameters is ['stp']: write a map",
        ),
        (
            [{"name": "v7", "kind": "vlans", "options": {"id": 7, "link": ["eth0"]}}],
            "link is ['eth0']: write a name",
        ),
        ([{"name": "eth0", "adresses": []}], "unknown key 'adresses'; did you mean addresses?"),
        ([{"name": "eth0", "accept-ra": True}], "raw netplan keys go under options"),
        ([{"name": "eth0", "addresses": "10.0.0.1/24"}], "addresses is '10.0.0.1/24': write a list"),
        ([{"name": "eth0", "addresses": ["10.0.0.1"]}], "has no prefix length: write it like 10.0.0.1/24"),
        ([{"name": "eth0", "addresses": ["10.0.0.300/24"]}], "'10.0.0.300/24' is no address"),
        ([{"name": "eth0", "addresses": ["10.0.0.0/24"]}], "the network address of 10.0.0.0/24"),
        ([{"name": "eth0", "addresses": ["10.0.0.255/24"]}], "the broadcast address of 10.0.0.0/24"),
        ([{"name": "eth0", "addresses": ["224.0.0.1/24"]}], "not an address that an interface can have"),
        (
            [{**STATIC, "gateway": "192.168.2.1"}],
            "gateway 192.168.2.1 lies in none of the interface's networks (192.168.1.0/24)",
        ),
        ([{**STATIC, "gateway": "192.168.1.100"}], "is the interface's own address"),
        ([{**STATIC, "gateway": "router"}], "gateway is 'router': write an IP address"),
        ([{**STATIC, "routes": [{"to": "10.0.0.0/8", "via": "10.9.9.9"}]}], "via 10.9.9.9 lies in none"),
        (
            [{**STATIC, "routes": [{"to": "10.0.0.1/8", "via": "192.168.1.1"}]}],
            "neither default nor a network",
        ),
        ([{**STATIC, "routes": [{"to": "default", "metrik": 1}]}], "unknown key 'metrik'"),
        ([{**STATIC, "mtu": 12}], "mtu is 12"),
        ([{**STATIC, "mtu": True}], "mtu is True"),
        ([{**STATIC, "nameservers": ["dns.example"]}], "nameservers is 'dns.example'"),
        ([{**STATIC, "kind": "bond"}], "kind is 'bond': write one of ethernets, bonds"),
        (
            [{**STATIC, "options": {"mtu": 1, "addresses": []}}],
            "options says 'addresses', which the entry itself says",
        ),
        ([STATIC, {"name": "eth0"}], "are both for eth0"),
        (
            [STATIC, {"name": "eth1", "addresses": ["192.168.1.100/24"]}],
            "192.168.1.100 stands in network_interfaces[0]",
        ),
        (
            [STATIC, {"name": "eth1", "addresses": ["10.0.0.2/24"], "gateway": "10.0.0.1"}],
            "network_interfaces[1] and network_interfaces[0] both have a default route",
        ),
        (
            [{"name": "v7", "kind": "vlans", "options": {"id": 7, "link": "eth9"}}],
            "names 'eth9', no interface of the host",
        ),
        ([{"name": "v7", "kind": "vlans", "options": {"link": "eth0"}}], "needs id and link"),
        ([{"name": "b0", "kind": "bonds", "options": {"interfaces": ["eth8"]}}], "names 'eth8'"),
        (
            [{"name": "b0", "kind": "bonds", "options": {"interfaces": ["eth1"]}}],
            "options takes in 'eth1', which has no entry: write {name: eth1} into network_interfaces too",
        ),
        (
            [STATIC, {"name": "b0", "kind": "bridges", "options": {"interfaces": ["eth0"]}}],
            "network_interfaces[0].addresses: b0 takes eth0 in, so nobody would reach the host there",
        ),
        ([{"name": "a-name-that-is-too-long", "kind": "bonds"}], "at most 15 characters"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_its_place(wanted, said):
    found = network_plan(survey(), wanted)
    assert set(found) == {"errors"}
    assert said in found["errors"][0]


CLOUD = "network:\n  version: 2\n  ethernets:\n    eth0: {dhcp4: true}\n"
BOTH = "network:\n  version: 2\n  ethernets:\n    eth0: {dhcp4: true}\n    eth1: {dhcp4: true}\n"
BY_MAC = "network:\n  ethernets:\n    lan: {match: {macaddress: '52:54:00:00:00:01'}, dhcp4: true}\n"


@pytest.mark.parametrize("content", [CLOUD, BY_MAC])
def test_a_netplan_file_for_our_interface_alone_is_moved_aside(content):
    path = "/etc/netplan/50-cloud-init.yaml"
    plan = planned([STATIC], files={"netplan": {path: content}})
    assert written(plan, path) == {"path": path, "move_to": f"{path}.before-trainyard"}
    assert set(plan["netplan"]) == {"90-trainyard.yaml"}
    assert "instead of /etc/netplan/50-cloud-init.yaml" in plan["summary"]


def cloud_init(identifier="eth0", name="eth0", match=f"macaddress: '{ETH0['mac']}'", more=""):
    """As cloud-init writes a card whose name it keeps, whatever the kernel calls it (ens3, say)."""
    one = f"{{match: {{{match}}}, set-name: {name}, dhcp4: true}}"
    return f"network:\n  version: 2\n  ethernets:\n    {identifier}: {one}\n{more}"


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"50-cloud-init.yaml": cloud_init()}, {"macaddress": ETH0["mac"]}),
        ({"50-cloud-init.yaml": cloud_init("id0")}, {"macaddress": ETH0["mac"]}),
        (
            {"50-cloud-init.yaml": cloud_init(match=f"macaddress: {ETH0['mac'].upper()}")},
            {"macaddress": ETH0["mac"]},
        ),
        ({"50-cloud-init.yaml": cloud_init("ens3", match="name: ens3")}, {"name": "ens3"}),
        (
            {
                "50-cloud-init.yaml": cloud_init(match="driver: r8169"),
                "60-more.yaml": "network: {ethernets: {eth0: {optional: true}}}",
            },
            {"driver": "r8169"},
        ),
        (
            {
                "20-match.yaml": f"network: {{ethernets: {{lan: {{match: {{macaddress: '{ETH0['mac']}'}}}}}}}}",
                "60-name.yaml": "network: {ethernets: {lan: {match: {driver: r8169}, set-name: eth0}}}",
            },
            {"macaddress": ETH0["mac"], "driver": "r8169"},
        ),
    ],
)
@pytest.mark.parametrize("wanted", [[STATIC], [BARE, {"name": "eth1"}, BOND]])
def test_a_card_keeps_the_name_that_a_file_gave_it_which_gives_way(files, match, wanted):
    """Else it has the kernel's name again after the next boot, and nothing configures it."""
    netplan = {f"/etc/netplan/{name}": content for name, content in files.items()}
    first = planned(wanted, files={"netplan": netplan})
    for path in netplan:
        assert written(first, path)["move_to"] == f"{path}.before-trainyard"
    assert (ethernets(first)["eth0"]["match"], ethernets(first)["eth0"]["set-name"]) == (match, "eth0")
    # And at each run after that, when our own file alone tells of it.
    again = planned(wanted, files={"netplan": {OUR_FILE: written(first)["content"]}})
    assert again["stands"]
    assert written(again)["content"] == written(first)["content"]


def test_a_card_that_cloud_init_named_and_others_keep_their_names():
    path = "/etc/netplan/50-cloud-init.yaml"
    more = f"    eth1: {{match: {{macaddress: {ETH1['mac']}}}, set-name: eth1, dhcp4: true}}\n"
    plan = planned([STATIC], files={"netplan": {path: cloud_init(more=more)}})
    assert list(ethernets(plan)) == ["eth0"] and ethernets(plan)["eth0"]["set-name"] == "eth0"
    left = yaml.safe_load(written(plan, path)["content"])["network"]["ethernets"]
    assert left == {"eth1": {"match": {"macaddress": ETH1["mac"]}, "set-name": "eth1", "dhcp4": True}}


@pytest.mark.parametrize(
    ("wanted", "content", "match", "name"),
    [
        # The inventory's word counts.
        (
            {**STATIC, "name": "lan0", "macaddress": ETH0["mac"]},
            cloud_init(),
            {"macaddress": ETH0["mac"]},
            "lan0",
        ),
        (
            {**STATIC, "name": "", "macaddress": ETH0["mac"]},
            cloud_init(match="driver: r8169"),
            {"macaddress": ETH0["mac"]},
            "eth0",
        ),
        ({**STATIC, "options": {"match": {"driver": "r8*"}}}, cloud_init(), {"driver": "r8*"}, None),
        # No definition that has given eth0 its name: another card's, one that waits for a boot, one that names nothing.
        (STATIC, cloud_init(match="macaddress: '52:54:00:00:00:77'"), None, None),
        (STATIC, cloud_init(name="lan0"), None, None),
        (STATIC, BY_MAC, None, None),
        (STATIC, CLOUD, None, None),
    ],
)
def test_nothing_else_is_said_of_a_name(wanted, content, match, name):
    (one,) = ethernets(
        planned([wanted], files={"netplan": {"/etc/netplan/50-cloud-init.yaml": content}})
    ).values()
    assert (one.get("match"), one.get("set-name")) == (match, name)


def test_a_netplan_file_for_others_too_keeps_them_and_its_original_is_kept():
    path = "/etc/netplan/50-cloud-init.yaml"
    plan = planned([STATIC], files={"netplan": {path: BOTH}}, asides=[f"{path}.before-trainyard"])
    assert yaml.safe_load(written(plan, path)["content"])["network"]["ethernets"] == {"eth1": {"dhcp4": True}}
    assert written(plan, f"{path}.before-trainyard.2")["content"] == BOTH
    asides = [f"{path}.before-trainyard{number}" for number in ("", ".2", ".3")]
    plan = planned([STATIC], files={"netplan": {path: BOTH}}, asides=asides)
    assert written(plan, f"{path}.before-trainyard.4")["content"] == BOTH  # over none of those
    assert "eth1" in plan["netplan"]["50-cloud-init.yaml"]


TWICE = """\
network:
  ethernets: {eth0: {addresses: [10.0.0.1/24], mtu: 1400, mtu: 1500}, eth0: {addresses: [10.0.0.2/24]}}
  bridges: {br0: {interfaces: [eth1]}}
  ethernets: {eth1: {}}
  bridges: {br1: {dhcp4: true}}
"""


def test_a_key_that_stands_twice_is_read_twice():
    """As netplan does: else the first of them were lost, as a file is written anew."""
    path = "/etc/netplan/50.yaml"
    left = yaml.safe_load(written(planned([STATIC], files={"netplan": {path: TWICE}}), path)["content"])
    assert left["network"] == {
        "ethernets": {"eth1": {}},
        "bridges": {"br0": {"interfaces": ["eth1"]}, "br1": {"dhcp4": True}},
    }
    assert read_netplan(TWICE)["network"]["ethernets"]["eth0"] == {
        "addresses": ["10.0.0.1/24", "10.0.0.2/24"],
        "mtu": 1500,
    }
    (refused,) = network_plan(survey(files={"netplan": {path: TWICE}}), [{"name": "eth1", "addresses": []}])[
        "errors"
    ]
    assert "'br0' takes in eth1" in refused


def test_a_renderer_may_stand_beside_the_definitions_of_a_kind():
    path = "/etc/netplan/50.yaml"
    one = "network: {ethernets: {renderer: networkd, eth0: {dhcp4: true}}, vlans: {renderer: networkd}}"
    assert (
        written(planned([STATIC], files={"netplan": {path: one}}), path)["move_to"]
        == f"{path}.before-trainyard"
    )
    two = "network: {ethernets: {renderer: NetworkManager, eth0: {dhcp4: true}, eth1: {dhcp4: true}}}"
    left = yaml.safe_load(written(planned([STATIC], files={"netplan": {path: two}}), path)["content"])
    assert left["network"]["ethernets"] == {"renderer": "NetworkManager", "eth1": {"dhcp4": True}}
    (refused,) = network_plan(
        survey(files={"netplan": {path: two.replace("NetworkManager", "[x]")}}), [STATIC]
    )["errors"]
    assert "network.ethernets.renderer is no mapping" in refused


def test_a_netplan_file_outside_etc_is_hidden_not_changed():
    plan = planned([STATIC], files={"netplan": {"/usr/lib/netplan/lan.yaml": CLOUD}})
    assert yaml.safe_load(written(plan, "/etc/netplan/lan.yaml")["content"]) == {"network": {"version": 2}}
    assert written(plan, "/usr/lib/netplan/lan.yaml") is None


@pytest.mark.parametrize("content", [CLOUD, BOTH])
@pytest.mark.parametrize("hidden", ["/usr/lib/netplan/lan.yaml", "/lib/netplan/lan.yaml"])
def test_what_is_hidden_stands_at_the_second_run(hidden, content):
    first = planned([STATIC], files={"netplan": {hidden: content}})
    ours = {change["path"]: change["content"] for change in first["files"]}
    again = planned([STATIC], files={"netplan": {**ours, hidden: content}})
    assert again["stands"] and [change["path"] for change in again["files"]] == [OUR_FILE]
    assert again["netplan"] == first["netplan"] == {os.path.basename(path): ours[path] for path in ours}


def test_a_netplan_file_in_run_cannot_be_hidden():
    """Of a name that stands twice, netplan reads that in /run (netplan-generate(8))."""
    files = {"netplan": {"/run/netplan/eth0.yaml": CLOUD}}
    (refused,) = network_plan(survey(files=files), [STATIC])["errors"]
    assert refused.startswith(
        "/run/netplan/eth0.yaml configures eth0: netplan reads that before a file of the same"
    )
    assert refused.endswith("then delete /run/netplan/eth0.yaml; or leave eth0 out of network_interfaces")
    planned([CLUSTERS], files=files)


@pytest.mark.parametrize("match", ["{name: 'eth*'}", "{}"])
def test_a_match_for_ours_and_others_is_refused(match):
    content = f"network:\n  ethernets:\n    all: {{match: {match}, dhcp4: true}}\n"
    found = network_plan(survey(files={"netplan": {"/etc/netplan/01.yaml": content}}), [STATIC])
    assert "'all' configures eth0 together with eth1" in found["errors"][0]


PODS = card("cali1234567", kind="veth", driver="veth")


def test_a_match_that_a_pods_card_fits_too_is_not_tied_to_that():
    """Calico and Cilium leave the host's ends of their wires without a bridge."""
    content = "network:\n  ethernets:\n    all: {match: {name: '*'}, dhcp4: true}\n"
    all_ = {"netplan": {"/etc/netplan/01.yaml": content}}
    (refused,) = network_plan(survey(files=all_, interfaces=[ETH0, PODS]), [STATIC])["errors"]
    assert refused.endswith("together with cali1234567: narrow the match in that file to eth0")
    (refused,) = network_plan(survey(files=all_, interfaces=[ETH0, PODS, ETH1]), [STATIC])["errors"]
    assert refused.endswith(": put eth1 into network_interfaces too, or narrow the match in that file")
    path = f"{PROFILES}/home.nmconnection"
    home = {"networkmanager": {path: profile()}}

    def said(*links):
        seen = survey(files=copy.deepcopy(home), active=DESKTOP, interfaces=list(links))
        return network_plan(seen, [STATIC])["errors"][0]

    for meant, links, more in (
        ("tie it to the card that is meant by `nmcli connection modify", (PODS, ETH0), "eth0`"),
        ("put eth1 into network_interfaces too, or tie it to one by `nmcli", (PODS, ETH0, ETH1), "eth1`"),
        # In a container each card is the end of a wire.
        (
            "put eth1 into network_interfaces too, or tie",
            ({**ETH0, "kind": "veth"}, {**ETH1, "kind": "veth"}),
            "eth1`",
        ),
    ):
        refused = said(*links)
        assert f": {meant}" in refused and refused.endswith(f"connection.interface-name {more}")


OTHERS = f"network: {{ethernets: {{eth0: {{match: {{macaddress: '{ETH1['mac']}'}}, dhcp4: true}}}}}}"


def test_a_definition_that_has_the_name_of_ours_and_means_another_card_is_refused():
    """Netplan joins the two; and whoever put the other card into network_interfaces would take a lease from it."""
    (refused,) = network_plan(survey(files={"netplan": {"/etc/netplan/01.yaml": OTHERS}}), [STATIC])["errors"]
    assert refused == (
        "/etc/netplan/01.yaml: 'eth0' is eth1 by its match, and netplan would take it for eth0 of network_interfaces, "
        "too: call it eth1 there, and what refers to it, too"
    )
    cured = OTHERS.replace("{eth0:", "{eth1:")
    plan = planned([STATIC], files={"netplan": {"/etc/netplan/01.yaml": cured}})
    assert written(plan, "/etc/netplan/01.yaml") is None


# As NetworkManager's window writes them by netplan.
ANY = """\
network:
  {kind}:
    NM-6a1c: {{renderer: NetworkManager, match: {{}}, dhcp4: true, networkmanager: {{uuid: 6a1c, name: home}}}}
"""
WLAN = card("wlan0", kind="wlan")
DEVICES = [
    card("docker0", kind="bridge"),
    card("veth1", kind="veth", master="docker0"),
    card("wg0", kind="wireguard"),
]


def test_an_empty_match_is_for_every_card_of_its_kind():
    path, wireless = "/etc/netplan/90-NM-6a1c.yaml", "/etc/netplan/90-NM-7b2d.yaml"
    files = {"netplan": {path: ANY.format(kind="ethernets"), wireless: ANY.format(kind="wifis")}}
    plan = planned([STATIC], interfaces=[copy.deepcopy(ETH0), WLAN, *DEVICES], files=files)
    assert written(plan, path)["move_to"] == f"{path}.before-trainyard"
    assert written(plan, wireless) is None
    container = [{**ETH0, "kind": "veth"}, card("eth1", kind="veth")]
    found = network_plan(survey(interfaces=container, files=files), [STATIC])
    assert "'NM-6a1c' configures eth0 together with eth1" in found["errors"][0]


def test_a_bond_of_somebody_elses_that_takes_ours_in_is_refused():
    content = "network: {bonds: {bond0: {interfaces: [eth0]}}, vlans: {v7: {id: 7, link: eth0}}}\n"
    found = network_plan(survey(files={"netplan": {"/etc/netplan/01.yaml": content}}), [STATIC])
    assert "01.yaml: 'bond0' takes in eth0: put bond0 into network_interfaces too" in found["errors"][0]
    path = "/etc/netplan/01.yaml"
    plan = planned([BARE, {"name": "eth1"}, BOND], files={"netplan": {path: content}})
    assert yaml.safe_load(written(plan, path)["content"]) == {
        "network": {"vlans": {"v7": {"id": 7, "link": "eth0"}}}
    }


ON_ETH0 = """\
network:
  ethernets: {eth0: {dhcp4: true}}
  vlans: {v7: {id: 7, link: eth0}, v8: {id: 8, link: v7, dhcp4: true}}
"""


def test_what_lies_on_ours_finds_its_name_in_the_file_that_gives_way():
    """Netplan knows a link only from the same file or an earlier one, and ours comes later."""
    path, before = "/etc/netplan/50-cloud-init.yaml", yaml.safe_load(ON_ETH0)["network"]
    plan = planned([STATIC], files={"netplan": {path: ON_ETH0}})
    left = written(plan, path)["content"]
    assert yaml.safe_load(left)["network"] == {**before, "ethernets": {"eth0": {}}}
    assert written(plan, f"{path}.before-trainyard")["content"] == ON_ETH0
    # The rest stands, and is what went back to the whole.
    netplan = {path: left, OUR_FILE: written(plan)["content"]}
    again = planned([STATIC], files={"netplan": netplan})
    assert again["stands"] and written(again, path) is None
    seen = survey(files={"netplan": netplan}, asides=[f"{path}.before-trainyard"])
    seen["files"]["kept"] = {f"{path}.before-trainyard": {"text": ON_ETH0, "mode": "0600"}}
    back = network_back(seen)
    assert {"path": path, "content": ON_ETH0, "mode": "0600"} in back["files"] and not back["left"]
    # A name alone sets up nothing.
    (refused,) = network_plan(survey(files={"netplan": netplan}), [CLUSTERS])["errors"]
    assert refused.startswith("network_interfaces no longer names eth0")


def test_so_does_a_vlan_on_a_vlan_of_ours():
    path = "/etc/netplan/50-cloud-init.yaml"
    vlan = {"name": "v7", "kind": "vlans", "addresses": ["10.7.0.1/24"], "options": {"id": 7, "link": "eth0"}}
    there = [*survey()["interfaces"], card("v7", kind="vlan")]
    left = written(planned([vlan], interfaces=there, files={"netplan": {path: ON_ETH0}}), path)
    assert left is None  # which says nothing but what it is


@pytest.mark.parametrize(
    ("base", "content", "link", "more"),
    [
        ("50-lan.yaml", "ethernets: {eth1: {dhcp4: true}}", "eth1", {}),
        ("99-lan.yaml", "ethernets: {eth1: {dhcp4: true}}", "eth1", {"ethernets": {"eth1": {}}}),
        ("99-lan.yaml", "vlans: {eth1: {id: 5, link: eth0}}", "eth1", {"vlans": {"eth1": {"id": 5, "link": "eth0"}}}),
        ("50-lan.yaml", "ethernets: {lan: {match: {driver: mlx5*}, dhcp4: true}}", "lan", {}),
        ("50-lan.yaml", "tunnels: {eth1: {mode: gre, remote: 10.0.0.1, local: 10.0.0.2}}", "eth1", {}),
    ],
)  # fmt: skip
def test_netplan_knows_what_a_vlan_of_ours_lies_on(base, content, link, more):
    """By the name that a file gives it, which is to come no later than ours."""
    wanted = [
        {"name": "v7", "kind": "vlans", "addresses": ["10.7.0.1/24"], "options": {"id": 7, "link": "eth1"}}
    ]
    path = f"/etc/netplan/{base}"
    files = {"netplan": {path: f"network: {{{content}}}"}}
    plan = planned(wanted, files=files)
    network = yaml.safe_load(written(plan)["content"])["network"]
    assert network["vlans"].pop("v7")["link"] == link and written(plan, path) is None
    assert {kind: found for kind, found in network.items() if kind != "version" and found} == more
    files["netplan"][OUR_FILE] = written(plan)["content"]
    assert planned(wanted, files=files)["stands"]
    # On the way back, what is only named here keeps its addresses.
    seen = survey(files=files)
    seen["files"]["kept"] = {}
    assert not [command for command in network_back(seen)["apply"] if command[:2] == ["ip", "address"]]
    (refused,) = network_plan(survey(), wanted)["errors"]
    assert refused.startswith(
        "network_interfaces[0].options.link: no netplan file has eth1, so netplan takes no VLAN"
    )


def test_a_vlan_of_ours_lies_on_a_card_by_the_name_that_it_gets():
    lan = {"name": "lan0", "macaddress": ETH1["mac"]}
    vlan = {"name": "v7", "kind": "vlans", "addresses": ["10.7.0.1/24"], "options": {"id": 7, "link": "eth1"}}
    network = yaml.safe_load(written(planned([lan, vlan]))["content"])["network"]
    assert network["vlans"]["v7"]["link"] == "lan0"


def test_of_what_is_wireless_no_name_alone_is_left():
    """Netplan says: no access points defined."""
    points = {"access-points": {"home": {"password": "hunter22"}}}
    own = {"name": "wlan0", "kind": "wifis", "addresses": ["10.1.0.1/24"], "options": points}
    vlan = {
        "name": "v7",
        "kind": "vlans",
        "addresses": ["10.7.0.1/24"],
        "options": {"id": 7, "link": "wlan0"},
    }
    on_it = f"{WIFI % 'hunter22'}  vlans: {{v7: {{id: 7, link: wlan0}}}}\n"
    links = [copy.deepcopy(ETH0), WLAN, card("v7", kind="vlan")]

    def refused(wanted, path, content):
        return network_plan(survey(interfaces=links, files={"netplan": {path: content}}), wanted)["errors"]

    (said,) = refused([own], "/etc/netplan/50.yaml", on_it)
    assert said == (
        "/etc/netplan/50.yaml: 'v7' lies on 'wlan0', of whose definition in /etc/netplan/50.yaml network_interfaces "
        "would leave nothing but the name, which netplan does not take of what is wireless: put v7 into "
        "network_interfaces too (kind: vlans), or take 'v7' out there"
    )
    assert refused([own, vlan], "/etc/netplan/50.yaml", on_it) == []
    (said,) = refused([vlan], "/etc/netplan/99.yaml", WIFI % "hunter22")
    assert said.startswith(
        "network_interfaces[0].options.link: wlan0 is wireless, and stands in a netplan file that"
    )
    assert refused([vlan], "/etc/netplan/50.yaml", WIFI % "hunter22") == []


def test_a_name_is_left_for_other_files_too_but_not_for_those_after_ours():
    base, more = "/etc/netplan/10-base.yaml", "network: {vlans: {v7: {id: 7, link: eth0}}}"
    for path, name_stays in (("/etc/netplan/60-more.yaml", True), ("/etc/netplan/99-more.yaml", False)):
        plan = planned([STATIC], files={"netplan": {base: CLOUD, path: more}})
        left = yaml.safe_load(plan["netplan"].get("10-base.yaml", "network: {}"))["network"].get("ethernets")
        assert left == ({"eth0": {}} if name_stays else None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "vlans: {v7: {id: 7, link: lan}}",
            "'v7' lies on 'lan', which is eth0 in network_interfaces, so that it would lie on nothing: put v7 into "
            "network_interfaces too (kind: vlans), or have /etc/netplan/01.yaml call 'lan' eth0, and what refers to",
        ),
        ("tunnels: {t7: {mode: vxlan, id: 7, link: lan}}", "lie on nothing: have /etc/netplan/01.yaml call 'lan' "),
        ("bonds: {b7: {interfaces: [lan]}}", "'b7' takes in eth0: put b7 into network_interfaces too (kind: bonds)"),
    ],
)  # fmt: skip
def test_what_refers_to_ours_by_a_name_of_netplans_alone_is_refused(more, said):
    content = f"{BY_MAC}  {more}\n"
    (refused,) = network_plan(survey(files={"netplan": {"/etc/netplan/01.yaml": content}}), [STATIC])[
        "errors"
    ]
    assert refused.startswith("/etc/netplan/01.yaml: ") and said in refused


@pytest.mark.parametrize("driver", ["r8169", "r8*", ["e1000e", "r8169"]])
def test_a_match_by_driver_counts(driver):
    content = yaml.safe_dump(
        {"network": {"ethernets": {"all": {"match": {"driver": driver}, "dhcp4": True}}}}
    )
    path = "/etc/netplan/01.yaml"
    assert written(planned([STATIC], files={"netplan": {path: content}}), path)
    other = [{"name": "eth1", "addresses": ["10.1.0.1/24"]}]
    assert written(planned(other, files={"netplan": {path: content}}), path) is None
    networkd = "/etc/systemd/network/05-all.network"
    plan = planned([STATIC], files={"networkd": {networkd: "[Match]\nDriver=r8*\n"}})
    assert written(plan, networkd)["move_to"] == f"{networkd}.before-trainyard"


def test_a_broken_netplan_file_is_named():
    found = network_plan(survey(files={"netplan": {"/etc/netplan/01.yaml": "network: [\n"}}), [STATIC])
    assert "/etc/netplan/01.yaml is no valid YAML" in found["errors"][0]


WIFI = "network:\n  wifis:\n    wlan0:\n      access-points: {home: {password: %s}}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WIFI % "*hunter2", "host: found undefined alias … in line 4, column 40"),
        (
            "network: {}\nwifis: {password: !hunter2 a}\n",
            "host: could not determine a constructor for the tag … in line 2, column 19",
        ),
        (WIFI % "'hunter2", "host: found unexpected end of stream in line 5, column 1"),
        (WIFI % "hunter2\x07", "host: a character that YAML has not"),
        (WIFI % "{hunter2: ", "host: expected ',' or '}', but got '<stream end>' in line 5, column 1"),
        ("[hunter2]\n", "is no mapping, so netplan cannot work on this host: correct it"),
        ("network: [hunter2]\n", "is no mapping, so netplan cannot work on this host: correct it"),
        (
            "network: {wifis: [hunter2]}\n",
            "is no mapping, so netplan cannot work on this host: correct it",
        ),
    ],
)
def test_of_a_broken_netplan_file_the_place_is_told_and_no_word_of_it(content, said):
    (fault,) = network_plan(survey(files={"netplan": {"/etc/netplan/01.yaml": content}}), [STATIC])["errors"]
    assert fault.endswith(said) and "hunter2" not in fault


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ethernets: {lan: {match: enp5s0, dhcp4: true}}", "network.ethernets.lan.match is no mapping"),
        ("ethernets: {lan: {match: 0}}", "network.ethernets.lan.match is no mapping"),
        ("ethernets: {lan: {set-name: [eth7]}}", "network.ethernets.lan.set-name is no word"),
        ("ethernets: {lan: {addresses: 10.0.0.1/24}}", "network.ethernets.lan.addresses is no list"),
        ("bridges: {br9: {interfaces: 5}}", "network.bridges.br9.interfaces is no list"),
        ("bonds: {b9: {interfaces: [{eth7: up}]}}", "network.bonds.b9.interfaces is no list of words"),
        ("vlans: {v9: 5}", "network.vlans.v9 is no mapping"),
        ("vlans: {v9: {id: 9, link: [eth7]}}", "network.vlans.v9.link is no word"),
    ],
)
def test_what_is_yaml_and_nothing_for_netplan_is_refused(content, said):
    """Of our own file, which is written anew, it counts for nothing."""
    path, content = "/etc/netplan/60-lan.yaml", f"network: {{{content}}}\n"
    (fault,) = network_plan(survey(files={"netplan": {path: content}}), [STATIC])["errors"]
    assert fault == f"{path}: {said}, so netplan cannot work on this host: correct it"
    assert written(planned([STATIC], files={"netplan": {OUR_FILE: content}}))


def test_what_is_left_empty_counts_as_not_there():
    content = "network:\n  ethernets:\n    eth7: {match: , set-name: , addresses: }\n    eth8:\n  bonds:\n"
    assert written(planned([STATIC], files={"netplan": {"/etc/netplan/60-lan.yaml": content}}))


@pytest.mark.parametrize(
    "value",
    [
        *("2024-13-45", "2024-12-31", "1234567.50", "1.0e+10", "+12345678", "-0", "01234567", "12_345_678"),
        *("off", "on", "yes", "No", "TRUE", "true"),
    ],
)
def test_a_date_or_a_number_of_another_form_is_a_word_to_netplan(value):
    path, points = "/etc/netplan/60-lan.yaml", {"home": {"password": 1}}
    network = {"ethernets": {"eth0": {}}, "wifis": {"w9": {"access-points": points}}}
    content = yaml.safe_dump({"network": network}).replace("password: 1", f"password: {value}")
    left = written(planned([STATIC], files={"netplan": {path: content}}), path)["content"]
    node = yaml.compose(left)
    for key in ("network", "wifis", "w9", "access-points", "home", "password"):
        node = next(found for name, found in node.value if name.value == key)
    assert node.value == value


def test_a_word_that_yaml_takes_for_true_or_false_is_one_to_netplan():
    """`activation-mode: false` netplan refuses, and a network that is called on would be another."""
    path, more = "/etc/netplan/60-lan.yaml", "eth1: {activation-mode: off, dhcp4: yes}"
    content = (
        f"network:\n  ethernets: {{eth0: {{}}, {more}}}\n  wifis: {{w9: {{access-points: {{on: {{}}}}}}}}\n"
    )
    left = written(planned([STATIC], files={"netplan": {path: content}}), path)["content"]
    # yaml reads a word as one only where it stands in quotes.
    assert yaml.safe_load(left)["network"] == {
        "ethernets": {"eth1": {"activation-mode": "off", "dhcp4": "yes"}},
        "wifis": {"w9": {"access-points": {"on": {}}}},
    }


WHOLE = """\
network:
  version: 2
  renderer: networkd
  ethernets:
    lan:
      match: {name: eth0, macaddress: '52:54:00:00:00:01', driver: [r8169]}
      set-name: eth0
      addresses: [10.0.0.9/24]
      nameservers: {addresses: [10.0.0.1], search: [lan]}
      routes: [{to: default, via: 10.0.0.1}]
    eth1: {dhcp4: true}
  wifis:
    w9: {match: {}, access-points: {home: {password: hunter2}}}
  bonds:
    b9: {interfaces: [eth1, eth7], parameters: {mode: active-backup}}
  bridges:
    br9: {interfaces: [b9], addresses: [10.0.9.1/24]}
  vlans:
    v9: {id: 9, link: eth0}
"""
ODD = yaml.safe_load("""
[null, true, 5, 1.5, '', hunter2, [], {}, [5], [null], [eth0], [[]], [[eth0]], [{eth0: 5}],
 {eth0: 5}, {5: [5]}, {null: null}, {name: [eth0]}, {addresses: 5}, {match: {name: {}}}, {eth0: {}}]
""")


def places(node, way=()):
    """The way to each part of a document, itself included."""
    yield way
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, part in pairs:
        yield from places(part, (*way, key))


def put(document, way, value):
    """A copy of a document with another value in one place."""
    if not way:
        return value
    changed = copy.copy(document)
    changed[way[0]] = put(document[way[0]], way[1:], value)
    return changed


@pytest.mark.parametrize("path", [OUR_FILE, "/etc/netplan/60-lan.yaml"])
def test_whatever_stands_in_a_netplan_file_is_refused_or_taken(path):
    bridge = {"name": "new", "kind": "bridges", "options": {"interfaces": ["eth1"]}}
    document, dice = yaml.safe_load(WHOLE), random.Random(7)
    tried = [(way, value) for way in places(document) for value in ODD]
    # All of them, 1008, were tried when this was written.
    for way, value in dice.sample(tried, 60):
        content = yaml.safe_dump(put(document, way, value), sort_keys=False)
        seen = survey(files={"netplan": {path: content}})
        errors = network_plan(seen, dice.choice(([STATIC], [{"name": "eth1"}, bridge])))["errors"]
        assert all(isinstance(error, str) for error in errors), content
        # What gave way, and what stands there now.
        aside = "/etc/netplan/60-lan.yaml.before-trainyard"
        seen["files"]["kept"] = {aside: {"text": dice.choice((WHOLE, content)), "mode": "0600"}}
        network_back({**seen, "asides": [aside]})


def test_of_what_netplan_refuses_the_line_is_not_shown(run_module, tmp_path, monkeypatch):
    """As canonical/netplan's src/error.c writes it."""
    program = tmp_path / "netplan"
    program.write_text(
        "#!/bin/sh\n"
        "printf '%s/etc/netplan/9.yaml:6:13: Error in network definition: unknown key '\\''pasword'\\''\\n"
        '            pasword: hunter2\\n            ^\\n\' "$3" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = run_module("netplan_check", files={"9.yaml": WIFI % "hunter2"})
    assert answer["msg"].endswith(
        "/etc/netplan/9.yaml:6:13: Error in network definition: unknown key 'pasword'"
    )
    assert "hunter2" not in answer["output"]


def test_files_that_say_nothing_of_ours_stay():
    others = {
        "netplan": {
            "/etc/netplan/01-network-manager-all.yaml": "network: {version: 2, renderer: NetworkManager}\n"
        },
        "networkd": {
            "/etc/systemd/network/10-eth1.network": "[Match]\nName=eth1\n",
            "/etc/systemd/network/99-all.network": "[Match]\nName=*\n",  # read after netplan's, so it does not count
        },
        "ifupdown": {"/etc/network/interfaces": "auto lo\niface lo inet loopback\n"},
        "networkmanager": {
            "/etc/NetworkManager/system-connections/wifi.nmconnection": "[connection]\ninterface-name=wlan0\n"
        },
    }
    plan = planned([STATIC], files=others)
    assert [change["path"] for change in plan["files"]] == [OUR_FILE]


def test_networkd_files_that_come_before_netplans_give_way():
    ours, both = "/etc/systemd/network/10-eth0.network", "/etc/systemd/network/05-wired.network"
    files = {
        ours: "[Match]\nName=eth0\n[Network]\nDHCP=yes\n",
        both: "[Match]\nName=eth*\n[Network]\nDHCP=yes\n",
    }
    plan = planned([STATIC], files={"networkd": files})
    assert written(plan, ours)["move_to"] == f"{ours}.before-trainyard"
    assert written(plan, both)["move_to"] == "/etc/systemd/network/20-trainyard-05-wired.network"


def test_a_networkd_file_for_a_type_of_interface_comes_after_ours():
    path = "/etc/systemd/network/05-wired.network"
    files = {path: "[Match]\nType=ether\n[Network]\nDHCP=yes\n"}
    plan = planned([STATIC], files={"networkd": files})
    assert written(plan, path)["move_to"] == "/etc/systemd/network/20-trainyard-05-wired.network"
    files[path] = "[Match]\nType=wlan\n[Network]\nDHCP=yes\n"
    assert written(planned([STATIC], files={"networkd": files}), path) is None


@pytest.mark.parametrize(
    ("match", "meant"),
    [
        ("Name=!lo docker*", True),
        ("Name=!eth1 eth0", False),
        ("Name=eth*\nDriver=!mlx5_core", True),
        ("Type=!wlan loopback", True),
        ("Type=!ether", False),
        ("Type=e*", True),
    ],
)
def test_a_networkd_file_for_all_but_some_comes_after_ours(match, meant):
    path = "/etc/systemd/network/05-most.network"
    plan = planned([STATIC], files={"networkd": {path: f"[Match]\n{match}\n[Network]\nDHCP=yes\n"}})
    assert bool(written(plan, path)) is meant


@pytest.mark.parametrize(
    ("match", "meant"),
    [
        ("Path=pci-0000:02:*", ["eth0"]),
        ("Path=!pci-0000:02:*", ["eth1", "wlan0", "br0"]),
        ("Path=pci-0000:03:*", []),
        ("Kind=bridge", ["br0"]),
        ("Kind=!bridge", ["eth0", "eth1", "wlan0"]),
        ("Name=eth0\nKind=veth", []),
        ("Type=ether", ["eth0"]),
        ("Type=infiniband", ["eth1"]),
        ("Property=ID_VENDOR_ID=0x10ec", ["eth0"]),
        ('Property="ID_MODEL=RTL *" ID_BUS=pci', ["eth0"]),
        ("Property=ID_BUS=pci ID_MODEL=Other", []),
        ("Property=!ID_BUS=pci", ["eth1", "wlan0", "br0"]),
        ("Name=enp2s0", ["eth0"]),  # its other name
        ("MACAddress=525400.000001 52-54-00-00-00-02", ["eth0", "eth1"]),
        ("WLANInterfaceType=station", ["wlan0"]),
        ("Name=eth0\nSSID=home", []),
        ("Host=node7", ["eth0", "eth1", "wlan0", "br0"]),  # whatever that is
        ("Name=eth1\nName=\nName=eth0", ["eth0"]),
        ("Name=eth*\nName=!eth0", ["eth1"]),
        ("Name=", []),
        ("", []),
    ],
)
def test_what_a_networkd_file_matches_by(match, meant):
    pci = {"ID_PATH": "pci-0000:02:00.0", "ID_VENDOR_ID": "0x10ec", "ID_MODEL": "RTL 8125", "ID_BUS": "pci"}
    links = [
        {**ETH0, "properties": pci, "altnames": ["enp2s0"]},
        {**ETH1, "link_type": "infiniband"},
        WLAN,
        card("br0", kind="bridge"),
    ]
    assert planner.networkd_matches(planner.settings(f"[Match]\n{match}\n"), links) == meant
    path = "/etc/systemd/network/05-lan.network"
    plan = planned([STATIC], interfaces=links, files={"networkd": {path: f"[Match]\n{match}\n"}})
    gives_way = (written(plan, path) or {}).get("move_to")
    aside = {True: f"{path}.before-trainyard", False: "/etc/systemd/network/20-trainyard-05-lan.network"}
    assert gives_way == (aside[meant == ["eth0"]] if "eth0" in meant else None)


@pytest.mark.parametrize("match", ["", "match: {name: enp2s0}, "])
def test_netplan_knows_a_card_by_its_other_names_too(match):
    """As systemd-networkd does: enp2s0's file would come before eth0's of ours."""
    path, links = "/etc/netplan/50.yaml", [{**ETH0, "altnames": ["enp2s0"]}, copy.deepcopy(ETH1)]
    files = {"netplan": {path: f"network: {{ethernets: {{enp2s0: {{{match}dhcp4: true}}}}}}"}}
    assert (
        written(planned([STATIC], interfaces=links, files=files), path)["move_to"]
        == f"{path}.before-trainyard"
    )


def test_what_udev_knows_of_an_interface(load_module, tmp_path):
    survey = load_module("network_survey")
    assert survey.properties("eth0", tmp_path) == {}
    device, data = tmp_path / "sys/class/net/eth0", tmp_path / "run/udev/data"
    device.mkdir(parents=True), data.mkdir(parents=True)
    (device / "ifindex").write_text("7\n")
    (device / "uevent").write_text("DEVTYPE=wlan\nINTERFACE=eth0\nIFINDEX=7\n")
    assert survey.properties("eth0", tmp_path)["DEVTYPE"] == "wlan"  # without udev
    (data / "n7").write_text("I:1\nE:ID_PATH=pci-0000:02:00.0\nE:ID_MODEL=a=b\nG:systemd\n")
    assert survey.properties("eth0", tmp_path) == {
        **{"DEVTYPE": "wlan", "INTERFACE": "eth0", "IFINDEX": "7"},
        **{"ID_PATH": "pci-0000:02:00.0", "ID_MODEL": "a=b"},
    }


@pytest.mark.parametrize("base", ["05-lan.network", "50-lan.network"])  # before netplan's, and hidden by it
@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("Bridge=br0", "put br0 into network_interfaces too (kind: bridges), or take that line out there"),
        ("Bond=br0", "put br0 into network_interfaces too (kind: bonds), or take that line out there"),
        ("VLAN=br0", "put br0 into network_interfaces too (kind: vlans), or take that line out there"),
        ("Tunnel=br0", "into /etc/systemd/network/10-netplan-eth0.network.d/br0.conf, which is read besides"),
        (
            "MACVLAN=br0",
            "into /etc/systemd/network/10-netplan-eth0.network.d/br0.conf, which is read besides",
        ),
    ],
)
def test_what_networkd_makes_of_ours_or_on_it_is_refused(line, cure, base):
    """Else it is there until the next boot, and perhaps with it the way to the host is gone."""
    path = f"/etc/systemd/network/{base}"
    files = {"networkd": {path: f"[Match]\nName=eth0\n[Network]\nDHCP=no\n{line}\n"}}
    there = [*survey()["interfaces"], card("br0", kind="bridge")]
    (refused,) = network_plan(survey(interfaces=there, files=files), [STATIC])["errors"]
    assert refused.startswith(
        f"{path}: {line} would be lost at the next boot, since network_interfaces has eth0"
    )
    assert refused.endswith(cure)
    # One that has been hidden for a while has made nothing since the last boot.
    assert bool(network_plan(survey(files=files), [STATIC])["errors"]) is (base == "05-lan.network")
    files["networkd"] = {path: f"[Match]\nName=eth*\n[Network]\n{line}\n"}
    (refused,) = network_plan(survey(interfaces=there, files=files), [STATIC])["errors"]
    assert "take that line out" not in refused and (
        refused.endswith("or have its [Match] fit eth0 no more") or "into /etc" in refused
    )
    files["networkd"] = {path: f"[Match]\nName=eth0\n[Network]\nDHCP=no\n{line}\n"}
    planned([{"name": "eth1", "addresses": ["10.1.0.1/24"]}], files=files)  # not ours
    planned([STATIC], files=files, active=DESKTOP)  # networkd does not run, and has made nothing


def test_what_networkd_makes_gives_way_to_the_same_of_ours():
    path = "/etc/systemd/network/05-lan.network"
    files = {"networkd": {path: "[Match]\nName=eth0\n[Network]\nVLAN=eth0.7\n"}}
    vlan = {"name": "eth0.7", "kind": "vlans", "options": {"id": 7, "link": "eth0"}}
    assert written(planned([STATIC, vlan], files=files), path)["move_to"] == f"{path}.before-trainyard"
    # An entry that only gives it addresses does not make it.
    there = [copy.deepcopy(ETH0), card("eth0.7", kind="vlan")]
    found = network_plan(survey(files=files, interfaces=there), [STATIC, {"name": "eth0.7"}])
    assert "put eth0.7 into network_interfaces too (kind: vlans)" in found["errors"][0]


INTERFACES = """\
# The primary network interface
source /etc/network/interfaces.d/*
auto lo eth0
iface lo inet loopback
allow-hotplug eth0
iface eth0 inet static
    address 192.168.1.50/24
    # the router
    gateway 192.168.1.1

iface eth1 inet dhcp
"""


def test_ifupdown_stanzas_are_commented_out_and_taken_down_from_a_record():
    plan = planned(
        [STATIC],
        files={"ifupdown": {"/etc/network/interfaces": INTERFACES}},
        active={
            "systemd-networkd": False,
            "NetworkManager": False,
            "systemd-resolved": False,
            "networking": True,
        },
    )
    changed = written(plan, "/etc/network/interfaces")["content"].splitlines()
    active = [
        line for line in changed if line and not line.startswith("#") and not line.strip().startswith("#")
    ]
    assert active == [
        "source /etc/network/interfaces.d/*",
        "auto lo",
        "iface lo inet loopback",
        "iface eth1 inet dhcp",
    ]
    assert "iface eth0 inet static\n    address 192.168.1.50/24" in written(plan, IFUPDOWN_RECORD)["content"]
    assert plan["apply"] == [
        ["ifdown", "--force", f"--interfaces={IFUPDOWN_RECORD}", "eth0"],
        ["netplan", "apply"],
    ]
    assert plan["undo"][-1] == ["ifup", "--force", "eth0"]
    assert ["systemctl", "stop", "systemd-networkd.socket", "systemd-networkd.service"] in plan["undo"]
    again = planned([STATIC], files={"ifupdown": {"/etc/network/interfaces": "\n".join(changed) + "\n"}})
    assert written(again, "/etc/network/interfaces") is None


@pytest.mark.parametrize("before", ["nameserver 192.168.1.1\n", "nameserver 10.0.0.53\n"])
def test_name_servers_outlast_the_lease_that_told_them(before, tmp_path, monkeypatch):
    """As on Debian 13, whose installer leaves ifupdown with dhcpcd, and no resolver."""
    conf = tmp_path / "resolv.conf"
    monkeypatch.setattr(planner, "RESOLV_CONF", str(conf))
    off = dict.fromkeys(("systemd-networkd", "NetworkManager", "systemd-resolved"), False)
    plan = planned(
        [{**STATIC, "nameservers": ["192.168.1.1"]}],
        files={"ifupdown": {"/etc/network/interfaces": "auto eth0\niface eth0 inet dhcp\n"}},
        active={**off, "networking": True},
        resolv_conf=before,
    )
    down, again, up = plan["apply"]
    assert down[0] == "ifdown" and up == ["netplan", "apply"]
    conf.write_text("# Generated by dhcpcd\n")
    subprocess.run(again, check=True)
    assert (
        conf.read_text() == written(plan, str(conf))["content"]
        and "nameserver 192.168.1.1\n" in conf.read_text()
    )


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("bridge_ports eth1 eth0", "bridges"),
        ("bridge-ports \\\n        eth0", "bridges"),
        ("bond-slaves eth0 eth1", "bonds"),
        ("slaves eth0", "bonds"),
    ],
)
def test_what_takes_ours_in_by_ifupdown_is_refused(option, kind):
    """Else ifupdown puts the port back into it at the next boot, and networkd has it, too."""
    path = "/etc/network/interfaces"
    files = {"ifupdown": {path: f"auto joined\niface joined inet dhcp\n    {option}\n"}}
    (refused,) = network_plan(survey(files=files), [STATIC])["errors"]
    assert refused == (
        f"{path}: 'joined' takes in eth0: put joined into network_interfaces too (kind: {kind}), or take eth0 out there"
    )
    bond = {**BOND, "name": "joined"}
    plan = planned([BARE, {"name": "eth1"}, bond], files=files)
    assert f"    {option}" not in written(plan, path)["content"].splitlines()
    other = [{"name": "eth2", "addresses": ["10.1.0.1/24"]}]
    assert written(planned(other, interfaces=[ETH0, ETH1, card("eth2")], files=files), path) is None


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("bridge_ports regex eth.* noregex lan9", True),
        ("bridge_ports eth1 regex (eth|em)0", True),
        ("bridge_ports lan9 all", True),
        ("bridge-ports glob eth0-3", True),  # as ifupdown2 has it
        ("bridge-ports regex (eth", True),  # whatever that takes in
        ("bridge_ports regex em.* noregex eth.*", False),
        ("bridge_ports regex eth.?[1-9]", False),
        ("bridge_ports glob eth1-3 em0-1", False),
    ],
)
def test_what_takes_ours_in_by_a_pattern_of_ifupdowns_is_refused(option, refused):
    assert bool(stanzas("iface br0 inet dhcp", f"    {option}")["errors"]) is refused


def test_a_file_of_ifupdowns_in_run_cannot_give_way():
    """As Debian's cloud images have it: it is written again at the next boot."""
    path = "/run/network/interfaces.d/eth0"
    files = {"ifupdown": {path: "auto eth0\niface eth0 inet dhcp\n"}}
    (refused,) = network_plan(survey(files=files), [STATIC])["errors"]
    assert refused.startswith(
        f"{path} configures eth0: what wrote it does so again at the next boot, mostly /etc/"
    )
    assert refused.endswith("(source, source-directory); or leave eth0 out of network_interfaces")
    planned([CLUSTERS], files=files)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "pre-up iptables-restore < /etc/iptables.rules",
            "pre-up of eth0 runs iptables-restore, which nothing would",
        ),
        ("up ip route add 10.8.0.0/16 via 192.168.1.7", "up of eth0 runs ip, which"),
        ("post-up \\\n  /usr/local/sbin/nat start", "post-up of eth0 runs /usr/local/sbin/nat, which"),
        ("down KEY=hunter2 /sbin/leave", "down of eth0 runs a command, which"),
        ("pre-down [ -x /sbin/x ] && x", "pre-down of eth0 runs a command, which"),
        ("post_down x", "post-down of eth0 runs x, which"),
        ("up sleep 2; x", "up of eth0 runs sleep, which"),
        ("post-up route add default gw 192.168.1.1; x", "post-up of eth0 runs route, which"),
        (
            "post-up route add -net 10.0.0.0 netmask 255.0.0.0 gw 192.168.1.1 || true",
            "post-up of eth0 runs route,",
        ),
        # Vagrant's boxes and cloud-init write these.
        ("pre-up sleep 2", None),
        ("post-up route add default gw 192.168.1.1 || true", None),
        ("pre-down route del -A inet6 default gw fe80::1 || true", None),
        ("# up x", None),
    ],
)
def test_commands_that_ifupdown_runs_do_not_go_unsaid(line, said):
    """Else the owner's packet filter or routes are gone at the next boot."""
    path = "/etc/network/interfaces"
    before = "auto eth0\niface eth0 inet static\n  address \\\n 192.168.1.50/24\n\n"
    content = f"{before}  {line}\niface eth1 inet dhcp\n  up x\n"
    files = {"ifupdown": {path: content}}
    errors = network_plan(survey(files=files), [STATIC])["errors"]
    assert bool(errors) is bool(said)
    if said:
        assert errors[0].startswith(f"{path}, line 6: {said}") and "hunter2" not in errors[0]
        assert "take the line out there" in errors[0]


def stanzas(*lines, wanted=STATIC):
    path = "/etc/network/interfaces"
    return network_plan(survey(files={"ifupdown": {path: "\n".join(lines) + "\n"}}), [wanted])


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("auto eth0=home", "call that stanza `iface eth0`, and write `auto eth0` for this line; or leave eth0 out"),
        ("allow-hotplug eth1 /eth*=home", "call that stanza `iface eth0`"),
        ("auto mac/52:54:00:00:00:01=home", "call that stanza `iface eth0`"),
        ("mapping eth*", "call that stanza `iface eth0`"),
        ("iface eth1 inet static inherits eth0", "could read none of its files any more: write those lines out for"),
        ("iface eth0 inet manual\n  bond_master bond0", "'bond0' takes in eth0: put bond0 into network_interfaces too"),
        ("iface br0 inet manual\n  bridge_ports all", "'br0' takes in eth0: put br0 into network_interfaces too"),
        ("iface eth0:1 inet static\n  up x", "up of eth0:1 runs x, which"),
        ("iface eth0 inet dhcp\n#no \\\n  up x", "line 5: up of eth0 runs x, which"),  # no comment goes on
    ],
)  # fmt: skip
def test_what_ifupdown_does_with_ours_by_another_name_is_refused(line, cure):
    (refused,) = stanzas("iface home inet dhcp", "iface eth0 inet static", line)["errors"]
    assert refused.startswith("/etc/network/interfaces") and cure in refused
    if "eth0:" not in line and "bond" not in line and "#" not in line and "all" not in line:
        assert refused.startswith("/etc/network/interfaces, line 3: ")
    # Of another's, it is nobody's concern.
    line = (
        line.replace("eth0", "eth9").replace("eth*", "eth9").replace(":01=", ":99=").replace(" all", " eth9")
    )
    assert stanzas("iface home inet dhcp", line)["errors"] == []


def test_more_addresses_by_a_label_give_way_with_the_card():
    plan = stanzas(
        "auto eth0 eth0:1 eth1", "iface eth0 inet dhcp", "iface eth0:1 inet static", "  address 10.0.0.9/24"
    )
    left = written(plan, "/etc/network/interfaces")["content"].splitlines()
    assert [line for line in left if not line.startswith("#")] == ["auto eth1"]
    assert plan["apply"][0][3:] == plan["undo"][-1][2:] == ["eth0", "eth0:1"]
    assert [command[-3] for command in plan["undo"] if "flush" in command] == ["eth0"]


def test_lines_that_go_on_in_the_next_are_one():
    plan = stanzas("auto \\", "  eth0 eth1", "iface eth0 \\", "  inet static", "  address \\", " 10.0.0.9/24")
    left = written(plan, "/etc/network/interfaces")["content"].splitlines()
    assert [line for line in left if not line.startswith("#")] == ["auto eth1"]
    record = written(plan, IFUPDOWN_RECORD)["content"]
    assert record == "iface eth0 \\\n  inet static\n  address \\\n 10.0.0.9/24\n"


def test_what_a_stanza_inherits_stands_in_the_record_too():
    """Else ifdown could not read it."""
    base, home = (
        ["iface base inet static", "  netmask 24"],
        ["iface home inet static inherits base", "  mtu 1400"],
    )
    own = ["iface eth0 inet static inherits home", "  address 10.0.0.9"]
    plan = stanzas(*base, *home, "iface other inet dhcp", "auto eth0", *own)
    assert written(plan, IFUPDOWN_RECORD)["content"].splitlines() == [*base, *home, *own]
    left = written(plan, "/etc/network/interfaces")["content"].splitlines()
    assert [line for line in left if not line.startswith("#")] == [*base, *home, "iface other inet dhcp"]


@pytest.mark.parametrize("option", ["vlan-raw-device eth0", "vlan_raw_device eth0", "bridge_ports none"])
def test_what_lies_on_ours_by_ifupdown_stays(option):
    path = "/etc/network/interfaces"
    files = {"ifupdown": {path: f"iface v7 inet dhcp\n    {option}\n\nauto eth0\niface eth0 inet dhcp\n"}}
    assert f"iface v7 inet dhcp\n    {option}\n" in written(planned([STATIC], files=files), path)["content"]


DESKTOP = {
    "systemd-networkd": False,
    "NetworkManager": True,
    "systemd-resolved": True,
    "networking": False,
}
PROFILES = "/etc/NetworkManager/system-connections"


def profile(*lines, kind="ethernet", uuid="6a1c"):
    return "\n".join(
        ["[connection]", "id=home", f"uuid={uuid}", f"type={kind}", *lines, "[ipv4]", "method=auto"]
    )


def test_networkmanager_stays_where_the_machine_uses_it_and_its_profile_gives_way():
    path = f"{PROFILES}/Wired.nmconnection"
    files = {"networkmanager": {path: "[connection]\nid=Wired\ninterface-name=eth0\n"}}
    plan = planned([STATIC], files=files, active=DESKTOP)
    assert "renderer: NetworkManager" in written(plan)["content"]
    assert written(plan, path)["move_to"] == "/etc/NetworkManager/Wired.nmconnection.before-trainyard"
    assert plan["apply"][0] == ["nmcli", "connection", "reload"]


def test_where_networkmanager_does_not_run_its_profiles_stay_and_nobody_asks_it():
    files = {"networkmanager": {f"{PROFILES}/Wired.nmconnection": profile("interface-name=eth0")}}
    plan = planned([STATIC], files=files)
    assert [change["path"] for change in plan["files"]] == [OUR_FILE]
    assert plan["apply"] == plan["undo"] == [["netplan", "apply"]]


@pytest.mark.parametrize(
    ("lines", "kind", "gives_way"),
    [
        ([], "ethernet", True),
        ([], "802-3-ethernet", True),
        (["[ethernet]", f"mac-address={ETH0['mac'].upper()}"], "ethernet", True),
        (["[ethernet]", "mac-address=52:54:00:00:00:77"], "ethernet", False),
        (["[match]", "interface-name=en*;eth0;"], "ethernet", True),
        (["[match]", "interface-name=!eth0;"], "ethernet", False),
        (["autoconnect=false"], "ethernet", False),  # by hand alone
        (["autoconnect-priority=-100"], "ethernet", False),  # netplan's comes first
        (["interface-name=docker0"], "bridge", False),
        ([], "wifi", False),
        ([], "vpn", False),
        (["[.nmmeta]", "nm-generated=true"], "ethernet", False),  # what it found there
    ],
)
def test_a_profile_that_names_no_interface_is_for_every_card_of_its_kind(lines, kind, gives_way):
    path = f"{PROFILES}/home.nmconnection"
    files = {"networkmanager": {path: profile(*lines, kind=kind)}}
    plan = planned([STATIC], interfaces=[copy.deepcopy(ETH0), WLAN, *DEVICES], files=files, active=DESKTOP)
    assert bool(written(plan, path)) is gives_way
    assert (["nmcli", "connection", "reload"] in plan["apply"]) is gives_way


@pytest.mark.parametrize(
    ("lines", "kind", "meant"),
    [
        ([], "ethernet", ["eth0", "eth1"]),
        ([], "infiniband", ["ib0"]),
        (["[match]", "driver=r8*;"], "ethernet", ["eth0"]),
        (["[match]", "driver=!r8*;"], "ethernet", ["eth1"]),
        (["[match]", "path=pci-0000:02:*;pci-0000:07:*;"], "ethernet", ["eth0"]),
        (["[match]", "interface-name=|eth0;&eth*;|lan0"], "ethernet", ["eth0"]),
        (["[match]", "interface-name=eth0;&lan*;"], "ethernet", []),
        (["[match]", "kernel-command-line=lan"], "ethernet", ["eth0", "eth1"]),  # whatever it is
        (["[ethernet]", f"mac-address-blacklist={ETH0['mac'].upper()};"], "ethernet", ["eth1"]),
        (["[ethernet]", f"mac-address-denylist={ETH0['mac']};{ETH1['mac']}"], "ethernet", []),
    ],
)
def test_a_profile_is_for_the_cards_that_it_matches(lines, kind, meant):
    links = [
        {**ETH0, "properties": {"ID_PATH": "pci-0000:02:00.0"}},
        copy.deepcopy(ETH1),
        card("ib0", link_type="infiniband"),
        WLAN,
    ]
    assert profile_for(keyed(profile(*lines, kind=kind)), links) == meant


def test_a_profile_for_ours_and_others_is_refused():
    path = f"{PROFILES}/home.nmconnection"
    found = network_plan(survey(files={"networkmanager": {path: profile()}}, active=DESKTOP), [STATIC])
    assert (
        f"{path}: the profile 'home' names no interface, so it is for eth0 as well as for eth1"
        in found["errors"][0]
    )
    assert '`nmcli connection modify "home" connection.interface-name eth1`' in found["errors"][0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ("master=bond0", "slave-type=bond"),
            "put bond0 into network_interfaces too (kind: bonds), or take eth0 ",
        ),
        (
            ("controller=bond0", "port-type=bond"),
            "put bond0 into network_interfaces too (kind: bonds), or take ",
        ),
        (
            ("controller=9f00", "port-type=bond"),
            "put bond0 into network_interfaces too (kind: bonds), or take ",
        ),
        (("master=vrf0", "slave-type=vrf"), "'vrf0' takes in eth0: take eth0 out there"),
    ],
)
def test_a_port_of_what_networkmanager_makes_is_refused(lines, said):
    path, own = f"{PROFILES}/port.nmconnection", f"{PROFILES}/bond0.nmconnection"
    files = {
        path: profile("interface-name=eth0", *lines),
        own: profile("interface-name=bond0", kind="bond", uuid="9f00"),
    }
    found = network_plan(survey(files={"networkmanager": files}, active=DESKTOP), [STATIC])
    assert found["errors"][0].startswith(f"{path}: '") and said in found["errors"][0]


MAKERS = [
    ("/etc/netplan/01.yaml", "network: {bridges: {br0: {dhcp4: true}}}", "bridges"),
    ("/etc/netplan/01.yaml", "network: {ethernets: {eth1: {}}, vlans: {br0: {id: 7, link: eth1}}}", "vlans"),
    ("/etc/network/interfaces", "iface br0 inet dhcp\n  bridge_ports none\n", "bridges"),
    ("/etc/network/interfaces", "iface br0 inet manual\niface br0 inet6 auto\n  bond-slaves none\n", "bonds"),
    (f"{PROFILES}/br0", "[connection]\ntype=bridge\ninterface-name=br0\n", "bridges"),
    (f"{PROFILES}/br0", "[connection]\ntype=wireguard\ninterface-name=br0\n", None),
]


@pytest.mark.parametrize(("path", "content", "kind"), MAKERS)
def test_what_makes_a_device_does_not_give_way_to_an_entry_that_makes_none(path, content, kind):
    """It would hold its addresses until the next boot, and be gone after it."""
    wanted = {"name": "br0", "addresses": ["10.1.0.1/24"]}
    told = read_from(path, told={path: content})
    there = [*survey()["interfaces"], card("br0", kind="bridge")]
    (refused,) = network_plan(survey(interfaces=there, **told), [wanted])["errors"]
    assert refused.startswith(f"{path} makes br0, and would give way to network_interfaces")
    assert refused.endswith(
        f"write kind: {kind} in its entry, and what it says of br0 under options" if kind else "out"
    )
    if kind:
        options = {"id": 7, "link": "eth1"} if kind == "vlans" else {"parameters": {"stp": False}}
        assert written(
            planned([{**wanted, "kind": kind, "options": options}], interfaces=there, **told), path
        )


def test_so_it_is_with_a_vlan_that_ifupdown_makes_by_its_name():
    files = {"ifupdown": {"/etc/network/interfaces": "iface eth0.7 inet dhcp\n"}}
    there = [*survey()["interfaces"], card("eth0.7", kind="vlan")]
    wanted = {"name": "eth0.7", "addresses": ["10.1.0.1/24"]}
    (refused,) = network_plan(survey(interfaces=there, files=files), [wanted])["errors"]
    assert "write kind: vlans in its entry" in refused
    planned([wanted], interfaces=there)  # whoever makes it stays


def test_a_port_of_what_network_interfaces_makes_gives_way():
    path = f"{PROFILES}/port.nmconnection"
    files = {"networkmanager": {path: profile("interface-name=eth0", "master=bond0", "slave-type=bond")}}
    plan = planned([BARE, {"name": "eth1"}, BOND], files=files, active=DESKTOP)
    assert written(plan, path)["move_to"] == "/etc/NetworkManager/port.nmconnection.before-trainyard"


def test_profiles_outside_etc_are_moved_aside_or_hidden():
    unsaved = "/run/NetworkManager/system-connections/home.nmconnection"
    package = "/usr/lib/NetworkManager/system-connections/vendor.nmconnection"
    netplans = "/run/NetworkManager/system-connections/netplan-eth0.nmconnection"
    ours = "interface-name=eth0"
    files = {
        unsaved: profile(ours),
        package: profile(ours, uuid="7b2d"),
        netplans: profile(ours, uuid="8c3e"),
    }
    plan = planned([STATIC], files={"networkmanager": files}, active=DESKTOP)
    assert written(plan, unsaved)["move_to"] == "/run/NetworkManager/home.nmconnection.before-trainyard"
    assert written(plan, f"{PROFILES}/7b2d.nmmeta")["link_to"] == "/dev/null"
    assert not {package, netplans} & {change["path"] for change in plan["files"]}
    hidden = planned(
        [STATIC],
        files={"networkmanager": {package: files[package]}},
        active=DESKTOP,
        hidden_profiles=["7b2d"],
    )
    assert [change["path"] for change in hidden["files"]] == [OUR_FILE]
    nameless = {package: "[connection]\ninterface-name=eth0\n"}
    found = network_plan(survey(files={"networkmanager": nameless}, active=DESKTOP), [STATIC])
    assert f"{package} is a package's profile for eth0, and without a uuid" in found["errors"][0]


@pytest.mark.parametrize(
    ("parameters", "desktop", "refused"),
    [
        ({}, False, False),
        ({}, True, True),  # NetworkManager's own default
        ({"priority": 8}, False, True),  # netplan's, once there are parameters
        ({"stp": False}, True, False),
        ({"stp": True, "forward-delay": 4}, True, False),
        ({"stp": True, "forward-delay": 5}, True, True),
        ({"forward-delay": 12}, False, True),
    ],
)
def test_a_new_bridge_that_the_spanning_tree_keeps_shut_for_too_long_is_refused(parameters, desktop, refused):
    options = {"interfaces": ["eth0"], **({"parameters": parameters} if parameters else {})}
    wanted = [BARE, {**STATIC, "name": "br0", "kind": "bridges", "options": options}]
    active = DESKTOP if desktop else survey()["active"]
    errors = network_plan(survey(active=active), wanted)["errors"]
    assert bool(errors) is refused
    if refused:
        assert (
            "network_interfaces[1].options: a new bridge with the spanning tree carries nothing for 30 s"
            in errors[0]
        )
    there = [*survey()["interfaces"], card("br0", kind="bridge")]
    assert network_plan(survey(active=active, interfaces=there), wanted)["errors"] == []


FIXED = "2001:db8::5/64"


@pytest.mark.parametrize(
    ("dynamic", "more", "refused"),
    [
        (["192.168.1.50/24"], {}, True),
        (["192.168.1.50/24"], {"nameservers": ["192.168.1.1"]}, False),
        (["192.168.1.50/24"], {"nameservers": []}, False),
        ([], {}, False),  # nothing is lost that anybody could tell of
        (["192.168.1.50/24"], {"gateway": "none"}, False),  # a net of the cluster's own
    ],
)
def test_name_servers_of_a_lease_do_not_go_unsaid(dynamic, more, refused):
    interfaces = [{**ETH0, "addresses": ["192.168.1.50/24"], "dynamic": dynamic}, copy.deepcopy(ETH1)]
    given = {"name": "eth0", "addresses": ["192.168.1.10/24"], "gateway": "192.168.1.1", **more}
    bridge = {**given, "name": "br0", "kind": "bridges", "options": {"interfaces": ["eth0"]}}
    for wanted in ([given], [{"name": "eth0"}, bridge]):
        found = network_plan(survey(interfaces=interfaces), wanted)
        assert ["name servers" in one for one in found["errors"]] == [True] * refused, found["errors"]


STANZA = (
    "auto eth0\niface eth0 inet static\n  address 192.168.1.50/24\n  dns-nameservers 10.0.0.53 10.0.0.54\n"
)
TWO_SERVERS = "nameservers: {addresses: [10.0.0.53, 10.0.0.54]}"
# Each tells eth0's host its name servers, and gives way.
TOLD = {
    "/etc/netplan/50-cloud-init.yaml": f"network: {{ethernets: {{eth0: {{{TWO_SERVERS}}}}}}}",
    OUR_FILE: f"network: {{ethernets: {{eth0: {{{TWO_SERVERS}}}}}}}",
    "/etc/systemd/network/05-lan.network": "[Match]\nName=eth0\n[Network]\nDNS=10.0.0.53\nDNS=10.0.0.54#home\n",
    "/etc/systemd/network/50-lan.network": "[Match]\nName=eth0\n[Network]\nDNS=10.0.0.53 10.0.0.54\n",  # hidden
    "/etc/NetworkManager/system-connections/lan.nmconnection": (
        "[connection]\ninterface-name=eth0\n[ipv4]\ndns=10.0.0.53;10.0.0.54;\n"
    ),
    "/etc/network/interfaces": STANZA,
}


def read_from(*paths, told=None):
    """The survey's files, and what is active on such a host."""
    kinds = {
        "netplan": "netplan",
        "network": "ifupdown",
        "NetworkManager": "networkmanager",
        "systemd": "networkd",
    }
    files = {}
    for path in paths:
        files.setdefault(kinds[path.split("/")[2]], {})[path] = (told or TOLD)[path]
    return {"files": files, "active": {**survey()["active"], "NetworkManager": True}}


@pytest.mark.parametrize("path", TOLD)
def test_name_servers_that_a_file_tells_do_not_go_with_it_unsaid(path):
    told = read_from(path)
    (refused,) = network_plan(survey(**told), [STATIC])["errors"]
    assert refused == (
        f"network_interfaces[0]: {path} tells this host its name servers (10.0.0.53, 10.0.0.54), which would be lost, "
        "since network_interfaces names none: write nameservers: [10.0.0.53, 10.0.0.54], or nameservers: [] where it "
        "needs none"
    )
    for said in ({"nameservers": ["10.0.0.53"]}, {"nameservers": []}):
        planned([{**STATIC, **said}], **told)
    planned([BARE, {"name": "eth1"}, {**BOND, "nameservers": []}], **told)
    planned([{"name": "eth0", "options": {"dhcp4": True}}], **told)  # the lease names some
    if path != OUR_FILE:  # theirs stay beside a net of the cluster's own
        planned([{"name": "eth1", "addresses": ["10.1.0.1/24"]}], **told)
    # Other managers' resolv.conf is rewritten, or has an end with them.
    for text, link, refused in (
        ("nameserver 10.0.0.53\n", None, False),
        ("search lan\n", None, True),
        ("# Generated by NetworkManager\nnameserver 10.0.0.53\n", None, True),
        ("nameserver 10.0.0.53\n", "../run/resolvconf/resolv.conf", True),
    ):
        found = network_plan(survey(**told, resolv_conf=text, resolv_link=link), [STATIC])
        assert bool(found["errors"]) is refused, text


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/etc/netplan/60-more.yaml", f"network: {{ethernets: {{eth1: {{{TWO_SERVERS}}}}}}}"),
        ("/etc/systemd/network/50-eth1.network", "[Match]\nName=eth1\n[Network]\nDNS=10.0.0.53\n"),
        (
            "/etc/NetworkManager/system-connections/eth1",
            "[connection]\ninterface-name=eth1\n[ipv6]\ndns=fd00::53;\n",
        ),
        # As cloud-init writes those that are no interface's.
        (
            "/etc/network/interfaces.d/50-cloud-init",
            "iface lo inet loopback\n    dns-nameservers 10.0.0.53\n",
        ),
    ],
)
def test_what_stays_tells_its_name_servers(path, content):
    cloud = "/etc/netplan/50-cloud-init.yaml"
    for stays in (True, False):
        told = {
            **TOLD,
            path: content.replace("eth1", "eth9").replace("lo ", "eth9 ") if not stays else content,
        }
        errors = network_plan(survey(**read_from(cloud, path, told=told)), [STATIC])["errors"]
        assert ["name servers" in one for one in errors] == [True] * (
            not stays
        )  # of a card that is not there


NETPLAN, LAN_NETWORK = "/etc/netplan/50.yaml", "/etc/systemd/network/05-lan.network"
WIRED, STANZAS = "/etc/NetworkManager/system-connections/lan", "/etc/network/interfaces"
AUTH = {"key-management": "802.1x", "method": "ttls", "identity": "me", "password": "hunter22"}
ROUTE = {"to": "10.8.0.0/16", "via": "192.168.1.7"}
IN_WORDS = "under options in netplan's words"


def said_beside(path, lines):
    """A file of that kind which sets eth0 up, and says `lines` besides."""
    if path == NETPLAN:
        return yaml.safe_dump({"network": {"ethernets": {"eth0": {"dhcp4": True, **lines}}}}, sort_keys=False)
    if path == STANZAS:
        return f"auto eth0\niface eth0 inet dhcp\n    {lines}\n"
    match = (
        "[Match]\nName=eth0\n[Network]\nDHCP=yes"
        if path == LAN_NETWORK
        else "[connection]\ninterface-name=eth0"
    )
    return f"{match}\n{lines}\n"


@pytest.mark.parametrize(
    ("path", "lines", "place", "cure", "entry"),
    [
        (NETPLAN, {"auth": AUTH}, "auth", f"auth {IN_WORDS}", {"options": {"auth": AUTH}}),
        (
            WIRED,
            "[802-1x]\neap=ttls;\npassword=hunter22",
            "[802-1x]",
            f"auth {IN_WORDS}",
            {"options": {"auth": AUTH}},
        ),
        (STANZAS, "wpa-conf /etc/lan.conf", "wpa-conf", f"auth {IN_WORDS}", {"options": {"auth": AUTH}}),
        (NETPLAN, {"mtu": 9000}, "mtu", "mtu: 9000", {"mtu": 9000}),
        (NETPLAN, {"mtu": 9000}, "mtu", "mtu: 9000", {"options": {"mtu": 9000}}),
        (LAN_NETWORK, "[Link]\nMTUBytes=9000", "MTUBytes=", "mtu: 9000", {"mtu": 9000}),
        (LAN_NETWORK, "[Link]\nMTUBytes=9K", "MTUBytes=", "mtu in netplan's words", {"mtu": 9000}),
        (WIRED, "[ethernet]\nmtu=9000", "mtu=", "mtu: 9000", {"mtu": 9000}),
        (STANZAS, "mtu 9000", "mtu", "mtu: 9000", {"mtu": 9000}),
        (
            NETPLAN,
            {"routes": [{"to": "default", "via": "192.168.1.1"}, {**ROUTE, "metric": 50}]},
            "routes",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7, metric: 50}]",
            {"routes": [ROUTE]},
        ),
        (
            NETPLAN,
            {"routes": [{**ROUTE, "source": "x"}]},
            "routes",
            "routes in netplan's words",
            {"routes": []},
        ),
        (
            LAN_NETWORK,
            "Gateway=192.168.1.1\n[Route]\nGateway=192.168.1.1\n[Route]\nDestination=10.8.0.0/16\nGateway=192.168.1.7",
            "[Route]",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7}]",
            {"routes": [ROUTE]},
        ),
        (
            LAN_NETWORK,
            "[Route]\nGateway=_dhcp4\nDestination=10.8.0.0/16",
            "[Route]",
            "routes in netplan's words",
            {"routes": [ROUTE]},
        ),
        (
            LAN_NETWORK,
            "[Route]\nMetric=7\nDestination=10.8.0.0/16",
            "[Route]",
            "routes: [{to: 10.8.0.0/16, metric: 7, scope: link}]",
            {"routes": []},
        ),
        (
            LAN_NETWORK,
            f"[Link]\nMACAddress={ETH1['mac']}",
            "[Link] MACAddress=",
            f"options: {{macaddress: '{ETH1['mac']}'}}",
            None,
        ),
        (
            WIRED,
            "[ipv4]\nroute1=0.0.0.0/0,192.168.1.1\nroute2=10.8.0.0/16,192.168.1.7,50",
            "the routes",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7, metric: 50}]",
            {"routes": [ROUTE]},
        ),
        (
            WIRED,
            "[ipv4]\nroute1=10.8.0.0/16,192.168.1.7,0\nroute1_options=onlink=true,src=192.168.1.50,table=7",
            "the routes",
            "routes: [{to: 10.8.0.0/16, via: 192.168.1.7, metric: 0, on-link: true, table: 7, from: 192.168.1.50}]",
            {"routes": [ROUTE]},
        ),
        (
            WIRED,
            "[ipv4]\nroute1=10.8.0.0/16\nroute1_options=lock-mtu=true",
            "the routes",
            "routes in netplan's words",
            {"routes": []},
        ),
        (
            LAN_NETWORK,
            "[Route]\nDestination=10.8.0.0/16\nGateway=10.9.0.1\nGatewayOnLink=yes\nProtocol=static",
            "[Route]",
            "routes: [{to: 10.8.0.0/16, via: 10.9.0.1, on-link: true}]",
            {"routes": []},
        ),
        (
            WIRED,
            "[ipv6]\nroute1=fd00:8::/64",
            "the routes",
            "routes: [{to: 'fd00:8::/64', scope: link}]",
            {"routes": []},
        ),
        (WIRED, "[ethernet]\nwake-on-lan=64", "wake-on-lan=", "options: {wakeonlan: true}", None),
        (
            WIRED,
            "[infiniband]\ntransport-mode=connected",
            "transport-mode=",
            "options: {infiniband-mode: conn",
            None,
        ),
        (
            NETPLAN,
            {"routing-policy": [{"from": "10.0.0.0/8", "table": 7}]},
            "routing-policy",
            f"routing-policy {IN_WORDS}",
            {"options": {"routing-policy": []}},
        ),
        (
            LAN_NETWORK,
            "[RoutingPolicyRule]\nTable=7",
            "[RoutingPolicyRule]",
            f"routing-policy {IN_WORDS}",
            None,
        ),
        (WIRED, "[ipv4]\nrouting-rule1=priority 1 table 7", "[ipv4] routing-rule1=", "routing-policy", None),
        (
            NETPLAN,
            {"wakeonlan": True},
            "wakeonlan",
            "options: {wakeonlan: true}",
            {"options": {"wakeonlan": False}},
        ),
        (
            NETPLAN,
            {"macaddress": ETH1["mac"]},
            "macaddress",
            f"options: {{macaddress: '{ETH1['mac']}'}}",
            None,
        ),
        (STANZAS, "hwaddress ether 52:54:00:00:00:02", "hwaddress", f"macaddress {IN_WORDS}", None),
        (
            WIRED,
            "[ethernet]\ncloned-mac-address=52:54:00:00:00:02",
            "cloned-mac-address=",
            "options: {macaddress: '52:54",
            None,
        ),
    ],
)
def test_what_a_file_says_beside_addresses_does_not_go_with_it_unsaid(path, lines, place, cure, entry):
    files = {path: said_beside(path, lines)}
    told = read_from(path, told=files)
    wanted = {**STATIC, "nameservers": []}
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [wanted])["errors"]
    assert refused.startswith(
        f"network_interfaces[0]: {path} has {place} for eth0, which would be lost, since its entry has none: "
        f"write {cure}"
    )
    assert refused.endswith(", or take it out there") and "hunter22" not in refused
    if entry is not None:
        planned([{**wanted, **entry}], **copy.deepcopy(told))
    planned([CLUSTERS], **copy.deepcopy(told))  # theirs stays
    ours = {"netplan": {OUR_FILE: written(planned([{**wanted, "mtu": 9000}]))["content"]}}
    planned([wanted], files=ours)  # who takes it out of the inventory means that


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("IPMasquerade=both", "[Network] IPMasquerade="),
        ("DHCPServer=yes\n[DHCPServer]\nPoolSize=9\nDNS=1.1.1.1", "[Network] DHCPServer=, [DHCPServer]"),
        ("[Route]\nMultiPathRoute=192.168.1.7@eth0 1\nDestination=10.8.0.0/16", "[Route] MultiPathRoute="),
        ("[NextHop]\nId=7\nGateway=192.168.1.7\n[Route]\nNextHop=7", "[NextHop], [Route] NextHop="),
        ("[SR-IOV]\nVirtualFunction=0", "[SR-IOV]"),
    ],
)
def test_what_systemd_networkd_alone_has_a_word_for_does_not_go_unsaid(lines, place):
    files = {LAN_NETWORK: said_beside(LAN_NETWORK, lines)}
    wanted = [{**STATIC, "routes": [ROUTE]}]
    (refused,) = network_plan(survey(files={"networkd": files}), wanted)["errors"]
    assert refused == (
        f"{LAN_NETWORK}: {place} for eth0 would be lost, since network_interfaces has eth0, and netplan no word for "
        "it: move it, below the names of its sections, into "
        "/etc/systemd/network/10-netplan-eth0.network.d/05-lan.conf, which is read besides"
    )
    files = {LAN_NETWORK: files[LAN_NETWORK].replace("eth0\n[Net", "eth*\n[Net")}
    (refused,) = network_plan(survey(files={"networkd": files}), wanted)["errors"]
    assert refused.endswith(", or have its [Match] fit eth0 no more")
    files = {
        "/etc/systemd/network/50-lan.network": files[LAN_NETWORK]
    }  # netplan's hides it at the latest run, too
    planned(wanted, files={"networkd": files})


def with_drop_in(lines, match="Name=eth0"):
    """The survey's files, where a drop-in of systemd-networkd's has `lines`."""
    seen = survey(files={"networkd": {LAN_NETWORK: f"[Match]\n{match}\n[Network]\nDHCP=yes\n"}})
    seen["files"]["networkd"][LAN_NETWORK]["more"] = f"{lines}\n"
    return seen


def test_what_a_drop_in_says_counts():
    """What is in NAME.network.d goes with NAME.network."""
    (refused,) = network_plan(with_drop_in("[Network]\nDNS=10.0.0.53"), [STATIC])["errors"]
    assert f"{LAN_NETWORK} tells this host its name servers (10.0.0.53)" in refused
    (refused,) = network_plan(with_drop_in("[Network]\nMACVLAN=lan1"), [STATIC])["errors"]
    assert refused.startswith(f"{LAN_NETWORK}.d: MACVLAN=lan1 would be lost")
    (refused,) = network_plan(with_drop_in("[Link]\nMTUBytes=9000"), [STATIC])["errors"]
    assert f"{LAN_NETWORK} has MTUBytes= in {LAN_NETWORK}.d for eth0, which would be lost" in refused
    (refused,) = network_plan(with_drop_in("[DHCPv4]\nUseMTU=yes", "Name=eth*"), [STATIC])["errors"]
    assert refused.startswith(
        f"{LAN_NETWORK} is for eth1 as well as for eth0, so that it would get a name that"
    )
    assert refused.endswith(f"write that into {LAN_NETWORK} itself, or have its [Match] fit eth0 no more")
    plan = network_plan(with_drop_in("[Match]\nName=\nName=eth1"), [STATIC])
    assert [change["path"] for change in plan["files"]] == [OUR_FILE]


def test_a_networkd_file_outside_etc_that_comes_before_netplans_is_refused():
    path = "/run/systemd/network/05-boot.network"
    files = {"networkd_elsewhere": {path: "[Match]\nName=eth*\n[Network]\nDHCP=yes\n"}}
    (refused,) = network_plan(survey(files=files), [STATIC])["errors"]
    assert refused == (
        f"{path} sets eth0 up, and systemd-networkd reads it before netplan's; it is a package's, or written at each "
        "boot: hide it by `ln -s /dev/null /etc/systemd/network/05-boot.network`, or put a copy of your own there that "
        "fits eth0 no more"
    )
    for other, content in (("70-eth0.network", "Name=eth0"), ("05-boot.network", "Name=lan0")):
        planned(
            [STATIC], files={"networkd_elsewhere": {f"/run/systemd/network/{other}": f"[Match]\n{content}\n"}}
        )
    planned([STATIC], files=files, active=DESKTOP)


def test_networkd_files_outside_etc_are_read_unless_one_in_etc_hides_them(load_module, tmp_path):
    folders = [tmp_path / place / "systemd/network" for place in ("etc", "run", "usr/lib")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "05-lan.network").write_text(f"{folder}")
    (folders[1] / "10-netplan-eth0.network").write_text("netplan's")
    (folders[2] / "06-lan.network").write_text("hidden")
    (folders[0] / "06-lan.network").symlink_to("/dev/null")
    for folder in folders[1:]:
        (folder / "07-lan.network").write_text(folder.parts[-3])
    found = load_module("network_survey").networkd_elsewhere(tmp_path)
    assert {path: file["text"] for path, file in found.items()} == {f"{folders[1]}/07-lan.network": "run"}


def test_drop_ins_are_read_where_systemd_networkd_reads_them(load_module, tmp_path):
    survey = load_module("network_survey")
    for place, content in (("usr/lib", "far"), ("etc", "near"), ("run", "between")):
        folder = tmp_path / place / "systemd/network/05-lan.network.d"
        folder.mkdir(parents=True)
        (folder / "lan.conf").write_text(content)
    (folder / "a.conf").write_text("first")
    (tmp_path / "usr/lib/systemd/network/05-lan.network.d/off.conf").write_text("off")
    (tmp_path / "etc/systemd/network/05-lan.network.d/off.conf").symlink_to("/dev/null")
    files = survey.with_drop_ins({LAN_NETWORK: {}, "/etc/systemd/network/06-lan.network": {}}, tmp_path)
    assert [file["more"] for file in files.values()] == ["first\nnear\n", ""]


def test_of_what_is_said_beside_addresses_the_rest_is_replaced():
    """As images have it: leases, their words, what waits for whom."""
    overrides = {
        "dhcp4-overrides": {"route-metric": 100},
        "optional": True,
        "accept-ra": True,
        "critical": True,
    }
    cloud = said_beside(NETPLAN, {**overrides, "mtu": 1500, "wakeonlan": False, "link-local": []})
    planned([STATIC], files={"netplan": {NETPLAN: cloud}})
    planned([STATIC], files={"netplan": {NETPLAN: "network: {ethernets: {eth0: {mtu: , routes: }}}"}})
    lan = "IPForward=no\nIPv6Token=::7\nLLMNR=no\n[DHCP]\nUseMTU=yes\n[Link]\nMTUBytes=1500\nRequiredForOnline=no\n"
    planned([STATIC], files={"networkd": {LAN_NETWORK: said_beside(LAN_NETWORK, lan)}})
    wired = said_beside(
        WIRED, "[ethernet]\nmtu=0\nwake-on-lan=1\ncloned-mac-address=preserve\n[ipv4]\nmethod=auto\n[proxy]\n"
    )
    planned([STATIC], files={"networkmanager": {WIRED: wired}}, active=DESKTOP)
    # A wireless card's 802.1X stands with its networks.
    points = {"access-points": {"home": {"auth": AUTH}}}
    wlan = {"name": "wlan0", "kind": "wifis", "addresses": ["10.1.0.1/24"], "options": points}
    roaming = "[connection]\ntype=wifi\ninterface-name=wlan0\n[wifi]\nssid=home\n[802-1x]\neap=ttls;\n"
    planned([wlan], interfaces=[ETH0, WLAN], files={"networkmanager": {WIRED: roaming}}, active=DESKTOP)


@pytest.mark.parametrize(
    ("path", "lines", "place"),
    [
        (
            NETPLAN,
            {"nameservers": {"addresses": ["10.0.0.53"], "search": ["lan", "home.lan"]}},
            "nameservers.search",
        ),
        (LAN_NETWORK, "DNS=10.0.0.53\nDomains=lan home.lan", "Domains="),
        (WIRED, "[ipv4]\ndns=10.0.0.53\ndns-search=lan;home.lan;", "dns-search="),
        (STANZAS, "dns-nameservers 10.0.0.53\n    dns-search lan home.lan", "dns-search"),
    ],
)
def test_the_domains_of_short_names_do_not_go_unsaid(path, lines, place):
    told = read_from(path, told={path: said_beside(path, lines)})
    wanted = {**STATIC, "nameservers": ["10.0.0.53"]}
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [wanted])["errors"]
    assert refused == (
        f"network_interfaces[0]: {path} has {place} for eth0, which would be lost, since its entry has none: write "
        "nameservers: {addresses: […], search: [lan, home.lan]}, or take it out there"
    )
    for named in (
        {"addresses": ["10.0.0.53"], "search": ["lan"]},
        {"addresses": ["10.0.0.53"], "search": []},
        [],
    ):
        planned([{**wanted, "nameservers": named}], **copy.deepcopy(told))
        planned([BARE, {"name": "eth1"}, {**BOND, "nameservers": named}], **copy.deepcopy(told))
    planned([{**STATIC, "options": {"nameservers": {"search": []}}}], **copy.deepcopy(told))
    asked = {"networkd": {LAN_NETWORK: said_beside(LAN_NETWORK, "Domains=~corp")}}
    assert "search: [~corp]}" in network_plan(survey(files=asked), [wanted])["errors"][0]


@pytest.mark.parametrize(
    ("path", "lines", "place"),
    [
        (NETPLAN, {"accept-ra": False}, "accept-ra"),
        (NETPLAN, {"accept-ra": "n"}, "accept-ra"),
        (LAN_NETWORK, "IPv6AcceptRA=no", "[Network] IPv6AcceptRA="),
    ],
)
def test_that_no_router_is_listened_to_does_not_go_unsaid(path, lines, place):
    """Who else is on that network could have the host send by way of him."""
    told = read_from(path, told={path: said_beside(path, lines)})
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [STATIC])["errors"]
    assert refused == (
        f"network_interfaces[0]: {path} has {place} for eth0, which would be lost, since its entry has none: write "
        "options: {accept-ra: false}, or take it out there"
    )
    for wanted in (False, True):
        planned([{**STATIC, "options": {"accept-ra": wanted}}], **copy.deepcopy(told))
    others = {NETPLAN: {"accept-ra": True}, LAN_NETWORK: "IPv6AcceptRA=yes"}
    planned([STATIC], **read_from(path, told={path: said_beside(path, others[path])}))


def test_what_netplan_has_no_word_for_is_left_to_networkmanager():
    for lines in ("[ipv4]\nmethod=shared", "[ethtool]\nring-rx=4096", "[tc]\nqdisc.root=fq_codel"):
        files = {"networkmanager": {WIRED: said_beside(WIRED, lines)}}
        (refused,) = network_plan(survey(files=files, active=DESKTOP), [STATIC])["errors"]
        assert refused.endswith("has none: leave eth0 out of network_interfaces, or take it out there")


def stored(more="", passthrough=""):
    """A profile as NetworkManager stores it by netplan (Ubuntu 23.10 and later)."""
    return f"""network:
  version: 2
  ethernets:
    NM-ae9132e0-fcf6-3d96-9f77-aa48efd55419:
      renderer: NetworkManager
      match:
        name: "eth0"
      dhcp4: true
      dhcp6: true
      ipv6-address-generation: "stable-privacy"
      wakeonlan: true{more}
      networkmanager:
        uuid: "ae9132e0-fcf6-3d96-9f77-aa48efd55419"
        name: "Wired connection 1"
        passthrough:
          connection.timestamp: "1700000000"
          802-1x._: ""
          ethernet._: ""
          ipv6.ip6-privacy: "-1"
          proxy._: ""{passthrough}
"""


def by_stored(more="", passthrough=""):
    files = {"netplan": {"/etc/netplan/90-NM-1.yaml": stored(more, passthrough)}}
    return network_plan(survey(files=files, active=DESKTOP), [{**STATIC, "nameservers": []}])["errors"]


def test_a_profile_that_networkmanager_stored_by_netplan_says_no_more_than_it_did():
    assert by_stored() == []
    assert by_stored(passthrough='\n          ethernet.wake-on-lan: "1"') == []


@pytest.mark.parametrize(
    ("line", "place", "cure"),
    [
        ('ethernet.wake-on-lan: "64"', "wake-on-lan= in networkmanager.pass", "write options: {wakeonlan: true}"),
        ('802-1x.eap: "tls;"', "[802-1x] in networkmanager.pass", f"write auth {IN_WORDS}"),
        ("ethtool.ring-rx: 4096", "[ethtool] in networkmanager.pass", "leave eth0 out of network_interfaces"),
        ('tc.qdisc.root: "fq"', "[tc] in networkmanager.pass", "leave eth0 out of network_interfaces"),
        ('ipv4.method: "shared"', "[ipv4] method=shared in networkmanager.pass", "leave eth0 out of"),
        ('ipv4.route2: "10.9.0.0/16,192.168.1.9"', "routes", "write routes: [{to: 10.9.0.0/16, via: 192.168.1.9}]"),
    ],
)  # fmt: skip
def test_what_netplan_passes_through_to_networkmanager_does_not_go_unsaid(line, place, cure):
    (refused,) = by_stored(passthrough=f"\n          {line}")
    assert (
        refused.startswith(f"network_interfaces[0]: /etc/netplan/90-NM-1.yaml has {place}")
        and cure in refused
    )


def test_what_netplan_says_and_passes_through_is_told_once():
    (refused,) = by_stored("\n      mtu: 9000", '\n          ethernet.mtu: "9000"')
    assert "has mtu for eth0" in refused
    one = "routes: [{to: 10.8.0.0/16, via: 192.168.1.7}]"
    (refused,) = by_stored(f"\n      {one}", '\n          ipv4.route1: "10.8.0.0/16,192.168.1.7"')
    assert f"has routes for eth0, which would be lost, since its entry has none: write {one}," in refused
    (refused,) = by_stored(f"\n      {one}", '\n          ipv4.route2: "10.9.0.0/16,192.168.1.9"')
    assert f"write {one[:-1]}, {{to: 10.9.0.0/16, via: 192.168.1.9}}]" in refused
    auth = {"auth": AUTH, "networkmanager": {"passthrough": {"802-1x.eap": "tls;"}}}
    files = {"netplan": {NETPLAN: said_beside(NETPLAN, auth)}}
    planned([{**STATIC, "options": {"auth": AUTH}}], files=files)
    assert [place for _, place, _ in of_netplan(auth)] == ["auth"]
    for odd in ("networkmanager", {"passthrough": ["x"]}, {"passthrough": {7: None, "ipv4": ["y"]}}):
        assert of_netplan({"networkmanager": odd}) == []


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("ethernet-ring-rx 4096", "leave eth0 out of network_interfaces"),
        ("ethernet_autoneg off", "leave eth0 out of network_interfaces"),
        ("link-speed 1000", "leave eth0 out of network_interfaces"),
        ("hardware-irq-coalesce-rx-usecs 9", "leave eth0 out of network_interfaces"),
        ("offload-ufo off", "leave eth0 out of network_interfaces"),
        ("ethtool-coalesce-rx-usecs 9", "leave eth0 out of network_interfaces"),
        ("offload-tso off", "write options: {tcp-segmentation-offload: false}"),
        ("gro-offload on", "write options: {generic-receive-offload: true}"),
    ],
)
def test_what_ethtool_sets_by_a_stanza_does_not_go_unsaid(line, cure):
    files = {"ifupdown": {STANZAS: said_beside(STANZAS, line)}}
    wanted = {**STATIC, "nameservers": []}
    (refused,) = network_plan(survey(files=copy.deepcopy(files)), [wanted])["errors"]
    assert f"has {line.split()[0].replace('_', '-')} for eth0" in refused
    assert refused.endswith(f"its entry has none: {cure}, or take it out there")
    if "options" in cure:
        planned([{**wanted, **yaml.safe_load(cure.removeprefix("write "))}], files=files)
    planned([wanted], files={"ifupdown": {STANZAS: said_beside(STANZAS, "link-type dummy")}})


def test_what_netplan_turns_off_does_not_go_unsaid():
    """Most cards have it on by themselves."""
    files = {"netplan": {NETPLAN: said_beside(NETPLAN, {"tcp-segmentation-offload": False})}}
    (refused,) = network_plan(survey(files=files), [STATIC])["errors"]
    assert "write options: {tcp-segmentation-offload: false}, or" in refused
    files = {
        "netplan": {
            NETPLAN: said_beside(NETPLAN, {"virtual-function-count": 0, "emit-lldp": False, 7: False})
        }
    }
    planned([STATIC], files=files)


IFUPDOWN = {"systemd-networkd": False, "NetworkManager": False, "systemd-resolved": True, "networking": True}


def of_bridge(*lines, active=IFUPDOWN, path=STANZAS, options=None, **parameters):
    """What is said where a bridge that ifupdown, or netplan, made comes into network_interfaces."""
    content = "\n  ".join(["iface br0 inet dhcp", "bridge_ports eth0", *lines]) + "\niface eth0 inet manual\n"
    if path == WIRED:
        content = lines[0]
    elif path == NETPLAN:
        content = (
            f"network: {{ethernets: {{eth0: {{}}}}, bridges: {{br0: {{interfaces: [eth0], {lines[0]}}}}}}}"
        )
    options = {
        "interfaces": ["eth0"],
        **({"parameters": parameters} if parameters else {}),
        **(options or {}),
    }
    bridge = {**STATIC, "name": "br0", "kind": "bridges", "nameservers": [], "options": options}
    cards = [
        {**ETH0, "addresses": [], "master": "br0"},
        card("br0", kind="bridge", addresses=ETH0["addresses"]),
    ]
    told = read_from(path, told={path: content})["files"]
    out = [{**DEFAULT, "interface": "br0"}]
    seen = survey(files=told, active=active, interfaces=cards, routes=out)
    return network_plan(seen, [BARE, bridge])["errors"]


USUAL_BRIDGE = (
    "bridge_stp off",
    "bridge_fd 0",
    "bridge_maxwait 0",
    "bridge_waitport 0",
)  # Debian's wiki, Proxmox


def test_a_bridge_without_a_spanning_tree_is_what_systemd_networkd_makes_by_itself():
    assert of_bridge(*USUAL_BRIDGE) == []
    assert of_bridge(*(line.replace("_", "-") for line in USUAL_BRIDGE)) == []
    for parameters in ("{}", "{stp: false}", "{stp: no, forward-delay: 0}"):
        assert of_bridge(f"parameters: {parameters}", path=NETPLAN) == [], parameters
    for parameters in ("{stp: true}", "{forward-delay: 0}", "{stp: false, ageing-time: 7}"):
        (refused,) = of_bridge(f"parameters: {parameters}", path=NETPLAN)
        assert "has parameters for br0" in refused, parameters
    for line in ("bridge_stp on", "bridge_fd 9", "bridge_ageing 7"):
        (refused,) = of_bridge(*USUAL_BRIDGE[2:], line)
        assert f"has {line.split()[0].replace('_', '-')} for br0" in refused
        assert of_bridge(line, stp=True) == []
    assert "write options: {parameters: {stp: true, …}}, or" in of_bridge("bridge_stp on")[0]


def test_networkmanager_has_to_be_told_that_a_bridge_has_no_spanning_tree():
    """By itself it has one."""
    for said in ({"active": DESKTOP}, {"options": {"renderer": "NetworkManager"}}):
        (refused,) = of_bridge(*USUAL_BRIDGE, **said)
        assert (
            "has bridge-stp for br0" in refused
            and "write options: {parameters: {stp: false, …}}, or" in refused
        )
        (refused,) = of_bridge("renderer: NetworkManager, parameters: {stp: false}", path=NETPLAN, **said)
        assert "has parameters for br0" in refused
        assert of_bridge(*USUAL_BRIDGE, **said, stp=False) == []
    networkds = {"options": {"renderer": "networkd"}}
    assert of_bridge(*USUAL_BRIDGE, active=DESKTOP, **networkds) == []


def test_a_bridge_that_knows_vlans_is_left_to_whoever_made_it():
    """Whatever parameters its entry has: none says that."""
    for line in ("bridge-vlan-aware yes", "bridge_vids 2-4094", "bridge-pvid 7"):
        (refused,) = of_bridge(*USUAL_BRIDGE, line, stp=False)
        assert f"has {line.split()[0].replace('_', '-')} for br0" in refused
        assert refused.endswith("none: leave br0 out of network_interfaces, or take it out there")
    for line in ("bridge-vlan-aware no", "bridge-pvid 1", "bridge_allow_untagged yes", "ethernet-autoneg on"):
        assert of_bridge(*USUAL_BRIDGE, line) == []
    # netplan takes a card's offloads of cards alone.
    (refused,) = of_bridge(*USUAL_BRIDGE, "offload-gro off")
    assert refused.endswith("none: leave br0 out of network_interfaces, or take it out there")
    stored = "networkmanager: {passthrough: {bridge.multicast-snooping: 'false'}}"
    (refused,) = of_bridge(f"parameters: {{stp: false}}, {stored}", path=NETPLAN)
    assert "in networkmanager.passthrough for br0, which would be lost" in refused
    lines = "[connection]\ntype=bridge\ninterface-name=br0\n[bridge]\nstp=false\n"
    for more, refused in (("", False), ("vlan-filtering=false", False), ("vlan-filtering=true", True)):
        errors = of_bridge(f"{lines}{more}", path=WIRED, active=DESKTOP, stp=False)
        assert ["[bridge] vlan-filtering= for br0" in one for one in errors] == [True] * refused


def test_what_the_stanzas_of_a_bonds_ports_say_of_it_is_the_bonds():
    """ifenslave takes a bond's options from its ports, too."""
    ports = [f"iface {name} inet manual\n  bond-master bond0\n  bond-mode 1" for name in ("eth0", "eth1")]
    text = "\n".join([*ports, "iface bond0 inet dhcp\n  bond-slaves none\n"])
    told = {"files": {"ifupdown": {STANZAS: text}}, "active": IFUPDOWN}
    bond = {**BOND, "nameservers": []}
    planned([BARE, {"name": "eth1"}, bond], **copy.deepcopy(told))
    bond["options"] = {"interfaces": ["eth0", "eth1"]}
    (refused,) = network_plan(survey(**copy.deepcopy(told)), [BARE, {"name": "eth1"}, bond])["errors"]
    assert refused == (
        f"network_interfaces[2]: {STANZAS} has bond-mode for eth0, which would be lost, since the entry of bond0 has "
        f"none: write parameters {IN_WORDS}, or take it out there"
    )
    # Of another bond than that which takes the port in, they are not its own.
    parameters = {"parameters": BOND["options"]["parameters"]}
    other = {"name": "bond1", "kind": "bonds", "options": {"interfaces": ["eth1"], **parameters}}
    bond["options"] = {"interfaces": ["eth0"]}
    (refused,) = network_plan(survey(**told), [BARE, {"name": "eth1"}, bond, other])["errors"]
    assert refused.startswith(f"network_interfaces[2]: {STANZAS} has bond-mode for eth0")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/usr/lib/netplan/50.yaml", said_beside(NETPLAN, {"mtu": 9000})),
        ("/lib/netplan/50.yaml", said_beside(NETPLAN, {"mtu": 9000})),
        (
            "/usr/lib/NetworkManager/system-connections/lan",
            said_beside(WIRED, "uuid=7b2d\n[ethernet]\nmtu=9000"),
        ),
    ],
)
def test_nobody_is_told_to_change_a_packages_file(path, content):
    """The next upgrade would bring it back."""
    kind = "netplan" if "netplan" in path else "networkmanager"
    (refused,) = network_plan(survey(files={kind: {path: content}}, active=DESKTOP), [STATIC])["errors"]
    assert refused.endswith(
        f"{path} has mtu{'=' * (kind != 'netplan')} for eth0, which would be lost, since its "
        "entry has none: write mtu: 9000"
    )


def test_the_size_of_a_bonds_ports_is_the_bonds():
    files = {"netplan": {NETPLAN: said_beside(NETPLAN, {"mtu": 9000})}}
    wanted = [BARE, {"name": "eth1"}, {**BOND, "mtu": 9000}]
    planned(wanted, files=files)
    assert network_plan(survey(files=files), [*wanted[:2], BOND])["errors"]
    both = {"netplan": {NETPLAN: "network: {ethernets: {all: {match: {name: 'eth*'}, mtu: 9000}}}"}}
    (refused,) = network_plan(survey(files=both), [{**STATIC, "mtu": 9000}, CLUSTERS])["errors"]
    assert refused.startswith(
        "network_interfaces[1]: /etc/netplan/50.yaml has mtu for eth1, which would be lost"
    )


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"/etc/systemd/resolved.conf": "[Resolve]\nDNS=10.0.0.53 1.1.1.1\n"}, True),
        ({"/etc/systemd/resolved.conf": "[Resolve]\n#DNS=\n"}, False),
        ({"/etc/systemd/resolved.conf": "[Resolve]\nFallbackDNS=10.0.0.53\n"}, False),
        ({"/etc/systemd/resolved.conf.d/lan.conf": "[Resolve]\nDNS=10.0.0.53\n"}, True),
        ({"/etc/systemd/resolved.conf.d/lan.conf": "[Resolve]\nDNS=10.0.0.53\nDNS=\n"}, False),
        (
            {
                "/usr/lib/systemd/resolved.conf.d/lan.conf": "[Resolve]\nDNS=10.0.0.53\n",
                "/etc/systemd/resolved.conf.d/lan.conf": "",
            },
            False,
        ),
    ],
)
def test_systemd_resolveds_own_files_tell_its_name_servers(files, told):
    leased = [{**ETH0, "dynamic": ETH0["addresses"]}, copy.deepcopy(ETH1)]
    read = read_from("/etc/netplan/50-cloud-init.yaml")
    for more in (
        {"files": {"resolved": files}, "interfaces": leased},
        {"files": {**read["files"], "resolved": files}},
    ):
        for resolved in (True, False):
            active = {**survey()["active"], "systemd-resolved": resolved}
            errors = network_plan(survey(**copy.deepcopy(more), active=active), [STATIC])["errors"]
            assert bool(errors) is not (told and resolved)


def test_what_has_been_hidden_since_an_earlier_run_tells_no_name_servers():
    first = written(planned([STATIC]))["content"]
    planned(
        [STATIC],
        files={**read_from("/etc/systemd/network/50-lan.network")["files"], "netplan": {OUR_FILE: first}},
    )


def test_name_servers_of_a_device_that_goes_are_lost():
    made = written(planned([BARE, {"name": "eth1"}, {**BOND, "nameservers": ["10.0.0.53"]}]))["content"]
    interfaces = [{**ETH0, "addresses": []}, copy.deepcopy(ETH1), card("bond0", kind="bond")]
    (refused,) = network_plan(survey(interfaces=interfaces, files={"netplan": {OUR_FILE: made}}), [STATIC])[
        "errors"
    ]
    assert refused.startswith(f"network_interfaces: {OUR_FILE} tells this host its name servers (10.0.0.53)")


def test_a_lease_that_stays_tells_its_name_servers():
    interfaces = [copy.deepcopy(ETH0), {**ETH1, "addresses": ["10.0.0.5/24"], "dynamic": ["10.0.0.5/24"]}]
    static = {"name": "eth0", "addresses": ["192.168.1.10/24"], "gateway": "192.168.1.1"}
    kept = {"name": "eth1", "options": {"dhcp4": True}}
    for wanted in ([static], [static, kept]):
        assert not any(
            "name servers" in one for one in network_plan(survey(interfaces=interfaces), wanted)["errors"]
        )


ASIDE = "/etc/netplan/50-cloud-init.yaml.before-trainyard"
CLUSTERS = {"name": "eth1", "addresses": ["10.1.0.1/24"]}


def left_out(wanted, files=None, first=(STATIC, CLUSTERS), **more):
    """What is said where `first` was in network_interfaces, and `wanted` is now."""
    ours = written(planned(first, **more))["content"]
    files = {**(files or {}), "netplan": {**(files or {}).get("netplan", {}), OUR_FILE: ours}}
    return network_plan(survey(files=files, **more), wanted)["errors"]


def test_a_card_does_not_lose_what_sets_it_up_with_its_entry():
    keep = (
        f"network_interfaces no longer names eth1, which {OUR_FILE} sets up, and nothing else would: keep its entry "
        "({name: eth1} alone gives it no addresses)"
    )
    assert left_out([STATIC]) == [keep]
    for kept in (
        BOTH,
        BOTH.replace("eth1:", f"lan: {{match: {{macaddress: {ETH1['mac'].upper()}}}}}\n    x:"),
    ):
        # A client of DHCP notes for which card it wrote resolv.conf.
        leased = {"/etc/resolv.conf.before-trainyard": "# Generated by dhcpcd from eth1.dhcp\n"}
        aside = {"kept": {ASIDE: kept, f"{ASIDE}.2": CLOUD, **leased}}
        assert left_out([STATIC], aside) == [
            f"{keep}, or put back first what set it up before: {ASIDE}, as /etc/netplan/50-cloud-init.yaml"
        ]
    # Beside NetworkManager's profiles it would read what gave way.
    profile = "[connection]\ninterface-name=eth1\n"
    (said,) = left_out(
        [STATIC], {"kept": {"/etc/NetworkManager/Wired.nmconnection.before-trainyard": profile}}
    )
    assert ".before-trainyard, as /etc/NetworkManager/system-connections/Wired.nmconnection" in said
    path = "/etc/network/interfaces"
    stanzas = written(planned([CLUSTERS], files={"ifupdown": {path: INTERFACES}}), path)["content"]
    assert left_out([STATIC], {"ifupdown": {path: stanzas}}) == [
        f"{keep}, or put back first what set it up before: the lines of {path} that begin with '# trainyard:', "
        "without that"
    ]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ([STATIC, {"name": "eth1"}], {}),
        ([STATIC, {"macaddress": ETH1["mac"], "name": "lan0", "addresses": ["10.1.0.1/24"]}], {}),
        # Another's file has it, or has it again.
        ([STATIC], {"netplan": {"/etc/netplan/50-cloud-init.yaml": BOTH}}),
        ([STATIC], {"netplan": {"/etc/netplan/60.yaml": "network: {bonds: {bond0: {interfaces: [eth1]}}}"}}),
        ([STATIC], {"networkd": {"/etc/systemd/network/99-wired.network": "[Match]\nName=eth1\n"}}),
        ([STATIC], {"ifupdown": {"/etc/network/interfaces": "iface eth1 inet dhcp\n"}}),
        ([STATIC], {"ifupdown": {"/etc/network/interfaces": "iface br0 inet dhcp\n  bridge_ports eth1\n"}}),
    ],
)
def test_a_card_that_is_set_up_still_may_go_out_of_network_interfaces(wanted, files):
    assert left_out(wanted, files) == []


def test_a_card_that_is_gone_or_had_nothing_may_go_out_of_network_interfaces():
    bond = [BARE, {"name": "eth1"}, BOND]
    assert left_out([STATIC], first=bond) == []  # a port that is one no more
    assert left_out([STATIC], first=[STATIC, {**CLUSTERS, "mtu": 1400}]) != []
    ours = written(planned([STATIC, CLUSTERS]))["content"]
    planned([STATIC], files={"netplan": {OUR_FILE: ours}}, interfaces=[copy.deepcopy(ETH0)])
    profile_ = {f"{PROFILES}/eth1.nmconnection": profile("interface-name=eth1")}
    for active, refused in (
        (DESKTOP, False),
        (survey()["active"], True),
    ):  # it sets up nothing if it does not run
        files = {"netplan": {OUR_FILE: ours}, "networkmanager": profile_}
        assert bool(network_plan(survey(files=files, active=active), [STATIC])["errors"]) is refused


OUT = "the default route of this host, via 192.168.1.1 on eth0, would be lost, since no entry of network_interfaces "
STATIC_ALONE = {"name": "eth0", "addresses": ["192.168.1.100/24"]}
OUT_BY_6 = {"to": "default", "via": "fe80::1", "interface": "eth0", "version": 6, "told": False, "beside": []}
BOTH_VERSIONS = {**STATIC, "addresses": ["192.168.1.100/24", "2001:db8::5/64"]}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            [STATIC_ALONE],
            f"{OUT}gives it one: write gateway: 192.168.1.1, or gateway: none where none is meant",
        ),
        ([BARE], OUT),
        ([BARE, {**VLAN, "gateway": None}], None),
        ([BARE, VLAN], OUT),
        ([BARE, {"name": "eth1"}, {**BOND, "gateway": "none"}], None),
        ([STATIC], None),
        ([{**STATIC_ALONE, "routes": [{"to": "0.0.0.0/0", "via": "192.168.1.7"}]}], None),
        ([{**STATIC_ALONE, "options": {"gateway4": "192.168.1.7"}}], None),
        ([{**STATIC_ALONE, "options": {"routes": [{"to": "default", "via": "fe80::1"}]}}], OUT),
        ([{**STATIC_ALONE, "routes": [{"to": "default", "via": "192.168.1.7", "table": 7}]}], OUT),
        ([{"name": "eth0", "options": {"dhcp4": True}}], None),
        ([{"name": "eth1", "addresses": ["10.1.0.1/24"]}], None),  # a net of the cluster's own beside it
        ([{**STATIC_ALONE, "addresses": ["2001:db8::5/64"]}], None),  # IPv4 is given up
    ],
)
def test_the_way_out_does_not_go_unsaid(wanted, said):
    errors = network_plan(survey(), wanted)["errors"]
    assert bool(errors) is bool(said) and (
        not said or errors[0].startswith("network_interfaces[0]: " + said)
    ), errors
    assert network_plan(survey(routes=[]), wanted)["errors"] == []
    elsewhere = {**DEFAULT, "interface": "wlan0"}
    assert network_plan(survey(routes=[DEFAULT, elsewhere]), wanted)["errors"] == []


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, True),
        ({"routes": [{"to": "::/0", "via": "fe80::1"}]}, False),
        ({"options": {"accept-ra": True}}, False),
        ({"options": {"accept-ra": False}}, False),
    ],
)
def test_the_way_out_by_ipv6_does_not_go_unsaid(more, refused):
    """What a router advertises it advertises again."""
    wanted = [{**BOTH_VERSIONS, **more}]
    errors = network_plan(survey(routes=[DEFAULT, OUT_BY_6]), wanted)["errors"]
    assert ["write routes: [{to: '::/0', via: 'fe80::1'}], or accept-ra" in one for one in errors] == [
        True
    ] * refused
    planned(wanted, routes=[DEFAULT, {**OUT_BY_6, "told": True}])
    planned(
        [STATIC], routes=[DEFAULT, OUT_BY_6]
    )  # nobody has thought of IPv6; check_ipv6 sees to its addresses


def test_the_way_out_by_a_device_that_goes_is_lost():
    made = written(planned([BARE, {"name": "eth1"}, BOND]))["content"]
    interfaces = [{**ETH0, "addresses": []}, copy.deepcopy(ETH1), card("bond0", kind="bond")]
    seen = survey(
        interfaces=interfaces, files={"netplan": {OUR_FILE: made}}, routes=[{**DEFAULT, "interface": "bond0"}]
    )
    (refused,) = network_plan(seen, [STATIC_ALONE])["errors"]
    assert refused.startswith(
        "network_interfaces: the default route of this host, via 192.168.1.1 on bond0, would be "
    )


def test_what_is_read_of_routes():
    answers = {
        "-4": [
            {"dst": "default", "gateway": "192.168.1.1", "dev": "eth0", "protocol": "dhcp"},
            {"dst": "10.0.0.0/8"},
        ],
        "-6": [
            {"dst": "default", "gateway": "fe80::1", "dev": "eth0", "protocol": "ra"},
            {"dst": "::/0", "dev": "wg0"},
        ],
    }
    found = routes(lambda command: (0, json.dumps(answers[command[1]]), ""))
    assert found[0] == DEFAULT and found[1] == {**OUT_BY_6, "told": True}
    assert (found[2]["via"], found[2]["told"]) == (None, False) and len(found) == 3


def test_of_a_route_that_has_several_ways_each_is_read():
    ways = [{"gateway": "192.168.1.1", "dev": "eth0", "weight": 1}, {"gateway": "10.1.0.9", "dev": "eth1"}]
    other = {"dst": "10.9.0.0/24", "via": {"family": "inet6", "host": "fe80::9"}, "dev": "eth1"}
    answers = {"-4": [{"dst": "default", "nexthops": ways}, other], "-6": []}
    found = routes(lambda command: (0, json.dumps(answers[command[1]]), ""))
    assert found[0] == {**DEFAULT, "beside": ["eth1"]}
    assert [(one["via"], one["interface"]) for one in found[1:]] == [
        ("10.1.0.9", "eth1"),
        ("fe80::9", "eth1"),
    ]


@pytest.mark.parametrize("entry", [{"name": "eth0"}, {"name": "eth1"}])
def test_a_way_out_that_has_several_ways_does_not_go_unsaid(entry):
    """What sets it up goes with either card."""
    ways = [
        {**DEFAULT, "beside": ["eth1"]},
        {**DEFAULT, "via": "10.1.0.9", "interface": "eth1", "beside": ["eth0"]},
    ]
    wanted = {**entry, "addresses": ["192.168.1.100/24"]}
    (refused,) = network_plan(survey(routes=ways), [wanted])["errors"]
    way = next(one for one in ways if one["interface"] == entry["name"])
    assert refused == (
        f"network_interfaces[0]: the default route of this host, via {way['via']} on {entry['name']}, would be lost, "
        f"since no entry of network_interfaces gives it one: write gateway: {way['via']}, or gateway: none where none "
        "is meant"
    )
    planned([{**wanted, "gateway": "none"}], routes=ways)
    (refused,) = network_plan(survey(routes=[{**DEFAULT, "via": None}]), [{**wanted, "name": "eth0"}])[
        "errors"
    ]
    assert "default route of this host, on eth0, would be lost" in refused


@pytest.mark.parametrize(
    ("dynamic", "given", "before", "refused"),
    [
        ([], [], [], True),
        ([FIXED], [], [], False),  # the router gives it again
        ([], [FIXED], [], False),
        ([], ["2001:db8::6/64"], [], False),  # somebody has thought of IPv6
        ([], [], [FIXED], False),  # ours, and not wanted any more
    ],
)
def test_a_fixed_ipv6_address_does_not_go_unsaid(dynamic, given, before, refused):
    interfaces = [{**ETH0, "addresses": ["192.168.1.50/24", FIXED], "dynamic": dynamic}, copy.deepcopy(ETH1)]
    last = planned([{**STATIC, "addresses": ["192.168.1.100/24", *before]}])
    files = {"netplan": {OUR_FILE: written(last)["content"]}}
    for wanted in (
        [{**STATIC, "addresses": ["192.168.1.100/24", *given]}],
        [BARE, {"name": "eth1"}, {**BOND, "addresses": ["192.168.1.100/24", *given]}],
    ):
        errors = network_plan(survey(interfaces=interfaces, files=files), wanted)["errors"]
        assert bool(errors) is refused
        if refused:
            assert f"network_interfaces[0]: eth0 has the fixed address {FIXED}" in errors[0]


FURTHER = "10.9.0.5/24"
BARE_BOND = {"name": "bond0", "kind": "bonds", "options": {"interfaces": ["eth0"]}}
ON_BOND = {"name": "br0", "kind": "bridges", "gateway": "192.168.1.1", "options": {"interfaces": ["bond0"]}}


@pytest.mark.parametrize(
    ("held", "wanted", "said"),
    [
        ([FURTHER], [{**STATIC, "addresses": ["192.168.1.50/24"]}], FURTHER),
        ([FURTHER], [{**STATIC, "addresses": ["192.168.1.50/16", FURTHER]}], None),
        ([FURTHER], [{**STATIC, "addresses": ["192.168.1.100/24"]}], FURTHER),  # one is replaced
        ([FURTHER], [{**STATIC, "addresses": ["192.168.1.100/24", "10.9.0.6/24"]}], None),  # both are
        ([FURTHER], [{"name": "eth0", "options": {"dhcp4": True}, "gateway": "none"}], FURTHER),
        ([FURTHER], [{"name": "eth1", "addresses": ["10.1.0.1/24"]}], None),  # which is another card
        ([FURTHER], [{**STATIC_ALONE, "addresses": ["2001:db8::5/64"]}], None),  # IPv4 is given up
        ([FURTHER], [BARE, {"name": "eth1"}, {**BOND, "addresses": ["192.168.1.50/24"]}], FURTHER),
        ([FURTHER], [BARE, {"name": "eth1"}, {**BOND, "addresses": ["192.168.1.50/24", FURTHER]}], None),
        ([], [BARE, {"name": "eth1"}, {**BOND, "addresses": ["192.168.1.100/24"]}], None),
        (["10.9.0.5/32"], [{**STATIC, "addresses": ["192.168.1.50/24"]}], None),  # a service's, by keepalived
        ([FURTHER], [BARE, BARE_BOND, {**ON_BOND, "addresses": ["192.168.1.50/24"]}], FURTHER),
        ([FURTHER], [BARE, BARE_BOND, {**ON_BOND, "addresses": ["192.168.1.50/24", FURTHER]}], None),
    ],
)
def test_a_further_address_does_not_go_unsaid(held, wanted, said):
    interfaces = [{**ETH0, "addresses": ["192.168.1.50/24", *held], "dynamic": []}, copy.deepcopy(ETH1)]
    errors = network_plan(survey(interfaces=interfaces), wanted)["errors"]
    assert bool(errors) is bool(said)
    if said:
        at = next(number for number, one in enumerate(wanted) if one.get("addresses") or "dhcp4" in str(one))
        assert errors == [
            f"network_interfaces[{at}]: eth0 has the fixed address {said}, too, which would be lost: write it under "
            f"addresses, or give it up by `ip address del {said} dev eth0`, and by whatever sets it (keepalived, say)"
        ]


@pytest.mark.parametrize("held", [["192.168.1.50/24", FURTHER], [FURTHER, "192.168.1.50/24"]])
def test_the_address_of_the_login_is_not_what_is_to_be_deleted(held):
    interfaces = [{**ETH0, "addresses": held, "dynamic": []}, copy.deepcopy(ETH1)]
    (said,) = network_plan(survey(interfaces=interfaces), [{**STATIC, "addresses": ["192.168.1.100/24"]}])[
        "errors"
    ]
    assert f"`ip address del {FURTHER} dev eth0`" in said  # that of the login is what is replaced
    wanted = {"name": "eth0", "addresses": [FURTHER], "gateway": "none"}
    (said,) = network_plan(survey(interfaces=interfaces), [wanted])["errors"]
    assert "or log in by another first (ansible_host) and then give it up by" in said
    assert "`ip address del 192.168.1.50/24 dev eth0`" in said


@pytest.mark.parametrize(
    "entry",
    [{"options": {"dhcp4": True}}, {"addresses": ["192.168.1.100/24"]}, {"addresses": ["192.168.1.50/24"]}],
)
def test_beside_a_lease_a_fixed_address_does_not_go_unsaid(entry):
    """It is the lease that is replaced."""
    lease = "192.168.1.50/24"
    interfaces = [{**ETH0, "addresses": [lease, FURTHER], "dynamic": [lease]}, copy.deepcopy(ETH1)]
    wanted = {"name": "eth0", "gateway": "192.168.1.1", "nameservers": [], **entry}
    if "options" in entry:
        del wanted["gateway"]
    (said,) = network_plan(survey(interfaces=interfaces), [wanted])["errors"]
    assert f"eth0 has the fixed address {FURTHER}, too" in said
    interfaces[0]["addresses"] = [lease]
    planned([wanted], interfaces=interfaces)


def test_an_address_that_came_besides_since_is_no_matter_of_ours():
    lease = [{"name": "eth0", "options": {"dhcp4": True}}]
    held = {**ETH0, "addresses": ["192.168.1.50/24", FURTHER, "10.9.0.6/24"], "dynamic": ["192.168.1.50/24"]}
    files = {"netplan": {OUR_FILE: written(planned(lease))["content"]}}
    planned(lease, interfaces=[held, copy.deepcopy(ETH1)], files=files)
    wanted = {**STATIC, "nameservers": []}
    files = {"netplan": {OUR_FILE: written(planned([wanted]))["content"]}}
    for dynamic in ([], [FURTHER]):
        link = {**ETH0, "addresses": ["192.168.1.100/24", FURTHER], "dynamic": dynamic}
        planned([wanted], interfaces=[link, copy.deepcopy(ETH1)], files=files)
    leased = {**ETH0, "addresses": ["192.168.1.50/24", FURTHER], "dynamic": [FURTHER]}
    alone = {**wanted, "addresses": ["192.168.1.50/24"]}
    planned([alone], interfaces=[leased, copy.deepcopy(ETH1)])  # it comes again


def test_cloud_init_is_told_to_leave_the_network_alone():
    plan = planned([STATIC], cloud_init=True)
    assert (
        written(plan, "/etc/cloud/cloud.cfg.d/99-trainyard-network.cfg")["content"]
        == "network: {config: disabled}\n"
    )


def test_name_servers_reach_a_host_without_a_resolver():
    active = {
        "systemd-networkd": True,
        "NetworkManager": False,
        "systemd-resolved": False,
        "networking": False,
    }
    wanted = [{**STATIC, "nameservers": {"addresses": ["192.168.1.1"], "search": ["lan"]}}]
    plan = planned(wanted, active=active, resolv_conf="nameserver 10.0.0.53\n")
    assert "search lan\nnameserver 192.168.1.1\n" in written(plan, "/etc/resolv.conf")["content"]
    assert (
        written(planned(wanted, active=active, resolv_conf="nameserver 192.168.1.1\n"), "/etc/resolv.conf")
        is None
    )
    assert written(planned(wanted, resolv_conf="nameserver 10.0.0.53\n"), "/etc/resolv.conf") is None


@pytest.mark.parametrize(
    ("wanted", "session", "expected"),
    [
        ([STATIC], "192.168.1.50", ["192.168.1.100"]),
        (
            [{"name": "eth0", "addresses": ["10.9.0.1/24", "192.168.1.100/24"]}],
            "192.168.1.50",
            ["192.168.1.100", "10.9.0.1"],
        ),
        ([{"name": "eth0", "addresses": ["192.168.1.50/24", "10.9.0.1/24"]}], "192.168.1.50", []),
        ([{"name": "eth1", "addresses": ["10.9.0.1/24"]}], "192.168.1.50", []),
        ([{"name": "eth0", "options": {"dhcp4": True}}], "192.168.1.50", []),
        ([{"name": "eth1", "addresses": ["192.168.1.50/24"]}, {"name": "eth0"}], "192.168.1.50", []),
        ([BARE, {"name": "eth1"}, BOND], "192.168.1.50", ["192.168.1.100"]),
        ([BARE, {"name": "eth1"}, {**BOND, "addresses": ["192.168.1.50/24"]}], "192.168.1.50", []),
        (
            [
                BARE,
                {"name": "br0", "kind": "bridges", "options": {"interfaces": ["eth0"]}},
                {**VLAN, "options": {"id": 7, "link": "br0"}},
                {"name": "eth1", "addresses": ["10.9.0.1/24"]},
            ],
            "192.168.1.50",
            ["192.168.1.100"],
        ),
        ([BARE, VLAN], "192.168.1.50", ["192.168.1.100"]),
        ([{"name": "eth0", "options": {"dhcp4": True}}, VLAN], "192.168.1.50", []),
        (
            [BARE, {"name": "br0", "kind": "bridges", "options": {"interfaces": ["eth0"], "dhcp4": True}}],
            "192.168.1.50",
            [],
        ),
        (
            [{**STATIC, "macaddress": ETH0["mac"], "name": "lan0"}, {"name": "eth1"}],
            "192.168.1.50",
            ["192.168.1.100"],
        ),
    ],
)
def test_where_the_host_answers_afterwards(wanted, session, expected):
    plan = planned(wanted, session={"client": "192.168.1.9", "address": session, "port": 22}, routes=[])
    assert plan["addresses"] == expected


def test_where_the_host_answers_when_a_bond_is_given_up():
    """At the address of what came out of it, as our last file tells."""
    files = {"netplan": {OUR_FILE: written(planned([BARE, {"name": "eth1"}, BOND]))["content"]}}
    bond = card("bond0", kind="bond", addresses=["192.168.1.100/24"])
    plan = planned(
        [{**STATIC, "addresses": ["192.168.1.60/24"]}],
        interfaces=[{**ETH0, "addresses": [], "master": "bond0"}, copy.deepcopy(ETH1), bond],
        files=files,
        session={"client": "192.168.1.9", "address": "192.168.1.100", "port": 22},
    )
    assert plan["addresses"] == ["192.168.1.60"]


def test_only_a_plain_file_and_resolvconfs_link_are_ours_to_replace(load_module, tmp_path):
    resolver, path = load_module("network_survey").resolver, tmp_path / "resolv.conf"
    assert resolver(str(path)) == (None, None)
    path.write_text("nameserver 10.0.0.53\n")
    assert resolver(str(path)) == ("nameserver 10.0.0.53\n", None)
    for folder, theirs in (("resolvconf", True), ("systemd/resolve", False)):
        target = tmp_path / "run" / folder / "resolv.conf"
        target.parent.mkdir(parents=True)
        target.write_text("nameserver 10.0.0.54\n")
        path.unlink()
        path.symlink_to(target)
        expected = ("nameserver 10.0.0.54\n", str(target)) if theirs else (None, None)
        assert resolver(str(path)) == expected
    target.unlink()
    assert resolver(str(path)) == (None, None)


def test_profiles_are_read_wherever_networkmanager_reads_them(load_module, tmp_path, monkeypatch):
    survey, glob = load_module("network_survey"), load_module("network_survey").glob.glob
    monkeypatch.setattr(survey.glob, "glob", lambda pattern, **more: glob(f"{tmp_path}{pattern}", **more))
    for place in ("etc", "run", "usr/lib"):
        directory = tmp_path / place / "NetworkManager/system-connections"
        directory.mkdir(parents=True)
        (directory / f"{place[:3]}.nmconnection").write_text(place)
    (tmp_path / "etc/NetworkManager/system-connections/7b2d.nmmeta").symlink_to("/dev/null")
    found = survey.read(survey.PLACES["networkmanager"])
    assert sorted(one["text"] for one in found.values()) == ["etc", "run", "usr/lib"]
    assert survey.hidden_profiles() == ["7b2d"]


def test_ifupdowns_files_are_read_where_it_reads_them(load_module, tmp_path, monkeypatch):
    survey = load_module("network_survey")
    etc, elsewhere = tmp_path / "network", tmp_path / "more"
    (etc / "interfaces.d").mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.setitem(survey.PLACES, "ifupdown", [f"{etc}/interfaces", f"{etc}/interfaces.d/*"])
    (etc / "interfaces").write_text(
        f"source interfaces.d/*\n  source {elsewhere}/lan*.cfg\nsource-directory {elsewhere}\nsource {tmp_path}/none\n"
    )
    for path in (
        etc / "interfaces.d/a.cfg",
        elsewhere / "lan0.cfg",
        elsewhere / "wan",
        elsewhere / "wan.bak",
    ):
        path.write_text(f"source {etc}/interfaces\n")
    found = survey.configuration(ifupdown=True)["ifupdown"]
    assert sorted(os.path.basename(path) for path in found) == ["a.cfg", "interfaces", "lan0.cfg", "wan"]
    assert survey.configuration(ifupdown=False)["ifupdown"] == {}  # where no ifdown could be run


def test_what_is_read_of_an_interface():
    """As ip(8) tells it: what it is, what has it in, and which of its addresses are there for a while."""
    fixed = {"local": "192.168.1.50", "prefixlen": 24, "scope": "global"}
    leased = {"local": "2001:db8::7", "prefixlen": 64, "scope": "global", "dynamic": True}
    common = {"flags": ["UP"], "mtu": 1500, "address": "52:54:00:00:00:01"}
    sizes = {"min_mtu": 68, "max_mtu": 9194}
    shown = [
        {"ifname": "lo", "flags": ["LOOPBACK"]},
        {
            **common,
            **sizes,
            "altnames": ["enp1s0"],
            "link_type": "infiniband",
            "ifname": "none0",
            "master": "br0",
            "addr_info": [],
        },
        {**common, "ifname": "br0", "linkinfo": {"info_kind": "bridge"}, "addr_info": [fixed, leased]},
    ]
    card, bridge = interfaces(lambda command: (0, json.dumps(shown), ""))
    assert (card["kind"], card["master"], card["addresses"]) == (None, "br0", [])
    assert (bridge["kind"], bridge["master"]) == ("bridge", None)
    assert (card["mtu_range"], bridge["mtu_range"]) == ([68, 9194], [0, 0])
    assert (card["altnames"], card["link_type"]) == (["enp1s0"], "infiniband")
    assert bridge["addresses"] == ["192.168.1.50/24", "2001:db8::7/64"] and bridge["dynamic"] == [
        "2001:db8::7/64"
    ]


def test_without_an_ssh_session_no_address_is_expected():
    assert planned([STATIC], session=None)["addresses"] == []


def test_a_wireless_card_is_not_taken_for_a_wired_one():
    """Its profile would give way, and the way in with it, until the guard is there."""
    interfaces = [card("wlp3s0", kind="wlan", addresses=["192.168.1.60/24"])]
    found = network_plan(survey(interfaces=interfaces), [{**STATIC, "name": "wlp3s0"}])
    assert "network_interfaces[0]: wlp3s0 is wireless: write kind: wifis" in found["errors"][0]


def test_the_hardware_address_of_a_new_bridge_is_netplans():
    bridge = {
        "name": "br0",
        "kind": "bridges",
        "macaddress": "52:54:00:00:0b:00",
        "options": {"interfaces": ["eth1"], "dhcp4": True},
    }
    written_ = yaml.safe_load(written(planned([bridge, {"name": "eth1"}]))["content"])
    assert written_["network"]["bridges"]["br0"]["macaddress"] == "52:54:00:00:0b:00"
