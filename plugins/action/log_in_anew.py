"""Close the SSH connection that Ansible shares, so that the next task logs in anew and has its user's new groups.

`meta: reset_connection` would do the same, but does not heed `when`.
"""

from __future__ import annotations

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False
    _VALID_ARGS = frozenset(["group"])

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        if self._connection.transport == "local":  # it is the shell that this was typed in
            text = "before train.yml, log out and in, or run `newgrp {}` in this shell: only then is {} in that group"
            group = self._task.args["group"]
            user = (task_vars or {}).get("ansible_facts", {}).get("user_id", "your user")
            return {**result, "changed": False, "warnings": [text.format(group, user)]}
        reset = getattr(self._connection, "reset", None)
        if reset:
            reset()
        return {**result, "changed": False}
