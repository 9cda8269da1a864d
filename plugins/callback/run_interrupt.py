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
    """Whether the task belongs to roles/trainer/tasks/trial.yml: a smoke test before the run, or preflight's steps."""
    while task is not None:
        args = getattr(task, "args", {})
        if "trial.yml" in str(args.get("_raw_params", "")) or args.get("tasks_from") == "trial":
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
        self.words = ""

    def v2_runner_on_ok(self, result) -> None:
        if result.task.action == "run_config" and "run" in result.result:
            self.run, self.commands = result.result["run"], dict(result.result["commands"])

    def v2_playbook_on_task_start(self, task, is_conditional) -> None:
        if task.action == "run_follow" and self.before is None:
            if not sys.stdout.isatty():
                sys.stdout.reconfigure(line_buffering=True)
            self.before = signal.signal(signal.SIGINT, self._interrupted)
        if self.before is not None:
            self.words = self._words(task)

    def _words(self, task) -> str:
        """What Ctrl-C says from this task on."""
        if is_trial(task):
            rest = f"; run {self.run} was not started" if self.run else ""
            return f"\nThe trial ends by itself{rest}. Type the command again."
        if not self.run:
            return ""
        leaving = farewell(self.run, self.commands)
        if task.action == "run_follow" or self.words == leaving:
            return leaving
        return f"\nRun {self.run} may have been started; this tells:  {self.commands['follow']}"

    def _interrupted(self, signum, frame) -> None:
        if self.words:
            self._display.display(self.words)
        signal.signal(signal.SIGINT, self.before)
        self.before(signum, frame)
