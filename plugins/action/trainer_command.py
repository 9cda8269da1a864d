"""Run a command of the trainer on a host, and tell meanwhile how far it is where it says so."""

from __future__ import annotations

import contextlib
import copy
import shlex
import sys
import threading
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from run_keeper import shown
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
        words = (shown(shlex.quote(str(progress)), 64), task_vars["inventory_hostname"], over)
        teller = threading.Thread(target=self._tell, args=words, daemon=True)
        if progress:
            teller.start()
        try:
            return {**result, **self._execute_module(module_args=arguments, task_vars=task_vars)}
        finally:
            over.set()
            if progress:
                teller.join(2 * TOLD)

    def _tell(self, read: str, host: str, over: threading.Event) -> None:
        # A connection keeps what belongs to one command at a time; and no password is asked for beside the module's.
        connection = copy.copy(self._connection)
        while not over.wait(TOLD):
            with contextlib.suppress(AnsibleError, ValueError):  # it is told the next time
                status, said, _ = connection.exec_command(read, sudoable=False)
                done, total = map(int, said.split()) if status == 0 else (0, 0)
                if total and not over.is_set():
                    display.display(brought(host, done, total))
