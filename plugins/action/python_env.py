"""Have the locked environment on a host; where that lacks a fit Python or reaches no index, the controller helps."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "plugins" / "module_utils"))

from brought_python import archive
from how_far import ENVIRONMENT
from meanwhile import Said, file_on_host, told
from offline_wheels import COLLECTED, Failure, wheelhouse

QUIET_SECONDS = 5  # longer than an environment that is there takes to be recognised

display = Display()


class ActionModule(ActionBase):
    """Calls the module. Where that asks for more, `files` are what it asks for, as the action bring takes them.

    They are wheels, or, as `archive` says, the Python itself.
    """

    def run(self, tmp=None, task_vars=None):
        """The module's result."""
        super().run(tmp, task_vars)
        host = task_vars["inventory_hostname"]

        def say(text: str) -> None:
            display.display(f"{host}: {text}")

        # Where no region shows a row of each host, nothing would be seen of this task for a minute.
        notice = threading.Timer(QUIET_SECONDS, say, ["building the locked environment, which takes minutes"])
        notice.daemon = True
        if not getattr(display, "led_by_region", False):
            notice.start()
        try:
            with told(host, file_on_host(self, f"{self._task.args['dir']}/{ENVIRONMENT}")):
                result = self._execute_module(task_vars=task_vars)
        finally:
            notice.cancel()
        # Which files of the controller's are brought is said here, and never by a host.
        result = {key: value for key, value in result.items() if key not in ("archive", "files")}
        if result.get("failed") or not result.keys() & {"target", "bring_python"}:
            return result
        try:
            if "bring_python" in result:
                return self._with_python(result, say)
            return self._with_wheels(result, host, say)
        except Failure as failure:
            raise AnsibleActionFail(str(failure)) from None

    def _with_python(self, result: dict, say: Callable[[str], None]) -> dict:
        """The result, with a Python for the host; fetched in check mode, too, for that is when the role asks first."""
        # Which one that is says the role, not the host.
        wanted = self._task.args.get("brought", {}).get(str(result["bring_python"]))
        if not wanted:
            raise Failure(f"there is no Python to bring to a machine of the kind {result['bring_python']}")
        file = archive(wanted, ROOT / ".trainyard" / "pythons", say)
        if self._task.check_mode:
            return result
        size = file.stat().st_size
        say(f"its own Python is not for the environment; bringing {file.name}, {size / 1e6:,.0f} MB")
        key = wanted["sha256"][:16]
        return {
            **result,
            "key": key,
            "archive": f"{key}/{file.name}",
            "files": _files(key, {file: wanted["sha256"]}),
        }

    def _with_wheels(self, result: dict, host: str, say: Callable[[str], None]) -> dict:
        """The result, with the wheels for the host."""
        key, args, said = str(result["key"]), self._task.args, Said()
        if not re.fullmatch(r"[0-9a-f]{16}", key):
            raise Failure(f"the host names its environment {key!r}: expected 16 hexadecimal digits")
        directory = ROOT / ".trainyard" / "wheelhouse" / f"{key}-{COLLECTED}"
        with told(host, said.read):
            found = wheelhouse(args["lock"], args["torch"], result["target"], directory, say, said.say)
        files = _files(key, {directory / name: digest for name, digest in found.items()})
        size = sum(one["bytes"] for one in files)
        say(f"reaches no package index; bringing {len(files)} wheels, {size / 1e6:,.0f} MB")
        return {**result, "files": files}


def _files(key: str, files: dict[Path, str]) -> list[dict]:
    """The files, each with its SHA-256, as the action bring takes them: in the directory `key` of what was brought."""
    return [
        {
            "source": str(file),
            "path": f"wheels/{key}/{file.name}",
            "bytes": file.stat().st_size,
            "sha256": digest,
        }
        for file, digest in files.items()
    ]
