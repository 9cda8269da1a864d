"""The training loop. Read this first.

A step takes `batch_size` sequences, which every rank knows from (seed, cursor) alone. Each rank computes its share of
them, in micro-batches. Its loss is the sum over its tokens divided by the number of tokens of the *whole*
batch, and gradients are summed over ranks: the gradient is that of the batch's mean token loss, however the batch is
split. So the loss curve depends on data, seed, batch, model and optimizer, and on nothing else.
"""

import itertools
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer import machine, optim
from trainer.balance import Balance, sizes
from trainer.config import Config
from trainer.data.index import Index
from trainer.data.pack import IGNORE, Packed
from trainer.errors import Stopped
from trainer.model import lora, router
from trainer.model.loss import autocast
from trainer.strategies.base import Strategy
from trainer.world import World

SETTLED = 20  # steps before a loss can be called a spike
SCALE, LARGEST_SCALE = 2.0**16, 2.0**24  # of the loss in float16: at first, and at most
EMPTY = 2  # tokens of a micro-batch without sequences
GROWTH = 2000  # steps without an overflow, after which the scale is doubled


@dataclass
class Progress:
    """How far the run is. With weights, optimizer state and configuration, it is all that a resume needs."""

    step: int = 0
    cursor: int = 0  # samples consumed
    tokens: int = 0  # tokens trained on
    epoch_loss: float = 0.0  # summed over the tokens of the epoch so far
    epoch_tokens: int = 0
    recent_loss: float = 0.0  # of the last steps, smoothed; what a spike is measured by
    recent_steps: int = 0
    best_loss: float | None = None  # of the evaluations so far
    best_step: int = 0
    best_saved: int = 0  # the newest step that was the best and whose checkpoint is there
    no_better: int = 0  # evaluations in a row since the best
    evaluated_step: int = 0  # of the last one
    passed_over: int = 0  # batches that did harm, in a row
    loss_scale: float = field(default_factory=lambda: SCALE)  # of gradients in float16, else too small for it
    scaled_steps: int = 0  # since it was last changed
    launch: str = ""  # the newest start of the run that made steps (TRAINYARD_LAUNCH)
    held_out: str | None = None  # digest of what the best loss was measured on; None: nobody noted it

    def judge_by(self, held_out: str) -> bool:
        """Evaluations are made on the data of this digest; whether the best one was of other data, and is forgotten."""
        other = self.best_loss is not None and self.held_out not in (None, held_out)
        if other:
            self.best_loss, self.best_step, self.best_saved, self.no_better = None, 0, 0, 0
        self.held_out = held_out
        return other


@dataclass
class Run:
    """What the loop composes."""

    config: Config
    world: World
    packed: Packed
    held_out: Packed | None  # what evaluations are made on
    index: Index
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    progress: Progress
    steps: int  # number of the last step
    peak_lr: float
    balance: Balance
    micro_batch_size: (
        int  # sequences that this rank computes at once; where ranks keep step, all have room for them
    )
    router_coef: float = 0.0  # weight of the routers' auxiliary loss (model/router.py)
    from_random: bool = False  # weights, of a model that came without
    # Tokens of a sequence that are computed in this step, the same on all ranks; all, before the first one.
    width: int | None = None
    # Seconds of this rank's last step: compression, and the optimizer with the clipping.
    last_own: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class StepReport:
    """What one step was like, equal on all ranks but for the times marked 'own'."""

    loss: float  # mean over the batch's tokens, in nats
    grad_norm: float
    lr: float
    router_loss: float | None  # the routers' auxiliary loss, before its weight, where there is one
    tokens: int  # with a loss
    computed: int  # but for padding after a sequence's only document
    epoch: int
    shares: list[int]
    stop: bool  # some rank was asked to stop
    save: bool  # the first rank finds that it is time for a checkpoint
    save_failed: bool  # the checkpoint that some rank was writing did not come to be
    rank_seconds: list[float]  # compute, by rank
    # By rank, of the step before: coding what travels and diloco's outer step; the optimizer and the loop's rest.
    rank_compression_seconds: list[float]
    rank_optimizer_seconds: list[float]
    rank_memory_peak_bytes: list[int]  # the most so far, by rank, before the optimizer's step
    rank_held_bytes: list[int]  # of metrics and log, that its disk has no room for, by rank
    step_seconds: float
    compute_seconds: float  # own
    comm_seconds: float  # own, with compression and waiting for others


def train(run: Run, observer) -> None:
    """Train to the last step.

    `observer` is told of every step, decides about stopping, evaluates and saves (recorder.py).
    """
    config, progress = run.config, run.progress
    if evaluation_is_due(run):  # the run was stopped before it
        observer.evaluate()
    # A run that ended for want of patience, and was interrupted before its model was written, has ended.
    before = None  # the loss scale, while a batch is tried with smaller ones
    while progress.step < run.steps and not (config.patience and progress.no_better >= config.patience):
        report = None
        try:
            report = train_step(run, observer)
        except Harmful as harm:
            # A batch that no scale would do for says nothing of the others'.
            progress.loss_scale, before = before or progress.loss_scale, None
            observer.after_harm(harm)
        except Wordless as empty:
            observer.after_wordless(empty)
        except Overflow:
            before = before or progress.loss_scale
            progress.loss_scale, progress.scaled_steps = progress.loss_scale / 2, 0
            continue
        else:
            before = None
            observer.after_step(report)
            if report.save_failed:
                observer.settle()
            if report.stop and progress.step < run.steps:
                observer.save_last()
                raise Stopped(
                    f"stopped on request after step {progress.step} of {run.steps}; start it again to go on"
                )
        # Before an evaluation, which may take long: what comes then costs none of the steps.
        every = config.checkpoint_every
        due = report and (report.save or (every and progress.step % every == 0))
        if due or (config.checkpoint_epochs and epoch_has_ended(run)):
            observer.save()
        if evaluation_is_due(run):
            observer.evaluate()
            if config.patience and progress.no_better >= config.patience:
                break


def epoch_has_ended(run: Run) -> bool:
    """Whether the last batch, be it trained on or passed over, was the last of its epoch, or of the run."""
    cursor, sequences = run.progress.cursor, run.index.sequences
    begun = (cursor - run.config.batch_size) // sequences
    return run.progress.step == run.steps or cursor // sequences > begun


def epoch_steps(run: Run) -> int:
    """Steps of an epoch."""
    return -(-run.index.sequences // run.config.batch_size)


def evaluation_is_due(run: Run) -> bool:
    """Whether the weights as they are now are to be evaluated, and were not yet."""
    step, every = run.progress.step, run.config.eval_every
    if run.held_out is None or run.progress.evaluated_step == step:
        return False
    return step == run.steps or (step % every == 0 if every else epoch_has_ended(run))


def evaluations_left(run: Run) -> int:
    """How many there are after this step, up to the last one, which always has its own."""
    step, every = run.progress.step, run.config.eval_every
    left = run.steps - step
    if run.held_out is None or not left:
        return 0
    if every:
        return -(-run.steps // every) - step // every
    cursor, batch, sequences = run.progress.cursor, run.config.batch_size, run.index.sequences
    end = (cursor + left * batch) // sequences  # epochs
    besides = end == (cursor + (left - 1) * batch) // sequences  # the last step ends none
    return min(left, end - cursor // sequences + besides)


def train_step(run: Run, observer) -> StepReport:
    """One optimizer step over the global batch; raises Harmful where it would do harm, before it is taken.

    Raises Overflow where it is to be tried again, and Wordless where there is nothing to learn.
    """
    config, world, progress = run.config, run.world, run.progress
    begin = time.perf_counter()

    batch = run.index.batch(progress.cursor, config.batch_size)
    tokens = int(run.packed.valid[batch].sum())
    if not tokens:
        raise Wordless(f"step {progress.step + 1}: none of the batch's tokens counts")
    run.width = run.packed.width(batch)
    split = run.balance.split
    offset = sum(split[: world.rank])
    mine = batch[offset : offset + split[world.rank]]
    alone = -(-len(mine) // run.micro_batch_size)
    micro_batches = spread(mine, run.balance.passes if run.strategy.lockstep else alone)
    own = int(run.packed.valid[mine].sum())
    divisor = max(1, own) if run.strategy.independent else tokens

    scale = progress.loss_scale if config.dtype == "float16" else 1.0
    losses = torch.zeros(2, dtype=torch.float64, device=world.device)  # of the tokens, and of the routers
    run.strategy.zero_grad()
    routed, waited = expert_weights(run, micro_batches) if run.router_coef else (None, 0.0)
    for number, sequences in enumerate(micro_batches, 1):
        with run.strategy.micro_batch(last=number == len(micro_batches)):
            if routed is None:
                part = whole = token_loss(run, sequences) / divisor
            else:
                part, balance = token_loss(run, sequences, routed)
                part = part / tokens
                whole = part + run.router_coef * balance
                losses[1] += balance.detach()
            (whole * scale).backward()
        losses[0] += part.detach() * (divisor / tokens)
        observer.alive()
    compute_seconds = now(world) - begin - waited - run.strategy.waited_seconds

    run.strategy.compression_seconds()  # what a checkpoint has taken since the last step is not this one's
    run.strategy.finish()
    finished = now(world)
    grad_norm = run.strategy.clip(config.grad_clip, scale)
    clip_seconds = now(world) - finished - run.strategy.clip_waited
    flags = (observer.asked_to_stop(), observer.save_is_due(), observer.save_has_failed())
    loss, router_loss, squares, stop, save, save_failed, *by_rank = exchange(
        run,
        losses,
        grad_norm,
        flags,
        [compute_seconds, *run.last_own, machine.peak_bytes(world.devices), observer.held_bytes()],
    )
    rank_seconds, compression, optimizer, peaks, held = (
        by_rank[n * world.size :][: world.size] for n in range(5)
    )
    if run.strategy.independent:
        grad_norm = math.sqrt(squares / world.size) if math.isfinite(squares) else math.inf
    comm_seconds = now(world) - begin - compute_seconds - clip_seconds
    # Where a host has several ranks, one codes for all of them while they wait for it.
    alone = world.size == len(world.firsts)
    besides = [*map(sum, zip(compression, optimizer, strict=True))] if alone else optimizer
    full = as_whole(run)
    run.balance.learn(*([seconds * full for seconds in some] for some in (rank_seconds, besides)))
    if config.dtype == "float16":
        keep_scale(progress, loss, grad_norm)
    refuse_harm(run, loss, grad_norm)

    lr = optim.learning_rate(config, run.peak_lr, progress.step + 1, run.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    stepped = now(world)
    run.strategy.stepped(own, last=progress.step + 1 == run.steps)
    comm_seconds += now(world) - stepped
    step_seconds = now(world) - begin
    run.last_own = (run.strategy.compression_seconds(), step_seconds - compute_seconds - comm_seconds)

    epoch = progress.cursor // run.index.sequences
    progress.step += 1
    progress.cursor += config.batch_size
    progress.tokens += tokens
    progress.passed_over = 0
    return StepReport(
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        router_loss=router_loss if routed is not None else None,
        tokens=tokens,
        computed=sum(run.packed.lengths(batch)),
        epoch=epoch,
        shares=split,
        stop=stop > 0,
        save=save > 0,
        save_failed=save_failed > 0,
        rank_seconds=rank_seconds,
        rank_compression_seconds=compression,
        rank_optimizer_seconds=optimizer,
        rank_memory_peak_bytes=[int(peak) for peak in peaks],
        rank_held_bytes=[int(one) for one in held],
        step_seconds=step_seconds,
        compute_seconds=compute_seconds,
        comm_seconds=comm_seconds,
    )


class Harmful(Exception):
    """A batch whose loss or gradient is not finite, or a spike; equal on all ranks."""


class Wordless(Exception):
    """A batch without a token that counts, as where answers alone do: there is nothing to learn; equal on all ranks."""


class Overflow(Exception):
    """Gradients that were too large for float16, so that the step is to be tried with a smaller scale; on all ranks."""


def as_whole(run: Run) -> float:
    """How many times as long as this step's sequences whole ones take, where a rank's seconds are its own.

    What it waits, or sends, does not depend on their width.
    """
    return run.config.sequence_length / run.width if run.width and run.balance.watched else 1.0


def keep_scale(progress: Progress, loss: float, grad_norm: float) -> None:
    """Raise Overflow where the loss is good and its scaled gradient is not; else let the scale grow in time."""
    if math.isfinite(loss) and not math.isfinite(grad_norm) and progress.loss_scale > 1:
        raise Overflow
    progress.scaled_steps += 1
    if progress.scaled_steps >= GROWTH and progress.loss_scale < LARGEST_SCALE:
        progress.loss_scale, progress.scaled_steps = progress.loss_scale * 2, 0


def refuse_harm(run: Run, loss: float, grad_norm: float) -> None:
    """Raise Harmful for a step that should not be taken; else remember its loss."""
    progress, factor = run.progress, run.config.spike_factor
    what = f"loss {loss:.6g}, gradient norm {grad_norm:.6g}"
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise Harmful(f"step {progress.step + 1}: {what}")
    if factor and progress.recent_steps >= SETTLED and loss > factor * progress.recent_loss:
        raise Harmful(f"step {progress.step + 1}: a spike, {what}, {progress.recent_loss:.6g} before")
    weight = max(0.05, 1 / (progress.recent_steps + 1))
    progress.recent_loss += weight * (loss - progress.recent_loss)
    progress.recent_steps += 1


def spread(sequences: list[int], count: int) -> list[list[int]]:
    """`sequences` in `count` micro-batches as even as can be; where there are fewer, the last ones are empty."""
    ends = [0, *itertools.accumulate(sizes(len(sequences), count))]
    return [sequences[first:end] for first, end in itertools.pairwise(ends)]


def expert_weights(run: Run, micro_batches: list[list[int]]) -> tuple[router.Ask, float]:
    """What is asked of the routers in this step: the experts' weights in their loss, by the choices of all its tokens.

    Costs a forward pass over the batch. Also tells the seconds that the sum of the choices took, most of them until the
    slowest rank had its own.
    """
    chosen = router.chosen(run.strategy.model)
    with torch.no_grad():
        answers = [(token_loss(run, one, router.Ask(chosen))[1], bool(one)) for one in micro_batches]
    counts = sum(counts * some for counts, some in answers)
    counted = now(run.world)
    run.strategy.sum(counts)
    return router.Ask(chosen, router.weights(counts, chosen)), now(run.world) - counted


def token_loss(run: Run, sequences: list[int], routed: router.Ask | None = None):
    """The summed cross-entropy (nats, scalar) of some sequences of the training data.

    Without sequences it is zero, but the model runs: so that all ranks keep step. With `routed`: see TokenLoss.
    """
    if run.config.lora_dropout:
        step = run.config.seed * 1_000_003 + run.progress.step
        lora.key_dropout(run.strategy.module, [step * 1_000_003 + k for k in sequences or [0]])
    return summed_loss(run, run.packed, sequences, routed)


def summed_loss(run: Run, packed: Packed, sequences: list[int], routed: router.Ask | None = None):
    """As `token_loss`, of sequences of any data (model/loss.py)."""
    inputs, labels, positions = tensors(run, packed, sequences)
    if not sequences and routed is not None and routed.weights is not None:
        routed = router.Ask(routed.chosen, torch.zeros_like(routed.weights))
    with autocast(run.world.device, run.config.dtype):
        return run.strategy.module(inputs, labels, positions, *([routed] if routed else []))


def tensors(run: Run, packed: Packed, sequences: list[int]) -> list[torch.Tensor]:
    """Inputs, labels and positions (B, S) of some sequences, on the device; S is the step's width, or what these want.

    Without sequences they are a few tokens without a loss: a rank that only keeps step has next to nothing to compute.
    """
    width = run.width if packed is run.packed else packed.width(sequences or [0])
    rows = zip(*(packed[k] for k in sequences or [0]), strict=True)
    arrays = [np.stack([row[:width] for row in array]) for array in rows]
    if not sequences:
        arrays = [array[:, :EMPTY] for array in arrays]
        arrays[1] = np.full_like(arrays[1], IGNORE)
    return [torch.from_numpy(array).to(run.world.device) for array in arrays]


def exchange(
    run: Run, losses: torch.Tensor, norm: float, flags: tuple[bool, ...], own: list[float]
) -> list[float]:
    """What ranks tell each other beside gradients, in one message; `own`: figures that each rank has of itself.

    [both losses, the sum of the squared norms, how many set the first flag, the second one, …, the first figure of
    rank 0, of rank 1, …, the second one of rank 0, …].
    """
    figures = [[0.0] * run.world.size for _ in own]
    for figure, value in zip(figures, own, strict=True):
        figure[run.world.rank] = value
    told = itertools.chain.from_iterable(figures)
    message = torch.tensor(
        [0.0, 0.0, norm**2 if math.isfinite(norm) else math.inf, *map(float, flags), *told],
        dtype=torch.float64,
        device=run.world.device,
    )
    message[:2] = losses
    return run.strategy.sum(message).tolist()


def now(world: World) -> float:
    """The time in seconds, once the rank's devices have done what they were given."""
    if world.device.type == "cuda":
        for device in world.devices:
            torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
