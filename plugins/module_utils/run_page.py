"""A run, or several beside each other, as one page of HTML that needs nothing else: report.html.

What the page draws is chosen here and drawn by run_page.html. Reads what train.yml brought to runs/NAME; whatever is
missing or cut short there, of a run that failed, say, is left out of the page.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[2]))

from part_files import beside, sweep
from telling import names as several

from trainer import metrics
from trainer.data.read import named

POINTS = 1500  # of a curve; more could not be told apart
SHOWN_EVENTS = 300
SHOWN_RANKS = 16  # of more, the slowest and the fastest
SHOWN_MACHINES = 8  # of different kinds
SHOWN_SHARES = 300
SHOWN_SAMPLES = 20
# Of each line of kind train; memory is that of the rank that has had the most.
SERIES = (
    *("step", "loss", "router_loss", "lr", "grad_norm", "tokens_total", "tokens_per_second", "mfu"),
    *("step_seconds", "wire_bytes", "memory_peak_bytes"),
)
SPIKES = ("loss", "grad_norm", "step_seconds")  # what is thinned loses none of theirs
# Of a machine, as the ranks told it when the attempt began (trainer/machine.py): what it is called on the page.
MACHINE = {
    **{"cards": "cards", "driver": "driver", "cuda": "CUDA", "cpu": "CPU", "memory_bytes": "memory"},
    **{"system": "system", "kernel": "kernel", "python": "Python", "torch": "torch"},
    **{"transformers": "transformers", "trainer": "trainer"},
}
NETWORK = 0.4  # a share of a step that the network takes, from which less on the wire would help
UNEVEN = 0.2  # a share that the fastest rank waits for the slowest, from which other shares would help


def page(directories: list[Path]) -> str:
    """The page of the runs whose results lie in `directories`. Raises ValueError for one without metrics."""
    runs = [found(directory) for directory in directories]
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    # Within a script, "<" might end it or begin a comment.
    data = json.dumps({"made": time.time(), "runs": runs}, allow_nan=False).replace("<", "\\u003c")
    title = " and ".join(run["name"] for run in runs)
    before, between, after = template.replace("{{title}}", "\0").replace("{{data}}", "\0").split("\0")
    return before + escape(title) + between + data + after


def write(directory: Path) -> Path:
    """Write a run's report.html beside its metrics; returns its path."""
    path = directory / "report.html"
    sweep(str(path))
    temporary = Path(beside(str(path)))
    temporary.write_text(page([directory]), encoding="utf-8")
    temporary.replace(path)
    return path


def found(directory: Path) -> dict:
    """What the page shows of the run whose results lie in `directory`."""
    records = read_metrics(directory / "metrics.jsonl")
    train = [{**one, "memory_peak_bytes": most} for one, most in _memory_so_far(records)]
    summary, status = _json(directory / "summary.json"), _json(directory / "status.json")
    events = [one for one in records if one["kind"] == "event"]
    evals = [[one["step"], one["loss"]] for one in records if one["kind"] == "eval"]
    state = status.get("state") or summary.get("state") or "interrupted"
    last = max(at for at, one in enumerate(records) if one["kind"] == "train")
    begun = [one for one in records[:last] if one["kind"] == "event"]  # what begins after it has no step yet
    names = rank_names(begun, train)
    shown, left = _events(events)
    known = machines(events)
    summary |= {"settings": named(summary["settings"])} if summary.get("settings") else {}
    settings = summary.get("settings") or named(_yaml(directory / "config.yaml"))
    return {
        "name": directory.name,
        "state": state,
        "reason": status.get("reason") if state != "finished" else None,
        "about": _about(train, summary, names),
        "figures": _figures(train, evals, events),
        "series": series(train),
        "evals": metrics.thinned([one for one in evals if one[1] is not None], POINTS),
        "unigram": summary.get("unigram_entropy"),
        "events": shown,
        "events_left": left,
        "shares": _shares(train) if len(names) <= SHOWN_RANKS else [],
        "rank_names": names,
        "parts": parts(records, names, watched(begun), settings.get("balance", "auto") == "auto"),
        "settings": settings,
        "environment": _environment(summary, names, known),
        "machines": known,
        "memory": memory(train, names),
        "samples": _samples(directory),
    }


def _memory_so_far(records: list[dict]) -> Iterator[tuple[dict, int | None]]:
    """Each step's line, and the most that any rank had held by then in its attempt; None where no line says."""
    most = 0
    for one in records:
        if one["kind"] == "event" and one.get("event") in metrics.BEGINS:
            most = 0
        elif one["kind"] == "train":
            own = metrics.most_memory(one)
            # Of many ranks not each line has all of them.
            most = own if one.get("rank_memory_peak_bytes") else max(most, own)
            yield one, most or None


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl. Raises ValueError if no step is there."""
    records = [_finite(one) for one in read_lines(path) if "kind" in one and "step" in one]
    if not any(record["kind"] == "train" for record in records):
        raise ValueError(f"{path}: it holds no step; a report needs one, as train.yml brings it there")
    return records


def read_lines(path: Path) -> list[dict]:
    """The objects in a file of lines of JSON; lines cut short are passed over, as is a file that cannot be read."""
    try:
        return [one for one in metrics.read(path) if isinstance(one, dict)]
    except (OSError, ValueError):
        return []


def _finite(record: dict) -> dict:
    """NaN and the infinities are no JSON; on a page they are gaps."""
    return {
        name: None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
        for name, value in record.items()
    }


# ---- curves ----


def series(train: list[dict]) -> dict[str, list]:
    """The columns of at most POINTS steps, as they were written, to six digits; hours: of training, until then.

    Half of the points are steps at even distances, the others the highest of each of SPIKES, stretch by stretch.
    """
    hours, total = [], 0.0
    for one in train:
        total += one.get("step_seconds") or 0.0
        hours.append(total / 3600)
    kept = range(len(train))
    if len(train) > POINTS:
        even = _stretches(len(train), POINTS // 2)
        highest = {
            max(stretch, key=lambda n: train[n].get(name) or float("-inf"))
            for name in SPIKES
            for stretch in _stretches(len(train), POINTS // 2 // len(SPIKES))
        }
        kept = sorted({*(stretch[0] for stretch in even), *highest, len(train) - 1})
    columns = {name: [_rounded(train[n].get(name)) for n in kept] for name in SERIES}
    return {**columns, "hours": [_rounded(hours[n]) for n in kept]}


def _stretches(length: int, count: int) -> list[range]:
    """At most `count` stretches, equally long but for the last, of range(length)."""
    size = -(-length // count)
    return [range(first, min(first + size, length)) for first in range(0, length, size)]


def _rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _shares(train: list[dict]) -> list[list]:
    """[step, shares] wherever they changed."""
    changes: list[list] = []
    for one in train:
        if one.get("shares") and (not changes or changes[-1][1] != one["shares"]):
            changes.append([one["step"], one["shares"]])
    return metrics.thinned(changes, SHOWN_SHARES)


# ---- where the time goes ----


def rank_names(events: list[dict], train: list[dict]) -> list[str]:
    """A name for each rank of the last attempt: its host's, and its number where a host has several."""
    hosts = next((one["ranks"] for one in reversed(events) if one.get("ranks")), [])
    if len(hosts) != train[-1].get("world_size"):
        return [f"rank {rank}" for rank in range(train[-1].get("world_size") or 1)]
    return [f"{host}, rank {rank}" if hosts.count(host) > 1 else host for rank, host in enumerate(hosts)]


def watched(events: list[dict]) -> bool:
    """Whether the last attempt's ranks told their own seconds of computing, without their waiting for others."""
    return next((one["watched"] for one in reversed(events) if "watched" in one), True)


def parts(records: list[dict], names: list[str], own: bool = True, balanced: bool = True) -> dict | None:
    """Where a step's time went, in mean seconds, of the last attempt's steps; what to do about it.

    ranks: [{name, compute, compression, waiting, wire, optimizer}], as trainer/metrics.py says. None for metrics that
    do not say.
    own: as `watched` says. balanced: whether shares follow the ranks' speeds (balance: auto).
    """
    steps = metrics.last_attempt(records)
    went = metrics.parts(steps)
    if went is None or len(went["compute"]) != len(names):
        return None
    compute, waiting, wire = went["compute"], went["waiting"], went["wire"]
    by_rank = ("compute", "compression", "waiting", "optimizer")
    step = wire + sum(went[name][0] for name in by_rank)
    order = sorted(range(len(names)), key=lambda rank: -compute[rank])
    shown = sorted(
        order if len(order) <= SHOWN_RANKS else order[: SHOWN_RANKS // 2] + order[-SHOWN_RANKS // 2 :]
    )
    note = f"Means of {len(steps):,} steps of {step:.3g} s."
    if len(shown) < len(names):
        note += f" Shown are the slowest and the fastest {SHOWN_RANKS // 2} of {len(names)} ranks."
    return {
        "step": step,
        "ranks": [
            {
                "name": names[rank],
                "wire": wire,
                **{name: went[name][rank] for name in by_rank},
            }
            for rank in shown
        ],
        "computing": "computing" if own else "computing or waiting",
        "note": note,
        "advice": _advice(step, waiting, wire, names, own, balanced),
    }


def _advice(
    step: float, waiting: list[float], wire: float, names: list[str], own: bool, balanced: bool
) -> str:
    if wire > NETWORK * step:
        return "Most of what could be gained is on the network: docs/slow-networks.md says what sends less."
    if max(waiting) > UNEVEN * step:
        last = names[waiting.index(min(waiting))]
        if balanced:
            return (
                f"The others wait for {last}, and its share is balanced: of a larger batch_size shares, which are "
                "whole sequences, follow the speeds more closely; diagnose.yml looks at why it is slow."
            )
        return f"The others wait for {last}: balance: auto gives each rank what it can do in the same time."
    if not own:
        return (
            "How much of it the ranks wait for the network and for each other is not known: on GPUs, those of a "
            "sharded strategy wait within what counts as computing."
        )
    return "Most of the time is spent computing."


# ---- memory and machines ----


def memory(train: list[dict], names: list[str]) -> dict:
    """Whose memory is shown, and {name, bytes} of the last attempt's ranks, those with the most first.

    whose: "any rank" where the lines have that of each, else "the first rank", which has written them.
    """
    last = next((found for one in reversed(train) if (found := one.get("rank_memory_peak_bytes"))), [])
    each = [one for one in train if (one.get("world_size") or 0) <= metrics.TOLD_RANKS]
    told = bool(last) and all(one.get("rank_memory_peak_bytes") for one in each)
    by_rank = zip(names, last, strict=True) if len(last) == len(names) else ()
    ranks = sorted(({"name": name, "bytes": most} for name, most in by_rank), key=lambda one: -one["bytes"])
    return {
        "whose": "any rank" if told else "the first rank",
        "ranks": ranks[:SHOWN_RANKS],
        "ranks_left": max(0, len(ranks) - SHOWN_RANKS),
    }


def machines(events: list[dict]) -> dict | None:
    """What the last attempt ran on: hosts, of each kind of machine; rows, [what, of the first kind, …]; left.

    None for metrics that do not say.
    """
    kinds = next((one["machines"] for one in reversed(events) if one.get("machines")), [])
    shown = kinds[:SHOWN_MACHINES]
    rows = [[label, *(_of_machine(one, key) for one in shown)] for key, label in MACHINE.items()]
    return {
        "hosts": [several(one["hosts"]) for one in shown],
        "rows": [row for row in rows if any(row[1:])],
        "left": len(kinds) - len(shown),
    } if kinds else None  # fmt: skip


def _of_machine(machine: dict, key: str) -> str:
    value = machine.get(key)
    if key == "cards":
        return ", ".join(f"{value.count(card)} x {card}" for card in dict.fromkeys(value or []))
    if key == "memory_bytes" and value:
        return f"{value / 2**30:.3g} GiB"
    if key == "cpu" and value and machine.get("cores"):
        return f"{value}, {machine['cores']} cores"
    return "" if value is None else str(value)


# ---- words and figures ----


def _about(train: list[dict], summary: dict, names: list[str]) -> str:
    settings = summary.get("settings") or {}
    hosts = (summary.get("world") or {}).get("hosts") or []
    told = [
        f"model {settings['model']}" if settings.get("model") else "",
        f"{summary['parameters']:,} parameters" if summary.get("parameters") else "",
        f"data {settings['dataset']}" if settings.get("dataset") else "",
        f"{len(names)} rank{'s' * (len(names) > 1)}" + (f" on {', '.join(hosts[:8])}" if hosts else ""),
        str((summary.get("world") or {}).get("device") or ""),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(train[0].get("time") or 0)) if train[0].get("time") else "",
    ]  # fmt: skip
    return " · ".join(one for one in told if one)


def _figures(train: list[dict], evals: list[list], events: list[dict]) -> dict:
    seconds = sum(one.get("step_seconds") or 0 for one in train)
    tokens = sum(one.get("tokens") or 0 for one in train)
    wired = [one["wire_bytes"] for one in train if one.get("wire_bytes") is not None]
    used = [one["mfu"] for one in train if one.get("mfu")]
    losses = [loss for _, loss in evals if loss is not None]
    return {
        "last_loss": train[-1].get("loss"),
        "best_eval": min(losses, default=None),
        "tokens_per_second": tokens / seconds if seconds else None,
        "mfu": sum(used) / len(used) if used else None,
        "steps": train[-1]["step"],
        "tokens": tokens,
        "train_seconds": seconds,
        "memory_peak_bytes": max((one["memory_peak_bytes"] or 0 for one in train), default=0) or None,
        "wire_bytes": sum(wired) / len(wired) if any(wired) else None,
        "restarts": sum(one.get("event") == "restart" for one in events),
    }


def _events(events: list[dict]) -> tuple[list[dict], int]:
    """What is shown of the events, and how many are not; checkpoints, of which there are many, give way."""
    rest = max(0, SHOWN_EVENTS - sum(one.get("event") != "checkpoint" for one in events))
    saved = [one for one in events if one.get("event") == "checkpoint"]
    kept = {id(one) for one in saved[len(saved) - rest :]} if rest else set()
    shown = [one for one in events if one.get("event") != "checkpoint" or id(one) in kept][-SHOWN_EVENTS:]
    rows = [
        {
            "event": str(one.get("event")),
            "step": one["step"],
            "time": one.get("time") or 0,
            "text": _told(one),
        }
        for one in shown
    ]
    return rows, len(events) - len(rows)


def _told(event: dict) -> str:
    kind = event.get("event")
    if kind in ("start", "resume", "restart"):
        ranks, why = event.get("ranks") or [], event.get("reason")
        hosts = list(dict.fromkeys(ranks))
        by = f"{len(ranks)} ranks on {several(hosts)}" if ranks else ""
        return "; ".join(str(one) for one in (why, by) if one)
    if kind == "shares":
        return (
            ":".join(map(str, event.get("before") or []))
            + " to "
            + ":".join(map(str, event.get("shares") or []))
        )
    if kind == "checkpoint":
        return f"saved in {event.get('seconds') or 0:.1f} s; training waited {event.get('copy_seconds') or 0:.2f} s"
    return str(event.get("reason") or "")


def _environment(summary: dict, names: list[str], known: dict | None) -> list[list[str]]:
    versions = {} if known else summary.get("versions") or {}  # each machine has its own
    rows = [[f"version of {name}", str(value)] for name, value in versions.items()]
    world = summary.get("world") or {}
    if world.get("hosts"):
        rows.append(["hosts", ", ".join(world["hosts"])])
    rows.append(["ranks", str(len(names))])
    if world.get("device"):
        rows.append(["device", str(world["device"])])
    for name in ("parameters", "dataset_tokens", "sequences"):
        if summary.get(name):
            rows.append([name.replace("_", " "), f"{summary[name]:,}"])
    return rows


def _samples(directory: Path) -> list[dict]:
    """What generate.yml kept in samples.jsonl, the newest first, and the demo's sample.txt."""
    rows = []
    for one in read_lines(directory / "samples.jsonl")[-SHOWN_SAMPLES:]:
        if isinstance(one.get("text"), str):
            rows.insert(0, {"prompt": str(one.get("prompt") or ""), "text": one["text"]})
    try:
        text = (directory / "sample.txt").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        text = ""
    return rows + [{"prompt": "", "text": text}] * bool(text)


def _json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _finite(content) if isinstance(content, dict) else {}


def _yaml(path: Path) -> dict:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
