"""Close the SSH connection that Ansible shares, so that the next task logs in anew and has its user's new groups.

`meta: reset_connection` would do the same, but does not heed `when`.
"""

from __future__ import annotations

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        reset = getattr(self._connection, "reset", None)  # a local connection has nothing to close
        if reset:
            reset()
        return {"changed": False}
