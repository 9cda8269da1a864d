"""What gives way to network_interfaces in netplan's other files (plugins/module_utils/network_netplan.py).

Sends nothing.
"""

import copy
import os

import pytest
import yaml
from networks import (
    BARE,
    BOND,
    BOTH,
    CLOUD,
    CLUSTERS,
    DEVICES,
    ETH0,
    ETH1,
    STATIC,
    WIFI,
    WLAN,
    card,
    ethernets,
    planned,
    survey,
    written,
)

from plugins.filter.network_back import network_back
from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE

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
    assert plan["summary"].endswith(f"(instead of {path})")
    asides = [f"{path}.before-trainyard{number}" for number in ("", ".2", ".3")]
    plan = planned([STATIC], files={"netplan": {path: BOTH}}, asides=asides)
    assert written(plan, f"{path}.before-trainyard.4")["content"] == BOTH  # over none of those
    assert "eth1" in plan["netplan"]["50-cloud-init.yaml"]


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


@pytest.mark.parametrize("match", ["", "match: {name: enp2s0}, "])
def test_netplan_knows_a_card_by_its_other_names_too(match):
    """As systemd-networkd does: enp2s0's file would come before eth0's of ours."""
    path, links = "/etc/netplan/50.yaml", [{**ETH0, "altnames": ["enp2s0"]}, copy.deepcopy(ETH1)]
    files = {"netplan": {path: f"network: {{ethernets: {{enp2s0: {{{match}dhcp4: true}}}}}}"}}
    assert (
        written(planned([STATIC], interfaces=links, files=files), path)["move_to"]
        == f"{path}.before-trainyard"
    )
