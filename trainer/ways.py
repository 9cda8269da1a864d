"""By which ways gradients can travel under ddp: how much each sends, what it costs, and when one is worth that.

No torch here.
"""

import itertools
import math
from collections.abc import Sequence

from trainer.errors import BadInput

USED = 0.94  # of a link's bits: what is left beside the headers of Ethernet and TCP
BUCKET_MB = 25  # of gradients that travel together at most, and where nothing is known of the link
MIB = 1 << 20
BUCKET_BYTES = BUCKET_MB * MIB
SLOW = 0.5  # of the time to compute, which sending may take before another way is worth its price
FRAGMENTS = 4  # of diloco, in a proposal, where as many tensors are trained
# How often a rank holds the gradients' bytes from step to step, beside them, for what is left over and averages.
HELD = {"exact": 0, "16bit": 1, "8bit": 1, "powersgd": 1, "diloco": 3}
BACKWARD = 2 / 3  # of a micro-batch's time
# How often each byte of the gradients is read or written to code and decode it, counted in compress.py and local.py.
PASSES = {"exact": 0, "16bit": 16, "8bit": 24, "powersgd": 14, "diloco": 40}
ADAMW = 7  # as often, for each trained weight's 4 bytes: two moments and the weight both ways, the gradient
# Times as long as AdamW's step takes: on a GPU, by those counts; on a CPU, where powersgd's products take longer than
# memory does, about what one core was measured to.
CODING = {
    "cuda": {way: passes / ADAMW for way, passes in PASSES.items()},
    "cpu": {"16bit": 2.0, "8bit": 5.0, "powersgd": 10.0, "diloco": 8.0},
}
BLOCK = 1024  # values of `8bit` that share a scale of 4 bytes
PRICE = {
    "16bit": "next to none",
    "8bit": "the curve moves a little",
    "powersgd": "the curve moves; matrices only",
    "diloco": "another curve: the loss after as many tokens is a little higher, or needs more of them",
}
# Of diloco where weights begin random: it was measured there, and is worse than any wait (docs/slow-networks.md).
FROM_RANDOM = (
    "from random weights a loss far higher after as many tokens, by 15 to 25 % where it was measured"
)
# What is exact and makes sending a smaller part of a step, and what that costs.
LESS = "makes that less of a step and stays exact, but is another optimisation: fewer steps for as many tokens, with a "
LARGER = f"a larger batch_size {LESS}learning rate of their own"
# What travels for each micro-batch, not once a step, by strategy (strategies/sharded.py).
EACH = {
    "zero2": "gradients",
    **dict.fromkeys(("zero3", "fsdp", "offload", "infinity"), "weights and gradients"),
}
EXACT = (
    "auto",
    "exact",
)  # values of the key comm with which nothing is lost; auto proposes another where that pays


def sent(
    gradients: int, factors: int, ranks: int, sync_every: float, hosts: int | None = None, row: bool = False
) -> dict[str, int]:
    """Bytes that leave a host in a step, on average, by way; of one host alone, those that a rank of it sends.

    gradients: bytes of all of them, float32; factors: as powersgd sends them. hosts: of the ranks, as many unless
    given. All ways go inside hosts first (trainer/sums.py, compress.py), but in a `row` of all ranks not those that
    code nothing; a host alone codes nothing, and its ranks all send as exact ones do, but for diloco's.
    """
    hosts = hosts or ranks
    among = _among(ranks, hosts, row)
    exact = half = quarter = factored = 2 * gradients * (among - 1) // among
    if hosts > 1:
        between = 2 * gradients * (hosts - 1) // hosts
        factored = 2 * factors * (hosts - 1) // hosts
        half, quarter = between // 2, int(between * (BLOCK + 4) / (4 * BLOCK))
    return {
        "exact": exact,
        "16bit": half,
        "8bit": quarter,
        "powersgd": factored,
        "diloco": int(quarter / sync_every),
    }


def _among(ranks: int, hosts: int | None, row: bool) -> int:
    """How many sum over the wire: hosts, or in a row, and of one host, the ranks."""
    return hosts if hosts and hosts > 1 and not row else ranks


def rhythm(sync_every: int, *early: int, fragments: int = 1, last: int | None = None) -> tuple[float, float]:
    """(steps between two meetings of all of diloco, steps between two that something else asks for), on average; the
    latter 0 where nothing does.

    early: every how many steps a checkpoint or an evaluation has all meet, after which a round begins anew; 0: never.
    last: the run's last step, if that is known: what comes later is left out, and all meet after it.
    """
    early = sorted(one for one in early if one and (last is None or one < last))
    if not early and last is None:
        return sync_every, 0
    longest = 1000 * early[0] if early else math.inf  # what is rarer counts for nothing beside that
    early = [one for one in early if one <= longest]
    # All of the run where that is known and not too long, which ends with a meeting; else until all begins anew.
    period = last if last is not None and last <= longest else min(math.lcm(*early), longest)
    ends = sorted({step for one in early for step in range(one, period + 1, one)})
    apart = period / len(ends) if ends else 0
    ends = [*ends, period] if ends[-1:] != [period] else ends
    phases = [number * sync_every // fragments for number in range(1, fragments + 1)]
    # A fragment meets each sync_every steps from its phase on, and at the end unless it has just done so.
    meetings = sum(
        max(0, -(-(gap - phase) // sync_every)) + 1
        for gap in (end - begin for begin, end in itertools.pairwise((0, *ends)))
        for phase in phases
    )
    return period * fragments / meetings, apart


def saved(
    gradients: int, ranks: int, checkpoint_every: float, hosts: int | None = None, row: bool = False
) -> dict[str, int]:
    """Bytes that leave a host in a step, as for `sent`, for checkpoints: sums in float32, whatever travels else.

    Of what messages have left out; with diloco also of both moments.
    """
    among = _among(ranks, hosts, row)
    exact = 2 * gradients * (among - 1) // among
    left = int(hosts != 1)  # where nothing is coded, nothing is left over
    sums = {"exact": 0, "16bit": left, "8bit": left, "powersgd": left, "diloco": 3}
    return {
        way: int(count * exact / checkpoint_every) if checkpoint_every else 0 for way, count in sums.items()
    }


class TooManyFragments(BadInput):
    """A run cannot begin with so many, whatever else is known of it."""


def fragments(sizes: list[int], count: int) -> list[slice]:
    """`count` neighbouring pieces of parameters of these `sizes`, each piece about as large; raises TooManyFragments.

    A parameter goes where the larger part of it would lie if they could be cut, but no piece is empty.
    """
    if count > len(sizes):
        raise TooManyFragments(
            f"diloco_fragments: found {count}; expected no more than the {len(sizes)} parameters that are trained, for "
            f"each goes whole; set diloco_fragments to {len(sizes)} or less"
        )
    pieces, begin, left = [], 0, sum(sizes)
    for others in reversed(range(count)):
        end, piece = begin + 1, sizes[begin]
        while len(sizes) - end > others and (not others or piece + sizes[end] / 2 <= left / (others + 1)):
            piece += sizes[end]
            end += 1
        pieces.append(slice(begin, end))
        begin, left = end, left - piece
    return pieces


def waiting(seconds: float, compute: float, fragments: int, overlap: int, sync_every: int) -> float:
    """Seconds of a step, on average, that diloco waits for its meetings.

    seconds: of a meeting of everything at once; compute: of a step. A fragment's takes its part, and the steps that it
    overlaps with hide that.
    """
    return fragments * max(0.0, seconds / fragments - overlap * compute) / sync_every


def hidden(
    seconds: float, compute: float, sync_every: float, tensors: int = FRAGMENTS
) -> tuple[int, int] | None:
    """diloco_fragments and diloco_overlap with which no step waits, as for `waiting`; None where that cannot be.

    tensors: that are trained, each of which goes whole.
    """
    count = min(FRAGMENTS, tensors)
    overlap = math.ceil(seconds / count / compute) if compute else sync_every
    return (count, overlap) if count * overlap < sync_every else None


def open_to(dtype: str, routers: bool) -> tuple[str, ...]:
    """The lossy ways that a run may take; routers: their loss is part of its own. trainer/config.py has the reasons."""
    if dtype == "float16":
        return ()
    return tuple(way for way in PRICE if way != "diloco" or not routers)


def advised(dtype: str, routers: bool, from_random: bool) -> tuple[str, ...]:
    """Those of `open_to` that a run may be told to take; from_random: its weights begin so."""
    return tuple(way for way in open_to(dtype, routers) if way != "diloco" or not from_random)


def price(way: str, from_random: bool) -> str:
    """What a way costs; '' of one that costs nothing."""
    return FROM_RANDOM if from_random and way == "diloco" else PRICE.get(way, "")


def behind_backward(micro_batch: float, buckets: int) -> float:
    """Seconds in which exact gradients travel while backward still runs, where the network is what a step waits for.

    micro_batch: seconds of the last one on the slowest rank, whose buckets, about alike, become ready one by one.
    """
    return BACKWARD * micro_batch * (1 - 1 / buckets)


def _network(parts: dict) -> tuple[float, str] | None:
    """(seconds of a step without the network, how much that takes); None where it takes little."""
    wire = parts["wire"]
    compute = sum(parts[name][0] for name in ("compute", "compression", "optimizer", "waiting"))
    if wire <= SLOW * compute:
        return None
    step = compute + wire
    return compute, f"the network takes {wire / step:.0%} of a step ({wire:.2g} of {step:.2g} s)"


def less(strategy: str, passes: int) -> str:
    """What makes sending a smaller part of a step of `strategy`, whose gradients go exactly alone.

    passes: micro-batches of a step.
    """
    what, cure = EACH.get(strategy), LARGER
    if what:
        cure = f"strategy: {strategy} sends {what} for each of {passes} micro-batches, so that a larger "
        cure += (
            "micro_batch_size, for which gradient_checkpointing: true makes room, sends less and stays exact"
            if passes > 1
            else f"batch_size with as much more micro_batch_size {LESS}learning rate of their own"
        )
    return (
        f"{cure}. strategy: ddp, where it has room (-e plan=true shows that, and what each strategy sends), sends "
        "gradients once a step, and can send less of them (docs/slow-networks.md)"
    )


def proposal_of_others(parts: dict, strategy: str, passes: int) -> str | None:
    """As `proposal`, of a strategy that is not ddp."""
    found = _network(parts)
    return found and f"{found[1]}; {less(strategy, passes)}"


def proposal(
    parts: dict,
    by_way: dict[str, int],
    sync_every: float,
    saves: dict[str, int] | None = None,
    allowed: Sequence[str] = tuple(PRICE),
    behind: float = 0.0,
    device: str = "cpu",
    trained: Sequence[int] = (1,) * FRAGMENTS,
) -> str | None:
    """What to say of exact steps whose time went as `parts` tells (trainer/metrics.py); None where they are as they
    should be.

    by_way: as `sent` gives it. sync_every: steps between two meetings, on average. saves: as `saved` does. allowed: as
    `advised` does. behind: as `behind_backward` does: the ways that wait for the end of backward hide nothing. device:
    the kind that codes. trained: bytes of each tensor's gradient.
    """
    if not (found := _network(parts)):
        return None
    compute, takes_much = found
    wire = parts["wire"]
    step, larger = compute + wire, f"{takes_much}; {LARGER}"
    saves = saves or dict.fromkeys(by_way, 0)
    share = {way: (by_way[way] + saves[way]) / by_way["exact"] for way in allowed}
    full = wire + behind
    coding = {way: max(parts["optimizer"]) * CODING[device][way] for way in allowed}
    if "diloco" in coding:
        coding["diloco"] /= sync_every
    takes = {way: full * share[way] + coding[way] for way in allowed}
    takes = {way: seconds for way, seconds in takes.items() if seconds < wire}
    if not takes:
        return larger
    enough = [way for way, seconds in takes.items() if seconds <= SLOW * compute]
    way = enough[0] if enough else min(takes, key=takes.get)
    found = None
    if way == "diloco":
        meeting = sync_every * (full * by_way[way] / by_way["exact"] + coding[way])
        found = hidden(meeting, compute, sync_every, len(trained))
    hides = found and (
        f". Each of its meetings takes {meeting:.2g} s; with -e diloco_fragments={found[0]} "
        f"-e diloco_overlap={found[1]}, too, a part at a time travels while the next steps are computed"
    )
    return (
        f"{larger}. comm: {way} sends {share[way]:.1%} of the bytes, for steps "
        f"{step / (compute + takes[way]):.1f} times as fast. Its price: {PRICE[way]}; "
        f"{HELD[way] * sum(trained) / MIB:,.0f} MiB more on each rank. "
        f"A run goes on with it after stop.yml, by -e resume=true -e comm={way} (docs/slow-networks.md){hides or ''}"
    )
