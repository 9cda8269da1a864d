"""The loss on held-out data, by all ranks."""

from collections.abc import Callable

import torch

from trainer.balance import passes
from trainer.data.pack import Packed
from trainer.loop import Run, summed_loss
from trainer.model.lora import key_dropout

ROUNDS = 64  # of an evaluation at most, after each of which ranks tell each other whether to end


def evaluate(
    run: Run, held_out: Packed, beat: Callable[[], None], asked_to_stop: Callable[[], bool] = lambda: False
) -> float | None:
    """The mean loss (nats a token) over all of `held_out`, equal on all ranks; all must call.

    beat: called at each micro-batch, as a sign that it goes on. None on all ranks where one was asked to stop before
    the end: what was computed is of no use then.

    The model stays in training mode, in which nothing but the adapter's dropout differs, and that is off here:
    quantised layers may pack their weights anew in evaluation mode (model/quantize.py).
    """
    world, shares, size = run.world, run.balance, run.micro_batch_size
    parts = shares.parts(len(held_out))
    mine = parts[world.rank]
    count = -(-len(mine) // size)
    if run.strategy.lockstep:  # every rank goes through as many micro-batches, and a faster one's are larger
        even = shares.split == shares.even
        count = passes(list(map(len, parts)), [size] * world.size if even else shares.at_once)
        size = size if even else -(-len(mine) // count)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    key_dropout(run.strategy.module, None)
    # As many on all ranks, whatever their parts.
    rounds = max(1, min(ROUNDS, len(held_out) // (world.size * run.config.micro_batch_size)))
    for number in range(rounds):
        with torch.no_grad():
            for one in range(count * number // rounds, count * (number + 1) // rounds):
                beat()
                sequences = list(mine[one * size : (one + 1) * size])
                if sequences or run.strategy.lockstep:
                    loss = summed_loss(run, held_out, sequences)
                    total[0] += loss
        # Each has gone through its part alone, some far faster than others: that is a wait, and nobody has hung.
        if any(world.gather(asked_to_stop())) and number + 1 < rounds:
            return None
    total[1] = float(held_out.valid[mine.start : mine.stop : mine.step].sum())
    loss, tokens = run.strategy.sum(total).tolist()
    return loss / max(1.0, tokens)
