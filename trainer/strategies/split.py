"""A model's layers, one after the other on the GPUs of a host: for what fits no single one. Between hosts as ddp.

A rank has all of its host's GPUs, or an equal part of them, and holds all weights. Each GPU gets as many layers as its
free memory allows beside the others'; what is outside of the layers (embeddings, the last norm, the head) is on the
first. A layer's inputs come to where it lies, and autograd takes the gradients back. One GPU computes at a time.

Gradients are summed over the ranks once backward is over, in the model's order: hosts may lay their layers out
differently.
"""

import contextlib
import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import KVSharingDict

from trainer.config import Config
from trainer.errors import BadInput
from trainer.model import equal, quantize, stored
from trainer.model.footprint import QUANTISED
from trainer.model.load import frozen_dtype
from trainer.model.loss import TokenLoss
from trainer.strategies.base import Strategy, clipping
from trainer.strategies.ddp import split_up
from trainer.strategies.sharded import blocks
from trainer.sums import Sum
from trainer.ways import BUCKET_MB
from trainer.world import World, log, translated

ALONE = (
    "strategy: split lays a model's layers over several GPUs of a host, and no rank has more than one here; set "
    "strategy to another one (trainer plan names those that fit), or nproc_per_node to 1, so that a rank has all GPUs "
    "of its host"
)


def check(config: Config, world: World) -> None:
    """Refuse the strategy where no rank has several GPUs; all ranks must call.

    A run that has lost the hosts which have goes on as long as the model fits.
    """
    if config.strategy == "split" and max(world.gather(len(world.devices))) == 1:
        if world.environment.attempt == 1:
            raise BadInput(ALONE)
        if world.first:
            log("warning: no rank has several GPUs any more; all of the model is on one")


class Split(Strategy):
    """See the module."""

    def __init__(self, module: TokenLoss, world: World, config: Config):
        self.module, self.world, self.config = module, world, config
        layers = outermost(blocks(self.model))
        if not layers:
            raise BadInput(
                f"strategy: split: model {config.model} does not say which of its modules are layers "
                "(_no_split_modules); choose another strategy"
            )
        outside = {id(one): one for one in self.model.parameters()}
        sizes = []
        for layer in layers:
            own = list(layer.parameters())
            sizes.append(held(own, config))
            for one in own:
                outside.pop(id(one), None)
        numbers = places(sizes, held(outside.values(), config), _room(world.devices))
        self.layers = [(layer, world.devices[n]) for layer, n in zip(layers, numbers, strict=True)]
        self._lay_out()
        if len(world.devices) > 1:
            self._connect()
            counts = [numbers.count(n) for n in range(len(world.devices))]
            log(f"layers on {', '.join(map(str, world.devices))}: {', '.join(map(str, counts))}")
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for parameter in self.trainable.values():
            parameter.grad = torch.zeros_like(parameter)
        self._sum = Sum(world, world.layers() if world.size > 1 else None)
        self._bytes = sum(p.grad.nbytes for p in self.trainable.values())

    def _lay_out(self) -> None:
        """Bring every weight to its device; those that are still on disk are read there, one after the other."""
        home = {id(part): device for layer, device in self.layers for part in layer.modules()}
        at = [(part, home.get(id(part), self.world.device)) for part in self.module.modules()]
        names = {id(one): name for name, one in self.model.named_parameters()}
        frozen, files = frozen_dtype(self.config), getattr(self.model, "stored", None)
        filled = [
            one
            for part, device in (*self.layers, (self.model, self.world.device))
            for one in quantize.fill(part, files, names, frozen, device)
        ]
        equal.equalise(equal.with_scales(filled), self.world)
        for part, device in at:
            quantize.move(part, device)
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = buffer.to(device)
        of = {id(one): device for part, device in at for one in part.parameters(recurse=False)}
        names |= {id(one): name for name, one in self.model.named_parameters()}

        def brought(one):
            device = of[id(one)]
            if one.is_meta:
                return files.read(names[id(one)], slice(None)).to(device, one.dtype)
            return None if one.device == device else one.detach().to(device)

        stored.replace(self.model, brought)

    def _connect(self) -> None:
        """Have each layer's inputs brought to it, and what the last one gives to where the loss is computed."""
        for layer, device in self.layers:
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, device=device: moved((args, kwargs), device), with_kwargs=True
            )
        last, home = self.layers[-1][0], self.world.device
        last.register_forward_hook(lambda _, args, output: moved(output, home))

    def zero_grad(self) -> None:
        for parameter in self.trainable.values():
            parameter.grad.zero_()

    def micro_batch(self, last: bool):
        return contextlib.nullcontext()

    def finish(self) -> None:
        if self.world.size == 1:
            return
        with translated(self.world):
            limit = (self.config.bucket_mb or BUCKET_MB) << 20
            for parameters in split_up(reversed(self.trainable.values()), limit, lambda one: one.dtype):
                gradients = [one.grad for one in parameters]
                flat = torch.cat([one.flatten().to(self.world.device) for one in gradients])
                self._sum(flat)
                for one, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                    one.copy_(summed.view_as(one))

    def clip(self, limit: float, scale: float = 1.0) -> float:
        gradients = [one.grad for one in self.trainable.values()]
        norms = [torch.linalg.vector_norm(one).to(self.world.device) for one in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item() / scale
        norm = self._of_all(self.world.as_first, norm)
        factor = clipping(norm, limit) / scale
        if factor != 1:
            for one in gradients:
                one.mul_(factor)
        return norm

    @property
    def wire_bytes(self) -> int:
        return self._sum.sent(self._bytes)


def places(sizes: Sequence[int], outside: int, room: Sequence[int]) -> list[int]:
    """The number of the GPU that each layer is on, in order: all get the same share of their room filled, or nearly.

    sizes: bytes of each layer. outside: of what is no layer, and lies on the first. room: bytes free on each.
    """
    total, there = outside + sum(sizes), sum(room)
    ends = list(itertools.accumulate(total * one / there if there else total / len(room) for one in room))
    found, begin = [], outside
    for size in sizes:
        middle = begin + size / 2
        found.append(min(sum(middle >= end for end in ends), len(room) - 1))
        begin += size
    return found


def held(parameters: Iterable[nn.Parameter], config: Config) -> int:
    """Bytes of parameters, and of the gradients and moments of those that are trained."""
    trained = 4 + (2 if "8bit" in config.optimizer else 8)

    def width(one) -> float:
        if one.is_meta and quantize.is_quantised(one):  # it is still to be packed
            return QUANTISED["8bit" if hasattr(one, "SCB") else "4bit"]
        return one.element_size() + (trained if one.requires_grad else 0)

    return int(sum(width(one) * one.numel() for one in parameters))


def outermost(layers: list[nn.Module]) -> list[nn.Module]:
    """Those of `layers` that lie in no other of them."""
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def moved(value, device: torch.device):
    """`value` with the tensors that are in it, in tuples, lists and mappings, too, on `device`.

    What layers share of keys and values (Gemma 3n) goes there itself: later ones look for it in the same place.
    """
    return tree_map_only((torch.Tensor, KVSharingDict), lambda one: one.to(device, non_blocking=True), value)


def _room(devices: list[torch.device]) -> list[int]:
    """Bytes that each device has free; equal ones where that cannot be told."""
    return [torch.cuda.mem_get_info(one)[0] if one.type == "cuda" else 1 for one in devices]
