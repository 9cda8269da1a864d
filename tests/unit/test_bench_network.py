"""bench.yml: who measures whom, what programs answered, and what the report makes of it."""

import json
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import bench_report
import perftest
import preflight_report
import pytest

from plugins.action import bench_verdict
from plugins.filter import bench as rounds


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_every_way_is_measured_once_and_each_host_gets_one_stream_a_round(count):
    hosts = [{"name": f"n{i}", "address": f"10.77.0.{i}"} for i in range(count)]
    seen = {host["name"]: {"survey": {"rdma": []}} for host in hosts}
    ways = []
    for offset in rounds.bench_offsets(count):
        peers = [rounds.bench_peer(hosts, host["name"], offset, seen)["name"] for host in hosts]
        assert len(set(peers)) == count
        ways += [(host["name"], peer) for host, peer in zip(hosts, peers, strict=True)]
    assert len(ways) == len(set(ways)) == count * (count - 1)


def test_of_a_thousand_hosts_each_measures_ten():
    assert rounds.bench_offsets(1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


BURN = "trainyard-work-burn-0123abcd.service"


def asked(**more):
    return {"host_facts": {"release": "1", "active": [], "at_work": [], **more}}


@pytest.mark.parametrize(
    ("hosts", "seen", "found", "local", "word"),
    [
        (["a"], {}, {}, False, "two hosts or more"),
        (["a", "b"], {}, {}, True, "two hosts or more"),
        (["a", "b"], {"a": {"survey": 1}, "b": {"msg": "x\nno route"}}, {}, False, "b: no route. Cure that"),
        (
            ["a", "b"],
            {"a": {"survey": 1}, "b": {"survey": 1}},
            {"a": asked()},
            False,
            "b: the trainer is not deployed",
        ),
        (
            ["a", "b"],
            {"a": {"survey": 1}, "b": {"survey": 1}},
            {"a": asked(), "b": asked(active=["first"])},
            False,
            "run first is active",
        ),
        (
            ["a", "b", "c"],
            {key: {"survey": 1} for key in "abc"},
            {"a": asked(), "b": asked(at_work=[BURN]), "c": asked(at_work=["trainyard-bench.service", BURN])},
            False,
            f"b, c: {BURN} is at work, and each would spoil the other. Wait for its end, or stop it: "
            "ansible b,c -b -a 'systemctl stop trainyard-work-burn-*'",
        ),
    ],
)
def test_what_would_say_nothing_is_refused(hosts, seen, found, local, word):
    assert word in rounds.bench_refusal(hosts, seen, found, local)


def test_two_hosts_with_the_trainer_are_measured():
    seen = {"a": {"survey": 1}, "b": {"survey": 1}}
    left = asked(at_work=["trainyard-bench.service"])  # of a bench that was interrupted: the next one ends it
    assert rounds.bench_refusal(["a", "b"], seen, {"a": asked(), "b": left}, False) == ""


# ---- what programs answer ----


def test_of_iperf3_counts_what_arrived(load_module):
    module = load_module("bench_pair")
    answer = {
        "end": {
            "sum_sent": {"bits_per_second": 9e8, "retransmits": 3},
            "sum_received": {"bits_per_second": 8e8},
        }
    }
    assert module.sent(json.dumps(answer)) == {"mbit": 800.0, "retransmits": 3}


@pytest.mark.parametrize("answer", ['{"error": "unable to connect"}', "segfault", "{}", "[]"])
def test_what_iperf3_could_not_do_is_said(load_module, answer):
    module = load_module("bench_pair")
    with pytest.raises(module.Failure, match="iperf3"):
        module.sent(answer)


def test_delay_and_jitter_of_echoes(load_module, monkeypatch):
    module = load_module("bench_pair")
    times = [0.001, 0.003, 0.001, 0.002]
    monkeypatch.setattr(module, "echoes", lambda *_: (5, times))
    assert module.delays("a", "b", 5) == {"ms": 2.0, "ms_99": 3.0, "jitter_ms": 1.6667, "lost": 20.0}
    times.clear()
    assert module.delays("a", "b", 5) == {"ms": None, "ms_99": None, "jitter_ms": None, "lost": 100.0}
    times.append(0.001)
    assert module.delays("a", "b", 5)["jitter_ms"] == 0


def test_only_a_host_with_a_device_has_perftest_listen(load_module):
    module = load_module("bench_pair")
    assert "ib_" not in module.servers("10.77.0.11", "", 5201)
    both = module.servers("10.77.0.11", "mlx5_0", 5201)
    assert "ib_write_bw -d mlx5_0 -p 5202" in both and "ib_send_lat -d mlx5_0 -p 5203" in both
    assert "tclass" not in both
    assert "-p 5204 -n 2000 -s 64 -F --tclass=106" in module.servers("10.77.0.11", "mlx5_0", 5201, 106)


def test_what_listens_is_nobody_and_may_lock_memory(load_module, monkeypatch):
    """Of perftest, too: a peer's bytes reach it."""
    module, asked = load_module("bench_pair"), []
    monkeypatch.setattr(
        module.socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None)
    )
    module.listen(lambda words: asked.append(words) or (0, "", ""), "10.77.0.11", "mlx5_0", 5201, 60, 0)
    given = {one.removeprefix("--property=") for one in asked[-1] if one.startswith("--property=")}
    assert given >= {
        "DynamicUser=yes",
        "CapabilityBoundingSet=",
        "LimitMEMLOCK=infinity",
        "NoNewPrivileges=yes",
    }


def test_where_a_run_has_a_class_its_stream_is_in_it_and_messages_are_timed_in_and_outside_of_it(
    load_module, monkeypatch
):
    module, asked = load_module("bench_pair"), []

    class Asked:
        def __init__(self, command, **_):
            asked.append(" ".join(command))
            self.said = STREAM if command[0] == "ib_write_bw" else DELAY.format(3 * len(asked))

        def communicate(self, timeout):
            return self.said, None

    monkeypatch.setattr(module.subprocess, "Popen", Asked)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    found = module.rdma("mlx5_0", {"address": "10.77.0.12"}, 5201, 106)
    assert [("ib_write_bw" in one, "--tclass=106" in one) for one in asked] == [
        (False, False),
        (True, True),
        (False, False),
        (True, True),
        (False, True),
    ]
    assert (found["idle"]["us"], found["loaded"]["us"], found["marked"]["us"]) == (3.0, 9.0, 15.0)
    del asked[:]
    assert "marked" not in module.rdma("mlx5_0", {"address": "10.77.0.12"}, 5201)
    assert len(asked) == 3 and "tclass" not in " ".join(asked)


# perftest's lines, as test_perftests_tables has them.
STREAM = " 65536      150000           97.40              97.20              0.185"
DELAY = " 64      2000          1.02           9.70         {}        1.13     0.10     1.50     3.20"


def test_perftests_tables():
    heads = "#bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] t_stdev[usec] 99% 99.9%"
    line = " 64      2000          1.02           9.70         1.11        1.13     0.10     1.50     3.20"
    assert perftest.rdma_latency(f"{heads}\n{line}") == {"us": 1.11, "us_99": 1.5, "us_jitter": 0.1}
    assert perftest.rdma_latency("Couldn't connect") is None


# ---- the report ----


def way(mbit=940.0, idle=0.2, loaded=0.9, **more):
    return {
        "mbit": mbit,
        "retransmits": 0,
        "note": "",
        "idle": {"ms": idle, "ms_99": 2 * idle, "jitter_ms": idle / 10, "lost": 0.0},
        "loaded": {"ms": loaded, "ms_99": 2 * loaded, "jitter_ms": loaded / 4, "lost": 0.0},
        **more,
    }


def result(**changed):
    hosts = ["node1", "node2", "node3"]
    pairs = {a: {b: way() for b in hosts if b != a} for a in hosts}
    rows = [
        {
            "collective": name,
            "bytes": count,
            "seconds": count / 1e8 + 1e-4,
            "bus": count / (count / 1e8 + 1e-4),
        }
        for name in ("all_reduce", "broadcast")
        for count in (4096, 1 << 20, 64 << 20)
    ]
    collectives = {
        "backend": "gloo",
        "device": "cpu",
        "ranks": 3,
        "rows": rows,
        "ways": {host: {"lo": 9, "eth0": 10**8, "wlan0": 0} for host in hosts},
    }
    whole = {
        "time": 1.0,
        "seconds": 41.0,
        "hosts": hosts,
        "interfaces": dict.fromkeys(hosts, "eth0"),
        "layered": [],
        "pairs": pairs,
        "collectives": collectives,
        "failed": {},
        "before": None,
        "worse": [],
        **changed,
    }
    return {**whole, "figures": bench_report.figures_of(whole["pairs"], whole["collectives"])}


def test_the_report_of_a_healthy_cluster():
    told = bench_report.text(result())
    assert "940" in told and "0.20 (0.40) > 0.90 (1.80)" in told
    assert "Collectives over gloo, 3 ranks on cpu" in told and "64 MiB" in told
    assert "on all hosts by eth0 (100%)" in told and "QoS would change little" in told
    assert "0.020 > 0.225" in told and "Jitter at most: 0.02 ms idle, 0.225 ms under load (node1 to" in told
    assert "belongs on" not in told and "Worse" not in told and "RDMA" not in told


def test_bytes_that_leave_by_another_interface_are_found():
    found = result()
    found["collectives"]["ways"]["node2"] = {"eth0": 10, "wlan0": 10**8}
    assert "node2: wlan0 carried what belongs on eth0" in bench_report.text(found)


def test_small_packets_that_wait_behind_a_stream_are_found():
    found = result()
    found["pairs"]["node1"]["node2"] = way(loaded=25.0)
    assert "125.0 times (node1 to node2: 0.20 to 25.00 ms): whatever else crosses" in bench_report.text(found)


RDMA_IDLE = {"us": 1.1, "us_99": 1.5, "us_jitter": 0.15}
RDMA_LOADED = {"us": 4.0, "us_99": 9.0, "us_jitter": 0.57}


def test_rdma_has_a_table_where_it_is():
    found = result()
    rdma = {"gbit": 97.2, "idle": RDMA_IDLE, "loaded": RDMA_LOADED}
    found["pairs"]["node1"]["node2"]["rdma"] = rdma
    told = bench_report.text(found)
    assert "97.2, 1.1 (1.5) ± 0.15 > 4.0 (9.0) ± 0.57" in told
    assert "RDMA's jitter at most: 0.15 us idle, 0.57 us under load (node1 to node2)." in told
    assert "grows at most 3.6 times (node1 to node2: 1.1 to 4.0 us): QoS would change little." in told
    rdma["loaded"] = {**RDMA_LOADED, "us": 40.0}
    assert "36.4 times (node1 to node2: 1.1 to 40.0 us): a class of its own" in bench_report.text(found)


@pytest.mark.parametrize(
    ("marked", "worth"), [(40.0, "keeps the others apart"), (4.1, "makes no difference")]
)
def test_what_the_class_of_roce_is_worth_is_told(marked, worth):
    found = result()
    found["pairs"]["node1"]["node2"]["rdma"] = {
        "gbit": 97.2,
        "idle": RDMA_IDLE,
        "loaded": RDMA_LOADED,
        "marked": {**RDMA_LOADED, "us": marked},
    }
    told = bench_report.text(found)
    assert f"1.1 to 4.0 us, {marked} us in the class of roce_qos" in told and worth in told
    assert bench_report.figures_of(found["pairs"], {})["gbit"] == {"node1>node2": 97.2}


@pytest.mark.parametrize(
    ("carried", "stray"),
    [
        ({"bond0": 1000, "eth0": 520, "eth1": 490}, False),
        ({"bond0": 1000, "eth0.10": 1004, "eth0": 1008}, False),  # two layers
        ({"bond0": 950, "eth0": 1000}, False),  # a tunnel's own headers
        ({"bond0": 1000, "eth0": 300}, True),
        ({"bond0": 10, "eth0": 1000}, True),
        ({"eth0": 1000}, True),
    ],
)
def test_what_is_below_the_clusters_interface_is_no_other_way(carried, stray):
    found = result()
    found["collectives"]["ways"] = {"node1": {**carried, "lo": 7}}
    found["interfaces"]["node1"], found["layered"] = "bond0", ["node1"]
    told = bench_report.text(found)
    assert ("carried what belongs on bond0" in told) is stray
    assert stray or "by bond0 (100%)" in told
    if len(carried) > 1:  # of a card, whatever goes by another one is astray
        found["layered"] = []
        assert "carried what belongs on bond0" in bench_report.text(found)


def test_collectives_that_failed_say_so_as_the_task_registers_them():
    """With failed_when, as the role's task has it, Ansible registers failed: false whatever came of it."""
    fault = bench_verdict.collectives_fault
    assert fault({"failed": False, "rc": 1, "msg": "lost a peer\n"}) == "lost a peer"
    assert fault({"unreachable": True}) == "no reason given"
    for well in ({}, {"skipped": True}, {"failed": False, "text": ""}):
        assert fault(well) == ""


def test_a_port_that_is_not_the_first_is_named_to_perftest():
    for command in (perftest.rdma_command, perftest.latency_command):
        assert command("mlx4_0", 5202)[:5] == [command("x", 1)[0], "-d", "mlx4_0", "-p", "5202"]
        assert command("mlx4_0:2", 5202, "10.0.0.2")[1:7] == ["-d", "mlx4_0", "-i", "2", "-p", "5202"]


def test_what_failed_is_told_with_its_reason():
    found = result(failed={"node3": "collectives: lost a peer"})
    found["pairs"]["node1"]["node2"] = {"peer": "node2", "note": "iperf3: unable to connect"}
    told = bench_report.text(found)
    assert "node1 to node2: iperf3: unable to connect" in told and "node3: collectives: lost a peer" in told
    assert "failed" in told
    ElementTree.fromstring(bench_report.picture(found))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"mbit": {"node1>node2": 500.0}}, "node1>node2"),
        ({"rtt_ms": {"node1>node2": 5.0}}, "node1>node2"),
        ({"loaded_ms": {"node1>node2": 9.0}}, "node1>node2"),
        ({"bus": {"all_reduce of 64 MiB": 100.0}}, "all_reduce of 64 MiB"),
    ],
)
def test_what_got_worse_is_named(change, key):
    before = result()
    now = {**before["figures"], **{name: {**before["figures"][name], **new} for name, new in change.items()}}
    assert preflight_report.worse_than(before["figures"], before, set(before["hosts"])) == []
    worse = preflight_report.worse_than(now, before, set(before["hosts"]))
    assert [name for name, _ in worse] == [key]
    told = bench_report.text(result(before=before, worse=worse))
    assert "Worse than the best so far" in told and key.replace(">", " to ") in told


def test_the_picture_is_whole_and_names_cannot_break_it():
    found = result()
    found["hosts"][0] = '<a&"b'
    found["pairs"] = {'<a&"b': {"node2": way()}, "node2": {'<a&"b': way(mbit=10.0)}}
    tree = ElementTree.fromstring(bench_report.picture(found))
    texts = [one.text for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert '<a&"b' in texts and "940" in texts and "all_reduce" in texts


def test_many_hosts_are_told_by_their_slowest_ways():
    hosts = [f"n{i}" for i in range(20)]
    pairs = {a: {hosts[(i + 1) % 20]: way(mbit=100.0 + i)} for i, a in enumerate(hosts)}
    told = bench_report.text(result(hosts=hosts, pairs=pairs, interfaces={}))
    assert "the slowest:\nn0 to n1: 100" in told and "n19 to n0" not in told


@pytest.mark.parametrize(
    ("faults", "tries"), [([], 1), (["control socket has closed unexpectedly"] * 2, 3), (["no route"], 1)]
)
def test_a_server_that_lets_somebody_else_go_is_asked_again(load_module, monkeypatch, faults, tries):
    module = load_module("bench_pair")
    left, asked = list(faults), []

    def stream(*args):
        asked.append(args)
        if left:
            raise module.Failure(f"iperf3: {left.pop()}")
        return {"mbit": 9.0}

    monkeypatch.setattr(module, "stream", stream)
    monkeypatch.setattr(module, "delays", lambda *_: {"ms": 1.0})
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    if "no route" in faults:
        with pytest.raises(module.Failure, match="no route"):
            module.tcp("10.0.0.1", {"address": "10.0.0.2"}, 5201, 1, 1)
    else:
        assert module.tcp("10.0.0.1", {"address": "10.0.0.2"}, 5201, 1, 1) == {
            "idle": {"ms": 1.0},
            "mbit": 9.0,
        }
    assert len(asked) == tries
