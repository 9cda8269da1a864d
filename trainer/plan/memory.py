"""A rank's memory under each strategy, by what takes it, where it computes and on its host.

From the model's footprint and what there is of ranks and memory: a Budget, which has what the rank sends, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer import ways
from trainer.config import STRATEGIES, Config
from trainer.model.footprint import Footprint
from trainer.model.loss import HALF
from trainer.plan import wire
from trainer.plan.resources import Place
from trainer.strategies import split

# Which of them comes first where several are as good. After these comes split, on hosts with several GPUs.
ORDER = ("ddp", "zero1", "zero2", "fsdp", "offload", "infinity")
assert set(ORDER) <= set(STRATEGIES)
KERNELS = 40 << 20  # bytes of code that the first step loads
CONTEXT = 600 << 20  # bytes of a GPU that CUDA and NCCL take for themselves
SCATTERED = 0.2  # of what comes and goes in a step: holes in the C library's heap, which keeps what is freed


@dataclass(frozen=True)
class Budget:
    """A rank's memory in bytes by what takes it, where it computes and on its host; and what it sends."""

    strategy: str
    device: dict[str, int]
    host: dict[str, int]  # empty where the host is what computes
    wire_bytes: int  # a step: what leaves the rank's host, or of one host alone the rank
    wire_seconds: float
    # Of a rank with several GPUs, each one's; `device` is the fullest's.
    cards: tuple[dict[str, int], ...] = ()

    def fits(self, place: Place, times: float = 1.0) -> bool:
        """Whether there is room, `times` as much as there is."""
        if self.cards:
            there = zip(self.cards, place.cards, strict=True)
            on_device = all(sum(card.values()) <= times * room for card, room in there)
        else:
            on_device = sum(self.device.values()) <= times * place.memory
        return on_device and sum(self.host.values()) <= times * place.host_memory


def every(config: Config, found: Footprint, place: Place, overhead: int) -> dict[str, Budget]:
    """The budget of a rank under each strategy that there can be, by name; split where a rank has several GPUs."""
    budgets = {name: budget(name, config, found, place, overhead) for name in ORDER}
    if len(place.cards) > 1 and found.layers:
        budgets["split"] = split_budget(config, found, place, overhead)
    return budgets


def budget(name: str, config: Config, found: Footprint, place: Place, overhead: int) -> Budget:
    """The budget of a rank under strategy `name`; trainer/strategies/sharded.py has the table that this follows."""
    sharing = _Sharing.of(name, config, found, place)
    on_cpu = place.device.type == "cpu"
    lossy = sharing.name == "ddp" and wire.codes(config, place)
    copies = _copies(sharing, config, found, place, lossy)
    whole = _whole(sharing, config, found, place)
    plain = sharing.name == "ddp"
    device = {
        **_state(sharing, config, found, place),
        "whole for a while": whole,
        "activations": found.activations if plain else found.given_activations,
        "loss and backward": (found.working if plain else found.given_working) + 2 * found.largest,
    }
    host = {} if on_cpu else {"checkpoint": copies, "overhead": overhead}
    if sharing.name in ("offload", "infinity"):
        _put_away(sharing, found, device, host)
    if not on_cpu and not sharing.weights and found.converted:
        # Each rank makes all of the model float32 before the GPU has it, and before there is a checkpoint to copy; or
        # of an adapter's base what its files have otherwise. What stays as it is on disk is the page cache's.
        host["while loading"] = max(0, found.weights - copies)
    if on_cpu:
        device["checkpoint"] = copies
        comes_and_goes = device["activations"] + device["loss and backward"] + (0 if plain else whole)
        device["scattered"] = int(SCATTERED * comes_and_goes)
    device["overhead"] = overhead if on_cpu else CONTEXT
    sent = _sent(sharing, config, found, place)
    if lossy:
        sent = wire.by_way(config, found, place)[config.comm]
        _add_what_is_left_over(config, found, device, device if on_cpu else host)
    if "paged" in config.optimizer and not on_cpu:  # as much of it as the card has no room for
        gives = min(device["optimizer"], max(0, sum(device.values()) - place.memory))
        device["optimizer"] -= gives
        host["optimizer"] = host.get("optimizer", 0) + gives
    return Budget(name, device, host, sent, wire.seconds(sent, place))


@dataclass(frozen=True)
class _Sharing:
    """What of a model's bytes a strategy shares out among the ranks."""

    name: str  # the strategy's; ddp where a rank has nobody to share with
    weights: bool  # they are shared out, too
    part: int  # of what is shared out a rank holds one in so many
    gathered: int  # bytes of the weights that ranks give each other
    narrow: float  # trained ones travel in this part of what they are held in, frozen ones as they are held

    @classmethod
    def of(cls, name: str, config: Config, found: Footprint, place: Place) -> "_Sharing":
        """What strategy `name` shares out here."""
        if place.ranks == 1 and name not in ("offload", "infinity"):
            name = "ddp"
        weights = name in ("fsdp", "offload", "infinity")
        part = place.ranks if name != "ddp" else 1
        gathered = found.shared if weights else found.gradients  # which are float32, as trained weights are
        return cls(name, weights, part, gathered, 0.5 if config.dtype in HALF else 1.0)


def _state(sharing: _Sharing, config: Config, found: Footprint, place: Place) -> dict[str, int]:
    """What a rank holds from step to step: weights, adapter, gradients and moments."""
    held = found.weights + found.adapter - sharing.gathered + sharing.gathered // sharing.part
    adapter = found.adapter // (sharing.part if sharing.weights else 1)
    gradients = found.gradients // (sharing.part if sharing.weights or sharing.name == "zero2" else 1)
    if sharing.name == "ddp" and place.ranks == 1 and wire.passes(config, place) == 1:
        gradients = max(0, found.growing - found.working)  # they come to be while activations go
    return {
        "weights": max(0, held - adapter) if found.adapter else held,
        "adapter": adapter,
        "gradients": gradients,
        "optimizer": optimizer_bytes(config, found) // sharing.part,
    }


def _whole(sharing: _Sharing, config: Config, found: Footprint, place: Place) -> int:
    """Weights and gradients that are whole for a while."""
    trained = found.gradients
    if sharing.name == "ddp":  # the other ranks' slices
        summed_by_layers = place.ranks > place.nodes > 1 and not place.row
        return min(2 * ways.BUCKET_BYTES, trained) if summed_by_layers else 0
    outside = max(0, trained - found.blocks)
    gradients = 2 * found.block if sharing.name == "zero1" else found.block + outside
    block = min(found.block, sharing.gathered)
    rest, weights = 0, int(trained * sharing.narrow)
    if sharing.weights:
        rest = max(0, sharing.gathered - found.blocks)
        weights = int((rest + 2 * block) * (sharing.narrow if config.adapter == "none" else 1))
    # What is gathered, or scattered, at once; over gloo a rank gets the others' versions of its part besides.
    scattered = min(trained, max(found.block, outside))
    at_once = max(block, rest, (2 if place.device.type == "cpu" else 1) * scattered)
    return weights + min(trained, gradients) + at_once


def _copies(sharing: _Sharing, config: Config, found: Footprint, place: Place, lossy: bool) -> int:
    """What a checkpoint copies while training goes on."""
    copies = 0 if sharing.name == "infinity" else checkpoint_bytes(config, found) // sharing.part
    if lossy:  # sums over ranks, which are copies whether or not the rest is
        copies += {"diloco": 8}.get(config.comm, 4) * found.trainable
        # Means of the ranks' are copies in any case.
        if config.comm == "diloco" and not config.checkpoint_async:
            copies += 12 * found.trainable
    # Of ddp one rank of a host makes them: a part of each one's memory.
    return copies // place.here if sharing.name == "ddp" else copies


def _put_away(sharing: _Sharing, found: Footprint, device: dict[str, int], host: dict[str, int]) -> None:
    """Take from `device` what offload keeps in the host's memory, and infinity on disk.

    host: empty where that is what computes.
    """
    stays = found.weights + found.adapter - sharing.gathered  # quantised ones do where they compute
    if host:
        for what in ("weights", "adapter", "gradients", "optimizer"):
            host[what], device[what] = device[what], 0
        if sharing.name == "offload":
            host["pinned"] = sum(_rounded_up(ones, sharing.part) for ones in (found.tensors, found.trained))
        device["weights"] = stays
        host["weights"] -= stays
    if sharing.name == "infinity":  # the kernel keeps of it what there is room for
        where = host or device
        where["optimizer"] = where["adapter"] = 0
        where["weights"] = 0 if host else stays


def _rounded_up(tensors: Sequence[tuple[int, int]], part: int) -> int:
    """Bytes that pinned memory takes beyond what is in it; tensors: as Footprint has them, a `part` of each here.

    torch takes it by powers of two, for each of an offloaded weight's and gradient's parts.
    """
    return sum(
        count * ((1 << (size - 1).bit_length()) - size)
        for size, count in ((max(1, -(-size // part)), count) for size, count in tensors)
    )


def _add_what_is_left_over(
    config: Config, found: Footprint, device: dict[str, int], host: dict[str, int]
) -> None:
    """Add what a lossy way holds beside gradients; host: the CPU's memory, which may be what computes."""
    device["left over"], codes = _lossy_bytes(config, found)
    # Coding begins when what backward needs is gone.
    device["compression"] = max(0, codes - device["activations"] - device["loss and backward"])
    if config.comm == "diloco" and config.diloco_overlap:  # what travels does so from the CPU's memory
        device["left over"] -= found.gradients
        host["left over"] = host.get("left over", 0) + found.gradients
        host["under way"] = found.fragment


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


def _sent(sharing: _Sharing, config: Config, found: Footprint, place: Place) -> int:
    """Bytes that leave the host in a step, with what checkpoints make it send."""
    trained, gathered = found.gradients, sharing.gathered
    in_blocks = min(found.blocks, gathered)
    trained_in_blocks = min(trained, in_blocks)
    slimmer = int((1 - sharing.narrow) * trained_in_blocks)
    slimmer_outside = int((1 - sharing.narrow) * (trained - trained_in_blocks))
    rest = max(0, gathered - in_blocks - slimmer_outside)
    sent = wire.by_strategy(sharing.name, config, place, trained, in_blocks - slimmer, rest)
    return sent + (wire.for_checkpoints(config, found, place) if sharing.name != "ddp" else 0)


def split_budget(config: Config, found: Footprint, place: Place, overhead: int) -> Budget:
    """The budget of a rank under strategy split, with all of its host's GPUs (trainer/strategies/split.py)."""
    trained = 4 + (2 if "8bit" in config.optimizer else 8)  # bytes of a trained weight's gradient and moments
    own, count = found.weights + found.adapter, found.trainable
    outside = own - sum(size for size, _ in found.layers), count - sum(number for _, number in found.layers)
    sizes = [size + trained * number for size, number in found.layers]
    numbers = split.places(sizes, outside[0] + trained * outside[1], place.cards)
    moments = optimizer_bytes(config, found)
    # The other ranks', on the first card.
    slices = min(2 * ways.BUCKET_BYTES, found.gradients) if place.nodes > 1 else 0
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
                "whole for a while": 0 if card else slices,
                "activations": found.activations * numbers.count(card) // len(numbers),
                "loss and backward": found.working + 2 * found.largest,
                "overhead": CONTEXT,
            }
        )
    fullest = max(zip(cards, place.cards, strict=True), key=lambda one: sum(one[0].values()) - one[1])[0]
    host = {"checkpoint": checkpoint_bytes(config, found) // place.here, "overhead": overhead}
    ranks = place.nodes if config.strategy != "split" else place.ranks
    sent = ways.sent(found.gradients, found.factors, ranks, 1, place.nodes, place.row)["exact"]
    return Budget("split", fullest, host, sent, wire.seconds(sent, place), tuple(cards))


def optimizer_bytes(config: Config, found: Footprint) -> int:
    """AdamW's two moments of what is trained."""
    if "8bit" not in config.optimizer:
        return 8 * found.trainable
    return 8 * found.small + int((found.trainable - found.small) * (2 + 8 / 256))


def checkpoint_bytes(config: Config, found: Footprint) -> int:
    """The copy of weights and moments that is written while training goes on."""
    return 12 * found.trainable if config.checkpoint_async else 0


def known(strategy: str) -> str:
    """The strategy of ORDER whose budget is that of `strategy`."""
    return strategy if strategy in (*ORDER, "split") else {"zero3": "fsdp"}.get(strategy, "ddp")
