"""Which strategy a run had better take, by the budgets of all; what is to be set for that, and what else makes room."""

import bisect
import os
from collections.abc import Callable

from trainer import ways
from trainer.config import Config
from trainer.model import quantize
from trainer.model.footprint import Footprint
from trainer.plan.memory import Budget, known
from trainer.plan.resources import Place
from trainer.strategies import STRATEGIES

LAST = ("offload", "infinity", "split")  # where nothing else fits


def propose_both(
    config: Config, budgets: dict[str, Budget], exact: Budget, place: Place
) -> tuple[str | None, str]:
    """The strategy that `propose` finds, and the comm to go with it: a lossy one goes with ddp alone, and takes memory.

    budgets: with config's own comm; exact: ddp's with comm exact.
    """
    if config.comm in ways.EXACT:
        return propose(budgets, place), config.comm
    if budgets["ddp"].fits(place):
        return "ddp", config.comm
    found = propose(budgets | {"ddp": exact}, place)
    less = sum(exact.device.values()) < sum(budgets["ddp"].device.values())
    return found, "exact" if found or less else config.comm


def propose(budgets: dict[str, Budget], place: Place) -> str | None:
    """Of the strategies that fit ddp, or the one that sends least, and of equals the simplest; None: nothing fits.

    In 16 bits zero1 sends somewhat less than ddp, but its curve is another one, and no other way is open to it.
    """
    fitting = [name for name, one in budgets.items() if one.fits(place)]
    if "ddp" in fitting:
        return "ddp"
    plain = [name for name in fitting if name not in LAST]
    return min(plain, key=lambda name: budgets[name].wire_seconds, default=fitting[0] if fitting else None)


def ddp_with_fewer(
    config: Config, place: Place, proposed: str | None, ddp: Callable[[int], Budget]
) -> int | None:
    """With how many sequences at once ddp fits; None where it need not.

    That is where else an adapter's frozen weights would go over a slow link in every step, or nothing fits.
    ddp: its budget with so many.
    """
    travel = proposed is None or getattr(STRATEGIES[proposed], "shares_weights", False)
    if config.adapter == "none" or config.comm not in ways.EXACT or not (travel and place.slow):
        return None
    fitting = range(1, min(config.micro_batch_size, config.batch_size))
    return bisect.bisect_left(fitting, True, key=lambda rows: not ddp(rows).fits(place)) or None


def switch(config: Config, strategy: str | None, comm: str, place: Place | None = None) -> list[str]:
    """What is to be set for both, as one cure; nothing where they are as configured. place: to say what this wants."""
    other = strategy not in (None, known(config.strategy))
    keys = [
        *([f"comm: {comm}"] if comm != config.comm else []),
        *([f"strategy: {strategy}"] if other else []),
        *(["force_strategy: true"] if other and place and wants_force(strategy, config, place) else []),
    ]
    return [" and ".join(keys)] if keys else []


def wants_force(strategy: str, config: Config, place: Place) -> bool:
    """Whether it would send an adapter's frozen weights over a slow link: a run wants to be told (trainer/room.py)."""
    sends = getattr(STRATEGIES.get(strategy), "shares_weights", False)
    if config.adapter == "none" or config.force_strategy or not sends:
        return False
    by_name = os.environ.get("GLOO_SOCKET_IFNAME") == "lo"
    return place.slow and not place.row and not by_name


def cures(config: Config, found: Footprint) -> list[str]:
    """What makes a rank need less memory."""
    packs = found.packs > quantize.MUCH * found.weights
    return [
        "a smaller micro_batch_size" if config.micro_batch_size > 1 else "a shorter sequence_length",
        *([] if config.gradient_checkpointing else ["gradient_checkpointing: true"]),
        *(["adapter: lora"] if config.adapter == "none" else []),
        *(["quantize: 4bit"] if packs else []),
        *(["checkpoint_async: false"] if config.checkpoint_async and config.comm != "diloco" else []),
    ]
