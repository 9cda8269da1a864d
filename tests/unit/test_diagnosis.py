"""What diagnose.yml says of a run, from what the hosts found."""

import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from plugins.filter.diagnosis import diagnosis

WAITS = ["DDP.finish (trainer/strategies/ddp.py:81)", "train_step (trainer/loop.py:158)"]
WAITS_TOO = ["all_reduce (torch/distributed/distributed_c10d.py:3252)", "exchange (trainer/loop.py:281)"]
COMPUTES = ["_engine_run_backward (torch/autograd/graph.py:979)", "train_step (trainer/loop.py:154)"]


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
    return {"changed": False, "diagnosis": found}


SILENT = {"unreachable": True, "msg": "ssh: connect to host: timed out"}
BUSY = [{"cpu": 0.9, "name": "folding", "pid": 4711}]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (
            {"a": host(rank(0)), "b": host(rank(1, state="T"))},
            r"Rank 1 on b was stopped by a signal .*`kill -CONT 101`",
        ),
        ({"a": host(rank(0)), "b": SILENT}, r"b does not answer, the others wait for its lease"),
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
        ({"a": host(active=False, state="finished")}, r"last word is finished\.$"),
        (
            {"a": host(state="stalled", status={"reason": "paused: etcd does not answer"}), "b": host()},
            r"a has paused: paused: etcd does not answer",
        ),
        (
            {
                "a": host(rank(0), state="starting", age=2, status={"reason": "tokenising x: 34%, 9 s left"}),
                "b": host(rank(1), state="starting", age=99),
            },
            r"makes ready for its first step: tokenising x: 34%, 9 s left\.$",
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
            {"a": host(rank(0)), "b": host(rank(1), interface={"rx_errors": 12})},
            r"All ranks wait in a collective, and b's eth0 loses packets \(rx_errors 12\)",
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
            {"a": host(rank(0), steps=(7, 9), age=0.1), "b": host(rank(1))},
            r"no rank is much slower than another",
        ),
        # A step of a minute, 40 s after the last one: not hung.
        ({"a": host(rank(0), compute=(60, 61)), "b": host(rank(1))}, r"The run goes on \(step 7 of 100\)"),
    ],
)
def test_the_sentence(results, words):
    sentence = diagnosis(results, "r").split("\n\n")[0]
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence


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


def test_what_nccl_misses_comes_before_a_guess_at_the_network():
    text = diagnosis({"a": host(rank(0), ras=RAS_SAYS), "b": host(rank(1), ras=RAS_SAYS)}, "r")
    sentence, _, machines, *_ = text.split("\n\n")
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
        assert module.ras(server.getsockname()) == RAS_SAYS
        thread.join()
    assert heard == [b"timeout 5\nverbose status\n"]
    assert module.ras(("127.0.0.1", 1)) == []


def test_what_the_sentence_rests_on():
    text = diagnosis({"a": host(rank(0)), "b": host(rank(1, state="T"), busy=BUSY), "c": SILENT}, "r")
    _, ranks, machines, mute = text.split("\n\n")
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
