"""The plan as one reads it at a terminal, from the answer that `--json` prints."""

import math

from trainer import ways
from trainer.config import FEW, Config
from trainer.model.footprint import Footprint
from trainer.plan import proposal, wire, work
from trainer.plan.memory import Budget
from trainer.plan.resources import Place
from trainer.ways import MIB


def text(config: Config, found: Footprint, place: Place, budgets: dict[str, Budget], answer: dict) -> str:
    """All of it; answer: as commands/plan.py makes it."""
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
        *_travel(config, place, answer),
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
    other = proposal.switch(config, proposed, comm)
    if proposed is None:
        return "proposed: none of the strategies fits. Cure: " + ", ".join(
            [*other, *proposal.cures(config, found), "more hosts"]
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


def _travel(config: Config, place: Place, answer: dict) -> list[str]:
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
    """What breaks the rule that the loss curve is the same on any machines (docs/design/training-step.md), and how."""
    found = []
    if wire.codes(config, place):
        found.append(f"comm: {config.comm} ({ways.price(config.comm, answer['from_random'])})")
    if "8bit" in config.optimizer:
        found.append(f"optimizer: {config.optimizer} (moments in 8 bits)")
    if config.dtype == "float16":
        found.append("dtype: float16 (a step whose gradients overflow is tried again with a smaller scale)")
    return [f"at a price for the loss curve: {', '.join(found)}"] if found else []


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
        f"{estimate['matrix_flops_per_second'] / 1e12:.3g} TFLOP/s here, a step {work.REACHED:.0%} of that)",
    ]
    if config.steps is None and estimate["steps"] < FEW:
        smaller = "batch_size or sequence_length" if config.packing else "batch_size"
        few = f"so few steps are too few to learn by: a smaller {smaller}, or more data, makes more"
        lines.append(f"  {few}")
    return lines


def _duration(seconds: float) -> str:
    for name, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"


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
        mark = " (as configured)" if name == wire.way_of(answer["comm"]) else ""
        lines.append(
            f"  comm: {name:9} {one['wire_bytes'] / MIB:>10,.2f} MiB {one['wire_seconds']:>8.2f} s a step"
            f"{_all_at_once(one)}: "
            f"{share:.0%} of the step computes; {ways.price(name, answer['from_random']) or 'the curve as it is'}{mark}"
            f"{'' if one['fits'] else '; does not fit'}"
        )
    return lines


def _all_at_once(way: dict) -> str:
    """What a way sends in one step, where that is not what it sends in each."""
    if way["most_bytes"] == way["wire_bytes"]:
        return ""
    return f" ({way['most_bytes'] / MIB:,.2f} MiB at once)"


def _patience(config: Config, place: Place, answer: dict) -> list[str]:
    """Where ranks would give each other up: NCCL counts a sum's time from when it was queued, as a step's all are."""
    way, mine = answer["ways"], answer["strategies"][answer["strategy"]]
    sends = (
        way[wire.way_of(config.comm)]
        if answer["strategy"] == "ddp" and wire.way_of(config.comm) in way
        else mine
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
