"""Checkpoints: complete or invisible, checked by hash, on two hosts, resumed at any world size.

A checkpoint is a directory `checkpoints/step-NNNNNNNN` in the format of a transformers model (config.json,
model.safetensors, tokenizer) with optimizer.safetensors and manifest.json beside it. Tensors are kept by
parameter name, so that they do not depend on how many ranks there were. The first ranks of nodes 0 and 1 each
write a copy under a temporary name; only when both are safe on disk do both get their manifest and their
name.
"""

import base64
import errno
import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer import disk
from trainer.errors import BadInput, TrainerError
from trainer.world import World, log, versions

COPIES = 2
FORMAT = 1


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint of the run, wherever it lies."""

    manifest: dict
    path: Path | None  # on this host, or None
    source: int  # a rank whose host has it
    everywhere: bool  # every host has it


def save(run_dir: Path, world: World, model, optimizer, tokenizer, facts: dict, keep: int) -> Path:
    """Write a checkpoint of `facts['step']`; all ranks must call. Returns its path on the hosts of the copies.

    Raises TrainerError on all ranks where a copy could not be written; what was there before is untouched.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step-{facts['step']:08d}"
    temporary = folder / f".{final.name}.tmp"
    writes = world.first_on_host and world.nodes[world.rank] < COPIES
    try:
        files = world.together(lambda: _write(temporary, model, optimizer, tokenizer) if writes else None)
        copies = [
            {"host": world.hosts[rank], "files": one}
            for rank, one in enumerate(world.gather(files))
            if one is not None
        ]
        manifest = {
            "format": FORMAT,
            **facts,
            "files": files,
            "copies": copies,
            "rng": base64.b64encode(bytes(torch.get_rng_state().numpy())).decode(),
            "versions": versions(),
            "world_size": world.size,
            "time": time.time(),
        }
        world.together(lambda: _commit(temporary, final, manifest) if writes else None)
    except TrainerError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if world.first and any(one["files"] != copies[0]["files"] for one in copies):
        log(
            f"warning: the copies of {final.name} on {' and '.join(one['host'] for one in copies)} differ: "
            "these hosts do not compute alike"
        )
    if writes:
        _rotate(folder, facts["step"], keep)
    return final


def find(run_dir: Path, world: World) -> Found | None:
    """The newest checkpoint that is valid on any host; all ranks must call.

    Damaged ones are named in the log.
    """
    folder = run_dir / "checkpoints"
    manifest, _, damaged = newest(folder) if world.first_on_host else (None, None, {})
    everyone = world.gather(
        {"manifest": manifest, "damaged": {path.name: why for path, why in damaged.items()}}
    )
    problems = [
        f"{world.hosts[rank]}: {why}" for rank, one in enumerate(everyone) for why in one["damaged"].values()
    ]
    holders = [(one["manifest"]["step"], -rank) for rank, one in enumerate(everyone) if one["manifest"]]
    if not holders:
        if problems:
            raise BadInput(
                "none of the run's checkpoints is valid; bring a good one back, or choose another run name:\n"
                + "\n".join(problems)
            )
        return None
    for problem in problems if world.first else ():
        log(f"passed over a damaged checkpoint: {problem}")
    for path in damaged:  # out of the way; deleted once a good one has been written
        path.rename(path.with_name(f".{path.name}.damaged"))
    source = -max(holders)[1]
    best = everyone[source]["manifest"]
    nodes = {
        world.nodes[rank]
        for rank, one in enumerate(everyone)
        if one["manifest"]
        and (one["manifest"]["step"], one["manifest"]["files"]) == (best["step"], best["files"])
    }
    here = world.nodes[world.rank] in nodes
    return Found(
        manifest=best,
        path=folder / f"step-{best['step']:08d}" if here else None,
        source=source,
        everywhere=nodes == set(world.nodes),
    )


def newest(folder: Path) -> tuple[dict | None, Path | None, dict[Path, str]]:
    """The newest valid checkpoint in `folder`: its manifest and path; and by path, what is wrong with newer ones."""
    problems = {}
    for path in reversed(_list(folder)):
        try:
            return validate(path), path, problems
        except BadInput as error:
            problems[path] = str(error)
    return None, None, problems


def validate(path: Path) -> dict:
    """The manifest of the checkpoint at `path`; raises BadInput where a file is missing, cut short or altered."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = manifest["files"].items()
        if manifest["format"] != FORMAT:
            raise BadInput(f"{path}: format {manifest['format']}; this trainer reads format {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}/manifest.json: missing or damaged ({type(error).__name__})") from None
    for name, facts in files:
        file = path / name
        if not file.is_file():
            raise BadInput(f"{file}: missing")
        if file.stat().st_size != facts["bytes"]:
            raise BadInput(f"{file}: {file.stat().st_size} bytes, its manifest says {facts['bytes']}")
        if _sha256(file) != facts["sha256"]:
            raise BadInput(f"{file}: its content has changed since it was written (sha256 differs)")
    return manifest


def check_identity(manifest: dict, identity: dict, settings: dict) -> None:
    """Refuse to resume where what the run trains has changed.

    identity: hash or value by what must be equal; settings: this run's configuration.
    """
    differences = []
    for what, value in identity.items():
        before = manifest["identity"].get(what)
        if before != value:
            then, now = manifest["settings"].get(what, str(before)[:12]), settings.get(what, str(value)[:12])
            content = " (the same name, another content)" if then == now else ""
            differences.append(f"{what}: {then} then, {now} now{content}")
    if differences:
        raise BadInput(
            f"the run's checkpoint of step {manifest['step']} was made from something else: {'; '.join(differences)}. "
            "Cure: choose another run name, or set these back"
        )


def load(found: Found, world: World, model, optimizer) -> None:
    """Restore weights, optimizer state and random numbers on every rank; all ranks must call."""

    def read():
        try:
            return load_file(found.path / "model.safetensors"), load_file(
                found.path / "optimizer.safetensors"
            )
        except (OSError, SafetensorError) as error:
            raise TrainerError(f"{found.path}: cannot be read: {error}") from None

    weights, moments = world.together(lambda: read() if found.path else ({}, {}))
    with torch.no_grad():
        for name, tensor in _weights(model).items():
            tensor.copy_(_everywhere(weights.get(name), tensor, found, world))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                optimizer.state[parameter] = {
                    part: _everywhere(moments.get(f"{part}.{name}"), like, found, world).to(parameter.device)
                    for part, like in (
                        ("step", torch.zeros(())),
                        ("exp_avg", parameter),
                        ("exp_avg_sq", parameter),
                    )
                }
    torch.set_rng_state(
        torch.frombuffer(bytearray(base64.b64decode(found.manifest["rng"])), dtype=torch.uint8)
    )


def _everywhere(value: torch.Tensor | None, like: torch.Tensor, found: Found, world: World) -> torch.Tensor:
    """`value` where this host has it, or else as received from the source; shaped like `like`."""
    if found.everywhere:
        return value
    if value is None:
        value = torch.empty(like.shape, dtype=like.dtype)
    value = value.contiguous()
    world.broadcast(value, found.source)
    return value


def _weights(model) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tied tensor once, under its first name."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _moments(model, optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors by 'part.parameter name'."""
    return {
        f"{part}.{name}": tensor
        for name, parameter in model.named_parameters()
        for part, tensor in optimizer.state.get(parameter, {}).items()
    }


def _write(temporary: Path, model, optimizer, tokenizer) -> dict:
    """Write all files but the manifest; return `{name: {bytes, sha256}}`."""
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, tensors in (
            ("model.safetensors", _weights(model)),
            ("optimizer.safetensors", _moments(model, optimizer)),
        ):
            save_file(
                {k: t.detach().cpu().contiguous() for k, t in tensors.items()},
                temporary / name,
                {"format": "pt"},
            )
        model.config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        return {file.name: _settled(file) for file in sorted(temporary.iterdir()) if file.is_file()}
    except (OSError, SafetensorError) as error:
        raise TrainerError(_disk_message(temporary.parent, error)) from None


def _commit(temporary: Path, final: Path, manifest: dict) -> None:
    """Give a written checkpoint its manifest and its name."""
    try:
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        if final.exists():  # left by an attempt that was damaged
            shutil.rmtree(final)
        disk.publish(temporary, final)
    except OSError as error:
        raise TrainerError(_disk_message(final.parent, error)) from None


def _disk_message(folder: Path, error: Exception) -> str:
    full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
    reason = getattr(error, "strerror", None) or str(error)
    cure = "free some space there" if full else "look at the disk and at who may write there"
    if full:
        reason = f"no space left ({shutil.disk_usage(folder).free >> 20} MiB free)"
    return (
        f"{folder}: the checkpoint cannot be saved: {reason}; {cure}, then start the run again. "
        "It goes on from its last checkpoint, which is intact"
    )


def _rotate(folder: Path, step: int, keep: int) -> None:
    """Delete all but the `keep` newest up to `step`, just written, and what interrupted saves have left."""
    older = [path for path in _list(folder) if _step(path) <= step]
    for path in older[:-keep]:
        doomed = path.with_name(f".{path.name}.old")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _list(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    paths = folder.glob("step-*") if folder.is_dir() else []
    return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _settled(file: Path) -> dict:
    """Size and hash of a file that is now safe on disk."""
    disk.settle(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
