"""Runs contenders, each in a process of its own, and sums up. No torch here: a child would inherit its memory."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Who trains on the same packed sequences, by what tables call them: names of bench/contenders.py.
ALIKE = {
    "bare loop": "bare",
    "Trainyard": "ours",
    "HF Trainer": "hf",
    "TRL SFTTrainer, defaults": "sft",
    "TRL SFTTrainer, activations kept": "sft-kept",
}
# The ways of gradients that are compared (trainer/ways.py): keys of a run's configuration.
WAYS = {
    "exact": {"comm": "exact"},
    "16bit": {"comm": "16bit"},
    "8bit": {"comm": "8bit"},
    "powersgd": {"comm": "powersgd"},
    "diloco": {"comm": "diloco"},
}


# The step in which losses are compared. Later ones tell nothing: of steps of 256 tokens a weight that is other by 1e-7
# makes 1e-7 of a loss by then, and 3e-3 by step 123.
COMPARED = 20


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
    device: str = "cpu"
    dtype: str = "float32"  # in which products are computed; weights and moments are float32

    @property
    def compared(self) -> int:
        """The step in which losses are compared."""
        return min(COMPARED, self.steps)


@dataclass(frozen=True)
class Options:
    """What the command line says of a measurement."""

    quick: bool
    count: int | None  # rounds
    threads: int | None

    def fitted(self, case: Case, quick: Case) -> Case:
        case = quick if self.quick else case
        return replace(case, threads=self.threads) if self.threads else case

    def rounds(self, usual: int) -> int:
        return 1 if self.quick else self.count or usual


@dataclass(frozen=True)
class Measured:
    """One run of a contender."""

    speed: float  # tokens with a loss, a second, over the timed steps
    cpu_speed: float  # the same a second of a CPU: what is left of it where others compute here, too
    peak: int  # bytes of resident memory, all of the process's life; on a GPU, of the GPU's
    loss: float | None = None  # of the step in which contenders are compared, in nats a token


@contextlib.contextmanager
def prepared(case: Case) -> Iterator[Path]:
    """A directory with what the contenders need: case.json, model/, data, run.yaml (bench/material.py)."""
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        process([sys.executable, "-m", "bench.material", name], folder)
        yield folder


def contend(name: str, folder: Path, core: int | None = None) -> Measured:
    """One run of a contender of bench/contenders.py; core: the one that it gets, None: all."""
    command = [sys.executable, "-m", "bench.contenders", name, str(folder)]
    output, peak = process([*_held(core), *command], folder)
    return Measured(**{"peak": peak, **json.loads(output.splitlines()[-1])})


def _held(core: int | None) -> list[str]:
    """What a command begins with that is to have one core."""
    return [] if core is None else ["taskset", "--cpu-list", str(core)]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def launch(folder: Path, name: str, ranks: int, *words: str, core: int | None = None) -> list[dict]:
    """The steps of a run of `prepared`'s configuration with the keys `words` on so many ranks of this machine.

    core: the one that all of them get; None: whichever.
    """
    run_dir = folder / f"run-{name}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "TRAINYARD_RUN_DIR": str(run_dir),
        "TRAINYARD_CACHE_DIR": str(folder / "cache"),
        "NNODES": "1",
        "NODE_RANK": "0",
        "NPROC_PER_NODE": str(ranks),
        "RANK_OFFSET": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CLUSTER_ADDRESS": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "trainer", "launch", str(folder / "run.yaml"), *words]
    process([*_held(core), *command], folder, settings)
    return [one for one in metrics(run_dir) if one["kind"] == "train"]


def speed(rows: list[dict]) -> float:
    """Tokens a second over these steps."""
    return sum(row["tokens"] for row in rows) / sum(row["step_seconds"] for row in rows)


def speed_of(steps: list[dict], case: Case) -> float:
    """The median of the timed steps' tokens a second."""
    return statistics.median(one["tokens"] / one["step_seconds"] for one in steps[case.untimed :])


def together(rows: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Of each host's steps those that lie in the time in which all hosts have computed, their first three apart."""
    if min(map(len, rows.values())) <= 3:
        return {host: [] for host in rows}
    begin = max(found[2]["time"] for found in rows.values())
    end = min(found[-1]["time"] for found in rows.values())
    return {
        host: [row for row in found if begin <= row["time"] - row["step_seconds"] and row["time"] <= end]
        for host, found in rows.items()
    }


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
    with tempfile.TemporaryFile("w+") as errors:
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


def rounds(case: Case, contenders: dict[str, str], count: int) -> dict[str, Measured]:
    """The medians of `count` rounds, by the contenders' titles; `contenders`: {title: name}."""
    with prepared(case) as folder:
        return turns(folder, contenders, count)


def turns(
    folder: Path, contenders: dict[str, str], count: int, may_fail: bool = False
) -> dict[str, Measured]:
    """The same on what is `prepared`. In a round each runs once, so that a slow minute hits them all.

    may_fail: one that fails, as for memory, is told of and left out.
    """
    found: dict[str, list[Measured]] = {title: [] for title in contenders}
    for number in range(count):
        for title in list(found):
            try:
                one = contend(contenders[title], folder)
            except RuntimeError as error:
                if not may_fail:
                    raise
                tell(f"{title}: {fault(error)}")
                del found[title]
                continue
            found[title].append(one)
            speeds = f"{one.speed:,.0f} tokens/s, {one.cpu_speed:,.0f} a CPU second"
            tell(f"round {number + 1}: {title}: {speeds}, {one.peak >> 20:,} MiB")

    def median(ones: list[Measured], name: str) -> float:
        return statistics.median(getattr(one, name) for one in ones)

    return {
        title: Measured(
            median(ones, "speed"), median(ones, "cpu_speed"), int(median(ones, "peak")), ones[-1].loss
        )
        for title, ones in found.items()
    }


def beside(case: Case, contenders: dict[str, str], count: int) -> dict[str, list[float]]:
    """Tokens a CPU second, by title and round, of contenders that run at the same time on one core, a thread each.

    Another core each round: whatever makes one slow makes all of them slow.
    """
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, list[float]] = {title: [] for title in contenders}
    with prepared(replace(case, threads=1)) as folder, ThreadPoolExecutor(len(contenders)) as pool:
        for number in range(count):
            core = cores[number % len(cores)]
            runs = {title: pool.submit(contend, name, folder, core) for title, name in contenders.items()}
            for title, run in runs.items():
                found[title].append(run.result().cpu_speed)
            tell(f"beside, round {number + 1}: " + ", ".join(f"{k} {v[-1]:,.0f}" for k, v in found.items()))
    return found


def quotients(found: dict[str, list[float]], of: str, by: str) -> str:
    """The median of the rounds' quotients, and how far they lie apart."""
    each = [one / other for one, other in zip(found[of], found[by], strict=True)]
    return f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"


def fault(error: RuntimeError) -> str:
    """What a process that failed said last of an error."""
    said = [line for line in str(error).splitlines() if "error" in line.lower()]
    return said[-1] if said else str(error)


def tell(line: str) -> None:
    """How far the measurement is."""
    print(f"  {line}", file=sys.stderr, flush=True)


def against(found: dict[str, Measured], base: str) -> list[list[str]]:
    """Rows of a table, by HEAD: each figure, and how many times that of `base` it is."""
    return [
        [
            title,
            f"{one.speed:,.0f}",
            f"{one.speed / found[base].speed:.2f}",
            f"{one.cpu_speed:,.0f}",
            f"{one.cpu_speed / found[base].cpu_speed:.2f}",
            f"{one.peak >> 20:,}",
            f"{one.peak / found[base].peak:.2f}",
        ]
        for title, one in found.items()
    ]


def same_losses(found: dict[str, Measured], *names: str, within: float = 1e-4) -> str:
    """Say that contenders computed the same; raises RuntimeError where they did not, and nothing was compared."""
    losses = [found[name].loss for name in names]
    if max(losses) - min(losses) > within * max(losses):
        raise RuntimeError(f"{' and '.join(names)} did not compute the same: losses {losses}")
    return f"A loss of {losses[0]:.4f} in step {COMPARED} or the last, of {' and '.join(names)} alike."


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


HEAD = ("contender", "tokens/s", "of it", "tokens a CPU second", "of it", "peak MiB", "of it")
