"""ddp with gradients that travel in fewer bits or as factors (trainer/compress.py), once backward is over."""

from collections.abc import Iterator

import torch

from trainer.compress import CODES, CodedSum, Factors
from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.ddp import DDP
from trainer.world import World, translated

# What checkpoints have besides weights and moments, by way (Strategy.keeps). First what has not travelled: `left` of
# gradients, `unsent` of how far weights have gone in a round, which is no gradient: another way does without it.
KEEPS = {
    "16bit": ("left",),
    "8bit": ("left",),
    "powersgd": ("left", "right"),
    "diloco": ("unsent", "momentum"),
}


class Alone(DDP):
    """One host, to which no other has come: nothing is coded, and what more hosts have kept is there when they return.

    Gradients that had not travelled come to the first step's, once, and are no more left over then. Where that host has
    one rank, what diloco's meetings left out, and their momentum, wait for the next one.
    """

    def __init__(self, module: TokenLoss, world: World, config: Config):
        super().__init__(module, world, config)
        self.keeps = KEEPS[config.comm]
        self._kept: dict[str, torch.Tensor] = {}
        self._due = {f"left.{name}": parameter for name, parameter in self.trainable.items()}

    def finish(self) -> None:
        super().finish()
        for key, parameter in self._due.items():
            if key in self._kept:
                parameter.grad += self._kept[key].to(parameter.grad)

    def stepped(self, tokens: int, last: bool) -> None:
        for key in self._due:
            self._kept.pop(key, None)

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((key, one.clone()) for key, one in self._kept.items())

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        self._kept = dict(kept)


class AfterBackward(DDP):
    """Nothing travels before backward is over, and each time something is left over, which checkpoints keep by name."""

    by_bucket = True

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

    _saved = 0  # bytes that checkpoints have made this rank send, and that no step has counted yet

    def _sum_exactly(self, one: torch.Tensor) -> None:
        """`one`, float32, becomes the sum over ranks, for a checkpoint; all ranks must call."""
        with translated(self.world):
            self._sum(one.view(-1))
            if one.is_cuda:  # NCCL counts a sum's time from when it was queued, and a checkpoint has many
                torch.cuda.current_stream(one.device).synchronize()
        self._saved += self._sum.sent(one.nbytes)

    def _summed(self, kind: str, own: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of `own`, as `kept` gives them, each the sum over ranks; all ranks must go through them."""
        for name, one in own.items():
            total = one.to(self.world.device, copy=True)
            self._sum_exactly(total)
            yield f"{kind}.{name}", total

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
        self._take(self.keeps[0], own, kept if sends else {}, between.size)


class Compressed(AfterBackward):
    """See the module. What has not travelled yet is kept in checkpoints, as the sum over ranks.

    With powersgd they have the columns, too, from which the next power iteration goes on (`right`).
    """

    def __init__(self, module: TokenLoss, world: World, config: Config):
        super().__init__(module, world, config)
        self.keeps = KEEPS[config.comm]
        self._counted = 0  # bytes, of what the last step counts for the checkpoint before it
        circles = world.circles()
        if config.comm == "powersgd":
            gradients = [parameter.grad for parameter in self._ordered()]
            self._factors = Factors(gradients, config.powersgd_rank, world, self._sum, circles)
            self._sums = []
        else:
            self._factors = None
            code = CODES[config.comm]()
            self._sums = [CodedSum(bucket.flat.numel(), code, world, circles) for bucket in self.buckets]

    def _ordered(self) -> list[torch.nn.Parameter]:
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def finish(self) -> None:
        if self._factors:
            self._factors([parameter.grad for parameter in self._ordered()])
        for bucket, one in zip(self.buckets, self._sums, strict=self._factors is None):
            one(bucket.flat)

    def stepped(self, tokens: int, last: bool) -> None:
        for one in [self._factors] if self._factors else self._sums:
            one.commit()
        self._counted, self._saved = self._saved, 0

    def compression_seconds(self) -> float:
        return self._factors.seconds() if self._factors else sum(one.clock.take() for one in self._sums)

    @property
    def wire_bytes(self) -> int:
        sent = self._factors.sent if self._factors else sum(one.sent for one in self._sums)
        return sent + self._counted

    @property
    def uncounted_bytes(self) -> int:
        return self._saved

    # ---- in a checkpoint ----

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._summed("left", self._left())
        for name, one in zip(self._left(), self._factors.right if self._factors else (), strict=False):
            yield f"right.{name}", one.clone()

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        """Each rank that codes takes an equal part of what all had left over, however many they were."""
        if self._factors:
            left, right = self._left(), self._factors.right
            self._take("left", left, kept, self.world.size)
            found = [kept.get(f"right.{name}") for name in left]
            self._factors.right = [
                own if one is None or one.shape != own.shape else one.to(own)
                for one, own in zip(found, right, strict=True)  # of another powersgd_rank they are of no use
            ]
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
