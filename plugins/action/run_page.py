"""Write a run's report.html anew, from what lies in its results; with `samples`, keep these texts beside them first."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

import run_page

display = Display()


class ActionModule(ActionBase):
    """Arguments: results (directory), perhaps samples ([prompt, text] each). Returns words: where the report is, or "".

    Where nothing was brought to the controller yet, nothing is written; a report that cannot be written is a warning.
    """

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        results, samples = Path(str(self._task.args["results"])), self._task.args.get("samples") or []
        words = ""
        if (results / "metrics.jsonl").exists():
            try:
                for prompt, text in samples:
                    row = {"time": time.time(), "prompt": str(prompt or ""), "text": str(text).strip("\n")}
                    with (results / "samples.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                words = f"Its report: {os.path.relpath(run_page.write(results))}"
            except (OSError, ValueError) as error:
                display.warning(f"no report of the run: {error}")
        return {**result, "changed": False, "words": words}
