"""How fast each rank is, before the first step: all go through a few sequences, each for itself, at the same moment.

The passes are those of the run: its model, its strategy, its data. Nothing is sent meanwhile (Strategy.alone), and what
comes of them is thrown away: weights, optimizer, random numbers and losses know nothing of them. On a GPU they also
tell how many sequences there really is memory for at once.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator

import torch

from trainer import machine
from trainer.loop import Run, as_whole, now, summed_loss
from trainer.model.lora import key_dropout
from trainer.world import lacks_memory, log

# Seconds that the slowest rank tries for. Two passes of a sequence and one of a micro-batch are made, however long they
# take: a rank with many cores, or a large card, is not as much faster with one sequence as it is with a micro-batch.
BUDGET = 0.8
# Of one size, at most. Their mean counts, not their median: a rank with a quota of CPU goes at full speed for some
# hundredths of a second, and then stands still for as long.
PASSES = 20


def begin(run: Run) -> list[dict[int, float]]:
    """Give `run.balance` the shares of ranks that are as fast as they are now, unless these are set; all ranks must
    call.

    Returns the seconds of a micro-batch on each rank, by the sizes that were tried; empty where shares are set. Where a
    GPU has memory for fewer sequences than its rank was to compute at once, it computes fewer from now on.
    """
    world, balance = run.world, run.balance
    memory, start = tries_memory(world.device), time.perf_counter()
    if not (memory or balance.learns):
        return []
    batch = run.index.batch(run.progress.cursor, run.config.batch_size)
    run.width = None if memory else run.packed.width(batch)  # memory is tried for whole sequences
    found = []
    with _leaving_nothing(run):
        if memory:
            _limit(run, _most(run))
        if balance.learns:
            told = world.gather(list(_by_size(run, _size(run)).items()))
            full = as_whole(run)
            found = [{int(size): seconds * full for size, seconds in one} for one in told]
            each = [one[max(one)] / max(one) for one in found]
            balance.begin(each, found)
        # Where ranks keep step, a fast one's micro-batches are larger than what was tried; and what one has no memory
        # for goes to others, beyond what these have tried. It ends: each turn, some rank's most becomes less.
        known = _size(run)
        while memory and run.strategy.lockstep and _limit(run, asked := balance.largest(world.rank), known):
            known = max(known, min(asked, balance.at_once[world.rank]))
            if balance.learns:
                balance.begin(each)
    if memory:
        torch.cuda.empty_cache()  # what was tried and is not needed at once; NCCL does not take it from torch
        machine.forget_peak(world.devices)  # what was tried in vain is no need of a step's
    balance.tried(max(world.gather(time.perf_counter() - start)))  # of all, who are to come to the same
    return found


def tries_memory(device: torch.device) -> bool:
    """Whether memory that is not there is told at once, and a rank lives on; the CPU's kernel kills it later."""
    return device.type == "cuda"


def _size(run: Run) -> int:
    """Sequences of this rank's micro-batches with even shares."""
    return min(run.micro_batch_size, max(run.balance.even))


def _most(run: Run) -> int:
    """Sequences of this rank's micro-batches for which memory is tried before all else.

    Where ranks do not keep step, they are the most of any shares that steps may lead to, which nobody tries later.
    """
    if run.strategy.lockstep:
        return _size(run)
    if not run.balance.learns:
        return min(run.micro_batch_size, run.balance.split[run.world.rank])
    return min(run.micro_batch_size, run.config.batch_size - run.world.size + 1)


def _by_size(run: Run, size: int) -> dict[int, float]:
    """Seconds of this rank's micro-batches of one sequence, and of `size`; all ranks must call.

    They begin together, and go through as many.
    """
    world = run.world
    least = size if run.config.compile else 1  # another size would be compiled anew
    world.together(lambda: _pass(run, least))  # code is loaded, and memory found
    times = {least: world.together(lambda: _pass(run, least))}
    told = world.gather([times[least] / least, size])
    most = max(one for _, one in told)
    count = min(PASSES, int(BUDGET / (max(one for one, _ in told) * most)))
    if count == 0 and most > 1 and not run.config.compile:  # else it has been timed
        count = 1
    if count > 1 and most > 1 and not run.config.compile:  # of all ranks, which go through as many
        # What has disturbed the first would else be taken for what every pass takes.
        times[least] = min(times[least], world.together(lambda: _pass(run, least)))
    if count:
        times[size] = world.together(lambda: statistics.fmean(_pass(run, size) for _ in range(count)))
    return times


def _pass(run: Run, size: int) -> float:
    """Seconds of a micro-batch of the next step's first `size` sequences, forward and backward."""
    batch = run.index.batch(run.progress.cursor, run.config.batch_size)
    begin = now(run.world)
    summed_loss(run, run.packed, batch[:size]).backward()
    return now(run.world) - begin


def _limit(run: Run, asked: int, known: int = 0) -> bool:
    """Try whether each rank has memory for a micro-batch as large as it is `asked`, and have it compute no larger one.

    known: for so many it has. All ranks must call. Returns whether one of them has not.
    """
    world, balance = run.world, run.balance
    told = world.gather([asked, world.together(lambda: _room(run, asked, known))])
    less = {rank: room for rank, (wanted, room) in enumerate(told) if room < wanted}
    balance.at_once = [less.get(rank, one) for rank, one in enumerate(balance.at_once)]
    if run.strategy.lockstep:
        run.micro_batch_size = min(run.micro_batch_size, *balance.at_once)
    else:
        run.micro_batch_size = less.get(world.rank, run.micro_batch_size)
    if less and world.first:
        shown = ", ".join(f"rank {rank} on {world.hosts[rank]} {room}" for rank, room in less.items())
        log(f"warning: memory was tried, and is less than was counted. At once computes: {shown}")
    return bool(less)


def _room(run: Run, size: int, known: int) -> int:
    """As many of `size` sequences as a pass has memory for, halved where it has not; the optimizer's moments beside it.

    known: for so many it has. Raises torch's error where there is none for one.
    """
    state, kept = run.optimizer.state, []
    # Bytes of a weight's two moments; paged ones give way.
    width = 0 if "paged" in run.config.optimizer else 2 if "8bit" in run.config.optimizer else 8
    while size > known:
        try:
            for one in run.strategy.trainable.values():
                # One rank's gradients come to be in a step's first micro-batch; the others' memory is tried for.
                if run.world.size == 1 and one.grad is None and size < run.config.batch_size:
                    one.grad = torch.zeros_like(one)
                if one not in state:
                    kept.append(torch.empty(width * one.numel(), dtype=torch.uint8, device=one.device))
            _pass(run, size)
            break
        except RuntimeError as error:
            if size == 1 or not lacks_memory(error):
                raise
        kept.clear()
        run.strategy.abandon()
        torch.cuda.empty_cache()
        size = max(-(-size // 2), known)
    return size


@contextlib.contextmanager
def _leaving_nothing(run: Run) -> Iterator[None]:
    """Undo what passes that are made within it leave behind: gradients, random numbers, buffers."""
    module, strategy = run.strategy.module, run.strategy
    buffers = [
        (part, name, one, one.clone())
        for part in module.modules()
        for name, one in part._buffers.items()
        if one is not None
    ]
    cards = [device for device in run.world.devices if device.type == "cuda"]
    key_dropout(module, None)
    strategy.zero_grad()
    with torch.random.fork_rng(cards), strategy.alone():
        yield
    for part, name, one, before in buffers:
        part._buffers[name] = one.copy_(before)
    strategy.zero_grad()
