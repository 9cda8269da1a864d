#!/usr/bin/python
"""What one host has of a run's results: the finished model, and the newest valid checkpoint. Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_saved
short_description: Find a run's finished model and its newest valid checkpoint on a host
description:
  - A checkpoint is looked at as the trainer does; with O(verify) its files' hashes are, too.
  - Changes nothing.
options:
  run_dir: {type: path, required: true, description: The run's directory.}
  step: {type: int, default: 0, description: "The step whose checkpoint alone is asked for; 0: the newest valid one."}
  verify: {type: bool, default: false, description: Whether contents are read and hashed.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: See what the host has of it
  run_saved:
    run_dir: /var/lib/trainyard/runs/first
"""

RETURN = r"""
saved:
  description: >-
    C(model) and C(checkpoint), each null or with C(path), C(step), C(launch) (the start of the run that made it; of
    two, the later is the greater), C(bytes) and, with O(verify), C(digest) of its weights; C(steps) of all checkpoints;
    C(damaged), what is wrong with newer or asked ones.
  type: dict
  returned: always
"""

import hashlib
import json
import os
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import opened
from ansible.module_utils.received_files import sha256

STEP = re.compile(r"step-(\d{8,})")
MANIFEST_BYTES = 16 << 20  # bytes that are read of a manifest
STATE = "optimizer.safetensors"  # no part of the model


class Damaged(Exception):
    """What is wrong with a checkpoint."""


def read_json(path: str) -> dict:
    """The object in a file; empty where there is none."""
    try:
        with opened(path) as file:
            found = json.loads(file.read(MANIFEST_BYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def weights(hashes: dict[str, str]) -> str:
    """A name for the weights in files with these SHA-256: other files may name paths of their host."""
    own = {name: one for name, one in hashes.items() if name.endswith(".safetensors") and name != STATE}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def model(run_dir: str, verify: bool, launch: str) -> dict | None:
    """The finished model or adapter, which appears whole; `launch`: of which start, where an older release made it."""
    path = os.path.join(run_dir, "model")
    if not any(os.path.isfile(os.path.join(path, name)) for name in ("config.json", "adapter_config.json")):
        return None
    files = {name: os.path.join(path, name) for name in sorted(os.listdir(path))}
    files = {name: file for name, file in files.items() if os.path.isfile(file)}
    summary = read_json(os.path.join(run_dir, "summary.json"))
    found = {
        "path": path,
        "step": int(summary.get("steps") or 0),
        "launch": str(summary.get("launch", launch)),
        "bytes": sum(os.path.getsize(file) for file in files.values()),
    }
    if verify:
        tensors = {name: sha256(file) for name, file in files.items() if name.endswith(".safetensors")}
        found["digest"] = weights(tensors)
    return found


def checkpoint(path: str, verify: bool) -> dict:
    """The checkpoint at `path`. Raises Damaged."""
    manifest = read_json(os.path.join(path, "manifest.json"))
    try:
        files = dict(manifest["files"])
        for name, facts in files.items():
            file = os.path.join(path, name)
            if not os.path.isfile(file) or os.path.getsize(file) != facts["bytes"]:
                raise Damaged(f"{file}: missing or cut short")
            if verify and sha256(file) != facts["sha256"]:
                raise Damaged(f"{file}: its content has changed since it was written (sha256 differs)")
        return {
            "path": path,
            "step": int(manifest["step"]),
            "launch": str(manifest.get("launch", "")),
            "bytes": sum(facts["bytes"] for name, facts in files.items() if name != STATE),
            **({"digest": weights({name: one["sha256"] for name, one in files.items()})} if verify else {}),
        }
    except (KeyError, TypeError, ValueError):
        raise Damaged(f"{path}/manifest.json: missing or damaged") from None
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from None


def launch(path: str) -> str | None:
    """The start of the run that saved the checkpoint at `path`: of two, the later is the greater; None: not known."""
    manifest = read_json(os.path.join(path, "manifest.json"))
    return str(manifest.get("launch", "")) if manifest else None


def saved(run_dir: str, step: int, verify: bool) -> dict:
    """RETURN's `saved`. Raises OSError."""
    folder = os.path.join(run_dir, "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    paths = {int(found[1]): os.path.join(folder, name) for name in names if (found := STEP.fullmatch(name))}
    launches = {number: launch(path) for number, path in paths.items()}
    last = max(filter(None, launches.values()), default="")  # what is damaged may be of that
    order = sorted(paths, key=lambda number: (last if launches[number] is None else launches[number], number))
    result = {"model": None, "checkpoint": None, "steps": sorted(paths, reverse=True), "damaged": []}
    for number in reversed(order):
        if step not in (0, number):
            continue
        try:
            result["checkpoint"] = checkpoint(paths[number], verify)
            break
        except Damaged as fault:
            result["damaged"].append(str(fault))
    if not step:
        result["model"] = model(run_dir, verify, last)
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "run_dir": {"type": "path", "required": True},
            "step": {"type": "int", "default": 0},
            "verify": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        module.exit_json(changed=False, saved=saved(p["run_dir"], p["step"], p["verify"]))
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror} for the user that Ansible logs in as. site.yml puts it "
            "into the group of trainer_user; that counts from its next login on."
        )


if __name__ == "__main__":
    main()
