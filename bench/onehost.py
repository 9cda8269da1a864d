"""Two ranks of one host, with shares and ways that are found by themselves, and without: what does that cost there?"""

import os
import statistics

from bench.measure import Case, Options, launch, markdown, metrics, prepared, speed_of, tell

THREADS = max(1, len(os.sched_getaffinity(0)) // 2)
CASE = Case("text", 2048, 8, 128, steps=63, untimed=3, threads=THREADS)
QUICK = Case("text", 2048, 4, 64, steps=3, untimed=1, threads=1)
ROUNDS = 5
HEAD = ("", "tokens/s", "by round", "of it", "steps with other shares", "s until the first step is done")
WAYS = {
    "without": ("balance=even", "comm=exact"),
    "balance: auto, comm: auto": ("balance=auto", "comm=auto"),
}


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    speeds, begun, losses, moved = ({title: [] for title in WAYS} for _ in range(4))
    with prepared(case) as folder:
        for number in range(options.rounds(ROUNDS)):
            for place, (title, words) in enumerate(WAYS.items()):
                name = f"{place}-{number}"
                steps = launch(folder, name, 2, *words, "micro_batch_size=1", "checkpoint_async=false")
                (start,) = (one for one in metrics(folder / f"run-{name}") if one.get("event") == "start")
                speeds[title].append(speed_of(steps, case))
                begun[title].append(steps[0]["time"] - start["time"])
                losses[title].append(steps[-1]["loss"])
                moved[title].append(sum(len(set(one["shares"])) > 1 for one in steps) / len(steps))
                tell(f"round {number + 1}: {title}: {speeds[title][-1]:,.0f} tokens/s")
    far = max(abs(one / other - 1) for one, other in zip(*losses.values(), strict=True))
    if far > 1e-4:  # other shares, another order of sums
        raise RuntimeError(f"the two did not compute the same: losses {losses}")
    rows = [
        (
            title,
            f"{statistics.median(found):,.0f}",
            f"{min(found):,.0f} to {max(found):,.0f}",
            f"{statistics.median(one / other for one, other in zip(found, speeds['without'], strict=True)):.3f}",
            f"{statistics.mean(moved[title]):.0%}",
            f"{statistics.median(begun[title]):.1f}",
        )
        for title, found in speeds.items()
    ]
    return f"""\
### One host

{case.layers} layers, {case.width} wide, vocabulary {case.vocabulary:,}; 2 ranks over gloo on this machine, \
{case.threads} threads each; {case.batch_size} sequences of {case.sequence_length} tokens a step, a sequence a \
micro-batch; float32; medians of {options.rounds(ROUNDS)} rounds. Losses of both are equal to 1e-4.

{markdown(HEAD, rows)}

`of it`: the median of the rounds' own quotients. Target: 0.99, which says nothing where rounds differ by far more. \
With even shares both do the same in a step. What ranks try before the first one is in the last column alone."""
