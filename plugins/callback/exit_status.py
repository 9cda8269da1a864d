"""Makes ansible-playbook end with 1 where a preflight only warned.

Ansible itself knows 0, and 2 for failed tasks. What a task returned as `exit_status` is heeded where nothing failed.
"""

from __future__ import annotations

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: exit_status
type: aggregate
short_description: End with 1 after warnings
description:
  - A task preflight_verdict that returned C(exit_status) 1 makes ansible-playbook end with 1, if no task failed.
requirements: []
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "exit_status"

    def __init__(self) -> None:
        super().__init__()
        self.status = 0

    def v2_runner_on_ok(self, result) -> None:
        if result.task.action == "preflight_verdict":
            self.status = max(self.status, int(result.result.get("exit_status") or 0))

    def v2_playbook_on_stats(self, stats) -> None:
        """The last word: the recap stands on the screen already. Nobody but an exception is heard from here."""
        if self.status and not stats.failures and not stats.dark:
            raise SystemExit(self.status)
