"""Keep what a controller has of another run of the same name, before a new run's results come to that place."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()
RESULTS = ("summary.json", "metrics.jsonl", "model", "export")  # without these there is nothing to keep


def same(results: Path, begins: str | None) -> bool:
    """Whether what is there is of the run whose metrics begin so: by its first start; it is, where one tells none."""
    if begins is None:
        return False
    try:
        with open(results / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            here = first_start(file.readline())
    except FileNotFoundError:
        return True
    there = first_start(begins)
    return not here or not there or here == there


def first_start(line: str) -> str:
    """The start that a run's first line is of; each host's has a time of its own."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return str(json.loads(line).get("launch") or "")
    return ""


class ActionModule(ActionBase):
    """Arguments: results (directory), begins (of a run that goes on, the first line of some host's metrics: what is
    here of the same run stays). Returns kept: where it is now, or "".
    """

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        results = Path(str(self._task.args["results"]))
        begins = self._task.args.get("begins")
        if not any((results / name).exists() for name in RESULTS) or same(results, begins):
            return {**result, "changed": False, "kept": ""}
        kept = results.with_name(f"{results.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        if not self._task.check_mode:
            try:
                results.rename(kept)
            except OSError as error:
                raise AnsibleActionFail(
                    f"{results}: found the results of another run of this name, and they cannot be moved to "
                    f"{kept.name} ({error.strerror}); move them yourself, or name this run otherwise (-e run=NAME)"
                ) from None
        display.display(
            f"{os.path.relpath(results)} holds another run of this name, which its hosts do not know any more or never "
            f"did: {'would be ' if self._task.check_mode else ''}kept as {os.path.relpath(kept)}"
        )
        return {**result, "changed": True, "kept": str(kept)}
