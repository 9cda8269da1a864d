"""Checkpoints: complete or invisible, checked by hash, on several hosts, resumed at any world size.

A checkpoint is a directory `checkpoints/step-NNNNNNNN` in the format of a transformers model (config.json,
model.safetensors, tokenizer), or of a peft adapter where one is trained, with optimizer.safetensors and manifest.json
beside it. Tensors are whole and kept by parameter name, so that they depend neither on how many ranks there were nor on
the strategy. The first ranks of two nodes, from five hosts on of three, each write a copy under a temporary name; only
when all are safe on disk do they get their manifest and their name. These are the first nodes that have room. Nodes
that share a run directory count as one.

A step waits only until the tensors are copied to the CPU's memory (snapshot.py); the rest goes on in a thread.
"""

import base64
import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer import disk, metrics, optim
from trainer.config import FIELDS
from trainer.errors import BadInput, TrainerError
from trainer.model import load as model_load
from trainer.snapshot import MOMENTS, OPTIMIZER, Snapshot, weights_file
from trainer.strategies.base import Strategy
from trainer.tensor_file import TensorFile
from trainer.world import World, log, translated, versions

FORMAT = 1
ASIDE = ".step-[0-9]*[0-9].damaged"  # what find has passed over
BACK = (
    "The run goes on from it once one of these hosts takes part: switch it on; a run that has ended goes on with "
    "-e resume=true"
)
# What an earlier release of the trainer did otherwise with the same.
EARLIER = {
    "model": ", or an earlier release of the trainer trained what no text reaches of it, or put "
    "an adapter beside other layers",
    "dataset": ", or an earlier release of the trainer left out calls of tools without arguments",
}
# Settings that make another architecture, or other tokens of the same data.
SHAPING = {
    "model": ("model", "adapter", "lora_rank", "lora_targets"),
    "dataset": (
        *("dataset", "dataset_weights", "data_format", "text_field", "max_samples", "validation_split"),
        *("loss_on", "overlong", "packing"),
    ),
}
MARGIN = 32 << 20  # bytes for what lies beside the tensors


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint of the run, wherever it lies."""

    manifest: dict
    path: Path | None  # on this host, or None
    source: int  # a rank whose host has it
    everywhere: bool  # every host has it
    damaged: list[str]  # copies that were passed over, by their hosts, and why


class Absent(BadInput):
    """A checkpoint that the run has saved is on none of the hosts that take part.

    hosts: those that have it and do not take part, as far as that is known.
    """

    def __init__(self, message: str, hosts: list[str]):
        super().__init__(message)
        self.hosts = hosts


@dataclass
class Saved:
    """A checkpoint under way, and how long it took once it is there."""

    step: int
    path: Path
    hosts: list[str]  # that have a copy
    begin: float  # time.perf_counter()
    copy_seconds: float  # that the step waited, for the checkpoint before it, too
    seconds: float | None = None  # in all; None: not there yet
    warning: str = ""  # what went wrong once it was there


class Saver:
    """Writes a run's checkpoints, one at a time; all ranks must call `save` and `settle` together."""

    def __init__(
        self,
        run_dir: Path,
        strategy: Strategy,
        optimizer,
        tokenizer,
        *,
        keep: int,
        background: bool,
        before: Callable[[], None] = lambda: None,
    ):
        """before: called on every rank before a checkpoint is there, for what must not be older than it after a power
        cut; what it raises of a disk is no reason not to save."""
        self.folder = run_dir / "checkpoints"
        self.strategy, self.optimizer, self.tokenizer = strategy, optimizer, tokenizer
        self.keep, self.background, self.before = keep, background, before
        self.world = world = strategy.world
        self.keepers = sorted(set(world.keepers))
        self.copies = min(len(self.keepers), copies(max(len(world.firsts), world.environment.expected)))
        self.writers: list[int] = []  # ranks, of the last one begun
        self.passed_over = ""  # the hosts without room for it, whose place others have taken
        self.group = world.new_control_group() if background else world.control
        self._thread: threading.Thread | None = None
        self._failure: TrainerError | None = None
        self._saved: Saved | None = None  # the last one begun
        self._told = True  # `news` has given it out
        if world.keeps:  # what an attempt left that was cut short is in the way of the next one's
            for left in self.folder.glob(".step-*"):
                if not left.name.endswith(".damaged"):
                    shutil.rmtree(left, ignore_errors=True)

    def save(self, facts: dict, spare: int | None = None, waited: float = 0.0) -> None:
        """Begin a checkpoint of `facts['step']`, once the one before is there; without `background`, end it, too.

        spare: a step whose checkpoint is kept, however old. waited: seconds that the step has waited for it already.
        Raises TrainerError on all ranks where the one before failed or this one cannot be begun.
        """
        self.settle()
        begin = time.perf_counter()
        self._choose_writers()
        snapshot = Snapshot(self.strategy, self.optimizer, self.writers, self.background, self.group)
        manifest = {
            "format": FORMAT,
            **facts,
            "rng": base64.b64encode(bytes(torch.get_rng_state().numpy())).decode(),
            "versions": versions(),
            "world_size": self.world.size,
            "device": self.world.device.type,
        }
        path = self.folder / f"step-{facts['step']:08d}"
        world = self.world
        hosts = [world.hosts[rank] for rank in sorted(world.firsts) if world.keepers[rank] in self.writers]
        self._saved = Saved(facts["step"], path, hosts, begin, waited + time.perf_counter() - begin)
        self._told = False
        self._thread = threading.Thread(target=self._finish, args=(snapshot, manifest, spare), daemon=True)
        self._thread.start()
        if not self.background:
            self.settle()
            self._saved.copy_seconds = self._saved.seconds

    @property
    def writes(self) -> bool:
        """Whether this rank has a copy of the last one begun."""
        return self.world.rank in self.writers

    @property
    def failed(self) -> bool:
        """Whether the save under way is known, on this rank, to have failed; `settle` then tells all why."""
        return self._failure is not None

    @property
    def under_way(self) -> bool:
        """Whether the last one begun has yet to be waited for; `news` then has it."""
        return self._thread is not None

    @property
    def told(self) -> bool:
        """Whether `news` has given out the last one begun."""
        return self._told

    def news(self) -> Saved | None:
        """The checkpoint that has come to be since this was last asked."""
        if self._told or self._saved.seconds is None:
            return None
        self._told = True
        return self._saved

    def settle(self) -> None:
        """Wait for what is under way; raises TrainerError on all ranks if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        self.world.agree(failure, named=False)  # it names its host already

    def _finish(self, snapshot: Snapshot, manifest: dict, spare: int | None) -> None:
        """Write, hash and commit all copies; what every rank's thread does together."""
        try:
            with translated(self.world):
                self._write_all(snapshot, manifest)
                self._saved.warning = self._delete_old(manifest["step"], spare)
            self._saved.seconds = time.perf_counter() - self._saved.begin
        except TrainerError as error:
            self._failure = error
        except Exception as error:
            self._failure = TrainerError(
                f"a fault of the trainer itself, in a save: {type(error).__name__}: {error}"
            )

    def _write_all(self, snapshot: Snapshot, manifest: dict) -> None:
        world, final = self.world, self._saved.path
        temporary = final.with_name(f".{final.name}.tmp")
        try:
            written = world.together(
                lambda: _write(
                    temporary if self.writes else None, snapshot, self.strategy.model, self.tokenizer
                ),
                self.group,
            )
            snapshot.files.clear()
            copies = [
                {"host": world.hosts[rank], "files": one}
                for rank, one in enumerate(world.gather(written, self.group))
                if one is not None
            ]
            manifest |= {"files": written, "copies": copies, "time": time.time()}
            with contextlib.suppress(OSError):
                self.before()
            world.together(lambda: _commit(temporary, final, manifest) if self.writes else None, self.group)
        except TrainerError:
            if self.writes:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if world.first and any(_tensors(one) != _tensors(copies[0]) for one in copies):
            log(
                f"warning: the copies of {final.name} on {' and '.join(one['host'] for one in copies)} differ: "
                "these hosts do not compute alike"
            )

    def _delete_old(self, step: int, spare: int | None) -> str:
        """Delete what is superfluous everywhere, now that `step` is there; returns what could not be, and why.

        A host without a copy of it, for want of room, has no use for older ones than those who have one keep.
        """
        world, steps, failure = self.world, [], None
        try:
            if self.writes:
                steps = [_step(path) for path in _list(self.folder) if _step(path) <= step][-self.keep :]
        except OSError as error:
            failure = error
        kept = {spare}.union(*world.gather(steps, self.group))
        try:
            if world.keeps and not failure:
                _rotate(self.folder, step, kept)
        except OSError as error:
            failure = error
        where = f"{world.environment.host}: {self.folder}"
        told = f"{where}: old checkpoints cannot be deleted: {failure}" if failure else ""
        return "; ".join(filter(None, world.gather(told, self.group)))

    def _choose_writers(self) -> None:
        """Have the first nodes that have room write; all ranks must call.

        Raises TrainerError on all where too few have.
        """
        world = self.world
        lacks = world.gather(self._lacks_room() if world.keeps else "")
        short = [rank for rank in self.keepers if lacks[rank]]
        having = [rank for rank in self.keepers if not lacks[rank]][: self.copies]
        told = {rank: f"{world.hosts[rank]}: " * (len(world.firsts) > 1) + str(self.folder) for rank in short}
        if len(having) < self.copies:
            raise TrainerError(
                "; ".join(f"{told[rank]}: the checkpoint cannot be saved: {lacks[rank]}" for rank in short)
            )
        instead = " and ".join(world.hosts[rank] for rank in having)
        self.writers = having
        self.passed_over = "; ".join(
            f"{told[rank]}: no room for a checkpoint of {self._needed() >> 20} MiB: free some space there; until then "
            f"copies are on {instead}"
            for rank in short
            if world.nodes[rank] < world.nodes[having[-1]]
        )

    def _lacks_room(self) -> str:
        """Why this host cannot have a copy, and what to do; "" where there is room. What is there stays."""
        needed = self._needed()
        try:
            free = shutil.disk_usage(_there(self.folder)).free
        except OSError as error:
            return _disk_reason(self.folder, error)
        if free >= needed:
            return ""
        return f"no space left: it needs {needed >> 20} MiB, {free >> 20} MiB are free; free some space there"

    def _needed(self) -> int:
        """Bytes of disk of a copy."""
        return MARGIN + tensor_bytes(self.strategy)


def copies(hosts: int) -> int:
    """On how many of a run's hosts a checkpoint lies, where it has so many: one more than may be lost at once.

    hosts: that it was started on. Of five on, the memory of runs stands the loss of any two (the role etcd).
    """
    return 3 if hosts >= 5 else 2


def tensor_bytes(strategy: Strategy) -> int:
    """Bytes of a checkpoint's tensors: weights, AdamW's moments, and what `strategy` keeps besides, at most."""
    each = 8 + 4 * len(strategy.keeps)
    trained = sum(
        (part.element_size() + each) * strategy.shape(name).numel()
        for name, part in strategy.trainable.items()
    )
    if weights_file(strategy.model)[0] != "model.safetensors":
        return trained
    # What a model itself freezes, or no text reaches, is in its file, too.
    return trained + sum(
        one.numel() * one.element_size() for one in strategy.model.parameters() if not one.requires_grad
    )


def find(run_dir: Path, world: World, step: int | None = None, given_up: int = 0) -> Found | None:
    """The newest checkpoint that is valid on any host, or that of `step`; all ranks must call.

    Where two starts of the run went on apart, on some hosts each, what the later one has saved is the newer.
    given_up: the newest step whose checkpoint may be missing without a word.
    Damaged ones are set aside, and the earlier start's of later steps. Raises BadInput where all are damaged, unless
    one of them was asked for; and Absent, if none was, where hosts that do not take part have a good one, or the run
    has saved a newer one that nobody has here.
    """
    folder = run_dir / "checkpoints"
    manifest, _, damaged = newest(folder, step) if world.keeps else (None, None, {})
    everyone = world.gather(
        {
            "manifest": manifest,
            "damaged": [
                {"step": _step(path), "why": why, "hosts": _holders(path)} for path, why in damaged.items()
            ],
            "steps": [_step(path) for path in _list(folder)] if world.keeps else [],
            "set_aside": [int(path.name[len(".step-") : -len(".damaged")]) for path in folder.glob(ASIDE)],
            "saved": metrics.last_saved(run_dir) if world.keeps else None,
        }
    )
    holders = [
        (_launch(one["manifest"]), one["manifest"]["step"], -rank)
        for rank, one in enumerate(everyone)
        if one["manifest"]
    ]
    best = max(holders, default=("", 0, 0))[1]
    problems = [
        f"{world.hosts[rank]}: {bad['why']}" for rank, one in enumerate(everyone) for bad in one["damaged"]
    ]
    if step is None:
        _miss(world, everyone, best, given_up, problems)
    if not holders:
        return None
    aside = set(damaged)
    if step is None:
        problems += [
            f"{world.hosts[rank]}: the checkpoint of step {number} is of an earlier start of the run, and the later "
            f"one has come to step {best}"
            for rank, one in enumerate(everyone)
            for number in sorted({*one["steps"]} - {bad["step"] for bad in one["damaged"]})
            if number > best
        ]
        aside |= {path for path in _list(folder) if world.keeps and _step(path) > best}
    for path in aside:  # out of the way; deleted once a good one has been written
        hidden = path.with_name(f".{path.name}.damaged")
        shutil.rmtree(hidden, ignore_errors=True)  # one of the same step, damaged before
        path.rename(hidden)
    source = -max(holders)[2]
    best = everyone[source]["manifest"]
    having = {
        rank
        for rank, one in enumerate(everyone)
        if one["manifest"]
        and (one["manifest"]["step"], one["manifest"]["files"]) == (best["step"], best["files"])
    }
    here = world.keepers[world.rank] in having
    return Found(
        manifest=best,
        path=folder / f"step-{best['step']:08d}" if here else None,
        source=source,
        everywhere=having == set(world.keepers),
        damaged=problems,
    )


def _miss(world: World, everyone: list[dict], best: int, given_up: int, problems: list[str]) -> None:
    """Raise Absent, or BadInput, on all ranks where the run is not to go on from step `best`; see `find`."""
    damaged = [one for rank in everyone for one in rank["damaged"]]
    if damaged and not best:
        bring = "bring a good one back, or choose another run name:\n" + "\n".join(problems)
        copies = [(one["step"], hosts) for one in damaged if (hosts := _others(world, one["hosts"]))]
        if not copies:
            raise BadInput(f"none of the run's checkpoints is valid; {bring}")
        step, hosts = max(copies)
        raise Absent(
            f"none of the run's checkpoints is valid on the hosts that take part; {' and '.join(hosts)} had a copy of "
            f"step {step}, too. {BACK}. Else {bring}",
            hosts,
        )
    told = [one["saved"] for one in everyone if one["saved"]]
    # What other hosts know of may have been passed over since.
    last = max((one["launch"], one["attempt"]) for one in told)
    step, hosts = max((one["step"], one["hosts"]) for one in told if (one["launch"], one["attempt"]) == last)
    set_aside = {one["step"] for one in damaged}.union(*(one["set_aside"] for one in everyone))
    if step <= max(best, given_up) or step in set_aside:
        return
    what = f"the run's newest checkpoint, of step {step}, is on"
    others = _others(world, hosts)
    if others:
        what += f" {' and '.join(others)}, and on no host that takes part. {BACK}"
    else:
        what += (
            f" none of its hosts any more ({' and '.join(hosts) or 'not known which'} had it); bring it back"
        )
    instead = f"goes on from step {best}" if best else "begins anew"
    raise Absent(f"{what}. If it is lost for good: -e resume=true -e lost_step={step} {instead}", others)


def _others(world: World, hosts: list[str]) -> list[str]:
    """Those of `hosts` that do not take part."""
    return [host for host in hosts if host not in world.hosts]


def _holders(path: Path) -> list[str]:
    """The hosts that the manifest of a damaged checkpoint names, if it can still be read."""
    try:
        return [str(one["host"]) for one in json.loads((path / "manifest.json").read_text())["copies"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def newest(
    folder: Path, step: int | None = None, beyond: int = -1
) -> tuple[dict | None, Path | None, dict[Path, str]]:
    """The newest valid checkpoint in `folder`: its manifest and path; and by path, what is wrong with newer ones.

    step: no other than that step's. beyond: none up to that step.
    """
    problems, paths = {}, [path for path in _list(folder) if _step(path) > beyond]
    launches = {path: _launch_of(path) for path in paths}
    last = max(filter(None, launches.values()), default="")  # what is damaged may be of that
    paths.sort(key=lambda path: (last if launches[path] is None else launches[path], _step(path)))
    for path in (path for path in reversed(paths) if step in (None, _step(path))):
        try:
            return validate(path), path, problems
        except BadInput as error:
            problems[path] = str(error)
    return None, None, problems


def _launch(manifest: dict) -> str:
    """The start of the run that saved a checkpoint; of two, the later one is the greater."""
    return str(manifest.get("launch", ""))


def _launch_of(path: Path) -> str | None:
    """As `_launch`; None where the manifest cannot be read."""
    try:
        return _launch(json.loads((path / "manifest.json").read_text()))
    except (OSError, ValueError, AttributeError):
        return None


def validate(path: Path) -> dict:
    """The manifest of the checkpoint at `path`; raises BadInput where a file is missing, cut short or altered."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = manifest["files"].items()
        if manifest["format"] != FORMAT:
            raise BadInput(f"{path}: format {manifest['format']}; this trainer reads format {FORMAT}")
        named = re.fullmatch(r"step-(\d+)", path.resolve().name)  # or as whoever has brought it here calls it
        step, digest = manifest["step"], _digest(manifest)
        misplaced = named is not None and int(named[1]) != step
        if misplaced or OPTIMIZER not in manifest["files"] or manifest.get("sha256", digest) != digest:
            raise BadInput(f"{path}/manifest.json: its content has changed since it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}/manifest.json: missing or damaged ({type(error).__name__})") from None
    for name, facts in files:
        file = path / name
        try:
            if not file.is_file():
                raise BadInput(f"{file}: missing")
            if file.stat().st_size != facts["bytes"]:
                raise BadInput(f"{file}: {file.stat().st_size} bytes, its manifest says {facts['bytes']}")
            if disk.sha256(file) != facts["sha256"]:
                raise BadInput(f"{file}: its content has changed since it was written (sha256 differs)")
        # A bad sector, a file of another user, a damaged manifest.
        except (OSError, KeyError, TypeError) as error:
            raise BadInput(
                f"{file}: cannot be checked: {getattr(error, 'strerror', None) or error!r}"
            ) from None
    return manifest


def _digest(manifest: dict) -> str:
    """The SHA-256 of all that a manifest says, as it comes from the disk, but for this; those of before have none."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def check_identity(manifest: dict, identity: dict, settings: dict) -> None:
    """Refuse to resume where what the run trains has changed.

    identity: hash or value by what must be equal; settings: this run's configuration.
    """
    differences = []
    for what, value in identity.items():
        before = manifest["identity"].get(what, value)  # an earlier version did not note all of it
        if isinstance(value, list):  # by host
            if set(value) & set(before):
                continue
            before, value = before[0], value[0]
        if before != value:
            then, now = manifest["settings"].get(what, str(before)[:12]), settings.get(what, str(value)[:12])
            content = f" (the same name, another content){EARLIER.get(what, '')}" if then == now else ""
            before_now = {
                # One that a release did not have yet was as it is by default.
                key: [some.get(key, FIELDS[key].default) for some in (manifest["settings"], settings)]
                for key in SHAPING.get(what, ())
            }
            shaped = [
                f"{key}: {one} then, {other} now" for key, (one, other) in before_now.items() if one != other
            ]
            differences += shaped or [f"{what}: {then} then, {now} now{content}"]
    if differences:
        raise BadInput(
            f"the run's checkpoint of step {manifest['step']} was made from something else: {'; '.join(differences)}. "
            "Cure: choose another run name, or set these back"
        )


def check_device(manifest: dict, wanted: str, cards: bool) -> None:
    """Refuse to go on, a hundred times slower and without a word, on the CPU where the run was on GPUs.

    wanted: the key `device`; cards: whether a rank sees one. A driver that does not load after a boot looks like none.
    """
    # An earlier version did not note it.
    if wanted == "auto" and manifest.get("device") == "cuda" and not cards:
        raise BadInput(
            f"the run's checkpoint of step {manifest['step']} was made on GPUs, and torch sees none now: see "
            "`nvidia-smi` on its hosts, and `dkms status` after a new kernel. Cure: get them back, or set device to cpu"
        )


def load(found: Found, strategy: Strategy, optimizer) -> None:
    """Restore weights, optimizer state and random numbers on every rank; all ranks must call."""
    world = strategy.world
    weights, keys = weights_file(strategy.model)
    with contextlib.ExitStack() as opened:

        def read():
            try:
                return [
                    opened.enter_context(safe_open(found.path / name, "pt")) for name in (weights, OPTIMIZER)
                ]
            except (OSError, SafetensorError) as error:
                raise TrainerError(f"{found.path}: cannot be read: {error}") from None

        files = world.together(lambda: read() if found.path else (None, None))
        with torch.no_grad():
            for name, part in strategy.trainable.items():
                part.copy_(_rows(found, files[0], keys[name], strategy, name))
                step, mean, square = (
                    _rows(found, files[1], f"{kind}.{name}", strategy, name) for kind in MOMENTS
                )
                optim.restore(optimizer, part, step.item(), mean, square)
            if strategy.keeps:
                wanted = {f"{kind}.{name}": name for kind in strategy.keeps for name in strategy.trainable}
                here = [key for key in files[1].keys() if key in wanted] if files[1] else []  # noqa: SIM118
                shapes = world.share({key: files[1].get_slice(key).get_shape() for key in here}, found.source)
                kept = {}
                for key, shape in sorted(shapes.items()):
                    kept[key] = _rows(found, files[1], key, strategy, wanted[key], shape)
                strategy.restore(kept)
    torch.set_rng_state(
        torch.frombuffer(bytearray(base64.b64decode(found.manifest["rng"])), dtype=torch.uint8)
    )


def _rows(
    found: Found, file, key: str, strategy: Strategy, name: str, shape: list[int] | None = None
) -> torch.Tensor:
    """This rank's part of tensor `key` of a file, or where some host lacks it, as received from the source.

    shape: of all of it, unless it is that of parameter `name`.
    """
    if found.everywhere:
        one = file.get_slice(key)
        return one[strategy.rows(name)] if one.get_shape() else file.get_tensor(key)
    scalar = key.startswith("step.")
    if file is not None:
        value = file.get_tensor(key).contiguous()
    else:
        shape = () if scalar else shape or strategy.shape(name)
        value = torch.empty(shape, dtype=strategy.trainable[name].dtype)
    strategy.world.broadcast(value, found.source)
    return value if scalar else value[strategy.rows(name)]


def _write(temporary: Path | None, snapshot: Snapshot, model, tokenizer) -> dict | None:
    """Write all files but the manifest; return `{name: {bytes, sha256}}`. All ranks must call.

    temporary: None on a rank that writes nothing.
    """
    tensors = iter(snapshot)
    try:
        if temporary is None:
            return None
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_tensors(temporary, snapshot.files, tensors)
        if hasattr(model, "peft_config"):
            adapter = copy.copy(model.peft_config["default"])
            adapter.inference_mode = True
            adapter.save_pretrained(temporary)
        else:
            if model.is_remote_code():
                from transformers.dynamic_module_utils import custom_object_save

                # The configuration's own saving brings its own code alone; its auto_map is told of the model's here.
                custom_object_save(model, temporary, config=model.config)
            model.config.save_pretrained(temporary)
            model_load.restore_dropout(temporary, model.original_dropout)
        _save_tokenizer(tokenizer, temporary)
        return {file.name: _settled(file) for file in sorted(temporary.iterdir()) if file.is_file()}
    except OSError as error:
        raise TrainerError(_disk_message(temporary.parent, error)) from None
    finally:
        for _ in tensors:  # other ranks' copies are made of this one's parts, whatever its own disk says
            pass


def _save_tokenizer(tokenizer, folder: Path) -> None:
    """Raises OSError where a disk does, of which tokenizers has only the words, in an exception without a type."""
    try:
        tokenizer.save_pretrained(folder)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def _write_tensors(folder: Path, told: dict[str, dict[str, torch.Tensor]], tensors) -> None:
    """Write `tensors`, (file, key, tensor) in any order, of the types and shapes that `told` has by file and key."""
    with contextlib.ExitStack() as opened:
        files = {name: opened.enter_context(TensorFile(folder / name, ones)) for name, ones in told.items()}
        for name, key, tensor in tensors:
            files[name].write(key, tensor)


def _tensors(copy: dict) -> list:
    """The facts of a copy's files of tensors; others may name paths of their host."""
    return [facts for name, facts in copy["files"].items() if name.endswith(".safetensors")]


def _commit(temporary: Path, final: Path, manifest: dict) -> None:
    """Give a written checkpoint its manifest and its name."""
    try:
        manifest["sha256"] = _digest(json.loads(json.dumps(manifest)))
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        if final.exists():  # left by an attempt that was damaged
            shutil.rmtree(final)
        disk.publish(temporary, final)
    except OSError as error:
        raise TrainerError(_disk_message(final.parent, error)) from None


def _disk_message(folder: Path, error: Exception) -> str:
    return f"{folder}: the checkpoint cannot be saved: {_disk_reason(folder, error)}"


def _disk_reason(folder: Path, error: Exception) -> str:
    """What a disk has refused, and what to do."""
    if disk.is_full(error):
        free = shutil.disk_usage(_there(folder)).free >> 20
        return f"no space left ({free} MiB free); free some space there"
    reason = getattr(error, "strerror", None) or str(error)
    return f"{reason}; look at the disk and at who may write there"


def _there(folder: Path) -> Path:
    """`folder`, or what is there of the way to it."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _rotate(folder: Path, step: int, kept: set[int | None]) -> None:
    """Delete what interrupted saves have left, and of the checkpoints up to `step` all but those that are `kept`.

    Raises OSError, once all has been tried.
    """
    failure = None
    old = [path for path in _list(folder) if _step(path) <= step and _step(path) not in kept]
    for path in [*folder.glob(".step-*"), *old]:
        try:
            hidden = path.rename(path.with_name(f".{path.name}.old")) if path in old else path
            shutil.rmtree(hidden)
        except OSError as error:
            failure = error
    if failure:
        raise failure


def _list(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    paths = folder.glob("step-*") if folder.is_dir() else []
    return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _settled(file: Path) -> dict:
    """Size and hash of a file that is now safe on disk, and that the run's group may read."""
    file.chmod(0o640)  # safetensors writes for its owner alone
    disk.settle(file)
    return {"bytes": file.stat().st_size, "sha256": disk.sha256(file)}
