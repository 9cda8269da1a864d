"""How the ranks share the work of a step, by name."""

from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.base import Strategy
from trainer.strategies.compressed import Compressed
from trainer.strategies.ddp import DDP
from trainer.strategies.local import DiLoCo
from trainer.strategies.sharded import FSDP, Infinity, Offload, Sharded, Zero1, Zero2
from trainer.ways import EXACT
from trainer.world import World

STRATEGIES: dict[str, type[Strategy]] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": FSDP,
    "offload": Offload,
    "infinity": Infinity,
}


def make(config: Config, module: TokenLoss, world: World) -> Strategy:
    """The strategy that `config` names, with `module` in it; all ranks must call."""
    return _kind(config, world)(module, world, config)


def shares_weights(config: Config, world: World) -> bool:
    """Whether a rank holds no more than its part of the weights."""
    kind = _kind(config, world)
    return issubclass(kind, Sharded) and kind.shares_weights


def _kind(config: Config, world: World) -> type[Strategy]:
    kind = STRATEGIES[config.strategy]
    if config.comm not in EXACT and world.size > 1:
        return DiLoCo if config.comm == "diloco" else Compressed
    return (
        DDP if world.size == 1 and not issubclass(kind, Offload) else kind
    )  # one rank has nobody to share with
