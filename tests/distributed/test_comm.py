"""What travels instead of gradients: all ranks stay alike, what is left out comes later, and the curve stays near."""

import math
import os

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import free_port, side_by_side
from safetensors.torch import load_file

from trainer import config as configuration
from trainer.errors import BadInput
from trainer.strategies.compressed import KEEPS

pytestmark = pytest.mark.distributed
LONG = ("steps=40", "batch_size=12", "micro_batch_size=4", "lr=0.003", "checkpoint_every=20")


class Three:
    """As much of a World as a sum asks for."""

    def __init__(self, rank, size, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=size)
        self.rank, self.size, self.device, self.alike = rank, size, torch.device("cpu"), True
        self.training = dist.group.WORLD


def _sums(rank, size, port, kind, folder):
    """20 sums of what each rank has; what came out, and what was left over, of each rank in a file.

    Two of them are not used: one that is not finite, and one because something else was wrong with the batch.
    """
    from trainer.compress import CODES, CodedSum, Factors

    world = Three(rank, size, port)
    chance = torch.Generator().manual_seed(rank)
    shapes = [(40, 30), (50,), (6, 5, 20)]
    count = sum(math.prod(shape) for shape in shapes)
    one = Factors([torch.zeros(shape) for shape in shapes], 2, world) if kind == "powersgd" else None
    coded = None if one else CodedSum(count, CODES[kind](), world)
    own, came = torch.zeros(count), torch.zeros(count)
    for step in range(20):
        flat = torch.randn(count, generator=chance) * 10.0 ** (rank - 1)
        if step == 7:
            flat[3] = math.nan if rank == 1 else 1.0
        given = flat.clone()
        if one:
            parts = [
                part.view(shape) for part, shape in zip(flat.split([1200, 50, 600]), shapes, strict=True)
            ]
            one(parts)
            flat = torch.cat([part.flatten() for part in parts])
        else:
            coded(flat)
        if step == 7:
            assert not torch.isfinite(flat).all()
        elif step != 11:
            (one or coded).commit()
            own += given
            came += flat
    left = torch.cat([e.flatten() for e in one.errors]) if one else coded.error
    torch.save({"own": own, "came": came, "left": left}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["16bit", "8bit", "powersgd"])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_what_came_and_what_is_left_over_is_all_there_was(tmp_path, kind, size):
    port = free_port()
    side_by_side(_sums, size, size, port, kind, tmp_path, seconds=120)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for one in found:
        assert torch.equal(one["came"], found[0]["came"])  # to the bit
    total = sum(one["own"] for one in found)
    left = sum(one["left"] for one in found)
    came = found[0]["came"]
    if kind == "powersgd":  # the vector in the middle goes whole
        came = torch.cat([came[:1200], came[1250:]])
        assert torch.allclose(found[0]["came"][1200:1250], total[1200:1250], rtol=1e-4, atol=1e-3)
        total = torch.cat([total[:1200], total[1250:]])
    assert left.abs().max() > 0
    scale = total.abs().max()
    assert (came + left - total).abs().max() < 1e-5 * scale
    assert (came - total).abs().max() < {"16bit": 0.05, "8bit": 0.05, "powersgd": 1.0}[kind] * scale


def _unlike(rank, size, port, folder):
    """Sums by powersgd of ranks whose libraries compute differently, as those of other processors do.

    The sum has one direction alone, from the tenth on three; what each rank has of it has many.
    """
    from trainer.compress import Factors

    world = Three(rank, size, port)
    if rank:  # adds up from the other end
        really = torch.Tensor.__matmul__
        torch.Tensor.__matmul__ = lambda one, other: really(one.flip(-1), other.flip(-2))
    chance = torch.Generator().manual_seed(1)
    own, every = torch.zeros(200, 100), []
    factors = Factors([own], 4, world)
    for step in range(20):
        directions = 1 if step < 10 else 3
        total = torch.randn(200, directions, generator=chance) @ torch.randn(
            directions, 100, generator=chance
        )
        given = total / 2 + torch.randn(200, 100, generator=chance) * (1, -1)[rank]
        own += given
        factors([given])
        factors.commit()
        every.append(given)
    rounded = every[-1][:, :50] @ every[-1][:, 50:].T
    torch.save(
        {"own": own, "came": torch.stack(every), "left": factors.errors[0], "rounded": rounded},
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


def test_ranks_that_compute_differently_end_with_the_same_bits(tmp_path):
    side_by_side(_unlike, 2, 2, free_port(), tmp_path, seconds=120)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(one["came"], other["came"])
    assert not torch.equal(one["rounded"], other["rounded"])  # of the same values: their libraries do differ
    total = one["own"] + other["own"]
    assert (one["came"].sum(0) + one["left"] + other["left"] - total).abs().max() < 1e-3


def files(directory):
    return load_file(directory / "model/model.safetensors")


def _far(*arguments):
    """A network on which a step's sums take a while."""
    import time

    from trainer import loop

    time.sleep(0.2)
    return loop.exchange_really(*arguments)


@pytest.mark.full
@pytest.mark.parametrize(("comm", "strategy"), [("auto", "ddp"), ("exact", "ddp"), ("auto", "zero2")])
def test_on_a_slow_network_auto_says_once_what_would_be_faster(material, tmp_path, comm, strategy):
    patch = {("trainer.loop", "exchange"): _far}
    words = "steps=44", f"comm={comm}", "balance=even", f"strategy={strategy}", "micro_batch_size=2"
    ranks.run(tmp_path, 2, material / "run.yaml", *words, patch=patch)
    said = [one for one in ranks.records(tmp_path / "node0", "event") if one["event"] == "advice"]
    advice = ranks.status(tmp_path / "node0")["advice"]
    if comm == "exact":
        assert said == [] and advice is None
        return
    (one,) = said
    assert one["step"] == 40 and one["reason"] == advice
    assert "the network takes" in advice
    assert ranks.status(tmp_path / "node0")["parts"]["wire"] >= 0.2
    other = (
        "-e comm="
        if strategy == "ddp"
        else "zero2 sends gradients for each of 2 micro-batches, so that a larger"
    )
    assert other in advice
    assert (tmp_path / "node0/logs/rank-0.log").read_text().count(advice) == 1


def wire(directory):
    return sum(row["wire_bytes"] for row in ranks.records(directory))


@pytest.fixture(scope="module")
def exact(material, tmp_path_factory):
    """Directory and losses of a run of three ranks with gradients as they are."""
    folder = tmp_path_factory.mktemp("exact")
    return folder, ranks.run(folder, 3, material / "run.yaml", *LONG)


@pytest.mark.parametrize(
    ("comm", "near", "less", "shares"),
    [
        ("16bit", 0.005, 1.9, "even"),
        ("8bit", 0.02, 3.4, "even"),
        ("powersgd", 0.1, 2.0, "even"),
        ("diloco", 0.15, 25.0, "even"),
        pytest.param("powersgd", 0.1, 2.0, "7,3,2", marks=pytest.mark.full),
        ("diloco", 0.15, 25.0, "7,3,2"),  # whoever is faster does more of each inner step
    ],
)
def test_the_curve_stays_near_all_ranks_stay_alike_and_less_is_sent(
    material, tmp_path, exact, comm, near, less, shares
):
    folder, reference = exact
    # Without checkpoints, for which more is sent than steps need.
    words = (*LONG, f"comm={comm}", "sync_every=10", "checkpoint_every=0", f"balance={shares}")
    patch = {("trainer.strategies.ddp", "BUCKET_BYTES"): 48 << 10}  # three buckets or more
    found = ranks.run(tmp_path, 3, material / "run.yaml", *words, patch=patch)
    assert found != reference
    assert found[0] == pytest.approx(reference[0], rel=1e-6)  # nothing has travelled yet
    last, before = sum(found[-5:]) / 5, sum(reference[-5:]) / 5
    assert last == pytest.approx(before, rel=near) and last < 0.75 * found[0]
    weights = [files(tmp_path / f"node{rank}") for rank in range(3)]
    for one in weights[1:]:
        assert all(torch.equal(one[name], weights[0][name]) for name in one)
    assert wire(folder / "node0") > less * wire(tmp_path / "node0")
    exactly, coded = (
        zip(*(one["rank_compression_seconds"] for one in ranks.records(where / "node0")), strict=True)
        for where in (folder, tmp_path)
    )
    assert not any(map(any, exactly)) and all(map(any, coded))


@pytest.mark.parametrize(
    "comm", [*(pytest.param(one, marks=pytest.mark.full) for one in ("8bit", "powersgd")), "diloco"]
)
def test_a_run_goes_on_with_other_ranks_and_what_was_left_over(material, tmp_path, comm):
    words = (*LONG, f"comm={comm}", "powersgd_rank=2", "sync_every=10")
    whole = ranks.run(tmp_path / "whole", 2, material / "run.yaml", *words)
    ranks.run(tmp_path / "parts", 2, material / "run.yaml", *words, stop_in=20, codes=[75, 75])
    kept = load_file(tmp_path / "parts/node0/checkpoints/step-00000020/optimizer.safetensors")
    names = {name.split(".")[0] for name in kept}
    assert names == {"step", "exp_avg", "exp_avg_sq", *KEEPS[comm]}
    assert any(one.abs().max() > 0 for name, one in kept.items() if name.startswith(("left.", "unsent.")))
    found = ranks.run(tmp_path / "parts", 3, material / "run.yaml", *words)
    assert found[:20] == whole[:20]
    assert sum(found[-5:]) / 5 == pytest.approx(sum(whole[-5:]) / 5, rel=0.1)
    weights = [files(tmp_path / f"parts/node{rank}") for rank in range(3)]
    for one in weights[1:]:
        assert all(torch.equal(one[name], weights[0][name]) for name in one)


@pytest.mark.parametrize("comm", ["powersgd", "diloco"])
def test_what_was_left_over_outlives_a_while_with_one_rank(material, tmp_path, comm):
    """Two hosts, of which one goes on alone until the other is back."""
    words = (*LONG, f"comm={comm}", "powersgd_rank=2", "sync_every=10")
    for size, step in ((2, 20), (1, 25)):
        ranks.run(tmp_path, size, material / "run.yaml", *words, stop_in=step, codes=[75] * size)
    before, after = (
        {
            name: one
            for name, one in load_file(file).items()
            if name.startswith(("left", "unsent", "right", "momentum"))
        }
        for file in sorted(tmp_path.glob("node0/checkpoints/step-*/optimizer.safetensors"))
    )
    assert any(one.abs().max() > 0 for one in before.values())
    if comm != "diloco":  # what had not travelled is in the gradients of the first step alone
        before = {name: one for name, one in before.items() if not name.startswith("left")}
    assert before.keys() == after.keys() and all(
        torch.equal(one, after[name]) for name, one in before.items()
    )
    found = ranks.run(tmp_path, 2, material / "run.yaml", *words)
    assert len(found) == 40 and sum(found[-5:]) / 5 < 0.75 * found[0]
    one, other = (files(tmp_path / f"node{node}") for node in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.full
def test_a_checkpoint_of_one_way_is_gone_on_from_in_another(material, tmp_path):
    ranks.run(tmp_path, 2, material / "run.yaml", *LONG, "comm=diloco", stop_in=20, codes=[75, 75])
    found = ranks.run(tmp_path, 2, material / "run.yaml", *LONG)
    assert len(found) == 40 and found[-1] < found[19]


HARMFUL = 7 * 5  # samples before the batch that is passed over


def _refused(run, loss, norm):
    """One batch does harm, as is found once its gradients have travelled."""
    from trainer import loop

    if run.progress.cursor == 35:  # HARMFUL
        raise loop.Harmful("made up")
    loop.refuse_harm_really(run, loss, norm)


def _unseen(run, observer):
    """The same batch is passed over before anybody looks at it."""
    from trainer import loop

    if run.progress.cursor == 35:  # HARMFUL
        raise loop.Harmful("made up")
    return loop.train_step_really(run, observer)


@pytest.mark.parametrize("comm", [pytest.param("16bit", marks=pytest.mark.full), "8bit", "powersgd"])
def test_a_step_that_is_not_taken_leaves_nothing_over(material, tmp_path, comm):
    """What is left over then is what was so before: none of a harmful batch comes later, and nothing else is lost."""
    words = (f"comm={comm}", "powersgd_rank=2", "on_nan=skip")
    refused, unseen = (
        ranks.run(tmp_path / name, 2, material / "run.yaml", *words, patch={("trainer.loop", name): patch})
        for name, patch in (("refuse_harm", _refused), ("train_step", _unseen))
    )
    assert refused == unseen and len(refused) == 12
    (event,) = (
        one for one in ranks.records(tmp_path / "refuse_harm/node0", "event") if one["event"] == "passed over"
    )
    assert event["step"] == HARMFUL // 7


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"comm": "8bit", "strategy": "zero2"}, "works with strategy ddp"),
        ({"comm": "powersgd", "dtype": "float16"}, "set dtype to bfloat16"),
        ({"comm": "diloco", "router_aux_loss_coef": 0.1}, "no global batch"),
    ],
)
def test_what_does_not_go_together_is_refused(keys, word):
    with pytest.raises(BadInput, match=word):
        configuration.check_together(configuration.from_mapping(keys))


def test_what_a_checkpoint_makes_all_send_is_counted_with_the_step_after_it(material, tmp_path):
    words = ("steps=12", "batch_size=4", "micro_batch_size=2", "comm=diloco", "sync_every=12")
    for name, every in (("one", 12), ("three", 4)):
        ranks.run(tmp_path / name, 2, material / "run.yaml", *words, f"checkpoint_every={every}")
    once, thrice = (
        [row["wire_bytes"] for row in ranks.records(tmp_path / f"{name}/node0")] for name in ("one", "three")
    )
    assert once[:11] == [0] * 11 and once[11] > 0
    assert [step for step, sent in enumerate(thrice, 1) if sent] == [5, 9, 12]
    # The sums of both moments and of what was left out, over two ranks, for the checkpoints of steps 4 and 8.
    kept = load_file(tmp_path / "three/node0/checkpoints/step-00000008/optimizer.safetensors")
    each = sum(one.nbytes for name, one in kept.items() if name.startswith(("exp_avg", "unsent.")))
    assert sum(thrice) == 3 * once[11] + 2 * each
    # Each checkpoint's event tells of it, too; of the last one nothing else does.
    events = [one for one in ranks.records(tmp_path / "three/node0", "event") if one["event"] == "checkpoint"]
    assert [one["wire_bytes"] for one in events] == [once[11] + each, once[11] + each, each]


def test_so_is_what_a_sharded_strategy_sends_for_one_and_for_an_evaluation(material, tmp_path):
    words = ("steps=9", "batch_size=4", "micro_batch_size=2", "strategy=zero1", "checkpoint_every=4")
    ranks.run(tmp_path, 2, material / "run.yaml", *words, "validation_split=0.2", "eval_every=7")
    for node in ("node0", "node1"):
        sent = [row["wire_bytes"] for row in ranks.records(tmp_path / node)]
        events = [one for one in ranks.records(tmp_path / node, "event") if one["event"] == "checkpoint"]
        # Its half of weights and moments, to the other host; all weights' other half is gathered for the evaluation.
        half = 4 * 37120 // 2
        saved = {one["step"]: one["wire_bytes"] // half for one in events}
        assert saved == {4: 3, 7: 4, 8: 3, 9: 4}  # the evaluations of steps 7 and 9 come before theirs
        assert sent == [sent[0] + more * half for more in (0, 0, 0, 0, 3, 0, 0, 4, 3)]


@pytest.mark.full
def test_what_8bit_sends_for_a_checkpoint_is_counted(material, tmp_path):
    words = ("steps=6", "batch_size=4", "micro_batch_size=2", "comm=8bit", "checkpoint_every=3")
    ranks.run(tmp_path, 2, material / "run.yaml", *words)
    sent = [row["wire_bytes"] for row in ranks.records(tmp_path / "node0")]
    kept = load_file(tmp_path / "node0/checkpoints/step-00000003/optimizer.safetensors")
    left = sum(one.nbytes for name, one in kept.items() if name.startswith("left."))
    assert sent == [sent[0]] * 3 + [sent[0] + left] + [sent[0]] * 2
