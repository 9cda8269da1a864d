"""`trainer send`: what a run has told in metrics.jsonl to Weights & Biases or MLflow, from where its directory lies."""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from trainer import sinks
from trainer.config import UNREADABLE
from trainer.data import read
from trainer.errors import BadInput, TrainerError
from trainer.metrics import BEGINS, FINAL


def main(directory: Path, service: str) -> int:
    """Give `service` (wandb, mlflow) the lines that it was not given before; sent-SERVICE.json has how far it got.

    Raises BadInput where there is no run's directory or no such package, TrainerError where the service fails.
    """
    sinks.need(service, f"{service}: ")
    lines, kept = directory / "metrics.jsonl", directory / f"sent-{service}.json"
    if not lines.is_file():
        raise BadInput(
            f"{directory}: found no metrics.jsonl in it; expected a run's directory, such as runs/RUN of the checkout, "
            "where train.yml puts it"
        )
    with _alone(kept):
        return _send(directory, service, lines, kept)


def _send(directory: Path, service: str, lines: Path, kept: Path) -> int:
    settings = _settings(directory)
    name = str(settings.get("run") or directory.resolve().name)
    begun, sent, there = _progress(lines, _read(kept))
    number, last = sent, ""
    if sent == there:
        print(f"run '{name}': {service} has all {sent} lines")
        return 0
    try:
        if service == "wandb":
            sink, close = sinks.wandb(name, directory, settings, begun)
        else:
            sink, close = sinks.mlflow(name, settings, begun)
        for record in _records(lines, sent):
            sink(record)
            number, last = number + 1, record
        close(_ended(directory))
    except TrainerError:
        raise
    except Exception as error:  # whatever another's package may raise
        text = " ".join(str(error).split())[:200]
        raise TrainerError(
            f"{service}: {type(error).__name__}: {text}; {number - sent} lines of {lines} were sent. Type this again "
            "once that is cured: it goes on behind them"
        ) from None
    finally:
        if last:
            kept.write_text(json.dumps({"begun": begun, "lines": number, "last": _digest(last)}) + "\n")
    print(f"run '{name}': {number - sent} lines sent to {service}")
    return 0


@contextlib.contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """Raise BadInput where what was sent could not be noted in `kept`, or another sends now: both would send twice."""
    try:
        file = kept.open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"{kept}: another `trainer send` is at work; wait until it has ended") from None
    except OSError as error:
        raise BadInput(
            f"{kept}: {error.strerror}; expected a file that takes down how much was sent: make it and its directory "
            "yours to write, or copy the directory and send from there"
        ) from None
    with file:
        yield


def _records(path: Path, skipped: int = 0) -> Iterator[dict]:
    """The records of metrics.jsonl but for the first so many; a last one that is half there is not told yet."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if number <= skipped or not line.endswith("\n"):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or not {"kind", "step", "time"} <= record.keys():
                raise BadInput(
                    f"{path}:{number}: expected an object with kind, step and time, found {line[:40]!r}; bring the "
                    "run's results anew"
                )
            yield record


def _settings(directory: Path) -> dict:
    """The run's, with names of data and models as they were asked for: of its end, or as it began."""
    settings = _read(directory / "summary.json").get("settings")
    return settings if isinstance(settings, dict) else read.named(_read(directory / "config.yaml"))


def _read(path: Path) -> dict:
    """What a file in YAML or JSON has; nothing where it is not there, or no mapping."""
    try:
        found = yaml.safe_load(path.read_text()) if path.is_file() else {}  # a pipe would be waited for
    except (OSError, yaml.YAMLError, *UNREADABLE):
        found = {}
    return found if isinstance(found, dict) else {}


def _progress(lines: Path, told: dict) -> tuple[str, int, int]:
    """(the run's first start, how many lines the service has, how many there are); told: what sent-SERVICE.json has.

    The service has those that were sent, or where the run went back behind these, those up to there.
    """
    noted = told.get("lines")
    noted = noted if isinstance(noted, int) and noted > 0 else 0
    begun, number, same, back = "", 0, False, 0
    for number, record in enumerate(_records(lines), 1):
        begun = begun or record.get("launch") or record.get("begun") or ""  # as the run's own recorder has it
        if record.get("event") in BEGINS:
            back = number - 1
        same = same or (number == noted and _digest(record) == told.get("last"))
    if told.get("begun") != begun:
        return begun, 0, number
    return begun, noted if same else min(noted, back), number


def _digest(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _ended(directory: Path) -> str:
    """How the run ended; one that has not is sent on later, as one that was stopped."""
    state = _read(directory / "status.json").get("state")
    return state if state in FINAL else "stopped"
