"""A host as module network_survey tells of it, for the tests of what is made of that."""

import copy

from plugins.filter.network_plan import network_plan

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
STATIC = {"name": "eth0", "addresses": ["192.168.1.100/24"], "gateway": "192.168.1.1"}


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


def text(content):
    return {"text": content, "mode": "0600", "more": ""}


def planned(wanted, **more):
    found = network_plan(survey(**more), wanted)
    assert found["errors"] == []
    return found
