"""`python -m bench.slow [WAY …]`: what each lossy way costs in validation loss, over seeds: hours, resumable.

Two ranks of this machine, each a host of its own (within a host nothing is coded), train the same model by each way,
for as many tokens. It is a fine-tune, as these ways are meant for: before, exact ddp has trained that model on another
part of the text. A run that is interrupted goes on from
its checkpoint when the command is given again; one that has ended is a line of results.jsonl and not run again.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.measure import ROOT, WAYS, markdown, metrics, tell
from trainer import config as configuration
from trainer.data import tokenizer as own_tokenizer

FOLDER = ROOT / "runs" / "bench-slow"
RANKS = 2
TOLD_EVERY = 600  # seconds between two lines on how far it is
LONGEST = 50_000  # letters of a module: what is held out should be of many
NO_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
WEIGHTS = "model.safetensors"
TARGETS = {"16bit": 0.5, "8bit": 0.5, "powersgd": 1.0, "diloco": 2.0}  # % of exact's validation loss


@dataclass(frozen=True)
class Sizes:
    """What all runs have in common. A step is as short as it may be: what counts is how many there are."""

    width: int = 448
    layers: int = 4
    vocabulary: int = 2048
    sequence_length: int = 64
    batch_size: int = 8
    steps: int = 2400
    sync_every: int = (
        60  # 40 meetings; of 50 steps each they send 199 times less than exact, and 200 times is asked
    )
    lr: float = 5e-5  # what the trainer takes for weights that are there, where none is set
    base_steps: int = 2000  # before, of exact ddp, from whose weights all runs begin; 0: from random ones
    base_lr: float = 1e-3
    letters: int = 9_000_000  # of the text, half of what is not held out for the steps before
    held_out: int = 100_000  # letters of it that only evaluations see


def text(sizes: Sizes) -> list[str]:
    """The modules of Python's standard library, in an order that no directory has a say in: real text, at hand here."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(library) for path in library.rglob("*.py")]
    files = [path for path in files if not NO_TEXT & set(path.parts)]
    files.sort(key=lambda path: hashlib.sha256(str(path).encode()).digest())
    texts, left = [], sizes.letters
    for path in files:
        texts.append(
            (library / path).read_text(encoding="utf-8", errors="replace")[: max(0, min(left, LONGEST))]
        )
        left -= len(texts[-1])
    return [one for one in texts if one.strip()]


def prepare(folder: Path, sizes: Sizes) -> None:
    """What the runs start from: the parts of the text, a model without weights, run.yaml. Exits where there is another
    already.
    """
    place, mine = folder / "sizes.json", dataclasses.asdict(sizes)
    if place.exists():
        there = json.loads(place.read_text())
        if there != mine:
            differ = ", ".join(f"{k} {there.get(k)}, now {v}" for k, v in mine.items() if there.get(k) != v)
            sys.exit(
                f"{folder} was begun with {differ}: give those again, another --folder, or remove this one"
            )
        return
    texts = text(sizes)
    there = sum(map(len, texts))
    held = _first(texts, sizes.held_out)
    before = held + _first(texts[held:], (there - sizes.held_out) // 2 if sizes.base_steps else 0)
    if before == len(texts):
        sys.exit(
            f"--held-out {sizes.held_out} leaves nothing of the text's {there} letters; give less, or more --letters"
        )
    parts = {"held_out": texts[:held], "base": texts[held:before], "train": texts[before:]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in part))
    settings = {"dataset": str(folder / "train.jsonl"), "vocab_size": sizes.vocabulary}
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer.json").write_text(own_tokenizer.train(configuration.from_mapping(settings)))
    end = {"eos_token": own_tokenizer.END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(end))
    # As transformers would write it, which this process, there for hours, need not load. Without weights each seed has
    # its own.
    llama = {
        "model_type": "llama",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.width * 11 // 4,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": max(1, sizes.width // 64),
        "max_position_embeddings": sizes.sequence_length,
        "tie_word_embeddings": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
        "use_cache": False,
    }
    (model / "config.json").write_text(json.dumps(llama))
    run = {
        "model": str(model),
        "dataset": str(folder / "train.jsonl"),
        "validation": str(folder / "held_out.jsonl"),
        "sequence_length": sizes.sequence_length,
        "batch_size": sizes.batch_size,
        "min_nodes": RANKS,  # one that goes on alone would be recorded as what both had found
        "micro_batch_size": max(1, sizes.batch_size // RANKS),
        "balance": "even",  # shares by speed would differ from run to run, and with them diloco's curve
        "steps": sizes.steps,
        "lr": sizes.lr,
        "warmup_steps": sizes.steps // 20,
        "sync_every": sizes.sync_every,
        "eval_every": sizes.steps,
        "checkpoint_every": 0,  # one sends as much as a step by exact, or three: only at a stop, and at the end
        "checkpoint_async": False,
        "tensorboard": False,
        "threads": 1,
        "device": "cpu",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    place.write_text(json.dumps(mine))


def _first(texts: list[str], letters: int) -> int:
    """How many of the texts have so many letters."""
    return next((n for n in range(len(texts)) if sum(map(len, texts[:n])) >= letters), len(texts))


def train_base(folder: Path, sizes: Sizes, lock: int, left: int) -> None:
    """Have all later runs begin from weights that exact ddp has trained, once; as `_run`."""
    settings = {
        "dataset": folder / "base.jsonl",
        "steps": sizes.base_steps,
        "warmup_steps": sizes.base_steps // 20,
        "lr": sizes.base_lr,
        "seed": 0,
        **WAYS["exact"],
    }
    run_dir = folder / "base"
    _run(folder, "base", settings, lock, left)
    os.replace(run_dir / "model" / WEIGHTS, folder / "model" / WEIGHTS)
    _clear(run_dir)


def train(folder: Path, way: str, seed: int, lock: int, left: int) -> dict:
    """The result of one run, as `_run`."""
    name = f"{way}-{seed}"
    run_dir = folder / name
    _run(folder, name, {"seed": seed, **WAYS[way]}, lock, left)
    rows = metrics(run_dir)
    steps = [row for row in rows if row["kind"] == "train"]
    return {
        "way": way,
        "seed": seed,
        "loss": [row["loss"] for row in rows if row["kind"] == "eval"][-1],
        "tokens": sum(row["tokens"] for row in steps),
        "bytes": sum(row["wire_bytes"] * row["world_size"] for row in steps),
        "saving": RANKS * uncounted(rows),  # bytes, too: of the checkpoints at the end and at a stop
        "begins": beginning(folder),
        "seconds": sum(row["step_seconds"] for row in steps),
        # A stop brings about a checkpoint, for which diloco meets: a round cut short, and its bytes.
        "stops": sum(row.get("event") in ("resume", "restart") for row in rows),
        "parameters": json.loads((run_dir / "summary.json").read_text())["parameters"],
    }


def beginning(folder: Path) -> str:
    """A digest of what all runs have in common: the weights that they begin from, if there are any, and the text."""
    found = hashlib.sha256()
    for name in (f"model/{WEIGHTS}", "model/tokenizer.json", "train.jsonl", "held_out.jsonl"):
        if (folder / name).exists():
            found.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return found.hexdigest()[:16]


def uncounted(rows: list[dict]) -> int:
    """Bytes that a rank sent for the last checkpoint of each attempt, if no step after it has counted them."""
    total = pending = step = 0
    for row in rows:
        if row["kind"] == "train":
            step, pending = row["step"], 0
        elif row.get("event") == "checkpoint" and row["step"] >= step:  # told later, it may be counted
            pending = row.get("wire_bytes", 0)
        elif row.get("event") in ("start", "resume", "restart"):
            total, pending = total + pending, 0
    return total + pending


def _hosts(run_dir: Path) -> list[Path]:
    return [run_dir, *(run_dir / f"host{node}" for node in range(1, RANKS))]


def _clear(run_dir: Path) -> None:
    """Of a run that has ended, weights are not needed."""
    for place in _hosts(run_dir):
        for what in ("checkpoints", "model"):
            shutil.rmtree(place / what, ignore_errors=True)


def _run(folder: Path, name: str, overrides: dict, lock: int, left: int) -> None:
    """One run, begun or gone on with, to its end. Ctrl-C ends it with a checkpoint, as KeyboardInterrupt.

    lock: a descriptor that the launchers inherit. left: how many runs there are to do, this one included.
    """
    run_dir = folder / name
    hosts = _hosts(run_dir)
    settings = {
        "TRAINYARD_CACHE_DIR": folder / "cache",
        "TRAINYARD_STORE": run_dir / "store",
        "TRAINYARD_LAUNCH": time.time_ns(),
        "NNODES": RANKS,
        "NPROC_PER_NODE": 1,
        "MASTER_PORT": 29700,
        "CLUSTER_ADDRESS": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": 1,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": 1,
        "PYTHONPATH": ROOT,
    }
    keys = [f"{key}={value}" for key, value in {"run": name, **overrides}.items()]
    command = [sys.executable, "-m", "trainer", "launch", str(folder / "run.yaml"), *keys]
    children = []
    for node, place in enumerate(hosts):
        place.mkdir(exist_ok=True)
        own = {"TRAINYARD_RUN_DIR": place, "TRAINYARD_HOST": f"host{node}", "NODE_RANK": node}
        with (place / "launcher.log").open("a") as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, **{key: str(value) for key, value in {**settings, **own}.items()}},
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
                pass_fds=(lock,),
            )
        children.append(child)
    try:
        _watch(children[0], run_dir, name, left)
        for child in children[1:]:
            child.wait()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it takes some seconds to save
        tell(f"{name}: saves and stops")
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
        raise
    for child, place in zip(children, hosts, strict=True):
        if child.returncode:
            said = "\n".join((place / "launcher.log").read_text().splitlines()[-5:])
            sys.exit(f"{name} ended with {child.returncode} ({place}/logs):\n{said}")


def _watch(child: subprocess.Popen, run_dir: Path, name: str, left: int) -> None:
    """Wait for its end, saying now and then how far it is, and how long all will take."""
    begin, told = time.time(), 0.0
    while True:
        try:
            return child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass
        try:
            status = json.loads((run_dir / "status.json").read_text())
        except (OSError, ValueError):
            continue
        step, rate = status.get("step") or 0, status.get("tokens_per_second")
        if status["updated"] < begin or not rate or step < 20 or time.monotonic() - told < TOLD_EVERY:
            continue
        told, steps, eta = time.monotonic(), status["steps"], status["eta_seconds"]
        hours = (eta + (left - 1) * eta / max(1, steps - step) * steps) / 3600
        tell(
            f"{name}: step {step:,} of {steps:,}, {eta / max(1, steps - step):.2f} s a step; "
            f"{left} runs left, about {hours:.1f} hours at this pace"
        )


def results(folder: Path) -> list[dict]:
    """What has ended; exits where that is of a release that counted other bytes."""
    file = folder / "results.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not all({"begins", "saving"} <= set(one) for one in found):
        sys.exit(f"{file}: some lines are of an older release, whose bytes are others: move it away")
    return found


def table(found: list[dict], before: float | None = None) -> str:
    """A row for each way that has ended runs; differences are from exact with the same seed.

    before: the validation loss, in nats a token, that all runs begin with, if it is known.
    """
    by_way = {way: {one["seed"]: one for one in found if one["way"] == way} for way in WAYS}
    exact = by_way["exact"]
    rows = []
    for way, seeds in by_way.items():
        if not seeds:
            continue
        losses = statistics.mean(one["loss"] for one in seeds.values())
        a_token = sum(one["bytes"] for one in seeds.values()) / sum(one["tokens"] for one in seeds.values())
        pairs = [(one, exact[seed]) for seed, one in seeds.items() if seed in exact]
        far = [100 * (one["loss"] / other["loss"] - 1) for one, other in pairs]
        compared = way in TARGETS and far
        rows.append(
            (
                way,
                ", ".join(map(str, sorted(seeds))),
                f"{losses:.4f}",
                f"{statistics.mean(far):+.2f}" if compared else "",
                f"{max(far, key=abs):+.2f}" if compared else "",
                f"{TARGETS[way]:g}" if way in TARGETS else "",
                f"{_of_improvement(pairs, before):+.1f}" if compared and before else "",
                f"{a_token:,.1f}",
                f"{_fewer(pairs, 'bytes'):.1f}" if compared else "",
                f"{_fewer(pairs, 'bytes', 'saving'):.1f}" if compared else "",
            )
        )
    head = ("comm", "seeds", "validation loss", "from exact, %", "the worst seed, %", "at most, %",
            "of exact's improvement, %", "bytes a token", "times fewer than exact",
            "with checkpoints")  # fmt: skip
    return markdown(head, rows)


def _of_improvement(pairs: list[tuple[dict, dict]], before: float) -> float:
    """How much higher runs end than exact ones with their seeds, in % of what these improved from `before` on."""
    return statistics.mean(
        100 * (one["loss"] - exact["loss"]) / (before - exact["loss"]) for one, exact in pairs
    )


def _fewer(pairs: list[tuple[dict, dict]], *what: str) -> float:
    """How many times fewer bytes a token, of these kinds, runs have sent than exact ones with their seeds."""
    own, exact = (
        sum(one[kind] for one in runs for kind in what) / sum(one["tokens"] for one in runs)
        for runs in zip(*pairs, strict=True)
    )
    return exact / own


def report(folder: Path) -> str:
    found = results(folder)
    if not found:
        return f"{folder}: no run has ended yet"
    before = _before(folder)
    sizes = Sizes(**{"base_steps": 0, **json.loads((folder / "sizes.json").read_text())})  # as it once was
    return (
        f"{found[0]['parameters']:,} parameters, {sizes.steps:,} steps of {sizes.batch_size} x "
        f"{sizes.sequence_length} tokens on {RANKS} hosts of a rank, diloco meets "
        f"{sizes.steps // sizes.sync_every} times; "
        f"{f'from weights after {sizes.base_steps:,} steps of exact' if sizes.base_steps else 'from random weights'}; "
        f"validation loss in nats a token, on text that was held out"
        f"{f', {before:.4f} before' if before else ''}; bytes that all ranks sent, in steps alone and with the "
        f"checkpoints at the end and at stops{_stopped(found)}.\n\n"
        f"{table(found, before)}"
    )


def _stopped(found: list[dict]) -> str:
    """Which runs were not of one piece."""
    named = [f"{one['way']} of seed {one['seed']} ({one['stops']})" for one in found if one.get("stops")]
    return (
        f"; stopped and gone on with, for which diloco meets once more: {', '.join(named)}" if named else ""
    )


def _before(folder: Path) -> float | None:
    """What that loss is of the weights that all runs begin from; None where nothing has measured it."""
    if not (folder / "base/metrics.jsonl").exists():
        return None
    found = [row["loss"] for row in metrics(folder / "base") if row["kind"] == "eval"]
    return found[-1] if found else None


def _interrupted(*_) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.slow", description=__doc__.split(": ", 1)[1])
    parser.add_argument("ways", metavar="WAY", nargs="*", help=f"of {', '.join(WAYS)}; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where all of it lies")
    parser.add_argument("--table", action="store_true", help="only show what has ended so far")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"no way is named {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    folder = options.folder.absolute()
    if options.table:
        print(report(folder))
        return
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                f"{folder}: another bench.slow is at work there, or the run that it left; wait, or end it"
            )
        os.nice(19)
        signal.signal(signal.SIGTERM, _interrupted)
        signal.signal(signal.SIGINT, _interrupted)  # where a shell has it ignored in the background, too
        done = {(one["way"], one["seed"]) for one in results(folder)}
        pairs = [(way, seed) for seed in range(options.seeds) for way in options.ways or WAYS]
        ahead = [pair for pair in pairs if pair not in done]
        try:
            prepare(folder, sizes)
            if sizes.base_steps and not (folder / "model" / WEIGHTS).exists():
                train_base(folder, sizes, lock.fileno(), len(ahead) + 1)
            if {one["begins"] for one in results(folder)} - {beginning(folder)}:
                sys.exit(
                    f"{folder / 'results.jsonl'} has runs that began from other weights or another text than those of "
                    f"{folder} now, which cannot be compared: move it away, and the runs that it names"
                )
            for number, (way, seed) in enumerate(ahead):
                one = train(folder, way, seed, lock.fileno(), len(ahead) - number)
                with (folder / "results.jsonl").open("a") as file:
                    file.write(json.dumps(one) + "\n")
                _clear(folder / f"{way}-{seed}")
                tell(f"{way}, seed {seed}: validation loss {one['loss']:.4f}")
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on from here")
    print(report(folder))


if __name__ == "__main__":
    main()
