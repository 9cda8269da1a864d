"""What preflight says of what hosts say: nothing of a healthy cluster, and of a fault its host and its cure."""

import contextlib
import copy
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from plugins.action import preflight_pair as pair_action
from plugins.action import preflight_verdict
from plugins.filter import preflight as filters

from preflight_base import CHECKS, FAIL, PASS, SKIP, WARN, Cluster, Limits, blamed, findings, odd
from preflight_report import (
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
                "managed": True,
            }
        ],
        "client": "10.77.0.1",
        "free_port": 40001,
        "time": 2e9,
    }


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
                "run_dir": "/var/lib/trainyard/runs/smoke-preflight",
                "processes": 1,
                "port_holder": None,
            },
            "error": "",
            "pairs": {other: way(other) for other in nodes if other != name},
            "outside": {"29500": "closed", "40001": "closed"},
            "clock": [0.0, 0.25],
        }
        for name in nodes
    }


STEPS = {"result": PASS, "message": "2 steps on 3 ranks"}


def cluster(facts, steps=STEPS, **limits):
    return Cluster(
        facts, Limits(ansible="ansible -i inv", site="ansible-playbook -i inv site.yml", **limits), steps
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
    "duplicate host key": ([("node3", "survey.host_keys", ["key-of-node1"])], "host_key", FAIL, "node1 node3", "same key", "ssh-keygen -A"),
    "address on no interface": ([("node2", "survey.interfaces", [])], "address", FAIL, "node2", "on no interface", "--tags network -l node2"),
    "127.0.1.1": ([("node2", "survey.names.node2", ["127.0.1.1"])], "names", FAIL, "node2", "127.0.1.1", "--tags identity -l node2"),
    "unknown name": ([("node1", "survey.names.node3", [])], "names", FAIL, "node1", "node3 is unknown", "--tags identity -l node1"),
    "route by another NIC": (
        [("node3", "survey.routes", {"10.77.0.11": {"dev": "wg0", "source": "10.9.0.3", "via": "", "error": ""}})],
        "route", FAIL, "node3", "by wg0 from 10.9.0.3", "ip route replace 10.77.0.11 dev eth0",
    ),
    "overlapping subnets": (
        [("node1", "survey.interfaces", lambda old: [*old, {"name": "wlan0", "enabled": True, "addresses": ["10.77.0.99/24"]}])],
        "subnets", WARN, "node1", "wlan0", "ip address del 10.77.0.99/24 dev wlan0",
    ),
    "other release": ([("node2", "run.release", "0.1-bb")], "release", FAIL, "node2", "0.1-bb", "--tags trainer"),
    "no release": ([("node2", "run.release", None)], "release", FAIL, "node2", "no trainer", "site.yml"),
    "other packages": ([("node2", "run.environment", {"digest": "e" * 64})], "packages", FAIL, "node2", "eeee", "--tags python_env"),
    "other Python": ([("node1", "survey.versions.python", "3.12.1")], "python", FAIL, "node1", "3.12.1", "--tags python_env"),
    "other torch": ([("node3", "survey.versions.torch", "2.12.0")], "torch", FAIL, "node3", "2.12.0", "--tags python_env"),
    "other NCCL": ([("node2", "survey.versions.nccl", "2.21.5")], "nccl", FAIL, "node2", "2.21.5", "--tags python_env"),
    "other kernel": ([("node2", "survey.versions.kernel", "6.12.1")], "kernel", WARN, "node2", "6.12.1", "dist-upgrade"),
    "other driver": ([("node2", "survey.versions.driver", "570.1")], "driver", WARN, "node2", "570.1", "--tags nvidia"),
    "full disk": ([("node2", "survey.disk.free", 10**9)], "disk", FAIL, "node2", "1.0 of 500.0 GB", "du -sh"),
    "disk read-only": ([("node2", "survey.disk.read_only", True)], "disk", FAIL, "node2", "reading alone", "du -sh"),
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
        [("node1", "survey.gpu.processes", [{"gpu": 0, "pid": 9, "kind": "G", "name": "Xorg", "run": False}])],
        "gpu_memory", WARN, "node1", "Xorg", "multi-user.target",
    ),
    "foreign GPU process": (
        [("node1", "survey.gpu.processes", [{"gpu": 0, "pid": 99, "kind": "C", "name": "ollama", "run": False}])],
        "gpu_memory", WARN, "node1", "ollama (process 99", "kill 99",
    ),
    "memory left over": ([("node1", "survey.gpu.gpus.0.memory.used", "900")], "gpu_memory", WARN, "node1", "900 MiB", "fuser"),
    "ECC": ([("node3", "survey.gpu.gpus.0.ecc.errors.uncorrected.volatile.total", "3")], "gpu_health", FAIL, "node3", "3 uncorrected", "gpu-reset"),
    "row remapping": ([("node3", "survey.gpu.gpus.0.remapped_rows.pending", "Yes")], "gpu_health", FAIL, "node3", "pending", "gpu-reset"),
    "throttled": ([("node3", "survey.gpu.gpus.0.clocks_throttle_reasons.active", "0x0000000000000040")], "gpu_health", WARN, "node3", "heat", "TEMPERATURE"),
    "hard Xid": ([("node3", "survey.gpu.xids", [{"bus": "0000:3b:00", "xid": 79, "text": "GPU has fallen off the bus"}])], "gpu_health", FAIL, "node3", "79", "reboot"),
    "soft Xid": ([("node3", "survey.gpu.xids", [{"bus": "0000:3b:00", "xid": 13, "text": ""}])], "gpu_health", WARN, "node3", "13", "reboot"),
    "half the lanes": ([("node2", "survey.gpu.gpus.0.pcie.link.width.current", "8")], "pcie", WARN, "node2", "8 of 16", "PCIE"),
    "half duplex": ([("node2", "survey.link.duplex", "half")], "link", WARN, "node2", "half duplex", "ethtool eth0"),
    "slow interface": (
        [("node2", "survey.link.speed", 10), *((a, f"pairs.{b}.mbit", 9.4) for a, b in (("node1", "node2"), ("node3", "node2"), ("node2", "node1"), ("node2", "node3")))],
        "link", WARN, "node2", "10 Mbit/s", "ethtool eth0",
    ),
    "other MTU": (
        [("node2", "survey.link.mtu", 1400), *((a, "pairs.node2.mtu_arrives", False) for a in ("node1", "node3"))],
        "mtu", FAIL, "node2", "1400", "mtu 1500",
    ),
    "switch without jumbo frames": (
        [*((a, "survey.link.mtu", 9000) for a in NODES), *((a, f"pairs.{b}.mtu_arrives", False) for a, b in (("node1", "node3"), ("node2", "node3"), ("node3", "node1"), ("node3", "node2")))],
        "mtu", FAIL, "node3", "9000", "mtu 1500",
    ),
    "closed port": ([(a, "pairs.node2.ports.29500", "dropped") for a in ("node1", "node3")], "ways", FAIL, "node2", "29500): dropped from node1, node3", "--tags firewall -l node2"),
    "packets lost": ([*((a, f"pairs.{b}.lost", 4) for a, b in (("node1", "node2"), ("node2", "node1"), ("node2", "node3"), ("node3", "node2")))], "loss", WARN, "node2", "2.0 %", "ip -s -s link show eth0"),
    "many packets lost": ([("node1", "pairs.node2.lost", 50)], "loss", FAIL, "node1 node2", "25.0 %", "ip -s"),
    "latency": ([("node1", "pairs.node3.rtt_ms", 25.0), ("node2", "pairs.node3.rtt_ms", 26.0)], "latency", WARN, "node3", "25.0 ms", "ip -s"),
    "slow link": ([("node1", "pairs.node2.mbit", 94.0), ("node3", "pairs.node2.mbit", 93.0)], "bandwidth", WARN, "node2", "94.0 Mbit/s", "ethtool -S eth0"),
    "open to a stranger": ([("node2", "outside", {"29500": "open", "40001": "closed"})], "firewall", FAIL, "node2", "29500 is open", "--tags firewall -l node2"),
    "RDMA port down": ([("node2", "survey.rdma.0.state", "DOWN")], "rdma", FAIL, "node2", "mlx5_0/1 DOWN", "rdma link show"),
    "no subnet manager": ([("node2", "survey.rdma.0.state", "INIT")], "rdma", FAIL, "node2", "INIT", "start opensm"),
    "slow RDMA": ([("node1", "pairs.node2.rdma_gbit", 40.0), ("node3", "pairs.node2.rdma_gbit", 41.0)], "rdma_bandwidth", FAIL, "node2", "40.0 %", "rdma link show"),
}  # fmt: skip


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
