"""Says, when a followed run is left by Ctrl-C, that the run goes on, and how to come back to it.

It lives in the main process, where Ansible hears Ctrl-C; the workers that follow are ended before they could
speak.
"""

from __future__ import annotations

import signal
import sys

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: run_interrupt
type: aggregate
short_description: Tell what Ctrl-C leaves running
description:
  - From the start of a run on, Ctrl-C first prints how to follow, stop and resume it.
  - Sees to it that lines of progress reach a pipe or a file at once.
requirements: []
"""


def farewell(run: str, commands: dict[str, str]) -> str:
    """The text at Ctrl-C."""
    return (
        f"\nRun {run} goes on without this terminal.\n"
        f"  Follow it, and have its results:  {commands['follow']}\n"
        f"  Stop it:    {commands['stop']}\n"
        f"  Resume it, once it was stopped:  {commands['resume']}"
    )


def is_trial(task) -> bool:
    """Whether the task belongs to a smoke test, which comes before the run (roles/trainer/tasks/trial.yml)."""
    while task is not None:
        if "trial.yml" in str(getattr(task, "args", {}).get("_raw_params", "")):
            return True
        task = getattr(task, "_parent", None)
    return False


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "run_interrupt"

    def __init__(self) -> None:
        super().__init__()
        self.run = ""
        self.commands: dict[str, str] = {}
        self.before = None
        self.trial = False

    def v2_runner_on_ok(self, result) -> None:
        if result.task.action == "run_config" and "run" in result.result:
            self.run, self.commands = result.result["run"], dict(result.result["commands"])

    def v2_playbook_on_task_start(self, task, is_conditional) -> None:
        if task.action == "run_follow":
            self.trial = is_trial(task)
            if self.before is None:
                if not sys.stdout.isatty():
                    sys.stdout.reconfigure(line_buffering=True)
                self.before = signal.signal(signal.SIGINT, self._interrupted)

    def _interrupted(self, signum, frame) -> None:
        trial = f"\nThe smoke test of run {self.run} ends by itself; the run was not started. Type the command again."
        self._display.display(trial if self.trial else farewell(self.run, self.commands))
        signal.signal(signal.SIGINT, self.before)
        self.before(signum, frame)
