"""Ansible's own fetch, which tells how far it is, a model being gigabytes on whatever network there is.

A file takes the place of an older one once it is whole.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ansible.plugins.action.fetch import ActionModule as Fetch

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from meanwhile import Coming, told


class ActionModule(Fetch):
    """Arguments: those of ansible.builtin.fetch; with `flat`, and `dest` the file itself, not its directory."""

    def run(self, tmp=None, task_vars=None):
        self.coming = Coming()
        fetch = self._connection.fetch_file

        def whole(source: str, dest: str) -> None:
            fetch(source, part := beside(dest))
            os.replace(part, dest)

        self._connection.fetch_file = whole
        try:
            with told(task_vars["inventory_hostname"], self.coming.words):
                return super().run(tmp, task_vars)
        finally:
            self._connection.fetch_file = fetch

    def _execute_remote_stat(self, path, *args, **options):
        """By which fetch asks for the file's hash; the answer has its size, too."""
        found = super()._execute_remote_stat(path, *args, **options)
        self.coming.total = found.get("size") or 0
        self.coming.growing = Path(beside(self._loader.path_dwim(self._task.args["dest"])))
        return found


def beside(path: str) -> str:
    """Where a file grows until it is whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.part")
