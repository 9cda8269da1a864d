"""The loss on held-out data, by all ranks."""

from collections.abc import Callable

import torch

from trainer.data.pack import Packed
from trainer.loop import Run, summed_loss
from trainer.model.lora import key_dropout


def evaluate(run: Run, held_out: Packed, beat: Callable[[], None]) -> float:
    """The mean loss (nats a token) over all of `held_out`, equal on all ranks; all must call.

    beat: called at each micro-batch, as a sign that it goes on.

    The model stays in training mode, in which nothing but the adapter's dropout differs, and that is off here:
    quantised layers may pack their weights anew in evaluation mode (model/quantize.py).
    """
    world, size = run.world, run.micro_batch_size
    mine = range(world.rank, len(held_out), world.size)
    # Where passes are collective, every rank goes through as many as rank 0, which has the most.
    passes = -(-len(range(0, len(held_out), world.size)) // size)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    key_dropout(run.strategy.module, None)
    with torch.no_grad():
        for number in range(passes):
            beat()
            sequences = list(mine[number * size : (number + 1) * size])
            if sequences or run.strategy.lockstep:
                loss = summed_loss(run, held_out, sequences)
                total[0] += loss
    total[1] = float(held_out.valid[mine.start :: world.size].sum())
    loss, tokens = run.strategy.sum(total).tolist()
    return loss / max(1.0, tokens)
