"""What diagnose.yml says of a run, from what the hosts found."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

from plugins.action import tell
from plugins.filter.cluster_status import run_chosen
from plugins.filter.diagnosis import behind, diagnosis, whole_stacks
from plugins.module_utils import rdma_ports
from trainer import collectives
from trainer.collectives import newest

WAITS = ["DDP.finish (trainer/strategies/ddp.py:81)", "train_step (trainer/loop.py:158)"]
WAITS_BY_HOST = [
    "wait (threading.py:327)",
    "result (concurrent/futures/_base.py:451)",
    "wait (trainer/sums.py:93)",
    "finish (trainer/strategies/ddp.py:88)",
]
IN_TURN = ["exchange (trainer/sums.py:138)", "_sum_between (trainer/compress.py:124)"]
WAITS_TOO = ["all_reduce (torch/distributed/distributed_c10d.py:3252)", "exchange (trainer/loop.py:281)"]
ON_CARD = [
    "synchronize (torch/cuda/streams.py:105)",
    "now (trainer/loop.py:370)",
    "train_step (trainer/loop.py:190)",
]
COMPUTES = ["_engine_run_backward (torch/autograd/graph.py:979)", "train_step (trainer/loop.py:154)"]

RAS_SAYS = """NCCL version 2.27.3 compiled with CUDA 12.8
Job summary
===========
  Nodes  Processes
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 10.77.0.12 managing GPU 5

Warnings
========

#0-0 MISMATCH
  Rank 0 has launched up to operation 6650
""".splitlines()


SPENT = {
    "compute": [0.2, 0.4],
    "compression": [0.0, 0.0],
    "optimizer": [0.1, 0.1],
    "waiting": [0.2, 0.0],
    "wire": 1.5,
}
CODES = {
    "compute": [7.0, 4.0],
    "compression": [1.0, 4.0],
    "optimizer": [0.1, 0.1],
    "waiting": [0.0, 0.0],
    "wire": 0.5,
}
SLOWLY = {"steps": (7, 9), "age": 0.1, "compute": (0.2, 0.4), "status": {"parts": SPENT}}


def rank(number, stack=WAITS, **facts):
    return {
        "rank": number,
        "pid": 100 + number,
        "state": "S",
        "cpu": 0.0,
        "rss_bytes": 1 << 30,
        "stack": stack,
        "said": "",
        "silent_seconds": 40.0,
        **facts,
    }


def host(*ranks, steps=(7, 7), age=40.0, compute=(1.0, 1.0), active=True, state="running", **facts):
    status = {
        "state": state,
        "step": steps[1],
        "steps": 100,
        "world_size": 2,
        "compute_seconds": list(compute),
    }
    found = {
        "run": "r",
        "late": [],
        "budget": 4.0,
        "active": active,
        "status": status | facts.pop("status", {}),
        "steps": list(steps),
        "age": age,
        "seconds": 2.0,
        "ranks": list(ranks),
        "interface": {"name": "eth0", "rx_bytes": 5000, "tx_bytes": 5000, "rx_errors": 0}
        | facts.pop("interface", {}),
        "kernel": [],
        "gpus": [],
        "busy": [],
        "load": 1.0,
        "cpus": 4,
        **facts,
    }
    known = {"time": 1000.0, "active": ["r"] if active else [], "runs": {"r": found["status"]}}
    return {"changed": False, "host_status": known, "diagnosis": found}


OF_BEFORE = {
    "parts": {"compute": [0.2, 0.2], "waiting": [0.0, 0.0], "wire": 1.2, "rest": 0.1}
}  # by an older release
PORT = [{"name": "mlx5_0 port 1", "state": "ACTIVE"}]
SILENT = {"unreachable": True, "msg": "ssh: connect to host: timed out"}
LEFT_OUT = host(state="stalled", age=0.5, status={"world_size": 3, "reason": "c is left out of the run"})
BUSY = [{"cpu": 0.9, "name": "folding", "pid": 4711}]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (
            {"a": host(rank(0)), "b": host(rank(1, state="T"))},
            r"Rank 1 on b was stopped by a signal .*`kill -CONT 101`",
        ),
        (
            {"a": host(rank(0)), "b": SILENT},
            r"b does not answer, the others go on without it once a lease of 10 s",
        ),
        (
            {"a": host(rank(0)), "b": {"failed": True, "msg": "Task failed: Timed out after 30 second(s)."}},
            r"^b does not answer, the others .*: it lets us in, and nothing comes of it: see its disks",
        ),
        (
            {"a": host(rank(0)), "b": SILENT, "c": host(rank(1, COMPUTES, cpu=0.99))},
            r"Rank 1 on c has not come to where 1 wait for it",
        ),
        (
            {"a": host(rank(0), state="starting", status={"world_size": None}), "b": SILENT},
            r"b does not answer",
        ),
        (
            {
                "a": host(state="stalled", status={"reason": "paused: etcd at a:1 does not answer"}),
                "b": SILENT,
            },
            r"^b does not answer, a has paused \(paused: etcd at a:1 does not answer\): see whether the machine is on",
        ),
        # An old rank that has yet to end is none of the attempt's.
        (
            {"a": host(rank(1), age=50.0), "b": SILENT, "c": host(rank(1))},
            r"b does not answer, the others go on",
        ),
        ({"a": host(rank(0)), "b": LEFT_OUT, "c": host(rank(1, COMPUTES))}, r"Rank 1 on c has not come"),
        (
            {"a": host(rank(0), steps=(7, 9), age=0.1, status={"world_size": 1}), "b": SILENT, "c": LEFT_OUT},
            r"The run goes on \(step 9 of 100\) without b \(does not answer\); c \(c is left out of the run\), and",
        ),
        (
            {"a": host(rank(0), steps=(7, 9), age=0.1), "b": SILENT},
            r"b does not answer, the run goes on on a",
        ),
        ({"a": SILENT, "b": SILENT}, r"None of a, b answers"),
        (
            {
                "a": host(active=False, state="failed", status={"reason": "out of memory\nmore"}),
                "b": host(active=False),
            },
            r"Run r is not active; its last word is failed: out of memory\. Go on with it: train\.yml -e run=r",
        ),
        ({"a": host(active=False, state="finished"), "b": SILENT}, r"last word is finished\.$"),
        (
            {"a": host(active=False), "b": SILENT},
            r"not active on a, where its last word is running; it may go on on b: see whether that machine is on\.$",
        ),
        (
            {"a": host(state="stalled", status={"reason": "paused: etcd does not answer"}), "b": host()},
            r"a has paused: paused: etcd does not answer",
        ),
        (
            {
                "a": host(
                    rank(0), state="starting", age=2, status={"reason": "tokenising x: 34 %, 9 s left"}
                ),
                "b": host(rank(1), state="starting", age=99),
            },
            r"makes ready for its first step: tokenising x: 34 %, 9 s left\.$",
        ),
        # It is written once, and may take long; a rank that waits is behind no other for that.
        (
            {
                "a": host(rank(0, COMPUTES), state="starting", status={"reason": "loading the model"}),
                "b": host(rank(1, ["read (load.py:3)"], state="D"), state="starting", age=50.0),
            },
            r"step: loading the model \(said 40 s ago\); rank 1 on b is waiting for a disk in read \(load\.py:3\)\.$",
        ),
        (
            {
                "a": host(rank(0), state="starting", status={"reason": "loading the model"}),
                "b": host(rank(1, ["read (load.py:3)"], state="D"), state="starting", age=50.0),
            },
            r"^Rank 1 on b has not come to where 1 wait for it; it is waiting for a disk in read",
        ),
        # One alone, and all at something of their own: no wire is to blame.
        (
            {"a": host(rank(0, COMPUTES, cpu=0.9), status={"world_size": 1})},
            r"^Rank 0 on a waits for no other rank; it is computing in _engine_run_backward .*: see its stack above;",
        ),
        (
            {"a": host(rank(0, [])), "b": host(rank(1, ["read (load.py:3)"], state="D"))},
            r"^Rank 1 on b \(and 1 more\) waits for no other rank; it is waiting for a disk in read .*dmesg",
        ),
        # Over NCCL the main thread waits for its card; and what has no stack may wait for others.
        (
            {"a": host(rank(0, ON_CARD), ras=RAS_SAYS), "b": host(rank(1, ON_CARD), ras=RAS_SAYS)},
            r"^NCCL says: ",
        ),
        (
            {"a": host(rank(0, ON_CARD)), "b": host(rank(1, ON_CARD), interface={"rx_errors": 12})},
            r"^All ranks wait in a collective, and b's eth0 loses packets \(rx_errors 12\)",
        ),
        (
            {"a": host(rank(0, [])), "b": host(rank(1, []), interface={"rx_errors": 12})},
            r"b's eth0 loses packets",
        ),
        (
            {"a": host(rank(0, []), status={"world_size": 1})},
            r"^Rank 0 on a waits for no other rank; .* at a place that cannot be read: look again",
        ),
        (
            {"a": host(state="starting"), "b": host(state="starting")},
            r"no rank is: the hosts meet, or torch is being loaded",
        ),
        ({"a": host(rank(0)), "b": host()}, r"Rank 1 of 2 is not there"),
        (
            {"a": host(rank(0)), "b": host(rank(1, COMPUTES, cpu=0.99))},
            r"Rank 1 on b has not come to where 1 wait for it; it is computing in _engine_run_backward",
        ),
        (
            {"a": host(rank(0, WAITS_TOO)), "b": host(rank(1, ["read (data.py:3)"], state="D"))},
            r"Rank 1 on b .* waiting for a disk in read .*dmesg",
        ),
        (
            {
                "a": host(rank(0, WAITS_BY_HOST)),
                "b": host(rank(1, ["wait (threading.py:327)", "next (own.py:3)"])),
            },
            r"Rank 1 on b has not come to where 1 wait for it",
        ),
        (
            {"a": host(rank(0)), "b": host(rank(1), interface={"rx_errors": 12})},
            r"All ranks wait in a collective, and b's eth0 loses packets \(rx_errors 12\)",
        ),
        (
            {"a": host(rank(0), rdma=PORT), "b": host(rank(1), rdma=[PORT[0] | {"symbol_error": 3}])},
            r"All ranks wait in a collective, and b's mlx5_0 port 1 loses packets \(symbol_error 3\)",
        ),
        (
            {"a": host(rank(0), rdma=[PORT[0] | {"out_of_sequence": 21}]), "b": host(rank(1), rdma=PORT)},
            r"and a's mlx5_0 port 1 loses packets \(out_of_sequence 21\)",
        ),
        (
            {"a": host(rank(0), rdma=[PORT[0] | {"out_of_sequence": 20}]), "b": host(rank(1), rdma=PORT)},
            "a connection between them is lost",
        ),
        (
            {"a": host(rank(0), rdma=PORT), "b": host(rank(1), rdma=[PORT[0] | {"state": "INIT"}])},
            "b's mlx5_0 port 1 is INIT, where others' are ACTIVE: see its cable, and of InfiniBand the subnet manager",
        ),
        (
            {"a": host(rank(0), rdma=[PORT[0] | {"state": "DOWN"}]), "b": host(rank(1))},
            "a connection between them is lost",
        ),
        (
            {
                "a": host(rank(0), interface={"rx_bytes": 0}, rdma=[PORT[0] | {"rx_bytes": 0}]),
                "b": host(rank(1), interface={"rx_bytes": 0}, rdma=[PORT[0] | {"rx_bytes": 9000}]),
            },
            "is lost. Nothing arrives at a. playbooks",
        ),
        (
            {"a": host(rank(0)), "b": host(rank(1), interface={"tx_dropped": 90, "tx_packets": 4000})},
            r"b's eth0 loses packets \(tx_dropped 90\)",
        ),
        (
            {"a": host(rank(0)), "b": host(rank(1), interface={"rx_dropped": 2, "rx_packets": 9})},
            r"none is behind: a connection between them is lost",
        ),
        (
            {"a": host(rank(0)), "b": host(rank(1), interface={"rx_dropped": 30, "rx_packets": 90000})},
            r"none is behind: a connection between them is lost",
        ),
        (
            {"a": host(rank(0)), "b": host(rank(1), kernel=["eth0: Link is Down"])},
            r"b's kernel says: eth0: Link is Down",
        ),
        (
            {"a": host(rank(0)), "b": host(rank(1), interface={"rx_bytes": 0})},
            r"a connection between them is lost\. Nothing arrives at b\.",
        ),
        (
            {
                "a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)),
                "b": host(rank(1), busy=BUSY, age=0.2),
            },
            r"rank 1 on b is the slowest, 1\.50 s .*1\.00 s, because `folding` \(process 4711\) takes 90% of a core",
        ),
        (
            {"a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)), "b": host(rank(1), age=0.2)},
            r"nothing else runs there, so its processor or card is the slower one",
        ),
        (
            {
                "a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)),
                "b": host(rank(1), age=0.2, slowed=["HW Thermal Slowdown"]),
            },
            r"because a GPU there is slowed down \(HW Thermal Slowdown\): see its fan",
        ),
        (
            {
                "a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)),
                "b": host(rank(1), age=0.2, busy=BUSY, cpus=64, gpus=["0, 40 C"], slowed=["HW Slowdown"]),
            },
            r"because a GPU there is slowed down \(HW Slowdown\)",
        ),
        (
            {
                "a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)),
                "b": host(rank(1), age=0.2, busy=BUSY, cpus=64, gpus=["0, 40 C"]),
            },
            r"; little else runs there, so its processor or card",
        ),
        (
            {
                "a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)),
                "b": host(rank(1), age=0.2, busy=BUSY, cpus=4, gpus=["0, 40 C"]),
            },
            r"because `folding` ",
        ),
        (
            {
                "a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)),
                "b": host(rank(1), age=0.2, busy=[BUSY[0] | {"run": "other"}]),
            },
            r"because run other \(process 4711\) takes 90% of a core there: stop it \(playbooks/stop\.yml -e run=",
        ),
        # What a host has that takes no part is nobody's reason.
        (
            {
                "a": host(rank(0), **SLOWLY, interface={"speed": 1000}),
                "b": host(rank(1), **SLOWLY, interface={"speed": 1000}),
                "c": host(active=False, interface={"speed": 100, "rx_errors": 7}),
            },
            r"^The run goes on \(step 9 of 100\); the network takes 1\.50 s",
        ),
        (
            {
                "a": host(rank(0)),
                "b": host(rank(1)),
                "c": host(active=False, kernel=["sdb: I/O error"], interface={"rx_errors": 7}),
            },
            r"none is behind: a connection between them is lost",
        ),
        # Nor is what the kernel said an hour ago, where much goes over the network now.
        (
            {n: host(rank(i), interface={"rx_bytes": 9e6}, kernel=["I/O error"]) for i, n in enumerate("ab")},
            r"^All 2 ranks wait in a collective, and much goes over each host's network meanwhile",
        ),
        (
            {
                "a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5)),
                "b": host(rank(1), on_cards=[{"pid": 9, "name": "game", "memory": "900 MiB"}], slowed=["x"]),
            },
            r"because `game` \(process 9\) computes on a GPU there, too, with 900 MiB: end it",
        ),
        (
            {"a": host(rank(0), steps=(7, 9), age=0.1), "b": host(rank(1))},
            r"no rank is much slower than another",
        ),
        # By the network, and whose link is the slower one; a rank's own work is little beside it.
        (
            {"a": host(rank(0), **SLOWLY), "b": host(rank(1), **SLOWLY)},
            r"^The run goes on \(step 9 of 100\); the network takes 1\.50 s of a step's 2\.00 s: "
            r"docs/slow-networks\.md says what sends less; playbooks/bench\.yml, once no run is active, measures "
            r"every way\.$",
        ),
        (
            {n: host(rank(i), steps=(7, 9), age=0.1, status=OF_BEFORE) for i, n in enumerate("ab")},
            r"^The run goes on \(step 9 of 100\); the network takes 1\.20 s of a step's 1\.50 s",
        ),
        (
            {
                "a": host(rank(0), **SLOWLY, interface={"speed": 1000}),
                "b": host(rank(1), **SLOWLY, interface={"speed": 100}),
                "c": host(rank(2), **SLOWLY),
            },
            r"; b's eth0 is at 100 Mbit/s, others at 1,000: see its cable and port; the network takes 1\.50 s",
        ),
        (
            {
                "a": host(rank(0), **SLOWLY, interface={"speed": 1000}),
                "b": host(rank(1), **SLOWLY, interface={"speed": 100, "rx_errors": 7}),
            },
            r"; b's eth0 loses packets \(rx_errors 7\): see its cable and port; the network takes 1\.50 s",
        ),
        (
            {
                "a": host(
                    rank(0), **{**SLOWLY, "status": {"parts": SPENT, "advice": "the network takes 9% x"}}
                ),
                "b": host(rank(1), **SLOWLY),
            },
            r"; the network takes 9% x; playbooks/bench\.yml",
        ),
        (
            {
                "a": host(rank(0), **{**SLOWLY, "status": {"parts": {**SPENT, "wire": 0.2}}}),
                "b": host(rank(1)),
            },
            r"rank 1 on b is the slowest, 0\.50 s of own work a step where the fastest takes 0\.30 s",
        ),
        # One that computes less, for it codes for as much longer, is no slower than the other.
        (
            {
                n: host(rank(i), **{**SLOWLY, "compute": (7.0, 4.0), "status": {"parts": CODES}})
                for i, n in enumerate("ab")
            },
            r"no rank is much slower than another",
        ),
        # What counts as computing holds their waiting for each other.
        (
            {
                n: host(rank(i), steps=(7, 9), age=0.1, status={"parts": {"watched": False}})
                for i, n in enumerate("ab")
            },
            r"whether a rank is slower than another is not known",
        ),
        # A step of a minute, 40 s after the last one: not hung.
        ({"a": host(rank(0), compute=(60, 61)), "b": host(rank(1))}, r"The run goes on \(step 7 of 100\)"),
        (
            {n: host(rank(i), status={"parts": {**SPENT, "wire": 40.0}}) for i, n in enumerate("ab")},
            r"^The run goes on \(step 7 of 100\); the network takes 40\.00 s of a step's",
        ),
        # No word for longer than that, and yet much arrives everywhere: a meeting, or a checkpoint's state.
        (
            {n: host(rank(i), interface={"rx_bytes": 9e6}) for i, n in enumerate("ab")},
            r"^All 2 ranks wait in a collective, and much goes over each host's network meanwhile: it seems to go on",
        ),
        # Where one of several ranks of a host codes for all, the others wait for it.
        (
            {
                "a": host(
                    rank(0),
                    rank(1),
                    **{**SLOWLY, "compute": (4.0, 4.0), "status": {"parts": {**CODES, "ranks": ["a", "a"]}}},
                )
            },
            r"no rank is much slower than another",
        ),
    ],
)
def test_the_sentence(results, words):
    sentence = diagnosis(results, "r").split("\n\n")[-1]
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("results", "words"),
    [
        # A rank of theirs is neither missing nor waited for.
        (
            {"a": host(rank(0), steps=(7, 9), age=0.1, status={"world_size": 3})},
            r"^The run goes on \(step 9 of 100\), and no rank is much slower",
        ),
        (
            {"a": host(rank(0), steps=(7, 9), age=0.1, compute=(1.0, 1.5))},
            r"rank 1 on a host that was not asked is the slowest, 1\.50 s",
        ),
        (
            {"a": host(rank(0), rank(1, COMPUTES), status={"world_size": 3})},
            r"^The run stands, and whom it waits for is not to be seen without b, c, where nobody looked: .* -l\.$",
        ),
        ({"a": host(rank(0), state="starting", status={"world_size": None})}, r"^The run stands"),
        (
            {"a": host(active=False, status={"reason": "left out"})},
            r"not active on a, .* is running: left out; it may go on on b, c: ask there, too, without -l\.$",
        ),
        ({"a": host(active=False, state="finished")}, r"last word is finished\.$"),
        # What is to be seen is said all the same.
        ({"a": host(rank(0, state="T"), status={"world_size": 3})}, r"^Rank 0 on a was stopped by a signal"),
        ({"a": host(rank(0), rank(1, COMPUTES))}, r"Rank 1 on a has not come to where 1 wait for it"),
        ({"a": host(state="starting")}, r"no rank is: the hosts meet"),
    ],
)
def test_of_hosts_that_l_leaves_out_nothing_is_said_but_that(results, words):
    *_, left_out, sentence = diagnosis(results, "r", ["a", "b", "c"]).split("\n\n")
    assert re.search(words, sentence), sentence
    assert left_out.endswith("b, c: not asked (-l)")
    everybody = {"a": host(rank(0)), "b": host(rank(1)), "c": SILENT}
    assert diagnosis(everybody, "r", ["a", "b", "c"]) == diagnosis(everybody, "r")


@pytest.mark.parametrize(
    ("said", "tells"),
    [
        ("thermal_sys: Registered thermal governor 'step_wise'", False),
        ("mce: CPU0: Thermal monitoring enabled (TM1)", False),
        ("ata1: SATA link down (SStatus 0 SControl 300)", False),
        ("e1000e 0000:00:1f.6 eno1: NIC Link is Up 1000 Mbps Full Duplex", False),
        ("IPv6: ADDRCONF(NETDEV_CHANGE): eno1: link becomes ready", False),
        ("e1000e 0000:00:1f.6 eno1: NIC Link is Down", True),
        ("mlx5_core 0000:01:00.0 enp1s0f0np0: Link down", True),
        ("mce: [Hardware Error]: Machine check events logged", True),
        ("CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)", True),
        ("thermal thermal_zone0: acpitz: critical temperature reached, shutting down", True),
        ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", True),
        ("nfs: server node1 not responding, still trying", True),
    ],
)
def test_what_the_kernel_says_that_explains_something(load_module, said, tells):
    line = f"2026-11-27T03:00:00+00:00 node1 kernel: {said}"
    assert load_module("diagnose_host").telling([line]) == [line] * tells


def test_a_link_that_came_up_again_as_at_each_boot_explains_nothing(load_module):
    words = ["eno1: Link is Down", "eno2: Link is Down", "eno1: Link is Up - 1Gbps/Full", "Out of memory: x"]
    lines = [f"host kernel: r8169 0000:03:00.0 {one}" for one in words]
    assert load_module("diagnose_host").telling(lines) == [lines[1], lines[3]]
    assert load_module("diagnose_host").telling([*lines, lines[0]]) == [lines[1], lines[3], lines[0]]


def group(sequence, name="0", ranks=(0, 1, 2), started=-1, desc="default_pg", op="gloo:all_reduce"):
    known = {"name": name, "desc": desc, "ranks": list(ranks), "op": op, "sizes": [[64, 2]]}
    return {**known, "sequence": sequence, "started": started}


def come(*groups):
    """Ranks, each with its groups."""
    return [rank(number, groups=list(own)) for number, own in enumerate(groups)]


def test_who_has_begun_the_fewest_collectives_is_waited_for():
    ranks = come([group(57)], [group(56)], [group(58)])
    assert {number: lag["waiting"] for number, lag in behind(ranks).items()} == {1: [0, 2]}
    # All frames look as if all waited.
    sentence = diagnosis({"a": host(*ranks), "b": host()}, "r").split("\n\n")[-1]
    assert "Rank 1 on a has not come to where 2 wait for it" in sentence
    assert (
        "of the collectives of all ranks it has begun 56, where ranks 0, 2 came to 58, gloo:all_reduce of 64x2 elements"
        in sentence
    )
    stopped = [ranks[0], {**ranks[1], "state": "T"}, ranks[2]]
    sentence = diagnosis({"a": host(*stopped)}, "r").split("\n\n")[-1]
    assert (
        "was stopped by a signal" in sentence and "it has begun 56, where ranks 0, 2 came to 58" in sentence
    )


def test_who_hangs_in_saving_is_shown_whole_and_by_when_it_is_ended():
    saves = ["_write_all (trainer/checkpoint.py:160)", "_finish (trainer/checkpoint.py:140)"]
    joins = ["join (threading.py:1119)", "settle (trainer/checkpoint.py:120)", "main (trainer/cli.py:9)"]
    ranks = [rank(0), rank(1, stack=joins, threads={"save": saves})]
    told = diagnosis({"a": host(*ranks, state="saving")}, "r")
    assert told.split("\n\n")[1].splitlines() == [
        "Rank 1 on a, innermost first:",
        "  MainThread",
        *(f"    {frame}" for frame in joins),
        "  save",
        *(f"    {frame}" for frame in saves),
    ]
    assert "after half an hour (or twice timeout_seconds) without a sign of life its launcher ends it" in told
    told = diagnosis({"a": host(*ranks)}, "r")
    assert "see its stack above; after timeout_seconds its launcher ends it" in told
    assert "innermost first" not in diagnosis({"a": host(rank(0), rank(1))}, "r")


def test_of_a_ranks_threads_those_at_the_trainers_work_are_read(load_module, tmp_path):
    def thread(name, *places):
        frames = [{"name": "f", "short_filename": place, "line": 7} for place in places]
        return {"thread_name": name, "frames": frames}

    spy, said = tmp_path / "py-spy", tmp_path / "said"
    told = [
        thread("collectives", "threading.py", "trainer/collectives.py"),
        thread("log", "trainer/environment.py"),
        thread("MainThread", "trainer/loop.py"),
        thread("tqdm_monitor", "tqdm/_monitor.py"),
        thread("save", "trainer/checkpoint.py"),
    ]
    module = load_module("diagnose_host")

    def dump(words, code=0):
        said.write_text(words)
        spy.write_text(f"#!/bin/sh\ncat {said}; exit {code}\n")
        spy.chmod(0o755)
        return module.stacks(str(spy), 7, 30)

    assert dump(json.dumps(told)) == (["f (trainer/loop.py:7)"], {"save": ["f (trainer/checkpoint.py:7)"]})
    assert dump("", code=1) == dump("[]") == dump("no JSON") == ([], {})


SPY = """#!/bin/sh
# Answers for the ranks below 6 alone, as long after it was asked as it may take to read a stack.
grep -qz '^RANK=[0-5]$' "/proc/$5/environ" || sleep 987
sleep 1
echo '[{"thread_name": "MainThread", "frames": [{"name": "f", "short_filename": "trainer/loop.py", "line": 7}]}]'
"""


def soon_gone(command, seconds=20):
    """Whether no process has this command line: one that was killed is there until the kernel comes to it."""
    end = time.monotonic() + seconds
    while subprocess.run(["pgrep", "-fx", command], check=False, stdout=subprocess.DEVNULL).returncode == 0:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_eight_ranks_are_looked_at_in_the_time_of_one_and_who_does_not_answer_is_named(run_module, tmp_path):
    """Six stacks take a second each, two hang: all in the 4 s that a host has, and nothing of it is left behind."""
    spy, opt = tmp_path / "env/bin/py-spy", tmp_path / "opt/current"
    for path in (spy.parent, opt, tmp_path / "runs/a"):
        path.mkdir(parents=True)
    spy.write_text(SPY)
    spy.chmod(0o755)
    (opt / "environment").write_text(f"{tmp_path / 'env'}\n")
    (tmp_path / "runs/a/status.json").write_text('{"state": "running", "step": 3}')
    place = {"TRAINYARD_RUN_DIR": str(tmp_path / "runs/a")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", "train"],
            env={**os.environ, **place, "RANK": str(number)},
        )
        for number in range(8)
    ]
    places = {"opt_dir": str(tmp_path / "opt"), "state_dir": str(tmp_path), "address": "127.0.0.1"}
    try:
        result = run_module("diagnose_host", keeper="process", **places)
        found = result["diagnosis"]
        left = not soon_gone("sleep 987")
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert (found["run"], found["active"], result["host_status"]["active"]) == ("a", True, ["a"])
    assert [bool(one["stack"]) for one in found["ranks"]] == [True] * 6 + [False] * 2, found
    assert found["late"] == ["rank 6's stack", "rank 7's stack"]
    assert found["seconds"] < 6, "one after another would take 16"
    assert not left


def test_looks_are_made_at_once_and_a_fault_of_one_is_raised(load_module):
    module, released = load_module("diagnose_host"), threading.Event()
    begin = time.monotonic()
    found = module.at_once({"a": lambda: 1, "b": released.wait, "c": lambda: released.wait(0.2) or 3}, 1.0)
    assert found == {"a": 1, "b": None, "c": 3} and 1.0 <= time.monotonic() - begin < 5
    released.set()
    with pytest.raises(ZeroDivisionError):
        module.at_once({"a": lambda: 1 // 0}, 9.0)


def test_a_command_that_hangs_is_left_with_all_that_it_began(load_module):
    module = load_module("host_status")
    runs = sys.modules["ansible.module_utils.host_runs"]
    begin = time.monotonic()
    hangs = ["sh", "-c", "sleep 986 & sleep 986"]
    assert runs.within(0.3, hangs) == (124, "", "no answer within 0 s")
    assert time.monotonic() - begin < 5 and module
    assert soon_gone("sleep 986")
    assert runs.within(30, ["sh", "-c", "echo a; echo b >&2; exit 3"]) == (3, "a\n", "b\n")
    assert runs.within(30, ["/nowhere"])[0] == 127


@pytest.mark.parametrize(
    ("driver", "answer", "found"),
    [
        (True, (0, "A100, 98, 20480, 81920, 71\n", ""), [["A100", "98", "20480", "81920", "71"]]),
        (True, (124, "", "no answer within 5 s"), None),
        (True, (18, "Failed to initialize NVML: Driver/library version mismatch\n", ""), None),
        (True, (127, "", "No such file or directory"), []),
        (False, (124, "", ""), []),
    ],
)
def test_cards_that_are_not_told_of_are_not_taken_for_none(load_module, monkeypatch, driver, answer, found):
    assert load_module("host_status")
    runs = sys.modules["ansible.module_utils.host_runs"]
    monkeypatch.setattr(runs, "cards", lambda: driver)
    monkeypatch.setattr(runs, "within", lambda seconds, command: answer)
    assert runs.gpus() == found


@pytest.mark.parametrize(
    ("asked", "active", "expected"),
    [
        ("", ["old"], "old"),
        ("", [], "new"),
        ("", ["old", "new"], ""),
        ("old", ["new"], "old"),
        ("starts", ["starts"], "starts"),
        ("../b", [], ""),
    ],
)
def test_a_host_takes_for_meant_what_all_together_do(load_module, asked, active, expected):
    runs = {"old": {"state": "failed", "updated": 1.0}, "new": {"state": "failed", "updated": 2.0}}
    module = load_module("diagnose_host")
    assert module.chosen({"active": active, "runs": runs}, asked) == expected
    known = {"time": 5.0, "active": active, "runs": runs}
    assert run_chosen({"a": {"host_status": known}}, asked) == expected
    assert module.chosen({"active": [], "runs": {}}, "") == ""


def test_a_host_that_took_another_run_for_the_one_that_is_meant_has_no_rank_in_it():
    other = host(rank(1), active=False, status={"state": "failed", "updated": 940.0, "step": 4})
    other["diagnosis"]["run"] = "older"
    other["host_status"]["runs"] = {"r": {"state": "running", "step": 7, "updated": 960.0}}
    text = diagnosis({"a": host(rank(0)), "b": other}, "r")
    assert "Rank 1 of 2 is not there" in text and "b: step 7, 40 s ago" in text
    assert whole_stacks({"b": other}, "r") == ""
    other["host_status"]["runs"] = {}
    assert "b: no status" in diagnosis({"a": host(rank(0)), "b": other}, "r")


def test_what_had_no_answer_is_told_and_a_rank_without_a_stack_is_not_the_first_to_blame():
    late = host(rank(1, stack=[]), rank(2, COMPUTES), late=["rank 1's stack", "the GPUs"])
    text = diagnosis({"a": host(rank(0)), "b": late}, "r")
    assert "\n  no answer within 4 s: rank 1's stack, the GPUs" in text
    assert "Rank 2 on b (and 1 more) has not come to where 1 wait for it" in text
    late["diagnosis"]["ranks"].pop()
    text = diagnosis({"a": host(rank(0)), "b": late}, "r")
    assert "Rank 1 on b has not come" in text and "look again" in text and "see its stack" not in text


def test_all_stacks_whole_go_to_a_file_that_is_named(monkeypatch, tmp_path, capsys):
    results = {"a": host(rank(0)), "b": host(rank(1, stack=[], threads={"save": COMPUTES}))}
    more = whole_stacks(results, "r")
    assert more.split("\n\n")[0].splitlines() == [
        "Rank 0 on a, innermost first:",
        "  MainThread",
        *(f"    {frame}" for frame in WAITS),
    ]
    assert more.split("\n\n")[1].splitlines()[1:4] == ["  MainThread", "    (no stack)", "  save"]
    file = tmp_path / "runs/r/diagnosis.txt"
    monkeypatch.chdir(tmp_path)

    def said(**arguments):
        action = tell.ActionModule.__new__(tell.ActionModule)
        action._task = types.SimpleNamespace(args={"text": "table", "what": "All", **arguments})
        monkeypatch.setattr(tell.ActionBase, "run", lambda *_: {})
        return action.run()["text"]

    assert said(more=more, file=str(file)) == "table\n\nAll: runs/r/diagnosis.txt"
    stamp, text = file.read_text().split("\n\n", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", stamp) and text == f"table\n\n{more}\n"
    assert said(more="", file=str(file)) == said() == "table"
    assert said(text="a\x1b]52;c;eA==\x07b") == "ab"  # what a run says moves no terminal
    (tmp_path / "full").touch()
    assert "could not be written to" in said(more=more, file=str(tmp_path / "full/diagnosis.txt"))


def test_who_waits_in_an_earlier_turn_of_an_exchange_is_not_to_blame():
    """The wire between 1 and 2 is out: they hang in the first turn, and rank 0 in the second. Each turn counts."""
    ranks = [{**one, "stack": IN_TURN} for one in come([group(304)], [group(302)], [group(302)])]
    dead = host(*ranks[2:], interface={"rx_bytes": 0})
    sentence = diagnosis({"a": host(ranks[0]), "b": host(ranks[1]), "c": dead}, "r").split("\n\n")[-1]
    assert "a connection between them is lost. Nothing arrives at c." in sentence
    # One that has not come to the exchange is.
    ranks[1] = {**ranks[1], "stack": COMPUTES}
    sentence = diagnosis({"a": host(*ranks)}, "r").split("\n\n")[-1]
    assert "Rank 1 on a has not come to where 2 wait for it" in sentence


def test_who_waits_in_another_group_is_not_to_blame():
    """Rank 1 is behind in the first group, since it waits for rank 2 in the second one."""
    ranks = come(
        [group(9)],
        [group(8), group(4, "1", (1, 2), desc="circle")],
        [group(8), group(3, "1", (1, 2), desc="circle")],
    )
    assert list(behind(ranks)) == [2]
    # In a ring of three groups there is no such one: all are named.
    ring = come(
        [group(2, "1", (0, 1)), group(1, "3", (2, 0))],
        [group(1, "1", (0, 1)), group(2, "2", (1, 2))],
        [group(1, "2", (1, 2)), group(2, "3", (2, 0))],
    )
    assert sorted(behind(ring)) == [0, 1, 2]


def test_over_nccl_the_card_counts_and_over_gloo_it_is_not_asked():
    assert list(behind(come([group(9, started=7)], [group(9, started=6)], [group(9, started=7)]))) == [1]
    assert behind(come([group(9, started=7)], [group(9)], [group(9, started=7)])) == {}
    assert behind(come([group(9)], [group(9)], [])) == {}
    # A group that a rank is not in, and names that two groups share.
    assert behind(come([group(9, ranks=(1, 2))], [group(8, ranks=(1, 2))], [group(8, ranks=(1, 2))])) == {}
    assert behind(come([group(9, ranks=(0, 1))], [group(9, ranks=(0, 1))], [group(8, ranks=(2, 3))])) == {}


def test_what_a_rank_wrote_is_read_with_care(load_module, tmp_path):
    module = load_module("diagnose_host")
    file = tmp_path / "logs/collectives-2.json"
    file.parent.mkdir()
    assert module.groups_of(str(tmp_path), 2, 7) == []
    good = {"rank": 2, "pid": 7, "groups": [group(3, ranks=(0, 2))]}
    file.write_text(json.dumps(good))
    assert module.groups_of(str(tmp_path), 2, 7) == good["groups"]
    assert module.groups_of(str(tmp_path), 2, 8) == []
    for bad in (
        "",
        "[]",
        "{}",
        '{"pid": 7, "groups": [{"name": "0"}]}',
        '{"pid": 7, "groups": {"a": 1}}',
        "\x00" * 99,
    ):
        file.write_text(bad)
        assert module.groups_of(str(tmp_path), 2, 7) == []
    file.write_text(json.dumps(good))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert module.groups_of(str(tmp_path), 2, 7) == []
    file.unlink()
    os.mkfifo(file)
    assert module.groups_of(str(tmp_path), 2, 7) == []


def record(number, name="0", op="nccl:all_reduce", p2p=False):
    return {
        "record_id": number,
        "is_p2p": p2p,
        "profiling_name": op,
        "input_sizes": [[number]],
        "pg_id": 0,
        "process_group": [name, "default_pg"],
    }


def test_the_recorder_is_asked_when_a_run_stands_longer_than_usual(monkeypatch, tmp_path):
    asked, sequence = [], [0]
    monkeypatch.setattr(
        collectives, "groups", lambda: [{"name": "0", "desc": "", "ranks": [0, 1], "sequence": sequence[0]}]
    )
    monkeypatch.setattr(collectives, "flight", lambda: asked.append(sequence[0]) or [])
    watch = collectives.Watch(tmp_path, 0)

    def stand(looks):
        """A new collective, then so many looks without one; whether the recorder was asked."""
        sequence[0] += 1
        before = len(asked)
        for _ in range(1 + looks):
            watch.look()
        return len(asked) - before

    assert [stand(looks) for looks in (0, 2, 3, 4, 5, 7, 9, 13)] == [0, 0, 0, 0, 0, 0, 0, 0]
    assert stand(99) == 1  # and once is enough
    assert stand(59) == 0 and stand(60) == 1
    words = json.loads((tmp_path / "logs/collectives-0.json").read_text())
    assert words["groups"][0]["sequence"] == sequence[0] and words["pid"] == os.getpid()


def test_the_flight_recorders_newest_entry_of_each_group_counts():
    """NCCL's recorder, by what torch documents of it: this machine has no card."""
    status = {"0": {"last_started_collective": "6", "last_completed_collective": "5"}}
    nccl = {"entries": [record(8), record(7), record(9, p2p=True)], "pg_status": status}
    gloo = {"entries": [record(3, "1", "gloo:broadcast")], "pg_status": status}
    assert newest([nccl, gloo, {}]) == {
        "0": {"op": "nccl:all_reduce", "sizes": [[8]], "started": 6, "completed": 5},
        "1": {"op": "gloo:broadcast", "sizes": [[3]]},
    }


def test_what_nccl_misses_comes_before_a_guess_at_the_network():
    text = diagnosis({"a": host(rank(0), ras=RAS_SAYS), "b": host(rank(1), ras=RAS_SAYS)}, "r")
    _, machines, *_, sentence = text.split("\n\n")
    assert "NCCL says: INCOMPLETE; Missing communicator data from 1 job process; Process 3487984" in sentence
    assert "NCCL's warnings: Rank 0 has launched up to operation 6650" in machines
    assert "Nodes  Processes" not in text


def test_dumps_of_the_flight_recorder_are_named_with_a_warning():
    text = diagnosis({"a": host(rank(0), flights=["/r/logs/flight-0"]), "b": host(rank(1))}, "r")
    assert "1 dumps like /r/logs/flight-0" in text and "pickled" in text


def test_nccls_watch_is_asked_by_its_own_words(load_module):
    module = load_module("diagnose_host")
    heard = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def answer():
            connection, _ = server.accept()
            with connection:
                heard.append(connection.recv(100))
                connection.sendall("\n".join(RAS_SAYS).encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert module.ras(30, server.getsockname()) == RAS_SAYS
        thread.join()
        assert module.ras(0.3, server.getsockname()) is None  # connected, and not a word
    assert heard == [b"timeout 29\nverbose status\n"]
    assert module.ras(30, ("127.0.0.1", 1)) == []


def test_each_runs_nccl_is_asked_where_it_answers(load_module):
    """Two runs on one host cannot share a port, and the second one's says nothing."""
    module = load_module("diagnose_host")
    assert module.ras_place([]) == module.ras_place([0]) == ("127.0.0.1", 28028)
    place = {"NCCL_RAS_ADDR": "127.0.0.1:28777"}
    with (
        subprocess.Popen(["sleep", "60"], env={**os.environ, **place}) as other,
        subprocess.Popen(["sleep", "60"]) as one,
    ):
        assert module.ras_place([one.pid, other.pid]) == ("127.0.0.1", 28777)
        assert module.ras_place([one.pid]) == ("127.0.0.1", 28028)
        one.kill()
        other.kill()


def test_what_the_sentence_rests_on():
    text = diagnosis({"a": host(rank(0)), "b": host(rank(1, state="T"), busy=BUSY), "c": SILENT}, "r")
    ranks, machines, mute, _ = text.split("\n\n")
    assert [line.split()[:3] for line in ranks.splitlines()[1:]] == [
        ["0", "a", "waiting"],
        ["1", "b", "stopped"],
    ]
    assert "a: step 7, 40 s ago; eth0 rx 0.0 Mbit/s  tx 0.0 Mbit/s; load 1.0 of 4" in machines
    assert "`folding` (process 4711) takes 90% of a core" in machines
    assert mute == "c: no answer: ssh: connect to host: timed out"


def test_a_rank_is_found_by_its_environment_and_its_command(load_module, tmp_path):
    module = load_module("diagnose_host")
    code = "import time; print(flush=True); time.sleep(60)"
    environment = {**os.environ, "RANK": "3", "TRAINYARD_RUN_DIR": str(tmp_path)}
    for words, expected in ((["train"], 3), (["compile"], None)):
        child = subprocess.Popen(
            [sys.executable, "-c", code, *words], env=environment, stdout=subprocess.PIPE
        )
        try:
            child.stdout.readline()
            assert module.rank_of(child.pid) == expected
            assert module.process(child.pid)["state"] in "SR"
        finally:
            child.kill()
            child.wait()
    assert module.process(child.pid) is None


def test_a_run_that_is_not_there_is_looked_at_all_the_same(run_module, tmp_path):
    found = run_module(
        "diagnose_host",
        run="a",
        keeper="process",
        opt_dir=str(tmp_path),
        state_dir=str(tmp_path),
        address="127.0.0.1",
        seconds=0.1,
    )["diagnosis"]
    assert (found["active"], found["ranks"], found["status"]) == (False, [], {})
    assert found["interface"]["name"] == "lo" and found["interface"]["rx_bytes"] >= 0


def test_what_an_interface_lost_meanwhile_is_told_of_any_run():
    text = diagnosis(
        {"a": host(rank(0), steps=(7, 9), age=0.1, interface={"rx_errors": 7}), "b": host(rank(1))}, "r"
    )
    assert "\n  eth0: rx_errors 7 meanwhile\n" in text and text.count("meanwhile") == 1


def test_of_rdma_ports_is_told_what_they_carry_and_lose(load_module, tmp_path):
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    for name, value in {
        "state": "4: ACTIVE",
        "counters/port_rcv_data": "500000",
        "counters/link_downed": "2",
        "hw_counters/out_of_sequence": "8",
        "hw_counters/lifespan": "10",
    }.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{value}\n")
    counted = rdma_ports.rdma_counters(str(tmp_path))
    assert counted == {"mlx5_0 port 1": {"rx_bytes": 2_000_000, "link_downed": 2, "out_of_sequence": 8}}
    grown = load_module("diagnose_host").grown(
        counted["mlx5_0 port 1"], {"rx_bytes": 1_000_000, "link_downed": 1, "out_of_sequence": 9}
    )
    assert grown == {"rx_bytes": 1_000_000, "link_downed": 1}  # a driver that was loaded again counts anew
    silent = {"name": "rxe0 port 1", "state": "INIT"}  # whose driver counts nothing
    text = diagnosis({"a": host(rank(0), steps=(7, 9), age=0.1, rdma=[PORT[0] | grown, silent])}, "r")
    assert "\n  mlx5_0 port 1 ACTIVE rx 4.0 Mbit/s\n  rxe0 port 1 INIT\n" in text
    assert "\n  mlx5_0 port 1: link_downed 1 meanwhile\n" in text


# As drivers of 550 to 580 write it.
PERFORMANCE = """
GPU 00000000:01:00.0
    Performance State                                  : P0
    Clocks Event Reasons
        Idle                                           : Not Active
        SW Power Cap                                   : Active
        HW Slowdown                                    : Active
            HW Thermal Slowdown                        : Active
            HW Power Brake Slowdown                    : Not Active
        Sync Boost                                     : Not Active
        SW Thermal Slowdown                            : Not Active
"""


def test_the_kernels_own_threads_are_known(load_module, monkeypatch):
    module = load_module("diagnose_host")
    assert not module.process(os.getpid())["of_kernel"]
    # As the kernel writes them: the seventh after the name is its flags.
    line = "9 (kswapd0) S 2 0 0 0 -1 2629696 0 0 0 0 10 20 " + "0 " * 30
    monkeypatch.setattr(module, "open", lambda *_, **__: io.StringIO(line), raising=False)
    assert module.process(9)["of_kernel"] and module.process(9)["ticks"] == 30


def test_why_cards_are_slow_and_who_else_is_on_them_is_asked(load_module, monkeypatch):
    module = load_module("diagnose_host")
    answers = {
        "-q": PERFORMANCE,
        "--query": "4711, /usr/games/one, 900 MiB\n[N/A], x, y\n12, python, 3 MiB\n",
    }
    monkeypatch.setattr(
        module,
        "within",
        lambda _, words: (0, next(out for key, out in answers.items() if words[1].startswith(key)), ""),
    )
    assert module.slowed(1) == ["HW Slowdown", "HW Thermal Slowdown"]
    assert module.others_on_cards(1) == [
        {"pid": 4711, "name": "one", "memory": "900 MiB"},
        {"pid": 12, "name": "python", "memory": "3 MiB"},
    ]
    monkeypatch.setattr(module, "within", lambda *_: (9, "No devices were found", ""))
    assert module.slowed(1) == module.others_on_cards(1) == []
