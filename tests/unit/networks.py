"""A host as module network_survey tells of it, its files and entries, for the tests of what is made of that."""

import copy

import yaml

from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE

ETH0 = {
    "name": "eth0",
    "altnames": [],
    "link_type": "ether",
    "properties": {},
    "mac": "52:54:00:00:00:01",
    "kind": None,
    "master": None,
    "driver": "r8169",
    "enabled": True,
    "up": True,
    "mtu": 1500,
    "mtu_range": [68, 9194],
    "addresses": ["192.168.1.50/24"],
    "dynamic": [],
}
ETH1 = {
    "name": "eth1",
    "altnames": [],
    "link_type": "ether",
    "properties": {},
    "mac": "52:54:00:00:00:02",
    "kind": None,
    "master": None,
    "driver": "mlx5_core",
    "enabled": True,
    "up": True,
    "mtu": 1500,
    "mtu_range": [68, 9978],
    "addresses": [],
    "dynamic": [],
}
DEFAULT = {
    "to": "default",
    "via": "192.168.1.1",
    "interface": "eth0",
    "version": 4,
    "told": False,
    "beside": [],
}
OUT_BY_6 = {"to": "default", "via": "fe80::1", "interface": "eth0", "version": 6, "told": False, "beside": []}
# A machine on which NetworkManager does all.
DESKTOP = {
    "systemd-networkd": False,
    "NetworkManager": True,
    "systemd-resolved": True,
    "networking": False,
}

# Entries of network_interfaces.
STATIC = {"name": "eth0", "addresses": ["192.168.1.100/24"], "gateway": "192.168.1.1"}
BARE = {"name": "eth0"}
CLUSTERS = {"name": "eth1", "addresses": ["10.1.0.1/24"]}
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

# Files, and where they lie.
CLOUD = "network:\n  version: 2\n  ethernets:\n    eth0: {dhcp4: true}\n"
BOTH = "network:\n  version: 2\n  ethernets:\n    eth0: {dhcp4: true}\n    eth1: {dhcp4: true}\n"
WIFI = "network:\n  wifis:\n    wlan0:\n      access-points: {home: {password: %s}}\n"
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
NETPLAN, LAN_NETWORK = "/etc/netplan/50.yaml", "/etc/systemd/network/05-lan.network"
PROFILES = "/etc/NetworkManager/system-connections"


def survey(**more):
    """A host with two interfaces, configured by nothing, reached at eth0's address; `more` replaces parts of it."""
    files = {"netplan": {}, "networkd": {}, "ifupdown": {}, "networkmanager": {}, "resolved": {}}
    files["networkd_elsewhere"] = {}
    files.update(
        {
            kind: {path: text(content) for path, content in found.items()}
            for kind, found in more.pop("files", {}).items()
        }
    )
    return {
        "interfaces": [copy.deepcopy(ETH0), copy.deepcopy(ETH1)],
        "routes": [DEFAULT],
        "session": {"client": "192.168.1.9", "address": "192.168.1.50", "port": 22},
        "files": files,
        "asides": [],
        "hidden_profiles": [],
        "active": {
            "systemd-networkd": True,
            "NetworkManager": False,
            "systemd-resolved": True,
            "networking": False,
        },
        "cloud_init": False,
        "resolv_conf": None,
        "resolv_link": None,
        **more,
    }


def card(name, **more):
    """One more interface of the host."""
    return {**copy.deepcopy(ETH1), "name": name, "mac": f"52:54:00:00:01:{name[-1]:0>2}", **more}


WLAN = card("wlan0", kind="wlan")
DEVICES = [
    card("docker0", kind="bridge"),
    card("veth1", kind="veth", master="docker0"),
    card("wg0", kind="wireguard"),
]


def text(content):
    return {"text": content, "mode": "0600", "more": ""}


def planned(wanted, **more):
    found = network_plan(survey(**more), wanted)
    assert found["errors"] == []
    return found


def written(plan, path=OUR_FILE):
    """The change at `path` in a plan, or None."""
    return next((change for change in plan["files"] if change["path"] == path), None)


def ethernets(plan):
    return yaml.safe_load(written(plan)["content"])["network"]["ethernets"]


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


def profile(*lines, kind="ethernet", uuid="6a1c"):
    return "\n".join(
        ["[connection]", "id=home", f"uuid={uuid}", f"type={kind}", *lines, "[ipv4]", "method=auto"]
    )
