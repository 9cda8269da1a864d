"""How the ranks share the work of a step, by name."""

from trainer.config import Config
from trainer.model.loss import TokenLoss
from trainer.strategies.base import Strategy
from trainer.strategies.compressed import Alone, Compressed
from trainer.strategies.ddp import DDP
from trainer.strategies.local import DiLoCo
from trainer.strategies.sharded import FSDP, Infinity, Offload, Sharded, Zero1, Zero2
from trainer.strategies.split import Split
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
    "split": Split,
}


def make(config: Config, module: TokenLoss, world: World) -> Strategy:
    """The strategy that `config` names, with `module` in it; all ranks must call."""
    return chosen(config, world)(module, world, config)


def reads_weights(config: Config, world: World) -> bool:
    """Whether the strategy itself takes the weights from the disk: a rank's part of each, or each to its device."""
    kind = chosen(config, world)
    return issubclass(kind, Split) or (issubclass(kind, Sharded) and kind.shares_weights)


def chosen(config: Config, world: World) -> type[Strategy]:
    """The strategy that `config` names, or what it comes down to on so many ranks."""
    kind = STRATEGIES[config.strategy]
    if config.comm not in EXACT:
        if world.size > 1 and config.comm == "diloco":
            return DiLoCo
        return Compressed if world.size > 1 and len(world.firsts) > 1 else Alone
    shares = world.size > 1 or issubclass(kind, Offload | Split)  # else one rank has nobody to share with
    return kind if shares else DDP
