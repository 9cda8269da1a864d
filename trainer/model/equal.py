"""All ranks train from the same weights: what another processor or another file made otherwise is rank 0's."""

import hashlib
from collections.abc import Sequence

import torch

from trainer.model import quantize
from trainer.world import World, log


def held(model: torch.nn.Module) -> list[torch.Tensor]:
    """What `model` computes with and has in memory: weights, buffers, and by what quantised weights are made whole."""
    return with_scales([one for one in (*model.parameters(), *model.buffers()) if not one.is_meta])


def with_scales(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors, *(scale for one in tensors for scale in quantize.scales(one))]


def equalise(tensors: Sequence[torch.Tensor], world: World) -> set[str]:
    """Compare the ranks' `tensors`, of the same shapes on each; of those that differ all take rank 0's.

    Returns the hosts whose were others, which the log names. All ranks call it; it hashes some hundred MB a second.
    """
    if world.size == 1 or not tensors:
        return set()
    mine = [_digest(tensor) for tensor in tensors]
    totals = world.gather(hashlib.sha256("".join(mine).encode()).hexdigest())
    others = {world.hosts[rank] for rank, one in enumerate(totals) if one != totals[0]}
    if others:
        if world.first:
            log(f"the weights on {', '.join(sorted(others))} differ from rank 0's; all ranks take rank 0's")
        for tensor, *digests in zip(tensors, *world.gather(mine), strict=True):
            if len(set(digests)) > 1:
                values = tensor.detach().cpu().contiguous()
                world.broadcast(values, source=0)
                tensor.data.copy_(values)
    return others


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()[:16]
