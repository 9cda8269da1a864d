"""`python -m bench.simulate`: what unlike machines on a slow network would do, by each way for gradients to travel.

The model of a step, which docs/slow-networks.md states for readers. A host computes its share of the sequences, at its
own speed, and its optimizer's step. Under exact, a bucket of gradients travels once every host has it ready, and after
the one before it; under the other ways all is coded, and travels, once the last host is done; under diloco that is once
in sync_every steps. Bytes are the trainer's own count (trainer/ways.py). They go around a ring at the pace of its
slowest link, and each hop costs the network's latency. The switch is never the limit.

Speeds of the cards of home-lan come from what others have measured of such cards and published: none was here.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import WAYS, markdown
from trainer import balance, link, ways
from trainer import config as configuration
from trainer.ways import ADAMW, BACKWARD, BUCKET_BYTES, PASSES, USED

DECODED = 3  # how often a rank decodes what it has coded once: others' parts, its own for what is left over, the sums
WITHIN = 0.10  # of the measured speed


@dataclass(frozen=True)
class Host:
    """A machine with one rank."""

    name: str
    speed: float  # tokens a second of forward and backward, alone
    link: float  # bytes a second, in the slower direction
    memory: int = 0  # bytes, where it computes
    rest: float = 0.0  # seconds of a step that no share makes shorter: the optimizer
    coding: Mapping[str, float] = field(default_factory=dict)  # seconds a byte of gradients, by way
    sending: float = 0.0  # seconds a byte that it sends, of the processor that computes; a GPU's does not
    steps: tuple[
        float, ...
    ] = ()  # times its mean that each of some steps takes, beside the other hosts' of that time
    burst: int = 0  # bytes that its link lets through at once after a pause, as a shaped one does


@dataclass(frozen=True)
class Work:
    """What is trained, and how."""

    gradients: int  # bytes, in float32
    factors: int  # bytes, as powersgd sends them
    sequence_length: int
    batch_size: int  # sequences of a step, of all ranks
    micro_batch_size: int = 1
    shares: str = "auto"  # auto, even, or listed
    comm: str = "exact"
    sync_every: int = 50
    fragments: int = 1  # of diloco, which meet one after the other
    overlap: int = 0  # steps that are computed while one of them travels
    checkpoint_every: int = 0  # steps; lossy ways send for each


@dataclass(frozen=True)
class Network:
    latency: float = 1e-4  # seconds of a hop
    backend: str = "gloo"  # or nccl, whose sums take a tree's way where that has fewer hops

    def sum_hops(self, ranks: int) -> int:
        """Of a sum over all ranks."""
        ring = 2 * (ranks - 1)
        return min(ring, 2 * math.ceil(math.log2(ranks))) if self.backend == "nccl" else ring


@dataclass(frozen=True)
class Step:
    """The mean step."""

    seconds: float
    tokens: int
    sent: int  # bytes that leave each host
    split: tuple[int, ...]  # sequences, by host
    waiting: tuple[float, ...]  # the share of the step in which a host computes nothing

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@functools.lru_cache
def split(
    seconds: tuple[float, ...], batch_size: int, shares: str, fixed: tuple[float, ...] = ()
) -> tuple[int, ...]:
    """Each host's sequences, as the trainer's balance ends up with them; `seconds`: of a sequence, in any unit; fixed:
    of what no share makes shorter, in the same one.
    """
    if listed := balance.given(shares):
        return tuple(listed)
    if shares == "even":
        return tuple(balance.shares(batch_size, len(seconds)))
    return tuple(balance.solve(batch_size, list(seconds), fixed=fixed))


def late(hosts: Sequence[Host], busy: Sequence[float]) -> float:
    """Seconds by which the last of hosts that are `busy` for so long, on average, is later than the busiest one's mean.

    What makes all of them slower at the same time, as on a machine below them all, makes none wait for another.
    """
    every = [[own * times for times in host.steps] for host, own in zip(hosts, busy, strict=True)]
    ends = list(map(max, zip(*every, strict=False)))
    return max(0.0, statistics.mean(ends) - max(busy)) if ends else 0.0


def step(hosts: Sequence[Host], work: Work, network: Network) -> Step:
    """What a step of `work` takes on `hosts`."""
    ranks = len(hosts)
    fastest = max(host.speed for host in hosts)
    each = [host.coding.get(work.comm, 0.0) * work.gradients for host in hosts]
    # Meetings are too rare for the balance to see what they cost. Rounded, so that ways alike are found again.
    fixed = [host.rest + (own if work.comm != "diloco" else 0) for host, own in zip(hosts, each, strict=True)]
    shares = split(
        tuple(round(fastest / host.speed, 9) for host in hosts),
        work.batch_size,
        work.shares,
        tuple(round(own * fastest / work.sequence_length, 9) for own in fixed),
    )
    compute = [share * work.sequence_length / host.speed for share, host in zip(shares, hosts, strict=True)]
    busy = [host.rest + own for host, own in zip(hosts, compute, strict=True)]
    sent = ways.sent(work.gradients, work.factors, ranks, work.sync_every)[work.comm]
    if ranks == 1:
        seconds = busy[0]
    else:
        buckets = max(1, math.ceil(work.gradients / BUCKET_BYTES))
        coding = max(each)
        done = max(own + more for own, more in zip(busy, each, strict=True))
        link = min(host.link for host in hosts)
        at_once = sent * (work.sync_every if work.comm == "diloco" else 1)
        # What the pauses before have left room for; powersgd's two sums have a third of its coding between them.
        pauses = [max(busy), coding / 3] if work.comm == "powersgd" else [max(busy)]
        burst = sum(min(*(host.burst for host in hosts), link * pause) for pause in pauses if pause)
        wire = sent * max(0.0, 1 - burst / max(1, at_once)) / link
        # What goes over the wire is handed to it, and taken from it, by a processor.
        handing = max(host.sending for host in hosts) * sent
        wire = max(wire, handing)
        sums, small = network.sum_hops(ranks), network.sum_hops(ranks) * network.latency
        # Coded: everybody's part to each, over gloo in turns, and one ring of the sums.
        turns = 1 if network.backend == "nccl" else ranks - 1
        code = (turns + ranks - 1) * network.latency
        coded = buckets * code
        if work.comm == "exact":
            last = [  # of the last micro-batch's backward, whose buckets travel one by one
                BACKWARD * own / math.ceil(share / work.micro_batch_size)
                for own, share in zip(compute, shares, strict=True)
            ]
            end = 0.0
            for left in range(buckets - 1, -1, -1):
                ready = max(done - own * left / buckets for done, own in zip(busy, last, strict=True))
                end = max(end, ready) + wire / buckets + sums * network.latency
        elif work.comm == "powersgd":
            end = done + wire + 2 * code + sums * network.latency  # of each factor, and what is no matrix
        elif work.comm == "diloco":
            meeting = wire * work.sync_every + coded + small
            each_step = max(busy) + small
            waits = ways.waiting(meeting, each_step, work.fragments, work.overlap, work.sync_every)
            # What travels meanwhile is handed to the wire by who computes.
            end = max(busy) + waits + coding / work.sync_every + (handing if work.overlap else 0)
        else:
            end = done + wire + coded
        saves = ways.saved(work.gradients, ranks, work.checkpoint_every)[work.comm]
        sent += saves
        seconds = end + late(hosts, busy) + small  # the loop's own exchange of losses and times
        seconds += saves / link
    return Step(
        seconds=seconds,
        tokens=work.batch_size * work.sequence_length,
        sent=sent if ranks > 1 else 0,
        split=shares,
        waiting=tuple(1 - own / seconds for own in busy),
    )


# ---- home-lan ----


@dataclass(frozen=True)
class Card:
    """A large product of 16-bit matrices as PyTorch does it, measured, in TFLOP/s; GB and GB/s by its maker."""

    tflops: float
    memory: int
    bandwidth: float


# Products: the database of github.com/zzc0721/torch-performance-test-data, which owners of cards fill.
CARDS = {
    "5070 Ti": Card(92.2, 16, 896),  # two have been entered, with 85.3 and 99.1
    "4070 laptop": Card(46.3, 8, 256),  # float16's; its 64.4 in bfloat16 is like no other card's of its kind
    "3070 Ti": Card(45.8, 8, 608),
}
# What training reaches of that, by the convention of trainer/model/flops.py: a published log of nanochat's on such a
# laptop has 12,240 tokens/s of 1.359 GFLOP each (16 layers of 1,024, 512 tokens, bfloat16), 16.6 TFLOP/s.
MFU = 0.36
A_HOST = 8  # sequences of a step
SIZES = (3, 8, 64, 1000)
COMMON = {
    **{"dtype": "bfloat16", "device": "cpu", "micro_batch_size": 1, "batch_size": 24},
    **{"gradient_checkpointing": True, "checkpoint_async": False},
}
LORA = {
    **{"adapter": "lora", "lora_rank": 16, "lora_targets": "q_proj,v_proj", "quantize": "4bit"},
    **{"optimizer": "paged_adamw_8bit", "sequence_length": 2048},
}
WORKLOADS = {
    "TinyLlama (1.1 B), LoRA of rank 16": ("tinyllama", LORA),
    "Llama 2 (7 B), LoRA of rank 16": ("llama2", LORA),
    "GPT-2 (124 M), all weights": ("gpt2", {"sequence_length": 1024}),
}


def architecture(name: str):
    """transformers' configuration of a model that WORKLOADS names."""
    from transformers import GPT2Config, LlamaConfig

    if name == "gpt2":
        return GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if name == "llama2":
        return LlamaConfig(vocab_size=32000)
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )


@dataclass(frozen=True)
class Assumed:
    """What the command line may say otherwise."""

    link: float  # bits a second
    latency: float
    mfu: float
    speeds: Mapping[str, float]  # tokens a second of a card, where it was measured


@functools.lru_cache
def footprint_of(title: str):
    """(configuration, trainer.model.footprint.Footprint) of a workload."""
    from trainer.model import footprint

    name, settings = WORKLOADS[title]
    config = configuration.from_mapping({**COMMON, **settings})
    return config, footprint.measure(config, architecture(name))


def home_lan(count: int, found, assumed: Assumed) -> list[Host]:
    """The three cards, again and again, until there are `count` hosts."""
    hosts = []
    for number in range(count):
        name = list(CARDS)[number % len(CARDS)]
        card = CARDS[name]
        hosts.append(
            Host(
                name=name,
                speed=assumed.speeds.get(name) or assumed.mfu * card.tflops * 1e12 / found.flops,
                link=assumed.link / 8 * USED,
                memory=card.memory * 10**9,
                rest=ADAMW * 4 * found.trainable / (card.bandwidth * 1e9),
                coding={way: passes / (card.bandwidth * 1e9) for way, passes in PASSES.items()},
            )
        )
    return hosts


def needs(config: configuration.Config, found, comm: str, overlap: bool = False) -> int:
    """Bytes of a GPU that a rank needs, as `trainer plan` counts them. overlap: whether Work has any."""
    import torch

    from trainer.plan import memory
    from trainer.plan.resources import Place

    place = Place(3, 3, 1, torch.device("cuda"), 0, 0, 1e9)
    config = dataclasses.replace(config, comm=comm, diloco_overlap=int(overlap))
    budget = memory.budget("ddp", config, found, place, 0)
    return sum(budget.device.values())


def tables(assumed: Assumed) -> str:
    """The scenario by every way, and the same cards up to 1,000 hosts; Markdown."""
    network = Network(assumed.latency, "nccl")
    parts = []
    for title in WORKLOADS:
        config, found = footprint_of(title)
        parts.append(_workload(title, config, found, assumed, network))
    return "\n\n".join(parts)


def _workload(title, config, found, assumed: Assumed, network: Network) -> str:
    base = Work(
        found.gradients,
        found.factors,
        config.sequence_length,
        0,
        config.micro_batch_size,
        checkpoint_every=config.checkpoint_every,
    )
    variants = {
        "exact, even shares": {"shares": "even"},
        **{way: {"comm": way} for way in WAYS},
        "diloco, hidden*": {"comm": "diloco", "overlap": base.sync_every - 1},
    }
    found_steps, sums = {}, {}
    for count in SIZES:
        hosts = home_lan(count, found, assumed)
        sums[count] = sum(host.speed for host in hosts)
        for name, keys in variants.items():
            work = dataclasses.replace(base, batch_size=A_HOST * count, **keys)
            found_steps[name, count] = step(hosts, work, network)
    hosts = home_lan(3, found, assumed)
    best = max(hosts, key=lambda host: host.speed)
    alone = step([best], dataclasses.replace(base, batch_size=A_HOST), network).speed
    rows = []
    for name, keys in variants.items():
        three = found_steps[name, 3]
        memory = needs(config, found, keys.get("comm", "exact"), bool(keys.get("overlap")))
        fits = min(host.memory for host in hosts)
        rows.append(
            (
                name,
                f"{memory / 1e9:.1f}{'' if memory <= fits else ', too much'}",
                ":".join(map(str, three.split)),
                f"{three.sent / 1e6:,.1f}",
                f"{three.seconds:.2f}",
                f"{three.speed:,.0f}",
                f"{three.speed / alone:.2f}",
                " ".join(f"{100 * own:.0f}" for own in three.waiting),
                *(f"{found_steps[name, count].speed / sums[count]:.2f}" for count in SIZES),
            )
        )
    head = ("comm", "GB of a card", "shares", "MB sent a step", "s a step", "tokens/s", f"of a {best.name}",
            "% waiting", *(f"of the sum, {count:,} hosts" for count in SIZES))  # fmt: skip
    speeds = ", ".join(f"{host.name} {host.speed:,.0f}" for host in hosts)
    return (
        f"**{title}**, {A_HOST} x {config.sequence_length:,} tokens a host and step; tokens/s alone: "
        f"{speeds}.\n\n{markdown(head, rows)}"
    )


# ---- against what was measured ----


def of_run(
    run: dict, gradients: int, factors: int, coding: Mapping[str, float], sending: float, network: Network
) -> Step:
    """The simulated step of a run that bench.cluster has recorded."""
    hosts = [
        Host(
            name=host["name"],
            speed=host["speed"],
            link=host["rate"] / 8 * USED if host["rate"] else math.inf,
            rest=host["rest"],
            sending=sending / host["cpus"],
            steps=tuple(host.get("steps", ())),
            burst=host.get("burst", 0),
            coding={way: seconds / host["cpus"] for way, seconds in coding.items()},
        )
        for host in run["hosts"]
    ]
    names = ("sequence_length", "batch_size", "micro_batch_size", "shares", "comm", "sync_every")
    overlap = {name: run[name] for name in ("fragments", "overlap") if name in run}
    return step(hosts, Work(gradients, factors, **{name: run[name] for name in names}, **overlap), network)


def check(
    runs: list[dict], coding: Mapping[str, float] | None = None, sending: float | None = None
) -> tuple[str, bool]:
    """A table of measured and simulated tokens/s, and whether all differ by WITHIN at most.

    coding: seconds a byte of gradients on one core, by way, measured here where not given. sending: seconds of one for
    a byte that is sent, where a run does not say what its ranks took.
    """
    gradients = _inverse([run for run in runs if run["comm"] == "exact"])
    if not gradients:
        sys.exit("no run by exact is among the results: give those of `python -m bench.cluster wire`")
    unlimited = [
        run["sending"] for run in runs if run.get("sending") is not None and not run["hosts"][0]["rate"]
    ]
    if sending is None and not unlimited:
        sys.exit(
            "no run without a limit says what sending took of its processors (`sending`): measure again, "
            "`python -m bench.cluster wire`"
        )
    factors = _inverse([run for run in runs if run["comm"] == "powersgd"]) or gradients
    coding = coding if coding is not None else {way: coding_seconds(way, gradients) for way in WAYS}
    sending = sending if sending is not None else unlimited[-1]
    rows, good = [], True
    for run in runs:
        own = run.get("sending")
        found = of_run(run, gradients, factors, coding, sending if own is None else own, Network())
        off = found.speed / run["tokens_a_second"] - 1
        good &= abs(off) <= WITHIN
        real, simulated = f"{run['tokens_a_second']:,.0f}", f"{found.speed:,.0f}"
        rows.append(
            (run["name"], real, simulated, f"{100 * off:+.1f}", "yes" if abs(off) <= WITHIN else "no")
        )
    head = ("run", "tokens/s measured", "simulated", "off by, %", f"within {WITHIN:.0%}")
    return markdown(head, rows), good


def _inverse(runs: list[dict]) -> int:
    """What `ways.sent` must have been given for what these runs' ranks have sent a step; 0 without runs."""
    found = [run["wire_bytes"] * len(run["hosts"]) / (2 * (len(run["hosts"]) - 1)) for run in runs]
    return round(statistics.median(found)) if found else 0


def coding_seconds(way: str, gradients: int) -> float:
    """Seconds a byte of gradients that coding and decoding take one core of this machine."""
    if way == "exact":
        return 0.0
    if way == "diloco":
        return coding_seconds("8bit", gradients) * PASSES["diloco"] / PASSES["8bit"]
    import torch
    import torch.distributed as dist

    from trainer import compress

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _timed(compress, _Alone(torch.device("cpu")), way, gradients)
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()


def _timed(compress, alone, way: str, gradients: int) -> float:
    import torch

    if way == "powersgd":  # whose factors' own code is little beside them
        one = [torch.randn(256, 256) for _ in range(max(1, gradients // (4 * 256 * 256)))]
        factors, count = compress.Factors(one, 0, alone), 256 * 256 * len(one)

        def once() -> None:
            factors(one)
    else:
        code = compress.CODES[way]()
        count = gradients // 4 // code.block * code.block
        values = torch.randn(count)

        def once() -> None:  # as CodedSum does it, which codes nothing for a host alone
            data = code.encode(values)
            for _ in range(DECODED):
                code.decode(data, torch.empty_like(values))

    times = []
    for _ in range(5):
        begin = time.perf_counter()
        once()
        times.append(time.perf_counter() - begin)
    return min(times) / (4 * count)


@dataclass
class _Alone:
    """As much of a World as trainer/compress.py asks for: one rank."""

    device: object
    size = 1
    rank = 0
    training = None
    alike = True


def speed(text: str) -> tuple[str, float]:
    """--speed CARD=TOKENS."""
    name, _, number = text.partition("=")
    if name not in CARDS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(
            f"{text}: expected CARD=TOKENS a second, with a card of {', '.join(CARDS)}"
        )
    return name, float(number)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    found = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.split(": ", 1)[1])
    found.add_argument("--link", default="1gbit", help="of every host, each way")
    found.add_argument("--latency", type=float, default=1e-4, help="of a hop, in seconds")
    found.add_argument(
        "--mfu", type=float, default=MFU, help="share of a large product's speed that training reaches"
    )
    found.add_argument(
        "--speed",
        metavar="CARD=TOKENS",
        type=speed,
        action="append",
        default=[],
        help=f"tokens/s of a card alone, measured: {', '.join(CARDS)}",
    )
    found.add_argument(
        "--check", type=Path, metavar="FILE", help="compare with what bench.cluster has measured"
    )
    return found


def main() -> None:
    options = parser().parse_args()
    if options.check:
        text, good = check(json.loads(options.check.read_text()))
        print(text)
        sys.exit(0 if good else 1)
    print(tables(Assumed(link.bits(options.link), options.latency, options.mfu, dict(options.speed))))


if __name__ == "__main__":
    main()
