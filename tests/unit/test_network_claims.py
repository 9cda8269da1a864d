"""What holds for a file that gives way, whichever manager's it is (plugins/module_utils/network_claims.py).

Sends nothing.
"""

import copy

import pytest
from networks import DESKTOP, ETH0, ETH1, PROFILES, STATIC, card, planned, profile, read_from, survey, written

from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE

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
