"""`trainer plan`: what a run will need on this host, before it is started; no weights are loaded."""

import contextlib
import dataclasses
import json
import sys

import torch

from trainer import ways
from trainer.commands import check, train  # noqa: F401 - what a run has loaded, its overhead counts
from trainer.config import Config
from trainer.environment import Environment, resident_bytes
from trainer.errors import BadInput
from trainer.model import footprint, load, router
from trainer.model.footprint import Footprint
from trainer.plan import memory, proposal, report, resources, wire, work
from trainer.plan.memory import Budget
from trainer.plan.resources import Place
from trainer.strategies import split
from trainer.world import World


def main(
    config: Config, environment: Environment, link: str | None, as_json: bool, speeds: str | None = None
) -> int:
    """Print the plan, as text or JSON."""
    world = World(dataclasses.replace(config, strategy="ddp"), environment, trains=False)
    place = resources.of_environment(config, world.device, link)
    shares = work.share(config, place.ranks, speeds)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        source = load.source(config, world)
    with _countable(config):
        _load_code(source.config, config)
    overhead = resident_bytes() + memory.KERNELS
    place = dataclasses.replace(place, epoch=work.steps_of_epoch(config, *work.trained_on(config)))
    if problems := check.refused(config, source, environment.cache_dir, world.device.type):
        raise BadInput("\n".join(problems))
    with _countable(config):
        found = footprint.measure(config, source.config, world.device.type)
    model = load.rehearse(config, source)
    lossy = ways.open_to(config.dtype, bool(model and router.coefficient(config, model)))
    budgets = memory.every(config, found, place, overhead)
    by_comm = {
        way: memory.budget("ddp", dataclasses.replace(config, comm=way), found, place, overhead)
        for way in ("exact", *lossy)
    }
    if config.strategy == "split" and "split" not in budgets:
        if place.ranks == 1:
            raise BadInput(split.ALONE)
        budgets["split"] = dataclasses.replace(budgets["ddp"], strategy="split")  # of a host with one GPU
    estimate = work.estimate(config, found, place, shares)
    answer = _answer(config, found, place, budgets, estimate, by_comm)
    answer |= {"shares": shares, "from_random": source.weights is None}

    def ddp(rows: int) -> Budget:
        own = dataclasses.replace(config, micro_batch_size=rows)
        fewer = footprint.measure(own, source.config, place.device.type)
        return memory.budget("ddp", own, fewer, place, overhead)

    if rows := proposal.ddp_with_fewer(config, place, answer["proposed"], ddp):
        answer |= {"proposed": "ddp", "proposed_micro_batch_size": rows}
    print(json.dumps(answer, indent=1) if as_json else report.text(config, found, place, budgets, answer))
    return 0


@contextlib.contextmanager
def _countable(config: Config):
    """Make a message of what the model's own code stumbles over where there are shapes, and no numbers to see."""
    try:
        yield
    except (BadInput, OSError):
        raise
    except Exception as error:
        raise BadInput(
            f"model: {config.model}: its code cannot be tried without weights ({' '.join(str(error).split())[:300]}); "
            "so what it takes cannot be counted: try a few steps (train.yml … -e smoke=true)"
        ) from None


def _load_code(model_config, config: Config) -> None:
    """Import what a run of this model imports, so that its memory is known."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    if config.adapter != "none":
        import peft  # noqa: F401
    if config.quantize != "none" or config.optimizer != "adamw":
        import bitsandbytes  # noqa: F401
    if config.tensorboard:
        import tensorboardX  # noqa: F401


def _answer(
    config: Config,
    found: Footprint,
    place: Place,
    budgets: dict,
    estimate: dict,
    by_comm: dict[str, Budget],
) -> dict:
    """The plan as `--json` prints it; bytes and seconds. by_comm: ddp's budget by each way that the run may take."""
    mine = budgets[memory.known(config.strategy)]
    proposed, comm = proposal.propose_both(config, budgets, by_comm["exact"], place)
    most = wire.at_once(config, found, place)
    waiting = wire.waiting(config, found, place, estimate["compute_seconds"])
    coding = wire.coding(config, place, estimate["optimizer_seconds"])
    way = wire.way_of(config.comm)
    waits, codes = (waiting[way], coding[way]) if mine.strategy == "ddp" else (mine.wire_seconds, 0.0)
    step = estimate["compute_seconds"] + waits + codes
    return {
        "run": config.run,
        "model": config.model,
        "parameters": found.parameters,
        "trainable": found.trainable,
        "ranks": place.ranks,
        "nodes": place.nodes,
        "device": str(place.device),
        "memory_there": place.memory,
        "cards_there": list(place.cards),
        "host_memory_there": place.host_memory,
        "link_bits_per_second": place.link,
        "link_source": place.link_source or "asked for",
        "inside_hosts_first": wire.inside_first(mine.strategy, place),
        "bucket": wire.bucket(config, place),
        "strategies": {name: _of_strategy(one, place) for name, one in budgets.items()},
        "want_force": [name for name in budgets if proposal.wants_force(name, config, place)],
        "ways": {
            name: {
                "wire_bytes": sent,
                "wire_seconds": wire.seconds(sent, place),
                "most_bytes": most[name],
                "waiting_seconds": waiting[name],
                "coding_seconds": coding[name],
                "fits": by_comm[name].fits(place),
            }
            for name, sent in wire.by_way(config, found, place).items()
            if name in by_comm
        },
        "comm": config.comm,
        "passes": wire.passes(config, place),
        "strategy": memory.known(config.strategy),
        "fits": mine.fits(place),
        "proposed": proposed,
        "proposed_comm": comm,
        "proposed_micro_batch_size": None,
        "estimate": {
            **estimate,
            "waiting_seconds": waits,
            "coding_seconds": codes,
            "step_seconds": step,
            "seconds": step * estimate["steps"],
        },
    }


def _of_strategy(one: Budget, place: Place) -> dict:
    return {
        "memory": one.device,
        "memory_bytes": sum(one.device.values()),
        "host_memory": one.host,
        "host_memory_bytes": sum(one.host.values()),
        "wire_bytes": one.wire_bytes,
        "wire_seconds": one.wire_seconds,
        "fits": one.fits(place),
        **({"cards": [sum(card.values()) for card in one.cards]} if one.cards else {}),
    }
