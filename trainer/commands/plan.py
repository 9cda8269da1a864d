"""`trainer plan`: what a run will need on this host, before it is started; no weights are loaded."""

import bisect
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer import checkpoint, ways
from trainer import config as configuration
from trainer import link as network
from trainer.balance import Balance, given, miscounted, shares
from trainer.config import Config
from trainer.environment import Environment, number, rdma, resident_bytes
from trainer.errors import BadInput
from trainer.model import quantize
from trainer.model.footprint import Footprint
from trainer.model.loss import HALF
from trainer.strategies import STRATEGIES, split

REACHED = 0.6  # of the speed of large matrix products: what a training step makes of it
KERNELS = 40 << 20  # bytes of code that the first step loads
SCATTERED = 0.2  # of what comes and goes in a step: holes in the C library's heap, which keeps what is freed
CONTEXT = 600 << 20  # bytes of a GPU that CUDA and NCCL take for themselves
WIRELESS = 0.3e9  # bits a second of a network that says no speed: what good Wi-Fi carries in a house
LETTERS = 4  # of a text, a token
COPIED = 64 << 20  # bytes, to see how fast memory is: more than a cache holds
ASSUMED = 1e9  # of a network of which nothing is known: gigabit Ethernet
SLOW_LINK = 2.5e9  # bits a second at most of what takes long to carry a model
MIB = ways.MIB
RESULTS = Path("runs")  # where the playbooks keep what they have measured

# Which of them comes first where several are as good; the last two only where nothing else fits. After these comes
# split, on hosts with several GPUs.
ORDER = ("ddp", "zero1", "zero2", "fsdp", "offload", "infinity")
LAST = ("offload", "infinity", "split")


@dataclass(frozen=True)
class Place:
    """What there is: the run's ranks, this host's memory in bytes, the data."""

    ranks: int
    nodes: int
    here: int  # ranks on this host
    device: torch.device
    memory: int  # for a rank: the GPU's, or its share of the host's
    host_memory: int  # for a rank, on the host
    link: float  # bits a second, as a link is named: ways.USED of them carry what is sent
    link_source: str = ""  # what says so; "": it was asked for
    hop: float | None = None  # seconds from host to host, where that was measured
    row: bool = False  # all ranks sum as one: NCCL by RDMA (World.layers)
    cards: tuple[int, ...] = ()  # bytes free on each GPU that a rank has under strategy split
    epoch: int = 0  # steps through all of the data; 0: not known


@dataclass(frozen=True)
class Budget:
    """A rank's memory in bytes by what takes it, where it computes and on its host; and what it sends."""

    strategy: str
    device: dict[str, int]
    host: dict[str, int]  # empty where the host is what computes
    wire_bytes: int  # a step: what leaves the rank's host, or of one host alone the rank
    wire_seconds: float
    cards: tuple[
        dict[str, int], ...
    ] = ()  # of a rank with several GPUs, each one's; `device` is the fullest's

    def fits(self, place: Place, times: float = 1.0) -> bool:
        """Whether there is room, `times` as much as there is."""
        if self.cards:
            there = zip(self.cards, place.cards, strict=True)
            on_device = all(sum(card.values()) <= times * room for card, room in there)
        else:
            on_device = sum(self.device.values()) <= times * place.memory
        return on_device and sum(self.host.values()) <= times * place.host_memory


def main(
    config: Config, environment: Environment, link: str | None, as_json: bool, speeds: str | None = None
) -> int:
    """Print the plan, as text or JSON."""
    from trainer.commands import check, train  # noqa: F401 - what a run has loaded, its overhead counts
    from trainer.model import footprint, load, router
    from trainer.world import World

    world = World(dataclasses.replace(config, strategy="ddp"), environment, trains=False)
    place = _place(config, world.device, link)
    found_shares = share(config, place.ranks, speeds)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        source = load.source(config, world)
    with _countable(config):
        _load_code(source.config, config)
    overhead = resident_bytes() + KERNELS
    place = dataclasses.replace(place, epoch=_epoch(config, *trained_on(config)))
    if problems := check.refused(config, source, environment.cache_dir, world.device.type):
        raise BadInput("\n".join(problems))
    with _countable(config):
        found = footprint.measure(config, source.config, world.device.type)
    model = load.rehearse(config, source)
    lossy = ways.open_to(config.dtype, bool(model and router.coefficient(config, model)))
    budgets = every(config, found, place, overhead)
    by_comm = {
        way: budget("ddp", with_comm(config, way), found, place, overhead) for way in ("exact", *lossy)
    }
    if config.strategy == "split" and "split" not in budgets:
        if place.ranks == 1:
            raise BadInput(split.ALONE)
        budgets["split"] = dataclasses.replace(budgets["ddp"], strategy="split")  # of a host with one GPU
    estimate = _estimate(config, found, place, found_shares)
    answer = _answer(config, found, place, budgets, estimate, by_comm)
    answer |= {"shares": found_shares, "from_random": source.weights is None}
    if rows := ddp_with_fewer(
        config, place, answer["proposed"], lambda rows: _ddp(config, source.config, place, overhead, rows)
    ):
        answer |= {"proposed": "ddp", "proposed_micro_batch_size": rows}
    print(json.dumps(answer, indent=1) if as_json else _text(config, found, place, budgets, answer))
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


def every(config: Config, found: Footprint, place: Place, overhead: int) -> dict[str, Budget]:
    """The budget of a rank under each strategy that there can be, by name; split where a rank has several GPUs."""
    budgets = {name: budget(name, config, found, place, overhead) for name in ORDER}
    if len(place.cards) > 1 and found.layers:
        budgets["split"] = split_budget(config, found, place, overhead)
    return budgets


def with_comm(config: Config, comm: str) -> Config:
    """The same with gradients that travel another way."""
    return dataclasses.replace(config, comm=comm)


def _ddp(config: Config, model_config, place: Place, overhead: int, rows: int) -> Budget:
    """ddp's budget with so many sequences at once."""
    from trainer.model import footprint

    config = dataclasses.replace(config, micro_batch_size=rows)
    return budget("ddp", config, footprint.measure(config, model_config, place.device.type), place, overhead)


def _is_slow(place: Place) -> bool:
    """Whether a model takes long from host to host."""
    return place.nodes > 1 and place.link <= SLOW_LINK


def ddp_with_fewer(
    config: Config, place: Place, proposed: str | None, ddp: Callable[[int], Budget]
) -> int | None:
    """With how many sequences at once ddp fits; None where it need not.

    That is where else an adapter's frozen weights would go over a slow link in every step, or nothing fits.
    ddp: its budget with so many.
    """
    travel = proposed is None or getattr(STRATEGIES[proposed], "shares_weights", False)
    if config.adapter == "none" or config.comm not in ways.EXACT or not (travel and _is_slow(place)):
        return None
    fitting = range(1, min(config.micro_batch_size, config.batch_size))
    return bisect.bisect_left(fitting, True, key=lambda rows: not ddp(rows).fits(place)) or None


def share(config: Config, ranks: int, speeds: str | None) -> dict:
    """The ranks' shares of a step, and how many times as fast as even ones that makes it; both by `speeds`.

    {split, speed_up, speeds, at_once}; without speeds even shares, and the next two None. at_once: sequences of the
    largest micro-batch. Raises BadInput.
    """
    if fault := miscounted(config.balance, ranks):
        raise fault
    kind, size = STRATEGIES[config.strategy], config.micro_batch_size
    balance = Balance(
        config.batch_size,
        ranks,
        config.balance,
        grain=size if config.compile else 1,
        lockstep=size if kind.lockstep and ranks > 1 else 0,
        # What memory the other hosts have is known when they meet (trainer/room.py).
        at_once=None if config.compile else [config.batch_size] * ranks,
    )

    def told(speed_up: float | None, found: list[float] | None) -> dict:
        largest = min(size, max(balance.split))
        if balance.lockstep:
            largest = max(map(balance.largest, range(ranks)))
        return {"split": balance.split, "speed_up": speed_up, "speeds": found, "at_once": largest}

    if speeds is None:
        return told(None, None)
    try:
        found = [float(one) for one in speeds.split(",")]
    except ValueError:
        found = []
    if len(found) != ranks or not all(0 < one < math.inf for one in found):
        raise BadInput(
            f"--speeds: found {speeds}; expected a number above 0 for each of the {ranks} ranks, by commas, such as "
            f"{','.join(['2', *['1'] * (ranks - 1)])}"
        )
    balance.foresee([1 / one for one in found])
    return told(balance.gain, found)


def budget(name: str, config: Config, found: Footprint, place: Place, overhead: int) -> Budget:
    """The budget of a rank under strategy `name`; trainer/strategies/sharded.py has the table that this follows."""
    ranks = place.ranks
    if ranks == 1 and name not in ("offload", "infinity"):
        name, kind = "ddp", name
    else:
        kind = name
    shared = name in ("fsdp", "offload", "infinity")  # the weights are
    part = ranks if name != "ddp" else 1
    # Trained weights travel in this part of what they are held in; frozen ones as they are held.
    narrow = 0.5 if config.dtype in HALF else 1.0
    own = found.weights + found.adapter
    trained = found.gradients  # float32, as the trained weights are
    gathered = found.shared if shared else trained
    rest = max(0, gathered - found.blocks) if shared else 0
    in_blocks = min(found.blocks, gathered)

    held = own - gathered + gathered // part if name != "ddp" else own
    gradients = trained // part if name in ("zero2", "fsdp", "offload", "infinity") else trained
    if name == "ddp" and ranks == 1 and _passes(config, place) == 1:
        gradients = max(0, found.growing - found.working)  # they come to be while activations go
    whole = 0  # weights and gradients that are whole for a while
    if name in ("zero1", "zero2"):
        whole = int(trained * narrow)
        if name == "zero2":
            whole += min(trained, found.block + max(0, trained - found.blocks))
        else:
            whole += min(trained, 2 * found.block)
    elif ranks > place.nodes > 1 and not shared and not place.row:
        whole = min(2 * ways.BUCKET_BYTES, trained)  # the other ranks' slices
    elif shared:
        whole = int(
            (rest + 2 * min(found.block, gathered)) * (narrow if config.adapter == "none" else 1)
        ) + min(trained, found.block + max(0, trained - found.blocks))
    on_cpu = place.device.type == "cpu"
    if name != "ddp":
        # What is gathered, or scattered, at once; over gloo a rank gets the others' versions of its part besides.
        scattered = min(trained, max(found.block, trained - found.blocks))
        whole += max(min(found.block, gathered), rest, (2 if on_cpu else 1) * scattered)
    moments = optimizer_bytes(config, found) // part

    lines = {
        "weights": held if not found.adapter else max(0, held - found.adapter // (part if shared else 1)),
        "adapter": found.adapter // (part if shared else 1),
        "gradients": gradients,
        "optimizer": moments,
        "whole for a while": whole,
        "activations": found.activations if name == "ddp" else found.given_activations,
        "loss and backward": (found.working if name == "ddp" else found.given_working) + 2 * found.largest,
    }
    lossy = name == "ddp" and _codes(config, place)
    copies = 0 if name == "infinity" else checkpoint_bytes(config, found) // part
    if lossy:  # sums over ranks, which are copies whether or not the rest is
        copies += {"diloco": 8}.get(config.comm, 4) * found.trainable
        if (
            config.comm == "diloco" and not config.checkpoint_async
        ):  # means of the ranks' are copies in any case
            copies += 12 * found.trainable
    if name == "ddp":  # one rank of a host makes them: a part of each one's memory
        copies //= place.here
    host = {} if on_cpu else {"checkpoint": copies, "overhead": overhead}
    if name in ("offload", "infinity") and not on_cpu:
        for what in ("weights", "adapter", "gradients", "optimizer"):
            host[what], lines[what] = lines[what], 0
        if name == "offload":
            host["pinned"] = sum(_rounded(ones, part) for ones in (found.tensors, found.trained))
        lines["weights"] = own - gathered  # quantised ones stay where they compute
        host["weights"] -= lines["weights"]
    if not on_cpu and not shared and found.converted:
        # Each rank makes all of the model float32 before the GPU has it, and before there is a checkpoint to copy; or
        # of an adapter's base what its files have otherwise. What stays as it is on disk is the page cache's.
        host["while loading"] = max(0, found.weights - copies)
    if name == "infinity":  # on disk; the kernel keeps of it what there is room for
        where = lines if on_cpu else host
        where["optimizer"] = where["adapter"] = 0
        where["weights"] = own - gathered if on_cpu else 0
    if on_cpu:
        lines["checkpoint"] = copies
        comes_and_goes = lines["activations"] + lines["loss and backward"] + (whole if name != "ddp" else 0)
        lines["scattered"] = int(SCATTERED * comes_and_goes)
    lines["overhead"] = overhead if on_cpu else CONTEXT
    slimmer = [int((1 - narrow) * one) for one in (min(trained, in_blocks), max(0, trained - in_blocks))]
    sent = wire(
        name, config, place, trained, in_blocks - slimmer[0], max(0, gathered - in_blocks - slimmer[1])
    )
    if name != "ddp":
        sent += sent_for_checkpoints(config, found, place)
    if lossy:
        sent = by_way(config, found, place)[config.comm]
        lines["left over"], codes = _lossy_bytes(config, found)
        # Coding begins when what backward needs is gone.
        lines["compression"] = max(0, codes - lines["activations"] - lines["loss and backward"])
        if config.comm == "diloco" and config.diloco_overlap:  # what travels does so from the CPU's memory
            lines["left over"] -= trained
            where = lines if on_cpu else host
            where["left over"] = where.get("left over", 0) + trained
            where["under way"] = found.fragment
    if "paged" in config.optimizer and not on_cpu:  # as much of it as the card has no room for
        gives = min(lines["optimizer"], max(0, sum(lines.values()) - place.memory))
        lines["optimizer"] -= gives
        host["optimizer"] = host.get("optimizer", 0) + gives
    return Budget(kind, lines, host, sent, _seconds(sent, place))


def _codes(config: Config, place: Place) -> bool:
    """Whether what travels is coded with loss: on one host nothing is, but by diloco."""
    return config.comm not in ways.EXACT and (
        place.nodes > 1 or (place.ranks > 1 and config.comm == "diloco")
    )


def _rounded(tensors: Sequence[tuple[int, int]], part: int) -> int:
    """Bytes that pinned memory takes beyond what is in it; tensors: as Footprint has them, a `part` of each here.

    torch takes it by powers of two, for each of an offloaded weight's and gradient's parts.
    """
    return sum(
        count * ((1 << (size - 1).bit_length()) - size)
        for size, count in ((max(1, -(-size // part)), count) for size, count in tensors)
    )


def _lossy_bytes(config: Config, found: Footprint) -> tuple[int, int]:
    """(what config.comm holds from step to step beside gradients, what it needs on top while it codes).

    All that is left over is held twice until the optimizer has gone by its sum; the rest is as measured
    (tests/unit/test_compress.py): copies of a bucket, or of powersgd's factors in float32.
    """
    trained, factors = found.gradients, 4 * found.factors
    bucket = min(trained, ways.BUCKET_BYTES + max(0, trained - found.blocks))  # an embedding goes whole
    held = ways.HELD[config.comm] * trained
    if config.comm == "powersgd":
        return held + 5 * factors // 2, trained + 4 * factors
    if config.comm == "diloco":
        return held, 5 * bucket
    return held, trained + 3 * bucket


def split_budget(config: Config, found: Footprint, place: Place, overhead: int) -> Budget:
    """The budget of a rank under strategy split, with all of its host's GPUs (trainer/strategies/split.py)."""
    trained = 4 + (2 if "8bit" in config.optimizer else 8)  # bytes of a trained weight's gradient and moments
    own, count = found.weights + found.adapter, found.trainable
    outside = own - sum(size for size, _ in found.layers), count - sum(number for _, number in found.layers)
    sizes = [size + trained * number for size, number in found.layers]
    numbers = split.places(sizes, outside[0] + trained * outside[1], place.cards)
    moments = optimizer_bytes(config, found)
    cards = []
    for card in range(len(place.cards)):
        here = [layer for layer, number in zip(found.layers, numbers, strict=True) if number == card]
        here += [outside] if card == 0 else []
        part = sum(number for _, number in here) / max(1, count)
        adapter = int(found.adapter * part)
        cards.append(
            {
                "weights": sum(size for size, _ in here) - adapter,
                "adapter": adapter,
                "gradients": int(found.gradients * part),
                "optimizer": int(moments * part),
                "whole for a while": min(2 * ways.BUCKET_BYTES, found.gradients)
                if not card and place.nodes > 1
                else 0,
                "activations": found.activations * numbers.count(card) // len(numbers),
                "loss and backward": found.working + 2 * found.largest,
                "overhead": CONTEXT,
            }
        )
    fullest = max(zip(cards, place.cards, strict=True), key=lambda one: sum(one[0].values()) - one[1])[0]
    host = {"checkpoint": checkpoint_bytes(config, found) // place.here, "overhead": overhead}
    ranks = place.nodes if config.strategy != "split" else place.ranks
    sent = ways.sent(found.gradients, found.factors, ranks, 1, place.nodes, place.row)["exact"]
    return Budget("split", fullest, host, sent, _seconds(sent, place), tuple(cards))


def _coding(config: Config, place: Place, optimizer: float) -> dict[str, float]:
    """Seconds of a step, on average, in which ddp's ranks code what they send, by way; optimizer: those of AdamW's."""
    each = {way: optimizer * ways.CODING[place.device.type].get(way, 0) for way in ways.PASSES}
    each["diloco"] /= _rhythm(config, place)[0]
    alone = {way: 0.0 for way in each if place.ranks == 1 or (place.nodes == 1 and way != "diloco")}
    return each | alone


def _seconds(sent: int, place: Place) -> float:
    """That a rank's bytes take on its way to another host."""
    return sent * 8 / (place.link * ways.USED) if place.nodes > 1 else 0.0


def optimizer_bytes(config: Config, found: Footprint) -> int:
    """AdamW's two moments of what is trained."""
    if "8bit" not in config.optimizer:
        return 8 * found.trainable
    return 8 * found.small + int((found.trainable - found.small) * (2 + 8 / 256))


def checkpoint_bytes(config: Config, found: Footprint) -> int:
    """The copy of weights and moments that is written while training goes on."""
    return 12 * found.trainable if config.checkpoint_async else 0


def wire(name: str, config: Config, place: Place, trained: int, in_blocks: int, rest: int) -> int:
    """Bytes that leave a host in a step; `in_blocks`, `rest`: of the weights that are gathered, by where they are."""
    inside = _inside_first(name, place)
    among = place.nodes if inside else place.ranks
    passes = _passes(config, place)
    summed, gathered = {
        "ddp": (2 * trained, 0),
        "zero1": (trained, in_blocks + rest),
        "zero2": (passes * trained, in_blocks + rest),
    }.get(name, (passes * trained, passes * (2 * in_blocks + rest)))
    if name != "ddp" and place.device.type == "cpu" and place.nodes > 1 and not inside:
        # Each rank has its part from each other one itself (strategies/sharded.py, Scatter).
        summed = summed * place.here * (place.ranks - place.here) // place.ranks
        return summed + gathered * (among - 1) // among
    return (summed + gathered) * (among - 1) // among


def _passes(config: Config, place: Place) -> int:
    """Micro-batches of a step of ranks that keep step, as Balance has them where memory wants no more."""
    largest = max((config.compile and given(config.balance)) or shares(config.batch_size, place.ranks))
    return -(-largest // config.micro_batch_size)


def by_way(config: Config, found: Footprint, place: Place) -> dict[str, int]:
    """Bytes that leave a host in a step of ddp, on average, by way; with what checkpoints make it send."""
    meets, saves = _rhythm(config, place)
    sent = ways.sent(found.gradients, found.factors, place.ranks, meets, place.nodes, place.row)
    saved = ways.saved(found.gradients, place.ranks, saves, place.nodes, place.row)
    return {way: sent[way] + saved[way] for way in sent}


def sent_for_checkpoints(config: Config, found: Footprint, place: Place) -> int:
    """Bytes that leave a host in a step of a sharded strategy, on average, for checkpoints: the host that sends most.

    Each rank's part of weights and moments goes to every other host that writes a copy; on one host to its first rank.
    """
    saves = _rhythm(config, place)[1]
    if not saves or place.ranks == 1:
        return 0
    parts = min(checkpoint.copies(place.nodes), place.nodes - 1) * place.here if place.nodes > 1 else 1
    return int(parts * 12 * found.trainable / place.ranks / saves)


def _rhythm(config: Config, place: Place) -> tuple[float, float]:
    """As ways.rhythm; each evaluation is taken to save, as one that is better does."""
    return ways.rhythm(
        config.sync_every,
        *configuration.early(config, place.epoch),
        fragments=config.diloco_fragments,
        last=_steps(config, place.epoch) if config.steps or place.epoch else None,
    )


def at_once(config: Config, found: Footprint, place: Place) -> dict[str, int]:
    """Bytes that leave a host in the step of ddp that sends most, by way."""
    fragment = ways.sent(found.fragment, found.factors, place.ranks, 1, place.nodes, place.row)
    return by_way(config, found, place) | {"diloco": fragment["diloco"]}


def _waiting(config: Config, found: Footprint, place: Place, compute: float) -> dict[str, float]:
    """Seconds of a step, on average, that ddp's ranks wait for what is sent, by way; compute: seconds of a step."""
    meeting = ways.sent(found.gradients, found.factors, place.ranks, 1, place.nodes, place.row)["diloco"]
    diloco = ways.waiting(
        _seconds(meeting, place), compute, config.diloco_fragments, config.diloco_overlap, config.sync_every
    )
    seconds = {way: _seconds(sent, place) for way, sent in by_way(config, found, place).items()}
    meets, saves = _rhythm(config, place)
    early = max(0.0, 1 / meets - 1 / config.sync_every)  # meetings a step that hide behind nothing
    diloco += early * _seconds(meeting, place)
    saved = ways.saved(found.gradients, place.ranks, saves, place.nodes, place.row)
    return seconds | {"diloco": diloco + _seconds(saved["diloco"], place)}


def _place(config: Config, device: torch.device, link: str | None) -> Place:
    ranks = number("WORLD_SIZE", 1)
    nodes = number("NNODES", 1)
    here = number("NPROC_PER_NODE", max(1, -(-ranks // nodes)))
    if not ranks or not nodes or not here:
        raise BadInput("WORLD_SIZE, NNODES and NPROC_PER_NODE must be 1 or more")
    return place(config, device, ranks, nodes, here, link)


def place(
    config: Config,
    device: torch.device,
    ranks: int,
    nodes: int,
    here: int,
    link: str | None = None,
    own: list[torch.device] | None = None,
) -> Place:
    """What there is now, for one of `here` ranks of this host.

    own: the rank's devices, of which `device` is the first. Without them all GPUs of the host are looked at, and each
    look leaves a context there: so ranks that train give theirs.
    """
    host = _host_memory() // here
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    row = device.type == "cuda" and rdma()
    free = _free(own) if own else _cards(device)
    cards = free[: len(free) // here] if config.strategy == "split" and not own else free
    return Place(ranks, nodes, here, device, memory, host, *_link(link, nodes), cards=tuple(cards), row=row)


def _cards(device: torch.device) -> list[int]:
    """Bytes that are free on each of this host's GPUs; none where a run computes on the CPU."""
    if device.type != "cuda":
        return []
    return _free([torch.device("cuda", number) for number in range(torch.cuda.device_count())])


def _free(devices: list[torch.device]) -> list[int]:
    """Bytes that are free on each of these GPUs."""
    return [torch.cuda.mem_get_info(one)[0] for one in devices if one.type == "cuda"]


def bits(link: str) -> float:
    """Bits a second of a link written like 1gbit, 2.5gbit or 100mbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mg])bit(?:/s)?", link.strip().lower())
    if not found or not float(found[1]):
        raise BadInput(f"--link: expected a speed such as 1gbit, 2.5gbit or 100mbit, found {link}")
    return float(found[1]) * {"m": 1e6, "g": 1e9}[found[2]]


def _link(asked: str | None, nodes: int) -> tuple[float, str, float | None]:
    """Bits a second of the link between hosts, what says so, and the seconds of a hop where that was measured.

    asked: a speed, or a result of preflight.yml or bench.yml. Else the newest such result below runs/ for so many hosts
    counts, then what the interface that the ranks would talk over reports, then a plain network.
    """
    if asked and asked.endswith(".json"):
        if not (found := network.read(Path(asked))):
            raise BadInput(
                f"--link: {asked}: expected a result of preflight.yml or bench.yml (runs/preflight/last.json, "
                "runs/bench/last.json) with a bandwidth between hosts; give one, or a speed such as 1gbit"
            )
        return found.bits, found.source, found.hop
    if asked:
        return bits(asked), "", None
    for found in network.newest(RESULTS):
        if len(found.hosts) == nodes > 1:
            return found.bits, found.source, found.hop
    if speed := interface_speed():
        return speed, f"as {os.environ.get('GLOO_SOCKET_IFNAME', 'the interface')} reports", None
    return ASSUMED, "assumed: nothing was measured", None


def interface_speed(interfaces: Path = Path("/sys/class/net")) -> float | None:
    """Bits a second of the interface that the ranks would talk over, where it says so; of a wireless one WIRELESS."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not name:
        return None
    if (interfaces / name / "phy80211").exists():
        return WIRELESS
    try:
        megabits = int((interfaces / name / "speed").read_text())
    except (OSError, ValueError):
        megabits = 0
    return megabits * 1e6 if megabits > 0 else None


def _host_memory() -> int:
    """Bytes that this host has left, or that this control group may still take."""
    text = Path("/proc/meminfo").read_text()
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    free = int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        of = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read or written count as used until somebody needs the memory.
        given_back = sum(
            int(of.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable")
        )
        free = min(free, limit - used + given_back)
    except (OSError, ValueError):  # no such group, or `max`
        pass
    return max(0, free)


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


def trained_on(config: Config) -> tuple[int, int]:
    """Characters and samples of an epoch: what is held out is read, too, and not counted.

    Raises BadInput as read.check does.
    """
    from trainer.data import read

    everything, held_out = read.check(config), read.check(config, ("validation",))
    part = 1 - (config.validation_split or 0)
    samples, letters = (round((one - other) * part) for one, other in zip(everything, held_out, strict=True))
    return letters, samples


def _epoch(config: Config, letters: int, samples: int) -> int:
    """Steps through so many letters, about; where nothing is packed, each sample but a paragraph has a sequence."""
    from trainer.data import read

    sequences = letters / LETTERS / config.sequence_length
    if not config.packing and read.of_records(config):
        sequences = max(sequences, samples)
    return max(1, math.ceil(sequences / config.batch_size))


def _steps(config: Config, epoch: int) -> int:
    """Steps of a run, about; epoch: those through all of the data, where the run goes by epochs."""
    if config.steps is None:
        return max(1, math.ceil(epoch * (config.epochs or 1)))
    return min(config.steps, math.ceil(epoch * config.epochs)) if config.epochs and epoch else config.steps


def _estimate(config: Config, found: Footprint, place: Place, shared: dict) -> dict:
    """Steps, tokens and seconds; the speeds are those of matrix products and of memory here, tried for a moment.

    shared: who has how much of a step, by which speeds (`share`): those of the other ranks follow from this host's.
    """
    speed = _matrix_speed(config, place.device)
    threads = torch.get_num_threads() / max(1, config.threads or len(os.sched_getaffinity(0)) // place.here)
    if place.device.type == "cpu" and threads > 1:
        speed /= threads
    speeds = shared["speeds"] or [1.0] * place.ranks
    # What checkpointed activations cost: forward once more, 2 operations a weight of 6, or of 4 where it is frozen.
    again = (3 / 2 if config.adapter != "none" else 4 / 3) if config.gradient_checkpointing else 1.0
    own = speeds[min(number("RANK_OFFSET", 0), place.ranks - 1)]
    longest = max(part * own / speed for part, speed in zip(shared["split"], speeds, strict=True))
    return {
        "steps": _steps(config, place.epoch),
        "tokens_a_step": config.batch_size * config.sequence_length,
        "flops_a_token": found.flops,
        "matrix_flops_per_second": speed,
        "compute_seconds": longest * config.sequence_length * found.flops * again / (REACHED * speed),
        "optimizer_seconds": 4 * ways.ADAMW * found.trainable / _memory_speed(place.device),
    }


def _matrix_speed(config: Config, device: torch.device) -> float:
    """FLOP/s of a product of two matrices here, in the run's format: the best of some tries."""
    size = 4096 if device.type == "cuda" else 1024
    one = torch.ones(size, size, dtype=HALF.get(config.dtype, torch.float32), device=device)
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        one @ one
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def _memory_speed(device: torch.device) -> float:
    """Bytes a second that are read or written here: the best of some copies."""
    one = torch.ones(COPIED // 4, device=device)
    other, best = torch.empty_like(one), math.inf
    for _ in range(5):
        begin = time.perf_counter()
        other.copy_(one)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * COPIED / best


def propose(budgets: dict[str, Budget], place: Place) -> str | None:
    """Of the strategies that fit ddp, or the one that sends least, and of equals the simplest; None: nothing fits.

    In 16 bits zero1 sends somewhat less than ddp, but its curve is another one, and no other way is open to it.
    """
    fitting = [name for name, one in budgets.items() if one.fits(place)]
    if "ddp" in fitting:
        return "ddp"
    plain = [name for name in fitting if name not in LAST]
    return min(plain, key=lambda name: budgets[name].wire_seconds, default=fitting[0] if fitting else None)


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
    return _is_slow(place) and not place.row and not by_name


def _answer(
    config: Config,
    found: Footprint,
    place: Place,
    budgets: dict,
    estimate: dict,
    by_comm: dict[str, Budget],
) -> dict:
    """The plan as `--json` prints it; bytes and seconds. by_comm: ddp's budget by each way that the run may take."""
    mine = budgets[known(config.strategy)]
    proposed, comm = propose_both(config, budgets, by_comm["exact"], place)
    most = at_once(config, found, place)
    waiting = _waiting(config, found, place, estimate["compute_seconds"])
    coding = _coding(config, place, estimate["optimizer_seconds"])
    way = _travels(config.comm)
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
        "inside_hosts_first": _inside_first(mine.strategy, place),
        "bucket": _bucket(config, place),
        "strategies": {
            name: {
                "memory": one.device,
                "memory_bytes": sum(one.device.values()),
                "host_memory": one.host,
                "host_memory_bytes": sum(one.host.values()),
                "wire_bytes": one.wire_bytes,
                "wire_seconds": one.wire_seconds,
                "fits": one.fits(place),
                **({"cards": [sum(card.values()) for card in one.cards]} if one.cards else {}),
            }
            for name, one in budgets.items()
        },
        "want_force": [name for name in budgets if wants_force(name, config, place)],
        "ways": {
            name: {
                "wire_bytes": sent,
                "wire_seconds": _seconds(sent, place),
                "most_bytes": most[name],
                "waiting_seconds": waiting[name],
                "coding_seconds": coding[name],
                "fits": by_comm[name].fits(place),
            }
            for name, sent in by_way(config, found, place).items()
            if name in by_comm
        },
        "comm": config.comm,
        "passes": _passes(config, place),
        "strategy": known(config.strategy),
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


def _travels(comm: str) -> str:
    return "exact" if comm in ways.EXACT else comm


def known(strategy: str) -> str:
    """The strategy of ORDER whose budget is that of `strategy`."""
    return strategy if strategy in (*ORDER, "split") else {"zero3": "fsdp"}.get(strategy, "ddp")


def _text(config: Config, found: Footprint, place: Place, budgets: dict[str, Budget], answer: dict) -> str:
    mine, estimate = budgets[answer["strategy"]], answer["estimate"]
    rows = min(config.micro_batch_size, config.batch_size)
    lines = [
        f"run '{config.run}': model {config.model}, {found.parameters:,} parameters, {found.trainable:,} trained; "
        f"{place.ranks} ranks on {place.nodes} hosts, {place.device}, {config.dtype}",
        "",
        f"a rank's memory with strategy {mine.strategy}, micro-batches of {rows} x {config.sequence_length} tokens:",
        *_tables(mine, place),
        *(_table(mine.host, place.host_memory, "host") if mine.host else []),
        "",
        f"{'strategy':10} {'a rank holds':>14} {'sends a step':>14} {'which takes':>12}   "
        f"(link: {place.link / 1e9:.4g} Gbit/s{', ' if place.link_source else ''}{place.link_source})",
    ]
    for name, one in budgets.items():
        size = sum(one.device.values())
        sent = f"{one.wire_bytes / MIB:>10,.1f} MiB {one.wire_seconds:>10.2f} s"
        verdict = "fits" if one.fits(place) else "does not fit"
        lines.append(f"{name:10} {size / MIB:>10,.0f} MiB {sent}   {verdict}")
    lines += [
        "",
        _proposal(config, found, answer),
        *_forced(answer),
        *_travel(config, found, place, answer),
        *_shares(config, place, answer),
        *_curve(config, place, answer),
        *_time(config, estimate),
        *_less(answer),
        *_patience(config, place, answer),
    ]
    return "\n".join(lines)


def _tables(mine: Budget, place: Place) -> list[str]:
    """What a rank holds where it computes: a table for each GPU of one that has several."""
    if not mine.cards:
        return _table(mine.device, place.memory, "GPU" if mine.host else "host")
    there = enumerate(zip(mine.cards, place.cards, strict=True))
    return [line for number, (card, room) in there for line in _table(card, room, f"GPU {number}")]


def _table(parts: dict[str, int], there: int, where: str) -> list[str]:
    total = sum(parts.values())
    rows = [f"  {name:18} {size / MIB:>10,.0f} MiB" for name, size in parts.items() if size]
    verdict = "fits" if total <= there else "does not fit"
    return [
        *rows,
        f"  {'in all':18} {total / MIB:>10,.0f} MiB   of {there / MIB:,.0f} MiB of the {where}: {verdict}",
    ]


def _proposal(config: Config, found: Footprint, answer: dict) -> str:
    proposed, comm = answer["proposed"], answer["proposed_comm"]
    other = switch(config, proposed, comm)
    if proposed is None:
        return "proposed: none of the strategies fits. Cure: " + ", ".join(
            [*other, *cures(config, found), "more hosts"]
        )
    same = f"the configuration has {answer['strategy']}" if other else "as configured"
    if rows := answer["proposed_micro_batch_size"]:
        return (
            f"proposed: strategy {proposed} with micro_batch_size: {rows} ({same}{' with' if other else ', but'} "
            f"micro_batch_size: {config.micro_batch_size}), so that frozen weights stay where they are"
        )
    if comm == config.comm:
        return f"proposed: strategy {proposed} ({same})"
    return f"proposed: strategy {proposed} with comm: {comm} ({same} with comm: {config.comm})"


def _forced(answer: dict) -> list[str]:
    """What a run wants to hear before it begins as configured, or as is proposed."""
    named = dict.fromkeys([answer["strategy"], answer["proposed"]])
    return [
        f"strategy {name} sends the frozen weights, too, {answer['strategies'][name]['wire_seconds']:,.1f} s a step "
        "over this link: a run begins so with force_strategy: true alone"
        for name in named
        if name in answer["want_force"]
    ]


def _inside_first(name: str, place: Place) -> bool:
    """Whether under this strategy ranks sum inside their host before anything leaves it (trainer/sums.py).

    The sharded ones do on CPUs alone (strategies/sharded.py).
    """
    sharded = place.device.type == "cpu" and place.ranks == place.nodes * place.here
    return not place.row and 1 < place.nodes < place.ranks and (name in ("ddp", "split") or sharded)


def _bucket(config: Config, place: Place) -> dict:
    """What travels at once under ddp: {mb, why}."""
    exact = config.comm in ways.EXACT
    if exact and config.bucket_mb:
        return {"mb": config.bucket_mb, "why": "bucket_mb, set or by the measured link"}
    if not exact or place.nodes == 1 or place.row or place.hop is None:
        return {"mb": ways.BUCKET_MB, "why": "the default"}
    chosen = network.bucket_mb(place.link * ways.USED, place.hop, place.nodes)
    return {"mb": chosen, "why": f"by the link: a hop takes {1000 * place.hop:.2g} ms"}


def _travel(config: Config, found: Footprint, place: Place, answer: dict) -> list[str]:
    """How gradients go between several hosts, where that is not plain."""
    if place.nodes == 1 or answer["strategy"] not in ("ddp", "split", "zero1", "zero2", "fsdp"):
        return []
    lines = []
    if answer["strategy"] in ("ddp", "split") and config.comm in ways.EXACT:
        bucket = answer["bucket"]
        lines.append(f"buckets: {bucket['mb']} MB of gradients travel together ({bucket['why']})")
    if answer["inside_hosts_first"]:
        ring = place.nodes * (place.ranks - 1) / (place.ranks * (place.nodes - 1))
        lines.append(
            f"a host's ranks exchange among themselves first: what is sent leaves each host once, however many it has; "
            f"one ring of all {place.ranks} ranks would send {ring:.2f} times as much"
        )
    return lines


def _shares(config: Config, place: Place, answer: dict) -> list[str]:
    """Who does how much of a step, and has how much of the state."""
    if place.ranks == 1:
        return []
    found = answer["shares"]
    split = ", ".join(map(str, found["split"][:16])) + (", …" if len(found["split"]) > 16 else "")
    line = f"shares: {split} of {config.batch_size} sequences a step"
    if found["speeds"]:
        line += f"; by these speeds they compute {found['speed_up']:.2f} times as fast as even ones"
        if found["at_once"] > config.micro_batch_size:
            line += f", where there is memory for {found['at_once']} sequences at once"
    elif config.balance == "auto":
        line += " if they are as fast, else by their speeds, which are tried first (--speeds tells what that will be)"
    state = {
        "ddp": "all of it on each rank",
        "split": "all of it on each rank",
        "zero1": "the optimizer's in even parts, whatever the ranks' memory, the rest on each rank",
        "zero2": "the optimizer's and gradients in even parts, whatever the ranks' memory, the weights on each rank",
    }.get(answer["strategy"], "in even parts, whatever the ranks' memory")
    return [line, f"state: {state}"]


def _curve(config: Config, place: Place, answer: dict) -> list[str]:
    """What breaks the rule that the loss curve is the same on any machines (docs/architecture.md), and how."""
    found = []
    if _codes(config, place):
        found.append(f"comm: {config.comm} ({ways.price(config.comm, answer['from_random'])})")
    if "8bit" in config.optimizer:
        found.append(f"optimizer: {config.optimizer} (moments in 8 bits)")
    if config.dtype == "float16":
        found.append("dtype: float16 (a step whose gradients overflow is tried again with a smaller scale)")
    return [f"at a price for the loss curve: {', '.join(found)}"] if found else []


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


def _less(answer: dict) -> list[str]:
    """Where sending takes much of a step: what else could travel, and at which price."""
    compute = answer["estimate"]["compute_seconds"]
    if answer["strategy"] != "ddp":
        mine = answer["strategies"][answer["strategy"]]
        slow = answer["ranks"] > 1 and mine["wire_seconds"] > ways.SLOW * compute
        return ["", f"sending takes long: {ways.less(answer['strategy'], answer['passes'])}"] if slow else []
    if answer["ways"]["exact"]["wire_seconds"] <= ways.SLOW * compute:
        return []
    if list(answer["ways"]) == ["exact"]:
        return ["", f"sending takes long: {ways.LARGER}"]
    lines = [
        "",
        "sending takes long; less can travel, and the loss curve is then another one (invariant 1 of the design):",
    ]
    for name, one in answer["ways"].items():
        share = compute / (compute + one["waiting_seconds"] + one["coding_seconds"])
        mark = " (as configured)" if name == _travels(answer["comm"]) else ""
        lines.append(
            f"  comm: {name:9} {one['wire_bytes'] / MIB:>10,.2f} MiB {one['wire_seconds']:>8.2f} s a step"
            f"{_all_at_once(one)}: "
            f"{share:.0%} of the step computes; {ways.price(name, answer['from_random']) or 'the curve as it is'}{mark}"
            f"{'' if one['fits'] else '; does not fit'}"
        )
    return lines


def _patience(config: Config, place: Place, answer: dict) -> list[str]:
    """Where ranks would give each other up: NCCL counts a sum's time from when it was queued, as a step's all are."""
    way, mine = answer["ways"], answer["strategies"][answer["strategy"]]
    sends = (
        way[_travels(config.comm)] if answer["strategy"] == "ddp" and _travels(config.comm) in way else mine
    )
    seconds = sends["wire_seconds"]
    if sends.get("most_bytes", 0) > sends.get("wire_bytes", 0) > 0:  # all at once, in one step of many
        seconds *= sends["most_bytes"] / sends["wire_bytes"]
    if place.device.type != "cuda" or seconds < config.timeout_seconds / 2:
        return []
    return [
        "",
        f"warning: a step sends for {seconds:,.0f} s, and ranks give each other up after timeout_seconds, "
        f"{config.timeout_seconds:g}: set it to {4 * math.ceil(seconds):,d} or more, or send less",
    ]


def _all_at_once(way: dict) -> str:
    """What a way sends in one step, where that is not what it sends in each."""
    if way["most_bytes"] == way["wire_bytes"]:
        return ""
    return f" ({way['most_bytes'] / MIB:,.2f} MiB at once)"


def _time(config: Config, estimate: dict) -> list[str]:
    counted = (
        "4 FLOPs a frozen weight and token" if config.adapter != "none" else "6 FLOPs a weight and token"
    )
    more = " more" if config.comm == "diloco" and config.diloco_overlap else ""
    codes = f", {estimate['coding_seconds']:.2f} s to code" if estimate["coding_seconds"] else ""
    up_to = "" if config.packing else "up to "
    lines = [
        f"time: about {_duration(estimate['seconds'])} for {estimate['steps']:,} steps of "
        f"{up_to}{estimate['tokens_a_step']:,} tokens: {estimate['compute_seconds']:.2f} s to compute{codes} and "
        f"{estimate['waiting_seconds']:.2f} s{more} to send, each",
        f"  ({counted}, {estimate['flops_a_token'] / 1e9:.3g} GFLOP a token in all; matrix products reach "
        f"{estimate['matrix_flops_per_second'] / 1e12:.3g} TFLOP/s here, a step {REACHED:.0%} of that)",
    ]
    if config.steps is None and estimate["steps"] < configuration.FEW:
        smaller = "batch_size or sequence_length" if config.packing else "batch_size"
        few = f"so few steps are too few to learn by: a smaller {smaller}, or more data, makes more"
        lines.append(f"  {few}")
    return lines


def _duration(seconds: float) -> str:
    for name, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"


assert set(ORDER) <= set(configuration.STRATEGIES)
