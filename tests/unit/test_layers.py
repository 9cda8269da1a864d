"""Which ranks sum with which, inside hosts and between them."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

from trainer import config, environment
from trainer.environment import rdma
from trainer.model.footprint import Footprint
from trainer.plan import memory, wire
from trainer.plan.resources import Place
from trainer.strategies import sharded
from trainer.sums import Sum
from trainer.world import World


def world(monkeypatch, rank, nodes, device="cpu", rdma=True) -> World:
    """A rank whose groups are the names of their ranks; rdma: whether its host has it, all others do."""
    made = World.__new__(World)
    made.rank, made.size, made.nodes, made.device = rank, len(nodes), nodes, torch.device(device)
    made.firsts = [nodes.index(node) for node in sorted(set(nodes))]
    made._layers, made._timeout, made.training = None, None, "all"
    made.gather = lambda own: [own, *[True] * (len(nodes) - 1)]
    monkeypatch.setattr("trainer.world.rdma", lambda: rdma)
    monkeypatch.setattr(
        "trainer.world.dist",
        SimpleNamespace(new_group=lambda ranks, **_: str(ranks), DistError=RuntimeError),
    )
    made._meet = lambda group: None
    return made


@pytest.mark.parametrize(
    ("rank", "nodes", "within", "between", "even"),
    [
        (3, [0, 0, 1, 1], [2, 3], [1, 3], True),
        (2, [0, 0, 1, 1, 4, 4], [2, 3], [0, 2, 4], True),
        (1, [0, 0, 1], [0, 1], None, False),
        (2, [0, 0, 1], [2], [0, 2], False),
        (3, [1, 1, 0, 0], [2, 3], [1, 3], True),  # by their first ranks, whatever the nodes' numbers
    ],
)
def test_who_sums_with_whom(monkeypatch, rank, nodes, within, between, even):
    made = world(monkeypatch, rank, nodes)
    found = made.layers()
    assert found.within.ranks == within and found.within.ranks[found.within.rank] == rank
    assert found.within.group == (str(within) if len(within) > 1 else None)
    assert found.even is even and found is made.layers()
    if between is None:
        assert found.between.rank is None and found.between.size == 2
    else:
        assert found.between.ranks == between and found.between.group == str(between)


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 0, 0], [0]])
def test_ranks_that_are_alone_or_all_together_are_one_row(monkeypatch, nodes):
    assert world(monkeypatch, 0, nodes).layers() is None


def test_where_all_hosts_have_rdma_nccl_finds_its_own_way(monkeypatch):
    assert world(monkeypatch, 0, [0, 0, 1, 1], "cuda").layers() is None
    assert world(monkeypatch, 0, [0, 0, 1, 1], "cuda", rdma=False).layers().even
    assert world(monkeypatch, 0, [0, 0, 1, 1], "cpu").layers().even


@pytest.mark.parametrize(
    ("device", "nodes", "inside"),
    [
        ("cpu", [0, 0, 1, 1], True),
        ("cuda", [0, 0, 1, 1], False),  # two streams would use the groups in opposite orders
        ("cpu", [0, 0, 1], False),
        ("cpu", [0, 1, 0, 1], False),
        ("cpu", [0, 1], False),
    ],
)
def test_shards_go_inside_hosts_first_on_cpus_alone(monkeypatch, device, nodes, inside):
    assert bool(sharded._layers(world(monkeypatch, 0, nodes, device, rdma=False))) is inside


@pytest.mark.parametrize(
    ("device", "ranks", "name", "among"),
    [
        ("cpu", 16, "fsdp", 2),
        ("cuda", 16, "fsdp", 16),
        ("cuda", 16, "zero1", 16),
        ("cuda", 16, "ddp", 2),
        ("cpu", 15, "ddp", 2),
        ("cpu", 2, "zero2", 2),
    ],
)
def test_plan_counts_those_who_exchange(device, ranks, name, among):
    place = Place(ranks, 2, -(-ranks // 2), torch.device(device), 0, 0, 1e9)
    asked = config.from_mapping({"batch_size": 16, "micro_batch_size": 16})
    whole = {"ddp": 2000, "zero1": 4000, "zero2": 4000, "fsdp": 6000}[name]
    assert wire.by_strategy(name, asked, place, 1000, 2000, 1000) == pytest.approx(
        whole * (among - 1) / among, abs=1
    )
    assert wire.inside_first(name, place) is (among < ranks)


@pytest.mark.parametrize(("here", "more"), [(8, 8 * 7 / 15), (7, 7 * 8 / 15)])
@pytest.mark.parametrize(
    ("name", "summed", "gathered"),
    [("zero1", 1000, 3000), ("zero2", 1000, 3000), ("fsdp", 1000, 5000), ("offload", 1000, 5000)],
)
def test_plan_counts_what_unlike_hosts_send_each_other(here, more, name, summed, gathered):
    """On CPUs each rank has its part of gradients from each other one itself, and weights by a ring."""
    place = Place(15, 2, here, torch.device("cpu"), 0, 0, 1e9)
    asked = config.from_mapping({"batch_size": 16, "micro_batch_size": 16})
    assert wire.by_strategy(name, asked, place, 1000, 2000, 1000) == pytest.approx(
        summed * more + gathered * 14 / 15, abs=2
    )
    on_cards = dataclasses.replace(place, device=torch.device("cuda"))
    assert wire.by_strategy(name, asked, on_cards, 1000, 2000, 1000) == pytest.approx(
        (summed + gathered) * 14 / 15, abs=2
    )
    assert not wire.inside_first(name, place)


ROCE = {
    "0": ("fe80:0000:0000:0000:0250:56ff:fe00:0001", "RoCE v2"),
    "3": ("0000:0000:0000:0000:0000:ffff:c0a8:fac9", "RoCE v2"),
}
V1, LOCAL = {"1": (ROCE["3"][0], "IB/RoCE v1")}, {"0": ROCE["0"]}


@pytest.fixture
def port(monkeypatch, tmp_path):
    """Makes a port of /sys; NCCL has its library."""
    for name in ("NCCL_IB_DISABLE", "NCCL_IB_HCA"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "INFINIBAND", tmp_path)
    monkeypatch.setattr(environment, "_has_verbs", lambda: True)

    def make(device, layer="Ethernet", gids=ROCE, state="4: ACTIVE", rate="100 Gb/sec (4X EDR)", number=1):
        place = tmp_path / device / "ports" / str(number)
        texts = {"state": state, "link_layer": layer, "rate": rate}
        texts |= {f"gids/{index}": gid for index, (gid, _) in gids.items()}
        texts |= {f"gid_attrs/types/{index}": kind for index, (_, kind) in gids.items()}
        for name, text in texts.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(f"{text}\n")

    return make


@pytest.mark.parametrize(
    ("made", "good"),
    [
        ({"layer": "InfiniBand", "gids": {}}, True),
        ({"layer": "InfiniBand", "gids": {}, "state": "2: INIT"}, False),
        ({"layer": "InfiniBand", "gids": {}, "state": "5: ACTIVE_DEFER"}, False),
        ({}, True),
        ({"state": "1: DOWN"}, False),
        ({"gids": LOCAL}, False),  # cabled, and nobody gave it an address
        ({"gids": V1}, False),  # a ConnectX-3, or iWARP
        ({"gids": {}}, False),  # iWARP as Intel's cards have it
        ({"layer": "Unspecified"}, False),  # EFA, which NCCL leaves alone
    ],
)
def test_nccl_gets_the_ports_that_can_carry_a_run(port, monkeypatch, made, good):
    port("mlx5_0", **made)
    assert rdma() is good
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert not rdma()
    monkeypatch.delenv("NCCL_IB_DISABLE")
    # As where only others are in the group rdma:
    monkeypatch.setattr(environment, "_has_verbs", lambda: False)
    assert not rdma()


def test_an_rdma_port_that_goes_while_it_is_looked_at_is_none(port, tmp_path):
    assert not rdma()
    (tmp_path / "mlx5_0/ports/1/state").mkdir(parents=True)  # which cannot be read
    assert not rdma()
    port("mlx5_1", "InfiniBand")
    assert rdma()


def ports_of(monkeypatch, others):
    """What the ports' choice says, and the environment that NCCL gets, where other hosts have those ports."""
    made = World.__new__(World)
    made.hosts = [f"node{number}" for number in range(len(others) + 1)]
    made.gather = lambda own: [own, *([ports, False] for ports in others)]
    said = made._choose_rdma()
    return said, os.environ.get("NCCL_IB_HCA"), os.environ.get("NCCL_IB_DISABLE")


IB400, ROCE25, ROCE100 = ["InfiniBand", 400.0], ["Ethernet", 25.0], ["Ethernet", 100.0]


def test_hosts_go_by_one_kind_of_ports(port, monkeypatch):
    """Beside InfiniBand's a server's management card speaks RoCE; some ports of a card have no address."""
    port("mlx5_0", "InfiniBand", {}, rate="400 Gb/sec (4X NDR)")
    port("mlx5_1", "InfiniBand", {}, rate="400 Gb/sec (4X NDR)", state="1: DOWN")
    port("mlx5_bond_0", rate="25 Gb/sec (1X EDR)")
    assert ports_of(monkeypatch, [[IB400, IB400, ROCE25]]) == ("", "=mlx5_0:1", None)


def test_where_all_have_both_kinds_the_faster_one_counts(port, monkeypatch):
    port("mlx4_0", "InfiniBand", {}, rate="40 Gb/sec (4X QDR)", number=2)
    port("mlx5_0")
    port("mlx5_1")
    port("mlx5_2", gids=LOCAL)
    both = [["InfiniBand", 40.0], ROCE100]
    assert ports_of(monkeypatch, [both, both]) == ("", "=mlx5_0:1,mlx5_1:1", None)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([[IB400], []], "Ethernet on node0; InfiniBand on node1; none on node2; expected one kind"),
        (
            [[IB400], [IB400, ROCE100]],
            "Ethernet on node0; InfiniBand on node1; Ethernet and InfiniBand on node2",
        ),
        ([[]], "Ethernet on node0; none on node1"),
    ],
)
def test_without_a_kind_in_common_all_go_by_tcp_and_that_is_said(port, monkeypatch, others, said):
    port("rocep1s0")
    found, names, disabled = ports_of(monkeypatch, others)
    assert said in found and names is None and disabled == "1"


def test_ports_that_can_carry_nothing_are_not_tried(port, monkeypatch):
    """NCCL would take them, as they are up, and end with an error."""
    port("iwp1s0", gids={})
    assert ports_of(monkeypatch, [[]]) == ("", None, "1")


def test_hosts_of_the_group_rdma_that_all_lost_their_addresses_are_told_so(port, monkeypatch):
    port("mlx5_0", gids=LOCAL)
    monkeypatch.setenv("TRAINYARD_RDMA", "1")
    said, *found = ports_of(monkeypatch, [[]])
    assert "none on node0, node1; expected one kind" in said and found == [None, "1"]
    assert ports_of(monkeypatch, [[]])[0] == ""  # by now NCCL_IB_DISABLE says that none is wanted


def test_who_names_the_ports_is_obeyed(port, monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    port("mlx5_1", gids=LOCAL)  # with NCCL_IB_ADDR_FAMILY, say
    assert ports_of(monkeypatch, [[ROCE100]]) == ("", "mlx5_1", None)


@pytest.mark.parametrize(
    ("rank", "nodes", "bytes_sent"),
    [
        (0, [0, 0, 1], 1000),
        (1, [0, 0, 1], 0),  # the first sends for both
        (2, [0, 0, 1], 1000),
        (1, [0, 0, 1, 1], 1000),  # a slice of its host's
        (0, [0, 0, 0], 1333),
    ],
)
def test_a_rank_that_keeps_off_the_wire_has_sent_nothing(monkeypatch, rank, nodes, bytes_sent):
    made = world(monkeypatch, rank, nodes)
    assert Sum(made, made.layers()).sent(1000) == bytes_sent


@pytest.mark.parametrize(
    ("ranks", "nodes", "parts"),
    [
        (2, 2, 1),  # each host writes one of two copies
        (4, 4, 2),
        (6, 6, 3),  # of three
        (4, 2, 2),  # both ranks' parts go to the other host
        (4, 1, 1),  # to the first rank
        (1, 1, 0),
    ],
)
def test_plan_counts_what_checkpoints_of_a_sharded_strategy_send(ranks, nodes, parts):
    place = Place(ranks, nodes, ranks // nodes, torch.device("cpu"), 0, 0, 1e9)
    found = Footprint(**{field.name: 0 for field in dataclasses.fields(Footprint)} | {"trainable": 4800})
    found = dataclasses.replace(found, gradients=4 * 4800, tensors=(), trained=())

    def sends(name, **keys):
        asked = config.from_mapping({"batch_size": ranks, "steps": 1000, **keys})
        return memory.budget(name, asked, found, place, 0).wire_bytes

    for name in ("zero1", "zero2", "fsdp", "offload", "infinity"):
        never = sends(name, checkpoint_every=0)
        each = 12 * 4800 * parts // ranks
        assert sends(name, checkpoint_every=10) - never == each // 10
        assert sends(name, checkpoint_every=0, eval_every=5, validation="x") - never == each // 5
    assert sends("ddp", checkpoint_every=0) == sends("ddp", checkpoint_every=10)
