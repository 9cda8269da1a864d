"""What a run tells: metrics.jsonl, status.json, summary.json, once in every run directory. No torch here.

By the first rank of every host; where hosts share the directory, of the first of these (world.py, `find_sharers`).

metrics.jsonl, one object a line, by `kind`:
  train  step epoch loss router_loss lr grad_norm tokens tokens_total tokens_per_second mfu step_seconds
         compute_seconds comm_seconds rank_seconds rank_compression_seconds rank_optimizer_seconds
         rank_memory_peak_bytes wire_bytes world_size shares memory_allocated_bytes memory_reserved_bytes
         memory_peak_bytes time
         (compute, comm and memory are the writing rank's own, comm with its compression and its waiting for others;
         rank_…: by rank, rank_seconds being those of computing, compression and optimizer those of the step before, and
         the memory the most so far; of more than TOLD_RANKS these and shares stand in some steps alone, an attempt's
         first and the run's last among them (`by_rank`); on a CPU, reserved and mfu are null; mfu: model/flops.py;
         router_loss: model/router.py)
  epoch  epoch step loss time: the mean over the epoch's tokens
  eval   step loss best seconds time: the mean over the held-out data's tokens
  event  event step time, and what the event needs; each attempt begins with start, resume or restart, launch (the
         start of the run by train.yml that it is of), begun (its first, or the moment of it), its ranks' hosts,
         machines: what these are (machine.py), those that are alike as one, and watched: whether a rank's seconds of
         computing are its own, or hold its waiting for others (balance.py). checkpoint has hosts: those with a copy;
         wire_bytes: what it and an evaluation before it have the host send, which the next step's count, if there is
         one in the attempt. calibration has micro_batch_seconds: of each rank, by the size of the micro-batch
After a resume the lines beyond the checkpoint's step are cut: a step stands once. Lines that a full disk does not take
are kept in memory, and written when there is room.

status.json, whole and renamed into place: run state step steps loss tokens_per_second eta_seconds attempt
world_size last_checkpoint reason updated host compute_seconds slowest eval_loss best_eval note launch
shares speed_up parts losses advice metrics_port.
compute_seconds: of every rank in the last step; slowest: {rank, host, seconds}; best_eval: {step, loss}; note: why this
attempt was made; shares: of the last step; speed_up, where they are not even: {expected, got, speeds}, how many times
as fast as with even ones by the ranks' speeds, which are parts of the fastest one's, and by the last steps' own times,
or null where these do not tell it (Balance.saved); parts: where the last steps' seconds went (`parts` below), ranks,
their hosts, and watched, as above; losses: of the whole run, as TREND means at most; advice: what else would be faster
(ways.py); launch: the start of the run (TRAINYARD_LAUNCH) that has ended so, null before; metrics_port: the setting,
for Prometheus, or null.
stalled: the host waits for others, as reason says; ending: its ranks have ended, and its launcher has yet to say how.
What is not known yet is null.
"""

import contextlib
import io
import json
import operator
import os
import random
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer import disk
from trainer.environment import host

STATES = (
    *("queued", "starting", "running", "saving", "evaluating", "ending", "restarting", "stalled"),
    *("stopped", "failed", "finished"),
)
FINAL = ("stopped", "failed", "finished")
BEGINS = ("start", "resume", "restart")  # the events with which attempts begin
TOLD_RANKS = 64  # whose figures a step's line has at most, in the mean: every host keeps all lines, for ever
KEYS = (
    *("run", "state", "step", "steps", "loss", "tokens_per_second", "eta_seconds", "attempt", "world_size"),
    *("last_checkpoint", "reason", "updated", "host", "compute_seconds", "slowest", "eval_loss", "best_eval"),
    *("note", "warning", "launch", "shares", "speed_up", "parts", "losses", "advice", "metrics_port"),
)
POINTS = 1000  # losses in a summary, at most
TREND = 40  # losses in a status, at most


class Status:
    """A run's status.json."""

    EVERY = 0.5  # seconds between writings, unless the state changes

    def __init__(self, run_dir: Path, **facts):
        self.path = run_dir / "status.json"
        self.facts = {
            **dict.fromkeys(KEYS),
            **facts,
        }
        self._written = 0.0

    def update(self, at_once: bool = False, **facts) -> bool:
        """Take in new facts, and write if it is time to, or `at_once`. A function is called when it is written.

        Returns False where it was time to, and the disk is too full.
        """
        changed = "state" in facts and facts["state"] != self.facts["state"]
        self.facts.update(facts)
        if changed or at_once or time.monotonic() - self._written >= self.EVERY:
            self.facts["updated"] = time.time()
            told = {name: fact() if callable(fact) else fact for name, fact in self.facts.items()}
            try:
                write_json(self.path, told, settle=changed)
            except OSError as error:
                if not disk.is_full(error):
                    raise
                short = {name: fact for name, fact in told.items() if not isinstance(fact, list | dict)}
                if not any(disk.overwrite(self.path, as_text(one)) for one in (told, short)):
                    self._written = 0.0  # the next update tries again
                    return False
            self._written = time.monotonic()
        return True


class Metrics:
    """A run's metrics.jsonl, cut back (`cut`) and appended to; a disk that is full for a while costs no line."""

    def __init__(self, run_dir: Path, step: int, evaluated: int | None = None):
        self.path = run_dir / "metrics.jsonl"
        self._file = disk.Growing(io.FileIO(self.path, "a"))
        self.cut(step, evaluated)

    @property
    def held(self) -> int:
        """Bytes of lines that the disk has not taken yet."""
        return self._file.held

    def cut(self, step: int, evaluated: int | None = None) -> None:
        """Forget what was written of later steps, and what a crash has cut short. Needs no room on the disk.

        evaluated: the last step whose evaluation counts, if not `step`; one after it is made again.
        """
        last = {"eval": step if evaluated is None else min(step, evaluated)}
        end, gap, after = 0, False, []
        for line in self._file.lines():
            if not _is_until(line, step, last):
                gap = True
            elif gap:  # a checkpoint is told of some steps later
                after.append(line)
            else:
                end += len(line)
        if gap:
            self._file.truncate(end)
            self._file.write(b"".join(after))

    def lines(self) -> Iterator[bytes]:
        """All of them, one after the other: of a long run they may be gigabytes."""
        return self._file.lines()

    def replace(self, content: bytes) -> None:
        """Have other lines instead."""
        self._file.truncate(0)
        self._file.write(content)

    def write(self, record: dict) -> None:
        """Append one line."""
        self._file.write(json.dumps(record).encode() + b"\n")

    def settle(self) -> None:
        """Have all of them safe on disk. Raises OSError."""
        os.fsync(self._file.fileno())


class Trend:
    """The losses of all steps as at most TREND means, each of as many steps but perhaps the last."""

    def __init__(self, losses=()):
        self._sums, self._each, self._in_last = [], 1, 0
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> None:
        """Take in the next step's."""
        if self._in_last in (0, self._each):
            if len(self._sums) == TREND:
                self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
                self._each *= 2
            self._sums.append(0.0)
            self._in_last = 0
        self._sums[-1] += loss
        self._in_last += 1

    def means(self) -> list[float]:
        """From the first step to the last."""
        whole = [one / self._each for one in self._sums[:-1]]
        return whole + [one / self._in_last for one in self._sums[-1:]]


def read(path: Path):
    """Yield the records of a metrics.jsonl; a line cut short by a crash is passed over."""
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def read_status(run_dir: Path) -> dict:
    """What a run's status.json says; empty where it says nothing."""
    return _facts(run_dir / "status.json")


def last_saved(run_dir: Path) -> dict:
    """{launch, attempt, step, hosts}: the last attempt that a run's metrics.jsonl tells of, by which start of the run;
    its newest checkpoint, and where.

    0 and no hosts where there is none. What a resume has cut counts no more.
    """
    found = {"launch": "", "attempt": 0, "step": 0, "hosts": []}
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            for line in file:
                if b'"event"' not in line:
                    continue
                with contextlib.suppress(ValueError, LookupError, TypeError):  # cut short by a crash
                    record = json.loads(line)
                    if record["kind"] == "event" and record["event"] == "checkpoint":
                        found |= {"step": int(record["step"]), "hosts": list(record.get("hosts") or [])}
                    elif record["kind"] == "event" and record["event"] in BEGINS:
                        found |= {"launch": record.get("launch") or "", "attempt": int(record["attempt"])}
    except OSError:
        pass
    return found


def _is_until(line: bytes, step: int, last: dict[str, int]) -> bool:
    """Whether a line is whole, and of a step up to `step`, or up to its kind's `last`."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
        return record is not None and record["step"] <= last.get(record.get("kind"), step)
    except ValueError:
        return False


def as_text(content: dict) -> str:
    """As it stands in a JSON file."""
    return json.dumps(content, indent=1) + "\n"


def write_json(path: Path, content: dict, settle: bool = True) -> None:
    """Write a JSON file whole: a reader sees the old one or the new one; with `settle` after a power cut, too.

    Until ranks have met, and between two attempts, hosts that share a directory may write the same file at once.
    """
    temporary = path.with_name(f".{path.name}.{host()}-{os.environ.get('GROUP_RANK', '')}.tmp")
    try:
        temporary.write_text(as_text(content))
        if settle:  # a step must not wait for a slow disk
            disk.settle(temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def parts(steps: list[dict]) -> dict | None:
    """Where the time of some steps went, in mean seconds a step; `steps`: lines of kind train, of as many ranks each.

    By rank compute; compression: to code and decode what travels, and diloco's outer step; optimizer, with clipping and
    what the loop itself needs; waiting: until the slowest rank had done all that. wire: what the network then took that
    no work hid. A rank's sum with it is a step. None without steps.
    """
    went = Went()
    for one in steps:
        went.add(one)
    return went.means()


def by_rank(step: int, due: bool = False, **figures: list) -> dict[str, list]:
    """What the line of a step has of each rank's figures, by name: nothing in most, where ranks are many.

    due: whether it is to have them in any case. Else chance decides, the same on all hosts: what a step takes may go by
    its number (diloco's meetings).
    """
    size = len(next(iter(figures.values())))
    if size > TOLD_RANKS and not due and random.Random(step).random() * size >= TOLD_RANKS:
        return {}
    return {
        name: [round(one, 6) if isinstance(one, float) else one for one in some]
        for name, some in figures.items()
    }


def step_seconds(parts: dict) -> float:
    """What a step takes by a status's `parts`, those of releases that told of a `rest`, too; 0 without any."""
    by_rank = ("compute", "compression", "optimizer", "waiting")
    own = sum((parts.get(name) or [0.0])[0] for name in by_rank)
    return own + (parts.get("wire") or 0.0) + parts.get("rest", 0.0)


class Went:
    """Where the time of steps of as many ranks went, summed as they come; of the last `window` alone, if given."""

    def __init__(self, window: int | None = None):
        self.steps = self.ranks = 0
        self._window, self._kept = window, deque()
        self._own: list[list[float]] = []  # seconds of computing, compression, optimizer, by rank
        self._slowest = self._seconds = 0.0

    def add(self, step: dict) -> None:
        own = list(map(list, _own(step)))
        if self.steps:
            self._own = [list(map(operator.add, *both)) for both in zip(self._own, own, strict=True)]
        else:
            self._own = own
        self._slowest += max(map(sum, zip(*own, strict=True)))
        self._seconds += step["step_seconds"]
        self.steps, self.ranks = self.steps + 1, len(own[0])
        if self._window:
            self._kept.append((own, step["step_seconds"]))
            if self.steps > self._window:
                self._drop(*self._kept.popleft())

    def _drop(self, own: list[list[float]], seconds: float) -> None:
        self._own = [list(map(operator.sub, *both)) for both in zip(self._own, own, strict=True)]
        self._slowest -= max(map(sum, zip(*own, strict=True)))
        self._seconds -= seconds
        self.steps -= 1

    def means(self) -> dict | None:
        """As `parts`."""
        if not self.steps:
            return None
        compute, compression, optimizer = ([one / self.steps for one in ranks] for ranks in self._own)
        work = list(map(sum, zip(compute, compression, optimizer, strict=True)))
        slowest = self._slowest / self.steps
        return {
            "compute": compute,
            "compression": compression,
            "optimizer": optimizer,
            "waiting": [max(0.0, slowest - one) for one in work],
            "wire": max(0.0, self._seconds / self.steps - slowest),
        }


def _own(step: dict) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each rank's own work in a step: computing, compression, optimizer."""
    compute = step["rank_seconds"]
    if "rank_optimizer_seconds" in step:
        return compute, step["rank_compression_seconds"], step["rank_optimizer_seconds"]
    rest = (
        step["step_seconds"] - step["compute_seconds"] - step["comm_seconds"]
    )  # a release before told one rank's
    return compute, [0.0] * len(compute), [rest] * len(compute)


def curve(run_dir: Path, last: int | None = None) -> dict:
    """What metrics.jsonl tells of a run, up to step `last`.

    losses: [step, loss], thinned to POINTS; epochs, evals: [epoch or step, loss]; best: the lowest step's; parts: of
    the steps of the last attempt that made any.
    """
    steps, losses, epochs, evals = array("q"), array("d"), [], []
    seconds = tokens = 0
    best = peak = newest = None
    went, ended = Went(), False
    for one in read(run_dir / "metrics.jsonl"):  # of a long run they are gigabytes
        if last is not None and one["step"] > last:
            continue
        if one["kind"] == "event":
            ended = ended or one.get("event") in BEGINS
        elif one["kind"] == "epoch":
            epochs.append([one["epoch"], one["loss"]])
        elif one["kind"] == "eval" and one["loss"] is not None:
            evals.append([one["step"], one["loss"]])
        elif one["kind"] == "train":
            newest = one
            steps.append(one["step"])
            losses.append(one["loss"])
            seconds += one["step_seconds"]
            tokens += one["tokens"]
            peak = max(peak or 0, most_memory(one))
            if best is None or one["loss"] < best["loss"]:
                best = {"step": one["step"], "loss": one["loss"]}
            ranks = len(one.get("rank_seconds") or [])
            if ended or (ranks and ranks != went.ranks):
                went, ended = Went(), False
            if ranks:
                went.add(one)
    return {
        "steps": newest["step"] if newest else 0,
        "losses": [[steps[n], losses[n]] for n in thinned(range(len(steps)), POINTS)],
        "epochs": epochs,
        "evals": evals,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "best": best,
        "train_seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "memory_peak_bytes": peak,
        "parts": went.means() if newest and went.ranks == newest["world_size"] else None,
    }


def most_memory(record: dict) -> int:
    """The most that any rank has held until a line of kind train, in bytes; 0 where the line does not say."""
    return max([record.get("memory_peak_bytes") or 0, *(record.get("rank_memory_peak_bytes") or [])])


def thinned(rows: Sequence, count: int) -> list:
    """At most about `count` of some rows, evenly spread, the last one among them."""
    every = -(-len(rows) // count) or 1
    return [row for n, row in enumerate(rows) if n % every == 0 or n == len(rows) - 1]


def last_attempt(records: list[dict]) -> list[dict]:
    """Of a metrics.jsonl's records the steps of the last attempt that made any, as far as ranks told their times."""
    found: list[dict] = []
    for one in reversed(records):
        if found and one["kind"] == "event" and one.get("event") in BEGINS:
            break
        if one["kind"] == "train":
            ranks = len(one.get("rank_seconds") or [])
            if ranks and ranks != one["world_size"]:
                break
            if ranks:
                found.append(one)
    return found[::-1]


def summarise(run_dir: Path, **facts) -> dict:
    """Write summary.json, which is `facts` and the run's `curve`, and return it."""
    summary = {**facts, **curve(run_dir)}
    write_json(run_dir / "summary.json", summary)
    return summary


def read_summary(run_dir: Path) -> dict:
    """A run's summary.json; empty where there is none that can be read."""
    return _facts(run_dir / "summary.json")


def _facts(file: Path) -> dict:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
