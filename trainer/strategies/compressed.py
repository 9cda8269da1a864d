"""ddp with gradients that travel in fewer bits or as factors (trainer/compress.py), once backward is over."""

import torch
import torch.distributed as dist

from trainer.compress import CODES, CodedSum, Factors
from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.ddp import DDP
from trainer.world import World, translated


class Compressed(DDP):
    """See the module. What has not travelled yet is kept in checkpoints, as the sum over ranks."""

    keeps = ("left",)

    def __init__(self, module: TokenLoss, world: World, config: Config):
        super().__init__(module, world, config)
        if config.comm == "powersgd":
            self._factors = Factors([p.grad for p in self._ordered()], config.powersgd_rank, world)
            self._sums = []
        else:
            self._factors = None
            self._sums = [
                CodedSum(bucket.flat.numel(), CODES[config.comm](), world) for bucket in self.buckets
            ]

    def _ordered(self) -> list[torch.nn.Parameter]:
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def _ready(self, bucket) -> None:
        """Nothing travels before all is there: the collectives' order is then the same on all ranks."""

    def finish(self) -> None:
        if self._factors:
            self._factors([parameter.grad for parameter in self._ordered()])
        for bucket, one in zip(self.buckets, self._sums, strict=self._factors is None):
            one(bucket.flat)

    @property
    def wire_bytes(self) -> int:
        return self._factors.sent if self._factors else sum(one.sent for one in self._sums)

    # ---- in a checkpoint ----

    def kept(self) -> dict[str, torch.Tensor]:
        left = self._left()
        with translated(self.world):
            for one in left.values():
                dist.all_reduce(one, group=self.world.training)
        return {f"left.{name}": one for name, one in left.items()}

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        """Each rank takes an equal part of what all had left over, however many they were."""
        for name, one in self._left(copies=False).items():
            found = kept.get(f"left.{name}")
            one.copy_(found.view_as(one) / self.world.size if found is not None else torch.zeros_like(one))

    def _left(self, copies: bool = True) -> dict[str, torch.Tensor]:
        """This rank's, by parameter, shaped like it; views unless `copies`."""
        names = {id(parameter): name for name, parameter in self.trainable.items()}
        found = {}
        if self._factors:
            split = [p for p, is_split in zip(self._ordered(), self._factors.split, strict=True) if is_split]
            for parameter, error in zip(split, self._factors.errors, strict=True):
                found[names[id(parameter)]] = error.view(parameter.shape)
        for bucket, one in zip(self.buckets, self._sums, strict=self._factors is None):
            parts = one.error.split([p.numel() for p in bucket.parameters])
            for parameter, error in zip(bucket.parameters, parts, strict=True):
                found[names[id(parameter)]] = error.view(parameter.shape)
        return {name: one.clone() for name, one in found.items()} if copies else found
