"""Every strategy on two ranks of this machine, like for like: memory, speed and bytes on the wire."""

import os
from pathlib import Path

from bench.measure import Case, Options, launch, markdown, prepared, speed_of, tell
from trainer.ways import USED

NAMES = ("ddp", "zero1", "zero2", "fsdp", "offload", "infinity")
THREADS = max(1, len(os.sched_getaffinity(0)) // 2)
CASE = Case("text", 8192, 4, 128, steps=7, untimed=2, width=512, layers=8, threads=THREADS)
QUICK = Case("text", 2048, 4, 64, steps=3, untimed=1, threads=1)
GIGABIT = 1e9


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    with prepared(case) as folder:
        rows = [_row(name, case, folder) for name in NAMES]
    return f"""\
### Strategies

{case.layers} layers, {case.width} wide, vocabulary {case.vocabulary:,}; 2 ranks over gloo on this machine, \
{case.threads} threads each; {case.batch_size} sequences of {case.sequence_length} tokens a step, a sequence a \
micro-batch; float32.

{markdown(("strategy", "peak MiB a rank", "tokens/s", "MiB sent a rank and step", "s of that at 1 Gbit/s"), rows)}

The last column is what the same bytes take between two hosts with a GPU each and a plain network: on loopback they \
take next to nothing, and both ranks share this machine's cores."""


def _row(name: str, case: Case, folder: Path) -> list[str]:
    words = (f"strategy={name}", "micro_batch_size=1", "checkpoint_async=false")
    steps = launch(folder, name, 2, *words)
    speed, sent = speed_of(steps, case), steps[-1]["wire_bytes"]
    tell(f"{name}: {speed:,.0f} tokens/s")
    return [
        name,
        f"{steps[-1]['memory_peak_bytes'] >> 20:,}",
        f"{speed:,.0f}",
        f"{sent / 2**20:,.1f}",
        f"{sent * 8 / (USED * GIGABIT):.2f}",
    ]
