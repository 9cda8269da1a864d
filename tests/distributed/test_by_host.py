"""Sums that go inside hosts first: the same curve, fewer bytes between hosts, on 2 x 2 ranks and on 2 + 1."""

import fcntl
import os
import socket
import struct
import termios
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_parity import plain_loop

pytestmark = pytest.mark.distributed
COUNT = 500_001  # values of a sum: no number of ranks divides it
ACKED = 120  # where struct tcp_info has tcpi_bytes_acked, 64 bits (linux/tcp.h)


def acknowledged() -> dict[tuple[int, int], int]:
    """Bytes that each of this process's TCP connections has carried away, by (own port, peer's port)."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    # What a busy peer has not acknowledged yet would count for the next sum.
                    while struct.unpack("i", fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4)))[0]:
                        time.sleep(0.001)
                    information = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    ports = one.getsockname()[1], one.getpeername()[1]
                    found[ports] = struct.unpack_from("<Q", information, ACKED)[0]
        except OSError:  # no socket, or none that is connected
            continue
    return found


def between_hosts(counts: list[dict], nodes: list[int]) -> list[float]:
    """Bytes that left each host for another; counts: what each rank has `acknowledged`."""
    owner = {ports: rank for rank, one in enumerate(counts) for ports in one}
    left = [0.0] * len(set(nodes))
    for rank, one in enumerate(counts):
        for (own, peer), count in one.items():
            other = owner.get((peer, own))
            if other is not None and nodes[other] != nodes[rank]:
                left[nodes[rank]] += count
    return left


def _summed(world, config):
    """What sums of this rank's values come to, by way, and what each has sent."""
    from trainer import sums
    from trainer.strategies import sharded

    sums.BUCKET_BYTES = 600_000  # so that a sum has several pieces, the last a smaller one
    layers, found, wire = world.layers(), {}, sharded.Wire()
    even = layers if layers.even else None  # as sharded._layers has it
    here = world.nodes.count(world.nodes[world.rank])

    def plain(flat):
        dist.all_reduce(flat, group=world.training)
        return flat

    def by_host(flat):
        total = sums.Sum(world, layers)
        for one in [total.start(part) for part in flat.split(200_000)]:
            one.wait()
        return flat

    def gathered(flat):
        part, every = flat[:100_000], torch.empty(100_000 * world.size)
        sharded.Gather(wire, even, here)(every, part, world.training)
        return every

    def scattered(flat):
        part = torch.empty(100_000)
        sharded.Scatter(wire, even, here)(
            part, flat[: 100_000 * world.size], world.training, dist.ReduceOp.SUM
        )
        return part

    for way in (plain, by_host, gathered, scattered):
        chance = torch.Generator().manual_seed(world.rank)
        way(torch.zeros(COUNT))  # all have met
        flat = torch.rand(COUNT, generator=chance) - 0.5
        dist.barrier(group=world.control)
        before = acknowledged()
        wire.reset()
        result = way(flat.clone())
        dist.barrier(group=world.control)
        after = acknowledged()
        sent = {ports: count - before.get(ports, 0) for ports, count in after.items()}
        found[way.__name__] = flat, result, sent, wire.bytes
    return found


@pytest.mark.full
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 0, 1], [0, 0, 0, 1, 1]])
def test_each_host_sends_what_one_rank_of_it_would(tmp_path, nodes):
    found = ranks.together(tmp_path, _summed, nodes)

    def of(way):
        return [list(one) for one in zip(*(rank[way] for rank in found), strict=True)]

    size, nbytes = len(nodes), 4 * COUNT
    own, plain, sent, _ = of("plain")
    exact = sum(one.double() for one in own)
    # A ring goes on from each host by one wire; what of it is counted, is counted right.
    assert between_hosts(sent, nodes) == pytest.approx([2 * (size - 1) / size * nbytes] * 2, rel=0.02)
    own, mine, sent, _ = of("by_host")
    assert between_hosts(sent, nodes) == pytest.approx([nbytes] * 2, rel=0.02)
    for one in mine:
        assert torch.equal(one, mine[0])  # to the bit
        assert (one - exact).abs().max() < 1e-6
    assert (mine[0] - plain[0]).abs().max() < 1e-6
    whole, first = 4 * 100_000 * size, nodes.count(0)
    ring, direct = (size - 1) / size, first * (size - first) / size
    if 2 * first == size:
        ring = direct = 1 / 2  # inside hosts first
    own, every, sent, counted = of("gathered")
    assert between_hosts(sent, nodes) == pytest.approx([ring * whole] * 2, rel=0.02)
    assert counted == pytest.approx([ring * whole] * size, abs=1)
    assert all(torch.equal(one, torch.cat([part[:100_000] for part in own])) for one in every)
    own, parts, sent, counted = of("scattered")
    assert between_hosts(sent, nodes) == pytest.approx([direct * whole] * 2, rel=0.02)
    assert counted == pytest.approx([direct * whole] * size, abs=1)
    assert (torch.cat(parts) - exact[: 100_000 * size]).abs().max() < 1e-6


def _saved(world, config):
    """What this rank counts of a checkpoint and of an evaluation, and what of it went over its sockets."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from trainer import optim, strategies
    from trainer.model.loss import TokenLoss
    from trainer.snapshot import Snapshot

    torch.manual_seed(0)
    sizes = {"vocab_size": 1021, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2))
    strategy = strategies.make(config, TokenLoss(model.train(), chunk=16), world)
    optimizer = optim.adamw(strategy.trainable, config)
    tokens = torch.randint(0, 97, (1, 17))
    given = tokens[:, :-1], tokens[:, 1:], torch.arange(16).expand(1, -1)

    def step():
        strategy.zero_grad()
        with strategy.micro_batch(last=True):
            strategy.module(*given).backward()
        strategy.finish()
        optimizer.step()
        strategy.stepped(16, last=False)
        return strategy.wire_bytes

    def save():
        for _ in Snapshot(strategy, optimizer, writers, True, world.control):
            pass

    def evaluate():
        with torch.no_grad():
            strategy.module(*given)

    writers, found = sorted(world.firsts)[:2], {}
    plain = step()
    for what in (save, evaluate):
        dist.barrier(group=world.control)
        before = acknowledged()
        what()
        dist.barrier(group=world.control)
        after = acknowledged()
        counted = strategy.uncounted_bytes
        found[what.__name__] = (
            counted,
            {ports: count - before.get(ports, 0) for ports, count in after.items()},
        )
        # The next step has it, and the one after that has not.
        assert (step(), strategy.uncounted_bytes, step()) == (plain + counted, 0, plain)
    strategy.zero_grad()
    evaluate()
    strategy.zero_grad()  # a pass that comes to nothing
    assert strategy.uncounted_bytes == 0
    return found


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [
        ([0, 1, 2], "fsdp"),
        *(
            pytest.param(nodes, strategy, marks=pytest.mark.full)
            for nodes, strategy in (([0, 0, 1, 1], "fsdp"), ([0, 0, 1], "zero1"), ([0, 0], "zero2"))
        ),
    ],
)
def test_what_sharded_strategies_send_for_a_checkpoint_and_an_evaluation_is_counted(
    tmp_path, nodes, strategy
):
    found = ranks.together(tmp_path, _saved, nodes, strategy=strategy)
    for what in ("save", "evaluate"):
        counted, sent = zip(*(one[what] for one in found), strict=True)
        if len(set(nodes)) == 1:
            assert list(counted) == pytest.approx([sum(one.values()) for one in sent], rel=0.02, abs=4000)
            continue
        left = between_hosts(sent, nodes)
        assert list(counted) == pytest.approx([left[node] for node in nodes], rel=0.02, abs=4000)


@pytest.fixture(scope="module")
def reference(material):
    return plain_loop(material)


BUCKETS = {("trainer.strategies.ddp", "BUCKET_BYTES"): 48 << 10}  # three buckets or more


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([0, 0, 1, 1], ["micro_batch_size=1"]),
        *(
            pytest.param(nodes, words, marks=pytest.mark.full)
            for nodes, words in (
                ([0, 0, 1], ["micro_batch_size=1"]),
                ([0, 0, 1, 1, 2, 2], []),
                ([0, 0, 1, 1], ["strategy=zero1"]),
                ([0, 0, 1, 1], ["strategy=zero2", "micro_batch_size=1"]),
                ([0, 0, 1, 1], ["strategy=fsdp"]),
                ([0, 0, 1], ["strategy=fsdp"]),
                ([0, 0, 1, 1], ["balance=4,1,1,1"]),
            )
        ),
    ],
)
def test_the_curve_is_that_of_a_plain_loop(material, reference, tmp_path, nodes, words):
    """7 sequences, so shares are uneven; one rank has two micro-batches where the last one has one."""
    found = ranks.run(tmp_path, len(nodes), material / "run.yaml", *words, nodes=nodes, patch=BUCKETS)
    assert found == pytest.approx(reference, rel=1e-5)
    models = [load_file(tmp_path / f"node{node}/model/model.safetensors") for node in set(nodes)]
    assert all(torch.equal(one[name], models[0][name]) for one in models for name in one)
    if not any("strategy" in word for word in words):
        hosts = len(set(nodes))
        (sent,) = {row["wire_bytes"] for row in ranks.records(tmp_path / "node0")}
        assert sent == 2 * (hosts - 1) * 4 * 37120 // hosts


@pytest.mark.full
def test_a_stopped_run_goes_on_to_the_bit_and_with_other_layers(material, reference, tmp_path):
    """As many ranks again; 2 + 1 of them; two on one host; and one on each of two."""
    even = [0, 0, 1, 1]
    whole = ranks.run(tmp_path / "whole", 4, material / "run.yaml", nodes=even, patch=BUCKETS)
    for number, nodes in enumerate((even, [0, 0, 1], [0, 0], [0, 1])):
        root = tmp_path / str(number)
        ranks.run(root, 4, material / "run.yaml", nodes=even, patch=BUCKETS, stop_in=5, codes=[75] * 4)
        found = ranks.run(root, len(nodes), material / "run.yaml", nodes=nodes, patch=BUCKETS)
        assert found == pytest.approx(reference, rel=1e-5)
        assert found[:5] == whole[:5] and (found == whole or nodes != even)


@pytest.mark.full
@pytest.mark.parametrize("comm", ["16bit", "8bit", "powersgd", "diloco"])
def test_lossy_ways_go_inside_hosts_first(material, tmp_path, comm):
    words = (
        "steps=6",
        "batch_size=8",
        f"comm={comm}",
        "powersgd_rank=2",
        "sync_every=6",
        "checkpoint_every=0",
    )
    ranks.run(tmp_path / "four", 4, material / "run.yaml", *words, nodes=[0, 0, 1, 1])
    ranks.run(tmp_path / "two", 2, material / "run.yaml", *words)
    four, two = (
        [row["wire_bytes"] for row in ranks.records(tmp_path / name / "node0")] for name in ("four", "two")
    )
    assert four == two and sum(four) > 0
    one, other = (load_file(tmp_path / f"four/node{node}/model/model.safetensors") for node in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
