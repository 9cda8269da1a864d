"""What the loop, the optimizer and the checkpoints ask of a strategy."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from trainer.model.loss import TokenLoss
from trainer.world import World, translated


class Strategy(ABC):
    """Holds the model, its gradients and what the ranks exchange.

    The contract: after `backward(loss)` of all micro-batches and `finish()`, the gradients are the *sum* of all ranks'
    gradients. Losses are divided by the global number of tokens beforehand, so that the sum is the gradient
    of the global mean.

    A rank holds a *part* of every trainable parameter: its first dimension's `rows(name)`. Optimizers see plain
    tensors, the parts; checkpoints see whole parameters by name.
    """

    in_parts = False  # each rank has some rows of every trained parameter and of its moments
    lockstep = False  # every rank must go through the same number of forward and backward passes
    independent = (
        False  # each rank steps by the gradient of its own share's mean loss, and all meet now and then
    )
    copies = True  # of what a checkpoint has; else it is written while the step waits
    averages = False  # `whole` makes others of a rank's own moments, from which its optimizer is to go on
    clip_waited = 0.0  # seconds of the last clip that went to other ranks
    keeps: tuple[str, ...] = ()  # kinds of what `kept` has besides weights and moments

    module: TokenLoss  # called with (inputs, labels, positions), it gives the summed loss
    world: World
    trainable: dict[str, torch.nn.Parameter]  # this rank's part of what is trained, by the parameter's name

    @property
    def model(self) -> torch.nn.Module:
        """The language model itself; its parameters' names are those of a checkpoint."""
        return self.module.model

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Prepare a fresh optimizer of `trainable`; called once, before its first step."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Begin a step: all gradients are zero, or there are none yet."""

    @abstractmethod
    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Around a micro-batch's forward and backward; `last`: the step's last one on this rank."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it forward and backward passes, outside of `micro_batch`, send nothing and wait for nobody.

        They take the time that they always take; what comes of them is of no use. `zero_grad` throws it away.
        """
        yield

    def abandon(self) -> None:
        """A pass has failed half-way: make ready for another one."""
        self.zero_grad()

    @abstractmethod
    def finish(self) -> None:
        """End the step's backward: every part has its summed gradient."""

    @abstractmethod
    def clip(self, limit: float, scale: float = 1.0) -> float:
        """Divide the gradient by `scale`, then scale it down to norm `limit` (0: never).

        Returns the norm in between, equal on all ranks.
        """

    def _of_all(self, ask: Callable[..., float], *words) -> float:
        """What `ask(*words)` says, for which ranks wait for each other; notes how long that took."""
        begin = time.perf_counter()
        found = ask(*words)
        self.clip_waited = time.perf_counter() - begin
        return found

    def stepped(self, tokens: int, last: bool) -> None:  # noqa: B027
        """The optimizer has taken a step, on this rank by the gradient of `tokens`; `last`: the run's last one."""

    def settle(self) -> None:  # noqa: B027
        """Have the same weights on all ranks, which is so anyway unless they are `independent`; all ranks must call."""

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What else a checkpoint must have, by `KIND.PARAMETER`, in float32; as large as the parameter at most.

        Copies, one after the other; all ranks must go through them.
        """
        yield from ()

    def restore(self, kept: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Go on from what `kept` once gave, on however many ranks; empty where the checkpoint has none."""

    @property
    @abstractmethod
    def wire_bytes(self) -> int:
        """Bytes of gradients and weights that this rank's host sent to others in the last step.

        Of a rank that keeps off the wire, because another one sends for its host, none; where a host's ranks send a
        slice each, all of them. On one host alone, what this rank sent to the others there.

        What a checkpoint or an evaluation has it send counts with the step after it.
        """

    @property
    def uncounted_bytes(self) -> int:
        """Those of them that were sent since the last step, for a checkpoint or an evaluation."""
        return 0

    @property
    def waited_seconds(self) -> float:
        """Seconds of the last step's micro-batches that went to the other ranks, where that can be told."""
        return 0.0

    def compression_seconds(self) -> float:
        """Seconds since the last call in which this rank coded what travels, or took an outer step.

        Those of sending are not among them. What its devices were given must be done.
        """
        return 0.0

    def shape(self, name: str) -> torch.Size:
        """The shape of parameter `name`, whole."""
        return self.trainable[name].shape

    def rows(self, name: str) -> slice:
        """Which rows of parameter `name` this rank's part is."""
        return slice(None)

    def whole(
        self, name: str, parts: list[torch.Tensor], ranks: list[int], group=None
    ) -> Sequence[torch.Tensor] | None:
        """Tensors shaped like parameter `name`, on each of `ranks`, from every rank's `parts`; on others None.

        All ranks must call. The tensors of one call have one type. group: of all ranks on their CPUs, where the parts
        are; unless given they travel as gradients do.
        """
        return parts if self.world.rank in ranks else None

    def will_send(self, name: str, count: int, ranks: list[int]) -> None:  # noqa: B027
        """`count` parts of parameter `name` will be asked of `whole` on `ranks`, for a checkpoint.

        What that sends counts from now on, for it goes while the next steps are computed, and nobody knows in which.
        """

    def parameters(self, frozen: bool = True) -> dict[str, torch.Tensor]:
        """Every parameter by name, of the whole's shape; frozen: those that are not trained, too."""
        return {name: one for name, one in self.model.named_parameters() if frozen or one.requires_grad}

    def weights(self, ranks: list[int], frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """`parameters`, whole, one after the other, on each of `ranks`; all ranks must go through them."""
        if self.world.rank in ranks:
            yield from self.parameters(frozen).items()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a small float64 vector on the device, in place."""
        if self.world.size > 1:
            with translated(self.world):
                dist.all_reduce(values, group=self.world.training)
        return values


def clipping(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by so that it is no longer than `limit` (0: any length)."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0
