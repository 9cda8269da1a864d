"""DiLoCo: each rank trains for itself, and every so many steps all meet (Douillard et al. 2023, arXiv:2311.08105).

Inside a round every rank steps by the gradient of its own share, and nothing but a few numbers travels. At its end,
how far each has come is averaged, by the tokens that each has seen, and taken as a gradient by Nesterov's SGD on the
weights that all had at the round's begin. What travels is int8 with error feedback (trainer/compress.py).
With an outer rate of 1 and no momentum this is averaging of weights (local SGD: Stich 2019, arXiv:1805.09767).

Unlike the paper's, the momentum is of ways by the learning rate that they were gone at, and is taken at that of the
round: as SGD's own is, to which a schedule applies after it. Else what the rounds of a high rate have left would
throw the weights about at the end, when a round's own way is too short to find back. Of a round that ends early, for a
checkpoint or an evaluation, the momentum is taken, and fades, for as many steps as there were: else each of these would
move the weights as a whole round does.

The weights may meet in fragments, one after the other, and a fragment's message may travel while the next steps are
computed (Streaming DiLoCo: Douillard et al. 2025, arXiv:2501.18512). It is taken after a number of steps that does not
depend on the network. A rank has moved on meanwhile: its weights are then mixed with those that all have.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer import ways
from trainer.clock import Clock
from trainer.compress import Bits8, CodedSum
from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.compressed import KEEPS, AfterBackward
from trainer.strategies.ddp import Bucket
from trainer.world import Circle, World

OWN = 0.5  # of a rank's weights that stay its own where it has moved on meanwhile: the paper's alpha


class Leg(NamedTuple):
    """What ranks have gone by themselves: the mean learning rate of its steps, and how much of a round they were."""

    pace: float
    rounds: float


class Part:
    """A bucket, and what all ranks had of its weights when they last met."""

    def __init__(self, bucket: Bucket, world: World, circles: tuple[Circle, Circle]):
        self.bucket = bucket
        self.outer = self.weights()
        self.velocity = torch.zeros_like(self.outer)  # a way by the rate that it is gone at
        self.sum = CodedSum(self.outer.numel(), Bits8(), world, circles)

    def weights(self) -> torch.Tensor:
        """This rank's, as one flat float32 tensor."""
        return torch.cat([parameter.detach().flatten() for parameter in self.bucket.parameters]).float()

    def take(self, gone: torch.Tensor, leg: Leg, momentum: float, rate: float, own: float) -> None:
        """Take the mean way `gone` in a leg as a gradient of the outer weights, and these but for the share `own`."""
        self.sum.commit()
        self.velocity.mul_(momentum**leg.rounds)
        if leg.pace:
            self.velocity.add_(gone / leg.pace)
        self.outer.sub_(gone + momentum * leg.rounds * leg.pace * self.velocity, alpha=rate)
        flat = self.outer.lerp(self.weights(), own) if own else self.outer
        parts = flat.split([parameter.numel() for parameter in self.bucket.parameters])
        for parameter, part in zip(self.bucket.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))


@dataclass
class Fragment:
    """Neighbouring layers, which meet together."""

    parts: list[Part]
    phase: int  # it meets after so many steps of a round
    tokens: float = 0.0  # of this rank, since it last set out
    steps: int = 0
    rates: float = 0.0  # the sum of those steps' learning rates

    def arrive(self, every: int) -> Leg:
        """Set out anew; returns what has been gone since it last did. every: steps of a round."""
        leg = Leg(self.rates / max(1, self.steps), self.steps / every)
        self.tokens, self.steps, self.rates = 0.0, 0, 0.0
        return leg


@dataclass
class Message:
    """A fragment's way, which becomes the mean of all ranks' in a thread."""

    fragment: Fragment
    ways: list[torch.Tensor]  # one a part
    leg: Leg
    due: int  # the step of the schedule after which it is taken
    sum: Future


class DiLoCo(AfterBackward):
    """See the module. A checkpoint or an evaluation ends all rounds early, so that there are weights to keep."""

    independent = True
    keeps = KEEPS["diloco"]

    def __init__(self, module: TokenLoss, world: World, config: Config):
        super().__init__(module, world, config)
        self.every, self.rate, self.momentum = config.sync_every, config.outer_lr, config.outer_momentum
        self.overlap = config.diloco_overlap
        self._streams = config.diloco_fragments > 1 or self.overlap > 0
        self._thread = ThreadPoolExecutor(1) if self.overlap else None
        self._under_way: Message | None = None
        self._step = 0  # of the schedule, which begins anew where all meet
        circles = world.circles(apart=self._thread is not None)
        self._parts = [Part(bucket, world, circles) for bucket in self.buckets]
        groups = self._groups(config)
        self.fragments = [
            Fragment(
                [one for one in self._parts if any(one.bucket.parameters[0] is own for own in group)],
                phase=number * self.every // len(groups),
            )
            for number, group in enumerate(groups, 1)
        ]
        # Bytes: so far, when the last step began, and when it ended.
        self._sent = self._since = self._until = 0
        self._groups_of_rates = [{"lr": 1.0}]
        self._clock = Clock(world.device)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups_of_rates = optimizer.param_groups

    def _groups(self, config: Config) -> list[list[torch.nn.Parameter]]:
        """What meets together, in the model's order."""
        parameters = list(self.trainable.values())
        sizes = [one.numel() * one.element_size() for one in parameters]
        return [parameters[piece] for piece in ways.fragments(sizes, config.diloco_fragments)]

    def finish(self) -> None:
        """The gradients are this rank's own."""

    def stepped(self, tokens: int, last: bool) -> None:
        # What a checkpoint or an evaluation has made all send since the last step is this one's, too.
        self._since = self._until
        self._sent += self._saved
        self._saved = 0
        self._step += 1
        for fragment in self.fragments:
            fragment.tokens += tokens
            fragment.steps += 1
            fragment.rates += self._groups_of_rates[0]["lr"]
        if last:
            self.settle()
        elif self._under_way and self._step >= self._under_way.due:
            self._arrive()
        for fragment in () if last else self.fragments:
            if (self._step - fragment.phase) % self.every == 0:
                self._meet(fragment)
        self._until = self._sent

    def settle(self) -> None:
        """Have all fragments meet, without overlap: all ranks have the same weights afterwards."""
        self._arrive()
        for fragment in self.fragments:
            if fragment.steps:
                self._meet(fragment)
                self._arrive()
        self._step = 0

    @torch.no_grad()
    def _meet(self, fragment: Fragment) -> None:
        """Send how far this rank has come; take the mean of all ranks, or leave that to `_arrive`; all must call."""
        seen = torch.tensor([fragment.tokens], dtype=torch.float64, device=self.world.device)
        share = fragment.tokens / max(self.sum(seen).item(), 1.0)
        leg = fragment.arrive(self.every)
        if self._thread is None:
            for part in fragment.parts:
                with self._clock:
                    gone = (part.outer - part.weights()) * share
                part.sum(gone)
                with self._clock:
                    part.take(gone, leg, self.momentum, self.rate, own=0)
                self._sent += part.sum.sent
            return
        with self._clock:
            gone = [((part.outer - part.weights()) * share).cpu() for part in fragment.parts]
        done = self._thread.submit(_sum, fragment.parts, gone)
        self._under_way = Message(fragment, gone, leg, self._step + self.overlap, done)

    @torch.no_grad()
    def _arrive(self) -> None:
        """Wait for the message that is under way, if one is, and take it; all ranks must call."""
        message, self._under_way = self._under_way, None
        if message is None:
            return
        message.sum.result()
        own = OWN if message.fragment.steps else 0
        for part, gone in zip(message.fragment.parts, message.ways, strict=True):
            with self._clock:
                part.take(gone.to(self.world.device), message.leg, self.momentum, self.rate, own)
            self._sent += part.sum.sent

    def compression_seconds(self) -> float:
        coded = sum(part.sum.clock.take() for part in self._parts)
        if self._thread:  # for which steps do not wait
            coded = 0.0
        return coded + self._clock.take()

    @property
    def wire_bytes(self) -> int:
        return self._sent - self._since

    @property
    def uncounted_bytes(self) -> int:
        return self._sent + self._saved - self._until

    # ---- in a checkpoint ----

    @property
    def averages(self) -> bool:
        return self._streams

    def whole(self, name, parts, ranks, group=None):
        """The weights, which are all ranks' own after `settle`, and the mean of their moments.

        With fragments or overlap the run itself goes on from that mean, as one that is resumed from it.
        """
        weight, *moments = (part.clone() for part in parts)
        for one in moments:
            self._sum_exactly(one)
        for own, one in zip(parts[1:], moments, strict=True):
            one.div_(self.world.size)
            if self._streams:
                own.copy_(one)
        return [weight, *moments] if self.world.rank in ranks else None

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in self._velocity().items():
            yield f"momentum.{name}", one.clone()
        sums = [part.sum for part in self._parts]
        own = self._by_name([one.error for one in sums])
        for (key, total), mine in zip(self._summed(self.keeps[0], own), own.values(), strict=True):
            if self._streams:
                between = sums[0].between
                mine.copy_(total / between.size if between.rank is not None else torch.zeros_like(mine))
            yield key, total

    def restore(self, kept: dict[str, torch.Tensor]) -> None:
        """All rounds begin from the weights as they are now."""
        if self._under_way:  # of steps that are taken back
            self._under_way.sum.result()
            self._under_way = None
        for part in self._parts:
            part.outer = part.weights()
        for fragment in self.fragments:
            fragment.arrive(self.every)
        self._step = 0
        self._take("momentum", self._velocity(), kept, 1)
        self._take_errors([part.sum for part in self._parts], kept)

    def _velocity(self) -> dict[str, torch.Tensor]:
        return self._by_name([part.velocity for part in self._parts])


def _sum(parts: list[Part], gone: list[torch.Tensor]) -> None:
    """Make of `gone` the mean ways of all ranks, in place."""
    for part, one in zip(parts, gone, strict=True):
        part.sum(one)
