"""What gives way of NetworkManager's profiles (plugins/module_utils/network_networkmanager.py). Sends nothing."""

import copy

import pytest
from networks import (
    BARE,
    BOND,
    DESKTOP,
    DEVICES,
    ETH0,
    ETH1,
    PROFILES,
    STATIC,
    WLAN,
    card,
    planned,
    profile,
    survey,
    written,
)

from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE, keyed
from plugins.module_utils.network_networkmanager import profile_for


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
