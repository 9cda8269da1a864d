"""How many steps a run makes, which rank computes how much of each, and how long that takes.

From the configuration, the size of the data, and the speeds of this host, which are tried for a moment.
"""

import math
import os
import time
from collections.abc import Callable

import torch

from trainer import ways
from trainer.balance import Balance, miscounted
from trainer.config import Config
from trainer.data import read
from trainer.environment import number
from trainer.errors import BadInput
from trainer.model.footprint import Footprint
from trainer.model.loss import HALF
from trainer.plan.resources import Place
from trainer.strategies import STRATEGIES

REACHED = 0.6  # of the speed of large matrix products: what a training step makes of it
LETTERS = 4  # of a text, a token
TRIES = 5  # of what is measured here for a moment
COPIED = 64 << 20  # bytes, to see how fast memory is: more than a cache holds


def steps(config: Config, epoch: int) -> int:
    """Steps of a run, about; epoch: those through all of the data, where the run goes by epochs."""
    if config.steps is None:
        return max(1, math.ceil(epoch * (config.epochs or 1)))
    return min(config.steps, math.ceil(epoch * config.epochs)) if config.epochs and epoch else config.steps


def steps_of_epoch(config: Config, letters: int, samples: int) -> int:
    """Steps through so many letters, about; where nothing is packed, each sample but a paragraph has a sequence."""
    sequences = letters / LETTERS / config.sequence_length
    if not config.packing and read.of_records(config):
        sequences = max(sequences, samples)
    return max(1, math.ceil(sequences / config.batch_size))


def trained_on(config: Config) -> tuple[int, int]:
    """Characters and samples of an epoch: what is held out is read, too, and not counted.

    Raises BadInput as read.check does.
    """
    everything, held_out = read.check(config), read.check(config, ("validation",))
    part = 1 - (config.validation_split or 0)
    samples, letters = (round((one - other) * part) for one, other in zip(everything, held_out, strict=True))
    return letters, samples


def share(config: Config, ranks: int, speeds: str | None) -> dict:
    """The ranks' shares of a step, and how many times as fast as even ones that makes it; both by `speeds`.

    {split, speed_up, speeds, at_once}; without speeds even shares, and the next two None. at_once: sequences of the
    largest micro-batch. Raises BadInput.
    """
    if fault := miscounted(config.balance, ranks):
        raise fault
    kind, size = STRATEGIES[config.strategy], config.micro_batch_size
    balance = Balance(
        config.batch_size,
        ranks,
        config.balance,
        grain=size if config.compile else 1,
        lockstep=size if kind.lockstep and ranks > 1 else 0,
        # What memory the other hosts have is known when they meet (trainer/room.py).
        at_once=None if config.compile else [config.batch_size] * ranks,
    )

    def told(speed_up: float | None, found: list[float] | None) -> dict:
        largest = min(size, max(balance.split))
        if balance.lockstep:
            largest = max(map(balance.largest, range(ranks)))
        return {"split": balance.split, "speed_up": speed_up, "speeds": found, "at_once": largest}

    if speeds is None:
        return told(None, None)
    try:
        found = [float(one) for one in speeds.split(",")]
    except ValueError:
        found = []
    if len(found) != ranks or not all(0 < one < math.inf for one in found):
        raise BadInput(
            f"--speeds: found {speeds}; expected a number above 0 for each of the {ranks} ranks, by commas, such as "
            f"{','.join(['2', *['1'] * (ranks - 1)])}"
        )
    balance.foresee([1 / one for one in found])
    return told(balance.gain, found)


def estimate(config: Config, found: Footprint, place: Place, shared: dict) -> dict:
    """Steps, tokens and seconds; the speeds are those of matrix products and of memory here, tried for a moment.

    shared: who has how much of a step, by which speeds (`share`): those of the other ranks follow from this host's.
    """
    speed = _matrix_speed(config, place.device)
    threads = torch.get_num_threads() / max(1, config.threads or len(os.sched_getaffinity(0)) // place.here)
    if place.device.type == "cpu" and threads > 1:
        speed /= threads
    speeds = shared["speeds"] or [1.0] * place.ranks
    # What checkpointed activations cost: forward once more, 2 operations a weight of 6, or of 4 where it is frozen.
    again = (3 / 2 if config.adapter != "none" else 4 / 3) if config.gradient_checkpointing else 1.0
    own = speeds[min(number("RANK_OFFSET", 0), place.ranks - 1)]
    longest = max(part * own / speed for part, speed in zip(shared["split"], speeds, strict=True))
    return {
        "steps": steps(config, place.epoch),
        "tokens_a_step": config.batch_size * config.sequence_length,
        "flops_a_token": found.flops,
        "matrix_flops_per_second": speed,
        "compute_seconds": longest * config.sequence_length * found.flops * again / (REACHED * speed),
        "optimizer_seconds": 4 * ways.ADAMW * found.trainable / _memory_speed(place.device),
    }


def _matrix_speed(config: Config, device: torch.device) -> float:
    """FLOP/s of a product of two matrices here, in the run's format."""
    size = 4096 if device.type == "cuda" else 1024
    one = torch.ones(size, size, dtype=HALF.get(config.dtype, torch.float32), device=device)
    return 2 * size**3 / _least_seconds(lambda: one @ one, device)


def _memory_speed(device: torch.device) -> float:
    """Bytes a second that are read or written here, by copies."""
    one = torch.ones(COPIED // 4, device=device)
    other = torch.empty_like(one)
    return 2 * COPIED / _least_seconds(lambda: other.copy_(one), device)


def _least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """What it takes there: the best of some tries."""
    best = math.inf
    for _ in range(TRIES):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
