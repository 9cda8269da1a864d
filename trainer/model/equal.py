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
    """Compare the ranks' `tensors`, of as many bytes on each; where they differ, all take rank 0's.

    The hosts whose were others. All ranks call it, in the same order.
    """
    if world.size == 1:
        return set()
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    digests = world.gather(total.hexdigest())
    others = {world.hosts[rank] for rank, one in enumerate(digests) if one != digests[0]}
    if others:
        for tensor in tensors:
            values = tensor.detach().cpu().contiguous()
            world.broadcast(values, source=0)
            tensor.data.copy_(values)
    return others


def tell(others: Iterable[str], world: World) -> None:
    """Say in the log whose weights `equalise` has found to be others."""
    if others and world.first:
        log(f"the weights on {', '.join(sorted(others))} differ from rank 0's; all ranks take rank 0's")
