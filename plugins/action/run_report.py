"""Say what a finished run left, and what may come next."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from live_frame import clean

display = Display()


def report(run: str, results: str, generate: str, export: str) -> str:
    """The text after a finished run: its figures from summary.json, where its results lie, and the next commands."""
    try:
        with open(os.path.join(results, "summary.json"), encoding="utf-8") as file:
            summary = json.load(file)
    except (OSError, ValueError, RecursionError):
        summary = {}
    figures = [f"Run {run} finished"]
    if summary.get("steps"):
        figures.append(f"{summary['steps']} steps")
    if summary.get("first_loss") is not None and summary.get("last_loss") is not None:
        figures.append(f"loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}")
    if summary.get("tokens_per_second"):
        figures.append(f"{summary['tokens_per_second']:,.0f} tokens/s")
    shown = os.path.relpath(results)
    there = [
        f"  {os.path.join(shown, name):<36} {what}"
        for name, what in (
            ("report.html", "curves, times and settings on one page"),
            ("summary.json", "figures and settings"),
            ("metrics.jsonl", "every step"),
            ("logs", "of every rank, by host"),
            ("model", "the trained model, in transformers' format"),
        )
        if os.path.exists(os.path.join(results, name))
    ]
    return "\n".join(
        [
            "",
            ": ".join([figures[0], ", ".join(figures[1:])]).rstrip(": "),
            *there,
            "Try the model:",
            f"  {generate}",
            "Have it in one directory, for everyone's tools:",
            f"  {export}",
        ]
    )


class ActionModule(ActionBase):
    """Arguments: run, results, generate and export (commands); where the hosts are this machine trainer and run_dir."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = self._task.args
        generate, export = str(args["generate"]), str(args["export"])
        if args["local"]:
            trainer, run_dir = (os.path.relpath(str(args[name])) for name in ("trainer", "run_dir"))
            generate = shlex.join([trainer, "generate", run_dir, "--prompt", "She"])
        text = report(str(args["run"]), str(args["results"]), generate, export)
        display.display(clean(text))  # of a summary that a rank wrote
        return {**result, "changed": False, "text": text}
