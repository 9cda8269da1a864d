"""Print a text as it is: a table, lines of a log. What `debug` shows is quoted, and shown once a host."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):
    """Arguments: text."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        text = str(self._task.args["text"])
        display.display(f"\n{text}\n")
        return {**result, "changed": False, "text": text}
