"""From a host's network as it is to the change of the role network (plugins/filter/network_plan.py). Sends nothing."""

import copy

import pytest
import yaml
from networks import (
    BARE,
    BOND,
    DEFAULT,
    DESKTOP,
    ETH0,
    ETH1,
    STATIC,
    VLAN,
    card,
    ethernets,
    planned,
    survey,
    written,
)

from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE

GUARD = "/usr/local/lib/trainyard/guard"


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
