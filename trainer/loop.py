"""The training loop. Read this first.

A step takes `batch_size` packed sequences, which every rank knows from (seed, cursor) alone. Each rank computes its
share of them, in micro-batches. Its loss is the sum over its tokens divided by the number of tokens of the *whole*
batch, and gradients are summed over ranks: the gradient is that of the batch's mean token loss, however the batch is
split. So the loss curve depends on data, seed, batch, model and optimizer, and on nothing else.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trainer import optim
from trainer.balance import shares
from trainer.config import Config
from trainer.data.index import Index
from trainer.data.pack import IGNORE, Packed
from trainer.errors import Diverged, Stopped
from trainer.model import lora
from trainer.strategies.base import Strategy
from trainer.world import World


@dataclass
class Progress:
    """How far the run is. With weights, optimizer state and configuration, it is all that a resume needs."""

    step: int = 0
    cursor: int = 0  # samples consumed
    tokens: int = 0  # tokens trained on
    epoch_loss: float = 0.0  # summed over the tokens of the epoch so far
    epoch_tokens: int = 0


@dataclass
class Run:
    """What the loop composes."""

    config: Config
    world: World
    packed: Packed
    index: Index
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    progress: Progress
    steps: int  # number of the last step
    peak_lr: float


@dataclass(frozen=True)
class StepReport:
    """What one step was like, equal on all ranks but for the times marked 'own'."""

    loss: float  # mean over the batch's tokens, in nats
    grad_norm: float
    lr: float
    tokens: int
    epoch: int
    shares: list[int]
    stop: bool  # some rank was asked to stop
    rank_seconds: list[float]  # compute, by rank
    step_seconds: float
    compute_seconds: float  # own
    comm_seconds: float  # own


def train(run: Run, observer) -> None:
    """Train to the last step.

    `observer` is told of every step, decides about stopping, and saves (recorder.py).
    """
    while run.progress.step < run.steps:
        report = train_step(run, observer.asked_to_stop)
        observer.after_step(report)
        if report.stop and run.progress.step < run.steps:
            observer.save()
            raise Stopped(
                f"stopped on request after step {run.progress.step} of {run.steps}; start it again to go on"
            )
        if run.config.checkpoint_every and run.progress.step % run.config.checkpoint_every == 0:
            observer.save()


def train_step(run: Run, asked_to_stop: Callable[[], bool]) -> StepReport:
    """One optimizer step over the global batch."""
    config, world, progress = run.config, run.world, run.progress
    begin = time.perf_counter()

    batch = run.index.batch(progress.cursor, config.batch_size)
    tokens = max(1, int(run.packed.valid[batch].sum()))
    split = shares(config.batch_size, world.size)
    offset = sum(split[: world.rank])
    mine = batch[offset : offset + split[world.rank]]
    largest = max(split) if run.strategy.lockstep else len(mine)
    micro_batches = spread(mine, -(-largest // config.micro_batch_size))

    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    run.strategy.zero_grad()
    for number, sequences in enumerate(micro_batches, 1):
        with run.strategy.micro_batch(last=number == len(micro_batches)):
            part = token_loss(run, sequences) / tokens
            part.backward()
        loss += part.detach()
    compute_seconds = _now(world) - begin - run.strategy.waited_seconds

    run.strategy.finish()
    grad_norm = run.strategy.clip(config.grad_clip)
    loss, asked, *rank_seconds = exchange(run, loss, asked_to_stop(), compute_seconds)
    comm_seconds = _now(world) - begin - compute_seconds
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise Diverged(
            f"diverged at step {progress.step + 1}: loss {loss}, gradient norm {grad_norm}; this step was not taken. "
            "Cure: a lower lr, more warmup_steps, a grad_clip; then start again from the last checkpoint"
        )

    lr = optim.learning_rate(config, run.peak_lr, progress.step + 1, run.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()

    epoch = progress.cursor // run.index.sequences
    progress.step += 1
    progress.cursor += config.batch_size
    progress.tokens += tokens
    return StepReport(
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        tokens=tokens,
        epoch=epoch,
        shares=split,
        stop=asked > 0,
        rank_seconds=rank_seconds,
        step_seconds=_now(world) - begin,
        compute_seconds=compute_seconds,
        comm_seconds=comm_seconds,
    )


def spread(sequences: list[int], count: int) -> list[list[int]]:
    """`sequences` in `count` micro-batches as even as can be; where there are fewer, the last ones are empty."""
    whole, rest = divmod(len(sequences), count)
    ends = [number * whole + min(number, rest) for number in range(count + 1)]
    return [sequences[first:end] for first, end in itertools.pairwise(ends)]


def token_loss(run: Run, sequences: list[int]) -> torch.Tensor:
    """The summed cross-entropy (nats, scalar) of some packed sequences (model/loss.py).

    Without sequences it is zero, but the model runs: so that all ranks keep step.
    """
    arrays = zip(*(run.packed[k] for k in sequences or [0]), strict=True)
    device = run.world.device
    inputs, labels, positions = (
        torch.from_numpy(np.stack(array)).to(device, non_blocking=True) for array in arrays
    )
    if not sequences:
        labels = torch.full_like(labels, IGNORE)
    if run.config.lora_dropout:
        step = run.config.seed * 1_000_003 + run.progress.step
        lora.key_dropout(run.strategy.module, [step * 1_000_003 + k for k in sequences or [0]])
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.config.dtype == "bfloat16"):
        return run.strategy.module(inputs, labels, positions)


def exchange(run: Run, loss: torch.Tensor, stop: bool, seconds: float) -> list[float]:
    """What ranks tell each other beside gradients, in one message: [loss, stops, seconds of rank 0, of 1, …]."""
    message = torch.zeros(2 + run.world.size, dtype=torch.float64, device=run.world.device)
    message[0] = loss
    message[1] = float(stop)
    message[2 + run.world.rank] = seconds
    return run.strategy.sum(message).tolist()


def _now(world: World) -> float:
    """The time in seconds, once the device has done what it was given."""
    if world.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
