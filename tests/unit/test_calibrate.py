"""Ranks try their speed before the first step: what they try, how long, and that nothing of it is left."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trainer import calibrate, config
from trainer.balance import Balance, solve
from trainer.errors import OutOfMemory
from trainer.loop import Progress, Run
from trainer.model.loss import TokenLoss
from trainer.strategies.ddp import DDP
from trainer.world import translated

LENGTH = 16


class World(SimpleNamespace):
    """Rank 0 of two; the other says `other(own)` where it says `own`."""

    size, rank, first, hosts = 2, 0, True, ["desktop", "laptop"]
    alike = False
    device = torch.device("cpu")
    devices = [device]
    longer = 0.0  # seconds that the other took more for the trial

    def together(self, action):
        return action()

    def layers(self):
        return None  # a rank each

    def gather(self, own):
        told = json.loads(json.dumps(own))
        return [told, self.other(told) if isinstance(told, list) else told + self.longer]


class Packed:
    full = config.from_mapping({}).sequence_length

    def width(self, sequences):
        return self.full

    def __getitem__(self, number):
        tokens = (np.arange(LENGTH) * (number + 3)) % 50
        return tokens, np.roll(tokens, -1), np.arange(LENGTH)


class Index:
    def batch(self, cursor, size):
        return list(range(cursor, cursor + size))


def slower(own, times=3.0):
    """What a rank says that takes so many times as long."""
    if isinstance(own[0], list):
        return [[size, times * seconds] for size, seconds in own]
    return own


def run(other=slower, **keys) -> Run:
    settings = config.from_mapping({"batch_size": 16, "micro_batch_size": 4, **keys})
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2))
    world = World(other=other)
    strategy = DDP(TokenLoss(model), world, settings)
    return Run(
        config=settings,
        world=world,
        packed=Packed(),
        held_out=None,
        index=Index(),
        strategy=strategy,
        optimizer=torch.optim.AdamW(strategy.trainable.values()),
        progress=Progress(),
        steps=10,
        peak_lr=0.1,
        balance=Balance(16, 2),
        micro_batch_size=settings.micro_batch_size,
    )


def passes(monkeypatch, seconds) -> list[int]:
    """The sizes of the passes that will be made, each of which takes `seconds` a sequence."""
    made = []

    def one(run, size):
        made.append(size)
        return size * seconds

    monkeypatch.setattr(calibrate, "_pass", one)
    return made


def test_shares_begin_by_what_was_tried(monkeypatch):
    passes(monkeypatch, 0.001)
    one = run()
    found = calibrate.begin(one)
    assert one.width == one.packed.full
    assert [list(times) for times in found] == [[1, 4], [1, 4]]
    assert one.balance.split == [12, 4] and one.balance.expected == pytest.approx(2)
    assert one.balance.speeds == pytest.approx([1, 1 / 3])
    one = run(lambda own: slower(own, 1.05))
    calibrate.begin(one)
    assert one.balance.split == [8, 8]  # as good as even, for what a trial knows


def test_narrow_sequences_are_tried_as_they_come_and_count_as_whole_ones(monkeypatch):
    """But for what memory is tried for, which must hold whole ones."""
    passes(monkeypatch, 0.001)
    one = run()
    one.packed.width = lambda sequences: one.packed.full // 4 if sequences == list(range(16)) else 0
    found = calibrate.begin(one)
    assert one.width == one.packed.full // 4 and found[0] == pytest.approx({1: 0.004, 4: 0.016})
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    monkeypatch.setattr(calibrate, "_limit", lambda *_: False)
    found = calibrate.begin(one)
    assert one.width is None and found[0] == pytest.approx({1: 0.001, 4: 0.004})


def test_what_a_micro_batch_takes_whatever_its_size_is_told_by_both_sizes(monkeypatch):
    """Ranks whose passes of 1 and of 4 take as long: two of them each, and not 9 and 7 for a little less."""
    monkeypatch.setattr(calibrate, "_pass", lambda run, size: 0.001)
    one = run(lambda own: slower(own, 1.25))
    one.balance.at_once = [4, 4]
    calibrate.begin(one)
    assert one.balance.split == [8, 8] and one.balance.speeds == pytest.approx([1, 1 / 1.25])
    linear = solve(16, [1.0, 1.25])
    assert linear == [9, 7] and one.balance._longest(linear) == pytest.approx(3 * 0.001)


def test_the_longest_ranks_seconds_are_a_trials(monkeypatch):
    """Those of one rank alone would have some ranks try again and wait for the others."""
    passes(monkeypatch, 0.001)
    one = run()
    one.world.longer, told = 7.0, []
    monkeypatch.setattr(one.balance, "tried", told.append)
    calibrate.begin(one)
    assert 7 <= told[0] < 12


def test_a_pass_takes_as_long_as_it_does(monkeypatch):
    found = []

    def sleepy(run, packed, sequences):
        found.append(sequences)
        time.sleep(0.05)
        return torch.ones(1, requires_grad=True)

    monkeypatch.setattr(calibrate, "summed_loss", sleepy)
    one = run()
    one.progress.cursor = 7
    assert 0.05 <= calibrate._pass(one, 3) < 5
    assert found == [[7, 8, 9]]  # the next step's


def test_a_trial_leaves_nothing_behind():
    """A model that draws random numbers and counts its passes in a buffer is as it was."""
    one = run()
    model = one.strategy.model
    model.register_buffer("passes", torch.zeros(2))
    seen = []

    def count(*_):
        seen.append(torch.rand(1))
        model.passes = model.passes + 1  # another tensor, as some positions' frequencies are
        model.transformer.wte.weight.grad.add_(1)

    model.register_forward_hook(count)
    buffer, weights = model.passes, {name: p.clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    random = torch.get_rng_state()
    calibrate.begin(one)
    assert len(seen) >= 2
    assert model.passes is buffer and buffer.tolist() == [0, 0]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(not bucket.flat.any() for bucket in one.strategy.buckets)
    assert not one.optimizer.state and one.progress == Progress()


@pytest.mark.parametrize(
    ("seconds", "keys", "sizes"),
    [
        (0.001, {}, [1, 1, 1, *[4] * 20]),
        (0.1, {}, [1, 1, 1, 4, 4]),
        (30.0, {}, [1, 1, 4]),
        (30.0, {"micro_batch_size": 1}, [1, 1]),
        (0.001, {"compile": True}, [4] * 22),  # no other size is compiled
        (30.0, {"compile": True}, [4] * 2),
    ],
)
def test_a_trial_takes_about_a_second(monkeypatch, seconds, keys, sizes):
    made = passes(monkeypatch, seconds)
    calibrate.begin(run(**keys))
    assert made == sizes


def test_a_micro_batch_is_tried_however_long_it_takes(monkeypatch):
    """The other rank is as fast with one sequence, and three times as slow with four."""
    passes(monkeypatch, 1.0)

    def other(own):
        return own if isinstance(own[0], float) else [[n, t * (3 if n > 1 else 1)] for n, t in own]

    one = run(other)
    calibrate.begin(one)
    assert one.balance.split == [12, 4]


def test_all_go_through_as_many_as_the_slowest_can(monkeypatch):
    made = passes(monkeypatch, 0.01)
    calibrate.begin(run(lambda own: own if isinstance(own[0], list) else [0.1, 4]))
    assert made == [1, 1, 1, 4, 4]


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1)])
def test_ranks_with_room_for_unlike_sizes_go_through_as_many(monkeypatch, sizes):
    made = passes(monkeypatch, 0.01)
    own, other = sizes
    calibrate.begin(
        run(lambda told: told if isinstance(told[0], list) else [told[0], other], micro_batch_size=own)
    )
    assert len(made) == 3 + int(calibrate.BUDGET / 0.04) and made[:3] == [1, 1, 1]


def test_a_pass_that_was_disturbed_is_no_pass_that_takes_so_long_by_itself(monkeypatch):
    """Of all later shares, too: what a pass takes whatever its size is not learnt from steps."""
    passes(monkeypatch, 0.01)
    inner, calls = calibrate._pass, []

    def disturbed(run, size):
        calls.append(size)
        return inner(run, size) + (0.05 if len(calls) == 2 else 0)

    monkeypatch.setattr(calibrate, "_pass", disturbed)
    one = run(lambda own: own)
    calibrate.begin(one)
    assert calls[:3] == [1, 1, 1] and one.balance._lines[0] == (0.0, 1.0)


def memory_for(monkeypatch, room, error=torch.OutOfMemoryError):
    """A pass over more than `room` sequences at once fails."""
    inner = calibrate._pass

    def full(run, size):
        if size > room:
            raise error
        return inner(run, size)

    monkeypatch.setattr(calibrate, "_pass", full)


@pytest.mark.parametrize(("room", "at_once"), [(4, 4), (3, 2), (1, 1)])
def test_a_gpu_without_memory_for_a_micro_batch_computes_fewer_at_once(monkeypatch, capsys, room, at_once):
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    made = passes(monkeypatch, 0.001)
    one = run(lambda own: own if isinstance(own[0], list) else [own[0], 4])
    memory_for(monkeypatch, room)
    calibrate.begin(one)
    assert one.micro_batch_size == at_once and max(made) == at_once
    said = capsys.readouterr().out
    assert ("At once computes: rank 0 on desktop" in said) == (room < 4)


@pytest.mark.parametrize(
    ("balance", "size", "split"), [("even", 2, [8, 8]), ("3,13", 2, [3, 13]), ("auto", 1, [16])]
)
def test_memory_is_tried_where_shares_are_set_or_a_gpu_is_alone(monkeypatch, balance, size, split):
    """And nothing else is; on a CPU nothing at all."""
    made = passes(monkeypatch, 0.001)
    one = run(lambda own: own)
    one.world.size, one.balance = size, Balance(16, size, balance)
    if size == 1:
        one.world.gather = lambda own: [own]
    assert calibrate.begin(one) == [] and made == []
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    memory_for(monkeypatch, 2)
    assert calibrate.begin(one) == [] and one.balance.split == split
    assert one.micro_batch_size == 2 and made == [2]
    # Where ranks keep step, all go through more micro-batches then.
    one = run(lambda own: own, strategy="zero2")
    one.strategy.lockstep, one.world.size = True, size
    one.balance = Balance(16, size, balance, lockstep=4, at_once=[16] * size)
    if size == 1:
        one.world.gather = lambda own: [own]
    assert calibrate.begin(one) == [] and one.balance.split == split
    assert one.balance.passes == -(-max(split) // 2)


def test_no_more_is_tried_than_a_listed_share_will_ever_ask_for(monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    made = passes(monkeypatch, 0.001)
    one = run(lambda own: own)
    one.balance = Balance(16, 2, "3,13")
    memory_for(monkeypatch, 3)
    assert calibrate.begin(one) == [] and made == [3]
    assert one.micro_batch_size == 4 and "memory" not in capsys.readouterr().out


def test_a_gpu_without_memory_for_one_sequence_is_told(monkeypatch):
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)

    def full(run, size):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(calibrate, "_pass", full)
    with pytest.raises(torch.OutOfMemoryError):
        calibrate.begin(run())


def test_where_ranks_keep_step_a_larger_micro_batch_is_tried_before_it_is_relied_upon(monkeypatch):
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    made = passes(monkeypatch, 0.001)
    roomy = lambda own: slower(own) if isinstance(own[0], list) else [own[0], max(own)]  # noqa: E731
    one = run(roomy, strategy="zero2", micro_batch_size=8)
    one.strategy.lockstep = True
    one.balance = Balance(16, 2, lockstep=8, at_once=[16, 16])
    memory_for(monkeypatch, 10)
    calibrate.begin(one)  # 12 would do, and are tried; 8 were before, beside the other rank's 16
    assert one.balance.at_once == [8, 16] and one.micro_batch_size == 8
    assert one.balance.split == [8, 8] and one.balance.passes == 1 and max(made) == 8
    assert one.balance.wants == 12


@pytest.mark.parametrize(("room", "split"), [(24, [13, 8, 3]), (12, [11, 8, 5])])
def test_what_a_rank_has_no_memory_for_is_tried_by_those_who_get_it(monkeypatch, room, split):
    """Of three ranks the second has room for 8 sequences, and not for its 11: then 13 are this one's to try."""
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    made = passes(monkeypatch, 0.001)
    one = run(batch_size=24, strategy="zero2", micro_batch_size=8)
    one.strategy.lockstep = True
    one.balance = Balance(24, 3, lockstep=8, at_once=[24, 24, 24])
    one.world.size, one.world.hosts = 3, ["a", "b", "c"]

    def gather(own):
        if not isinstance(own, list):
            return [own] * 3
        if isinstance(own[0], list):
            return [own, own, slower(own, 4.0)]
        if isinstance(own[0], float):
            return [own] * 3
        second, third = map(one.balance.largest, (1, 2))
        return [own, [second, min(second, 8)], [third, third]]

    one.world.gather = lambda own: gather(json.loads(json.dumps(own)))
    memory_for(monkeypatch, room)
    calibrate.begin(one)
    assert one.balance.split == split and one.balance.passes == 1
    assert max(made) == split[0] and one.balance.at_once[1] == 8


@pytest.mark.parametrize(("room", "at_once", "tried"), [(4, 4, 3), (2, 2, 2)])
def test_a_rank_that_keeps_no_step_tries_what_other_shares_may_bring_it(monkeypatch, room, at_once, tried):
    """Even shares of 4 are 2 and 2; the faster rank may come to have 3, in one micro-batch."""
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    made = passes(monkeypatch, 0.001)
    one = run(lambda own: slower(own) if isinstance(own[0], list) else own, batch_size=4)
    one.balance = Balance(4, 2)
    memory_for(monkeypatch, room)
    found = calibrate.begin(one)
    assert one.balance.split == [3, 1] and one.micro_batch_size == at_once and max(made) == tried
    assert [list(times) for times in found] == [[1, 2], [1, 2]]  # speeds are measured with even shares


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (torch.AcceleratorError("CUDA error: out of memory", 2), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_memory_that_libraries_do_not_get_counts_as_torchs_own(monkeypatch, error, counts):
    monkeypatch.setattr(calibrate, "tries_memory", lambda device: True)
    passes(monkeypatch, 0.001)
    one = run(lambda own: own if isinstance(own[0], list) else [own[0], 4])
    memory_for(monkeypatch, 2, error)
    if counts:
        calibrate.begin(one)
        assert one.micro_batch_size == 2
        with pytest.raises(OutOfMemory), translated():
            raise error
    else:
        with pytest.raises(RuntimeError, match="mat1"):
            calibrate.begin(one)
