"""What leaves a host in a step: bytes, and the seconds that they take, by strategy and by each way of ddp's gradients.

From bytes of weights and gradients, what there is of ranks and hosts, and the configuration's rhythm of checkpoints.
"""

from trainer import checkpoint, ways
from trainer import config as configuration
from trainer import link as network
from trainer.balance import given, shares
from trainer.config import Config
from trainer.model.footprint import Footprint
from trainer.plan import work
from trainer.plan.resources import Place


def by_strategy(name: str, config: Config, place: Place, trained: int, in_blocks: int, rest: int) -> int:
    """Bytes that leave a host in a step; `in_blocks`, `rest`: of the weights that are gathered, by where they are."""
    inside = inside_first(name, place)
    among = place.nodes if inside else place.ranks
    micro_batches = passes(config, place)
    summed, gathered = {
        "ddp": (2 * trained, 0),
        "zero1": (trained, in_blocks + rest),
        "zero2": (micro_batches * trained, in_blocks + rest),
    }.get(name, (micro_batches * trained, micro_batches * (2 * in_blocks + rest)))
    if name != "ddp" and place.device.type == "cpu" and place.nodes > 1 and not inside:
        # Each rank has its part from each other one itself (strategies/sharded.py, Scatter).
        summed = summed * place.here * (place.ranks - place.here) // place.ranks
        return summed + gathered * (among - 1) // among
    return (summed + gathered) * (among - 1) // among


def for_checkpoints(config: Config, found: Footprint, place: Place) -> int:
    """Bytes that leave a host in a step of a sharded strategy, on average, for checkpoints: the host that sends most.

    Each rank's part of weights and moments goes to every other host that writes a copy; on one host to its first rank.
    """
    saves = rhythm(config, place)[1]
    if not saves or place.ranks == 1:
        return 0
    parts = min(checkpoint.copies(place.nodes), place.nodes - 1) * place.here if place.nodes > 1 else 1
    return int(parts * 12 * found.trainable / place.ranks / saves)


def by_way(config: Config, found: Footprint, place: Place) -> dict[str, int]:
    """Bytes that leave a host in a step of ddp, on average, by way; with what checkpoints make it send."""
    meets, saves = rhythm(config, place)
    sent, saved = _sent(found, place, found.gradients, meets), _saved(found, place, saves)
    return {way: sent[way] + saved[way] for way in sent}


def at_once(config: Config, found: Footprint, place: Place) -> dict[str, int]:
    """Bytes that leave a host in the step of ddp that sends most, by way."""
    return by_way(config, found, place) | {"diloco": _sent(found, place, found.fragment, 1)["diloco"]}


def _sent(found: Footprint, place: Place, gradients: int, meets: float) -> dict[str, int]:
    """As ways.sent, of so many bytes of gradients, which meet once in so many steps."""
    return ways.sent(gradients, found.factors, place.ranks, meets, place.nodes, place.row)


def _saved(found: Footprint, place: Place, saves: float) -> dict[str, int]:
    """As ways.saved, with a checkpoint in so many steps."""
    return ways.saved(found.gradients, place.ranks, saves, place.nodes, place.row)


def seconds(sent: int, place: Place) -> float:
    """That a rank's bytes take on its way to another host."""
    return sent * 8 / (place.link * ways.USED) if place.nodes > 1 else 0.0


def waiting(config: Config, found: Footprint, place: Place, compute: float) -> dict[str, float]:
    """Seconds of a step, on average, that ddp's ranks wait for what is sent, by way; compute: seconds of a step."""
    sends = {way: seconds(sent, place) for way, sent in by_way(config, found, place).items()}
    meets, saves = rhythm(config, place)
    meeting = seconds(_sent(found, place, found.gradients, 1)["diloco"], place)
    diloco = ways.waiting(meeting, compute, config.diloco_fragments, config.diloco_overlap, config.sync_every)
    early = max(0.0, 1 / meets - 1 / config.sync_every)  # meetings a step that hide behind nothing
    diloco += early * meeting
    return sends | {"diloco": diloco + seconds(_saved(found, place, saves)["diloco"], place)}


def coding(config: Config, place: Place, optimizer: float) -> dict[str, float]:
    """Seconds of a step, on average, in which ddp's ranks code what they send, by way; optimizer: those of AdamW's."""
    each = {way: optimizer * ways.CODING[place.device.type].get(way, 0) for way in ways.PASSES}
    each["diloco"] /= rhythm(config, place)[0]
    alone = {way: 0.0 for way in each if place.ranks == 1 or (place.nodes == 1 and way != "diloco")}
    return each | alone


def codes(config: Config, place: Place) -> bool:
    """Whether what travels is coded with loss: on one host nothing is, but by diloco."""
    return config.comm not in ways.EXACT and (
        place.nodes > 1 or (place.ranks > 1 and config.comm == "diloco")
    )


def way_of(comm: str) -> str:
    """That gradients go with this comm."""
    return "exact" if comm in ways.EXACT else comm


def inside_first(name: str, place: Place) -> bool:
    """Whether under this strategy ranks sum inside their host before anything leaves it (trainer/sums.py).

    The sharded ones do on CPUs alone (strategies/sharded.py).
    """
    sharded = place.device.type == "cpu" and place.ranks == place.nodes * place.here
    return not place.row and 1 < place.nodes < place.ranks and (name in ("ddp", "split") or sharded)


def passes(config: Config, place: Place) -> int:
    """Micro-batches of a step of ranks that keep step, as Balance has them where memory wants no more."""
    largest = max((config.compile and given(config.balance)) or shares(config.batch_size, place.ranks))
    return -(-largest // config.micro_batch_size)


def rhythm(config: Config, place: Place) -> tuple[float, float]:
    """As ways.rhythm; each evaluation is taken to save, as one that is better does."""
    return ways.rhythm(
        config.sync_every,
        *configuration.early(config, place.epoch),
        fragments=config.diloco_fragments,
        last=work.steps(config, place.epoch) if config.steps or place.epoch else None,
    )


def bucket(config: Config, place: Place) -> dict:
    """What travels at once under ddp: {mb, why}."""
    exact = config.comm in ways.EXACT
    if exact and config.bucket_mb:
        return {"mb": config.bucket_mb, "why": "bucket_mb, set or by the measured link"}
    if not exact or place.nodes == 1 or place.row or place.hop is None:
        return {"mb": ways.BUCKET_MB, "why": "the default"}
    chosen = network.bucket_mb(place.link * ways.USED, place.hop, place.nodes)
    return {"mb": chosen, "why": f"by the link: a hop takes {1000 * place.hop:.2g} ms"}
