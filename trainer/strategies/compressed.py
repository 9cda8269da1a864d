"""ddp with gradients that travel in fewer bits or as factors (trainer/compress.py), once backward is over."""

import torch
import torch.distributed as dist

from trainer.compress import CODES, CodedSum, Factors
from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.ddp import DDP
from trainer.world import World, translated


class AfterBackward(DDP):
    """Nothing travels before backward is over, and each time something is left over, which checkpoints keep by name."""

    def _ready(self, bucket) -> None:
        """Nothing travels before all is there: the collectives' order is then the same on all ranks."""

    def _by_name(self, flats: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Views of flat tensors, one a bucket, by parameter and shaped like it."""
        names = {id(parameter): name for name, parameter in self.trainable.items()}
        found = {}
        for bucket, flat in zip(self.buckets, flats, strict=True):
            parts = flat.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, part in zip(bucket.parameters, parts, strict=True):
                found[names[id(parameter)]] = part.view(parameter.shape)
        return found

    def _summed(self, kind: str, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of `own`, as `kept` names them, each the sum over ranks; all ranks must call."""
        device = self.world.device
        found = {f"{kind}.{name}": one.to(device, copy=True) for name, one in own.items()}
        with translated(self.world):
            for one in found.values():
                dist.all_reduce(one, group=self.world.training)
        return found

    @staticmethod
    def _take(kind: str, own: dict[str, torch.Tensor], kept: dict[str, torch.Tensor], ranks: int) -> None:
        """Fill `own` with what is kept of it, an equal part for each of `ranks`; with zeros where nothing is."""
        for name, one in own.items():
            found = kept.get(f"{kind}.{name}")
            one.copy_(found.view_as(one) / ranks if found is not None else torch.zeros_like(one))

    def _take_errors(self, sums: list[CodedSum], kept: dict[str, torch.Tensor]) -> None:
        """Fill the errors of `sums`, one a bucket, with equal parts for all who send to other hosts."""
        between = sums[0].between
        sends = between.rank is not None
        own = self._by_name([one.error for one in sums])
        self._take("left", own, kept if sends else {}, between.size)


class Compressed(AfterBackward):
    """See the module. What has not travelled yet is kept in checkpoints, as the sum over ranks."""

    keeps = ("left",)

    def __init__(self, module: TokenLoss, world: World, config: Config):
        super().__init__(module, world, config)
        if config.comm == "powersgd":
            self._factors = Factors([p.grad for p in self._ordered()], config.powersgd_rank, world)
            self._sums = []
        else:
            self._factors = None
            code, circles = CODES[config.comm](), world.circles()
            self._sums = [CodedSum(bucket.flat.numel(), code, world, circles) for bucket in self.buckets]

    def _ordered(self) -> list[torch.nn.Parameter]:
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

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
        return self._summed("left", self._left())

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        """Each rank that codes takes an equal part of what all had left over, however many they were."""
        if self._factors:
            self._take("left", self._left(), kept, self.world.size)
        else:
            self._take_errors(self._sums, kept)

    def _left(self) -> dict[str, torch.Tensor]:
        """Views of this rank's, by parameter, shaped like it."""
        if not self._factors:
            return self._by_name([one.error for one in self._sums])
        names = {id(parameter): name for name, parameter in self.trainable.items()}
        split = [p for p, is_split in zip(self._ordered(), self._factors.split, strict=True) if is_split]
        return {
            names[id(parameter)]: error.view(parameter.shape)
            for parameter, error in zip(split, self._factors.errors, strict=True)
        }
