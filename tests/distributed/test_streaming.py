"""diloco in fragments and behind computing, and sums that go by host: the same on all ranks, on any network."""

import functools
import shutil
import threading

import pytest
import ranks
import torch
from safetensors.torch import load_file

from trainer import config as configuration
from trainer.errors import BadInput

pytestmark = pytest.mark.distributed
together = functools.partial(ranks.together, comm="diloco")


class Toy(torch.nn.Module):
    """As much of a TokenLoss as a strategy asks for: five parameters of 900 to 3,000 values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.model = torch.nn.ParameterDict(
            {
                name: torch.randn(size)
                for name, size in zip("abcde", (900, 3000, 1500, 1500, 2000), strict=True)
            }
        )


def rate_of(step: int) -> float:
    """A learning rate that changes from step to step."""
    return 0.004 * (1 + step % 4)


def walk(strategy, world, first, last, steps):
    """Steps `first` to `last` of `steps`, whose gradients are a chance of step and rank; yields after each."""
    optimizer = torch.optim.AdamW(strategy.trainable.values())
    strategy.adopt(optimizer)
    for step in range(first, last + 1):
        optimizer.param_groups[0]["lr"] = rate_of(step)
        strategy.zero_grad()
        chance = torch.Generator().manual_seed(100 * step + world.rank)
        for one in strategy.trainable.values():
            if one.grad is None:  # as backward would
                one.grad = torch.empty_like(one)
            one.grad.copy_(torch.randn(one.shape, generator=chance))
        strategy.finish()
        optimizer.step()
        strategy.stepped(tokens=10 + world.rank, last=step == steps)
        yield step


def weights(strategy) -> torch.Tensor:
    return torch.cat([one.detach().clone() for one in strategy.trainable.values()])


def _schedule(world, config):
    """By step: the weights of each name, and the bytes that were sent."""
    from trainer import strategies

    strategy = strategies.make(config, Toy(), world)
    return [
        ({name: one.detach().clone() for name, one in strategy.trainable.items()}, strategy.wire_bytes)
        for _ in walk(strategy, world, 1, 13, 100)
    ]


def test_each_fragment_meets_once_a_round_and_sends_its_part(tmp_path):
    def met(fragments):
        first, second = together(
            tmp_path, _schedule, [0, 1], sync_every=6, diloco_fragments=fragments, balance="even"
        )
        equal = [
            "".join(name for name in one if torch.equal(one[name], other[name]))
            for (one, _), (other, _) in zip(first, second, strict=True)
        ]
        return equal, [sent for _, sent in first]

    equal, sent = met(3)
    assert equal == ["", "ab", "", "cd", "", "e"] * 2 + [""]
    at_once, whole = met(1)
    assert at_once == ["", "", "", "", "", "abcde"] * 2 + [""]
    assert [bool(one) for one in sent] == [bool(one) for one in equal]
    assert max(sent) < 0.6 * max(whole)
    assert sum(sent) == pytest.approx(sum(whole), rel=0.3)  # but for the last blocks of 1,024 values


def _plain_and_ours(world, config):
    """Weights by DiLoCo's own algorithm, written down plainly, and by the strategy; all meet early after step 5."""
    from trainer import strategies
    from trainer.compress import Bits8, CodedSum

    ours, plain = (strategies.make(configuration.from_mapping(keys), Toy(), world) for keys in KEYS)
    plain.stepped = lambda tokens, last: None
    backwards = list(reversed(plain.trainable.values()))

    def flat():
        return torch.cat([one.detach() for one in backwards])

    outer, tokens, rates, found = flat(), 0, [], []
    velocity, coded = torch.zeros_like(outer), CodedSum(len(outer), Bits8(), world)
    for step, _ in zip(walk(ours, world, 1, 12, 12), walk(plain, world, 1, 12, 12), strict=True):
        tokens += 10 + world.rank
        rates.append(rate_of(step))
        if step == 5:
            ours.settle()
        if step in (3, 5, 8, 11, 12):
            total = ours.sum(torch.tensor([tokens], dtype=torch.float64)).item()
            gone = (outer - flat()) * (tokens / total)
            coded(gone)
            coded.commit()
            pace = sum(rates) / len(rates)
            rounds = len(rates) / 3
            velocity.mul_(0.9**rounds).add_(gone / pace)
            outer.sub_(gone + 0.9 * rounds * pace * velocity, alpha=0.7)
            with torch.no_grad():
                for one, part in zip(backwards, outer.split([len(p) for p in backwards]), strict=True):
                    one.copy_(part)
            tokens, rates = 0, []
        found.append((weights(ours), weights(plain)))
    return found


PAPER = {"comm": "diloco", "outer_momentum": 0.9, "device": "cpu"}
KEYS = ({**PAPER, "sync_every": 3}, PAPER)


def test_one_fragment_without_overlap_is_diloco_as_it_stands_in_the_paper(tmp_path):
    """But that its momentum follows the learning rate, and the steps of a round that ends early."""
    found = together(tmp_path, _plain_and_ours, [0, 1])
    for one in found:
        assert all(torch.equal(ours, plain) for ours, plain in one)
    assert torch.equal(found[0][-1][0], found[1][-1][0])


def _far(world, config):
    """How far all weights come in the 40th round of ten steps that each go as far, by the meetings in it."""
    from trainer import strategies

    found = []
    for early in ((), (9,), (3, 6)):  # steps of a round after which all meet, as for a checkpoint
        one, legs = strategies.make(config, Toy(), world), []
        before = weights(one)
        for step in range(1, 401):
            with torch.no_grad():
                for parameter in one.trainable.values():
                    parameter.add_(1e-3)
            one.stepped(10, last=False)
            if step % 10 in early:
                one.settle()
                one._step = step % 10  # the schedule goes on
            if step % 10 in (0, *early):
                legs.append((weights(one) - before).mean().item())
                before = weights(one)
        found.append(legs[-1 - len(early) :])
    return found


def test_a_round_that_ends_early_moves_the_weights_as_far_as_it_had_steps(tmp_path):
    for (whole,), late, thirds in together(tmp_path, _far, [0, 1], sync_every=10, outer_momentum=0.8):
        assert whole == pytest.approx(0.7 * 5 * 10 * 1e-3, rel=0.02)
        assert late == pytest.approx([0.9 * whole, 0.1 * whole], rel=0.15)
        assert thirds == pytest.approx([0.3 * whole, 0.3 * whole, 0.4 * whole], rel=0.15)


def _alone(world, config):
    from trainer.strategies.ddp import DDP
    from trainer.strategies.local import DiLoCo

    both = DiLoCo(Toy(), world, config), DDP(Toy(), world, config)
    for one in both:
        for _ in walk(one, world, 1, 12, 12):
            pass
    return [weights(one) for one in both]


def test_alone_with_an_outer_rate_of_one_it_is_plain_training(tmp_path, material, whole):
    keys = {"sync_every": 6, "diloco_fragments": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    ((found, plain),) = together(tmp_path, _alone, [0], **keys)
    assert torch.allclose(found, plain, rtol=0, atol=1e-5)
    words = ("comm=diloco", *(f"{key}={value}" for key, value in keys.items()), "diloco_overlap=2")
    assert ranks.run(tmp_path / "run", 1, material / "run.yaml", *words) == whole


def _averaged(world, config):
    """Weights before a round, after it by this rank alone, and after it by local SGD; the same of the next one."""
    from trainer import strategies

    ours, own = strategies.make(config, Toy(), world), strategies.make(config, Toy(), world)
    own.stepped = lambda tokens, last: None
    before, found = weights(ours), []
    for step, _ in zip(walk(ours, world, 1, 12, 100), walk(own, world, 1, 12, 100), strict=True):
        if step % 6 == 0:
            found.append((before, weights(own), weights(ours)))
            before = weights(ours)
            with torch.no_grad():  # each goes on from what all have, with moments of its own
                for one, other in zip(own.trainable.values(), ours.trainable.values(), strict=True):
                    one.copy_(other)
    return found


def test_with_an_outer_rate_of_one_and_no_momentum_it_is_local_sgd(tmp_path):
    """All go on from the mean of their weights, by their tokens; what the code leaves out comes with the next one."""
    keys = {"sync_every": 6, "outer_lr": 1.0, "outer_momentum": 0.0}
    one, other = together(tmp_path, _averaged, [0, 1], **keys)
    late = 0
    for (before, mine, met), (_, its, met_too) in zip(one, other, strict=True):
        assert torch.equal(met, met_too)
        mean = (10 * mine + 11 * its) / 21
        left = met - mean - late
        assert 0 < left.abs().max() < 3 * (mine - before).abs().max() / 127
        late = -left


def _behind(world, config):
    """By step: weights, and whether a message is under way; and what each arrival makes of the weights."""
    from trainer import strategies
    from trainer.strategies import local

    gate = threading.Semaphore(0)
    if (
        config.seed == world.rank + 1
    ):  # this rank's network carries nothing until the step before it is to have come
        really = local.CodedSum.__call__

        def slow(self, flat):
            assert gate.acquire(timeout=60)
            really(self, flat)

        local.CodedSum.__call__ = slow
    strategy = strategies.make(config, Toy(), world)
    arrive, arrivals = strategy._arrive, []

    def noted():
        message = strategy._under_way
        if message is None:
            return
        before = [part.weights() for part in message.fragment.parts]
        moved = message.fragment.steps
        arrive()
        for part, own in zip(message.fragment.parts, before, strict=True):
            arrivals.append((moved, own, part.outer.clone(), part.weights()))

    strategy._arrive = noted
    found = []
    for step in walk(strategy, world, 1, 12, 12):
        message = strategy._under_way
        found.append((step, weights(strategy), message is not None))
        if message and step == message.due - 1:
            gate.release()
        if step == 11:  # in the last one both fragments meet, without overlap
            gate.release(2)
    return found, arrivals


def test_what_travels_meanwhile_is_taken_at_its_step_however_slow_the_network(tmp_path):
    keys = {"sync_every": 6, "diloco_fragments": 2, "diloco_overlap": 2}
    quick = together(tmp_path, _behind, [0, 1], **keys, seed=0)
    slow = together(tmp_path, _behind, [0, 1], **keys, seed=2)
    for (one, _), (other, _) in zip(quick, slow, strict=True):
        assert all(torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))
    steps, arrivals = slow[1]
    assert [step for step, _, under_way in steps if under_way] == [3, 4, 6, 7, 9, 10]
    assert [moved for moved, *_ in arrivals] == [2, 2, 2, 0, 0]  # in the last step all meet
    for moved, own, outer, now in arrivals:
        assert torch.equal(now, outer.lerp(own, 0.5) if moved else outer)
    assert torch.equal(slow[0][0][-1][1], slow[1][0][-1][1])


def _taken_back(world, config):
    """Weights at the end of a run that went back to its checkpoint in mid-flight, and of one that began there."""
    from trainer import strategies

    back, begun = strategies.make(config, Toy(), world), strategies.make(config, Toy(), world)
    for _ in walk(back, world, 1, 7, 100):
        pass
    back.settle()
    kept = {name: one.clone() for name, one in back.kept()}
    saved = [one.detach().clone() for one in back.trainable.values()]
    for _ in walk(back, world, 8, 11, 100):
        pass
    under_way = back._under_way is not None
    ends = []
    for strategy in (back, begun):
        with torch.no_grad():
            for one, own in zip(strategy.trainable.values(), saved, strict=True):
                one.copy_(own)
        strategy.restore(kept)
        for step in walk(strategy, world, 8, 20, 20):
            if step == 9:  # a checkpoint, before anything else travels
                strategy.settle()
        ends.append(weights(strategy))
    return under_way, ends


def test_a_message_under_way_is_not_taken_after_a_way_back(tmp_path):
    keys = {"sync_every": 6, "diloco_fragments": 2, "diloco_overlap": 2}
    for under_way, (back, begun) in together(tmp_path, _taken_back, [0, 1], **keys):
        assert under_way and torch.equal(back, begun)


# ---- whole runs ----

STREAM = ("comm=diloco", "sync_every=9", "diloco_fragments=3", "diloco_overlap=2", "outer_lr=0.9")


def test_a_resumed_run_is_equal_to_the_last_bit_and_goes_on_with_other_ranks(material, tmp_path):
    """At the checkpoints one fragment has met, another's message is under way, and the third is yet to meet."""
    run = (material / "run.yaml", *STREAM, "steps=14", "checkpoint_every=7")
    straight = ranks.run(tmp_path / "straight", 2, *run)
    ranks.run(tmp_path / "resumed", 2, *run, stop_in=7, codes=[75, 75])
    kept = load_file(tmp_path / "resumed/node0/checkpoints/step-00000007/optimizer.safetensors")
    for kind in ("unsent", "momentum"):
        assert any(one.abs().max() > 0 for name, one in kept.items() if name.startswith(f"{kind}."))
    shutil.copytree(tmp_path / "resumed", tmp_path / "more")
    assert ranks.run(tmp_path / "resumed", 2, *run) == straight
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (
            load_file(tmp_path / name / "node0/checkpoints/step-00000014" / file)
            for name in ("straight", "resumed")
        )
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    more = ranks.run(tmp_path / "more", 3, *run)
    assert more[:7] == straight[:7] and sum(more[-2:]) == pytest.approx(sum(straight[-2:]), rel=0.1)
    models = [load_file(tmp_path / f"more/node{rank}/model/model.safetensors") for rank in range(3)]
    assert all(torch.equal(one[name], models[0][name]) for one in models for name in one)


def test_more_fragments_than_parameters_are_refused(material, tmp_path):
    words = ("comm=diloco", "sync_every=1000", "diloco_fragments=900", "steps=2")
    ranks.run(tmp_path, 2, material / "run.yaml", *words, codes=[2, 2])
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert "diloco_fragments: found 900; expected no more than the 28 parameters" in reason


# ---- sums that go by host ----


def _by_host(world, config):
    """Five sums of whole numbers, of each of four ranks or of two ranks that have what two of the four have."""
    from trainer.compress import CODES, CodedSum

    circles = world.circles(apart=config.seed == 1)
    found = {}
    for kind, code in CODES.items():
        coded = CodedSum(5000, code(), world, circles)
        sums = []
        for step in range(5):
            own = range(4) if world.size == 1 else [world.rank]
            if world.size == 2:
                own = [2 * world.rank, 2 * world.rank + 1]
            flat = torch.zeros(5000)
            for rank in own:
                chance = torch.Generator().manual_seed(10 * step + rank)
                flat += torch.randint(-1000, 1000, (5000,), generator=chance).float()
            if step == 3 and 1 in own:
                flat[7] = float("nan")
            coded(flat)
            coded.commit()
            sums.append(flat)
        found[kind] = torch.stack(sums), coded.error, coded.sent
    return found


@pytest.mark.parametrize("apart", [0, 1])
def test_hosts_sum_their_own_exactly_and_one_rank_of_each_sends(tmp_path, apart):
    four = together(tmp_path, _by_host, [0, 0, 1, 1], seed=apart)
    two = together(tmp_path, _by_host, [0, 1])
    for kind in ("16bit", "8bit"):
        for rank, one in enumerate(four):
            sums, error, sent = one[kind]
            expected, left, bytes_sent = two[rank // 2][kind]
            assert torch.equal(sums.nan_to_num(0.5), expected.nan_to_num(0.5))
            if rank % 2 == 0:
                assert torch.equal(error, left) and sent == bytes_sent > 0
            else:
                assert not error.any() and sent == 0


def test_ranks_of_one_host_lose_nothing(tmp_path):
    (alone,) = together(tmp_path, _by_host, [0])
    for one in together(tmp_path, _by_host, [0, 0, 0, 0]):
        for kind in ("16bit", "8bit"):
            sums, error, sent = one[kind]
            assert torch.equal(sums.nan_to_num(0.5), alone[kind][0].nan_to_num(0.5))
            assert not error.any() and sent == 2 * 3 * 4 * 5000 // 4


def _one_host(world, config):
    from trainer import strategies

    torch.manual_seed(0)
    strategy = strategies.make(config, Toy(), world)
    names = list(strategy.trainable)
    strategy.restore({f"left.{name}": torch.full_like(strategy.trainable[name], 3.0) for name in names})
    found = []
    for _ in range(2):
        strategy.zero_grad()
        with strategy.micro_batch(last=True):
            sum(((world.rank + 1) * one).sum() for one in strategy.trainable.values()).backward()
        travelling = bool(strategy._works)
        strategy.finish()
        found.append(torch.cat([one.grad.clone() for one in strategy.trainable.values()]))
        strategy.stepped(10, last=False)
    return found, travelling, dict(strategy.kept()), strategy.wire_bytes


@pytest.mark.parametrize("comm", ["16bit", "8bit", "powersgd"])
def test_ranks_of_one_host_code_nothing_and_send_while_they_compute(tmp_path, comm):
    """What more hosts had left over comes once."""
    for found, travelling, kept, sent in together(tmp_path, _one_host, [0, 0], comm=comm):
        assert (found[0] == 3 + 3).all() and (found[1] == 3).all()
        assert travelling and not kept and sent == 4 * len(found[0])


def _kept_twice(world, config):
    from trainer import checkpoint, strategies

    strategy = strategies.make(config, Toy(), world)
    for _ in walk(strategy, world, 1, 12, 12):
        pass
    summed, really, copied = [], strategy._sum_exactly, []
    strategy._sum_exactly = lambda one: (summed.append(one.nbytes), really(one))
    kept = {}
    for name, one in strategy.kept():
        kept[name] = one.clone()
        if name.startswith(("left.", "unsent.")):
            copied.append(len(summed))
    strategy._sum_exactly = really
    # One parameter after the other, so that there is never a second copy of all.
    assert copied == list(range(1, len(strategy.trainable) + 1))
    # Of two hosts each sends as much, by its first rank.
    assert strategy._saved == (sum(summed) if world.rank in (0, 3) else 0)
    beside = sum(12 * one.numel() for one in strategy.trainable.values())
    assert checkpoint.tensor_bytes(strategy) == beside + sum(one.nbytes for one in kept.values())
    strategy.restore(kept)
    sums = strategy._sums if config.comm == "8bit" else [part.sum for part in strategy._parts]
    return kept, dict(strategy.kept()), weights(strategy), any(one.error.any() for one in sums)


@pytest.mark.parametrize("comm", ["8bit", "diloco"])
def test_what_is_left_over_goes_to_those_who_send(tmp_path, comm):
    keys = {"comm": comm, **({"diloco_fragments": 2, "diloco_overlap": 1} if comm == "diloco" else {})}
    found = together(tmp_path, _kept_twice, [0, 0, 0, 1], sync_every=6, **keys)
    assert [one[-1] for one in found] == [True, False, False, True]
    for kept, again, ends, _ in found:
        assert torch.equal(ends, found[0][2])
        assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)
        assert any(one.any() for name, one in kept.items() if name.startswith(("left.", "unsent.")))


def _kept_of_factors(world, config):
    from trainer import strategies

    strategy = strategies.make(config, Matrices(), world)
    for _ in walk(strategy, world, 1, 6, 12):
        pass
    kept = {name: one.clone() for name, one in strategy.kept()}
    strategy.restore(kept)
    return kept, dict(strategy.kept()), any(one.any() for one in strategy._factors.errors)


def test_what_factors_have_left_over_goes_to_all_ranks_once(tmp_path):
    """For each makes factors of its own gradients, before a host's are summed."""
    found = together(tmp_path, _kept_of_factors, [0, 0, 0, 1], comm="powersgd", powersgd_rank=2)
    for kept, again, has in found:
        assert has and kept.keys() == again.keys() == {"left.a", "left.c", "right.a", "right.c"}
        assert all(one.any() and torch.equal(one, again[name]) for name, one in kept.items())


class Matrices(Toy):
    """Two matrices that powersgd splits, and a vector that it sends whole."""

    def __init__(self):
        super().__init__()
        shapes = {"a": (40, 30), "b": (7,), "c": (60, 20)}
        self.model = torch.nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})


def _columns(world, config):
    from trainer import strategies

    first, second = (strategies.make(config, Matrices(), world) for _ in range(2))
    begun = [one.clone() for one in first._factors.right]
    for _ in walk(first, world, 1, 3, 12):
        pass
    kept = dict(first.kept())
    second.restore(kept)
    second.restore({name: one for name, one in kept.items() if not name.startswith("right.")})
    again = [one.clone() for one in second._factors.right]
    second.restore({name: one[:, :1] if name.startswith("right.") else one for name, one in kept.items()})
    return begun, first._factors.right, again, second._factors.right, sorted(kept)


def test_powersgd_goes_on_from_the_columns_of_the_checkpoint(tmp_path):
    for begun, last, again, other, names in together(
        tmp_path, _columns, [0, 1], comm="powersgd", powersgd_rank=2
    ):
        assert names == ["left.a", "left.c", "right.a", "right.c"]
        assert all(torch.equal(one, two) for one, two in zip(last, again, strict=True))
        assert not any(torch.equal(one, two) for one, two in zip(begun, last, strict=True))
        assert all(torch.equal(one, two) for one, two in zip(last, other, strict=True))


def _sends(world, config):
    """How many gradients were still to come when each bucket was sent."""
    from trainer import strategies
    from trainer.strategies import ddp

    ddp.BUCKET_BYTES = 4096
    strategy = strategies.make(config, Toy(), world)
    really, left = strategy._send, []

    def send():
        left.append(sum(bucket.waiting for bucket in strategy.buckets))
        really()

    strategy._send = send
    strategy.zero_grad()
    with strategy.micro_batch(last=False):
        sum((one * one).sum() for one in strategy.trainable.values()).backward()
    first = list(left)
    with strategy.micro_batch(last=True):
        sum((one * one).sum() for one in strategy.trainable.values()).backward()
    before = len(left)
    strategy.finish()
    return first, left, before, len(strategy.buckets)


def test_buckets_are_as_large_as_is_asked():
    from types import SimpleNamespace

    from trainer.strategies.ddp import DDP

    world = SimpleNamespace(device=torch.device("cpu"), size=2, layers=lambda: None, alike=True)

    def buckets(**keys):
        module = torch.nn.Module()
        module.model = torch.nn.ParameterList(torch.zeros(300_000) for _ in range(4))  # 1.2 MB each
        strategy = DDP(module, world, configuration.from_mapping(keys))
        return [len(bucket.parameters) for bucket in strategy.buckets]

    assert buckets() == [4] and buckets(bucket_mb=2) == [2, 2] and buckets(bucket_mb=1) == [1, 1, 1, 1]
    assert buckets(bucket_mb=1, comm="8bit") == [4]  # those of a run that goes on otherwise


def test_gradients_travel_while_backward_still_runs(tmp_path):
    for first, left, before, buckets in together(tmp_path, _sends, [0, 1], comm="exact"):
        assert not first and buckets > 2 and before == len(left) == buckets
        assert left[0] > 0 and left == sorted(left, reverse=True) and left[-1] == 0


# ---- what does not go together ----


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"comm": "diloco", "sync_every": 5, "diloco_fragments": 6},
            "diloco_fragments: found 6; expected no more than sync_every, 5",
        ),
        (
            {"comm": "diloco", "sync_every": 50, "diloco_fragments": 5, "diloco_overlap": 10},
            "set diloco_overlap to 9 or less",
        ),
        ({"comm": "diloco", "sync_every": 5, "diloco_overlap": 5}, "set diloco_overlap to 4 or less"),
    ],
)
def test_schedules_that_cannot_be_are_refused(keys, words):
    with pytest.raises(BadInput, match=words):
        configuration.check_together(configuration.from_mapping(keys))


@pytest.mark.parametrize("overlap", [0, 4])
def test_schedules_that_can_be(overlap):
    keys = {"comm": "diloco", "sync_every": 50, "diloco_fragments": 12, "diloco_overlap": overlap}
    configuration.check_together(configuration.from_mapping(keys))
