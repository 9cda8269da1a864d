"""What is read of a host's network (plugins/modules/network_survey.py, plugins/module_utils/host_survey.py)."""

import json
import os

from networks import DEFAULT, LAN_NETWORK, OUT_BY_6

from plugins.module_utils.host_survey import interfaces, routes


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
