"""`python -m bench [TABLE …]`: the tables of docs/benchmarks.md, measured here and now, in Markdown."""

import argparse
import os
import time

from bench import equal, gpu, onehost, padding, saving, strategies, vocabulary, watched
from bench.measure import Options

TABLES = {
    "equal": equal,
    "padding": padding,
    "vocabulary": vocabulary,
    "strategies": strategies,
    "onehost": onehost,
    "watched": watched,
    "saving": saving,
    "gpu": gpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split(": ", 1)[1])
    listing = ", ".join(TABLES)
    parser.add_argument("tables", metavar="TABLE", nargs="*", help=f"of {listing}; default: all")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, no more")
    parser.add_argument("--rounds", type=int, help="so many, where a table has several")
    parser.add_argument("--threads", type=int, help="of each process; default: one a core")
    options = parser.parse_args()
    unknown = set(options.tables) - set(TABLES)
    if unknown:
        parser.error(f"no table is named {', '.join(sorted(unknown))}; there are {listing}")
    begin = time.monotonic()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{time.strftime('%Y-%m-%d')}, {cores} cores, load average {load:.1f} before the first run\n")
    for name in options.tables or TABLES:
        print(
            TABLES[name].table(Options(options.quick, options.rounds, options.threads)),
            end="\n\n",
            flush=True,
        )
    print(f"took {(time.monotonic() - begin) / 60:.1f} min")


main()
