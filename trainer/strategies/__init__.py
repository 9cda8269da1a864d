"""How the ranks share the work of a step, by name."""

from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDP

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP}
