"""Ansible's own fetch, which tells how far it is, a model being gigabytes on whatever network there is.

A file takes the place of an older one once it is whole. Two may bring the same files at once, as where two terminals
follow a run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action.fetch import ActionModule as Fetch
from ansible.utils.hashing import checksum

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from meanwhile import Coming, told
from part_files import beside, sweep


class ActionModule(Fetch):
    """Arguments: those of ansible.builtin.fetch; with `flat`, and `dest` the file itself, not its directory."""

    def run(self, tmp=None, task_vars=None):
        self.coming = Coming()
        fetch = self._connection.fetch_file

        def whole(source: str, dest: str) -> None:
            sweep(dest)
            part = beside(dest)
            try:
                fetch(source, part)
                os.replace(part, dest)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)

        self._connection.fetch_file = whole
        try:
            with told(task_vars["inventory_hostname"], self.coming.words):
                return super().run(tmp, task_vars)
        finally:
            self._connection.fetch_file = fetch

    def _execute_remote_stat(self, path, *args, **options):
        """By which fetch asks for the file's hash; the answer has its size, too."""
        found = super()._execute_remote_stat(path, *args, **options)
        dest = Path(self._loader.path_dwim(self._task.args["dest"]))
        self.coming.total = found.get("size") or 0
        self.coming.growing = Path(beside(str(dest)))
        # Before a disk is full on which other runs' results are written; a file with holes in it may say any size.
        there = next(one for one in dest.parents if one.exists())
        free = shutil.disk_usage(there).free
        is_here = dest.is_file() and checksum(str(dest)) == found.get("checksum")
        if self.coming.total > free and not is_here:
            size, left = (
                f"{one / 1e9:.1f} GB" if one >= 1e9 else f"{one / 1e6:.1f} MB"
                for one in (self.coming.total, free)
            )
            raise AnsibleActionFail(
                f"{path}: found {size}, and {left} free on this machine, in {there}; expected room for it there. Free "
                "some, and follow the run again"
            )
        return found
