"""Have DKMS build its modules on a host, and tell meanwhile how far the compiler is."""

from __future__ import annotations

import sys
from pathlib import Path

from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from how_far import PACKAGES
from meanwhile import file_on_host, told


class ActionModule(ActionBase):
    """The module's arguments."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        with told(task_vars["inventory_hostname"], file_on_host(self, PACKAGES)):
            return {**result, **self._execute_module(task_vars=task_vars)}
