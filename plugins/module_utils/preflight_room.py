"""What a run to come takes of the hosts' disks, as far as that is known before it is started. On the controller."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
if str(CHECKOUT) not in sys.path:
    sys.path.append(str(CHECKOUT))

from same_files import sizes

from trainer.data.read import SHIPPED as TEXTS
from trainer.data.read import names
from trainer.errors import BadInput
from trainer.model.files import SHIPPED

# Bytes of a checkpoint of all weights, over those of the model's files in 16 bits: 4 of weights and 8 of AdamW's
# moments a parameter.
CHECKPOINT_TIMES = 6
NAMED = 1000  # files that hosts are asked for, the largest


def run_material(words: dict) -> dict:
    """What hosts are asked for before a run: {files: [[name, bytes], …] of this controller, which may have been brought
    before; paths: [PATH, …] that are not here}. words: model, dataset and validation, as train.yml takes them, or "".
    """
    files: list[list] = []
    paths = []
    for name in _named(words):
        path = os.path.expanduser(name)
        if os.path.exists(path):
            files += [[os.path.basename(one), size] for one, size in sizes(path)]
        elif name.startswith("/"):
            paths.append(name)
    return {"files": sorted(files, key=lambda one: -one[1])[:NAMED], "paths": paths}


def run_room(
    words: dict, copies: int = 3, there: dict[str, int] | None = None, shared: str = ""
) -> tuple[float, str]:
    """Disk that a run takes on a host that has nothing of it yet, GB: data, model and as many checkpoints as `copies`;
    and of what of it the size is unknown.

    words: as above, and adapter, whose checkpoints are small. there: bytes of paths that are not on this controller, by
    what hosts say; what of them lies in the directory `shared` is used in its place. The hub's sizes nobody here knows.
    """
    there = there or {}
    weights, data, unknown, times = 0, 0, [], 1.0
    model = words.get("model") or ""
    if model and model not in SHIPPED:
        path = os.path.expanduser(model)
        weights, in_place = _known(model, there, shared)
        times = 0.0 if in_place else 1.0
        if words.get("adapter") in (None, "", "none"):
            times += copies * CHECKPOINT_TIMES / (2 if _wide(path) else 1)
        unknown += [] if os.path.exists(path) or model in there else [model]
    for name in _named({**words, "model": ""}):
        found, in_place = _known(name, there, shared)
        data += 0 if in_place else found
        if not (
            os.path.exists(os.path.expanduser(name)) or name in there or (TEXTS / f"{name}.txt").exists()
        ):
            unknown.append(name)
    return (data + weights * times) / 1e9, ", ".join(unknown)


def _named(words: dict) -> list[str]:
    """The model, and the sets of data, where they are given; what no name can be read from is one, of unknown size."""
    model, dataset, validation = (words.get(key) or "" for key in ("model", "dataset", "validation"))
    try:
        sets = list(names(dataset)) if dataset else []
    except BadInput:
        sets = [dataset]
    return [
        *([model] if model and model not in SHIPPED else []),
        *sets,
        *([validation] if validation else []),
    ]


def _known(name: str, there: dict[str, int], shared: str) -> tuple[int, bool]:
    """The bytes of a model or a set of data, and whether the hosts use it where it lies."""
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return sum(size for _, size in sizes(path)), False
    return there.get(name, 0), bool(shared) and os.path.normpath(name).startswith(f"{shared}/")


def _wide(path: str) -> bool:
    """Whether a model's weights are in 32 bits, as its config.json says."""
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            told = json.load(file)
        return "float32" in (told.get("dtype"), told.get("torch_dtype"))
    except (OSError, ValueError, AttributeError):  # what is wrong with it, train.yml says
        return False
