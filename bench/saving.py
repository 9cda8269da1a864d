"""Checkpoints written while training goes on, and between two steps: for how long does a step wait for one?"""

import itertools
import statistics
import time
from pathlib import Path

import numpy as np

from bench.measure import Case, Options, launch, markdown, metrics, prepared, tell

CASE = Case("text", 32_000, 1, 64, steps=36, untimed=3, width=768, layers=12, threads=1)
QUICK = Case("text", 2048, 1, 64, steps=12, untimed=1, threads=1)
WAYS = {"while training goes on": "true", "before the next step": "false"}
COUNT = 3  # checkpoints that a step follows; the run's end has one more
HEAD = ("written", "MiB", "s until it is on disk", "s until the next step began", "s of a plain copy",
        "s a step", "s a step meanwhile")  # fmt: skip


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    with prepared(case) as folder:
        rows = [_row(folder, case, way) for way in WAYS]
    return f"""\
### Saving

{case.layers} layers, {case.width} wide, vocabulary {case.vocabulary:,}; one rank and {case.threads} thread of it; \
{case.batch_size} x {case.sequence_length} tokens a step; float32; medians of {COUNT} checkpoints, with \
`checkpoint_async` true and false.

{markdown(HEAD, rows)}

`until the next step began`: from the end of the step before, by the steps' own clocks. The plain copy is one of as \
many bytes, into new memory, right after the run."""


def _row(folder: Path, case: Case, way: str) -> list[str]:
    name = f"saving-{WAYS[way]}"
    every = case.steps // (COUNT + 1)
    steps = launch(folder, name, 1, f"checkpoint_every={every}", f"checkpoint_async={WAYS[way]}")
    told = metrics(folder / f"run-{name}")
    seconds = {one["step"]: one["seconds"] for one in told if one.get("event") == "checkpoint"}
    begun = {one["time"]: one["time"] + seconds[one["step"]] for one in steps if one["step"] in seconds}
    waited = [
        step["time"] - step["step_seconds"] - before["time"]
        for before, step in itertools.pairwise(steps)
        if before["time"] in begun
    ]
    meanwhile = [
        one["step_seconds"]
        for one in steps
        if any(begin < one["time"] <= end for begin, end in begun.items())
    ]
    apart = [
        one["step_seconds"]
        for one in steps[case.untimed :]
        if not any(
            begin < one["time"] and one["time"] - one["step_seconds"] < end for begin, end in begun.items()
        )
    ]
    size = sum(
        file.stat().st_size for file in (folder / f"run-{name}/checkpoints/step-{case.steps:08d}").iterdir()
    )
    tell(f"{way}: {statistics.median(waited):.2f} s")
    return [
        way,
        f"{size >> 20:,}",
        f"{statistics.median(list(seconds.values())[:COUNT]):.2f}",
        f"{statistics.median(waited):.2f}",
        f"{_plain(size):.2f}",
        f"{statistics.median(apart):.2f}",
        f"{statistics.median(meanwhile):.2f}" if meanwhile else "none",
    ]


def _plain(size: int) -> float:
    """Seconds of a copy of so many bytes."""
    source = np.ones(size, np.uint8)
    found = []
    for _ in range(COUNT):
        begin = time.perf_counter()
        source.copy()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)
