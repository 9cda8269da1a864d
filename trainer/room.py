"""Whether each rank has the memory for its micro-batches, told before any weights are loaded.

`trainer plan` counts what a step needs (plan/memory.py); here the same count is held against what is free.
"""

import dataclasses
import math
import os
import re

from trainer import link
from trainer.balance import given, shares
from trainer.config import Config
from trainer.environment import rdma
from trainer.errors import BadInput
from trainer.model import footprint
from trainer.plan import memory, proposal, resources
from trainer.plan.memory import Budget
from trainer.plan.resources import Place
from trainer.strategies import chosen
from trainer.ways import EXACT, MIB, TooManyFragments
from trainer.world import World, log

DOUBT = 1.15  # how far the count may be off (docs/trainer.md): what is within that is tried
# What a configuration has whose layers are not those of a dense transformer: experts, recurrent or convolutional
# layers, embeddings in each layer, layers of different sizes; encoders, and what sees.
OTHERWISE = re.compile("expert|mamba|ssm|conv|linear|lru|per_layer|altup|^encoder_|^decoder_layers|vision_")
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def at_once(config: Config, model_config, world: World) -> list[int]:
    """How many sequences each rank may compute at once, by rank: micro_batch_size, or as many fewer as it has room for.

    Where ranks keep step and shares follow their speeds, a faster one may compute more, as far as it has room. All
    ranks must call. Raises BadInput on all where one has no room for a single sequence. model_config: transformers'
    own.
    """
    sizes = world.gather(world.together(lambda: _size(config, model_config, world)))
    less = {rank: one for rank, one in enumerate(sizes) if one < config.micro_batch_size}
    if less and world.first:
        shown = ", ".join(f"rank {rank} on {world.hosts[rank]} {one}" for rank, one in less.items())
        log(
            f"warning: micro_batch_size {config.micro_batch_size} needs more memory than there is everywhere. At once "
            f"computes: {shown}; a smaller micro_batch_size, or gradient_checkpointing: true, for all would do as well"
        )
    return sizes


def _most(config: Config, world: World) -> int:
    """What this rank may be asked to compute at once, if all keep step: of its listed share, or of all that is to share
    but one sequence for each other rank.
    """
    wanted = min(config.micro_batch_size, config.batch_size)
    keeps_step = chosen(config, world).lockstep and world.size > 1
    if not keeps_step or config.balance == "even" or config.compile:
        return wanted
    listed = given(config.balance)
    share = listed[world.rank] if listed else config.batch_size - world.size + 1
    count = -(-max(shares(config.batch_size, world.size)) // wanted)
    return max(wanted, -(-share // count))


def refuse_frozen_weights_on_a_slow_wire(config: Config, model_config, world: World, goes_on: bool) -> None:
    """Raise BadInput where an adapter's run would send the frozen model in every step, and is not forced to.

    That is where hosts are joined by slow interfaces, or by such as tell no speed, or what was measured between them is
    slow; ddp may have room on each rank, if with fewer sequences at once, or not. All ranks must call. A run that goes
    on, with other hosts than it began with or once its link has been measured, is warned.
    """
    shared = config.adapter != "none" and getattr(chosen(config, world), "shares_weights", False)
    if not shared or config.force_strategy or len(world.firsts) == 1:
        return
    if all(world.gather(world.device.type == "cuda" and rdma())):  # NCCL then goes by that
        return
    speeds = world.gather(_speed(config))
    slowest = min(one or link.ASSUMED for one in speeds)
    if slowest > link.SLOW:
        return
    unknown = dict.fromkeys(host for host, one in zip(world.hosts, speeds, strict=True) if not one)
    pace = f"{slowest / 1e9:g} Gbit/s"
    if unknown and slowest == link.ASSUMED:
        pace += f", which is assumed of {', '.join(unknown)} until playbooks/preflight.yml has measured it"
    place = dataclasses.replace(_place(config, world), link=slowest)
    try:
        found = footprint.measure(config, model_config, world.device.type)
        mine = memory.budget(memory.known(config.strategy), config, found, place, memory.KERNELS)
        one = dataclasses.replace(config, micro_batch_size=1)
        found = footprint.measure(one, model_config, world.device.type)
        ddp = memory.budget("ddp", one, found, place, memory.KERNELS)
        costs = (
            f"strategy: {config.strategy} sends the frozen weights, too: about {mine.wire_bytes / MIB:,.0f} MiB a "
            f"step, {mine.wire_seconds:,.1f} s at {pace}. ddp"
        )
        words = (
            f"{costs} has room on all ranks, if with fewer sequences at once, and sends the adapter's gradients alone, "
            f"{ddp.wire_bytes / MIB:,.1f} MiB. Set strategy to ddp, or force_strategy to true"
        )
        crowded = (
            f"{costs}, which would not, has no room; a larger micro_batch_size sends them less often. Set "
            "force_strategy to true to pay that, or quantize to 4bit where that makes room for ddp"
        )
        fits = ddp.fits(place)
    except Exception as error:  # as in _size
        words = crowded = (
            f"strategy: {config.strategy} sends the frozen weights, too, in every step, at {pace}; "
            f"whether ddp, which would not, has room cannot be told: {error}. Set strategy to ddp, or force_strategy "
            "to true"
        )
        fits = False
    words = words if all(world.gather(fits)) else crowded
    if not goes_on:
        raise BadInput(words)
    if world.first:
        log(f"warning: {words}")


def _speed(config: Config) -> float:
    """Bits a second of this rank's way to others, the lower of what its interface says and was measured; 0: unknown."""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":  # hosts by name alone
        return math.inf
    said = link.interface_speed(), config.link_gbit and config.link_gbit * 1e9
    return min(filter(None, said), default=0.0)


def _size(config: Config, model_config, world: World) -> int:
    """As `at_once`, by this rank's own memory."""
    place = _place(config, world)
    overhead = memory.KERNELS  # what this process holds already is not free any more
    wanted, asked = min(config.micro_batch_size, config.batch_size), _most(config, world)
    bytes_ = at_most(config, model_config, asked)
    there = min(place.memory, place.host_memory) if world.device.type == "cuda" else place.memory
    if bytes_ is not None and bytes_ + max(overhead, memory.CONTEXT * (world.device.type == "cuda")) < there:
        return max(asked, config.micro_batch_size)

    def budgets(rows: int, config: Config = config) -> dict[str, Budget]:
        own = dataclasses.replace(config, micro_batch_size=rows)
        size = footprint.measure(own, model_config, world.device.type)
        return memory.every(own, size, place, overhead)

    try:
        one = budgets(1)
    except TooManyFragments:  # the run itself would end with that, once the model is loaded
        raise
    except Exception as error:  # the model's own code runs there, which may want a real GPU
        log(f"warning: what a step needs cannot be told beforehand, so memory is not checked: {error}")
        return config.micro_batch_size
    strategy = memory.known(config.strategy)
    if strategy not in one:  # split, of a rank with one GPU
        strategy = "ddp"
    whole = budgets(wanted)
    # A step that is one micro-batch has its gradients when activations are gone, and may fit where several do not.
    if not one[strategy].fits(place, DOUBT) and not whole[strategy].fits(place, DOUBT):
        exact = one if config.comm in EXACT else budgets(1, dataclasses.replace(config, comm="exact"))
        raise BadInput(_refusal(config, model_config, world, one, exact["ddp"], strategy, place))
    least, most = 1, wanted
    if whole[strategy].fits(place, DOUBT):
        # What nobody asked for is not tried where the count may be too low. To an eighth, for each takes seconds.
        too_many = asked + 1
        while too_many - most > max(1, most // 8) or too_many > asked > most:
            more = min(2 * most, asked) if too_many > asked else (most + too_many) // 2
            if budgets(more)[strategy].fits(place, 1 / DOUBT):
                most = more
            else:
                too_many = more
        return max(most, config.micro_batch_size)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if budgets(middle)[strategy].fits(place) else (least, middle)
    return least


def _place(config: Config, world: World) -> Place:
    here = world.environment.local_world_size
    return resources.of_rank(config, world.device, world.size, len(world.firsts), here, own=world.devices)


def _refusal(
    config: Config,
    model_config,
    world: World,
    budgets: dict[str, Budget],
    exact: Budget,
    strategy: str,
    place: Place,
) -> str:
    """What a rank without room for one sequence says; exact: ddp's budget with comm exact."""
    mine = budgets[strategy]
    where, needs, there = "GPU's memory", sum(mine.device.values()), place.memory
    if world.device.type == "cpu":
        where = "memory"
    elif needs <= DOUBT * there:
        where, needs, there = "host's memory", sum(mine.host.values()), place.host_memory
    alone = dataclasses.replace(config, micro_batch_size=1)
    cures = [
        *proposal.switch(config, *proposal.propose_both(config, budgets, exact, place), place),
        *proposal.cures(alone, footprint.measure(alone, model_config, world.device.type)),
    ]
    return (
        f"rank {world.rank}: a step of a single sequence needs about {needs // MIB:,} MiB of the {where}, and "
        f"{there // MIB:,} MiB are free for it; no step was made. What would help: {', '.join(cures)}; or leave "
        "this host out (-l). `trainer plan` shows what takes how much"
    )


def at_most(config: Config, model_config, rows: int) -> int | None:
    """More bytes than a step of any dense transformer of this shape needs; None where its shape is not known.

    rows: sequences that are computed at once. To count takes seconds, which small models would wait for in vain.
    """
    text = model_config.get_text_config()
    if text is not model_config:  # there is more to it, which sees or hears
        return None
    keys = text.to_dict()
    parts = [one for one in keys.values() if isinstance(one, dict)]
    if any(value and OTHERWISE.search(str(name)) for some in (keys, *parts) for name, value in some.items()):
        return None
    if {*(getattr(text, "layer_types", None) or ())} - ATTENTION:
        return None
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    width, layers, vocabulary, heads = sizes = [getattr(text, name, None) for name in names]
    inner = getattr(text, "intermediate_size", None) or 0
    head = getattr(text, "head_dim", None) or 0
    if any(not isinstance(one, int) for one in (*sizes, inner, head)):  # a list has one for each layer
        return None
    inner = max(4 * width, inner)
    length = config.sequence_length
    attention = 4 * width * max(width, heads * head)
    weights = layers * (attention + 3 * width * inner) + 2 * vocabulary * width + length * width
    # Of a weight: itself, its gradient, two moments, copies in a checkpoint, and as many in a lossy way. Of a token:
    # each layer's values of both widths, some of them twice; its attention to all others; its logits, four times.
    kept = layers * (24 * width + 8 * inner + 4 * heads * length) + 4 * vocabulary
    each = 40 if config.comm in EXACT else 72
    return each * weights + 4 * rows * length * kept
