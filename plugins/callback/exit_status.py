"""Makes ansible-playbook end with 1 where a preflight only warned, and no playbook came after it.

Ansible itself knows 0, and 2 for failed tasks. What a task returned as `exit_status` is heeded where nothing failed.
"""

from __future__ import annotations

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: exit_status
type: aggregate
short_description: End with 1 after warnings
description:
  - A task preflight_verdict that returned C(exit_status) 1 makes ansible-playbook end with 1, if no task failed and its
    playbook is the command's last.
requirements: []
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "exit_status"

    def __init__(self) -> None:
        super().__init__()
        self.status = 0
        self.begun = 0

    def v2_playbook_on_start(self, playbook) -> None:
        """`ansible-playbook playbooks/preflight.yml train.yml`: a warning keeps nothing from starting after it."""
        self.status = 0
        self.begun += 1

    def v2_runner_on_ok(self, result) -> None:
        if result.task.action == "preflight_verdict":
            self.status = max(self.status, int(result.result.get("exit_status") or 0))

    def v2_playbook_on_stats(self, stats) -> None:
        """The last word: the recap stands on the screen already. Nobody but an exception is heard from here."""
        last = self.begun == len(context.CLIARGS.get("args", [""]))
        if self.status and last and not stats.failures and not stats.dark:
            raise SystemExit(self.status)
