"""DiLoCo: each rank trains for itself, and every so many steps all meet (Douillard et al. 2023, arXiv:2311.08105).

Inside a round every rank steps by the gradient of its own share, and nothing but a few numbers travels. At its end,
how far each has come is averaged, by the tokens that each has seen, and taken as a gradient by Nesterov's SGD on the
weights that all had at the round's begin. What travels is int8 with error feedback (trainer/compress.py).
With one step a round, an outer rate of 1 and no momentum this is averaging of weights (local SGD).
"""

import torch
import torch.distributed as dist

from trainer.compress import Bits8, CodedSum
from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.compressed import AfterBackward
from trainer.world import World, translated


class DiLoCo(AfterBackward):
    """See the module. A checkpoint or an evaluation ends a round early, so that there are weights to keep."""

    independent = True
    keeps = ("left", "velocity")

    def __init__(self, module: TokenLoss, world: World, config: Config):
        super().__init__(module, world, config)
        self.every, self.rate, self.momentum = config.sync_every, config.outer_lr, config.outer_momentum
        self._tokens = 0.0  # of this rank, in the round
        self._steps = 0  # of the round
        self._outer = [self._weights(bucket) for bucket in self.buckets]
        self._velocity = [torch.zeros_like(one) for one in self._outer]
        self._sums = [CodedSum(one.numel(), Bits8(), world) for one in self._outer]
        self._sent = 0

    def finish(self) -> None:
        """The gradients are this rank's own."""

    def stepped(self, tokens: int, last: bool) -> None:
        self._tokens += tokens
        self._steps += 1
        self._sent = 0
        if self._steps >= self.every or last:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """End the round: all ranks have the same weights afterwards."""
        if not self._steps:
            return
        total = self.sum(torch.tensor([self._tokens], dtype=torch.float64, device=self.world.device)).item()
        share = self._tokens / max(total, 1.0)
        for bucket, outer, velocity, one in zip(
            self.buckets, self._outer, self._velocity, self._sums, strict=True
        ):
            gone = (outer - self._weights(bucket)) * share
            one(gone)  # the mean of how far all have come
            velocity.mul_(self.momentum).add_(gone)
            outer.sub_(gone + self.momentum * velocity, alpha=self.rate)
            self._set_weights(bucket, outer)
            self._sent += one.sent
        self._tokens, self._steps = 0.0, 0

    @property
    def wire_bytes(self) -> int:
        return self._sent

    @staticmethod
    def _weights(bucket) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in bucket.parameters]).float()

    @staticmethod
    def _set_weights(bucket, flat: torch.Tensor) -> None:
        parts = flat.split([parameter.numel() for parameter in bucket.parameters])
        for parameter, part in zip(bucket.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))

    # ---- in a checkpoint ----

    def whole(self, name, parts, ranks):
        """The weights, which are all ranks' own after `settle`, and the mean of their moments."""
        weight, *moments = (part.clone() for part in parts)
        with translated(self.world):
            for one in moments:
                dist.all_reduce(one, group=self.world.training)
        return [weight, *(one.div_(self.world.size) for one in moments)] if self.world.rank in ranks else None

    def kept(self) -> dict[str, torch.Tensor]:
        velocity = {f"velocity.{name}": one.clone() for name, one in self._by_name(self._velocity).items()}
        return velocity | self._summed("left", self._by_name([one.error for one in self._sums]))

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        """The round begins from the weights as they are now."""
        self._outer = [self._weights(bucket) for bucket in self.buckets]
        self._tokens, self._steps = 0.0, 0
        self._take("velocity", self._by_name(self._velocity), kept, 1)
        self._take("left", self._by_name([one.error for one in self._sums]), kept, self.world.size)
