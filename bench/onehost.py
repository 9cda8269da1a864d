"""Ranks of one host, with shares and ways that are found by themselves, and without: what does that cost there?"""

import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from bench.measure import Case, Options, launch, markdown, metrics, prepared, speed, tell, together

CORES = sorted(os.sched_getaffinity(0))
CASE = Case("text", 2048, 8, 128, steps=60, untimed=3, threads=1)
QUICK = Case("text", 2048, 4, 64, steps=60, untimed=3, threads=1)
RANKS = (1, 2)
ROUNDS = 6
WITHOUT, FOUND = "without", "with"
WAYS = {WITHOUT: ("balance=even", "comm=exact"), FOUND: ("balance=auto", "comm=auto")}
HEAD = ("ranks", "without, tokens/s", "with, tokens/s", "with/without", "by round", "steps with other shares",
        "s more until the first step is done")  # fmt: skip


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    with prepared(case) as folder:
        launch(folder, "warm", 1, "steps=1")  # has the data tokenised, which would be the first round's alone
        rows = [_row(folder, ranks, options.rounds(ROUNDS)) for ranks in RANKS]
    return f"""\
### One host

{case.layers} layers, {case.width} wide, vocabulary {case.vocabulary:,}; ranks over gloo on this machine, \
a thread each; {case.batch_size} sequences of {case.sequence_length} tokens a step, a sequence a \
micro-batch; float32; {options.rounds(ROUNDS)} rounds. In a round both run at the same time and on one core, another \
one each round, so that whatever makes a core slow makes both slow, and the steps of that time count. Losses of both \
are equal to 1e-4.

{markdown(HEAD, rows)}

`with`: balance: auto, comm: auto. `with/without`: the median of the rounds' own quotients. Target: 0.99. With even \
shares both do the same in a step. What ranks try before the first one is in the last column alone."""


def _row(folder: Path, ranks: int, rounds: int) -> tuple[str, ...]:
    """A row of the table. Raises RuntimeError where the two do not have the same losses."""
    speeds = {way: [] for way in WAYS}
    begun, moved = [], []
    for number in range(rounds):
        ways = list(WAYS)[:: -1 if number % 2 else 1]
        with ThreadPoolExecutor(len(ways)) as pool:
            runs = pool.map(
                _run, repeat(folder), ways, repeat(ranks), repeat(number), repeat(CORES[number % len(CORES)])
            )
            found = dict(zip(ways, runs, strict=True))
        steps = {way: run[0] for way, run in found.items()}
        one, other = (found[way][0][-1]["loss"] for way in WAYS)
        if abs(one / other - 1) > 1e-4:  # other shares, another order of sums
            raise RuntimeError(f"{ranks} ranks: the two did not compute the same: losses {one} and {other}")
        if not all(both := together(steps).values()):
            raise RuntimeError(
                f"{ranks} ranks: one ended before the other had begun; the table needs longer runs"
            )
        for way, rows in zip(steps, both, strict=True):
            speeds[way].append(speed(rows))
        moved.append(statistics.mean(len(set(row["shares"])) > 1 for row in steps[FOUND]))
        begun.append(found[FOUND][1] - found[WITHOUT][1])
        tell(
            f"{ranks} ranks, round {number + 1}: "
            + ", ".join(f"{way} {speeds[way][-1]:,.0f}" for way in WAYS)
        )
    quotients = [one / other for one, other in zip(speeds[FOUND], speeds[WITHOUT], strict=True)]
    return (
        f"{ranks}",
        f"{statistics.median(speeds[WITHOUT]):,.0f}",
        f"{statistics.median(speeds[FOUND]):,.0f}",
        f"{statistics.median(quotients):.3f}",
        f"{min(quotients):.3f} to {max(quotients):.3f}",
        f"{statistics.mean(moved):.0%}",
        f"{statistics.median(begun):+.1f}",
    )


def _run(folder: Path, way: str, ranks: int, number: int, core: int) -> tuple[list[dict], float]:
    """(the steps, the seconds until the first of them is done)."""
    name = f"{way}-{ranks}-{number}"
    words = (*WAYS[way], "micro_batch_size=1", "checkpoint_async=false")
    steps = launch(folder, name, ranks, *words, core=core)
    (start,) = (one for one in metrics(folder / f"run-{name}") if one.get("event") == "start")
    return steps, steps[0]["time"] - start["time"]
