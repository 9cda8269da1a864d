"""Shows a run on a terminal: its loss curve, its speed, a sample of its text, and where its files lie.

    scripts/show_run.py [runs/NAME] [--below-unigram NATS]

Reads what train.yml brought to runs/NAME (by default the newest there), and sample.txt where there is one.
With --below-unigram it fails unless the loss ended at least so many nats below the unigram
entropy of the data: the loss of a model that has learned how often each token occurs, and nothing of their order.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import sys
import textwrap
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / place) for place in ("plugins/module_utils", "")]

from live_frame import clean

LAST = 10  # steps that the final loss is a mean of: single steps differ by their batch

# What a run's directory may hold, and what it is for.
FILES = {
    "report.html": "curves, times and settings on one page, for a browser",
    "sample.txt": "text that the model wrote",
    "model": "the trained model and its tokenizer, in transformers' format",
    "metrics.jsonl": "one line a step",
    "summary.json": "losses, times, speed, memory, settings",
    "config.yaml": "the settings, for the same run again",
    "logs": "what each rank said",
}

# A braille character is 2 dots wide and 4 high; these are their bits, by row, then column.
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def speaks_unicode(environ, stream):
    """Whether `stream` can show box-drawing and braille characters: UTF-8, and not asked for the C locale."""
    asked = next((environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environ.get(name)), "")
    return "utf" in (stream.encoding or "").lower() and "utf" in asked.lower().replace("-", "")


def wants_color(environ, stream):
    """Whether to colour: only a terminal, and never against https://no-color.org's variable."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def read_losses(path):
    """The (step, loss) pairs of a metrics.jsonl, by step; of a step that a resumed run repeated, the later one.

    Raises ValueError that names the line which is no row of metrics.
    """
    losses = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            if row.get("kind", "train") == "train":
                losses[int(row["step"])] = float(row["loss"])
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is no row of metrics ({error}): {line[:80]}") from None
    return sorted(losses.items())


def final_loss(losses):
    """Mean of the last LAST losses, in nats a token; short runs have fewer."""
    tail = [loss for _, loss in losses[-LAST:]]
    return sum(tail) / len(tail)


def columns_of(losses, count):
    """The curve as `count` values: the mean loss of the steps that fall on a column, straight lines over gaps."""
    first, last = losses[0][0], losses[-1][0]
    sums, hits = [0.0] * count, [0] * count
    for step, loss in losses:
        column = (step - first) * (count - 1) // max(last - first, 1)
        if math.isfinite(loss):
            sums[column] += loss
            hits[column] += 1
    known = [(column, sums[column] / hits[column]) for column in range(count) if hits[column]]
    values = []
    for (left, low), (right, high) in itertools.pairwise(known):
        values += [low + (high - low) * step / (right - left) for step in range(right - left)]
    return values + [value for _, value in known[-1:]]


def plot(losses, level=None, *, width=72, height=12, unicode=True):
    """The loss curve as `height` + 2 lines, `width` columns wide without the axis: (axis, curve) pairs of text.

    level: a loss to draw a horizontal line at (the unigram entropy).
    """
    across, down = (2, 4) if unicode else (1, 1)
    values = columns_of(losses, width * across)
    low = min(values)
    high = max([*values, level] if level is not None else values)
    low, high = math.floor(low * 2) / 2, math.ceil(high * 2) / 2
    if low == high:
        high += 0.5
    rows = height * down

    def row_of(loss):
        return min(rows - 1, max(0, round((high - loss) / (high - low) * (rows - 1))))

    dots = [[False] * (width * across) for _ in range(rows)]
    before = row_of(values[0]) if values else 0
    for column, value in enumerate(values):
        row = row_of(value)
        # Joined to the column before, so that a steep fall is a line and not a few far dots.
        start, stop = (row, row) if row == before else (min(row, before + 1), max(row, before - 1))
        for y in range(min(start, stop), max(start, stop) + 1):
            dots[y][column] = True
        before = row

    level_row = None if level is None else row_of(level) // down
    labels = {0: high, height - 1: low, height // 2: high - (high - low) * (height // 2) / (height - 1)}
    lines = []
    for row in range(height):
        cells = []
        for column in range(width):
            bits = sum(
                BRAILLE[y][x] if unicode else 1
                for y in range(down)
                for x in range(across)
                if dots[row * down + y][column * across + x]
            )
            empty = ("┈" if unicode else "-") if row == level_row else " "
            cells.append((chr(0x2800 + bits) if unicode else "*") if bits else empty)
        label = f"{labels[row]:6.2f}" if row in labels else " " * 6
        tick, bar = "┤│" if unicode else "||"
        lines.append((f"{label} {tick if row in labels else bar}", "".join(cells).rstrip()))
    first, last = str(losses[0][0]), str(losses[-1][0])
    lines.append((" " * 7 + ("└" if unicode else "+"), ("─" if unicode else "-") * width))
    lines.append((" " * 8, first + "step".center(width - len(first) - len(last)) + last))
    return lines


def duration(seconds):
    """Seconds as a person says them: '48 s', '2 min 5 s'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def picture(run, summary, losses, sample, *, width, unicode, color):
    """The whole picture of a run as text. run: its directory; summary: its summary.json; sample: text or ''."""
    level = summary.get("unigram_entropy")
    paint = (
        {"curve": "\033[36m", "head": "\033[1m", "end": "\033[0m"}
        if color
        else dict.fromkeys(("curve", "head", "end"), "")
    )
    arrow = "→" if unicode else "->"
    ranks = clean(summary["world"]["size"])
    lines = [f"{paint['head']}{run.name}{paint['end']}: loss by step, in nats a token", ""]
    plotted = plot(losses, level, width=min(width - 8, 92), unicode=unicode)
    lines += [f"{axis}{paint['curve']}{curve}{paint['end']}" for axis, curve in plotted]
    lines += [
        "",
        f"Loss        {losses[0][1]:.2f} {arrow} {final_loss(losses):.2f} "
        f"(mean of the last {min(LAST, len(losses))} steps)",
    ]
    if level is not None:
        mark = "the dotted line" if unicode else "the line of dashes"
        lines.append(
            f"Unigram     {level:.2f} ({mark}): what knowing the tokens' frequencies alone would reach"
        )
    lines.append(
        f"Speed       {summary['tokens_per_second']:,.0f} tokens/s over {ranks} {'ranks' if ranks != '1' else 'rank'}; "
        f"{summary['steps']:,} steps, {summary['tokens']:,} tokens in {duration(summary['train_seconds'])}"
    )
    if sample:
        parts = clean(sample).splitlines()  # a model may write what a terminal would obey
        wrapped = [textwrap.wrap(part, min(width - 12, 88)) for part in parts if part.strip()]
        indented = [line for part in wrapped for line in part]
        lines += ["", f"Sample      {indented[0]}", *(" " * 12 + line for line in indented[1:])]
    lines += ["", f"Files       {os.path.relpath(run)}/"]
    lines += [f"              {name:<16}{FILES[name]}" for name in FILES if (run / name).exists()]
    text = "\n".join(lines)
    return text if unicode else text.encode("ascii", "replace").decode()


def newest_run(runs):
    """The directory in `runs` whose metrics are the newest; raises FileNotFoundError where there is none."""
    found = sorted(runs.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{runs}/: there is no run yet; make demo, or ansible-playbook train.yml")
    return found[-1].parent


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="the run's directory; default: the newest in runs/")
    parser.add_argument(
        "--below-unigram", type=float, metavar="NATS", help="fail unless the loss ends so far below it"
    )
    options = parser.parse_args(arguments)
    try:
        run = options.run or newest_run(Path("runs"))
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        losses = read_losses(run / "metrics.jsonl")
        sample = (run / "sample.txt").read_text(encoding="utf-8") if (run / "sample.txt").exists() else ""
    except (OSError, ValueError, RecursionError) as error:
        print(f"cannot show the run: {clean(error)}", file=sys.stderr)
        return 2
    if not losses:
        print(f"cannot show the run: {run}/metrics.jsonl holds no step yet", file=sys.stderr)
        return 2
    size = shutil.get_terminal_size((100, 30))
    print(
        picture(
            run,
            summary,
            losses,
            sample.strip(),
            width=max(size.columns, 40),
            unicode=speaks_unicode(os.environ, sys.stdout),
            color=wants_color(os.environ, sys.stdout),
        )
    )
    if options.below_unigram is None:
        return 0
    margin = summary["unigram_entropy"] - final_loss(losses)
    if margin >= options.below_unigram:
        return 0
    print(
        f"The loss ended {margin:.2f} nats below the unigram entropy; "
        f"at least {options.below_unigram:.2f} were expected: the model learned too little.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
