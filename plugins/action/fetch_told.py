"""Ansible's own fetch, which tells how far it is: a model is gigabytes, on whatever network there is."""

from __future__ import annotations

import sys
from pathlib import Path

from ansible.plugins.action.fetch import ActionModule as Fetch

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from meanwhile import Coming, told


class ActionModule(Fetch):
    """Arguments: those of ansible.builtin.fetch; with `flat`, and `dest` the file itself, not its directory."""

    def run(self, tmp=None, task_vars=None):
        self.coming = Coming()
        with told(task_vars["inventory_hostname"], self.coming.words):
            return super().run(tmp, task_vars)

    def _execute_remote_stat(self, path, *args, **options):
        """By which fetch asks for the file's hash; the answer has its size, too."""
        found = super()._execute_remote_stat(path, *args, **options)
        self.coming.total = found.get("size") or 0
        self.coming.growing = Path(self._loader.path_dwim(self._task.args["dest"]))
        return found
