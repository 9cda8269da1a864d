"""All ranks train from the same weights: what another processor or another file made otherwise is rank 0's."""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from trainer.model import quantize
from trainer.world import World, log


def held(model: torch.nn.Module) -> list[torch.Tensor]:
    """What `model` computes with and has in memory: weights, buffers, and by what quantised weights are made whole."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if not one.is_meta]
    return tensors + [scale for one in tensors for scale in quantize.scales(one)]


def equalise(tensors: Sequence[torch.Tensor], world: World) -> set[str]:
    """Compare the ranks' `tensors`, of the same shapes on each; of those that differ all take rank 0's.

    Returns the hosts whose were others. All ranks call it. It hashes every byte, some hundred MB a second.
    """
    if world.size == 1:
        return set()
    mine = [_digest(tensor) for tensor in tensors]
    totals = world.gather(hashlib.sha256("".join(mine).encode()).hexdigest())
    others = {world.hosts[rank] for rank, one in enumerate(totals) if one != totals[0]}
    if others:
        for tensor, *digests in zip(tensors, *world.gather(mine), strict=True):
            if len(set(digests)) > 1:
                values = tensor.detach().cpu().contiguous()
                world.broadcast(values, source=0)
                tensor.data.copy_(values)
    return others


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()[:16]


def tell(others: Iterable[str], world: World) -> None:
    """Say in the log whose weights `equalise` has found to be others."""
    if others and world.first:
        log(f"the weights on {', '.join(sorted(others))} differ from rank 0's; all ranks take rank 0's")
