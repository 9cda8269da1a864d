"""A lab that is like an inventory: what it takes from it, and what it refuses."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from lab import lab as labs
from lab.__main__ import options, parser
from lab.lab import LabError, Options
from lab.like import like, way_in_holds
from lab.network import Network

EXAMPLES = "inventory/examples"


def inventory(tmp_path, head, workers=None, **variables):
    groups = {"head": {"hosts": head}, "workers": {"hosts": workers or {}}}
    file = tmp_path / "hosts.yml"
    file.write_text(
        yaml.safe_dump({"all": {"vars": variables, "children": {"cluster": {"children": groups}}}})
    )
    return file


def test_the_three_machines_at_home():
    found = like(f"{EXAMPLES}/home-lan")
    assert found["names"] == ["desktop", "laptop", "oldie"]
    assert found["addresses"] == ["192.168.1.100", "192.168.1.101", "192.168.1.102"]
    assert found["subnet"] == "192.168.1.0/24"
    assert (
        found["interfaces"] == {"desktop": "enp5s0", "laptop": "enp3s0", "oldie": "enp7s0"}
        and found["second"] == ""
    )
    Options(**found)


def test_the_two_hosts_of_readme():
    found = like(f"{EXAMPLES}/two-hosts")
    assert found["names"] == ["node1", "node2"] and found["interfaces"] == {}
    assert found["addresses"] == ["192.168.1.100", "192.168.1.101"]
    Options(**found)


def test_a_network_for_ansible_and_another_for_the_cluster():
    found = like(f"{EXAMPLES}/rdma-pair", "192.168.48.0/22")
    assert found["names"] == ["ubunturdma1", "ubunturdma2"]
    assert found["addresses"] == ["192.168.48.175", "192.168.48.176"]
    assert found["second"] == "ens192" and found["interfaces"] == {}
    with pytest.raises(
        LabError, match=r"192\.168\.48\.175, 192\.168\.48\.176 are not in 192\.168\.250\.0/24"
    ):
        like(f"{EXAMPLES}/rdma-pair")
    with pytest.raises(LabError, match="add --vms"):
        Options(**found)


def test_interfaces_by_host():
    found = like(f"{EXAMPLES}/two-by-eight")
    assert found["interfaces"] == {"server1": "enp26s0np0", "server2": "enp26s0np0"}


def test_the_command_line_takes_it():
    given = parser().parse_args(["up", "--like", f"{EXAMPLES}/two-by-eight", "--quota", "server2=0.5"])
    found = options(given)
    assert found.hosts == 2 and found.host_names() == ["server1", "server2"]
    assert found.interfaces == {"server1": "enp26s0np0", "server2": "enp26s0np0"}
    assert found.quota == {"server2": 0.5}
    given = parser().parse_args(["up", "--network", "192.168.1.0/24"])
    with pytest.raises(LabError, match="only with --like"):
        options(given)
    plain = options(parser().parse_args(["up", "--hosts", "2", "--interfaces", "lan0"]))
    assert plain.interfaces == {"node1": "lan0", "node2": "lan0"} and plain.names == []


def test_its_network():
    network = Network("home", 3, "192.168.48.0/22", ["192.168.48.175"])
    assert network.address(1) == "192.168.48.175"
    assert network.with_prefix(network.gateway) == "192.168.48.1/22"
    assert Network("lab", 3).with_prefix(Network("lab", 3).address(1)) == "10.77.3.11/24"


@pytest.mark.parametrize(
    ("head", "variables", "said"),
    [
        ({}, {}, "no host in the groups head and workers"),
        ({"a": {}}, {}, "ansible_host of a is no address: expected an IPv4 address"),
        ({"a": {"ansible_host": "a.example"}}, {}, "ansible_host of a is a.example"),
        ({"a": {"ansible_host": "192.168.1.7"}}, {}, "192.168.1.7 is not in any network that it names"),
        (
            {"a": {"ansible_host": "192.168.1.7"}},
            {"cluster_network": "192.168.2.0/24"},
            "192.168.1.7 is not in 192.168.2.0/24",
        ),
    ],
)
def test_what_an_inventory_does_not_say(tmp_path, head, variables, said):
    with pytest.raises(LabError, match=said):
        like(inventory(tmp_path, head, **variables))


@pytest.mark.parametrize(
    ("address", "subnet", "said"),
    [
        ("192.168.1.1", "192.168.1.0/24", "a has the address of the lab's router"),
        ("192.168.1.200", "192.168.1.0/24", "a has the address of its stranger"),
        ("8.8.4.9", "8.8.4.0/24", "expected a private network"),
        ("192.168.1.9", "192.168.1.8/29", "expected a private network, from /16 to /24"),
        ("192.168.1.9", "192.168.1.0/33", "expected one such as 192.168.1.0/24"),
    ],
)
def test_addresses_that_a_lab_cannot_have(address, subnet, said):
    with pytest.raises(LabError, match=said):
        Options(hosts=1, names=["a"], addresses=[address], subnet=subnet)


def test_a_name_that_is_a_path():
    with pytest.raises(LabError, match=r"host '\.\./a'"):
        Options(hosts=1, names=["../a"], addresses=["192.168.1.9"], subnet="192.168.1.0/24")


def test_no_inventory_is_one_message(tmp_path):
    with pytest.raises(LabError, match="there is no such inventory"):
        like(tmp_path / "none")
    (tmp_path / "bad.yml").write_text("{")
    with pytest.raises(LabError, match=r"bad\.yml"):
        like(tmp_path / "bad.yml")
    done = subprocess.run(
        [sys.executable, "-m", "lab", "up", "--like", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert done.returncode != 0 and "there is no such inventory" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_hosts_of_groups_below_count(tmp_path):
    file = tmp_path / "hosts.yml"
    hosts = {"b": {"ansible_host": "192.168.1.8"}}
    groups = {
        "head": {"hosts": {"a": {"ansible_host": "192.168.1.7"}}},
        "workers": {"children": {"rack": {"hosts": hosts}}},
    }
    words = {"vars": {"cluster_network": "192.168.1.0/24"}, "children": {"cluster": {"children": groups}}}
    file.write_text(yaml.safe_dump({"all": words}))
    assert like(file)["names"] == ["a", "b"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, None),
        ({"ansible_user": "anna"}, None),  # the lab's own wins
        ({"ansible_port": 2222}, "ansible_port of a would lead elsewhere"),
        ({"ansible_ssh_extra_args": "-J gate"}, "ansible_ssh_extra_args of a would lead elsewhere"),
        ({"ansible_connection": "local"}, "ansible_connection of a would lead elsewhere"),
    ],
)
def test_nothing_of_the_inventory_leads_to_real_machines(tmp_path, variables, said):
    inventory(tmp_path, {"a": {"ansible_host": "192.168.1.7"}}, **variables)
    way_in = {"ansible_user": "ops", "ansible_ssh_common_args": "-o ProxyCommand=relay"}
    beside = {"all": {"hosts": {"a": way_in}}}
    (tmp_path / "zz-way-in.yml").write_text(yaml.safe_dump(beside))
    if said:
        with pytest.raises(LabError, match=said):
            way_in_holds(tmp_path, way_in, ["a"])
        return
    way_in_holds(tmp_path, way_in, ["a"])
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/a.yml").write_text("ansible_user: anna\n")  # stronger than a host's own line
    with pytest.raises(LabError, match="ansible_user of a would lead elsewhere"):
        way_in_holds(tmp_path, way_in, ["a"])


APT = """#!/bin/sh
# apt-get, which refuses a second one beside it.
mkdir {folder}/held || exit 100
sleep 0.2
case "$*" in *install*) printf '#!/bin/sh\\n' > {folder}/made-up; chmod 755 {folder}/made-up;; esac
echo "$@" >> {folder}/called
rmdir {folder}/held
"""


def test_two_labs_at_once_install_what_lacks_once(tmp_path, monkeypatch):
    file = tmp_path / "apt-get"
    file.write_text(APT.format(folder=tmp_path))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(labs, "STATE", tmp_path / "state")
    monkeypatch.setattr(labs, "TOOLS", {"made-up": "a-package"})
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(labs.install_missing_tools) for _ in range(2)]:
            one.result()
    update, install = (tmp_path / "called").read_text().splitlines()
    assert update == "update" and install.endswith("install --yes --no-install-recommends a-package")
