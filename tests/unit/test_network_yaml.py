"""Netplan's files are read as netplan reads them (plugins/module_utils/network_yaml.py). Sends nothing."""

import copy
import os
import random

import pytest
import yaml
from networks import STATIC, WIFI, planned, survey, written

from plugins.filter.network_back import network_back
from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import OUR_FILE
from plugins.module_utils.network_yaml import read_netplan

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


def test_a_broken_netplan_file_is_named():
    found = network_plan(survey(files={"netplan": {"/etc/netplan/01.yaml": "network: [\n"}}), [STATIC])
    assert "/etc/netplan/01.yaml is no valid YAML" in found["errors"][0]


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
