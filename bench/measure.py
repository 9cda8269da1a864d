"""Runs contenders, each in a process of its own, and sums up. No torch here: a child would inherit its memory."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """What all contenders of a table train on."""

    data: str  # text: packed sequences of a running text; records: its paragraphs, each a record
    vocabulary: int  # of the model; the tokenizer has TOKENS
    batch_size: int  # sequences or records of a step
    sequence_length: int  # tokens
    steps: int
    untimed: int  # the first so many of them
    width: int = 256
    layers: int = 4
    threads: int = len(os.sched_getaffinity(0))
    lr: float = 1e-3


@dataclass(frozen=True)
class Measured:
    """One run of a contender."""

    speed: float  # tokens with a loss, a second, over the timed steps
    peak: int  # bytes of resident memory, all of the process's life
    loss: float | None = None  # of the last step, in nats a token


@contextlib.contextmanager
def prepared(case: Case) -> Iterator[Path]:
    """A directory with what the contenders need: case.json, model/, data, run.yaml (bench/material.py)."""
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        process([sys.executable, "-m", "bench.material", name], folder)
        yield folder


def ours(case: Case, folder: Path) -> Measured:
    """`trainer train`, as an operator runs it: metrics, checkpoint and model are written."""
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    settings = {"TRAINYARD_RUN_DIR": str(run_dir), "TRAINYARD_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "trainer", "train", str(folder / "run.yaml")]
    _, peak = process(command, folder, settings)
    steps = [one for one in metrics(run_dir) if one["kind"] == "train"]
    timed = steps[case.untimed :]
    seconds = timed[-1]["time"] - steps[case.untimed - 1]["time"]
    return Measured(sum(one["tokens"] for one in timed) / seconds, peak, steps[-1]["loss"])


def peer(name: str, folder: Path) -> Measured:
    """A contender of bench/peers.py."""
    output, peak = process([sys.executable, "-m", "bench.peers", name, str(folder)], folder)
    found = json.loads(output.splitlines()[-1])
    return Measured(found["speed"], peak, found["loss"])


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def process(command: Sequence[str], folder: Path, settings: dict[str, str] | None = None) -> tuple[str, int]:
    """(what `command` printed, its peak of resident memory in bytes); raises RuntimeError where it fails."""
    threads = json.loads((folder / "case.json").read_text())["threads"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **(settings or {}),
    }
    log = folder / "log"
    with log.open("w+") as errors:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors
        )
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)}: exit code {child.returncode}\n{output}{errors.read()}")
    return output, usage.ru_maxrss * 1024


def rounds(contenders: dict, count: int) -> dict[str, Measured]:
    """The medians of `count` rounds; in a round each contender runs once, so that a slow minute hits them all."""
    found: dict[str, list[Measured]] = {name: [] for name in contenders}
    for number in range(count):
        for name, contend in contenders.items():
            found[name].append(contend())
            one = found[name][-1]
            print(
                f"  round {number + 1}: {name}: {one.speed:,.0f} tokens/s, {one.peak >> 20:,} MiB",
                file=sys.stderr,
                flush=True,
            )
    return {
        name: Measured(
            statistics.median(one.speed for one in ones),
            int(statistics.median(one.peak for one in ones)),
            ones[-1].loss,
        )
        for name, ones in found.items()
    }


def against(found: dict[str, Measured], base: str) -> list[list[str]]:
    """Rows of a table: name, tokens/s, times that of `base`, MiB, times that of `base`."""
    return [
        [
            name,
            f"{one.speed:,.0f}",
            f"{one.speed / found[base].speed:.2f}",
            f"{one.peak >> 20:,}",
            f"{one.peak / found[base].peak:.2f}",
        ]
        for name, one in found.items()
    ]


def same_losses(found: dict[str, Measured], *names: str) -> str:
    """Say that contenders computed the same; raises RuntimeError where they did not, and nothing was compared."""
    losses = [found[name].loss for name in names]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise RuntimeError(f"{' and '.join(names)} did not compute the same: losses {losses}")
    return f"Last step's loss: {losses[0]:.4f} of {' and '.join(names)} alike."


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


HEAD = ("contender", "tokens/s", "of it", "peak MiB", "of it")
