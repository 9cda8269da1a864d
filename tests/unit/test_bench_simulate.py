"""The simulator: steps worked out by hand, laws that hold whatever the hosts, and what docs/slow-networks.md says."""

import json
import math
import random
import subprocess
import sys
import timeit
from pathlib import Path

import pytest
import torch

from bench import cluster, simulate
from bench.measure import WAYS
from bench.simulate import BUCKET_BYTES, Host, Network, Work, step
from trainer import compress

ROOT = Path(__file__).resolve().parents[2]
FAST, SLOW = Host("fast", 300.0, 1e6), Host("slow", 100.0, 1e6)
WORK = Work(gradients=1_000_000, factors=50_000, sequence_length=100, batch_size=8, shares="even")
AT_ONCE = Network(latency=0.0)


def with_(one, **changes):
    return simulate.dataclasses.replace(one, **changes)


# ---- by hand ----


def test_even_shares_wait_for_the_slow_host_and_then_for_the_wire():
    """4 x 100 tokens take 4/3 and 4 s; each of two hosts sends all of the gradients once, 1 MB in 1 s."""
    found = step([FAST, SLOW], WORK, AT_ONCE)
    assert found.split == (4, 4) and found.sent == 1_000_000
    assert found.seconds == pytest.approx(5.0) and found.speed == pytest.approx(160.0)
    assert found.waiting == pytest.approx((1 - 4 / 3 / 5, 0.2))


def test_shares_by_speed():
    found = step([FAST, SLOW], with_(WORK, shares="auto"), AT_ONCE)
    assert found.split == (6, 2) and found.seconds == pytest.approx(2 + 1)
    assert step([FAST, SLOW], with_(WORK, shares="5,3"), AT_ONCE).split == (5, 3)


def test_the_slowest_link_sets_the_pace_of_the_ring():
    assert step([FAST, with_(SLOW, link=5e5)], WORK, AT_ONCE).seconds == pytest.approx(4 + 2)


def test_buckets_travel_while_backward_still_runs():
    """Two buckets of 0.5 s each: the first is ready in the middle of backward, two thirds of the step's second."""
    hosts = [Host("a", 100.0, 2 * BUCKET_BYTES)] * 2
    work = with_(WORK, gradients=2 * BUCKET_BYTES, batch_size=2)
    assert step(hosts, work, AT_ONCE).seconds == pytest.approx(2 / 3 + 0.5 + 0.5)
    # With two micro-batches a host, only the second one's backward: 1/3 s of its second, from 5/3 s on.
    work = with_(work, batch_size=4)
    assert step(hosts, work, AT_ONCE).seconds == pytest.approx(2 - 1 / 3 + 0.5 + 0.5)
    assert step(hosts, with_(work, comm="16bit"), AT_ONCE).seconds == pytest.approx(2 + 0.5)


@pytest.mark.parametrize(
    ("comm", "seconds"),
    [
        # Hops of 10 ms among four: 6 of a sum. Each way ends with one, of losses and times.
        ("exact", 1.5 + 0.06 + 0.06),
        ("16bit", 0.3 + 0.75 + (3 + 3) * 0.01 + 0.06),
        ("8bit", 0.4 + 1.5 * 1028 / 4096 + (3 + 3) * 0.01 + 0.06),
        (
            "powersgd",
            0.2 + 0.075 + 2 * (3 + 3) * 0.01 + 0.06 + 0.06,
        ),  # two codes, and a sum of what is no matrix
        # A tenth of: coding, a code of everything, and the sums of tokens.
        ("diloco", (0.5 + 1.5 * 1028 / 4096 + 0.06 + 0.06) / 10 + 0.06),
    ],
)
def test_each_way_of_four_hosts(comm, seconds):
    coding = {"16bit": 3e-7, "8bit": 4e-7, "powersgd": 2e-7, "diloco": 5e-7}
    hosts = [Host("one", 100.0, 1e6, rest=0.25, coding=coding)] * 4
    found = step(hosts, with_(WORK, comm=comm, sync_every=10), Network(latency=0.01))
    assert found.seconds == pytest.approx(0.25 + 2 + seconds, rel=1e-5)


def test_a_hidden_meeting_costs_what_the_round_cannot_hide():
    hosts = [Host("one", 100.0, 1e6)] * 2
    work = with_(WORK, comm="diloco", sync_every=3, overlap=2, batch_size=2)
    assert step(hosts, work, AT_ONCE).seconds == pytest.approx(1.0)
    work = with_(work, gradients=16_000_000)  # 4 s of code, 2 s of steps to hide it behind
    sent = 16_000_000 * 1028 / 4096 / 1e6
    assert step(hosts, work, AT_ONCE).seconds == pytest.approx(1 + (sent - 2) / 3, rel=1e-4)


def test_what_checkpoints_send_is_a_pause_however_well_meetings_are_hidden():
    """Three sums of 1 MB each, between two hosts, once in 10 steps: 0.3 s a step at 1 MB/s."""
    hosts = [Host("one", 100.0, 1e6)] * 2
    work = with_(WORK, comm="diloco", sync_every=50, overlap=49, batch_size=2)
    now, then = (step(hosts, with_(work, checkpoint_every=every), AT_ONCE) for every in (10, 0))
    assert now.seconds == pytest.approx(then.seconds + 0.3) and now.sent == then.sent + 300_000
    work = with_(work, comm="exact")
    assert step(hosts, with_(work, checkpoint_every=10), AT_ONCE) == step(hosts, work, AT_ONCE)


def test_hops():
    assert [Network(backend="gloo").sum_hops(n) for n in (2, 3, 1000)] == [2, 4, 1998]
    assert [Network(backend="nccl").sum_hops(n) for n in (2, 3, 8, 1000)] == [2, 4, 6, 20]


# ---- laws ----


def some_hosts(chance, **same):
    return [
        Host(
            f"host{number}",
            **{"speed": chance.uniform(50, 5000), "link": 10 ** chance.uniform(5, 9), **same},
            rest=chance.uniform(0, 0.1),
            coding=dict.fromkeys(WAYS, 10 ** chance.uniform(-10, -8)),
        )
        for number in range(chance.choice((2, 3, 5, 8)))
    ]


@pytest.mark.parametrize("comm", WAYS)
@pytest.mark.parametrize("seed", range(20))
def test_more_bandwidth_or_speed_and_less_latency_are_never_slower(comm, seed):
    chance = random.Random(seed)
    hosts = some_hosts(chance)
    work = with_(WORK, gradients=chance.randrange(10**5, 10**9), factors=10**5, batch_size=64, comm=comm)
    network = Network(latency=10 ** chance.uniform(-5, -2))
    now = step(hosts, work, network).seconds
    assert step([with_(one, link=2 * one.link) for one in hosts], work, network).seconds <= now
    assert step([with_(one, speed=2 * one.speed) for one in hosts], work, network).seconds <= now
    assert step(hosts, work, with_(network, latency=network.latency / 2)).seconds <= now
    assert step(hosts, work, with_(network, backend="nccl")).seconds <= now
    if comm == "diloco":
        assert step(hosts, with_(work, overlap=True), network).seconds <= now
    assert all(0 <= share < 1 for share in step(hosts, work, network).waiting)


@pytest.mark.parametrize("comm", WAYS)
@pytest.mark.parametrize("seed", range(5))
def test_without_a_network_to_wait_for_shares_by_speed_reach_the_sum(comm, seed):
    hosts = [
        with_(one, rest=0.0, coding={}, sending=0.0) for one in some_hosts(random.Random(seed), link=math.inf)
    ]
    total = sum(one.speed for one in hosts)
    found = step(hosts, with_(WORK, batch_size=20_000, shares="auto", comm=comm), AT_ONCE).speed
    assert 0.99 * total < found <= total * (1 + 1e-9)
    even = step(hosts, with_(WORK, batch_size=20_000, comm=comm), AT_ONCE).speed
    assert even == pytest.approx(len(hosts) * min(one.speed for one in hosts), rel=0.01)


@pytest.mark.parametrize("comm", WAYS)
def test_one_host_has_its_own_speed(comm):
    found = step([SLOW], with_(WORK, comm=comm), Network(latency=1.0))
    assert found.speed == pytest.approx(100.0) and found.sent == 0 and found.waiting == (0.0,)


# ---- beside what was measured ----


def recorded(off=1.0):
    """Two runs as bench.cluster records them, of three hosts whose steps take what the model says, times `off`."""
    cluster.RECORDED.clear()
    alone = [{"speed": speed, "rest": 0.1} for speed in (400.0, 200.0, 200.0)]
    rate = 20e6
    wire = (1_000_000 * 4 / 3 - cluster.BURST) / (rate / 8 * 0.94)
    hops = 2 * 4 * 1e-4
    for name, shares, seconds in (
        ("even", [4, 4, 4], 0.1 + 4 * 128 / 200 + wire + hops),
        ("auto", [6, 3, 3], 0.1 + 3 * 128 / 200 + wire + hops),
    ):
        row = {
            **{"tokens": 12 * 128, "wire_bytes": 1_333_333, "shares": shares, "world_size": 3},
            **{"step_seconds": seconds * off, "compute_seconds": 1.0, "comm_seconds": 0.5},
        }
        cluster.record(name, [row] * 5, alone, (0.8, 0.4, 0.4), rate, batch_size=12, balance=name)
    return json.loads(json.dumps(cluster.RECORDED))


def test_a_measurement_as_the_model_says_is_within():
    text, good = simulate.check(recorded(), coding={}, sending=0.0)
    assert good and text.count("| +0.0 | yes |") == 2


def test_the_labs_runs_are_as_simulated():
    """Those of docs/benchmarks.md: all within 10 %."""
    runs = json.loads((ROOT / "bench/cluster_results.json").read_text())
    # Seconds a byte, on that machine on that day.
    coding = {"exact": 0.0, "16bit": 3.54e-10, "8bit": 7.29e-10, "powersgd": 2.27e-9, "diloco": 1.24e-9}
    text, good = simulate.check(runs, coding=coding)
    assert len(runs) == 11 and good and "| no |" not in text, text


def test_a_measurement_that_differs_is_told():
    text, good = simulate.check(recorded(off=1.25), coding={}, sending=0.0)
    assert not good and text.count("| +25.0 | no |") == 2
    with pytest.raises(SystemExit, match="no run by exact"):
        simulate.check([{**run, "comm": "8bit"} for run in recorded()], coding={}, sending=0.0)


def test_what_sending_takes_is_what_a_run_measured():
    """Of a run behind a limit by itself; those of other tables have no such figure, and no limit."""
    runs = recorded()
    free = {**runs[1], "hosts": [{**host, "rate": None} for host in runs[1]["hosts"]]}
    with pytest.raises(SystemExit, match="sending"):
        simulate.check([*runs, free], coding={})
    with pytest.raises(SystemExit, match="without a limit"):
        simulate.check([{**runs[0], "sending": 0.0}, free], coding={})
    text, _ = simulate.check([*runs, {**free, "sending": 0.0}], coding={})
    assert text.count("| +0.0 | yes |") == 2
    text, good = simulate.check([runs[0], {**runs[1], "sending": 1e-6}, {**free, "sending": 0.0}], coding={})
    assert text.count("| +0.0 | yes |") == 1 and not good
    text, _ = simulate.check([*runs, {**free, "sending": 1e-6}], coding={})
    assert text.count("| +0.0 | yes |") == 0


def test_what_hosts_do_for_themselves_is_told_from_a_runs_steps():
    row = {
        **{"tokens": 1200, "shares": [2, 1], "world_size": 2, "rank_seconds": [2.0, 4.0]},
        **{"step_seconds": 5.0, "compute_seconds": 2.0, "comm_seconds": 2.5},
    }
    assert cluster.paces([row, row]) == [
        {"speed": 400.0, "rest": 0.5},
        {"speed": 100.0, "rest": 0.5},
    ]


def test_hosts_that_vary_wait_for_the_last_and_not_for_what_all_have_in_common():
    slow = with_(SLOW, rest=0.0, link=math.inf)
    steady = step([slow] * 3, WORK, AT_ONCE).seconds
    alike = step([with_(slow, steps=(0.8, 1.2))] * 3, WORK, AT_ONCE)
    assert alike.seconds == pytest.approx(steady)
    by_turns = [with_(slow, steps=one) for one in ((0.8, 1.2), (1.2, 0.8), (1.0, 1.0))]
    busy = (1 - step([slow] * 3, WORK, AT_ONCE).waiting[0]) * steady
    assert step(by_turns, WORK, AT_ONCE).seconds == pytest.approx(steady + 0.2 * busy)
    fast = [with_(slow, speed=1e4, steps=(0.5, 1.5)), with_(slow, steps=(1.0, 1.0))]  # never the last
    assert simulate.late(fast, [0.1, 10.0]) == 0


def test_who_hands_bytes_to_the_wire_computes_nothing_meanwhile():
    hosts = [with_(SLOW, rest=0.0, link=math.inf, sending=1e-8)] * 3
    found = step(hosts, with_(WORK, comm="16bit"), AT_ONCE)
    assert found.seconds == pytest.approx(
        step([with_(one, sending=0.0) for one in hosts], with_(WORK, comm="16bit"), AT_ONCE).seconds
        + 1e-8 * found.sent
    )


def test_a_shaped_link_lets_some_through_at_once_after_a_pause():
    """1 MB in 1 s, less the burst; where the pause was too short for that, less what it left room for."""
    hosts = [with_(one, burst=100_000) for one in (FAST, SLOW)]
    assert step(hosts, WORK, AT_ONCE).seconds == pytest.approx(4 + 0.9)
    quick = [with_(one, speed=400e2) for one in hosts]
    assert step(quick, WORK, AT_ONCE).seconds == pytest.approx(0.01 + 0.99)
    lone = [with_(hosts[0], burst=0), hosts[1]]
    assert step(lone, WORK, AT_ONCE).seconds == pytest.approx(4 + 1)
    meeting = step(hosts, with_(WORK, comm="diloco", sync_every=10), AT_ONCE)
    sent = 1_000_000 * 1028 / 4096
    assert meeting.seconds == pytest.approx(4 + (sent - 100_000) / 1e6 / 10, rel=1e-4)


def test_coding_is_measured_by_the_trainers_own_code():
    seconds = {way: simulate.coding_seconds(way, 4_000_000) for way in WAYS}
    assert seconds["exact"] == 0 and all(1e-12 < seconds[way] < 1e-4 for way in WAYS if way != "exact")
    code, values, threads = compress.CODES["8bit"](), torch.randn(2**20), torch.get_num_threads()
    torch.set_num_threads(1)
    ratios = []
    try:
        coded, into = code.encode(values), torch.empty_like(values)
        for _ in range(3):  # a machine that becomes busy between the two measures them as two machines
            own = min(timeit.repeat(lambda: code.encode(values), number=1, repeat=9))
            own += simulate.DECODED * min(timeit.repeat(lambda: code.decode(coded, into), number=1, repeat=9))
            ratios.append(simulate.coding_seconds("8bit", 4_000_000) * 4 * 2**20 / own)
    finally:
        torch.set_num_threads(threads)
    assert any(1 / 3 < ratio < 3 for ratio in ratios), ratios


# ---- the document ----


@pytest.mark.full
def test_the_document_has_the_tables_as_they_are_printed_now(repository):
    said = (repository / "docs/slow-networks.md").read_text()
    for table in simulate.tables(simulate.Assumed(1e9, 1e-4, simulate.MFU, {})).split("\n\n"):
        assert table in said


def test_a_card_that_is_unknown_is_refused(repository):
    words = [sys.executable, "-m", "bench.simulate", "--speed", "4090=1"]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "expected CARD=TOKENS" in done.stderr and "3070 Ti" in done.stderr
