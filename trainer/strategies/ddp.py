"""Data parallel: every rank holds all weights; gradients are summed, in buckets, while backward still runs.

torch's own DistributedDataParallel lays its buckets out anew after its first step, and a ring adds ranks in
an order that depends on a value's place in its bucket: a resumed run would differ in the last bit. Here the
layout is fixed, gradients are summed instead of averaged (a share may be of any size), and what travels is
one flat tensor a bucket, inside hosts first (trainer/sums.py).

One rank sends nothing, and has no buckets: a parameter's gradient is the tensor that the first backward makes, without
zeros that it would be added to.
"""

import contextlib

import torch

from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.base import Strategy, clipping
from trainer.sums import Sum
from trainer.ways import BUCKET_BYTES, BUCKET_MB, EXACT
from trainer.world import World, translated


class Bucket:
    """Some parameters, in the order in which backward reaches them; their gradients are views of `flat`."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.waiting = 0
        offset = 0
        for parameter in parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()


class DDP(Strategy):
    """See the module."""

    by_bucket = False  # whether one rank has them, too, as codes go by them

    def __init__(self, module: TokenLoss, world: World, config: Config):
        self.module, self.world = module.to(world.device), world
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # What waits for the end of backward gains nothing by small ones, and a run may have them from before.
        asked = (config.bucket_mb if config.comm in EXACT else None) or BUCKET_MB
        self.buckets = [
            Bucket(parameters)
            for group in self._groups(config)
            for parameters in split_up(reversed(group), min(BUCKET_BYTES, asked << 20))
            if world.size > 1 or self.by_bucket
        ]
        self._sending = False
        self._next = 0  # buckets travel in order, on every rank
        self._works: list = []
        self._sum = Sum(world, world.layers() if world.size > 1 else None)
        if world.size > 1:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._ready(bucket))

    def _groups(self, config: Config) -> list[list[torch.nn.Parameter]]:
        """What is trained, in the model's order, by what may share a bucket."""
        return [list(self.trainable.values())]

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()
        if not self.buckets:
            for parameter in self.trainable.values():
                parameter.grad = None

    @contextlib.contextmanager
    def micro_batch(self, last: bool):
        self._sending = last and self.world.size > 1
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)
        yield
        self._sending = False

    def _ready(self, bucket: Bucket) -> None:
        if self._sending:
            bucket.waiting -= 1
            while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
                self._send()

    def _send(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        self._works.append(self._sum.start(bucket.flat))

    def finish(self) -> None:
        if self.world.size == 1:
            # The optimizer goes by what this batch did not reach, too.
            for parameter in self.trainable.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return
        with translated(self.world):
            while self._next < len(self.buckets):  # parameters that this batch did not reach
                self._send()
            for work in self._works:
                work.wait()
        self._works.clear()
        self._next = 0

    def clip(self, limit: float, scale: float = 1.0) -> float:
        gradients = [bucket.flat for bucket in self.buckets] or [p.grad for p in self.trainable.values()]
        norm = torch.nn.utils.get_total_norm(gradients).item() / scale
        if not self.independent:
            norm = self._of_all(self.world.as_first, norm)
        factor = clipping(norm, limit) / scale
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        return norm

    @property
    def wire_bytes(self) -> int:
        return self._sum.sent(sum(bucket.flat.nbytes for bucket in self.buckets))


def split_up(parameters, limit: int, kind=lambda one: (one.dtype, one.device)):
    """Group parameters of one `kind` into buckets of about `limit` bytes."""
    bucket, size = [], 0
    for parameter in parameters:
        alike = not bucket or kind(parameter) == kind(bucket[0])
        if bucket and (size >= limit or not alike):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
