"""Run a command of the trainer on a host, and tell meanwhile how far it is where it says so."""

from __future__ import annotations

import shlex
import sys
import threading
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from telling import brought

display = Display()

TOLD = 5.0  # seconds between two words about how far it is


class ActionModule(ActionBase):
    """The module's arguments, and progress: a file below state_dir that holds "DONE TOTAL" (bytes) meanwhile."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        progress = arguments.pop("progress", None)
        over = threading.Event()
        if progress:
            read = f"cat {shlex.quote(str(progress))}"
            threading.Thread(
                target=self._tell, args=(read, task_vars["inventory_hostname"], over), daemon=True
            ).start()
        try:
            return {**result, **self._execute_module(module_args=arguments, task_vars=task_vars)}
        finally:
            over.set()

    def _tell(self, read: str, host: str, over: threading.Event) -> None:
        while not over.wait(TOLD):
            # As the login user: no password is asked for beside the module's own.
            answer = self._low_level_execute_command(read, sudoable=False)
            numbers = answer["stdout"].split()
            if answer["rc"] == 0 and len(numbers) == 2 and not over.is_set():
                display.display(brought(host, *map(int, numbers)))
