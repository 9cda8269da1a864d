"""What gives way of systemd-networkd's files (plugins/module_utils/network_networkd.py). Sends nothing."""

import copy

import pytest
from networks import DESKTOP, ETH0, ETH1, LAN_NETWORK, STATIC, WLAN, card, planned, survey, written

from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE, settings
from plugins.module_utils.network_networkd import networkd_matches


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
    assert networkd_matches(settings(f"[Match]\n{match}\n"), links) == meant
    path = "/etc/systemd/network/05-lan.network"
    plan = planned([STATIC], interfaces=links, files={"networkd": {path: f"[Match]\n{match}\n"}})
    gives_way = (written(plan, path) or {}).get("move_to")
    aside = {True: f"{path}.before-trainyard", False: "/etc/systemd/network/20-trainyard-05-lan.network"}
    assert gives_way == (aside[meant == ["eth0"]] if "eth0" in meant else None)


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
