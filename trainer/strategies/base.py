"""What the loop asks of a strategy."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch

from trainer.model.loss import TokenLoss


class Strategy(ABC):
    """Holds the model, its gradients and what the ranks exchange.

    The contract: after `backward(loss, last=True)` and `finish()`, the gradients are the *sum* of all ranks'
    gradients. Losses are divided by the global number of tokens beforehand, so that the sum is the gradient
    of the global mean.
    """

    module: TokenLoss  # called with (inputs, labels, positions), it gives the summed loss

    @property
    def model(self) -> torch.nn.Module:
        """The language model itself; its parameters' names are those of a checkpoint."""
        return self.module.model

    @abstractmethod
    def zero_grad(self) -> None:
        """Begin a step: all gradients are zero."""

    @abstractmethod
    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Around a micro-batch's forward and backward; `last`: gradients travel as they become ready."""

    @abstractmethod
    def finish(self) -> None:
        """End the step's backward: every rank holds the summed gradients."""

    @abstractmethod
    def clip(self, limit: float) -> float:
        """Scale the gradient down to norm `limit` (0: never); return its norm before, equal on all ranks."""

    @abstractmethod
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a small float64 vector on the device, in place."""

    @property
    @abstractmethod
    def wire_bytes(self) -> int:
        """Bytes of gradients that each rank sends in a step."""
