"""Writes a run's report, or a page that compares several: scripts/write_report.py runs/NAME [runs/OTHER …]

Of one run it is runs/NAME/report.html; of several, runs/NAME-OTHER.html beside them, and their figures are printed.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "plugins" / "module_utils"))

import run_page
from telling import table

FIGURES = (
    ("loss at the end", "last_loss", "{:.4f}"),
    ("best held-out loss", "best_eval", "{:.4f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("steps", "steps", "{:,}"),
    ("tokens", "tokens", "{:,}"),
    ("seconds in steps", "train_seconds", "{:,.1f}"),
    ("bytes of memory, the most of a rank", "memory_peak_bytes", "{:,}"),
    ("bytes on the wire a step", "wire_bytes", "{:,.0f}"),
    ("restarts", "restarts", "{}"),
)


def compared(directories):
    """The figures of runs as a table of text."""
    runs = [run_page.found(directory) for directory in directories]
    rows = [("", *(run["name"] for run in runs))]
    for label, name, form in FIGURES:
        values = [run["figures"][name] for run in runs]
        if any(value is not None for value in values):
            rows.append((label, *("-" if value is None else form.format(value) for value in values)))
    return table(rows)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories that train.yml brought")
    directories = list(dict.fromkeys(parser.parse_args(arguments).runs))
    try:
        if len(directories) == 1:
            path = run_page.write(directories[0])
        else:
            path = directories[0].parent / ("-".join(one.name for one in directories) + ".html")
            path.write_text(run_page.page(directories), encoding="utf-8")
            print(compared(directories), end="\n\n")
    except (OSError, ValueError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 2
    print(f"Report      {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
