"""What preflight says of what hosts say: nothing of a healthy cluster, and of a fault its host and its cure."""

# ruff: noqa: E501 - the table of faults has a line a fault
import contextlib
import json
import os
import random
import socket
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError

from plugins.action import preflight_pair as pair_action
from plugins.action import preflight_verdict
from plugins.action.preflight_verdict import FAIL, SKIP, WARN, Cluster, Limits, findings
from plugins.filter import preflight as filters
from plugins.module_utils import address_probe, echo, host_runs, host_survey, nvidia_host

# On the path only since the action was imported.
import preflight_network  # isort: skip
import preflight_room  # isort: skip
from preflight_base import CHECKS, PASS, blamed, odd  # isort: skip
from preflight_report import (  # isort: skip
    baseline_name,
    is_good,
    read_result,
    renewed,
    report,
    table,
    text,
    write_result,
)

ROOT = Path(__file__).resolve().parents[2]
NODES = ("node1", "node2", "node3")
ADDRESS = {f"node{n}": f"10.77.0.1{n}" for n in range(1, 5)}
GPU = {
    "index": "0",
    "name": "NVIDIA A100-SXM4-80GB",
    "driver_version": "580.95.05",
    "memory.total": "81920",
    "memory.used": "4",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "clocks_throttle_reasons.active": "0x0000000000000001",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "temperature.gpu": "41",
}


BURNED = {
    **{"device": "cuda:0 (NVIDIA A100-SXM4-80GB)", "dtype": "bfloat16", "products": 9000, "wrong": 0},
    **{"first": 240.0, "last": 235.0, "error": ""},
}


def survey(name, nodes):
    own = ADDRESS[name]
    return {
        "hostname": name,
        "machine_id": f"id-of-{name}",
        "host_keys": [f"key-of-{name}"],
        "names": {other: [ADDRESS[other]] for other in nodes},
        "interfaces": [{"name": "eth0", "enabled": True, "addresses": [f"{own}/24"]}],
        "routes": {
            ADDRESS[other]: {"dev": "eth0", "source": own, "via": "", "error": ""}
            for other in nodes
            if other != name
        },
        "link": {
            "name": "eth0",
            "mtu": 1500,
            "speed": 1000,
            "duplex": "full",
            "physical": True,
            "wireless": False,
        },
        "versions": {
            "kernel": "6.1.0-40-amd64",
            "python": "3.11.2",
            "torch": "2.13.0+cu128",
            "nccl": "2.27.5",
            "driver": "580.95.05",
        },
        "memory": {"total": 64 << 30, "available": 60 << 30, "swapped": 0, "shared": 32 << 30},
        "disk": {"free": 400_000_000_000, "total": 500_000_000_000, "inodes": 10_000_000, "read_only": False},
        "memlock": {"loaded": True, "set": None, "found": None, "drop_ins": []},
        "container": False,
        "stores": {f"http://{ADDRESS[other]}:2389": "" for other in nodes},
        "gpu": {"cards": 1, "gpus": [dict(GPU)], "error": "", "processes": [], "xids": [], "driver": True},
        "rdma": [
            {
                "device": "mlx5_0",
                "port": 1,
                "state": "ACTIVE",
                "gbit": 100.0,
                "layer": "InfiniBand",
                "sm_lid": 1,
                "driver": "mlx5_core",
                "guests": False,
                "iwarp": False,
                "interface": "",
                "enabled": None,
                "gids": [],
            }
        ],
        "client": "10.77.0.1",
        "door": ADDRESS[name],
        "system": "debian-12",
        "free_port": 40001,
        "strangers": [],
        "time": 2e9,
    }


def second_port(state):
    """A change: a host's first RDMA port has a like, in this state."""
    return lambda ports: [*ports, {**ports[0], "device": "mlx5_1", "state": state}]


def roce(gids):
    """A change: a host's RDMA ports are a card's on Ethernet, with these addresses (address, type)."""
    given = [{"index": index, "address": text, "type": kind} for index, (text, kind) in enumerate(gids)]
    return lambda ports: [{**one, "layer": "Ethernet", "interface": "ens1", "gids": given} for one in ports]


def way(peer):
    return {
        "ports": {"29500": "open", "40001": "open"},
        "sent": 200,
        "lost": 0,
        "rtt_ms": 0.2,
        "mtu_arrives": True,
        "mbit": 941.0,
        "offset": 0.001,
        "offset_error": 0.0001,
        "rdma_gbit": 97.0,
    }


def healthy(*nodes):
    """The facts of a healthy cluster with a card and an RDMA port in each host."""
    nodes = nodes or NODES
    return {
        name: {
            "expected": {
                "hostname": name,
                "address": ADDRESS[name],
                "rdma": True,
                "firewall": True,
                "processes": 0,
            },
            "survey": survey(name, nodes),
            "run": {
                "release": "0.1-aa",
                "environment": {"torch": "2.13.0", "digest": "d" * 64},
                "active": [],
                "at_work": [],
                "run_dir": "/var/lib/trainyard/runs/smoke-preflight",
                "processes": 1,
                "port_holder": None,
            },
            "error": "",
            "pairs": {other: way(other) for other in nodes if other != name},
            "outside": {"29500": "closed", "40001": "closed"},
            "clock": [0.0, 0.25],
            "burn": [dict(BURNED)],
        }
        for name in nodes
    }


STEPS = {"result": PASS, "message": "2 steps on 3 ranks"}


def cluster(facts, steps=STEPS, **limits):
    return Cluster(
        facts,
        Limits(ansible="ansible -i inv", site="ansible-playbook -i inv site.yml", **limits),
        steps,
        members={address: host for host, address in ADDRESS.items()},
    )


def complaints(facts, steps=STEPS, **limits):
    return [one for one in findings(cluster(facts, steps, **limits)) if one.result in (WARN, FAIL)]


@pytest.mark.parametrize(
    "nodes", [("node1",), ("node1", "node2"), NODES, ("node1", "node2", "node3", "node4")]
)
def test_of_a_healthy_cluster_nothing_is_said(nodes):
    assert complaints(healthy(*nodes)) == []


def test_every_check_has_its_word_on_a_healthy_cluster():
    said = {one.check: one.result for one in findings(cluster(healthy()))}
    assert list(said) == list(CHECKS)
    assert set(said.values()) == {PASS}


# name -> (changes: (host, path, value), check, result, hosts, what is found, a piece of the cure)
ALL = "node1 node2 node3"
FAULTS = {
    "no answer": ([("node2", "survey", None), ("node2", "error", "timed out")], "answer", FAIL, "node2", "timed out", "-m ping"),
    "duplicate hostname": ([("node2", "survey.hostname", "node1")], "hostname", FAIL, "node2", "node1", "--tags identity -l node2"),
    "duplicate machine-id": ([("node2", "survey.machine_id", "id-of-node1")], "machine_id", FAIL, "node1 node2", "id-of-node1", "--tags identity"),
    "duplicate host key": ([("node3", "survey.host_keys", ["key-of-node1"])], "host_key", FAIL, "node1 node3", "same key", "'   then ssh-keygen -R for each of them here, and ansible-playbook -i inv site.yml --tags ssh_mesh"),
    "address on no interface": ([("node2", "survey.interfaces", [])], "address", FAIL, "node2", "on no interface", "--tags network -l node2"),
    "another address before its own": ([("node2", "survey.interfaces", [{"name": "eth0", "enabled": True, "addresses": ["2001:db8::2/64", "203.0.113.5/24", "10.77.0.12/24"]}])], "address", WARN, "node2", "10.77.0.12 is not the first address of eth0, by which gloo and NCCL go: that is 203.0.113.5", "--tags network -l node2"),
    "a stranger with its address": ([("node2", "survey.strangers", ["02:00:00:00:00:09"])], "address", FAIL, "node2", "10.77.0.12 is another machine's, too, whose hardware address is 02:00:00:00:00:09", "--tags network -l node2"),
    "a peer with its address": (
        # Which the probe hears, too: the peer is named, and no stranger is looked for.
        [("node2", "survey.strangers", ["02:00:00:00:00:03"]), ("node3", "survey.interfaces", lambda old: [*old, {"name": "eth1", "enabled": False, "addresses": ["10.77.0.12/32"]}])],
        "address", FAIL, "node3", "10.77.0.12, which is node2's, on eth1", "ip address del 10.77.0.12 dev eth1",
    ),
    "127.0.1.1": ([("node2", "survey.names.node2", ["127.0.1.1"])], "names", FAIL, "node2", "127.0.1.1", "--tags identity -l node2"),
    "unknown name": ([("node1", "survey.names.node3", [])], "names", FAIL, "node1", "node3 is unknown", "--tags identity -l node1"),
    "route by another NIC": (
        [("node3", "survey.routes", {"10.77.0.11": {"dev": "wg0", "source": "10.9.0.3", "via": "", "error": ""}})],
        "route", FAIL, "node3", "by wg0 from 10.9.0.3", "ip route replace 10.77.0.11 dev eth0",
    ),
    "a peer beyond its network, by another interface": (
        [
            ("node3", "survey.interfaces.0.addresses", ["10.77.0.13/32"]),
            ("node3", "survey.routes", {"10.77.0.11": {"dev": "wlan0", "source": "192.168.9.3", "via": "192.168.9.1", "error": ""}}),
        ],
        "route", FAIL, "node3", "by wlan0 from 192.168.9.3", "10.77.0.11 is not in eth0's network, give it a route to it: routes in network_interfaces",
    ),
    "overlapping subnets": (
        [("node1", "survey.interfaces", lambda old: [*old, {"name": "wlan0", "enabled": True, "addresses": ["10.77.0.99/24"]}])],
        "subnets", WARN, "node1", "wlan0", "ip address del 10.77.0.99/24 dev wlan0",
    ),
    "overlapping subnets, one of them SSH's": (
        [
            ("node1", "survey.interfaces", lambda old: [*old, {"name": "eth1", "enabled": True, "addresses": ["10.77.0.99/24"]}]),
            ("node1", "survey.door", "10.77.0.99"),
        ],
        "subnets", WARN, "node1", "SSH comes in by it", "give eth1 or eth0 another subnet",
    ),
    "other release": ([("node2", "run.release", "0.1-bb")], "release", FAIL, "node2", "0.1-bb", "--tags trainer"),
    "no release": ([("node2", "run.release", None)], "release", FAIL, "node2", "no trainer", "site.yml"),
    "other packages": ([("node2", "run.environment", {"digest": "e" * 64})], "packages", FAIL, "node2", "eeee", "--tags python_env"),
    "other Python": ([("node1", "survey.versions.python", "3.12.1")], "python", FAIL, "node1", "3.12.1", "--tags python_env   which names the hosts that need python_env_python: bring"),
    "upgraded Python": ([("node1", "survey.versions.python", "3.11.9")], "python", WARN, "node1", "3.11.9", "node1,node2,node3 -b -a 'sh -c \"apt-get update && apt-get upgrade"),
    "other torch": ([("node3", "survey.versions.torch", "2.12.0")], "torch", FAIL, "node3", "2.12.0", "--tags python_env"),
    "other NCCL": ([("node2", "survey.versions.nccl", "2.21.5")], "nccl", FAIL, "node2", "2.21.5", "--tags python_env"),
    "newer kernel": ([("node2", "survey.versions.kernel", "6.1.0-41-amd64")], "kernel", WARN, "node2", "6.1.0-41", "node1,node3 -b -a 'sh -c \"apt-get update && apt-get dist-upgrade"),
    "kernel of backports": ([("node2", "survey.versions.kernel", "6.12.43+deb12-amd64")], "kernel", WARN, "node2", "6.12.43", "node2 -b -a 'dpkg -S /boot/vmlinuz-6.12.43+deb12-amd64'   names its package; install that on node1, node3"),
    "Ubuntu's desktop beside servers": (
        [*((a, "survey.system", "ubuntu-24.04") for a in NODES), *((a, "survey.versions.kernel", f"6.{n}.0-88-generic") for a, n in zip(NODES, (8, 14, 8), strict=True))],
        "kernel", WARN, "node2", "6.14.0-88-generic", "node1,node3 -b -a 'sh -c \"apt-get update && apt-get install linux-generic-hwe-24.04 -y && reboot",
    ),
    "older kernel": ([("node2", "survey.versions.kernel", "6.1.0-9-amd64")], "kernel", WARN, "node2", "6.1.0-9", "node2 -b -a 'sh -c \"apt-get update && apt-get dist-upgrade"),
    "other driver": ([("node2", "survey.versions.driver", "570.1")], "driver", WARN, "node2", "570.1", "--tags nvidia"),
    "full disk": ([("node2", "survey.disk.free", 10**9)], "disk", FAIL, "node2", "1.0 of 500.0 GB", "du -sh"),
    "disk read-only": ([("node2", "survey.disk.read_only", True)], "disk", FAIL, "node2", "reading alone", "node2 -b -a 'dmesg --level=err,crit'"),
    "memory that is not promised": ([("node2", "survey.memory.promised", 5 * 10**8)], "memory", FAIL, "node2", "0.50 GB for 1 processes: vm.overcommit_memory is 2", "sysctl vm.overcommit_memory=0"),
    "a lost card": ([("node2", "survey.gpu.gpus", [dict.fromkeys(GPU, "[GPU is lost]")])], "gpu_health", FAIL, "node2", "GPU is lost", "--gpu-reset"),
    "no memory": ([("node2", "survey.memory.available", 5 * 10**8)], "memory", FAIL, "node2", "0.50 GB", "ps -eo"),
    "memlock by a drop-in": (
        [("node1", "survey.memlock", {"loaded": True, "set": 65536, "found": 65536, "drop_ins": ["/etc/x.conf"]})],
        "memlock", FAIL, "node1", "65536 bytes, by /etc/x.conf", "rm /etc/x.conf",
    ),
    "memlock that does not take": ([("node1", "survey.memlock.found", 8 << 20)], "memlock", FAIL, "node1", "8388608", "--tags trainer"),
    "no unit": ([("node1", "survey.memlock.loaded", False)], "memlock", FAIL, "node1", "not there", "--tags trainer -l node1"),
    "foreign process on the port": (
        [("node2", "run.port_holder", "process 4711 (python3 -m http.server)")],
        "port", FAIL, "node2", "http.server", 'kill 4711',
    ),
    "stopped etcd": (
        [(node, "survey.stores", lambda old: {**old, "http://10.77.0.12:2389": "Connection refused"}) for node in NODES],
        "store", WARN, "node2", "refused", "restart trainyard-etcd",
    ),
    "etcd without a majority": (
        [(node, "survey.stores", {"http://10.77.0.11:2389": "Connection refused"}) for node in NODES],
        "store", FAIL, "node1", "refused", "restart trainyard-etcd",
    ),
    "stopped etcd of a host that -l leaves out": (
        [(node, "survey.stores", lambda old: {**old, "http://10.77.0.14:2389": "Connection refused"}) for node in NODES],
        "store", WARN, "node4", "etcd on node4", "ansible -i inv node4 -b -a 'systemctl restart trainyard-etcd'",
    ),
    "etcd that has lost its data": (
        [(node, "survey.stores", lambda old: {**old, "http://10.77.0.13:2389": "Connection refused"}) for node in NODES],
        "store", WARN, "node3", "has lost its data", "restart trainyard-etcd'   or, where that does not help, once no run is active: ansible-playbook",
    ),
    "etcd out of one host's reach": (
        [("node3", "survey.stores", lambda old: {**old, "http://10.77.0.11:2389": "timed out"})],
        "store", FAIL, "node3", "etcd on node1", "--tags firewall -l node1",
    ),
    "a card is gone": ([("node2", "survey.gpu.cards", 2)], "gpus", FAIL, "node2", "1 of 2 cards", "--tags nvidia -l node2"),
    "nvidia-smi hangs": (
        [("node2", "survey.gpu", {"cards": 1, "gpus": [], "error": "no answer within 20 s", "processes": [], "xids": [], "driver": True})],
        "gpus", FAIL, "node2", "no answer within 20 s", "--tags nvidia",
    ),
    "too few GPUs": ([("node2", "expected.processes", 8)], "gpus", FAIL, "node2", "nproc_per_node 8", "--tags nvidia"),
    "desktop": (
        [
            ("node1", "survey.gpu.processes", [{"gpu": 0, "pid": 9, "kind": "G", "name": "Xorg", "run": False}]),
            ("node1", "survey.gpu.gpus.0.memory.used", "900"),
        ],
        "gpu_memory", WARN, "node1", "Xorg", "multi-user.target",
    ),
    "foreign GPU process": (
        [("node1", "survey.gpu.processes", [{"gpu": 0, "pid": 99, "kind": "C", "name": "ollama", "run": False}])],
        "gpu_memory", WARN, "node1", "ollama (process 99", "kill 99",
    ),
    "GPU processes that would come again": (
        [
            (
                "node1", "survey.gpu.processes",
                [
                    {"gpu": 0, "pid": pid, "kind": "C", "name": name, "run": False, "end": end}
                    for pid, name, end in (
                        (98, "ollama", "systemctl stop ollama.service"), (99, "ollama", "systemctl stop ollama.service"),
                        (7, "python3", ""), (8, "vllm", "docker stop 0123456789ab"),
                    )
                ],
            )
        ],
        "gpu_memory", WARN, "node1", "vllm (process 8",
        'sh -c "systemctl stop ollama.service; docker stop 0123456789ab; kill 7"',
    ),
    "memory left over": ([("node1", "survey.gpu.gpus.0.memory.used", "900")], "gpu_memory", WARN, "node1", "900 MiB", "fuser"),
    "ECC": ([("node3", "survey.gpu.gpus.0.ecc.errors.uncorrected.volatile.total", "3")], "gpu_health", FAIL, "node3", "3 uncorrected", "gpu-reset"),
    "row remapping": ([("node3", "survey.gpu.gpus.0.remapped_rows.pending", "Yes")], "gpu_health", FAIL, "node3", "pending", "gpu-reset"),
    "throttled": ([("node3", "survey.gpu.gpus.0.clocks_throttle_reasons.active", "0x0000000000000040")], "gpu_health", WARN, "node3", "heat", "TEMPERATURE"),
    "hard Xid": ([("node3", "survey.gpu.xids", [{"bus": "0000:3b:00", "xid": 79, "text": "GPU has fallen off the bus"}])], "gpu_health", FAIL, "node3", "79", "reboot"),
    "soft Xid": ([("node3", "survey.gpu.xids", [{"bus": "0000:3b:00", "xid": 13, "text": "", "age": 3600.0}])], "gpu_health", WARN, "node3", "1 Xid within a day, the last 13", "dmesg -T"),
    "a card that computes wrong": ([("node2", "burn.0.wrong", 1)], "burn", FAIL, "node2", "cuda:0 (NVIDIA A100-SXM4-80GB): 1 of 9000 products were wrong", "-l 'all:!node2'"),
    "a card that gives up under load": ([("node2", "burn.0.error", "CUDA error: unspecified launch failure")], "burn", FAIL, "node2", "launch failure", "dmesg"),
    "a card that heat slows": ([("node2", "burn.0.last", 210.0)], "burn", WARN, "node2", "210 TFLOP/s in the last minute, 240 in the first", "TEMPERATURE"),
    "no load": ([("node2", "burn", [{"device": "", "error": "it was killed"}])], "burn", FAIL, "node2", "trainer burn: it was killed", "dmesg"),
    "half the lanes": ([("node2", "survey.gpu.gpus.0.pcie.link.width.current", "8")], "pcie", WARN, "node2", "8 of 16", "PCIE"),
    "half duplex": ([("node2", "survey.link.duplex", "half")], "link", WARN, "node2", "half duplex", "ip -s -s link show eth0"),
    "a cable with a broken pair": ([("node2", "survey.link.speed", 100)], "link", WARN, "node2", "100 Mbit/s, where others have up to 1000", "ip -s -s link show eth0"),
    "slow interface": (
        [("node2", "survey.link.speed", 10), *((a, f"pairs.{b}.mbit", 9.4) for a, b in (("node1", "node2"), ("node3", "node2"), ("node2", "node1"), ("node2", "node3")))],
        "link", WARN, "node2", "10 Mbit/s", "ip -s -s link show eth0",
    ),
    "other MTU": (
        [("node2", "survey.link.mtu", 1400), *((a, "pairs.node2.mtu_arrives", False) for a in ("node1", "node3"))],
        "mtu", FAIL, "node2", "1400", "mtu 1500",
    ),
    "switch without jumbo frames": (
        [*((a, "survey.link.mtu", 9000) for a in NODES), *((a, f"pairs.{b}.mtu_arrives", False) for a, b in (("node1", "node3"), ("node2", "node3"), ("node3", "node1"), ("node3", "node2")))],
        "mtu", FAIL, "node3", "9000", "set what is between them, a switch or a tunnel, to 9000 bytes",
    ),
    "a tunnel": (
        [*((a, f"pairs.{b}.{k}", v) for a, b in (("node1", "node3"), ("node2", "node3")) for k, v in (("mtu_arrives", False), ("mtu_most", 1420)))],
        "mtu", FAIL, "node3", "packets of 1500 bytes do not arrive from node1 to node3, node2 to node3, those of 1420 do",
        "node1,node2,node3 -b -a 'ip link set eth0 mtu 1420'   and mtu in network_interfaces; or set what is between",
    ),
    "the owner's line": (
        [("node2", "survey.names.node3", ["10.0.0.9"]), ("node2", "survey.lines", [{"number": 4, "text": "10.0.0.9 node3", "names": ["node3"]}])],
        "names", FAIL, "node2", "line 4 of /etc/hosts there: 10.0.0.9 node3", """node2 -b -a 'sed -i.before -e "4s/[[:space:]]node3[[:space:]]/ /I" -e "4s/[[:space:]]node3$//I" /etc/hosts'""",
    ),
    "closed port of the owner's firewall": (
        [("node2", "expected.firewall", False), (("node1"), "pairs.node2.ports.29500", "dropped")],
        "ways", FAIL, "node2", "29500): dropped from node1", "open all ports between the peers in the firewall that you keep there",
    ),
    "closed port": ([(a, "pairs.node2.ports.29500", "dropped") for a in ("node1", "node3")], "ways", FAIL, "node2", "29500): dropped from node1, node3", "--tags firewall -l node2"),
    "packets lost": ([*((a, f"pairs.{b}.lost", 4) for a, b in (("node1", "node2"), ("node2", "node1"), ("node2", "node3"), ("node3", "node2")))], "loss", WARN, "node2", "2.0 %", "ip -s -s link show eth0"),
    "many packets lost": ([("node1", "pairs.node2.lost", 50)], "loss", FAIL, "node1 node2", "25.0 %", "ip -s"),
    "latency": ([("node1", "pairs.node3.rtt_ms", 25.0), ("node2", "pairs.node3.rtt_ms", 26.0)], "latency", WARN, "node3", "25.0 ms", "ip -s"),
    "slow link": ([("node1", "pairs.node2.mbit", 94.0), ("node3", "pairs.node2.mbit", 93.0)], "bandwidth", WARN, "node2", "94.0 Mbit/s", "ip -s -s link show eth0"),
    "ports that are open and carry nothing": (
        [*((a, f"pairs.{b}.no_stream", True) for a, b in (("node1", "node2"), ("node3", "node2")))],
        "bandwidth", WARN, "node2", "node1 to node2, node3 to node2: the ports are open, and no stream came through", "ip -s -s link show eth0",
    ),
    "a port that was taken meanwhile": (
        [("node2", "unmeasured", "10.77.0.12: cannot listen there: Address already in use. A program took the port meanwhile: run preflight.yml again."),
         *((a, "pairs.node2.ports.40001", "refused") for a in ("node1", "node3"))],
        "ways", FAIL, "node2", "A program took the port meanwhile", "node2 -b -a 'ip -brief address'",
    ),
    "open to a stranger": ([("node2", "outside", {"29500": "open", "40001": "closed"})], "firewall", FAIL, "node2", "29500 is open", "--tags firewall -l node2"),
    "RDMA port down": ([("node2", "survey.rdma.0.state", "DOWN")], "rdma", FAIL, "node2", "mlx5_0/1: found DOWN", "the cable"),
    "RDMA port of two down": ([("node1", "survey.rdma", second_port("ACTIVE")), ("node2", "survey.rdma", second_port("DOWN"))], "rdma", WARN, "node2", "1 can carry a run, on others 2; mlx5_1/1: found DOWN", "the cable"),
    "RDMA port that lost its address": ([(a, "survey.rdma", roce([("10.0.0.1", "RoCE v2")] if a != "node2" else [])) for a in NODES], "rdma", FAIL, "node2", "found no GID of type RoCE v2", "network_interfaces"),
    "a second port that has a cable and no address": ([(a, "survey.rdma", lambda ports: [*ports, {**roce([])(ports)[0], "device": "mlx5_1"}]) for a in NODES[:1]], "rdma", WARN, "node1", "mlx5_1/1: found no GID", "network_interfaces"),
    "InfiniBand here and RoCE there": ([("node2", "survey.rdma", roce([("10.0.0.1", "RoCE v2")]))], "rdma", FAIL, "node1 node2 node3", "node1 InfiniBand; node2 Ethernet", "-l"),
    "RDMA port of a cable to somewhere else": (
        [
            *((a, "survey.rdma", roce([(ADDRESS[a], "RoCE v2")])) for a in NODES),
            ("node2", "survey.interfaces", lambda old: [*old, {"name": "eth9", "enabled": True, "addresses": ["10.99.0.1/30"]}]),
            ("node2", "survey.rdma", lambda ports: [*ports, {**roce([("10.99.0.1", "RoCE v2")])(ports)[0], "device": "mlx5_1"}]),
        ],
        "rdma", WARN, "node2", "mlx5_1/1 (10.99.0.0/30): in a network that no other host's ports are in", "NCCL_IB_HCA",
    ),
    "no subnet manager": ([("node2", "survey.rdma.0.state", "INIT")], "rdma", FAIL, "node2", "INIT", "--tags rdma"),
    "slow RDMA": ([("node1", "pairs.node2.rdma_gbit", 40.0), ("node3", "pairs.node2.rdma_gbit", 41.0)], "rdma_bandwidth", FAIL, "node2", "40.0 %", "rdma link show"),
}  # fmt: skip


WELL = {
    "more processes than cards, on CPUs": [("node2", "expected.processes", 8), ("node2", "expected.device", "cpu")],
    "a host without cards, all on CPUs": [
        *((a, "expected.device", "cpu") for a in NODES),
        ("node2", "survey.gpu.cards", 0),
        ("node2", "survey.gpu.gpus", []),
        ("node2", "survey.versions.driver", ""),
    ],
    "a desktop that holds next to nothing": [
        ("node1", "survey.gpu.processes", [{"gpu": 0, "pid": 9, "kind": "G", "name": "Xorg", "run": False}]),
    ],
    "RoCE ports that routers join": [
        (a, path, value)
        for n, a in enumerate(NODES)
        for path, value in (
            ("survey.interfaces", lambda old, n=n: [*old, {"name": "eth9", "enabled": True, "addresses": [f"10.99.{n}.1/31"]}]),
            ("survey.rdma", roce([(f"10.99.{n}.1", "RoCE v2")])),
        )
    ],
    "RoCE ports that routers join, beside one of a network that all share": [
        (a, path, value)
        for n, a in enumerate(NODES)
        for path, value in (
            ("survey.interfaces", lambda old, n=n: [*old, {"name": "eth9", "enabled": True, "addresses": [f"10.99.0.{2 * n}/31"]}]),
            ("survey.rdma", roce([(ADDRESS[a], "RoCE v2")])),
            ("survey.rdma", lambda ports, n=n: [*ports, {**roce([(f"10.99.0.{2 * n}", "RoCE v2")])(ports)[0], "device": "mlx5_1"}]),
        )
    ],
    "a virtual function that waits for a guest": [
        ("node1", "survey.rdma", lambda ports: [*ports, {**roce([])(ports)[0], "device": "mlx5_2", "guests": True}]),
    ],
    "a program's Xid of last week": [
        ("node3", "survey.gpu.xids", [{"bus": "0000:3b:00", "xid": 13, "text": "", "age": 604800.0}]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WELL)
def test_what_is_no_fault_is_none(name):
    facts = healthy()
    for host, path, value in WELL[name]:
        deep_change(facts, host, path, value)
    assert complaints(facts) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_named_and_has_a_cure(name):
    changes, check, result, hosts, found, cure = FAULTS[name]
    facts = healthy()
    for host, path, value in changes:
        deep_change(facts, host, path, value)
    said = complaints(facts)
    assert {one.check for one in said} == {check}, said
    assert (said[0].result, " ".join(said[0].hosts)) == (result, hosts)
    assert found in said[0].found and cure in said[0].cure, said[0]
    assert said[0].limit and said[0].source


def deep_change(facts, host, path, value):
    """`change`, where keys themselves may have dots."""
    place, words = facts[host], path.split(".")
    while words:
        for count in range(len(words), 0, -1):
            key = ".".join(words[:count])
            if isinstance(place, list):
                key, count = int(words[0]), 1
            if isinstance(place, list) or key in place or count == 1:
                break
        words = words[count:]
        if words:
            place = place[key]
        else:
            place[key] = value(place.get(key)) if callable(value) else value


@pytest.mark.parametrize(
    ("nodes", "local", "stores"),
    [
        (["node2"], False, []),  # by -l, of a cluster of two: a run there needs no store
        (["node1", "node2"], False, ["http://a:2389", "http://b:2389"]),
        (["node1", "node2"], True, []),
    ],
)
def test_the_stores_that_matter_are_those_of_the_plays_hosts(nodes, local, stores):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    words = yaml.safe_load((ROOT / "roles/preflight/vars/main.yml").read_text())["_preflight_stores"]
    known = {"_trainer_nodes": nodes, "groups": {"cluster": ["node1", "node2"]}, "_preflight_local": local}
    known["_trainer_store"] = "http://a:2389,http://b:2389"
    assert Templar(loader=DataLoader(), variables=known).template(trust_as_template(words)) == stores


@pytest.mark.parametrize(
    ("depth", "steps", "check_mode", "done"),
    [
        ("quick", "2", False, ["Try them"]),
        ("burn", "2", False, ["Try them", "Load processors and cards for hours"]),
        ("burn", "0", False, ["Load processors and cards for hours"]),
        ("quick", "0", False, []),
        ("burn", "2", True, []),
    ],
)
def test_cards_are_loaded_without_the_steps_too(depth, steps, check_mode, done):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    known = {"_preflight_depth": depth, "preflight_steps": steps, "ansible_check_mode": check_mode}
    known["__preflight_hindrance"] = {"failed_checks": [], "active": []}
    templar = Templar(loader=DataLoader(), variables=known)

    def asked(task):
        when = task.get("when", [])
        return all(
            templar.evaluate_conditional(trust_as_template(one))
            for one in ([when] if isinstance(when, str) else when)
        )

    block = yaml.safe_load((ROOT / "roles/preflight/tasks/steps.yml").read_text())[1]
    assert [task["name"] for task in block["block"] if asked(block) and asked(task)] == done


def test_who_is_to_blame():
    assert odd({"a": 1, "b": 2, "c": 2}) == (["a"], 2)
    assert odd({"a": 1, "b": 2}) == (["b"], 1)  # of two, the head is right
    assert list(blamed([("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")])) == [("b",)]
    assert list(blamed([("a", "b"), ("b", "a")])) == [("a", "b")]
    assert list(blamed([("a", "b"), ("b", "c"), ("x", "y")])) == [("b",), ("x", "y")]


def with_clocks(offsets):
    """A healthy cluster whose clocks are so far from the right time, s."""
    facts = healthy(*offsets)
    for host, fact in facts.items():
        fact["clock"] = [offsets[host] + 0.1, 0.25]
        for peer, found in fact["pairs"].items():
            found["offset"] = offsets[peer] - offsets[host]
    return facts


@pytest.mark.parametrize(
    ("offsets", "result", "hosts"),
    [
        ({"node1": 0.0, "node2": 0.03, "node3": -0.05}, None, []),
        ({"node1": 0.0, "node2": 0.3, "node3": 0.0}, WARN, ["node2"]),
        ({"node1": -90.0, "node2": 0.0, "node3": 0.0}, FAIL, ["node1"]),
        ({"node1": 5.0, "node2": 0.0}, FAIL, ["node1"]),  # of two, the controller's clock tells which
    ],
)
def test_a_clock_that_is_off_is_found(offsets, result, hosts):
    said = complaints(with_clocks(offsets))
    assert [(one.check, one.result, one.hosts) for one in said] == (
        [("clock", result, hosts)] if result else []
    )
    assert all(one.cure.endswith("site.yml --tags time_sync") for one in said)


def test_clocks_are_compared_over_a_ring_too():
    facts = with_clocks({"node1": 0.0, "node2": 0.0, "node3": 2.0, "node4": 0.0})
    for host, peer in zip(facts, [*list(facts)[1:], "node1"], strict=True):
        facts[host]["pairs"] = {peer: facts[host]["pairs"][peer]}
    assert [(one.check, one.hosts) for one in complaints(facts)] == [("clock", ["node3"])]


def test_where_no_stranger_can_be_asked_for_that_is_said():
    facts = healthy()
    facts["node2"]["survey"]["strangers"] = None
    assert complaints(facts) == []
    said = {one.check: one.found for one in findings(cluster(facts))}
    assert said["address"] == "each its own; whether a stranger has node2's, too, was not to be asked"


def test_a_failed_step_is_told_in_the_trainers_words():
    (said,) = complaints(
        healthy(), {"result": FAIL, "message": "rank 1 on node2: out of memory", "hosts": ["node2"]}
    )
    assert (said.check, said.hosts, said.found) == ("steps", ["node2"], "rank 1 on node2: out of memory")


def test_an_active_run_is_not_disturbed():
    facts = healthy()
    for fact in facts.values():
        fact["run"].update(active=["first"], port_holder="process 7 (trainer)")
        fact.update(pairs=None, outside=None)
    assert complaints(facts) == []
    skipped = {one.check: one.found for one in findings(cluster(facts)) if one.result == SKIP}
    assert skipped["bandwidth"] == "run first is active, and is not disturbed"
    for fact in facts.values():
        fact["run"].update(active=[], at_work=["trainyard-work-0123abcd.service"])
    assert complaints(facts) == []
    skipped = {one.check: one.found for one in findings(cluster(facts)) if one.result == SKIP}
    assert skipped["bandwidth"] == "trainyard-work-0123abcd.service is active, and is not disturbed"


def test_packages_that_differ_by_python_have_its_cure():
    """Else site.yml would change nothing, and preflight.yml name it for ever."""
    facts = healthy()
    facts["node2"]["run"]["environment"] = {"digest": "e" * 64}
    assert ["bring" in one.cure for one in complaints(facts)] == [False]
    facts["node2"]["survey"]["versions"]["python"] = "3.12.3"
    said = {one.check: one.cure for one in complaints(facts)}
    assert said.keys() == {"packages", "python"}
    assert all("python_env_python: bring" in cure for cure in said.values())


def test_a_release_that_is_not_the_checkouts_fails_as_train_would():
    assert complaints(healthy(), version="0.1") == []
    (one,) = complaints(healthy(), version="0.2")
    assert (one.check, one.result, one.hosts) == ("release", FAIL, list(NODES))
    assert "release 0.1-aa; expected 0.2, this checkout's" in one.found
    assert one.cure.startswith("ansible-playbook -i inv site.yml ") and "git pull" in one.cure
    facts = healthy()
    facts["node2"]["run"]["release"] = "0.2-bb"
    (one,) = complaints(facts, version="0.2")  # the odd one is named, whichever it is
    assert (one.check, one.hosts) == ("release", ["node2"])


def test_of_a_host_without_a_release_only_that_is_said():
    facts = healthy()
    facts["node2"]["run"].update(release=None, environment=None)
    facts["node2"]["survey"]["versions"].update(python="", torch="", nccl="")
    assert [one.check for one in complaints(facts)] == ["release"]
    for fact in facts.values():
        fact["run"]["release"] = None
    assert [one.check for one in complaints(facts)] == ["release"]


def test_a_processor_that_others_use_too_is_not_called_slow():
    facts = healthy()
    for fact in facts.values():
        fact["burn"] = [{**BURNED, "device": "cpu (processors)", "first": 0.5, "last": 0.2}]
    assert complaints(facts) == []
    words = {one.check: one.found for one in findings(cluster(facts))}
    assert words["burn"] == "node1 0.2, node2 0.2, node3 0.2 TFLOP/s, each product the same"
    for fact in facts.values():
        fact["burn"] = None
    assert {one.check: one.result for one in findings(cluster(facts))}["burn"] == SKIP


def test_what_became_of_the_burn():
    burned = preflight_verdict.burned
    for said in ("", "[rank0] a library's word\n", "warming up\n"):
        assert burned({"text": f"{said}{json.dumps([BURNED])}\n"}) == [BURNED]
    assert burned({"text": "nothing"}) == [{"device": "", "error": "it said nothing of its devices"}]
    assert burned({}) == burned({"skipped": True, "changed": False}) is None
    assert burned({"rc": 2, "msg": "usage: …\nit was killed"}) == [{"device": "", "error": "it was killed"}]
    assert burned({"unreachable": True}) == [{"device": "", "error": "no reason given"}]


def test_nobody_answers():
    facts = healthy()
    for fact in facts.values():
        fact.update(survey=None, run=None, error="timed out", pairs=None, outside=None, clock=None)
    assert [one.check for one in complaints(facts)] == ["answer"] * 3


def test_on_one_machine_one_note_stands_for_the_network():
    local = Cluster(healthy("node1", "node2"), Limits(), STEPS, local=True)
    said = {one.check: one.result for one in findings(local)}
    assert "bandwidth" not in said and said["machines"] == SKIP and said["torch"] == PASS


def room(model="", dataset="", validation="", adapter="", **more):
    words = {"model": model, "dataset": dataset, "validation": validation, "adapter": adapter}
    return preflight_room.run_room(words, **more)


def test_an_adapters_checkpoints_take_next_to_nothing(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_bytes(b"x" * 1000)
    model = str(tmp_path / "model")
    assert room(model, adapter="lora") == (1e-6, "")
    assert room(model, adapter="none") == room(model) == (19e-6, "")
    assert room(model, copies=4) == (25e-6, "")  # the best one is kept, too
    # In 32 bits the files are twice as large; what training makes of them is not.
    (tmp_path / "model/weights").write_bytes(b"x" * 1980)
    (tmp_path / "model/config.json").write_text('{"dtype": "float32"}')
    assert room(model) == (20e-6, "")


def test_what_cannot_be_read_costs_no_report(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    assert room(str(tmp_path), "~nobody-of-that-name/x") == (0, "~nobody-of-that-name/x")
    assert preflight_room.run_material({"model": str(tmp_path), "dataset": "~nobody-of-that-name/x"}) == {
        "files": [],
        "paths": [],
    }


def test_the_room_that_the_run_takes_is_asked_for(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "data.jsonl").write_bytes(bytes(500))
    needed, unknown = room(str(tmp_path / "model"), str(tmp_path / "data.jsonl"))
    assert needed == pytest.approx((500 + 1000 * 19) / 1e9) and unknown == ""
    assert room("tiny", "austen") == (0, "") == room()
    # A list of sets, and what is not here: its size is not none, it is not known.
    (tmp_path / "more").mkdir()
    (tmp_path / "more/a.txt").write_bytes(bytes(70))
    listed = f"{tmp_path}/data.jsonl, {tmp_path}/more,austen,org/set@main:*.parquet"
    assert room("org/model", listed, str(tmp_path / "more/a.txt")) == (
        640 / 1e9,
        "org/model, org/set@main:*.parquet",
    )
    assert room("tiny", "/on/hosts") == (0, "/on/hosts")
    (said,) = complaints(healthy("node1"), run_gb=399)
    assert said.check == "disk" and said.found.endswith("404.0 GB needed")
    (said,) = complaints(healthy("node1"), run_gb=399, run_unknown="org/model")
    more = (
        " besides what org/model takes: not on the controller, so of unknown size (in a full fine-tune, with three "
        "checkpoints, a model takes 19 times its files)"
    )
    assert said.found.endswith(f"404.0 GB needed{more}")
    words = {one.check: one.found for one in findings(cluster(healthy("node1"), run_unknown="org/model"))}
    assert words["disk"] == f"400 GB free or more, 5.0 GB needed{more}"
    words = {one.check: one.found for one in findings(cluster(healthy("node1")))}
    assert words["disk"] == "400 GB free or more, 5.0 GB needed"


def test_what_is_on_the_hosts_already_needs_no_room_again(tmp_path, load_module):
    """A second run with the same model, one that goes on, and one whose data lies on the hosts alone."""
    here, state = tmp_path / "here", tmp_path / "state"
    for path, size in {
        here / "model/model.safetensors": 1000,
        here / "model/config.json": 20,
        here / "text.txt": 50,
        state / "models/0a1b/model/model.safetensors": 1000,
        state / "models/0a1b/model/config.json": 21,  # another one's
        state / "data/2c3d/text.txt": 50,
        state / "runs/first/checkpoints/step-00000010/model.safetensors": 300,
        tmp_path / "alone/a.jsonl": 70,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / "alone/b.jsonl").symlink_to(here / "text.txt")
    alone = str(tmp_path / "alone")
    asked = preflight_room.run_material(
        {"model": str(here / "model"), "dataset": f"{here}/text.txt, {here}/text.txt"}
    )
    assert asked["files"][0] == ["model.safetensors", 1000] and asked["paths"] == []
    held = load_module("preflight_survey").held
    assert held(str(state), asked["files"], [alone, "/nowhere"], "first") == {
        "brought": 1050,
        "checkpoints": 300,
        "paths": {alone: 70 + 50},
    }
    assert held(str(state), [], [], "") == {"brought": 0, "checkpoints": 0, "paths": {}}
    # What the hosts alone have: on each host's own disk it gets another place, in a shared directory it does not.
    there = {"/on/hosts/a.jsonl": 70, "/shared/model": 400}
    assert preflight_room.run_material({"model": "/shared/model", "dataset": "/on/hosts/a.jsonl"})[
        "paths"
    ] == [
        "/shared/model",
        "/on/hosts/a.jsonl",
    ]
    given = {"model": "/shared/model", "dataset": "/on/hosts/a.jsonl", "there": there}
    assert room(**given, shared="/shared") == pytest.approx(((70 + 400 * 18) / 1e9, ""))
    assert room(**given, shared="/share") == pytest.approx(((70 + 400 * 19) / 1e9, ""))
    # A host that has it needs less, and none less than nothing.
    one = healthy("node1")
    one["node1"]["survey"]["held"] = {"brought": 200e9, "checkpoints": 100e9, "paths": {}}
    assert not complaints(one, run_gb=600)
    (said,) = complaints(one, run_gb=700)
    assert said.found.endswith("405.0 GB needed besides 300.0 that are there")
    words = {one.check: one.found for one in findings(cluster(one, run_gb=100))}
    assert words["disk"] == "400 GB free or more, 5.0 GB needed"


# ---- the report ----


def whole(facts, before=None, **limits):
    return report(cluster(facts, **limits), before, 31.4, "runs/preflight/baseline-x.json")


def test_the_report_says_all_and_counts(tmp_path):
    facts = healthy()
    facts["node2"]["survey"]["link"]["mtu"] = 9000
    facts["node2"]["survey"]["hostname"] = "debian"
    result = whole(facts)
    assert (result["result"], result["exit_status"]) == (FAIL, 2)
    words = text(result)
    assert words.startswith("Preflight (quick) of 3 hosts, 31 s: ")
    assert "pass  disk" in words and "400 GB free or more" in words
    assert "FAIL  hostname: node2: it calls itself debian" in words
    assert words.index("WARN  mtu") < words.index("FAIL  hostname")
    assert "cure:  ansible-playbook -i inv site.yml --tags identity -l node2" in words
    assert "from \\ to" in words and "941 Mbit/s, 0.20 ms" in words
    write_result(str(tmp_path / "runs/last.json"), result)
    assert read_result(str(tmp_path / "runs/last.json")) == json.loads(json.dumps(result))
    assert not is_good(result)


def test_warnings_end_with_1_and_none_with_0():
    facts = healthy()
    assert whole(facts)["exit_status"] == 0
    facts["node2"]["survey"]["link"]["duplex"] = "half"
    assert whole(facts)["exit_status"] == 1


def test_a_later_result_says_what_got_worse():
    facts = healthy()
    facts["node1"]["pairs"]["node3"]["rdma_gbit"] = 92.0
    before = whole(facts)
    assert is_good(before)
    assert whole(healthy(), before)["result"] == PASS  # what was not measured is not worse
    facts["node1"]["pairs"]["node3"]["rdma_gbit"] = 60.0
    facts["node1"]["pairs"]["node2"]["mbit"] = 830.0  # above the limit of 800, below nine tenths of 941
    facts["node3"]["pairs"]["node2"]["rtt_ms"] = 1.9
    facts["node3"]["survey"]["gpu"].update(cards=0, gpus=[])
    result = whole(facts, before)
    (said,) = [one for one in result["checks"] if one["check"] == "baseline"]
    assert said["result"] == WARN
    assert "node1 to node2: 830.0 Mbit/s, 941.0 on" in said["found"]
    assert "node1 to node3: 60.0 Gbit/s by RDMA, 92.0 on" in said["found"]
    assert "node3: 0 GPUs, 1 on" in said["found"] and "node3 to node2: 1.9 ms, 0.2 on" in said["found"]
    assert "rm runs/preflight/baseline-x.json" in said["cure"]
    assert not is_good(result)


@pytest.mark.parametrize(
    ("link", "best", "now", "worse"),
    [
        ({}, 940.0, 830.0, True),
        ({"wireless": True}, 940.0, 300.0, False),  # others are on it
        ({"wireless": True}, 940.0, 200.0, True),
        ({"physical": False}, 940.0, 300.0, False),
        # Beyond 10 Gbit/s one processor is what is measured.
        ({"speed": 25_000}, 21_000.0, 12_000.0, False),
        ({"speed": 25_000}, 21_000.0, 8_900.0, True),
    ],
)
def test_bandwidth_is_held_against_what_a_link_carries_each_time(link, best, now, worse):
    def measured(mbit, before=None):
        facts = healthy("node1", "node2")
        for fact in facts.values():
            fact["survey"]["link"].update(link)
        facts["node1"]["pairs"]["node2"]["mbit"] = mbit
        return whole(facts, before, bandwidth_percent=0)

    (said,) = [one for one in measured(now, measured(best))["checks"] if one["check"] == "baseline"]
    assert (said["result"] == WARN) == worse, said


def test_a_new_baseline_keeps_the_figures_that_were_not_measured():
    before, facts = whole(healthy()), healthy()
    for fact in facts.values():
        fact["pairs"] = None
    after = renewed(whole(facts, before), before)
    assert after["figures"]["mbit"] == before["figures"]["mbit"]
    assert baseline_name(["b", "a"]) == baseline_name(["a", "b"]) != baseline_name(["a"])


def test_what_gets_worse_little_by_little_is_told(tmp_path):
    """Each result is near the one before, and that is the best one no more."""
    before = None

    def measured(mbit, rtt_ms):
        nonlocal before
        facts = healthy()
        facts["node1"]["pairs"]["node2"].update(mbit=mbit, rtt_ms=rtt_ms)
        result = whole(facts, before)
        if is_good(result):
            write_result(str(tmp_path / "b.json"), renewed(result, before))
            before = read_result(str(tmp_path / "b.json"))
        return next(one["found"] for one in result["checks"] if one["check"] == "baseline")

    measured(940.0, 0.9)
    measured(1000.0, 0.6)
    for mbit, rtt_ms in ((930.0, 1.4), (905.0, 2.1)):
        assert measured(mbit, rtt_ms).startswith("as on")
    said = measured(850.0, 3.0)  # within a tenth of the last, within twice the last and 1 ms
    assert "node1 to node2: 850.0 Mbit/s, 1000.0 on" in said and "3.0 ms, 0.6 on" in said
    assert before["figures"]["mbit"]["node1>node2"] == 905.0  # what plans go by is what was measured last
    assert measured(1000.0, 0.6).startswith("as on")


def test_a_damaged_baseline_is_none(tmp_path):
    (tmp_path / "b.json").write_text('{"figures": 3')
    assert read_result(str(tmp_path / "b.json")) is None
    assert read_result(str(tmp_path / "none.json")) is None


def test_many_hosts_get_no_table():
    result = whole(healthy())
    result["hosts"] = [f"node{n}" for n in range(1, 17)]
    assert "from \\ to" not in text(result) and "The slowest ways: " in text(result)


def test_the_document_has_every_check_as_the_code_has_it():
    document = (ROOT / "docs/preflight.md").read_text()
    assert table() in document, "run: make docs"


# ---- what is asked ----


def test_pairs_are_measured_as_the_depth_says():
    link = {"link": {"mtu": 9000, "speed": 25_000, "physical": True}}
    hosts = [{"name": f"n{n}", "address": f"10.0.0.{n}", "port": 1, "rdma": "mlx5_0"} for n in range(6)]
    quick = filters.preflight_measure(link, hosts[:4], "quick", 120)
    assert (quick["rounds"], quick["mtu"], quick["streams"], quick["passes"]) == ([1, 2, 3], 9000, 4, 1)
    assert quick["hosts"][0]["rdma"] == ""
    assert filters.preflight_measure(link, hosts, "quick", 120)["rounds"] == [1]
    assert quick["patience"] == 15
    assert (
        filters.preflight_measure(link, hosts * 50, "quick", 120)["patience"] == 30
    )  # of 300 the last begins later
    full = filters.preflight_measure(link, hosts, "full", 120)
    assert full["rounds"] == [1, 2, 3, 4, 5] and full["hosts"][0]["rdma"] == "mlx5_0"
    burn = filters.preflight_measure({"link": None}, hosts[:2], "burn", 120)
    rdma_too = burn["seconds"] + 1.5 + 3 + 1.5
    assert 55 <= burn["passes"] * rdma_too / 60 <= 65 and burn["streams"] == 1
    alone = filters.preflight_measure({"link": None}, [{**one, "rdma": ""} for one in hosts[:2]], "burn", 120)
    assert 55 <= alone["passes"] * (alone["seconds"] + 1.5) / 60 <= 65


def test_who_takes_part_in_the_measurement():
    hosts = [{"name": name, "address": ADDRESS[name], "names": [name]} for name in NODES]
    seen = {name: {"survey": survey(name, NODES)} for name in NODES}
    asked = {name: {"host_facts": {"active": []}} for name in NODES}
    takers = filters.preflight_takers(hosts, seen, asked, False)
    assert takers[1] == {"name": "node2", "address": "10.77.0.12", "port": 40001, "rdma": "mlx5_0"}
    assert filters.preflight_takers(hosts, seen, asked, True) == []
    assert (
        filters.preflight_takers(hosts, {**seen, "node3": {"unreachable": True}}, asked, False) == takers[:2]
    )
    port = seen["node2"]["survey"]["rdma"][0]
    seen["node2"]["survey"]["rdma"] += [
        {**port, "device": "mlx5_1", "port": 2, "gbit": 400.0},
        {**port, "device": "mlx5_2", "gbit": 800.0, "state": "DOWN"},
    ]
    assert (
        filters.preflight_takers(hosts, seen, asked, False)[1]["rdma"] == "mlx5_1:2"
    )  # the fastest that is up
    for key, name in (("active", "first"), ("at_work", "trainyard-work-0123abcd.service")):
        asked["node2"]["host_facts"] = {"active": [], "at_work": [], key: [name]}
        assert filters.preflight_takers(hosts, seen, asked, False) == []


def test_the_steps_take_what_the_inventory_says_of_machines_alone():
    asked = filters.preflight_trial(
        {"threads": 2, "model": "/models/large", "lr": 1.0, "dtype": "bfloat16"}, 6, 2
    )
    config = asked["config"]
    assert (config["model"], config["threads"], config["dtype"], config["steps"]) == (
        "tiny",
        2,
        "bfloat16",
        2,
    )
    assert config["batch_size"] == 6 and asked["run"].startswith("smoke-")
    with pytest.raises(AnsibleFilterError, match=r"trainer_config in the inventory, or -e: .*threads"):
        filters.preflight_trial({"threads": "many"})


def test_what_became_of_the_steps():
    said = filters.preflight_steps_said
    well = {"outcome": {"result": "finished"}, "last": {"step": 2, "world_size": 3, "step_seconds": 0.5}}
    assert (
        said({"failed_checks": []}, well, {}, 2, False)["message"]
        == "2 steps on 3 ranks, 0.50 s the last one"
    )
    lost = {"outcome": {"result": "failed", "host": "node2", "message": "rank 1 died"}}
    assert said({"failed_checks": []}, lost, {"node1": "Smoke test …"}, 2, False) == {
        **{"result": "fail", "message": "rank 1 died"},
        "hosts": ["node2"],
    }
    # By the fault of one, all are out of it; and by one that does not answer any more.
    for faults, told, hosts in (
        ({"node1": "", "node2": "no room"}, "no room", ["node2"]),
        ({"node1": "", "node3": ""}, "a host does not answer any more", []),
    ):
        found = said({"failed_checks": []}, {}, faults, 2, False)
        assert found == {"result": "fail", "message": told, "hosts": hosts}
    assert said({"failed_checks": []}, {}, {}, 2, False)["message"] == "they came to no end"
    assert "mtu" in said({"failed_checks": ["mtu"]}, {}, {}, 2, False)["message"]
    assert "first" in said({"failed_checks": [], "active": ["first"]}, {}, {}, 2, False)["message"]
    assert said({}, {}, {}, 0, False)["result"] == said({}, {}, {}, 2, True)["result"] == "skip"


# ---- the controller's look from outside ----


def test_the_way_of_ssh():
    direct = pair_action.way_of("user ops\nhostname 10.77.0.11\nport 22\n")
    assert direct == pair_action.Way("10.77.0.11", "ops")
    proxied = pair_action.way_of("user ops\nhostname 10.77.0.11\nproxycommand relay %h %p %r 100%%\n")
    assert proxied.command(29500) == "exec relay 10.77.0.11 29500 ops 100%"
    assert "jump host" in pair_action.way_of("hostname h\nproxyjump gate\n")
    note = pair_action.note_for
    assert note(direct, "10.77.0.11", "10.77.0.1", ["10.77.0.11"]) == ""
    assert "by 10.77.0.11, not by the cluster's address 10.0.0.1" in note(direct, "10.0.0.1", "10.77.0.1", [])
    assert "is a peer" in note(direct, "10.77.0.11", "10.77.0.12", ["10.77.0.11", "10.77.0.12"])
    assert "unknown" in note(direct, "10.77.0.11", "", [])


def test_a_name_that_leads_to_the_cluster_address_is_no_other_way(monkeypatch):
    known = {"node1.local": ["fe80::1", "10.77.0.11"], "gate.lan": ["192.168.1.11"]}

    def look_up(name, port):
        if name not in known:
            raise socket.gaierror("Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(pair_action.socket, "getaddrinfo", look_up)
    by_name = pair_action.Way("node1.local", "ops")
    assert pair_action.to_cluster(by_name, "10.77.0.11") == pair_action.Way("10.77.0.11", "ops")
    for way_ in (
        pair_action.Way("gate.lan"),  # another network's: what is not the host's own is not tried
        pair_action.Way("nowhere"),
        pair_action.Way("node1.local", proxy="relay %h %p"),
    ):
        assert pair_action.to_cluster(way_, "10.77.0.11") == way_
        assert way_.address in pair_action.note_for(way_, "10.77.0.11", "10.77.0.1", [])


def test_a_host_that_ssh_reaches_by_its_name_is_tried(monkeypatch):
    action = pair_action.ActionModule.__new__(pair_action.ActionModule)
    hosts = [{"name": "a", "address": "127.0.0.1", "port": 2}]
    args = {"host": "a", "port": 1, "client": "10.77.0.1", "hosts": hosts}
    action._task = types.SimpleNamespace(args=args)
    monkeypatch.setattr(pair_action.ActionBase, "run", lambda *_: {})
    monkeypatch.setattr(action, "_execute_module", lambda *_, **__: {})
    monkeypatch.setattr(action, "_way", lambda: pair_action.Way("localhost"))
    assert action.run()["outside"] == {"1": "closed", "2": "closed"}


def test_an_open_port_is_seen_from_outside_a_shut_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as gone:
        here, there = server.getsockname()[1], gone.getsockname()[1]
        gone.close()
        watches = [pair_action.Watch(pair_action.Way("127.0.0.1"), port) for port in (here, there)]
        for watch in watches:
            watch.start()
        watches[0].join(10)
        assert pair_action.outcome(watches) == {str(here): "open", str(there): "closed"}


def test_a_port_that_is_silent_does_not_keep_another_from_being_tried(monkeypatch):
    monkeypatch.setattr(pair_action, "is_open", lambda way, port: port == 2 or time.sleep(60))
    watches = [pair_action.Watch(pair_action.Way("127.0.0.1"), port) for port in (1, 2)]
    for watch in watches:
        watch.start()
    watches[1].join(10)
    monkeypatch.setattr(pair_action, "TRY_SECONDS", 0.1)
    assert pair_action.outcome(watches) == {"1": "closed", "2": "open"}


def test_through_a_proxy_only_the_greeting_counts():
    def way_(command):
        return pair_action.Way("h", "u", command)

    assert pair_action.is_open(way_("sh -c 'echo trainyard preflight; sleep 60'"), 1)
    assert not pair_action.is_open(way_("sh -c 'echo SSH-2.0; sleep 60'"), 1)
    assert not pair_action.is_open(way_("false"), 1)


# ---- what a host reads ----


def test_gpus_are_read_with_the_fields_that_the_driver_knows(load_module):
    module = load_module("preflight_survey")
    asked = []

    def run_command(command):
        fields = command[3].partition("=")[2].split(",")
        asked.append(fields)
        if "remapped_rows.pending" in fields:
            return 2, 'Field "remapped_rows.pending" is not a valid field to query.\n', ""
        values = {"index": "0", "name": "NVIDIA GeForce RTX 3090", "memory.used": "12"}
        return 0, ", ".join(values.get(name, "[N/A]") for name in fields) + "\n", ""

    def newer(command):
        fields = command[3].partition("=")[2].split(",")
        if "clocks_throttle_reasons.active" in fields:
            return 2, 'Field "clocks_throttle_reasons.active" is not a valid field to query.\n', ""
        return 0, ", ".join("0x40" if "clocks" in name else "[N/A]" for name in fields) + "\n", ""

    told = "0, NVIDIA L4, [Unknown Error], [Insufficient Permissions], [GPU requires reset]\n"
    assert module.gpu_rows(
        told, ["index", "name", "memory.used", "temperature.gpu", "remapped_rows.pending"]
    ) == [{"index": "0", "name": "NVIDIA L4", "remapped_rows.pending": "[GPU requires reset]"}]
    assert module.gpus(newer) == ([{"clocks_event_reasons.active": "0x40"}], "")
    rows, error = module.gpus(run_command)
    assert (rows, error) == ([{"index": "0", "name": "NVIDIA GeForce RTX 3090", "memory.used": "12"}], "")
    assert len(asked) == 2
    assert module.gpus(lambda command: (124, "", ""))[1] == "no answer within 20 s"
    assert "mismatch" in module.gpus(lambda command: (18, "Driver/library version mismatch", ""))[1]


def test_a_process_of_a_burn_is_not_a_stranger_s(tmp_path):
    for pid, unit in ((7, "trainyard-work-burn-0123abcd.service"), (8, "ollama.service")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/cgroup").write_text(f"0::/system.slice/{unit}\n")
    assert [host_runs.at_work(pid, str(tmp_path)) for pid in (7, 8, 9)] == [True, False, False]


@pytest.mark.parametrize(
    ("cgroup", "command"),
    [
        ("0::/system.slice/ollama.service", "systemctl stop ollama.service"),
        ("0::/system.slice/system-vllm.slice/vllm@a.service", "systemctl stop vllm@a.service"),
        ("1:name=systemd:/system.slice/boinc-client.service\n0::/", "systemctl stop boinc-client.service"),
        (f"0::/system.slice/docker-{'0a' * 32}.scope", f"docker stop {'0a' * 6}"),
        (f"4:devices:/docker/{'0a' * 32}", f"docker stop {'0a' * 6}"),
        (f"0::/machine.slice/libpod-{'0a' * 32}.scope/container", f"podman stop {'0a' * 6}"),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", "scancel 123"),
        ("5:memory:/slurm/uid_1000/job_77/step_batch", "scancel 77"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.x.service", ""),
        ("0::/user.slice/user-1000.slice/session-3.scope", ""),
        ("0::/system.slice/cron.service", ""),
        ("0::/system.slice/ssh.service", ""),
        ("0::/system.slice/jupyterhub.service", ""),  # it would end everybody's notebooks
        # Root's own docker and podman do not know a user's containers, nor the host what runs in a guest.
        (
            f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{'0a' * 32}.scope/container",
            "",
        ),
        (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{'0a' * 32}.scope", ""),
        ("0::/lxc.payload.ai/system.slice/ollama.service", ""),
        ("0::/lxc/101/ns/system.slice/ollama.service", ""),
        (f"0::/lxc/101/ns/system.slice/docker-{'0a' * 32}.scope", ""),
        ("0::/machine.slice/systemd-nspawn@ai.service/payload/system.slice/ollama.service", ""),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{'0a' * 32}.scope", ""),
        ("0::/", ""),
    ],
)
def test_what_would_start_a_process_again_is_ended_instead(load_module, tmp_path, cgroup, command):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text(f"{cgroup}\n")
    module = load_module("preflight_survey")
    assert module.keeper(7, str(tmp_path)) == command
    assert module.keeper(8, str(tmp_path)) == ""  # it has ended


def test_processes_and_faults_of_cards_are_read(load_module):
    module = load_module("preflight_survey")
    pmon = (
        "# gpu         pid   type     sm    mem    enc    dec    command\n"
        "# Idx           #    C/G      %      %      %      %    name\n"
        "    0       1234      G      1      0      -      -    Xorg\n"
        "    0       5678    C+G     40     20      -      -    python3\n"
        "    0       5679    C+G      -      -      -      -    chrome --type=g\n"
        "    1          -      -      -      -      -      -    -\n"
    )
    assert module.gpu_processes(pmon) == [
        {"gpu": 0, "pid": 1234, "kind": "G", "name": "Xorg"},
        {"gpu": 0, "pid": 5678, "kind": "C+G", "name": "python3"},
        {"gpu": 0, "pid": 5679, "kind": "C+G", "name": "chrome"},
    ]
    log = "[ 12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    (fault,) = module.xids("[ 1.0] eth0: up\n" + log, 20.0)
    assert (fault["bus"], fault["xid"]) == ("0000:3b:00", 79) and "fallen off" in fault["text"]
    assert fault["age"] == pytest.approx(7.7)
    assert module.xids(log.partition("] ")[2], 20.0) == [{**fault, "age": None}]
    assert module.xids(log.replace(":00)", ":00 GPU-I:05 GPU-CI:00)"), 20.0) == [
        fault
    ]  # of a slice of it (MIG)


def test_ports_links_and_cards_are_read_from_sys(load_module, tmp_path):
    module = load_module("preflight_survey")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    wire = tmp_path / "sys/class/net/eth0"
    card = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    driver = tmp_path / "sys/bus/pci/drivers/igb"
    for place in (port, wire / "device", card, driver):
        place.mkdir(parents=True)
    (wire / "device/driver").symlink_to(driver)
    for path, content in {
        port / "state": "4: ACTIVE",
        port / "rate": "100 Gb/sec (4X EDR)",
        port / "link_layer": "InfiniBand",
        port / "sm_lid": "0x1",
        wire / "speed": "1000",
        wire / "duplex": "full",
        wire / "mtu": "1500",
        card / "vendor": "0x10de",
        card / "class": "0x030200",
    }.items():
        path.write_text(content + "\n")
    root = str(tmp_path)
    assert module.rdma_ports(root) == [
        {
            "device": "mlx5_0",
            "port": 1,
            "state": "ACTIVE",
            "gbit": 100.0,
            "layer": "InfiniBand",
            "guid": "",
            "sm_lid": 1,
            "driver": "",
            "guests": False,
            "iwarp": False,
            "interface": "",
            "enabled": None,
            "mtu": None,
            "gids": [],
            "cards": [],
        }
    ]
    found = module.link("eth0", root)
    assert (found["mtu"], found["speed"], found["physical"]) == (1500, 1000, True)
    (wire / "speed").write_text("-1\n")
    assert module.link("eth0", root)["speed"] is None
    assert module.cards(root) == 1
    # Of the others: three that virtual machines have, one that is too old, and one with the driver.
    drivers = {
        "0000:02:00.0": ("vfio-pci", "0x2684"),
        "0000:03:00.0": ("nouveau", "0x128b"),
        "0000:04:00.0": ("nvidia", "0x2684"),
        "0009:01:00.0": ("nvgrace-gpu-vfio-pci", "0x2342"),
        "0000:05:00.0": ("pciback", "0x2684"),
    }
    for address, (driver, device) in drivers.items():
        card = tmp_path / "sys/bus/pci/devices" / address
        card.mkdir(parents=True)
        for name, value in (("vendor", "0x10de"), ("class", "0x030000"), ("device", device)):
            (card / name).write_text(f"{value}\n")
        (tmp_path / driver).mkdir()
        (card / "driver").symlink_to(tmp_path / driver)
    assert module.cards(root) == 2


def test_an_address_that_a_host_gave_itself_is_one_that_it_holds(load_module):
    """As two machines with a cable between them may have, which networkd marks as the link's own."""
    given = [("169.254.3.4", 16, "link"), ("fe80::1", 64, "link"), ("10.0.0.1", 24, "global")]
    link = {"ifname": "enp1s0f1np1", "flags": ["UP"], "mtu": 9000, "address": "02:00:00:00:00:01"}
    link["addr_info"] = [
        {"local": text, "prefixlen": length, "scope": scope} for text, length, scope in given
    ]
    (found,) = load_module("preflight_survey").links(lambda command: (0, json.dumps([link]), ""))
    assert found["addresses"] == ["169.254.3.4/16", "10.0.0.1/24"]
    (others,) = host_survey.interfaces(lambda command: (0, json.dumps([link]), ""))
    assert others["addresses"] == ["10.0.0.1/24"]  # the role network is to give none such to a host


def test_what_is_too_old_for_a_run_is_what_the_role_nvidia_leaves_out(load_module):
    module = load_module("preflight_survey")
    (too_old,) = yaml.safe_load((ROOT / "roles/nvidia/vars/main/cards.yml").read_text())["_nvidia_too_old"]
    first, last = (int(end, 16) for end in too_old.split("-"))
    assert (module.TOO_OLD[0], module.TOO_OLD[-1]) == (first, last)
    assert module.UNUSABLE == nvidia_host.UNUSABLE


def test_kernels_of_two_distributions_are_compared_with_their_own():
    facts = healthy()
    facts["node3"]["survey"]["system"] = "ubuntu-24.04"
    facts["node3"]["survey"]["versions"]["kernel"] = "6.8.0-90-generic"
    assert complaints(facts) == []
    told = [(one.found, one.hosts) for one in findings(cluster(facts)) if one.check == "kernel"]
    assert told == [("kernel 6.1.0-40-amd64", ["node1", "node2"]), ("kernel 6.8.0-90-generic", ["node3"])]
    facts["node2"]["survey"]["versions"]["kernel"] = "6.1.0-1-amd64"
    assert [one.check for one in complaints(facts)] == ["kernel"]


def test_a_machines_cards_are_no_fault_of_its_containers():
    facts = healthy()
    for host in NODES:
        facts[host]["survey"]["container"] = True
        facts[host]["survey"]["gpu"].update(driver=False, gpus=[])
    assert [one for one in complaints(facts) if one.check == "gpus"] == []


def test_versions_are_those_that_are_there_whatever_was_once_installed(load_module, tmp_path):
    module = load_module("preflight_survey")
    packages = tmp_path / "env/lib/python3.12/site-packages"
    release = tmp_path / "current"
    for place in (packages / "torch", release, tmp_path / "env/bin"):
        place.mkdir(parents=True)

    def versions():
        return module.versions(lambda command: (0, f"Python 3.12.4 by {command[0]}\n", ""), str(tmp_path))

    assert {versions()[key] for key in ("python", "torch", "nccl")} == {""}
    (release / "environment").write_text(f"{tmp_path}/env\n")
    (tmp_path / "env/.complete").write_text(
        '{"python": "3.12.3", "torch": "2.12.0", "versions": {"torch": "2.12.0"}}'
    )
    (tmp_path / "env/bin/python").touch(0o755)
    for name in ("torch-2.13.0", "nvidia_nccl_cu12-2.27.5"):
        (packages / f"{name}.dist-info").mkdir()
    found = versions()
    assert (found["torch"], found["nccl"]) == ("2.13.0", "2.27.5")
    assert found["python"] == f"3.12.4 by {tmp_path}/env/bin/python"
    # The index's wheel of torch has its build in a file of its own alone.
    (packages / "torch/version.py").write_text("debug = False\n__version__ = '2.13.0+cu128'\n")
    assert versions()["torch"] == "2.13.0+cu128"


def test_the_units_limit_is_read_with_its_drop_ins(load_module, tmp_path):
    module = load_module("preflight_survey")
    ours, other = tmp_path / "memory.conf", tmp_path / "nice.conf"
    ours.write_text("[Service]\nLimitMEMLOCK=8M\n")
    other.write_text("[Service]\nNice=5\n")
    shown = f"LoadState=loaded\nLimitMEMLOCK={{}}\nDropInPaths={ours} {other} {tmp_path}/gone\n"
    table_ = "Max locked memory         {}            {}            bytes\n"

    def answers(limit, real):
        return lambda command: (
            0,
            shown.format(limit) if command[0] == "systemctl" else table_.format(real, real),
            "",
        )

    limit = module.unit_limit(answers("infinity", "unlimited"), "trainyard")
    assert (limit["set"], limit["found"]) == (None, None)
    limit = module.unit_limit(answers("infinity", "8388608"), "trainyard")
    assert (limit["set"], limit["found"]) == (None, 8388608)
    assert limit["drop_ins"] == [str(ours)]  # the cure removes them
    assert module.unit_limit(lambda command: (0, "LoadState=not-found\n", ""), "")["loaded"] is False


def test_a_survey_of_this_machine(run_module, tmp_path):
    answer = run_module(
        "preflight_survey",
        hosts=[{"name": "here", "address": "127.0.0.1", "names": ["localhost"]}],
        address="127.0.0.1",
        keeper="process",
        opt_dir=str(tmp_path),
        state_dir=str(tmp_path / "not/yet"),
    )
    found = answer["survey"]
    assert found["versions"]["torch"] == "" and found["disk"]["free"] > 0 and found["memory"]["total"] > 0
    assert found["free_port"] > 0 and not answer["changed"]


def test_who_claims_an_address_is_heard_in_arp_packets():
    own, odd = bytes.fromhex("020000000001"), bytes.fromhex("020000000009")
    probe = address_probe.probe_of(own, "10.77.0.12")
    # RFC 5227: Ethernet, IPv4, a request; whoever asks has no address yet.
    assert probe.hex() == "0001080006040001" + "020000000001" + "00000000" + "000000000000" + "0a4d000c"
    answer = bytes.fromhex("0001080006040002") + odd + socket.inet_aton("10.77.0.12") + own + bytes(4)
    claimant = address_probe.claimant
    assert claimant(answer, "10.77.0.12", {own.hex(":")}) == "02:00:00:00:00:09"
    assert claimant(answer, "10.77.0.12", {own.hex(":"), odd.hex(":")}) == ""  # another card of this host
    assert claimant(answer, "10.77.0.13", set()) == claimant(probe, "10.77.0.12", set()) == ""
    assert claimant(answer[:20], "10.77.0.12", set()) == ""
    assert address_probe.others_with("lo", "127.0.0.1") is None


# ---- the ways, on this machine's loopback ----


@pytest.fixture
def exchange(load_module):
    """`exchange(names, **options)`: what each of the hosts, on loopback addresses of their own, finds of the others."""
    module = load_module("preflight_pair")
    base = free_ports(9)

    def run(names, missing=(), **options):
        hosts = [
            {"name": name, "address": f"127.0.9.{n}", "port": base[n], "rdma": options.pop(name, "")}
            for n, name in enumerate(names, 1)
        ]
        found, threads = {}, []
        for host in hosts:
            if host["name"] in missing:
                continue
            given = {
                **{
                    "host": host["name"],
                    "hosts": hosts,
                    "port": base[0],
                    "rounds": list(range(1, len(names))),
                },
                **{"mtu": 1500, "streams": 1, "packets": 20, "seconds": 0.3, "passes": 1, "patience": 3.0},
                **options,
            }

            def one(given=given):
                found[given["host"]] = module.Exchange(given).run()

            threads.append(threading.Thread(target=one))
        for number, thread in enumerate(threads):
            thread.start()
            time.sleep(0.2 * number)  # they never begin at once
        for thread in threads:
            thread.join(60)
        return found

    return run


def free_ports(count):
    """Below the ports that the kernel gives to outgoing connections: an earlier test's may still hold one of those."""
    with contextlib.ExitStack() as stack:
        found = []
        for port in random.sample(range(20000, 32000), 500):
            server = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                server.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"{count} free ports were not found")


def test_three_hosts_measure_all_their_ways(exchange):
    found = exchange(["a", "b", "c"])
    assert {(a, b) for a, ways in found.items() for b in ways} == {
        (a, b) for a in "abc" for b in "abc" if a != b
    }
    for ways in found.values():
        for one in ways.values():
            assert (
                set(one["ports"].values()) == {"open"} and one["mbit"] > 1
            )  # loopback, on a machine that may be busy
            assert abs(one["offset"]) < 0.05 and one["offset_error"] < 0.05
            if os.geteuid() == 0:
                assert one["lost"] == 0 and one["rtt_ms"] < 100 and one["mtu_arrives"]


def test_a_host_that_does_not_take_part_holds_nobody_up_for_long(exchange):
    start = time.monotonic()
    found = exchange(["a", "b", "c"], missing=["c"])
    assert time.monotonic() - start < 25
    assert found["a"]["b"]["mbit"] > 1 and "mbit" not in found["a"]["c"]
    assert set(found["a"]["c"]["ports"].values()) == {"refused"}


def test_a_ring_and_several_streams_and_passes(exchange):
    found = exchange(["a", "b", "c", "d"], rounds=[1], streams=3, passes=2)
    assert {host: list(ways) for host, ways in found.items()} == {
        "a": ["b"],
        "b": ["c"],
        "c": ["d"],
        "d": ["a"],
    }
    assert all(one["mbit"] > 1 for ways in found.values() for one in ways.values())


def test_a_stranger_is_greeted_and_no_more(load_module):
    """It would have perftest begin here, and pass for a peer's stream."""
    module = load_module("preflight_pair")
    base = free_ports(2)
    hosts = [{"name": name, "address": f"127.0.9.{n}", "port": base[n - 1]} for n, name in enumerate("ab", 1)]
    options = {"host": "a", "hosts": hosts, "port": 1, "streams": 1, "patience": 3.0, "seconds": 0.3}
    one = module.Exchange(options)
    with one.listen(base[0], one.serve):
        for address, answer in (("127.0.9.2", b"go\n"), ("127.0.9.77", b"")):
            with module.connect(("127.0.9.1", base[0]), address) as connection:
                assert module.read_line(connection) == module.GREETING
                got = b""
                with contextlib.suppress(OSError):  # a stranger has been let go by then
                    connection.sendall(b"hello 0 1\n")
                    got = connection.recv(3)
                assert got == answer
    assert one.heard == {"b"}


def test_perftest_measures_rdma_where_all_have_a_device(exchange, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # where the user nobody, too, may enter and write
        os.chmod(folder, 0o777)
        perftest_measures(exchange, Path(folder), monkeypatch)


def perftest_measures(exchange, tmp_path, monkeypatch):
    program = tmp_path / "ib_write_bw"
    program.write_text(
        f"#!/bin/sh\nfor last; do :; done\nid -u >> {tmp_path}/ids\n"
        "case $last in --report_gbits) exec sleep 60;; esac\n"
        "echo '#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]'\n"
        "echo ' 65536      543210           0.00               97.21              0.185'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = exchange(["a", "b"], a="rxe0", b="rxe0")
    assert found["a"]["b"]["rdma_gbit"] == found["b"]["a"]["rdma_gbit"] == 97.21
    users = set((tmp_path / "ids").read_text().split())
    assert users == {str(os.geteuid() or 65534)}, "a peer's words reach a program of root's"
    program.unlink()
    found = exchange(["a", "b"], a="rxe0", b="rxe0")
    assert "apt-get install perftest" in found["a"]["b"]["rdma_note"]


def test_echo_requests_have_the_sum_that_rfc_1071_wants():
    for size in (84, 1500, 1499):
        packet = echo.echo_request(77, 3, size)
        assert len(packet) == size - 20  # IPv4's header is the kernel's
        assert echo.checksum(packet + bytes(len(packet) % 2)) == 0


def test_a_cure_on_several_hosts_names_each_ones_interface():
    names = {"node1": "enp3s0", "node2": "eno1", "node3": "enp3s0"}
    facts = {host: {"survey": {"link": {"name": name}}} for host, name in names.items()}
    facts = {host: {**fact, "run": {}} for host, fact in facts.items()}
    assert preflight_network._on_each(Cluster(facts, Limits()), list(names), "ip link show {interface}") == (
        "ansible node1,node3 -b -a 'ip link show enp3s0'; ansible node2 -b -a 'ip link show eno1'"
    )


def test_the_owners_lines_that_lead_a_name_elsewhere(load_module):
    """Not ours, not comments, nor those of the loopback, whose names the role identity takes away."""
    text = (
        "\n127.0.1.1 node2\n# 10.0.0.8 node2\n10.0.0.9 printer node2.lan # mine\n10.77.0.12 node2\nfd00::2 node2\n"
        "# BEGIN trainyard\n10.77.0.13 node3\n10.0.0.7 node1\n# END trainyard\n10.0.0.6 node1\n10.0.0.5 NODE3\n"
    )
    hosts = [{"address": f"10.77.0.1{n}", "names": [f"node{n}", f"node{n}.lan"]} for n in (1, 2, 3)]
    found = load_module("preflight_survey").owners_lines(text, hosts)
    assert found == [
        {"number": 4, "text": "10.0.0.9 printer node2.lan # mine", "names": ["node2.lan"]},
        {"number": 11, "text": "10.0.0.6 node1", "names": ["node1"]},
        {"number": 12, "text": "10.0.0.5 NODE3", "names": ["node3"]},
    ]
