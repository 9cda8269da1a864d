"""Print a text as it is: a table, lines of a log. What `debug` shows is quoted, and shown once a host.

What would be too long for a screen goes, after the text, into a file on this controller, which is then named.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from live_frame import clean

display = Display()


class ActionModule(ActionBase):
    """Arguments: text; and of what is written, if it is not empty: more, file, what (it is)."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        text = clean(self._task.args["text"])  # lines of a run's, too, which may hold anything
        more, file = (str(self._task.args.get(name) or "") for name in ("more", "file"))
        if more:
            text += f"\n\n{self._written(text, more, file)}"
        display.display(f"\n{text}\n")
        return {**result, "changed": False, "text": text}

    def _written(self, text: str, more: str, file: str) -> str:
        """Where `more` stands now."""
        what = self._task.args["what"]
        try:
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(f"{file}.new", "w", encoding="utf-8") as new:
                new.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n\n{text}\n\n{more}\n")
            os.replace(f"{file}.new", file)
        except OSError as error:
            return f"{what} could not be written to {file}: {error.strerror}."
        return f"{what}: {os.path.relpath(file)}"
